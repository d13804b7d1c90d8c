"""The loop: it learns, it resumes to the bit, it stops on bad numbers, it refuses what does not belong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from training_tiny import MODEL, ROWS, tiny_options, tiny_rows, trainer, weights

from jetflow_core.head import DraftHead
from jetflow_train.checkpoint import checkpoints
from jetflow_train.data import is_held_out, spread
from jetflow_train.heads import target_tables, training_dtype
from jetflow_train.masters import MasterWeights
from jetflow_train.terminal import Bars
from jetflow_train.trainer import STEPS_PER_LOG, Trainer, learning_rate


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_falls_and_the_metrics_say_so(tmp_path: Path, dtype: str) -> None:
    run = trainer(tmp_path, tiny_options(steps=4 * STEPS_PER_LOG, blocks=16, learning_rate=5e-3, dtype=dtype))
    run.run()
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < 0.8 * losses[0]
    final = records[-1]
    assert final["replayed_tau"].keys() == {"8", "32"}
    assert 1.0 <= final["replayed_tau"]["8"] <= final["replayed_tau"]["32"] <= 5.0
    assert len(final["held_out"]["conditional_accuracy"]) == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path, dtype: str) -> None:
    options = tiny_options(steps=14, dtype=dtype)
    straight = trainer(tmp_path / "a", options)
    straight.run()
    interrupted = trainer(tmp_path / "b", options)

    def stop(current: Trainer, record: object) -> None:
        if current.position.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted.run(stop)
    resumed = trainer(tmp_path / "b", options)
    resumed.run()
    assert resumed.position.step == straight.position.step == 14
    assert resumed.position.blocks == straight.position.blocks
    for name, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[name]), name


def test_the_exported_head_loads_and_scores_alike(tmp_path: Path) -> None:
    run = trainer(tmp_path, tiny_options(steps=2))
    run.run()
    loaded = DraftHead.load(tmp_path / "run" / "head", *target_tables(MODEL))
    assert loaded.config == run.head.config
    assert loaded.draft_vocab is not None
    assert run.head.draft_vocab is not None
    assert torch.equal(loaded.draft_vocab, run.head.draft_vocab)
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(loaded.logits(hidden), run.head.logits(hidden))
    previous = torch.tensor([5, 9, 11])
    torch.testing.assert_close(
        loaded.condition(hidden, previous, previous),
        run.head.condition(hidden, previous, previous),
        rtol=0.05,
        atol=0.02,
    )


def test_updates_below_the_rounding_step_add_up() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    masters = MasterWeights({"p": parameter})
    optimizer = torch.optim.SGD(masters.named.values(), lr=1e-4)
    for _ in range(100):  # bfloat16's step below 1 is 2⁻⁸: a hundred times 1e-4 is more, each of them is less
        masters.clear_gradients()
        parameter.sum().backward()
        masters.collect_gradients()
        optimizer.step()
        masters.publish()
    assert torch.equal(parameter, torch.full((3,), 0.99).bfloat16())
    assert parameter.grad is None


def test_float32_parameters_are_their_own_masters() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert MasterWeights({"p": parameter}).named["p"] is parameter


def test_an_unknown_training_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype 'float16' is unknown for training: use auto, float32, bfloat16"):
        training_dtype("float16", torch.device("cpu"))


def test_another_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, tiny_options(steps=2)).run()
    with pytest.raises(ValueError, match=r"had gamma = 6.0, this one has 3.0"):
        trainer(tmp_path, tiny_options(steps=2, gamma=3.0)).run()
    # The mask id is part of a run even when the option is left to its default.
    with pytest.raises(ValueError, match="mask_token_id"):
        trainer(tmp_path, tiny_options(steps=2, mask_token_id=7)).run()


def test_a_longer_run_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    trainer(tmp_path, tiny_options(steps=2)).run()
    longer = trainer(tmp_path, tiny_options(steps=5))
    longer.run()
    assert longer.position.step == 5


def test_a_bad_batch_is_named_and_the_checkpoint_stays(tmp_path: Path) -> None:
    run = trainer(tmp_path, tiny_options(steps=3))
    run.run()
    before = (checkpoints(tmp_path / "run")[-1]).read_bytes()
    broken = trainer(tmp_path, tiny_options(steps=6))
    broken.resume()
    with torch.no_grad():
        broken.head.norm.weight.fill_(math.nan)
    with pytest.raises(ValueError, match=r"step 3: loss nan.*tiny/"):
        broken.step()
    assert (checkpoints(tmp_path / "run")[-1]).read_bytes() == before


def test_a_gradient_that_is_no_number_moves_nothing(tmp_path: Path) -> None:
    """The loss may be finite all the same."""
    run = trainer(tmp_path, tiny_options(steps=3))
    start = weights(run)
    run.head.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(
        ValueError, match=r"step 0: loss \d.*, gradient norm (nan|inf) on rows .*tiny/.* saved before is intact"
    ):
        run.step()
    assert run.position.step == 0
    for name, value in weights(run).items():
        assert torch.equal(value, start[name]), name


def test_held_out_rows_are_never_trained_on(tmp_path: Path) -> None:
    run = trainer(tmp_path, tiny_options(steps=1, held_out=0.4))
    position, seen = run.position, set[int]()
    for _ in range(30):
        draws, position = run.order.draw(position)
        seen |= {draw.row for draw in draws}
    held = {number for number, row in enumerate(ROWS) if is_held_out(row, 0.4)}
    assert held
    assert seen == set(range(len(ROWS))) - held


def test_everything_held_out_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no training rows"):
        trainer(tmp_path, tiny_options(steps=1, held_out=0.999999)).run()


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    trainer(tmp_path, tiny_options(steps=2)).run()
    path = checkpoints(tmp_path / "run")[-1]
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"checkpoint-00000002\.pt: cannot read"):
        trainer(tmp_path, tiny_options(steps=2)).run()
    torch.save({"weights": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"checkpoint-00000002\.pt: cannot read .*not one of a training run"):
        trainer(tmp_path, tiny_options(steps=2)).run()


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, tiny_options(steps=2))
    run.run()
    path = checkpoints(tmp_path / "run")[-1]
    state = torch.load(path, weights_only=True)
    state["head"]["norm.weight"] = torch.ones(7)
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"does not fit this target \(norm\.weight\)"):
        run.resume()


def test_the_device_is_no_part_of_a_runs_identity(tmp_path: Path) -> None:
    trainer(tmp_path, tiny_options(steps=2)).run()
    assert trainer(tmp_path, tiny_options(steps=4, device="cpu")).resume()


def test_without_greedy_rows_there_is_no_replayed_tau(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(tmp_path, tiny_options(steps=1, held_out=0.4), spread(tiny_rows(12, temperature=0.7)))
    record = run.evaluate()
    assert record.keys() == {"held_out"}
    with Bars() as bars:
        bars.training(run, record)
    assert "held out: KL" in (text := capsys.readouterr().out)
    assert "τ" not in text


def test_an_unwritable_output_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    with pytest.raises(ValueError, match="run: cannot write the output folder"):
        trainer(tmp_path, tiny_options(steps=2))


def test_the_schedule_warms_up_and_ends_at_its_floor() -> None:
    options = tiny_options(learning_rate=1.0, warmup=0.1, final_rate=0.2)
    assert learning_rate(0.05, options) == pytest.approx(0.5)
    assert learning_rate(0.1, options) == pytest.approx(1.0)
    assert learning_rate(0.55, options) == pytest.approx(0.6)
    assert learning_rate(1.0, options) == learning_rate(1.3, options) == pytest.approx(0.2)


def test_a_step_has_the_schedules_rate_clipped_gradients_and_decay_of_matrices_alone(tmp_path: Path) -> None:
    options = tiny_options(steps=10, learning_rate=0.5, warmup=0.5, clip=1e-3, weight_decay=0.25)
    run = trainer(tmp_path, options)
    seen: list[tuple[float, float]] = []
    step = run.optimizer.step

    def look() -> None:
        norm = torch.stack([p.grad.norm() for p in run.head.parameters() if p.grad is not None]).norm()
        seen.append((float(norm), run.optimizer.param_groups[0]["lr"]))
        step()

    run.optimizer.step = look  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(3):
        run.step()
    norms, rates = zip(*seen, strict=True)
    assert norms == pytest.approx([1e-3] * 3, rel=1e-3)
    assert rates == tuple(learning_rate(number / 10, options) for number in range(3))
    assert rates[1] < rates[2]
    decays = {
        parameter.ndim > 1: group["weight_decay"]
        for group in run.optimizer.param_groups
        for parameter in group["params"]
    }
    assert decays == {True: 0.25, False: 0.0}


def test_minutes_are_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of three of them with steps of twenty seconds: its length, its rate, its checkpoints and its measures."""
    options = tiny_options(steps=None, minutes=3.0, checkpoint_minutes=1.0, evaluate_minutes=2.0, keep=9, warmup=0.5)
    run = trainer(tmp_path, options)
    now, rates, step = [0.0], list[float](), run.optimizer.step
    monkeypatch.setattr(run, "_elapsed", lambda: now[0])

    def slow() -> None:
        step()
        now[0] += 20.0
        rates.append(run.optimizer.param_groups[0]["lr"])

    run.optimizer.step = slow  # pyright: ignore[reportAttributeAccessIssue]
    run.run()
    assert run.position.step == 9
    assert rates == [learning_rate(20.0 * number / 180.0, options) for number in range(9)]
    # More than a minute after the last one, or with a measure.
    assert [path.name for path in checkpoints(run.output)] == [f"checkpoint-0000000{step}.pt" for step in (4, 7, 8, 9)]
    records = [json.loads(line) for line in (run.output / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["elapsed"]) for record in records] == [(7, 140.0), (9, 180.0)]


def test_an_interrupt_in_the_middle_of_a_step_saves_nothing_of_it(tmp_path: Path) -> None:
    options = tiny_options(steps=5, checkpoint_minutes=0.0)
    straight = trainer(tmp_path / "a", options)
    straight.run()
    run = trainer(tmp_path / "b", options)
    step = run.optimizer.step

    def interrupted() -> None:
        step()
        if run.position.step == 3:
            raise KeyboardInterrupt  # the weights have moved, the position has not

    run.optimizer.step = interrupted  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert checkpoints(run.output)[-1].name == "checkpoint-00000003.pt"
    resumed = trainer(tmp_path / "b", options)
    resumed.run()
    for name, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[name]), name


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "bidirectional"},
        {"pairwise_size": 0},
        {"pairwise_order": 2},
        {"learned_mask": False, "draft_vocab_size": None},
    ],
)
def test_every_kind_of_head_trains(tmp_path: Path, changes: dict[str, object]) -> None:
    run = trainer(tmp_path, tiny_options(steps=2, **changes))
    start = weights(run)
    run.run()
    moved = [name for name, value in weights(run).items() if not torch.equal(value, start[name])]
    assert len(moved) > 0.8 * len(start)
