"""What exact mode stands on: a row of these twins has the same bits whatever stands beside it."""

from __future__ import annotations

from collections.abc import Callable

import kernel_reference as reference
import pytest
import torch
from torch import Tensor

import jetflow_triton as ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
ROWS = 300


def holds(op: Callable[..., Tensor | tuple[Tensor, ...]], *args: Tensor) -> None:
    def run(rows: slice) -> tuple[Tensor, ...]:
        results = op(*(arg[rows] for arg in args))
        return (results,) if isinstance(results, Tensor) else results

    everything = run(slice(None))
    for count in (1, 2, 7, 16, 33):
        for first in (0, 101, ROWS - count):
            rows = slice(first, first + count)
            for result, expected in zip(run(rows), everything, strict=True):
                assert torch.equal(result, expected[rows]), (count, first)


@every_dtype
@pytest.mark.parametrize("width", [64, 100, 576, 1536, 4096])
def test_norms_and_activation(dtype: torch.dtype, width: int) -> None:
    x, residual, weight = torch.randn(ROWS, width).to(dtype), torch.randn(ROWS, width).to(dtype), torch.rand(width)
    weight = weight.to(dtype)
    holds(lambda x: ops.rms_norm(x, weight, 1e-5), x)
    holds(lambda x, residual: ops.add_rms_norm(x, residual, weight, 1e-5), x, residual)
    holds(ops.silu_mul, x)


@every_dtype
@pytest.mark.parametrize("normed", [True, False])
def test_qk_norm_rope(dtype: torch.dtype, normed: bool) -> None:
    q, k, cos_sin = torch.randn(ROWS, 9, 64).to(dtype), torch.randn(ROWS, 3, 64).to(dtype), torch.randn(500, 64)
    weight = torch.rand(64).to(dtype) if normed else None
    holds(
        lambda q, k, positions: ops.qk_norm_rope(q, k, positions, cos_sin, weight, weight, 1e-6),
        q,
        k,
        torch.randint(0, 500, (ROWS,)),
    )


@every_dtype
@pytest.mark.parametrize("experts", [4, 32, 128])
def test_moe_route(dtype: torch.dtype, experts: int) -> None:
    holds(lambda logits: ops.moe_route(logits, 4, True), torch.randn(ROWS, experts).to(dtype))


@every_dtype
def test_tree_attention_among_other_sequences(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    trees = [reference.random_parents(nodes, generator) for nodes in (20, 1, 33, 7)]
    call = reference.random_call(trees, [37, 200, 90, 500], heads=9, kv_heads=3, width=64, dtype=dtype)
    together = ops.tree_attention(*call.args())
    for b in range(len(trees)):
        first, last = call.query_start[b : b + 2].tolist()
        assert torch.equal(ops.tree_attention(*call.alone(b).args()), together[first:last])


@every_dtype
def test_moe_experts_in_exact_mode(dtype: torch.dtype) -> None:
    gate_up, down = torch.randn(8, 2 * 48, 64).to(dtype), torch.randn(8, 64, 48).to(dtype)
    x, logits = torch.randn(ROWS, 64).to(dtype), torch.randn(ROWS, 8)
    holds(
        lambda x, weights, experts: ops.moe_experts(x, gate_up, down, weights, experts, exact=True),
        x,
        *ops.moe_route(logits, 2, True),
    )
