"""Predictions as Markdown tables and a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jetflow_serve.trace import replayed_tau

if TYPE_CHECKING:
    from jetflow_serve.devices import Device
    from jetflow_serve.shapes import Shape
    from jetflow_serve.simulate import Acceptance, Prediction
    from jetflow_serve.trace import Trace

CAVEAT = (
    "Predicted, not measured. Acceptance is that of the recorded head on its own target and prompts; times are the shape's. "
    "A trace of the demo model's head says how *that* head accepts: for another target, record a trace of its own head there."
)


def markdown(
    device: Device,
    shape: Shape,
    traces: Sequence[Trace],
    accepted: Sequence[Acceptance],
    rows: Sequence[Prediction],
    host_ms: float,
) -> str:
    """What was assumed, τ by budget, and the best budget at each batch size and context."""
    prompts, tokens = len(traces), sum(trace.decode_tokens for trace in traces)
    host = "none, as in a CUDA graph" if host_ms == 0 else f"{host_ms:g} ms a step"
    lines = [
        f"{shape.name} on {device.name} ({device.source}).",
        f"Head: {_head(shape)}. Added host time: {host}.",
        f"Trace: {traces[0].method}, {prompts} prompts, {tokens} decoded tokens, trees of {traces[0].budget} nodes.",
        "",
        *_acceptance(traces, accepted),
        "",
        "Best budget: speed-up over plain decoding without a head (tokens/s of all requests), by batch size and context:",
        "",
        *_best(rows),
        "",
        CAVEAT,
    ]
    return "\n".join(lines)


def best(rows: Sequence[Prediction]) -> Prediction | None:
    """The fastest of the rows that fit, the smallest budget of equals; None where none fits."""
    fitting = [row for row in rows if row.fits]
    return max(fitting, key=lambda row: (row.tokens_per_second, -row.budget), default=None)


def _head(shape: Shape) -> str:
    if shape.head is None:
        return "none"
    head = shape.head
    width = f", pairwise conditioning of width {head.pairwise}" if head.pairwise else ""
    return f"{head.layers.layers} layers, blocks of {head.block}, draft vocabulary of {head.layers.vocab:,}{width}"


def _acceptance(traces: Sequence[Trace], accepted: Sequence[Acceptance]) -> Iterator[str]:
    workloads = list(dict.fromkeys(trace.workload for trace in traces))
    yield "| τ at budget | " + " | ".join(str(each.budget) for each in accepted) + " |"
    yield "|---" * (len(accepted) + 1) + "|"
    for workload in workloads:
        own = [trace for trace in traces if trace.workload == workload]
        yield f"| {workload} | " + " | ".join(f"{replayed_tau(own, each.budget):.2f}" for each in accepted) + " |"
    if len(workloads) > 1:
        yield "| all | " + " | ".join(f"{each.tau:.2f}" for each in accepted) + " |"


def _best(rows: Sequence[Prediction]) -> Iterator[str]:
    contexts = list(dict.fromkeys(row.context for row in rows))
    yield "| batch | " + " | ".join(f"context {context:,}" for context in contexts) + " |"
    yield "|---" * (len(contexts) + 1) + "|"
    for batch in dict.fromkeys(row.batch for row in rows):
        cells = [_cell([row for row in rows if (row.batch, row.context) == (batch, context)]) for context in contexts]
        yield f"| {batch} | " + " | ".join(cells) + " |"


def _cell(rows: Sequence[Prediction]) -> str:
    found = best(rows)
    if found is None:
        return "does not fit"
    return f"{found.budget}: {found.speedup:.2f}× ({found.tokens_per_second:,.0f})"


def draw(rows: Sequence[Prediction], path: Path, title: str) -> None:
    """Speed-up against budget, a panel a context and a line a batch size, as the image `path`."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra of the package

    contexts = list(dict.fromkeys(row.context for row in rows))
    figure = Figure(figsize=(1 + 4.5 * len(contexts), 4.5), layout="constrained")
    panels = figure.subplots(1, len(contexts), sharey=True, squeeze=False)[0]
    for axes, context in zip(panels, contexts, strict=True):
        for batch in dict.fromkeys(row.batch for row in rows):
            own = [row for row in rows if (row.batch, row.context) == (batch, context) and row.fits]
            axes.plot([str(row.budget) for row in own], [row.speedup for row in own], "o-", label=f"batch {batch}")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_title(f"context {context:,}")
        axes.set_xlabel("draft nodes a request and pass")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("speed-up over plain decoding (predicted)")
    panels[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
