"""What a step minimises: every divergence trains, micro-batches change nothing, slot weights and known tokens hold."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_tiny import CPU, features_of, tiny_head, tiny_model, tiny_options, tiny_rows

from jetflow_train.blocks import (
    BlockRules,
    block_hidden,
    pack_blocks,
    sample_anchors,
    sample_lengths,
    sample_prefixes,
)
from jetflow_train.data import spread
from jetflow_train.features import build_features
from jetflow_train.heads import target_tables
from jetflow_train.losses import LOSSES
from jetflow_train.states import slot_states
from jetflow_train.trainer import STEPS_PER_ACCEPTANCE, STEPS_PER_LOG, Trainer

MODEL = tiny_model()
ROWS = spread(tiny_rows(16))
FEATURES = [features_of(MODEL, row, number) for number, row in enumerate(ROWS)]
HEAD = tiny_head(MODEL, ROWS)
MASK = HEAD.config.mask_token_id


def trainer(folder: Path, **changes: object) -> Trainer:
    options = tiny_options(output=str(folder / "run"), **changes)
    head = tiny_head(MODEL, ROWS, **changes)
    store = build_features(folder / "features", MODEL, ROWS, head.config.target_layer_ids, options.teacher_top)
    return Trainer(head, target_tables(MODEL), store, ROWS, options)


@pytest.mark.parametrize(
    "changes", [{"loss": loss} for loss in LOSSES] + [{"draft_temperature": 2.0}, {"d_pace": True}]
)
def test_every_objective_falls(tmp_path: Path, changes: dict[str, object]) -> None:
    run = trainer(tmp_path, steps=5 * STEPS_PER_LOG, blocks=16, learning_rate=5e-3, prefix=0.3, **changes)
    records = [record for record in (run.step() for _ in range(5 * STEPS_PER_LOG)) if record]
    assert records[-1]["loss"] < 0.9 * records[0]["loss"]


def gradients(run: Trainer) -> dict[str, torch.Tensor]:
    """The gradients of the first step."""
    run.step()
    return {name: p.grad.clone() for name, p in run.head.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("changes", [{}, {"truncate": False}, {"attention": "bidirectional", "gamma": 2.0}])
def test_micro_batches_give_the_gradient_of_one_batch(tmp_path: Path, changes: dict[str, object]) -> None:
    # Clipped gradients would be alike whatever they are divided by.
    whole, parts = (trainer(tmp_path / str(n), blocks=24, accumulate=n, clip=math.inf, **changes) for n in (1, 3))
    first, second = gradients(whole), gradients(parts)
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_the_loss_is_one_mean_over_slots_however_they_are_dealt(tmp_path: Path) -> None:
    run = trainer(tmp_path, blocks=12, truncate=False, steps=STEPS_PER_LOG)
    draws, _ = run.order.draw(run.position)
    with torch.no_grad():
        batches = [run.pack([draw]) for draw in draws]
        total = sum(float(run.losses(batch)[0]) for batch in batches)
        whole = run.pack(draws)
        assert float(run.losses(whole)[0]) == pytest.approx(total, rel=1e-5)
    assert float(whole.weight.sum()) == pytest.approx(sum(float(batch.weight.sum()) for batch in batches))


def test_the_gradient_is_that_of_the_options_objective(tmp_path: Path) -> None:
    """Both temperatures and the weight of the marginal loss, written the long way."""
    changes: dict[str, object] = {"teacher_temperature": 0.5, "draft_temperature": 2.0, "marginal_weight": 0.7}
    run = trainer(tmp_path, blocks=12, clip=math.inf, draft_vocab_size=None, **changes)
    batch = run.pack(run.order.draw(run.position)[0])
    teacher = torch.softmax(batch.teacher_logp / 0.5, dim=-1)

    def divergence(states: torch.Tensor) -> torch.Tensor:
        log_q = torch.log_softmax(run.head.logits(states) / 2.0, dim=-1).gather(1, batch.teacher_ids)
        return 2.0**2 * (batch.weight * (teacher * (teacher.log() - log_q)).sum(-1)).sum()

    conditioned, hidden = slot_states(run.head, batch)
    ((divergence(conditioned) + 0.7 * divergence(hidden)) / batch.weight.sum()).backward()
    expected = {name: p.grad.clone() for name, p in run.head.named_parameters() if p.grad is not None}
    found = gradients(run)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_the_seed_decides_what_is_drawn(tmp_path: Path) -> None:
    first, same, other = (trainer(tmp_path / name, seed=seed) for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    draws = [run.order.draw(run.position)[0] for run in (first, same, other)]
    assert draws[0] == draws[1] != draws[2]
    batches = [run.pack(each) for run, each in zip((first, same, other), draws, strict=True)]
    assert torch.equal(batches[0].positions, batches[1].positions)
    assert not torch.equal(batches[0].positions, batches[2].positions)

    def seeds(run: Trainer, epoch: int = 0) -> dict[int, int]:
        """Of each row's anchors, in the order of an epoch."""
        position, found = replace(run.position, epoch=epoch, epoch_rows=len(ROWS)), dict[int, int]()
        while position.epoch == epoch:
            drawn, position = run.order.draw(position)
            for draw in drawn:
                found.setdefault(draw.row, draw.seed)
        return found

    once, again, otherwise = seeds(first), seeds(same), seeds(other)
    assert once == again
    assert once.keys() == otherwise.keys()
    assert list(once) != list(otherwise)
    assert list(once) != list(seeds(first, epoch=1))
    assert all(once[row] != otherwise[row] for row in once)


def test_slots_count_as_drafts_reach_them(tmp_path: Path) -> None:
    run = trainer(tmp_path, d_pace=True, gamma=3.0, steps=4 * STEPS_PER_ACCEPTANCE, truncate=False)
    before = run.pack([run.order.draw(run.position)[0][0]])
    torch.testing.assert_close(before.weight, torch.exp(-(before.depth - 1) / 3.0))
    for _ in range(2 * STEPS_PER_ACCEPTANCE):
        run.step()
    batch = run.pack([run.order.draw(run.position)[0][0]])
    hits, seen = run.acceptance.counts
    assert seen[0] > 0
    assert hits[0] < seen[0] * math.exp(-1 / 3)  # a random head hits less than assumed at first
    reach = torch.tensor(run.acceptance.reach())
    assert bool((reach[1:] < torch.exp(-torch.arange(1, 4) / 3.0)).all())
    torch.testing.assert_close(batch.weight.double(), reach.double()[batch.depth - 1])


def test_cuts_follow_any_reach() -> None:
    rules = BlockRules(5, MASK, reach=(1.0, 0.5, 0.5, 0.1))
    generator = torch.Generator().manual_seed(0)
    lengths = sample_lengths(torch.zeros(20000, dtype=torch.int64), 1000, rules, generator)
    present = [float((lengths > k).float().mean()) for k in range(1, 5)]
    assert present == pytest.approx([1.0, 0.5, 0.5, 0.1], abs=0.02)


# -- known tokens before the masks ------------------------------------------------------------------------------------


def test_prefixes_follow_their_probability() -> None:
    rules = BlockRules(8, MASK, prefix=0.6)
    known = sample_prefixes(torch.zeros(20000, dtype=torch.int64), 1000, rules, torch.Generator().manual_seed(0))
    assert int(known.max()) == 6  # one slot is left to predict
    for j in range(1, 6):
        assert float((known >= j).float().mean()) == pytest.approx(0.6**j, abs=0.02)


@given(
    prefix=st.floats(0, 0.99), causal=st.booleans(), truncate=st.booleans(), seed=st.integers(0, 99), block=st.integers(2, 7)
)  # fmt: skip
def test_every_block_keeps_a_masked_slot_inside_the_row(
    prefix: float, causal: bool, truncate: bool, seed: int, block: int
) -> None:
    rules = BlockRules(block, MASK, causal, 2.0, truncate, prefix=prefix)
    generator = torch.Generator().manual_seed(seed)
    features = FEATURES[seed % len(FEATURES)]
    anchors = sample_anchors(features, 6, generator)
    ends = features.ends(anchors)
    known = sample_prefixes(anchors, ends, rules, generator)
    lengths = sample_lengths(anchors, ends, rules, generator, known)
    batch = pack_blocks([(features, anchors, lengths)], rules, CPU, [known])
    start = lengths.cumsum(0) - lengths
    loss_slots = set(batch.slots.tolist())
    for at, anchor, length, j in zip(start.tolist(), anchors.tolist(), lengths.tolist(), known.tolist(), strict=True):
        assert 0 <= j <= block - 2
        expected = features.tokens[anchor : anchor + j + 1].tolist() + [MASK] * (length - 1 - j)
        assert batch.input_ids[at : at + length].tolist() == expected
        counted = [k for k in range(length) if at + k in loss_slots]
        assert counted == [k for k in range(j + 1, length) if anchor + k < int(ends[0])]
        assert counted
    position = batch.positions[batch.slots]
    torch.testing.assert_close(batch.label, features.tokens[position])
    torch.testing.assert_close(batch.previous, features.tokens[position - 1])
    torch.testing.assert_close(batch.before, features.tokens[position - 2])


@torch.no_grad()
def test_known_tokens_are_seen_by_the_masks_after_them() -> None:
    features, rules = FEATURES[0], BlockRules(5, MASK)
    anchors, lengths, known = torch.tensor([6]), torch.tensor([5]), torch.tensor([2])

    def hidden(tokens: torch.Tensor) -> torch.Tensor:
        items = [(replace(features, tokens=tokens), anchors, lengths)]
        return block_hidden(HEAD, pack_blocks(items, rules, CPU, [known]))

    plain = hidden(features.tokens)
    changed = features.tokens.clone()
    changed[8] = (changed[8] + 5) % 50
    other = hidden(changed)
    torch.testing.assert_close(other[:2], plain[:2])
    assert all(not torch.allclose(other[slot], plain[slot], atol=1e-4) for slot in (2, 3, 4))
    changed = features.tokens.clone()
    changed[9:11] = (changed[9:11] + 5) % 50  # what is to be predicted stays hidden
    torch.testing.assert_close(hidden(changed), plain)


def test_depth_counts_from_the_last_known_token() -> None:
    batch = pack_blocks(
        [(FEATURES[0], torch.tensor([6]), torch.tensor([5]))],
        BlockRules(5, MASK, gamma=2.0, truncate=False),
        CPU,
        [torch.tensor([2])],
    )
    assert batch.depth.tolist() == [1, 2]
    torch.testing.assert_close(batch.weight, torch.tensor([1.0, math.exp(-0.5)]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "mse"}, "loss 'mse' is unknown: use one of forward_kl, reverse_kl"),
        ({"prefix": 1.0}, "prefix 1.0 must be at least 0 and below 1"),
        ({"accumulate": 0}, "accumulate 0 must be at least 1"),
        ({"accumulate": 9}, "accumulate 9 exceeds the 8 blocks of a step"),
        ({"keep": 0}, "keep 0 must be at least 1"),
        ({"draft_temperature": 0.0}, "draft_temperature 0.0 must lie between"),
    ],
)
def test_impossible_options_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_options(**changes)
