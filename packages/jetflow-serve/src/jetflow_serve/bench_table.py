"""Runs of the benchmark into rows and Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

from jetflow_core.step_clock import PHASES, Phase, PhaseTimes
from jetflow_serve.flips import Flip, largest_gap
from jetflow_serve.measure import Run
from jetflow_serve.methods import BASELINE
from jetflow_serve.trace import Trace, acceptance_by_depth, replayed_acceptance, replayed_tau

PASSES: tuple[Phase, ...] = (
    "draft",
    "verify",
)  # the drafter's and the target's; everything else is the host's overhead
HOST: tuple[Phase, ...] = tuple(phase for phase in PHASES if phase not in PASSES)
STEERING: tuple[Phase, ...] = ("tree", "batch", "accept")
DEEPEST = 8  # of the acceptance table

NOTE = """\
AR is plain decoding by the same target on an engine without a drafter: no taps, no draft context. It is measured like the
others, in turn with them, in an order that rotates. × AR: median over prompts and repeats of tokens/s against the AR run made
next to it, quartiles in brackets. τ: tokens a target pass. Nodes: drafted and verified a pass, without the anchor. Identical:
answers with AR's tokens; gap: the largest difference of the two tokens' logits where an answer parts from AR's.

Times are means over decoding passes, of the host: on a GPU its waiting shows in the phase that waits, `accept` for the target.
Draft: the drafter's passes. Tree: candidates to trees. Batch: flat tensors of the target's pass. Verify: that pass and its LM
head. Accept: the target's choices and the walk along them. Commit: accepted K/V in place, the drafter's context. Rest:
scheduling, text, what policies learn. Host: the share of a step outside of draft and verify; in brackets that of tree, batch
and accept alone."""


@dataclass(frozen=True)
class Row:
    """Results of one method and budget on one workload; the baseline's has budget 0.

    `tokens_per_second`: median over runs. `ratio`: median over prompts and repeats of speed against the baseline's run made next
    to it; `ratio_low` and `ratio_high` are its quartiles. `acceptance`: share of target passes that accepted at least 1, 2, …
    nodes. `nodes`: mean drafted nodes a pass. `phase_ms`: mean milliseconds of a decoding pass by phase. `host_share` of a pass
    lies outside of draft and verify, `steering_share` in tree, batch and accept. `identical`: prompts with the baseline's tokens;
    `flips` are the other ones.
    """

    workload: str
    method: str
    budget: int
    prompts: int
    tokens: int
    tokens_per_second: float
    acceptance_length: float
    acceptance: list[float]
    nodes: float
    ratio: float
    ratio_low: float
    ratio_high: float
    identical: int
    phase_ms: dict[Phase, float]
    host_share: float
    steering_share: float
    flips: list[Flip] = field(default_factory=list[Flip])


@dataclass(frozen=True)
class Replay:
    """τ of one method and budget on one workload, replayed from traces of `prompts` answers; see `Row` for the rest."""

    workload: str
    method: str
    budget: int
    prompts: int
    tokens: int
    acceptance_length: float
    acceptance: list[float]
    nodes: float


def summarise(
    workload: str,
    method: str,
    budget: int,
    runs: Sequence[Run],
    baseline: Sequence[Run],
    repeats: int,
    flips: Sequence[Flip] = (),
) -> Row:
    """Results of `runs`; `baseline` holds the plain runs of the same prompts in the same order, `flips` the answers that differ.

    Raises ValueError where nothing was decoded.
    """
    pairs = [(run, base) for run, base in zip(runs, baseline, strict=True) if run.decode_tokens and base.decode_tokens]
    if not pairs:
        raise ValueError(f"{workload}: every answer ended with its first token; raise --max-tokens")
    ratios = [(run.tokens_per_second or 0) / (base.tokens_per_second or 1) for run, base in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    times = reduce(add, (run.phases for run in runs))
    passes = sum(run.decode_steps for run in runs)
    return Row(
        workload=workload,
        method=method,
        budget=budget,
        prompts=len(runs) // repeats,
        tokens=sum(len(run.token_ids) for run in runs),
        tokens_per_second=statistics.median(run.tokens_per_second or 0 for run, _ in pairs),
        acceptance_length=sum(run.decode_tokens for run in runs) / passes,
        acceptance=acceptance_by_depth([count for run in runs for count in run.accepted]),
        nodes=sum(run.nodes for run in runs) / passes,
        ratio=middle,
        ratio_low=low,
        ratio_high=high,
        identical=len(runs) // repeats - len(flips),
        phase_ms={phase: 1000 * times.seconds[phase] / times.steps for phase in PHASES},
        host_share=_share(times, HOST),
        steering_share=_share(times, STEERING),
        flips=list(flips),
    )


def replay(workload: str, method: str, budget: int, traces: Sequence[Trace]) -> Replay:
    """What `traces` say of a budget. Raises ValueError where nothing was decoded, or for more than was recorded."""
    steps = [step for trace in traces for step in trace.steps(budget)]
    return Replay(
        workload=workload,
        method=method,
        budget=budget,
        prompts=len(traces),
        tokens=sum(trace.decode_tokens for trace in traces),
        acceptance_length=replayed_tau(traces, budget),
        acceptance=replayed_acceptance(traces, budget),
        nodes=sum(size for _, size, _ in steps) / len(steps),
    )


def markdown(rows: Sequence[Row], temperature: float) -> str:
    """Tables of speed, phases and acceptance, and what their words mean."""
    lines = [
        "| workload | method | budget | tokens/s | × AR | τ | nodes | identical | gap |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_speed_line(row, temperature) for row in rows),
        "",
        "| workload | method | budget | step ms | draft | tree | batch | verify | accept | commit | rest | host |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_phase_line(row) for row in rows),
        "",
        *_acceptance_table([row for row in rows if row.method != BASELINE]),
        "",
        NOTE,
    ]
    return "\n".join(lines)


def replay_markdown(rows: Sequence[Replay]) -> str:
    """τ by method and budget, a line a workload and method, and acceptance by depth."""
    budgets = list(dict.fromkeys(row.budget for row in rows))
    lines = [
        f"| workload | method | {' | '.join(f'budget {budget}' for budget in budgets)} |",
        "|---" * (2 + len(budgets)) + "|",
    ]
    for workload, method in dict.fromkeys((row.workload, row.method) for row in rows):
        own = {row.budget: row.acceptance_length for row in rows if (row.workload, row.method) == (workload, method)}
        lines.append(f"| {workload} | {method} | {' | '.join(f'{own[budget]:.2f}' for budget in budgets)} |")
    lines += ["", *_acceptance_table(rows)]
    return "\n".join(lines)


def _share(times: PhaseTimes, phases: Sequence[Phase]) -> float:
    return sum(times.seconds[phase] for phase in phases) / sum(times.seconds.values())


def _speed_line(row: Row, temperature: float) -> str:
    plain = row.method == BASELINE
    ratio = "1" if plain else f"{row.ratio:.2f} ({row.ratio_low:.2f}–{row.ratio_high:.2f})"
    same = "—" if plain else f"{row.identical} of {row.prompts}"
    speed = f"{row.tokens_per_second:.1f} | {ratio} | {row.acceptance_length:.2f} | {row.nodes:.1f}"
    return (
        f"| {row.workload} | {row.method} | {row.budget} | {speed} | {same} | {largest_gap(row.flips, temperature)} |"
    )


def _phase_line(row: Row) -> str:
    times = row.phase_ms
    middle = [times[phase] for phase in ("draft", "tree", "batch", "verify", "accept", "commit")]
    cells = [sum(times.values()), *middle, times["plan"] + times["other"]]
    share = f"{row.host_share:.1%} ({row.steering_share:.1%})"
    return f"| {row.workload} | {row.method} | {row.budget} | {' | '.join(f'{cell:.2f}' for cell in cells)} | {share} |"


def _acceptance_table(rows: Sequence[Row | Replay]) -> list[str]:
    """Share of passes that accept at least so many nodes."""
    depths = min(max((len(row.acceptance) for row in rows), default=0), DEEPEST)
    if depths == 0:
        return []
    head = " | ".join(f"≥ {depth}" for depth in range(1, depths + 1))
    lines = [f"| workload | method | budget | {head} |", "|---" * (3 + depths) + "|"]
    for row in rows:
        shares = [*row.acceptance, *[0.0] * depths][:depths]
        lines.append(f"| {row.workload} | {row.method} | {row.budget} | {' | '.join(f'{s:.0%}' for s in shares)} |")
    return lines
