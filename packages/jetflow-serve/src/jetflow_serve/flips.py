"""Answers that part from plain decoding's, and whether a near-tie of the target excuses them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from jetflow_core.model import Decoder

# Half-precision logits have 8 or 11 significant bits, so two products of the same row differ by a few units in the last place.
# A larger gap between the two best tokens at a flip is an error of ours and not a near-tie.
GAP_LIMIT = {torch.bfloat16: 0.5, torch.float16: 0.0625}


@dataclass(frozen=True)
class Flip:
    """The first token in which an answer differs: its position in the answer and what the target thinks of both tokens."""

    prompt: str
    position: int
    gap: float | None  # logit of budget 0's token minus that of the other, from one plain pass over the text so far;
    # None where one answer ends and the other goes on: they share every token, so it is no near-tie


@torch.inference_mode()
def find_flip(model: Decoder, name: str, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> Flip:
    """Where the answer `other` parts from `plain`, both to `prompt`. They must differ; all are token ids."""
    position = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if position is None:
        return Flip(name, min(len(plain), len(other)), None)
    hidden, _ = model.forward_sequence(torch.tensor([*prompt, *plain[:position]], device=model.embed.device))
    logits = model.logits(hidden[-1:]).float()[0]
    return Flip(name, position, float(logits[plain[position]] - logits[other[position]]))


def excused(flips: Sequence[Flip], temperature: float, dtype: torch.dtype, exact: bool) -> bool:
    """Whether there are no flips, or only those from near-ties where `dtype` allows some outside exact mode.

    Sampling adds noise to the logits, so their gap says nothing there: only float32 and exact mode are held to equality.
    """
    if exact or dtype == torch.float32:
        return not flips
    return temperature > 0 or all(_size(flip) <= GAP_LIMIT[dtype] for flip in flips)


def largest_gap(flips: Sequence[Flip], temperature: float) -> str:
    """The largest gap as a cell of a table."""
    if not flips:
        return "—"
    return "not judged" if temperature > 0 else f"{max(map(_size, flips)):.3g}"


def _size(flip: Flip) -> float:
    return math.inf if flip.gap is None else abs(flip.gap)
