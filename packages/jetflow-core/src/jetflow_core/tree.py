"""Draft trees: candidates to tree, tree to attention bitmask, and the acceptance walk.

Shapes: D draft depths, K candidates a depth, N tree nodes, W = ceil(N / 32) mask words.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Candidates:
    """What a drafter thinks may follow an anchor: K tokens a depth and their log-probabilities.

    `tokens` [D, K]; `first` [K] scores depth 1 after the anchor; `following` [D − 1, P, K] scores the tokens of depth d + 2
    after candidate p of depth d + 1, with P = K, or P = 1 where all branches of a depth share their scores. Scores of −inf are
    never drafted.
    """

    tokens: Ints
    first: Floats
    following: Floats

    def __post_init__(self) -> None:
        depths, width = self.tokens.shape
        shared = self.following.shape[1] if self.following.ndim == 3 else 0
        expected = (depths - 1, shared, width)
        if (
            self.first.shape != (width,)
            or self.following.shape != expected
            or (depths > 1 and shared not in (1, width))
        ):
            raise ValueError(
                f"candidates of {depths} depths and width {width} need first [{width}] and following "
                f"[{depths - 1}, 1 or {width}, {width}], not {self.first.shape} and {self.following.shape}"
            )


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
        if np.any(parents[1:] < 0) or np.any(parents[1:] >= np.arange(1, size)):
            raise ValueError("parents must come before their children")
        if np.any(self.depths[1:] != self.depths[parents[1:]] + 1):
            raise ValueError("a node is one deeper than its parent")
        siblings = np.stack([parents, self.tokens])
        if np.unique(siblings, axis=1).shape[1] != size:
            raise ValueError("two siblings share a token")

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that holds `token`, if it was drafted."""
        found = np.nonzero((self.parents == node) & (self.tokens == token))[0]
        return int(found[0]) if len(found) else None

    @classmethod
    def root(cls, anchor: int) -> DraftTree:
        """The tree of the anchor alone: plain autoregressive decoding."""
        return cls(np.array([anchor]), np.array([-1]), np.array([0]), np.zeros(1))


def best_first_tree(anchor: int, candidates: Candidates, budget: int, max_depth: int) -> DraftTree:
    """The `budget` most probable nodes (besides the anchor) that form a tree over `candidates`, at most `max_depth` deep.

    Since a path's score never exceeds its prefix's, taking nodes in order of score keeps the set prefix-closed and optimal.
    A heap holds, for every node taken, its best untaken child, and for every child its next sibling: O(budget · log budget).
    Ties break by (depth, rank), so trees are deterministic.
    """
    max_depth = min(max_depth, len(candidates.tokens))
    tokens, parents, depths, scores = [anchor], [-1], [0], [0.0]
    shared = candidates.following.shape[1] == 1
    ranked: dict[tuple[int, int], tuple[list[int], list[float]]] = {}

    def children(depth: int, parent: int) -> tuple[list[int], list[float]]:
        """Candidate indices of `depth` after candidate `parent` of the depth before, best first, with their scores."""
        key = (depth, 0 if shared or depth == 1 else parent)
        if key not in ranked:
            row = candidates.first if depth == 1 else candidates.following[depth - 2, key[1]]
            order = np.argsort(-row, kind="stable")
            order = order[np.isfinite(row[order])]
            ranked[key] = order.tolist(), row[order].tolist()
        return ranked[key]

    # Entries: (−score, depth, rank among siblings, node of the parent, candidate of the parent).
    heap: list[tuple[float, int, int, int, int]] = []

    def push(depth: int, rank: int, node: int, candidate: int) -> None:
        if depth <= max_depth:
            _, values = children(depth, candidate)
            if rank < len(values):
                heapq.heappush(heap, (-(scores[node] + values[rank]), depth, rank, node, candidate))

    push(1, 0, 0, 0)
    while heap and len(tokens) <= budget:
        score, depth, rank, node, candidate = heapq.heappop(heap)
        chosen = children(depth, candidate)[0][rank]
        tokens.append(int(candidates.tokens[depth - 1, chosen]))
        parents.append(node)
        depths.append(depth)
        scores.append(-score)
        push(depth, rank + 1, node, candidate)
        push(depth + 1, 0, len(tokens) - 1, chosen)
    return DraftTree(np.array(tokens), np.array(parents), np.array(depths), np.array(scores))


def ancestor_mask(tree: DraftTree, words: int) -> NDArray[np.int32]:
    """Packed mask [N, words]: bit j of row i (word j // 32, bit j % 32) is set when node j is i or an ancestor of i."""
    size = len(tree)
    assert words * 32 >= size
    bits = np.zeros((size, words * 32), dtype=bool)
    for depth in range(int(tree.depths.max()) + 1):
        nodes = np.nonzero(tree.depths == depth)[0]
        if depth:
            bits[nodes] = bits[tree.parents[nodes]]
        bits[nodes, nodes] = True
    return pack_bits(bits)


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
