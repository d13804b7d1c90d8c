"""Real speculative decoding of workloads, and beside it what the training code predicts for the very same answers.

Each prompt is decoded at every budget in turn (interleaved), so a slow minute of the machine touches all budgets
alike. Speeds are medians over prompts of tokens per second of decoding alone: prompts are read before the clock starts.

The predictions use the training forward: features of whole sequences, packed blocks and their masks, no pages. Where
they part from what was measured, training and serving see different things, which no training metric would show.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jetflow_core import host
from jetflow_core.engine import EngineConfig
from jetflow_core.llm import LLM
from jetflow_core.sampling import SamplingParams
from jetflow_core.tokenizer import Tokenizer
from jetflow_core.weights import open_checkpoint
from jetflow_train.config import EvaluateOptions
from jetflow_train.data import Row
from jetflow_train.features import RowFeatures
from jetflow_train.files import replace_file
from jetflow_train.heads import target_mark
from jetflow_train.prompts import EVALUATION, encode_prompts, read_prompts
from jetflow_train.record import read_record
from jetflow_train.simulate import answer_features, forced_metrics, head_rules, replayed_tau
from jetflow_train.targets import target_path, target_tokenizer

PACKAGES = ("jetflow-train", "jetflow-core", "jetflow-triton", "torch")
FORCED_ANCHORS = 16


@dataclass(frozen=True)
class Measurement:
    """One workload at one budget.

    `predicted` is τ replayed on the same answers with the training code, None at budget 0. `acceptance` has for each depth the
    share of target passes that accepted so many drafted tokens. What is relative to plain decoding is None where budget 0
    was not run.
    """

    workload: str
    budget: int
    prompts: int
    tokens: int
    tau: float
    predicted: float | None
    acceptance: list[float]
    tokens_per_second: float
    plain_tokens_per_second: float | None
    speedup: float | None
    identical: int | None  # prompts whose text equals plain decoding's


@dataclass(frozen=True)
class Forced:
    """Teacher-forced measures of a workload's answers: `accuracy` per slot k from 1, and 1 + Σ_k Π_{j ≤ k} accuracy_j."""

    accuracy: list[float]
    accepted_length: float


@dataclass(frozen=True)
class Evaluation:
    """Everything that is known of a head: `facts` are target, head, hardware, dtype and versions, `training` is the
    record that training left in the head's folder, None without one, `forced` has an entry a workload.
    """

    facts: dict[str, str | int | bool]
    training: dict[str, Any] | None
    forced: dict[str, Forced]
    measurements: list[Measurement]


@dataclass(frozen=True)
class Run:
    """One greedy answer: `sizes` are the tokens that each target pass after the prefill committed."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: float

    @property
    def decoded(self) -> int:
        """Tokens that decoding added: the first one comes out of the prefill."""
        return len(self.token_ids) - 1

    @property
    def speed(self) -> float:
        """Decoded tokens a second."""
        return self.decoded / max(self.seconds, 1e-9)


def evaluate(options: EvaluateOptions, on_run: Callable[[int, int], object] = lambda done, total: None) -> Evaluation:
    """Load target and head, and `measure`. Raises ValueError as that does, for the workloads before anything is loaded."""
    checkpoint = open_checkpoint(target_path(options.target))
    read_workloads(target_tokenizer(checkpoint), options, checkpoint.config.max_position_embeddings)
    config = EngineConfig(max_running=1, drafter="head")
    llm = LLM.load(target_path(options.target), options.head, device=options.device, config=config)
    return measure(llm, options, on_run)


def measure(
    llm: LLM, options: EvaluateOptions, on_run: Callable[[int, int], object] = lambda done, total: None
) -> Evaluation:
    """Measure every workload at every budget with `llm`, which has a head; write all of it to `options.output` when given.

    `on_run(done, total)` is told of each decoded prompt. Raises ValueError for a head that does not fit the target,
    bad prompts, answers that are all one token long, and an output file that cannot be written.
    """
    budgets = list(dict.fromkeys(options.budgets))
    workloads = read_workloads(llm.tokenizer, options, llm.engine.max_model_len)
    total = sum(len(prompts) for prompts in workloads.values()) * len(budgets)
    done = 0
    forced: dict[str, Forced] = {}
    measurements: list[Measurement] = []
    for name, prompts in workloads.items():
        runs: dict[int, list[Run]] = {budget: [] for budget in budgets}
        for ids in prompts:
            for budget in budgets:
                runs[budget].append(_decode(llm, ids, options.max_tokens, budget))
                done += 1
                on_run(done, total)
        predicted, forced[name] = predictions(llm, name, runs)
        measurements += summarise(name, runs, predicted)
    engine = llm.engine
    facts = {"target": options.target or "demo model", "head": options.head}
    facts["target_mark"] = target_mark(engine.model.embed)
    facts |= host.describe(engine.device, engine.model.embed.dtype, PACKAGES)
    result = Evaluation(facts, read_record(Path(options.head)), forced, measurements)
    if options.output is not None:
        try:
            replace_file(Path(options.output), (json.dumps(asdict(result), indent=1) + "\n").encode())
        except OSError as error:
            raise ValueError(f"{options.output}: cannot write the results ({error})") from error
    return result


def read_workloads(tokenizer: Tokenizer, options: EvaluateOptions, positions: int) -> dict[str, list[list[int]]]:
    """Token ids of every workload's prompts, for a target with so many `positions`.

    Raises ValueError for whatever of `options` cannot be used, the output file included: to be known before long work.
    """
    if options.output is not None:
        _check_place(Path(options.output))
    limit = positions - options.max_tokens
    if limit < 2:
        raise ValueError(
            f"max_tokens {options.max_tokens} leaves no room for a prompt in {positions} positions; lower it"
        )
    files = workload_files(options.prompts or (str(EVALUATION),))
    return {
        name: encode_prompts(tokenizer, read_prompts(path, limit=options.limit), limit, str(path), "lower max_tokens")
        for name, path in files.items()
    }


def workload_files(files: Sequence[str]) -> dict[str, Path]:
    """Prompt files by the names of their workloads: the file's own, or its path where files share a name."""
    paths = [Path(file) for file in dict.fromkeys(files)]
    stems = Counter(path.stem for path in paths)
    return {path.stem if stems[path.stem] == 1 else str(path): path for path in paths}


def _check_place(path: Path) -> None:
    """Raise ValueError where no file `path` can be written."""
    new = not path.exists()
    try:
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{path}: cannot write the results ({error}); name another file") from error


def _decode(llm: LLM, ids: Sequence[int], max_tokens: int, budget: int) -> Run:
    """Greedy decoding of one prompt; the clock starts with its first token."""
    tokens: list[int] = []
    sizes: list[int] = []
    began = 0.0
    for output in llm.stream(ids, SamplingParams(max_tokens=max_tokens), budget):
        if output.error:
            raise ValueError(output.error)
        if tokens:
            sizes.append(len(output.token_ids))
        else:
            began = time.perf_counter()
        tokens += output.token_ids
    return Run(tuple(ids), tuple(tokens), tuple(sizes), time.perf_counter() - began)


def predictions(llm: LLM, name: str, runs: dict[int, list[Run]]) -> tuple[dict[int, float], Forced]:
    """τ at each budget above 0, replayed on that budget's own answers, and teacher-forced measures of the first budget's.

    In half precision an answer can part from plain decoding's at a near-tie, so every budget is held against its own.
    Raises ValueError when no answer has a second token.
    """
    assert llm.engine.head is not None
    head = llm.engine.head
    rules = head_rules(head)
    known: dict[tuple[int, ...], RowFeatures] = {}

    def features(run: Run) -> RowFeatures:
        key = run.prompt_ids + run.token_ids
        if key not in known:
            row = Row("", 0.0, run.prompt_ids, run.token_ids)
            known[key] = answer_features(llm.engine.model, row, head.config.target_layer_ids)
        return known[key]

    items = {budget: [features(run) for run in each if run.decoded] for budget, each in runs.items()}
    if not all(items.values()):
        raise ValueError(f"{name}: every answer ended with its first token; raise --max-tokens")
    tau = {
        budget: replayed_tau(head, each, rules, [budget], max(len(item.tokens) for item in each))[budget]
        for budget, each in items.items()
        if budget
    }
    forced = forced_metrics(head, next(iter(items.values())), rules, FORCED_ANCHORS, temperature=1.0)
    return tau, Forced(forced.conditional_accuracy, forced.accepted_length)


def summarise(name: str, runs: dict[int, list[Run]], predicted: dict[int, float]) -> list[Measurement]:
    """A workload's measurements from its runs at each budget, the same prompts in the same order."""
    plain = runs.get(0)
    results: list[Measurement] = []
    for budget, each in runs.items():
        # An answer that ended with its first token has no decoding speed.
        pairs = [(a, b) for a, b in zip(each, plain or each, strict=True) if a.decoded and b.decoded]
        if not pairs:
            raise ValueError(f"{name}: every answer ended with its first token; raise --max-tokens")
        base = speedup = identical = None
        if plain is not None:
            base = statistics.median(b.speed for _, b in pairs)
            speedup = statistics.median(a.speed / b.speed for a, b in pairs)
            identical = sum(a.token_ids == b.token_ids for a, b in zip(each, plain, strict=True))
        sizes = [size for run in each for size in run.sizes]
        results.append(
            Measurement(
                workload=name,
                budget=budget,
                prompts=len(each),
                tokens=sum(len(run.token_ids) for run in each),
                tau=sum(sizes) / len(sizes),
                predicted=predicted.get(budget),
                acceptance=[sum(size > depth for size in sizes) / len(sizes) for depth in range(1, max(sizes))],
                tokens_per_second=statistics.median(a.speed for a, _ in pairs),
                plain_tokens_per_second=base,
                speedup=speedup,
                identical=identical,
            )
        )
    return results
