"""The draft head: conditioning, causality, files, and what one pass may see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from jetflow_core.drafter import head_candidates
from jetflow_core.head import DraftHead
from jetflow_core.layers import Attend
from jetflow_core.tree import grown_trees
from tiny import MASK, VOCAB, tiny_head, tiny_model


def dense_attend(head: DraftHead, features: Tensor, positions: Tensor, *, causal: bool) -> Attend:
    """Attention of one block over a whole context, written out: the reference for masks and caches."""
    context = head.context_kv(features, positions)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (
            torch.cat(pair).repeat_interleave(2, dim=1) for pair in zip(context[layer], (k, v), strict=True)
        )
        scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
        own = torch.ones(len(q), len(q)).tril() if causal else torch.ones(len(q), len(q))
        visible = torch.cat([torch.ones(len(q), len(features)), own], dim=1).bool()
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), values)

    return attend


def run_block(head: DraftHead, ids: list[int], context: int) -> Tensor:
    torch.manual_seed(5)
    features = head.fuse(torch.randn(context, 64))
    attend = dense_attend(head, features, torch.arange(context), causal=head.config.causal)
    return head(torch.tensor(ids), context + torch.arange(len(ids)), attend)


@pytest.mark.parametrize("vocab", [None, 2])
def test_transitions_are_conditioned_logits(vocab: int | None) -> None:
    model = tiny_model()
    ids = torch.arange(VOCAB) if vocab is None else torch.arange(0, VOCAB - 1, vocab)
    head = tiny_head(model, draft_vocab=None if vocab is None else ids)
    torch.manual_seed(1)
    hidden, parents, children = torch.randn(3, 4, 32), torch.randint(0, 40, (3, 4, 5)), torch.randint(0, 40, (3, 4, 6))
    expected = torch.empty(3, 4, 5, 6)
    for p in range(5):
        previous = ids[parents[..., p]].flatten()
        conditioned = head.condition(hidden.flatten(0, 1), previous, previous)
        expected[:, :, p] = head.logits(conditioned).view(3, 4, -1).gather(-1, children)
    marginal = head.logits(hidden.flatten(0, 1)).view(3, 4, -1).gather(-1, children)
    head.pack()
    torch.testing.assert_close(head.transitions(hidden, marginal, parents, children), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocab", [None, 2])
@pytest.mark.parametrize("blocks", [1, 3])
def test_second_order_trees_are_scored_by_both_tokens_before(vocab: int | None, blocks: int) -> None:
    """With every token a candidate nothing is approximate: a node's score is the sum of conditioned log-probabilities."""
    model = tiny_model()
    ids = torch.arange(VOCAB) if vocab is None else torch.arange(0, VOCAB - 1, vocab)
    head = tiny_head(model, order=2, draft_vocab=None if vocab is None else ids)
    torch.manual_seed(1)
    hidden = torch.randn(blocks, 4, 32)
    anchors, before = torch.randint(0, VOCAB, (2, blocks))
    place = {int(token): index for index, token in enumerate(ids)}
    head.pack()
    candidates = head_candidates(head, hidden, anchors, before, len(ids))
    trees = grown_trees(anchors.tolist(), candidates, [30] * blocks, [4, 3, 4][:blocks])
    assert max(int(tree.depths.max()) for tree in trees) == 4
    for block, tree in enumerate(trees):
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            older = before[block] if parent == 0 else torch.tensor(tree.tokens[tree.parents[parent]])
            state = hidden[block, tree.depths[node] - 1][None]
            logits = head.logits(head.condition(state, torch.tensor(tree.tokens[parent])[None], older[None]))
            expected = logits[0].log_softmax(-1)[place[int(tree.tokens[node])]]
            assert tree.scores[node] - tree.scores[parent] == pytest.approx(float(expected), abs=2e-4)


def test_causal_slots_do_not_see_later_ones_and_bidirectional_ones_do() -> None:
    model = tiny_model()
    for causal in (True, False):
        head = tiny_head(model, causal=causal)
        first = run_block(head, [5, MASK, 7, MASK], 9)
        second = run_block(head, [5, MASK, 7, 11], 9)
        assert torch.equal(first[:3], second[:3]) is causal
        assert not torch.equal(first[3], second[3])


def test_learned_mask_replaces_the_table_row() -> None:
    model = tiny_model()
    head = tiny_head(model)
    before = run_block(head, [5, MASK, MASK], 4)
    model.embed[MASK] = 50.0
    assert torch.equal(run_block(head, [5, MASK, MASK], 4), before)


@pytest.mark.parametrize(("conditioning", "order"), [("pairwise", 1), ("pairwise", 2), ("none", 1)])
def test_a_saved_head_drafts_as_before(tmp_path: Path, conditioning: str, order: int) -> None:
    model = tiny_model()
    assert model.lm_head.weight is not None
    head = tiny_head(model, conditioning=conditioning, order=order, draft_vocab=torch.arange(0, 90, 3))
    head.save(tmp_path / "head")
    loaded = DraftHead.load(tmp_path / "head", model.embed, model.lm_head.weight)
    assert loaded.config == head.config
    for name, tensor in head.named_parameters():
        if name == "_rows.weight":  # the target's own rows: shared, not stored
            continue
        torch.testing.assert_close(loaded.get_parameter(name), tensor.to(torch.bfloat16).to(tensor.dtype))
    again = tmp_path / "again"
    loaded.save(again)
    assert (again / "model.safetensors").read_bytes() == (tmp_path / "head" / "model.safetensors").read_bytes()
    modes = {file.stat().st_mode for file in again.iterdir()}
    assert len(modes) == 1, "who may read the configuration may read the weights"


def test_a_head_for_another_width_is_refused() -> None:
    model, other = tiny_model(), tiny_model(hidden_size=48)
    head = tiny_head(model)
    assert other.lm_head.weight is not None
    with pytest.raises(ValueError, match=r"32.*48"):
        DraftHead(head.config, other.embed, other.lm_head.weight)


@pytest.mark.parametrize(
    ("ids", "message"), [([VOCAB], "97"), ([-1], "97"), ([], "97"), ([0.5], "int64"), ([1, 2, 1], "twice")]
)
def test_a_draft_vocabulary_that_the_target_has_not_is_refused(ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_head(tiny_model(), draft_vocab=torch.tensor(ids))
