"""What a report says: τ beside its prediction, a plain line where they part, and what a head was trained on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from report_samples import evaluation
from training_tiny import features_of, tiny_head, tiny_model, tiny_options, tiny_rows

from jetflow_core.config import default_tap_layers
from jetflow_train.blocks import BlockRules
from jetflow_train.data import Row
from jetflow_train.heads import target_mark
from jetflow_train.record import dataset_of, read_record, training_record, write_record
from jetflow_train.report import FORCED_TOLERANCE, TOLERANCE, evaluation_report, markdown_table, notes, warnings
from jetflow_train.simulate import answer_features, head_rules, replayed_tau

TRAINING: dict[str, Any] = {
    "data": {"gsm8k": {"rows": 90, "held_out": 3, "tokens": 9000}, "ifeval": {"rows": 7, "held_out": 0, "tokens": 700}},
    "template_variants": ["", '{"enable_thinking": false}'],
    "results": {"step": 50, "blocks": 4800, "replayed_tau": {"8": 2.5}},
}


@given(st.floats(1, 9), st.floats(1, 9))
def test_a_gap_beyond_the_tolerance_is_a_warning(measured: float, predicted: float) -> None:
    lines = warnings(evaluation(measured, predicted))
    assert len(lines) == (abs(measured - predicted) > TOLERANCE * predicted)
    if lines:
        assert lines[0].startswith(f"WARNING: gsm8k, budget 8: measured τ {measured:.2f}, but {predicted:.2f} replayed")
        assert "\n" not in lines[0]


def test_the_classical_bug_is_seen_at_once() -> None:
    """Good accuracy in training, acceptance 1.0 in serving, and a replay that shares the serving bug."""
    text = evaluation_report(evaluation(1.0, forced=2.4))
    assert "measured τ 1.00, but teacher-forced accuracy promises a chain of 2.40" in text
    assert not warnings(evaluation(2.4 * (1 - FORCED_TOLERANCE) + 1e-9, forced=2.4))


def test_a_tree_smaller_than_a_chain_is_not_held_to_it() -> None:
    made = evaluation(1.2, forced=2.4)
    assert warnings(made)
    small = replace(made, measurements=[replace(each, budget=each.budget // 4) for each in made.measurements])
    assert [each.budget for each in small.measurements] == [0, 2]
    assert not warnings(small)


def test_a_head_of_another_target_is_a_warning() -> None:
    trained = TRAINING | {"target": "org/other", "target_mark": "other"}
    made = evaluation(2.0, training=trained)
    made = replace(made, facts=made.facts | {"target_mark": "this"})
    (line,) = warnings(made)
    assert line.startswith("WARNING: this head was trained for another target, org/other")
    assert not warnings(replace(made, facts=made.facts | {"target_mark": "other"}))
    assert not warnings(replace(made, training=TRAINING))  # a head from before targets were noted


def test_a_targets_mark_is_its_table_whatever_the_precision() -> None:
    table = torch.randn(61, 32)
    assert target_mark(table) == target_mark(table.bfloat16()) == target_mark(table.bfloat16().float())
    assert target_mark(table) != target_mark(table + 0.1)
    assert target_mark(table) != target_mark(table[:, :16])


def test_a_workload_unlike_the_training_data_is_noted() -> None:
    assert not notes(evaluation(2.4, training=TRAINING))
    (line,) = notes(evaluation(1.3, training=TRAINING))
    assert "gsm8k, budget 8: τ 1.30 is far below the 2.50 of held-out training rows" in line
    assert not notes(evaluation(1.3))


def test_a_speed_up_never_stands_alone() -> None:
    header, _, plain, drafted, *_ = evaluation_report(evaluation(2.0, training=TRAINING)).split("\n")
    for name in ("τ predicted", "plain tokens/s", "speed-up", "accepted to depth"):
        assert name in header
    assert drafted.split() == ["gsm8k", "8", "2.00", "2.00", "50", "25", "40.0", "20.0", "2.00x", "6/6"]
    assert plain.split()[:3] == ["gsm8k", "0", "1.00"]
    text = evaluation_report(evaluation(2.0, training=TRAINING))
    assert "target demo model, head run/head" in text
    assert "Some CPU, 2 cores, 2 threads; bfloat16; torch 2.15.0" in text
    assert "trained on 97 rows, 9700 tokens (gsm8k 90, ifeval 7) under the template's defaults" in text
    assert 'and {"enable_thinking": false}; 50 steps, 4800 blocks' in text
    assert "trained on: unknown" in evaluation_report(evaluation(2.0))


def test_before_and_after_stand_side_by_side() -> None:
    text = evaluation_report(evaluation(2.0), evaluation(1.1))
    header, _, plain, drafted, *_ = text.split("\n")
    assert header.split()[2:6] == ["τ", "untrained", "speed-up", "untrained"]
    assert drafted.split()[:5] == ["gsm8k", "8", "1.10", "1.10x", "2.00"]
    assert "1.10" not in plain


def test_a_markdown_table() -> None:
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


# -- the record ---------------------------------------------------------------------------------------------------------


def test_the_record_counts_data_sets(tmp_path: Path) -> None:
    rows = [Row(f"gsm8k/train/{i}", 0.0, (1, i), (2, 3)) for i in range(40)] + [Row("loose", None, (1,), (2, 3, 4))]
    record = training_record(rows, tiny_options(held_out=0.2), {"step": 4, "blocks": 32}, "abc")
    counts = record["data"]["gsm8k"]
    assert counts["rows"] + counts["held_out"] == 40
    assert 0 < counts["held_out"] < 20
    assert counts["tokens"] == 2 * counts["rows"]
    assert set(record["data"]) == {"gsm8k", "unnamed"}
    assert (record["temperatures"], record["corpus_rows"]) == ([0.0], 1)
    assert record["template_variants"] == [""]
    assert record["options"]["block_size"] == 5
    assert (record["target"], record["target_mark"]) == ("demo model", "abc")
    assert "output" not in record["options"]
    assert read_record(tmp_path) is None
    write_record(tmp_path / "head", record)
    assert read_record(tmp_path / "head") == json.loads(json.dumps(record))


@pytest.mark.parametrize("text", ["[]", "{}", "not json"])
def test_a_file_that_is_no_record_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "training.json").write_text(text)
    assert read_record(tmp_path) is None


def test_an_unwritable_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "head").write_text("a file")
    with pytest.raises(ValueError, match=r"training.json: cannot write the training record"):
        write_record(tmp_path / "head", {"data": {}})


def test_data_sets_are_named_by_their_prefix() -> None:
    assert [dataset_of(name) for name in ("gsm8k/train/3", "math/7", "12")] == ["gsm8k", "math", "unnamed"]


# -- replay --------------------------------------------------------------------------------------------------------------


def test_features_without_a_store_are_the_same() -> None:
    model = tiny_model()
    row = tiny_rows(1)[0]
    made, known = answer_features(model, row, (1, 3), 8), features_of(model, row)
    for name in ("tokens", "taps", "teacher_ids", "teacher_logp"):
        torch.testing.assert_close(getattr(made, name), getattr(known, name))
    assert made.prompt_length == known.prompt_length
    assert default_tap_layers(6, 2) == (1, 3)


def test_replay_stays_inside_the_answer() -> None:
    """τ counts the tokens after the first of an answer and no others, however long the replay may go."""
    model = tiny_model()
    rows = tiny_rows(6)
    head = tiny_head(model, rows).requires_grad_(False)
    head.pack()
    items = [features_of(model, row, number) for number, row in enumerate(rows)]
    rules = head_rules(head)
    assert rules == BlockRules(5, head.config.mask_token_id, causal=True, gamma=None, truncate=False)
    tau = replayed_tau(head, items, rules, [1, 40], max_tokens=100)
    most = max(len(row.output_ids) - 1 for row in rows)
    assert 1.0 <= tau[1] <= tau[40] <= min(most, rules.block_size)
    assert replayed_tau(head, items, rules, [40], max_tokens=1)[40] == 1.0
