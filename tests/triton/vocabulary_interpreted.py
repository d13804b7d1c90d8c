"""The kernels between a hidden state and a token, on the CPU under Triton's interpreter.

The interpreter is chosen when the kernels are imported, so `test_vocabulary_kernels.py` runs this file in a process of
its own.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jetflow_triton.kernels import linear as linear_kernels
from jetflow_triton.kernels import logprobs as logprobs_kernels
from jetflow_triton.linear import linear_twin
from jetflow_triton.logprobs import topk_logprobs_twin

DTYPES = [torch.float32, torch.float16]  # the interpreter has no bfloat16 products
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def close(result: Tensor, expected: Tensor, *, factor: float = 1.0) -> None:
    tolerance = TOLERANCE[expected.dtype] * factor
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


@every_dtype
@pytest.mark.parametrize(("rows", "width", "columns", "biased"), [(1, 64, 40, True), (70, 100, 33, False)])
def test_linear(dtype: torch.dtype, rows: int, width: int, columns: int, biased: bool) -> None:
    x, weight = torch.randn(rows, 2 * width).to(dtype)[:, ::2], (torch.randn(columns, width) / 10).to(dtype)
    bias = torch.randn(columns).to(dtype) if biased else None
    close(linear_kernels.linear(x, weight, bias), linear_twin(x, weight, bias))


@every_dtype
def test_linear_gives_a_row_the_same_bits_at_any_number_of_rows(dtype: torch.dtype) -> None:
    x, weight = torch.randn(300, 200).to(dtype), torch.randn(72, 200).to(dtype) / 10
    everything = linear_kernels.linear(x, weight, None)
    for count in (1, 2, 7, 16, 33, 300):
        first = (300 - count) // 2
        assert torch.equal(linear_kernels.linear(x[first : first + count], weight, None), everything[first:][:count])
    order = torch.randperm(300)
    assert torch.equal(linear_kernels.linear(x[order], weight, None), everything[order])


@pytest.mark.parametrize("block_n", [16, 32, 64, 128])
@pytest.mark.parametrize("block_k", [32, 64])
def test_every_tile_adds_along_k_in_the_same_order(block_n: int, block_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product a step of K is not zero, so only the order of the steps decides the rounding."""
    tile = linear_kernels.Tile(block_n, block_k, 4, 1)
    monkeypatch.setattr(linear_kernels, "tile_for", lambda *_: tile)
    steps = torch.randn(20, 9) * 10 ** torch.randint(-3, 4, (20, 9))
    x, weight = torch.zeros(9, 20, 64), torch.ones(40, 20, 64)
    x[:, :, 5] = steps.T
    expected = torch.zeros(9)
    for step in steps:
        expected += step
    result = linear_kernels.linear(x.flatten(1), weight.flatten(1), None)
    assert torch.equal(result, expected[:, None].expand(9, 40))
    assert not torch.equal(steps.flip(0).cumsum(0)[-1], expected)  # another order would show


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts in a small vocabulary, and several turns in a small batch."""
    monkeypatch.setattr(logprobs_kernels, "PART", 32)
    monkeypatch.setattr(logprobs_kernels, "LOGITS_AT_ONCE", 200)


@every_dtype
@pytest.mark.parametrize(("rows", "vocab", "k", "size"), [(5, 90, 4, 70), (1, 40, 40, None), (3, 33, 1, 33)])
@pytest.mark.usefixtures("short_parts")
def test_topk_logprobs(dtype: torch.dtype, rows: int, vocab: int, k: int, size: int | None) -> None:
    hidden, table = torch.randn(rows, 16).to(dtype), torch.randint(-2, 3, (vocab, 16)).to(dtype)
    table[7::9] = table[3].clone()  # ties, across parts too
    results = logprobs_kernels.topk_logprobs(hidden, table, k, size)
    expected = topk_logprobs_twin(hidden, table, k, size)
    for i in (0, 2):
        torch.testing.assert_close(results[i], expected[i], atol=1e-5, rtol=1e-5)
    assert torch.equal(results[1], expected[1])


@pytest.mark.usefixtures("short_parts")
def test_topk_logprobs_of_extreme_logits() -> None:
    logits = torch.full((4, 70), -torch.inf)
    logits[1, [3, 60]], logits[2], logits[3] = 5.0, torch.linspace(-1e4, 1e4, 70), 0.0
    logprobs, ids, logsumexp = torch.empty(4, 3), torch.empty(4, 3, dtype=torch.int64), torch.empty(4)
    logprobs_kernels._topk(logits, 3, logprobs, ids, logsumexp)
    assert logprobs[0].tolist() == [-torch.inf] * 3
    assert logprobs[1].tolist() == [pytest.approx(-0.6931472), pytest.approx(-0.6931472), -torch.inf]
    assert logprobs[2].tolist() == [0.0, pytest.approx(-289.855, abs=1e-2), pytest.approx(-579.71, abs=1e-2)]
    assert ids.tolist() == [[0, 1, 2], [3, 60, 0], [69, 68, 67], [0, 1, 2]]
    assert logsumexp.tolist() == [-torch.inf, pytest.approx(5.6931472), 1e4, pytest.approx(4.2484952)]
