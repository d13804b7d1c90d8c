"""The simulator: shapes and costs counted by hand, what follows from a trace, calibration, and the whole commands."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.llm import LLM
from jetflow_core.weights import open_head
from jetflow_serve import calibrate, choice, cli, simulate, validation
from jetflow_serve.calibrate import Calibration, StepTime, fit, non_negative_fit
from jetflow_serve.demo import demo_head
from jetflow_serve.devices import GPUS, Gpu, Measured, find_device, save_profile, step_seconds
from jetflow_serve.shapes import SHAPES, HeadShape, Shape, named_shape, read_shape, shape_of
from jetflow_serve.simulate import Acceptance, acceptance, choose_budgets, predict, select
from jetflow_serve.simulate_report import best
from jetflow_serve.step_model import Call, decode_step, draft_pass, observe, target_pass
from jetflow_serve.trace import Trace, write_traces
from jetflow_serve.validation import Decode, compare
from jetflow_triton.roofline import H200, Cost, Load, Model
from serve.support import byte_tokenizer
from tiny import tiny_config, tiny_eagle, tiny_head, tiny_model

HIDDEN, LAYERS, HEADS, KV, WIDTH, INNER, VOCAB = 64, 3, 4, 2, 16, 96, 1000
DENSE = Model("dense", HIDDEN, LAYERS, HEADS, KV, WIDTH, INNER, VOCAB)
SPARSE = Model("sparse", HIDDEN, LAYERS, HEADS, KV, WIDTH, INNER, VOCAB, experts=8, top_k=2)
HEAD = HeadShape(Model("head", HIDDEN, 2, HEADS, KV, WIDTH, INNER, 200), block=5, taps=3 * HIDDEN, pairwise=8)
SHAPE = Shape("tiny", (DENSE,), HEAD)
MEASURED = Measured("box", (1, 4, 16), (1e9, 3e9, 8e9), 1e-5, 1e-10, 2e-11, 1e-3, "made up")
ATTENTION_MATRICES = HIDDEN * (HEADS + 2 * KV) * WIDTH + HEADS * WIDTH * HIDDEN


def trace(seed: int = 0, tokens: int = 40, budget: int = 64, **fields: Any) -> Trace:
    """An answer with random ranks that a tree of `budget` nodes could have."""
    draw = random.Random(seed)
    positions: list[list[int]] = []
    for left in range(tokens - 1, -1, -1):
        ranks: list[int] = []
        while len(ranks) < left and (rank := (ranks or [0])[-1] + draw.randrange(1, 20)) <= budget:
            ranks.append(rank)
        positions.append(ranks)
    scores = [[-float(depth) for depth in range(len(ranks))] for ranks in positions]
    names = {"method": "head", "workload": "small", "prompt": f"s/{seed}", "prompt_tokens": 9, "passes": 1} | fields
    return Trace(budget=budget, positions=positions, scores=scores, sizes=[budget] * (tokens - 1) + [0], **names)


def total(calls: Iterable[Call], field: str, *kinds: str) -> float:
    return sum(call.times * getattr(call.cost, field) for call in calls if not kinds or call.kind in kinds)


# -- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "parameters"), [("qwen3-8b", 1_048_626_432), ("qwen3-30b-a3b", 473_995_264)])
def test_named_heads_are_the_public_ones(name: str, parameters: int) -> None:
    """Parameters of the public heads, but for their norms."""
    shape = SHAPES[name]
    assert shape.head is not None
    plain = replace(shape, head=replace(shape.head, pairwise=0))
    assert (plain.weight_bytes - replace(shape, head=None).weight_bytes) / 2 == pytest.approx(parameters, rel=2e-4)


def test_named_targets_have_their_size() -> None:
    sizes = {name: replace(shape, head=None).weight_bytes / 2 for name, shape in SHAPES.items()}
    assert sizes == {"qwen3-8b": pytest.approx(8.19e9, rel=1e-3), "qwen3-30b-a3b": pytest.approx(30.53e9, rel=1e-3)}


@pytest.mark.parametrize("kind", ["dense", "moe", "llama"])
def test_a_shape_counts_the_weights_of_its_model(kind: str) -> None:
    model = tiny_model(kind)
    head = tiny_head(model, draft_vocab=torch.arange(40))
    shape = shape_of(model.config, head.config, "tiny")
    assert sum(stack.layers for stack in shape.stacks) == 4
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
    assert replace(shape, head=None).weight_bytes == 2 * weights
    own = sum(p.numel() for name, p in head.named_parameters() if p.ndim > 1 and not name.startswith("_rows"))
    tables = head.config.pairwise_size * 3 * 40
    assert shape.weight_bytes == 2 * (weights + own + tables)


def test_layers_are_sparse_where_the_configuration_says() -> None:
    dense, sparse = shape_of(tiny_config("moe"), None, "tiny").stacks
    assert (dense.layers, dense.inner, dense.experts) == (2, 48, 0)
    assert (sparse.layers, sparse.inner, sparse.experts, sparse.top_k) == (2, 24, 8, 2)
    assert shape_of(tiny_config(tie_word_embeddings=True), None, "tiny").tables == 1


def test_heads_of_other_targets_are_refused(tmp_path: Path) -> None:
    head = tiny_head(tiny_model())
    head.save(tmp_path)
    with pytest.raises(ValueError, match="they do not belong together"):
        shape_of(tiny_config(hidden_size=64), head.config, "wide")
    with pytest.raises(ValueError, match="hidden size 32, Qwen3-8B has 4096"):
        named_shape("qwen3-8b", str(tmp_path))
    with pytest.raises(ValueError, match="65 query heads a KV head"):
        shape_of(tiny_config(num_heads=65, num_kv_heads=1), None, "odd")
    with pytest.raises(ValueError, match="use qwen3-8b, qwen3-30b-a3b, or --model"):
        named_shape("gpt-5", None)


def test_the_demo_shape_is_read_without_its_weights() -> None:
    chosen = choice.choose_model(None, None, None)
    shape = read_shape(chosen.model, chosen.head, chosen.name)
    assert shape.stacks == (Model(chosen.name, 576, 30, 9, 3, 64, 1536, 49152),)
    assert shape.tables == 1
    assert shape.head is not None
    assert shape.head.taps == 5 * 576


# -- steps, counted by hand -------------------------------------------------------------------------------------------


def test_products_of_a_target_pass() -> None:
    """Every weight is read once and multiplied with every row."""
    rows = 2 * 5
    calls = [call for call in target_pass(SHAPE, Load(2, 5, 100)) if call.kind == "product"]
    weights = LAYERS * (ATTENTION_MATRICES + 3 * HIDDEN * INNER) + VOCAB * HIDDEN
    assert total(calls, "flops") == 2 * rows * weights
    ins = LAYERS * (HIDDEN + HEADS * WIDTH + HIDDEN + INNER) + HIDDEN
    outs = LAYERS * ((HEADS + 2 * KV) * WIDTH + HIDDEN + 2 * INNER + HIDDEN) + VOCAB
    assert total(calls, "bytes") == 2 * (weights + rows * (ins + outs))
    assert all(call.rows == rows for call in calls)
    assert total(calls, "launches") == 4 * LAYERS + 1


def test_attention_reads_the_context_of_every_request_in_every_layer() -> None:
    short, long = (list(target_pass(SHAPE, Load(3, 2, context))) for context in (100, 164))
    assert total(long, "bytes") - total(short, "bytes") == LAYERS * 3 * 64 * 2 * KV * WIDTH * 2
    [attention] = [call for call in long if call.kind == "attention"]
    assert attention.times == LAYERS
    assert attention.scored == 4 * 6 * HEADS * WIDTH * (164 + 2)


def test_a_sparse_layer_reads_the_experts_that_some_token_is_expected_to_choose() -> None:
    """8 experts, 2 a token: 3 tokens choose 8 · (1 − 0.75³) = 4.625 of them."""
    [experts] = [call for call in target_pass(Shape("s", (SPARSE,), None), Load(1, 3, 0)) if call.kind == "experts"]
    assert experts.times == LAYERS
    own = 3 * (2 * HIDDEN * 2 + 2 * 8)
    assert experts.cost.bytes == pytest.approx(4.625 * 3 * HIDDEN * INNER * 2 + own)
    assert experts.cost.flops == 6 * 3 * 2 * HIDDEN * INNER
    assert experts.rows == pytest.approx(3 * 2 / 4.625)
    everything = Shape("s", (replace(SPARSE, top_k=8),), None)
    [experts] = [call for call in target_pass(everything, Load(1, 3, 0)) if call.kind == "experts"]
    assert experts.cost.bytes == 8 * 3 * HIDDEN * INNER * 2 + 3 * (2 * HIDDEN * 2 + 8 * 8)


def test_a_draft_is_one_pass_over_the_blocks_and_the_transitions() -> None:
    batch, depths = 2, 4
    calls = list(draft_pass(HEAD, batch, 50))
    rows = batch * 5
    layers = 2 * rows * 2 * (ATTENTION_MATRICES + 3 * HIDDEN * INNER)
    logits = 2 * batch * depths * 200 * HIDDEN
    first = 2 * batch * (2 * 16 * HIDDEN + 8 * HIDDEN)
    hidden = 2 * batch * (depths - 1) * 16 * HIDDEN
    assert total(calls, "flops", "product") == layers + logits + first + hidden
    pairs = batch * (depths - 1) * 32
    scores = 2 * pairs * 32 * 8
    [transitions] = [call for call in calls if call.kind == "other" and call.cost.flops == scores]
    assert transitions.cost.bytes == 2 * (3 * pairs * 8 + pairs * 32)
    plain = list(draft_pass(replace(HEAD, pairwise=0), batch, 50))
    assert total(plain, "flops", "product") == layers + logits
    shortest = list(draft_pass(replace(HEAD, block=2), batch, 50))  # one depth: no transitions
    assert total(shortest, "flops", "product") == layers * 2 / 5 + 2 * batch * 200 * HIDDEN + first
    assert {call.phase for call in calls} == {"draft"}


def test_committed_tokens_are_fused_and_written_for_every_layer_of_the_head() -> None:
    calls = list(observe(HEAD, 7))
    stacked = 2 * 2 * KV * WIDTH
    assert total(calls, "flops", "product") == 2 * 7 * (HEAD.taps * HIDDEN + stacked * HIDDEN)
    assert total(calls, "launches") == 2 + 1 + 2 * 2


def test_what_a_step_consists_of() -> None:
    plain = list(decode_step(SHAPE, 1, 0, 10, observed=False))
    watched = list(decode_step(SHAPE, 1, 0, 10))
    drafted = list(decode_step(SHAPE, 1, 8, 10, 1.5))
    assert plain == list(target_pass(SHAPE, Load(1, 1, 10)))
    assert watched[len(plain) :] == list(observe(HEAD, 1))
    assert {call.phase for call in drafted} == {"draft", "target", "commit"}
    assert [call for call in drafted if call.phase == "target"] == list(target_pass(SHAPE, Load(1, 9, 10)))
    headless = list(decode_step(replace(SHAPE, head=None), 1, 8, 10, 1.5))
    assert {call.phase for call in headless} == {"target", "commit"}


# -- devices ----------------------------------------------------------------------------------------------------------


def test_a_gpu_takes_the_larger_of_memory_and_arithmetic_and_its_launches() -> None:
    gpu = GPUS["h200"]
    small = Call("target", "product", 3, Cost(4.8e9, 1e9, 9e9, 2e9, 1, 2), 1, 0)
    assert gpu.seconds(small) == pytest.approx(3 * (1e-3 / 0.9 + 2 * 2e-6))
    large = replace(small, cost=replace(small.cost, flops=989e9))
    assert gpu.seconds(large) == pytest.approx(3 * (1e-3 / 0.75 + 2 * 2e-6))
    own = replace(small, kind="other")
    attained = replace(H200, bandwidth=0.9 * 4.8e12, flops=0.75 * 989e12)
    assert gpu.seconds(own) == pytest.approx(3 * small.cost.expected(attained))
    assert replace(gpu, kernels="floor").seconds(own) == pytest.approx(gpu.seconds(small))


def test_a_measured_machine_is_exact_where_it_was_measured_and_linear_in_between() -> None:
    def product(rows: float) -> float:
        return MEASURED.seconds(Call("target", "product", 1, Cost(1, rows * 1e6, 0, 0, 1, 1), rows, 0))

    assert [product(rows) for rows in (1, 4, 16)] == pytest.approx([1e-3, 4e-3 / 3, 2e-3])
    assert product(10) == pytest.approx((product(4) + product(16)) / 2)
    assert product(32) == pytest.approx(2 * product(16))
    other = Call("target", "attention", 2, Cost(1e6, 5, 0, 0, 1, 1), 1, 3e6)
    assert MEASURED.seconds(other) == pytest.approx(2 * (1e-5 + 1e-4 + 6e-5))
    assert MEASURED.seconds(replace(other, kind="other")) == pytest.approx(2 * (1e-5 + 1e-4))


def test_profiles_are_files(tmp_path: Path) -> None:
    path = tmp_path / "box.json"
    save_profile(MEASURED, path)
    assert find_device(str(path), "design") == MEASURED
    assert find_device("B200", "floor") == replace(GPUS["b200"], kernels="floor")
    for change, message in (
        ({"rows": [4, 1, 16]}, "rising order"),
        ({"product_flops": [1e9]}, "one for each"),
        ({"product_flops": [1e9, 0, 1e9]}, "above 0"),
        ({"per_call": -1}, "0 or more"),
        ({"rows": 3}, "not a device profile"),
        ({"colour": "red"}, "not a device profile"),
        ({"memory": "much"}, "not a device profile"),
        ({"memory": 0}, "memory must be bytes above 0"),
    ):
        path.write_text(json.dumps(asdict(MEASURED) | change))
        with pytest.raises(ValueError, match=message):
            find_device(str(path), "design")
    for content in ("[1]", "[" * 10**5):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"not a device profile: .*; make one with --device-profile here"):
            find_device(str(path), "design")
    with pytest.raises(ValueError, match="use h100, h200, b200, here"):
        find_device("a100", "design")


# -- predictions ------------------------------------------------------------------------------------------------------


def test_one_prediction_by_hand() -> None:
    accepted = [Acceptance(0, 1.0, 0.0), Acceptance(8, 2.5, 7.6)]
    plain, drafted = predict(MEASURED, SHAPE, accepted, [3], [100], host=2e-3)
    alone = step_seconds(MEASURED, decode_step(SHAPE, 3, 0, 100, observed=False), drafts=False) + 2e-3
    assert (plain.speedup, plain.tau, plain.host_ms) == (pytest.approx(1), 1.0, pytest.approx(2))
    assert plain.tokens_per_second == pytest.approx(3 / alone)
    step = sum(MEASURED.seconds(call) for call in decode_step(SHAPE, 3, 8, 100, 1.5)) + 1e-3 + 2e-3
    assert drafted.step_ms == pytest.approx(1e3 * step)
    assert drafted.host_ms == pytest.approx(3)
    parts = drafted.target_ms + drafted.draft_ms + drafted.commit_ms + drafted.host_ms
    assert parts == pytest.approx(drafted.step_ms)
    assert drafted.tokens_per_second == pytest.approx(3 * 2.5 / step)
    assert drafted.speedup == pytest.approx(2.5 * alone / step)


def test_what_does_not_fit_is_never_best() -> None:
    accepted = [Acceptance(0, 1.0, 0.0), Acceptance(8, 2.5, 8.0)]
    rows = list(predict(GPUS["h100"], SHAPES["qwen3-30b-a3b"], accepted, [1, 4096], [1024], 0.0))
    assert [row.fits for row in rows] == [True, True, False, False]
    assert best(rows) in rows[:2]
    assert best(rows[2:]) is None
    cache = SHAPES["qwen3-8b"].cache_bytes(Load(2, 9, 1015))
    assert cache == 2 * 1024 * 2 * 8 * 128 * (36 + 5) * 2


NODES = st.integers(1, 256)
BATCH = st.integers(1, 64)
CONTEXT = st.integers(0, 32768)


@given(
    shape=st.sampled_from([*SHAPES.values(), SHAPE]), batch=BATCH, nodes=NODES, context=CONTEXT, more=st.integers(1, 99)
)
@settings(deadline=None, max_examples=60)
def test_more_work_never_takes_less_time(shape: Shape, batch: int, nodes: int, context: int, more: int) -> None:
    # Launches are free here: from a full grid on attention has no splits to merge, and a launch a layer less.
    for device in (Gpu(replace(H200, launch=0.0), 141e9, kernels="floor"), MEASURED):

        def seconds(batch: int, nodes: int, context: int, device: Gpu | Measured = device) -> float:
            return step_seconds(device, decode_step(shape, batch, nodes, context, 2.0), drafts=True)

        base = seconds(batch, nodes, context) * (1 - 1e-9)
        assert base <= seconds(batch + more, nodes, context)
        assert base <= seconds(batch, nodes + more, context)
        assert base <= seconds(batch, nodes, context + more)


@given(batch=BATCH, nodes=NODES, context=CONTEXT)
@settings(deadline=None, max_examples=40)
def test_our_kernels_are_between_the_floor_and_what_a_slower_chip_makes_of_them(
    batch: int, nodes: int, context: int
) -> None:
    for shape in SHAPES.values():
        calls = list(decode_step(shape, batch, nodes, context, 2.0))
        h100, h200, b200 = (step_seconds(GPUS[name], calls, drafts=True) for name in ("h100", "h200", "b200"))
        assert step_seconds(replace(GPUS["h200"], kernels="floor"), calls, drafts=True) <= h200 <= h100
        assert b200 <= h200 * 1.13  # its 148 multiprocessors are emptier than 132 where a kernel has few programs


@given(seed=st.integers(0, 99), tau=st.floats(1, 10))
@settings(deadline=None, max_examples=30)
def test_a_speed_up_is_below_tau_and_budgets_never_accept_less(seed: int, tau: float) -> None:
    traces = [trace(seed), trace(seed + 1)]
    taus = [acceptance(traces, budget).tau for budget in (0, 1, 4, 16, 64)]
    assert taus[0] == 1
    [row] = predict(GPUS["h100"], SHAPES["qwen3-8b"], [Acceptance(16, tau, 16)], [4], [1024])
    assert row.speedup < tau
    single = trace(seed)
    accepted = [[single.accepted(position, budget) for position in range(40)] for budget in (0, 1, 4, 16, 64)]
    assert all(a <= b for low, high in itertools.pairwise(accepted) for a, b in zip(low, high, strict=True))


@given(seed=st.integers(0, 999), budget=st.integers(0, 64))
@settings(deadline=None, max_examples=60)
def test_replay_is_what_a_walk_over_the_answer_gives(seed: int, budget: int) -> None:
    traces = [trace(seed, tokens=30), trace(seed + 1, tokens=7)]
    passes = nodes = tokens = 0
    for each in traces:
        left = list(range(len(each.positions)))
        while left:
            here = left[0]
            kept = [rank for rank in each.positions[here] if rank <= budget]
            passes += 1
            nodes += min(budget, each.sizes[here])
            tokens += len(kept) + 1
            left = left[len(kept) + 1 :]
    found = acceptance(traces, budget)
    assert tokens == 37
    assert found.tau == pytest.approx(37 / passes)
    assert found.nodes == pytest.approx(nodes / passes)


def test_budgets_and_methods_are_chosen_from_the_trace() -> None:
    traces = [trace(0), trace(1, budget=40)]
    assert choose_budgets(None, traces) == [0, 8, 16, 32]
    assert choose_budgets("64,5", traces) == [0, 5, 64]
    with pytest.raises(ValueError, match="holds trees of 40 nodes"):
        acceptance(traces, 64)
    with pytest.raises(ValueError, match="nothing was decoded"):
        acceptance([Trace("head", "small", "p", 5, 8, [], [], [], 1)], 4)
    mixed = [trace(0), trace(0, method="lookup")]
    assert select(mixed, "lookup") == mixed[1:]
    with pytest.raises(ValueError, match="head, lookup: choose one with --method"):
        select(mixed, None)
    with pytest.raises(ValueError, match="--method chain: the file has traces of head, lookup"):
        select(mixed, "chain")


# -- calibration ------------------------------------------------------------------------------------------------------


def test_a_fit_finds_the_prices_behind_the_steps() -> None:
    shape = SHAPES["qwen3-8b"]
    steps = [StepTime(nodes, context, 1.0, 0.0) for nodes in (0, 4, 24, 96) for context in (16, 640)]
    timed = [
        replace(
            step,
            seconds=step_seconds(
                MEASURED, decode_step(shape, 1, step.nodes, step.context, step.accepted), drafts=step.nodes > 0
            ),
        )
        for step in steps
    ]
    blank = replace(MEASURED, per_call=0.0, per_byte=0.0, per_score=0.0, draft_host=0.0)
    found = fit(blank, shape, timed)
    prices = [found.per_call, found.per_byte, found.per_score, found.draft_host]
    assert prices == pytest.approx([1e-5, 1e-10, 2e-11, 1e-3], rel=1e-6)


def test_prices_are_never_negative() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        matrix = torch.rand(9, 3, dtype=torch.float64, generator=generator)
        wanted = torch.randn(9, dtype=torch.float64, generator=generator)
        x = torch.tensor(non_negative_fit(matrix, wanted), dtype=torch.float64)
        assert (x >= 0).all()
        # The optimality conditions of non-negative least squares: no price would gain by moving.
        slope = matrix.T @ (matrix @ x - wanted)
        assert (slope >= -1e-9).all()
        assert (slope[x > 0].abs() < 1e-9).all()
    assert non_negative_fit(torch.ones(3, 2, dtype=torch.float64), -torch.ones(3, dtype=torch.float64)) == [0, 0]


# -- validation -------------------------------------------------------------------------------------------------------


def test_a_comparison_pairs_prompts_and_takes_medians() -> None:
    traces = [trace(0), trace(1), trace(2)]
    predicted = {budget: [validation.predict(MEASURED, SHAPE, each, budget) for each in traces] for budget in (0, 16)}
    exact = compare(MEASURED, SHAPE, traces, predicted)
    assert [row.budget for row in exact] == [0, 16]
    for row in exact:
        assert (row.speed_error, row.speedup_error) == (pytest.approx(0), pytest.approx(0))
        assert row.tau == row.measured_tau == pytest.approx(acceptance(traces, row.budget).tau)
    slower = {0: predicted[0], 16: [replace(run, seconds=2 * run.seconds) for run in predicted[16]]}
    plain, drafted = compare(MEASURED, SHAPE, traces, slower)
    assert plain.speed_error == pytest.approx(0)
    assert (drafted.speed_error, drafted.speedup_error) == (pytest.approx(1), pytest.approx(1))
    assert drafted.measured_step_ms == pytest.approx(2 * drafted.step_ms)
    assert "Largest error: 100.0% of tokens/s, 100.0% of the speed-up." in validation.markdown(
        [plain, drafted], MEASURED
    )
    run = validation.predict(MEASURED, SHAPE, traces[0], 16, host=1.0)
    assert run.seconds == pytest.approx(predicted[16][0].seconds + run.steps)
    assert Decode(6, 3, 2.0).rate == 3


# -- the commands -----------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["bench", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "small.trace.jsonl"
    write_traces(path, [trace(0), trace(1), trace(2, workload="other")])
    return path


def test_a_prediction_from_the_command_line(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_path, plot = tmp_path / "out.json", tmp_path / "out.png"
    status, out, _ = run(
        capsys, "--simulate", str(recorded), "--shape", "qwen3-30b-a3b", "--device-profile", "b200", "--batch", "1,512",
        "--context", "1024,32768", "--json", str(json_path), "--plot", str(plot), "--markdown", str(tmp_path / "out.md"),
    )  # fmt: skip
    assert status == 0
    assert (tmp_path / "out.md").read_text() == out
    for fact in (
        "Qwen3-30B-A3B on B200 (data sheet: 8 TB/s, 2250 TFLOP/s dense bfloat16, of which 90% and 75% are attained",
        "Added host time: none, as in a CUDA graph.",
        "3 prompts, 120 decoded tokens, trees of 64 nodes",
        "| τ at budget | 0 | 8 | 16 | 32 | 64 |",
        "| all | 1.00 |",
        "does not fit |",
        "how *that* head accepts",
    ):
        assert fact in out
    result = json.loads(json_path.read_text())
    assert [row["budget"] for row in result["rows"]] == 4 * [0, 8, 16, 32, 64]
    assert {(row["batch"], row["context"]) for row in result["rows"]} == {
        (b, c) for b in (1, 512) for c in (1024, 32768)
    }
    assert result["device"]["name"] == "B200"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_demo_is_the_default_and_lookup_runs_no_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "traces.jsonl"
    write_traces(path, [trace(0), trace(0, method="copies", passes=0)])
    status, out, _ = run(capsys, "--simulate", str(path), "--method", "head", "--budgets", "8", "--host-ms", "0.5")
    assert status == 0
    assert "SmolLM2-135M-Instruct on H200" in out
    shipped = demo_head()
    assert shipped is not None
    head = open_head(shipped)[0]
    assert f"Head: {head.num_layers} layers, blocks of {head.block_size}, draft vocabulary of 8,192" in out
    assert f"pairwise conditioning of width {head.pairwise_size}." in out
    assert "Added host time: 0.5 ms a step." in out
    status, out, _ = run(capsys, "--simulate", str(path), "--method", "copies", "--shape", "qwen3-8b")
    assert status == 0
    assert "Head: none." in out
    status, _, err = run(capsys, "--simulate", str(path), "--method", "copies", "--validate", "--data", "x.jsonl")
    assert (status, "copies has none" in err) == (2, True)
    status, _, err = run(capsys, "--simulate", str(path), "--method", "head", "--drafter", "lookup")
    assert (status, "head drafts with a head" in err) == (2, True)
    write_traces(path, [trace(0, method="levels", passes=8)])
    status, _, err = run(capsys, "--simulate", str(path), "--shape", "qwen3-8b")
    assert (status, err.count("\n")) == (2, 1)
    assert "levels drafts with 8 passes of its head" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device-profile", "tpu"], "there is no device 'tpu'"),
        (["--shape", "qwen9"], "there is no shape 'qwen9'"),
        (["--shape", "qwen3-8b", "--model", "x"], "both name a target"),
        (["--shape", "qwen3-8b", "--budgets", "128"], "record it with a budget of 128"),
        (["--shape", "qwen3-8b", "--budgets", "many"], "separated by commas"),
        (["--shape", "qwen3-8b", "--batch", "0,1"], "--batch 0"),
        (["--validate"], "name their files with --data"),
        (["--validate", "--data", "x", "--shape", "qwen3-8b"], "--shape does nothing with --validate"),
        (["--validate", "--data", "x", "--trace", "y"], "--trace does nothing with --validate"),
        (["--data", "x"], "--data does nothing with --simulate"),
        (["--tau-only"], "--tau-only does nothing with --simulate"),
        (["--repeats", "2"], "--repeats does nothing with --simulate"),
        (["--save-profile", "here.json"], "not h200: use --device-profile here"),
        (["--device-profile", ""], "there is no device ''"),
        (["--shape", "qwen3-8b", "--json", "none/out"], "--json none/out: cannot be written"),
        (["--shape", "qwen3-8b", "--plot", "none/out.png"], "--plot none/out.png: cannot be written"),
        (["--shape", "qwen3-8b", "--plot", "out.txt"], "--plot out.txt: name a .png or .svg file"),
    ],
)
def test_mistakes_are_one_line(
    recorded: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    status, _, err = run(capsys, "--simulate", str(recorded), *arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert message in err


def test_bad_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text('{"method": "head"}\n')
    for file, message in ((path, "line 1: not an acceptance trace"), (tmp_path / "none", "there is no file")):
        status, _, err = run(capsys, "--simulate", str(file), "--shape", "qwen3-8b")
        assert (status, err.count("\n")) == (2, 1)
        assert message in err
    status, _, err = run(capsys)
    assert (status, err.count("\n")) == (2, 1)
    assert "--data" in err
    tiny_eagle(tiny_model()).save(tmp_path / "head")
    write_traces(path, [trace(0)])
    for shape in (["--shape", "qwen3-8b"], []):
        status, _, err = run(capsys, "--simulate", str(path), *shape, "--head", str(tmp_path / "head"))
        assert (status, err.count("\n")) == (2, 1)
        assert "is an EAGLE head" in err


@pytest.fixture
def tiny_llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    model = tiny_model(vocab_size=258)
    head = tiny_head(model)
    head.pack()
    model.pack()
    llm = LLM(Engine(model, byte_tokenizer(), head, EngineConfig(page_size=4, max_model_len=128)))
    chosen = choice.ModelChoice("m", "h", "auto", "tiny")
    for module in (simulate, validation):
        monkeypatch.setattr(module, "choose_model", lambda *_: chosen)
        monkeypatch.setattr(module, "load", lambda *_: llm)
    monkeypatch.setattr(calibrate, "ROWS", (1, 8))
    monkeypatch.setattr(calibrate, "BUDGETS", (0, 4, 12))
    monkeypatch.setattr(calibrate, "STEPS", 3)
    return llm


def test_this_machine_is_calibrated_and_kept(
    tiny_llm: LLM, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "here.json"
    arguments = ["--simulate", str(recorded), "--shape", "qwen3-8b", "--batch", "1", "--context", "64"]
    status, out, err = run(capsys, *arguments, "--device-profile", "here", "--save-profile", str(profile))
    assert status == 0
    assert "calibration: 3/3 rounds" in err
    assert "calibrated with tiny: cpu " in out
    again = run(capsys, *arguments, "--device-profile", str(profile))
    assert again[:2] == (0, out)


def test_a_validation_measures_the_prompts_of_the_trace(
    tiny_llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "small.jsonl"
    data.write_text("".join(json.dumps({"id": f"s/{i}", "turns": [f"say {i}"]}) + "\n" for i in range(3)))
    size = len(tiny_llm.tokenizer.encode_chat([{"role": "user", "content": "say 0"}]))
    path, json_path, profile = tmp_path / "t.jsonl", tmp_path / "out.json", tmp_path / "here.json"
    write_traces(path, [trace(seed, tokens=12, prompt_tokens=size) for seed in range(2)])
    arguments = ["--simulate", str(path), "--validate", "--data", str(data), "--budgets", "4,8"]
    status, out, err = run(
        capsys, *arguments, "--json", str(json_path), "--save-profile", str(profile), "--markdown", str(tmp_path / "o")
    )
    assert status == 0
    assert (tmp_path / "o").read_text() == out
    assert "validation: 2/2 prompts" in err
    for fact in ("cpu: ", "Largest error: ", "| × budget 0 predicted / measured |"):
        assert fact in out
    result = json.loads(json_path.read_text())
    assert [row["budget"] for row in result["rows"]] == [0, 4, 8]
    assert result["prompts"] == 2
    plain = result["rows"][0]
    assert plain["measured_speedup"] == plain["speedup"] == plain["measured_tau"] == 1
    assert isinstance(find_device(str(profile), "design"), Measured)
    tiny_llm.engine.check_idle()
    status, out, _ = run(capsys, *arguments, "--device-profile", "h100")
    assert (status, "Predicted with H100 SXM" in out) == (0, True)
    write_traces(path, [trace(0, tokens=12)])
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert "small, prompt s/0: it has" in err
    assert "recorded with another model or chat template" in err
    write_traces(path, [trace(0, tokens=128, prompt_tokens=size)])
    status, _, err = run(capsys, *arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert "small, prompt s/0: the prompt has" in err
    write_traces(path, [trace(7)])
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert "has none of the prompts" in err


def test_a_calibration_counts_the_nodes_that_were_drafted(tiny_llm: LLM) -> None:
    assert [calibrate.time_steps(tiny_llm, [1] * 16, budget).nodes for budget in (0, 4)] == [0, 4]
    engine = Engine(
        tiny_llm.engine.model,
        tiny_llm.tokenizer,
        tiny_llm.engine.head,
        EngineConfig(drafter="head", draft_depth=1, candidates=2),
    )
    assert calibrate.time_steps(LLM(engine), [1] * 16, 4).nodes == 2


def test_a_calibration_needs_a_parallel_head_and_room() -> None:
    bare = LLM(Engine(tiny_model(vocab_size=258), byte_tokenizer(), None, EngineConfig(page_size=4, max_model_len=64)))
    with pytest.raises(ValueError, match="parallel draft head"):
        Calibration(bare, "tiny")
    model = tiny_model(vocab_size=258)
    twice = LLM(Engine(model, byte_tokenizer(), tiny_head(model), EngineConfig(draft_passes=2)))
    with pytest.raises(ValueError, match=r"one head pass.*--draft-passes 1"):
        Calibration(twice, "tiny")
    with pytest.raises(ValueError, match="too short to time a step"):
        calibrate.time_steps(bare, [1] * 63, 0)
