"""What training minimises: a divergence from a sparse teacher, slot by slot, and how much each slot counts.

The teacher keeps the target's M likeliest tokens at each position. At temperature τ it is p ∝ exp(logp / τ) over
those M (at τ = 1 the target's own probabilities, the tail left out); entries outside the draft vocabulary cannot be
drafted and are dropped *without* renormalising. The divergences themselves are `jetflow_triton.distill_loss`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

import jetflow_triton as ops
from jetflow_triton.distill import Kind

LOSSES: tuple[str, ...] = get_args(Kind)
FORGET = 0.9  # share of the acceptance measured so far that the next measurement leaves
PRIOR_SLOTS = 100.0  # slots' worth of evidence that the acceptance assumed at the start counts


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


@dataclass(frozen=True)
class Divergence:
    """Σ_j weight_j · D(teacher_j, head_j), by `kind` (one of `LOSSES`).

    `temperature` divides the head's logits, `teacher_temperature` the teacher's log-probabilities. The value is multiplied
    by temperature², so that its gradient keeps its size (Hinton et al. 2015).
    """

    kind: Kind
    temperature: float = 1.0
    teacher_temperature: float = 1.0

    def __call__(self, hidden: Tensor, rows: Tensor, ids: Tensor, logp: Tensor, weight: Tensor) -> Tensor:
        """A float32 scalar for `hidden` [J, C], frozen LM-head `rows` [V', C] in its dtype, the teacher's draft `ids` [J, M]
        (−1: not draftable) with log-probabilities `logp` [J, M], and `weight` [J]. The gradient reaches `hidden` only.
        """
        value = ops.distill_loss(
            hidden,
            rows,
            teacher_ids=ids,
            teacher_logprobs=logp,
            kind=self.kind,
            temperature=self.temperature,
            teacher_temperature=self.teacher_temperature,
            weights=weight,
        )
        return value * self.temperature**2


class SlotAcceptance:
    """How often the head's likeliest token at slot k is the target's, for each k from 1: a forgetting average.

    Slots that were hardly seen keep what was assumed of them: exp(−1/γ), which makes `reach` start as the weights of γ.
    After D-PACE (Wu et al. 2026, arXiv 2605.18810), which weighs by each block's own confidences and the accepted length still
    to come; one curve for all blocks can be realised by random cuts.
    """

    def __init__(self, slots: int, gamma: float | None) -> None:
        self._prior = torch.tensor(-1.0 / gamma if gamma else 0.0, dtype=torch.float64).exp()
        self.counts = torch.zeros(2, slots, dtype=torch.float64)  # hits, seen

    def add(self, counts: Tensor) -> None:
        """Take in new `counts` [2, slots] of hits and slots seen."""
        self.counts = FORGET * self.counts + counts.to(self.counts)

    def reach(self) -> tuple[float, ...]:
        """The chance that every slot before k is accepted, for k from 1: 1, a₁, a₁a₂, …"""
        hits, seen = self.counts
        accepted = (hits + PRIOR_SLOTS * self._prior) / (seen + PRIOR_SLOTS)
        return (1.0, *accepted[:-1].cumprod(0).tolist())


@torch.no_grad()
def slot_hits(hidden: Tensor, rows: Tensor, best: Tensor, depth: Tensor, slots: int) -> Tensor:
    """Counts [2, slots] for `SlotAcceptance` of `hidden` [J, C] at `depth` [J] from 1, whose right draft ids are `best` [J]."""
    _, drafted, _ = ops.topk_logprobs(hidden, rows, 1)
    where = depth - 1
    hits = torch.bincount(where, (drafted[:, 0] == best).double(), minlength=slots)
    return torch.stack([hits, torch.bincount(where, minlength=slots).double()]).cpu()
