"""Per-head q/k RMS norm and rotary embedding (Su et al. 2021, half-rotation layout) as one op."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetflow_triton.checks import (
    INTEGER,
    check_devices,
    check_indices,
    check_rows,
    check_values,
    check_weight,
    debugging,
)
from jetflow_triton.dispatch import register, register_gradient, uses_op
from jetflow_triton.norm import rms_norm_backward, rms_norm_twin


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
        ValueError: a shape or device does not fit, or (checked on the CPU) a position is out of range.
    """
    _check(q, k, positions, cos_sin, q_weight, k_weight)
    if debugging():
        check_values("positions", positions, 0, cos_sin.shape[0] - 1)
    if uses_op(q):
        return _qk_norm_rope(q, k, positions, cos_sin, q_weight, k_weight, eps)
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
    cos, sin = _angles(cos_sin, positions)
    return _norm_rotate(q, cos, sin, q_weight, eps), _norm_rotate(k, cos, sin, k_weight, eps)


def _norm_rotate(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """One of q and k `[T, H, D]`; `cos` is `[T, 1, D]` twice over, `sin` the same with its first half negated."""
    if x.shape[1] == 0:
        return x.new_empty(x.shape)
    normed = x if weight is None else rms_norm_twin(x, weight, eps)
    rotated = torch.addcmul(normed * cos, normed.roll(x.shape[2] // 2, -1), sin)
    return rotated if rotated.dtype is x.dtype else rotated.to(x.dtype)


@dataclass(frozen=True, slots=True)
class _Angles:
    """The rows of a table at some positions, laid out for `_norm_rotate`."""

    table: weakref.ref[Tensor]
    version: int
    positions: list[int]
    rows: tuple[Tensor, Tensor]


_latest: list[_Angles] = []


def _angles(cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The rows for `positions`. Every layer of a step asks for the same ones, so the latest are kept.

    They are used again for equal positions and the same table, unmodified since.
    """
    if cos_sin.is_inference():  # such a tensor does not say whether it was modified
        return _lookup(cos_sin, positions)
    version, listed = cos_sin._version, positions.tolist()
    for found in _latest:
        if found.table() is cos_sin and found.version == version and found.positions == listed:
            return found.rows
    with torch.inference_mode(False):  # a later call may be under autograd
        rows = _lookup(cos_sin.detach(), positions)
    _latest[:] = [_Angles(weakref.ref(cos_sin), version, listed, rows)]
    return rows


def _lookup(cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    try:
        rows = cos_sin.index_select(0, positions)
    except IndexError as error:  # of the CPU
        check_values("positions", positions, 0, cos_sin.shape[0] - 1)
        raise AssertionError from error
    cos, sin = rows.unsqueeze(1).chunk(2, -1)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


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
    check_indices("positions", positions, 1, INTEGER)
    tokens, _, width = q.shape
    if width % 2:
        raise ValueError(f"q has head width {width}: rotary pairs need an even one")
    if k.dtype != q.dtype:
        raise TypeError(f"k is {k.dtype}, q is {q.dtype}: cast one of them")
    if k.shape[0] != tokens or k.shape[2] != width:
        raise ValueError(f"k has shape {tuple(k.shape)}: [{tokens}, heads, {width}] is needed to match q")
    if positions.shape[0] != tokens:
        raise ValueError(f"positions has {positions.shape[0]} entries for {tokens} tokens")
    if cos_sin.dtype is not torch.float32:
        raise TypeError(f"cos_sin is {cos_sin.dtype}: float32 is needed")
    if cos_sin.dim() != 2 or cos_sin.shape[1] != width:
        raise ValueError(f"cos_sin has shape {tuple(cos_sin.shape)}: [length, {width}] is needed")
    if q.stride(2) != 1 or k.stride(2) != 1:
        raise ValueError("q and k need a contiguous last dimension: call .contiguous() on them")
    check_devices(q=q, k=k, positions=positions, cos_sin=cos_sin, q_weight=q_weight, k_weight=k_weight)
    if q_weight is not None:
        check_weight("q_weight", q_weight, width)
    if k_weight is not None:
        check_weight("k_weight", k_weight, width)


def _shape(q: Tensor, k: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, positions, cos_sin, q_weight, k_weight = ctx.saved_tensors
    cos, sin = _lookup(cos_sin, positions)
    q_grad, q_weight_grad = _rotate_back(q_grad, q, cos, sin, q_weight, ctx.eps)
    k_grad, k_weight_grad = _rotate_back(k_grad, k, cos, sin, k_weight, ctx.eps)
    return q_grad, k_grad, None, None, q_weight_grad, k_weight_grad, None


def _rotate_back(
    grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """A rotation's transpose turns the other way; then the norm's gradient."""
    half = x.shape[2] // 2
    normed_grad = (grad * cos - grad.roll(half, -1) * sin).to(x.dtype)
    return (normed_grad, None) if weight is None else rms_norm_backward(normed_grad, x, weight, eps)


_qk_norm_rope = register(
    "qk_norm_rope(Tensor q, Tensor k, Tensor positions, Tensor cos_sin, Tensor? q_weight, Tensor? k_weight, float eps)"
    " -> (Tensor, Tensor)",
    qk_norm_rope_twin,
    "rope.qk_norm_rope",
    _shape,
)
register_gradient(_qk_norm_rope, _save, _backward)
