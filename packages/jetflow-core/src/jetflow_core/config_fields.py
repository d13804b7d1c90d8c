"""Typed reading of a JSON object: every complaint names the file, the key and the value."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast


class Fields:
    """One JSON object of the file `source`; `prefix` is its own key when it is nested ("rope_scaling.").

    A key whose value is null counts as absent, as in Hugging Face files.
    """

    def __init__(self, data: Mapping[str, object], source: str, prefix: str = "") -> None:
        self.data = data
        self.source = source
        self.prefix = prefix

    def error(self, key: str, problem: str) -> ValueError:
        """The complaint about `key`: file, key, value and what was wanted."""
        value = repr(self.data.get(key, "absent"))
        shown = value if len(value) <= 80 else value[:77] + "..."
        return ValueError(f"{self.source}: {self.prefix}{key} = {shown}: {problem}")

    def has(self, key: str) -> bool:
        """Whether `key` is present and not null."""
        return self.data.get(key) is not None

    def _get(self, key: str, default: object) -> object:
        value = self.data.get(key)
        if value is not None:
            return value
        if default is None:
            raise ValueError(f"{self.source}: the required key {self.prefix}{key} is missing")
        return default

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer under `key`; without a default the key is required."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "expected an integer")
        return value

    def maybe_integer(self, key: str) -> int | None:
        """The integer under `key`, or None when absent."""
        return self.integer(key) if self.has(key) else None

    def number(self, key: str, default: float | None = None) -> float:
        """The finite number under `key`; without a default the key is required."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
            raise self.error(key, "expected a finite number")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """The boolean under `key`; without a default the key is required."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "expected true or false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        """The string under `key`; without a default the key is required."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "expected a string")
        return value

    def integers(self, key: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """The list of integers under `key`; a single integer counts as a list of one."""
        value = self._get(key, default)
        items = cast("list[object]", list(value)) if isinstance(value, list | tuple) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
            raise self.error(key, "expected a list of integers")
        return tuple(cast("list[int]", items))

    def strings(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """The list of strings under `key`; without a default the key is required."""
        value = self._get(key, default)
        if not isinstance(value, list | tuple):
            raise self.error(key, "expected a list of strings")
        items = cast("list[object]", list(value))
        if any(not isinstance(item, str) for item in items):
            raise self.error(key, "expected a list of strings")
        return tuple(cast("list[str]", items))

    def object(self, key: str) -> Fields:
        """The nested object under `key`; an empty one when absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "expected an object")
        return Fields(cast("dict[str, object]", value), self.source, f"{self.prefix}{key}.")


def agreed(values: Mapping[str, object], source: str) -> object | None:
    """The one value several spellings of the same setting hold (None: absent).

    Raises `ValueError` naming two keys that contradict each other: guessing either would be silently wrong.
    """
    present = [(key, value) for key, value in values.items() if value is not None]
    for key, value in present[1:]:
        if value != present[0][1]:
            first, kept = present[0]
            raise ValueError(f"{source}: {first} = {kept!r} contradicts {key} = {value!r}; make them equal")
    return present[0][1] if present else None


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in the file `path`. Raises `ValueError` naming the file when it is missing or malformed."""
    try:
        data: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (
        OSError,
        ValueError,
        RecursionError,
    ) as error:  # ValueError: malformed JSON, bad UTF-8, endless integers
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return cast("dict[str, object]", data)


def check_positive(**values: int) -> None:
    """Raise `ValueError` naming the first key whose value is not positive."""
    for key, value in values.items():
        if value < 1:
            raise ValueError(f"{key} = {value}: must be positive")


def check_at_most(key: str, value: int, limit: int, problem: str) -> None:
    """Raise `ValueError` unless 0 <= value <= limit."""
    if not 0 <= value <= limit:
        raise ValueError(f"{key} = {value}: must be in 0 … {limit}; {problem}")


@contextmanager
def located(source: str) -> Generator[None]:
    """Put the file's name before a `ValueError` that does not start with it yet."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(source):
            raise
        raise ValueError(f"{source}: {error}") from None
