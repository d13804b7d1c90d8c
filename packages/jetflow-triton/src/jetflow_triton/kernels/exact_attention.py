"""Paged tree attention whose rows are functions of their own query and visible keys: see `jetflow_triton.exact_attention`.

A program owns a tile of rows, each a (query, query head) pair. Whole blocks of keys are products of the tile; a row that
does not see a block skips it by a weight of exact zero. The keys behind a row's last block come one at a time, in slot
order: adding a key that a row does not see changes no bit of it, so it does not matter which other nodes a tree has.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetflow_triton.exact_attention import LAG, SPAN
from jetflow_triton.kernels.attention import find_sequence, merge_split, no_slots
from jetflow_triton.kernels.common import EXACT, dot_precision, power_of_two


@triton.jit
def _set_bits(words):
    """The number of bits set in each int32."""
    words = words.to(tl.uint32, bitcast=True)
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words + (words >> 8) + (words >> 16) + (words >> 24)) & 0xFF).to(tl.int32)


@triton.jit
def _offset(table, slots, kv_head, PAGE: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Where the keys of logical slots begin in the cache."""
    page = tl.load(table + slots // PAGE).to(tl.int64)
    return ((page * PAGE + slots % PAGE) * KV_HEADS + kv_head) * WIDTH


@triton.jit(
    do_not_specialize=["table_width", "mask_words", "batch"],
    do_not_specialize_on_alignment=["block_tables", "query_start", "prefix_lens", "tree_mask"],
)
def tree_attention_exact_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    query_start,
    prefix_lens,
    tree_mask,
    out,
    q_token,
    q_head,
    table_width,
    mask_words,
    batch,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPAN: tl.constexpr,
    LAG: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: tiles, KV heads. `mask_words` is 0 for chains: one kernel serves both, so that both have the same bits."""
    kv_head = tl.program_id(1)
    sequence, tile = find_sequence(query_start, batch, tl.program_id(0), BLOCK_M // GROUP, BLOCK_B)
    if sequence >= batch:
        return
    first = tl.load(query_start + sequence)
    count = tl.load(query_start + sequence + 1) - first
    prefix = tl.load(prefix_lens + sequence)
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

    nodes = tl.where(mask_words > 0, 0, query + 1)
    for word in range(mask_words):
        nodes += _set_bits(tl.load(mask_row + word, mask=row_inside, other=0))
    blocks = tl.where(row_inside, tl.maximum(prefix + nodes - LAG, 0) // SPAN, 0)
    most = tl.max(blocks, 0)
    least = tl.min(tl.where(row_inside, blocks, most), 0)
    # Nodes behind the tile's last query are invisible to a chain.
    high = tl.where(mask_words > 0, prefix + count, prefix + tl.minimum(count, (tile + 1) * (BLOCK_M // GROUP)))

    acc, peak, total = no_slots(BLOCK_M, BLOCK_D)
    lanes_inside = (lanes < WIDTH)[None, :]
    for block in range(most):
        slots = block * SPAN + tl.arange(0, SPAN)
        offset = _offset(table, slots, kv_head, PAGE, KV_HEADS, WIDTH)
        k = tl.load(k_cache + offset[:, None] + lanes[None, :], mask=lanes_inside, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k), input_precision=PRECISION) * scale
        top = tl.max(scores, 1)
        weights = tl.exp2(scores - top[:, None])
        v = tl.load(v_cache + offset[:, None] + lanes[None, :], mask=lanes_inside, other=0.0)
        values = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        sees = block < blocks
        acc, peak, total = merge_split(
            acc, peak, total,
            tl.where(sees[:, None], values, 0.0), tl.where(sees, top, float("-inf")), tl.where(sees, tl.sum(weights, 1), 0.0),
        )  # fmt: skip

    wide_q = q_tile.to(tl.float32)
    masked = row_inside & (query * 0 + mask_words > 0)
    for slot in range(least * SPAN, high):
        node = query * 0 + slot - prefix
        bits = tl.load(mask_row + node // 32, mask=masked & (node >= 0), other=0)
        in_tree = tl.where(masked, ((bits >> (node % 32)) & 1) != 0, node <= query)
        sees = row_inside & (slot >= blocks * SPAN) & ((node < 0) | in_tree)
        offset = _offset(table, slot, kv_head, PAGE, KV_HEADS, WIDTH)
        k = tl.load(k_cache + offset + lanes, mask=lanes < WIDTH, other=0.0).to(tl.float32)
        v = tl.load(v_cache + offset + lanes, mask=lanes < WIDTH, other=0.0).to(tl.float32)
        score = tl.where(sees, tl.sum(wide_q * k[None, :], 1) * scale, float("-inf"))
        values = tl.where(sees[:, None], v[None, :], 0.0)
        acc, peak, total = merge_split(acc, peak, total, values, score, tl.where(sees, 1.0, 0.0))

    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    place = token * HEADS + head
    tl.store(out + place[:, None] * WIDTH + lanes[None, :], result.to(out.dtype.element_ty), mask=stored)


def tile_rows(width: int, itemsize: int) -> int:
    """Rows of a tile, as many as the registers hold; a function of model constants only, for the bits depend on it."""
    if itemsize == 4:
        return 16
    return 64 if power_of_two(width) <= 128 else 32


def tree_attention_exact(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    prefix_lens: Tensor,
    tree_mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Launches `tree_attention_exact_kernel`."""
    tokens, heads, width = q.shape
    page, kv_heads = k_cache.shape[1:3]
    batch, table_width = block_tables.shape
    out = q.new_empty(q.shape)
    if not tokens:
        return out
    group = power_of_two(heads // kv_heads)
    rows = max(tile_rows(width, q.element_size()), group)
    tiles = min(tokens, batch + tokens // (rows // group))
    tree_attention_exact_kernel[(tiles, kv_heads)](
        q,
        k_cache,
        v_cache,
        block_tables.contiguous(),
        query_start,
        prefix_lens,
        query_start if tree_mask is None else tree_mask.contiguous(),
        out,
        q.stride(0),
        q.stride(1),
        table_width,
        0 if tree_mask is None else tree_mask.shape[1],
        batch,
        scale * 1.4426950408889634,  # the kernel's exponentials have base 2
        HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        PAGE=page,
        GROUP=group,
        BLOCK_B=power_of_two(batch),
        BLOCK_M=rows,
        BLOCK_D=max(16, power_of_two(width)),
        SPAN=SPAN,
        LAG=LAG,
        PRECISION=dot_precision(q.dtype),
        num_warps=8,
        num_stages=2,
        **EXACT,
    )
    return out
