"""What is done to the trees of any drafter: a depth limit, a score cut-off that adapts their length, calibrated scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jetflow_core.drafter import Committed, Drafter, DraftJob
from jetflow_core.tree import DraftTree

LEAST = -1e6  # a log-probability is no less: a tiny temperature would make some that no float holds


@dataclass(frozen=True)
class Shaping:
    """What is done to a drafter's trees. The defaults change nothing.

    `depth`: no path is longer; None leaves it to the drafter. `temperature`: every draft log-probability is divided by it, so a
    path of probability p counts as p^(1/temperature): above 1 for a drafter that is too hesitant, below 1 for one too sure.
    `cutoff`: a tree ends where the best remaining path is less probable than this, and may then be smaller than the budget.

    Raises ValueError for a depth below 1, a temperature that is not a positive number, or a cut-off outside 0 … 1.
    """

    depth: int | None = None
    temperature: float = 1.0
    cutoff: float = 0.0

    def __post_init__(self) -> None:
        if self.depth is not None and self.depth < 1:
            raise ValueError(f"draft_depth is {self.depth}: use 1 or more, or leave it out")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"draft_temperature is {self.temperature}: use a finite number above 0; 1 changes nothing")
        if not 0 <= self.cutoff <= 1:
            raise ValueError(f"draft_cutoff is {self.cutoff}: use a probability, 0 … 1; 0 cuts nothing off")

    def limit(self, job: DraftJob) -> DraftJob:
        """The job with no more than the allowed depth."""
        return job if self.depth is None else replace(job, max_depth=min(job.max_depth, self.depth))

    def apply(self, tree: DraftTree) -> DraftTree:
        """A ranked tree with calibrated scores, up to the cut-off."""
        if self.temperature != 1:
            scores = np.maximum(tree.scores, LEAST * self.temperature) / self.temperature
            tree = replace(tree, scores=scores)
        if self.cutoff > 0:  # scores fall in order of rank
            tree = tree.cut(int(np.count_nonzero(tree.scores[1:] >= math.log(self.cutoff))))
        return tree


class ShapedDrafter:
    """A drafter whose trees are shaped."""

    def __init__(self, drafter: Drafter, shaping: Shaping) -> None:
        self.drafter, self.shaping = drafter, shaping
        self.tap_layers, self.block_slots = drafter.tap_layers, drafter.block_slots

    def observe(self, rows: Committed) -> None:
        """Pass the rows on."""
        self.drafter.observe(rows)

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        """The drafter's trees within the depth limit, calibrated and cut."""
        return [self.shaping.apply(tree) for tree in self.drafter.propose([self.shaping.limit(job) for job in jobs])]


def shaped(drafter: Drafter, shaping: Shaping) -> Drafter:
    """`drafter` with its trees shaped; itself where nothing is asked for."""
    return drafter if shaping == Shaping() else ShapedDrafter(drafter, shaping)
