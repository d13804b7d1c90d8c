"""Checkpoints: each one file that is there whole or not at all, the newest few kept, and the exported head beside them."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any, cast

import torch

from jetflow_core.heads import Head
from jetflow_train.features import replace_file

_NAME = "checkpoint-"


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
        path.with_name(path.name + ".partial").unlink(missing_ok=True)
        raise ValueError(f"{path}: cannot write the checkpoint ({error}); an earlier one is intact") from error
    for old in [*checkpoints(folder)[:-keep], *folder.glob(f"{_NAME}*.partial")]:  # a killed run leaves partial ones
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint. Raises ValueError naming the file when it is damaged or holds something else."""
    remedy = "delete it to go on from an earlier one, or to start anew"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen unrelated types for a damaged file
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: cannot read this checkpoint ({reason}); {remedy}") from error
    if not isinstance(state, dict) or {"options", "position", "head", "optimizer", "acceptance"} - state.keys():
        raise ValueError(f"{path}: cannot read this checkpoint (not one of a training run); {remedy}")
    return cast("dict[str, Any]", state)


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
        raise ValueError(f"{path}: cannot write the head ({error})") from error
