"""Attention of ragged token trees over a paged K/V cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from jetflow_triton.checks import INT32, INTEGER, check_devices, check_indices, check_rows, debugging
from jetflow_triton.dispatch import register, uses_op

ROWS_AT_ONCE = 64  # queries of a sequence whose float32 scores exist at the same time on the CPU


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    prefix_lens: Tensor,
    tree_mask: Tensor | None,
    scale: float,
    window: int | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Each query attends to its sequence's cached prefix and to its own ancestors in the sequence's tree.

    The K/V of query j of sequence b is in the cache already, at logical slot `prefix_lens[b] + j`; logical slot s is
    the physical slot `block_tables[b, s // page] * page + s % page`. Query j sees every slot below `prefix_lens[b]`,
    and slot `prefix_lens[b] + i` where bit `i % 32` of word `i // 32` of its mask row is set. Without a mask it sees
    i ≤ j: a causal chain. A query that sees nothing gives zeros.

    A sliding window acts on positions, not on slots: a query at position p loses the keys at positions ≤ p − window.
    A prefix slot's position is its own number; a tree node's is its entry of `positions`, so siblings share one.

    Args:
        q: `[T, Hq, D]`, last dimension contiguous.
        k_cache: `[blocks, page, Hk, D]` contiguous, dtype of q; Hk divides Hq. `v_cache` likewise.
        block_tables: `[B, P]` int32; entries beyond a sequence's last slot are not read.
        query_start: `[B + 1]` int32, rising from 0 to T.
        prefix_lens: `[B]` int32.
        tree_mask: `[T, W]` int32 with 32 W ≥ the longest tree, or None.
        scale: multiplies the scores, usually `D ** -0.5`.
        window: positions that a query sees, its own included; None for all.
        positions: `[T]` int32 or int64, `prefix_lens[b]` + depth in the tree; read with a window only.

    Returns:
        `[T, Hq, D]`. A row's result does not depend on the other sequences of the batch.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, stride or device does not fit, or (checked on the CPU) the values of the index tensors.
    """
    check_call(q, k_cache, v_cache, block_tables, query_start, prefix_lens, tree_mask)
    _check_window(q, window, positions)
    if debugging():
        check_layout(read_layout(q, k_cache, block_tables, query_start, prefix_lens, tree_mask, window, positions))
    run = _tree_attention if uses_op(q) else tree_attention_twin
    return run(q, k_cache, v_cache, block_tables, query_start, prefix_lens, tree_mask, scale, window, positions)


def tree_attention_twin(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    prefix_lens: Tensor,
    tree_mask: Tensor | None,
    scale: float,
    window: int | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Plain-torch `tree_attention`, float32 inside.

    Torch's fused attention costs more for the few queries of a step: its small half-precision products are slow.
    """
    group = q.shape[1] // k_cache.shape[2]
    # Every layer of a step asks for the same layout; it is found by content, so it can never be stale.
    layout = read_layout(q, k_cache, block_tables, query_start, prefix_lens, tree_mask, window, positions)
    shares = _shares(layout, group, torch.promote_types(q.dtype, torch.float32))
    outputs = [_attend(q, k_cache, v_cache, share, group, scale) for share in shares]
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs) if outputs else torch.empty_like(q)


@dataclass(frozen=True, slots=True)
class _Share:
    """Some rows of one sequence in a call."""

    first: int  # its rows of q are first … last − 1
    last: int
    start: int  # its slots are those from the beginning of block `start`,
    length: int
    blocks: Tensor | None  # or of these blocks, where they do not follow each other
    bias: Tensor  # [(last − first) * group, length], 0 where visible, −inf elsewhere
    blind: Tensor | None  # rows * group that see nothing


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, share: _Share, group: int, scale: float) -> Tensor:
    """`[rows, Hq, D]`. The query heads of one KV head are packed as rows, so K and V are not repeated."""
    rows, (_, heads, width), dtype = share.last - share.first, q.shape, share.bias.dtype
    if share.blocks is None:
        k, v = k_cache[share.start :], v_cache[share.start :]
    else:  # whole blocks: one by one, slots would take several times as long to copy
        k, v = k_cache.index_select(0, share.blocks), v_cache.index_select(0, share.blocks)
    k, v = k.flatten(0, 1)[: share.length].to(dtype), v.flatten(0, 1)[: share.length].to(dtype)
    packed = q[share.first : share.last].to(dtype).view(rows, heads // group, group, width).transpose(0, 1)
    packed = packed.reshape(heads // group, rows * group, width)
    weights = torch.baddbmm(share.bias, packed, k.permute(1, 2, 0), alpha=scale).softmax(-1)
    out = torch.bmm(weights, v.transpose(0, 1)).to(q.dtype)
    if share.blind is not None:
        out = out.masked_fill(share.blind.unsqueeze(1), 0.0)
    return out.view(-1, rows, group, width).transpose(0, 1).reshape(rows, heads, width)


@dataclass(frozen=True, slots=True)
class Layout:
    """The values of a call's index tensors."""

    tokens: int
    blocks: int
    page: int
    query_start: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    tree_mask: tuple[tuple[int, ...], ...] | None
    window: int | None
    positions: tuple[int, ...] | None  # None without a window


def read_layout(
    q: Tensor,
    k_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    prefix_lens: Tensor,
    tree_mask: Tensor | None,
    window: int | None = None,
    positions: Tensor | None = None,
) -> Layout:
    return Layout(
        q.shape[0],
        k_cache.shape[0],
        k_cache.shape[1],
        tuple(query_start.tolist()),
        tuple(prefix_lens.tolist()),
        tuple(map(tuple, block_tables.tolist())),
        None if tree_mask is None else tuple(map(tuple, tree_mask.tolist())),
        window,
        None if window is None or positions is None else tuple(positions.tolist()),
    )


@lru_cache(maxsize=16)
def _shares(layout: Layout, group: int, dtype: torch.dtype) -> list[_Share]:
    """How the twin reads the cache for a layout, which it checks first; it computes in `dtype`."""
    check_layout(layout)
    shares: list[_Share] = []
    for b, prefix in enumerate(layout.prefix_lens):
        first, last = layout.query_start[b], layout.query_start[b + 1]
        if first == last:
            continue
        blocks = layout.block_tables[b][: -(-(prefix + last - first) // layout.page)]
        joined = all(later == sooner + 1 for sooner, later in pairwise(blocks))
        scattered = None if joined else torch.tensor(blocks, dtype=torch.int64)
        visible = visible_slots(layout, first, last, prefix)
        for start in range(0, last - first, ROWS_AT_ONCE):
            own = visible[start : start + ROWS_AT_ONCE]
            seen = own.any(0).nonzero()
            length = int(seen[-1]) + 1 if len(seen) else 1  # what no row sees is not even read
            bias, blind = _bias(own[:, :length], group, dtype)
            shares.append(_Share(first + start, first + start + len(own), blocks[0], length, scattered, bias, blind))
    return shares


def visible_slots(layout: Layout, first: int, last: int, prefix: int) -> Tensor:
    """`[rows, prefix + rows]` bool: what each query of one sequence sees."""
    rows = last - first
    visible = torch.ones(rows, prefix + rows, dtype=torch.bool)
    if layout.tree_mask is None:
        visible[:, prefix:].tril_()
    else:
        words = torch.tensor(layout.tree_mask[first:last], dtype=torch.int32).unsqueeze(2)
        bits = words >> torch.arange(32, dtype=torch.int32)
        visible[:, prefix:] = (bits & 1).flatten(1)[:, :rows]
    if layout.window is not None and layout.positions is not None:
        own = torch.tensor(layout.positions[first:last])
        visible &= torch.cat((torch.arange(prefix), own)) > own.unsqueeze(1) - layout.window
    return visible


def _bias(visible: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    visible = visible.repeat_interleave(group, 0)
    blind = ~visible.any(1)
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
    if not bool(blind.any()):
        return bias, None
    return bias.masked_fill_(blind.unsqueeze(1), 0.0), blind  # a row of −inf would be NaN


def check_call(
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
    check_devices(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=block_tables,
        query_start=query_start,
        prefix_lens=prefix_lens,
        tree_mask=tree_mask,
    )
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
        if tree_mask.shape[1] * 32 * batch < tokens:  # the longest tree has the mean length or more
            raise ValueError(
                f"tree_mask has {tree_mask.shape[1]} words a row for the {tokens} queries of {batch} sequences"
            )


def _check_window(q: Tensor, window: int | None, positions: Tensor | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: a query sees at least 1 position, its own")
    if positions is not None:
        check_indices("positions", positions, 1, INTEGER)
        check_devices(q=q, positions=positions)
        if positions.shape[0] != q.shape[0]:
            raise ValueError(f"positions has {positions.shape[0]} entries for {q.shape[0]} queries")
    elif window is not None:
        raise ValueError("positions is None: a window needs the position of each query")


def check_layout(layout: Layout) -> None:
    """The values that a GPU takes on trust."""
    starts = layout.query_start
    if starts[0] != 0 or starts[-1] != layout.tokens or any(b < a for a, b in pairwise(starts)):
        raise ValueError(f"query_start is {list(starts)}: it must rise from 0 to the {layout.tokens} queries")
    for b, prefix in enumerate(layout.prefix_lens):
        nodes = starts[b + 1] - starts[b]
        if prefix < 0:
            raise ValueError(f"prefix_lens has {prefix} for sequence {b}: lengths are 0 or more")
        blocks = layout.block_tables[b][: -(-(prefix + nodes) // layout.page)] if nodes else ()
        if nodes and len(blocks) * layout.page < prefix + nodes:
            raise ValueError(
                f"block_tables has {len(blocks)} blocks of {layout.page} for the {prefix + nodes} slots of sequence {b}"
            )
        if blocks and not 0 <= min(blocks) <= max(blocks) < layout.blocks:
            raise ValueError(
                f"block_tables has blocks {min(blocks)} … {max(blocks)} for sequence {b}: "
                f"the cache has 0 … {layout.blocks - 1}"
            )
        if layout.tree_mask is not None and nodes and len(layout.tree_mask[starts[b]]) * 32 < nodes:
            words = len(layout.tree_mask[starts[b]])
            raise ValueError(f"tree_mask has {words} words a row for the {nodes} queries of sequence {b}")


def _shape(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


_tree_attention = register(
    "tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor query_start,"
    " Tensor prefix_lens, Tensor? tree_mask, float scale, int? window=None, Tensor? positions=None) -> Tensor",
    tree_attention_twin,
    "attention.tree_attention",
    _shape,
)
