"""Blocks see what serving will show them, nothing else: no leak, right positions, right labels."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_tiny import CPU, features_of, tiny_head, tiny_model, tiny_rows

from jetflow_train.blocks import BlockRules, block_hidden, pack_blocks, sample_anchors, sample_lengths
from jetflow_train.features import RowFeatures

MODEL = tiny_model()
ROWS = tiny_rows(4)
FEATURES = [features_of(MODEL, row, number) for number, row in enumerate(ROWS)]
HEAD = tiny_head(MODEL, ROWS)
MASK = HEAD.config.mask_token_id


def rules(**changes: object) -> BlockRules:
    return replace(BlockRules(block_size=5, mask_token_id=MASK), **changes)  # pyright: ignore[reportArgumentType]


def whole(features: RowFeatures, anchors: list[int], length: int = 5) -> tuple[RowFeatures, torch.Tensor, torch.Tensor]:
    starts = torch.tensor(anchors)
    return features, starts, torch.full_like(starts, length)


def plain_block(features: RowFeatures, anchor: int, length: int, causal: bool) -> torch.Tensor:
    """One block by itself through ordinary masked attention, written the long way: the reference of the packed
    forward.
    """
    ids = torch.tensor([int(features.tokens[anchor])] + [MASK] * (length - 1))
    context = HEAD.context_kv(HEAD.fuse(features.taps[:anchor]), torch.arange(anchor))

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys = torch.cat([context[layer][0], k]).repeat_interleave(2, 1)
        values = torch.cat([context[layer][1], v]).repeat_interleave(2, 1)
        out = torch.zeros_like(q)
        for slot in range(length):
            end = anchor + (slot + 1 if causal else length)
            scores = torch.einsum("hd,shd->hs", q[slot], keys[:end]) / math.sqrt(q.shape[-1])
            out[slot] = torch.einsum("hs,shd->hd", scores.softmax(-1), values[:end])
        return out

    return HEAD(ids, torch.arange(anchor, anchor + length), attend)


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_packed_blocks_equal_single_blocks(causal: bool) -> None:
    anchors = [[5, 6, 9], [7], [8, 12]]
    lengths = [[5, 2, 4], [3], [5, 5]] if causal else [[5, 5, 5], [5], [5, 5]]
    items = [(f, torch.tensor(a), torch.tensor(n)) for f, a, n in zip(FEATURES, anchors, lengths, strict=False)]
    hidden = block_hidden(HEAD, pack_blocks(items, rules(causal=causal), CPU))
    expected = [
        plain_block(FEATURES[i], a, n, causal) for i in range(3) for a, n in zip(anchors[i], lengths[i], strict=True)
    ]
    torch.testing.assert_close(hidden, torch.cat(expected), rtol=1e-4, atol=1e-5)


@given(anchor=st.integers(5, 9), changed=st.integers(0, 15), causal=st.booleans())
@settings(max_examples=40, deadline=None)
@torch.no_grad()
def test_only_features_before_the_anchor_matter(anchor: int, changed: int, causal: bool) -> None:
    features = FEATURES[1]
    taps, tokens = features.taps.clone(), features.tokens.clone()
    taps[changed] += 1.0
    if changed != anchor:
        tokens[changed] = (tokens[changed] + 7) % 50
    other = replace(features, taps=taps, tokens=tokens)
    # Overlapping neighbours that do see the change must not pass it on either.
    anchors = sorted({anchor, 6, 10})
    mine = anchors.index(anchor)
    before, after = (
        block_hidden(HEAD, pack_blocks([whole(f, anchors)], rules(causal=causal), CPU)).view(len(anchors), 5, -1)[mine]
        for f in (features, other)
    )
    if changed < anchor:
        assert not torch.allclose(before, after, atol=1e-5)
    else:
        torch.testing.assert_close(before, after, rtol=0, atol=1e-6)


@torch.no_grad()
def test_earlier_slots_do_not_notice_a_cut_block() -> None:
    long = block_hidden(HEAD, pack_blocks([whole(FEATURES[0], [7], 5)], rules(), CPU))
    short = block_hidden(HEAD, pack_blocks([whole(FEATURES[0], [7], 3)], rules(), CPU))
    torch.testing.assert_close(long[:3], short, rtol=0, atol=1e-6)


def test_labels_teachers_and_positions_line_up() -> None:
    features, row = FEATURES[2], ROWS[2]
    batch = pack_blocks([whole(FEATURES[0], [6]), whole(features, [8, 17])], rules(causal=False), CPU)
    tokens, prompt = torch.tensor(row.tokens), len(row.prompt_ids)
    assert batch.rows == (0, 2)
    assert batch.input_ids[5:10].tolist() == [row.tokens[8]] + [MASK] * 4
    assert batch.positions[10:].tolist() == [17, 18, 19, 20, 21]
    hidden, _ = MODEL.forward_sequence(tokens)
    teacher = torch.log_softmax(MODEL.logits(hidden), dim=-1)
    for j, slot in enumerate(batch.slots.tolist()):
        if slot < 5:
            continue
        anchor, k = (8, slot - 5) if slot < 10 else (17, slot - 10)
        assert int(batch.depth[j]) == k > 0
        assert int(batch.label[j]) == row.tokens[anchor + k]
        assert int(batch.previous[j]) == row.tokens[anchor + k - 1]
        assert int(batch.before[j]) == row.tokens[anchor + k - 2]
        expected = teacher[anchor + k - 1].topk(8)
        assert batch.teacher_ids[j].tolist() == expected.indices.tolist()
        torch.testing.assert_close(batch.teacher_logp[j], expected.values)
    assert int((batch.slots >= 10).sum()) == len(row.tokens) - 1 - 17  # nothing past the row's end
    assert prompt == features.prompt_length


def test_every_tensor_of_a_batch_lands_on_the_device() -> None:
    batch = pack_blocks([whole(FEATURES[0], [6]), whole(FEATURES[2], [8, 17])], rules(), torch.device("meta"))
    tensors = {each.name: getattr(batch, each.name) for each in fields(batch)} | {
        f"document {number}": document.visible for number, document in enumerate(batch.documents)
    }
    devices = {name: value.device.type for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    assert len(devices) == 15 + 2
    assert set(devices.values()) == {"meta"}, devices


def test_anchors_are_output_tokens_with_a_successor() -> None:
    features = FEATURES[3]
    generator = torch.Generator().manual_seed(0)
    anchors = sample_anchors(features, 1000, generator)
    assert anchors.tolist() == list(range(features.prompt_length, len(features.tokens) - 1))
    few = sample_anchors(features, 3, generator)
    assert len(set(few.tolist())) == 3


def test_random_cuts_follow_the_slot_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    anchors = torch.zeros(20000, dtype=torch.int64)
    lengths = sample_lengths(anchors, 1000, rules(block_size=8, gamma=3.0), generator)
    for k in range(1, 8):
        present = float((lengths > k).float().mean())
        assert present == pytest.approx(math.exp(-(k - 1) / 3.0), abs=0.02)


def test_weights_without_cuts() -> None:
    batch = pack_blocks([whole(FEATURES[0], [6])], rules(gamma=2.0, truncate=False), CPU)
    torch.testing.assert_close(batch.weight, torch.exp(-(batch.depth - 1) / 2.0))
    assert pack_blocks([whole(FEATURES[0], [6])], rules(gamma=None), CPU).weight.tolist() == [1.0] * 4


@pytest.mark.parametrize(("changes", "message"), [({"gamma": 0.0}, "gamma 0.0"), ({"block_size": 1}, "block_size 1")])
def test_impossible_rules_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rules(**changes)
