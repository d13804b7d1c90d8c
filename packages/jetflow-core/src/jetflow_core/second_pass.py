"""Branch conditioning by a second pass of the head, over the first tree's tokens: every node gets children of its own.

Shapes: N nodes of a tree, E of them expanded, U nodes below those, K candidates a node, C head width, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jetflow_core.batch import PagedAttention, Segment, build_batch
from jetflow_core.config import HeadConfig
from jetflow_core.head import DraftHead
from jetflow_core.kv_cache import KVCache
from jetflow_core.step_clock import StepClock
from jetflow_core.tree import DraftTree, Floats, Ints

if TYPE_CHECKING:
    from jetflow_core.drafter import DraftJob

EXPANDED = 32  # nodes besides the anchor that get a slot: what is less probable is seldom reached


def check_passes(passes: int) -> None:
    """Raise ValueError unless a head can be asked for that many passes."""
    if passes not in (1, 2):
        raise ValueError(f"draft_passes is {passes}: use 1, or 2 for a second pass over the drafted tree")


def scratch_slots(config: HeadConfig, passes: int) -> int:
    """Slots from the anchor on that drafting with so many passes writes."""
    return config.block_size if passes == 1 else max(config.block_size, 2 * (1 + EXPANDED))


@dataclass(frozen=True)
class Expansion:
    """What a second pass says about one tree.

    `nodes` [E] got candidates for their children: `tokens` and log-probabilities `logp` [E, K]. `known` [U] are the tree's own
    nodes below those, and `known_logp` [U] theirs.
    """

    nodes: Ints
    tokens: Ints
    logp: Floats
    known: Ints
    known_logp: Floats


class SecondPass:
    """Conditions the nodes of first trees on their whole branches and grows the trees again.

    The anchor and the `EXPANDED` best nodes (a tree's first ones, no more than its budget) that may have children go through the
    head as real tokens under the tree's own attention mask, each with one MASK slot below it: the inputs of training blocks with
    known tokens before their masks (`prefix`). A slot sees its branch alone and is corrected for the node's own token and the one
    before. Its logits are normalised exactly over the draft vocabulary, and its `width` best tokens become candidates. They are
    as deep as the head's block at most. How trees grow again is told at `regrown`.

    The pass ends the phase "draft" of `clock`, the trees its phase "tree". Raises ValueError for a bidirectional head, whose
    slots cannot do without those beside them.
    """

    def __init__(self, head: DraftHead, cache: KVCache, page: int, width: int, clock: StepClock) -> None:
        if not head.config.causal:
            raise ValueError(
                "draft_passes is 2, but the head's attention is bidirectional and has no second pass: use draft_passes 1, or a "
                "causal head, best one trained with `jetflow-train head --prefix`"
            )
        self._head, self._cache, self._page, self._width, self._clock = head, cache, page, width, clock
        self._device = head.norm.weight.device
        self._draft_ids: Tensor | None = None  # of target ids
        if (vocab := head.draft_vocab) is not None:
            self._draft_ids = torch.zeros(head.config.vocab_size, dtype=torch.int64, device=self._device)
            self._draft_ids[vocab] = torch.arange(len(vocab), device=self._device)

    def __call__(self, trees: Sequence[DraftTree], jobs: Sequence[DraftJob]) -> list[DraftTree]:
        """The first `trees` of `jobs`, whose depth limits are 1 or more, grown again."""
        expansions = self.expand(trees, jobs)
        self._clock.lap("draft")
        grown = [
            regrown(tree, expansion, job.budget) for tree, expansion, job in zip(trees, expansions, jobs, strict=True)
        ]
        self._clock.lap("tree")
        return grown

    def expand(self, trees: Sequence[DraftTree], jobs: Sequence[DraftJob]) -> list[Expansion]:
        """One forward over all trees with their slots."""
        config = self._head.config
        expanded = [
            np.nonzero(tree.depths[: 1 + min(job.budget, EXPANDED)] < min(job.max_depth, config.block_size - 1))[0]
            for tree, job in zip(trees, jobs, strict=True)
        ]
        segments = [
            slotted(tree, nodes, config.mask_token_id, job.position, job.blocks)
            for tree, nodes, job in zip(trees, expanded, jobs, strict=True)
        ]
        batch = build_batch(segments, self._page, self._device)
        hidden = self._head(batch.input_ids, batch.positions, PagedAttention(self._cache, batch, config.head_dim))
        counts = np.array([len(nodes) for nodes in expanded])
        firsts = np.cumsum(counts) - counts  # of every tree's slots among all slots
        rows = np.arange(counts.sum()) + np.repeat(firsts + counts, counts)
        before = [
            np.where(nodes == 0, job.before, tree.tokens[tree.parents[nodes]])
            for tree, nodes, job in zip(trees, expanded, jobs, strict=True)
        ]
        previous = [tree.tokens[nodes] for tree, nodes in zip(trees, expanded, strict=True)]
        log_q = self._log_probs(hidden[self._tensor(rows)], np.concatenate(previous), np.concatenate(before))
        return self._expansions(trees, expanded, firsts, log_q)

    def _log_probs(self, hidden: Tensor, previous: Ints, before: Ints) -> Tensor:
        """Log-probabilities [E, V'] of what follows at slots with states `hidden` [E, C] after tokens one and two back."""
        conditioned = self._head.condition(hidden, self._tensor(previous), self._tensor(before))
        return self._head.logits(conditioned).log_softmax(-1, dtype=torch.float32)

    def _expansions(
        self, trees: Sequence[DraftTree], expanded: Sequence[Ints], firsts: Ints, log_q: Tensor
    ) -> list[Expansion]:
        """Every tree's share of the log-probabilities, on the host; its slots begin at `firsts` among all."""
        vocab = self._head.draft_vocab
        known, slots, below = [], [], []
        for tree, nodes, first in zip(trees, expanded, firsts.tolist(), strict=True):
            place = np.full(len(tree) + 1, -1)  # of a node among the expanded; of none for the anchor's parent, −1
            place[nodes] = np.arange(len(nodes))
            children = np.nonzero(place[tree.parents] >= 0)[0]
            known.append(children)
            slots.append(first + place[tree.parents[children]])
            below.append(tree.tokens[children])
        drafted = self._tensor(np.concatenate(below))
        columns = drafted if self._draft_ids is None else self._draft_ids[drafted]
        known_logp = log_q[self._tensor(np.concatenate(slots)), columns].cpu().numpy()
        top, ids = log_q.topk(min(self._width, log_q.shape[1]), dim=-1)
        tokens, logp = (ids if vocab is None else vocab[ids]).cpu().numpy(), top.cpu().numpy()
        at, ends = firsts[1:], np.cumsum([len(each) for each in known])[:-1]
        parts = zip(np.split(tokens, at), np.split(logp, at), known, np.split(known_logp, ends), strict=True)
        return [Expansion(nodes, *part) for nodes, part in zip(expanded, parts, strict=True)]

    def _tensor(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def slotted(tree: DraftTree, nodes: Ints, mask: int, prefix: int, blocks: Sequence[int]) -> Segment:
    """The `nodes` [E] of a tree, ascending and prefix-closed, then a `mask` below each: a segment with its anchor at `prefix`."""
    count = len(nodes)
    place = np.zeros(len(tree), dtype=np.int64)
    place[nodes] = np.arange(count)
    parents = np.where(nodes == 0, -1, place[tree.parents[nodes]])
    depths = np.concatenate([tree.depths[nodes], tree.depths[nodes] + 1])
    # A node may hold the mask's own token, so the tree that says who sees whom gives the slots one that no node has.
    nobodys = np.full(count, int(tree.tokens.max()) + 1)
    shape = DraftTree(
        np.concatenate([tree.tokens[nodes], nobodys]),
        np.concatenate([parents, np.arange(count)]),
        depths,
        np.zeros(2 * count),
    )
    return Segment(np.concatenate([tree.tokens[nodes], np.full(count, mask)]), depths, prefix, blocks, shape)


def regrown(tree: DraftTree, expansion: Expansion, budget: int) -> DraftTree:
    """The `budget` best nodes among those of a first tree and the candidates below its expanded nodes: a ranked tree.

    The rule: below an expanded node the second pass says how probable a child is, whether the first tree has it or not; elsewhere
    the first tree's transitions stay. So what the first tree lacks comes in as leaves, one deeper than the expanded nodes,
    and its branches go on as they did. Scores are summed along the paths anew and never rise, which makes the best nodes
    prefix-closed; ties go by depth, then to the first tree's nodes. Nodes whose score is not finite are left out.
    """
    scores = _rescored(tree, expansion)
    children = expansion.tokens.shape[1]
    above, tokens = np.repeat(expansion.nodes, children), expansion.tokens.ravel()
    base = int(max(tree.tokens.max(), tokens.max())) + 1
    lacking = ~np.isin(above * base + tokens, (tree.parents * base + tree.tokens)[1:])
    above, tokens = above[lacking], tokens[lacking]
    # A log-probability rounded to above zero must not put a child before its parent.
    steps = np.minimum(expansion.logp.ravel()[lacking], 0)
    all_scores = np.concatenate([scores, scores[above] + steps])
    all_depths = np.concatenate([tree.depths, tree.depths[above] + 1])
    order = np.lexsort((all_depths, -all_scores))
    order = order[np.isfinite(all_scores[order])][: budget + 1]
    place = np.zeros(len(all_scores), dtype=np.int64)
    place[order] = np.arange(len(order))
    parents = np.concatenate([tree.parents, above])[order]
    return DraftTree(
        np.concatenate([tree.tokens, tokens])[order],
        np.where(order == 0, -1, place[parents]),
        all_depths[order],
        all_scores[order],
    )


def _rescored(tree: DraftTree, expansion: Expansion) -> NDArray[np.float64]:
    """The scores [N] of a tree's nodes with the second pass's log-probabilities below its expanded nodes."""
    steps = tree.scores - tree.scores[np.maximum(tree.parents, 0)]
    steps[expansion.known] = np.minimum(expansion.known_logp, 0)
    scores = np.zeros(len(tree))
    for depth in range(1, int(tree.depths.max()) + 1):
        level = np.nonzero(tree.depths == depth)[0]
        scores[level] = scores[tree.parents[level]] + steps[level]
    return scores
