"""Who runs in a step: order, chunks, draft budgets, pages, preemption. A fake engine stands in for the model."""

from collections.abc import Callable
from random import Random

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


def make_request(name: str, prompt: int, max_tokens: int, budget: int = 0, max_model_len: int = MODEL_LEN) -> Request:
    return Request(
        name,
        [1] * prompt,
        SamplingParams(max_tokens=max_tokens),
        vocab_size=1000,
        max_model_len=max_model_len,
        eos_ids=(),
        detokenizer=NoText,
        budget=budget,
    )


def make_scheduler(
    blocks: int = 100, page: int = 4, tokens: int = 32, running: int = 8, draft_slots: int = 0, length: int = MODEL_LEN
) -> Scheduler:
    return Scheduler(
        BlockPool(blocks, page),
        max_batch_tokens=tokens,
        max_running=running,
        max_model_len=length,
        draft_slots=draft_slots,
    )


def next_token(request: Request) -> int:
    """A function of request and position, as a model's greedy choice is."""
    return 100 + (request.arrival * 31 + len(request.tokens) * 7) % 800


def run_step(scheduler: Scheduler, accept: Callable[[int], int] = lambda draft: draft) -> list[Share]:
    """What the engine does with a plan; `accept` says how many of the draft nodes the target takes."""
    plan = scheduler.plan()
    check_plan(scheduler, plan)
    for share in plan:
        request = share.request
        request.num_cached += share.known
        if request.num_cached < len(request.tokens):
            continue
        for _ in range(1 + accept(share.draft)):
            if request.finish_reason is None:
                request.append([next_token(request)])
        request.num_cached = len(request.tokens) - 1
        if request.finish_reason is not None:
            scheduler.finish(request)
        else:
            scheduler.trim(request)
    return plan


def check_plan(scheduler: Scheduler, plan: list[Share]) -> None:
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


def check_pages(scheduler: Scheduler) -> None:
    held = [block for request in scheduler.running for block in request.blocks]
    assert len(set(held)) == len(held)
    assert len(held) + scheduler.pool.free == scheduler.pool.num_blocks
    assert not any(request.blocks or request.num_cached for request in scheduler.waiting)
    arrivals = [request.arrival for request in [*scheduler.running, *scheduler.waiting]]
    assert arrivals == sorted(arrivals), "running requests are older than waiting ones, both in order"


def drain(scheduler: Scheduler, accept: Callable[[int], int] = lambda draft: draft) -> int:
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


def start(scheduler: Scheduler, *requests: Request) -> None:
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
    assert scheduler.pool.free == 98


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
    scheduler = make_scheduler(blocks=4, page=4)
    start(scheduler, make_request("a", 6, 10, budget=8), make_request("b", 6, 10, budget=8))
    plan = scheduler.plan()
    assert [s.request.id for s in plan] == ["a", "b"]
    assert [s.draft for s in plan] == [1, 1]  # the pages held anyway have room for one


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
    scheduler = make_scheduler(blocks=6, page=4, running=2)
    start(scheduler, make_request("a", 10, 14), make_request("b", 10, 14))
    scheduler.add(make_request("c", 2, 2))
    while len(scheduler.running) == 2:
        run_step(scheduler)
    assert [r.id for r in scheduler.running] == ["a"]
    assert [r.id for r in scheduler.waiting] == ["b", "c"]
    assert scheduler.waiting[0].num_output > 0
    drain(scheduler)


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
        seed=st.integers(0, 99),
    )
    def set_up(self, blocks: int, page: int, running: int, more: int, draft_slots: int, seed: int) -> None:
        self.scheduler = make_scheduler(blocks, page, running + more, running, draft_slots)
        self.random = Random(seed)
        self.added: list[Request] = []
        self.aborted: set[str] = set()

    def accept(self, draft: int) -> int:
        return self.random.randint(0, draft)

    @rule(prompt=st.integers(1, 40), max_tokens=st.integers(1, 20), budget=st.sampled_from([0, 3, 12]))
    def add(self, prompt: int, max_tokens: int, budget: int) -> None:
        request = make_request(str(len(self.added)), prompt, max_tokens, budget)
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
