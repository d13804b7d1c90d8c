"""Answers that part from plain decoding's, and whether a near-tie of the target excuses them."""

from __future__ import annotations

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
    gap: float  # logit of budget 0's token minus that of the other, from one plain pass over the text so far


@torch.inference_mode()
def find_flip(model: Decoder, name: str, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> Flip:
    """Where the answer `other` parts from `plain`, both to `prompt`. They must differ; all are token ids."""
    position = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if position is None:  # one ends where the other goes on: they share every token, so this is no near-tie
        return Flip(name, min(len(plain), len(other)), float("inf"))
    hidden, _ = model.forward_sequence(torch.tensor([*prompt, *plain[:position]], device=model.embed.device))
    logits = model.logits(hidden[-1:]).float()[0]
    return Flip(name, position, float(logits[plain[position]] - logits[other[position]]))


def excused(flips: Sequence[Flip], temperature: float, dtype: torch.dtype, exact: bool) -> bool:
    """Whether there are no flips, or only those from near-ties where `dtype` allows some outside exact mode.

    Sampling adds noise to the logits, so their gap says nothing there: only float32 and exact mode are held to equality.
    """
    if exact or dtype == torch.float32:
        return not flips
    return temperature > 0 or all(abs(flip.gap) <= GAP_LIMIT[dtype] for flip in flips)


def largest_gap(flips: Sequence[Flip], temperature: float) -> str:
    """The largest gap as a cell of a table."""
    if not flips:
        return "—"
    return "not judged" if temperature > 0 else f"{max(abs(flip.gap) for flip in flips):.3g}"
