"""Every Triton kernel against its twin, on the CPU under Triton's interpreter.

The interpreter is chosen when the kernels are imported, so `test_kernels.py` runs this file in a process of its own.
"""

from __future__ import annotations

import kernel_reference as reference
import pytest
import torch

from jetflow_triton import activation, attention, kv, moe, norm, rope
from jetflow_triton.kernels import activation as activation_kernels
from jetflow_triton.kernels import attention as attention_kernels
from jetflow_triton.kernels import kv as kv_kernels
from jetflow_triton.kernels import moe as moe_kernels
from jetflow_triton.kernels import norm as norm_kernels
from jetflow_triton.kernels import rope as rope_kernels

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


@every_dtype
@pytest.mark.parametrize("renormalize", [True, False])
def test_route(dtype: torch.dtype, renormalize: bool) -> None:
    logits = torch.randn(4, 10).to(dtype)
    logits[0], logits[1, 3], logits[2, :8] = 0, logits[1, 7], float("-inf")
    for result, expected in zip(
        moe_kernels.moe_route(logits, 3, renormalize), moe.moe_route_twin(logits, 3, renormalize), strict=True
    ):
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-6)


@every_dtype
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 6, 2), (23, 5, 3), (40, 2, 1)])
def test_experts(dtype: torch.dtype, tokens: int, experts: int, top_k: int) -> None:
    x = torch.randn(tokens, 48).to(dtype)
    gate_up, down = torch.randn(experts, 2 * 40, 48).to(dtype) / 7, torch.randn(experts, 48, 40).to(dtype) / 7
    weights, chosen = moe.moe_route_twin(torch.randn(tokens, experts), top_k, True)
    args = (x, gate_up, down, weights, chosen)
    result = moe_kernels.moe_experts(*args)
    close(result, moe.moe_experts_twin(*args), factor=2)
    assert torch.equal(result, moe_kernels.moe_experts(*args))


def test_pairs_are_sorted_by_expert() -> None:
    experts = torch.tensor([[3, 1], [1, 0], [3, 5], [1, 3]], dtype=torch.int32)
    order, starts = torch.empty(8, dtype=torch.int32), torch.empty(7, dtype=torch.int32)
    moe_kernels.sort_pairs_kernel[(6,)](experts, order, starts, 8, BLOCK=4)
    assert order.tolist() == torch.sort(experts.flatten(), stable=True).indices.tolist()
    assert starts.tolist() == [0, 1, 4, 4, 7, 7, 8]


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several splits on short sequences, which the interpreter can afford."""
    monkeypatch.setattr(attention_kernels, "SPLIT", 64)


ATTENTION = [  # parents are random: (nodes of each tree, prefixes, heads, KV heads, width, page, masked)
    ([5, 1, 0, 34], [0, 33, 10, 70], 3, 1, 16, 16, True),
    ([5, 18], [130, 0], 2, 2, 80, 32, False),
    ([1], [200], 8, 1, 64, 256, True),
]


@every_dtype
@pytest.mark.parametrize("case", ATTENTION)
@pytest.mark.usefixtures("short_splits")
def test_attention(dtype: torch.dtype, case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, prefixes, heads, kv_heads, width, page, masked = case
    generator = torch.Generator().manual_seed(0)
    trees = [reference.random_parents(n, generator) if n else [] for n in counts]
    call = reference.random_call(
        trees, prefixes, heads=heads, kv_heads=kv_heads, width=width, page=page, dtype=dtype, masked=masked
    )
    if masked:
        call.tree_mask[0] = 0  # sees its prefix only, or nothing
    results = []
    for filled in (1 << 30, 0):  # splits spread over the grid, splits merged in registers
        monkeypatch.setattr(attention_kernels, "FILLED", filled)
        results.append(attention_kernels.tree_attention(*call.args()))
        close(results[-1], attention.tree_attention_twin(*call.args()))
    assert torch.equal(*results)


@pytest.mark.usefixtures("short_splits")
def test_attention_ignores_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    call = reference.random_call([reference.random_parents(n, generator) for n in (7, 2)], [20, 90], width=16)
    result = attention_kernels.tree_attention(*call.args())
    for b in range(2):
        first, last = call.query_start[b : b + 2].tolist()
        assert torch.equal(result[first:last], attention_kernels.tree_attention(*call.alone(b).args()))


@pytest.mark.usefixtures("short_splits")
def test_attention_of_extreme_scores() -> None:
    call = reference.random_call([[-1, 0, 0, 1]], [70])
    call.q *= 1e4
    result = attention_kernels.tree_attention(*call.args())
    torch.testing.assert_close(result, attention.tree_attention_twin(*call.args()), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("seed", [pytest.param(i, marks=[pytest.mark.slow] if i >= 2 else []) for i in range(200)])
@pytest.mark.usefixtures("short_splits")
def test_a_tree_is_its_paths(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    nodes, prefix = (int(torch.randint(low, high, (), generator=generator)) for low, high in ((1, 12), (0, 80)))
    parents = reference.random_parents(nodes, generator)
    call = reference.random_call([parents], [prefix], heads=2, kv_heads=1, seed=seed)
    result = attention_kernels.tree_attention(*call.args())
    for leaf in set(range(nodes)) - set(parents):
        path = reference.path_to(leaf, parents)
        plain = attention_kernels.tree_attention(*reference.as_sequence(call, path).args())
        torch.testing.assert_close(result[path], plain, atol=2e-6, rtol=2e-5)
