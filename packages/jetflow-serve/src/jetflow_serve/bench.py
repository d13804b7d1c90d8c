"""`jetflow-serve bench`: interleaved autoregressive and speculative runs over prompts from files."""

from __future__ import annotations

import json
import secrets
import statistics
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetflow_core.sampling import SamplingParams
from jetflow_serve.choice import choose_model, load
from jetflow_serve.host import describe
from jetflow_serve.measure import Run, timed_run, warm_up

if TYPE_CHECKING:
    from jetflow_core.llm import LLM


@dataclass(frozen=True)
class Workload:
    """Prompts of one file: (id, first user turn)."""

    name: str
    prompts: list[tuple[str, str]]


@dataclass(frozen=True)
class Row:
    """Results of one budget on one workload.

    `tokens_per_second`: median over runs. `ratio`: median over prompts and repeats of speed against the budget-0 run
    made next to it; `ratio_low` and `ratio_high` are its quartiles. `identical`: prompts with the tokens of budget 0.
    """

    workload: str
    budget: int
    prompts: int
    tokens: int
    tokens_per_second: float
    acceptance_length: float
    ratio: float
    ratio_low: float
    ratio_high: float
    identical: int


def bench(options: Namespace, write: Callable[[str], None], progress: Callable[[str], None]) -> int:
    """Run the benchmark, print a Markdown table, write JSON where asked. Raises ValueError for bad files or options."""
    workloads = [read_workload(Path(path), options.prompts) for path in options.data]
    budgets = [budget for budget in parse_numbers("--budgets", options.budgets) if budget > 0]
    choice = choose_model(options.model, options.head, max(budgets, default=0), None, options.drafter)
    seed = secrets.randbits(31) if options.seed is None else options.seed  # every run of a prompt needs the same one
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=seed)
    llm = load(choice, options)
    warm_up(llm, [0, *budgets])
    rows: list[Row] = []
    for workload in workloads:
        rows += measure(llm, workload, budgets, params, options.repeats, progress)
    facts = {"model": choice.name, "head": choice.head or "none", **describe(llm)}
    write("".join(f"{name}: {value}\n" for name, value in facts.items()))
    write(f"{options.max_tokens} new tokens at most, batch 1, {options.repeats} interleaved repeats\n\n")
    write(markdown(rows) + "\n")
    if options.json:
        settings = {"sampling": asdict(params), "repeats": options.repeats, "data": list(options.data)}
        Path(options.json).write_text(
            json.dumps({"host": facts, "settings": settings, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"
        )
    return 0


def measure(
    llm: LLM,
    workload: Workload,
    budgets: Sequence[int],
    params: SamplingParams,
    repeats: int,
    progress: Callable[[str], None],
) -> list[Row]:
    """A row for budget 0 and one for each of `budgets`; the runs of a prompt alternate, in an order that rotates."""
    order = [0, *budgets]
    runs: dict[int, list[Run]] = {budget: [] for budget in order}
    for number, (name, text) in enumerate(workload.prompts):
        prompt = llm.tokenizer.encode_chat([{"role": "user", "content": text}])
        for repeat in range(repeats):
            shift = (number + repeat) % len(order)
            for budget in [*order[shift:], *order[:shift]]:
                try:
                    runs[budget].append(timed_run(llm, prompt, params, budget))
                except ValueError as error:
                    raise ValueError(f"{workload.name}, prompt {name}: {error}") from error
        progress(f"{workload.name}: {number + 1}/{len(workload.prompts)} prompts")
    return [summarise(workload.name, budget, runs[budget], runs[0], repeats) for budget in order]


def summarise(name: str, budget: int, runs: Sequence[Run], baseline: Sequence[Run], repeats: int) -> Row:
    """Results of `runs` of one budget; `baseline` holds the budget-0 runs of the same prompts in the same order."""
    pairs = [(run, base) for run, base in zip(runs, baseline, strict=True) if run.decode_tokens and base.decode_tokens]
    if not pairs:
        raise ValueError(f"{name}: every answer ended with its first token; raise --max-tokens")
    ratios = [(run.tokens_per_second or 0) / (base.tokens_per_second or 1) for run, base in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    same = [run.token_ids == base.token_ids for run, base in zip(runs, baseline, strict=True)]
    return Row(
        workload=name,
        budget=budget,
        prompts=len(runs) // repeats,
        tokens=sum(len(run.token_ids) for run in runs),
        tokens_per_second=statistics.median(run.tokens_per_second or 0 for run, _ in pairs),
        acceptance_length=sum(run.decode_tokens for run in runs) / sum(run.decode_steps for run in runs),
        ratio=middle,
        ratio_low=low,
        ratio_high=high,
        identical=sum(all(same[start : start + repeats]) for start in range(0, len(same), repeats)),
    )


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table; budget 0 is our own autoregressive path."""
    lines = [
        "| workload | budget | tokens/s | τ | × budget 0 (quartiles) | identical to budget 0 |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = f"{row.ratio:.2f} ({row.ratio_low:.2f}–{row.ratio_high:.2f})" if row.budget else "1"
        same = f"{row.identical} of {row.prompts}" if row.budget else "—"
        speed = f"{row.tokens_per_second:.1f} | {row.acceptance_length:.2f} | {ratio}"
        lines.append(f"| {row.workload} | {row.budget} | {speed} | {same} |")
    return "\n".join(lines)


def read_workload(path: Path, limit: int) -> Workload:
    """The first `limit` rows `{"id": …, "turns": [text, …]}` of a JSON-lines file.

    Raises ValueError that names file and line.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    prompts: list[tuple[str, str]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(prompts) == limit:
                break
            if line.strip():
                prompts.append(_read_row(line, f"{path}, line {number}"))
    if not prompts:
        raise ValueError(f"{path} has no rows")
    return Workload(path.stem, prompts)


def _read_row(line: str, where: str) -> tuple[str, str]:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    match row:
        case {"turns": [str(text), *_]} if text:
            return str(row.get("id", where)), text
        case _:
            raise ValueError(f'{where}: a row must be {{"id": ..., "turns": ["text of the first user message", ...]}}')


def parse_numbers(option: str, text: str) -> list[int]:
    """`8,16,32` as distinct numbers in order. Raises ValueError that names `option`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError(f"{option} is {text!r}: give numbers separated by commas, such as 8,16,32")
    return list(dict.fromkeys(int(part) for part in parts))
