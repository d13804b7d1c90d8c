"""`jetflow-serve bench`: methods and their options, rows and tables, traces against real decoding, plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.head import DraftHead
from jetflow_core.heads import Head
from jetflow_core.llm import LLM
from jetflow_core.model import Decoder
from jetflow_core.sampling import SamplingParams
from jetflow_core.step_clock import PHASES, PhaseTimes
from jetflow_serve import bench, cli, workload
from jetflow_serve.bench_table import Row, markdown, summarise
from jetflow_serve.flips import Flip
from jetflow_serve.measure import Run, timed_run
from jetflow_serve.methods import Method, parse_method, parse_methods
from jetflow_serve.trace import read_traces, replayed_acceptance, replayed_tau
from jetflow_serve.trace_recorder import Recorder, record_trace
from serve.support import byte_tokenizer
from tiny import tiny_eagle, tiny_head, tiny_model

Runner = Callable[..., tuple[int, str, str]]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, EngineConfig]]:
    """A tiny target and its heads `causal` and `flat` in place of what would be loaded; returns what was asked for."""
    model = tiny_model(vocab_size=258)
    heads = {"causal": tiny_head(model), "flat": tiny_head(model, causal=False, conditioning="none")}
    for head in heads.values():
        head.pack()
    asked: list[tuple[str | None, EngineConfig]] = []

    def load_each(
        path: str, setups: Sequence[tuple[str | None, EngineConfig]], *, dtype: str, device: str, exact: bool
    ) -> list[LLM]:
        asked.extend(setups)
        engines = [Engine(model, byte_tokenizer(), heads[head] if head else None, config) for head, config in setups]
        return [LLM(engine) for engine in engines]

    monkeypatch.setattr(LLM, "load_each", load_each)
    return asked


@pytest.fixture
def run(loads: list[tuple[str | None, EngineConfig]], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Runner:
    """Runs `bench` on three prompts: (status, stdout, stderr)."""
    data = tmp_path / "small.jsonl"
    data.write_text("".join(json.dumps({"id": f"s/{i}", "turns": [f"say {i}"]}) + "\n" for i in range(3)))

    def run_bench(*arguments: str) -> tuple[int, str, str]:
        given = [*arguments] if "--data" in arguments else ["--data", str(data), *arguments]
        status = cli.main(["bench", "--model", "tiny", *given])
        out, err = capsys.readouterr()
        return status, out, err

    return run_bench


def cells(out: str, header: str) -> list[list[str]]:
    """Cells of the table whose first line begins with `header`."""
    lines = iter(out.splitlines())
    next(line for line in lines if line.startswith(header))
    next(lines)
    table: list[list[str]] = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


SPEED, PHASE_TABLE = "| workload | method | budget | tokens/s", "| workload | method | budget | step ms"


# -- methods ----------------------------------------------------------------------------------------------------------


def test_a_method_is_a_name_a_head_and_options() -> None:
    assert parse_method("jetflow=heads/my-head") == Method("jetflow", "heads/my-head", {})
    assert parse_method("dflash=org/head:candidates=1") == Method("dflash", "org/head", {"candidates": 1})
    assert parse_method("jetflow+lookup=h:drafter=head+lookup,draft-cutoff=0.01") == Method(
        "jetflow+lookup", "h", {"drafter": "head+lookup", "draft_cutoff": 0.01}
    )
    assert parse_method("shallow:draft_depth=2,draft_temperature=none,draft_passes=2") == Method(
        "shallow", None, {"draft_depth": 2, "draft_temperature": None, "draft_passes": 2}
    )
    assert parse_method("eagle=h:draft-width=4") == Method("eagle", "h", {"draft_width": 4})
    assert parse_method("lookup") == Method("lookup", None, {"drafter": "lookup"})
    assert parse_method("lookup=h") == Method("lookup", "h", {})
    assert parse_method("mine") == Method("mine", None, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "write NAME=HEAD"),
        ("=head", "write NAME=HEAD"),
        ("two words=h", "write NAME=HEAD"),
        ("a=h:candidates", "write NAME=HEAD"),
        ("a=h:candidates=1,depth", "'depth' is no option=value pair"),
        ("a=h:candidate=1", "no option 'candidate'; the nearest is candidates"),
        ("a=h:budget=1", "there is no option 'budget'"),
        ("a=h:zebra=1", "there are drafter, candidates"),
        ("a=h:candidates=many", "candidates is 'many': use a whole number"),
        ("a=h:candidates=none", "use a whole number"),
        ("a=h:draft_cutoff=low", "draft_cutoff is 'low': use a number"),
        ("a=h:drafter=oracle", "use one of auto, head, lookup, head"),
        ("a=h:candidates=1,candidates=2", "candidates is given twice"),
        ("a=h:candidates=0", "--method a: candidates is 0: use 1 or more"),
        ("a=h:draft_cutoff=2", "--method a: draft_cutoff is 2.0"),
    ],
)
def test_what_is_wrong_with_a_method_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_method(text)


def test_names_are_distinct_and_not_the_baselines() -> None:
    with pytest.raises(ValueError, match="--method a: the name is given twice"):
        parse_methods(["a=h", "b=h", "a=i"])
    with pytest.raises(ValueError, match="--method AR: the name is the baseline's"):
        parse_methods(["AR=h"])


def test_each_method_gets_an_engine_over_the_same_target(
    run: Runner, loads: list[tuple[str | None, EngineConfig]]
) -> None:
    methods = ["--method", "dflash=flat:candidates=1", "--method", "lookup", "--method", "both:drafter=head+lookup"]
    status, out, _ = run("--head", "causal", *methods, "--budgets", "3", "--max-tokens", "6", "--draft-depth", "4")
    assert status == 0
    assert [head for head, _ in loads] == [None, "flat", None, "causal"]
    assert [(config.drafter, config.candidates) for _, config in loads] == [
        ("auto", 32),
        ("head", 1),
        ("lookup", 32),
        ("head+lookup", 32),
    ]
    assert {(config.draft_depth, config.max_running, config.prefix_cache) for _, config in loads} == {(4, 1, False)}
    assert [row[1] for row in cells(out, SPEED)] == ["AR", "dflash", "lookup", "both"]
    assert "method dflash: flat, candidates=1\n" in out
    assert "method lookup: drafter=lookup\n" in out


def test_methods_without_a_head_are_refused(run: Runner) -> None:
    for arguments, message in (
        (["--method", "mine"], "--method mine has no draft head"),
        (["--method", "a=flat:drafter=lookup"], "--method a names a draft head, which drafter=lookup does not use"),
        (["--method", "a=flat:drafter=oracle"], "drafter is 'oracle'"),
        (["--budgets", "4"], "needs a draft head"),
    ):
        status, _, err = run(*arguments)
        assert (status, err.count("\n")) == (2, 1)
        assert message in err


# -- what is printed and written --------------------------------------------------------------------------------------


def test_bench_prints_tables_and_writes_them(run: Runner, tmp_path: Path) -> None:
    as_json, as_markdown = tmp_path / "out.json", tmp_path / "out.md"
    arguments = ["--budgets", "0, 4,8,4", "--prompts", "2", "--max-tokens", "8", "--repeats", "2"]
    status, out, err = run("--head", "causal", *arguments, "--json", str(as_json), "--markdown", str(as_markdown))
    assert status == 0
    assert "small: 2/2 prompts" in err
    for fact in ("cpu:", "cores:", "native_bf16:", "dtype: float32", "torch:", "threads:", "baseline: AR, no drafter"):
        assert fact in out
        assert fact in as_markdown.read_text()
    assert [row[:3] for row in cells(out, SPEED)] == [
        ["small", "AR", "0"],
        ["small", "head", "4"],
        ["small", "head", "8"],
    ]
    assert cells(as_markdown.read_text(), PHASE_TABLE) == cells(out, PHASE_TABLE)
    result = json.loads(as_json.read_text())
    assert result["host"]["dtype"] == "float32"
    assert result["settings"]["repeats"] == 2
    assert result["settings"]["methods"] == [{"name": "head", "head": None, "options": {}}]
    for row, drafted in zip(result["rows"], (False, True, True), strict=True):
        assert row["prompts"] == row["identical"] == 2
        assert row["acceptance_length"] >= 1
        assert row["tokens_per_second"] > 0
        assert set(row["phase_ms"]) == set(PHASES)
        assert (row["phase_ms"]["draft"] > 0) == (row["nodes"] > 0) == drafted
        assert 0 < row["steering_share"] < row["host_share"] < 1
    assert result["rows"][0]["ratio"] == 1


def test_the_runs_of_a_prompt_alternate_in_an_order_that_rotates(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, order = timed_run, []

    def noted(llm: LLM, prompt: Sequence[int], params: SamplingParams, budget: int) -> Run:
        order.append((type(llm.engine.drafter).__name__, budget))
        return honest(llm, prompt, params, budget)

    monkeypatch.setattr(bench, "timed_run", noted)
    methods = ["--method", "head", "--method", "lookup", "--budgets", "2,4", "--max-tokens", "4", "--repeats", "2"]
    assert run("--head", "causal", *methods, "--prompts", "2")[0] == 0
    once = [("NoneType", 0), *((drafter, budget) for drafter in ("HeadDrafter", "LookupDrafter") for budget in (2, 4))]
    rounds = [order[start : start + 5] for start in range(0, len(order), 5)]
    assert rounds == [once, [*once[1:], once[0]], [*once[1:], once[0]], [*once[2:], *once[:2]]]


def one(tokens: tuple[int, ...], seconds: float, accepted: tuple[int, ...] = (1, 1)) -> Run:
    times = PhaseTimes(2, dict.fromkeys(PHASES, 0.001) | {"draft": 0.004, "verify": 0.006})
    return Run(tokens, "", "length", 0.1, seconds, 4, accepted, times, 6)


def test_rows_count_differences_pair_speeds_and_average_phases() -> None:
    baseline = [one((5, 1), seconds) for seconds in (2.0, 2.0, 4.0, 4.0)]
    runs = [one((5, 1), 1.0), one((5, 1), 1.0, (2, 0)), one((5, 1), 2.0), one((5, 9), 2.0)]
    row = summarise("w", "head", 8, runs, baseline, 2, [Flip("p", 1, 0.25)])
    assert (row.prompts, row.identical) == (2, 1)
    assert row.ratio == row.ratio_low == row.ratio_high == 2.0
    assert row.acceptance_length == 2.0
    assert row.acceptance == [7 / 8, 1 / 8]
    assert row.nodes == 3.0
    assert row.phase_ms["verify"] == pytest.approx(3.0)
    assert row.host_share == pytest.approx(6 / 16)
    assert row.steering_share == pytest.approx(3 / 16)
    text = markdown([row], temperature=0.0)
    assert cells(text, SPEED)[0][-2:] == ["1 of 2", "0.25"]
    assert cells(text, PHASE_TABLE)[0][3:] == [
        "8.00",
        "2.00",
        "0.50",
        "0.50",
        "3.00",
        "0.50",
        "0.50",
        "1.00",
        "37.5% (18.7%)",
    ]
    assert cells(text, "| workload | method | budget | ≥ 1")[0][3:] == ["88%", "12%"]


def forge(monkeypatch: pytest.MonkeyPatch, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
    """Change the answers of all runs that draft."""
    honest = timed_run

    def forged(llm: LLM, prompt: Sequence[int], params: SamplingParams, budget: int) -> Run:
        found = honest(llm, prompt, params, budget)
        return found if budget == 0 else Run(**(vars(found) | {"token_ids": change(found.token_ids)}))

    monkeypatch.setattr(bench, "timed_run", forged)


def test_a_difference_in_float32_is_status_1(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    forge(monkeypatch, lambda tokens: (*tokens[:2], (tokens[2] + 1) % 200, *tokens[3:]))
    status, out, _ = run("--head", "causal", "--budgets", "4", "--max-tokens", "6")
    assert status == 1
    assert "NOT LOSSLESS" in out
    assert cells(out, SPEED)[1][-2] == "0 of 3"


def test_files_and_numbers_that_are_wrong(run: Runner, tmp_path: Path) -> None:
    status, _, err = run("--data", str(tmp_path / "none.jsonl"))
    assert (status, "there is no file" in err) == (2, True)
    status, _, err = run("--data", str(tmp_path / "small.jsonl"), str(tmp_path / "small.jsonl"))
    assert (status, "two files of one name" in err) == (2, True)
    for text in ("8;16", "8,,16", "", "-1", "²", "9" * 5000):
        with pytest.raises(ValueError, match=r"--batch .* 8,16,32") as caught:
            workload.parse_numbers("--batch", text)
        assert len(str(caught.value)) < 200
    assert workload.parse_numbers("--budgets", "8,16,8, 0") == [8, 16, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no rows"),
        ("{", "line 1: not JSON"),
        ('\n{"id": "a"}\n', "line 2: a row must be"),
        ('{"turns": []}', "line 1"),
        ('{"turns": [""]}', "line 1"),
        ('{"turns": "hello"}', "line 1"),
        ("[]", "line 1"),
        ("\udcff", "line 1: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        ("9" * 5000, "line 1: not JSON"),
        ('{"turns": ["hi"], "id": 1}\n{"turns": ["ho"], "id": "1"}', "line 2: an earlier row has the id 1 too"),
        ('{"turns": ["\\ud800"], "id": "s/1"}', "bad, prompt s/1: text holds a lone surrogate"),
        ('{"turns": ["hi"]}\n{"turns": ["' + "x" * 300 + '"], "id": "long/1"}', "prompt long/1: AR: the prompt has"),
    ],
)
def test_bad_prompt_files(content: str, message: str, run: Runner, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content, errors="surrogateescape")
    status, _, err = run("--data", str(path), "--head", "causal", "--budgets", "4")
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


def test_rows_without_an_id_are_named_after_their_line(tmp_path: Path) -> None:
    path = tmp_path / "bare.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"turns": ["hi"]}\r\n\n{"turns": ["ho", "and"], "id": null}\nwhat is not asked for is not read'
    )
    assert workload.read_workload(path, 2).prompts == [(f"{path}, line 1", "hi"), (f"{path}, line 3", "ho")]


@pytest.mark.parametrize("option", ["--json", "--markdown", "--trace", "--plot"])
def test_results_that_cannot_be_written_are_refused_before_anything_is_measured(
    option: str, run: Runner, loads: list[tuple[str | None, EngineConfig]], tmp_path: Path
) -> None:
    for path in (tmp_path / "none" / "out", tmp_path):
        if option != "--plot" or path != tmp_path:  # a folder can be a prefix
            status, _, err = run("--head", "causal", "--budgets", "4", option, str(path))
            assert (status, err.count("\n")) == (2, 1)
            assert f"{option} {path}" in err
            assert "cannot be written" in err
    assert not loads
    status, _, err = run("--head", "causal", "--json", str(tmp_path / "out"), "--markdown", f"{tmp_path}/./out")
    assert (status, err.count("\n")) == (2, 1)
    assert "--json names that file too" in err
    kept = tmp_path / "kept"
    kept.write_text("before")
    workload.check_outputs({"--json": str(kept), "--trace": str(tmp_path / "new"), "--markdown": None})
    assert kept.read_text() == "before"
    assert not (tmp_path / "new").exists()


def test_budgets_that_no_pass_holds_are_refused(run: Runner) -> None:
    status, _, err = run("--head", "causal", "--budgets", "8,64", "--max-batch-tokens", "64")
    assert (status, err.count("\n")) == (2, 1)
    assert "--budgets 64: a target pass takes 64 tokens, so 63 nodes" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--validate"],
        ["--shape", "qwen3-8b"],
        ["--device-profile", "h100"],
        ["--save-profile", "here.json"],
        ["--batch", "1"],
        ["--context", "9"],
        ["--kernels", "floor"],
        ["--host-ms", "1"],
    ],
)
def test_options_of_a_simulation_need_one(arguments: list[str], run: Runner) -> None:
    status, _, err = run("--head", "causal", *arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert f"{arguments[0]} belongs to --simulate" in err


def test_the_default_method_is_named_after_its_drafter(run: Runner) -> None:
    status, out, _ = run("--head", "causal", "--drafter", "head+lookup", "--budgets", "4", "--max-tokens", "4")
    assert (status, cells(out, SPEED)[-1][1]) == (0, "head+lookup")


def test_plots_are_drawn(run: Runner, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    prefix = tmp_path / "plot"
    methods = ["--method", "flat=flat", "--method", "causal=causal"]
    trace = str(tmp_path / "trace.jsonl")
    assert run(*methods, "--budgets", "2,4", "--max-tokens", "4", "--plot", str(prefix), "--trace", trace)[0] == 0
    for name in ("speedup", "phases", "tau"):
        assert (tmp_path / f"plot-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_plots_need_matplotlib(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, err = run("--head", "causal", "--plot", str(tmp_path / "plot"))
    assert (status, "install jetflow-serve[plots]" in err) == (2, True)


# -- traces -----------------------------------------------------------------------------------------------------------


def engines(model: Decoder, head: DraftHead, **options: object) -> Iterator[LLM]:
    """Fresh engines that draft with `head`."""
    while True:
        yield LLM(Engine(model, head=head, config=EngineConfig(num_pages=64, **options)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("conditioning", "options", "temperature"),
    [
        ("pairwise", {"candidates": 97}, 0.0),
        ("none", {"candidates": 16}, 0.0),
        ("pairwise", {"candidates": 97, "drafter": "head+lookup"}, 0.8),
    ],
)
def test_replayed_acceptance_is_that_of_real_decoding(
    conditioning: str, options: dict[str, object], temperature: float
) -> None:
    model = tiny_model()
    head = tiny_head(model, conditioning=conditioning)
    head.pack()
    fresh = engines(model, head, **options)
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=1)
    prompts = [(f"p/{i}", torch.randint(0, 96, (5 + i,)).tolist()) for i in range(3)]
    recorder = next(fresh)
    traces = [record_trace(recorder, "head", "w", prompt, params, 160) for prompt in prompts]
    recorder.engine.check_idle()
    assert not isinstance(recorder.engine.drafter, Recorder)
    plain = LLM(Engine(model, config=EngineConfig(num_pages=64)))
    for trace, (name, prompt) in zip(traces, prompts, strict=True):
        answer = plain.generate([prompt], params, 0)[0].token_ids
        assert (trace.prompt, trace.prompt_tokens, trace.decode_tokens) == (name, len(prompt), len(answer) - 1)
        assert trace.sizes[-1] == 0
    real = next(fresh)
    taus = []
    for budget in (1, 16, 60, 160):
        runs = [timed_run(real, prompt, params, budget) for _, prompt in prompts]
        for trace, run in zip(traces, runs, strict=True):
            steps = trace.steps(budget)
            assert tuple(accepted for *_, accepted in steps) == run.accepted
            assert sum(nodes for _, nodes, _ in steps) == run.nodes
        taus.append(sum(run.decode_tokens for run in runs) / sum(run.decode_steps for run in runs))
        assert replayed_tau(traces, budget) == taus[-1]
    assert taus[-1] > max(1.1, taus[0]), "the trees must have been worth something for this to mean anything"


def test_tau_only_decodes_once_a_method_and_replays_the_rest(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "timed_run", lambda *_: pytest.fail("τ alone needs no timed run"))
    path, as_json = tmp_path / "traces.jsonl", tmp_path / "out.json"
    arguments = ["--method", "flat=flat", "--method", "lookup", "--budgets", "2,8", "--max-tokens", "12", "--tau-only"]
    status, out, err = run(*arguments, "--trace", str(path), "--json", str(as_json))
    assert status == 0
    assert "small, trace of lookup: 3/3 prompts" in err
    traces = read_traces(path)
    assert [(trace.method, trace.prompt) for trace in traces] == [
        (method, f"s/{i}") for method in ("flat", "lookup") for i in range(3)
    ]
    assert {trace.budget for trace in traces} == {8}
    table = cells(out, "| workload | method | budget 2 | budget 8 |")
    assert [row[:2] for row in table] == [["small", "flat"], ["small", "lookup"]]
    for row in json.loads(as_json.read_text())["replays"]:
        own = [trace for trace in traces if trace.method == row["method"]]
        assert row["acceptance_length"] == replayed_tau(own, row["budget"])
        assert row["acceptance"] == replayed_acceptance(own, row["budget"])


def test_a_benchmark_records_traces_beside_its_measurements(run: Runner, tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    status, out, _ = run("--head", "causal", "--budgets", "4", "--max-tokens", "8", "--trace", str(path))
    assert status == 0
    measured = float(cells(out, SPEED)[1][5])
    assert replayed_tau(read_traces(path), 4) == pytest.approx(measured, abs=0.005)


def test_a_trace_knows_how_often_the_head_ran() -> None:
    model = tiny_model()
    heads: list[tuple[Head | None, dict[str, object], int]] = [
        (tiny_head(model), {}, 1),
        (tiny_head(model), {"drafter": "head+lookup", "draft_passes": 2}, 2),
        (tiny_head(model), {"drafter": "lookup"}, 0),
        (tiny_eagle(model, depth=4), {}, 4),
    ]
    for head, options, passes in heads:
        if head is not None:
            head.pack()
        llm = LLM(Engine(model, head=head, config=EngineConfig(num_pages=64, **options)))  # type: ignore[arg-type]
        assert record_trace(llm, "m", "w", ("p", [1, 2, 1]), SamplingParams(max_tokens=4), 4).passes == passes


def test_there_is_no_trace_without_a_drafter(run: Runner, tmp_path: Path) -> None:
    for arguments in (["--tau-only"], ["--trace", str(tmp_path / "t")], ["--plot", str(tmp_path / "p")]):
        status, _, err = run("--budgets", "0", *arguments)
        assert (status, err.count("\n")) == (2, 1)
        assert "give --budgets above 0" in err
    plain = LLM(Engine(tiny_model()))
    with pytest.raises(ValueError, match="no drafter"):
        record_trace(plain, "AR", "w", ("p", [1, 2]), SamplingParams(max_tokens=4), 4)


def test_an_answer_of_one_token_decodes_nothing(run: Runner) -> None:
    for arguments in (["--tau-only"], []):
        status, _, err = run("--head", "causal", "--budgets", "4", "--max-tokens", "1", *arguments)
        assert (status, "ended with its first token" in err) == (2, True)


def test_rows_of_the_table_can_have_no_accepted_node() -> None:
    row = summarise("w", "head", 8, [one((5, 1), 1.0, (0, 0))], [one((5, 1), 1.0)], 1)
    assert isinstance(row, Row)
    assert row.acceptance == []
    assert "≥ 1" not in markdown([row], temperature=0.0)
