"""Per-head q/k RMS norm and rotary embedding (Su et al. 2021, half-rotation layout) as one op."""

from __future__ import annotations

import torch
from torch import Tensor

from jetflow_triton.checks import check_indices, check_rows, check_weight
from jetflow_triton.norm import rms_norm_twin


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Normalises each head of q and k if it has a weight, then rotates it by its token's position.

    Args:
        q: `[T, Hq, D]`, last dimension contiguous; a view of a fused projection is fine. `Hq` may be 0.
        k: `[T, Hk, D]`, likewise.
        positions: `[T]` int32 or int64 rows of `cos_sin`.
        cos_sin: `[L, D]` float32, a row is `cat(cos[D/2], sin[D/2])`; context scaling lives in this table.
        q_weight: `[D]`, or None for no norm. `k_weight` likewise.
        eps: added to the mean square.

    Returns:
        New `(q, k)`, contiguous. Differentiable in q, k and the weights.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit.
    """
    _check(q, k, positions, cos_sin, q_weight, k_weight)
    return qk_norm_rope_twin(q, k, positions, cos_sin, q_weight, k_weight, eps)


def qk_norm_rope_twin(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Plain-torch `qk_norm_rope`; the rotation is float32."""
    cos, sin = (
        cos_sin.index_select(0, positions)
        .view(-1, 1, 2, cos_sin.shape[1] // 2)
        .unbind(2)
    )
    return _norm_rotate(q, cos, sin, q_weight, eps), _norm_rotate(
        k, cos, sin, k_weight, eps
    )


def _norm_rotate(
    x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float
) -> Tensor:
    """One of q and k `[T, H, D]`; `cos` and `sin` are `[T, 1, D/2]`."""
    if x.shape[1] == 0:
        return x.clone()
    normed = x if weight is None else rms_norm_twin(x, weight, eps)
    pairs = normed.view(x.shape[0], x.shape[1], 2, x.shape[2] // 2)
    low, high = pairs.unbind(2)
    # (low, high) * cos first, the crossed products added in place: half the ops of the usual rotate-half form.
    out = pairs * cos.unsqueeze(2)
    out.select(2, 0).addcmul_(high, sin, value=-1)
    out.select(2, 1).addcmul_(low, sin)
    return out.view(x.shape).to(x.dtype)


def _check(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
) -> None:
    check_rows("q", q, 3)
    check_rows("k", k, 3)
    check_indices("positions", positions, 1)
    tokens, _, width = q.shape
    if width % 2:
        raise ValueError(f"q has head width {width}: rotary pairs need an even one")
    if k.dtype != q.dtype:
        raise TypeError(f"k is {k.dtype}, q is {q.dtype}: cast one of them")
    if k.shape[0] != tokens or k.shape[2] != width:
        raise ValueError(
            f"k has shape {tuple(k.shape)}: [{tokens}, heads, {width}] is needed to match q"
        )
    if positions.shape[0] != tokens:
        raise ValueError(
            f"positions has {positions.shape[0]} entries for {tokens} tokens"
        )
    if cos_sin.dtype is not torch.float32:
        raise TypeError(f"cos_sin is {cos_sin.dtype}: float32 is needed")
    if cos_sin.dim() != 2 or cos_sin.shape[1] != width:
        raise ValueError(
            f"cos_sin has shape {tuple(cos_sin.shape)}: [length, {width}] is needed"
        )
    if q.stride(2) != 1 or k.stride(2) != 1:
        raise ValueError(
            "q and k need a contiguous last dimension: call .contiguous() on them"
        )
    if q_weight is not None:
        check_weight("q_weight", q_weight, width)
    if k_weight is not None:
        check_weight("k_weight", k_weight, width)
