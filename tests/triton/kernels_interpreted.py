"""The kernels that go row by row, the cache and the experts against their twins, on the CPU under Triton's interpreter.

The interpreter is chosen when the kernels are imported, so `test_kernels.py` runs this file in a process of its own.
"""

from __future__ import annotations

import kernel_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_strategies import expert_calls

from jetflow_triton import activation, kv, moe, norm, rope
from jetflow_triton.kernels import activation as activation_kernels
from jetflow_triton.kernels import kv as kv_kernels
from jetflow_triton.kernels import moe as moe_kernels
from jetflow_triton.kernels import norm as norm_kernels
from jetflow_triton.kernels import rope as rope_kernels
from jetflow_triton.tiles import Tile

DTYPES = [torch.float32, torch.float16]  # the interpreter has no bfloat16 products
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def close(result: torch.Tensor, expected: torch.Tensor, *, factor: float = 1.0) -> None:
    tolerance = TOLERANCE[expected.dtype] * factor
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


@every_dtype
@pytest.mark.parametrize("width", [64, 77])
def test_norms(dtype: torch.dtype, width: int) -> None:
    x, residual = torch.randn(2, 3, width + 1).to(dtype)[..., :width], torch.randn(2, 3, width).to(dtype)
    weight = torch.rand(width).to(dtype)
    close(norm_kernels.rms_norm(x, weight, 1e-5), norm.rms_norm_twin(x, weight, 1e-5))
    results = norm_kernels.add_rms_norm(x, residual, weight, 1e-5)
    for result, expected in zip(results, norm.add_rms_norm_twin(x, residual, weight, 1e-5), strict=True):
        close(result, expected)


@every_dtype
@pytest.mark.parametrize(("q_heads", "k_heads", "width"), [(6, 2, 16), (5, 0, 24), (0, 3, 80), (40, 1, 64)])
def test_qk_norm_rope(dtype: torch.dtype, q_heads: int, k_heads: int, width: int) -> None:
    fused = torch.randn(3, (q_heads + k_heads + 1) * width).to(dtype)
    q, k, _ = fused.view(3, -1, width).split((q_heads, k_heads, 1), 1)
    args = (q, k, torch.tensor([3, 0, 9]), torch.randn(10, width), torch.rand(width).to(dtype), None, 1e-6)
    for result, expected in zip(rope_kernels.qk_norm_rope(*args), rope.qk_norm_rope_twin(*args), strict=True):
        close(result, expected, factor=4)


@every_dtype
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = torch.randn(3, 2 * 1100).to(dtype)
    gate_up[0, 0], gate_up[0, 1] = -60000, 60000
    gate_up[0, 1101] = 0.5  # 60000 gated by more than 1.09 is past float16's range
    close(activation_kernels.silu_mul(gate_up), activation.silu_mul_twin(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # numpy's, of the interpreter
def test_silu_mul_past_the_range_of_float16_is_infinite() -> None:
    gate_up = torch.full((1, 2 * 8), 300.0, dtype=torch.float16)
    assert torch.equal(activation_kernels.silu_mul(gate_up), activation.silu_mul_twin(gate_up))
    assert activation_kernels.silu_mul(gate_up).isinf().all()


@every_dtype
def test_cache(dtype: torch.dtype) -> None:
    fused = torch.randn(5, 9, 24).to(dtype)
    _, k, v = fused.split(3, 1)
    slots = torch.tensor([5, -1, 33, 0, 63])
    caches = [torch.zeros(2, 4, 16, 3, 24, dtype=dtype) for _ in range(2)]
    kv_kernels.kv_write(k, v, caches[0][0], caches[0][1], slots)
    kv.kv_write_twin(k, v, caches[1][0], caches[1][1], slots)
    assert torch.equal(*caches)
    moved = [torch.randn(3, 2, 4, 16, 3, 24, generator=torch.Generator().manual_seed(0)).to(dtype) for _ in range(2)]
    source, target = torch.tensor([5, 6, 7, 9, 9]), torch.tensor([6, 5, -1, 7, 8])  # a cycle, a skip, a shared source
    kv_kernels.kv_move(moved[0], source, target)
    kv.kv_move_twin(moved[1], source, target)
    assert torch.equal(*moved)


@settings(deadline=None, max_examples=6)
@given(st.permutations(range(32)), st.lists(st.integers(0, 31), min_size=1, max_size=8), st.sets(st.integers(0, 7)))
def test_moves_read_everything_first(order: list[int], source: list[int], skipped: set[int]) -> None:
    target = torch.tensor([-1 if i in skipped else slot for i, slot in enumerate(order[: len(source)])])
    kv_of_kernel = torch.randn(2, 2, 2, 16, 3, 8)
    kv_of_twin = kv_of_kernel.clone()
    kv_kernels.kv_move(kv_of_kernel, torch.tensor(source), target)
    kv.kv_move_twin(kv_of_twin, torch.tensor(source), target)
    assert torch.equal(kv_of_kernel, kv_of_twin)


@every_dtype
@pytest.mark.parametrize("renormalize", [True, False])
def test_route(dtype: torch.dtype, renormalize: bool) -> None:
    logits = torch.randn(4, 10).to(dtype)
    logits[0], logits[1, 3], logits[2, :8] = 0, logits[1, 7], float("-inf")
    for result, expected in zip(
        moe_kernels.moe_route(logits, 3, renormalize), moe.moe_route_twin(logits, 3, renormalize), strict=True
    ):
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter
def test_a_row_of_logits_without_numbers_stays_alone() -> None:
    logits = torch.randn(3, 6)
    expected = moe_kernels.moe_route(logits, 2, True)
    for poison in (float("nan"), float("-inf")):
        poisoned = logits.clone()
        poisoned[1] = poison
        for op in (moe_kernels.moe_route, moe.moe_route_twin):
            weights, chosen = op(poisoned, 2, True)
            assert weights[1].isnan().all()
            assert chosen[1].tolist() == [0, 1]
            assert torch.equal(weights[[0, 2]], expected[0][[0, 2]])
            assert torch.equal(chosen[[0, 2]], expected[1][[0, 2]])


@every_dtype
@settings(deadline=None, max_examples=6)
@given(st.data())
def test_experts(dtype: torch.dtype, data: st.DataObject) -> None:
    args = data.draw(expert_calls(dtype, 24))
    result = moe_kernels.moe_experts(*args)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2}[dtype]
    torch.testing.assert_close(result.double(), reference.experts(*args), atol=tolerance, rtol=tolerance)
    assert torch.equal(result, moe_kernels.moe_experts(*args))


@pytest.mark.usefixtures("ordered_dot")
@every_dtype
def test_a_token_has_the_same_bits_among_any_others(dtype: torch.dtype) -> None:
    """At tiles of 16, 32 and 64 rows, which 1 … 300 tokens on 4 experts take."""
    gate_up, down = (torch.randn(4, 2 * 40, 48) / 7).to(dtype), (torch.randn(4, 48, 40) / 6).to(dtype)
    x, (weights, chosen) = torch.randn(300, 48).to(dtype), moe.moe_route_twin(torch.randn(300, 4), 2, True)
    everything = moe_kernels.moe_experts(x, gate_up, down, weights, chosen)
    for count in (1, 2, 7, 16, 33):
        some = slice(150, 150 + count)
        result = moe_kernels.moe_experts(x[some], gate_up, down, weights[some], chosen[some])
        assert torch.equal(result, everything[some]), count


@pytest.mark.parametrize("tile", [Tile(16, 16, 16, 4, 2), Tile(64, 128, 64, 4, 2)])
def test_any_tile_will_do(tile: Tile) -> None:
    x, gate_up, down = torch.randn(9, 40), torch.randn(5, 2 * 20, 40) / 6, torch.randn(5, 40, 20) / 5
    args = (x, gate_up, down, *moe.moe_route_twin(torch.randn(9, 5), 3, False))
    close(moe_kernels.moe_experts(*args, tile=tile), moe.moe_experts_twin(*args), factor=2)


def test_experts_out_of_range_touch_no_other_memory() -> None:
    """The CPU and debug mode refuse them; the fast path on a GPU takes them on trust, but only such pairs suffer."""
    x, gate_up, down = torch.randn(3, 8), torch.randn(4, 2 * 8, 8), torch.randn(4, 8, 8)
    weights, chosen = torch.ones(3, 2), torch.tensor([[0, 1], [4, -1], [2, 0]], dtype=torch.int32)
    result = moe_kernels.moe_experts(x, gate_up, down, weights, chosen)
    kept = [0, 2]
    close(result[kept], moe.moe_experts_twin(x[kept], gate_up, down, weights[kept], chosen[kept]), factor=2)


def test_pairs_are_sorted_by_expert() -> None:
    experts = torch.tensor([[3, 1], [1, 0], [3, 5], [1, 3]], dtype=torch.int32)
    order, starts = torch.empty(8, dtype=torch.int32), torch.empty(7, dtype=torch.int32)
    moe_kernels.sort_pairs_kernel[(6,)](experts, order, starts, 8, BLOCK=4)
    assert order.tolist() == torch.sort(experts.flatten(), stable=True).indices.tolist()
    assert starts.tolist() == [0, 1, 4, 4, 7, 7, 8]
