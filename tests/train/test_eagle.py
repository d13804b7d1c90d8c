"""EAGLE heads in training: what is trained is what is drafted, and the loop learns, resumes and exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import training_tiny
from training_tiny import CPU, MODEL, tiny_options, tiny_rows, trainer, weights

from jetflow_core.eagle import EagleHead
from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.heads import load_head
from jetflow_core.llm import LLM
from jetflow_core.model import Decoder
from jetflow_core.sampling import SamplingParams
from jetflow_train.blocks import BlockRules, pack_blocks, sample_anchors, sample_lengths
from jetflow_train.checkpoint import checkpoints
from jetflow_train.config import HeadOptions
from jetflow_train.data import Row
from jetflow_train.eagle import unrolled_states
from jetflow_train.features import RowFeatures, row_features
from jetflow_train.heads import continued_head, head_config, target_tables
from jetflow_train.served import row_trees
from jetflow_train.simulate import head_rules, replayed_tau
from jetflow_train.trainer import STEPS_PER_LOG, Trainer
from tiny import VOCAB, tiny_eagle, tiny_model

WHOLE = BlockRules(6, 0, gamma=None, truncate=False)


def features_of(model: Decoder, row: Row, number: int = 0) -> RowFeatures:
    """Features for `tiny_eagle`."""
    taps, ids, logp = row_features(model, row, (0, 2), 4)
    return RowFeatures(number, len(row.prompt_ids), torch.tensor(row.tokens), taps, ids, logp)


def random_row(length: int, seed: int) -> Row:
    generator = torch.Generator().manual_seed(seed)
    tokens = tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())
    return Row(f"tiny/{seed}", 0.0, tokens[:3], tokens[3:])


# -- the forward ------------------------------------------------------------------------------------------------------


def test_drafted_scores_are_those_of_the_training_forward() -> None:
    model = tiny_model()
    vocab = torch.arange(0, VOCAB - 1, 2)
    head = tiny_eagle(model, draft_vocab=vocab)
    row = random_row(20, 1)
    anchor = 13
    tree = row_trees(head, features_of(model, row), [4, anchor, 15], 40, 6)[1]
    assert tree.depths.max() == head.config.depth
    for leaf in range(len(tree)):
        path = [leaf]
        while path[0] != 0:
            path.insert(0, int(tree.parents[path[0]]))
        drafted = tuple(tree.tokens[path].tolist())
        assert drafted[0] == row.tokens[anchor]
        if len(path) == 1:
            continue
        # The drafted path as a row of its own: below the anchor it is the same context.
        taught = Row("path", 0.0, row.prompt_ids, row.tokens[3:anchor] + drafted + (0,) * 3)
        batch = pack_blocks(
            [(features_of(model, taught), torch.tensor([anchor]), torch.tensor([len(path)]))],
            WHOLE,
            torch.device("cpu"),
        )
        logp = head.logits(unrolled_states(head, batch)).log_softmax(-1)
        expected = logp[torch.arange(len(path) - 1), torch.searchsorted(vocab, torch.tensor(drafted[1:]))].sum()
        torch.testing.assert_close(torch.tensor(tree.scores[leaf]).float(), expected, rtol=1e-4, atol=1e-4)


def test_blocks_of_several_documents_do_not_see_each_other() -> None:
    """Packed and cut blocks give what each block gives alone, and so does a document without later tokens."""
    model = tiny_model()
    head = tiny_eagle(model)
    generator = torch.Generator().manual_seed(0)
    rules = BlockRules(6, 0, gamma=2.0)
    items: list[tuple[RowFeatures, torch.Tensor, torch.Tensor]] = []
    for number, length in enumerate((12, 30, 5)):
        features = features_of(model, random_row(length, number), number)
        anchors = sample_anchors(features, 6, generator)
        items.append((features, anchors, sample_lengths(anchors, features.ends(anchors), rules, generator)))
    lengths = torch.cat([lengths for _, _, lengths in items])
    assert {2, 3, 4} <= set(lengths.tolist())
    together = unrolled_states(head, pack_blocks(items, rules, CPU)).split((lengths - 1).tolist())
    alone = [
        unrolled_states(head, pack_blocks([(features, anchors[i : i + 1], lengths[i : i + 1])], rules, CPU))
        for features, anchors, lengths in items
        for i in range(len(anchors))
    ]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_block_sees_nothing_of_the_target_from_its_anchor_on() -> None:
    model = tiny_model()
    head = tiny_eagle(model)
    features = features_of(model, random_row(20, 1))
    batch = pack_blocks([(features, torch.tensor([8, 12]), torch.tensor([6, 6]))], WHOLE, CPU)
    before = unrolled_states(head, batch)
    batch.taps[8:] += 1.0
    after = unrolled_states(head, batch)
    assert torch.equal(before[:5], after[:5])
    assert not torch.equal(before[5:], after[5:])


# -- the loop ---------------------------------------------------------------------------------------------------------


def options(**changes: object) -> HeadOptions:
    return tiny_options(**({"kind": "eagle"} | changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_falls_and_every_weight_moves(tmp_path: Path, dtype: str) -> None:
    run = trainer(tmp_path, options(steps=3 * STEPS_PER_LOG, blocks=12, learning_rate=5e-3, dtype=dtype))
    start = weights(run)
    run.run()
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < 0.8 * losses[0]
    assert {record["marginal_loss"] for record in records if "loss" in record} == {0.0}
    final = records[-1]
    assert 1.0 <= final["replayed_tau"]["8"] <= final["replayed_tau"]["32"] <= 5.0
    assert final["held_out"]["conditional_accuracy"] == final["held_out"]["marginal_accuracy"]
    assert len(final["held_out"]["conditional_accuracy"]) == 4
    for name, value in weights(run).items():
        assert not torch.equal(value, start[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path, dtype: str) -> None:
    chosen = options(steps=14, dtype=dtype, d_pace=True)
    straight = trainer(tmp_path / "a", chosen)
    straight.run()
    interrupted = trainer(tmp_path / "b", chosen)

    def stop(current: Trainer, record: object) -> None:
        if current.position.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted.run(stop)
    resumed = trainer(tmp_path / "b", chosen)
    resumed.run()
    assert resumed.position.step == straight.position.step == 14
    for name, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[name]), name


def test_the_exported_head_scores_alike_and_can_be_trained_on(tmp_path: Path) -> None:
    run = trainer(tmp_path, options(steps=2))
    run.run()
    folder = tmp_path / "run" / "head"
    loaded = load_head(folder, *target_tables(MODEL))
    assert isinstance(loaded, EagleHead)
    assert loaded.config == run.head.config
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(loaded.logits(hidden), run.head.logits(hidden))
    again = continued_head(str(folder), MODEL, loaded.config)
    for name, value in loaded.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    with pytest.raises(ValueError, match="that head is of another kind; change the option kind or the head"):
        continued_head(str(folder), MODEL, head_config(MODEL, tiny_options()))
    with pytest.raises(ValueError, match="that head has depth = 4, this run makes 6"):
        continued_head(str(folder), MODEL, head_config(MODEL, options(block_size=7)))


def test_a_run_of_the_other_kind_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, options(steps=2)).run()
    with pytest.raises(ValueError, match=r"had kind = 'eagle', this one has 'jetflow'"):
        trainer(tmp_path, tiny_options(steps=2)).run()


def test_a_checkpoint_from_before_an_option_goes_on(tmp_path: Path) -> None:
    trainer(tmp_path, tiny_options(steps=2)).run()
    path = checkpoints(tmp_path / "run")[-1]
    state = torch.load(path, weights_only=True)
    del state["options"]["kind"]
    torch.save(state, path)
    assert trainer(tmp_path, tiny_options(steps=3)).resume()
    with pytest.raises(ValueError, match=r"had kind = 'jetflow', this one has 'eagle'"):
        trainer(tmp_path, options(steps=3)).resume()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "medusa"}, "kind 'medusa' is unknown: use jetflow or eagle"),
        ({"attention": "bidirectional"}, "leave out attention and prefix"),
        ({"prefix": 0.5}, "leave out attention and prefix"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(**changes)


# -- what it is worth -------------------------------------------------------------------------------------------------


def answers(engine: Engine, rows: list[Row], budget: int) -> tuple[list[Row], float]:
    """The target's own greedy answers to the rows' prompts, and τ of making them."""
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    done = LLM(engine).generate([row.prompt_ids for row in rows], params, budget=budget)
    steps = sum(each.usage.target_steps - 1 for each in done)  # the first token comes out of the prefill
    made = [Row(row.id, 0.0, row.prompt_ids, tuple(each.token_ids)) for row, each in zip(rows, done, strict=True)]
    return made, sum(len(each.token_ids) - 1 for each in done) / steps


def test_a_trained_head_is_accepted_as_often_as_replay_says(tmp_path: Path) -> None:
    limits = EngineConfig(page_size=4, num_pages=200, drafter="head")
    rows, plain = answers(Engine(MODEL), tiny_rows(6), 0)
    assert plain == 1.0
    untrained = trainer(tmp_path, options(steps=120, blocks=16, anchors=24, learning_rate=5e-3, held_out=0.0), rows)
    chance = answers(Engine(MODEL, head=untrained.head, config=limits), rows, 6)[1]
    untrained.run()
    head = load_head(tmp_path / "run" / "head", *target_tables(MODEL))
    head.pack()
    for budget in (3, 12):
        again, tau = answers(Engine(MODEL, head=head, config=limits), rows, budget)
        assert again == rows
        assert tau > max(2.0, 1.2 * chance)
        items = [training_tiny.features_of(MODEL, row, number) for number, row in enumerate(rows)]
        assert replayed_tau(head, items, head_rules(head), [budget], 25)[budget] == pytest.approx(tau)
