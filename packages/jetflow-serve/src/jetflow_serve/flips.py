"""Answers that part from plain decoding's, and whether a near-tie of the target excuses them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from jetflow_core.model import Decoder

# A half-precision logit has 8 or 11 significant bits: two products of the same row differ by a few units in the last place,
# which for logits around 36 in bfloat16 are 0.25 each. A larger gap of two tokens at a flip is an error of ours, no near-tie.
NEAR_TIE = 4


@dataclass(frozen=True)
class Flip:
    """The first token in which an answer differs: its position in the answer and what the target thinks of both tokens.

    `gap` is the logit of budget 0's token minus that of the other, from one plain pass over the text so far, and `unit` what the
    last place of the larger one is worth. `gap` is None where one answer ends and the other goes on: they share every token.
    """

    prompt: str
    position: int
    gap: float | None
    unit: float = 0.0

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap is not None and abs(self.gap) <= NEAR_TIE * self.unit


@torch.inference_mode()
def find_flip(model: Decoder, name: str, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> Flip:
    """Where the answer `other` parts from `plain`, both to `prompt`. They must differ; all are token ids."""
    position = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if position is None:
        return Flip(name, min(len(plain), len(other)), None)
    hidden, _ = model.forward_sequence(torch.tensor([*prompt, *plain[:position]], device=model.embed.device))
    logits = model.logits(hidden[-1:])[0]
    ours, theirs = float(logits[plain[position]]), float(logits[other[position]])
    _, exponent = math.frexp(max(abs(ours), abs(theirs)))
    return Flip(name, position, ours - theirs, math.ldexp(torch.finfo(hidden.dtype).eps, exponent - 1))


def excused(flips: Sequence[Flip], temperature: float, dtype: torch.dtype, exact: bool) -> bool:
    """Whether there are no flips, or only those from near-ties where `dtype` allows some outside exact mode.

    Sampling adds noise to the logits, so their gap says nothing there: only float32 and exact mode are held to equality.
    """
    if exact or dtype == torch.float32:
        return not flips
    return temperature > 0 or all(flip.near_tie for flip in flips)


def largest_gap(flips: Sequence[Flip], temperature: float) -> str:
    """The largest gap as a cell of a table."""
    if not flips:
        return "—"
    return "not judged" if temperature > 0 else f"{max(map(_size, flips)):.3g}"


def _size(flip: Flip) -> float:
    return math.inf if flip.gap is None else abs(flip.gap)
