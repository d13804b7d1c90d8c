"""Acceptance traces: what a drafter ranked where, from which the acceptance of any node budget is replayed.

At every position of a plain decode the drafter was asked for a ranked tree of `budget` nodes (`trace_recorder`). Verification
accepts exactly the nodes that lie on the target's own continuation, and the tree of a smaller budget n is the first n nodes of
the ranked one. So the ranks of those nodes say what every budget up to the recorded one accepts: one pass replays them all.

A drafter whose tree of n nodes is not a cut of its larger one (one that grows its beam with the budget) is replayed as what is
counted here: the tree of the recorded budget, cut to n.

A file holds JSON lines, one a method and prompt, with the fields of `Trace`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jetflow_serve.workload import json_lines


@dataclass(frozen=True)
class Trace:
    """One answer of the target as one drafter foresaw it.

    The answer's first token comes with the prompt's last pass; every other one is decoded, and entry i of the three lists is
    about the draft whose anchor is the answer's i-th token (from 0). They have one entry a decoded token: a draft at i may
    accept the nodes for tokens i + 1, i + 2, … of the answer.

    `positions[i]`: ranks of those nodes in the ranked tree, depth 1 first, up to the first token that was not drafted after its
    predecessors. The best node has rank 1 (the anchor is node 0), so budget n holds the ranks up to n; ranks increase with depth.
    `scores[i]`: their accumulated draft log-probabilities. `sizes[i]`: nodes of the ranked tree, at most `budget`; 0 where
    nothing may be drafted, as before the last token. `passes`: how often a head runs for a draft, 0 where none does.
    """

    method: str
    workload: str
    prompt: str
    prompt_tokens: int
    budget: int
    positions: list[list[int]]
    scores: list[list[float]]
    sizes: list[int]
    passes: int

    def __post_init__(self) -> None:
        if self.budget < 1 or self.prompt_tokens < 1:
            raise ValueError("budget and prompt_tokens must be 1 or more")
        if self.passes < 0:
            raise ValueError("passes must be 0 or more")
        if not len(self.positions) == len(self.scores) == len(self.sizes):
            raise ValueError("positions, scores and sizes must have one entry a decoded token each")
        for ranks, scores, size in zip(self.positions, self.scores, self.sizes, strict=True):
            if len(ranks) != len(scores):
                raise ValueError("positions and scores must have the same lengths")
            if ranks and (ranks[0] < 1 or ranks[-1] > min(size, self.budget)):
                raise ValueError("ranks must lie between 1 and the size of their tree")
            if any(child <= parent for parent, child in itertools.pairwise(ranks)):
                raise ValueError("ranks must increase with the depth")

    @property
    def decode_tokens(self) -> int:
        """Tokens of the answer after its first."""
        return len(self.positions)

    def accepted(self, position: int, budget: int) -> int:
        """Draft nodes that a step with `budget` nodes and its anchor at `position` accepts."""
        return sum(rank <= budget for rank in self.positions[position])

    def steps(self, budget: int) -> list[tuple[int, int, int]]:
        """The target passes of a decode with `budget` nodes: (position of the anchor, drafted nodes, accepted nodes) each.

        Raises ValueError for a budget above the recorded one.
        """
        if budget > self.budget:
            raise ValueError(
                f"the trace of {self.method} on {self.workload}, prompt {self.prompt}, holds trees of {self.budget} nodes; "
                f"record it with a budget of {budget} to know more"
            )
        walked: list[tuple[int, int, int]] = []
        position = 0
        while position < self.decode_tokens:
            accepted = self.accepted(position, budget)
            walked.append((position, min(self.sizes[position], budget), accepted))
            position += accepted + 1
        return walked


def replayed_tau(traces: Sequence[Trace], budget: int) -> float:
    """τ of a decode of all `traces` with `budget` nodes: decoded tokens a target pass.

    Raises ValueError for a budget above the recorded one, and where nothing was decoded.
    """
    passes = sum(len(trace.steps(budget)) for trace in traces)
    if passes == 0:
        raise ValueError("every answer ended with its first token: nothing was decoded")
    return sum(trace.decode_tokens for trace in traces) / passes


def replayed_acceptance(traces: Sequence[Trace], budget: int) -> list[float]:
    """Share of target passes with `budget` nodes that accept at least 1, 2, … nodes, as deep as any did."""
    return acceptance_by_depth([accepted for trace in traces for *_, accepted in trace.steps(budget)])


def acceptance_by_depth(accepted: Sequence[int]) -> list[float]:
    """Of steps that accepted so many nodes, the share that accepted at least 1, 2, … of them, as deep as any did."""
    return [
        sum(count >= depth for count in accepted) / len(accepted) for depth in range(1, max(accepted, default=0) + 1)
    ]


def write_traces(path: Path, traces: Iterable[Trace]) -> None:
    """Write a JSON line a trace."""
    lines = [json.dumps(asdict(trace), ensure_ascii=False) + "\n" for trace in traces]
    path.write_text("".join(lines), encoding="utf-8")


def read_traces(path: Path) -> list[Trace]:
    """The traces of a file that `write_traces` has written. Raises ValueError that names file and line."""
    traces: list[Trace] = []
    for where, row in json_lines(path):
        try:
            traces.append(_trace(row))
        except ValueError as error:
            raise ValueError(f"{where}: not an acceptance trace: {error}") from error
    if not traces:
        raise ValueError(f"{path} has no traces")
    return traces


def _trace(row: Any) -> Trace:
    match row:
        case {
            "method": str(method),
            "workload": str(workload),
            "prompt": str(prompt),
            "prompt_tokens": int(prompt_tokens),
            "budget": int(budget),
            "positions": [*positions],
            "scores": [*scores],
            "sizes": [*sizes],
            "passes": int(passes),
        }:
            return Trace(
                method,
                workload,
                prompt,
                prompt_tokens,
                budget,
                [_ints(ranks) for ranks in positions],
                [_floats(own) for own in scores],
                _ints(sizes),
                passes,
            )
        case _:
            raise ValueError(
                "a line needs method, workload, prompt, prompt_tokens, budget, positions, scores, sizes and passes; "
                "record it with bench --trace"
            )


def _ints(values: Any) -> list[int]:
    match values:
        case [*items] if all(type(item) is int for item in items):
            return items
        case _:
            raise ValueError(f"{values!r} is not a list of whole numbers")


def _floats(values: Any) -> list[float]:
    match values:
        case [*items] if all(type(item) in (int, float) for item in items):  # JSON writes a whole float as it likes
            return [float(item) for item in items]
        case _:
            raise ValueError(f"{values!r} is not a list of numbers")
