"""What a head's scores are worth: the temperature at which path probabilities say how often paths are accepted.

A tree orders its nodes by path probability, an order that no temperature changes; but how many of them are worth verifying
(`--budget auto`, a cut-off) is read off the probabilities themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jetflow_core.heads import Head
from jetflow_core.tree import DraftTree
from jetflow_train.blocks import BlockRules
from jetflow_train.features import RowFeatures
from jetflow_train.simulate import drafted_trees

Scores = NDArray[np.float64]
Outcomes = NDArray[np.bool_]
COLDEST, HOTTEST = 0.25, 4.0
LEAST_NODES = 200  # outcomes below which nothing is fitted
STEPS = 40  # of bisection


@dataclass(frozen=True)
class Calibration:
    """A fitted temperature, the nodes it was fitted on, and their mean log-likelihood at temperature 1 and at the fitted one."""

    temperature: float
    nodes: int
    before: float
    after: float


def calibrate(
    head: Head, items: Sequence[RowFeatures], rules: BlockRules, budget: int, max_tokens: int
) -> Calibration | None:
    """Fit the temperature of `head` on the nodes that greedy decoding of `items` drafts at `budget`.

    None where that would not be knowledge: few nodes, or a temperature fitted on half of the items that makes the other half no
    likelier.
    """
    parts = [node_outcomes(head, each, rules, budget, max_tokens) for each in (items[::2], items[1::2])]
    scores, accepted = (np.concatenate(column) for column in zip(*parts, strict=True))
    if len(scores) < LEAST_NODES or not 0 < accepted.sum() < len(accepted) or not all(len(part[0]) for part in parts):
        return None
    for fitted_on, held_out in (parts, parts[::-1]):
        if log_likelihood(*held_out, fit_temperature(*fitted_on)) <= log_likelihood(*held_out, 1.0):
            return None
    temperature = fit_temperature(scores, accepted)
    before, after = (log_likelihood(scores, accepted, each) for each in (1.0, temperature))
    return Calibration(temperature, len(scores), before, after)


def node_outcomes(
    head: Head, items: Sequence[RowFeatures], rules: BlockRules, budget: int, max_tokens: int
) -> tuple[Scores, Outcomes]:
    """Path log-probabilities of drafted nodes and whether the target accepts them, for the first `max_tokens` tokens of `items`.

    Nodes past the end of a row are left out: nobody knows what the target would have said.
    """
    scores: list[Scores] = [np.empty(0)]
    accepted: list[Outcomes] = [np.empty(0, dtype=np.bool_)]
    for features in items:
        trees = drafted_trees(head, features, rules, budget, max_tokens)
        tokens, position = features.tokens.tolist(), features.prompt_length
        while position < features.prompt_length + len(trees):
            tree = trees[position - features.prompt_length]
            path = tree.along(tokens[position + 1 :])
            known = _known(tree, len(tokens) - 1 - position)
            outcomes = np.zeros(len(tree), dtype=np.bool_)
            outcomes[path] = True
            scores.append(tree.scores[known])
            accepted.append(outcomes[known])
            position += 1 + len(path)
    return np.concatenate(scores), np.concatenate(accepted)


def _known(tree: DraftTree, room: int) -> Outcomes:
    """The nodes besides the anchor that are at most `room` deep."""
    return (tree.depths > 0) & (tree.depths <= room)


def log_likelihood(scores: Scores, accepted: Outcomes, temperature: float) -> float:
    """The mean log-likelihood of `accepted` when a path of score s is accepted with probability exp(s / temperature)."""
    scaled = np.minimum(scores / temperature, -1e-9)
    return float(np.where(accepted, scaled, np.log(-np.expm1(scaled))).mean())


def fit_temperature(scores: Scores, accepted: Outcomes) -> float:
    """The likeliest temperature between `COLDEST` and `HOTTEST`.

    The log-likelihood is concave in 1 / temperature, so its slope has one zero, which bisection finds.
    """
    low, high = 1 / HOTTEST, 1 / COLDEST
    for _ in range(STEPS):
        middle = (low * high) ** 0.5
        scaled = np.clip(scores * middle, -700, -1e-9)
        # d/db [s·b] = s for an accepted path, d/db log(1 − exp(s·b)) = s · exp(s·b) / (exp(s·b) − 1) for another one.
        slope = np.where(accepted, scores, scores / -np.expm1(-scaled)).sum()
        low, high = (middle, high) if slope > 0 else (low, middle)
    return 1 / (low * high) ** 0.5
