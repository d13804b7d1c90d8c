"""`tree_attention_exact`: a token's bits do not change with where its keys are or what is beside it."""

from __future__ import annotations

from dataclasses import replace

import kernel_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetflow_triton import tree_attention_exact
from jetflow_triton.exact_attention import LAG, SPAN

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def attend(call: reference.Ragged) -> Tensor:
    return tree_attention_exact(*call.args()[:8])


@st.composite
def trees(draw: st.DrawFn) -> tuple[reference.Ragged, list[int]]:
    nodes = draw(st.integers(1, 60))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    parents = reference.random_parents(nodes, generator)
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 3), (3, 1), (1, 8)]))
    call = reference.random_call(
        [parents],
        [draw(st.integers(0, 4 * SPAN))],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        width=draw(st.sampled_from([16, 64, 80])),
        page=draw(st.sampled_from([16, 32])),
        joined=draw(st.booleans()),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 1 << 30)),
    )
    return call, parents


@settings(deadline=None, max_examples=60)
@given(trees())
def test_equals_the_oracle(drawn: tuple[reference.Ragged, list[int]]) -> None:
    call, _ = drawn
    tolerance = TOLERANCE[call.q.dtype]
    torch.testing.assert_close(attend(call).double(), reference.attention(call), atol=tolerance, rtol=tolerance)


@settings(deadline=None, max_examples=60)
@given(trees())
def test_a_node_has_the_bits_of_plain_decoding(drawn: tuple[reference.Ragged, list[int]]) -> None:
    call, parents = drawn
    result = attend(call)
    for node in range(len(parents)):
        path = reference.path_to(node, parents)
        plain = reference.as_sequence(call, path)
        assert torch.equal(attend(plain)[-1], result[node])  # a prompt chunk
        assert torch.equal(attend(plain.last(len(path) - 1))[0], result[node])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 33, 300])
def test_the_chunks_of_a_prompt_do_not_matter(dtype: torch.dtype, chunk: int) -> None:
    whole = reference.random_call([list(range(-1, 299))], [0], heads=6, kv_heads=2, width=64, masked=False, dtype=dtype)
    expected = attend(whole)
    for first in range(0, 300, chunk):
        size = min(chunk, 300 - first)
        part = replace(
            whole,
            q=whole.q[first : first + size],
            query_start=torch.tensor([0, size], dtype=torch.int32),
            prefix_lens=torch.tensor([first], dtype=torch.int32),
        )
        assert torch.equal(attend(part), expected[first : first + size])


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_do_not_matter(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    parents = [reference.random_parents(n, generator) for n in (9, 1, 40)] + [[]]
    call = reference.random_call(parents, [100, 260, 0, 5], heads=6, kv_heads=2, width=64, dtype=dtype)
    result = attend(call)
    for b in range(4):
        first, last = call.query_start[b : b + 2].tolist()
        assert torch.equal(result[first:last], attend(call.alone(b)))


def test_a_tree_deeper_than_the_lag_is_refused_once_it_matters() -> None:
    deep = list(range(-1, LAG + 1))
    chain = reference.random_call([deep], [SPAN])  # a chain is a plain sequence, however long
    attend(chain)
    branching = reference.random_call([[*deep, 0]], [SPAN - 1])
    attend(branching)
    branching = reference.random_call([[-1, 0, 0, *range(2, LAG + SPAN)]], [0])
    with pytest.raises(ValueError, match=f"deeper than the {LAG} nodes"):
        attend(branching)


def test_extreme_scores_and_blind_queries() -> None:
    call = reference.random_call([[-1, 0, 0]], [70])
    call.q *= 1e4
    assert torch.isfinite(attend(call)).all()
    blind = reference.random_call([[-1, 0, 0]], [0])
    assert blind.tree_mask is not None
    blind.tree_mask[1] = 0
    assert bool((attend(blind)[1] == 0).all())
