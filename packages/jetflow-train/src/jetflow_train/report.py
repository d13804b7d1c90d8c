"""An evaluation as text: the table, what it was measured on, and a plain line wherever numbers that should agree do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jetflow_train.evaluate import Evaluation, Measurement

# Replay and engine walk the same trees but for near-ties, which fall either way in half precision.
TOLERANCE = 0.05
# A chain's expected length is over evenly drawn anchors; real rounds begin where the last one failed, which is harder.
FORCED_TOLERANCE = 0.25
# τ so far below that of held-out training rows says that the head has seen nothing like this workload.
FAMILIAR = 0.75
SHOWN_DEPTHS = 5


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to their widest cell, numbers (all but the first column) to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *(line(row) for row in rows)])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same cells as a Markdown table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def evaluation_report(after: Evaluation, before: Evaluation | None = None) -> str:
    """Table, facts and warnings of an evaluation; with `before`, the untrained head's τ and speed-up beside it."""
    parts = [measurement_table(after.measurements, before.measurements if before else ())]
    parts.append("\n".join([*facts_lines(after.facts), *training_lines(after.training)]))
    if lines := [*warnings(after), *notes(after)]:
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def measurement_table(results: Sequence[Measurement], before: Sequence[Measurement] = ()) -> str:
    """τ measured and predicted, acceptance per depth and speed of every workload and budget."""
    untrained = {(each.workload, each.budget): each for each in before}
    extra = ["τ untrained", "speed-up untrained"] if before else []
    header = ["workload", "budget", *extra, "τ", "τ predicted", f"accepted to depth 1–{SHOWN_DEPTHS}, %"]
    header += ["tokens/s", "plain tokens/s", "speed-up", "same text"]
    rows: list[list[str]] = []
    for each in results:
        earlier = untrained.get((each.workload, each.budget)) if each.budget else None
        cells = [_number(earlier and earlier.tau), _times(earlier and earlier.speedup)] if before else []
        rows.append(
            [
                each.workload,
                str(each.budget),
                *cells,
                f"{each.tau:.2f}",
                _number(each.predicted),
                " ".join(f"{100 * share:.0f}" for share in each.acceptance[:SHOWN_DEPTHS]),
                f"{each.tokens_per_second:.1f}",
                _number(each.plain_tokens_per_second, 1),
                _times(each.speedup),
                "" if each.identical is None else f"{each.identical}/{each.prompts}",
            ]
        )
    return table(header, rows)


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def warnings(evaluation: Evaluation) -> list[str]:
    """A line for a head that was trained for another target, and for each measured τ that the training code does not explain."""
    lines: list[str] = []
    training, mark = evaluation.training or {}, evaluation.facts.get("target_mark")
    if training.get("target_mark", mark) != mark:
        lines.append(
            f"WARNING: this head was trained for another target, {training['target']}: what it reaches here says little about it."
        )
    drafted = [each for each in evaluation.measurements if each.budget]
    for each in drafted:
        if each.predicted is not None and abs(each.tau - each.predicted) > TOLERANCE * each.predicted:
            lines.append(
                f"WARNING: {each.workload}, budget {each.budget}: measured τ {each.tau:.2f}, but {each.predicted:.2f} replayed "
                f"on the same answers with the training code; they should agree within {TOLERANCE:.0%}. Training and serving see "
                "different taps, positions, masks or context: trust neither number."
            )
    for workload, forced in evaluation.forced.items():
        # A tree with a node for each depth holds the chain of the likeliest tokens, or something likelier.
        whole = [each for each in drafted if each.workload == workload and each.budget >= len(forced.accuracy)]
        best = max(whole, key=lambda each: each.budget, default=None)
        if best is not None and best.tau < (1 - FORCED_TOLERANCE) * forced.accepted_length:
            lines.append(
                f"WARNING: {workload}, budget {best.budget}: measured τ {best.tau:.2f}, but teacher-forced accuracy promises a "
                f"chain of {forced.accepted_length:.2f}; more than {FORCED_TOLERANCE:.0%} is lost between head and tree."
            )
    return lines


def notes(evaluation: Evaluation) -> list[str]:
    """A line for each workload that the head does much worse on than on its own held-out rows."""
    results = (evaluation.training or {}).get("results") or {}
    held_out: Mapping[str, float] = results.get("replayed_tau") or {}
    lines: list[str] = []
    for each in evaluation.measurements:
        expected = held_out.get(str(each.budget))
        if each.budget and expected is not None and each.tau < FAMILIAR * expected:
            lines.append(
                f"note: {each.workload}, budget {each.budget}: τ {each.tau:.2f} is far below the {expected:.2f} of held-out "
                "training rows; the head has hardly seen such prompts (other task, language, template or thinking mode)."
            )
    return lines


def facts_lines(facts: Mapping[str, str | int | bool]) -> list[str]:
    """What was measured, on what hardware, in which versions."""
    hardware = [f"{facts['cpu']}, {facts['cores_usable']} cores, {facts['threads']} threads"]
    hardware += [str(facts[key]) for key in ("gpu", "dtype") if key in facts]
    versions = [f"{key} {facts[key]}" for key in ("python", "torch", "jetflow-core", "jetflow-train") if key in facts]
    return [f"target {facts['target']}, head {facts['head']}", "; ".join([*hardware, ", ".join(versions)])]


def training_lines(training: Mapping[str, Any] | None) -> list[str]:
    """What the head was trained on."""
    if training is None:
        return ["trained on: unknown (the head's folder has no training.json)"]
    data: Mapping[str, Mapping[str, int]] = training["data"]
    listed = ", ".join(f"{name} {counts['rows']}" for name, counts in data.items())
    rows, tokens = (sum(counts[key] for counts in data.values()) for key in ("rows", "tokens"))
    results = training.get("results") or {}
    seen = f"; {results['step']} steps, {results['blocks']} blocks" if "step" in results else "; training not finished"
    variants = " and ".join(each or "the template's defaults" for each in training["template_variants"])
    return [f"trained on {rows} rows, {tokens} tokens ({listed}) under {variants}{seen}"]
