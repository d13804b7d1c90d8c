"""The plots of the benchmark. matplotlib is an extra of the package (`jetflow-serve[plots]`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jetflow_core.step_clock import PHASES
from jetflow_serve.bench_table import Replay, Row
from jetflow_serve.methods import BASELINE

COLUMNS = 4  # panels side by side


@dataclass(frozen=True)
class Point:
    """A value of one method and budget on one workload, and how far below and above it its spread reaches."""

    workload: str
    method: str
    budget: int
    value: float
    spread: tuple[float, float] = (0.0, 0.0)


def draw(rows: Sequence[Row], prefix: str, title: str) -> None:
    """Draw `PREFIX-speedup.png` (whiskers are quartiles) and `PREFIX-phases.png`."""
    points = [
        Point(row.workload, row.method, row.budget, row.ratio, (row.ratio - row.ratio_low, row.ratio_high - row.ratio))
        for row in rows
        if row.method != BASELINE
    ]
    _draw_by_budget(points, f"speed, × {BASELINE}", Path(f"{prefix}-speedup.png"), title)
    _draw_phases(rows, Path(f"{prefix}-phases.png"), title)


def draw_replays(replays: Sequence[Replay], prefix: str, title: str) -> None:
    """Draw `PREFIX-tau.png`."""
    points = [Point(each.workload, each.method, each.budget, each.acceptance_length) for each in replays]
    _draw_by_budget(points, "τ, tokens a target pass", Path(f"{prefix}-tau.png"), title)


def _draw_by_budget(points: Sequence[Point], label: str, path: Path, title: str) -> None:
    """Values over the budget, a line a method, a panel a workload; plain decoding is a dashed line at 1."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra of the package

    workloads = list(dict.fromkeys(point.workload for point in points))
    columns = min(len(workloads), COLUMNS)
    lines = -(-len(workloads) // columns)
    figure = Figure(figsize=(5.5 * columns, 4.5 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in panels[len(workloads) :]:
        axes.set_axis_off()
    for axes, workload in zip(panels, workloads, strict=False):
        shown = [point for point in points if point.workload == workload]
        for method in dict.fromkeys(point.method for point in shown):
            own = sorted((point for point in shown if point.method == method), key=lambda point: point.budget)
            spread = list(zip(*(point.spread for point in own), strict=True))
            axes.errorbar(
                [point.budget for point in own],
                [point.value for point in own],
                yerr=spread,
                marker="o",
                capsize=3,
                label=method,
            )
        axes.axhline(1, color="black", linewidth=1, linestyle="--")
        budgets = sorted({point.budget for point in shown})
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [str(budget) for budget in budgets])
        axes.minorticks_off()
        axes.set_xlabel("draft nodes a pass")
        axes.set_ylabel(label)
        axes.set_title(workload)
        axes.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _draw_phases(rows: Sequence[Row], path: Path, title: str) -> None:
    """Time of a step by phase, a bar a method and budget, a panel a workload."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra of the package

    workloads = list(dict.fromkeys(row.workload for row in rows))
    bars = len(rows) // len(workloads)
    figure = Figure(figsize=(max(5.0, 2.0 + 0.45 * bars) * len(workloads), 5), layout="constrained")
    for axes, workload in zip(figure.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True):
        own = [row for row in rows if row.workload == workload]
        names = [row.method if row.method == BASELINE else f"{row.method} {row.budget}" for row in own]
        bottom = [0.0] * len(own)
        for phase in PHASES:
            heights = [row.phase_ms[phase] for row in own]
            axes.bar(names, heights, bottom=bottom, label=phase)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        axes.tick_params(axis="x", labelrotation=90)
        axes.set_ylabel("ms a step, mean")
        axes.set_title(workload)
        axes.grid(axis="y", alpha=0.3)
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper")  # in the order of the bars
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
