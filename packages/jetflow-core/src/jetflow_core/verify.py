"""What the target says of a step: it chooses after rows that may decide a token, and trees are walked along its choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jetflow_core.batch import Segment
from jetflow_core.model import Decoder
from jetflow_core.sampling import Choice, choose
from jetflow_core.scheduler import Share
from jetflow_core.tree import DraftTree, Ints, accept


@dataclass(frozen=True)
class Verified:
    """The outcome of one share: its rows that are now part of the prefix, in order, and the tokens that follow.

    `rows` counts within the segment. `tokens` is empty while a prompt is not finished; it ends in −1 where the logits were not
    finite. A tree with such logits is `poisoned`: nothing of it is kept, since a drafted token alone may be to blame (zero weight
    times a value that is not finite is not zero), and its anchor has to be tried without a draft.
    """

    share: Share
    segment: Segment
    rows: Ints
    tokens: list[int]
    poisoned: bool = False

    @property
    def failed(self) -> bool:
        """Whether the target gave no finite logits to choose from."""
        return bool(self.tokens) and self.tokens[-1] < 0


def verify(
    model: Decoder, vocab_size: int, shares: Sequence[Share], segments: Sequence[Segment], hidden: Tensor
) -> list[Verified]:
    """Decide the tokens of a step from the target's final `hidden` states [T, C] of all its rows.

    Ids from `vocab_size` on are padding of the LM head and are never chosen.
    """
    starts = np.cumsum([0, *(len(segment.ids) for segment in segments)])
    decisions = [
        decision
        for share, segment, start in zip(shares, segments, starts, strict=False)
        if (decision := _decision(share, segment, int(start))) is not None
    ]
    rows = [decision.first_row + np.arange(len(decision.tree)) for decision in decisions]
    bounds = np.cumsum([0, *(len(own) for own in rows)])
    logits = _logits(model, vocab_size, hidden, rows)

    def choose_after(active: Sequence[int], nodes: Sequence[int]) -> list[int]:
        """The target's token after node `nodes[k]` of tree `active[k]`."""
        picked = torch.tensor([int(bounds[i]) + node for i, node in zip(active, nodes, strict=True)])
        choices = [_choice(k, decisions[i], node) for k, (i, node) in enumerate(zip(active, nodes, strict=True))]
        return choose(logits[picked.to(logits.device)], choices).tolist()

    outcomes = accept([decision.tree for decision in decisions], choose_after)
    walked = {decision.share.request.id: outcome for decision, outcome in zip(decisions, outcomes, strict=True)}
    verified: list[Verified] = []
    for share, segment in zip(shares, segments, strict=True):
        path, tokens = walked.get(share.request.id, ([], []))
        if segment.tree is not None and -1 in tokens:
            verified.append(Verified(share, segment, np.arange(0), [], poisoned=True))
            continue
        rows_kept = np.arange(len(segment.ids)) if segment.tree is None else np.array(path)
        verified.append(Verified(share, segment, rows_kept, tokens))
    return verified


@dataclass(frozen=True)
class _Decision:
    """A tree to walk: node n is row `first_row` + n of the flat batch, at position `position` + its depth."""

    share: Share
    tree: DraftTree
    first_row: int
    position: int


def _decision(share: Share, segment: Segment, start: int) -> _Decision | None:
    """The draft of a segment, or the end of a finished prompt as a tree of its own; None while the prompt goes on."""
    if segment.tree is not None:
        return _Decision(share, segment.tree, start, segment.prefix)
    if share.request.num_cached + share.known < len(share.request.tokens):
        return None
    last = len(segment.ids) - 1
    return _Decision(share, DraftTree.root(int(segment.ids[last])), start + last, segment.prefix + last)


def _logits(model: Decoder, vocab_size: int, hidden: Tensor, rows: Sequence[Ints]) -> Tensor:
    """Logits [R, vocab_size] of the deciding rows only: the LM head is a large part of a small model's pass."""
    if not rows:
        return hidden.new_empty(0, vocab_size)
    picked = torch.from_numpy(np.concatenate(rows)).to(hidden.device)
    return model.logits(hidden[picked])[:, :vocab_size]


def _choice(row: int, decision: _Decision, node: int) -> Choice:
    request = decision.share.request
    return Choice(
        rows=slice(row, row + 1),
        params=request.params,
        positions=torch.tensor([decision.position + int(decision.tree.depths[node]) + 1]),
        earliest_end=request.earliest_end,
        end_ids=request.end_ids,
        seed=request.seed,
    )
