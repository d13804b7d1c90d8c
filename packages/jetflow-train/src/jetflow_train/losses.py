"""Distillation losses against a sparse teacher.

The teacher keeps the target's M likeliest tokens at each position. At temperature τ it is p ∝ exp(logp / τ) over
those M (at τ = 1 the target's own probabilities, the tail left out); entries outside the draft vocabulary cannot be
drafted and are dropped *without* renormalising. The forward KL is then Σ_i p_i (log p_i − log q_i) with gradient
(Σp)·q − p on the logits: its minimum is q = p / Σp, and a position counts as much as its mass lies inside the draft
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS_PER_CHUNK = 128


@dataclass(frozen=True)
class Teacher:
    """Sparse target distributions over draft ids: `ids` [J, M] int64 and `probs` [J, M] float32, 0 where not
    draftable.
    """

    ids: Tensor
    probs: Tensor


def draft_index(draft_vocab: Tensor | None, vocab_size: int, device: torch.device) -> Tensor:
    """The draft id of every target id [V], −1 where the draft vocabulary lacks it; on `device`, as `draft_vocab` is."""
    if draft_vocab is None:
        return torch.arange(vocab_size, device=device)
    index = torch.full((vocab_size,), -1, dtype=torch.int64, device=device)
    index[draft_vocab] = torch.arange(len(draft_vocab), device=device)
    return index


def sparse_teacher(ids: Tensor, logp: Tensor, index: Tensor, temperature: float) -> Teacher:
    """Teacher of target ids [J, M] with log-probabilities [J, M] at `temperature`, mapped through `draft_index`."""
    if temperature <= 0:
        raise ValueError(f"teacher temperature {temperature} must be positive")
    probs = torch.exp(logp) if temperature == 1.0 else torch.softmax(logp / temperature, dim=-1)
    drafted = index[ids]
    return Teacher(drafted.clamp_min(0), torch.where(drafted < 0, 0.0, probs))


def forward_kl(hidden: Tensor, rows: Tensor, teacher: Teacher, weight: Tensor) -> Tensor:
    """Σ_j weight_j · KL(teacher_j ‖ softmax(rows · hidden_j)), a float32 scalar, for hidden [J, C] and frozen LM-head
    `rows` [V', C].

    The gradient reaches `hidden` only. Logits live for `ROWS_PER_CHUNK` positions at a time, and are used for value and
    gradient while in the cache.
    """
    loss: Tensor = _ForwardKL.apply(hidden, rows, teacher.ids, teacher.probs, weight)  # pyright: ignore[reportAssignmentType]
    return loss


class _ForwardKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: Tensor, ids: Tensor, probs: Tensor, weight: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden)
        for start in range(0, len(hidden), ROWS_PER_CHUNK):
            part = slice(start, start + ROWS_PER_CHUNK)
            p, w = probs[part], weight[part]
            logits = torch.nn.functional.linear(hidden[part], rows).float()
            normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
            log_q = logits.gather(1, ids[part]) - normaliser
            total += (w[:, None] * (torch.xlogy(p, p) - p * log_q)).sum()
            q = logits.sub_(normaliser).exp_()
            q *= (w * p.sum(dim=-1))[:, None]
            q.scatter_add_(1, ids[part], -(w[:, None] * p))
            gradient[part] = q.to(hidden.dtype) @ rows
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None, None
