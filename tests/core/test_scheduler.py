"""Who runs in a step: order, chunks, draft budgets, pages, reuse, preemption. A fake engine stands in for the model."""

from collections.abc import Callable, Sequence
from random import Random
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jetflow_core.block_pool import BlockPool
from jetflow_core.request import Request
from jetflow_core.sampling import SamplingParams
from jetflow_core.scheduler import PREFILL_SHARE, Scheduler, Share, fair_shares

MODEL_LEN = 64


class NoText:
    def push(self, token: int, /) -> str:
        return ""

    def flush(self) -> str:
        return ""


def make_request(
    name: str,
    prompt: int | Sequence[int],
    max_tokens: int,
    budget: int = 0,
    max_model_len: int = MODEL_LEN,
    cache_salt: str = "",
    prompt_logprobs: int | None = None,
) -> Request:
    """`prompt`: its tokens, or how many it has; then no other name begins alike."""
    if isinstance(prompt, int):
        prompt = [crc32(name.encode()) % 1000] * prompt
    return Request(
        name,
        prompt,
        SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs),
        vocab_size=1000,
        max_model_len=max_model_len,
        eos_ids=(),
        detokenizer=NoText,
        budget=budget,
        cache_salt=cache_salt,
    )


class Recorder(Scheduler):
    """A scheduler with a memory of what the fake engine has written to every slot."""

    def __init__(self, pool: BlockPool, **limits: int) -> None:
        super().__init__(pool, **limits)  # type: ignore[arg-type]
        self.memory: dict[int, int] = {}

    def slot(self, request: Request, index: int) -> int:
        page = self.pool.page_size
        return request.blocks[index // page] * page + index % page

    def read(self, request: Request) -> list[int]:
        return [self.memory[self.slot(request, i)] for i in range(request.num_cached)]

    def write(self, request: Request, start: int, values: Sequence[int]) -> None:
        for index, value in enumerate(values, start):
            self.memory[self.slot(request, index)] = value


def contents(tokens: Sequence[int]) -> list[int]:
    """What the slot of every token holds: a function of all tokens up to it, as keys and values are."""
    values = [0]
    for token in tokens:
        values.append(hash((values[-1], token)))
    return values[1:]


def make_scheduler(
    blocks: int = 100,
    page: int = 4,
    tokens: int = 32,
    running: int = 8,
    draft_slots: int = 0,
    length: int = MODEL_LEN,
    prefix_cache: bool = True,
) -> Recorder:
    return Recorder(
        BlockPool(blocks, page),
        max_batch_tokens=tokens,
        max_running=running,
        max_model_len=length,
        draft_slots=draft_slots,
        prefix_cache=prefix_cache,
    )


def next_token(request: Request) -> int:
    """A function of request and position, as a model's greedy choice is."""
    return 100 + (request.arrival * 31 + len(request.tokens) * 7) % 800


def run_step(scheduler: Recorder, accept: Callable[[int], int] = lambda draft: draft) -> list[Share]:
    """What the engine does with a plan; `accept` says how many of the draft nodes the target takes."""
    plan = scheduler.plan()
    check_plan(scheduler, plan)
    for share in plan:
        assert scheduler.read(share.request) == contents(share.request.tokens[: share.request.num_cached])
    for share in plan:
        request, start = share.request, share.request.num_cached
        scheduler.write(
            request, start, [-1] * max(share.known + share.draft, scheduler.draft_slots if share.draft else 0)
        )
        request.num_cached += share.known
        if request.num_cached == len(request.tokens):
            for _ in range(1 + accept(share.draft)):
                if request.finish_reason is None:
                    request.append([next_token(request)])
            request.num_cached = len(request.tokens) - 1
        scheduler.write(request, start, contents(request.tokens[: request.num_cached])[start:])
        scheduler.register(request, sound=True)
        if request.finish_reason is not None:
            scheduler.finish(request)
        else:
            scheduler.trim(request)
    return plan


def check_plan(scheduler: Recorder, plan: list[Share]) -> None:
    assert bool(plan) == scheduler.has_work
    assert sum(share.known + share.draft for share in plan) <= scheduler.max_batch_tokens
    assert len({share.request.id for share in plan}) == len(plan) <= scheduler.max_running
    if plan:
        assert plan[0].request is scheduler.running[0], "the oldest request must always progress"
    for share in plan:
        request, page = share.request, scheduler.pool.page_size
        assert request.status == "running"
        assert 1 <= share.known <= len(request.tokens) - request.num_cached
        assert 0 <= share.draft <= request.budget
        slots = share.known + share.draft
        if share.draft:
            assert share.known == 1
            assert request.is_decoding
            assert request.remaining > 1
            slots = max(slots, scheduler.draft_slots)
            assert request.num_cached + slots <= scheduler.max_model_len
        assert len(request.blocks) * page >= request.num_cached + slots


def check_pages(scheduler: Recorder) -> None:
    scheduler.check()
    assert not any(request.blocks or request.num_cached for request in scheduler.waiting)
    arrivals = [request.arrival for request in [*scheduler.running, *scheduler.waiting]]
    assert arrivals == sorted(arrivals), "running requests are older than waiting ones, both in order"


def drain(scheduler: Recorder, accept: Callable[[int], int] = lambda draft: draft) -> int:
    """Steps until nothing is left; the oldest progresses in each, so their number is bounded."""
    requests = [*scheduler.running, *scheduler.waiting]
    bound = sum(len(r.prompt_ids) + r.max_output for r in requests)
    steps = 0
    while scheduler.has_work:
        assert steps < bound
        run_step(scheduler, accept)
        check_pages(scheduler)
        steps += 1
    scheduler.pool.check_idle()
    return steps


# --- refused ---


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_batch_tokens \(8\) must exceed max_running \(8\)"):
        make_scheduler(tokens=8, running=8)
    with pytest.raises(ValueError, match="max_running is 0"):
        make_scheduler(running=0)


def test_a_request_the_pool_can_never_hold_is_refused() -> None:
    scheduler = make_scheduler(blocks=4)
    scheduler.add(make_request("fits", 10, 7))  # the 17th token is never cached
    with pytest.raises(ValueError, match="'big' may need 17 cache slots, but the whole cache has 16"):
        scheduler.add(make_request("big", 10, 8))
    drain(scheduler)


def test_an_id_in_use_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 3, 3))
    with pytest.raises(ValueError, match="'a' is already in use"):
        scheduler.add(make_request("a", 3, 3))
    drain(scheduler)
    scheduler.add(make_request("a", 3, 3))


# --- decodes and drafts ---


def start(scheduler: Recorder, *requests: Request) -> None:
    """Bring requests to decoding."""
    for request in requests:
        scheduler.add(request)
    while not all(request.is_decoding for request in requests):
        run_step(scheduler)


def test_a_lone_decode_gets_its_whole_budget() -> None:
    scheduler = make_scheduler()
    start(scheduler, make_request("a", 5, 30, budget=16))
    assert [(s.known, s.draft) for s in scheduler.plan()] == [(1, 16)]


def test_no_draft_for_the_last_token() -> None:
    scheduler = make_scheduler()
    start(scheduler, make_request("a", 5, 2, budget=16))
    assert [(s.known, s.draft) for s in scheduler.plan()] == [(1, 0)]


def test_budgets_shrink_fairly_when_the_step_is_full() -> None:
    scheduler = make_scheduler(tokens=20, running=4)
    start(scheduler, *(make_request(n, 2, 50, budget=b) for n, b in [("a", 16), ("b", 2), ("c", 16), ("d", 16)]))
    plan = run_step(scheduler, lambda draft: 0)
    assert [s.draft for s in plan] == [5, 2, 5, 4]


def test_every_decode_keeps_its_anchor() -> None:
    scheduler = make_scheduler(tokens=9, running=8)
    start(scheduler, *(make_request(str(i), 2, 50, budget=8) for i in range(8)))
    plan = run_step(scheduler, lambda draft: 0)
    assert [s.known for s in plan] == [1] * 8
    assert sum(s.draft for s in plan) == 1


def test_drafts_stay_within_the_context() -> None:
    scheduler = make_scheduler(draft_slots=6, length=32)
    request = make_request("a", 20, 12, budget=30, max_model_len=32)
    start(scheduler, request)
    drafts = [share.draft for _ in range(11) for share in run_step(scheduler, lambda draft: 0)]
    # Slot 32 would be the first beyond the context; with fewer than 6 slots left the head's block does not fit.
    assert drafts == [11, 10, 9, 8, 7, 6, 5, 0, 0, 0, 0]


def test_the_heads_block_has_its_slots() -> None:
    scheduler = make_scheduler(draft_slots=10)
    request = make_request("a", 4, 30, budget=2)
    start(scheduler, request)
    scheduler.plan()
    assert len(request.blocks) == 4  # 4 cached + 10 slots, pages of 4
    scheduler.trim(request)
    assert len(request.blocks) == 2
    assert scheduler.pool.used == 2


# --- prefill ---


def test_a_prompt_is_chunked_to_the_step() -> None:
    scheduler = make_scheduler(tokens=10)
    scheduler.add(make_request("a", 25, 3))
    assert [share.known for _ in range(3) for share in run_step(scheduler)] == [10, 10, 5]


@pytest.mark.parametrize("budget", [0, 4, 64])
def test_a_long_prompt_progresses_while_decodes_fill_the_step(budget: int) -> None:
    scheduler = make_scheduler(tokens=32, running=8, blocks=500, length=400)
    decodes = [make_request(str(i), 2, 300, budget, max_model_len=400) for i in range(7)]
    start(scheduler, *decodes)
    scheduler.add(make_request("long", 390, 5, max_model_len=400))
    for _ in range(10):
        plan = run_step(scheduler, lambda draft: 0)
        assert len(plan) == 8
        assert plan[-1].known >= 32 * PREFILL_SHARE


def test_a_late_short_prompt_passes_beside_a_long_one() -> None:
    scheduler = make_scheduler(tokens=16, blocks=500, length=2000)
    scheduler.add(make_request("long", 1000, 5, max_model_len=2000))
    run_step(scheduler)
    short = make_request("short", 6, 3)
    scheduler.add(short)
    plan = run_step(scheduler)
    assert [share.known for share in plan] == [10, 6]
    assert short.num_output == 1


def test_admission_is_first_come_first_served() -> None:
    scheduler = make_scheduler(blocks=8)
    scheduler.add(make_request("a", 20, 4))
    run_step(scheduler)
    scheduler.add(make_request("b", 20, 4))  # 6 pages wanted, 2 free
    scheduler.add(make_request("c", 2, 2))  # would fit, but came later
    run_step(scheduler)
    assert [r.id for r in scheduler.running] == ["a"]
    assert [r.id for r in scheduler.waiting] == ["b", "c"]
    drain(scheduler)


def test_max_running_is_a_limit() -> None:
    scheduler = make_scheduler(running=2)
    for name in "abc":
        scheduler.add(make_request(name, 2, 4))
    assert len(run_step(scheduler)) == 2


def test_pages_promised_to_a_running_prefill_are_not_given_away() -> None:
    scheduler = make_scheduler(blocks=12, tokens=8, running=4)
    scheduler.add(make_request("a", 36, 4))
    run_step(scheduler)
    scheduler.add(make_request("b", 12, 4))  # 4 pages; 10 are free, but 8 of them are promised to a
    run_step(scheduler)
    assert [r.id for r in scheduler.running] == ["a"]


def test_a_prompt_of_one_token_runs() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 1, 5, budget=4)
    scheduler.add(request)
    drain(scheduler)
    assert request.finish_reason == "length"


# --- pages run out ---


def test_drafts_give_way_before_any_request_does() -> None:
    scheduler = make_scheduler(blocks=5, page=4)
    start(scheduler, make_request("a", 6, 10, budget=8), make_request("b", 6, 10, budget=8))
    plan = scheduler.plan()
    assert [s.request.id for s in plan] == ["a", "b"]
    assert [s.draft for s in plan] == [5, 1]  # a takes the last page; the page that b holds anyway has room for one


def test_the_youngest_is_preempted_and_comes_back_with_the_same_tokens() -> None:
    def outputs(blocks: int) -> tuple[list[list[int]], bool]:
        scheduler = make_scheduler(blocks=blocks, page=4)
        requests = [make_request(n, 8, 20, budget=3) for n in "abc"]
        for request in requests:
            scheduler.add(request)
        preempted = False
        while scheduler.has_work:
            before = {r.id for r in scheduler.running}
            run_step(scheduler, lambda draft: draft // 2)
            check_pages(scheduler)
            lost = before & {r.id for r in scheduler.waiting}
            assert "a" not in lost
            preempted |= bool(lost)
        scheduler.pool.check_idle()
        return [r.tokens for r in requests], preempted

    roomy, tight = outputs(100), outputs(9)
    assert (roomy[1], tight[1]) == (False, True)
    assert roomy[0] == tight[0]


def test_a_preempted_request_is_first_in_the_queue() -> None:
    scheduler = make_scheduler(blocks=7, page=4, running=2)
    start(scheduler, make_request("a", 10, 14), make_request("b", 10, 14))
    scheduler.add(make_request("c", 2, 2))
    while len(scheduler.running) == 2:
        run_step(scheduler)
    assert [r.id for r in scheduler.running] == ["a"]
    assert [r.id for r in scheduler.waiting] == ["b", "c"]
    assert scheduler.waiting[0].num_output > 0
    drain(scheduler)


def test_a_newcomer_leaves_a_page_for_everyone_who_runs() -> None:
    scheduler = make_scheduler(blocks=7, page=4)
    start(scheduler, make_request("a", 10, 14))
    scheduler.add(make_request("b", 14, 2))  # 4 pages; 4 are left, but a needs one of them soon
    run_step(scheduler)
    assert [r.id for r in scheduler.running] == ["a"]
    drain(scheduler)
    assert scheduler.preemptions == 0


# --- pages of equal beginnings ---

TEXT = [crc32(bytes([i])) % 1000 for i in range(60)]


def shares(plan: list[Share]) -> dict[str, int]:
    return {share.request.id: share.known for share in plan}


@pytest.mark.parametrize(("prompt", "known"), [(3, 3), (4, 4), (5, 1), (8, 4), (15, 3), (16, 4), (17, 1)])
def test_whole_pages_are_reused_and_the_last_token_is_always_computed(prompt: int, known: int) -> None:
    scheduler = make_scheduler()
    first, second = make_request("a", TEXT[:prompt], 3), make_request("b", TEXT[:prompt], 3)
    scheduler.add(first)
    drain(scheduler)
    scheduler.add(second)
    assert shares(run_step(scheduler)) == {"b": known}
    assert scheduler.hit_tokens == second.usage().cached_tokens == prompt - known
    assert first.usage().cached_tokens == 0
    drain(scheduler)


def test_output_is_reused_as_a_prompt_is() -> None:
    """The next turn of a conversation begins with the whole turn before."""
    scheduler = make_scheduler()
    scheduler.add(first := make_request("a", TEXT[:10], 11))
    drain(scheduler)
    scheduler.add(second := make_request("b", [*first.tokens, 7, 7], 3))
    assert shares(run_step(scheduler)) == {"b": 3}  # 21 tokens came before, 20 of them in the cache, and 2 are new
    assert second.cached_tokens == 20
    drain(scheduler)


def test_only_the_common_beginning_is_reused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", TEXT[:20], 3))
    drain(scheduler)
    scheduler.add(make_request("b", [*TEXT[:11], 5, *TEXT[12:20]], 3))
    scheduler.add(make_request("c", [5, *TEXT[1:20]], 3))
    assert shares(run_step(scheduler)) == {"b": 12, "c": 20}
    drain(scheduler)


def test_another_salt_shares_nothing() -> None:
    scheduler = make_scheduler()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        scheduler.add(request := make_request(name, TEXT[:9], 2, cache_salt=salt))
        drain(scheduler)
        assert request.cached_tokens == (8 if name == "c" else 0)


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    scheduler = make_scheduler(prefix_cache=False)
    for name in "abc":
        scheduler.add(make_request(name, TEXT[:20], 2))
    assert shares(run_step(scheduler)) == {"a": 16, "b": 8, "c": 8}
    drain(scheduler)
    assert scheduler.hit_tokens == 0
    assert scheduler.pool.free == scheduler.pool.num_blocks


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    scheduler = make_scheduler(tokens=16)
    requests = [make_request(name, TEXT[:30], 4) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    steps = [shares(run_step(scheduler)) for _ in range(3)]
    assert steps == [{"a": 16}, {"a": 14}, {"a": 1, "b": 2, "c": 2}]
    assert [r.cached_tokens for r in requests] == [0, 28, 28]
    assert scheduler.pool.used == 7 + 3
    drain(scheduler)


def test_one_that_waits_for_a_page_goes_on_alone_when_the_other_is_aborted() -> None:
    scheduler = make_scheduler(tokens=16)
    for name in "ab":
        scheduler.add(make_request(name, TEXT[:40], 4))
    assert shares(run_step(scheduler)) == {"a": 16}
    scheduler.abort("a")
    assert shares(run_step(scheduler)) == {"b": 16}
    assert scheduler.running[0].cached_tokens == 16
    drain(scheduler)


def test_one_that_waits_does_not_keep_back_others() -> None:
    scheduler = make_scheduler(tokens=16)
    scheduler.add(make_request("a", TEXT[:40], 4))
    scheduler.add(make_request("b", [*TEXT[:40], 1], 4))
    scheduler.add(make_request("c", 6, 4))
    assert shares(run_step(scheduler)) == {"a": 10, "c": 6}
    drain(scheduler)


def test_pages_with_values_that_are_not_finite_are_never_shared() -> None:
    scheduler = make_scheduler(tokens=9)
    scheduler.add(bad := make_request("a", TEXT[:40], 4))
    for step in range(3):  # the second of three chunks is bad
        plan = scheduler.plan()
        bad.num_cached += plan[0].known
        scheduler.register(bad, sound=step != 1)
    scheduler.add(other := make_request("b", TEXT[:40], 4))
    scheduler.plan()
    assert other.cached_tokens == 8
    scheduler.finish(bad)
    assert scheduler.pool.cached == 0  # b holds the two good pages
    scheduler.finish(other)
    assert scheduler.pool.cached == 2
    scheduler.pool.check_idle()


def test_a_request_that_wants_all_logits_computes_all_and_shares_them() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", TEXT[:20], 3))
    drain(scheduler)
    scheduler.add(make_request("b", TEXT[:24], 3, prompt_logprobs=0))
    assert shares(run_step(scheduler)) == {"b": 24}
    scheduler.check()
    drain(scheduler)
    scheduler.add(make_request("c", TEXT[:25], 3))
    assert shares(run_step(scheduler)) == {"c": 1}
    drain(scheduler)


def test_what_a_preempted_request_had_computed_is_no_gift_of_the_cache() -> None:
    scheduler = make_scheduler(blocks=9, page=4)
    requests = [make_request(n, 8, 20, budget=3) for n in "ab"]
    for request in requests:
        scheduler.add(request)
    drain(scheduler, lambda draft: draft // 2)
    assert scheduler.preemptions >= 1
    assert scheduler.hit_tokens > 0  # its pages were still there when it came back
    assert [r.cached_tokens for r in requests] == [0, 0]


def test_cached_pages_give_way_to_new_requests() -> None:
    scheduler = make_scheduler(blocks=8, page=4)
    for i in range(6):
        scheduler.add(make_request(str(i), 20, 4))
        drain(scheduler)
    assert scheduler.pool.cached + scheduler.pool.free == 8


# --- nobody starves ---


def steps_until(scheduler: Recorder, request: Request, arrive: Callable[[int], None], limit: int) -> int:
    """Steps until the first token of `request`, while `arrive` adds other requests before every step."""
    for step in range(limit):
        if request.num_output:
            return step
        arrive(step)
        run_step(scheduler)
        check_pages(scheduler)
    pytest.fail(f"no token within {limit} steps")


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_stream_of_short_requests_does_not_starve_a_long_prompt(prefix_cache: bool) -> None:
    scheduler = make_scheduler(blocks=120, tokens=24, running=6, length=500, prefix_cache=prefix_cache)

    def short(step: int) -> None:
        for i in range(4):  # more than the engine can serve: the queue grows without end
            scheduler.add(make_request(f"{step}-{i}", [*TEXT[: 3 + step % 7], step], 5, budget=2, max_model_len=500))

    for step in range(-10, 0):
        short(step % 100)
        run_step(scheduler)
    queue = len(scheduler.waiting)
    assert queue > 10
    scheduler.add(long := make_request("long", 400, 5, max_model_len=500))
    # Before it, everyone in the queue takes a few steps, six at a time; then it gets half of a quarter of a step at least.
    steps_until(scheduler, long, lambda step: short(step + 100), limit=queue + 400 // 3)
    assert len(scheduler.waiting) > queue


def test_a_stream_of_long_prompts_does_not_starve_a_late_short_one() -> None:
    scheduler = make_scheduler(blocks=400, tokens=40, running=4, length=500)

    def long(step: int) -> None:
        if step % 3 == 0:
            scheduler.add(make_request(f"long-{step}", 200, 3, max_model_len=500))

    for step in range(9):
        long(step)
        run_step(scheduler)
    ahead = [*scheduler.running, *scheduler.waiting]
    scheduler.add(late := make_request("late", 6, 3, max_model_len=500))
    work = sum(len(r.tokens) - r.num_cached + r.remaining for r in ahead)
    # First come, first served: no more than what was there before it, at a whole step's tokens each step.
    assert steps_until(scheduler, late, lambda step: long(step + 9), limit=100) <= work // 40 + len(ahead) * 3


def test_a_request_larger_than_what_is_free_is_not_passed_by_for_ever() -> None:
    scheduler = make_scheduler(blocks=20, page=4, tokens=32, running=6, length=100)

    def small(step: int) -> None:
        scheduler.add(make_request(f"small-{step}", 6, 6, max_model_len=100))

    for step in range(6):
        small(step)
        run_step(scheduler)
    ahead = len(scheduler.waiting) + len(scheduler.running)
    scheduler.add(big := make_request("big", 60, 10, max_model_len=100))
    assert steps_until(scheduler, big, lambda step: small(step + 6), limit=200) <= 7 * ahead + 4


# --- abort ---


def test_abort_releases_the_pages_of_a_running_request() -> None:
    scheduler = make_scheduler()
    start(scheduler, request := make_request("a", 9, 9))
    assert scheduler.abort("a") is request
    assert request.status == "finished"
    scheduler.pool.check_idle()
    assert scheduler.abort("a") is None
    assert not scheduler.has_work
    assert scheduler.plan() == []


def test_abort_of_a_waiting_request_spares_the_others() -> None:
    scheduler = make_scheduler(running=1)
    for name in "abc":
        scheduler.add(make_request(name, 2, 2))
    run_step(scheduler)
    scheduler.abort("b")
    assert [r.id for r in scheduler.waiting] == ["c"]
    drain(scheduler)


def test_finishing_twice_is_a_bug() -> None:
    scheduler = make_scheduler()
    start(scheduler, request := make_request("a", 9, 9))
    scheduler.finish(request)
    with pytest.raises(AssertionError, match="not here"):
        scheduler.finish(request)


# --- any traffic ---


class Traffic(RuleBasedStateMachine):
    """Random arrivals, steps and aborts over a small pool: nothing leaks, all orders hold, everything ends."""

    @initialize(
        blocks=st.integers(16, 24),
        page=st.sampled_from([1, 4, 5]),
        running=st.integers(1, 5),
        more=st.integers(1, 20),
        draft_slots=st.sampled_from([0, 5]),
        prefix_cache=st.booleans(),
        seed=st.integers(0, 99),
    )
    def set_up(
        self, blocks: int, page: int, running: int, more: int, draft_slots: int, prefix_cache: bool, seed: int
    ) -> None:
        self.scheduler = make_scheduler(
            blocks, page, running + more, running, draft_slots, MODEL_LEN, prefix_cache=prefix_cache
        )
        self.random = Random(seed)
        self.added: list[Request] = []
        self.aborted: set[str] = set()

    def accept(self, draft: int) -> int:
        return self.random.randint(0, draft)

    @rule(
        prompt=st.integers(1, 40),
        own=st.integers(0, 6),
        max_tokens=st.integers(1, 20),
        budget=st.sampled_from([0, 3, 12]),
        scored=st.sampled_from([None, None, 0]),
    )
    def add(self, prompt: int, own: int, max_tokens: int, budget: int, scored: int | None) -> None:
        """All prompts begin alike, and end in `own` tokens of one of two kinds."""
        text = TEXT[: max(0, prompt - own)] + [len(self.added) % 2] * min(own, prompt)
        request = make_request(str(len(self.added)), text, max_tokens, budget, prompt_logprobs=scored)
        pool = self.scheduler.pool
        if request.max_slots > pool.num_blocks * pool.page_size:
            with pytest.raises(ValueError, match="cache slots"):
                self.scheduler.add(request)
        else:
            self.scheduler.add(request)
            self.added.append(request)

    @rule()
    def step(self) -> None:
        waited = list(self.scheduler.waiting)
        run_step(self.scheduler, self.accept)
        admitted = [r for r in waited if r.status != "waiting"]
        assert admitted == waited[: len(admitted)]

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.added))
        here = request.status != "finished"
        assert self.scheduler.abort(request.id) is (request if here else None)
        if here:
            self.aborted.add(request.id)

    @invariant()
    def pages_are_accounted_for(self) -> None:
        check_pages(self.scheduler)

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            drain(self.scheduler, self.accept)
            for request in self.added:
                assert request.status == "finished"
                assert (request.num_output == request.max_output) == (request.id not in self.aborted)
                output = request.tokens[len(request.prompt_ids) :]
                assert output == [
                    100 + (request.arrival * 31 + i * 7) % 800
                    for i in range(len(request.prompt_ids), len(request.tokens))
                ]


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# --- fair shares ---


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(0, 100))
def test_fair_shares(wanted: list[int], total: int) -> None:
    shares = fair_shares(wanted, total)
    assert sum(shares) == min(total, sum(wanted))
    assert all(0 <= share <= wish for share, wish in zip(shares, wanted, strict=True))
    cut = [share for share, wish in zip(shares, wanted, strict=True) if share < wish]
    if cut:
        assert max(cut) - min(cut) <= 1
        assert cut == sorted(cut, reverse=True)
        assert max(shares) <= min(cut) + 1


def test_pending_prefill_is_what_the_next_step_may_read() -> None:
    scheduler = make_scheduler(blocks=20, page=4, tokens=30, running=2)
    assert scheduler.pending_prefill == 0
    for name, prompt in (("a", 12), ("b", 25), ("c", 7)):
        scheduler.add(make_request(name, prompt, 4))
    assert scheduler.pending_prefill == 30  # of 37: a third request finds no place, and a step reads 30
    scheduler.abort("b")
    assert scheduler.pending_prefill == 12 + 7
