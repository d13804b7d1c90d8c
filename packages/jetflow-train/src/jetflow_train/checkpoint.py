"""Checkpoints: each one file that is there whole or not at all, the newest few kept, and the exported head beside them."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from jetflow_core.heads import Head
from jetflow_train.files import replace_file

_NAME = "checkpoint-"
GO_ON = "what was saved before is intact: make room, and the same command goes on"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoint files of a run's folder, by step."""
    return sorted(folder.glob(f"{_NAME}*.pt"))


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write `state` (tensors and plain values) atomically as the checkpoint of `step`, then drop all but the newest `keep`.

    Raises ValueError when the disk refuses; the earlier checkpoints stay.
    """
    path = folder / f"{_NAME}{step:08d}.pt"
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        replace_file(path, buffer.getbuffer())
    except OSError as error:
        raise ValueError(f"{path}: cannot write the checkpoint ({error}); {GO_ON}") from error
    for old in [*checkpoints(folder)[:-keep], *folder.glob(f"{_NAME}*.partial")]:  # a killed run leaves partial ones
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint. Raises ValueError naming the file when it is damaged or holds something else."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen unrelated types for a damaged file
        raise unreadable(path, error) from error
    parts = state if isinstance(state, dict) else {}
    whole = all(isinstance(parts.get(key), dict) for key in ("options", "position", "head", "optimizer"))
    if not whole or not isinstance(parts.get("acceptance"), Tensor):
        raise unreadable(path, "not one of a training run")
    return cast("dict[str, Any]", parts)


def unreadable(path: Path, reason: object) -> ValueError:
    """What to say of a damaged checkpoint. Of a long `reason` the first sentence is enough."""
    first = str(reason).partition("\n")[0].partition(". ")[0] or type(reason).__name__
    remedy = "delete it to go on from an earlier one, or to start anew"
    return ValueError(f"{path}: cannot read this checkpoint ({first}); {remedy}")


def export_head(path: Path, head: Head) -> None:
    """Save `head` as the folder `path`, replacing its files one by one and each atomically."""
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        head.save(partial)
        path.mkdir(parents=True, exist_ok=True)
        for file in sorted(partial.iterdir()):
            os.replace(file, path / file.name)
        partial.rmdir()
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ValueError(f"{path}: cannot write the head ({error}); {GO_ON}") from error
