"""Paged tree attention: flash attention over fixed splits of the slots, merged in order.

A program owns a tile of rows, each a (query, query head) pair, the query heads of one KV head side by side. The prefix
is cut into splits of `SPLIT` slots whatever the batch, and the tree belongs to the last of them. Each split is reduced
alone, and splits are merged one after the other by the same arithmetic, in registers when there are tiles enough to
fill a GPU and in a second kernel when not. So the bits of a row are a function of its own query, prefix and tree.

After FlashAttention-2 (Dao 2023), Flash-Decoding (Dao et al. 2023) and PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetflow_triton.kernels.common import EXACT, ceil_div, dot_precision, power_of_two

SPLIT = 512
ROWS = 64  # one tile height for every shape: another would change the tensor-core instruction, and with it the bits
FILLED = 128  # programs that keep a GPU busy without splitting


@triton.jit
def find_sequence(query_start, batch, tile, QUERIES: tl.constexpr, BLOCK_B: tl.constexpr):
    """The sequence that owns a tile of `QUERIES` queries, and the tile's number in it; `batch` if there is none."""
    index = tl.arange(0, BLOCK_B)
    first = tl.load(query_start + index, mask=index < batch, other=0)
    last = tl.load(query_start + index + 1, mask=index < batch, other=0)
    tiles = (last - first + QUERIES - 1) // QUERIES
    ends = tl.cumsum(tiles, 0)
    sequence = tl.sum(tl.where((ends <= tile) & (index < batch), 1, 0), 0)
    before = tl.sum(tl.where(index < sequence, tiles, 0), 0)
    return sequence, tile - before


@triton.jit
def no_slots(ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The state of rows that have seen no slot: their sum of values, highest score and sum of weights."""
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    return acc, tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)


@triton.jit
def merge_split(acc, peak, total, new_acc, new_peak, new_total):
    """Adds one split to the splits before it."""
    top = tl.maximum(peak, new_peak)
    base = tl.where(top == float("-inf"), 0.0, top)
    keep, add = tl.exp2(peak - base), tl.exp2(new_peak - base)
    return acc * keep[:, None] + new_acc * add[:, None], top, total * keep + new_total * add


@triton.jit
def _reduce(
    q,
    k_cache,
    v_cache,
    table,
    mask_row,
    mask_bits,
    query,
    row_inside,
    positions,
    oldest,
    low,
    middle,
    prefix,
    high,
    scale,
    kv_head,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over the slots `low … middle − 1` of the prefix, then `prefix … high − 1` of the tree.

    `positions` are those of the sequence's queries, `oldest` the first position that each row's window holds.
    """
    acc, peak, total = no_slots(BLOCK_M, BLOCK_D)
    lanes, block_lanes = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    behind = (tl.maximum(middle - low, 0) + BLOCK_N - 1) // BLOCK_N  # blocks of the prefix
    for i in range(behind + (high - prefix + BLOCK_N - 1) // BLOCK_N):
        in_tree = i >= behind
        start = tl.where(in_tree, prefix + (i - behind) * BLOCK_N, low + i * BLOCK_N)
        slots = start + block_lanes
        inside = slots < tl.where(in_tree, high, middle)
        block = tl.load(table + slots // PAGE, mask=inside, other=0).to(tl.int64)
        offset = ((block * PAGE + slots % PAGE) * KV_HEADS + kv_head) * WIDTH
        loaded = inside[:, None] & (lanes < WIDTH)[None, :]
        k = tl.load(k_cache + offset[:, None] + lanes[None, :], mask=loaded, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = tl.broadcast_to(inside[None, :], scores.shape)
        node = start - prefix  # in the tree a multiple of the block: its bits are one word a row, or two
        if HAS_MASK:
            row_word, at = mask_row + node // 32, query * 0 + node
            reached = row_inside & (at >= 0)
            words = tl.load(row_word, mask=reached & (at < mask_bits), other=0)[:, None]
            if BLOCK_N > 32:
                more = tl.load(row_word + 1, mask=reached & (at + 32 < mask_bits), other=0)[:, None]
                words = tl.where((block_lanes < 32)[None, :], words, more)
            words |= tl.where(node >= 0, 0, -1)
            seen = seen & (((words >> ((node + block_lanes) & 31)[None, :]) & 1) != 0)
        else:
            seen = seen & ((node + block_lanes)[None, :] <= query[:, None])
        if HAS_WINDOW:
            place = tl.load(positions + slots - prefix, mask=inside & (slots >= prefix), other=0).to(tl.int64)
            seen = seen & (tl.where(slots >= prefix, place, slots)[None, :] >= oldest[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(scores - base[:, None])
        keep = tl.exp2(peak - base)
        v = tl.load(v_cache + offset[:, None] + lanes[None, :], mask=loaded, other=0.0)
        acc = acc * keep[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        total = total * keep + tl.sum(p, 1)
        peak = top
    return acc, peak, total


@triton.jit(
    do_not_specialize=["table_width", "mask_words", "batch", "tokens", "window"],
    do_not_specialize_on_alignment=["block_tables", "query_start", "prefix_lens", "tree_mask", "positions"],
)
def tree_attention_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    query_start,
    prefix_lens,
    tree_mask,
    positions,
    out,
    partial,
    partial_stats,
    q_token,
    q_head,
    table_width,
    mask_words,
    batch,
    tokens,
    window,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    IN_GRID: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: tiles, KV heads, splits. `IN_GRID`: one split a program, written to `partial`; else all, to `out`."""
    kv_head = tl.program_id(1)
    sequence, tile = find_sequence(query_start, batch, tl.program_id(0), BLOCK_M // GROUP, BLOCK_B)
    if sequence >= batch:
        return
    first = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - first
    prefix = tl.load(prefix_lens + sequence)
    splits = tl.maximum((prefix + SPLIT_SIZE - 1) // SPLIT_SIZE, 1)
    one = tl.program_id(2)
    if one >= splits:
        return
    rows = tl.arange(0, BLOCK_M)
    query, member = tile * (BLOCK_M // GROUP) + rows // GROUP, rows % GROUP
    row_inside = (query < count) & (member < HEADS // KV_HEADS)
    token = (first + query).to(tl.int64)
    head = kv_head * (HEADS // KV_HEADS) + member
    lanes = tl.arange(0, BLOCK_D)
    stored = row_inside[:, None] & (lanes < WIDTH)[None, :]
    q_tile = tl.load(q + token[:, None] * q_token + head[:, None] * q_head + lanes[None, :], mask=stored, other=0.0)
    mask_row = tree_mask + token * mask_words
    table = block_tables + sequence.to(tl.int64) * table_width

    high = prefix + count
    if not HAS_MASK:  # later nodes are invisible to the whole tile
        high = tl.minimum(high, prefix + (tile + 1) * (BLOCK_M // GROUP))
    begin = one if IN_GRID else 0
    end = one + 1 if IN_GRID else splits
    oldest = tl.zeros([BLOCK_M], tl.int64)
    unseen = 0  # blocks of slots that every row's window has left behind are skipped, which changes no bit
    if HAS_WINDOW:
        oldest = tl.load(positions + token, mask=row_inside, other=2147483647).to(tl.int64) - window + 1
        unseen = tl.maximum(tl.min(oldest, 0), 0).to(tl.int32) // BLOCK_N * BLOCK_N
        if not IN_GRID:
            begin = tl.minimum(unseen // SPLIT_SIZE, splits - 1)

    acc, peak, total = no_slots(BLOCK_M, BLOCK_D)
    for split in range(begin, end):
        low = split * SPLIT_SIZE
        new_acc, new_peak, new_total = _reduce(
            q_tile, k_cache, v_cache, table, mask_row, mask_words * 32, query, row_inside, positions + first, oldest,
            tl.maximum(low, unseen), tl.minimum(low + SPLIT_SIZE, prefix),
            prefix, tl.where(split == splits - 1, high, prefix), scale, kv_head,
            PAGE, KV_HEADS, WIDTH, BLOCK_M, BLOCK_N, BLOCK_D, HAS_MASK, HAS_WINDOW, PRECISION,
        )  # fmt: skip
        if IN_GRID:
            acc, peak, total = new_acc, new_peak, new_total
        else:
            acc, peak, total = merge_split(acc, peak, total, new_acc, new_peak, new_total)

    place = token * HEADS + head
    if IN_GRID:
        place += one.to(tl.int64) * tokens * HEADS
        tl.store(partial + place[:, None] * WIDTH + lanes[None, :], acc, mask=stored)
        tl.store(partial_stats + place * 2, peak, mask=row_inside)
        tl.store(partial_stats + place * 2 + 1, total, mask=row_inside)
    else:
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out + place[:, None] * WIDTH + lanes[None, :], result.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["batch", "tokens"], do_not_specialize_on_alignment=["query_start", "prefix_lens"])
def merge_splits_kernel(
    partial,
    partial_stats,
    query_start,
    prefix_lens,
    out,
    batch,
    tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
):
    """Grid: tokens, blocks of heads. Merges a row's splits in order."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_B)
    last = tl.load(query_start + index + 1, mask=index < batch, other=0)
    sequence = tl.sum(tl.where((last <= token) & (index < batch), 1, 0), 0)
    splits = tl.maximum((tl.load(prefix_lens + sequence) + SPLIT_SIZE - 1) // SPLIT_SIZE, 1)
    heads, lanes = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside = heads < HEADS
    stored = inside[:, None] & (lanes < WIDTH)[None, :]
    acc, peak, total = no_slots(BLOCK_H, BLOCK_D)
    for split in range(splits):
        place = (token + split * tokens) * HEADS + heads
        new_acc = tl.load(partial + place[:, None] * WIDTH + lanes[None, :], mask=stored, other=0.0)
        new_peak = tl.load(partial_stats + place * 2, mask=inside, other=float("-inf"))
        new_total = tl.load(partial_stats + place * 2 + 1, mask=inside, other=0.0)
        acc, peak, total = merge_split(acc, peak, total, new_acc, new_peak, new_total)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    place = token * HEADS + heads
    tl.store(out + place[:, None] * WIDTH + lanes[None, :], result.to(out.dtype.element_ty), mask=stored)


@dataclass(frozen=True, slots=True)
class Tile:
    """How one head width and dtype run."""

    block_n: int
    warps: int
    stages: int


def tile_for(width: int, itemsize: int) -> Tile:
    """Keeps K and V of `stages` blocks within shared memory; a function of model constants only."""
    size = power_of_two(width) * itemsize
    if size <= 128:
        return Tile(64, 8, 3)
    if size <= 256:
        return Tile(64, 8, 2)
    return Tile(32 if size <= 512 else 16, 8, 2)


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
    """Launches `tree_attention_kernel`, and `merge_splits_kernel` where the splits are spread over the grid."""
    tokens, heads, width = q.shape
    page, kv_heads = k_cache.shape[1:3]
    batch, table_width = block_tables.shape
    out = q.new_empty(q.shape)
    if not tokens:
        return out
    group = power_of_two(heads // kv_heads)
    rows = max(ROWS, group)
    block_b, block_d = power_of_two(batch), max(16, power_of_two(width))
    tiles = min(tokens, batch + tokens // (rows // group))
    splits = ceil_div(table_width * page, SPLIT)
    in_grid = splits > 1 and tiles * kv_heads < FILLED
    partial = q.new_empty((splits, tokens, heads, width) if in_grid else (1,), dtype=torch.float32)
    stats = q.new_empty((splits, tokens, heads, 2) if in_grid else (1,), dtype=torch.float32)
    tile = tile_for(width, q.element_size())
    tree_attention_kernel[(tiles, kv_heads, splits if in_grid else 1)](
        q,
        k_cache,
        v_cache,
        block_tables.contiguous(),
        query_start,
        prefix_lens,
        query_start if tree_mask is None else tree_mask.contiguous(),
        query_start if positions is None or window is None else positions,
        out,
        partial,
        stats,
        q.stride(0),
        q.stride(1),
        table_width,
        0 if tree_mask is None else tree_mask.shape[1],
        batch,
        tokens,
        window or 0,
        scale * 1.4426950408889634,  # the kernel's exponentials have base 2
        HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        PAGE=page,
        GROUP=group,
        BLOCK_B=block_b,
        BLOCK_M=rows,
        BLOCK_N=tile.block_n,
        BLOCK_D=block_d,
        SPLIT_SIZE=SPLIT,
        IN_GRID=in_grid,
        HAS_MASK=tree_mask is not None,
        HAS_WINDOW=window is not None,
        PRECISION=dot_precision(q.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **EXACT,
    )
    if in_grid:
        block_h = max(1, min(power_of_two(heads), 1024 // block_d))
        merge_splits_kernel[(tokens, ceil_div(heads, block_h))](
            partial,
            stats,
            query_start,
            prefix_lens,
            out,
            batch,
            tokens,
            HEADS=heads,
            WIDTH=width,
            BLOCK_B=block_b,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            SPLIT_SIZE=SPLIT,
            num_warps=4,
            **EXACT,
        )
    return out
