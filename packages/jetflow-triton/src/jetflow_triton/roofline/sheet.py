"""The roofline as text: a readable selection in Markdown, or every row as CSV."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from jetflow_triton.roofline.costs import OPS, Cost
from jetflow_triton.roofline.prose import introduction, losses, number, step
from jetflow_triton.roofline.shapes import H100, H200, LOADS, MODELS, Load, Model

WIDTH = 120
SHOWN = (Load(1, 16, 8192), Load(1, 64, 8192), Load(8, 64, 8192), Load(32, 256, 8192))
FIELDS = (
    "model", "batch", "budget", "context", "op", "calls", "bytes", "flops", "loads", "issued", "programs", "launches",
    "floor_h100_us", "floor_h200_us", "design_h100_us", "design_h200_us",
)  # fmt: skip


def table() -> Iterator[tuple[Model, Load, str, int, Cost]]:
    """Every row: model, load, op, calls a step, cost of one call."""
    for model in MODELS:
        for name, op in OPS.items():
            calls = op.calls(model)
            if calls is not None:
                for load in LOADS:
                    yield model, load, name, calls, op.cost(model, load)


def csv() -> Iterator[str]:
    """The whole table, a line at a time."""
    yield ",".join(FIELDS)
    for model, load, name, calls, cost in table():
        times = (cost.floor(H100), cost.floor(H200), cost.expected(H100), cost.expected(H200))
        amounts = (cost.bytes, cost.flops, cost.loads, cost.issued, cost.programs)
        cells = [model.name, load.batch, load.budget, load.context, name, calls, *(f"{x:.0f}" for x in amounts)]
        yield ",".join(map(str, [*cells, cost.launches, *(f"{x * 1e6:.2f}" for x in times)]))


def markdown() -> Iterator[str]:
    """The sheet, a line at a time."""
    yield "# Roofline of the ops"
    for paragraph in introduction():
        yield ""
        yield from wrap(paragraph, WIDTH)
    yield from _steps()
    yield from ("", "## Where the design loses", "")
    for paragraph in losses():
        yield from wrap(f"- {paragraph}", WIDTH, subsequent_indent="  ")
    for model in MODELS:
        yield from _calls(model)
    yield from _attention()


def _steps() -> Iterator[str]:
    yield from (
        "",
        "## A whole step",
        "",
        "| model | batch | budget | context | floor H100 | floor H200 | design H100 | largest parts of the floor |",
    )
    yield "|---|--:|--:|--:|--:|--:|--:|---|"
    for model in MODELS:
        for load in LOADS:
            if load.context == 8192:
                parts = step(model, load)
                times = {name: calls * cost.floor(H100) for name, calls, cost in parts}
                total = sum(times.values())
                other = sum(calls * cost.floor(H200) for _, calls, cost in parts)
                design = sum(calls * cost.expected(H100) for _, calls, cost in parts)
                largest = sorted(times, key=lambda name: -times[name])[:3]
                named = ", ".join(f"{name} {times[name] / total:.0%}" for name in largest)
                cells = " | ".join(f"{number(seconds * 1e3)} ms" for seconds in (total, other, design))
                yield f"{_where(model, load)} {cells} | {named} |"


def _calls(model: Model) -> Iterator[str]:
    yield from ("", f"## {model.name}: one call at context 8,192", "", f"| op | batch | budget | {HEADER}", RULE)
    for name, op in OPS.items():
        if op.calls(model) is not None and name != "tree_attention":
            for load in SHOWN:
                yield f"| {name} | {load.batch} | {load.budget} | {_cells(op.cost(model, load))}"


def _attention() -> Iterator[str]:
    yield from ("", "## tree_attention: one call", "", f"| model | batch | budget | context | {HEADER}", "|---" + RULE)
    for model in MODELS:
        for load in LOADS:
            yield f"{_where(model, load)} {_cells(OPS['tree_attention'].cost(model, load))}"


HEADER = "MB | GFLOP | H100 µs | H200 µs | asked MB | issued GFLOP | programs | launches | design H100 µs |"
RULE = "|---" + 11 * "|--:" + "|"


def _where(model: Model, load: Load) -> str:
    return f"| {model.name} | {load.batch} | {load.budget} | {load.context} |"


def _cells(cost: Cost) -> str:
    return (
        f"{number(cost.bytes / 1e6)} | {number(cost.flops / 1e9)} | {number(cost.floor(H100) * 1e6)} | "
        f"{number(cost.floor(H200) * 1e6)} | {number(cost.loads / 1e6)} | {number(cost.issued / 1e9)} | "
        f"{cost.programs:.0f} | {cost.launches} | {number(cost.expected(H100) * 1e6)} |"
    )
