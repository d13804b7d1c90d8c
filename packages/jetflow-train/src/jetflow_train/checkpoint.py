"""Checkpoints: one file that is either the old state or the new, and the exported head beside it."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any, cast

import torch

from jetflow_core.head import DraftHead
from jetflow_train.features import replace_file


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors and plain values) atomically. Raises ValueError when the disk refuses; the old file
    stays.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        replace_file(path, buffer.getbuffer())
    except OSError as error:
        path.with_name(path.name + ".partial").unlink(missing_ok=True)
        raise ValueError(f"{path}: cannot write the checkpoint ({error}); an earlier one is intact") from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint. Raises ValueError naming the file when it is damaged or holds something else."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen unrelated types for a damaged file
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: cannot read this checkpoint ({reason}); delete it to start anew") from error
    if not isinstance(state, dict) or {"options", "position", "head", "optimizer"} - state.keys():
        raise ValueError(f"{path}: cannot read this checkpoint (not one of a training run); delete it to start anew")
    return cast("dict[str, Any]", state)


def export_head(path: Path, head: DraftHead) -> None:
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
        raise ValueError(f"{path}: cannot write the head ({error})") from error
