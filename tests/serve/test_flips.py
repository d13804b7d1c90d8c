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


@pytest.mark.parametrize("answers", [([7, 3], [7, 3, 1]), ([7, 3, 1], [7, 3]), ([], [7])])
def test_an_answer_that_ends_early_is_no_near_tie(answers: tuple[list[int], list[int]]) -> None:
    flip = find_flip(tiny_model(), "p", PROMPT, *answers)
    assert flip == Flip("p", min(map(len, answers)), None)
    assert not excused([Flip("p", 0, 0.0), flip], 0.0, torch.bfloat16, exact=False)
    assert largest_gap([Flip("p", 0, 0.1), flip], 0.0) == "inf"
    json.dumps(asdict(flip), allow_nan=False)
