"""What all kinds of draft heads have in common: the draft vocabulary, and the files of a head's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from jetflow_core.tensor_source import TensorSource


def draft_rows(lm_head: Tensor, ids: Tensor | None) -> Tensor:
    """The rows [V', C] of the target's `lm_head` [V, C] for the draft vocabulary `ids` [V'] of target ids; all without one.

    Raises ValueError unless `ids` are int64, each once and below V.
    """
    if ids is None:
        return lm_head.detach()
    if (
        ids.dtype != torch.int64
        or ids.ndim != 1
        or len(ids) == 0
        or int(ids.min()) < 0
        or int(ids.max()) >= len(lm_head)
    ):
        raise ValueError(f"draft vocabulary must hold int64 ids below {len(lm_head)}")
    if len(ids.unique()) < len(ids):
        raise ValueError("draft vocabulary holds an id twice")
    return lm_head[ids].detach()


def read_draft_vocab(source: TensorSource, size: int | None, device: torch.device) -> Tensor | None:
    """The stored draft vocabulary `d2t` [size] as int64 target ids; None for a head that scores all tokens."""
    if size is None:
        return None
    return source.take("d2t", (size,), integer=True).to(device, torch.int64)


def read_weights(source: TensorSource, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Fill a head's named `tensors` from `source`. Raises CheckpointError for anything missing, extra or mis-shaped."""
    with torch.no_grad():
        for name, tensor in tensors:
            tensor.copy_(source.take(name, tuple(tensor.shape)))
    source.finish(lambda name: False)


def write_head(
    path: Path, config: Mapping[str, object], tensors: Sequence[tuple[str, Tensor]], draft_vocab: Tensor | None
) -> None:
    """Write `config.json` and `model.safetensors` (bfloat16) into the folder `path`.

    Raises OSError when the disk refuses.
    """
    path.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors}
    if draft_vocab is not None:
        stored["d2t"] = draft_vocab.clone()
    try:
        save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path / 'model.safetensors'}: {error}") from error
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
