"""Paged K/V cache: scatter by slot, and moves through a scratch copy."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetflow_triton.kernels.common import EXACT, ceil_div, power_of_two


@triton.jit(do_not_specialize_on_alignment=["slots"])
def kv_write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    k_token,
    k_head,
    v_token,
    v_head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token a program."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    columns = tl.arange(0, BLOCK)
    inside = columns < tl.where(slot >= 0, HEADS * WIDTH, 0)
    head, lane = columns // WIDTH, columns % WIDTH
    k_value = tl.load(k + token * k_token + head * k_head + lane, mask=inside)
    v_value = tl.load(v + token * v_token + head * v_head + lane, mask=inside)
    tl.store(k_cache + slot * (HEADS * WIDTH) + columns, k_value.to(k_cache.dtype.element_ty), mask=inside)
    tl.store(v_cache + slot * (HEADS * WIDTH) + columns, v_value.to(v_cache.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["moves"], do_not_specialize_on_alignment=["slots", "targets"])
def kv_copy_kernel(
    kv, scratch, slots, targets, moves, plane_size, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GATHER: tl.constexpr
):
    """One move and one plane (K or V of a layer) a program: cache to scratch, or scratch to cache."""
    move, plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < tl.where(tl.load(targets + move) >= 0, WIDTH, 0)
    cached = kv + plane * plane_size + tl.load(slots + move) * WIDTH + columns
    kept = scratch + (plane * moves + move) * WIDTH + columns
    if GATHER:
        tl.store(kept, tl.load(cached, mask=inside), mask=inside)
    else:
        tl.store(cached, tl.load(kept, mask=inside), mask=inside)


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Launches `kv_write_kernel`."""
    tokens, heads, width = k.shape
    if not tokens:
        return
    kv_write_kernel[(tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        HEADS=heads,
        WIDTH=width,
        BLOCK=power_of_two(heads * width),
        num_warps=4,
        **EXACT,
    )


def kv_move(kv: Tensor, source: Tensor, target: Tensor) -> None:
    """Launches `kv_copy_kernel` twice: everything is read before anything is written."""
    moves, planes = source.shape[0], kv.shape[0] * 2
    if not moves:
        return
    width = kv.shape[4] * kv.shape[5]
    scratch = kv.new_empty(planes, moves, width)
    block = min(1024, power_of_two(width))
    plane_size = kv.stride(1)
    grid = (moves, planes, ceil_div(width, block))
    for slots, gather in ((source, True), (target, False)):
        kv_copy_kernel[grid](
            kv, scratch, slots, target, moves, plane_size, WIDTH=width, BLOCK=block, GATHER=gather, num_warps=4, **EXACT
        )
