"""Held-out measures without an engine: teacher-forced accuracy, and τ of greedy tree decoding replayed on known
answers.

A greedy row *is* the target's own choice at every position. So whether a draft node would be accepted can be read off
the row, and decoding with any tree is replayed from cached features alone: draft at a, walk the tree along the row,
go on after the bonus token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetflow_core.drafter import head_candidates
from jetflow_core.eagle import EagleHead
from jetflow_core.heads import Head
from jetflow_core.model import Decoder
from jetflow_core.second_pass import check_passes
from jetflow_core.tree import DraftTree, grown_trees
from jetflow_train.blocks import BlockRules, block_hidden, pack_blocks, sample_anchors
from jetflow_train.data import Row
from jetflow_train.features import RowFeatures, row_features
from jetflow_train.losses import draft_index, sparse_teacher
from jetflow_train.served import row_trees
from jetflow_train.states import slot_states

BRANCHES = 32  # candidates a depth, as in serving


@dataclass(frozen=True)
class ForcedMetrics:
    """Teacher-forced measures over held-out anchors. Slot lists start at k = 1."""

    conditional_kl: float
    marginal_kl: float
    conditional_accuracy: list[float]  # share of slots whose draft argmax is the target's argmax
    marginal_accuracy: list[float]
    accepted_length: float  # Σ_k Π_{j ≤ k} accuracy_j of the conditioned logits, plus the bonus token


@torch.no_grad()
def forced_metrics(
    head: Head, items: Sequence[RowFeatures], rules: BlockRules, anchors: int, temperature: float
) -> ForcedMetrics:
    """Measure `anchors` whole blocks of each row of `items`; the same ones at every call."""
    generator = torch.Generator().manual_seed(0)
    whole = BlockRules(rules.block_size, rules.mask_token_id, rules.causal, gamma=None, truncate=False)
    device = head.norm.weight.device
    index = draft_index(head.draft_vocab, head.config.vocab_size, device)
    depths = rules.block_size - 1
    hits = torch.zeros(2, depths, device=device)
    kl = torch.zeros(2, device=device)
    seen = torch.zeros(depths, device=device)
    for features in items:
        starts = sample_anchors(features, anchors, generator)
        room = features.ends(starts) - starts if rules.causal else torch.full_like(starts, rules.block_size)
        batch = pack_blocks([(features, starts, room.clamp_max(rules.block_size))], whole, device)
        teacher = sparse_teacher(batch.teacher_ids, batch.teacher_logp, index, temperature)
        best = index[batch.teacher_ids[:, 0]]
        seen += torch.bincount(batch.depth - 1, minlength=depths)
        for which, states in enumerate(slot_states(head, batch)):
            log_q = torch.log_softmax(head.logits(states).float(), dim=-1)
            cross = teacher.probs * (torch.log(teacher.probs.clamp_min(1e-9)) - log_q.gather(1, teacher.ids))
            kl[which] += cross.sum()
            hit = (log_q.argmax(dim=-1) == best).float()
            hits[which] += torch.zeros(depths, device=device).index_add(0, batch.depth - 1, hit)
    accuracy = hits / seen.clamp_min(1)
    mean_kl = kl / seen.sum().clamp_min(1)
    return ForcedMetrics(
        conditional_kl=float(mean_kl[0]),
        marginal_kl=float(mean_kl[1]),
        conditional_accuracy=accuracy[0].tolist(),
        marginal_accuracy=accuracy[1].tolist(),
        accepted_length=1.0 + float(accuracy[0].cumprod(0).sum()),
    )


def answer_features(model: Decoder, row: Row, taps: Sequence[int], teacher_top: int = 1) -> RowFeatures:
    """Features of one row straight from the target, no store between."""
    states, ids, logp = row_features(model, row, taps, teacher_top)
    tokens = torch.tensor(row.tokens)
    return RowFeatures(0, len(row.prompt_ids), tokens, states.cpu(), ids.cpu(), logp.cpu())


def head_rules(head: Head) -> BlockRules:
    """The rules of whole blocks of `head`, as measures want them. An EAGLE head has no masks and looks at none."""
    size = head.config.block_size
    if isinstance(head, EagleHead):
        return BlockRules(size, mask_token_id=0, gamma=None, truncate=False)
    return BlockRules(size, head.config.mask_token_id, head.config.causal, gamma=None, truncate=False)


def replayed_tau(
    head: Head,
    items: Sequence[RowFeatures],
    rules: BlockRules,
    budgets: Sequence[int],
    max_tokens: int,
    passes: int = 1,
) -> dict[int, float]:
    """τ (tokens committed per target forward) at each budget, over `items` from *greedy* rows, their first
    `max_tokens` tokens, drafting with so many `passes`. There must be a row: no rows have no τ.
    """
    assert items
    counts = replayed_rounds(head, items, rules, budgets, max_tokens, passes)
    return {budget: tau_of(pairs) for budget, pairs in counts.items()}


def tau_of(pairs: Sequence[tuple[int, int]]) -> float:
    """τ of rows given as (tokens committed, target passes)."""
    return sum(tokens for tokens, _ in pairs) / sum(rounds for _, rounds in pairs)


@torch.no_grad()
def replayed_rounds(
    head: Head,
    items: Sequence[RowFeatures],
    rules: BlockRules,
    budgets: Sequence[int],
    max_tokens: int,
    passes: int = 1,
) -> dict[int, list[tuple[int, int]]]:
    """(tokens committed, target passes) of every item at each budget, as in `replayed_tau`."""
    counts: dict[int, list[tuple[int, int]]] = {budget: [] for budget in budgets}
    for features in items:
        # What a second pass expands depends on the budget, so its trees are no cuts of a larger one's.
        drafted = budgets if passes == 2 else [max(budgets)]
        by_budget = {budget: drafted_trees(head, features, rules, budget, max_tokens, passes) for budget in drafted}
        tokens, last = features.tokens.tolist(), features.prompt_length + len(by_budget[max(budgets)])
        for budget in budgets:
            trees = by_budget.get(budget, by_budget[max(budgets)])
            position, rounds = features.prompt_length, 0
            while position < last:
                tree = trees[position - features.prompt_length].cut(budget)
                position += 1 + len(tree.along(tokens[position + 1 :]))
                rounds += 1
            counts[budget].append((last - features.prompt_length, rounds))
    return counts


@torch.no_grad()
def drafted_trees(
    head: Head, features: RowFeatures, rules: BlockRules, budget: int, max_tokens: int, passes: int = 1
) -> list[DraftTree]:
    """The ranked tree at every anchor among the row's first `max_tokens` output tokens that has a successor.

    Raises ValueError for more `passes` than `head` has.
    """
    check_passes(passes)
    last = min(len(features.tokens) - 1, features.prompt_length + max_tokens)
    anchors = torch.arange(features.prompt_length, last)
    return [tree for part in anchors.split(32) for tree in _row_trees(head, features, part, rules, budget, passes)]


def _row_trees(
    head: Head, features: RowFeatures, anchors: Tensor, rules: BlockRules, budget: int, passes: int
) -> list[DraftTree]:
    """The ranked tree of every anchor."""
    if isinstance(head, EagleHead) or passes == 2:
        return row_trees(head, features, anchors.tolist(), budget, BRANCHES, passes)
    whole = BlockRules(rules.block_size, rules.mask_token_id, rules.causal, gamma=None, truncate=False)
    batch = pack_blocks(
        [(features, anchors, torch.full_like(anchors, rules.block_size))], whole, head.norm.weight.device
    )
    hidden = block_hidden(head, batch).view(len(anchors), rules.block_size, -1)
    tokens, before = (
        features.tokens[positions].to(hidden.device) for positions in (anchors, (anchors - 1).clamp_min(0))
    )
    candidates = head_candidates(head, hidden[:, 1:], tokens, before, BRANCHES)
    count = len(anchors)
    return grown_trees(tokens.tolist(), candidates, [budget] * count, [rules.block_size - 1] * count)
