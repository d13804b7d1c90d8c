"""The file that regenerated rows are appended to, one JSON object a line, and which rows it already has.

A row is either in it whole or not at all: half a line that a killed run has left is cut off at the next start, and a
disk that fills up costs the line at hand alone.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from jetflow_train.chats import tokens_key
from jetflow_train.data import RowKey, read_jsonl, row_key
from jetflow_train.files import append_line, cut_partial_line, sole_use


class RowFile:
    """Appends rows to a file. `present` has, for each row in it, the hash of its prompt's tokens and how it was sampled."""

    def __init__(self, path: Path, stream: FileIO) -> None:
        self.path = path
        self._stream = stream
        self.present: dict[RowKey, tuple[str, Any]] = {}
        for number, value in read_jsonl(path, partial_end=True):
            key = row_key(value, f"{path}, line {number}")
            self.present[key] = tokens_key(value.get("prompt_ids", ())), value.get("sampling")
        self._end = cut_partial_line(path)

    def has(self, key: RowKey, prompt_ids: list[int], sampling: Mapping[str, Any]) -> bool:
        """Whether the row is there. Raises ValueError when it was made from another prompt or sampled in another way."""
        if key not in self.present:
            return False
        prompt, sampled = self.present[key]
        if prompt != tokens_key(prompt_ids):
            raise ValueError(f"{self.path}: row {key[0]} answers another prompt of that id; name another output file")
        if sampled is not None and sampled != dict(sampling):
            raise ValueError(
                f"{self.path}: row {key[0]} was sampled with {sampled}, now with {dict(sampling)}; name another output file"
            )
        return True

    def append(self, value: Mapping[str, Any]) -> None:
        """Write one row. An OSError leaves the file as it was."""
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        self._end = append_line(self._stream, self.path, self._end, line)


@contextmanager
def open_rows(path: Path) -> Generator[RowFile]:
    """The file at `path`, made where it is missing.

    Raises ValueError for one that cannot be written, holds no rows, or is another run's to write at the moment.
    """
    if path.suffix == ".gz":
        raise ValueError(f"{path}: rows are appended as plain text; name a .jsonl file and compress it afterwards")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A buffer would write its rest when a full disk has room again.
        with path.open("ab", buffering=0) as stream, sole_use(path):
            yield RowFile(path, stream)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot write rows ({error}); those before are kept, and the same command goes on"
        ) from error
