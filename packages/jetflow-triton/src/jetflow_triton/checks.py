"""Argument checks shared by the ops. They read shapes, dtypes and strides only, never values."""

from __future__ import annotations

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
