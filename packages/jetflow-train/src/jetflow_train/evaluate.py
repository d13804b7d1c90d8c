"""Real speculative decoding of workloads: τ and tokens/s at several budgets, beside plain decoding of the same prompts.

Each prompt is decoded at every budget in turn (interleaved), so a slow minute of the machine touches all budgets
alike. Speeds are medians over prompts of tokens per second of decoding alone: prompts are read before the clock starts.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jetflow_core.engine import EngineConfig
from jetflow_core.llm import LLM
from jetflow_core.sampling import SamplingParams
from jetflow_train.config import EvaluateOptions
from jetflow_train.prompts import EVALUATION, encode_prompts, read_prompts
from jetflow_train.targets import target_path


@dataclass(frozen=True)
class Measurement:
    """One workload at one budget. `speedup` is against budget 0 (None where that was not run)."""

    workload: str
    budget: int
    prompts: int
    tokens: int
    tau: float
    tokens_per_second: float
    speedup: float | None
    identical: int | None  # prompts whose text equals plain decoding's


@dataclass(frozen=True)
class _Run:
    token_ids: list[int]
    steps: int
    seconds: float

    @property
    def decoded(self) -> int:
        return len(self.token_ids) - 1  # the first token comes out of the prefill

    @property
    def speed(self) -> float:
        return self.decoded / max(self.seconds, 1e-9)


def evaluate(
    options: EvaluateOptions, on_run: Callable[[int, int], object] = lambda done, total: None
) -> list[Measurement]:
    """Load target and head, and `measure`."""
    config = EngineConfig(max_running=1)
    llm = LLM.load(target_path(options.target), options.head, device=options.device, config=config)
    return measure(llm, options, on_run)


def measure(
    llm: LLM, options: EvaluateOptions, on_run: Callable[[int, int], object] = lambda done, total: None
) -> list[Measurement]:
    """Measure every workload at every budget; write them to `options.output` when it is given.

    `on_run(done, total)` is told of each decoded prompt. Raises ValueError for a head that does not fit the target,
    bad prompts, answers that are all one token long, and an output file that cannot be written.
    """
    budgets = list(dict.fromkeys(options.budgets))
    workloads = [
        (Path(file).stem, read_prompts(Path(file), limit=options.limit))
        for file in options.prompts or (str(EVALUATION),)
    ]
    total = sum(len(prompts) for _, prompts in workloads) * len(budgets)
    done = 0
    results: list[Measurement] = []
    for name, prompts in workloads:
        limit = llm.engine.max_model_len - options.max_tokens
        runs: dict[int, list[_Run]] = {budget: [] for budget in budgets}
        for ids in encode_prompts(llm.tokenizer, prompts, limit, name):
            for budget in budgets:
                runs[budget].append(_decode(llm, ids, options.max_tokens, budget))
                done += 1
                on_run(done, total)
        results += _measurements(name, runs)
    if options.output is not None:
        try:
            Path(options.output).write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")
        except OSError as error:
            raise ValueError(f"{options.output}: cannot write the results ({error})") from error
    return results


def _decode(llm: LLM, ids: Sequence[int], max_tokens: int, budget: int) -> _Run:
    """Greedy decoding of one prompt; the clock starts with its first token."""
    tokens: list[int] = []
    began = 0.0
    steps = 0
    for output in llm.stream(ids, SamplingParams(max_tokens=max_tokens), budget):
        if output.error:
            raise ValueError(output.error)
        if not tokens:
            began = time.perf_counter()
        tokens += output.token_ids
        steps = output.usage.target_steps
    return _Run(tokens, steps, time.perf_counter() - began)


def _measurements(name: str, runs: dict[int, list[_Run]]) -> list[Measurement]:
    plain = runs.get(0)
    results: list[Measurement] = []
    for budget, each in runs.items():
        tokens = sum(len(run.token_ids) for run in each)
        steps = sum(run.steps for run in each)
        # An answer that ended with its first token has no decoding speed.
        pairs = [(a, b) for a, b in zip(each, plain or each, strict=True) if a.decoded and b.decoded]
        if not pairs:
            raise ValueError(f"{name}: every answer ended with its first token; raise --max-tokens")
        speed = statistics.median(a.speed for a, _ in pairs)
        speedup = identical = None
        if plain is not None:
            speedup = statistics.median(a.speed / b.speed for a, b in pairs)
            identical = sum(a.token_ids == b.token_ids for a, b in zip(each, plain, strict=True))
        # The first token of a prompt comes out of its prefill, which drafts nothing: it is no decoding step.
        tau = (tokens - len(each)) / max(steps - len(each), 1)
        results.append(Measurement(name, budget, len(each), tokens, tau, speed, speedup, identical))
    return results
