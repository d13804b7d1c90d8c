"""The file that regenerated rows are appended to, one JSON object a line, and which rows it already has.

A row is either in it whole or not at all: half a line that a killed run has left is cut off at the next start, and a
disk that fills up costs the line at hand alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from jetflow_train.chats import tokens_key
from jetflow_train.data import RowKey, read_jsonl, row_key


class RowFile:
    """Appends rows to a file. `present` has, for each row in it, the hash of its prompt's tokens and how it was sampled."""

    def __init__(self, path: Path, stream: FileIO) -> None:
        self.path = path
        self._stream = stream
        self.present: dict[RowKey, tuple[str, Any]] = {}
        for number, value in read_jsonl(path, partial_end=True):
            key = row_key(value, f"{path}, line {number}")
            self.present[key] = tokens_key(value.get("prompt_ids", ())), value.get("sampling")
        self._end = _cut_partial_line(path)

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
        rest = memoryview(json.dumps(value, separators=(",", ":")).encode() + b"\n")
        size = len(rest)
        try:
            while rest:
                rest = rest[self._stream.write(rest) :]
        except OSError:
            os.truncate(self.path, self._end)
            raise
        self._end += size


@contextmanager
def open_rows(path: Path) -> Generator[RowFile]:
    """The file at `path`, made where it is missing. Raises ValueError for one that cannot be written or holds no rows."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as stream:  # a buffer would write its rest when a full disk has room again
            yield RowFile(path, stream)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot write rows ({error}); those before are kept, and the same command goes on"
        ) from error


def _cut_partial_line(path: Path) -> int:
    """Cut off a last line without its newline; the size that is left."""
    content = path.read_bytes()
    size = content.rfind(b"\n") + 1
    if size < len(content):
        os.truncate(path, size)
    return size
