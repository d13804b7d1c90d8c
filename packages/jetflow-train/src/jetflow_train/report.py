"""Plain-text tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from jetflow_train.evaluate import Measurement


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


def measurement_table(results: Sequence[Measurement], before: Sequence[Measurement] = ()) -> str:
    """τ and speed of every workload and budget; with `before`, the untrained head's τ beside it."""
    untrained = {(each.workload, each.budget): each for each in before}
    header = ["workload", "budget", *(["τ untrained"] if before else []), "τ", "tokens/s", "speed-up", "same text"]
    rows: list[list[str]] = []
    for each in results:
        earlier = untrained.get((each.workload, each.budget))
        rows.append(
            [
                each.workload,
                str(each.budget),
                *([f"{earlier.tau:.2f}" if earlier else ""] if before else []),
                f"{each.tau:.2f}",
                f"{each.tokens_per_second:.1f}",
                "" if each.speedup is None else f"{each.speedup:.2f}x",
                "" if each.identical is None else f"{each.identical}/{each.prompts}",
            ]
        )
    return table(header, rows)
