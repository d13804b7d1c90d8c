"""Drafts with an EAGLE head: a tree grows a level a pass, the best nodes of each level get children (EAGLE-2's dynamic tree).

Shapes: R requests, E nodes that a level expands, W mask words, M nodes of a tree before the best are chosen, T committed rows,
C head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import jetflow_triton as ops
from jetflow_core.drafter import Committed, DraftJob
from jetflow_core.eagle import EagleHead
from jetflow_core.eagle_config import EagleConfig
from jetflow_core.kv_cache import KVCache
from jetflow_core.step_clock import StepClock
from jetflow_core.tree import DraftTree, Ints, pack_bits


class EagleDrafter:
    """Keeps keys, values and features of committed tokens in pages of its own under the target's block tables.

    What a page holds depends on tokens up to its end only: keys and values at p come from the token there and the feature at
    p − 1 (zero before the first token), features from the target's taps. `width` is the number of children that a node may get,
    and `expanded` the number of a level's nodes that get any (None: the head's own). The head's passes end the phase "draft" of
    `clock`, the choice of the trees' nodes its phase "tree".
    """

    def __init__(
        self,
        head: EagleHead,
        num_blocks: int,
        page: int,
        width: int = 32,
        clock: StepClock | None = None,
        expanded: int | None = None,
    ) -> None:
        config = head.config if expanded is None else replace(head.config, expanded=expanded)
        dtype, device = head.norm.weight.dtype, head.norm.weight.device
        self._clock = clock or StepClock()
        self.head, self.page, self.width, self.device = head, page, width, device
        self.tap_layers = config.target_layer_ids
        self.block_slots, self._expanded = config.tree_slots, config.expanded
        self.cache = KVCache(1, num_blocks, page, config.num_kv_heads, config.head_dim, dtype, device)
        self.features = torch.empty(num_blocks * page, config.hidden_size, dtype=dtype, device=device)

    @staticmethod
    def bytes_per_slot(config: EagleConfig, dtype: torch.dtype) -> int:
        """Memory of one token's keys, values and feature."""
        return (
            KVCache.bytes_per_slot(1, config.num_kv_heads, config.head_dim, dtype) + config.hidden_size * dtype.itemsize
        )

    def observe(self, rows: Committed) -> None:
        """Write features, keys and values of newly committed tokens."""
        self.features[rows.slots] = self.head.fuse(rows.taps)
        keys, values = self.head.context_kv(rows.tokens, self.features_at(rows.before), rows.positions)
        self.cache.write(0, keys, values, rows.slots)

    def features_at(self, slots: Tensor) -> Tensor:
        """The features [T, C] in physical `slots` [T]; zeros for slot −1, which is before the first token."""
        return torch.where(slots[:, None] < 0, 0, self.features[slots.clamp_min(0)])

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        """One tree a job, of the most probable nodes among all that the levels have scored."""
        budgets, depths = [job.budget for job in jobs], [job.max_depth for job in jobs]
        deepest = min(self.head.config.depth, max(depths), max(budgets))
        # A node that is not among the `budget` best of its level is not among the best of all either.
        growth = _Growth(self, jobs, deepest, min(self._expanded, max(budgets)))
        for _ in range(deepest):
            growth.add_level()
        nodes = growth.nodes()
        self._clock.lap("draft")
        trees = [nodes.best(row, job.anchor, job.budget, job.max_depth) for row, job in enumerate(jobs)]
        self._clock.lap("tree")
        return trees


@dataclass(frozen=True)
class _Nodes:
    """The anchors and every child that was scored, level by level: `tokens`, `parents` and `scores` [R, M], `depths` [M]."""

    tokens: Ints
    parents: Ints
    scores: NDArray[np.float64]
    depths: Ints

    def best(self, row: int, anchor: int, budget: int, max_depth: int) -> DraftTree:
        """The tree of the `budget` most probable nodes of a row that are no deeper than `max_depth`, ranked by score.

        A child's score never exceeds its parent's and it comes later, so it is ranked behind it. Nodes whose score is not a
        number (their request's features are not finite) are left out.
        """
        shallow = np.nonzero(self.depths <= max_depth)[0]
        order = shallow[np.argsort(-self.scores[row, shallow], kind="stable")[: budget + 1]]
        order = order[np.isfinite(self.scores[row, order])]
        place = np.zeros(len(self.depths), dtype=np.int64)
        place[order] = np.arange(len(order))
        parents = np.where(order == 0, -1, place[self.parents[row, order]])
        tokens = np.where(order == 0, anchor, self.tokens[row, order])
        return DraftTree(tokens, parents, self.depths[order], self.scores[row, order])


@dataclass
class _Level:
    """Nodes that get children next: `ids`, `scores` and their `places` among all nodes [R, E], the `features` before them
    [R, E, C], and which nodes that went through the head are above them, as bits [R, E, W].
    """

    ids: Tensor
    scores: Tensor
    places: Tensor
    features: Tensor
    above: Tensor


class _Growth:
    """Trees of several jobs while they grow, up to `depth` levels. All have the same number of nodes at every level."""

    def __init__(self, drafter: EagleDrafter, jobs: Sequence[DraftJob], depth: int, expanded: int) -> None:
        self._drafter, self._head, self._expanded, device = drafter, drafter.head, expanded, drafter.device
        page, requests, size = drafter.page, len(jobs), 1 + max(0, depth - 1) * expanded
        blocks = np.zeros((requests, max(len(job.blocks) for job in jobs)), dtype=np.int32)
        for row, job in zip(blocks, jobs, strict=True):
            row[: len(job.blocks)] = job.blocks
        prefix = np.array([job.position for job in jobs])

        def physical(logical: Ints) -> Ints:
            return np.take_along_axis(blocks, logical // page, axis=1).astype(np.int64) * page + logical % page

        def tensor(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        anchors = np.array([job.anchor for job in jobs])[:, None]
        last = np.where(prefix[:, None] > 0, physical(np.maximum(prefix[:, None] - 1, 0)), -1)
        words = (size + 31) // 32
        self._blocks, self._prefix = tensor(blocks), tensor(prefix.astype(np.int32))
        self._positions = tensor(prefix)[:, None]
        self._slots = tensor(physical(prefix[:, None] + np.arange(size)))
        self._bits = tensor(pack_bits(np.eye(size, 32 * words, dtype=bool)))
        self._masks = torch.zeros(requests, 0, words, dtype=torch.int32, device=device)
        ids, zeros = tensor(anchors), torch.zeros(requests, 1, device=device)
        features = drafter.features_at(tensor(last)[:, 0])[:, None]
        self._next = _Level(ids, zeros, zeros.long(), features, self._masks.new_zeros(requests, 1, words))
        self._tokens, self._parents, self._scores = [ids], [zeros.long() - 1], [zeros]

    def add_level(self) -> None:
        """Score the children of the next level's nodes, and choose those of them that will get children."""
        level, depth, head = self._next, len(self._tokens), self._head
        requests, nodes = level.ids.shape
        done = self._masks.shape[1]
        self._masks = torch.cat([self._masks, level.above | self._bits[done : done + nodes]], dim=1)
        positions = (self._positions + depth - 1).expand(requests, nodes)
        features = head(level.ids.flatten(), level.features.flatten(0, 1), positions.flatten(), self._attend)
        logits = head.logits(head.hidden(features)).float()
        top, drafted = logits.topk(min(self._drafter.width, logits.shape[1]), dim=-1)
        # A log-probability rounded to above zero must not put a child before its parent.
        logp = (top - logits.logsumexp(-1, keepdim=True)).clamp_max(0).view(requests, nodes, -1)
        scores = (level.scores[..., None] + logp).flatten(1)
        children = logp.shape[-1]
        tokens = (drafted if head.draft_vocab is None else head.draft_vocab[drafted]).view(requests, -1)
        start = sum(each.shape[1] for each in self._tokens)
        self._tokens.append(tokens)
        self._parents.append(level.places.repeat_interleave(children, 1))
        self._scores.append(scores)
        best, chosen = scores.topk(min(self._expanded, scores.shape[1]), dim=1)
        row, parent = torch.arange(requests, device=chosen.device)[:, None], chosen // children
        self._next = _Level(
            tokens.gather(1, chosen),
            best,
            start + chosen,
            features.view(requests, nodes, -1)[row, parent],
            self._masks[row, done + parent],
        )

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the newest nodes, the last rows of `_masks`, whose keys and values go into the tree's slots.

        The op knows a query by its place in the tree, so nodes of earlier levels come along with empty queries: of their
        pass only the attention is made again.
        """
        cache, (requests, nodes, _) = self._drafter.cache, self._masks.shape
        new = len(q) // requests
        cache.write(layer, k, v, self._slots[:, nodes - new : nodes].flatten())
        queries = q.new_zeros(requests, nodes, *q.shape[1:])
        queries[:, nodes - new :] = q.view(requests, new, *q.shape[1:])
        starts = torch.arange(0, requests * nodes + 1, nodes, dtype=torch.int32, device=q.device)
        out = ops.tree_attention(
            queries.flatten(0, 1),
            *cache.layers[layer],
            self._blocks,
            starts,
            self._prefix,
            self._masks.flatten(0, 1),
            q.shape[-1] ** -0.5,
        )
        return out.view(queries.shape)[:, nodes - new :].flatten(0, 1)

    def nodes(self) -> _Nodes:
        """Every node so far, on the host."""
        tokens, parents, scores = (
            torch.cat(each, dim=1).cpu().numpy() for each in (self._tokens, self._parents, self._scores)
        )
        depths = np.repeat(np.arange(len(self._tokens)), [each.shape[1] for each in self._tokens])
        return _Nodes(tokens, parents, scores.astype(np.float64), depths)
