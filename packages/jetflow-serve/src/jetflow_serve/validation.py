"""Predictions of decoding speed held to measured runs of the same prompts, on the machine that was calibrated.

The calibration never sees the prompts or the drafted row counts; its rounds alternate with the measured runs, so that a machine
whose speed drifts is the same one for both.
"""

from __future__ import annotations

import json
import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jetflow_core.sampling import SamplingParams
from jetflow_serve.calibrate import Calibration
from jetflow_serve.choice import check_budgets, choose_model, load
from jetflow_serve.devices import Device, find_device, save_profile, step_seconds
from jetflow_serve.host import describe
from jetflow_serve.measure import Run, check_request, timed_run, warm_up
from jetflow_serve.step_model import decode_step
from jetflow_serve.trace import Trace
from jetflow_serve.workload import parse_numbers, read_workload

if TYPE_CHECKING:
    from jetflow_core.llm import LLM
    from jetflow_serve.shapes import Shape

DEFAULT_BUDGETS = "8,16,32,64"


@dataclass(frozen=True)
class Decode:
    """One prompt at one budget: decoded tokens, target passes, seconds."""

    tokens: int
    steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Comparison:
    """A budget: τ over all prompts, medians over prompts of a step, of tokens a second, and of their ratio to budget 0's."""

    budget: int
    tau: float
    measured_tau: float
    step_ms: float
    measured_step_ms: float
    tokens_per_second: float
    measured_tokens_per_second: float
    speedup: float
    measured_speedup: float

    @property
    def speed_error(self) -> float:
        """Of predicted tokens a second, relative to the measured ones."""
        return self.tokens_per_second / self.measured_tokens_per_second - 1

    @property
    def speedup_error(self) -> float:
        """Of the predicted speed-up, relative to the measured one."""
        return self.speedup / self.measured_speedup - 1


def validate(
    traces: Sequence[Trace], options: Namespace, write: Callable[[str], None], progress: Callable[[str], None]
) -> int:
    """Measure the traced prompts of `--data` beside their predictions. Raises ValueError for bad files or options."""
    if not options.data:
        raise ValueError("--validate measures the prompts of the trace again: name their files with --data")
    budgets = sorted({0, *parse_numbers("--budgets", DEFAULT_BUDGETS if options.budgets is None else options.budgets)})
    check_budgets(budgets, options)
    pairs = match(traces, options.data, options.prompts)
    for trace, _ in pairs:
        trace.steps(budgets[-1])  # a budget above the recorded one is refused before anything is measured
    here = options.device_profile == "here"
    fixed = None if here else find_device(options.device_profile, options.kernels)
    choice = choose_model(options.model, options.head, budgets[-1], None, options.drafter or "head")
    llm = load(choice, options)
    calibration = Calibration(llm, choice.name)
    prompts = [_prompt(llm, trace, text) for trace, text in pairs]
    warm_up(llm, budgets)
    measured: dict[int, list[Decode]] = {budget: [] for budget in budgets}
    for number, ((trace, _), prompt) in enumerate(zip(pairs, prompts, strict=True)):
        if fixed is None:
            calibration.round()
        shift = number % len(budgets)
        for budget in [*budgets[shift:], *budgets[:shift]]:
            measured[budget].append(_measure(llm, trace, prompt, budget))
        progress(f"validation: {number + 1}/{len(pairs)} prompts")
    device = calibration.device() if fixed is None else fixed
    rows = compare(device, calibration.shape, [trace for trace, _ in pairs], measured, options.host_ms / 1e3)
    facts = {"model": choice.name, "head": choice.head or "none", **describe(llm)}
    text = "".join(f"{name}: {value}\n" for name, value in facts.items()) + "\n" + markdown(rows, device) + "\n"
    write(text)
    if options.markdown:
        Path(options.markdown).write_text(text, encoding="utf-8")
    if options.save_profile:
        save_profile(calibration.device(), Path(options.save_profile))
    if options.json:
        result = {"host": facts, "device": device.source, "prompts": len(pairs), "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def match(traces: Sequence[Trace], paths: Sequence[str], limit: int) -> list[tuple[Trace, str]]:
    """The traces of the first `limit` prompts of each file that decoded anything, with the prompts' texts. Raises ValueError."""
    known = {(trace.workload, trace.prompt): trace for trace in traces}
    found: list[tuple[Trace, str]] = []
    for path in paths:
        workload = read_workload(Path(path), limit)
        for name, text in workload.prompts:
            trace = known.get((workload.name, name))
            if trace is not None and trace.decode_tokens:
                found.append((trace, text))
    if not found:
        raise ValueError(f"the trace has none of the prompts of {', '.join(paths)}: record one with --trace")
    return found


def compare(
    device: Device,
    shape: Shape,
    traces: Sequence[Trace],
    measured: dict[int, list[Decode]],
    host: float = 0.0,
) -> list[Comparison]:
    """A row a budget; `measured` has every budget's decodes of the traced prompts, in their order."""
    predicted = {budget: [predict(device, shape, trace, budget, host) for trace in traces] for budget in measured}
    return [
        Comparison(
            budget,
            _tau(predicted[budget]),
            _tau(measured[budget]),
            *(
                1e3 * statistics.median(run.seconds / run.steps for run in runs[budget])
                for runs in (predicted, measured)
            ),
            *(statistics.median(run.rate for run in runs[budget]) for runs in (predicted, measured)),
            *(_ratio(runs[budget], runs[0]) for runs in (predicted, measured)),
        )
        for budget in measured
    ]


def predict(device: Device, shape: Shape, trace: Trace, budget: int, host: float = 0.0) -> Decode:
    """The decode of one traced prompt at batch 1, on an engine with a head."""
    steps = trace.steps(budget)
    context = trace.prompt_tokens + trace.decode_tokens // 2
    nodes = round(sum(nodes for _, nodes, _ in steps) / len(steps))
    calls = decode_step(shape, 1, nodes, context, trace.decode_tokens / len(steps) - 1)
    step = step_seconds(device, calls, drafts=budget > 0) + host
    return Decode(trace.decode_tokens, len(steps), step * len(steps))


def markdown(rows: Sequence[Comparison], device: Device) -> str:
    """Predicted / measured side by side, and the largest errors."""
    lines = [
        f"Predicted with {device.name} ({device.source}).",
        "",
        "| budget | τ replayed / measured | ms a step predicted / measured | tokens/s predicted / measured | error "
        "| × budget 0 predicted / measured | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.budget} | {row.tau:.2f} / {row.measured_tau:.2f} | {row.step_ms:.1f} / {row.measured_step_ms:.1f} "
            f"| {row.tokens_per_second:.1f} / {row.measured_tokens_per_second:.1f} | {row.speed_error:+.1%} "
            f"| {row.speedup:.2f} / {row.measured_speedup:.2f} | {row.speedup_error:+.1%} |"
        )
    speed = max(abs(row.speed_error) for row in rows)
    speedup = max(abs(row.speedup_error) for row in rows)
    return "\n".join([*lines, "", f"Largest error: {speed:.1%} of tokens/s, {speedup:.1%} of the speed-up."])


def _prompt(llm: LLM, trace: Trace, text: str) -> list[int]:
    """The token ids of a traced prompt. Raises ValueError where they are not those of the trace, or too many."""
    place = f"{trace.workload}, prompt {trace.prompt}"
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": text}])
    if len(prompt) != trace.prompt_tokens:
        raise ValueError(
            f"{place}: it has {len(prompt)} tokens here and {trace.prompt_tokens} in the trace: "
            "it was recorded with another model or chat template"
        )
    try:
        check_request(llm, prompt, _params(trace))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    return prompt


def _params(trace: Trace) -> SamplingParams:
    return SamplingParams(max_tokens=trace.decode_tokens + 1)


def _measure(llm: LLM, trace: Trace, prompt: list[int], budget: int) -> Decode:
    place = f"{trace.workload}, prompt {trace.prompt}, budget {budget}"
    try:
        run: Run = timed_run(llm, prompt, _params(trace), budget)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    if not run.decode_tokens:
        raise ValueError(f"{place}: the answer ended with its first token, the trace has {trace.decode_tokens} more")
    return Decode(run.decode_tokens, run.decode_steps, run.decode_s)


def _tau(runs: Sequence[Decode]) -> float:
    return sum(run.tokens for run in runs) / sum(run.steps for run in runs)


def _ratio(runs: Sequence[Decode], plain: Sequence[Decode]) -> float:
    return statistics.median(run.rate / base.rate for run, base in zip(runs, plain, strict=True))
