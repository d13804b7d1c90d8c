"""The command line: every option a flag and a TOML key, mistakes in one line, an interrupt that says how to go on."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from report_samples import evaluation
from safetensors.torch import load_file
from tiny_checkpoint import GOLDEN, write_checkpoint, write_prompts

from jetflow_train import cli
from jetflow_train.config import (
    AblateOptions,
    EvaluateOptions,
    HeadOptions,
    RegenerateOptions,
    ThroughputOptions,
    load_options,
    section_name,
)
from jetflow_train.evaluate import Evaluation

KNOBS = {
    RegenerateOptions: "target device prompts output suffix suffix_files limit temperature samples top_p top_k thinking "
    "max_tokens max_length batch_size seed head budget endpoint endpoint_api endpoint_model api_key_file retries timeout",
    HeadOptions: "target device dtype data output features online target_dtype max_length held_out kind block_size layers "
    "intermediate_size attention taps pairwise_size pairwise_order draft_vocab_size mask_token_id init learned_mask loss gamma "
    "truncate d_pace prefix marginal_weight teacher_top teacher_temperature draft_temperature minutes steps anchors blocks "
    "accumulate learning_rate warmup final_rate weight_decay clip seed checkpoint_minutes keep evaluate_minutes tensorboard",
    EvaluateOptions: "target device head prompts budgets limit max_tokens output",
    ThroughputOptions: "target device data rows output rounds steps",
    AblateOptions: "target device regenerated corpus output only steps minutes budgets rows row_tokens decode prompts limit "
    "max_tokens",
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
    monkeypatch.setattr(cli, "plot_line", lambda folder: f"plot of {folder}")
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
        ("head = 3\n", r"run\.toml: head must be a section: write \[head\] above its keys"),
        ("[[head]]\nsteps = 1\n", "head must be a section"),
        ("[head]\nsteps = 1\nblock-size = 3\n", "unknown key 'block-size'; keys are the flags .* with _ for -"),
        ("[head]\nsteps = 1\ndata = []\n", "data is an empty list; give at least one"),
        ("[head]\nsteps = 1\nwarmup = nan\n", "warmup nan must lie between 0 and 1"),
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
        (["--steps", "0"], "steps 0 must be positive"),
        (["--minutes", "nan"], "minutes nan must be positive"),
        (["--steps", "3", "--seed", "-1"], "seed -1 must lie between"),
        (["--steps", "3", "--target", "/nowhere"], "/nowhere"),
        (["--minutes", "inf"], "minutes inf must be positive and at most 1e+09"),
        (["--steps", "3", "--gamma", "nan"], "gamma nan must be positive"),
        (["--steps", "3", "--clip", "nan"], "clip nan must be positive"),
        (["--steps", "3", "--learning-rate", "inf"], "learning_rate inf must be positive and at most 1"),
        (["--steps", "3", "--warmup", "1.5"], "warmup 1.5 must lie between 0 and 1"),
        (["--steps", "3", "--final-rate", "nan"], "final_rate nan must lie between 0 and 1"),
        (["--steps", "3", "--weight-decay", "-1"], "weight_decay -1.0 must lie between 0 and"),
        (["--steps", "3", "--marginal-weight", "nan"], "marginal_weight nan must lie between 0 and"),
        (["--steps", "3", "--checkpoint-minutes", "nan"], "checkpoint_minutes nan must be at least 0"),
        (["--steps", "3", "--evaluate-minutes", "-1"], "evaluate_minutes -1.0 must be at least 0"),
        (["--steps", "3", "--teacher-temperature", "0"], "teacher_temperature 0.0 must lie between 0.01 and 100"),
        (["--steps", "3", "--draft-temperature", "1e300"], "draft_temperature 1e+300 must lie between 0.01 and 100"),
        (["--steps", "3", "--max-length", "1"], "max_length 1 must be at least 2"),
        (["--steps", "3", "--intermediate-size", "0"], "intermediate_size 0 must be at least 1"),
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


@pytest.mark.parametrize("before", [True, False])
def test_the_file_may_be_named_before_the_command(
    before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text("[head]\nsteps = 9\n")
    seen = captured(monkeypatch, "train_head", Path("head"))
    config = ["--config", str(tmp_path / "run.toml")]
    assert cli.main([*config, "head"] if before else ["head", *config]) == 0
    assert seen[0].steps == 9


@pytest.mark.parametrize("option", ["output", "target", "device", "minutes"])
@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_recipes_options_do_not_go_before_a_command(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([f"--{option}", "3", command]) == 1
    assert f"--{option} before {command} is an option of the whole recipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(13, "Permission denied", "metrics.jsonl"), "Permission denied: 'metrics.jsonl'"),
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), "CUDA out of memory.; use fewer blocks"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes\nmore"), "9 bytes; use fewer blocks"),
        (MemoryError(), "out of memory; use fewer blocks"),
    ],
)
def test_trouble_on_the_way_ends_in_one_line(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "train_head", fail)
    assert cli.main(["head", "--steps", "1"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("jetflow-train: ")
    assert message in text
    assert text.count("\n") == 1


def test_a_target_that_cannot_be_asked_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("evaluate", "regenerate"):
        assert cli.main([command, "--target", str(GOLDEN)]) == 1
        assert "golden/qwen3: this target has no tokenizer.json" in capsys.readouterr().err


def test_a_terminal_without_greek_letters_ends_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jetflow_train", "evaluate", "--help"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Measure ? and tokens/s" in done.stdout


def test_a_cpus_allocator_is_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.uint8)
    assert cli._is_out_of_memory(caught.value)  # pyright: ignore[reportPrivateUsage]


def test_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(cli, "train_head", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        cli.main(["head", "--steps", "1"])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("regenerate --limit 0", "limit 0 must be at least 1"),
        ("regenerate --max-length 1", "max_length 1 must be at least 2"),
        ("regenerate --budget -1", "budget -1 must be at least 0"),
        ("regenerate --timeout inf", "timeout inf must be positive and at most 1e+06"),
        ("evaluate --limit -1", "limit -1 must be at least 1"),
        ("evaluate --max-tokens 0", "max_tokens 0 must be at least 1"),
        ("evaluate --budgets 8 -1", "budgets [8, -1]: each must be at least 0 nodes"),
        ("ablate --minutes 0", "minutes 0.0 must be positive"),
        ("ablate --max-tokens 1", "max_tokens 1 must be at least 2"),
        ("throughput --rows 0", "rows 0 must be at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused_at_once(
    command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command.split()) == 1
    assert capsys.readouterr().err.startswith(f"jetflow-train: {message}")


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        (RegenerateOptions, "temperature"),
        (EvaluateOptions, "budgets"),
        (AblateOptions, "regenerated"),
        (ThroughputOptions, "data"),
    ],
)
def test_an_empty_list_is_refused(tmp_path: Path, kind: type[Any], key: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[{section_name(kind)}]\n{key} = []\n")
    with pytest.raises(ValueError, match=f"{key} is an empty list"):
        load_options(kind, file, {})


def test_a_head_without_its_plot_is_still_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "can_plot", lambda: True)
    (tmp_path / "metrics.jsonl").write_text('{"lines": "of something else"}\n')
    assert cli.plot_line(tmp_path).startswith(f"no plot: {tmp_path}/metrics.jsonl, line 1: not the metrics")
    monkeypatch.setattr(cli, "can_plot", lambda: False)
    assert "matplotlib" in cli.plot_line(tmp_path)


def test_without_a_command_the_whole_recipe_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def recipe(*options: Any) -> tuple[Evaluation, Evaluation, Path]:
        seen.extend(options)
        return evaluation(1.0), evaluation(2.0), Path("somewhere/head")

    monkeypatch.setattr(cli, "run_recipe", recipe)
    monkeypatch.setattr(cli, "plot_line", lambda folder: f"plot of {folder}")
    assert cli.main(["--output", str(tmp_path), "--minutes", "2", "--device", "cpu"]) == 0
    regenerating, training, evaluating, _ = seen
    assert {each.device for each in seen[:3]} == {"cpu"}
    assert (training.target, training.mask_token_id) == (None, 16)
    assert (training.minutes, training.steps, training.output) == (2.0, None, str(tmp_path))
    assert training.data == (regenerating.output,) == (f"{tmp_path}/rows.jsonl",)
    assert evaluating.head == f"{tmp_path}/head"
    text = capsys.readouterr().out
    assert "jetflow-serve generate --head somewhere/head" in text
    assert "plot of somewhere\n" in text
    assert "τ untrained" in text


def test_an_ablation_changes_the_head_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[head]\nlayers = 2\nminutes = 3\n[ablate]\nsteps = 30\nonly = ["base", "layers-1"]\n')
    options, base = cli.with_head(AblateOptions, file, {"corpus": ("c.jsonl",)})
    assert (options.only, options.corpus, options.steps) == (("base", "layers-1"), ("c.jsonl",), 30)
    assert (base.layers, base.gamma, base.mask_token_id, base.steps) == (2, 4.0, 16, 30)
    options, base = cli.with_head(AblateOptions, file, {"target": "org/other"})
    assert (options.target, base.mask_token_id) == ("org/other", None)
    file.write_text('[head]\ntarget = "org/a"\n[ablate]\ntarget = "org/b"\n')
    with pytest.raises(ValueError, match=r"\[head\] org/a, \[ablate\] org/b"):
        cli.with_head(AblateOptions, file, {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "steps 0 must be at least 1"),
        (["--budgets", "0", "8"], "budgets [0, 8]: at least one, each of at least 1 node"),
        (["--only", "sideways"], "variant 'sideways' is unknown: there are base, reverse-kl"),
        (["--only", "corpus"], "variant 'corpus' needs answers that are not the target's own: give --corpus"),
    ],
)
def test_mistakes_in_an_ablation_end_in_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ablate", *flags]) == 1
    assert capsys.readouterr().err.startswith(f"jetflow-train: {message}")


def recipe_of(folder: Path, text: str, **flags: Any) -> tuple[RegenerateOptions, HeadOptions, EvaluateOptions]:
    file = folder / "run.toml"
    file.write_text(text)
    return cli.recipe_options(file, flags)


def test_a_target_named_once_is_the_whole_recipes(tmp_path: Path) -> None:
    for section in cli.PARTS:
        parts = recipe_of(tmp_path, f'[{section}]\ntarget = "org/other"\n')
        assert [each.target for each in parts] == ["org/other"] * 3
        assert parts[1].mask_token_id is None  # the demo's id is an ordinary token elsewhere
    parts = recipe_of(tmp_path, '[head]\ntarget = "org/other"\nmask_token_id = 5\n')
    assert parts[1].mask_token_id == 5


def test_two_targets_are_refused_unless_a_flag_decides(tmp_path: Path) -> None:
    text = '[head]\ntarget = "org/a"\n[evaluate]\ntarget = "org/b"\n'
    with pytest.raises(ValueError, match=r"\[head\] org/a, \[evaluate\] org/b"):
        recipe_of(tmp_path, text)
    assert {each.target for each in recipe_of(tmp_path, text, target="org/c")} == {"org/c"}


def test_places_in_the_file_are_kept_and_followed(tmp_path: Path) -> None:
    regenerating, training, evaluating = recipe_of(
        tmp_path, '[regenerate]\noutput = "r.jsonl"\n[head]\noutput = "run"\n[evaluate]\noutput = "e.json"\n'
    )
    assert (regenerating.output, training.data, training.output) == ("r.jsonl", ("r.jsonl",), "run")
    assert (evaluating.head, evaluating.output) == ("run/head", "e.json")
    regenerating, training, evaluating = recipe_of(
        tmp_path, '[head]\ndata = ["a.jsonl"]\noutput = "run"\n[evaluate]\nhead = "h"\n', output="here"
    )
    assert (regenerating.output, training.data, training.output) == ("here/rows.jsonl", ("a.jsonl",), "here")
    assert evaluating.head == "h"


# -- the whole recipe ---------------------------------------------------------------------------------------------------

RECIPE = """
[regenerate]
prompts = ["{prompts}"]
max_tokens = 16
[head]
steps = 3
taps = {taps}
layers = 1
block_size = 4
pairwise_size = 8
draft_vocab_size = "none"
teacher_top = 8
anchors = 4
blocks = 8
held_out = 0.2
[evaluate]
prompts = ["{prompts}"]
limit = 2
max_tokens = 8
budgets = [0, 4]
"""


def test_the_whole_recipe_from_prompts_to_a_head_and_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, prompts = write_checkpoint(tmp_path / "target"), write_prompts(tmp_path / "load.jsonl", 12)
    config, output = tmp_path / "run.toml", tmp_path / "out"
    command = ["--config", str(config), "--target", target, "--output", str(output), "--device", "cpu"]
    config.write_text(RECIPE.format(prompts=prompts, taps=5))
    assert cli.main(command) == 1
    assert "5 taps need a target with at least 8 layers" in capsys.readouterr().err
    config.write_text(RECIPE.format(prompts=prompts, taps=1) + 'output = "nowhere/results.json"\n')
    assert cli.main(command) == 1
    assert "nowhere/results.json: cannot write the results" in capsys.readouterr().err
    assert not output.exists()  # both are said before the prompts are answered
    config.write_text(RECIPE.format(prompts=prompts, taps=1))
    for _ in range(2):  # the second time everything is there but the measures
        assert cli.main(command) == 0
        text = capsys.readouterr().out
        header, _, plain, drafted = text[text.index("workload") :].splitlines()[:4]
        for column in ("τ untrained", "speed-up untrained", "τ predicted", "plain tokens/s", "speed-up", "same text"):
            assert column in header
        assert plain.split()[:2] == ["load", "0"]
        assert drafted.split()[:2] == ["load", "4"]
        assert drafted.split()[-1] == "2/2"
        assert f"head: {output / 'head'}\n" in text
        assert "WARNING" not in text
    assert len((output / "rows.jsonl").read_text().splitlines()) == 12
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-00000003.pt"]
    assert load_file(output / "head" / "model.safetensors")
