"""`tree_attention`'s kernels on the CPU under Triton's interpreter; `test_kernels.py` runs this file."""

from __future__ import annotations

import kernel_reference as reference
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_strategies import attention_calls
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from jetflow_triton.attention import tree_attention_twin
from jetflow_triton.kernels import attention as kernels

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}  # the interpreter has no bfloat16 products
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE)
few = settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several splits on short sequences, which the interpreter can afford."""
    monkeypatch.setattr(kernels, "SPLIT", 64)


def run(call: reference.Ragged, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The kernel's result; the same bits whether splits are spread over the grid or merged in registers."""
    results = []
    for filled in (1 << 30, 0):
        monkeypatch.setattr(kernels, "FILLED", filled)
        results.append(kernels.tree_attention(*call.args()))
    assert torch.equal(*results)
    return results[0]


def holds(call: reference.Ragged, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    tolerance = TOLERANCE[call.q.dtype]
    result, expected = run(call, monkeypatch), reference.attention(call)
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(tree_attention_twin(*call.args()).double(), expected, atol=tolerance, rtol=tolerance)
    return result


def trees(*counts: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [reference.random_parents(n, generator) if n else [] for n in counts]


@pytest.mark.usefixtures("ordered_dot")
@every_dtype
@few
@given(st.data(), st.integers(0, 64))
def test_random_batches(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, data: st.DataObject, filled: int) -> None:
    """Against the oracle; and bit for bit each sequence alone, which may take the other way of merging splits."""
    call = data.draw(attention_calls(dtype, nodes=24, prefix=100))
    result = holds(call, monkeypatch)
    monkeypatch.setattr(kernels, "FILLED", filled)
    for b in range(call.prefix_lens.shape[0]):
        first, last = call.query_start[b : b + 2].tolist()
        assert torch.equal(result[first:last], kernels.tree_attention(*call.alone(b).args()))


@every_dtype
@pytest.mark.parametrize(("width", "page"), [(64, 16), (80, 64), (96, 32), (128, 128), (256, 256)])
def test_widths_and_pages(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, page: int) -> None:
    holds(reference.random_call(trees(9, 1), [70, 5], width=width, page=page, dtype=dtype), monkeypatch)


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_is_its_paths(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """20 × 10 random trees in ragged batches equal plain attention of each root-to-node path on its own."""
    monkeypatch.setattr(kernels, "FILLED", 0 if seed % 4 else 1 << 30)  # a quarter spreads its splits
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    forest = [reference.random_parents(draw(1, 16), generator) for _ in range(10)]
    call = reference.random_call(forest, [draw(0, 70) for _ in forest], heads=2, kv_heads=1, seed=seed)
    result = kernels.tree_attention(*call.args())
    row = 0
    for b, parents in enumerate(forest):
        slots, prefix = call.slots(b), int(call.prefix_lens[b])
        for node in range(len(parents)):
            seen = slots[[*range(prefix), *(prefix + i for i in reference.path_to(node, parents))]]
            k, v = (cache.flatten(0, 1)[seen].double().transpose(0, 1) for cache in (call.k_cache, call.v_cache))
            q = call.q[row].double().unsqueeze(1)  # [Hq, 1, D] on [1, seen, D]
            plain = scaled_dot_product_attention(q, k, v, scale=call.scale).squeeze(1)
            torch.testing.assert_close(result[row].double(), plain, atol=2e-5, rtol=2e-5)
            row += 1
    assert row == len(result)


def test_more_than_a_thousand_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    call = reference.random_call(trees(1026), [3], heads=1, kv_heads=1)
    monkeypatch.setattr(kernels, "FILLED", 0)
    result = kernels.tree_attention(*call.args())
    torch.testing.assert_close(result, tree_attention_twin(*call.args()), atol=2e-5, rtol=2e-5)


@every_dtype
def test_extreme_scores(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    call = reference.random_call(trees(9), [70], dtype=dtype)
    call.q *= 1e4  # within float16; scores are past its range
    result = run(call, monkeypatch)
    torch.testing.assert_close(result.double(), reference.attention(call), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("prefix", [0, 65])
def test_blind_queries(monkeypatch: pytest.MonkeyPatch, prefix: int) -> None:
    """A row without a visible node sees its prefix only; a row that sees nothing is zero, never NaN."""
    call = reference.random_call(trees(5, 3), [prefix, 0])
    call.tree_mask[2], call.tree_mask[6] = 0, 0
    result = run(call, monkeypatch)
    assert bool((result[6] == 0).all())
    torch.testing.assert_close(result.double(), reference.attention(call), atol=2e-5, rtol=2e-5)


def test_words_beyond_the_mask_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is too short hides the nodes it does not reach; the row behind it in memory stays unread."""
    call = reference.random_call([[-1, *range(39)]], [3])
    call.tree_mask[:, 1] = 0
    expected = run(call, monkeypatch)
    call.tree_mask = call.tree_mask[:, :1].contiguous()
    assert torch.equal(run(call, monkeypatch), expected)


def test_positions_may_be_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    call = reference.random_call(trees(9), [70], window=7)
    expected = run(call, monkeypatch)
    call.positions = call.positions.to(torch.int32)
    assert torch.equal(run(call, monkeypatch), expected)
