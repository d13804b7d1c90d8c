"""The twins of the mixture of experts against oracles that go token by token."""

from __future__ import annotations

import kernel_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_strategies import expert_calls
from torch import Tensor

from jetflow_triton import moe_experts, moe_route

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 6), st.integers(1, 20), st.data())
def test_route(tokens: int, experts: int, data: st.DataObject) -> None:
    top_k, renormalize = data.draw(st.integers(1, experts)), data.draw(st.booleans())
    logits = torch.randint(-3, 4, (tokens, experts)).float()  # many ties
    weights, chosen = moe_route(logits, top_k, renormalize)
    expected_weights, expected = reference.route(logits, top_k, renormalize)
    assert chosen.dtype is torch.int32
    assert torch.equal(chosen, expected.view(tokens, top_k))
    torch.testing.assert_close(weights, expected_weights.view(tokens, top_k), atol=1e-6, rtol=1e-6)


def test_route_survives_extremes() -> None:
    logits = torch.tensor([[1e30, -1e30, float("-inf"), 0.0]])
    weights, chosen = moe_route(logits, 3, True)
    assert chosen.tolist() == [[0, 1, 2]]  # equal zeros by index
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", TOLERANCE)
@settings(deadline=None, max_examples=15)
@given(st.data())
def test_experts(dtype: torch.dtype, data: st.DataObject) -> None:
    args: tuple[Tensor, ...] = data.draw(expert_calls(dtype))
    result = moe_experts(*args)
    assert result.dtype is dtype
    torch.testing.assert_close(result.double(), reference.experts(*args), atol=TOLERANCE[dtype], rtol=0.02)


def test_no_tokens() -> None:
    weights, chosen = moe_route(torch.randn(0, 4), 2, True)
    args = (torch.randn(0, 12), torch.randn(4, 20, 12), torch.randn(4, 12, 10), weights, chosen)
    assert moe_experts(*args).shape == (0, 12)
