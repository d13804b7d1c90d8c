"""Runs of the load benchmark into rows, a table and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jetflow_serve.load_client import Answer

NOTE = (
    "Budget 0 is a server without a draft head: no taps, no head context, no draft. Auto keeps what it has learned from run to "
    "run. Every run starts with an empty cache. Times are what clients see; a chunk of k "
    "tokens counts as k tokens of a k-th of its time. Nodes: drafted per sequence and target pass."
)


@dataclass(frozen=True)
class Measured:
    """One run: times in milliseconds, `texts` of the answers in order (None: failed)."""

    tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    token_p50: float
    token_p99: float
    acceptance_length: float
    nodes: float
    errors: int
    first_error: str | None
    texts: list[str | None]


@dataclass(frozen=True)
class Row:
    """Medians over the rounds of one budget at one load.

    `ratio`: of tokens a second to those of budget 0 in the same round, None without one. Of the `compared` answers `identical`
    have the text of budget 0.
    """

    load: str
    budget: str
    tokens_per_second: float
    ratio: float | None
    ttft_p50: float
    ttft_p99: float
    token_p50: float
    token_p99: float
    acceptance_length: float
    nodes: float
    errors: int
    first_error: str | None
    compared: int
    identical: int


def measured(answers: Sequence[Answer], nodes: float) -> Measured:
    """What a run's answers say. Failed ones count as errors and nothing else."""
    good = [answer for answer in answers if answer.error is None]
    failed = [answer.error for answer in answers if answer.error is not None]
    if not good:
        raise ValueError(f"every request failed, the first with: {failed[0] if failed else 'no answer'}")
    tokens = sum(answer.tokens for answer in good)
    seconds = max(answer.end for answer in answers) - min(answer.start for answer in answers)
    first = [(answer.chunks[0][0], 1) for answer in good]
    later = [(gap / size, size) for answer in good for gap, size in answer.chunks[1:]]
    if not later:
        raise ValueError(
            "the server does not say how many tokens a chunk has: it has to know `stream_options.continuous_usage_stats`"
        )
    return Measured(
        tokens_per_second=tokens / seconds,
        ttft_p50=1000 * percentile(first, 0.5),
        ttft_p99=1000 * percentile(first, 0.99),
        token_p50=1000 * percentile(later, 0.5),
        token_p99=1000 * percentile(later, 0.99),
        acceptance_length=tokens / max(1, tokens - sum(answer.accepted for answer in good)),
        nodes=nodes,
        errors=len(failed),
        first_error=failed[0] if failed else None,
        texts=[answer.text if answer.error is None else None for answer in answers],
    )


def percentile(weighted: Sequence[tuple[float, int]], share: float) -> float:
    """The smallest value that at least `share` of the (value, weight) pairs' weight does not exceed."""
    left = share * sum(weight for _, weight in weighted)
    for value, weight in sorted(weighted):
        left -= weight
        if left <= 1e-9:
            return value
    return max(weighted)[0]


def summarise(load: str, budget: str, runs: Sequence[Measured], baseline: Sequence[Measured] | None) -> Row:
    """The row of `runs`; `baseline` has budget 0's, round by round the same work."""

    def middle(value: Callable[[Measured], float]) -> float:
        return statistics.median(map(value, runs))

    ratio, compared, identical = None, 0, 0
    if baseline is not None:
        ratio = statistics.median(
            run.tokens_per_second / base.tokens_per_second for run, base in zip(runs, baseline, strict=True)
        )
        pairs = [
            pair
            for run, base in zip(runs, baseline, strict=True)
            for pair in zip(run.texts, base.texts, strict=True)
            if None not in pair
        ]
        compared, identical = len(pairs), sum(one == other for one, other in pairs)
    return Row(
        load=load,
        budget=budget,
        tokens_per_second=middle(lambda run: run.tokens_per_second),
        ratio=ratio,
        ttft_p50=middle(lambda run: run.ttft_p50),
        ttft_p99=middle(lambda run: run.ttft_p99),
        token_p50=middle(lambda run: run.token_p50),
        token_p99=middle(lambda run: run.token_p99),
        acceptance_length=middle(lambda run: run.acceptance_length),
        nodes=middle(lambda run: run.nodes),
        errors=sum(run.errors for run in runs),
        first_error=next((run.first_error for run in runs if run.first_error is not None), None),
        compared=compared,
        identical=identical,
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table, what its words mean, and where `auto` stands against the best fixed budget of each load."""
    lines = [
        "| load | budget | tokens/s | × budget 0 | first token ms p50 / p99 | per token ms p50 / p99 | τ | nodes | errors "
        "| same as budget 0 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = "—" if row.ratio is None else f"{row.ratio:.2f}"
        same = f"{row.identical} of {row.compared}" if row.compared and row.budget != "0" else "—"
        times = f"{row.ttft_p50:.0f} / {row.ttft_p99:.0f} | {row.token_p50:.1f} / {row.token_p99:.1f}"
        lines.append(
            f"| {row.load} | {row.budget} | {row.tokens_per_second:.1f} | {ratio} | {times} | {row.acceptance_length:.2f} "
            f"| {row.nodes:.1f} | {row.errors} | {same} |"
        )
    lines += ["", NOTE, *envelope(rows)]
    lines += [
        f"First error of budget {row.budget} at load {row.load}: {row.first_error}" for row in rows if row.first_error
    ]
    return "\n".join(lines)


def envelope(rows: Sequence[Row]) -> list[str]:
    """For each load, tokens a second of `auto` over those of the best fixed budget."""
    lines: list[str] = []
    for auto in (row for row in rows if row.budget == "auto"):
        fixed = [row for row in rows if row.load == auto.load and row.budget != "auto"]
        if fixed:
            best = max(fixed, key=lambda row: row.tokens_per_second)
            ratio = auto.tokens_per_second / best.tokens_per_second
            lines.append(f"Load {auto.load}: auto has {ratio:.2f} of the best fixed budget, {best.budget}.")
    return ["", *lines] if lines else []


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Tokens a second and time per token against the load, a line a budget, as the image `path`."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra of the package

    loads = list(dict.fromkeys(row.load for row in rows))
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for budget in dict.fromkeys(row.budget for row in rows):
        own = {row.load: row for row in rows if row.budget == budget}
        style = {"color": "black", "linewidth": 2.5} if budget == "auto" else {"linewidth": 1.2}
        label = f"budget {budget}"
        left.plot(loads, [own[load].tokens_per_second for load in loads], "o-", label=label, **style)
        right.plot(loads, [own[load].token_p50 for load in loads], "o-", label=label, **style)
    left.set_ylabel("tokens/s, all clients")
    right.set_ylabel("ms per token, median")
    for axes in (left, right):
        axes.set_xlabel("clients, or requests a second")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    left.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
