"""The row-invariant product: a row's bits at any number of rows and any place among them, and its values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetflow_triton import linear
from jetflow_triton.linear import ROWS, by_row_blocks, linear_twin

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
COUNTS = [1, 2, 7, 16, 33, 300]
SHAPES = [(64, 96), (100, 30), (576, 960), (1536, 576), (4096, 512)]  # (K, N)


def example(rows: int, width: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width).to(dtype), (torch.randn(columns, width) * width**-0.5).to(dtype)


def holds_for_every_count(x: Tensor, weight: Tensor) -> None:
    everything = linear(x, weight)
    for count in COUNTS:
        first = (300 - count) // 2
        assert torch.equal(linear(x[first : first + count], weight), everything[first : first + count]), count
    order = torch.randperm(len(x))
    assert torch.equal(linear(x[order], weight), everything[order])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "columns"), SHAPES)
def test_same_bits_at_any_number_of_rows(dtype: torch.dtype, width: int, columns: int) -> None:
    holds_for_every_count(*example(300, width, columns, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "columns"), [(576, 49152), (1536, 8960), (4096, 6144)])
def test_same_bits_at_any_number_of_rows_of_large_weights(dtype: torch.dtype, width: int, columns: int) -> None:
    holds_for_every_count(*example(300, width, columns, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_stays_alone(dtype: torch.dtype) -> None:
    x, weight = example(11, 64, 40, dtype)
    expected = linear(x, weight)
    x[3], x[7] = torch.nan, torch.inf
    others = [i for i in range(11) if i not in (3, 7)]
    assert torch.equal(linear(x, weight)[others], expected[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, ROWS, ROWS + 1, 45])
@pytest.mark.parametrize("biased", [True, False])
def test_values(dtype: torch.dtype, rows: int, biased: bool) -> None:
    x, weight = example(rows, 72, 50, dtype)
    bias = torch.randn(50).to(dtype) if biased else None
    expected = x.double() @ weight.double().T + (bias.double() if biased else 0)
    result = linear(x, weight, bias)
    assert result.dtype is dtype
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "columns"), SHAPES)
def test_blocks_make_packed_weights_row_invariant(dtype: torch.dtype, width: int, columns: int) -> None:
    x, weight = example(300, width, columns, dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)

    def product(rows: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")

    everything = by_row_blocks(product, x)
    for count in COUNTS:
        assert torch.equal(by_row_blocks(product, x[300 - count :]), everything[300 - count :]), count
    torch.testing.assert_close(everything, linear_twin(x, weight), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": torch.zeros(3, 8, dtype=torch.int64)}, TypeError, "x is torch.int64"),
        ({"x": torch.zeros(8)}, ValueError, "x has shape"),
        ({"weight": torch.zeros(4, 7)}, ValueError, "weight has shape"),
        ({"weight": torch.zeros(8, 4).T}, ValueError, "weight must be contiguous"),
        ({"weight": torch.zeros(4, 8).half()}, TypeError, "weight is torch.float16"),
        ({"weight": torch.zeros(4, 8, device="meta")}, ValueError, "weight is on meta"),
        ({"bias": torch.zeros(3)}, ValueError, "bias has shape"),
        ({"bias": torch.zeros(4).half()}, TypeError, "bias is torch.float16"),
    ],
)
def test_wrong_argument(changed: dict[str, Tensor], error: type[Exception], message: str) -> None:
    good = {"x": torch.zeros(3, 8), "weight": torch.zeros(4, 8), "bias": torch.zeros(4)}
    with pytest.raises(error, match=message):
        linear(**(good | changed))
