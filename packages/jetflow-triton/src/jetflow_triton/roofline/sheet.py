"""The roofline as text: a readable selection in Markdown, or every row as CSV."""

from __future__ import annotations

from collections.abc import Iterator

from jetflow_triton.roofline import costs
from jetflow_triton.roofline.costs import OPS, Cost
from jetflow_triton.roofline.shapes import H100, H200, LOADS, MODELS, QWEN3_8B, QWEN3_30B_A3B, Load, Model

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
    yield from INTRODUCTION.splitlines()
    yield from _steps()
    yield from LOSSES.format(**_numbers()).splitlines()
    for model in MODELS:
        yield from _calls(model)
    yield from _attention()


def step(model: Model, load: Load) -> list[tuple[str, int, Cost]]:
    """The ops that one decode step calls, how often, and the cost of a call."""
    found = ((name, op.calls(model), op) for name, op in OPS.items())
    return [(name, calls, op.cost(model, load)) for name, calls, op in found if calls]


def _steps() -> Iterator[str]:
    yield from ("", "## A whole step", "", "| model | batch | budget | context | floor H100 | floor H200 | largest parts |")
    yield "|---|--:|--:|--:|--:|--:|---|"
    for model in MODELS:
        for load in LOADS:
            if load.context == 8192:
                times = {name: calls * cost.floor(H100) for name, calls, cost in step(model, load)}
                other = sum(calls * cost.floor(H200) for _, calls, cost in step(model, load))
                total = sum(times.values())
                largest = sorted(times, key=lambda name: -times[name])[:3]
                parts = ", ".join(f"{name} {100 * times[name] / total:.0f}%" for name in largest)
                yield f"{_where(model, load)} {total * 1e3:.2f} ms | {other * 1e3:.2f} ms | {parts} |"


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
        f"{_number(cost.bytes / 1e6)} | {_number(cost.flops / 1e9)} | {_number(cost.floor(H100) * 1e6)} | "
        f"{_number(cost.floor(H200) * 1e6)} | {_number(cost.loads / 1e6)} | {_number(cost.issued / 1e9)} | "
        f"{cost.programs:.0f} | {cost.launches} | {_number(cost.expected(H100) * 1e6)} |"
    )


def _number(x: float) -> str:
    """About three digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


INTRODUCTION = ""
LOSSES = ""


def _numbers() -> dict[str, str]:
    return {}
