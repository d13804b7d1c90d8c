"""A request's limits and ends: tokens, stop ids, stop strings over any border, and the text returned."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetflow_core.request import Request, StopFilter
from jetflow_core.sampling import SamplingParams

EOS = 99


class Pieces:
    """Token i reads as `texts[i]`; `rest` is what only the end brings out."""

    def __init__(self, texts: Sequence[str], rest: str = "") -> None:
        self.texts = texts
        self.rest = rest

    def push(self, token: int, /) -> str:
        return self.texts[token] if token < len(self.texts) else f"<{token}>"

    def flush(self) -> str:
        return self.rest


def make(
    params: SamplingParams | None = None,
    prompt: Sequence[int] = (1, 2, 3),
    texts: Sequence[str] = tuple("abcdefgh"),
    rest: str = "",
    max_model_len: int = 1000,
) -> Request:
    detokenizer: Callable[[], Pieces] = lambda: Pieces(texts, rest)  # noqa: E731
    return Request(
        "r",
        prompt,
        params or SamplingParams(),
        vocab_size=100,
        max_model_len=max_model_len,
        eos_ids=(EOS,),
        detokenizer=detokenizer,
        budget=4,
    )


# --- refused at the door ---


@pytest.mark.parametrize(
    ("prompt", "params", "length", "message"),
    [
        ((), SamplingParams(), 10, "prompt is empty"),
        ((1, 100), SamplingParams(), 10, "prompt holds token id 100, outside the vocabulary of 100"),
        ((1, -1), SamplingParams(), 10, "token id -1"),
        ((1,), SamplingParams(stop_token_ids=(100,)), 10, "stop_token_ids holds token id 100"),
        ((1,) * 10, SamplingParams(), 10, "prompt has 10 tokens and the context 10: shorten it to 9"),
        ((1,) * 11, SamplingParams(), 10, "prompt has 11 tokens"),
        (
            (1,) * 8,
            SamplingParams(max_tokens=3),
            10,
            "prompt has 8 tokens and max_tokens is 3.*at most 2 new tokens fit",
        ),
    ],
)
def test_what_cannot_run_is_refused(prompt: tuple[int, ...], params: SamplingParams, length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(params, prompt, max_model_len=length)


def test_max_tokens_that_just_fits_is_taken() -> None:
    assert make(SamplingParams(max_tokens=2), (1,) * 8, max_model_len=10).remaining == 2


def test_without_max_tokens_the_context_is_the_limit() -> None:
    request = make(prompt=(1,) * 8, max_model_len=10)
    assert request.remaining == 2
    assert request.append([0, 1, 2]) == ([0, 1], "ab")
    assert request.finish_reason == "length"
    assert len(request.tokens) == 10


# --- counters and properties ---


def test_properties_follow_the_tokens() -> None:
    request = make(SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=(7,)))
    assert (request.anchor_position, request.num_output, request.remaining) == (2, 0, 5)
    assert request.earliest_end == 5
    assert request.end_ids == (EOS, 7)
    assert request.max_slots == 7
    assert not request.is_decoding
    request.num_cached = 2
    assert request.is_decoding
    request.append([4, 5])
    assert (request.anchor_position, request.num_output, request.remaining) == (4, 2, 3)
    request.accepted, request.target_steps = 1, 1
    usage = request.usage()
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 2)
    assert (usage.accepted_draft_tokens, usage.target_steps) == (1, 1)


def test_a_missing_seed_is_drawn_once_and_differs() -> None:
    first, second = make(), make()
    assert first.seed == first.seed
    assert first.seed != second.seed
    assert make(SamplingParams(seed=-3)).seed == -3


# --- ends by token ---


def test_eos_early_in_an_accepted_batch_drops_what_follows() -> None:
    request = make()
    assert request.append([0, 1, EOS, 2, 3]) == ([0, 1, EOS], "ab")
    assert request.finish_reason == "stop"
    assert request.usage().completion_tokens == 3
    assert request.tokens == [1, 2, 3, 0, 1, EOS]


def test_a_stop_id_ends_without_text() -> None:
    request = make(SamplingParams(stop_token_ids=(2,)))
    assert request.append([0, 2, 1]) == ([0, 2], "a")
    assert request.finish_reason == "stop"


def test_ignore_eos_keeps_stop_ids() -> None:
    request = make(SamplingParams(ignore_eos=True, stop_token_ids=(2,)))
    assert request.append([0, EOS, 1]) == ([0, EOS, 1], "a<99>b")
    assert request.finish_reason is None
    request.append([2])
    assert request.finish_reason == "stop"


@pytest.mark.parametrize(("min_tokens", "ends_at"), [(0, 1), (1, 2), (3, 4)])
def test_min_tokens_come_before_the_end(min_tokens: int, ends_at: int) -> None:
    request = make(SamplingParams(min_tokens=min_tokens))
    kept, _ = request.append([EOS] * 6)
    assert len(kept) == ends_at


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_max_tokens_is_exact(limit: int) -> None:
    request = make(SamplingParams(max_tokens=limit))
    kept, text = request.append([0, 1, 2, 3, 4, 5])
    assert len(kept) == limit
    assert text == "abcdef"[:limit]
    assert (request.finish_reason, request.remaining) == ("length", 0)


def test_eos_as_the_last_allowed_token_is_a_stop() -> None:
    request = make(SamplingParams(max_tokens=2))
    request.append([0, EOS])
    assert request.finish_reason == "stop"


def test_nothing_may_follow_the_end() -> None:
    request = make(SamplingParams(max_tokens=1))
    request.append([0])
    with pytest.raises(AssertionError, match="finished"):
        request.append([1])


# --- text ---


@pytest.mark.parametrize(("ids", "reason"), [([0, EOS], "stop"), ([0, 1], "length")])
def test_trailing_text_comes_out_at_the_end(ids: list[int], reason: str) -> None:
    request = make(SamplingParams(max_tokens=2), rest="�")
    _, text = request.append(ids)
    assert text.endswith("�")
    assert request.finish_reason == reason


def test_held_back_text_comes_out_at_the_end() -> None:
    request = make(SamplingParams(stop=("bcX",), max_tokens=3))
    assert request.append([0, 1])[1] == "a"
    assert request.append([2])[1] == "bc"
    assert request.finish_reason == "length"


def test_a_stop_string_over_two_steps_never_shows() -> None:
    request = make(SamplingParams(stop=("cd",)))
    assert request.append([0, 1, 2])[1] == "ab"
    assert request.append([3, 4, 5]) == ([3], "")
    assert request.finish_reason == "stop"
    assert request.usage().completion_tokens == 4


def test_a_stop_string_inside_one_token() -> None:
    request = make(SamplingParams(stop=("ll",)), texts=("hello", "x"))
    assert request.append([1, 0, 1]) == ([1, 0], "xhe")


def test_a_stop_string_in_the_flushed_rest_stops() -> None:
    request = make(SamplingParams(stop=("b!",), max_tokens=2), rest="!")
    assert request.append([0, 1])[1] == "a"
    assert request.finish_reason == "stop"


def test_min_tokens_hold_for_stop_strings() -> None:
    request = make(SamplingParams(stop=("b",), min_tokens=2))
    assert request.append([0, 1, 2, 1, 3]) == ([0, 1, 2, 1], "abc")
    assert request.finish_reason == "stop"


words = st.text("ab", min_size=1, max_size=4)


def text_by_definition(pieces: Sequence[str], stop: Sequence[str], min_tokens: int) -> tuple[int, str, bool]:
    """(tokens, text, stopped): read character by character; the first stop string completed ends it."""
    text = ""
    for count, piece in enumerate(pieces, start=1):
        for char in piece:
            text += char
            ends = [s for s in stop if text.endswith(s)]
            if ends and count > min_tokens:
                return count, text[: len(text) - max(map(len, ends))], True
    return len(pieces), text, False


@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(st.text("ab", max_size=4), min_size=1, max_size=5),
    stop=st.lists(words, max_size=3),
    steps=st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=6),
    min_tokens=st.integers(0, 3),
)
def test_text_and_usage_follow_the_definition_whatever_the_steps(
    texts: list[str], stop: list[str], steps: list[list[int]], min_tokens: int
) -> None:
    steps = [[token % len(texts) for token in step] for step in steps]
    flat = [token for step in steps for token in step]
    count, text, stopped = text_by_definition([texts[t] for t in flat], stop, min_tokens)
    request = make(SamplingParams(stop=tuple(stop), min_tokens=min_tokens), texts=texts)
    got: list[str] = []
    for step in steps:
        got.append(request.append(step)[1])
        assert text.startswith("".join(got))  # nothing shown is ever taken back
        if request.finish_reason is not None:
            break
    if not stopped:
        assert request.finish_reason is None
        got.append(request.append([EOS])[1] if len(flat) >= min_tokens else text[len("".join(got)) :])
    assert "".join(got) == text
    assert request.finish_reason == "stop" or len(flat) < min_tokens
    assert request.usage().completion_tokens == count + (not stopped and len(flat) >= min_tokens)


@given(stop=st.lists(words, min_size=1, max_size=3), text=st.text("ab", max_size=12))
def test_only_a_possible_beginning_is_held_back(stop: list[str], text: str) -> None:
    keeper = StopFilter(stop)
    shown = keeper.push(text)
    if not keeper.stopped:
        held = text[len(shown) :]
        assert held == "" or any(s.startswith(held) and s != held for s in stop)
        assert keeper.flush() == held


# --- what the prefix cache knows of it ---


def test_a_page_is_known_by_all_tokens_up_to_its_end_and_the_salt() -> None:
    request, longer, other = make(prompt=[1, 2, 3, 4, 5]), make(prompt=[1, 2, 3, 4, 9, 9]), make(prompt=[2, 1, 3, 4])
    assert [request.page_key(i, 2) for i in (0, 1)] == [longer.page_key(i, 2) for i in (0, 1)]
    assert request.page_key(1, 2) != other.page_key(1, 2)
    with pytest.raises(AssertionError, match="page 2 of request"):
        request.page_key(2, 2)
    request.append([9])
    assert request.page_key(2, 2) != longer.page_key(2, 2)


def test_keys_do_not_depend_on_when_they_are_asked_for() -> None:
    early, late = make(prompt=[1, 2]), make(prompt=[1, 2])
    early.page_key(0, 2)
    for request in (early, late):
        request.append([3, 4])
    assert early.page_key(1, 2) == late.page_key(1, 2)


def test_prompt_logprobs_need_the_whole_prompt_computed() -> None:
    assert make().reuses_prefix
    assert not make(SamplingParams(prompt_logprobs=0)).reuses_prefix
