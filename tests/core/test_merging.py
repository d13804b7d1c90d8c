"""Joining ranked trees: what the union of several drafters' paths must be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jetflow_core.drafter import Committed, DraftJob
from jetflow_core.merging import MergedDrafter, merge
from jetflow_core.shaping import Shaping
from jetflow_core.tree import DraftTree

ANCHOR = 9


@st.composite
def ranked_trees(draw: st.DrawFn) -> DraftTree:
    """A tree in order of score; few tokens and few distinct scores, so that paths coincide and ties are common."""
    paths: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(draw(st.integers(0, 12))):
        above = draw(st.sampled_from(sorted(paths)))
        path = (*above, draw(st.integers(0, 2)))
        paths.setdefault(path, paths[above] - draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])))
    order = sorted(paths, key=lambda path: (-paths[path], len(path), path))
    place = {path: rank for rank, path in enumerate(order)}
    return DraftTree(
        np.array([path[-1] if path else ANCHOR for path in order]),
        np.array([place[path[:-1]] if path else -1 for path in order]),
        np.array([len(path) for path in order]),
        np.array([paths[path] for path in order]),
    )


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    known: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        known.append((*known[tree.parents[node]], int(tree.tokens[node])))
    return dict(zip(known, tree.scores.tolist(), strict=True))


several = st.lists(ranked_trees(), min_size=1, max_size=3)


@given(several)
def test_without_a_limit_it_is_the_union_with_the_best_scores(trees: list[DraftTree]) -> None:
    expected: dict[tuple[int, ...], float] = {}
    for tree in trees:
        for path, score in paths(tree).items():
            expected[path] = max(score, expected.get(path, score))
    assert paths(merge(trees, 1000)) == expected


@given(several, st.integers(0, 20))
def test_it_is_ranked_and_a_smaller_budget_is_a_cut(trees: list[DraftTree], budget: int) -> None:
    merged, whole = merge(trees, budget), merge(trees, 1000)
    assert len(merged) == min(budget + 1, len(whole))
    assert np.all(np.diff(merged.scores) <= 0)
    assert np.all(merged.scores[1:] <= merged.scores[merged.parents[1:]])
    for mine, cut in zip(vars(merged).values(), vars(whole.cut(budget)).values(), strict=True):
        np.testing.assert_array_equal(mine, cut)


@given(several, st.integers(0, 20))
def test_the_best_of_every_tree_is_in_it(trees: list[DraftTree], budget: int) -> None:
    merged = paths(merge(trees, budget))
    least = min(merged.values())
    expected = sum(np.exp(score) for score in merged.values())
    for tree in trees:
        assert all(path in merged for path, score in paths(tree).items() if score > least or len(merged) <= budget)
        assert expected >= sum(np.exp(score) for score in paths(tree.cut(budget)).values()) - 1e-9


@given(several, st.integers(0, 20), st.sampled_from([0.2, 0.5, 0.75]))
def test_cutting_off_the_parts_is_cutting_off_the_whole(trees: list[DraftTree], budget: int, cutoff: float) -> None:
    cut = Shaping(cutoff=cutoff)
    assert paths(merge([cut.apply(tree) for tree in trees], budget)) == paths(cut.apply(merge(trees, budget)))


@given(ranked_trees())
def test_a_tree_merged_with_itself_or_nothing_is_itself(tree: DraftTree) -> None:
    for others in ([], [tree], [DraftTree.root(ANCHOR)]):
        merged = merge([tree, *others], 1000)
        for mine, own in zip(vars(merged).values(), vars(tree).values(), strict=True):
            np.testing.assert_array_equal(mine, own)


def test_trees_of_different_anchors_are_refused() -> None:
    with pytest.raises(ValueError, match="same anchor"):
        merge([DraftTree.root(1), DraftTree.root(2)], 4)


class Recorder:
    """A drafter with one answer, which keeps what it is shown and asked."""

    def __init__(self, tap_layers: tuple[int, ...], block_slots: int, tree: DraftTree) -> None:
        self.tap_layers, self.block_slots, self.tree = tap_layers, block_slots, tree
        self.seen: list[Committed] = []
        self.asked: list[DraftJob] = []

    def observe(self, rows: Committed) -> None:
        self.seen.append(rows)

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        self.asked += jobs
        return [self.tree for _ in jobs]


def chain(*tokens: int) -> DraftTree:
    order = np.arange(len(tokens) + 1)
    return DraftTree(np.array([ANCHOR, *tokens]), order - 1, order, -0.5 * order)


def test_every_part_sees_its_own_taps_and_all_are_asked() -> None:
    parts = [Recorder((1, 5), 6, chain(1, 2)), Recorder((), 0, chain(1, 3)), Recorder((3,), 2, chain(4))]
    drafter = MergedDrafter(parts)
    assert (drafter.tap_layers, drafter.block_slots) == ((1, 3, 5), 6)
    taps = torch.tensor([[1, 1, 3, 3, 5, 5], [10, 10, 30, 30, 50, 50]])
    row = torch.arange(2)
    drafter.observe(Committed(taps, row, row, row, row - 1))
    assert [part.seen[0].taps.tolist() for part in parts] == [
        [[1, 1, 5, 5], [10, 10, 50, 50]],
        [[], []],
        [[3, 3], [30, 30]],
    ]
    job = DraftJob([7, ANCHOR], [0], 3, 5)
    tree = drafter.propose([job])[0]
    assert paths(tree).keys() == {(), (1,), (4,), (1, 2)}
    assert all(part.asked == [job] for part in parts)


def test_parts_without_taps_are_shown_rows_all_the_same() -> None:
    part = Recorder((), 0, chain(1))
    row = torch.arange(2)
    MergedDrafter([part, part]).observe(Committed(torch.empty(2, 0), row, row, row, row - 1))
    assert part.seen[0].taps.shape == (2, 0)
    assert len(part.seen) == 2
