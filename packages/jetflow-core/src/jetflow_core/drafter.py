"""From anchors to draft trees: what every drafter is asked, and the JetFlow head's answer, one pass for all requests of a step.

Shapes: T committed rows, K·Ct concatenated taps, R requests, B block slots, D = B − 1 draft depths, K candidates a depth,
C head width, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jetflow_core.batch import PagedAttention, Segment, build_batch
from jetflow_core.head import DraftHead, SecondOrder
from jetflow_core.kv_cache import KVCache
from jetflow_core.second_pass import SecondPass, scratch_slots
from jetflow_core.step_clock import StepClock
from jetflow_core.tree import Candidates, DraftTree, Floats, Ints, grown_trees


@dataclass(frozen=True)
class DraftJob:
    """One request's wish for a tree: its `tokens`, whose last one is the anchor, a node budget besides the anchor, and a depth
    limit. Slots from the anchor's position on are the drafter's to write until the step is committed.
    """

    tokens: Sequence[int]
    blocks: Sequence[int]
    budget: int
    max_depth: int

    @property
    def anchor(self) -> int:
        """The last committed token, the root of the tree."""
        return self.tokens[-1]

    @property
    def before(self) -> int:
        """The token before the anchor; the anchor itself where it is the first token of all."""
        return self.tokens[-2] if len(self.tokens) > 1 else self.anchor

    @property
    def position(self) -> int:
        """The anchor's absolute position, which is the length of the cached prefix."""
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Committed:
    """Rows of a step that are now part of their requests' prefixes, request by request, each in order.

    `taps` [T, K·Ct] of `tap_layers`; `tokens`, `positions` and physical `slots` [T] int64; `before` [T] is the slot of the
    position before a row's own, −1 at position 0.
    """

    taps: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    before: Tensor


class Drafter(Protocol):
    """Proposes trees.

    `tap_layers`: target layers whose outputs it wants to see; `block_slots`: slots that it writes from the anchor on.
    """

    @property
    def tap_layers(self) -> tuple[int, ...]: ...

    @property
    def block_slots(self) -> int: ...

    def observe(self, rows: Committed) -> None:
        """Take in newly committed tokens, each once and in order; what a prefix-cache hit brings is not shown again."""
        ...

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        """One tree a job, within its budget and depth."""
        ...


class HeadDrafter:
    """Drafts with a JetFlow (or DFlash) head whose context lives in its own pages under the target's block tables.

    `width` is the number K of candidates considered at each depth. With two `passes` every tree goes through the head once more
    and grows again (`jetflow_core.second_pass`). The head's pass ends the phase "draft" of `clock`, the trees its phase "tree".
    Raises ValueError for two passes of a bidirectional head.
    """

    def __init__(
        self,
        head: DraftHead,
        num_blocks: int,
        page: int,
        width: int = 32,
        clock: StepClock | None = None,
        passes: int = 1,
    ) -> None:
        config, dtype, device = head.config, head.norm.weight.dtype, head.norm.weight.device
        self.head, self.page, self.width, self.device = head, page, width, device
        self._clock = clock or StepClock()
        self.tap_layers = config.target_layer_ids
        self.block_slots = scratch_slots(config, passes)
        self.cache = KVCache(config.num_layers, num_blocks, page, config.num_kv_heads, config.head_dim, dtype, device)
        self._second = SecondPass(head, self.cache, page, width, self._clock) if passes == 2 else None

    def observe(self, rows: Committed) -> None:
        """Write the context of newly committed tokens."""
        pairs = self.head.context_kv(self.head.fuse(rows.taps), rows.positions)
        for layer, (k, v) in enumerate(pairs):
            self.cache.write(layer, k, v, rows.slots)

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        """One tree a job, from one forward of the head over all blocks [anchor, MASK, …], and a second over the trees."""
        config = self.head.config
        masks = [config.mask_token_id] * (config.block_size - 1)
        segments = [Segment.chain([job.anchor, *masks], job.position, job.blocks) for job in jobs]
        batch = build_batch(segments, self.page, self.device, bidirectional=not config.causal)
        hidden = self.head(batch.input_ids, batch.positions, PagedAttention(self.cache, batch, config.head_dim))
        hidden = hidden.view(len(jobs), config.block_size, -1)[:, 1:]
        before = torch.tensor([job.before for job in jobs], device=self.device)
        candidates = head_candidates(self.head, hidden, batch.input_ids[:: config.block_size], before, self.width)
        self._clock.lap("draft")
        trees = grown_trees(
            [job.anchor for job in jobs],
            candidates,
            [job.budget for job in jobs],
            [job.max_depth for job in jobs],
        )
        self._clock.lap("tree")
        return trees if self._second is None else self._second(trees, jobs)


def head_candidates(head: DraftHead, hidden: Tensor, anchors: Tensor, before: Tensor, width: int) -> Candidates:
    """Candidates of R blocks from their slots' hidden states [R, D, C], their anchors [R] and the tokens `before` those [R].

    Two stages: the marginals name K tokens a depth, then transitions between them are scored. Those of first order, K × K a
    depth, all at once; those of second order, K times as many, only for the nodes that a tree grows.

    Depth 1 has one known history, so its scores are exact over the draft vocabulary. Deeper transitions are normalised
    over the candidates plus what the marginal leaves to all other tokens.
    """
    requests, depths, _ = hidden.shape
    pairwise = head.pairwise
    if pairwise is not None:
        hidden_first = head.condition(hidden[:, 0], anchors, before)[:, None]
        scored = torch.cat([hidden_first, hidden[:, 1:]], dim=1)
    else:
        scored = hidden
    marginals = head.logits(scored.flatten(0, 1)).log_softmax(-1, dtype=torch.float32).view(requests, depths, -1)
    marginal, ids = marginals.topk(min(width, marginals.shape[-1]), dim=-1)
    tokens = _array(ids if head.draft_vocab is None else head.draft_vocab[ids])
    first = _array(marginal[:, 0])
    if pairwise is None or depths == 1:
        return Candidates.of_tables(tokens, first, _array(marginal[:, 1:, None]))
    covered = marginal.exp().sum(-1, keepdim=True)
    rest = torch.log1p(-covered.clamp(max=1 - 1e-6))
    if pairwise.before is not None:
        return Candidates(tokens, first, _FrontierScores(head.second_order(hidden, anchors, ids), marginal, rest))
    scores = head.transitions(hidden[:, 1:], marginal[:, 1:], ids[:, :-1], ids[:, 1:]).float()
    return Candidates.of_tables(tokens, first, _array(_normalised(scores, rest[:, 1:, None])))


@dataclass(frozen=True)
class _FrontierScores:
    """`Transitions` of second order, of the nodes that trees grow: `marginal` [R, D, K] of the candidates and `rest`
    [R, D, 1], the logarithm of what the marginal leaves to all other tokens.
    """

    corrections: SecondOrder
    marginal: Tensor
    rest: Tensor

    def __call__(self, depth: int, owner: Ints, before: Ints, parents: Ints) -> Floats:
        """See `Transitions`."""
        place = np.arange(len(owner)) - np.searchsorted(owner, owner)
        index = torch.from_numpy(np.stack([owner, place, before, parents])).to(self.marginal.device)
        corrections = self.corrections(depth, *index).float()
        scores = self.marginal[index[0], depth - 1] + corrections
        return _array(_normalised(scores, self.rest[index[0], depth - 1]))


def _normalised(scores: Tensor, rest: Tensor) -> Tensor:
    """Log-probabilities of candidates' scores [..., K] beside the logarithm `rest` [..., 1] of everything else's mass."""
    return scores - torch.logaddexp(scores.logsumexp(-1, keepdim=True), rest)


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.cpu().numpy()
