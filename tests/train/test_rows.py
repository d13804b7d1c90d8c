"""Rows and draft vocabulary: what is read, what is refused."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from training_tiny import VOCABULARY, tiny_model, tiny_options, tiny_rows

from jetflow_train.data import Row, counted_spans, frequent_tokens, is_held_out, read_rows, spread
from jetflow_train.heads import head_config

MODEL = tiny_model()


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(**changes: object) -> dict[str, object]:
    return {"id": "a", "temperature": 0.0, "prompt_ids": [1, 2], "output_ids": [3, 4, 5], **changes}


def test_rows_of_plain_and_gzip_files_without_repeats(tmp_path: Path) -> None:
    warm = row(temperature=0.7, output_ids=[8, 9])
    plain = write(
        tmp_path / "a.jsonl", row(), warm, {**warm, "sample": 1, "output_ids": [8, 7]}, row(id="b", output_ids=[9])
    )
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress((json.dumps(row(output_ids=[7, 7])) + "\n" + json.dumps(row(id="c"))).encode()))
    rows = read_rows([plain, packed], 50, 4)
    assert [(each.id, each.temperature, each.sample, each.output_ids) for each in rows] == [
        ("a", 0.0, 0, (3, 4)),  # cut at the limit; the same row in the second file is not taken again
        ("a", 0.7, 0, (8, 9)),
        ("a", 0.7, 1, (8, 7)),
    ]  # c says what a says


def test_of_equal_answers_the_coldest_is_kept(tmp_path: Path) -> None:
    file = write(
        tmp_path / "rows.jsonl", row(temperature=0.7), row(id="b", temperature=0.0), row(id="c", temperature=0.3)
    )
    assert [each.id for each in read_rows([file], 50, 8)] == ["b"]


def test_rows_of_one_prompt_fall_on_the_same_side() -> None:
    rows = tiny_rows(200)
    others = [replace(each, id=f"other/{each.id}", temperature=0.7, output_ids=(5, 6, 7)) for each in rows]
    assert [is_held_out(each, 0.3) for each in rows] == [is_held_out(each, 0.3) for each in others]
    mixed = spread(rows + others)
    pairs = [(one.prompt_ids, two.prompt_ids) for one, two in zip(mixed[::2], mixed[1::2], strict=True)]
    assert all(one == two for one, two in pairs)


def test_only_tokens_with_a_loss_count_and_anchors_stay_among_them() -> None:
    row = Row("a", None, (1, 2), (3, 4, 5, 6, 7, 8), ignored=((4, 6),))
    assert row.spans == ((2, 4), (6, 8))
    assert frequent_tokens([row], 4, VOCABULARY, always=[]) == [3, 4, 7, 8]
    assert counted_spans(2, 8, ((2, 4), (7, 8))) == ((4, 7),)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no training rows"),
        ([row(output_ids=[3])], "every row is masked .* give rows with answers, or raise max_length"),
        ([row(prompt_ids=[1] * 8)], "line 1: the prompt has 8 tokens, the limit is 8"),
        ([row(prompt_ids=[])], "'prompt_ids' is empty"),
        ([row(), row(id="b", output_ids=[3, 50])], "line 2: 'output_ids' holds id 50, the target's vocabulary has 50"),
        ([row(prompt_ids="text")], "'prompt_ids' must be a list of token ids"),
        ([row(temperature=None)], "'temperature' must be a number of at least 0, found None"),
        ([row(temperature=float("nan"))], "'temperature' must be a number of at least 0, found nan"),
        ([row(temperature=-0.5)], "'temperature' must be a number of at least 0, found -0.5"),
        ([{"id": "a"}], "missing key 'output_ids'"),
        ([[1]], "expected an object, found list"),
    ],
)
def test_unusable_rows_are_refused(tmp_path: Path, rows: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rows([write(tmp_path / "rows.jsonl", *rows)], 50, 8)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\.jsonl: no such file"):
        read_rows([tmp_path / "nothing.jsonl"], 50, 8)
    deep = tmp_path / "deep.jsonl"
    deep.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"deep\.jsonl, line 1: not JSON"):
        read_rows([deep], 50, 8)
    for value in ({"text": "a \ud800"}, row(id="\udfff"), {"\ud83d": 1}):
        with pytest.raises(ValueError, match=r"half\.jsonl, line 2: not JSON .*surrogates not allowed"):
            read_rows([write(tmp_path / "half.jsonl", row(), value)], 50, 8)
    assert read_rows([write(tmp_path / "whole.jsonl", row(id="\U0001f600"))], 50, 8)[0].id == "\U0001f600"
    damaged = tmp_path / "rows.jsonl.gz"
    damaged.write_bytes(gzip.compress(json.dumps(row()).encode() * 50)[:-12])
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz"):
        read_rows([damaged], 50, 8)
    packed = bytearray(gzip.compress(json.dumps(row()).encode()))
    packed[10] |= 0b110  # a block type that does not exist
    damaged.write_bytes(packed)
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz: damaged gzip file"):
        read_rows([damaged], 50, 8)


def test_the_held_out_share_is_about_what_was_asked_and_comes_first() -> None:
    rows = spread(tiny_rows(400) + tiny_rows(400, temperature=0.7))
    held = [is_held_out(each, 0.1) for each in rows]
    assert 0.05 < sum(held) / len(held) < 0.16
    assert held == sorted(held, reverse=True)


def test_draft_vocabulary() -> None:
    rows = tiny_rows(1)
    tokens = frequent_tokens(rows, 12, VOCABULARY, always=[2])
    assert len(tokens) == 12
    assert tokens == sorted(set(tokens))
    assert 2 in tokens
    for size in (0, VOCABULARY + 1):
        with pytest.raises(ValueError, match=f"draft_vocab_size {size}"):
            frequent_tokens(rows, size, VOCABULARY, always=[2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": VOCABULARY}, "mask_token_id"),
        ({"draft_vocab_size": VOCABULARY + 1}, "draft_vocab_size"),
        ({"block_size": 1}, "block_size"),
        ({"block_size": 129}, "block_size 129 exceeds the target's 128 positions"),
    ],
)
def test_heads_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head_config(MODEL, tiny_options(**changes))
