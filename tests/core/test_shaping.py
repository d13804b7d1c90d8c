"""Depth limit, cut-off and temperature: what they take from a tree, and that they take nothing by default."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from jetflow_core.drafter import DraftJob
from jetflow_core.lookup import LookupDrafter
from jetflow_core.shaping import ShapedDrafter, Shaping, shaped
from jetflow_core.tree import DraftTree

TEXT = [1, 2, 3, 1, 2, 4, 5, 2, 3, 1, 2]
JOB = DraftJob(TEXT, [], 30, 12)


def draft(shaping: Shaping) -> DraftTree:
    return shaped(LookupDrafter(), shaping).propose([JOB])[0]


def assert_equal(a: DraftTree, b: DraftTree) -> None:
    for mine, other in zip(vars(a).values(), vars(b).values(), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_nothing_is_done_by_default() -> None:
    drafter = LookupDrafter()
    assert shaped(drafter, Shaping()) is drafter
    assert_equal(ShapedDrafter(drafter, Shaping()).propose([JOB])[0], drafter.propose([JOB])[0])


def test_a_wrapper_is_asked_and_shown_what_the_drafter_is() -> None:
    drafter = LookupDrafter()
    wrapped = shaped(drafter, Shaping(depth=3))
    assert (wrapped.tap_layers, wrapped.block_slots) == (drafter.tap_layers, drafter.block_slots)


@pytest.mark.parametrize("depth", [1, 2, 5, 100])
def test_no_path_is_deeper_than_the_limit(depth: int) -> None:
    tree = draft(Shaping(depth=depth))
    assert tree.depths.max() == min(depth, JOB.max_depth)
    assert_equal(tree, LookupDrafter().propose([replace(JOB, max_depth=min(depth, 12))])[0])


@pytest.mark.parametrize("cutoff", [1e-9, 0.05, 0.2, 1.0])
def test_a_tree_ends_where_the_best_path_left_is_below_the_cutoff(cutoff: float) -> None:
    whole, tree = draft(Shaping()), draft(Shaping(cutoff=cutoff))
    assert_equal(tree, whole.cut(len(tree) - 1))
    assert np.all(np.exp(tree.scores) >= cutoff)
    assert np.all(np.exp(whole.scores[len(tree) :]) < cutoff)
    assert {1e-9: len(tree) == len(whole), 1.0: len(tree) == 1}.get(cutoff, 1 < len(tree) < len(whole))


def test_the_temperature_takes_a_root_of_every_probability_before_the_cut() -> None:
    whole, tree = draft(Shaping()), draft(Shaping(temperature=2.0))
    np.testing.assert_allclose(np.exp(tree.scores), np.exp(whole.scores) ** 0.5)
    assert_equal(replace(tree, scores=whole.scores), whole)
    assert len(draft(Shaping(temperature=2.0, cutoff=0.3))) == len(draft(Shaping(cutoff=0.09)))


def test_scores_stay_finite_under_a_temperature_near_zero() -> None:
    tree = draft(Shaping(temperature=1e-320))
    assert np.isfinite(tree.scores).all()
    assert (np.diff(tree.scores) <= 0).all()
    assert len(tree) == len(draft(Shaping()))
    assert len(draft(Shaping(temperature=1e-320, cutoff=1e-9))) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "draft_depth is 0"),
        ({"cutoff": -0.1}, "draft_cutoff is -0.1"),
        ({"cutoff": 1.5}, "draft_cutoff is 1.5"),
        ({"cutoff": math.nan}, "draft_cutoff is nan"),
        ({"temperature": 0.0}, "draft_temperature is 0.0"),
        ({"temperature": -1.0}, "draft_temperature is -1.0"),
        ({"temperature": math.inf}, "draft_temperature is inf"),
        ({"temperature": math.nan}, "draft_temperature is nan"),
    ],
)
def test_impossible_settings_are_refused_by_name(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shaping(**changes)  # type: ignore[arg-type]
