"""Draft temperatures: fitted on which drafted nodes the target accepts, and exported with the head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training_tiny import features_of, tiny_head, tiny_model, tiny_options, tiny_rows

from jetflow_core.weights import open_head
from jetflow_train import trainer as trainer_module
from jetflow_train.calibration import (
    COLDEST,
    HOTTEST,
    Calibration,
    Outcomes,
    Scores,
    calibrate,
    fit_temperature,
    log_likelihood,
    node_outcomes,
)
from jetflow_train.data import spread
from jetflow_train.recipe import Progress, new_trainer
from jetflow_train.simulate import head_rules, replayed_tau

MODEL = tiny_model()


def outcomes(temperature: float, count: int = 20_000) -> tuple[Scores, Outcomes]:
    """Paths that are accepted as often as their scores at `temperature` say."""
    random = np.random.default_rng(0)
    scores = -random.exponential(2.0, count)
    return scores, random.random(count) < np.exp(scores / temperature)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_the_temperature_that_made_the_outcomes_is_found(temperature: float) -> None:
    scores, accepted = outcomes(temperature)
    fitted = fit_temperature(scores, accepted)
    assert fitted == pytest.approx(temperature, rel=0.05)
    best = log_likelihood(scores, accepted, fitted)
    assert all(log_likelihood(scores, accepted, fitted * factor) < best for factor in (0.9, 1.1))


def test_outcomes_of_one_kind_end_at_a_limit() -> None:
    scores = np.array([-0.5, -1000.0, 0.0])
    assert fit_temperature(scores, np.array([True, True, True])) == pytest.approx(HOTTEST)
    assert fit_temperature(scores, np.array([False, False, False])) == pytest.approx(COLDEST)


def test_accepted_nodes_are_those_that_replayed_decoding_commits() -> None:
    rows = tiny_rows(6)
    head = tiny_head(MODEL, rows).requires_grad_(False)
    head.pack()
    items = [features_of(MODEL, row, number) for number, row in enumerate(rows)]
    scores, accepted = node_outcomes(head, items, head_rules(head), 12, 10)
    tau = replayed_tau(head, items, head_rules(head), [12], 10)[12]
    passes = len(items) * 10 / tau
    assert len(scores) == len(accepted) <= 12 * passes
    assert 0 < accepted.sum() == pytest.approx(len(items) * 10 - passes, abs=len(items) * head.config.block_size)
    assert scores.max() <= 0


def test_too_few_nodes_say_nothing() -> None:
    rows = tiny_rows(2)
    head = tiny_head(MODEL, rows).requires_grad_(False)
    head.pack()
    assert calibrate(head, [features_of(MODEL, rows[0])], head_rules(head), 4, 3) is None


@pytest.mark.parametrize(("halves", "fitted"), [((1.7, 1.7), 1.7), ((0.5, 2.5), None)])
def test_a_temperature_must_hold_for_rows_that_it_was_not_fitted_on(
    monkeypatch: pytest.MonkeyPatch, halves: tuple[float, float], fitted: float | None
) -> None:
    made = {0: outcomes(halves[0]), 1: outcomes(halves[1])}
    monkeypatch.setattr("jetflow_train.calibration.node_outcomes", lambda head, items, *_: made[items[0]])
    found = calibrate(None, [0, 1], None, 32, 96)  # pyright: ignore[reportArgumentType]
    if fitted is None:
        assert found is None
    else:
        assert found is not None
        assert found.temperature == pytest.approx(fitted, rel=0.05)
        assert (found.nodes, found.after > found.before) == (40_000, True)


def test_one_row_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a second row there is nothing to hold a fit against, however many nodes the first one has."""
    monkeypatch.setattr("jetflow_train.calibration.LEAST_NODES", 1)
    rows = tiny_rows(2)
    head = tiny_head(MODEL, rows).requires_grad_(False)
    head.pack()
    items = [features_of(MODEL, row, number) for number, row in enumerate(rows)]
    _, accepted = node_outcomes(head, items[:1], head_rules(head), 12, 10)
    assert 0 < accepted.sum() < len(accepted)
    assert calibrate(head, items[:1], head_rules(head), 12, 10) is None


@pytest.mark.parametrize(("fitted", "exported"), [(Calibration(1.7041, 500, -0.5, -0.4), 1.704), (None, 1.0)])
def test_the_exported_head_has_the_fitted_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fitted: Calibration | None, exported: float
) -> None:
    monkeypatch.setattr(trainer_module, "calibrate", lambda *_: fitted)
    options = tiny_options(steps=1, output=str(tmp_path), init=None)
    run = new_trainer(MODEL, spread(tiny_rows(12)), options, Progress())
    run.run()
    assert open_head(tmp_path / "head")[0].draft_temperature == exported
    again = new_trainer(MODEL, spread(tiny_rows(12)), tiny_options(init=str(tmp_path / "head")), Progress())
    assert again.head.config.draft_temperature == 1.0  # it is fitted anew
