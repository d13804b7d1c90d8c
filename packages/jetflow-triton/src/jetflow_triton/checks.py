"""Argument checks shared by the ops.

`check_rows`, `check_weight`, `check_indices`, `check_devices` read shapes, dtypes, strides and devices only.
`check_values` reads values: always on the CPU, on a GPU only within `debug_checks`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

INT32 = (torch.int32,)
INT64 = (torch.int64,)
INTEGER = (torch.int64, torch.int32)


def check_rows(name: str, x: Tensor, dim: int | None = None) -> None:
    """`x` is floating point with a non-empty last dimension and, if given, `dim` dimensions."""
    if not x.is_floating_point():
        raise TypeError(f"{name} is {x.dtype}: a floating-point tensor is needed")
    if dim is not None and x.dim() != dim:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: {dim} dimensions are needed")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: a non-empty last dimension is needed")


def check_weight(name: str, weight: Tensor, width: int) -> None:
    """`weight` is a floating-point vector of `width` entries."""
    if not weight.is_floating_point():
        raise TypeError(f"{name} is {weight.dtype}: a floating-point tensor is needed")
    if weight.dim() != 1 or weight.shape[0] != width:
        raise ValueError(f"{name} has shape {tuple(weight.shape)}: [{width}] is needed to match the last dimension")


def check_indices(name: str, indices: Tensor, dim: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """`indices` has one of `dtypes` and `dim` dimensions."""
    if indices.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} is {indices.dtype}: {wanted} is needed")
    if indices.dim() != dim:
        raise ValueError(f"{name} has shape {tuple(indices.shape)}: {dim} dimension(s) are needed")


def check_devices(**tensors: Tensor | None) -> None:
    """All tensors are where the first one is."""
    if len({tensor.device for tensor in tensors.values() if tensor is not None}) < 2:
        return
    (first, reference), *others = ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
    for name, tensor in others:
        if tensor.device != reference.device:
            raise ValueError(f"{name} is on {tensor.device}, {first} on {reference.device}: one device is needed")


def check_values(name: str, values: Tensor, low: int, high: int) -> int:
    """All `values` are `low … high`; returns the least (0 of none). On a GPU this waits for the GPU."""
    if not values.numel():
        return 0
    listed = values.flatten().tolist()  # for the short lists of a step far quicker than a reduction
    least, most = min(listed), max(listed)
    if least < low or most > high:
        raise ValueError(f"{name} holds values from {least} to {most}: {low} … {high} are valid")
    return least


class _Debug:
    on = False


@contextmanager
def debug_checks(enabled: bool = True) -> Generator[None]:
    """While it is open, every op checks the values of its index arguments on a GPU too, as it always does on the CPU.

    Slots, block tables, lengths, positions and expert ids out of range then raise `ValueError` instead of reading or
    writing elsewhere in memory. Each check waits for the GPU, so calls are slow and cannot be captured in a CUDA
    graph. Holds for all threads; calls may be nested.
    """
    before, _Debug.on = _Debug.on, enabled
    try:
        yield
    finally:
        _Debug.on = before


def debugging() -> bool:
    """Whether a public function checks values before it launches (never while `torch.compile` traces)."""
    return _Debug.on and not torch.compiler.is_compiling()
