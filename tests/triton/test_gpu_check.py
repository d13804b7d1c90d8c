"""`scripts/gpu_check.py` without a GPU: the twins stand in for the kernels, so that its cases and lines are sound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_cases
import gpu_check
import gpu_graph
import gpu_speed
import pytest
import torch

import jetflow_triton
from jetflow_triton import roofline

NOT_OPS = {"debug_checks"}


def records(part: str, name: str) -> list[dict[str, Any]]:
    return [{"part": part, "name": name} | record for record in gpu_check.PARTS[part](name, "cpu", True)]


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, names in gpu_check.STAGES for name in names])
def test_every_case_runs(part: str, name: str) -> None:
    found = records(part, name)
    assert found
    for record in found:
        assert "failure" not in record, record
        json.dumps(record)
        assert gpu_check.line_of(record).startswith("       speed" if part == "speed" else "ok ")


def test_every_op_is_checked_and_measured() -> None:
    ops = set(jetflow_triton.__all__) - NOT_OPS
    assert set(gpu_cases.OPS) == ops
    assert set(gpu_speed.BUILDERS) == set(roofline.OPS)
    assert {name.split()[0] for name in gpu_speed.BUILDERS} == ops


def test_every_case_has_a_name_of_its_own() -> None:
    for op in gpu_cases.OPS:
        names = [case.name for case in gpu_cases.cases(op, gpu_cases.CHECKED, torch.bfloat16, "cuda")]
        assert len(names) == len(set(names)), op


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (torch.tensor([1.0, 3.0]), 0.0),
        (torch.tensor([1.0, 3.4]), 0.1),
        (torch.tensor([1.0, float("nan")]), float("inf")),
        (torch.tensor([1.0, float("inf")]), float("inf")),
        (torch.tensor([1.0]), float("inf")),
        (torch.tensor([1, 3]), float("inf")),
    ],
)
def test_error_is_seen(result: torch.Tensor, error: float) -> None:
    assert gpu_cases.error_of(result, torch.tensor([1.0, 3.0])) == pytest.approx(error)


def test_error_of_integers_and_infinities() -> None:
    assert gpu_cases.error_of(torch.tensor([1, 2]), torch.tensor([1, 3])) == float("inf")
    infinite = torch.tensor([float("-inf"), 1.0])
    assert gpu_cases.error_of(infinite, infinite.clone()) == 0.0


def test_a_wrong_kernel_fails_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    right = jetflow_triton.silu_mul

    def wrong(gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.shape[0] == 1:
            raise RuntimeError("launch failed")
        return right(gate_up) * (2 if gate_up.shape[0] > 500 else 1)

    monkeypatch.setattr(jetflow_triton, "silu_mul", wrong)
    found = records("check", "silu_mul bfloat16")
    failed = {record["case"]: record for record in found if "failure" in record}
    assert list(failed) == ["1 rows", "600 rows", "a row at any number of rows"]
    assert [record["case"] for record in found if "failure" not in record] == ["40 rows", "gradients"]
    assert failed["1 rows"]["failure"] == "RuntimeError: launch failed"
    assert all(gpu_check.line_of(record).startswith("FAILED check silu_mul") for record in failed.values())


def test_a_row_that_feels_its_neighbours_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jetflow_triton, "silu_mul", lambda gate_up: gate_up[:, ::2] * gate_up.shape[0])
    (record,) = [r for r in records("check", "silu_mul float32") if r["case"] == "a row at any number of rows"]
    assert record["error"] > record["allowed"]


def test_a_replay_of_stale_inputs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(step: Any, _device: str) -> Any:
        results = step()
        return lambda: results, {}

    monkeypatch.setattr(gpu_graph, "captured", stale)
    assert all("failure" in record for record in records("graph", "dense bfloat16"))


def test_script_writes_what_it_prints(tmp_path: Path) -> None:
    command = [
        sys.executable,
        gpu_check.__file__,
        str(tmp_path / "out"),
        "--device",
        "cpu",
        "--quick",
        "--part",
        "speed",
    ]
    finished = subprocess.run(
        [*command, "--only", "kv_write"], check=False, capture_output=True, text=True, timeout=200
    )
    assert finished.returncode == 0, finished.stderr
    written = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert written["about"]["torch"] == torch.__version__
    lines = finished.stdout.splitlines()
    assert [gpu_check.line_of(record) for record in written["records"]] == lines[1:3]
    assert [line.count("|") for line in lines if line.startswith("|")] == [7] * 4
    assert "check 0, graph 0, compile 0, speed 2; failed: 0" in finished.stdout


def test_script_names_what_it_had_no_time_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "cpu", "--quick", "--seconds", "0"]) == 1
    total = sum(len(names) for _, names in gpu_check.STAGES)
    assert capsys.readouterr().out.count("not run: out of time") == 2 * total


CHILD = """
import sys
for name in sys.argv[3:-2]:
    print('{"name": "%s"}' % name, flush=True)
    if name == "dies":
        raise SystemExit(7)
    if name == "hangs":
        import time; time.sleep(60)
    print("some library's line")
    print('{"part": "check", "name": "%s", "case": "a", "failure": "wrong"}' % name, flush=True)
"""


def test_what_follows_a_process_that_dies_or_hangs_is_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(gpu_check, "__file__", str(tmp_path / "child.py"))
    monkeypatch.setattr(gpu_check, "SILENCE", 5)
    report, options = gpu_check.Report(None, {}), gpu_check.parse(["--device", "cpu"])
    gpu_check.run_names("check", ["one", "dies", "two", "hangs", "three"], options, report, deadline=float("inf"))
    found = {record["name"]: record["failure"] for record in report.records}
    assert list(found) == ["one", "dies", "two", "hangs", "three"]
    assert found["one"] == found["two"] == found["three"] == "wrong"
    assert found["dies"] == "the process ended with status 7"
    assert found["hangs"].startswith("killed")
    assert report.close() == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert "No GPU" in capsys.readouterr().out
