"""SwiGLU: a program a block of columns of one row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetflow_triton.kernels.common import EXACT, ceil_div, power_of_two, rows_of


@triton.jit
def silu(x):
    e = tl.exp(-tl.abs(x))  # never above 1
    return x * tl.where(x < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def silu_mul_kernel(gate_up, out, stride, INNER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < INNER
    start = gate_up + row * stride + columns
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + INNER, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + columns, (silu(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Launches `silu_mul_kernel`."""
    rows = rows_of(gate_up)
    inner = rows.shape[1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], inner)
    block = min(1024, power_of_two(inner))
    if rows.shape[0]:
        silu_mul_kernel[(rows.shape[0], ceil_div(inner, block))](
            rows, out, rows.stride(0), INNER=inner, BLOCK=block, num_warps=4, **EXACT
        )
    return out
