"""`jetflow-serve bench`: methods × budgets × workloads on one target, interleaved, against plain decoding of the same prompts."""

from __future__ import annotations

import json
import secrets
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetflow_core.sampling import SamplingParams
from jetflow_serve.bench_plot import draw, draw_replays
from jetflow_serve.bench_table import Replay, Row, markdown, replay, replay_markdown, summarise
from jetflow_serve.choice import ModelChoice, check_budgets, choose_model
from jetflow_serve.flips import Flip, excused, find_flip
from jetflow_serve.host import describe
from jetflow_serve.measure import Run, check_request, timed_run, warm_up
from jetflow_serve.methods import BASELINE, Method, load_methods, parse_methods
from jetflow_serve.trace import Trace, write_traces
from jetflow_serve.trace_recorder import record_trace
from jetflow_serve.workload import Workload, check_outputs, check_plot, parse_numbers, read_workload

if TYPE_CHECKING:
    from jetflow_core.llm import LLM


@dataclass(frozen=True)
class Contender:
    """A loaded method."""

    name: str
    llm: LLM


@dataclass(frozen=True)
class Plan:
    """What is compared: methods at `budgets`, asked with `params`, every run of a prompt made `repeats` times."""

    methods: list[Method]
    budgets: list[int]
    params: SamplingParams
    repeats: int


def bench(options: Namespace, write: Callable[[str], None], progress: Callable[[str], None]) -> int:
    """Run the benchmark, print tables, write JSON, Markdown, plots and traces where asked.

    Status 1 when an answer differs from plain decoding's by more than a near-tie. Raises ValueError for bad files or options.
    """
    workloads = [read_workload(Path(path), options.prompts) for path in options.data]
    if len({workload.name for workload in workloads}) < len(workloads):
        raise ValueError("--data names two files of one name, which is the workload's: rename one of them")
    check_outputs({"--json": options.json, "--markdown": options.markdown, "--trace": options.trace})
    check_plot("--plot", None if options.plot is None else f"{options.plot}-speedup.png")
    choice, plan = _plan(options)
    baseline, others = load_methods(choice, options, plan.methods)
    contenders = [Contender(method.name, llm) for method, llm in zip(plan.methods, others, strict=True)]
    for workload in workloads:
        _check_prompts(baseline, contenders, workload, plan.params)
    facts = _facts(choice, plan, baseline)
    write("".join(f"{name}: {value}\n" for name, value in facts.items()) + "\n")
    results: dict[str, Any] = {"host": facts, "settings": _settings(options, plan)}
    tables, sound = "", True
    if options.tau_only or options.trace:
        traces = [trace for load in workloads for trace in record(contenders, load, plan, progress)]
        replays = _replays(traces, workloads, plan)
        tables += replay_markdown(replays) + "\n"
        results["replays"] = [asdict(row) for row in replays]
        if options.trace:
            write_traces(Path(options.trace), traces)
        if options.plot:
            draw_replays(replays, options.plot, _title(facts))
    if not options.tau_only:
        warm_up(baseline, [0])
        for contender in contenders:
            warm_up(contender.llm, plan.budgets)
        rows = [row for load in workloads for row in measure(baseline, contenders, load, plan, progress)]
        tables = markdown(rows, plan.params.temperature) + "\n" + ("\n" + tables if tables else "")
        results["rows"] = [asdict(row) for row in rows]
        sound = _sound(rows, baseline, plan.params.temperature)
        if options.plot:
            draw(rows, options.plot, _title(facts))
    write(
        tables
        if sound
        else tables + "\nNOT LOSSLESS: an answer differs from plain decoding's, and not by a near-tie.\n"
    )
    _save(options, facts, tables, results)
    return int(not sound)


def measure(
    baseline: LLM, contenders: Sequence[Contender], workload: Workload, plan: Plan, progress: Callable[[str], None]
) -> list[Row]:
    """A row for the baseline and one for each contender and budget; the runs of a prompt alternate, in an order that rotates."""
    order = [(BASELINE, baseline, 0), *((each.name, each.llm, b) for each in contenders for b in plan.budgets)]
    runs: dict[tuple[str, int], list[Run]] = {(name, budget): [] for name, _, budget in order}
    prompts = workload.encoded(baseline.tokenizer)
    for number, (name, prompt) in enumerate(prompts):
        for repeat in range(plan.repeats):
            shift = (number + repeat) % len(order)
            for method, llm, budget in [*order[shift:], *order[:shift]]:
                try:
                    runs[method, budget].append(timed_run(llm, prompt, plan.params, budget))
                except ValueError as error:
                    raise ValueError(f"{workload.name}, prompt {name}: {method}, budget {budget}: {error}") from error
        progress(f"{workload.name}: {number + 1}/{len(prompts)} prompts")
    plain = runs[BASELINE, 0]
    return [
        summarise(
            workload.name, method, budget, own, plain, plan.repeats, _flips(baseline, prompts, own, plain, plan.repeats)
        )
        for (method, budget), own in runs.items()
    ]


def record(
    contenders: Sequence[Contender], workload: Workload, plan: Plan, progress: Callable[[str], None]
) -> list[Trace]:
    """A trace of every prompt and contender, with trees of the largest budget."""
    traces: list[Trace] = []
    for contender in contenders:
        for number, (name, prompt) in enumerate(prompts := workload.encoded(contender.llm.tokenizer)):
            try:
                traces.append(
                    record_trace(
                        contender.llm, contender.name, workload.name, (name, prompt), plan.params, max(plan.budgets)
                    )
                )
            except ValueError as error:
                raise ValueError(f"{workload.name}, prompt {name}: {contender.name}: {error}") from error
            progress(f"{workload.name}, trace of {contender.name}: {number + 1}/{len(prompts)} prompts")
    return traces


def _check_prompts(baseline: LLM, contenders: Sequence[Contender], workload: Workload, params: SamplingParams) -> None:
    """Raise ValueError for a prompt that one of the engines would refuse, before any of them has worked for nothing."""
    for name, prompt in workload.encoded(baseline.tokenizer):
        for each in (Contender(BASELINE, baseline), *contenders):
            try:
                check_request(each.llm, prompt, params)
            except ValueError as error:
                raise ValueError(f"{workload.name}, prompt {name}: {each.name}: {error}") from error


def _plan(options: Namespace) -> tuple[ModelChoice, Plan]:
    """What the command line asks for. Raises ValueError where that compares nothing."""
    budgets = [budget for budget in parse_numbers("--budgets", options.budgets) if budget > 0]
    check_budgets(budgets, options)
    named = parse_methods(options.method)
    least = None if named else max(budgets, default=0)
    choice = choose_model(options.model, options.head, least, None, options.drafter)
    alone = Method("head" if choice.drafter == "auto" else choice.drafter)
    methods = (named or [alone]) if budgets else []
    if not methods and (options.tau_only or options.trace or options.plot):
        raise ValueError("traces and plots need a drafter and a budget: give --budgets above 0")
    seed = secrets.randbits(31) if options.seed is None else options.seed  # every run of a prompt needs the same one
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=seed)
    return choice, Plan(methods, budgets, params, options.repeats)


def _flips(
    baseline: LLM, prompts: Sequence[tuple[str, list[int]]], runs: Sequence[Run], plain: Sequence[Run], repeats: int
) -> list[Flip]:
    """The answers that differ from plain decoding's, one a prompt at most."""
    flips: list[Flip] = []
    for number, (name, prompt) in enumerate(prompts):
        own = slice(number * repeats, (number + 1) * repeats)
        for run, base in zip(runs[own], plain[own], strict=True):
            if run.token_ids != base.token_ids:
                flips.append(find_flip(baseline.engine.model, name, prompt, base.token_ids, run.token_ids))
                break
    return flips


def _replays(traces: Sequence[Trace], workloads: Sequence[Workload], plan: Plan) -> list[Replay]:
    """What the traces say of every budget."""
    replays: list[Replay] = []
    for workload in workloads:
        for method in plan.methods:
            own = [trace for trace in traces if (trace.workload, trace.method) == (workload.name, method.name)]
            replays += [replay(workload.name, method.name, budget, own) for budget in plan.budgets]
    return replays


def _sound(rows: Sequence[Row], baseline: LLM, temperature: float) -> bool:
    """Whether no answer parts from plain decoding's, other than by a near-tie where the dtype has some."""
    model = baseline.engine.model
    return all(excused(row.flips, temperature, model.embed.dtype, model.exact) for row in rows)


def _facts(choice: ModelChoice, plan: Plan, baseline: LLM) -> dict[str, str | int | bool]:
    """What was compared and where, in print order."""
    methods: dict[str, str] = {}
    for method in plan.methods:
        drafts = [f"{name}={value}" for name, value in method.options.items()]
        head = [] if method.options.get("drafter") == "lookup" else [method.head or choice.head or ""]
        methods[f"method {method.name}"] = ", ".join([*head, *drafts])
    exact = {"exact": True} if baseline.engine.model.exact else {}
    return {"model": choice.name, **methods, **describe(baseline), **exact, "baseline": f"{BASELINE}, no drafter"}


def _settings(options: Namespace, plan: Plan) -> dict[str, Any]:
    return {
        "sampling": asdict(plan.params),
        "repeats": plan.repeats,
        "budgets": plan.budgets,
        "methods": [asdict(method) for method in plan.methods],
        "data": list(options.data),
    }


def _title(facts: dict[str, str | int | bool]) -> str:
    return f"{facts['model']}, {facts['dtype']} on {facts.get('gpu', facts['cpu'])}, batch 1"


def _save(options: Namespace, facts: dict[str, str | int | bool], tables: str, results: dict[str, Any]) -> None:
    """Write what `--json` and `--markdown` ask for."""
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.markdown:
        lines = "".join(f"- {name}: {value}\n" for name, value in facts.items())
        Path(options.markdown).write_text(f"{lines}\n{tables}", encoding="utf-8")
