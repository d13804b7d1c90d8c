"""Top-k log-probabilities against a float64 log-softmax, a stable sort and extreme logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetflow_triton import logprobs as module
from jetflow_triton import topk_logprobs

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def oracle(hidden: Tensor, table: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """float64 log-softmax of the logits as the dtype has them, in order of (value, id)."""
    logits = torch.nn.functional.linear(hidden, table).double()
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
    logsumexp = torch.logsumexp(logits, -1)
    return logits.gather(1, order) - logsumexp[:, None], order, logsumexp


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 9), st.integers(1, 200), st.data())
def test_values_and_order(dtype: torch.dtype, rows: int, vocab: int, data: st.DataObject) -> None:
    size = data.draw(st.none() | st.integers(1, vocab))
    k = data.draw(st.integers(1, size or vocab))
    hidden, table = torch.randn(rows, 12).to(dtype), torch.randint(-2, 3, (vocab, 12)).to(dtype)
    table[::3] = table[0].clone()  # ties at every place
    results, expected = topk_logprobs(hidden, table, k, size), oracle(hidden, table[:size], k)
    assert [result.dtype for result in results] == [torch.float32, torch.int64, torch.float32]
    assert torch.equal(results[1], expected[1])
    for i in (0, 2):
        torch.testing.assert_close(results[i].double(), expected[i], atol=1e-5, rtol=1e-6)


def test_padding_rows_are_never_chosen() -> None:
    table = torch.eye(8)
    logprobs, ids, logsumexp = topk_logprobs(torch.arange(8.0)[None], table, 5, vocab_size=5)
    assert ids.tolist() == [[4, 3, 2, 1, 0]]
    torch.testing.assert_close(logprobs, torch.log_softmax(torch.arange(5.0), 0).flip(0)[None])
    torch.testing.assert_close(logsumexp, torch.logsumexp(torch.arange(5.0), 0, keepdim=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_are_joined(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, table = torch.randn(20, 16).to(dtype), torch.randn(64, 16).to(dtype)
    whole = topk_logprobs(hidden, table, 4)
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 6)
    for part, expected in zip(topk_logprobs(hidden, table, 4), whole, strict=True):
        torch.testing.assert_close(part, expected, atol=1e-6, rtol=1e-6)


def test_extreme_logits() -> None:
    """The logits are the hidden states: `_topk` sees them as they are."""
    logits = torch.full((3, 9), -torch.inf)
    logits[1, [2, 7]], logits[2] = 3e38, 0.0
    values, ids = module._topk(logits, 3)
    assert ids.tolist() == [[0, 1, 2], [2, 7, 0], [0, 1, 2]]
    assert values[0].tolist() == [-torch.inf] * 3
    big = topk_logprobs(torch.full((1, 1), 1e30), torch.tensor([[1e8], [-1e8], [1e8]]), 3)
    assert not big[0].isnan().any()
    assert big[1].tolist() == [[0, 2, 1]]


def test_a_row_of_nan_stays_alone() -> None:
    hidden, table = torch.randn(3, 8), torch.randn(30, 8)
    expected = topk_logprobs(hidden, table, 4)
    hidden[1] = torch.nan
    logprobs, ids, logsumexp = topk_logprobs(hidden, table, 4)
    assert logprobs[1].isnan().all()
    assert 0 <= int(ids.min()) <= int(ids.max()) < 30
    for i in (0, 2):
        assert torch.equal(ids[i], expected[1][i])
        assert torch.equal(logprobs[i], expected[0][i])
        assert torch.equal(logsumexp[i], expected[2][i])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"hidden": torch.zeros(3, 8, dtype=torch.int64)}, TypeError, "hidden is torch.int64"),
        ({"lm_head": torch.zeros(9, 7)}, ValueError, "lm_head has shape"),
        ({"lm_head": torch.zeros(9, 8).half()}, TypeError, "lm_head is torch.float16"),
        ({"lm_head": torch.zeros(8, 9).T}, ValueError, "lm_head must be contiguous"),
        ({"lm_head": torch.zeros(9, 8, device="meta")}, ValueError, "lm_head is on meta"),
        ({"vocab_size": 10}, ValueError, "vocab_size is 10"),
        ({"vocab_size": 0}, ValueError, "vocab_size is 0"),
        ({"k": 0}, ValueError, "k is 0"),
        ({"k": 10}, ValueError, "k is 10: 1 … 9"),
        ({"k": 5, "vocab_size": 4}, ValueError, "k is 5: 1 … 4"),
    ],
)
def test_wrong_argument(changed: dict, error: type[Exception], message: str) -> None:
    good = {"hidden": torch.zeros(3, 8), "lm_head": torch.zeros(9, 8), "k": 2}
    with pytest.raises(error, match=message):
        topk_logprobs(**(good | changed))
