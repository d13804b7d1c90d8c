"""Training rows: prompts with the target's own continuations, as JSONL (plain or gzip), and their held-out split.

A row is `{"id", "temperature", "prompt_ids", "output_ids"}`: the prompt with the chat template applied, the answer
with its end-of-turn token when it came. Loss and anchors live on `output_ids` alone (the assistant's tokens).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True)
class Row:
    """One prompt and the target's continuation of it."""

    id: str
    temperature: float
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output in one sequence."""
        return self.prompt_ids + self.output_ids


def read_jsonl(path: Path, *, partial_end: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a JSONL file; `.gz` is decompressed. Raises ValueError naming file and line.

    With `partial_end`, a last line without its newline is passed over: what a killed writer leaves.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with path.open("rb") as raw:
        stream = cast(io.BufferedIOBase, gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw)
        try:
            for number, line in enumerate(stream, start=1):
                if not line.strip() or (partial_end and not line.endswith(b"\n")):
                    continue
                try:
                    value = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
                if not isinstance(value, dict):
                    raise ValueError(f"{path}, line {number}: expected an object, found {type(value).__name__}")
                yield number, cast("dict[str, Any]", value)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: damaged gzip file ({error})") from error


def read_rows(paths: Iterable[Path], vocab_size: int, max_length: int) -> list[Row]:
    """Rows of all files, in order, without repeated (id, temperature).

    Rows with fewer than two output tokens carry nothing to draft and are left out; outputs are cut at `max_length`.
    Raises ValueError for a missing key, ids outside the vocabulary, a prompt of `max_length` or more, no usable row
    at all.
    """
    rows: dict[tuple[str, float], Row] = {}
    seen = 0
    paths = list(paths)
    for path in paths:
        for number, value in read_jsonl(path):
            seen += 1
            row = _parse_row(value, f"{path}, line {number}", vocab_size, max_length)
            if len(row.output_ids) >= 2:
                rows.setdefault((row.id, row.temperature), row)
    names = ", ".join(str(path) for path in paths)
    if not seen:
        raise ValueError(f"{names}: no training rows; run `jetflow-train regenerate` first")
    if not rows:
        raise ValueError(f"{names}: every row is masked (none of {seen} has two or more output tokens)")
    return list(rows.values())


def _parse_row(value: dict[str, Any], where: str, vocab_size: int, max_length: int) -> Row:
    _require(value, {"id", "temperature", "prompt_ids", "output_ids"}, where)
    name, temperature = row_key(value, where)
    prompt, output = (_token_ids(value[key], key, where, vocab_size) for key in ("prompt_ids", "output_ids"))
    if not prompt:
        raise ValueError(f"{where}: 'prompt_ids' is empty")
    if len(prompt) >= max_length:
        raise ValueError(
            f"{where}: the prompt has {len(prompt)} tokens, the limit is {max_length}; raise max_length or drop it"
        )
    return Row(name, temperature, prompt, output[: max_length - len(prompt)])


def row_key(value: dict[str, Any], where: str) -> tuple[str, float]:
    """(id, temperature), which names a row. Raises ValueError with `where` when the object has no such key."""
    _require(value, {"id", "temperature"}, where)
    if type(value["temperature"]) not in (int, float):
        raise ValueError(f"{where}: 'temperature' must be a number, found {value['temperature']!r}")
    return str(value["id"]), float(value["temperature"])


def _require(value: dict[str, Any], keys: set[str], where: str) -> None:
    if missing := keys - value.keys():
        raise ValueError(f"{where}: missing key {min(missing)!r}")


def _token_ids(value: Any, key: str, where: str, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in cast("list[object]", value)):
        raise ValueError(f"{where}: {key!r} must be a list of token ids")
    ids = tuple(cast("list[int]", value))
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{where}: {key!r} holds id {token}, the target's vocabulary has {vocab_size}")
    return ids


def is_held_out(row_id: str, fraction: float) -> bool:
    """Whether a prompt is kept for evaluation: by a hash of its id, so every sample of a prompt falls on the same
    side.
    """
    digest = hashlib.sha256(row_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def rows_fingerprint(rows: Sequence[Row]) -> str:
    """A hash of ids and tokens of `rows`, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.id, row.temperature, row.prompt_ids, row.output_ids]).encode())
    return digest.hexdigest()


def frequent_tokens(rows: Iterable[Row], size: int, vocab_size: int, always: Iterable[int]) -> list[int]:
    """The draft vocabulary: `size` target ids, ascending: `always`, then the most frequent of the outputs, then the
    lowest ids.

    Raises ValueError when `size` exceeds the vocabulary or cannot hold `always`.
    """
    kept = dict.fromkeys(always)
    if size > vocab_size or size < len(kept):
        raise ValueError(f"draft_vocab_size {size} must lie between {len(kept)} and the vocabulary's {vocab_size}")
    counts = Counter(token for row in rows for token in row.output_ids)
    ranked = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    for token in (*ranked, *range(vocab_size)):
        if len(kept) == size:
            break
        kept[token] = None
    return sorted(kept)


def spread(rows: Sequence[Row]) -> list[Row]:
    """Rows ordered by a hash of their id: held-out prompts first, then the rest in a fixed, well-mixed order."""
    return sorted(rows, key=lambda row: (hashlib.sha256(row.id.encode()).digest()[:8], row.temperature))
