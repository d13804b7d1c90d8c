"""Two ranks make the steps of one: the same losses and weights, whoever has the blocks, and they stop together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_worker import ROWS, SCENARIOS, gradients, trainer, weights

from jetflow_train.distributed import deal

QUICK = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run two ranks of `arguments` on this machine."""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = os.environ | QUICK | {"PYTHONPATH": here}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    done = torchrun(str(Path(__file__).parent / "rank_worker.py"), str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [record["held_out"]["conditional_kl"] for record in records]


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_equal_one(two_ranks: Path, tmp_path: Path, name: str) -> None:
    alone = trainer(tmp_path, SCENARIOS[name], name == "online")
    start = weights(alone)
    alone.run()
    assert losses(two_ranks / name) == pytest.approx(losses(tmp_path), rel=1e-4)
    first, second = (torch.load(two_ranks / name / f"gradients-{rank}.pt", weights_only=True) for rank in (0, 1))
    for key, value in gradients(alone).items():
        assert torch.equal(first[key], second[key]), key
        assert value.any(), key
        torch.testing.assert_close(first[key], value, rtol=1e-2, atol=1e-5)
    first, second = (torch.load(two_ranks / name / f"weights-{rank}.pt", weights_only=True) for rank in (0, 1))
    for key, value in weights(alone).items():
        assert torch.equal(first[key], second[key]), key
        assert not torch.equal(value, start[key]), key
        torch.testing.assert_close(first[key], value, rtol=1e-3, atol=2e-5)


def test_the_second_rank_may_have_nothing_to_do() -> None:
    assert deal([4], 2) == [[0], []]
    assert SCENARIOS["one document a step"]["blocks"] == 4  # what a document gives: `anchors` of the tiny options


def test_a_bad_batch_stops_all_ranks_and_is_named(two_ranks: Path, tmp_path: Path) -> None:
    run = trainer(tmp_path, SCENARIOS["shared"], online=False)
    draws, _ = run.order.draw(run.position)
    first, second = ((two_ranks / f"error-{rank}").read_text() for rank in (0, 1))
    assert first == second
    assert ROWS[draws[1].row].id in first
    assert ROWS[draws[0].row].id not in first  # the other rank's rows are not blamed
    assert "step 0: loss nan" in first


def test_only_the_first_rank_writes(two_ranks: Path) -> None:
    run = two_ranks / "shared" / "run"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
    assert {path.name for path in run.iterdir()} == {"metrics.jsonl", "checkpoint-00000003.pt", "head", "best"}


def test_no_thread_of_the_process_group_outlives_it(two_ranks: Path) -> None:
    # One that still has a tensor to free when Python exits would abort the process.
    for rank in (0, 1):
        assert "gloo" not in (two_ranks / f"threads-{rank}").read_text()


@given(counts=st.lists(st.integers(1, 32), max_size=12), parts=st.integers(1, 5))
def test_every_document_is_dealt_once_and_evenly(counts: list[int], parts: int) -> None:
    dealt = deal(counts, parts)
    assert sorted(item for part in dealt for item in part) == list(range(len(counts)))
    filled = [sum(counts[item] for item in part) for part in dealt]
    assert max(filled) - min(filled) <= max(counts, default=0)


def head_command(tmp_path: Path, steps: int) -> list[str]:
    """`jetflow-train head` on a tiny target, for `torchrun`."""
    target = Path(__file__).parents[1] / "core" / "golden" / "qwen3"
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"id": f"r{i}", "temperature": 0.0, "prompt_ids": [3, 4 + i], "output_ids": list(range(9, 30))})
            + "\n"
            for i in range(12)
        )
    )
    options = {
        "target": target, "data": rows, "output": tmp_path / "run", "device": "cpu", "dtype": "float32", "steps": steps,
        "block-size": 4, "layers": 1, "taps": 1, "pairwise-size": 8, "draft-vocab-size": "none", "teacher-top": 8,
        "anchors": 4, "blocks": 8, "held-out": 0.3,
    }  # fmt: skip
    return ["-m", "jetflow_train", "head", *(text for k, v in options.items() for text in (f"--{k}", str(v)))]


def test_the_command_runs_under_torchrun(tmp_path: Path) -> None:
    done = torchrun(*head_command(tmp_path, steps=2))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert done.stdout.count(f"head: {tmp_path / 'run' / 'head'}") == 1
    assert (tmp_path / "run" / "head" / "model.safetensors").exists()


def test_a_rank_that_ends_leaves_no_other_waiting(tmp_path: Path) -> None:
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)  # what the first rank alone writes, at step 20
    done = torchrun(*head_command(tmp_path, steps=400))
    assert done.returncode == 1
    assert "metrics.jsonl: cannot write the metrics" in done.stderr
    assert "[rank" not in done.stderr  # torch's prefix of a traceback
