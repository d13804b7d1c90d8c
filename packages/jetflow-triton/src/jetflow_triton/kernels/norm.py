"""RMS norm: one program a row, the row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetflow_triton.kernels.common import EXACT, power_of_two, rows_of, warps_for


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    dtype = value.dtype
    if ADD:
        other = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(dtype)
        tl.store(total + row * WIDTH + columns, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed = (wide * scale).to(dtype)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    result = normed.to(tl.float32) * gain.to(tl.float32)
    tl.store(out + row * WIDTH + columns, result.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launches `rms_norm_kernel`."""
    rows = rows_of(x)
    out = x.new_empty(rows.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    _launch(rows, rows, weight, out, out, eps, add=False)
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Launches `rms_norm_kernel` with the sum in front."""
    rows, others = rows_of(x), rows_of(residual)
    out = x.new_empty(rows.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    total = x.new_empty(rows.shape)
    _launch(rows, others, weight, out, total, eps, add=True)
    return out.view(x.shape), total.view(x.shape)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, *, add: bool) -> None:
    if not x.shape[0]:
        return
    block = power_of_two(x.shape[1])
    rms_norm_kernel[(x.shape[0],)](
        x,
        residual,
        weight.contiguous(),
        out,
        total,
        x.stride(0),
        residual.stride(0),
        eps,
        WIDTH=x.shape[1],
        BLOCK=block,
        ADD=add,
        num_warps=warps_for(block),
        **EXACT,
    )
