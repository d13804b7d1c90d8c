"""Regeneration and evaluation through the engine, and the loop closed: measured τ = replayed τ."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from training_tiny import features_of, tiny_head, tiny_model, tiny_rows

from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.llm import LLM
from jetflow_core.sampling import SamplingParams
from jetflow_core.tokenizer import Tokenizer
from jetflow_train.blocks import BlockRules
from jetflow_train.config import EvaluateOptions, RegenerateOptions
from jetflow_train.data import Row, read_rows
from jetflow_train.evaluate import Run, measure, summarise, workload_files
from jetflow_train.regenerate import answer
from jetflow_train.simulate import replayed_tau

WORDS = [f"w{i}" for i in range(61)]


def word_tokenizer() -> Tokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    template = "{% for m in messages %}w1 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w3{% endif %}"
    return Tokenizer(inner, eos_token_ids=[2], chat_template=template)


def llm(with_head: bool = True, **limits: Any) -> LLM:
    model = tiny_model()
    head, drafter = None, "head" if with_head else "auto"
    if with_head:
        head = tiny_head(model, tiny_rows(8)).requires_grad_(False)
        head.pack()
    return LLM(
        Engine(model, word_tokenizer(), head, EngineConfig(page_size=4, num_pages=200, drafter=drafter, **limits))
    )


def prompt_file(path: Path, count: int = 5) -> str:
    lines = [json.dumps({"id": f"p/{i}", "turns": [f"w{7 + i} w{20 + i}", "second"]}) for i in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def options(folder: Path, **changes: object) -> RegenerateOptions:
    values: dict[str, object] = {
        "prompts": (prompt_file(folder / "prompts.jsonl"),),
        "output": str(folder / "rows.jsonl"),
        "max_tokens": 10,
        "temperature": (0.0, 0.9),
        **changes,
    }
    return RegenerateOptions(**values)  # pyright: ignore[reportArgumentType]


def rows_of(path: Path) -> dict[tuple[str, float], Row]:
    return {(row.id, row.temperature): row for row in read_rows([path], 61, 100)}


def test_answers_are_the_targets_own(tmp_path: Path) -> None:
    assert answer(llm(with_head=False), options(tmp_path)) == 10
    rows = rows_of(tmp_path / "rows.jsonl")
    model = tiny_model()
    greedy = rows["p/1", 0.0]
    assert greedy.prompt_ids == (1, 8, 21, 3)
    hidden, _ = model.forward_sequence(torch.tensor(greedy.tokens))
    choices = model.logits(hidden).argmax(-1)[len(greedy.prompt_ids) - 1 : -1]
    assert choices.tolist() == list(greedy.output_ids)
    assert rows["p/1", 0.9].output_ids != greedy.output_ids


def test_a_killed_run_goes_on_with_the_same_rows(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    answer(llm(with_head=False), options(whole))

    def kill(done: int, total: int, tokens: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(llm(with_head=False, max_running=2), options(parts), kill)
    file = parts / "rows.jsonl"
    file.write_bytes(file.read_bytes() + b'{"id": "p/4", "temper')  # a line the kill cut short
    assert answer(llm(with_head=False, max_running=3), options(parts)) == 6
    assert rows_of(file) == rows_of(whole / "rows.jsonl")


def test_a_file_that_is_not_rows_stays_as_it_is(tmp_path: Path) -> None:
    made = options(tmp_path)
    output = tmp_path / "rows.jsonl"
    output.write_text("somebody's notes\nwithout a last newline")
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: not JSON"):
        answer(llm(with_head=False), made)
    assert output.read_text() == "somebody's notes\nwithout a last newline"


def test_a_head_does_not_change_the_answers(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    answer(llm(with_head=False), options(one))
    answer(llm(), options(two))
    assert rows_of(one / "rows.jsonl") == rows_of(two / "rows.jsonl")


def test_the_suffix_goes_to_the_files_named(tmp_path: Path) -> None:
    other = prompt_file(tmp_path / "maths.jsonl", count=1)
    both = options(tmp_path, suffix=" w50", suffix_files=(other,), temperature=(0.0,))
    with pytest.raises(ValueError, match=r"maths.jsonl, which is not among prompts"):
        answer(llm(with_head=False), both)
    answer(llm(with_head=False), replace(both, prompts=(other,)))
    assert rows_of(tmp_path / "rows.jsonl")["p/0", 0.0].prompt_ids == (1, 7, 20, 50, 3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "a", "turns": []}', "needs 'id' and a non-empty list 'turns'"),
        ('{"id": "a", "turns": [" "]}', "the first turn must be a text"),
        ('{"id": "a", "turns": ["' + "w5 " * 200 + '"]}', "prompt a has 202 tokens, the limit is 100"),
        ("not json", "line 1: not JSON"),
        ("", "no prompts in this file"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        answer(llm(with_head=False), options(tmp_path, prompts=(str(file),), max_length=100))


def test_an_unwritable_row_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prompts.jsonl/rows.jsonl: cannot write rows"):
        answer(llm(with_head=False), options(tmp_path, output=str(tmp_path / "prompts.jsonl" / "rows.jsonl")))


def test_measurements_are_lossless_and_written(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    prompts = (prompt_file(tmp_path / "load.jsonl"),)
    options = EvaluateOptions(
        head="nowhere", prompts=prompts, budgets=(0, 4, 12), max_tokens=16, limit=3, output=str(file)
    )
    result = measure(llm(), options)
    plain, small, large = result.measurements
    assert [each.budget for each in result.measurements] == [0, 4, 12]
    assert all(each.prompts == each.identical == 3 for each in result.measurements)
    assert plain.tau == plain.speedup == 1.0
    assert plain.predicted is None
    assert plain.acceptance == []
    assert {each.plain_tokens_per_second for each in result.measurements} == {plain.tokens_per_second}
    for each in (small, large):  # float32: the training code must say what serving does, to the step
        assert each.predicted == pytest.approx(each.tau)
        assert 1 + sum(each.acceptance) == pytest.approx(each.tau)
        assert each.acceptance == sorted(each.acceptance, reverse=True)
    assert (result.facts["target"], result.facts["dtype"], result.training) == ("demo model", "float32", None)
    assert len(result.forced["load"].accuracy) == 4
    assert json.loads(file.read_text()) == asdict(result)


def test_files_of_one_name_are_two_workloads() -> None:
    files = ["gsm8k/test.jsonl", "math/test.jsonl", "ifeval.jsonl", "ifeval.jsonl"]
    assert workload_files(files) == {
        "gsm8k/test.jsonl": Path("gsm8k/test.jsonl"),
        "math/test.jsonl": Path("math/test.jsonl"),
        "ifeval": Path("ifeval.jsonl"),
    }


@pytest.mark.parametrize("name", ["nowhere/results.json", "folder"])
def test_results_that_cannot_be_written_are_seen_before_the_work(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    prompts = (prompt_file(tmp_path / "load.jsonl", 2),)
    decoded: list[int] = []
    with pytest.raises(ValueError, match=rf"{name}: cannot write the results .*; name another file"):
        measure(
            llm(), EvaluateOptions(prompts=prompts, output=str(tmp_path / name)), lambda *done: decoded.append(done[0])
        )
    assert not decoded
    file = tmp_path / "results.json"
    with pytest.raises(ValueError, match="load"):
        measure(llm(), EvaluateOptions(prompts=prompts, max_tokens=1, output=str(file)))
    assert not file.exists()


def test_more_tokens_than_the_target_has_positions_for(tmp_path: Path) -> None:
    prompts = (prompt_file(tmp_path / "load.jsonl", 2),)
    with pytest.raises(ValueError, match="max_tokens 127 leaves no room for a prompt in 128 positions; lower it"):
        measure(llm(), EvaluateOptions(prompts=prompts, max_tokens=127))
    with pytest.raises(ValueError, match="prompt p/0 has 4 tokens, the limit is 4 with its answer; lower max_tokens"):
        measure(llm(), EvaluateOptions(prompts=prompts, max_tokens=124))


def test_answers_of_one_token_have_no_speed(tmp_path: Path) -> None:
    short = EvaluateOptions(prompts=(prompt_file(tmp_path / "load.jsonl", 2),), budgets=(0, 4, 4), max_tokens=1)
    with pytest.raises(ValueError, match=r"load: every answer ended with its first token; raise --max-tokens"):
        measure(llm(), short)
    runs = {budget: [Run((1,), (5,), (), 0.0), Run((1,), (5, 6, 7), (1, 1), 0.5)] for budget in (0, 4)}
    plain, drafted = summarise("load", runs, {4: 1.0})
    assert (plain.speedup, drafted.speedup, drafted.identical) == (1.0, 1.0, 2)
    assert (plain.predicted, drafted.predicted) == (None, 1.0)
    assert plain.tokens_per_second == pytest.approx(4.0)
    flipped = runs | {4: [runs[4][0], replace(runs[4][1], token_ids=(5, 9, 7))]}  # at a near-tie
    assert summarise("load", flipped, {4: 1.0})[1].identical == 1
    assert [each.budget for each in measure(llm(), replace(short, max_tokens=3)).measurements] == [0, 4]


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"id": "a"}', "line 1: missing key 'temperature'"), ('{"id": "a", "temperature": null}', "must be a number")],
)
def test_a_row_file_that_holds_no_rows_is_refused(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        answer(llm(with_head=False), options(tmp_path))


@pytest.mark.parametrize(
    ("budget", "order", "passes"), [(3, 1, 1), (12, 1, 1), (3, 2, 1), (12, 2, 1), (3, 2, 2), (12, 1, 2)]
)
def test_replayed_tau_is_the_engines(budget: int, order: int, passes: int) -> None:
    """The classical bug is a good offline number with poor real acceptance: here the two must agree to the step."""
    model = tiny_model()
    head = tiny_head(model, tiny_rows(8), pairwise_order=order).requires_grad_(False)
    head.pack()
    config = EngineConfig(page_size=4, num_pages=200, drafter="head", draft_passes=passes)
    engine = LLM(Engine(model, None, head, config))
    prompts = [row.prompt_ids for row in tiny_rows(4)]
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    items, tokens, steps = [], 0, 0
    for number, (prompt, done) in enumerate(zip(prompts, engine.generate(prompts, params, budget=budget), strict=True)):
        items.append(features_of(model, Row(str(number), 0.0, prompt, tuple(done.token_ids)), number))
        tokens += len(done.token_ids) - 1  # the first token comes out of the prefill
        steps += done.usage.target_steps - 1
    rules = BlockRules(head.config.block_size, head.config.mask_token_id)
    replayed = replayed_tau(head, items, rules, [1, budget], max_tokens=25, passes=passes)[budget]
    assert replayed == pytest.approx(tokens / steps)
