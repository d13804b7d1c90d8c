"""What several launchers share."""

from __future__ import annotations

import torch
import triton
from torch import Tensor


def power_of_two(n: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    """`a / b` rounded up."""
    return -(-a // b)


def warps_for(block: int) -> int:
    """Warps for a program that handles `block` elements of one row."""
    return 4 if block <= 2048 else 8 if block <= 8192 else 16


def rows_of(x: Tensor) -> Tensor:
    """`x` as `[rows, C]` with a contiguous last dimension; a view where the strides allow it."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def dot_precision(dtype: torch.dtype) -> str:
    """float32 products are exact products; the tensor cores' tf32 would lose 13 bits."""
    return "ieee" if dtype is torch.float32 else "tf32"


__all__ = ["ceil_div", "dot_precision", "power_of_two", "rows_of", "triton", "warps_for"]
