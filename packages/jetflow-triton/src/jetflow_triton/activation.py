"""The gated activation of the MLP: `silu(gate) * up` (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from jetflow_triton.checks import check_rows


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
    return silu_mul_twin(gate_up)


def silu_mul_twin(gate_up: Tensor) -> Tensor:
    """Plain-torch `silu_mul`; float32 inside, one rounding at the end."""
    gate, up = gate_up.chunk(2, -1)
    if gate_up.dtype is torch.float32:
        return functional.silu(gate) * up
    return (functional.silu(gate.float()) * up.float()).to(gate_up.dtype)
