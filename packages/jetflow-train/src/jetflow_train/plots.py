"""Plots of a training run and of an ablation, as matplotlib figures and PNG files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetflow_train.data import read_jsonl

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 130
NO_PLOT = "no plot: it needs matplotlib (pip install jetflow-train[plots])"


def can_plot() -> bool:
    """Whether matplotlib, an extra of the package, is there."""
    return importlib.util.find_spec("matplotlib") is not None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of a run's `metrics.jsonl` in order of step: what a resumed run did again replaces what a kill had cut off."""
    records: list[dict[str, Any]] = []
    for number, record in read_jsonl(path, partial_end=True):
        if "step" not in record:
            raise ValueError(f"{path}, line {number}: not the metrics of a training run; move the file away")
        while records and (records[-1]["step"] > record["step"] or _same(records[-1], record)):
            records.pop()
        records.append(record)
    return records


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one["step"] == other["step"] and one.keys() == other.keys()


def training_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Loss on the left, held-out τ on the right, against blocks below and steps above."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra of the package

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    logged = [each for each in records if "loss" in each]
    held = [each for each in records if "held_out" in each]
    replayed = [each for each in held if "replayed_tau" in each]
    for key, label in (("loss", "training"), ("marginal_loss", "training, unconditioned")):
        if any(each.get(key) for each in logged):
            left.plot(_blocks(logged), [each[key] for each in logged], label=label)
    if held:
        kl = [each["held_out"]["conditional_kl"] for each in held]
        left.plot(_blocks(held), kl, "o-", label="held out, forward KL")
        length = [each["held_out"]["accepted_length"] for each in held]
        right.plot(_blocks(held), length, "o--", label="a chain, from teacher-forced accuracy")
    for budget in replayed[0]["replayed_tau"] if replayed else ():
        tau = [each["replayed_tau"][budget] for each in replayed]
        right.plot(_blocks(replayed), tau, "o-", label=f"replayed, budget {budget}")
    left.set_ylabel("loss, nats a slot")
    right.set_ylabel("τ, tokens a target pass")
    per_step = records[-1]["blocks"] / max(records[-1]["step"], 1) if records else 1.0
    for axes in (left, right):
        axes.set_xlabel("blocks")
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
        above = axes.secondary_xaxis("top", functions=_scale(per_step))
        above.set_xlabel("steps")
    return figure


def _blocks(records: Sequence[Mapping[str, Any]]) -> list[int]:
    return [each["blocks"] for each in records]


def _scale(factor: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    return (lambda x: x / factor), (lambda x: x * factor)


def draw_training(folder: Path) -> Path:
    """`training.png` of the run in `folder`. Raises ValueError when it cannot be written."""
    return save_figure(training_figure(read_metrics(folder / "metrics.jsonl")), folder / "training.png")


def ablation_figure(panels: Mapping[str, Mapping[str, Mapping[int, float]]], ylabel: str) -> Figure:
    """τ against the node budget: a panel for each thing that was varied, a line a variant ({panel: {variant: {budget: τ}}})."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra of the package

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.6 * rows), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axes, (name, lines) in zip(places, panels.items(), strict=False):
        budgets = sorted({budget for line in lines.values() for budget in line})
        for label, line in lines.items():
            axes.plot(range(len(budgets)), [line.get(budget, float("nan")) for budget in budgets], "o-", label=label)
        axes.set_xticks(range(len(budgets)), [str(budget) for budget in budgets])
        axes.set_title(name)
        axes.set_xlabel("node budget")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    for row in range(rows):
        places[row * columns].set_ylabel(ylabel)
    return figure


def save_figure(figure: Figure, path: Path) -> Path:
    """Write `figure` as the PNG file `path`. Raises ValueError when the disk refuses."""
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise ValueError(f"{path}: cannot write the plot ({error})") from error
    return path
