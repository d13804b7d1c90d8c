"""Attention of ragged token trees over a paged K/V cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from jetflow_triton.checks import INT32, check_indices, check_rows
from jetflow_triton.dispatch import register, uses_op


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    prefix_lens: Tensor,
    tree_mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Each query attends to its sequence's cached prefix and to its own ancestors in the sequence's tree.

    The K/V of query j of sequence b is in the cache already, at logical slot `prefix_lens[b] + j`; logical slot s is
    the physical slot `block_tables[b, s // page] * page + s % page`. Query j sees every slot below `prefix_lens[b]`,
    and slot `prefix_lens[b] + i` where bit `i % 32` of word `i // 32` of its mask row is set. Without a mask it sees
    i ≤ j: a causal chain. A query that sees nothing gives zeros.

    Args:
        q: `[T, Hq, D]`, last dimension contiguous.
        k_cache: `[blocks, page, Hk, D]` contiguous, dtype of q; Hk divides Hq. `v_cache` likewise.
        block_tables: `[B, P]` int32; entries beyond a sequence's last slot are not read.
        query_start: `[B + 1]` int32, rising from 0 to T.
        prefix_lens: `[B]` int32.
        tree_mask: `[T, W]` int32 with 32 W ≥ the longest tree, or None.
        scale: multiplies the scores, usually `D ** -0.5`.

    Returns:
        `[T, Hq, D]`. A row's result does not depend on the other sequences of the batch.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or stride does not fit, or (checked on the CPU) a table is too short.
    """
    _check(q, k_cache, v_cache, block_tables, query_start, prefix_lens, tree_mask)
    run = _tree_attention if uses_op(q) else tree_attention_twin
    return run(q, k_cache, v_cache, block_tables, query_start, prefix_lens, tree_mask, scale)


def tree_attention_twin(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    prefix_lens: Tensor,
    tree_mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Plain-torch `tree_attention`: one fused torch attention a sequence."""
    page, kv_heads, width = k_cache.shape[1:]
    group = q.shape[1] // kv_heads
    # Every layer of a step asks for the same layout; it is found by content, so it can never be stale.
    shares = _shares(
        tuple(query_start.tolist()),
        tuple(prefix_lens.tolist()),
        tuple(map(tuple, block_tables.tolist())),
        None if tree_mask is None else tuple(map(tuple, tree_mask.tolist())),
        page,
        group,
        q.dtype,
    )
    k_flat, v_flat = (
        k_cache.view(-1, kv_heads, width),
        v_cache.view(-1, kv_heads, width),
    )
    outputs = [_attend(q, k_flat, v_flat, share, group, scale) for share in shares]
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs) if outputs else torch.empty_like(q)


@dataclass(frozen=True, slots=True)
class _Share:
    """One sequence's part of a call."""

    first: int  # its rows of q are first … last − 1
    last: int
    start: int  # its slots are start … start + length − 1 of the flat cache,
    length: int
    slots: Tensor | None  # or these, where its blocks do not follow each other
    bias: Tensor | None  # [(last − first) * group, length], 0 where visible, −inf elsewhere; None: all visible
    blind: Tensor | None  # rows * group that see nothing


def _attend(q: Tensor, k_flat: Tensor, v_flat: Tensor, share: _Share, group: int, scale: float) -> Tensor:
    """`[rows, Hq, D]`. The query heads of one KV head are packed as rows, so K and V are not repeated."""
    rows, (_, heads, width) = share.last - share.first, q.shape
    if share.slots is None:
        k = k_flat[share.start : share.start + share.length]
        v = v_flat[share.start : share.start + share.length]
    else:
        k, v = k_flat.index_select(0, share.slots), v_flat.index_select(0, share.slots)
    packed = q[share.first : share.last].unflatten(1, (heads // group, group)).transpose(0, 1)
    packed = packed.reshape(1, heads // group, rows * group, width)
    out = scaled_dot_product_attention(
        packed,
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=share.bias,
        scale=scale,
    )
    if share.blind is not None:
        out = out.masked_fill(share.blind.unsqueeze(1), 0.0)
    return out.view(-1, rows, group, width).transpose(0, 1).reshape(rows, heads, width)


@lru_cache(maxsize=16)
def _shares(
    query_start: tuple[int, ...],
    prefix_lens: tuple[int, ...],
    block_tables: tuple[tuple[int, ...], ...],
    tree_mask: tuple[tuple[int, ...], ...] | None,
    page: int,
    group: int,
    dtype: torch.dtype,
) -> list[_Share]:
    """The layout of a call, from the values of its index tensors."""
    shares: list[_Share] = []
    for b, prefix in enumerate(prefix_lens):
        first, last = query_start[b], query_start[b + 1]
        if first == last:
            continue
        length = prefix + last - first
        blocks = block_tables[b][: -(-length // page)]
        if len(blocks) * page < length:
            raise ValueError(f"block_tables has {len(blocks)} blocks of {page} for the {length} slots of sequence {b}")
        words = None if tree_mask is None else tree_mask[first:last]
        if words is not None and len(words[0]) * 32 < last - first:
            raise ValueError(
                f"tree_mask has {len(words[0])} words a row for the {last - first} queries of sequence {b}"
            )
        bias, blind = _bias(_visible(last - first, prefix, words), group, dtype)
        joined = all(later == sooner + 1 for sooner, later in pairwise(blocks))
        slots = None if joined else _slots(blocks, page, length)
        shares.append(_Share(first, last, blocks[0] * page, length, slots, bias, blind))
    return shares


def _slots(blocks: tuple[int, ...], page: int, length: int) -> Tensor:
    starts = torch.tensor(blocks, dtype=torch.int64) * page
    return (starts.unsqueeze(1) + torch.arange(page)).flatten()[:length]


def _visible(rows: int, prefix: int, words: tuple[tuple[int, ...], ...] | None) -> Tensor:
    """`[rows, prefix + rows]` bool: what each query sees."""
    visible = torch.ones(rows, prefix + rows, dtype=torch.bool)
    if words is None:
        visible[:, prefix:].tril_()
    else:
        bits = torch.tensor(words, dtype=torch.int32).unsqueeze(2) >> torch.arange(32, dtype=torch.int32)
        visible[:, prefix:] = (bits & 1).flatten(1)[:, :rows]
    return visible


def _bias(visible: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    if bool(visible.all()):
        return None, None
    visible = visible.repeat_interleave(group, 0)
    blind = ~visible.any(1)
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
    if not bool(blind.any()):
        return bias, None
    return bias.masked_fill_(blind.unsqueeze(1), 0.0), blind  # a row of −inf would be NaN


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    prefix_lens: Tensor,
    tree_mask: Tensor | None,
) -> None:
    check_rows("q", q, 3)
    check_rows("k_cache", k_cache, 4)
    check_indices("block_tables", block_tables, 2, INT32)
    check_indices("query_start", query_start, 1, INT32)
    check_indices("prefix_lens", prefix_lens, 1, INT32)
    tokens, heads, width = q.shape
    kv_heads = k_cache.shape[2]
    if k_cache.shape[3] != width or heads % kv_heads:
        raise ValueError(f"k_cache has shape {tuple(k_cache.shape)}: it does not fit q of shape {tuple(q.shape)}")
    if v_cache.shape != k_cache.shape:
        raise ValueError(f"v_cache has shape {tuple(v_cache.shape)}, k_cache has {tuple(k_cache.shape)}")
    if k_cache.dtype != q.dtype or v_cache.dtype != q.dtype:
        raise TypeError(f"q is {q.dtype}, k_cache {k_cache.dtype}, v_cache {v_cache.dtype}: one dtype is needed")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous: pass whole layers of the cache")
    if q.stride(2) != 1:
        raise ValueError("q needs a contiguous last dimension: call .contiguous() on it")
    batch = prefix_lens.shape[0]
    if block_tables.shape[0] != batch or query_start.shape[0] != batch + 1:
        raise ValueError(
            f"block_tables has {block_tables.shape[0]} rows and query_start {query_start.shape[0]} entries "
            f"for {batch} sequences: {batch} and {batch + 1} are needed"
        )
    if tree_mask is not None:
        check_indices("tree_mask", tree_mask, 2, INT32)
        if tree_mask.shape[0] != tokens:
            raise ValueError(f"tree_mask has {tree_mask.shape[0]} rows for {tokens} queries")


def _shape(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


_tree_attention = register(
    "tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor query_start,"
    " Tensor prefix_lens, Tensor? tree_mask, float scale) -> Tensor",
    tree_attention_twin,
    "attention.tree_attention",
    _shape,
)
