"""The command line: every option a flag and a TOML key, mistakes in one line, an interrupt that says how to go on."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from jetflow_train import cli
from jetflow_train.config import EvaluateOptions, HeadOptions, RegenerateOptions, load_options

KNOBS = {
    RegenerateOptions: "target prompts output suffix suffix_files limit temperature max_tokens max_length batch_size seed "
    "head budget",
    HeadOptions: "target data output features max_length held_out block_size layers intermediate_size attention taps "
    "pairwise_size draft_vocab_size mask_token_id learned_mask gamma truncate marginal_weight teacher_top "
    "teacher_temperature minutes steps anchors blocks learning_rate warmup final_rate weight_decay clip seed "
    "checkpoint_minutes evaluate_minutes",
    EvaluateOptions: "target head prompts budgets limit max_tokens output",
}


@pytest.mark.parametrize("kind", KNOBS)
def test_the_knobs(kind: type[Any]) -> None:
    assert [each.name for each in fields(kind)] == KNOBS[kind].split()


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_option_is_a_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    for each in fields(cli.COMMANDS[command]):
        assert "--" + each.name.replace("_", "-") in text


def captured(monkeypatch: pytest.MonkeyPatch, name: str, result: object) -> list[Any]:
    seen: list[Any] = []

    def call(options: object, *rest: object) -> object:
        seen.append(options)
        return result

    monkeypatch.setattr(cli, name, call)
    return seen


def test_flags_win_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[head]\nsteps = 9\ngamma = "none"\ndata = ["a.jsonl"]\nlearning_rate = 1\nlayers = 4\n')
    seen = captured(monkeypatch, "train_head", Path("head"))
    flags = ["--layers", "2", "--minutes", "3", "--draft-vocab-size", "none", "--no-truncate", "--data", "b", "c"]
    assert cli.main(["head", "--config", str(file), *flags]) == 0
    options = seen[0]
    assert (options.minutes, options.steps, options.layers) == (3.0, None, 2)
    assert (options.gamma, options.draft_vocab_size, options.truncate) == (None, None, False)
    assert (options.data, options.learning_rate) == (("b", "c"), 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[head]\nsteps = 1\nlayer = 3\n", r"\[head\] has an unknown key 'layer'"),
        ("[train]\n", r"section \[train\] is unknown"),
        ('[head]\nsteps = "9"\n', r"\[head\] steps: expected int, found '9'"),
        ("[head]\nsteps = 1\ndata = 3\n", r"\[head\] data: expected a list"),
        ("[head\n", "cannot read this configuration"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_options(HeadOptions, file, {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "length of the run as either minutes or steps"),
        (["--steps", "3", "--minutes", "1"], "length of the run as either minutes or steps"),
        (["--steps", "3", "--attention", "sideways"], "attention 'sideways' is unknown"),
        (["--steps", "3", "--held-out", "1"], "held_out 1.0"),
        (["--steps", "3", "--blocks", "0"], "blocks 0 must be at least 1"),
        (["--steps", "3", "--learning-rate", "0"], "learning_rate 0.0 must be positive"),
        (["--steps", "3", "--target", "/nowhere"], "/nowhere"),
    ],
)
def test_mistakes_end_in_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["head", *flags]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("jetflow-train: ")
    assert "Traceback" not in error


def test_an_interrupt_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "regenerate", interrupt)
    assert cli.main(["regenerate"]) == 130
    assert "the same command goes on from here" in capsys.readouterr().err


def test_without_a_command_the_whole_recipe_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def recipe(*options: Any) -> tuple[list[Any], list[Any], Path]:
        seen.extend(options)
        return [], [], Path("somewhere/head")

    monkeypatch.setattr(cli, "run_recipe", recipe)
    assert cli.main(["--output", str(tmp_path), "--minutes", "2"]) == 0
    regenerating, training, evaluating, _ = seen
    assert (training.minutes, training.steps, training.output) == (2.0, None, str(tmp_path))
    assert training.data == (regenerating.output,) == (f"{tmp_path}/rows.jsonl",)
    assert evaluating.head == f"{tmp_path}/head"
    assert "jetflow-serve generate --head somewhere/head" in capsys.readouterr().out
