"""The lookup drafter against a plain search, and what its trees must be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetflow_core import lookup
from jetflow_core.drafter import DraftJob
from jetflow_core.lookup import GROWTH, HALF_LIFE, LONGEST, SUREST, UNSEEN, LookupDrafter
from jetflow_core.tree import DraftTree
from jetflow_triton.exact_attention import LAG

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def draft(tokens: Sequence[int], budget: int = 1000, max_depth: int = 1000) -> DraftTree:
    return LookupDrafter().propose([DraftJob(tokens, [], budget, max_depth)])[0]


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Score of every path of a tree."""
    known: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        known.append((*known[tree.parents[node]], int(tree.tokens[node])))
    return {path: float(tree.scores[node]) for node, path in enumerate(known) if node}


def searched(tokens: Sequence[int], depth: int) -> dict[tuple[int, ...], float]:
    """The same by definition: every earlier place, its match token by token, and the weights summed path by path."""
    last = len(tokens) - 1
    found: list[tuple[list[int], float]] = []
    for end in range(last):
        length = 0
        while length < LONGEST and length <= end and tokens[end - length] == tokens[last - length]:
            length += 1
        if length:
            text = list(tokens)
            for _ in range(depth):  # a copy that reaches the end goes on with what it has copied
                text.append(text[end + len(text) - last])
            found.append((text[last + 1 :], GROWTH ** (length - 1) * 0.5 ** ((last - end) / HALF_LIFE)))
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    for size in range(1, depth + 1):
        for path in {tuple(text[:size]) for text, _ in found}:
            above = sum(weight for text, weight in found if tuple(text[: size - 1]) == path[:-1])
            own = sum(weight for text, weight in found if tuple(text[:size]) == path)
            seen = SUREST * own / (above + UNSEEN / GROWTH ** (size - 1))
            scores[path] = scores[path[:-1]] + math.log(seen)
    del scores[()]
    return scores


@given(tokens=TEXTS, depth=st.integers(1, 6))
def test_the_whole_trie_is_what_a_plain_search_finds(tokens: list[int], depth: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "PLACES", 1000)
        found = paths(draft(tokens, budget=1000, max_depth=depth))
    expected = searched(tokens, depth)
    assert found.keys() == expected.keys()
    for path, score in found.items():
        assert score == pytest.approx(expected[path], abs=1e-9)


@settings(deadline=None)
@given(tokens=TEXTS, budget=st.integers(0, 40), max_depth=st.integers(0, 40))
def test_trees_are_ranked_and_a_smaller_budget_is_a_cut(tokens: list[int], budget: int, max_depth: int) -> None:
    tree = draft(tokens, budget, max_depth)
    assert len(tree) <= budget + 1
    assert tree.tokens[0] == tokens[-1]
    assert tree.depths.max() <= max_depth
    assert np.all(np.diff(tree.scores) <= 0)
    assert np.all(tree.scores[1:] < tree.scores[tree.parents[1:]])
    whole = draft(tokens, 40, max_depth).cut(budget)
    for mine, cut in zip(vars(tree).values(), vars(whole).values(), strict=True):
        np.testing.assert_array_equal(mine, cut)


def test_longer_and_later_matches_win() -> None:
    tree = draft([1, 2, 3, 4, 9, 2, 3, 5, 9, 3, 6, 9, 1, 2, 3])
    first = [int(token) for token, depth in zip(tree.tokens, tree.depths, strict=True) if depth == 1]
    assert first == [4, 5, 6]
    later = draft([1, 7, 1, 8, 1, 9, 1])
    assert [int(token) for token, depth in zip(later.tokens, later.depths, strict=True) if depth == 1] == [9, 8, 7]


def test_frequent_continuations_win() -> None:
    tree = draft([1, 7, 0, 1, 7, 2, 1, 8, 3, 1])
    assert [int(token) for token, depth in zip(tree.tokens, tree.depths, strict=True) if depth == 1] == [7, 8]


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    tree = draft([5, 1, 2, 3, 1, 2, 3, 1, 2, 3], budget=20)
    assert tree.tokens[:13].tolist() == [3, *[1, 2, 3] * 4]
    assert tree.parents[:13].tolist() == list(range(-1, 12))


@pytest.mark.parametrize("tokens", [[4], [4, 5], [1, 2, 3, 1, 2, 9]])
def test_an_unknown_last_token_drafts_nothing(tokens: list[int]) -> None:
    tree = draft(tokens)
    assert tree.tokens.tolist() == [tokens[-1]]


def test_requests_do_not_see_each_other() -> None:
    jobs = [DraftJob([1, 2, 1], [], 4, 9), DraftJob([3], [], 4, 9), DraftJob([1, 5, 1, 5, 1], [], 2, 1)]
    together = LookupDrafter().propose(jobs)
    for job, tree in zip(jobs, together, strict=True):
        assert paths(tree) == paths(LookupDrafter().propose([job])[0])
    assert len(together[2]) == 2


def test_only_the_last_tokens_are_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "WINDOW", 6)
    assert paths(draft([1, 2, 3, 4, 5, 6, 1])) == {}
    assert paths(draft([1, 2, 3, 4, 5, 1], budget=1)).keys() == {(2,)}


def test_it_drafts_no_deeper_than_exact_mode_takes() -> None:
    assert draft([1] * 50).depths.max() == lookup.DEPTH <= LAG
