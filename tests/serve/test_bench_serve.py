"""The load benchmark: what its clients note, what its table says, and a whole short sweep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.llm import LLM
from jetflow_serve import bench_report, bench_serve, choice, cli
from jetflow_serve.bench_report import Measured, measured, percentile, summarise
from jetflow_serve.load_client import Answer, Target, run_load
from serve.support import END, ScriptedEngine, byte_tokenizer, serving
from tiny import tiny_head, tiny_model


def chat(text: str, **fields: Any) -> dict[str, Any]:
    options = {"include_usage": True, "continuous_usage_stats": True}
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "stream": True, "stream_options": options, "temperature": 0} | fields


# -- clients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrivals", [None, [0.0, 0.02, 0.04, 0.06, 0.08]])
def test_clients_note_every_chunk(arrivals: list[float] | None) -> None:
    engine = ScriptedEngine(script=lambda prompt: [1] * 10 + [END], per_step=4)
    with serving(engine) as running:
        answers = run_load(Target(running.url), [chat(f"question {i}") for i in range(5)], 5, arrivals)
    assert [answer.error for answer in answers] == [None] * 5
    for answer in answers:
        assert answer.text == engine.tokenizer.decode([1] * 10)
        assert (answer.tokens, sum(size for _, size in answer.chunks)) == (11, 11)
        assert [size for _, size in answer.chunks] == [4, 4, 3]
        assert answer.accepted == 8  # 11 tokens in 3 steps
        assert 0 < sum(gap for gap, _ in answer.chunks) <= answer.end - answer.start
    if arrivals is not None:
        starts = [answer.start - answers[0].start for answer in answers]
        assert starts == sorted(starts)
        assert starts[-1] >= 0.05


def test_failures_are_answers_with_an_error() -> None:
    engine = ScriptedEngine()
    with serving(engine, api_keys=("k",)) as running:
        bodies = [chat("a"), chat("b", nonsense=1), chat("c")]
        good, bad, last = run_load(Target(running.url, "k"), bodies, 1, None)
        assert (good.error, last.error) == (None, None)
        assert bad.error is not None
        assert bad.error.startswith("400")
        assert run_load(Target(running.url, "wrong"), bodies[:1], 1, None)[0].error is not None
        engine.poison = "logits are not finite"
        broken = run_load(Target(running.url, "k"), bodies[:1], 1, None)[0]
        assert broken.error == "logits are not finite"
        with pytest.raises(ValueError, match="answered 401"):
            Target(running.url).get("/metrics")
    gone = run_load(Target(running.url), [chat("a")], 1, None)[0]
    assert "ConnectionRefused" in str(gone.error)
    with pytest.raises(ValueError, match="cannot be reached"):
        Target(running.url).get("/metrics")
    with pytest.raises(ValueError, match="no URL of a server"):
        Target("localhost:8000").connect()


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_percentiles_weigh_tokens() -> None:
    assert percentile([(5.0, 1)], 0.5) == 5.0
    assert percentile([(3.0, 1), (1.0, 1), (2.0, 1)], 0.5) == 2.0
    assert percentile([(1.0, 1), (9.0, 3)], 0.5) == 9.0
    assert percentile([(float(i), 1) for i in range(1, 101)], 0.99) == 99.0
    assert percentile([(float(i), 1) for i in range(1, 101)], 1.0) == 100.0


def test_what_a_run_says() -> None:
    answers = [
        Answer(start=0.0, end=2.0, chunks=[(0.5, 1), (1.0, 4), (0.5, 1)], tokens=6, accepted=3, text="a"),
        Answer(start=1.0, end=4.0, chunks=[(1.5, 1), (1.5, 3)], tokens=4, accepted=2, text="b"),
        Answer(start=1.0, end=1.5, error="429: full"),
    ]
    run = measured(answers, nodes=7.5)
    assert run.tokens_per_second == 10 / 4
    assert (run.ttft_p50, run.ttft_p99) == (500, 1500)
    assert (run.token_p50, run.token_p99) == (250, 500)  # four tokens of 0.25 s, four of 0.5 s
    assert run.acceptance_length == 10 / 5
    assert (run.nodes, run.errors, run.first_error) == (7.5, 1, "429: full")
    assert run.texts == ["a", "b", None]
    with pytest.raises(ValueError, match="every request failed, the first with: 429"):
        measured(answers[2:], 0.0)
    with pytest.raises(ValueError, match="continuous_usage_stats"):
        measured([Answer(0.0, 1.0, [(1.0, 6)], 6)], 0.0)


def test_rows_pair_rounds_and_compare_texts() -> None:
    def run(speed: float, texts: Sequence[str | None]) -> Measured:
        return Measured(speed, 1, 2, 3, 4, 2.0, 8.0, texts.count(None), None, list(texts))

    base = [run(10, ["a", "b"]), run(20, ["c", "d"]), run(10, ["e", None])]
    fast = [run(20, ["a", "b"]), run(30, ["c", "x"]), run(30, ["e", "f"])]
    row = summarise("4", "auto", fast, base)
    assert (row.tokens_per_second, row.ratio) == (30, 2.0)
    assert (row.compared, row.identical, row.errors) == (5, 4, 0)
    plain = summarise("4", "0", base, base)
    lines = bench_report.markdown([plain, row]).splitlines()
    assert "| 4 | 0 | 10.0 | 1.00 | 1 / 2 | 3.0 / 4.0 | 2.00 | 8.0 | 1 | — |" in lines
    assert "4 of 5" in lines[3]
    assert "auto has 3.00 of the best fixed budget, 0" in lines[-1]
    assert summarise("4", "as served", fast, None).ratio is None


def test_arrivals_are_a_poisson_process_that_can_be_repeated() -> None:
    load = bench_serve.Load(400, 8.0)
    times = load.arrivals(400, 3)
    assert times == load.arrivals(400, 3) != load.arrivals(400, 4)
    assert times is not None
    assert times == sorted(times)
    assert 0.8 * 50 < times[-1] < 1.2 * 50  # 400 arrivals, 8 a second
    assert bench_serve.Load(4).arrivals(9, 0) is None


def test_options_become_loads_and_budgets() -> None:
    assert bench_serve.read_loads("1,4", None, 9) == [bench_serve.Load(1), bench_serve.Load(4)]
    assert bench_serve.read_loads("1,4", [0.5, 2.0], 9) == [bench_serve.Load(9, 0.5), bench_serve.Load(9, 2.0)]
    assert [load.name for load in (bench_serve.Load(4), bench_serve.Load(9, 0.5))] == ["4", "0.5/s"]
    assert bench_serve.read_budgets("0, 8,auto,8", True) == [0, 8, "auto"]
    assert bench_serve.read_budgets("0", False) == [0]
    for text, message in (
        ("0,8", "needs a draft head"),
        ("auto", "needs a draft head"),
        ("0,many", "separated by commas"),
    ):
        with pytest.raises(ValueError, match=message):
            bench_serve.read_budgets(text, False)
    with pytest.raises(ValueError, match="holds 0"):
        bench_serve.read_loads("0,1", None, 9)


# -- the whole --------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps({"id": f"s/{i}", "turns": [f"say {i}"]}) + "\n" for i in range(5)))
    return path


@pytest.fixture
def tiny_llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    model = tiny_model(vocab_size=258)
    head = tiny_head(model)
    head.pack()
    llm = LLM(Engine(model, byte_tokenizer(), head, EngineConfig(page_size=4, max_model_len=128)))
    chosen = choice.ModelChoice("m", "h", "auto", "tiny")
    monkeypatch.setattr(bench_serve, "choose_model", lambda *_: chosen)
    monkeypatch.setattr(bench_serve, "load_llm", lambda *_: llm)
    return llm


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["bench-serve", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_short_sweep(tiny_llm: LLM, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Servers of every budget, clients in their own process, table, JSON and plot."""
    json_path, plot = tmp_path / "out.json", tmp_path / "out.png"
    status, out, err = run(
        capsys, "--data", str(data), "--concurrency", "1,3", "--requests", "3", "--rounds", "2", "--max-tokens", "8",
        "--budgets", "0,4,auto", "--json", str(json_path), "--plot", str(plot),
    )  # fmt: skip
    assert status == 0
    assert "load 3, round 2/2, budget auto" in err
    for fact in ("cpu:", "dtype: float32", "torch:", "Budget 0 is a server without a draft head", "auto has"):
        assert fact in out
    result = json.loads(json_path.read_text())
    assert [(row["load"], row["budget"]) for row in result["rows"]] == [
        (load, budget) for load in ("1", "3") for budget in ("0", "4", "auto")
    ]
    for row in result["rows"]:
        assert row["errors"] == 0
        assert row["compared"] == row["identical"] == 2 * (3 if row["load"] == "1" else 6)
        assert row["tokens_per_second"] > 0
        assert row["acceptance_length"] >= 1
        if row["budget"] == "0":
            assert (row["nodes"], row["ratio"], row["acceptance_length"]) == (0, 1, 1)
        if row["budget"] == "4":
            assert 3 <= row["nodes"] <= 4
    assert result["host"]["dtype"] == "float32"
    assert result["settings"]["rounds"] == 2
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_running_server_is_measured_as_it_is(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(ScriptedEngine(script=lambda _: [1] * 250, per_step=2), api_keys=("k",)) as running:
        arguments = ["--data", str(data), "--rates", "50", "--requests", "4", "--rounds", "1", "--max-tokens", "6"]
        status, out, _ = run(capsys, *arguments, "--url", running.url, "--api-key", "k")
        assert status == 0
        assert f"url: {running.url}" in out
        assert f"| 50/s | {bench_serve.SERVED} |" in out
        status, _, err = run(capsys, *arguments, "--url", running.url)
    assert status == 2
    assert "answered 401" in err


def test_a_wrong_answer_is_status_1_in_float32(
    tiny_llm: LLM, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = bench_serve.measured

    def forged(answers: Sequence[Answer], nodes: float) -> Measured:
        run = honest(answers, nodes)
        return replace(run, texts=["other", *run.texts[1:]]) if nodes else run

    monkeypatch.setattr(bench_serve, "measured", forged)
    arguments = ["--rates", "50", "--requests", "2", "--rounds", "1", "--max-tokens", "8", "--budgets", "0,4"]
    status, out, _ = run(capsys, "--data", str(data), *arguments)
    assert status == 1
    assert "1 of 2" in out


def test_mistakes_are_one_line(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    status, _, err = run(capsys, "--data", str(data), "--plot", "x.png")
    assert (status, err.count("\n")) == (2, 1)
    assert "matplotlib" in err
    monkeypatch.undo()
    for arguments in (["--json", "none/out"], ["--plot", "none/out.svg"], ["--plot", "out.txt"]):
        status, _, err = run(capsys, "--data", str(data), *arguments)
        assert (status, err.count("\n")) == (2, 1)
        assert " ".join(arguments) in err
    status, _, err = run(capsys, "--data", str(data), "--url", "http://127.0.0.1:9")
    assert (status, err.count("\n")) == (2, 1)
    assert "every request failed" in err or "cannot be reached" in err
