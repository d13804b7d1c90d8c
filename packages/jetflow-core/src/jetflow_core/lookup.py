"""Drafts without a head: what followed the last few tokens wherever they stood before, in the request's own prompt and output.

Shapes: M earlier places of a request's last tokens, D draft depths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jetflow_core.drafter import Committed, DraftJob
from jetflow_core.tree import DraftTree, Ints

Weights = NDArray[np.float64]

LONGEST = 8  # tokens of a match that count
PLACES = 32  # a request: the longest matches, of equals the latest
WINDOW = 8192  # tokens looked back, so that a step costs the same in any context
DEPTH = 32  # as deep as exact mode takes a tree
# Fitted on answers of the demo model (docs/lab-notes.md): one more token of a match multiplies its weight by GROWTH, HALF_LIFE
# tokens of age halve it, and UNSEEN is the weight of all tokens that no match has seen to follow.
GROWTH = 2.0
HALF_LIFE = 1024.0
UNSEEN = 3.0
SUREST = 0.95  # however long a match, a copy ends somewhere


class LookupDrafter:
    """Looks the longest suffixes of each request's tokens up in what stands before them; needs no training and keeps no state.

    The continuations of all places found are merged into one trie. A child's probability is its places' share of its parent's
    weight, with `UNSEEN` for everything else; a place weighs more, the longer it matches and the later it stands. Its match grows
    by each drafted token, so what is left to the unseen shrinks along a path.
    """

    tap_layers: tuple[int, ...] = ()
    block_slots = 0

    def observe(self, rows: Committed) -> None:
        """All it reads is in the jobs."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        """One tree a job, the anchor alone where its last token is a new one."""
        return [_draft(job) for job in jobs]


def _draft(job: DraftJob) -> DraftTree:
    depth = min(DEPTH, job.budget, job.max_depth)
    return _ranked_tree(job.anchor, *_continuations(np.array(job.tokens[-WINDOW:]), depth), job.budget)


def _continuations(tokens: Ints, depth: int) -> tuple[Ints, Weights]:
    """What followed where the end of `tokens` stood before: continuations [M, depth] and their weights [M]."""
    ends, lengths = _matches(tokens)
    last = len(tokens) - 1
    age = last - ends
    # What runs into the end of the text goes on from where it began: a text that repeats itself goes on repeating.
    following = ends[:, None] + 1 + np.arange(depth) % age[:, None]
    return tokens[following], GROWTH ** (lengths - 1) * 0.5 ** (age / HALF_LIFE)


def _matches(tokens: Ints) -> tuple[Ints, Ints]:
    """Where earlier places end that agree with the end of `tokens`, and in how many tokens; longest first, then latest."""
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])[::-1]
    lengths = np.ones(len(ends), dtype=np.int64)
    growing = np.arange(len(ends))
    for back in range(1, LONGEST):
        growing = growing[ends[growing] >= back]
        growing = growing[tokens[ends[growing] - back] == tokens[last - back]]
        if len(growing) == 0:
            break
        lengths[growing] += 1
    best = np.argsort(-lengths, kind="stable")[:PLACES]
    return ends[best], lengths[best]


def _ranked_tree(anchor: int, rows: Ints, weights: Weights, budget: int) -> DraftTree:
    """The best of the trie over continuations `rows` [M, D] of `weights` [M], in order of score, ties by depth, then tokens.

    Sorted by tokens, the rows that share a node are neighbours: a node is named after the first of them and its depth.
    """
    order = np.lexsort(rows.T[::-1]) if rows.size else np.arange(0)
    rows, weights = rows[order], weights[order]
    size, depth = rows.shape
    begins = np.ones((size, depth), dtype=bool)
    begins[1:] = np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1)
    first = np.maximum.accumulate(np.where(begins, np.arange(size)[:, None], 0), axis=0)
    scores = _scores(first, weights)
    places, level = np.nonzero(begins)
    ranked = np.lexsort((level, -scores[places, level]))[:budget]
    places, level = places[ranked], level[ranked]
    rank = np.zeros((size, depth + 1), dtype=np.int64)  # of a node in the tree; column 0 is the anchor
    rank[places, level + 1] = np.arange(1, len(places) + 1)
    parents = rank[first[places, np.maximum(level - 1, 0)], level]
    return DraftTree(
        np.concatenate([[anchor], rows[places, level]]),
        np.concatenate([[-1], parents]),
        np.concatenate([[0], level + 1]),
        np.concatenate([[0.0], scores[places, level]]),
    )


def _scores(first: Ints, weights: Weights) -> Weights:
    """Accumulated log-probabilities [M, D] of the nodes that the rows share; `first` [M, D] names each one's node."""
    size, depth = first.shape
    nodes = first * depth + np.arange(depth)
    sums = np.bincount(nodes.ravel(), np.repeat(weights, depth), minlength=size * depth)[nodes]
    above = np.column_stack([np.full(size, weights.sum()), sums])[:, :depth]
    return np.log(SUREST * sums / (above + UNSEEN / GROWTH ** np.arange(depth))).cumsum(axis=1)
