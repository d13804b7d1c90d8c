"""Candidates of one request as plain arrays, and the trees that grow over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jetflow_core.tree import Candidates, DraftTree, Floats, Ints, grown_trees


@dataclass(frozen=True)
class ScoreTable:
    """`tokens` [D, K]; `first` [K] scores depth 1, `following` [D − 1, P, K] the others, as in `Candidates.of_tables`."""

    tokens: Ints
    first: Floats
    following: Floats


def best_first_tree(anchor: int, table: ScoreTable, budget: int, max_depth: int) -> DraftTree:
    """`best_first_trees` of a single request."""
    return best_first_trees([anchor], [table], [budget], [max_depth])[0]


def best_first_trees(
    anchors: Sequence[int], tables: Sequence[ScoreTable], budgets: Sequence[int], max_depths: Sequence[int]
) -> list[DraftTree]:
    """`grown_trees` over tables of the same shapes."""
    columns = zip(*((each.tokens, each.first, each.following) for each in tables), strict=True)
    return grown_trees(anchors, Candidates.of_tables(*map(np.stack, columns)), budgets, max_depths)
