"""Answers that part from plain decoding's."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from jetflow_serve.flips import Flip, excused, find_flip, largest_gap
from tiny import tiny_model

PROMPT = [5, 9, 2]


def test_a_flip_is_where_the_answers_part_and_how_near_a_tie_it_was() -> None:
    model = tiny_model()
    hidden, _ = model.forward_sequence(torch.tensor([*PROMPT, 7]))
    logits = model.logits(hidden[-1:])[0]
    flip = find_flip(model, "p", PROMPT, [7, 3, 1], [7, 4, 1])
    assert (flip.prompt, flip.position) == ("p", 1)
    assert flip.gap == pytest.approx(float(logits[3] - logits[4]), abs=1e-5)
    larger = logits[[3, 4]].abs().max()
    assert flip.unit == pytest.approx(float(torch.nextafter(larger, larger + 1) - larger), rel=1e-3)


@pytest.mark.parametrize(("dtype", "logit", "unit"), [(torch.bfloat16, 36.25, 0.25), (torch.float16, 19.0, 2**-6)])
def test_a_near_tie_is_a_few_units_in_the_last_place(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, logit: float, unit: float
) -> None:
    model = tiny_model()
    monkeypatch.setattr(model, "forward_sequence", lambda tokens: (torch.zeros(len(tokens), 32, dtype=dtype), []))
    for gap, near in ((0.0, True), (4 * unit, True), (5 * unit, False)):
        logits = torch.zeros(1, 200, dtype=dtype)
        logits[0, 3], logits[0, 4] = logit, logit - gap
        monkeypatch.setattr(model, "logits", lambda hidden, logits=logits: logits)
        flip = find_flip(model, "p", PROMPT, [3], [4])
        assert (flip.gap, flip.unit, flip.near_tie) == (gap, unit, near)
        assert excused([flip], 0.0, dtype, exact=False) == near


def test_exact_mode_and_float32_allow_no_difference_half_precision_a_near_tie() -> None:
    tie = [Flip("p", 2, 0.0, 0.25)]
    assert excused(tie, 0.0, torch.bfloat16, exact=False)
    assert not excused(tie, 0.0, torch.bfloat16, exact=True)
    assert not excused(tie, 0.0, torch.float32, exact=False)
    assert excused([Flip("p", 2, 9.0, 0.25)], 0.8, torch.bfloat16, exact=False), "a sampled answer's gap says nothing"


@pytest.mark.parametrize("answers", [([7, 3], [7, 3, 1]), ([7, 3, 1], [7, 3]), ([], [7])])
def test_an_answer_that_ends_early_is_no_near_tie(answers: tuple[list[int], list[int]]) -> None:
    flip = find_flip(tiny_model(), "p", PROMPT, *answers)
    assert flip == Flip("p", min(map(len, answers)), None)
    assert not excused([Flip("p", 0, 0.0, 1.0), flip], 0.0, torch.bfloat16, exact=False)
    assert largest_gap([Flip("p", 0, 0.1), flip], 0.0) == "inf"
    json.dumps(asdict(flip), allow_nan=False)
