"""Safetensors files: the header checked to the byte before anything is allocated, then tensors read one by one.

Format: 8 bytes little-endian header length, that many bytes of JSON `{name: {dtype, shape, data_offsets}}`, then the
data, which the tensors cover without gap or overlap (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from jetflow_core.config_fields import read_json
from jetflow_core.tensor_source import CheckpointError, TensorSource

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 8
_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_TORCH = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: where its bytes are, from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of the safetensors file `path`, every claim of its header checked against the file's size.

    Raises `CheckpointError` naming file and tensor.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: not a safetensors file or truncated: header of {length} in {size} bytes"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    entries = {
        name: _entry(path, name, value, 8 + length)
        for name, value in _parse(path, raw).items()
        if name != "__metadata__"
    }
    _check_cover(path, entries, 8 + length, size)
    return entries


def _parse(path: Path, raw: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        parsed = dict(pairs)
        if len(parsed) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: {twice} appears twice in the header")
        return parsed

    try:
        header: object = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is not a JSON object")
    return cast("dict[str, object]", header)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _entry(path: Path, name: str, value: object, data_start: int) -> Entry:
    def damaged(problem: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name}: {problem}")

    if not isinstance(value, dict):
        raise damaged("its header entry is not an object")
    fields = cast("dict[str, object]", value)
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BYTES:
        raise damaged(f"unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(cast("list[object]", shape)) > MAX_DIMENSIONS:
        raise damaged(f"shape must be a list of at most {MAX_DIMENSIONS} sizes")
    sizes = cast("list[object]", shape)
    if not all(_whole(size) for size in sizes):
        raise damaged(f"impossible shape {str(sizes)[:80]}")
    if not isinstance(offsets, list) or len(cast("list[object]", offsets)) != 2:
        raise damaged("data_offsets must be two numbers")
    start, stop = cast("list[object]", offsets)
    if not (_whole(start) and _whole(stop)):
        raise damaged(f"impossible data_offsets [{str(start)[:40]}, {str(stop)[:40]}]")
    dims, begin, end = tuple(cast("list[int]", sizes)), cast(int, start), cast(int, stop)
    wanted = math.prod(dims) * _BYTES[dtype]
    if end - begin != wanted:
        raise damaged(f"{dtype} {list(dims)} takes {wanted} bytes, data_offsets [{begin}, {end}] give {end - begin}")
    return Entry(path, dtype, dims, data_start + begin, data_start + end)


def _check_cover(path: Path, entries: Mapping[str, Entry], start: int, size: int) -> None:
    """The tensors lie one after another, from the header to the end of the file."""
    position = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.stop > size:
            raise CheckpointError(f"{path}: tensor {name} ends at byte {entry.stop}, the file at {size}: truncated")
        if entry.start != position:
            problem = "overlaps the tensor before it" if entry.start < position else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {name} at byte {entry.start} {problem} (expected {position})")
        position = entry.stop
    if position != size:
        raise CheckpointError(f"{path}: {size - position} bytes follow the last tensor")


class SafetensorsSource(TensorSource):
    """The tensors of `entries`, which may lie in several files of the checkpoint `path`."""

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
        super().__init__()
        self._path = path
        self._entries = dict(entries)

    @property
    def path(self) -> Path:
        return self._path

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        if entry.dtype not in _TORCH:
            raise CheckpointError(f"{entry.file}: tensor {name}: dtype {entry.dtype} is not supported")
        tensor = torch.empty(entry.shape, dtype=_TORCH[entry.dtype])
        # Read into fresh memory, not mapped: a file that shrinks later cannot kill the process.
        target = memoryview(cast("Any", tensor.reshape(-1).view(torch.uint8).numpy()))
        try:
            with entry.file.open("rb", buffering=0) as file:
                file.seek(entry.start)
                done = 0
                while done < len(target):
                    count = file.readinto(target[done:])  # one call reads at most 2 GiB
                    if not count:
                        raise CheckpointError(f"{entry.file}: tensor {name}: the file shrank while it was read")
                    done += count
        except OSError as error:
            raise CheckpointError(f"{entry.file}: tensor {name}: cannot be read: {error.strerror}") from None
        return tensor


def open_safetensors(folder: Path) -> SafetensorsSource:
    """The tensors of a folder's `model.safetensors`, or of the shards that `model.safetensors.index.json` lists.

    Raises `CheckpointError` naming file and tensor.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return SafetensorsSource(single, read_header(single))
    if not index.is_file():
        _refuse_pickle(folder)
        raise CheckpointError(f"{folder}: neither model.safetensors nor model.safetensors.index.json is there")
    return SafetensorsSource(folder, _read_shards(folder, index))


def _refuse_pickle(folder: Path) -> None:
    pickled = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind))
    if pickled:
        raise CheckpointError(
            f"{folder}: {pickled[0]} is a pickle, which can run code when it is read; convert it to safetensors"
        )


def _read_shards(folder: Path, index: Path) -> dict[str, Entry]:
    try:
        shards = read_json(index).get("weight_map")
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    entries: dict[str, Entry] = {}
    weight_map = cast("dict[str, object]", shards)
    files = sorted({str(file) for file in weight_map.values()})
    for file in files:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {file!r} is not the name of a safetensors file in this folder")
        if not (folder / file).is_file():
            raise CheckpointError(f"{index}: the file {file} is missing")
    for shard in files:
        for name, entry in read_header(folder / shard).items():
            if weight_map.get(name) != shard:
                raise CheckpointError(f"{folder / shard}: tensor {name}: weight_map says {weight_map.get(name)!r}")
            entries[name] = entry
    for name, shard in weight_map.items():
        if name not in entries:
            raise CheckpointError(f"{folder}: tensor {name} is missing from {shard}, where weight_map puts it")
    return entries
