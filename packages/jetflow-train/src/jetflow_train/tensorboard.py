"""Scalars of a run for TensorBoard, where its package is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGE = "tensorboard"
AXES = {"step", "blocks", "elapsed", "epoch", "epoch_rows", "cursor"}  # where a run stands; the rest is measured


def require_tensorboard() -> None:
    """Raise ValueError where TensorBoard's writer is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ValueError(
            "--tensorboard needs the package tensorboard: `pip install tensorboard`, or leave the option out"
        )


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name, value) of every number in a metrics record: lists become `name/1`, `name/2`, …, objects `name/key`."""
    for key, value in record.items():
        if not prefix and key in AXES:
            continue
        name = f"{prefix}{key}"
        if isinstance(value, list):
            yield from scalars({str(place): item for place, item in enumerate(value, start=1)}, f"{name}/")
        elif isinstance(value, Mapping):
            yield from scalars(value, f"{name}/")
        elif isinstance(value, int | float):
            yield name, float(value)


@contextmanager
def scalar_log(folder: Path, wanted: bool) -> Generator[Callable[[Mapping[str, Any]], None]]:
    """What writes a metrics record's scalars at its step into `folder`; it does nothing where that is not wanted."""
    if not wanted:
        yield lambda record: None
        return
    require_tensorboard()
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - imports a package that need not be there

    with SummaryWriter(str(folder)) as writer:

        def write(record: Mapping[str, Any]) -> None:
            for name, value in scalars(record):
                writer.add_scalar(name, value, record["step"])

        yield write
