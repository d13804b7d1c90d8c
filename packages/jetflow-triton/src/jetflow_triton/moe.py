"""Mixture of experts: softmax → top-k routing and the routed gated MLPs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from jetflow_triton.activation import silu_mul_twin
from jetflow_triton.checks import INTEGER, check_devices, check_indices, check_rows, check_values, debugging
from jetflow_triton.dispatch import register, uses_op
from jetflow_triton.linear import linear_twin


def moe_route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Softmax over the experts in float32, then the `top_k` largest; equal ones by the lower expert index.

    Args:
        logits: `[T, E]`.
        top_k: experts a token, 1 … E.
        renormalize: divide the chosen weights by their sum.

    Returns:
        Weights `[T, K]` float32 in falling order, and experts `[T, K]` int32.

    Raises:
        TypeError: `logits` is not floating point.
        ValueError: `top_k` is out of range.
    """
    check_rows("logits", logits, 2)
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k is {top_k}: 1 … {logits.shape[1]} experts can be chosen")
    return (_moe_route if uses_op(logits) else moe_route_twin)(logits, top_k, renormalize)


def moe_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor, exact: bool = False
) -> Tensor:
    """Sum over a token's experts of `weight * down[e] @ silu_mul(gate_up[e] @ x)`.

    Args:
        x: `[T, C]`.
        gate_up: `[E, 2I, C]`, gate rows before up rows.
        down: `[E, C, I]`.
        weights: `[T, K]` float32.
        experts: `[T, K]` int32 or int64 below E; a token's experts are distinct.
        exact: a row's bits do not depend on the other rows. On a GPU they never do; a CPU pays for it.

    Returns:
        `[T, C]`. Products and the combine have a fixed order: the same input gives the same bits.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape or device does not fit, or (checked on the CPU) an expert is out of range.
    """
    _check_experts(x, gate_up, down, weights, experts)
    if debugging():
        check_values("experts", experts, 0, gate_up.shape[0] - 1)
    return (_moe_experts if uses_op(x) else moe_experts_twin)(x, gate_up, down, weights, experts, exact)


def moe_route_twin(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Plain-torch `moe_route`; a stable sort, since `topk` leaves the order of ties open."""
    probs = torch.softmax(logits, -1, dtype=torch.float32)
    probs, order = torch.sort(probs, dim=-1, descending=True, stable=True)
    weights = probs[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.contiguous(), order[:, :top_k].to(torch.int32)


def moe_experts_twin(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor, exact: bool = False
) -> Tensor:
    """Plain-torch `moe_experts`: a loop over the experts that have tokens."""
    product = linear_twin if exact else functional.linear
    check_values("experts", experts, 0, gate_up.shape[0] - 1)
    top_k = experts.shape[1]
    pairs = x.new_empty(experts.numel(), x.shape[1])
    for expert, chosen in _tokens_by_expert(experts.flatten().tolist()).items():
        index = torch.tensor(chosen, device=x.device)
        rows = x.index_select(0, index // top_k)
        pairs[index] = product(silu_mul_twin(product(rows, gate_up[expert])), down[expert])
    weighted = pairs.view(-1, top_k, x.shape[1]) * weights.unsqueeze(2)
    return weighted.sum(1).to(x.dtype)


def _tokens_by_expert(experts: list[int]) -> dict[int, list[int]]:
    """Places in the flat `[T * K]` list, by expert."""
    places: dict[int, list[int]] = {}
    for place, expert in enumerate(experts):
        places.setdefault(expert, []).append(place)
    return places


def _check_experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> None:
    check_rows("x", x, 2)
    check_rows("gate_up", gate_up, 3)
    count, double, width = gate_up.shape
    if width != x.shape[1] or double % 2:
        raise ValueError(f"gate_up has shape {tuple(gate_up.shape)}: [experts, 2 * inner, {x.shape[1]}] is needed")
    if down.shape != (count, width, double // 2):
        raise ValueError(f"down has shape {tuple(down.shape)}: {[count, width, double // 2]} is needed")
    if gate_up.dtype != x.dtype or down.dtype != x.dtype:
        raise TypeError(f"x is {x.dtype}, gate_up {gate_up.dtype}, down {down.dtype}: one dtype is needed")
    check_indices("experts", experts, 2, INTEGER)
    if experts.shape[0] != x.shape[0]:
        raise ValueError(f"experts has shape {tuple(experts.shape)}: [{x.shape[0]}, top_k] is needed")
    if weights.shape != experts.shape:
        raise ValueError(f"weights has shape {tuple(weights.shape)}, experts has {tuple(experts.shape)}")
    if weights.dtype is not torch.float32:
        raise TypeError(f"weights is {weights.dtype}: float32 is needed")
    check_devices(x=x, gate_up=gate_up, down=down, weights=weights, experts=experts)
    if not (gate_up.is_contiguous() and down.is_contiguous()):
        raise ValueError("gate_up and down must be contiguous: a call must not copy all experts")


def _route_shape(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _experts_shape(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


_moe_route = register(
    "moe_route(Tensor logits, int top_k, bool renormalize) -> (Tensor, Tensor)",
    moe_route_twin,
    "moe.moe_route",
    _route_shape,
)
_moe_experts = register(
    "moe_experts(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor experts, bool exact=False) -> Tensor",
    moe_experts_twin,
    "moe.moe_experts",
    _experts_shape,
)
