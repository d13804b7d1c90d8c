"""What a head was trained on and how it did, as `training.json` in the head's folder: a τ without it cannot be judged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from jetflow_train.config import HeadOptions
from jetflow_train.data import Row, is_held_out
from jetflow_train.files import replace_file

NAME = "training.json"
PATHS = {"output", "features", "device", "data"}  # options that say where, not what


def dataset_of(row_id: str) -> str:
    """The data set that a row's id names: what stands before its first slash."""
    name, slash, _ = row_id.partition("/")
    return name if slash else "unnamed"


def training_record(
    rows: Sequence[Row], options: HeadOptions, results: dict[str, Any] | None, mark: str
) -> dict[str, Any]:
    """The record of a run on `rows`; `results` is the last held-out record of the metrics, None before there is one, `mark`
    the `target_mark` of what it was trained for.
    """
    data: dict[str, dict[str, int]] = {}
    for row in rows:
        counts = data.setdefault(dataset_of(row.id), {"rows": 0, "held_out": 0, "tokens": 0})
        held = is_held_out(row, options.held_out)
        counts["held_out" if held else "rows"] += 1
        counts["tokens"] += 0 if held else sum(end - start for start, end in row.spans)
    return {
        "target": options.target or "demo model",
        "target_mark": mark,
        "data": dict(sorted(data.items())),
        "corpus_rows": sum(row.temperature is None for row in rows),  # whose answers are not the target's own
        "temperatures": sorted({row.temperature for row in rows if row.temperature is not None}),
        "template_variants": sorted({row.variant for row in rows}),
        "options": {key: value for key, value in asdict(options).items() if key not in PATHS},
        "results": results,
    }


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Put `record` into the head's folder. Raises ValueError when it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / NAME, (json.dumps(record, indent=1) + "\n").encode())
    except OSError as error:
        raise ValueError(f"{folder / NAME}: cannot write the training record ({error})") from error


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record in a head's folder; None where there is none (a hub id, a head of other origin) or it is no record."""
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) and "data" in found else None
