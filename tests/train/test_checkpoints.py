"""Checkpoints survive kills and full disks, the best head is kept, and a head can be trained on."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training_tiny import tiny_model, tiny_options, tiny_rows

from jetflow_train import cli
from jetflow_train import trainer as trainer_module
from jetflow_train.checkpoint import checkpoints, export_head, load_checkpoint
from jetflow_train.data import spread
from jetflow_train.files import sole_use
from jetflow_train.recipe import Progress, new_trainer, run_training
from jetflow_train.trainer import MAIN_BUDGET, Trainer

MODEL = tiny_model()
ROWS = spread(tiny_rows(12))
STEPS = 60
TARGET = Path(__file__).parents[1] / "core" / "golden" / "qwen3"


def trainer(folder: Path, **changes: object) -> Trainer:
    options = replace(tiny_options(**changes), output=str(folder / "run"), features=str(folder / "features"))
    return new_trainer(MODEL, ROWS, options, Progress())


def names(run: Trainer) -> list[str]:
    return [path.name for path in checkpoints(run.output)]


def head_options(folder: Path) -> dict[str, object]:
    """Options of `jetflow-train head` on the tiny checkpoint, and rows for it."""
    rows = folder / "rows.jsonl"
    if not rows.exists():
        made = [
            {
                "id": f"r{i}",
                "temperature": 0.0,
                "prompt_ids": [3, 4 + i],
                "output_ids": [(7 * j + i) % 90 + 3 for j in range(20)],
            }
            for i in range(12)
        ]
        rows.write_text("".join(json.dumps(row) + "\n" for row in made))
    return {
        "target": TARGET, "data": rows, "output": folder / "run", "device": "cpu", "dtype": "float32", "steps": STEPS,
        "block-size": 4, "layers": 1, "taps": 1, "pairwise-size": 8, "draft-vocab-size": "none", "teacher-top": 8,
        "anchors": 4, "blocks": 8, "held-out": 0.2,
    }  # fmt: skip


def flags(options: dict[str, object]) -> list[str]:
    return ["head", *(text for key, value in options.items() for text in (f"--{key}", str(value)))]


# -- the files --------------------------------------------------------------------------------------------------------


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=5, keep=3, checkpoint_minutes=0.0)
    run.run()
    assert names(run) == [f"checkpoint-0000000{step}.pt" for step in (3, 4, 5)]
    run.position = replace(run.position, step=6)
    (run.output / "checkpoint-00000004.pt.partial").write_text("what a kill left")
    run.save()
    assert names(run) == [f"checkpoint-0000000{step}.pt" for step in (4, 5, 6)]
    assert not list(run.output.glob("*.partial"))


def test_an_earlier_checkpoint_resumes_too(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=5, checkpoint_minutes=0.0)
    run.run()
    final = {name: p.clone() for name, p in run.head.named_parameters()}
    checkpoints(run.output)[-1].unlink()
    again = trainer(tmp_path, steps=5)
    again.run()
    for name, value in again.head.named_parameters():
        assert torch.equal(value, final[name]), name


@contextmanager
def file_limit(size: int) -> Generator[None]:
    """Writes beyond `size` bytes of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits")
def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=2)
    run.run()
    (before,) = checkpoints(run.output)
    content = before.read_bytes()
    run = trainer(tmp_path, steps=4)
    run.resume()
    run.step()
    with (
        file_limit(len(content) // 2),
        pytest.raises(
            ValueError,
            match=r"checkpoint-00000003\.pt: cannot write the checkpoint .*; what was saved before is intact",
        ),
    ):
        run.save()
    assert [path.name for path in run.output.glob("checkpoint*")] == [before.name]
    assert before.read_bytes() == content
    resumed = trainer(tmp_path, steps=4)
    assert resumed.resume()
    assert resumed.position.step == 2


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits")
def test_a_full_disk_leaves_the_earlier_head(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=2)
    run.run()
    head = run.output / "head"
    before = {path.name: path.read_bytes() for path in head.iterdir()}
    with file_limit(1000), pytest.raises(ValueError, match="cannot write"):
        export_head(head, run.head)
    assert {path.name: path.read_bytes() for path in head.iterdir()} == before
    assert not (run.output / "head.partial").exists()


def test_the_best_head_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taus = iter([1.5, 2.5, 2.0])
    monkeypatch.setattr(trainer_module, "replayed_tau", lambda *_: dict.fromkeys((8, MAIN_BUDGET), next(taus)))
    run = trainer(tmp_path, steps=3, evaluate_minutes=0.0, checkpoint_minutes=0.0)
    at_step: list[dict[str, Any]] = []

    def stop(current: Trainer, record: dict[str, Any] | None) -> None:
        if record is not None and "replayed_tau" in record:
            at_step.append(load_file(current.output / "head" / "model.safetensors"))
            if len(at_step) == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.run(stop)
    resumed = trainer(tmp_path, steps=3, evaluate_minutes=1e9)
    resumed.run()
    assert resumed.position.best_tau == 2.5  # which the resumed run knows of, or its own 2.0 would have won
    best, last = (load_file(resumed.output / name / "model.safetensors") for name in ("best", "head"))
    assert all(torch.equal(best[name], at_step[1][name]) for name in best)
    assert any(not torch.equal(best[name], last[name]) for name in best)


# -- kills ------------------------------------------------------------------------------------------------------------


KILLED = """
import os, signal, sys
from jetflow_train import checkpoint, cli
replace, calls = checkpoint.replace_file, 0

def killed(path, content):
    global calls
    calls += 1
    if calls == 30:
        path.with_name(path.name + ".partial").write_bytes(content[: len(content) // 2])
        (path.parent / "metrics.jsonl").open("a").write('{"step": 29, "lo')
        os.kill(os.getpid(), signal.SIGKILL)
    replace(path, content)

checkpoint.replace_file = killed
cli.main(sys.argv[1:])
"""


def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    """SIGKILL in the middle of writing a checkpoint, and of a line of the metrics."""
    undisturbed, killed = tmp_path / "a", tmp_path / "b"
    for folder in (undisturbed, killed):
        folder.mkdir()
    assert cli.main(flags(head_options(undisturbed))) == 0
    process = subprocess.run(
        [sys.executable, "-c", KILLED, *flags(head_options(killed) | {"checkpoint-minutes": 0})],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert [path.name for path in checkpoints(killed / "run")] == ["checkpoint-00000028.pt", "checkpoint-00000029.pt"]
    assert (killed / "run" / "checkpoint-00000030.pt.partial").exists()
    assert cli.main(flags(head_options(killed))) == 0
    first, second = (load_file(folder / "run" / "head" / "model.safetensors") for folder in (undisturbed, killed))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    masters = [torch.load(checkpoints(folder / "run")[-1], weights_only=True) for folder in (undisturbed, killed)]
    assert masters[0]["position"] | {"elapsed": 0} == masters[1]["position"] | {"elapsed": 0}
    assert all(torch.equal(masters[0]["head"][name], masters[1]["head"][name]) for name in masters[0]["head"])
    lines = [(folder / "run" / "metrics.jsonl").read_text().splitlines() for folder in (undisturbed, killed)]
    assert [json.loads(line)["step"] for line in lines[1]] == [20, 49, STEPS]  # 20 steps after 29, and the end
    assert [json.loads(line)["step"] for line in lines[0]] == [20, 40, STEPS, STEPS]


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=2)
    with sole_use(run.output), pytest.raises(ValueError, match="run: another run is writing here"):
        run.run()
    assert not checkpoints(run.output)
    run.run()
    assert names(run) == ["checkpoint-00000002.pt"]


def test_metrics_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    run = trainer(tmp_path, steps=2)
    (run.output / "metrics.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"metrics\.jsonl: cannot write the metrics .*the same command goes on"):
        run.run()


# -- a checkpoint that does not belong --------------------------------------------------------------------------------


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write the checkpoint at `path` anew with a `change`."""
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: state["position"].pop("cursor"), "'cursor'"),
        (lambda state: state.update(position=[1]), "not one of a training run"),
        (lambda state: state.update(options="x"), "not one of a training run"),
        (lambda state: state.update(optimizer={}), "'param_groups'"),
        (lambda state: state.update(optimizer={"state": {}, "param_groups": []}), "parameter groups"),
        (lambda state: state.update(acceptance=[]), "not one of a training run"),
    ],
)
def test_a_checkpoint_with_a_part_missing_is_named(tmp_path: Path, change: Any, reason: str) -> None:
    trainer(tmp_path, steps=2).run()
    (path,) = checkpoints(tmp_path / "run")
    changed(path, change)
    with pytest.raises(ValueError, match=rf"000002\.pt: cannot read this checkpoint \(.*{reason}.*\); delete it"):
        trainer(tmp_path, steps=3).run()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"text"])
def test_what_is_wrong_with_a_checkpoint_is_said_in_a_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "checkpoint-00000002.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"pt: cannot read this checkpoint \(.+\); delete it") as caught:
        load_checkpoint(path)
    assert "weights_only" not in str(caught.value)  # how to switch torch's safety off is no remedy
    assert len(str(caught.value)) < len(str(path)) + 200


def test_another_target_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    options = replace(tiny_options(steps=2, online=True), output=str(tmp_path / "run"))
    new_trainer(MODEL, ROWS, options, Progress()).run()
    other = new_trainer(tiny_model(seed=5), ROWS, options, Progress())
    with pytest.raises(ValueError, match=r"that run had target's table = .*; name another output folder"):
        other.run()
    (path,) = checkpoints(tmp_path / "run")
    changed(path, lambda state: state["options"].pop("target's table"))  # as earlier versions wrote it
    assert other.resume()


def test_fewer_rows_than_before_are_refused(tmp_path: Path) -> None:
    options = replace(tiny_options(steps=2, online=True, draft_vocab_size=None), output=str(tmp_path / "run"))
    new_trainer(MODEL, ROWS, options, Progress()).run()
    fewer = new_trainer(MODEL, ROWS[:5], replace(options, steps=4), Progress())
    with pytest.raises(ValueError, match=r"that run had 12 rows, this one has 5; give it the same data"):
        fewer.run()


# -- a head to start from ---------------------------------------------------------------------------------------------


def test_a_head_is_trained_on(tmp_path: Path) -> None:
    first = trainer(tmp_path, steps=3)
    first.run()
    head = first.output / "head"
    further = trainer(tmp_path, steps=3, init=str(head), output="elsewhere")
    assert further.head.draft_vocab is not None
    assert first.head.draft_vocab is not None
    assert torch.equal(further.head.draft_vocab, first.head.draft_vocab)
    stored = load_file(head / "model.safetensors")
    assert torch.equal(further.head.fc.dense, stored["fc.weight"].float())
    moved = {name: p.detach().clone() for name, p in further.head.named_parameters() if p.requires_grad}
    assert moved.keys() == {name for name, p in first.head.named_parameters() if p.requires_grad}
    further.step()
    assert all(not torch.equal(p, moved[name]) for name, p in further.head.named_parameters() if name in moved)


def trained_on(tmp_path: Path, **changes: object) -> tuple[Trainer, Trainer]:
    """A training that goes on from a head with `changes`, and one that goes on from it as it is."""
    first = trainer(tmp_path, steps=3)
    first.run()
    init = str(first.output / "head")
    return trainer(tmp_path, steps=3, init=init, output="elsewhere", **changes), trainer(
        tmp_path, steps=3, init=init, output="same"
    )


def test_second_order_goes_on_from_first_order_as_if_nothing_had_changed(tmp_path: Path) -> None:
    second, same = trained_on(tmp_path, pairwise_order=2)
    hidden, tokens = torch.randn(4, 32), torch.arange(4)
    assert torch.equal(
        second.head.condition(hidden, tokens, tokens + 9), same.head.condition(hidden, tokens, tokens + 20)
    )
    second.step()
    assert second.head.pairwise is not None
    assert second.head.pairwise.before is not None
    assert second.head.pairwise.before.dense.any()


def test_wider_conditioning_goes_on_from_a_narrower_one_as_if_nothing_had_changed(tmp_path: Path) -> None:
    wider, same = trained_on(tmp_path, pairwise_size=13)
    hidden, tokens = torch.randn(4, 32), torch.arange(4)
    corrected = same.head.condition(hidden, tokens, tokens + 20)
    assert not torch.equal(corrected, hidden)
    torch.testing.assert_close(wider.head.condition(hidden, tokens, tokens + 20), corrected)
    wider.step()
    assert wider.head.pairwise is not None
    assert wider.head.pairwise.down.dense[:, 8:].any(), "new units learn"


def test_a_head_of_another_target_is_a_beginning_that_is_told_of(tmp_path: Path) -> None:
    options = replace(tiny_options(steps=1, online=True), output=str(tmp_path / "run"))
    progress = Progress()
    head = run_training(new_trainer(MODEL, ROWS, options, progress), progress)
    notes: list[str] = []
    further = replace(options, init=str(head), output=str(tmp_path / "further"))
    new_trainer(MODEL, ROWS, further, Progress(note=notes.append))
    assert not notes
    new_trainer(tiny_model(seed=5), ROWS, further, Progress(note=notes.append))
    assert notes == [f"note: init {head} was trained for another target, demo model"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pairwise_size": 4}, r"that head has pairwise_size = 8, this run makes 4"),
        ({"layers": 3}, r"that head has num_layers = 2, this run makes 3"),
        ({"block_size": 7}, r"that head has block_size = 5, this run makes 7"),
        ({"attention": "bidirectional"}, r"that head has causal = True, this run makes False"),
        ({"draft_vocab_size": None}, r"that head has draft_vocab_size = 40, this run makes None"),
        ({"mask_token_id": 5}, r"that head has mask_token_id = 60, this run makes 5"),
    ],
)
def test_a_head_of_another_shape_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    run = trainer(tmp_path, steps=1)
    run.save()
    with pytest.raises(ValueError, match=rf"init .*head: {message}"):
        trainer(tmp_path, steps=1, init=str(run.output / "head"), **changes)


def test_another_draft_vocabulary_is_another_run(tmp_path: Path) -> None:
    trainer(tmp_path, steps=1).save()
    other = replace(tiny_options(steps=1), output=str(tmp_path / "run"), features=str(tmp_path / "more"))
    rows = spread(tiny_rows(12, seed=5))
    with pytest.raises(ValueError, match="had draft vocabulary"):
        new_trainer(MODEL, rows, other, Progress()).resume()


# -- mistakes of the command line -------------------------------------------------------------------------------------


def refused(folder: Path, capsys: pytest.CaptureFixture[str], **changes: object) -> str:
    assert cli.main(flags(head_options(folder) | {key.replace("_", "-"): value for key, value in changes.items()})) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(tmp_path / "other", steps=1)
    run.save()
    error = refused(tmp_path, capsys, init=run.output / "head")
    assert "num_target_layers = 6, this run makes 3" in error
    assert "vocab_size is 97" in refused(tmp_path, capsys, mask_token_id=97)
    (tmp_path / "file").write_text("in the way")
    error = refused(tmp_path, capsys, output=tmp_path / "file", target="/nowhere")  # seen before the target is read
    assert "file: cannot write the output folder" in error
    assert "config.json: no such file" in refused(tmp_path, capsys, init=tmp_path)
    masked = tmp_path / "masked.jsonl"
    masked.write_text('{"id": "a", "temperature": 0.0, "prompt_ids": [3, 4], "output_ids": [5]}\n')
    assert "every row is masked" in refused(tmp_path, capsys, data=masked)
