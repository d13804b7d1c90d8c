"""The container of GGUF files: metadata and tensor table, every length checked against the file before it is read.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Parsed here and not by the `gguf` package's reader,
which trusts the lengths in the file and takes seconds for a large vocabulary; block sizes are the package's.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jetflow_core.tensor_source import CheckpointError

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place: `shape` has the row length last, `start` counts from the beginning of the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    row_bytes: int

    @property
    def rows(self) -> int:
        """Number of rows, all leading dimensions together."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True)
class GgufFile:
    """A parsed header."""

    path: Path
    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]


class _Reader:
    """Reads little-endian values and never past the end."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file = file
        self.path = path
        self.left = path.stat().st_size

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise CheckpointError(f"{self.path}: damaged or truncated: {size} bytes wanted, {self.left} left")
        self.left -= size
        data = self.file.read(size)
        if len(data) != size:
            raise CheckpointError(f"{self.path}: the file shrank while it was read")
        return data

    def integer(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, least: int) -> int:
        """A number of items of at least `least` bytes each, which the rest of the file must be able to hold."""
        count = self.integer("<Q")
        if count * least > self.left:
            raise CheckpointError(f"{self.path}: damaged or truncated: {count} items in {self.left} bytes")
        return count

    def string(self) -> str:
        return self.take(self.integer("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.integer("<I"))
        return self.scalars(kind, 1)[0]

    def array(self, kind: int) -> list[object]:
        if kind == _STRING:
            return [self.string() for _ in range(self.count(8))]
        return self.scalars(kind, self.count(1))

    def scalars(self, kind: int, count: int) -> list[object]:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path}: metadata of unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()


def read_gguf(path: Path) -> GgufFile:
    """Parse the header of `path`. Raises `CheckpointError` naming file and tensor for anything damaged."""
    try:
        with path.open("rb") as file:
            return _read(_Reader(file, path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def _read(reader: _Reader) -> GgufFile:
    path, size = reader.path, reader.left
    if reader.left < 24 or reader.take(4) != b"GGUF":
        raise CheckpointError(f"{path}: not a GGUF file")
    version = reader.integer("<I")
    if version not in (2, 3):
        raise CheckpointError(f"{path}: GGUF version {version} is not supported (2 and 3, little-endian, are)")
    tensor_count, entry_count = reader.count(24), reader.count(12)
    metadata: dict[str, object] = {}
    for _ in range(entry_count):
        key = reader.string()
        if key in metadata:
            raise CheckpointError(f"{path}: metadata key {key} appears twice")
        metadata[key] = reader.value(reader.integer("<I"))
    infos: dict[str, tuple[list[int], int, int]] = {}
    for _ in range(tensor_count):
        name = reader.string()
        if name in infos:
            raise CheckpointError(f"{path}: tensor {name} appears twice")
        dimensions = reader.integer("<I")
        if dimensions > 4:
            raise CheckpointError(f"{path}: tensor {name}: {dimensions} dimensions, at most 4 are possible")
        shape = [reader.integer("<Q") for _ in range(dimensions)]
        infos[name] = (shape, reader.integer("<I"), reader.integer("<Q"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment > 1 << 20:
        raise CheckpointError(f"{path}: general.alignment = {alignment!r} is impossible")
    data_start = -(-(size - reader.left) // alignment) * alignment
    tensors = {name: _tensor(path, name, info, data_start) for name, info in infos.items()}
    _check_places(path, tensors, size)
    return GgufFile(path, metadata, tensors)


def _tensor(path: Path, name: str, info: tuple[list[int], int, int], data_start: int) -> GgufTensor:
    reversed_shape, kind_number, offset = info
    shape = tuple(reversed(reversed_shape)) or (1,)
    try:
        kind = GGMLQuantizationType(kind_number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise CheckpointError(f"{path}: tensor {name}: unknown type {kind_number}") from None
    if shape[-1] % block:
        raise CheckpointError(f"{path}: tensor {name}: {shape[-1]} columns are no multiple of {kind.name}'s {block}")
    return GgufTensor(kind, shape, data_start + offset, shape[-1] // block * block_bytes)


def _check_places(path: Path, tensors: dict[str, GgufTensor], size: int) -> None:
    """Every tensor lies inside the file and none overlaps another."""
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
        stop = tensor.start + tensor.rows * tensor.row_bytes
        if stop > size:
            raise CheckpointError(f"{path}: tensor {name} ends at byte {stop}, the file at {size}: truncated")
        if tensor.start < position:
            raise CheckpointError(f"{path}: tensor {name} at byte {tensor.start} overlaps the one before it")
        position = stop
