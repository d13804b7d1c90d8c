"""What several launchers share."""

from __future__ import annotations

import torch
from torch import Tensor

EXACT = {"enable_fp_fusion": False}
"""Launch option: products and sums are rounded one by one. Which of them the compiler would fuse differs from kernel to
kernel, and with it the bits of a row; the kernels wait for memory, not for these."""


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
