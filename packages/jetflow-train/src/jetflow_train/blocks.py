"""Anchors, blocks and the packed training forward's attention.

A block is `[anchor, MASK, …]` at absolute positions a, a + 1, …; slot k predicts the token at a + k from the target's
features at positions below a. Some of the row's real tokens may stand between the anchor and the masks.
Many blocks of several documents go through the head in one call; their attention is computed per document over
(context | own block), so no product is spent on pairs that may not see each other.

Shapes: N slots of all blocks, S context positions of all documents, n and s those of one document, b blocks of at
most L slots, J slots that carry a loss, M teacher entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from jetflow_core.head import DraftHead
from jetflow_core.layers import Attend
from jetflow_train.data import Row
from jetflow_train.features import RowFeatures


@dataclass(frozen=True)
class BlockRules:
    """How blocks are drawn. `gamma` weighs slot k by exp(−(k − 1)/γ); None weighs all alike; `reach` [block_size − 1], where
    it is given, has the weights themselves, which never rise (D-PACE: the chance that a draft reaches slot k).

    A block starts with j or more real tokens after its anchor with probability `prefix` to the power of j. They are
    known, so k counts from the last of them, and they carry no loss.

    With `truncate`, a block is cut at random so that slot k is *present* with that probability and counts fully: the
    same expected gradient for fewer slots. It needs a causal head, whose earlier slots do not notice the cut.
    """

    block_size: int
    mask_token_id: int
    causal: bool = True
    gamma: float | None = 6.0
    truncate: bool = True
    reach: tuple[float, ...] | None = None
    prefix: float = 0.0

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(f"block_size {self.block_size}: a block needs its anchor and at least one slot to predict")
        if self.gamma is not None and self.gamma <= 0:
            raise ValueError(f"gamma {self.gamma} must be positive; leave slots unweighted with gamma = none")
        if not 0 <= self.prefix < 1:
            raise ValueError(f"prefix {self.prefix} must be at least 0 and below 1")

    def slot_weights(self) -> Tensor:
        """The weight of slot k, for k from 1: float64 [block_size − 1], 1 at first and never rising."""
        if self.reach is not None:
            return torch.tensor(self.reach, dtype=torch.float64)
        k = torch.arange(1, self.block_size, dtype=torch.float64)
        return torch.ones_like(k) if self.gamma is None else torch.exp(-(k - 1) / self.gamma)


@dataclass(frozen=True)
class Document:
    """One document's share of a batch: half-open ranges of context positions and of slots."""

    context: tuple[int, int]
    slots: tuple[int, int]
    visible: Tensor  # bool [n, s]: context strictly before the slot's anchor


@dataclass(frozen=True)
class BlockBatch:
    """Blocks of several documents, packed."""

    rows: tuple[int, ...]  # row numbers, to name a bad batch
    documents: tuple[Document, ...]
    taps: Tensor  # [S, K·C]
    context_ids: Tensor  # [S] the row's own tokens there
    context_positions: Tensor  # [S]
    input_ids: Tensor  # [N]
    positions: Tensor  # [N]
    padded: Tensor  # [b, L] slot of every block place; places past a block's end repeat its anchor
    place: Tensor  # [N] place of every slot in the flattened `padded`
    slots: Tensor  # [J] slots with a loss
    depth: Tensor  # [J] their k, from 1: how far they lie past the block's last known token
    weight: Tensor  # [J]
    label: Tensor  # [J] the row's own token at a + k
    previous: Tensor  # [J] the row's own token at a + k − 1
    before: Tensor  # [J] and the one at a + k − 2, which for k = 1 lies before the anchor
    teacher_ids: Tensor  # [J, M] target ids
    teacher_logp: Tensor  # [J, M]
    causal: bool

    @property
    def blocks(self) -> int:
        """How many blocks (anchors) the batch holds."""
        return len(self.padded)

    def to(self, device: torch.device) -> BlockBatch:
        """The same batch with every tensor on `device`."""
        members = ((each.name, getattr(self, each.name)) for each in fields(self))
        moved = {name: value.to(device) for name, value in members if isinstance(value, Tensor)}
        documents = tuple(replace(each, visible=each.visible.to(device)) for each in self.documents)
        return replace(self, documents=documents, **moved)


def anchor_count(row: Row) -> int:
    """How many anchors `sample_anchors` finds in the features of `row`."""
    return sum(end - start - 1 for start, end in row.spans)


def sample_anchors(features: RowFeatures, count: int, generator: torch.Generator) -> Tensor:
    """Up to `count` anchor positions without replacement, ascending, among tokens of a span that have a successor
    in it.
    """
    candidates = torch.cat([torch.arange(start, end - 1) for start, end in features.spans])
    chosen = torch.randperm(len(candidates), generator=generator)[:count]
    return candidates[chosen.sort().values]


def sample_prefixes(anchors: Tensor, ends: Tensor | int, rules: BlockRules, generator: torch.Generator) -> Tensor:
    """Real tokens after every block's anchor; at least one masked slot before the `ends` of their spans is left."""
    if rules.prefix == 0:
        return torch.zeros_like(anchors)
    exponential = torch.empty(len(anchors), dtype=torch.float64).exponential_(generator=generator)
    drawn = (exponential / -math.log(rules.prefix)).clamp_max(rules.block_size).long()
    return torch.minimum(drawn, (ends - 2 - anchors).clamp_max(rules.block_size - 2))


def sample_lengths(
    anchors: Tensor, ends: Tensor | int, rules: BlockRules, generator: torch.Generator, prefixes: Tensor | int = 0
) -> Tensor:
    """Slots of every block: its anchor, its `prefixes` real tokens and the masks that are left of it; a causal block
    stops at the `ends` of its anchor's span.
    """
    if not rules.causal:
        return torch.full_like(anchors, rules.block_size)
    predicted = torch.full_like(anchors, rules.block_size - 1)
    if rules.truncate:
        drawn = torch.rand(len(anchors), 1, dtype=torch.float64, generator=generator)
        predicted = (rules.slot_weights() > drawn).sum(1)
    return 1 + torch.minimum(prefixes + predicted, (ends - 1 - anchors).clamp_max(rules.block_size - 1))


def pack_blocks(
    items: Sequence[tuple[RowFeatures, Tensor, Tensor]],
    rules: BlockRules,
    device: torch.device,
    prefixes: Sequence[Tensor] | None = None,
) -> BlockBatch:
    """Pack (features, anchors, block lengths) of several documents, all on the CPU, into one batch on `device`.

    `prefixes` has the blocks' real tokens after the anchor, document by document; None is none.
    """
    known = [torch.zeros_like(anchors) for _, anchors, _ in items] if prefixes is None else prefixes
    parts = [_pack_document(*item, prefix, rules) for item, prefix in zip(items, known, strict=True)]
    lengths = torch.cat([lengths for _, _, lengths in items])
    offset = lengths.cumsum(0) - lengths
    step = torch.arange(int(lengths.max()))
    inside = step < lengths[:, None]
    padded = offset[:, None] + torch.where(inside, step, 0)
    documents: list[Document] = []
    context_end = slot_end = 0
    slots: list[Tensor] = []
    for part in parts:
        n, s = part.visible.shape
        documents.append(Document((context_end, context_end + s), (slot_end, slot_end + n), part.visible))
        slots.append(part.slots + slot_end)
        context_end, slot_end = context_end + s, slot_end + n
    return BlockBatch(
        rows=tuple(features.row for features, _, _ in items),
        documents=tuple(documents),
        taps=torch.cat([part.taps for part in parts]),
        context_ids=torch.cat([part.context_ids for part in parts]),
        context_positions=torch.cat([torch.arange(len(part.taps)) for part in parts]),
        input_ids=torch.cat([part.input_ids for part in parts]),
        positions=torch.cat([part.positions for part in parts]),
        padded=padded,
        place=inside.flatten().nonzero()[:, 0],
        slots=torch.cat(slots),
        depth=torch.cat([part.depth for part in parts]),
        weight=torch.cat([part.weight for part in parts]),
        label=torch.cat([part.label for part in parts]),
        previous=torch.cat([part.previous for part in parts]),
        before=torch.cat([part.before for part in parts]),
        teacher_ids=torch.cat([part.teacher_ids for part in parts]),
        teacher_logp=torch.cat([part.teacher_logp for part in parts]),
        causal=rules.causal,
    ).to(device)


@dataclass(frozen=True)
class _Part:
    taps: Tensor
    context_ids: Tensor
    input_ids: Tensor
    positions: Tensor
    visible: Tensor
    slots: Tensor
    depth: Tensor
    weight: Tensor
    label: Tensor
    previous: Tensor
    before: Tensor
    teacher_ids: Tensor
    teacher_logp: Tensor


def _pack_document(
    features: RowFeatures, anchors: Tensor, lengths: Tensor, prefixes: Tensor, rules: BlockRules
) -> _Part:
    tokens = features.tokens
    anchor = anchors.repeat_interleave(lengths)
    depth = torch.arange(len(anchor)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    positions = anchor + depth
    ahead = depth - prefixes.repeat_interleave(lengths)
    # What is known needs no prediction; past the end of the anchor's span nothing is the target's to say.
    with_loss = ((ahead > 0) & (positions < features.ends(anchor))).nonzero()[:, 0]
    target, k = positions[with_loss], ahead[with_loss]
    cut = rules.truncate and rules.causal  # then the slots that are left count alike
    weight = torch.ones(len(k)) if cut else rules.slot_weights()[k - 1].float()
    context = int(anchors.max())
    output = target - features.prompt_length
    return _Part(
        taps=features.taps[:context],
        context_ids=tokens[:context],
        input_ids=torch.where(ahead <= 0, tokens[positions.clamp_max(len(tokens) - 1)], rules.mask_token_id),
        positions=positions,
        visible=torch.arange(context) < anchor[:, None],
        slots=with_loss,
        depth=k,
        weight=weight,
        label=tokens[target],
        previous=tokens[target - 1],
        before=tokens[target - 2],  # a prompt holds a token, so a target is never the row's second one
        teacher_ids=features.teacher_ids[output],
        teacher_logp=features.teacher_logp[output],
    )


def block_hidden(head: DraftHead, batch: BlockBatch) -> Tensor:
    """The head's hidden states [N, C] of every slot."""
    context = head.context_kv(head.fuse(batch.taps.to(head.norm.weight.dtype)), batch.context_positions)
    return head(batch.input_ids, batch.positions, block_attention(batch, context))


def block_attention(batch: BlockBatch, context: list[tuple[Tensor, Tensor]]) -> Attend:
    """How the slots of `batch` meet the `context` keys and values [S, Hk, D] of every layer."""
    longest = batch.padded.shape[1]
    within = torch.ones(longest, longest, dtype=torch.bool, device=batch.padded.device)
    if batch.causal:
        within = within.tril()
    padded, place = batch.padded.flatten(), batch.place

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _, heads, width = q.shape
        groups = heads // k.shape[1]

        def by_block(x: Tensor) -> Tensor:  # [N, H, D] → [b, H, L, D]
            return x.index_select(0, padded).unflatten(0, (-1, longest)).transpose(1, 2)

        q = q * width**-0.5
        k_block = by_block(k).repeat_interleave(groups, 1)
        v_block = by_block(v).repeat_interleave(groups, 1)
        scores = (by_block(q) @ k_block.transpose(2, 3)).masked_fill(~within, -torch.inf)  # [b, Hq, L, L]
        own = scores.transpose(1, 2).flatten(0, 1).index_select(0, place).transpose(0, 1)  # [Hq, N, L]
        out: list[Tensor] = []
        own_weights: list[Tensor] = []
        for document in batch.documents:
            (start, end), (context_start, context_end) = document.slots, document.context
            keys, values = (x[context_start:context_end].transpose(0, 1) for x in context[layer])  # [Hk, s, D]
            queries = q[start:end].transpose(0, 1).unflatten(0, (-1, groups)).flatten(1, 2)  # [Hk, G·n, D]
            seen = (queries @ keys.transpose(1, 2)).view(heads, end - start, -1)
            seen = seen.masked_fill(~document.visible, -torch.inf)
            scores = torch.cat([seen, own[:, start:end]], dim=-1)
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
            prefix = weights[..., : seen.shape[-1]].reshape(len(keys), -1, seen.shape[-1]) @ values  # [Hk, G·n, D]
            out.append(prefix.view(heads, end - start, width).transpose(0, 1))
            own_weights.append(weights[..., seen.shape[-1] :].transpose(0, 1))
        blocks = (
            torch.cat(own_weights).new_zeros(len(padded), heads, longest).index_copy(0, place, torch.cat(own_weights))
        )
        mixed = blocks.unflatten(0, (-1, longest)).transpose(1, 2) @ v_block  # [b, Hq, L, D]
        return torch.cat(out) + mixed.transpose(1, 2).flatten(0, 1).index_select(0, place)

    return attend
