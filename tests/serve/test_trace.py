"""Acceptance traces: replay of budgets, and files of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from jetflow_serve.trace import Trace, acceptance_by_depth, read_traces, replayed_acceptance, replayed_tau, write_traces

TRACE = Trace(
    method="head",
    workload="small",
    prompt="small/1",
    prompt_tokens=5,
    budget=8,
    positions=[[1, 4, 7], [2, 8], [], [3], [1], []],
    scores=[[-0.5, -1.0, -2.25], [-1.0, -3.0], [], [-2.0], [-0.125], []],
    sizes=[8, 8, 8, 5, 1, 0],
    passes=1,
)


def test_a_budget_accepts_the_nodes_it_holds_and_goes_on_after_the_bonus_token() -> None:
    assert TRACE.steps(0) == [(position, 0, 0) for position in range(6)]
    assert TRACE.steps(1) == [(0, 1, 1), (2, 1, 0), (3, 1, 0), (4, 1, 1)]
    assert TRACE.steps(4) == [(0, 4, 2), (3, 4, 1), (5, 0, 0)]
    assert TRACE.steps(8) == [(0, 8, 3), (4, 1, 1)]
    assert replayed_tau([TRACE], 0) == 1
    assert replayed_tau([TRACE], 4) == 2
    assert replayed_tau([TRACE, TRACE], 8) == 3
    assert replayed_acceptance([TRACE], 4) == [2 / 3, 1 / 3]
    assert acceptance_by_depth([0, 0]) == []


def test_a_budget_above_the_recorded_one_and_empty_answers_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt small/1, holds trees of 8 nodes"):
        replayed_tau([TRACE], 9)
    with pytest.raises(ValueError, match="nothing was decoded"):
        replayed_tau([Trace("head", "small", "p", 5, 8, [], [], [], 1)], 4)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    other = Trace("lookup", "small", "small/ä", 3, 2, [[1]], [[0.0]], [2], 0)
    write_traces(path, [TRACE, other])
    assert read_traces(path) == [TRACE, other]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": 0}, "must be 1 or more"),
        ({"passes": -1}, "passes must be 0 or more"),
        ({"passes": None}, "sizes and passes"),
        ({"method": 3}, "a line needs method, workload"),
        ({"positions": [[1]]}, "one entry a decoded token"),
        ({"positions": [[4, 1, 7], [2, 8], [], [3], [1], []]}, "increase with the depth"),
        ({"positions": [[1, 4, 9], [2, 8], [], [3], [1], []]}, "between 1 and the size"),
        ({"positions": [[1, 4, 7], [2, 8], [], [6], [1], []]}, "between 1 and the size"),
        ({"positions": [[1, 4], [2, 8], [], [3], [1], []]}, "same lengths"),
        ({"sizes": [8, 8, 8, 5, 1, "x"]}, "whole numbers"),
        ({"positions": [3] * 6}, "3 is not a list of whole numbers"),
        ({"scores": [["x"]] * 6}, "is not a list of numbers"),
    ],
)
def test_what_is_no_trace_is_named_with_file_and_line(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(asdict(TRACE)) + "\n\n" + json.dumps(asdict(TRACE) | change) + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        read_traces(path)
    assert f"{path}, line 3: not an acceptance trace" in str(caught.value)


def test_files_without_traces(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    with pytest.raises(ValueError, match="there is no file"):
        read_traces(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no traces"):
        read_traces(path)
    for content in (b"{\n", b"\xff", b"[" * 10**5, b"9" * 5000):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"line 1: not JSON: "):
            read_traces(path)
