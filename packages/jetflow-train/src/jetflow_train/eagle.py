"""An EAGLE head in training.

Training drafts as serving does (EAGLE-3's training-time test): at every anchor a the head is unrolled over the block's depths,
fed with the row's own tokens and, from its second step on, with its own features. Step k reads the token at a + k − 1 and
predicts the one at a + k; it sees the context of positions below a, whose features come from the target, and the block's
earlier steps.

Shapes: J slots that carry a loss, S context positions of all documents, s those of one, b blocks that reach a step, C head width.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from jetflow_core.eagle import EagleHead
from jetflow_train.blocks import BlockBatch


def unrolled_states(head: EagleHead, batch: BlockBatch) -> Tensor:
    """Hidden states [J, C] of the slots with a loss, in their order in `batch`; all blocks go through a step together.

    Blocks hold no known tokens after their anchors and end where their rows do (`BlockRules` without `prefix`, causal).
    """
    fused = head.fuse(batch.taps.to(head.norm.weight.dtype))
    before = torch.where((batch.context_positions > 0)[:, None], fused.roll(1, 0), 0)
    context = head.context_kv(batch.context_ids, before, batch.context_positions)
    first = (batch.depth == 1).nonzero()[:, 0]
    anchors = _Anchors(batch, first)
    features = fused[anchors.last]
    block_of = (batch.depth == 1).cumsum(0) - 1
    blocks = torch.arange(len(first), device=fused.device)
    own: list[tuple[Tensor, Tensor]] = []
    outputs: list[Tensor] = []
    order: list[Tensor] = []
    for depth in range(1, int(batch.depth.max()) + 1):
        slots = (batch.depth == depth).nonzero()[:, 0]
        kept = torch.searchsorted(blocks, block_of[slots])  # blocks that go on, among those of the step before
        blocks = block_of[slots]
        own = [(k.index_select(0, kept), v.index_select(0, kept)) for k, v in own]
        attend = _Step(anchors, blocks, context, own)
        features = head(
            batch.previous[slots], features.index_select(0, kept), anchors.positions[blocks] + depth - 1, attend
        )
        outputs.append(features)
        order.append(slots)
    states = torch.cat(outputs)
    return head.hidden(torch.zeros_like(states).index_copy(0, torch.cat(order), states))


class _Anchors:
    """Where the blocks of a batch start: `positions` of their anchors, and the rows of the context `last` before them."""

    def __init__(self, batch: BlockBatch, first: Tensor) -> None:
        self.positions = batch.positions[batch.slots[first]] - 1
        ends = torch.tensor([document.slots[1] for document in batch.documents], device=first.device)
        self.document = torch.searchsorted(ends, batch.slots[first], right=True)
        self.contexts = [document.context for document in batch.documents]
        starts = torch.tensor([start for start, _ in self.contexts], device=first.device)
        self.last = starts[self.document] + self.positions - 1


class _Step:
    """Attention of one step of the `blocks` [b]: over the context below their anchors and the steps in `own`, which it joins."""

    def __init__(
        self, anchors: _Anchors, blocks: Tensor, context: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]]
    ) -> None:
        self._context, self._own, self._contexts = context, own, anchors.contexts
        self._positions = anchors.positions[blocks]
        documents = torch.arange(len(self._contexts) + 1, device=blocks.device)
        self._bounds: list[int] = torch.searchsorted(anchors.document[blocks], documents).tolist()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `jetflow_core.layers.Attend`."""
        self._own.append((k, v))
        rows, heads, width = q.shape
        grouped = (q * width**-0.5).view(rows, k.shape[1], -1, width)  # [b, Hk, G, D]
        own_keys, own_values = (torch.stack(each, dim=2) for each in zip(*self._own, strict=True))  # [b, Hk, k, D]
        own_scores = grouped @ own_keys.transpose(2, 3)
        outputs: list[Tensor] = []
        for (start, end), (low, high) in zip(pairwise(self._bounds), self._contexts, strict=True):
            if start == end:  # none of the document's blocks is that long
                continue
            keys, values = (each[low:high].transpose(0, 1) for each in self._context)  # [Hk, s, D]
            queries = grouped[start:end].transpose(0, 1).flatten(1, 2)  # [Hk, n·G, D]
            scores = (queries @ keys.transpose(1, 2)).unflatten(1, (end - start, -1)).transpose(0, 1)  # [n, Hk, G, s]
            unseen = torch.arange(high - low, device=q.device) >= self._positions[start:end, None]
            scores = scores.masked_fill(unseen[:, None, None], -torch.inf)
            both = torch.cat([scores, own_scores[start:end]], dim=-1)
            weights = torch.softmax(both, dim=-1, dtype=torch.float32).to(q.dtype)
            seen, own = weights.split([high - low, len(self._own)], dim=-1)
            prefix = seen.transpose(0, 1).flatten(1, 2) @ values  # [Hk, n·G, D]
            prefix = prefix.unflatten(1, (end - start, -1)).transpose(0, 1)
            outputs.append(prefix + own @ own_values[start:end])
        return torch.cat(outputs).view(rows, heads, width)
