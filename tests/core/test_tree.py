"""Trees: structure, best-first optimality, the mask as the set of ancestors, and the acceptance walk."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetflow_core.tree import DraftTree, accept, ancestor_mask, pack_bits
from score_tables import ScoreTable, best_first_tree, best_first_trees


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 70) -> DraftTree:
    size = draw(st.integers(1, max_nodes))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)]
    depths = [0] * size
    for i in range(1, size):
        depths[i] = depths[parents[i]] + 1
    seen: dict[int, int] = {}
    tokens = [7]
    for parent in parents[1:]:  # the n-th child of a node gets token n: siblings differ
        tokens.append(seen.get(parent, 0))
        seen[parent] = tokens[-1] + 1
    return DraftTree(np.array(tokens), np.array(parents), np.array(depths), np.zeros(size))


def ancestors(tree: DraftTree, node: int) -> set[int]:
    found = {node}
    while tree.parents[node] >= 0:
        node = int(tree.parents[node])
        found.add(node)
    return found


@given(trees())
def test_mask_row_is_the_node_and_its_ancestors(tree: DraftTree) -> None:
    words = (len(tree) + 31) // 32 + 1
    mask = ancestor_mask(tree, words)
    assert mask.shape == (len(tree), words)
    assert mask.dtype == np.int32
    for node in range(len(tree)):
        bits = {w * 32 + b for w in range(words) for b in range(32) if int(mask[node, w]) >> b & 1}
        assert bits == ancestors(tree, node)


def test_packing_uses_the_sign_bit() -> None:
    bits = np.zeros((1, 32), dtype=bool)
    bits[0, 31] = True
    assert pack_bits(bits).tolist() == [[-(2**31)]]


@st.composite
def candidates(draw: st.DrawFn) -> ScoreTable:
    depths, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shared = draw(st.booleans())
    rows = 1 if shared else width
    value = st.floats(-5, 0, width=32) | st.just(float("-inf"))
    first = np.array(draw(st.lists(value, min_size=width, max_size=width)), dtype=np.float32)
    count = (depths - 1) * rows * width
    flat = np.array(draw(st.lists(value, min_size=count, max_size=count)), dtype=np.float32)
    tokens = np.arange(depths * width).reshape(depths, width) % 5  # siblings differ, depths repeat tokens
    return ScoreTable(tokens, first, flat.reshape(depths - 1, rows, width))


def every_path(c: ScoreTable, max_depth: int) -> dict[tuple[int, ...], float]:
    depths, width = c.tokens.shape
    paths: dict[tuple[int, ...], float] = {}
    for depth in range(1, min(depths, max_depth) + 1):
        for path in itertools.product(range(width), repeat=depth):
            score = float(c.first[path[0]])
            for level, (parent, child) in enumerate(itertools.pairwise(path)):
                row = 0 if c.following.shape[1] == 1 else parent
                score += float(c.following[level, row, child])
            if np.isfinite(score):
                paths[path] = score
    return paths


@settings(max_examples=200)
@given(candidates(), st.integers(0, 20), st.integers(0, 4))
def test_best_first_takes_the_most_probable_paths(c: ScoreTable, budget: int, max_depth: int) -> None:
    tree = best_first_tree(99, c, budget, max_depth)
    best = sorted(every_path(c, max_depth).values(), reverse=True)[:budget]
    assert len(tree) == 1 + len(best)
    np.testing.assert_allclose(sorted(tree.scores[1:], reverse=True), best, rtol=1e-6, atol=1e-6)
    assert tree.depths.max() <= max_depth
    assert tree.tokens[0] == 99


@given(candidates(), st.integers(1, 20))
def test_a_larger_budget_extends_the_same_tree(c: ScoreTable, budget: int) -> None:
    small, large = best_first_tree(0, c, budget, 3), best_first_tree(0, c, budget + 5, 3)
    size = len(small)
    assert large.tokens[:size].tolist() == small.tokens.tolist()
    assert large.parents[:size].tolist() == small.parents.tolist()


@given(st.data(), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), min_size=1, max_size=5))
def test_trees_do_not_depend_on_the_requests_beside_them(data: st.DataObject, jobs: list[tuple[int, int]]) -> None:
    first = data.draw(candidates())
    others = [first]
    while len(others) < len(jobs):  # the same shapes, other scores
        rolled = np.roll(others[-1].following, 1, axis=-1)
        others.append(ScoreTable(first.tokens, np.roll(others[-1].first, 1), rolled))
    budgets, depths = [budget for budget, _ in jobs], [depth for _, depth in jobs]
    together = best_first_trees(range(len(jobs)), others, budgets, depths)
    for anchor, (tree, candidate, (budget, depth)) in enumerate(zip(together, others, jobs, strict=True)):
        alone = best_first_tree(anchor, candidate, budget, depth)
        for column in ("tokens", "parents", "depths", "scores"):
            np.testing.assert_array_equal(getattr(tree, column), getattr(alone, column))


def test_a_child_never_comes_before_its_parent_whatever_rounding_does() -> None:
    above_zero = np.full((1, 2, 2), 1e-6, dtype=np.float32)
    candidate = ScoreTable(np.array([[1, 2], [3, 4]]), np.array([-1, -1], dtype=np.float32), above_zero)
    assert len(best_first_tree(0, candidate, 6, 2)) == 7


@given(trees(), st.integers(0, 80))
def test_a_cut_keeps_the_first_nodes(tree: DraftTree, nodes: int) -> None:
    cut = tree.cut(nodes)
    assert len(cut) == min(len(tree), nodes + 1)
    assert cut.tokens.tolist() == tree.tokens[: nodes + 1].tolist()
    assert cut.parents.tolist() == tree.parents[: nodes + 1].tolist()


@given(trees(), st.lists(st.integers(0, 5), max_size=8))
def test_a_path_goes_along_a_continuation_as_far_as_it_was_drafted(tree: DraftTree, tokens: list[int]) -> None:
    path = tree.along(iter(tokens))
    assert tree.tokens[path].tolist() == tokens[: len(path)]
    assert tree.parents[path].tolist() == [0, *path][: len(path)]
    if len(path) < len(tokens):
        assert tree.child(path[-1] if path else 0, tokens[len(path)]) is None


@given(st.lists(trees(20), max_size=3), st.data())
def test_acceptance_equals_step_by_step_decoding(forest: list[DraftTree], data: st.DataObject) -> None:
    sizes = [len(tree) for tree in forest]
    choices = [data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)) for size in sizes]
    asked: list[tuple[int, int]] = []

    def choose(active: Sequence[int], nodes: Sequence[int]) -> list[int]:
        asked.extend(zip(active, nodes, strict=True))
        return [choices[i][node] for i, node in zip(active, nodes, strict=True)]

    outcome = accept(forest, choose)
    assert len(outcome) == len(forest)
    for i, (tree, (path, tokens)) in enumerate(zip(forest, outcome, strict=True)):
        node, expected = 0, []
        while True:  # one token at a time: choose, then step to that child if it was drafted
            expected.append(choices[i][node])
            children = [n for n in range(len(tree)) if tree.parents[n] == node and tree.tokens[n] == expected[-1]]
            if not children:
                break
            node = children[0]
        assert tokens == expected
        assert path[0] == 0
        assert [int(tree.tokens[n]) for n in path[1:]] == tokens[:-1]
        assert all(tree.parents[b] == a for a, b in itertools.pairwise(path))
        assert [n for k, n in asked if k == i] == path  # the target is asked on the path and nowhere else


@pytest.mark.parametrize(
    ("tokens", "parents", "depths", "message"),
    [
        ([1], [0], [0], "anchor"),
        ([1, 2], [-1, 1], [0, 1], "before their children"),
        ([1, 2], [-1, -1], [0, 1], "before their children"),
        ([1, 2], [-1, 0], [0, 2], "one deeper"),
        ([1, 2, 2], [-1, 0, 0], [0, 1, 1], "siblings"),
        ([], [], [], "anchor"),
    ],
)
def test_malformed_trees_are_refused(tokens: list[int], parents: list[int], depths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTree(*(np.array(column, dtype=np.int64) for column in (tokens, parents, depths)), np.zeros(len(tokens)))
