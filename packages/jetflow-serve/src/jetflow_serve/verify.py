"""`jetflow-serve verify`: is every speculative answer the one of budget 0, token for token?"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from jetflow_core.sampling import SamplingParams
from jetflow_serve.choice import choose_model, load
from jetflow_serve.flips import Flip, excused, find_flip, largest_gap
from jetflow_serve.host import describe
from jetflow_serve.workload import Workload, parse_numbers, read_workload

if TYPE_CHECKING:
    from jetflow_core.llm import LLM


@dataclass(frozen=True)
class Verdict:
    """One comparison: `flips` of `prompts` answers differ."""

    workload: str
    temperature: float
    budget: int
    batch: int
    prompts: int
    flips: list[Flip]

    def holds(self, dtype: torch.dtype, exact: bool) -> bool:
        """Whether every answer is the same, or differs as `dtype` allows outside exact mode (`excused`)."""
        return excused(self.flips, self.temperature, dtype, exact)

    def row(self) -> str:
        """The verdict as a row of the table."""
        gap = largest_gap(self.flips, self.temperature)
        same = f"{self.prompts - len(self.flips)} of {self.prompts}"
        return f"| {self.workload} | {self.temperature} | {self.budget} | {self.batch} | {same} | {gap} |"


def verify(options: Namespace, write: Callable[[str], None], progress: Callable[[str], None]) -> int:
    """Compare and print; status 1 when any answer differs by more than a near-tie. Raises ValueError for bad files or options."""
    workloads = [read_workload(Path(path), options.prompts) for path in options.data]
    budgets, batches = parse_numbers("--budgets", options.budgets), parse_numbers("--batch", options.batch)
    if 0 in batches:
        raise ValueError("--batch holds 0: use 1 or more prompts at once")
    choice = choose_model(options.model, options.head, max(budgets), None, options.drafter)
    llm = load(choice, options)
    write("".join(f"{name}: {value}\n" for name, value in {"model": choice.name, **describe(llm)}.items()) + "\n")
    write("| workload | temperature | budget | batch | identical to budget 0, batch 1 | largest gap at a flip |\n")
    write("|---|---|---|---|---|---|\n")
    failed, model = False, llm.engine.model
    for workload in workloads:
        for temperature in options.temperature:
            params = SamplingParams(temperature=temperature, seed=options.seed, max_tokens=options.max_tokens)
            for verdict in compare(llm, workload, params, budgets, batches, progress):
                failed = failed or not verdict.holds(model.embed.dtype, model.exact)
                write(verdict.row() + "\n")
    return int(failed)


def compare(
    llm: LLM,
    workload: Workload,
    params: SamplingParams,
    budgets: Sequence[int],
    batches: Sequence[int],
    progress: Callable[[str], None],
) -> Iterator[Verdict]:
    """One verdict for every budget and batch size against budget 0 at batch 1."""
    encoded = workload.encoded(llm.tokenizer)
    names, prompts = [name for name, _ in encoded], [prompt for _, prompt in encoded]
    progress(f"{workload.name}, temperature {params.temperature}: budget 0")
    expected = _answers(llm, prompts, params, 0, 1)
    for budget in budgets:
        for batch in batches:
            progress(f"{workload.name}, temperature {params.temperature}: budget {budget}, batch {batch}")
            found = _answers(llm, prompts, params, budget, batch)
            flips = [
                find_flip(llm.engine.model, name, prompt, plain, other)
                for name, prompt, plain, other in zip(names, prompts, expected, found, strict=True)
                if plain != other
            ]
            yield Verdict(workload.name, params.temperature, budget, batch, len(prompts), flips)


def _answers(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, budget: int, batch: int
) -> list[list[int]]:
    """Token ids of every answer, `batch` prompts at a time."""
    answers: list[list[int]] = []
    for start in range(0, len(prompts), batch):
        for completion in llm.generate(prompts[start : start + batch], params, budget):
            if completion.error is not None:
                raise ValueError(completion.error)
            answers.append(completion.token_ids)
    return answers
