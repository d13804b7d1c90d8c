"""Budgets that follow the load: the frontier against brute force, what is learned, and simulated and real engines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hinted import hinted_engine
from jetflow_core.budget import Budget, BudgetPolicy, Calibration, Spent, check_budget, frontier
from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.llm import LLM
from jetflow_core.model import Decoder
from jetflow_core.sampling import SamplingParams
from jetflow_core.scheduler import Share
from jetflow_core.step_time import CostCurve, monotone
from jetflow_core.tree import DraftTree
from score_tables import ScoreTable, best_first_tree
from simulated_load import Machine, SimulatedLoad
from tiny import tiny_model

# -- the frontier -----------------------------------------------------------------------------------------------------


def prefix_closed_sets(tree: DraftTree) -> list[set[int]]:
    """Every set of nodes (without the anchor) that holds the parent of each of its nodes."""
    nodes = range(1, len(tree))
    subsets = (set(c) for size in range(len(tree)) for c in itertools.combinations(nodes, size))
    return [own for own in subsets if all(tree.parents[n] in own or tree.parents[n] == 0 for n in own)]


LOGPROB = st.floats(-4, 0, width=32)


@st.composite
def forests(draw: st.DrawFn) -> list[DraftTree]:
    """Up to three ranked trees with few nodes, so that every choice can be tried."""

    def tree() -> DraftTree:
        first, following = (np.array(draw(st.lists(LOGPROB, min_size=n, max_size=n)), np.float32) for n in (2, 4))
        candidates = ScoreTable(np.array([[1, 2], [3, 4]]), first, following.reshape(1, 2, 2))
        return best_first_tree(0, candidates, draw(st.integers(0, 4)), 2)

    return [tree() for _ in range(draw(st.integers(1, 3)))]


rising = st.lists(st.floats(0, 1), min_size=13, max_size=13).map(lambda steps: 1e-3 + np.cumsum(steps))


@settings(max_examples=60, deadline=None)
@given(forests(), rising)
def test_the_best_cut_of_the_frontier_is_the_best_set_of_all(forest: list[DraftTree], seconds: np.ndarray) -> None:
    gains = [np.exp(tree.scores[1:]) for tree in forest]
    total = sum(map(len, gains))
    tokens = float(len(forest))
    _, expected, cost = frontier(gains, np.zeros(len(forest)), seconds[: total + 1], tokens, 1.0)
    best = 0.0
    for choice in itertools.product(*(prefix_closed_sets(tree) for tree in forest)):
        value = tokens + sum(np.exp(tree.scores[list(own)]).sum() for tree, own in zip(forest, choice, strict=True))
        best = max(best, value / seconds[sum(map(len, choice))])
    np.testing.assert_allclose(np.max(expected / cost), best, rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(forests(), st.lists(st.floats(0, 0.5), min_size=3, max_size=3), st.floats(0, 2))
def test_with_tolls_every_cut_is_worth_most_for_its_size(
    forest: list[DraftTree], tolls: list[float], rate: float
) -> None:
    gains = [np.exp(tree.scores[1:]) for tree in forest]
    worth = [own - rate * toll for own, toll in zip(gains, tolls, strict=False)]
    total = sum(map(len, gains))
    owner, expected, seconds = frontier(gains, tolls[: len(forest)], np.zeros(total + 1), 0.0, rate)
    for size in range(total + 1):
        counts = np.bincount(owner[:size], minlength=len(forest))
        every = itertools.product(*(range(len(own) + 1) for own in gains))
        best = max(sum(w[:n].sum() for w, n in zip(worth, each, strict=True)) for each in every if sum(each) == size)
        mine = sum(w[:n].sum() for w, n in zip(worth, counts, strict=True))
        np.testing.assert_allclose(mine, best, atol=1e-9)
        np.testing.assert_allclose(mine, expected[size] - rate * seconds[size], atol=1e-9)


def test_equal_nodes_go_to_the_earlier_request() -> None:
    owner, _, _ = frontier([np.array([0.5, 0.25]), np.array([0.5, 0.25])], [0, 0], np.ones(5), 2, 1.0)
    assert owner.tolist() == [0, 1, 0, 1]


# -- step times -------------------------------------------------------------------------------------------------------

TIMES = st.floats() | st.sampled_from([0.0, -1.0, 1e-9, 1e300, float("nan"), float("inf")])


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 10**6), TIMES), max_size=40))
def test_whatever_the_clock_says_a_curve_is_positive_and_never_falls(records: list[tuple[int, int, float]]) -> None:
    curve = CostCurve()
    for size, reads, seconds in records:
        curve.record(size, reads, seconds)
    values = curve.at(np.arange(4000))
    assert np.isfinite(values).all()
    assert (values > 0).all()
    assert (np.diff(values) >= -1e-9 * values[1:]).all()
    assert np.isfinite(curve.per_read)
    assert curve.per_read >= 0


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(0.1, 5)), min_size=1, max_size=7))
def test_monotone_is_the_least_squares_fit(points: list[tuple[float, float]]) -> None:
    values, weights = (list(column) for column in zip(*points, strict=True))
    fit = monotone(values, weights)
    # The optimum's closed form: max over starts of the min over ends of the weighted mean between.
    for i in range(len(values)):
        best = max(
            min(np.average(values[a : b + 1], weights=weights[a : b + 1]) for b in range(i, len(values)))
            for a in range(i + 1)
        )
        assert fit[i] == pytest.approx(best, abs=1e-6)


def test_stalls_and_first_compilations_do_not_bend_the_curve() -> None:
    curve = CostCurve()
    for round_ in range(12):
        for size in (1, 2, 4, 8, 16, 32):
            stalled = (round_ * 6 + size) % 5 == 0 or round_ == 0
            curve.record(size, 0, (10.0 if stalled else 1.0) * (1e-2 + 1e-3 * size))
    np.testing.assert_allclose(curve.at(np.array([1, 16, 24, 32])), [0.011, 0.026, 0.034, 0.042], rtol=0.02)
    assert curve.at(64) > curve.at(32) * 1.5  # beyond what was measured it rises on


def test_the_price_of_context_is_found_while_contexts_vary() -> None:
    random = np.random.default_rng(0)
    curve = CostCurve()
    for _ in range(600):
        size, prefix = int(random.integers(1, 33)), int(random.integers(50, 4000))
        reads = size * prefix
        curve.record(size, reads, (0.02 + 1e-3 * size + 2e-7 * reads) * float(np.exp(random.normal(0, 0.03))))
    assert curve.per_read == pytest.approx(2e-7, rel=0.25)
    np.testing.assert_allclose(curve.at(np.array([4, 32])), [0.024, 0.052], rtol=0.15)


# -- calibration ------------------------------------------------------------------------------------------------------


def test_calibration_finds_how_often_paths_of_a_score_are_taken() -> None:
    random = np.random.default_rng(0)
    calibration = Calibration()
    for _ in range(1500):
        scores = -random.exponential(1.5, size=12)
        calibration.observe(scores, random.random(12) < np.exp(1.5 * scores))  # an overconfident drafter
    for score in (-0.3, -1.0, -2.0):
        gain = float(calibration.gains(np.array([score]))[0])
        assert gain == pytest.approx(np.exp(1.5 * score), abs=0.03)
    assert calibration.gains(np.array([-30.0, 0.0])).max() <= 1


# -- simulated load ---------------------------------------------------------------------------------------------------

MACHINES = {
    # Weights are read once, then arithmetic counts: a GPU with a dense model.
    "flat": Machine(lambda rows, reads: 0.010 + max(0, rows - 16) * 4e-4 + 1e-9 * reads, lambda n: 1e-3 + 5e-5 * n),
    # Arithmetic counts from the first row: the demo model on two cores.
    "steep": Machine(lambda rows, reads: 0.016 + 1.9e-3 * rows, lambda n: 5e-3 + 1.5e-3 * n),
    # Every row reads other experts until all are read.
    "moe": Machine(
        lambda rows, reads: 0.002 + 0.008 * (1 - (1 - 8 / 128) ** rows) + 2e-5 * rows, lambda n: 6e-4 + 3e-5 * n
    ),
}
STATIC = (0, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("concurrency", [1, 4, 8, 32])
@pytest.mark.parametrize("name", MACHINES)
def test_auto_follows_the_best_static_budget(name: str, concurrency: int) -> None:
    load = SimulatedLoad(MACHINES[name], "auto", concurrency)
    first = load.run(150)
    rate = load.run(1200 // concurrency + 100)
    speeds = [load.static(budget) for budget in STATIC]
    assert first > 0.9 * speeds[0]  # while everything is new
    assert rate > 0.95 * max(speeds)


def test_a_load_that_changes_is_followed() -> None:
    load = SimulatedLoad(MACHINES["flat"], "auto", 1)
    load.run(100)
    for concurrency in (24, 1, 8, 32, 2):
        load.resize(concurrency)
        load.run(20)  # the curve may be new here
        rate = load.run(100)
        assert rate > 0.93 * max(load.static(budget) for budget in STATIC)


def test_a_target_that_never_agrees_costs_little_and_agreement_is_noticed() -> None:
    load = SimulatedLoad(MACHINES["flat"], "auto", 4, truth=0.0)
    load.run(300)
    assert load.run(300) > 0.97 * load.static(0)
    load.truth = 0.9
    load.run(600)
    assert load.run(200) > 0.9 * max(load.static(budget) for budget in STATIC)


def test_long_prefixes_get_fewer_nodes() -> None:
    machine = Machine(lambda rows, reads: 0.01 + 1e-4 * rows + 2e-6 * reads, lambda n: 1e-3, noise=0.0, stalls=0.0)
    load = SimulatedLoad(machine, "auto", 2)
    for step in range(300):  # contexts vary, so that their price can be learned
        load.set_prefix(*[50 + 150 * (step // 10 % 10)] * 2)
        load.run(1)
    load.set_prefix(10, 3000)
    nodes = [0, 0]
    for _ in range(50):
        load.run(1)
        for k, request in enumerate(load.requests):
            nodes[k] += len(load.trees[request.id]) - 1 if request.id in load.trees else 0
    assert nodes[0] > 2 * nodes[1]


def test_the_same_clock_gives_the_same_decisions() -> None:
    runs = [SimulatedLoad(MACHINES["moe"], "auto", 3) for _ in range(2)]
    for load in runs:
        load.run(120)
    assert runs[0].policy.state() == runs[1].policy.state()
    state = runs[0].policy.state()
    assert state.steps == 120 >= state.drafted_steps > 0
    assert 0 < state.accepted < state.nodes
    assert state.step_seconds[0][0] == 3


def test_fixed_budgets_beside_auto_stay_whole_and_are_paid_for() -> None:
    load = SimulatedLoad(MACHINES["flat"], "auto", 2)
    load.run(60)
    fixed, auto = load.requests
    fixed.auto, fixed.budget = False, 30
    load.policy.allot(load.requests)
    assert fixed.budget == 30
    shares = [Share(fixed, 1, 30), Share(auto, 1, 16)]
    trees = {fixed.id: load.pool[20].cut(30), auto.id: load.pool[20].cut(16)}
    load.policy.draft_begins()
    kept = load.policy.cut(shares, trees)
    assert kept[fixed.id] is trees[fixed.id]
    beside = len(kept.get(auto.id, [0])) - 1
    fixed.auto = True
    load.policy.draft_begins()
    alone_ = load.policy.cut([Share(auto, 1, 16)], {auto.id: trees[auto.id]})
    assert beside < len(alone_[auto.id]) - 1  # thirty other rows have used up what was nearly free


def test_prompts_that_take_the_cheap_rows_end_drafting_for_the_step() -> None:
    cheap_then_dear = Machine(lambda rows, reads: 0.010 + max(0, rows - 16) * 4e-3, lambda n: 1e-3)
    load = SimulatedLoad(cheap_then_dear, "auto", 2)
    load.run(60)
    load.policy.allot(load.requests)
    assert all(request.budget > 0 for request in load.requests)
    credit = load.policy.state().probes, load.policy.state().explorations
    for _ in range(20):
        load.policy.allot(load.requests, prefill=1000)
        assert all(request.budget == 0 for request in load.requests)
    assert credit == (load.policy.state().probes, load.policy.state().explorations)
    load.policy.allot(load.requests)
    assert all(request.budget > 0 for request in load.requests)


def test_steps_with_prefill_chunks_do_not_count_as_decoding() -> None:
    load = SimulatedLoad(MACHINES["flat"], "auto", 1)
    load.policy.learn([Spent(load.requests[0], 40, 0, None, np.arange(40))])
    assert load.policy.steps.records == 0


@pytest.mark.parametrize("budget", [-1, "fast", 2.5, None])
def test_other_budgets_are_refused(budget: object) -> None:
    with pytest.raises(ValueError, match="budget"):
        check_budget(budget)


# -- the engine -------------------------------------------------------------------------------------------------------


PROMPTS = [[3], list(range(5, 10)), [int(i * 7 % 90) for i in range(40)], [4, 4, 4]]
PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=0.8, seed=1),
    SamplingParams(max_tokens=17, temperature=1.2, top_p=0.9, seed=2),
    SamplingParams(max_tokens=30, temperature=0.7, min_p=0.05, seed=3),
]


@pytest.fixture(scope="module", params=["dense", "moe"])
def reference(request: pytest.FixtureRequest) -> tuple[Decoder, list[list[int]]]:
    """A model and what it says to each prompt alone, one token a step."""
    model = tiny_model(request.param)
    engine = LLM(Engine(model, config=EngineConfig(budget=0)))
    return model, [engine.generate([p], [q])[0].token_ids for p, q in zip(PROMPTS, PARAMS, strict=True)]


def auto_engine(reference: tuple[Decoder, list[list[int]]], seed: int, config: EngineConfig) -> Engine:
    """An engine under budget "auto" whose drafter knows some of the answers."""
    model, expected = reference
    truth = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, expected, strict=True)}
    return hinted_engine(model, config, truth, seed)


class HostileClock:
    """Time stands still, jumps ahead, runs backwards, or is not a number."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.now = 0.0

    def __call__(self) -> float:
        jumps: Sequence[float] = [0.0, 1e-6, 1e-2, 1.0, -1.0, 1e9, -1e9, float("nan"), float("inf")]
        jump = float(self.random.choice(jumps, p=[0.2, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05]))
        if np.isfinite(jump):
            self.now += jump
            return self.now
        return jump


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 999),
    page=st.sampled_from([1, 8, 64]),
    chunk=st.integers(6, 80),
    pool=st.sampled_from([110, 400]),
    running=st.integers(1, 5),
)
def test_no_clock_changes_a_token(
    reference: tuple[Decoder, list[list[int]]], seed: int, page: int, chunk: int, pool: int, running: int
) -> None:
    config = EngineConfig(
        budget="auto", page_size=page, max_batch_tokens=chunk, num_pages=-(-pool // page), max_running=running
    )
    engine = auto_engine(reference, seed, config)
    engine.budgets = BudgetPolicy(HostileClock(seed))
    completions = LLM(engine).generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in completions] == reference[1]
    engine.check_idle()


def test_auto_drafts_in_a_real_engine_and_requests_may_choose(reference: tuple[Decoder, list[list[int]]]) -> None:
    now = itertools.count()
    engine = auto_engine(reference, 3, EngineConfig(budget="auto"))
    engine.budgets = BudgetPolicy(lambda: next(now) * 1e-3)  # every part of a step takes equally long: drafts pay
    budgets: list[Budget | None] = [None, 0, 5, "auto"]
    for prompt, params, budget in zip(PROMPTS, PARAMS, budgets, strict=True):
        engine.add(prompt, params, budget)
    while engine.has_work:
        engine.step()
    state = engine.budgets.state()
    assert 0 < state.accepted < state.nodes
    assert 0 < state.drafted_steps < state.steps


def test_without_a_head_auto_decodes_plainly(reference: tuple[Decoder, list[list[int]]]) -> None:
    engine = Engine(reference[0], config=EngineConfig(budget="auto"))
    assert LLM(engine).generate(PROMPTS[:1], PARAMS[0])[0].token_ids == reference[1][0]
    assert engine.budgets.state().drafted_steps == 0
