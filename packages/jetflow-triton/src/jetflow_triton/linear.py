"""A matrix product whose rows do not know of each other: what exact mode is made of.

Libraries pick a product's algorithm by its shape, so a token's bits change with the number of tokens beside it (batch
invariance: He et al. 2025, "Defeating Nondeterminism in LLM Inference"). Here a row's bits depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from jetflow_triton.checks import check_devices, check_rows, check_weight
from jetflow_triton.dispatch import register, uses_op

ROWS = 8
"""Rows of one product on the CPU. oneDNN goes over a packed weight of a small model with 8 rows in twice the time of one,
and with 32 in six times that; below 8, long outputs pay for every further pass over the weight."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weightᵀ + bias` with the same bits for a row at any number of rows and at any place among them.

    Sums are float32, in one fixed order of K; the bias is added before the one rounding to the dtype of x (bfloat16 on
    the CPU: as oneDNN does it).

    Args:
        x: `[T, K]`.
        weight: `[N, K]` contiguous, dtype of x.
        bias: `[N]`, dtype of x, or None.

    Returns:
        `[T, N]` of the dtype of x.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, stride or device does not fit.

    Example:
        >>> x, weight = torch.randn(5, 64), torch.randn(96, 64)
        >>> bool((linear(x, weight)[3:4] == linear(x[3:4], weight)).all())
        True
    """
    _check(x, weight, bias)
    return (_linear if uses_op(x) else linear_twin)(x, weight, bias)


def linear_twin(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Plain-torch `linear`: products of `ROWS` rows, never more, never fewer."""
    if x.dtype is torch.float16:  # torch multiplies halves on a CPU row by row, several times slower than floats
        wide_bias = None if bias is None else bias.float()
        return linear_twin(x.float(), weight.float(), wide_bias).to(x.dtype)
    return by_row_blocks(lambda rows: functional.linear(rows, weight, bias), x)


def by_row_blocks(product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`product` `[ROWS, K] -> [ROWS, N]` over x `[T, K]`, zeros filling up the last block; `[T, N]`.

    Every product of a library that treats the rows of one call alike becomes row-invariant this way, since all its calls
    have one shape: oneDNN's packed weights too.
    """
    tokens = x.shape[0]
    missing = -tokens % ROWS if tokens else ROWS
    padded = functional.pad(x, (0, 0, 0, missing)) if missing else x
    blocks = [product(block) for block in padded.split(ROWS)]
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks))[:tokens]


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_rows("x", x, 2)
    check_rows("weight", weight, 2)
    if weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}: [N, {x.shape[1]}] is needed to match x")
    if not weight.is_contiguous():
        raise ValueError("weight must be contiguous: call .contiguous() on it once")
    if weight.dtype != x.dtype:
        raise TypeError(f"weight is {weight.dtype}, x is {x.dtype}: cast one of them")
    check_devices(x=x, weight=weight, bias=bias)
    if bias is not None:
        check_weight("bias", bias, weight.shape[0])
        if bias.dtype != x.dtype:
            raise TypeError(f"bias is {bias.dtype}, x is {x.dtype}: cast one of them")


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_linear = register("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", linear_twin, "linear.linear", _shape)
