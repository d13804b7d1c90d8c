"""Prompt files, numbers in options and paths for results, as every measurement reads them."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetflow_core.tokenizer import Tokenizer


@dataclass(frozen=True)
class Workload:
    """Prompts of one file: (id, first user turn)."""

    name: str
    prompts: list[tuple[str, str]]

    def encoded(self, tokenizer: Tokenizer) -> list[tuple[str, list[int]]]:
        """(id, token ids) of every prompt. Raises ValueError that names the prompt that has none."""
        found: list[tuple[str, list[int]]] = []
        for name, text in self.prompts:
            try:
                found.append((name, tokenizer.encode_chat([{"role": "user", "content": text}])))
            except ValueError as error:
                raise ValueError(f"{self.name}, prompt {name}: {error}") from error
        return found


def read_workload(path: Path, limit: int) -> Workload:
    """The first `limit` rows `{"id": …, "turns": [text, …]}` of a JSON-lines file.

    Raises ValueError that names file and line.
    """
    prompts: dict[str, str] = {}
    for where, row in itertools.islice(json_lines(path), limit):
        name, text = _read_row(row, where)
        if name in prompts:
            raise ValueError(f"{where}: an earlier row has the id {name} too; give each its own")
        prompts[name] = text
    if not prompts:
        raise ValueError(f"{path} has no rows")
    return Workload(path.stem, list(prompts.items()))


def _read_row(row: Any, where: str) -> tuple[str, str]:
    match row:
        case {"turns": [str(text), *_]} if text:
            name = row.get("id")
            return where if name is None else str(name), text
        case _:
            raise ValueError(f'{where}: a row must be {{"id": ..., "turns": ["text of the first user message", ...]}}')


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The place ("FILE, line N") and the value of every line that is not blank. Raises ValueError that names it."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8 and endless numbers too
                raise ValueError(f"{where}: not JSON: {error}") from error
            yield where, value


def parse_numbers(option: str, text: str) -> list[int]:
    """`8,16,32` as distinct numbers in order. Raises ValueError that names `option`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise ValueError(f"{option} is {shown!r}: give numbers below 10^9 separated by commas, such as 8,16,32")
    return list(dict.fromkeys(int(part) for part in parts))


def check_outputs(paths: Mapping[str, str | None]) -> None:
    """Try the files in which results are to end, by the option that names each, so that no measurement is made in vain.

    Raises ValueError that names the option, also where two name one file.
    """
    taken: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        target = Path(path)
        if (other := taken.setdefault(target.resolve(), option)) != option:
            raise ValueError(f"{option} {path}: {other} names that file too; give each its own")
        try:
            new = not target.exists()
            target.open("ab").close()
            if new:
                target.unlink()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ValueError(
                f"{option} {path}: cannot be written ({reason}): name a file in a folder that exists"
            ) from error


def check_plot(option: str, path: str | None) -> None:
    """Raise ValueError that names `option` where no plot can be drawn as the image `path`."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs matplotlib: install jetflow-serve[plots], or leave {option} out")
    if Path(path).suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"{option} {path}: name a .png or .svg file")
    check_outputs({option: path})
