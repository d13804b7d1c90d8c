"""Distillation loss of a draft head: LM head, softmax, divergence and gradient, some rows at a time.

Full-vocabulary logits of a training step are larger than everything else in it together (4,096 rows of 151,936 floats:
2.5 GB, several times over). Here they live for a chunk of rows, and value and gradient are taken while they do. After
Liger-Kernel's fused linear losses (Hsu et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from jetflow_triton.checks import INT64, check_devices, check_indices, check_rows, check_values, debugging
from jetflow_triton.dispatch import register, register_gradient

Kind = Literal["forward_kl", "reverse_kl", "cross_entropy", "total_variation"]

ROWS_AT_ONCE = 128  # rows whose logits exist at the same time on the CPU
_REST = 2.0**-20  # least mass of what a sparse teacher leaves out: its log-probabilities are rounded


def distill_loss(
    hidden: Tensor,
    lm_head: Tensor,
    *,
    teacher_hidden: Tensor | None = None,
    teacher_lm_head: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    teacher_logprobs: Tensor | None = None,
    kind: Kind = "forward_kl",
    temperature: float = 1.0,
    teacher_temperature: float = 1.0,
    weights: Tensor | None = None,
) -> Tensor:
    """`Σ_t weights_t · D(p_t, q_t)` with q the softmax of `hidden @ lm_headᵀ / temperature` and p the teacher's.

    D by `kind`: `forward_kl` Σ p (log p − log q), `reverse_kl` Σ q (log q − log p), `total_variation` ½ Σ |p − q|,
    `cross_entropy` −log q at the teacher's likeliest token (the lowest id of equals).

    The teacher is dense (its final hidden states and its LM head) or sparse (its likeliest tokens). A sparse one has
    p = exp(logprobs), or at another temperature the softmax of `logprobs / teacher_temperature` over its entries; those
    without an id in q's vocabulary are then left out without renormalising. So `forward_kl` has its minimum at p / Σp,
    and a row counts as much as its mass lies inside the vocabulary. `reverse_kl` and `total_variation` need p
    everywhere: all tokens that the teacher does not name count as one event with the mass that it leaves (2⁻²⁰ at
    least). `cross_entropy` is 0 where the likeliest entry has no id.

    The gradient reaches `hidden` only, and is computed with the value; sums are float32. No factor temperature² is
    applied: multiply by it for the usual scaling.

    Args:
        hidden: `[T, C]`, the draft head's final hidden states.
        lm_head: `[V, C]`, frozen, dtype of `hidden`; the rows of a draft vocabulary are fine.
        teacher_hidden: `[T, C']`, and `teacher_lm_head` `[V, C']` in the same order of tokens, one dtype.
        teacher_ids: `[T, M]` int64, rows of `lm_head`, distinct in a row; −1 for tokens that it does not have.
        teacher_logprobs: `[T, M]` floating point; −inf for an entry to be ignored.
        kind: the divergence.
        temperature: divides q's logits.
        teacher_temperature: divides the teacher's logits, or a sparse teacher's log-probabilities.
        weights: `[T]` float32; None is 1 for every row.

    Returns:
        Scalar, float32 (float64 for float64 input).

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, a device, a temperature, `kind` or the choice of teacher does not fit; something but
            `hidden` wants a gradient; or (checked on the CPU) an id is out of range.

    Example:
        >>> hidden, lm_head = torch.randn(6, 64, requires_grad=True), torch.randn(1000, 64)
        >>> loss = distill_loss(hidden, lm_head, teacher_hidden=torch.randn(6, 64), teacher_lm_head=lm_head)
        >>> loss.backward()
        >>> logprobs, ids = torch.log_softmax(torch.randn(6, 1000), -1).topk(32)
        >>> sparse = distill_loss(hidden, lm_head, teacher_ids=ids, teacher_logprobs=logprobs, kind="reverse_kl")
        >>> loss.shape, bool(loss > 0), hidden.grad.shape, bool(sparse > 0)
        (torch.Size([]), True, torch.Size([6, 64]), True)
    """
    _check_student(hidden, lm_head, kind, temperature, teacher_temperature, weights)
    _check_teacher(hidden, lm_head, teacher_hidden, teacher_lm_head, teacher_ids, teacher_logprobs)
    if debugging() and teacher_ids is not None:
        _check_ids(teacher_ids, lm_head)
    if torch.is_grad_enabled():
        _check_frozen(lm_head, teacher_hidden, teacher_lm_head, teacher_logprobs, weights)
    loss, _ = _distill_loss(
        hidden,
        lm_head,
        teacher_hidden,
        teacher_lm_head,
        teacher_ids,
        teacher_logprobs,
        weights,
        kind,
        temperature,
        teacher_temperature,
        hidden.requires_grad and torch.is_grad_enabled(),
    )
    return loss


@dataclass(frozen=True, slots=True)
class Divergence:
    """What one chunk of rows is measured by. `slopes`: whether the gradient is wanted."""

    kind: str
    temperature: float
    teacher_temperature: float
    slopes: bool


Dense = Callable[[Tensor, Tensor, Divergence], Tensor]
"""(logits, teacher's logits, both `[R, V]`) -> D of every row; leaves its slope in each tempered logit in `logits`."""
Sparse = Callable[[Tensor, Tensor, Tensor, Divergence], Tensor]
"""(logits `[R, V]`, ids, probabilities, both `[R, M]`) -> the same."""


def distill_in_chunks(
    dense: Dense,
    sparse: Sparse,
    rows_at_once: int,
    hidden: Tensor,
    lm_head: Tensor,
    teacher_hidden: Tensor | None,
    teacher_lm_head: Tensor | None,
    teacher_ids: Tensor | None,
    teacher_logprobs: Tensor | None,
    weights: Tensor | None,
    kind: str,
    temperature: float,
    teacher_temperature: float,
    slopes: bool,
) -> tuple[Tensor, Tensor]:
    """The op on one device: `(loss, its gradient in hidden)`, the latter empty if not wanted, both float32 or wider."""
    how = Divergence(kind, temperature, teacher_temperature, slopes)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    loss = hidden.new_zeros((), dtype=wide)
    gradient = hidden.new_empty(hidden.shape if slopes else (0,), dtype=wide)
    named = None
    if teacher_ids is not None and teacher_logprobs is not None:
        named = sparse_teacher(teacher_ids, teacher_logprobs.to(wide), how)
    for start in range(0, len(hidden), rows_at_once):
        part = slice(start, start + rows_at_once)
        logits = functional.linear(hidden[part], lm_head)
        if named is not None:
            values = sparse(logits, named[0][part], named[1][part], how)
        else:
            assert teacher_hidden is not None, "the caller has seen to one teacher"
            assert teacher_lm_head is not None, "the caller has seen to one teacher"
            values = dense(logits, functional.linear(teacher_hidden[part], teacher_lm_head), how)
        weight = values.new_ones(len(values)) if weights is None else weights[part].to(wide)
        loss += torch.dot(values, weight)
        if slopes:
            gradient[part] = (logits @ lm_head).to(wide) * (weight / temperature)[:, None]
    return loss, gradient


def sparse_teacher(ids: Tensor, logprobs: Tensor, how: Divergence) -> tuple[Tensor, Tensor]:
    """A sparse teacher's ids (−1 for every entry to be ignored) and probabilities (0 there), `[T, M]` each."""
    heat = how.teacher_temperature
    probs = logprobs.exp() if heat == 1.0 else torch.softmax(logprobs / heat, -1)
    if how.kind == "cross_entropy":
        probs = torch.zeros_like(probs).scatter_(1, logprobs.argmax(-1, keepdim=True), 1.0)
    ignored = (ids < 0) | (logprobs == -torch.inf)
    return ids.masked_fill(ignored, -1), probs.masked_fill(ignored, 0.0)


def sparse_divergence(log_q: Tensor, probs: Tensor, ids: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """D of each row, from q's log-probabilities at the teacher's entries, `[R, M]`.

    Returns:
        D `[R]`, and its slopes: a factor of q `[R]` that holds for every token, and what is to be added to that at the
        entries `[R, M]`.
    """
    if kind in ("forward_kl", "cross_entropy"):
        return (torch.xlogy(probs, probs) - probs * log_q).sum(-1), probs.sum(-1), -probs
    named = ids >= 0
    q = log_q.exp().masked_fill(~named, 0.0)
    q_rest = (1.0 - q.sum(-1)).clamp_min(_REST)
    p_rest = (1.0 - probs.sum(-1)).clamp_min(_REST)
    if kind == "reverse_kl":
        slope, slope_rest = log_q - probs.clamp_min(torch.finfo(torch.float32).tiny).log(), (q_rest / p_rest).log()
        value = (q * slope).sum(-1) + q_rest * slope_rest
        mean = value
    else:
        slope, slope_rest = (q - probs).sign() / 2, (q_rest - p_rest).sign() / 2
        value = ((q - probs) * slope).sum(-1) + (q_rest - p_rest) * slope_rest
        mean = (q * slope).sum(-1) + q_rest * slope_rest
    return value, slope_rest - mean, q * (slope - slope_rest[:, None])


def distill_loss_twin(*args: Any) -> tuple[Tensor, Tensor]:
    """Plain-torch op behind `distill_loss`."""
    _, lm_head, _, _, ids, *_ = args
    if ids is not None:
        _check_ids(ids, lm_head)
    return distill_in_chunks(_dense, _sparse, ROWS_AT_ONCE, *args)


def _dense(logits: Tensor, teacher: Tensor, how: Divergence) -> Tensor:
    log_q, log_p = _log_softmax(logits, how.temperature), _log_softmax(teacher, how.teacher_temperature)
    q, p = log_q.exp(), log_p.exp()
    if how.kind == "cross_entropy":
        label = teacher.max(-1, keepdim=True).indices  # the first of equals
        value, slopes = (
            -log_q.gather(1, label).squeeze(1),
            q.scatter_add_(1, label, -torch.ones_like(label, dtype=q.dtype)),
        )
    elif how.kind == "forward_kl":
        value, slopes = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1), q - p
    elif how.kind == "reverse_kl":
        ratio = log_q - log_p
        value = torch.where(q > 0, q * ratio, 0.0).sum(-1)
        slopes = torch.where(q > 0, q * (ratio - value[:, None]), 0.0)
    else:
        sign = (q - p).sign() / 2
        value, slopes = ((q - p) * sign).sum(-1), q * (sign - (q * sign).sum(-1, keepdim=True))
    if how.slopes:
        logits.copy_(slopes)
    return value


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.log_softmax(logits.to(wide) / temperature, -1)


def _sparse(logits: Tensor, ids: Tensor, probs: Tensor, how: Divergence) -> Tensor:
    scaled = logits.to(probs.dtype)
    if how.temperature != 1.0:
        scaled.div_(how.temperature)
    normaliser = torch.logsumexp(scaled, -1, keepdim=True)
    place = ids.clamp_min(0)
    log_q = scaled.gather(1, place) - normaliser
    value, factor, extra = sparse_divergence(log_q, probs, ids, how.kind)
    if how.slopes:
        slopes = scaled.sub_(normaliser).exp_().mul_(factor[:, None])
        slopes.scatter_add_(1, place, extra.masked_fill(ids < 0, 0.0))
        if slopes.data_ptr() != logits.data_ptr():
            logits.copy_(slopes)
    return value


def _check_student(
    hidden: Tensor, lm_head: Tensor, kind: str, temperature: float, teacher_temperature: float, weights: Tensor | None
) -> None:
    check_rows("hidden", hidden, 2)
    check_rows("lm_head", lm_head, 2)
    if lm_head.shape[1] != hidden.shape[1]:
        raise ValueError(f"lm_head has shape {tuple(lm_head.shape)}: [V, {hidden.shape[1]}] is needed to match hidden")
    if lm_head.dtype != hidden.dtype:
        raise TypeError(f"lm_head is {lm_head.dtype}, hidden is {hidden.dtype}: cast one of them")
    if kind not in get_args(Kind):
        raise ValueError(f"kind is {kind!r}: one of {', '.join(get_args(Kind))} is needed")
    for name, value in (("temperature", temperature), ("teacher_temperature", teacher_temperature)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}: a positive number is needed")
    check_devices(hidden=hidden, lm_head=lm_head, weights=weights)
    if weights is not None:
        if not weights.is_floating_point():
            raise TypeError(f"weights is {weights.dtype}: a floating-point tensor is needed")
        if weights.shape != hidden.shape[:1]:
            raise ValueError(f"weights has shape {tuple(weights.shape)}: [{hidden.shape[0]}] is needed to match hidden")


def _check_teacher(
    hidden: Tensor,
    lm_head: Tensor,
    teacher_hidden: Tensor | None,
    teacher_lm_head: Tensor | None,
    ids: Tensor | None,
    logprobs: Tensor | None,
) -> None:
    if teacher_hidden is not None and teacher_lm_head is not None and ids is None and logprobs is None:
        check_rows("teacher_hidden", teacher_hidden, 2)
        check_rows("teacher_lm_head", teacher_lm_head, 2)
        if teacher_hidden.shape[0] != hidden.shape[0]:
            raise ValueError(f"teacher_hidden has {teacher_hidden.shape[0]} rows, hidden has {hidden.shape[0]}")
        wanted = (lm_head.shape[0], teacher_hidden.shape[1])
        if teacher_lm_head.shape != wanted:
            raise ValueError(f"teacher_lm_head has shape {tuple(teacher_lm_head.shape)}: {list(wanted)} is needed")
        if teacher_lm_head.dtype != teacher_hidden.dtype:
            raise TypeError(f"teacher_lm_head is {teacher_lm_head.dtype}, teacher_hidden is {teacher_hidden.dtype}")
        check_devices(hidden=hidden, teacher_hidden=teacher_hidden, teacher_lm_head=teacher_lm_head)
    elif ids is not None and logprobs is not None and teacher_hidden is None and teacher_lm_head is None:
        check_indices("teacher_ids", ids, 2, INT64)
        check_rows("teacher_logprobs", logprobs, 2)
        if ids.shape[0] != hidden.shape[0]:
            raise ValueError(f"teacher_ids has {ids.shape[0]} rows, hidden has {hidden.shape[0]}")
        if logprobs.shape != ids.shape:
            raise ValueError(f"teacher_logprobs has shape {tuple(logprobs.shape)}, teacher_ids has {tuple(ids.shape)}")
        check_devices(hidden=hidden, teacher_ids=ids, teacher_logprobs=logprobs)
    else:
        raise ValueError(
            "one teacher is needed: teacher_hidden and teacher_lm_head, or teacher_ids and teacher_logprobs"
        )


def _check_ids(ids: Tensor, lm_head: Tensor) -> None:
    if ids.numel():
        check_values("teacher_ids", torch.stack(ids.aminmax()), -1, lm_head.shape[0] - 1)


def _check_frozen(*tensors: Tensor | None) -> None:
    names = ("lm_head", "teacher_hidden", "teacher_lm_head", "teacher_logprobs", "weights")
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{name} requires a gradient, and only hidden gets one: detach it")


def _shape(hidden: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.new_empty((), dtype=wide), hidden.new_empty(hidden.shape if args[-1] else (0,), dtype=wide)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.dtype = inputs[0].dtype
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    return (gradient * grad).to(ctx.dtype), *[None] * 10


_distill_loss = register(
    "distill_loss(Tensor hidden, Tensor lm_head, Tensor? teacher_hidden, Tensor? teacher_lm_head, Tensor? teacher_ids,"
    " Tensor? teacher_logprobs, Tensor? weights, str kind, float temperature, float teacher_temperature,"
    " bool with_gradient) -> (Tensor, Tensor)",
    distill_loss_twin,
    "distill.distill_loss",
    _shape,
)
register_gradient(_distill_loss, _save, _backward)
