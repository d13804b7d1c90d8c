"""The gated activation of the MLP: `silu(gate) * up` (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from jetflow_triton.checks import check_rows
from jetflow_triton.dispatch import register, register_gradient, uses_op


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate_up[..., :I]) * gate_up[..., I:]` for `gate_up` of shape `[..., 2I]`. Differentiable.

    Raises:
        TypeError: `gate_up` is not floating point.
        ValueError: its last dimension is odd.
    """
    check_rows("gate_up", gate_up)
    if gate_up.shape[-1] % 2:
        raise ValueError(
            f"gate_up has shape {tuple(gate_up.shape)}: the last dimension holds gate and up, so it is even"
        )
    return _silu_mul(gate_up) if uses_op(gate_up) else silu_mul_twin(gate_up)


def silu_mul_twin(gate_up: Tensor) -> Tensor:
    """Plain-torch `silu_mul`; float32 inside, one rounding at the end."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def _shape(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    """Torch's own operations on every device, as in `rms_norm_backward`."""
    (gate_up,) = ctx.saved_tensors
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
    wide, opened = grad.to(gate.dtype), torch.sigmoid(gate)
    gate_grad = wide * up * opened * (1 + gate * (1 - opened))
    return torch.cat((gate_grad, wide * gate * opened), -1).to(gate_up.dtype)


_silu_mul = register("silu_mul(Tensor gate_up) -> Tensor", silu_mul_twin, "activation.silu_mul", _shape)
register_gradient(_silu_mul, _save, _backward)
