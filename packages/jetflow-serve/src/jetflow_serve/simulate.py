"""`jetflow-serve bench --simulate`: what a head whose acceptance was recorded would give on a device, before anyone rents one.

Acceptance traces say how many tokens a step of each budget commits; the step model and a device say how long it takes.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jetflow_serve.calibrate import Calibration
from jetflow_serve.choice import choose_model, load
from jetflow_serve.devices import Device, find_device, save_profile, step_seconds
from jetflow_serve.shapes import Shape, named_shape, read_shape
from jetflow_serve.simulate_report import draw, markdown
from jetflow_serve.step_model import Call, decode_step
from jetflow_serve.trace import Trace, read_traces
from jetflow_serve.validation import validate
from jetflow_serve.workload import check_outputs, check_plot, parse_numbers
from jetflow_triton.roofline import Load

CALIBRATION_ROUNDS = 3


@dataclass(frozen=True)
class Acceptance:
    """What a trace says of a budget: τ (tokens a step) and drafted nodes a step, of a decode of all its prompts."""

    budget: int
    tau: float
    nodes: float


@dataclass(frozen=True)
class Prediction:
    """A budget at one batch size and context.

    `step_ms` is a step of all requests, with the target's pass, draft, commit and host in it. `speedup`: of tokens a second to
    those of plain decoding at the same batch and context on an engine without a head. `fits`: weights and caches are not more
    than the device's memory.
    """

    batch: int
    context: int
    budget: int
    tau: float
    step_ms: float
    target_ms: float
    draft_ms: float
    commit_ms: float
    host_ms: float
    tokens_per_second: float
    speedup: float
    fits: bool


def simulate(options: Namespace, write: Callable[[str], None], progress: Callable[[str], None]) -> int:
    """Predict, or with `--validate` hold predictions to measurements. Raises ValueError for bad files or options."""
    if len(options.method) > 1:
        raise ValueError(
            f"--simulate predicts one method at a time, not {', '.join(options.method)}: give one --method"
        )
    check_outputs({"--json": options.json, "--markdown": options.markdown, "--save-profile": options.save_profile})
    check_plot("--plot", options.plot)
    if options.device_profile is None:
        options.device_profile = "here" if options.validate else "h200"
    if options.save_profile and options.device_profile != "here":
        raise ValueError(
            f"--save-profile keeps a calibration of this machine, not {options.device_profile}: use --device-profile here"
        )
    traces = select(read_traces(Path(options.simulate)), next(iter(options.method), None))
    if options.validate:
        if traces[0].passes == 0:
            raise ValueError(
                f"--validate measures a draft head, and {traces[0].method} has none: choose another --method"
            )
        return validate(traces, options, write, progress)
    numbers = {name: parse_numbers(f"--{name}", getattr(options, name)) for name in ("batch", "context")}
    if 0 in numbers["batch"]:
        raise ValueError("--batch 0: use 1 or more")
    budgets = choose_budgets(options.budgets, traces)
    accepted = [acceptance(traces, budget) for budget in budgets]
    shape = choose_shape(options, traces[0])
    device = choose_device(options, progress)
    rows = list(predict(device, shape, accepted, numbers["batch"], numbers["context"], options.host_ms / 1e3))
    text = markdown(device, shape, traces, accepted, rows, options.host_ms) + "\n"
    write(text)
    if options.markdown:
        Path(options.markdown).write_text(text, encoding="utf-8")
    if options.plot:
        draw(rows, Path(options.plot), f"{shape.name} on {device.name}, acceptance of {traces[0].method}")
    if options.json:
        facts = {"shape": asdict(shape), "device": {"name": device.name, "source": device.source}}
        settings = {"trace": options.simulate, "method": traces[0].method, "host_ms": options.host_ms}
        result = facts | {"settings": settings, "acceptance": [asdict(each) for each in accepted]}
        result |= {"rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def select(traces: Sequence[Trace], method: str | None) -> list[Trace]:
    """The traces of `method`, which may be left out where there is one. Raises ValueError."""
    methods = list(dict.fromkeys(trace.method for trace in traces))
    if method is None and len(methods) > 1:
        raise ValueError(f"the file has traces of {', '.join(methods)}: choose one with --method")
    chosen = methods[0] if method is None else method
    found = [trace for trace in traces if trace.method == chosen]
    if not found:
        raise ValueError(f"--method {chosen}: the file has traces of {', '.join(methods)}")
    if found[0].passes > 1:
        raise ValueError(
            f"{chosen} drafts with {found[0].passes} passes of its head, and the step model knows one: choose another --method"
        )
    return found


def choose_budgets(text: str | None, traces: Sequence[Trace]) -> list[int]:
    """Budgets in rising order, 0 among them: those asked for, or the powers of two from 8 that the traces hold."""
    if text is not None:
        return sorted({0, *parse_numbers("--budgets", text)})
    recorded = min(trace.budget for trace in traces)
    return [0, *(1 << power for power in range(3, recorded.bit_length()))]


def acceptance(traces: Sequence[Trace], budget: int) -> Acceptance:
    """Replay `budget`. Raises ValueError for one above the recorded one, and where nothing was decoded."""
    steps = [step for trace in traces for step in trace.steps(budget)]
    if not steps:
        raise ValueError("every answer of the trace ended with its first token: nothing was decoded")
    tokens = sum(trace.decode_tokens for trace in traces)
    return Acceptance(budget, tokens / len(steps), sum(nodes for _, nodes, _ in steps) / len(steps))


def choose_shape(options: Namespace, trace: Trace) -> Shape:
    """The shape that the options ask for; a method without a head runs none."""
    if options.shape is not None:
        if options.model is not None:
            raise ValueError("--shape and --model both name a target: use one")
        shape = named_shape(options.shape, options.head)
    else:
        choice = choose_model(options.model, options.head, None, None, options.drafter)
        shape = read_shape(choice.model, choice.head, choice.name)
    if trace.passes == 0:
        return Shape(shape.name, shape.stacks, None, shape.tables)
    if shape.head is None:
        raise ValueError(f"{trace.method} drafts with a head and {shape.name} has none here: name one with --head")
    return shape


def choose_device(options: Namespace, progress: Callable[[str], None]) -> Device:
    """The named device, or this machine after a calibration with the options' model and head."""
    if options.device_profile != "here":
        return find_device(options.device_profile, options.kernels)
    choice = choose_model(options.model, options.head, None, None, options.drafter or "head")
    calibration = Calibration(load(choice, options), choice.name)
    for number in range(CALIBRATION_ROUNDS):
        calibration.round()
        progress(f"calibration: {number + 1}/{CALIBRATION_ROUNDS} rounds")
    device = calibration.device()
    if options.save_profile:
        save_profile(device, Path(options.save_profile))
    return device


def predict(
    device: Device,
    shape: Shape,
    accepted: Iterable[Acceptance],
    batches: Sequence[int],
    contexts: Sequence[int],
    host: float = 0.0,
) -> Iterator[Prediction]:
    """A row a batch size, context and budget, in that order; `host` seconds are added to every step."""
    budgets = list(accepted)
    for batch in batches:
        for context in contexts:
            plain = step_seconds(device, decode_step(shape, batch, 0, context, observed=False), drafts=False) + host
            for each in budgets:
                yield _predict(device, shape, each, batch, context, host, batch / plain)


def _predict(
    device: Device, shape: Shape, each: Acceptance, batch: int, context: int, host: float, plain_rate: float
) -> Prediction:
    nodes = round(each.nodes)
    calls = list(decode_step(shape, batch, nodes, context, each.tau - 1, observed=False))
    phases = {phase: _phase(device, calls, phase) for phase in ("target", "draft", "commit")}
    own_host = host + (device.draft_host if each.budget else 0.0)
    seconds = sum(phases.values()) + own_host
    rate = batch * each.tau / seconds
    needed = shape.weight_bytes + shape.cache_bytes(Load(batch, nodes + 1, context))
    return Prediction(
        batch=batch,
        context=context,
        budget=each.budget,
        tau=each.tau,
        step_ms=1e3 * seconds,
        target_ms=1e3 * phases["target"],
        draft_ms=1e3 * phases["draft"],
        commit_ms=1e3 * phases["commit"],
        host_ms=1e3 * own_host,
        tokens_per_second=rate,
        speedup=rate / plain_rate,
        fits=device.memory is None or needed <= device.memory,
    )


def _phase(device: Device, calls: Iterable[Call], phase: str) -> float:
    return sum(device.seconds(call) for call in calls if call.phase == phase)
