"""Where a loader takes its tensors from, one at a time, and the complaint when one does not fit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32)


class CheckpointError(ValueError):
    """A checkpoint cannot be used: the message names file, tensor, expected and found."""


class TensorSource(ABC):
    """Tensors by Hugging Face name. Each is read when taken, so that the file is never in memory twice."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    @property
    @abstractmethod
    def path(self) -> Path:
        """The file or folder, for messages."""

    @abstractmethod
    def names(self) -> frozenset[str]:
        """The names of all tensors."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The stored shape of a tensor that is in `names()`."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """Read a tensor that is in `names()`: freshly allocated, contiguous, on the CPU."""

    def take(self, name: str, shape: tuple[int, ...], *, integer: bool = False) -> torch.Tensor:
        """The tensor `name` in its stored dtype, on the CPU, free for the caller to change.

        Args:
            name: Hugging Face tensor name.
            shape: the shape it must have.
            integer: whether token ids (int64 or int32) are wanted instead of float32, float16 or bfloat16.

        Raises:
            CheckpointError: for a missing or mis-shaped tensor or another dtype.
        """
        if name not in self.names():
            raise CheckpointError(f"{self.path}: tensor {name} is missing (expected shape {list(shape)})")
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(f"{self.path}: tensor {name}: expected shape {list(shape)}, found {list(found)}")
        tensor = self.read(name)
        wanted = INTEGERS if integer else FLOATS
        if tensor.dtype not in wanted:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in wanted)
            raise CheckpointError(f"{self.path}: tensor {name}: expected dtype {kinds}, found {tensor.dtype}")
        self._taken.add(name)
        return tensor

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        """Raise `CheckpointError` if tensors are left that nobody took and that are not `ignorable`.

        A leftover means that the configuration describes another model than the weights do.
        """
        left = sorted(name for name in self.names() - self._taken if not ignorable(name))
        if left:
            shown = ", ".join(left[:5]) + (", …" if len(left) > 5 else "")
            raise CheckpointError(f"{self.path}: {len(left)} tensors do not belong to the configured model: {shown}")
