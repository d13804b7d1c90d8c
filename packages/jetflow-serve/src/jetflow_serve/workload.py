"""Prompt files, and numbers in options, as every measurement reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Workload:
    """Prompts of one file: (id, first user turn)."""

    name: str
    prompts: list[tuple[str, str]]


def read_workload(path: Path, limit: int) -> Workload:
    """The first `limit` rows `{"id": …, "turns": [text, …]}` of a JSON-lines file.

    Raises ValueError that names file and line.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    prompts: list[tuple[str, str]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(prompts) == limit:
                break
            if line.strip():
                prompts.append(_read_row(line, f"{path}, line {number}"))
    if not prompts:
        raise ValueError(f"{path} has no rows")
    return Workload(path.stem, prompts)


def _read_row(line: str, where: str) -> tuple[str, str]:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    match row:
        case {"turns": [str(text), *_]} if text:
            return str(row.get("id", where)), text
        case _:
            raise ValueError(f'{where}: a row must be {{"id": ..., "turns": ["text of the first user message", ...]}}')


def parse_numbers(option: str, text: str) -> list[int]:
    """`8,16,32` as distinct numbers in order. Raises ValueError that names `option`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError(f"{option} is {text!r}: give numbers separated by commas, such as 8,16,32")
    return list(dict.fromkeys(int(part) for part in parts))
