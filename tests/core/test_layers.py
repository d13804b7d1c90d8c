"""Packed projections against the plain product."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from jetflow_core import layers
from jetflow_core.layers import Linear


@pytest.mark.parametrize("exact_mode", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 16, 33])
def test_packed_product_is_the_plain_one(
    monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype, bias: bool, exact_mode: bool
) -> None:
    monkeypatch.setattr(layers, "PIECE", 24)
    linear = Linear(48, 40, bias).to(dtype).requires_grad_(False)
    assert linear.weight is not None
    linear.weight.normal_()
    if linear.bias is not None:
        linear.bias.normal_()
    x = torch.randn(rows, 48).to(dtype)
    exact = functional.linear(x.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double())
    plain = linear(x)
    linear.exact = exact_mode
    linear.pack()
    packed = linear(x)
    assert packed.dtype == dtype
    assert packed.shape == plain.shape
    # One rounding of the result to `dtype`; sums of 48 products in float32 add far less.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(packed.double(), exact, rtol=tolerance, atol=1e-3 if dtype != torch.float32 else 1e-4)


def test_an_exact_row_has_the_same_bits_beside_any_others() -> None:
    linear = Linear(48, 40).to(torch.bfloat16).requires_grad_(False)
    assert linear.weight is not None
    linear.weight.normal_()
    linear.exact = True
    linear.pack()
    x = torch.randn(33, 48).bfloat16()
    for rows in (1, 2, 7, 16):
        assert torch.equal(linear(x[:rows]), linear(x)[:rows])


def test_packing_frees_the_plain_weight() -> None:
    linear = Linear(16, 16).requires_grad_(False)
    linear.pack()
    linear.pack()  # packing again changes nothing
    assert linear.weight is None
    assert linear(torch.zeros(2, 16)).shape == (2, 16)
