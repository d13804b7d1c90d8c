"""RMS normalisation, alone and with the residual sum that precedes it (Zhang & Sennrich 2019)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from jetflow_triton.checks import check_devices, check_rows, check_weight
from jetflow_triton.dispatch import register, register_gradient, uses_op


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last dimension, any number of leading ones.

    The mean and the division are float32; the normalised value is cast to `x.dtype` before it meets the weight, the
    rounding order of the Hugging Face decoders. Differentiable in `x` and `weight`.

    Raises:
        TypeError: `x` or `weight` is not floating point.
        ValueError: `weight` is not `[C]` for `x` of shape `[..., C]`, or is on another device.
    """
    check_rows("x", x)
    check_weight("weight", weight, x.shape[-1])
    check_devices(x=x, weight=weight)
    return _rms_norm(x, weight, eps) if uses_op(x) else rms_norm_twin(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns `(rms_norm(x + residual), x + residual)`; the sum is rounded to `x.dtype` before it is normalised.

    Raises:
        TypeError: an input is not floating point, or `x` and `residual` differ in dtype.
        ValueError: `residual` has not the shape of `x`, `weight` is not `[C]`, or one is on another device.
    """
    check_rows("x", x)
    check_weight("weight", weight, x.shape[-1])
    if residual.shape != x.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}, x has {tuple(x.shape)}: they must be equal")
    if residual.dtype != x.dtype:
        raise TypeError(f"residual is {residual.dtype}, x is {x.dtype}: cast one of them")
    check_devices(x=x, residual=residual, weight=weight)
    if uses_op(x):
        return _add_rms_norm(x, residual, weight, eps)
    return add_rms_norm_twin(x, residual, weight, eps)


def rms_norm_twin(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Plain-torch `rms_norm`; without a weight it only normalises."""
    wide = _widened(x)
    inverse_width, offset = _constants(x.shape[-1], eps, wide.dtype, x.device)
    # Constants as tensors: adding a Python scalar costs as much as this whole line in eager mode.
    scale = torch.addcmul(offset, (wide * wide).sum(-1, keepdim=True), inverse_width).rsqrt()
    normed = wide * scale
    if wide is not x:
        normed = normed.to(x.dtype)
    return normed if weight is None else normed * weight


def add_rms_norm_twin(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Plain-torch `add_rms_norm`."""
    total = x + residual
    return rms_norm_twin(total, weight, eps), total


def _widened(x: Tensor) -> Tensor:
    """`x` in the dtype of the sums: float32, or float64 for float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


@lru_cache(maxsize=64)
def _constants(width: int, eps: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """`1 / width` and `eps` as tensors."""
    with torch.inference_mode(False):  # usable under autograd, whoever asks first
        return torch.tensor(1.0 / width, dtype=dtype, device=device), torch.tensor(eps, dtype=dtype, device=device)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
    """Gradients of `rms_norm` in x and weight, for any leading dimensions.

    Torch's own operations on every device: training a head spends its time in products over the vocabulary, and what a
    kernel would save here, some passes over `[T, C]`, is not seen beside them.
    """
    wide = _widened(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * scale
    wide_grad = grad.to(wide.dtype)
    weight_grad = None
    if weight is not None:
        weight_grad = (wide_grad * normed.to(x.dtype)).flatten(0, -2).sum(0).to(weight.dtype)
        wide_grad = wide_grad * weight.to(wide.dtype)
    x_grad = scale * (wide_grad - normed * (wide_grad * normed).mean(-1, keepdim=True))
    return x_grad.to(x.dtype), weight_grad


def _rms_norm_shape(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


def _add_rms_norm_shape(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _rms_norm_shape(x, weight, eps), x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *_, weight, ctx.eps = inputs
    total = output[1] if isinstance(output, tuple) else inputs[0]
    ctx.save_for_backward(total, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    x_grad, weight_grad = rms_norm_backward(grad, x, weight, ctx.eps)
    return x_grad, weight_grad, None


def _add_backward(ctx: Any, grad: Tensor, total_grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    x_grad, weight_grad = rms_norm_backward(grad, x, weight, ctx.eps)
    x_grad = x_grad + total_grad
    return x_grad, x_grad, weight_grad, None


_rms_norm = register(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", rms_norm_twin, "norm.rms_norm", _rms_norm_shape
)
_add_rms_norm = register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    add_rms_norm_twin,
    "norm.add_rms_norm",
    _add_rms_norm_shape,
)
register_gradient(_rms_norm, _save, _backward)
register_gradient(_add_rms_norm, _save, _add_backward)
