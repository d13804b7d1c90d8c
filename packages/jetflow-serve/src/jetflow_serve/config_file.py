"""A TOML file of options: every key is a flag's name, every value what the flag would take."""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_config(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Values for `parser.set_defaults`, checked as the flags would be; keys may be written with - or _.

    Raises ValueError that names the file and the key at fault.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is not TOML: {error}") from error
    actions = {flag: action for action in parser._actions for flag in _names(action)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in actions:
            near = difflib.get_close_matches(name, actions, n=1, cutoff=0.0)[0]
            raise ValueError(f"--config {path}: there is no option {key!r}; the nearest is {near!r}")
        if actions[name].dest in values:
            raise ValueError(f"--config {path}: {name!r} is given twice, with - and with _")
        try:
            values[actions[name].dest] = _convert(actions[name], name, value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"--config {path}: {key} = {value!r}: {error}") from error
    return values


def _names(action: argparse.Action) -> list[str]:
    """What a file may call this option."""
    return [flag[2:] for flag in action.option_strings if flag.startswith("--") and flag not in ("--help", "--config")]


def _convert(action: argparse.Action, name: str, value: Any) -> Any:
    """`value` as the flag --`name` would give it. Raises ValueError."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError("use true or false")
        if isinstance(action, argparse.BooleanOptionalAction):
            return value != name.startswith("no-")
        return action.const if value else action.default
    if action.nargs == "+":
        items: list[Any] = value if isinstance(value, list) else [value]
        return [_convert_one(action, item) for item in items]
    return _convert_one(action, value)


def _convert_one(action: argparse.Action, value: Any) -> Any:
    """One value through the flag's own type and choices, as text: what the command line refuses, the file refuses."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("use a text or a number")
    convert: Callable[[str], Any] = action.type if callable(action.type) else str
    converted = convert(str(value))
    if action.choices is not None and converted not in action.choices:
        raise ValueError(f"choose one of {', '.join(map(str, action.choices))}")
    return converted
