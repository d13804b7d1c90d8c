"""Each sampling parameter is checked, and the message names it, its value and what is allowed."""

import math

import pytest

from jetflow_core.sampling import SamplingParams

BAD = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", True),
    ("temperature", "hot"),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_p", None),
    ("top_k", -1),
    ("top_k", 1.0),
    ("top_k", True),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("min_p", math.nan),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("seed", 1.0),
    ("seed", True),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("min_tokens", -1),
    ("min_tokens", None),
    ("stop", "text"),
    ("stop", ("",)),
    ("stop", (1,)),
    ("stop", ["list"]),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (True,)),
    ("stop_token_ids", ("a",)),
    ("stop_token_ids", [1]),
    ("ignore_eos", 1),
    ("presence_penalty", 2.01),
    ("presence_penalty", -2.01),
    ("presence_penalty", math.nan),
    ("presence_penalty", None),
    ("frequency_penalty", 2.5),
    ("frequency_penalty", -math.inf),
    ("frequency_penalty", True),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("repetition_penalty", math.nan),
    ("repetition_penalty", None),
    ("logit_bias", None),
    ("logit_bias", [1]),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {1: 100.1}),
    ("logit_bias", {1: -101}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: True}),
    ("logit_bias", {1: "2"}),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("logprobs", 1.0),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", False),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_values_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{field} is .*; it must be ") as error:
        SamplingParams(**{field: value})  # pyright: ignore[reportArgumentType]
    assert repr(value) in str(error.value)


def test_a_bad_bias_among_good_ones_is_the_one_shown() -> None:
    with pytest.raises(ValueError, match=r"^logit_bias is \{5: 200\}; it must be "):
        SamplingParams(logit_bias={4: 1.0, 5: 200, 6: -3.0})


def test_parameters_can_be_hashed_and_compared() -> None:
    first, second = SamplingParams(logit_bias={1: 2.0}), SamplingParams(logit_bias={1: 2.0})
    assert hash(first) == hash(second)
    assert first == second != SamplingParams(logit_bias={1: 3.0})


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"min_tokens is 5; it must be .*\(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 1),
        ("temperature", 1e-300),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("top_k", 10**9),
        ("min_p", 1.0),
        ("seed", -(2**63)),
        ("seed", 2**64 - 1),
        ("max_tokens", 0),
        ("max_tokens", 1),
        ("min_tokens", 10),
        ("stop", ("a", "b")),
        ("stop_token_ids", (0, 7)),
        ("ignore_eos", True),
        ("presence_penalty", -2),
        ("presence_penalty", 2.0),
        ("frequency_penalty", -2.0),
        ("frequency_penalty", 2),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 3),
        ("logit_bias", {0: -100, 7: 100.0}),
        ("logprobs", 0),
        ("logprobs", 20),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", 20),
    ],
)
def test_values_at_the_limits_are_taken(field: str, value: object) -> None:
    params = SamplingParams(**{field: value})  # pyright: ignore[reportArgumentType]
    assert getattr(params, field) == value


def test_the_default_is_greedy_unfiltered_and_unpenalised() -> None:
    off = SamplingParams(0.0, 1.0, 0, 0.0, None, None, 0, (), (), False, 0.0, 0.0, 1.0, {}, None, None)
    assert SamplingParams() == off
    assert not off.penalises
