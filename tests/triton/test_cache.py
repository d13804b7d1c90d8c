"""The twins of `kv_write` and `kv_move` against a dictionary of slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetflow_triton import kv_move, kv_write

PAGES, PAGE, HEADS, WIDTH = 3, 16, 2, 4
SLOTS = PAGES * PAGE


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=20), st.sets(st.integers(0, 19)))
def test_write(slots: list[int], skipped: set[int]) -> None:
    slots = [-1 if i in skipped else slot for i, slot in enumerate(slots)]
    fused = torch.randn(len(slots), 3 * HEADS, WIDTH)
    _, k, v = fused.split(HEADS, 1)
    k_cache, v_cache = torch.zeros(PAGES, PAGE, HEADS, WIDTH), torch.zeros(PAGES, PAGE, HEADS, WIDTH)
    kv_write(k, v, k_cache, v_cache, torch.tensor(slots, dtype=torch.int64))
    expected = torch.zeros(2, SLOTS, HEADS, WIDTH)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0, slot], expected[1, slot] = k[token], v[token]
    assert torch.equal(torch.stack((k_cache, v_cache)).flatten(1, 2), expected)


def test_write_casts() -> None:
    k = torch.randn(1, HEADS, WIDTH)
    caches = torch.zeros(2, PAGES, PAGE, HEADS, WIDTH, dtype=torch.bfloat16)
    kv_write(k, -k, caches[0], caches[1], torch.tensor([17]))
    assert torch.equal(caches[:, 1, 1], torch.stack((k[0], -k[0])).bfloat16())


@settings(deadline=None, max_examples=60)
@given(st.permutations(range(SLOTS)), st.lists(st.integers(0, SLOTS - 1), max_size=20), st.data())
def test_moves_read_everything_first(order: list[int], source: list[int], data: st.DataObject) -> None:
    """Any overlap: chains, cycles, one source for several targets."""
    target = order[: len(source)]
    skipped = data.draw(st.sets(st.integers(0, 19)))
    target = [-1 if i in skipped else slot for i, slot in enumerate(target)]
    kv = torch.randn(2, 2, PAGES, PAGE, HEADS, WIDTH)
    before = kv.clone().flatten(2, 3)
    kv_move(kv, torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int64))
    expected = before.clone()
    for a, b in zip(source, target, strict=True):
        if b >= 0:
            expected[:, :, b] = before[:, :, a]
    assert torch.equal(kv.flatten(2, 3), expected)


@pytest.mark.parametrize("bad", [SLOTS, -2])
def test_slots_out_of_range(bad: int) -> None:
    kv = torch.zeros(1, 2, PAGES, PAGE, HEADS, WIDTH)
    with pytest.raises(ValueError, match="slots holds"):
        kv_write(torch.zeros(1, HEADS, WIDTH), torch.zeros(1, HEADS, WIDTH), kv[0, 0], kv[0, 1], torch.tensor([bad]))
    with pytest.raises(ValueError, match="target holds"):
        kv_move(kv, torch.tensor([0]), torch.tensor([bad]))
    with pytest.raises(ValueError, match="source holds"):
        kv_move(kv, torch.tensor([bad]), torch.tensor([0]))
