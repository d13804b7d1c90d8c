"""A drafter that knows the answer: trees in which long paths are accepted, among branches that are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from jetflow_core.drafter import DraftJob, HeadDrafter
from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.model import Decoder
from jetflow_core.tree import DraftTree
from tiny import VOCAB, tiny_head


class HintedDrafter(HeadDrafter):
    """Drafts trees that hold a stretch of the true continuation among random branches, so that long paths are accepted."""

    engine: Engine
    truth: dict[tuple[int, ...], list[int]]
    random: np.random.Generator

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        super().propose(jobs)  # the head's own pass must not disturb anything
        return [self._tree(job) for job in jobs]

    def _tree(self, job: DraftJob) -> DraftTree:
        request = next(r for r in self.engine.scheduler.running if r.blocks is job.blocks)
        done = len(request.tokens) - len(request.prompt_ids)
        truth = self.truth[request.prompt_ids][done : done + int(self.random.integers(0, 7))]
        tokens, parents, depths, spine = [job.anchor], [-1], [0], 0
        used: set[tuple[int, int]] = set()
        while len(tokens) <= job.budget:
            on_truth = bool(truth) and self.random.random() < 0.6
            parent = spine if on_truth else int(self.random.integers(0, len(tokens)))
            token = truth[0] if on_truth else int(self.random.integers(0, VOCAB))
            if depths[parent] >= job.max_depth or (parent, token) in used:
                if not truth or depths[spine] >= job.max_depth:
                    break
                continue
            used.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            if on_truth:
                spine, truth = len(tokens) - 1, truth[1:]
        return DraftTree(np.array(tokens), np.array(parents), np.array(depths), np.zeros(len(tokens)))


def hinted_engine(
    model: Decoder, config: EngineConfig, truth: Mapping[tuple[int, ...], list[int]], seed: int
) -> Engine:
    """An engine whose drafter hints at `truth`, the continuation of each prompt."""
    head = tiny_head(model)
    head.pack()
    engine = Engine(model, head=head, config=replace(config, drafter="head"))
    assert engine.drafter is not None
    engine.drafter.__class__ = HintedDrafter
    assert isinstance(engine.drafter, HintedDrafter)
    engine.drafter.engine = engine
    engine.drafter.truth = dict(truth)
    engine.drafter.random = np.random.default_rng(seed)
    return engine
