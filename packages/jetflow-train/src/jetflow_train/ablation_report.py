"""An ablation as Markdown, JSON and a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jetflow_train.ablations import Comparison, Outcome, Rounds
from jetflow_train.config import HeadOptions
from jetflow_train.files import replace_file
from jetflow_train.plots import NO_PLOT, ablation_figure, can_plot, save_figure
from jetflow_train.report import TOLERANCE, markdown_table
from jetflow_train.simulate import tau_of
from jetflow_train.variants import REGENERATED

MAIN_BUDGET = 32  # the paper compares from here on
RESAMPLES = 400


def write_ablation(comparison: Comparison, folder: Path) -> str:
    """Write `ablation.md`, `ablation.json` and `ablation.png` into `folder`; the text of the first, and where they are.

    Raises ValueError when they cannot be written.
    """
    text = ablation_text(comparison)
    try:
        replace_file(folder / "ablation.md", (text + "\n").encode())
        replace_file(folder / "ablation.json", (json.dumps(asdict(comparison), indent=1) + "\n").encode())
    except OSError as error:
        raise ValueError(f"{folder}: cannot write the comparison ({error})") from error
    plot = NO_PLOT
    if can_plot():
        path = save_figure(ablation_figure(panels(comparison), "τ, replayed on held-out rows"), folder / "ablation.png")
        plot = f"plot: {path}"
    return f"{text}\n\ntable: {folder / 'ablation.md'}\n{plot}"


def ablation_text(comparison: Comparison) -> str:
    """Tables, directions and warnings."""
    outcomes = comparison.outcomes
    parts = ["# Ablation", _facts(comparison), "## τ replayed on held-out greedy rows", replayed_table(outcomes)]
    budget = _main_budget(outcomes)
    parts += [f"By data set, at budget {budget}:", data_set_table(outcomes, budget)]
    decoded = [each for each in outcomes if each.decoded is not None]
    if decoded:
        parts += ["## τ of real decoding, mean of the workloads (replayed on the same answers)", decoded_table(decoded)]
    if lines := directions(outcomes):
        parts += ["## Directions the paper gives", "\n".join(f"- {line}" for line in lines)]
    return "\n\n".join(parts)


def _facts(comparison: Comparison) -> str:
    base, facts = comparison.base, comparison.facts
    length = f"{base.steps} steps" if base.steps else f"{base.minutes} minutes"
    rows = ", ".join(f"{kind} {count}" for kind, count in comparison.rows.items())
    shared = f"block {base.block_size}, {base.layers} layers, {base.taps} taps, loss {base.loss}, gamma {base.gamma}"
    hardware = ", ".join(f"{key} {value}" for key, value in facts.items())
    return f"Each: {length} of {base.blocks} blocks, seed {base.seed}. Base: {shared}. Rows: {rows}.\n{hardware}."


def _main_budget(outcomes: Sequence[Outcome]) -> int:
    """The budget nearest to the one that tables are read at."""
    return min(_budgets(outcomes), key=lambda budget: abs(budget - MAIN_BUDGET))


def _budgets(outcomes: Sequence[Outcome]) -> list[int]:
    return sorted({budget for each in outcomes for budget in all_rows(each)})


def all_rows(outcome: Outcome) -> Rounds:
    """The replayed rows of all data sets together."""
    together: Rounds = {}
    for rounds in outcome.replayed.values():
        for budget, pairs in rounds.items():
            together.setdefault(budget, []).extend(pairs)
    return together


def difference(pairs: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """τ of one head less that of another on the same rows, and its standard error: rows are drawn again with replacement."""
    counts = np.array([pairs, others], dtype=float)  # [2, rows, (tokens, passes)]
    drawn = np.random.default_rng(0).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    sums = counts[:, drawn].sum(2)  # [2, resamples, (tokens, passes)]
    tau = sums[..., 0] / sums[..., 1]
    return tau_of(pairs) - tau_of(others), float((tau[0] - tau[1]).std())


def replayed_table(outcomes: Sequence[Outcome]) -> str:
    """τ of every variant at every budget, and by how much it differs from what it is held against."""
    known = {each.variant.name: each for each in outcomes}
    budgets, main = _budgets(outcomes), _main_budget(outcomes)
    header = ["varies", "variant", *(f"τ at {budget}" for budget in budgets), f"Δ at {main}", "against"]
    header += ["forward KL", "blocks", "blocks/s"]
    rows: list[list[str]] = []
    for each in outcomes:
        variant, rounds = each.variant, all_rows(each)
        other = known.get(variant.against) if variant.name != variant.against else None
        change = _signed(*difference(rounds[main], all_rows(other)[main])) if other else ""
        held, speed = each.trained["held_out"], each.trained["blocks_per_second"]
        rows.append(
            [
                variant.varies or "—",
                variant.name,
                *(f"{tau_of(rounds[budget]):.2f}" for budget in budgets),
                change,
                variant.against if other else "",
                f"{held['conditional_kl']:.2f}" if held else "",
                str(each.trained["blocks"]),
                f"{speed:.0f}" if speed else "",
            ]
        )
    return markdown_table(header, rows)


def _signed(value: float, error: float) -> str:
    return f"{value:+.2f} ± {error:.2f}"


def data_set_table(outcomes: Sequence[Outcome], budget: int) -> str:
    """τ of every variant on every data set."""
    names = list(outcomes[0].replayed)
    rows = [[each.variant.name, *(f"{tau_of(each.replayed[name][budget]):.2f}" for name in names)] for each in outcomes]
    return markdown_table(
        ["variant", *(f"{name} ({len(outcomes[0].replayed[name][budget])} rows)" for name in names)], rows
    )


def decoded_table(outcomes: Sequence[Outcome]) -> str:
    """Measured and predicted τ, and where they part."""
    budgets = list(dict.fromkeys(each["budget"] for outcome in outcomes for each in _measurements(outcome)))
    rows: list[list[str]] = []
    for outcome in outcomes:
        cells: list[str] = []
        apart = 0
        for budget in budgets:
            own = [each for each in _measurements(outcome) if each["budget"] == budget]
            tau, predicted = (sum(each[key] for each in own) / len(own) for key in ("tau", "predicted"))
            apart += sum(abs(each["tau"] - each["predicted"]) > TOLERANCE * each["predicted"] for each in own)
            cells.append(f"{tau:.2f} ({predicted:.2f})")
        rows.append(
            [outcome.variant.name, *cells, f"WARNING: {apart} apart by more than {TOLERANCE:.0%}" if apart else ""]
        )
    return markdown_table(["variant", *(f"τ at {budget}" for budget in budgets), "replay agrees"], rows)


def _measurements(outcome: Outcome) -> Sequence[Mapping[str, Any]]:
    assert outcome.decoded is not None
    return outcome.decoded["measurements"]


def directions(outcomes: Sequence[Outcome]) -> list[str]:
    """For each pair that the paper orders, whether it comes out so at the larger budgets."""
    known = {each.variant.name: each for each in outcomes}
    budgets = [budget for budget in _budgets(outcomes) if budget >= MAIN_BUDGET] or _budgets(outcomes)[-1:]
    lines: list[str] = []
    for each in outcomes:
        better = known.get(each.variant.against)
        if not each.variant.below or better is None:
            continue
        gains = {budget: difference(all_rows(better)[budget], all_rows(each)[budget]) for budget in budgets}
        if all(gain > 0 for gain, _ in gains.values()):
            verdict = "yes" if all(gain > 2 * error for gain, error in gains.values()) else "yes, within the noise"
        else:
            verdict = "NO" if any(gain < -2 * error for gain, error in gains.values()) else "no, within the noise"
        listed = ", ".join(f"{_signed(*gain)} at budget {budget}" for budget, gain in gains.items())
        lines.append(f"{each.variant.varies}: {label(better, each)} over {label(each, better)}: {verdict} ({listed})")
    return lines


def label(outcome: Outcome, other: Outcome) -> str:
    """What sets a variant apart from another: its data, or the options in which they differ."""
    if outcome.variant.data != other.variant.data:
        return "all regenerated rows" if outcome.variant.data == REGENERATED else f"{outcome.variant.data} answers"
    own, their = (
        _changed(each.options, {**outcome.variant.changes, **other.variant.changes}) for each in (outcome, other)
    )
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in own.items() if value != their[key]) or "base"


def _changed(options: HeadOptions, keys: Mapping[str, Any]) -> dict[str, str]:
    values = {key: getattr(options, key) for key in keys}
    return {key: "none" if value is None else str(value) for key, value in values.items()}


def panels(comparison: Comparison) -> dict[str, dict[str, dict[int, float]]]:
    """{what varies: {label: {budget: τ}}}, with what the variants are held against first in each."""
    known = {each.variant.name: each for each in comparison.outcomes}
    found: dict[str, dict[str, dict[int, float]]] = {}
    for each in comparison.outcomes:
        other = known.get(each.variant.against)
        if not each.variant.varies:
            continue
        lines = found.setdefault(each.variant.varies, {})
        if other is not None:
            lines.setdefault(label(other, each), _line(other))
        lines[label(each, other or each)] = _line(each)
    return found or {"base": {each.variant.name: _line(each) for each in comparison.outcomes}}


def _line(outcome: Outcome) -> dict[int, float]:
    return {budget: tau_of(pairs) for budget, pairs in all_rows(outcome).items()}
