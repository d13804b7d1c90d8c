"""Rows made by the target: what is asked, what is recorded, and a run that is killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from test_files import FullDisk
from tiny_checkpoint import write_checkpoint, write_prompts

from jetflow_core.llm import LLM
from jetflow_train import cli
from jetflow_train.config import RegenerateOptions
from jetflow_train.data import read_rows
from jetflow_train.files import sole_use
from jetflow_train.regenerate import answer, regenerate
from jetflow_train.row_file import RowFile


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def llm(target: str) -> LLM:
    return LLM.load(target)


def options(folder: Path, prompts: str | None = None, **changes: object) -> RegenerateOptions:
    made = RegenerateOptions(
        prompts=(prompts or write_prompts(folder / "prompts.jsonl", 3),),
        output=str(folder / "rows.jsonl"),
        max_tokens=8,
        max_length=100,
    )
    return replace(made, **changes)  # pyright: ignore[reportArgumentType]


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def content(path: Path) -> dict[str, str]:
    """Every row by its key, whatever the order of the file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {json.dumps([row["id"], row["temperature"], row["sample"]]): json.dumps(row, sort_keys=True) for row in rows}


def test_samples_differ_and_greedy_answers_come_once(tmp_path: Path, llm: LLM) -> None:
    assert answer(llm, options(tmp_path, temperature=(0.0, 1.0), samples=3)) == 3 * (1 + 3)
    rows = written(tmp_path)
    assert sorted((row["temperature"], row["sample"]) for row in rows if row["id"] == "p/1") == [
        (0.0, 0),
        (1.0, 0),
        (1.0, 1),
        (1.0, 2),
    ]
    assert len({tuple(row["output_ids"]) for row in rows if row["id"] == "p/1" and row["temperature"]}) == 3
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}
    read = read_rows([tmp_path / "rows.jsonl"], 97, 100)
    assert {row.sample for row in read} == {0, 1, 2}
    # More samples, and other temperatures, add to what is there.
    assert answer(llm, options(tmp_path, temperature=(0.0, 1.0), samples=4)) == 3
    assert answer(llm, options(tmp_path, temperature=(0.5,))) == 3


def test_thinking_is_recorded_and_names_the_row(tmp_path: Path, llm: LLM) -> None:
    for thinking in (True, False, None):
        assert answer(llm, options(tmp_path, thinking=thinking)) == 3
    rows = [row for row in written(tmp_path) if row["id"] == "p/0"]
    assert [row.get("chat_template_kwargs") for row in rows] == [
        {"enable_thinking": True},
        {"enable_thinking": False},
        None,
    ]
    assert [row["prompt_ids"][-1] for row in rows] == [3, 4, 3]
    read = [row for row in read_rows([tmp_path / "rows.jsonl"], 97, 100) if row.id == "p/0"]
    assert len({row.variant for row in read}) == len(read) >= 2
    assert len({row.prompt_key for row in read}) == 1


def test_a_template_without_thinking_says_so(tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer._template, "variables", frozenset({"messages"}))  # pyright: ignore
    with pytest.raises(ValueError, match=r"prompts.jsonl: prompt p/0: .*does not read 'enable_thinking'"):
        answer(llm, options(tmp_path, thinking=False))


def test_chats_are_asked_for_their_last_answer(tmp_path: Path, llm: LLM) -> None:
    said = [
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": "w6"},
        {"role": "user", "content": "w7"},
    ]
    file = tmp_path / "chats.jsonl"
    lines = [
        {"id": "open", "messages": said},
        {"messages": [*said[:2], {"role": "user", "content": "w8"}, {"role": "assistant", "content": "w9"}]},
        {"id": "copy", "messages": [*said, {"role": "assistant", "content": "w9"}]},
        {"id": "short", "prompt": "w5", "response": "w9"},
        {"id": "open", "messages": said},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    notes: list[str] = []
    assert answer(llm, options(tmp_path, str(file)), note=notes.append) == 3
    assert notes == ["2 prompts say what an earlier one says and are left out"]
    rows = {tuple(row["prompt_ids"]): row for row in written(tmp_path)}
    assert rows.keys() == {(1, 5, 3, 6, 2, 1, 7, 3), (1, 5, 3, 6, 2, 1, 8, 3), (1, 5, 3)}
    # Whoever asks the first question is on the same side of the split, in a chat or alone.
    read = read_rows([tmp_path / "rows.jsonl"], 97, 100)
    assert len(read) == 3
    assert len({row.prompt_key for row in read}) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": "a", "messages": [{"role": "assistant", "content": "w5"}]}, "nothing in 'messages' asks for an answer"),
        ({"id": "a", "text": "w5"}, "needs 'id' and a non-empty list 'turns', or 'messages', or 'prompt'"),
        ({"turns": ["w5"]}, "needs 'id'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "prompt .*only text is supported"),
        ({"id": "p", "prompt": " "}, "'prompt' is missing or empty"),
    ],
)
def test_prompts_that_cannot_be_asked_are_named(tmp_path: Path, llm: LLM, line: object, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl.*" + message):
        answer(llm, options(tmp_path, str(file)))


def test_one_id_for_two_prompts_is_refused(tmp_path: Path, llm: LLM) -> None:
    file = tmp_path / "two.jsonl"
    file.write_text('{"id": "a", "prompt": "w5"}\n{"id": "a", "prompt": "w6"}\n')
    with pytest.raises(ValueError, match="prompt id a occurs twice"):
        answer(llm, options(tmp_path, str(file)))


def test_rows_made_otherwise_are_not_taken_for_these(tmp_path: Path, llm: LLM) -> None:
    answer(llm, options(tmp_path, temperature=(1.0,)))
    for changes in ({"top_p": 0.5}, {"top_k": 3}, {"seed": 4}):
        with pytest.raises(ValueError, match=r"row p/0 was sampled with .*'top_p': 1.0.* name another output"):
            answer(llm, options(tmp_path, temperature=(1.0,), **changes))
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "p/0", "turns": ["w9"]}\n')
    with pytest.raises(ValueError, match="row p/0 answers another prompt of that id; name another output"):
        answer(llm, options(tmp_path, str(other), temperature=(1.0,)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "samples 0 must be at least 1"),
        ({"batch_size": 0}, "batch_size 0 must be at least 1"),
        ({"retries": -1}, "retries -1 must be at least 0"),
        ({"timeout": float("nan")}, "timeout nan must be positive"),
        ({"endpoint_model": "m"}, "need an endpoint"),
        ({"endpoint": "http://x/v1", "head": "h"}, "leave out head, or endpoint"),
    ],
)
def test_options_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RegenerateOptions(**changes)


def test_sampling_out_of_range_is_refused(tmp_path: Path, llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"top_p is 1\.5"):
        answer(llm, options(tmp_path, temperature=(1.0,), top_p=1.5))


# -- trouble on the way -----------------------------------------------------------------------------------------------


def test_a_full_disk_costs_the_row_at_hand_alone(tmp_path: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    answer(llm, options(whole))
    first = len((whole / "rows.jsonl").read_bytes().splitlines(keepends=True)[0])
    with monkeypatch.context() as patched:
        make = RowFile.__init__

        def init(self: RowFile, path: Path, stream: FileIO) -> None:
            make(self, path, FullDisk(stream, first + 20))  # pyright: ignore[reportArgumentType]

        patched.setattr(RowFile, "__init__", init)
        with pytest.raises(ValueError, match=r"rows.jsonl: cannot write rows \(.*No space left.*those before are kept"):
            answer(llm, options(tmp_path))
    llm.engine.abort_all("the test goes on")
    assert len(written(tmp_path)) == 1
    assert answer(llm, options(tmp_path)) == 2
    assert content(tmp_path / "rows.jsonl") == content(whole / "rows.jsonl")


KILLED = """
import os, signal, sys
from jetflow_train import cli, row_file
append, calls = row_file.append_line, 0

def killed(stream, path, size, line):
    global calls
    calls += 1
    if calls == 6:
        stream.write(line[: len(line) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return append(stream, path, size, line)

row_file.append_line = killed
cli.main(sys.argv[1:])
"""


def test_killed_and_started_again_makes_the_same_rows(
    tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL in the middle of a row, as the machine would do it, against a run that nobody disturbs."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 20)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    changes: dict[str, Any] = {"target": target, "temperature": (0.0, 1.0), "max_tokens": 60}
    assert regenerate(options(whole, prompts, **changes)) == 40
    flags = [
        "--prompts",
        prompts,
        "--output",
        str(killed / "rows.jsonl"),
        "--target",
        target,
        "--temperature",
        "0",
        "1",
    ]
    command = ["regenerate", *flags, "--max-tokens", "60", "--max-length", "100"]
    file = killed / "rows.jsonl"
    process = subprocess.run(
        [sys.executable, "-c", KILLED, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr
    left = file.read_bytes()
    assert left.count(b"\n") == 5
    assert not left.endswith(b"\n")
    assert cli.main(command) == 0
    assert "35 new rows" in capsys.readouterr().out
    assert content(file) == content(whole / "rows.jsonl")


def test_two_runs_do_not_write_one_file(tmp_path: Path, llm: LLM) -> None:
    chosen = options(tmp_path)
    Path(chosen.output).touch()
    with sole_use(Path(chosen.output)), pytest.raises(ValueError, match=r"rows\.jsonl: another run is writing here"):
        answer(llm, chosen)
    assert answer(llm, chosen) == 3


def test_rows_are_not_appended_to_a_compressed_file(tmp_path: Path, llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz: rows are appended as plain text; name a \.jsonl file"):
        answer(llm, options(tmp_path, output=str(tmp_path / "rows.jsonl.gz")))


def test_answers_are_no_longer_than_the_target_can_read(tmp_path: Path, target: str) -> None:
    changes: dict[str, Any] = {"target": target, "max_length": 5000, "max_tokens": 4000}
    assert regenerate(options(tmp_path, **changes)) == 3
    longest = max(len(row["prompt_ids"] + row["output_ids"]) for row in written(tmp_path))
    assert longest <= 128
    words = " ".join(["w9"] * 200)
    (tmp_path / "long.jsonl").write_text(json.dumps({"id": "long", "prompt": words}) + "\n")
    with pytest.raises(ValueError, match=r"prompt long has 202 tokens, the limit is 128 with its answer; .* remove it"):
        regenerate(options(tmp_path, str(tmp_path / "long.jsonl"), **changes))


def test_batches_may_be_larger_than_the_engines_default_allows(tmp_path: Path, target: str) -> None:
    assert regenerate(options(tmp_path, target=target, batch_size=1500)) == 3
