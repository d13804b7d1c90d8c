"""Several drafters as one: their ranked trees are joined into a single ranked tree within the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jetflow_core.drafter import Committed, Drafter, DraftJob
from jetflow_core.tree import DraftTree


class MergedDrafter:
    """Asks every drafter of `parts` for a whole tree and joins the answers (`merge`)."""

    def __init__(self, parts: Sequence[Drafter]) -> None:
        self.parts = tuple(parts)
        self.tap_layers = tuple(sorted({layer for part in parts for layer in part.tap_layers}))
        self.block_slots = max(part.block_slots for part in parts)

    def observe(self, rows: Committed) -> None:
        """Show every part the rows with the taps it asked for."""
        taps = rows.taps.unflatten(-1, (max(len(self.tap_layers), 1), -1))
        for part in self.parts:
            own = [self.tap_layers.index(layer) for layer in part.tap_layers]
            part.observe(replace(rows, taps=taps[:, own].flatten(1)))

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        """One tree a job, the best of all parts within its budget and depth."""
        drafts = zip(*(part.propose(jobs) for part in self.parts), strict=True)
        return [merge(trees, job.budget) for trees, job in zip(drafts, jobs, strict=True)]


def merge(trees: Sequence[DraftTree], budget: int) -> DraftTree:
    """The `budget` best nodes of ranked `trees` over one anchor: a ranked tree.

    Paths are united, so siblings of the same token become one node. Its score is the best that any of the trees gives the
    path: a drafter that does not know a path says little about it, and the maximum of scores that never rise along a path never
    rises either. So the best nodes are a prefix-closed set, and hold at least the expected tokens of any single tree of that
    budget. Ties go by depth, then to the earlier tree. Raises ValueError when the anchors differ.
    """
    if len({int(tree.tokens[0]) for tree in trees}) != 1:
        raise ValueError("only trees over the same anchor can be merged")
    # A dictionary takes about 0.2 µs a node, which no array form over the depths reaches at such sizes.
    known: dict[tuple[int, int], int] = {}  # (parent, token) to node
    tokens, parents, depths, scores = [int(trees[0].tokens[0])], [-1], [0], [0.0]
    for tree in trees:
        place = [0]  # of the tree's nodes among the joint ones
        columns = (column[1:].tolist() for column in (tree.tokens, tree.parents, tree.depths, tree.scores))
        for token, parent, depth, score in zip(*columns, strict=True):
            above = place[parent]
            node = known.setdefault((above, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(above)
                depths.append(depth)
                scores.append(score)
            elif score > scores[node]:
                scores[node] = score
            place.append(node)
    return _ranked(DraftTree(np.array(tokens), np.array(parents), np.array(depths), np.array(scores))).cut(budget)


def _ranked(tree: DraftTree) -> DraftTree:
    """The same tree in order of score, ties by depth, then as they were; scores must not rise along a path."""
    order = np.lexsort((tree.depths, -tree.scores))
    place = np.empty(len(tree), dtype=np.int64)
    place[order] = np.arange(len(tree))
    parents = np.where(tree.parents[order] < 0, -1, place[tree.parents[order]])
    return DraftTree(tree.tokens[order], parents, tree.depths[order], tree.scores[order])
