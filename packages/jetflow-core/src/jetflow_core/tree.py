"""Draft trees: candidates to tree, tree to attention bitmask, and the acceptance walk.

Shapes: D draft depths, K candidates a depth, N tree nodes, W = ceil(N / 32) mask words.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class Transitions(Protocol):
    """Scores of candidates after nodes of a growing tree, asked a depth at a time."""

    def __call__(self, depth: int, owner: Ints, before: Ints, parents: Ints) -> Floats:
        """Log-probabilities [N, K] of the candidates at `depth` (2 or more) after N nodes, grouped by their request `owner` [N].

        A node is the candidate `parents[n]` of depth − 1, and its own parent the candidate `before[n]` of depth − 2; at depth 2
        that parent is the anchor and `before` is 0.
        """
        ...


@dataclass(frozen=True)
class Candidates:
    """What may follow the anchors of R requests: K tokens a depth and their log-probabilities; of −inf, they are never drafted.

    `tokens` [R, D, K]; `first` [R, K] scores depth 1 after the anchor, `following` deeper ones while trees grow.
    """

    tokens: Ints
    first: Floats
    following: Transitions

    @classmethod
    def of_tables(cls, tokens: Ints, first: Floats, following: Floats) -> Candidates:
        """With all scores known beforehand: `following` [R, D − 1, P, K] scores the tokens of depth d + 2 after candidate p of
        depth d + 1, with P = K, or P = 1 where all branches of a depth share their scores.
        """

        def look_up(depth: int, owner: Ints, before: Ints, parents: Ints) -> Floats:
            table = following[:, depth - 2]
            return table[owner, parents if table.shape[1] > 1 else 0]

        return cls(tokens, first, look_up)


@dataclass(frozen=True)
class DraftTree:
    """A token tree whose node 0 is the anchor. `parents[0]` is −1, every other parent comes before its children.

    `tokens`, `parents`, `depths` [N] int64; `scores` [N] accumulated draft log-probabilities. Raises ValueError when the order is
    broken, a depth is not its parent's plus one, or two siblings share a token.
    """

    tokens: Ints
    parents: Ints
    depths: Ints
    scores: NDArray[np.float64]

    def __post_init__(self) -> None:
        parents, size = self.parents, len(self.tokens)
        if size == 0 or parents[0] != -1 or self.depths[0] != 0:
            raise ValueError("a draft tree starts with its anchor: parent -1, depth 0")
        if (parents[1:] < 0).any() or (parents[1:] >= np.arange(1, size)).any():
            raise ValueError("parents must come before their children")
        if (self.depths[1:] != self.depths[parents[1:]] + 1).any():
            raise ValueError("a node is one deeper than its parent")
        siblings = np.sort(parents * (int(self.tokens.max()) + 1) + self.tokens)
        if (siblings[1:] == siblings[:-1]).any():
            raise ValueError("two siblings share a token")

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`, if it was drafted."""
        found = np.nonzero((self.parents == node) & (self.tokens == token))[0]
        return int(found[0]) if len(found) else None

    def along(self, continuation: Iterable[int]) -> list[int]:
        """The nodes of the path that begins as `continuation`, from the anchor's child on, as far as it was drafted."""
        path: list[int] = []
        for token in continuation:
            child = self.child(path[-1] if path else 0, token)
            if child is None:
                break
            path.append(child)
        return path

    def cut(self, nodes: int) -> DraftTree:
        """The anchor and the first `nodes` nodes after it: a tree of its own, since parents come first."""
        if nodes >= len(self) - 1:
            return self
        kept = slice(nodes + 1)
        return DraftTree(self.tokens[kept], self.parents[kept], self.depths[kept], self.scores[kept])

    @classmethod
    def root(cls, anchor: int) -> DraftTree:
        """The tree of the anchor alone: plain autoregressive decoding."""
        return cls(np.array([anchor]), np.array([-1]), np.array([0]), np.zeros(1))


def grown_trees(
    anchors: Sequence[int], candidates: Candidates, budgets: Sequence[int], max_depths: Sequence[int]
) -> list[DraftTree]:
    """For each of R requests the `budget` most probable nodes (besides the anchor) that form a tree over its candidates.

    No tree is deeper than its `max_depth`. Since a path's score never exceeds its prefix's,
    the most probable nodes are a prefix-closed set. They come in order of score, ties by depth, then parent, then rank, so trees
    are deterministic and the first n nodes are the tree of budget n (`DraftTree.cut`).

    All requests grow together, a depth at a time: a node has children worth looking at only while it is among the
    `max(budgets)` best of its request so far. So the cost is a few array operations a depth, whatever the number of nodes.
    """
    requests, limits = np.arange(len(anchors)), np.asarray(budgets, dtype=np.int64)
    levels, floor = _grow(candidates, int(limits.max()), np.asarray(max_depths))
    owner = np.concatenate([level[0] for level in levels])
    scores = np.concatenate([level[1] for level in levels])
    parents = np.concatenate([level[2] for level in levels])
    chosen = np.concatenate([level[3] for level in levels])
    depths = np.repeat(np.arange(len(levels)), [len(level[0]) for level in levels])
    # Most nodes were once among the best and are not any more: they need no sorting.
    left = np.flatnonzero(scores >= floor[owner])
    # Levels follow each other and each keeps its order, so a stable sort breaks ties by depth, parent and rank.
    order = left[np.lexsort((-scores[left], owner[left]))]
    place = np.empty(len(owner), dtype=np.int64)  # of a node within its own tree
    place[order] = np.arange(len(order)) - np.searchsorted(owner[order], requests)[owner[order]]
    order = order[place[order] <= limits[owner[order]]]
    owner, depths, scores = owner[order], depths[order], scores[order]
    above = np.where(depths == 0, -1, place[parents[order]])
    ids = np.where(depths == 0, np.asarray(anchors)[owner], candidates.tokens[owner, depths - 1, chosen[order]])
    bounds = np.searchsorted(owner, np.arange(len(anchors) + 1))
    return [
        DraftTree(ids[low:high], above[low:high], depths[low:high], scores[low:high])
        for low, high in itertools.pairwise(bounds.tolist())
    ]


Level = tuple[Ints, NDArray[np.float64], Ints, Ints]


def _grow(candidates: Candidates, size: int, max_depths: Ints) -> tuple[list[Level], NDArray[np.float64]]:
    """The anchors, then a level a depth of the nodes that may be among the `size` best of their request.

    A level holds, in order of parent and rank, each node's request, score, parent (counted over all levels) and candidate.
    Beside the levels, the score [R] of each request's last node among its `size` best, −inf where it has fewer.
    """
    requests, deepest, width = candidates.tokens.shape
    shallowest = int(max_depths.min())
    best = np.full((requests, size), -np.inf)  # the best scores of each request so far, the least of them first
    floor = np.full(requests, -np.inf)  # that least one
    first = np.arange(requests)
    level = first, np.zeros(requests), np.zeros(requests, np.int64), np.zeros(requests, np.int64)
    levels: list[Level] = [level]
    above = 0  # where the parents' level starts
    before = np.zeros(requests, np.int64)  # the candidates that the parents' own parents are
    for depth in range(1, deepest + 1 if size else 1):
        owner, scores, _, chosen = levels[-1]
        known = candidates.first[owner] if depth == 1 else candidates.following(depth, owner, before, chosen)
        # A log-probability rounded to above zero must not put a child before its parent.
        grown = scores[:, None] + np.minimum(known, 0)
        if depth > shallowest:
            grown[max_depths[owner] < depth] = -np.inf
        # Flat places, since indices in two dimensions take numpy several times as long to find and to follow.
        found = np.flatnonzero(grown > floor[owner, None])
        if len(found) == 0:
            break
        parents, rank = np.divmod(found, width)
        owner, scores = owner[parents], grown.ravel()[found]
        bounds = np.searchsorted(owner, np.arange(requests + 1))
        most = int(np.diff(bounds).max())
        pool = np.full((requests, most + size), -np.inf)
        pool[:, :size] = best
        pool.ravel()[np.arange(len(owner)) + (size + first * (most + size) - bounds[:-1])[owner]] = scores
        pool.partition(most, axis=1)
        best = pool[:, most:]
        floor = best[:, 0]
        kept = scores >= floor[owner]
        above, start, before = above + len(levels[-1][0]), above, chosen[parents[kept]]
        levels.append((owner[kept], scores[kept], start + parents[kept], rank[kept]))
    return levels, floor


def ancestor_mask(tree: DraftTree, words: int) -> NDArray[np.int32]:
    """Packed mask [N, words]: bit j of row i (word j // 32, bit j % 32) is set when node j is i or an ancestor of i."""
    size = len(tree)
    assert words * 32 >= size
    nodes = np.arange(size)
    mask = np.zeros((size, words), dtype=np.uint32)
    mask[nodes, nodes // 32] = np.left_shift(np.uint32(1), (nodes % 32).astype(np.uint32))
    mask[:, 0] |= np.uint32(1)
    # After k rounds a row holds its 2ᵏ nearest ancestors and `above` is the next one, or the anchor.
    above = np.maximum(tree.parents, 0)
    while above.any():
        mask |= mask[above]
        above = above[above]
    return mask.view(np.int32)


def pack_bits(bits: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Pack booleans [N, 32·W] into int32 words [N, W], lowest bit first."""
    return np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32, copy=False)


def accept(
    trees: Sequence[DraftTree], choose: Callable[[Sequence[int], Sequence[int]], Sequence[int]]
) -> list[tuple[list[int], list[int]]]:
    """Walk every tree from its anchor along the target's own choices; return (nodes of the path, new tokens) of each.

    `choose(active, nodes)` gives the token that the target picks after node `nodes[k]` of tree `active[k]`: its argmax, or its
    sample under the seeded Gumbel noise. It is asked once a level, for the trees still walking, so only nodes on accepted paths
    are ever sampled. While the choice at a node is one of its children, the walk goes there; the first choice that is not
    becomes the bonus token. So the new tokens are exactly those of step-by-step decoding: the path's tokens, then the bonus.

    Why this is lossless at any temperature: the choice at a node depends only on the target's distribution given that path,
    never on the draft. For a deterministic tree this equals sequential rejection sampling, whose chance to go on is the
    target's mass on the node's children (arXiv 2606.18394, verification).
    """
    paths: list[list[int]] = [[0] for _ in trees]
    tokens: list[list[int]] = [[] for _ in trees]
    active = list(range(len(trees)))
    while active:
        chosen = choose(active, [paths[i][-1] for i in active])
        walking: list[int] = []
        for i, token in zip(active, chosen, strict=True):
            tokens[i].append(token)
            child = trees[i].child(paths[i][-1], token)
            if child is not None:
                paths[i].append(child)
                walking.append(i)
        active = walking
    return list(zip(paths, tokens, strict=True))
