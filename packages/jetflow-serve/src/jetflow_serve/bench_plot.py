"""The plots of the benchmark. matplotlib is an extra of the package (`jetflow-serve[plots]`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jetflow_core.step_clock import PHASES
from jetflow_serve.bench_table import Row
from jetflow_serve.methods import BASELINE


def draw(rows: Sequence[Row], prefix: str, title: str) -> list[Path]:
    """Draw `PREFIX-speedup.png` and `PREFIX-phases.png`; returns their paths."""
    paths = [Path(f"{prefix}-speedup.png"), Path(f"{prefix}-phases.png")]
    _draw_speedup(rows, paths[0], title)
    _draw_phases(rows, paths[1], title)
    return paths


def _draw_speedup(rows: Sequence[Row], path: Path, title: str) -> None:
    """Speed against plain decoding over the budget, a line a method, a panel a workload; whiskers are quartiles."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra of the package

    workloads = list(dict.fromkeys(row.workload for row in rows))
    figure = Figure(figsize=(5.5 * len(workloads), 4.5), layout="constrained")
    for axes, workload in zip(figure.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True):
        drafted = [row for row in rows if row.workload == workload and row.method != BASELINE]
        for method in dict.fromkeys(row.method for row in drafted):
            own = sorted((row for row in drafted if row.method == method), key=lambda row: row.budget)
            middle = [row.ratio for row in own]
            spread = [[row.ratio - row.ratio_low for row in own], [row.ratio_high - row.ratio for row in own]]
            axes.errorbar([row.budget for row in own], middle, yerr=spread, marker="o", capsize=3, label=method)
        axes.axhline(1, color="black", linewidth=1, linestyle="--")
        budgets = sorted({row.budget for row in drafted})
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [str(budget) for budget in budgets])
        axes.minorticks_off()
        axes.set_xlabel("draft nodes a pass")
        axes.set_ylabel(f"speed, × {BASELINE}")
        axes.set_title(workload)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=130)


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
