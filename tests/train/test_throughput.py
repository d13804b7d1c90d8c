"""The plain loop that training speed is held to minimises the same loss; the command measures both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from training_tiny import tiny_head, tiny_model, tiny_options, tiny_rows

from jetflow_train import cli
from jetflow_train.data import spread
from jetflow_train.features import build_features
from jetflow_train.heads import target_tables
from jetflow_train.throughput import PlainTrainer, summarise_speeds
from jetflow_train.trainer import Trainer

TARGET = Path(__file__).parents[1] / "core" / "golden" / "qwen3"


@pytest.mark.parametrize("changes", [{}, {"pairwise_size": 0}, {"teacher_temperature": 0.5}])
def test_the_plain_loop_has_the_same_loss_and_gradient(tmp_path: Path, changes: dict[str, object]) -> None:
    model, rows = tiny_model(), spread(tiny_rows(8))
    changes |= {"draft_vocab_size": None, "truncate": False, "blocks": 12}
    gradients: list[dict[str, torch.Tensor]] = []
    losses: list[float] = []
    for kind in (Trainer, PlainTrainer):
        head = tiny_head(model, rows, **changes)
        options = tiny_options(output=str(tmp_path / "run"), **changes)
        store = build_features(tmp_path / "features", model, rows, head.config.target_layer_ids, options.teacher_top)
        run = kind(head, target_tables(model), store, rows, options)
        batch = run.pack(run.order.draw(run.position)[0])
        conditional, marginal, _ = run.losses(batch)
        losses.append(float((conditional + marginal).detach()))
        run.step()
        gradients.append({name: p.grad for name, p in head.named_parameters() if p.grad is not None})
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_speeds_are_medians_and_ratios_are_taken_turn_by_turn() -> None:
    plain, fused = summarise_speeds({"plain": [2.0, 4.0, 8.0], "fused": [1.0, 1.0, 8.0]}, 16)
    assert (plain.blocks_per_second, plain.ratio) == (4.0, 1.0)
    assert (fused.blocks_per_second, fused.ratio) == (16.0, 2.0)


def test_the_command_prints_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    made = [
        {"id": f"r{i}", "temperature": 0.0, "prompt_ids": [3, 4 + i], "output_ids": list(range(9, 30))}
        for i in range(6)
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in made))
    config = tmp_path / "run.toml"
    config.write_text(
        "[head]\nblock_size = 4\nlayers = 1\ntaps = 1\npairwise_size = 8\ndraft_vocab_size = 40\nteacher_top = 8\n"
        "anchors = 4\nblocks = 8\n"
    )
    folder = tmp_path / "out"
    flags = ["--target", str(TARGET), "--device", "cpu", "--data", str(rows), "--output", str(folder)]
    assert cli.main(["throughput", "--config", str(config), *flags, "--rounds", "2", "--steps", "1"]) == 0
    text = capsys.readouterr().out
    plain, fused, ours, facts = text.strip().splitlines()[-4:]
    assert plain.startswith("plain loop")
    assert plain.endswith(" 1.00x")
    assert "blocks/s" in fused
    assert ours.startswith("fused loss, draft vocabulary, cut blocks")
    assert "dtype" in facts
