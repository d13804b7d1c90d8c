"""Row-invariant product: one tile height, one step along K, no split of K, whatever the number of rows.

With few rows the kernel streams the weight once and the padded rows of its tile cost nothing; with many, programs that
share a block of the weight run side by side, so that it comes from the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from jetflow_triton.kernels.common import EXACT, ceil_div, dot_precision

ROWS = 64  # another tile height would change the tensor-core instruction, and with it the bits


@triton.jit(do_not_specialize=["tokens"])
def linear_kernel(
    x,
    weight,
    bias,
    out,
    tokens,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: tiles of rows, blocks of columns."""
    rows, columns = (
        tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M),
        tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N),
    )
    real, kept = rows < tokens, columns < COLUMNS
    depth = tl.arange(0, BLOCK_K)
    x_at = x + rows.to(tl.int64)[:, None] * WIDTH + depth[None, :]
    weight_at = weight + tl.where(kept, columns, 0).to(tl.int64)[None, :] * WIDTH + depth[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for base in range(0, WIDTH, BLOCK_K):
        inside = depth < WIDTH - base
        a = tl.load(x_at + base, mask=real[:, None] & inside[None, :], other=0.0)
        b = tl.load(weight_at + base, mask=inside[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + columns, mask=kept, other=0.0).to(tl.float32)[None, :]
    target = out + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=real[:, None] & kept[None, :])


@dataclass(frozen=True, slots=True)
class Tile:
    """How one weight and dtype run."""

    block_n: int
    block_k: int
    warps: int
    stages: int


def tile_for(columns: int, itemsize: int) -> Tile:
    """Columns enough to give every processor of a large GPU a program; a function of the weight alone, not of the rows."""
    if itemsize == 4:
        return Tile(32, 32, 4, 3)
    block_n = 128 if columns >= 128 * 128 else 64 if columns >= 64 * 128 else 32
    return Tile(block_n, 64, 4, 3 if block_n == 128 else 4)  # within the 64 KB of shared memory that AMD's have


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Launches `linear_kernel`."""
    x = x.contiguous()  # a stride that is a compile-time constant lets the loads be wide and asynchronous
    tokens, width = x.shape
    columns = weight.shape[0]
    out = x.new_empty(tokens, columns)
    if not tokens:
        return out
    tile = tile_for(columns, x.element_size())
    linear_kernel[(ceil_div(tokens, ROWS), ceil_div(columns, tile.block_n))](
        x,
        weight,
        weight if bias is None else bias.contiguous(),
        out,
        tokens,
        WIDTH=width,
        COLUMNS=columns,
        BLOCK_M=ROWS,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        BIAS=bias is not None,
        PRECISION=dot_precision(x.dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **EXACT,
    )
    return out
