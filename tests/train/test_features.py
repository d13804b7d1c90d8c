"""Target features: what the target says, cached or at every visit; stores that do not belong, break or fill the disk."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoint import write_checkpoint
from training_tiny import CPU, TAPS, VOCABULARY, tiny_model, tiny_options, tiny_rows

from jetflow_train.blocks import BlockRules, anchor_count, pack_blocks, sample_anchors, sample_lengths
from jetflow_train.data import Row
from jetflow_train.features import (
    ROWS_PER_SHARD,
    OnlineFeatures,
    RowFeatures,
    build_features,
    row_features,
    rows_features,
)
from jetflow_train.files import sole_use
from jetflow_train.recipe import Progress, prepare

MODEL = tiny_model()
CHAT = Row("chat", None, (3, 4, 5), tuple(range(6, 26)), ignored=((7, 12), (15, 16), (17, 20)))


def test_features_are_what_the_target_says_and_survive_an_interrupt(tmp_path: Path) -> None:
    rows = tiny_rows(ROWS_PER_SHARD + 3)
    calls = 0

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == ROWS_PER_SHARD + 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_features(tmp_path, MODEL, rows, TAPS, 8, interrupt)
    computed = 0

    def count() -> None:
        nonlocal computed
        computed += 1

    store = build_features(tmp_path, MODEL, rows, TAPS, 8, count)
    assert len(store) == computed == len(rows)
    for number in (0, ROWS_PER_SHARD - 1, ROWS_PER_SHARD + 2):
        features, expected = store[number], rows[number]
        hidden, taps = MODEL.forward_sequence(torch.tensor(expected.tokens), TAPS)
        logp = torch.log_softmax(MODEL.logits(hidden), dim=-1)[len(expected.prompt_ids) - 1 : -1]
        assert features.tokens.tolist() == list(expected.tokens)
        assert features.prompt_length == len(expected.prompt_ids)
        torch.testing.assert_close(features.taps.float(), taps, rtol=0.01, atol=0.01)
        assert features.teacher_ids.tolist() == logp.topk(8).indices.tolist()
        torch.testing.assert_close(features.teacher_logp, logp.topk(8).values, rtol=0.01, atol=0.01)


def test_features_of_something_else_are_refused(tmp_path: Path) -> None:
    rows = tiny_rows(3)
    build_features(tmp_path, MODEL, rows, TAPS, 8)
    with pytest.raises(ValueError, match=r"made with another target; delete the folder or name another one$"):
        build_features(tmp_path, tiny_model(seed=5), rows, TAPS, 8)
    with pytest.raises(ValueError, match="made with another rows"):
        build_features(tmp_path, MODEL, tiny_rows(3, seed=9), TAPS, 8)
    with pytest.raises(ValueError, match=r"made with another tap_layers \(\[1, 3\] instead of \[0, 2\]\)"):
        build_features(tmp_path, MODEL, rows, (0, 2), 8)


@pytest.mark.parametrize(("file", "content"), [("tokens.npy", b""), ("index.json", b"{}"), ("taps.npy", b"\x93NUMPY")])
def test_damaged_features_are_named(tmp_path: Path, file: str, content: bytes) -> None:
    rows = tiny_rows(3)
    build_features(tmp_path, MODEL, rows, TAPS, 8)
    (tmp_path / "shard-00000" / file).write_bytes(content)
    with pytest.raises(ValueError, match=r"shard-00000: damaged features .* delete"):
        build_features(tmp_path, MODEL, rows, TAPS, 8)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokens.npy", lambda x: x[:-1]),
        ("taps.npy", lambda x: x[:, :-1]),
        ("taps.npy", lambda x: x.astype(np.float32)),
        ("teacher_ids.npy", lambda x: x[:, :-1]),
        ("teacher_logp.npy", lambda x: x[:-1]),
    ],
)
def test_features_of_another_shape_are_named(tmp_path: Path, file: str, change: Any) -> None:
    rows = tiny_rows(3)
    build_features(tmp_path, MODEL, rows, TAPS, 8)
    path = tmp_path / "shard-00000" / file
    np.save(path, change(np.load(path)))
    with pytest.raises(ValueError, match=rf"shard-00000: damaged features \({path.stem} is .* instead of .* delete"):
        build_features(tmp_path, MODEL, rows, TAPS, 8)


@pytest.mark.parametrize("file", ["tokens.npy", "teacher_ids.npy"])
@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_features_with_impossible_ids_are_named(tmp_path: Path, file: str, token: int) -> None:
    rows = tiny_rows(3)
    build_features(tmp_path, MODEL, rows, TAPS, 8)
    path = tmp_path / "shard-00000" / file
    values = np.load(path)
    values[-1] = token
    np.save(path, values)
    store = build_features(tmp_path, MODEL, rows, TAPS, 8)
    assert len(store[0].tokens)
    with pytest.raises(ValueError, match=r"shard-00000: damaged features \(row 2 has ids outside .* delete"):
        store[2]


def test_a_store_that_another_run_makes_is_left_to_it(tmp_path: Path) -> None:
    rows = tiny_rows(3)
    with sole_use(tmp_path), pytest.raises(ValueError, match="another run is writing here"):
        build_features(tmp_path, MODEL, rows, TAPS, 8)
    build_features(tmp_path, MODEL, rows, TAPS, 8)
    with sole_use(tmp_path):  # what is finished may be read
        assert len(build_features(tmp_path, MODEL, rows, TAPS, 8)) == 3


def test_features_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"teacher_top {VOCABULARY + 1} exceeds"):
        build_features(tmp_path, MODEL, tiny_rows(3), TAPS, VOCABULARY + 1)
    (tmp_path / "shard-00000.partial").write_text("a file where the folder should be")
    with pytest.raises(ValueError, match="shard-00000: cannot write features"):
        build_features(tmp_path, MODEL, tiny_rows(3), TAPS, 8)
    (tmp_path / "meta.json").write_text("[]")
    with pytest.raises(ValueError, match="not a feature store"):
        build_features(tmp_path, MODEL, tiny_rows(3), TAPS, 8)


def same(one: RowFeatures, two: RowFeatures) -> None:
    """Equal to the bit."""
    assert (one.row, one.prompt_length, one.spans) == (two.row, two.prompt_length, two.spans)
    for name in ("tokens", "taps", "teacher_ids", "teacher_logp"):
        left, right = getattr(one, name), getattr(two, name)
        assert left.dtype == right.dtype
        assert torch.equal(left, right), name


def test_at_every_visit_means_the_same_values(tmp_path: Path) -> None:
    rows = [*tiny_rows(5), CHAT]
    store, online = build_features(tmp_path, MODEL, rows, TAPS, 8), OnlineFeatures(MODEL, rows, TAPS, 8)
    assert len(store) == len(online) == store.refresh() == online.refresh() == 6
    for number in (5, 0, 3):
        same(store[number], online[number])
    with pytest.raises(ValueError, match=f"teacher_top {VOCABULARY + 1} exceeds"):
        OnlineFeatures(MODEL, rows, TAPS, VOCABULARY + 1)


def test_rows_joined_in_one_pass_do_not_see_each_other() -> None:
    rows = [*tiny_rows(4), CHAT]
    for row, joined in zip(rows, rows_features(MODEL, rows, TAPS, 8), strict=True):
        for alone, value in zip(row_features(MODEL, row, TAPS, 8), joined, strict=True):
            torch.testing.assert_close(value, alone, rtol=1e-5, atol=1e-5)


def test_passes_of_many_rows_fill_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tiny_rows(9)
    one = build_features(tmp_path / "one", MODEL, rows, TAPS, 8)
    monkeypatch.setattr("jetflow_train.features.PASS_TOKENS", {"cpu": 50})
    several = build_features(tmp_path / "several", MODEL, rows, TAPS, 8)
    for number in range(len(rows)):
        torch.testing.assert_close(one[number].taps, several[number].taps, rtol=0.01, atol=0.01)
        assert torch.equal(one[number].teacher_ids[:, 0], several[number].teacher_ids[:, 0])


def test_the_mask_and_the_precision_are_part_of_what_a_store_is(tmp_path: Path) -> None:
    build_features(tmp_path, MODEL, [CHAT], TAPS, 8)
    same(build_features(tmp_path, MODEL, [CHAT], TAPS, 8)[0], OnlineFeatures(MODEL, [CHAT], TAPS, 8)[0])
    with pytest.raises(ValueError, match="made with another rows"):
        build_features(tmp_path, MODEL, [replace(CHAT, ignored=CHAT.ignored[1:])], TAPS, 8)
    half = tiny_model().to(torch.bfloat16)
    whole = tiny_model().to(torch.bfloat16).float()  # the same weights
    for model in (half, whole):
        model.set_max_positions(128)
    build_features(tmp_path / "whole", whole, [CHAT], TAPS, 8)
    with pytest.raises(ValueError, match="made with another dtype"):
        build_features(tmp_path / "whole", half, [CHAT], TAPS, 8)


def test_a_full_disk_keeps_the_shards_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tiny_rows(ROWS_PER_SHARD + 3)
    save, saved = np.save, 0

    def fill(path: Path, values: Any) -> None:
        nonlocal saved
        saved += 1
        if saved > 6:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(path, values)

    with monkeypatch.context() as patched:
        patched.setattr(np, "save", fill)
        with pytest.raises(
            ValueError, match=r"shard-00001: cannot write features .*No space left.*the same command goes on"
        ):
            build_features(tmp_path, MODEL, rows, TAPS, 8)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["meta.json", "shard-00000"]
    made = (tmp_path / "shard-00000" / "taps.npy").stat().st_mtime_ns
    store = build_features(tmp_path, MODEL, rows, TAPS, 8)
    assert len(store) == len(rows)
    assert (tmp_path / "shard-00000" / "taps.npy").stat().st_mtime_ns == made


def test_what_a_killed_build_leaves_is_made_anew(tmp_path: Path) -> None:
    rows = tiny_rows(3)
    partial = tmp_path / "shard-00000.partial"
    partial.mkdir()
    (partial / "taps.npy").write_bytes(b"half")
    same(build_features(tmp_path, MODEL, rows, TAPS, 8)[2], OnlineFeatures(MODEL, rows, TAPS, 8)[2])
    assert not partial.exists()


# -- blocks of rows whose tokens do not all count ---------------------------------------------------------------------


def test_anchors_lie_where_the_next_token_counts() -> None:
    features = OnlineFeatures(MODEL, [CHAT], TAPS, 8)[0]
    assert features.spans == CHAT.spans == ((3, 7), (12, 15), (16, 17), (20, 23))
    anchors = sample_anchors(features, 100, torch.Generator().manual_seed(0))
    assert anchors.tolist() == [3, 4, 5, 12, 13, 20, 21]
    assert anchor_count(CHAT) == len(anchors)
    assert features.ends(anchors).tolist() == [7, 7, 7, 15, 15, 23, 23]


@settings(max_examples=40, deadline=None)
@given(
    causal=st.booleans(), truncate=st.booleans(), seed=st.integers(0, 99), cuts=st.sets(st.integers(4, 22), max_size=8)
)
def test_no_slot_outside_its_anchors_span_carries_a_loss(
    causal: bool, truncate: bool, seed: int, cuts: set[int]
) -> None:
    borders = sorted(cuts)[: len(cuts) // 2 * 2]
    row = replace(CHAT, ignored=tuple(zip(borders[::2], borders[1::2], strict=True)))
    if not anchor_count(row):
        return
    features = OnlineFeatures(MODEL, [row], TAPS, 8)[0]
    generator = torch.Generator().manual_seed(seed)
    rules = BlockRules(5, VOCABULARY - 1, causal, truncate=truncate)
    anchors = sample_anchors(features, 6, generator)
    lengths = sample_lengths(anchors, features.ends(anchors), rules, generator)
    batch = pack_blocks([(features, anchors, lengths)], rules, CPU)
    positions = batch.positions[batch.slots]
    owner = anchors.repeat_interleave(lengths)[batch.slots]
    for anchor, position in zip(owner.tolist(), positions.tolist(), strict=True):
        assert any(start <= anchor < position < end for start, end in row.spans)
    if not truncate or not causal:  # whole blocks: nothing that counts is left out
        expected = sum(
            min(4, int(end - anchor) - 1) for anchor, end in zip(anchors, features.ends(anchors), strict=True)
        )
        assert len(positions) == expected
    assert torch.equal(batch.label, features.tokens[positions])
    assert torch.equal(batch.teacher_ids, features.teacher_ids[positions - features.prompt_length])


# -- the whole way ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "model")


def corpus(path: Path) -> str:
    lines: list[dict[str, Any]] = [
        {"prompt": f"w{5 + i} w{6 + i}", "response": " ".join(f"w{10 + i + j}" for j in range(9))} for i in range(12)
    ]
    lines.append({"text": " ".join(f"w{number}" for number in range(30, 60))})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_corpus_trains_cached_and_online_alike(tmp_path: Path, target: str) -> None:
    options = tiny_options(
        target=target, taps=1, data=(corpus(tmp_path / "corpus.jsonl"),), steps=2, target_dtype="float32"
    )
    batches = []
    for online in (False, True):
        output = tmp_path / f"online-{online}"
        trainer = prepare(replace(options, output=str(output), online=online), Progress())
        batches.append([trainer.store[row] for row in range(len(trainer.store))])
        trainer.run()
        assert (output / "features").exists() is not online
        assert (output / "head" / "model.safetensors").exists()
    for cached, visited in zip(*batches, strict=True):
        same(cached, visited)
    weights = [(tmp_path / f"online-{online}" / "head" / "model.safetensors").read_bytes() for online in (False, True)]
    assert weights[0] == weights[1]


def test_the_targets_own_precision(tmp_path: Path, target: str) -> None:
    options = tiny_options(
        target=target, taps=1, data=(corpus(tmp_path / "corpus.jsonl"),), online=True, output=str(tmp_path / "run")
    )
    exact = prepare(replace(options, target_dtype="float32"), Progress()).store[0]
    rounded = prepare(replace(options, target_dtype="bfloat16"), Progress()).store[0]
    assert not torch.equal(exact.taps, rounded.taps)
    difference = (rounded.taps - exact.taps).float().norm() / exact.taps.float().norm()
    assert float(difference) < 0.1  # rounding, not another model
    with pytest.raises(ValueError, match="dtype 'int8' is unknown"):
        prepare(replace(options, target_dtype="int8"), Progress())
