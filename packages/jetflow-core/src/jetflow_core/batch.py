"""From what is planned to flat tensors: the ragged batch of one forward pass.

Shapes: T tokens, B sequences, P blocks a sequence, W mask words. Sequence b owns rows query_start[b] … query_start[b + 1] − 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import jetflow_triton as ops
from jetflow_core.kv_cache import KVCache
from jetflow_core.tree import DraftTree, Ints, ancestor_mask, pack_bits


@dataclass(frozen=True)
class Segment:
    """One sequence's rows: ids at depths below `prefix` cached tokens, a chain, or a tree when `tree` gives the parents."""

    ids: Ints
    depths: Ints
    prefix: int
    blocks: Sequence[int]
    tree: DraftTree | None = None

    @classmethod
    def chain(cls, ids: Sequence[int], prefix: int, blocks: Sequence[int]) -> Segment:
        """Tokens in a row."""
        return cls(np.asarray(ids, dtype=np.int64), np.arange(len(ids)), prefix, blocks)

    @classmethod
    def of_tree(cls, tree: DraftTree, prefix: int, blocks: Sequence[int]) -> Segment:
        """A draft tree, whose anchor is at position `prefix`."""
        return cls(tree.tokens, tree.depths, prefix, blocks, tree)

    def slots(self, logical: Ints, page: int) -> Ints:
        """Physical slots of logical positions of this sequence."""
        return np.asarray(self.blocks, dtype=np.int64)[logical // page] * page + logical % page


@dataclass(frozen=True)
class ForwardBatch:
    """Input of one forward pass; see the module docstring. `tree_mask` is None when every sequence is a chain."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64, physical
    query_start: Tensor  # [B + 1] int32
    prefix_lens: Tensor  # [B] int32
    block_tables: Tensor  # [B, P] int32
    tree_mask: Tensor | None  # [T, W] int32


def build_batch(
    segments: Sequence[Segment], page: int, device: torch.device, *, bidirectional: bool = False
) -> ForwardBatch:
    """Lay `segments` out as one ragged batch. `bidirectional` lets every row of a chain see its whole segment (DFlash heads)."""
    lengths = [len(segment.ids) for segment in segments]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    width = max(len(segment.blocks) for segment in segments)
    tables = np.zeros((len(segments), width), dtype=np.int32)
    for row, segment in zip(tables, segments, strict=True):
        row[: len(segment.blocks)] = segment.blocks
    mask = None
    if bidirectional or any(segment.tree is not None for segment in segments):
        words = (max(lengths) + 31) // 32
        mask = np.concatenate([_mask(segment, words, bidirectional) for segment in segments])

    def tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    return ForwardBatch(
        input_ids=tensor(np.concatenate([segment.ids for segment in segments])),
        positions=tensor(np.concatenate([segment.prefix + segment.depths for segment in segments])),
        slots=tensor(
            np.concatenate([s.slots(s.prefix + np.arange(n), page) for s, n in zip(segments, lengths, strict=True)])
        ),
        query_start=tensor(starts.astype(np.int32)),
        prefix_lens=tensor(np.array([segment.prefix for segment in segments], dtype=np.int32)),
        block_tables=tensor(tables),
        tree_mask=None if mask is None else tensor(mask),
    )


def _mask(segment: Segment, words: int, bidirectional: bool) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    if segment.tree is not None:
        return ancestor_mask(segment.tree, words)
    size = len(segment.ids)
    rows, columns = np.arange(size)[:, None], np.arange(words * 32)[None]
    last = size - 1 if bidirectional else rows
    return pack_bits(np.broadcast_to(columns <= last, (size, words * 32)))


class PagedAttention:
    """`Attend` over a paged cache: write the batch's own keys and values, then attend to prefix and ancestors.

    `exact`: a row's bits depend on nothing but its query and what it sees.
    """

    def __init__(self, cache: KVCache, batch: ForwardBatch, head_dim: int, *, exact: bool = False) -> None:
        self.cache, self.batch, self.scale = cache, batch, head_dim**-0.5
        self._attention = ops.tree_attention_exact if exact else ops.tree_attention

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `jetflow_core.layers.Attend`."""
        batch = self.batch
        self.cache.write(layer, k, v, batch.slots)
        keys, values = self.cache.layers[layer]
        return self._attention(
            q, keys, values, batch.block_tables, batch.query_start, batch.prefix_lens, batch.tree_mask, self.scale
        )
