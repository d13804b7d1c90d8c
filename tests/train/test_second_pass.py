"""What the second pass drafts with is what training with known tokens before the masks teaches."""

from __future__ import annotations

import pytest
import torch

from jetflow_core.head import DraftHead
from jetflow_core.model import Decoder
from jetflow_train.blocks import BlockRules, pack_blocks
from jetflow_train.data import Row
from jetflow_train.features import RowFeatures, row_features
from jetflow_train.served import row_trees
from jetflow_train.simulate import drafted_trees, head_rules
from jetflow_train.states import slot_states
from tiny import MASK, VOCAB, tiny_eagle, tiny_head, tiny_model

MODEL = tiny_model()
VOCABULARY = torch.arange(0, VOCAB - 1, 2)


def features_of(model: Decoder, row: Row) -> RowFeatures:
    """Features for the heads of `tiny`."""
    taps, ids, logp = row_features(model, row, (0, 2), 4)
    return RowFeatures(0, len(row.prompt_ids), torch.tensor(row.tokens), taps, ids, logp)


def random_row(length: int) -> Row:
    tokens = tuple(torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(1)).tolist())
    return Row("tiny/1", 0.0, tokens[:3], tokens[3:])


def taught_logp(head: DraftHead, row: Row, anchor: int, path: tuple[int, ...]) -> float:
    """The log-probability of `path` after the anchor: each token at the first mask after the true ones before it."""
    taught = Row("path", 0.0, row.prompt_ids, row.tokens[3 : anchor + 1] + path + (0,) * 3)
    known = torch.arange(len(path))
    blocks = (features_of(MODEL, taught), torch.full_like(known, anchor), known + 2)
    rules = BlockRules(head.config.block_size, MASK, gamma=None, truncate=False, prefix=0.5)
    batch = pack_blocks([blocks], rules, torch.device("cpu"), [known])
    assert batch.depth.tolist() == [1] * len(path)
    assert batch.label.tolist() == list(path)
    log_q = head.logits(slot_states(head, batch)[0]).log_softmax(-1)
    return float(log_q[known, torch.searchsorted(VOCABULARY, torch.tensor(path))].sum())


@pytest.mark.parametrize("order", [1, 2])
def test_drafted_scores_are_those_of_the_training_forward(order: int) -> None:
    head = tiny_head(MODEL, draft_vocab=VOCABULARY, order=order)
    head.pack()
    row, anchor = random_row(20), 13
    tree = row_trees(head, features_of(MODEL, row), [4, anchor, 15], 24, 6, passes=2)[1]
    assert len(tree) == 25
    assert tree.depths.max() >= 3
    for leaf in range(1, len(tree)):
        path: tuple[int, ...] = ()
        node = leaf
        while node:
            path, node = (int(tree.tokens[node]), *path), int(tree.parents[node])
        assert tree.scores[leaf] == pytest.approx(taught_logp(head, row, anchor, path), rel=1e-4, abs=1e-4)


def test_a_replay_refuses_passes_that_a_head_has_not() -> None:
    features = features_of(MODEL, random_row(12))
    for head, passes, message in (
        (tiny_eagle(MODEL), 2, "EAGLE head"),
        (tiny_head(MODEL, causal=False), 2, "bidirectional"),
        (tiny_head(MODEL), 3, "draft_passes is 3"),
    ):
        with pytest.raises(ValueError, match=message):
            drafted_trees(head, features, head_rules(head), 8, 4, passes)
