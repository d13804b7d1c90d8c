"""Trees of a known row from the drafter of serving, which keeps its context in pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jetflow_core.drafter import Committed, DraftJob
from jetflow_core.heads import Head, drafting_slots, head_drafter
from jetflow_core.tree import DraftTree
from jetflow_train.features import RowFeatures


@torch.no_grad()
def row_trees(
    head: Head, features: RowFeatures, anchors: Sequence[int], budget: int, width: int, passes: int = 1
) -> list[DraftTree]:
    """The tree of `budget` nodes that serving's drafter with this `width` and `passes` makes at each of `anchors`.

    The row's context is written once. With pages of one token all drafts share it, each with slots of its own behind it.
    Raises ValueError for more passes than `head` has.
    """
    device, dtype = head.norm.weight.device, head.norm.weight.dtype
    context, spare = max(anchors), drafting_slots(head, passes)
    drafter = head_drafter(head, context + len(anchors) * spare, 1, width, passes=passes)
    slots = torch.arange(context, device=device)
    tokens = features.tokens.tolist()
    drafter.observe(
        Committed(
            features.taps[:context].to(device, dtype), features.tokens[:context].to(device), slots, slots, slots - 1
        )
    )
    jobs: list[DraftJob] = []
    for number, anchor in enumerate(anchors):
        start = context + number * spare
        blocks = [*range(anchor), *range(start, start + spare)]
        jobs.append(DraftJob(tokens[: anchor + 1], blocks, budget, head.config.block_size - 1))
    return drafter.propose(jobs)
