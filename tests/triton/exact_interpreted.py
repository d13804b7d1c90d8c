"""The exact attention kernel under Triton's interpreter: against its oracle, and bit for bit against plain decoding."""

from __future__ import annotations

import kernel_reference as reference
import pytest
import torch
from torch import Tensor

from jetflow_triton.exact_attention import SPAN
from jetflow_triton.kernels.exact_attention import tree_attention_exact

pytestmark = pytest.mark.usefixtures("ordered_dot")


def attend(call: reference.Ragged) -> Tensor:
    return tree_attention_exact(*call.args()[:8])


@pytest.mark.parametrize(
    ("nodes", "prefix", "width", "dtype"),
    [
        (1, 0, 16, torch.float32),
        (9, 31, 64, torch.float32),
        (9, 31, 80, torch.float16),
        (36, SPAN + 30, 64, torch.float16),
    ],
)
def test_a_node_has_the_bits_of_plain_decoding(nodes: int, prefix: int, width: int, dtype: torch.dtype) -> None:
    parents = reference.random_parents(nodes, torch.Generator().manual_seed(nodes))
    call = reference.random_call([parents], [prefix], heads=3, kv_heads=1, width=width, dtype=dtype, seed=nodes)
    result = attend(call)
    tolerance = 2e-5 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(result.double(), reference.attention(call), atol=tolerance, rtol=tolerance)
    for node in {nodes // 2, nodes - 1}:
        path = reference.path_to(node, parents)
        plain = reference.as_sequence(call, path)
        assert torch.equal(attend(plain)[-1], result[node])
        assert torch.equal(attend(plain.last(len(path) - 1))[0], result[node])


def test_neighbours_do_not_matter() -> None:
    generator = torch.Generator().manual_seed(3)
    parents = [reference.random_parents(n, generator) for n in (5, 33)] + [[]]
    call = reference.random_call(parents, [100, 0, 5], heads=4, kv_heads=2, width=16)
    result = attend(call)
    for b in range(3):
        first, last = call.query_start[b : b + 2].tolist()
        assert torch.equal(result[first:last], attend(call.alone(b)))


def test_a_blind_query_gives_zeros_and_a_broken_sibling_does_no_harm() -> None:
    call = reference.random_call([[-1, 0, 0]], [40])
    assert call.tree_mask is not None
    expected = attend(call)[2]
    call.v_cache.flatten(0, 1)[call.slots(0)[41]] = float("nan")  # node 1, which node 2 does not see
    assert torch.equal(attend(call)[2], expected)
    blind = reference.random_call([[-1, 0, 0]], [0])
    assert blind.tree_mask is not None
    blind.tree_mask[1] = 0
    assert bool((attend(blind)[1] == 0).all())
