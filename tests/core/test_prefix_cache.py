"""Shared pages in the engine: the same tokens and the same drafts as without them, whatever happens in between (float32)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hinted import hinted_engine
from jetflow_core.drafter import HeadDrafter
from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.kv_cache import KVCache
from jetflow_core.llm import LLM
from jetflow_core.model import Decoder
from jetflow_core.request import Output
from jetflow_core.sampling import SamplingParams
from tiny import tiny_head, tiny_model

SYSTEM = [int(i * i * 3 % 89) for i in range(33)]
BAD = 95  # the token whose embedding a test may spoil

# Beginnings are shared down to whole prompts, with equal and with other sampling.
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    ([*SYSTEM, 1, 2, 3], SamplingParams(max_tokens=14)),
    ([*SYSTEM, 1, 2, 3], SamplingParams(max_tokens=14, temperature=0.9, seed=1)),
    ([*SYSTEM, 1, 2, 3, *SYSTEM[:20]], SamplingParams(max_tokens=9)),
    (SYSTEM[:16], SamplingParams(max_tokens=20)),
    (SYSTEM[:17], SamplingParams(max_tokens=6, temperature=0.7, seed=2)),
    (SYSTEM[:1], SamplingParams(max_tokens=3)),
    ([9, *SYSTEM], SamplingParams(max_tokens=8)),
]


def alone(model: Decoder, prompt: list[int], params: SamplingParams) -> list[int]:
    """Reference: a request by itself, one token a step, nothing shared."""
    engine = Engine(model, config=EngineConfig(budget=0, prefix_cache=False, num_pages=40))
    return LLM(engine).generate([prompt], params)[0].token_ids


@pytest.fixture(scope="module", params=["dense", "moe"])
def reference(request: pytest.FixtureRequest) -> tuple[Decoder, list[list[int]]]:
    model = tiny_model(request.param)
    return model, [alone(model, prompt, params) for prompt, params in REQUESTS]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model()


def guard_shared_pages(engine: Engine) -> None:
    """Fail on any write to a page that is shared or known by its content, and start from memory that is not finite."""
    pool, page = engine.scheduler.pool, engine.config.page_size

    def guarded(call: Callable[..., None]) -> Callable[..., None]:
        def checked(*args: object) -> None:
            slots = args[-1]  # of `write` and of `move` alike: where to
            assert isinstance(slots, Tensor)
            assert all(pool.is_private(block) for block in set((slots // page).tolist()))
            call(*args)

        return checked

    for cache in caches(engine):
        cache.pages.fill_(float("nan"))
        cache.write = guarded(cache.write)  # type: ignore[method-assign]
        cache.move = guarded(cache.move)  # type: ignore[method-assign]


def caches(engine: Engine) -> list[KVCache]:
    return [engine.cache, *([engine.drafter.cache] if isinstance(engine.drafter, HeadDrafter) else [])]


class Client:
    """What every request has returned so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, Output] = {}

    def add(self, prompt: list[int], params: SamplingParams) -> str:
        request_id = self.engine.add(prompt, params)
        self.tokens[request_id] = []
        return request_id

    def step(self) -> None:
        self.take(self.engine.step())
        self.engine.scheduler.check()

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.tokens[output.request_id] += output.token_ids
            self.last[output.request_id] = output

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()
        self.engine.check_idle()


events = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, len(REQUESTS) - 1), st.booleans()), min_size=2, max_size=7
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    traffic=events,
    budget=st.sampled_from([None, 0, 3, 20]),
    page=st.sampled_from([1, 3, 8, 16]),
    chunk=st.integers(6, 60),
    pool=st.sampled_from([72, 90, 300]),
    seed=st.integers(0, 99),
)
def test_any_interleaving_gives_each_the_tokens_it_gets_alone(
    reference: tuple[Decoder, list[list[int]]],
    traffic: list[tuple[int, int, bool]],
    budget: int | None,
    page: int,
    chunk: int,
    pool: int,
    seed: int,
) -> None:
    """`traffic`: steps to let pass, the request that comes then, whether the oldest is aborted then. `budget` None: no head."""
    model, expected = reference
    config = EngineConfig(
        budget=budget or 0, page_size=page, max_batch_tokens=chunk, num_pages=-(-pool // page), max_running=4
    )
    truth = {tuple(prompt): tokens for (prompt, _), tokens in zip(REQUESTS, expected, strict=True)}
    engine = Engine(model, config=config) if budget is None else hinted_engine(model, config, truth, seed)
    guard_shared_pages(engine)
    client = Client(engine)
    wanted: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for steps, index, abort in traffic:
        for _ in range(steps):
            client.step()
        wanted[client.add(*REQUESTS[index])] = expected[index]
        if abort:
            aborted |= {key for key in list(wanted)[:1] if engine.abort(key)}
    client.drain()
    for request_id, tokens in wanted.items():
        got = client.tokens[request_id]
        assert got == (tokens[: len(got)] if request_id in aborted else tokens)


def test_pages_run_out_while_they_are_shared(model: Decoder) -> None:
    """Requests that share their beginning are preempted and come back through the pages that are left of them."""
    prompt = [*SYSTEM, 1, 2, 3]
    params = [SamplingParams(max_tokens=40, temperature=1.0, seed=i) for i in range(4)]
    config = EngineConfig(budget=6, page_size=4, num_pages=26, max_running=4, max_batch_tokens=32)
    engine = hinted_engine(model, config, {tuple(prompt): alone(model, prompt, params[0])}, seed=0)
    guard_shared_pages(engine)
    done = LLM(engine).generate([prompt] * 4, params)
    assert [c.token_ids for c in done] == [alone(model, prompt, p) for p in params]
    assert engine.stats.preemptions > 0
    assert [c.usage.cached_tokens for c in done[1:]] == [32] * 3
    engine.check_idle()


def drafting_engine(model: Decoder, **changes: object) -> tuple[Engine, list[list[list[int]]]]:
    """An engine with a real (random) head, and a list that receives the trees of every step."""
    head = tiny_head(model)
    head.pack()
    engine = Engine(model, head=head, config=EngineConfig(**({"budget": 12, "page_size": 4} | changes)))  # type: ignore[arg-type]
    assert engine.drafter is not None
    drafted: list[list[list[int]]] = []
    propose = engine.drafter.propose

    def recorded(jobs: object) -> object:
        trees = propose(jobs)  # type: ignore[arg-type]
        drafted.append([tree.tokens.tolist() for tree in trees])
        return trees

    engine.drafter.propose = recorded  # type: ignore[method-assign, assignment]
    return engine, drafted


@pytest.mark.parametrize("before", [[*SYSTEM, 1, 2, 3], SYSTEM[:21], [*SYSTEM, 1, 2, 3, 4, 5]])
def test_a_hit_brings_the_draft_context(model: Decoder, before: list[int]) -> None:
    """After a hit the head drafts the very trees that it drafts after a full prefill."""
    prompt, params = [*SYSTEM, 1, 2, 3], SamplingParams(max_tokens=20)
    missing, trees_of_a_miss = drafting_engine(model, prefix_cache=False)
    miss = LLM(missing).generate([prompt], params)[0]
    hitting, trees_of_a_hit = drafting_engine(model)
    guard_shared_pages(hitting)
    LLM(hitting).generate([before], params)
    trees_of_a_hit.clear()
    hit = LLM(hitting).generate([prompt], params)[0]
    assert hit.usage == replace(miss.usage, cached_tokens=min(len(before), 35) // 4 * 4)
    assert trees_of_a_hit == trees_of_a_miss
    assert hit.token_ids == miss.token_ids


def test_a_conversation_reuses_its_own_answers(model: Decoder) -> None:
    """Accepted drafts have moved into the pages that the next turn finds."""
    params = SamplingParams(max_tokens=16)
    answer = alone(model, SYSTEM, params)
    turn = [*SYSTEM, *answer, 7, 7, 7]
    truth = {tuple(SYSTEM): answer, tuple(turn): alone(model, turn, params)}
    engine = hinted_engine(model, EngineConfig(budget=16, page_size=4), truth, seed=4)
    guard_shared_pages(engine)
    first = LLM(engine).generate([SYSTEM], params)[0]
    assert first.acceptance_length > 1.5
    second = LLM(engine).generate([turn], params)[0]
    assert second.token_ids == truth[tuple(turn)]
    assert second.usage.cached_tokens == 48  # of 49 tokens before the new turn, the last of which was never computed


def test_a_stop_in_the_middle_of_an_accepted_path_registers_only_what_was_kept(model: Decoder) -> None:
    plain = alone(model, SYSTEM, SamplingParams(max_tokens=24))
    for stop in range(3, 10):
        params = SamplingParams(max_tokens=24, stop_token_ids=(plain[stop],))
        engine = hinted_engine(model, EngineConfig(budget=24, page_size=1), {tuple(SYSTEM): plain}, seed=stop)
        kept = LLM(engine).generate([SYSTEM], params)[0].token_ids
        whole = [*SYSTEM, *kept]
        again = LLM(engine).generate([[*whole, 1]], SamplingParams(max_tokens=3), budget=0)[0]
        assert again.usage.cached_tokens >= len(whole) - 1
        assert again.token_ids == alone(model, [*whole, 1], SamplingParams(max_tokens=3))


def test_several_answers_to_one_prompt_compute_it_once(model: Decoder) -> None:
    prompt = [*SYSTEM, 1, 2, 3]
    params = [SamplingParams(max_tokens=5, temperature=1.0, seed=i) for i in range(3)]
    engine = Engine(model, config=EngineConfig(budget=0, page_size=4, max_batch_tokens=40, num_pages=60))
    done = LLM(engine).generate([prompt] * 3, params)
    assert [c.token_ids for c in done] == [alone(model, prompt, p) for p in params]
    assert [c.usage.cached_tokens for c in done] == [0, 32, 32]
    assert engine.stats.hit_tokens == 64


def test_prompt_logprobs_come_complete_beside_a_full_cache(model: Decoder) -> None:
    prompt = [*SYSTEM, 1, 2, 3]
    engine = Engine(model, config=EngineConfig(budget=0, page_size=4, num_pages=60))
    plain, scored = SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, prompt_logprobs=0)
    first, second, third = (LLM(engine).generate([prompt], p)[0] for p in (scored, plain, scored))
    assert [c.usage.cached_tokens for c in (first, second, third)] == [0, 32, 0]
    assert third.prompt_logprobs is not None
    assert third.prompt_logprobs == first.prompt_logprobs
    assert len(third.prompt_logprobs) == len(prompt)


# --- values that are not finite ---


@pytest.mark.parametrize("chunk", [7, 64])
def test_a_poisonous_prompt_touches_no_other_request(chunk: int) -> None:
    model = tiny_model()
    params = SamplingParams(max_tokens=8)
    good, bad = [*SYSTEM, 1, 2, 3], [*SYSTEM[:21], BAD, *SYSTEM[:12]]
    expected = alone(model, good, params)
    model.embed[BAD] = float("nan")
    config = EngineConfig(budget=6, page_size=4, max_batch_tokens=chunk, num_pages=60, max_running=4)
    engine = hinted_engine(model, config, {tuple(good): expected, tuple(bad): []}, seed=0)
    for _ in range(2):
        done = LLM(engine).generate([bad, good, bad, good], params)
        assert [c.error is None for c in done] == [False, True, False, True]
        assert [c.token_ids for c in done] == [[], expected, [], expected]
        assert_cached_pages_are_finite(engine)
    assert done[0].usage.cached_tokens == 20  # the page of the bad token was not kept, those before it are innocent


def test_a_poisoned_draft_leaves_nothing_in_the_cache() -> None:
    model = tiny_model()
    params = SamplingParams(max_tokens=20)
    expected = alone(model, SYSTEM, params)
    assert BAD not in expected
    model.embed[BAD] = float("nan")
    # What it takes for its continuation is poison from the fifth token on.
    hint = {tuple(SYSTEM): [*expected[:4], *[BAD] * 16]}
    engine = hinted_engine(model, EngineConfig(budget=9, page_size=2, num_pages=60), hint, seed=0)
    for turn in range(2):
        done = LLM(engine).generate([SYSTEM, SYSTEM], params)
        assert [c.token_ids for c in done] == [expected, expected]
        assert done[0].usage.cached_tokens == (32 if turn else 0)
        assert_cached_pages_are_finite(engine)


def assert_cached_pages_are_finite(engine: Engine) -> None:
    engine.check_idle()
    pool = engine.scheduler.pool
    known = [block for block in range(pool.num_blocks) if block in pool._cached]
    assert known
    for cache in caches(engine):
        assert cache.pages[:, :, known].isfinite().all()


# --- exceptions in a step ---

BREAKS: list[tuple[str, str]] = [
    ("drafter", "propose"),
    ("model", "forward"),
    ("model", "logits"),
    ("cache", "move"),
    ("drafter", "observe"),
    ("budgets", "learn"),
]


@pytest.mark.parametrize(("part", "method"), BREAKS)
@pytest.mark.parametrize("waiting", [False, True])
def test_the_engine_goes_on_after_a_step_that_raised(
    model: Decoder, part: str, method: str, waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {tuple(prompt): alone(model, prompt, params) for prompt, params in REQUESTS[:4:2]}
    config = EngineConfig(budget=9, page_size=4, num_pages=60, max_running=2)
    engine = hinted_engine(model, config, expected, seed=1)
    client = Client(engine)
    ids = [client.add(*REQUESTS[index]) for index in (0, 2, 0, 2)]
    while not (engine.stats.running == 2 and all(r.num_output for r in engine.scheduler.running)):
        client.step()
    target = getattr(engine, part)

    def broken(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(target, method, broken)
        with pytest.raises(torch.OutOfMemoryError):
            client.drain()  # not every step moves what it has accepted
    running = [request.id for request in engine.scheduler.running]
    assert running == ids[:2]
    ended = engine.abort_all("no memory left", waiting=waiting)
    assert [output.request_id for output in ended] == (ids if waiting else running)
    assert {output.error for output in ended} == {"no memory left"}
    assert engine.stats.used_pages == engine.stats.cached_pages == 0
    client.take(ended)
    new = client.add(*REQUESTS[0])
    client.drain()
    for request_id in [new] if waiting else [*ids[2:], new]:
        assert client.last[request_id].finish_reason == "length"
    assert client.tokens[new] == expected[tuple(REQUESTS[0][0])]
    assert waiting or [client.tokens[i] for i in ids[2:]] == list(expected.values())


def test_offline_calls_leave_nothing_behind_when_a_step_fails(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model, config=EngineConfig(budget=0, num_pages=20))
    prompts, params = [prompt for prompt, _ in REQUESTS], SamplingParams(max_tokens=3)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "logits", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            LLM(engine).generate(prompts, params)
    engine.check_idle()
    assert LLM(engine).generate(prompts[:1], params)[0].token_ids == alone(model, prompts[0], params)


def test_aborts_at_any_moment_leave_every_page_accounted_for(model: Decoder) -> None:
    config = EngineConfig(budget=9, page_size=4, num_pages=40, max_batch_tokens=20, max_running=3)
    truth = {tuple(prompt): alone(model, prompt, params) for prompt, params in REQUESTS[:2]}
    engine = hinted_engine(model, config, truth, seed=1)
    for steps in range(9):
        client = Client(engine)
        ids = [client.add(*REQUESTS[i]) for i in (0, 1, 0)]
        for _ in range(steps):
            client.step()
        for request_id in ids:
            engine.abort(request_id)
            engine.scheduler.check()
        engine.check_idle()
    assert engine.stats.used_pages == 0


def test_stats_count_what_is_there(model: Decoder) -> None:
    engine = Engine(model, config=EngineConfig(budget=0, page_size=4, num_pages=30, max_running=1))
    client = Client(engine)
    for _ in range(2):
        client.add(SYSTEM[:16], SamplingParams(max_tokens=4))
    client.step()
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.used_pages, stats.free_pages, stats.cached_pages) == (1, 1, 4, 26, 0)
    client.drain()
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.used_pages, stats.free_pages, stats.cached_pages) == (0, 0, 0, 26, 4)
    assert (stats.hit_tokens, stats.preemptions) == (12, 0)
