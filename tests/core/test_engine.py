"""The engine's promise: speculation, batching, chunking, paging and preemption never change a token (float32)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hinted
from hinted import HintedDrafter
from jetflow_core.drafter import HeadDrafter
from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.llm import LLM, check_head
from jetflow_core.model import Decoder
from jetflow_core.sampling import SamplingParams
from jetflow_core.tree import DraftTree
from tiny import KINDS, PARAMS, PROMPTS, VOCAB, tiny_head, tiny_model


def alone(model: Decoder, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    """Reference: every prompt by itself, one token a step."""
    return [
        LLM(Engine(model, config=EngineConfig(budget=0))).generate([p], [q])[0].token_ids
        for p, q in zip(prompts, params, strict=True)
    ]


def hinted_engine(model: Decoder, config: EngineConfig, truth: Sequence[Sequence[int]], seed: int) -> Engine:
    """An engine whose drafter knows that `truth` follows the `PROMPTS`."""
    known = {tuple(p): list(t) for p, t in zip(PROMPTS, truth, strict=True)}
    return hinted.hinted_engine(model, config, known, seed)


@pytest.fixture(scope="module", params=KINDS)
def reference(request: pytest.FixtureRequest) -> tuple[Decoder, list[list[int]]]:
    model = tiny_model(request.param)
    return model, alone(model, PROMPTS, PARAMS)


def test_the_reference_is_the_plain_forward(reference: tuple[Decoder, list[list[int]]]) -> None:
    model, expected = reference
    ids = list(PROMPTS[0])
    for _ in range(24):
        hidden, _ = model.forward_sequence(torch.tensor(ids))
        ids.append(int(model.logits(hidden[-1:]).argmax()))
    assert ids[len(PROMPTS[0]) :] == expected[0]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    budget=st.integers(0, 40),
    page=st.sampled_from([1, 2, 8, 16, 64]),
    chunk=st.integers(6, 80),
    pool=st.sampled_from([110, 130, 400]),
    running=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_any_schedule_gives_the_text_of_one_at_a_time(
    reference: tuple[Decoder, list[list[int]]], budget: int, page: int, chunk: int, pool: int, running: int, seed: int
) -> None:
    model, expected = reference
    config = EngineConfig(
        budget=budget, page_size=page, max_batch_tokens=chunk, num_pages=-(-pool // page), max_running=running
    )
    engine = hinted_engine(model, config, expected, seed)
    completions = LLM(engine).generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in completions] == expected
    assert [c.finish_reason for c in completions] == ["length"] * len(PROMPTS)
    engine.check_idle()


def test_long_paths_are_accepted_and_counted(reference: tuple[Decoder, list[list[int]]]) -> None:
    model, expected = reference
    engine = hinted_engine(model, EngineConfig(budget=16), expected, seed=5)
    completions = LLM(engine).generate(PROMPTS, PARAMS)
    usage = completions[0].usage
    assert completions[0].acceptance_length > 1.5
    assert usage.completion_tokens == 24 == usage.target_steps + usage.accepted_draft_tokens


def test_invariant_holds_after_every_step(reference: tuple[Decoder, list[list[int]]]) -> None:
    model, expected = reference
    engine = hinted_engine(model, EngineConfig(budget=9, page_size=4, max_batch_tokens=40), expected, seed=3)
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.add(prompt, params)
    while engine.has_work:
        engine.step()
        for request in engine.scheduler.running:
            assert request.num_cached <= len(request.tokens) - 1
            if request.num_output:
                assert request.num_cached == len(request.tokens) - 1
            assert len(request.blocks) * 4 >= request.num_cached


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("causal", "conditioning", "order", "vocab"),
    [
        (True, "pairwise", 1, None),
        (True, "none", 1, None),
        (False, "none", 1, None),
        (True, "pairwise", 1, 2),
        (False, "pairwise", 1, 3),
        (True, "pairwise", 2, None),
        (True, "pairwise", 2, 2),
    ],
)
def test_every_kind_of_head_is_lossless(
    kind: str, causal: bool, conditioning: str, order: int, vocab: int | None
) -> None:
    model = tiny_model(kind, seed=7)
    expected = alone(model, PROMPTS, PARAMS)
    draft_vocab = None if vocab is None else torch.arange(0, VOCAB - 1, vocab)
    head = tiny_head(model, causal=causal, conditioning=conditioning, order=order, draft_vocab=draft_vocab)
    head.pack()
    model.pack()
    for budget in (1, 5, 33):
        engine = Engine(model, head=head, config=EngineConfig(budget=budget, max_batch_tokens=64, max_running=4))
        assert [c.token_ids for c in LLM(engine).generate(PROMPTS, PARAMS)] == expected


def test_draft_context_is_what_one_pass_over_the_committed_tokens_gives() -> None:
    """After chunks, trees and moves, the drafter's cache and the target's equal a fresh prefill of the same tokens."""
    model = tiny_model()
    expected = alone(model, PROMPTS, PARAMS)
    engine = hinted_engine(
        model, EngineConfig(budget=12, page_size=4, max_batch_tokens=16, max_running=4), expected, seed=1
    )
    engine.add(PROMPTS[2], PARAMS[2])
    while not engine.scheduler.running or engine.scheduler.running[0].num_output < 12:
        engine.step()
    request = engine.scheduler.running[0]
    fresh = hinted_engine(model, EngineConfig(budget=0, page_size=4), expected, seed=1)
    fresh.add(request.tokens[:-1], SamplingParams(max_tokens=2))
    fresh.step()
    other = fresh.scheduler.running[0]
    positions = np.arange(request.num_cached)
    mine = np.array(request.blocks)[positions // 4] * 4 + positions % 4
    theirs = np.array(other.blocks)[positions // 4] * 4 + positions % 4
    assert isinstance(engine.drafter, HeadDrafter)
    assert isinstance(fresh.drafter, HeadDrafter)
    for a, b in ((engine.cache, fresh.cache), (engine.drafter.cache, fresh.drafter.cache)):
        torch.testing.assert_close(
            a.pages.flatten(2, 3)[:, :, mine], b.pages.flatten(2, 3)[:, :, theirs], rtol=1e-4, atol=1e-4
        )


def test_stop_ids_and_min_tokens_hold_inside_a_tree() -> None:
    model = tiny_model()
    plain = alone(model, PROMPTS, PARAMS)
    stop = plain[0][9]
    first = plain[0].index(stop)
    engine = hinted_engine(model, EngineConfig(budget=20), plain, seed=2)
    stopped = LLM(engine).generate([PROMPTS[0]], SamplingParams(max_tokens=24, stop_token_ids=(stop,)))[0]
    assert stopped.token_ids == plain[0][: first + 1]
    assert stopped.finish_reason == "stop"
    params = SamplingParams(max_tokens=24, stop_token_ids=(stop,), min_tokens=first + 1)
    late = alone(model, [PROMPTS[0]], [params])[0]
    engine = hinted_engine(model, EngineConfig(budget=20), [late, *plain[1:]], seed=2)
    assert LLM(engine).generate([PROMPTS[0]], params)[0].token_ids == late
    assert late.index(stop) > first if stop in late else len(late) == 24


def test_a_request_with_broken_logits_fails_alone() -> None:
    """A weight that overflows for one token poisons only the request that holds that token."""
    model = tiny_model()
    expected = alone(model, PROMPTS[:1], PARAMS[:1])
    assert 95 not in expected[0]
    model.embed[95] = float("nan")
    engine = Engine(model, config=EngineConfig(budget=0))
    good, bad = LLM(engine).generate([PROMPTS[0], [5, 95]], PARAMS[0])
    assert good.token_ids == expected[0]
    assert good.error is None
    assert bad.token_ids == []
    assert bad.error is not None
    assert "not finite" in bad.error
    engine.check_idle()


def test_a_poisonous_draft_does_not_kill_what_plain_decoding_serves() -> None:
    """A drafted token whose keys are not finite spoils every row of its tree; the anchor is then tried alone."""
    model = tiny_model()
    expected = alone(model, PROMPTS[:1], PARAMS[:1])
    model.embed[95] = float("nan")
    engine = hinted_engine(model, EngineConfig(budget=9), [expected[0], *PROMPTS[1:]], seed=0)
    assert isinstance(engine.drafter, HintedDrafter)
    engine.drafter._tree = lambda job: DraftTree(  # type: ignore[method-assign]
        np.array([job.anchor, 95]), np.array([-1, 0]), np.array([0, 1]), np.zeros(2)
    )
    done = LLM(engine).generate(PROMPTS[:1], PARAMS[0])[0]
    assert done.error is None
    assert done.token_ids == expected[0]
    engine.check_idle()


def test_a_cache_smaller_than_the_context_limits_requests_not_the_server() -> None:
    model = tiny_model()
    engine = Engine(model, config=EngineConfig(budget=0, num_pages=4, page_size=16))
    assert engine.max_model_len == 65
    done = LLM(engine).generate([PROMPTS[2]], SamplingParams())[0]  # no max_tokens: what is left of the context
    assert len(done.token_ids) == 25
    assert done.finish_reason == "length"
    small = Engine(model, config=EngineConfig(budget=0, cache_gib=1e-4))
    assert small.max_model_len < 256


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(max_model_len=257), "257.*256"),
        (EngineConfig(max_model_len=100, num_pages=4), "100.*64"),
    ],
)
def test_a_context_that_cannot_be_is_refused(config: EngineConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(tiny_model(), config=config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_target_layers": 9}, "9 layers"),
        ({"num_target_layers": None, "target_layer_ids": (0, 41)}, "layer 41"),
        ({"target_hidden_size": 64}, "hidden size 64"),
    ],
)
def test_a_head_of_another_target_is_refused(changes: dict[str, object], message: str) -> None:
    model = tiny_model()
    head = tiny_head(model)
    head.config = dataclasses.replace(head.config, **changes)
    with pytest.raises(ValueError, match=message):
        check_head(head, model.config, "some/head")


def test_abort_frees_pages_at_once() -> None:
    model = tiny_model()
    engine = Engine(model, config=EngineConfig(budget=0, num_pages=8, page_size=16))
    request_id = engine.add(PROMPTS[2], SamplingParams(max_tokens=20))
    engine.step()
    assert engine.abort(request_id)
    assert not engine.abort(request_id)
    engine.check_idle()


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "empty"),
        ([VOCAB], SamplingParams(), "97"),
        ([1] * 256, SamplingParams(), "256"),
        ([1] * 200, SamplingParams(max_tokens=100), "200.*100"),
    ],
)
def test_impossible_requests_are_refused(prompt: list[int], params: SamplingParams, message: str) -> None:
    engine = Engine(tiny_model(), config=EngineConfig(budget=0))
    with pytest.raises(ValueError, match=message):
        engine.add(prompt, params)
    engine.check_idle()


def test_generation_up_to_the_last_position() -> None:
    model = tiny_model(max_position_embeddings=48)
    prompt, params = PROMPTS[2], SamplingParams()
    expected = alone(model, [prompt], [params])[0]
    assert len(expected) == 8
    head = tiny_head(model)
    head.pack()
    done = LLM(Engine(model, head=head, config=EngineConfig(budget=30))).generate([prompt], params)[0]
    assert done.token_ids == expected
    assert done.finish_reason == "length"


@pytest.mark.parametrize("changes", [{"num_pages": 10**12}, {"num_pages": 2, "page_size": 10**17}])
def test_a_cache_that_no_memory_holds_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"GiB, which cannot be had here: lower num_pages"):
        Engine(tiny_model(), config=EngineConfig(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field", ["budget", "page_size", "max_running", "num_pages", "max_model_len", "candidates", "draft_width"]
)
def test_bad_engine_limits_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        EngineConfig(**{field: -1})


def test_no_more_candidates_than_their_pairs_can_be_scored() -> None:
    assert EngineConfig(candidates=1024).candidates == 1024
    with pytest.raises(ValueError, match="candidates is 1025: use 1024 or fewer"):
        EngineConfig(candidates=1025)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_cache_sizes_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="cache_gib"):
        EngineConfig(cache_gib=value)
