"""Mixture of experts: routing, a counting sort of the (token, expert) pairs, two grouped products, an ordered combine.

Nothing is read back to the host: the grid is the largest that any routing can need, and a program finds its expert from
the experts' starts in the sorted order. Every sum has a fixed order, so equal input gives equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetflow_triton.kernels.activation import silu
from jetflow_triton.kernels.common import EXACT, ceil_div, dot_precision, power_of_two
from jetflow_triton.tiles import Tile, tile_for


@triton.jit
def moe_route_kernel(
    logits,
    weights,
    experts,
    stride,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """One token a program: softmax, then the largest again and again."""
    token = tl.program_id(0).to(tl.int64)
    index, rank = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    row = tl.load(logits + token * stride + index, mask=index < EXPERTS, other=float("-inf")).to(tl.float32)
    p = tl.exp(row - tl.max(row, 0))
    total = tl.sum(p, 0)
    p = tl.where(index < EXPERTS, tl.where(total > 0.0, p / total, 0.0), -1.0)  # a row with a NaN ranks by index
    best_p, best = tl.zeros([BLOCK_K], tl.float32), tl.zeros([BLOCK_K], tl.int32)
    for i in tl.static_range(TOP_K):
        top = tl.max(p, 0)
        winner = tl.min(tl.where(p == top, index, BLOCK), 0)
        best_p, best = tl.where(rank == i, top, best_p), tl.where(rank == i, winner, best)
        p = tl.where(index == winner, -1.0, p)
    if RENORMALIZE:
        best_p = best_p / tl.sum(best_p, 0)
    best_p += total - total  # and has NaN for weights
    tl.store(weights + token * TOP_K + rank, best_p, mask=rank < TOP_K)
    tl.store(experts + token * TOP_K + rank, best, mask=rank < TOP_K)


@triton.jit(do_not_specialize=["pairs"])
def sort_pairs_kernel(experts, order, starts, pairs, BLOCK: tl.constexpr):
    """One expert a program: where its pairs start, and which they are, in their order."""
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    start = 0
    for base in range(0, pairs, BLOCK):
        chosen = tl.load(experts + base + index, mask=base + index < pairs, other=2147483647)
        start += tl.sum((chosen < expert).to(tl.int32), 0)
    tl.store(starts + expert, start)
    place = start
    for base in range(0, pairs, BLOCK):
        mine = (tl.load(experts + base + index, mask=base + index < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, base + index, mask=mine != 0)
        place += tl.sum(mine, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, place)


@triton.jit
def _find_expert(starts, tile, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a tile, the tile's first place in the sorted order, and the expert's end; `EXPERTS` if none."""
    index = tl.arange(0, BLOCK_E)
    inside = index < EXPERTS
    first = tl.load(starts + index, mask=inside, other=0)
    tiles = (tl.load(starts + index + 1, mask=inside, other=0) - first + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum(((tl.cumsum(tiles, 0) <= tile) & inside).to(tl.int32), 0)
    before = tl.sum(tl.where(index < expert, tiles, 0), 0)
    start = tl.sum(tl.where(index == expert, first, 0), 0)
    return expert, start + (tile - before) * BLOCK_M


@triton.jit
def gate_up_kernel(
    x,
    gate_up,
    order,
    starts,
    out,
    x_stride,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`silu(x @ gate) * (x @ up)` of the sorted pairs. Grid: tiles of pairs, blocks of inner columns."""
    expert, place = _find_expert(starts, tl.program_id(0), EXPERTS, BLOCK_E, BLOCK_M)
    if expert >= EXPERTS:
        return
    places = place + tl.arange(0, BLOCK_M)
    real = places < tl.load(starts + expert + 1)
    token = (tl.load(order + places, mask=real, other=0) // TOP_K).to(tl.int64)
    columns, depth = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    kept = columns < INNER
    matrix = gate_up + expert.to(tl.int64) * (2 * INNER * WIDTH)
    gate_at = matrix + tl.where(kept, columns, 0)[None, :] * WIDTH + depth[:, None]
    x_at = x + token[:, None] * x_stride + depth[None, :]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for base in range(0, WIDTH, BLOCK_K):
        inside = depth < WIDTH - base
        a = tl.load(x_at + base, mask=real[:, None] & inside[None, :], other=0.0)
        g = tl.load(gate_at + base, mask=inside[:, None], other=0.0)
        u = tl.load(gate_at + INNER * WIDTH + base, mask=inside[:, None], other=0.0)
        gate = tl.dot(a, g, gate, input_precision=PRECISION)
        up = tl.dot(a, u, up, input_precision=PRECISION)
    target = out + places.to(tl.int64)[:, None] * INNER + columns[None, :]
    tl.store(target, (silu(gate) * up).to(out.dtype.element_ty), mask=real[:, None] & kept[None, :])


@triton.jit
def down_kernel(
    hidden,
    down,
    order,
    starts,
    weights,
    out,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`weight * hidden @ down`, stored at the pair's own place. Grid: tiles of pairs, blocks of columns."""
    expert, place = _find_expert(starts, tl.program_id(0), EXPERTS, BLOCK_E, BLOCK_M)
    if expert >= EXPERTS:
        return
    places = place + tl.arange(0, BLOCK_M)
    real = places < tl.load(starts + expert + 1)
    pair = tl.load(order + places, mask=real, other=0).to(tl.int64)
    columns, depth = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    kept = columns < WIDTH
    matrix = down + expert.to(tl.int64) * (WIDTH * INNER)
    b_at = matrix + tl.where(kept, columns, 0)[None, :] * INNER + depth[:, None]
    a_at = hidden + places.to(tl.int64)[:, None] * INNER + depth[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for base in range(0, INNER, BLOCK_K):
        inside = depth < INNER - base
        a = tl.load(a_at + base, mask=real[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_at + base, mask=inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    acc *= tl.load(weights + pair, mask=real, other=0.0)[:, None]
    target = out + pair[:, None] * WIDTH + columns[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=real[:, None] & kept[None, :])


@triton.jit
def combine_kernel(pairs, out, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Sums a token's experts in their order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    acc = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        acc += tl.load(pairs + (token * TOP_K + i) * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + columns, acc.to(out.dtype.element_ty), mask=inside)


def moe_route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Launches `moe_route_kernel`."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, top_k, dtype=torch.float32)
    chosen = logits.new_empty(tokens, top_k, dtype=torch.int32)
    if tokens:
        moe_route_kernel[(tokens,)](
            logits,
            weights,
            chosen,
            logits.stride(0),
            EXPERTS=experts,
            TOP_K=top_k,
            BLOCK=power_of_two(experts),
            BLOCK_K=power_of_two(top_k),
            RENORMALIZE=renormalize,
            num_warps=1 if experts <= 256 else 4,
            **EXACT,
        )
    return weights, chosen


def moe_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    experts: Tensor,
    exact: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """Launches the sort, the two grouped products and the combine; `tile` overrides the table, for the tuner."""
    del exact  # no row's bits ever depend on the others here
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, width = x.shape
    count, _, inner = down.shape
    top_k = experts.shape[1]
    pairs = tokens * top_k
    out = x.new_empty(tokens, width)
    if not pairs:
        return out.zero_()
    experts, weights = experts.contiguous(), weights.contiguous()
    order = experts.new_empty(pairs, dtype=torch.int32)
    starts = experts.new_empty(count + 1, dtype=torch.int32)
    sort_pairs_kernel[(count,)](experts, order, starts, pairs, BLOCK=1024, num_warps=4, **EXACT)
    hidden, per_pair = x.new_empty(pairs, inner), x.new_empty(pairs, width)
    if tile is None:  # 16 rows stream the weights of a decode step, larger tiles reuse them
        tile = tile_for("moe_experts", ceil_div(pairs, count), (count, width, inner), x.dtype, x.device)
    shared = {
        "EXPERTS": count,
        "WIDTH": width,
        "INNER": inner,
        "BLOCK_E": power_of_two(count),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "PRECISION": dot_precision(x.dtype),
        **EXACT,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    tiles = min(pairs, count + pairs // tile.block_m)
    gate_up_kernel[(tiles, ceil_div(inner, tile.block_n))](
        x, gate_up, order, starts, hidden, x.stride(0), TOP_K=top_k, **shared
    )
    down_kernel[(tiles, ceil_div(width, tile.block_n))](hidden, down, order, starts, weights, per_pair, **shared)
    block = min(1024, power_of_two(width))
    combine_kernel[(tokens, ceil_div(width, block))](
        per_pair, out, WIDTH=width, TOP_K=top_k, BLOCK=block, num_warps=4, **EXACT
    )
    return out
