"""Ablations from end to end on a tiny target, and what their tables say."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from test_plots import png_size
from tiny_checkpoint import write_checkpoint
from training_tiny import tiny_options

from jetflow_train import ablations, cli
from jetflow_train.ablation_report import (
    ablation_text,
    decoded_table,
    difference,
    directions,
    label,
    panels,
    replayed_table,
)
from jetflow_train.ablations import Comparison, Outcome, chosen, held_out_rows, matched_rows, variant_options
from jetflow_train.config import AblateOptions, HeadOptions
from jetflow_train.data import Row, spread
from jetflow_train.variants import VARIANTS

BASE = tiny_options(gamma=4.0, layers=3, taps=5, block_size=10, draft_vocab_size=None)


# -- the variants --------------------------------------------------------------------------------------------------------


def test_a_variant_is_one_change_of_the_base() -> None:
    names = {variant.name for variant in VARIANTS}
    assert len(names) == len(VARIANTS)
    for variant in VARIANTS:
        assert variant.against in names
        assert variant.changes.keys() <= {each.name for each in fields(HeadOptions)}
        other = next(each for each in VARIANTS if each.name == variant.against)
        mine, theirs = variant_options(variant, BASE), variant_options(other, BASE)
        different = [each.name for each in fields(mine) if getattr(mine, each.name) != getattr(theirs, each.name)]
        assert len(different) + (variant.data != other.data) == (variant.name != "base")


def test_variants_are_chosen_by_name_and_data() -> None:
    everything = AblateOptions(corpus=("c.jsonl",))
    assert [each.name for each in chosen(everything, BASE)] == [each.name for each in VARIANTS]
    assert not {"corpus", "matched"} & {each.name for each in chosen(AblateOptions(), BASE)}
    some = chosen(AblateOptions(only=("layers-1", "base")), BASE)
    assert [each.name for each in some] == ["base", "layers-1"]
    # What the base has already is no variant.
    assert "layers-1" not in {each.name for each in chosen(AblateOptions(), replace(BASE, layers=1))}


def row(name: str, prompt: int, temperature: float | None, answer: int = 9) -> Row:
    return Row(name, temperature, (1, prompt), (answer, answer, 2))


def test_matched_rows_answer_the_same_prompts() -> None:
    own = [row(f"a/{i}", i, t) for i in range(8) for t in (0.7, 0.0)]
    other = [row(f"c/{i}", i, None, answer=7) for i in range(3, 20)]
    made = matched_rows(spread(own), spread(other))
    keys = [[each.prompt_key for each in made[kind]] for kind in ("matched", "corpus")]
    assert keys[0] == keys[1]
    assert len(keys[0]) == 5
    assert {each.temperature for each in made["matched"]} == {0.0}
    assert {each.output_ids[0] for each in made["corpus"]} == {7}
    assert matched_rows(own, []) == {}
    with pytest.raises(ValueError, match="the corpus answers none of the regenerated prompts"):
        matched_rows(own, [row("c/0", 50, None)])


def test_only_held_out_greedy_rows_are_compared_on() -> None:
    rows = [row(f"{name}/{i}", i, t) for name in ("a", "b") for i in range(40) for t in (0.0, 0.7)]
    found = held_out_rows(rows, 0.5, 6)
    assert [len(each) for each in found.values()] == [6, 6]
    assert list(found) == ["a", "b"]
    assert {each.temperature for rows in found.values() for each in rows} == {0.0}
    with pytest.raises(ValueError, match="no held-out greedy rows to compare on"):
        held_out_rows(rows, 0.0, 6)


# -- the tables ----------------------------------------------------------------------------------------------------------


def outcome(name: str, passes: int, decoded: list[dict[str, Any]] | None = None) -> Outcome:
    """τ = 2000 / `passes` at budget 8, a tenth more at 32."""
    variant = next(each for each in VARIANTS if each.name == name)
    rounds = {8: [(100, passes // 20)] * 20, 32: [(110, passes // 20)] * 20}
    trained = {"step": 4, "blocks": 32, "elapsed": 1.0, "held_out": {"conditional_kl": 2.5}, "blocks_per_second": 90.0}
    measured = None if decoded is None else {"measurements": decoded}
    return Outcome(variant, variant_options(variant, BASE), trained, {"gsm8k": rounds}, measured)


def test_directions_are_judged_with_their_noise() -> None:
    assert directions([outcome("base", 1000), outcome("reverse-kl", 1200)]) == [
        "loss: loss forward_kl over loss reverse_kl: yes (+0.37 ± 0.00 at budget 32)"
    ]
    assert ": NO (-0.30 ± 0.00" in directions([outcome("base", 1000), outcome("bidirectional", 880)])[0]
    assert directions([outcome("base", 1000), outcome("layers-1", 1200)]) == []
    assert directions([outcome("reverse-kl", 1200)]) == []


def test_the_error_of_a_difference_is_that_of_paired_rows() -> None:
    rows = [(100, 20 + 3 * (i % 7)) for i in range(60)]
    assert difference(rows, rows) == (0.0, 0.0)
    slower = [(tokens, passes + 2 + i % 3) for i, (tokens, passes) in enumerate(rows)]
    change, error = difference(rows, slower)
    assert 0 < 2 * error < change
    backwards, same = difference(slower, rows)
    assert (backwards, same) == (-change, error)


def test_the_table_names_what_is_compared() -> None:
    header, _, first, second = replayed_table([outcome("base", 1000), outcome("layers-1", 1250)]).split("\n")
    assert header == ("| varies | variant | τ at 8 | τ at 32 | Δ at 32 | against | forward KL | blocks | blocks/s |")
    assert first == "| — | base | 2.00 | 2.20 |  |  | 2.50 | 32 | 90 |"
    assert second == "| layers | layers-1 | 1.61 | 1.77 | -0.43 ± 0.00 | base | 2.50 | 32 | 90 |"


def test_labels_say_the_difference_alone() -> None:
    made = {name: outcome(name, 1000) for name in ("base", "gamma-none", "unconditioned", "matched", "corpus")}
    pair = outcome("unconditioned-bidirectional", 1000)
    assert label(made["gamma-none"], made["base"]) == "gamma none"
    assert label(made["base"], made["gamma-none"]) == "gamma 4.0"
    assert label(pair, made["unconditioned"]) == "attention bidirectional"
    assert label(made["corpus"], made["matched"]) == "corpus answers"
    assert label(made["base"], made["matched"]) == "all regenerated rows"
    comparison = Comparison({}, BASE, {}, [*made.values(), pair])
    shown = {panel: list(lines) for panel, lines in panels(comparison).items()}
    assert shown["gamma"] == ["gamma 4.0", "gamma none"]
    assert shown["attention, unconditioned"] == ["attention causal", "attention bidirectional"]
    assert shown["data"] == ["all regenerated rows", "matched answers", "corpus answers"]
    assert list(panels(Comparison({}, BASE, {}, [made["base"]]))) == ["base"]


def test_a_gap_between_decoding_and_replay_is_marked() -> None:
    def measured(tau: float) -> list[dict[str, Any]]:
        return [{"workload": name, "budget": 8, "tau": tau, "predicted": 2.0} for name in ("a", "b")]

    _, _, good, bad = decoded_table(
        [outcome("base", 1000, measured(2.0)), outcome("layers-1", 900, measured(1.0))]
    ).split("\n")
    assert good == "| base | 2.00 (2.00) |  |"
    assert bad == "| layers-1 | 1.00 (2.00) | WARNING: 2 apart by more than 5% |"


def test_the_text_says_what_is_shared() -> None:
    text = ablation_text(Comparison({"cpu": "Some CPU"}, BASE, {"regenerated": 9}, [outcome("base", 1000)]))
    assert "4 steps of 8 blocks, seed 0. Base: block 10, 3 layers, 5 taps, loss forward_kl, gamma 4.0" in text
    assert "Rows: regenerated 9.\ncpu Some CPU." in text
    assert "## Directions" not in text


# -- the command -----------------------------------------------------------------------------------------------------------


def write_rows(folder: Path) -> tuple[str, str]:
    """Regenerated rows and a corpus for the same prompts."""
    own, other = folder / "rows.jsonl", folder / "corpus.jsonl"
    lines: list[str] = []
    corpus: list[str] = []
    for i in range(24):
        prompt = f"w{5 + i} w{30 + i}"
        for temperature in (0.0, 0.7):
            answer = [(7 * i + 3 * j + int(10 * temperature)) % 50 + 4 for j in range(14)]
            made = {
                "id": f"set{i % 2}/{i}",
                "temperature": temperature,
                "prompt_ids": [1, 5 + i, 30 + i, 3],
                "output_ids": answer,
            }
            lines.append(json.dumps(made))
        response = " ".join(f"w{(5 * i + 2 * j) % 50 + 4}" for j in range(12))
        corpus.append(json.dumps({"id": f"set{i % 2}/{i}", "prompt": prompt, "response": response}))
    own.write_text("\n".join(lines) + "\n")
    other.write_text("\n".join(corpus) + "\n")
    return str(own), str(other)


def test_the_command_compares_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_checkpoint(tmp_path / "target")
    own, other = write_rows(tmp_path)
    prompts = tmp_path / "load.jsonl"
    prompts.write_text('{"id": "p/0", "turns": ["w7 w8"]}\n')
    config = tmp_path / "run.toml"
    config.write_text(
        "[head]\nblock_size = 5\nlayers = 1\ntaps = 1\npairwise_size = 8\ndraft_vocab_size = 40\nteacher_top = 8\nanchors = 4\n"
        'blocks = 8\nheld_out = 0.4\ndtype = "float32"\ntarget_dtype = "float32"\nmax_length = 100\n'
    )
    output = tmp_path / "out"
    names = ["base", "reverse-kl", "bidirectional", "matched", "corpus", "layers-2"]
    command = ["ablate", "--config", str(config), "--target", target, "--regenerated", own, "--corpus", other]
    command += ["--output", str(output), "--steps", "3", "--budgets", "4", "12", "--rows", "3", "--row-tokens", "10"]
    command += ["--prompts", str(prompts), "--max-tokens", "8", "--device", "cpu", "--only", *names]

    trained: list[str] = []
    run_training = ablations.run_training

    def counted(trainer: Any, progress: Any) -> Path:
        if trainer.output.name == "layers-2" and len(trained) == 5:
            trained.append("interrupted")
            raise KeyboardInterrupt
        trained.append(trainer.output.name)
        return run_training(trainer, progress)

    monkeypatch.setattr(ablations, "run_training", counted)
    assert cli.main(command) == 130
    assert trained == [*names[:5], "interrupted"]
    assert cli.main(command) == 0
    assert trained[6:] == ["layers-2"]  # what was finished is not trained again
    text = capsys.readouterr().out
    for name in names:
        assert f"| {name} |" in text
        assert (output / name / "head" / "model.safetensors").exists()
        assert (output / name / "head" / "training.json").exists()
        assert not list((output / name).glob("checkpoint*"))
    for line in ("- loss: loss forward_kl over loss reverse_kl", "- data: matched answers over corpus answers"):
        assert line in text
    assert "WARNING" not in text
    # The variants that tap the same layers of the same rows share their features.
    assert sorted(each.name for each in (output / "features").iterdir()) == [
        "corpus-1",
        "matched-1",
        "regenerated-1",
    ]
    assert (output / "ablation.md").read_text().startswith("# Ablation")
    found = json.loads((output / "ablation.json").read_text())
    assert [each["variant"]["name"] for each in found["outcomes"]] == names
    assert found["rows"]["matched"] == found["rows"]["corpus"] == 24
    assert set(found["outcomes"][0]["replayed"]) <= {"set0", "set1"}
    png_size(output / "ablation.png")

    # Other budgets need no training; other steps another folder.
    assert cli.main([*command, "--budgets", "6", "--no-decode"]) == 0
    assert trained[7:] == []
    assert "τ at 6" in (output / "ablation.md").read_text()
    assert cli.main([*command, "--steps", "4"]) == 1
    assert "trained with another steps; name another output folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "base", "taps-3", "--no-decode"], "variant taps-3: 3 taps need a target with at least 6 layers"),
        (["--only", "base", "--prompts", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--only", "base", "--max-tokens", "500"], "max_tokens 500 leaves no room for a prompt in 128 positions"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_trained(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, output = tmp_path / "run.toml", tmp_path / "out"
    config.write_text("[head]\ntaps = 1\ndraft_vocab_size = 40\nteacher_top = 8\n")
    command = ["ablate", "--config", str(config), "--target", write_checkpoint(tmp_path / "target"), "--device", "cpu"]
    assert cli.main([*command, "--regenerated", write_rows(tmp_path)[0], "--output", str(output), *flags]) == 1
    assert capsys.readouterr().err.startswith(f"jetflow-train: {message}")
    assert not output.exists()
