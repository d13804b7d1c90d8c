"""Per-head norm and rotary embedding: a program a token and a block of heads, of q or of k."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jetflow_triton.kernels.common import EXACT, ceil_div, power_of_two


@triton.jit
def _norm_rotate(
    x,
    out,
    weight,
    cos,
    sin,
    x_token,
    x_head,
    token,
    first,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
):
    """Heads `first … first + BLOCK_H − 1` of one token, as their low and high halves."""
    half: tl.constexpr = WIDTH // 2
    heads = first + tl.arange(0, BLOCK_H)
    columns = tl.arange(0, BLOCK_D)
    inside = (heads < HEADS)[:, None] & (columns < half)[None, :]
    source = x + token * x_token + heads[:, None] * x_head + columns[None, :]
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + half, mask=inside, other=0.0)
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(low * low + high * high, 1) / WIDTH + eps)
        low_gain = tl.load(weight + columns, mask=columns < half, other=0.0).to(tl.float32)
        high_gain = tl.load(weight + half + columns, mask=columns < half, other=0.0).to(tl.float32)
        low = ((low * scale[:, None]).to(dtype).to(tl.float32) * low_gain[None, :]).to(dtype).to(tl.float32)
        high = ((high * scale[:, None]).to(dtype).to(tl.float32) * high_gain[None, :]).to(dtype).to(tl.float32)
    target = out + (token * HEADS + heads[:, None]) * WIDTH + columns[None, :]
    tl.store(target, (low * cos[None, :] - high * sin[None, :]).to(dtype), mask=inside)
    tl.store(target + half, (high * cos[None, :] + low * sin[None, :]).to(dtype), mask=inside)


@triton.jit
def qk_norm_rope_kernel(
    q,
    k,
    positions,
    cos_sin,
    q_weight,
    k_weight,
    q_out,
    k_out,
    q_token,
    q_head,
    k_token,
    k_head,
    eps,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_H
    q_blocks: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    columns = tl.arange(0, BLOCK_D)
    row = cos_sin + tl.load(positions + token).to(tl.int64) * WIDTH + columns
    cos = tl.load(row, mask=columns < WIDTH // 2, other=0.0)
    sin = tl.load(row + WIDTH // 2, mask=columns < WIDTH // 2, other=0.0)
    if first < q_blocks * BLOCK_H:
        _norm_rotate(
            q, q_out, q_weight, cos, sin, q_token, q_head, token, first, eps, Q_HEADS, WIDTH, BLOCK_H, BLOCK_D, Q_NORM
        )
    else:
        first -= q_blocks * BLOCK_H
        _norm_rotate(
            k, k_out, k_weight, cos, sin, k_token, k_head, token, first, eps, K_HEADS, WIDTH, BLOCK_H, BLOCK_D, K_NORM
        )


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Launches `qk_norm_rope_kernel`."""
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    tokens, q_heads, width = q.shape
    k_heads = k.shape[1]
    block_d = power_of_two(width // 2)
    block_h = max(1, min(power_of_two(max(q_heads, k_heads)), 1024 // block_d))
    blocks = ceil_div(q_heads, block_h) + ceil_div(k_heads, block_h)
    if tokens and blocks:
        qk_norm_rope_kernel[(tokens, blocks)](
            q,
            k,
            positions,
            cos_sin.contiguous(),
            q if q_weight is None else q_weight.contiguous(),
            k if k_weight is None else k_weight.contiguous(),
            q_out,
            k_out,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            eps,
            Q_HEADS=q_heads,
            K_HEADS=k_heads,
            WIDTH=width,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            Q_NORM=q_weight is not None,
            K_NORM=k_weight is not None,
            num_warps=4,
            **EXACT,
        )
    return q_out, k_out
