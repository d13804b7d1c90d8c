"""Records acceptance traces: a plain decode beside which a drafter ranks a tree at every position."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from jetflow_core.drafter import Committed, Drafter, DraftJob
from jetflow_core.eagle import EagleHead
from jetflow_core.engine import Engine
from jetflow_core.llm import LLM
from jetflow_core.sampling import SamplingParams
from jetflow_core.tree import DraftTree
from jetflow_serve.trace import Trace


class Recorder:
    """Has a drafter draft and keeps its trees, by the position of their anchor; the engine gets none of their nodes to verify.

    For an engine that serves one request at a time.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.tap_layers, self.block_slots = drafter.tap_layers, drafter.block_slots
        self.trees: dict[int, DraftTree] = {}

    def observe(self, rows: Committed) -> None:
        """Pass the rows on."""
        self.drafter.observe(rows)

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        """The anchors alone."""
        for job, tree in zip(jobs, self.drafter.propose(jobs), strict=True):
            self.trees[job.position] = tree
        return [DraftTree.root(job.anchor) for job in jobs]


@contextmanager
def recording(engine: Engine) -> Generator[Recorder]:
    """Let the engine's drafter draft for the record alone. Raises ValueError where the engine has none."""
    drafter = engine.drafter
    if drafter is None:
        raise ValueError("this engine has no drafter whose trees could be recorded")
    engine.drafter = recorder = Recorder(drafter)
    try:
        yield recorder
    finally:
        engine.drafter = drafter


def record_trace(
    llm: LLM,
    method: str,
    workload: str,
    prompt: tuple[str, Sequence[int]],
    params: SamplingParams,
    budget: int,
) -> Trace:
    """The trace of one `prompt` (name, token ids) with trees of up to `budget` nodes.

    Raises ValueError when the engine refuses the prompt or fails.
    """
    name, prompt_ids = prompt
    with recording(llm.engine) as recorder:
        completion = llm.generate([prompt_ids], params, budget)[0]
    if completion.error is not None:
        raise ValueError(completion.error)
    answer = completion.token_ids
    trees = [recorder.trees.get(len(prompt_ids) + index) for index in range(len(answer) - 1)]
    walks = [tree.along(answer[index + 1 :]) if tree else [] for index, tree in enumerate(trees)]
    scores = [
        [round(float(tree.scores[node]), 4) for node in walk] if tree else []
        for tree, walk in zip(trees, walks, strict=True)
    ]
    sizes = [len(tree) - 1 if tree else 0 for tree in trees]
    return Trace(method, workload, name, len(prompt_ids), budget, walks, scores, sizes, _passes(llm.engine))


def _passes(engine: Engine) -> int:
    """How often the engine's head runs for a draft."""
    head = engine.head
    if head is None:
        return 0
    return head.config.depth if isinstance(head, EagleHead) else engine.config.draft_passes
