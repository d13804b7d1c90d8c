"""The twin of `tree_attention` against a float64 oracle, and what a tree of tokens must satisfy."""

from __future__ import annotations

import kernel_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_strategies import attention_calls

from jetflow_triton import tree_attention

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@settings(deadline=None, max_examples=25)
@given(attention_calls())
def test_equals_the_oracle(call: reference.Ragged) -> None:
    torch.testing.assert_close(tree_attention(*call.args()).double(), reference.attention(call), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@settings(deadline=None, max_examples=15)
@given(st.data())
def test_half_precision(dtype: torch.dtype, data: st.DataObject) -> None:
    call = data.draw(attention_calls(dtype))
    result = tree_attention(*call.args())
    assert result.dtype is dtype
    torch.testing.assert_close(result.double(), reference.attention(call), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 24), st.integers(0, 40), st.integers(0, 1 << 30))
def test_a_tree_is_its_paths(nodes: int, prefix: int, seed: int) -> None:
    """Attention of a tree equals attention run over each root-to-node path as a plain sequence."""
    parents = reference.random_parents(nodes, torch.Generator().manual_seed(seed))
    call = reference.random_call([parents], [prefix], seed=seed)
    result = tree_attention(*call.args())
    leaves = set(range(nodes)) - set(parents)
    for leaf in leaves:
        path = reference.path_to(leaf, parents)
        plain = tree_attention(*reference.as_sequence(call, path).args())
        torch.testing.assert_close(result[path], plain, atol=2e-6, rtol=2e-5)


@settings(deadline=None, max_examples=25)
@given(attention_calls())
def test_neighbours_do_not_matter(call: reference.Ragged) -> None:
    result = tree_attention(*call.args())
    for b in range(call.prefix_lens.shape[0]):
        alone = tree_attention(*call.alone(b).args())
        first, last = call.query_start[b : b + 2].tolist()
        assert torch.equal(result[first:last], alone)


def test_a_mask_of_a_chain_is_no_mask() -> None:
    chain = [-1, *range(34)]
    call = reference.random_call([chain], [5])
    masked = tree_attention(*call.args())
    call.tree_mask = None
    assert torch.equal(masked, tree_attention(*call.args()))


def test_extreme_scores_stay_finite() -> None:
    generator = torch.Generator().manual_seed(2)
    call = reference.random_call([reference.random_parents(9, generator)], [20])
    call.q *= 1e4
    result = tree_attention(*call.args())
    assert torch.isfinite(result).all()
    torch.testing.assert_close(result.double(), reference.attention(call), atol=1e-3, rtol=1e-3)


def test_a_blind_query_gives_zeros() -> None:
    call = reference.random_call([[-1, 0, 0]], [0])
    assert call.tree_mask is not None
    call.tree_mask[1] = 0
    result = tree_attention(*call.args())
    assert bool((result[1] == 0).all())
    torch.testing.assert_close(result.double(), reference.attention(call), atol=2e-5, rtol=2e-5)


def test_metadata_changed_in_place_is_seen() -> None:
    """The layout of a step is remembered by content, so the same tensors with other values give another result."""
    call = reference.random_call([[-1, 0, 0]], [20])
    assert call.tree_mask is not None
    with torch.inference_mode():
        tree_attention(*call.args())
        call.tree_mask[2] = 5 | 2
        call.prefix_lens[0] = 17
        call.block_tables[0] = call.block_tables[0].flip(0)
        result = tree_attention(*call.args())
    torch.testing.assert_close(result.double(), reference.attention(call), atol=2e-5, rtol=2e-5)


def test_a_strided_query_and_no_query() -> None:
    call = reference.random_call([[-1, 0, 0]], [4])
    expected = tree_attention(*call.args())
    fused = torch.cat((torch.zeros(3, 1, 16), call.q, torch.ones(3, 2, 16)), 1)
    call.q = fused[:, 1:5]
    assert torch.equal(tree_attention(*call.args()), expected)
    empty = reference.random_call([[]], [4])
    assert tree_attention(*empty.args()).shape == (0, 4, 16)


def test_a_window_acts_on_depths_not_on_slots() -> None:
    """Of 0 → 1 → 3 and 0 → 2 behind a prefix of 4: node 3 is two positions after node 0, three slots."""
    call = reference.random_call([[-1, 0, 0, 1]], [4])
    seen = {
        1: [[4], [5], [6], [7]],
        2: [[3, 4], [4, 5], [4, 6], [5, 7]],
        3: [[2, 3, 4], [3, 4, 5], [3, 4, 6], [4, 5, 7]],
    }
    slots, group = call.slots(0), call.q.shape[1] // call.k_cache.shape[2]
    for call.window, rows in seen.items():
        result = tree_attention(*call.args())
        for row, logical in enumerate(rows):
            k, v = (c.flatten(0, 1)[slots[logical]].repeat_interleave(group, 1) for c in (call.k_cache, call.v_cache))
            p = torch.softmax(torch.einsum("hd,shd->hs", call.q[row], k) * call.scale, -1)
            torch.testing.assert_close(result[row], torch.einsum("hs,shd->hd", p, v), atol=2e-5, rtol=2e-5)


def test_more_than_a_thousand_nodes() -> None:
    call = reference.random_call(
        [reference.random_parents(1030, torch.Generator().manual_seed(3))], [20], heads=1, kv_heads=1
    )
    torch.testing.assert_close(tree_attention(*call.args()).double(), reference.attention(call), atol=2e-5, rtol=2e-5)
