"""Measures this machine for the simulator: products by rows, then whole steps, to which the price of all other calls is fitted.

The steps are of a made-up prompt at budgets between those that one asks about, and never of the prompts of a benchmark, so what
is predicted from the result has not been seen. Rounds can be spread over a long measurement, so that both see the same machine.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jetflow_core.config import HeadConfig
from jetflow_core.layers import MLP, Linear
from jetflow_core.llm import LLM
from jetflow_core.sampling import SamplingParams
from jetflow_serve.devices import Measured
from jetflow_serve.host import describe
from jetflow_serve.shapes import Shape, shape_of
from jetflow_serve.step_model import decode_step, target_pass
from jetflow_triton.roofline import Load

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
BUDGETS = (0, 4, 12, 24, 48, 96)
CONTEXTS = (16, 640)
STEPS = 8  # timed steps a run
TEXT = "The quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True)
class StepTime:
    """Median step of a run: its drafted nodes and the tokens cached on average, nodes accepted a step, seconds."""

    nodes: int
    context: int
    accepted: float
    seconds: float


class Calibration:
    """Timings of one loaded engine, round by round, and the device that follows from their medians."""

    def __init__(self, llm: LLM, name: str) -> None:
        head = None if llm.engine.head is None else llm.engine.head.config
        if not isinstance(head, HeadConfig):
            raise ValueError("a calibration times the steps of a parallel draft head: name one with --head")
        if llm.engine.config.draft_passes > 1:
            raise ValueError(
                "a calibration times drafts of one head pass, which the step model knows: use --draft-passes 1"
            )
        self.llm, self.name = llm, name
        self.shape = shape_of(llm.engine.model.config, head, name)
        self._products: dict[int, list[float]] = defaultdict(list)
        self._steps: dict[tuple[int, int], list[StepTime]] = defaultdict(list)

    def round(self) -> None:
        """Time everything once more."""
        for rows in ROWS:
            self._products[rows].append(_products_seconds(self.llm, rows))
        for context, budget in itertools.product(self._contexts(), BUDGETS):
            self._steps[context, budget].append(time_steps(self.llm, self._prompt(context), budget))

    def device(self) -> Measured:
        """What the rounds so far say. Raises ValueError where there was none."""
        if not self._products:
            raise ValueError("there was no calibration round")
        flops = {rows: _product_flops(self.shape, rows) for rows in ROWS}
        facts = describe(self.llm)
        device = Measured(
            name=str(facts.get("cpu", "this machine")),
            rows=ROWS,
            product_flops=tuple(flops[rows] / statistics.median(self._products[rows]) for rows in ROWS),
            per_call=0.0,
            per_byte=0.0,
            per_score=0.0,
            draft_host=0.0,
            source=f"calibrated with {self.name}: " + ", ".join(f"{key} {value}" for key, value in facts.items()),
        )
        return fit(device, self.shape, [_middle(times) for times in self._steps.values()])

    def _contexts(self) -> tuple[int, ...]:
        return tuple(min(context, self.llm.engine.max_model_len // 2) for context in CONTEXTS)

    def _prompt(self, tokens: int) -> list[int]:
        once = self.llm.tokenizer.encode(TEXT, allow_special=False)
        return (once * (tokens // len(once) + 1))[:tokens]


def fit(device: Measured, shape: Shape, steps: Sequence[StepTime]) -> Measured:
    """`device`, whose products are known, with the prices that explain `steps` best: least squares of relative errors."""
    rows: list[list[float]] = []
    wanted: list[float] = []
    for step in steps:
        calls = list(decode_step(shape, 1, step.nodes, step.context, step.accepted))
        products = sum(device.seconds(call) for call in calls if call.kind in ("product", "experts"))
        others = [call for call in calls if call.kind not in ("product", "experts")]
        rows.append(
            [
                sum(call.times for call in others),
                sum(call.times * call.cost.bytes for call in others),
                sum(call.times * call.scored for call in others if call.kind == "attention"),
                float(step.nodes > 0),
            ]
        )
        wanted.append(step.seconds - products)
    weights = 1 / _vector([step.seconds for step in steps])
    prices = non_negative_fit(_vector(rows) * weights[:, None], _vector(wanted) * weights)
    per_call, per_byte, per_score, draft_host = prices
    return replace(device, per_call=per_call, per_byte=per_byte, per_score=per_score, draft_host=draft_host)


def non_negative_fit(matrix: Tensor, wanted: Tensor) -> list[float]:
    """The x ≥ 0 with the least squares of matrix [N, M] · x − wanted [N], for a handful of columns: the best of all choices of
    columns whose x is not zero.
    """
    scale = matrix.abs().amax(dim=0).clamp(min=1e-300)  # columns of one size, so that none counts as dependent
    best, least = torch.zeros_like(scale), float(wanted @ wanted)
    for size in range(1, matrix.shape[1] + 1):
        for chosen in itertools.combinations(range(matrix.shape[1]), size):
            own = list(chosen)
            x = (
                torch.linalg.lstsq(matrix[:, own] / scale[own], wanted[:, None], driver="gelsd").solution[:, 0]
                / scale[own]
            )
            error = matrix[:, own] @ x - wanted
            if bool((x >= 0).all()) and float(error @ error) < least:
                best, least = torch.zeros_like(scale), float(error @ error)
                best[own] = x
    return best.tolist()


def _vector(values: Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def time_steps(llm: LLM, prompt: Sequence[int], budget: int) -> StepTime:
    """Decode `prompt` for some steps and take their median. Raises ValueError when the engine refuses.

    A tree can be smaller than `budget`, so the nodes that were drafted are counted.
    """
    params = SamplingParams(max_tokens=llm.engine.max_model_len - len(prompt), ignore_eos=True)
    seconds: list[float] = []
    tokens: list[int] = []
    nodes: list[int] = []  # up to the end of each step
    before = time.perf_counter()
    for output in itertools.islice(llm.stream(prompt, params, budget), STEPS + 1):  # the first ends the prompt
        if output.error is not None:
            raise ValueError(output.error)
        now = time.perf_counter()
        seconds.append(now - before)
        tokens.append(len(output.token_ids))
        nodes.append(llm.engine.budgets.state().nodes)
        before = now
    if len(seconds) < 2:
        raise ValueError("the context of this engine is too short to time a step in: raise --max-model-len")
    decoded = sum(tokens[1:])
    return StepTime(
        nodes=round((nodes[-1] - nodes[0]) / (len(nodes) - 1)),
        context=len(prompt) + decoded // 2,
        accepted=decoded / (len(tokens) - 1) - 1,
        seconds=statistics.median(seconds[1:]),
    )


def _middle(times: Sequence[StepTime]) -> StepTime:
    """Median seconds of rounds of the same run."""
    return replace(times[0], seconds=statistics.median(time.seconds for time in times))


def _product_flops(shape: Shape, rows: int) -> float:
    calls = target_pass(shape, Load(1, rows, 0))
    return sum(call.times * call.cost.flops for call in calls if call.kind == "product")


def _products_seconds(llm: LLM, rows: int) -> float:
    """All dense products of a target pass over `rows` rows, weight after weight as in a pass. The second of two runs."""
    model, device = llm.engine.model, llm.engine.device
    config = model.config
    widths = {config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size}
    inputs = {width: torch.ones(rows, width, dtype=model.embed.dtype, device=device) for width in widths}
    products = list(_products(llm))

    def run() -> None:
        for linear, width in products:
            linear(inputs[width])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with torch.inference_mode():
        run()
        return _timed(run)


def _products(llm: LLM) -> Iterator[tuple[Linear, int]]:
    """The target's products and the widths of their inputs."""
    model = llm.engine.model
    config = model.config
    for layer in model.layers:
        yield layer.attention.qkv, config.hidden_size
        yield layer.attention.o, config.num_heads * config.head_dim
        if isinstance(layer.feed_forward, MLP):
            yield layer.feed_forward.gate_up, config.hidden_size
            yield layer.feed_forward.down, config.intermediate_size
        else:
            yield layer.feed_forward.router, config.hidden_size
    yield model.lm_head, config.hidden_size


def _timed(run: Callable[[], None]) -> float:
    before = time.perf_counter()
    run()
    return time.perf_counter() - before
