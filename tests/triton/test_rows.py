"""The twins of the row-wise ops against float64 oracles, their gradients and their rounding order."""

from __future__ import annotations

import kernel_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetflow_triton import add_rms_norm, qk_norm_rope, rms_norm, silu_mul

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert result.dtype is dtype
    torch.testing.assert_close(result.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def table(length: int, width: int) -> torch.Tensor:
    angles = torch.rand(length, width // 2) * 6
    return torch.cat((angles.cos(), angles.sin()), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 5), st.integers(1, 130), st.sampled_from([1e-3, 1.0, 100.0]))
def test_norms(dtype: torch.dtype, rows: int, width: int, size: float) -> None:
    x, residual = torch.randn(rows, width).to(dtype) * size, torch.randn(rows, width).to(dtype)
    weight = torch.rand(width).to(dtype)
    close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    close(normed, reference.rms_norm(total, weight, 1e-6), dtype)


def test_norm_rounds_before_the_weight() -> None:
    """As the Hugging Face decoders do: float32 statistics, a cast, then the weight."""
    x, weight = torch.randn(64, 96).bfloat16(), torch.rand(96).bfloat16()
    wide = x.float()
    expected = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * weight
    different = (rms_norm(x, weight, 1e-6) != expected).float().mean()
    assert different < 2e-3  # a last-bit difference in float32 may flip a rounding now and then


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = torch.randn(3, 5, 2 * 7).to(dtype) * 3
    close(silu_mul(gate_up), reference.silu_mul(gate_up), dtype)
    extreme = torch.tensor([[-1e4, 1e4, 1.0, 1.0]]).to(dtype)
    assert silu_mul(extreme).tolist() == [[0.0, float(extreme[0, 1])]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "k_heads"), [(6, 2), (3, 0), (0, 2)])
@pytest.mark.parametrize("norm", [True, False])
def test_qk_norm_rope(dtype: torch.dtype, q_heads: int, k_heads: int, norm: bool) -> None:
    width, tokens = 24, 5
    fused = torch.randn(tokens, (q_heads + k_heads + 1) * width).to(dtype)
    q, k, _ = fused.view(tokens, -1, width).split((q_heads, k_heads, 1), 1)
    positions, cos_sin = torch.tensor([3, 0, 9, 9, 1]), table(10, width)
    weight = torch.rand(width).to(dtype) if norm else None
    results = qk_norm_rope(q, k, positions, cos_sin, weight, None, 1e-6)
    for x, gain, result in zip((q, k), (weight, None), results, strict=True):
        normed = x if gain is None else reference.rms_norm(x, gain, 1e-6)
        close(result, reference.rotate(normed, positions, cos_sin), dtype)


def test_rotation_sees_a_changed_table_and_changed_positions() -> None:
    q, k, positions, cos_sin = torch.randn(4, 2, 8), torch.randn(4, 1, 8), torch.arange(4), table(9, 8)
    qk_norm_rope(q, k, positions, cos_sin, None, None, 1e-6)
    positions += 2
    close(qk_norm_rope(q, k, positions, cos_sin, None, None, 1e-6)[0], reference.rotate(q, positions, cos_sin), q.dtype)
    cos_sin.copy_(table(9, 8))
    close(qk_norm_rope(q, k, positions, cos_sin, None, None, 1e-6)[0], reference.rotate(q, positions, cos_sin), q.dtype)
    with torch.inference_mode():
        cos_sin = table(9, 8)
        close(
            qk_norm_rope(q, k, positions, cos_sin, None, None, 1e-6)[0],
            reference.rotate(q, positions, cos_sin),
            q.dtype,
        )
        cos_sin.neg_()
        close(
            qk_norm_rope(q, k, positions, cos_sin, None, None, 1e-6)[0],
            reference.rotate(q, positions, cos_sin),
            q.dtype,
        )


def test_gradients_equal_the_oracles() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 12, requires_grad=True), torch.rand(12, requires_grad=True)
    with torch.inference_mode():  # what inference leaves behind must not break training
        rms_norm(x, weight, 1e-6)
    positions, cos_sin = torch.arange(4), table(9, 6)

    def ours() -> torch.Tensor:
        heads = x.view(4, 2, 6)
        q, k = qk_norm_rope(heads, heads[:, :1], positions, cos_sin, weight[:6], None, 1e-6)
        normed, total = add_rms_norm(x, x.sin(), weight, 1e-6)
        parts = (rms_norm(x, weight, 1e-6), normed, total, silu_mul(x), q, k)
        return sum((part.double().sin() * torch.arange(part.numel()).view(part.shape)).sum() for part in parts)

    def theirs() -> torch.Tensor:
        heads = x.view(4, 2, 6)
        total = x + x.sin()
        parts = (
            reference.rms_norm(x, weight, 1e-6),
            reference.rms_norm(total, weight, 1e-6),
            total,
            reference.silu_mul(x),
            reference.rotate(reference.rms_norm(heads, weight[:6], 1e-6), positions, cos_sin),
            reference.rotate(heads[:, :1], positions, cos_sin),
        )
        return sum((part.double().sin() * torch.arange(part.numel()).view(part.shape)).sum() for part in parts)

    for result, expected in zip(
        torch.autograd.grad(ours(), (x, weight)), torch.autograd.grad(theirs(), (x, weight)), strict=True
    ):
        torch.testing.assert_close(result, expected, atol=1e-3, rtol=1e-4)
