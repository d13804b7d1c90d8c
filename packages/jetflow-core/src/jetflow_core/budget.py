"""Node budgets that follow the load: how many draft nodes each request verifies in the next step. Knows no tensor.

A step commits one token a request, plus each drafted node with the probability that the target agrees with its whole path. It
costs `t(rows)` seconds for the target's pass and `d(requests)` for the draft. The policy measures t and d from the engine's own
steps, calibrates the draft's probabilities by what was accepted, and takes from one frontier over all requests the set of nodes
with the most expected tokens a second. Where even the best set does not earn the draft back, nothing is drafted.
Times differ from run to run and so do the trees, but never a token: the target decides every one (`tree.accept`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from jetflow_core.step_time import EDGES, CostCurve, Seconds
from jetflow_core.tree import DraftTree, Ints

if TYPE_CHECKING:
    from jetflow_core.request import Request
    from jetflow_core.scheduler import Share

Budget = int | Literal["auto"]
Gains = NDArray[np.float64]

MOST_NODES = 256  # a request and step
MARGIN = 1.02  # drafting has to promise this much more than plain decoding: times are noisy
DOUBT = 0.15
REST = 3  # steps of an unchanged load for which "drafting does not pay" is not asked again: asking costs time too
CURIOSITY = 0.01  # part of the time that may go into trying what looks worse
SAVED = (
    3  # of that at most so many steps' worth is saved up, or a change of load would begin with a long stretch of trials
)
FREE_TRIALS = 12  # steps of sizes never tried, before that part has been earned
TRIED = [edge for edge in EDGES if edge & (edge - 1) == 0]


def check_budget(budget: object) -> None:
    """Raise ValueError for anything but "auto" or a number of nodes."""
    if budget != "auto" and not (isinstance(budget, int) and budget >= 0):
        raise ValueError(f'budget is {budget!r}: use "auto", 0 (no drafting) or more')


class Calibration:
    """How often drafted paths are accepted, against the probability that the drafter gave them; forgets over about 500 steps.

    Bins of half a nat of path probability. A bin's ratio of accepted to predicted is drawn to the overall one until it has seen
    `BIN_STRENGTH` predicted tokens, and that one to 1 until it has seen `STRENGTH`: nodes of a tree fall together, so a few
    unlucky steps say little.
    """

    BINS = 20
    BIN_STRENGTH = 8.0
    STRENGTH = 32.0
    KEEP = 0.998

    def __init__(self) -> None:
        self.centers = (np.arange(self.BINS) + 0.5) / 2
        self._predicted, self._accepted = np.zeros(self.BINS), np.zeros(self.BINS)
        self.ratios = np.ones(self.BINS)

    def observe(self, scores: NDArray[np.float64], accepted: NDArray[np.bool_]) -> None:
        """Learn from the nodes of one step: accumulated log-probabilities [N] and whether the target took each path [N]."""
        bins = np.clip(scores * -2, 0, self.BINS - 1).astype(np.int64)
        self._predicted = self.KEEP * self._predicted + np.bincount(bins, np.exp(scores), self.BINS)
        self._accepted = self.KEEP * self._accepted + np.bincount(bins, accepted, self.BINS)
        overall = (self._accepted.sum() + self.STRENGTH) / (self._predicted.sum() + self.STRENGTH)
        self.ratios = (self._accepted + self.BIN_STRENGTH * overall) / (self._predicted + self.BIN_STRENGTH)

    def gains(self, scores: NDArray[np.float64]) -> Gains:
        """Probabilities [N] that the target takes the paths with these log-probabilities [N]."""
        return np.minimum(np.exp(scores) * np.interp(-scores, self.centers, self.ratios), 1.0)


@dataclass
class History:
    """What a request's drafts were worth lately: expected and accepted nodes, and how many it has been given."""

    expected: float = 0.0
    accepted: float = 0.0
    nodes: float = 4.0

    STRENGTH = 24.0
    KEEP = 0.98

    @property
    def factor(self) -> float:
        """How much easier than the average this request is to draft for."""
        return min(max((self.accepted + self.STRENGTH) / (self.expected + self.STRENGTH), 0.25), 2.0)

    def limit(self, able: int) -> int:
        """Nodes worth ranking for the next step, of `able` requests that draft: room to double, little that is not taken."""
        return min(MOST_NODES, 2 * int(self.nodes) + max(4, min(16, MOST_NODES // able)))


@dataclass(frozen=True)
class Spent:
    """A request's part of a finished step: `rows` through the target after `prefix` cached tokens, and of its draft `tree`, if
    there was one, the nodes of the accepted `path`."""

    request: Request
    rows: int
    prefix: int
    tree: DraftTree | None
    path: Ints


@dataclass(frozen=True)
class BudgetState:
    """The policy at a glance. Counters run since the start and cover fixed budgets too.

    `step_seconds` (rows, seconds) without context, `read_seconds` more for a row and cached token it attends to, `draft_seconds`
    (requests, seconds), `calibration` (draft probability of a path, accepted over predicted).
    """

    step_seconds: list[tuple[float, float]]
    read_seconds: float
    draft_seconds: list[tuple[float, float]]
    calibration: list[tuple[float, float]]
    steps: int
    drafted_steps: int
    probes: int
    explorations: int
    nodes: int
    accepted: int
    last_nodes: int


class BudgetPolicy:
    """Decides a step's draft: `allot` before it is planned, `cut` when there are trees, `learn` when it is done."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` gives seconds."""
        self.clock = clock
        self.steps, self.drafts = CostCurve(), CostCurve()
        self.calibration = Calibration()
        self._histories: WeakKeyDictionary[Request, History] = WeakKeyDictionary()
        self._profile: Gains | None = None  # mean gain of the n-th best node of a request with factor 1
        self._rate = 0.0  # tokens a second that the last draft promised
        self._trials, self._credit = FREE_TRIALS, 0.0
        self._started = self._draft_started = self._draft_seconds = 0.0
        self._drafted = self._profiled = 0
        self._probing = False
        self._resting, self._load = 0, (0, 0, False)
        self._counts = dict.fromkeys(("steps", "drafted_steps", "probes", "explorations", "nodes", "accepted"), 0)
        self._last_nodes = 0

    def state(self) -> BudgetState:
        """For a monitor."""
        calibration = zip(np.exp(-self.calibration.centers).tolist(), self.calibration.ratios.tolist(), strict=True)
        return BudgetState(
            self.steps.table(),
            self.steps.per_read,
            self.drafts.table(),
            list(calibration),
            **self._counts,
            last_nodes=self._last_nodes,
        )

    # -- before a step ------------------------------------------------------------------------------------------------

    def allot(self, running: Sequence[Request], prefill: int = 0) -> None:
        """A step begins: set `budget` of the requests that follow the load to the nodes that are worth ranking now, or to 0.

        `prefill` prompt tokens are going to share the step, and take the cheap rows of its pass.
        """
        self._started = self.clock()
        self._draft_seconds, self._drafted = 0.0, 0
        self._probing = False
        decoding = [r for r in running if r.is_decoding]
        able = [r for r in decoding if r.auto and r.remaining > 1]
        load = len(decoding), len(able), prefill > 0
        drafting = False
        if self._resting and load == self._load:
            self._resting -= 1
        elif able:
            drafting = self._pays(decoding, able, prefill)
            self._resting = 0 if drafting else REST
        self._load = load
        for request in running:
            if request.auto:
                request.budget = self._history(request).limit(len(able)) if drafting else 0

    def _pays(self, decoding: Sequence[Request], able: Sequence[Request], prefill: int) -> bool:
        """Whether the requests `able` to draft, of those `decoding`, should; now and then yes although it does not pay."""
        rows = len(decoding)
        plain = float(self.steps.at(rows)) + self.steps.per_read * sum(r.num_cached for r in decoding)
        _, tokens, seconds = self._forecast(prefill, plain, decoding, able)
        best = int(np.argmax(tokens / seconds))
        rate = float(tokens[best] / seconds[best])
        pays = rate > MARGIN * rows / plain
        if prefill:  # such a step is not timed, so trying something in it teaches nothing
            return pays
        if not self.steps.known(rows) and self._explores(plain - rows / rate, plain):
            return False
        if self._profile is None or pays:
            return True
        # What a probe loses is what the model says, but the model is in doubt: at least a part of what it costs.
        probe = min(max(best, len(able)), len(tokens) - 1)
        loss = max(float(seconds[probe] - tokens[probe] * plain / rows), DOUBT * float(seconds[probe] - plain))
        self._probing = self._affords(loss)
        self._counts["probes"] += self._probing
        return self._probing

    def _forecast(
        self, prefill: int, plain: float, decoding: Sequence[Request], able: Sequence[Request]
    ) -> tuple[Ints, Gains, Seconds]:
        """The frontier that a draft would give if every tree were an average one of its request."""
        histories = [self._history(request) for request in able]
        profile = np.ones(1) if self._profile is None else self._profile
        gains = [np.minimum(history.factor * profile[: history.limit(len(able))], 1.0) for history in histories]
        curve = self.steps.at(prefill + len(decoding) + np.arange(sum(map(len, gains)) + 1))
        seconds = curve - curve[0] + plain + float(self.drafts.at(len(able)))
        return frontier(gains, self._tolls(able), seconds, len(decoding), self._rate)

    # -- the draft ----------------------------------------------------------------------------------------------------

    def draft_begins(self) -> None:
        """The drafter is about to run."""
        self._draft_started = self.clock()

    def cut(self, shares: Sequence[Share], trees: Mapping[str, DraftTree]) -> dict[str, DraftTree]:
        """Of the drafted `trees` by request id, what to verify in the step of all `shares`; trees without a node are left out.

        Trees of fixed budgets stay whole; their rows and those of prefills only move the place on the step-time curve.
        """
        drafted = [share.request for share in shares if share.request.auto and share.request.id in trees]
        kept = dict(trees)
        if drafted:
            own = [trees[request.id] for request in drafted]
            base = sum(share.known for share in shares) + sum(len(tree) - 1 for tree in trees.values())
            base -= sum(len(tree) - 1 for tree in own)
            decoding = [share.request for share in shares if share.request.is_decoding]
            timed = sum(share.known for share in shares) == len(decoding)
            counts = self._choose(drafted, own, base, decoding, timed)
            kept |= {r.id: tree.cut(n) for r, tree, n in zip(drafted, own, counts, strict=True)}
        self._draft_seconds, self._drafted = self.clock() - self._draft_started, len(trees)
        return {request_id: tree for request_id, tree in kept.items() if len(tree) > 1}

    def _choose(
        self,
        drafted: Sequence[Request],
        trees: Sequence[DraftTree],
        base: int,
        decoding: Sequence[Request],
        timed: bool,
    ) -> list[int]:
        """Nodes of each tree to verify beside `base` other rows, those of `decoding` requests among them.

        `timed`: the step will be timed, so an unknown size can be tried.
        """
        gains = self._gains(drafted, trees)
        # Prefill work has to be done whenever it is done, so a step is charged for decoding alone, and for what nodes add.
        curve = self.steps.at(base + np.arange(sum(map(len, gains)) + 1))
        fixed = float(self.steps.at(len(decoding))) + self.steps.per_read * sum(r.num_cached for r in decoding)
        shared = curve - curve[0] + fixed + float(self.drafts.at(len(drafted)))
        owner, expected, seconds = frontier(gains, self._tolls(drafted), shared, len(decoding), self._rate)
        best = int(np.argmax(expected / seconds))
        self._rate = float(expected[best] / seconds[best])
        if self._probing:
            best = min(max(best, len(drafted)), len(owner))
        if timed:
            best = self._size_to_try(base, best, expected, seconds)
        counts = np.bincount(owner[:best], minlength=len(drafted)).tolist()
        self._remember(drafted, gains, counts)
        return counts

    def _tolls(self, requests: Sequence[Request]) -> Seconds:
        """Seconds a node of each request costs for reading its prefix."""
        return self.steps.per_read * np.array([request.num_cached for request in requests], dtype=np.float64)

    def _gains(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> list[Gains]:
        """Calibrated gain of every node, falling within a tree as its scores do."""
        scores = np.concatenate([tree.scores[1:] for tree in trees])
        bounds = np.cumsum([len(tree) - 1 for tree in trees])[:-1]
        parts = np.split(self.calibration.gains(scores), bounds)
        return [
            np.minimum.accumulate(np.minimum(self._history(request).factor * part, 1.0))
            for request, part in zip(requests, parts, strict=True)
        ]

    def _size_to_try(self, base: int, best: int, expected: Gains, seconds: Seconds) -> int:
        """`best`, or the smallest size whose time is not known, when it can be afforded."""
        for rows in TRIED:
            size = rows - base
            if 0 < size < len(expected) and not self.steps.known(rows):
                loss = float(seconds[size] - expected[size] / self._rate)
                return size if self._explores(loss, float(seconds[best])) else best
        return best

    def _remember(self, requests: Sequence[Request], gains: Sequence[Gains], counts: Sequence[int]) -> None:
        profile = np.zeros(MOST_NODES)
        for request, own, count in zip(requests, gains, counts, strict=True):
            history = self._history(request)
            profile[: len(own)] += own / (history.factor * len(requests))
            history.nodes = max(count, 0.9 * history.nodes)
        # A mean over many steps: one poor stretch must not end drafting, since what is not drafted is not seen to recover.
        self._profiled += 1
        weight = max(1 / self._profiled, 0.02)
        self._profile = profile if self._profile is None else (1 - weight) * self._profile + weight * profile

    # -- after a step -------------------------------------------------------------------------------------------------

    def learn(self, spent: Sequence[Spent]) -> None:
        """A step is done: take its times, unless prefill chunks blur them, and what the target said of its trees."""
        seconds = self.clock() - self._started
        rows = sum(part.rows for part in spent)
        drafts = [(part, part.tree) for part in spent if part.tree is not None]
        if all(part.tree is not None or part.rows == 1 for part in spent):
            reads = sum(part.rows * part.prefix for part in spent)
            self.steps.record(rows, reads, seconds - self._draft_seconds)
        self.drafts.record(self._drafted, 0, self._draft_seconds)
        if 0 < seconds < float("inf") and any(part.request.auto for part in spent):
            self._credit = min(self._credit + CURIOSITY * seconds, SAVED * seconds)
        self._last_nodes = sum(len(tree) - 1 for _, tree in drafts)
        self._counts["steps"] += 1
        self._counts["drafted_steps"] += bool(drafts)
        self._counts["nodes"] += self._last_nodes
        if drafts:
            self._learn_acceptance(drafts)

    def _learn_acceptance(self, drafts: Sequence[tuple[Spent, DraftTree]]) -> None:
        scores = np.concatenate([tree.scores[1:] for _, tree in drafts])
        taken: list[NDArray[np.bool_]] = []
        expected = np.split(self.calibration.gains(scores), np.cumsum([len(tree) - 1 for _, tree in drafts])[:-1])
        for (part, tree), own in zip(drafts, expected, strict=True):
            accepted = np.zeros(len(tree), dtype=bool)
            accepted[part.path] = True
            taken.append(accepted[1:])
            history = self._history(part.request)
            history.expected = history.KEEP * history.expected + float(own.sum())
            history.accepted = history.KEEP * history.accepted + len(part.path) - 1
            self._counts["accepted"] += len(part.path) - 1
        self.calibration.observe(scores, np.concatenate(taken))

    # -- curiosity ----------------------------------------------------------------------------------------------------

    def _history(self, request: Request) -> History:
        return self._histories.setdefault(request, History())

    def _explores(self, loss: float, step: float) -> bool:
        """Whether to run a step of unknown cost, believed to lose `loss` seconds against one of `step` seconds."""
        if self._trials > 0 and loss < step / 2:
            self._trials -= 1
        elif not self._affords(loss):
            return False
        self._counts["explorations"] += 1
        return True

    def _affords(self, loss: float) -> bool:
        """Whether the time set aside for trying covers `loss` seconds; it is spent then."""
        if self._credit <= loss:
            return False
        self._credit -= max(loss, 0.0)
        return True


def frontier(
    gains: Sequence[Gains], tolls: Sequence[float] | Seconds, shared: Seconds, tokens: float, rate: float
) -> tuple[Ints, Gains, Seconds]:
    """Nodes of all requests in the order in which they are worth taking.

    `gains` of each request's nodes must not rise, so that a request's first nodes are its best tree. A step with n nodes in all
    takes `shared` [N + 1] seconds and the toll of each node's request (its prefix is read once more). A node is worth its gain
    less its toll at `rate` tokens a second; ties go to the earlier request. Returns each node's request [N], and for
    n = 0 … N nodes the expected tokens (`tokens` without any) and the seconds. Without tolls no set of n nodes has more
    expected tokens than the first n, so the best n gives the best set of all.
    """
    owner = np.repeat(np.arange(len(gains)), [len(own) for own in gains])
    every, toll = np.concatenate(gains), np.asarray(tolls)[owner]
    order = np.argsort(rate * toll - every, kind="stable")
    expected = tokens + np.concatenate([[0.0], np.cumsum(every[order])])
    seconds = shared + np.concatenate([[0.0], np.cumsum(toll[order])])
    return owner[order], expected, seconds
