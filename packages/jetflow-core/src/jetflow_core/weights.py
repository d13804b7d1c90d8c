"""Opening checkpoints: a local folder, a GGUF file or a hub id, with weights from safetensors or GGUF only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from jetflow_core.config import HeadConfig, ModelConfig
from jetflow_core.config_fields import Fields, located, read_json
from jetflow_core.eagle_config import EagleConfig
from jetflow_core.gguf import open_gguf
from jetflow_core.safetensors_file import open_safetensors
from jetflow_core.tensor_source import CheckpointError, TensorSource
from jetflow_core.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Checkpoint", "CheckpointError", "TensorSource", "open_checkpoint", "open_eagle", "open_head"]

_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]


@dataclass
class Checkpoint:
    """An opened model: its configuration, its tensors (read when taken) and its tokenizer if the files hold one."""

    config: ModelConfig
    tensors: TensorSource
    tokenizer: Tokenizer | None
    path: Path


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open a target model: a local folder in the Hugging Face layout, a `.gguf` file, or a hub id "org/name".

    Raises:
        CheckpointError: naming the file and what is wrong with it; for a hub id, why it could not be fetched.
    """
    path = resolve_path(model)
    if path.is_file():
        return Checkpoint(*open_gguf(path), path)
    try:
        config = ModelConfig.from_hf(read_json(path / "config.json"), str(path / "config.json"))
        config = _with_generation_config(config, path / "generation_config.json")
        return Checkpoint(config, open_safetensors(path), load_tokenizer(path, config), path)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def open_head(model: str | Path) -> tuple[HeadConfig, TensorSource]:
    """Open a draft head: a folder with `config.json` and safetensors, or a hub id. Names come without `model.`.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    path, data = head_folder(model)
    source = str(path / "config.json")
    try:
        config = HeadConfig.from_hf(data, source)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return config, HeadSource(open_safetensors(path), speculators="transformer_layer_config" in data)


def open_eagle(model: str | Path) -> tuple[EagleConfig, TensorSource]:
    """Open an EAGLE head: a folder with `config.json` and safetensors, or a hub id.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    path, data = head_folder(model)
    try:
        config = EagleConfig.from_hf(data, str(path / "config.json"))
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return config, open_safetensors(path)


def head_folder(model: str | Path) -> tuple[Path, dict[str, object]]:
    """The folder of a draft head and the object in its `config.json`.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    path = resolve_path(model)
    if path.is_file():
        raise CheckpointError(f"{path}: a draft head is a folder with config.json and model.safetensors")
    try:
        return path, read_json(path / "config.json")
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def resolve_path(model: str | Path) -> Path:
    """The local folder or GGUF file that `model` names; a hub id is fetched (or found in the local hub cache).

    Raises:
        CheckpointError: when there is no such file and no such hub id, when the hub cannot be reached, and for pickles.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        remedy = "a folder with config.json and model.safetensors, or a .gguf file"
        if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
            raise CheckpointError(f"{path}: pickles can run code when they are read and are refused; use {remedy}")
        raise CheckpointError(f"{path}: not a checkpoint; use {remedy}")
    parts = str(model).split("/")
    if len(parts) != 2 or not all(parts) or str(model).startswith((".", "~")) or path.suffix == ".gguf":
        raise CheckpointError(f"{model}: no such folder or file, nor a hub id of the form org/name")
    return _fetch(str(model))


def _fetch(repository: str) -> Path:
    # Imported when needed: the client takes a second to load, and local models never use it.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{repository}: no such local folder, and the hub could not provide it: {reason}; "
            "check the name and the network, or pass a local folder"
        ) from None


def _with_generation_config(config: ModelConfig, path: Path) -> ModelConfig:
    """Add the end tokens of `generation_config.json`, where chat models list the one that ends a turn."""
    if not path.is_file():
        return config
    more = Fields(read_json(path), str(path)).integers("eos_token_id", ())
    with located(str(path)):
        return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))


class HeadSource(TensorSource):
    """A head's tensors without a `model.` prefix, and with the speculators layout turned into the common one.

    Speculators files repeat tables of the target and store the draft vocabulary as offsets (d2t[i] = id − i).
    """

    def __init__(self, inner: TensorSource, speculators: bool) -> None:
        super().__init__()
        self._inner = inner
        self._speculators = speculators
        copies = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d")
        plain = {name.removeprefix("model."): name for name in inner.names()}
        if len(plain) != len(inner.names()):
            raise CheckpointError(f"{inner.path}: a tensor is there with and without the prefix model.")
        self._stored: Mapping[str, str] = {
            name: stored for name, stored in plain.items() if not (speculators and name in copies)
        }

    @property
    def path(self) -> Path:
        return self._inner.path

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(self._stored[name])

    def read(self, name: str) -> torch.Tensor:
        tensor = self._inner.read(self._stored[name])
        if name == "d2t" and self._speculators:
            tensor += torch.arange(len(tensor), dtype=tensor.dtype)
        return tensor
