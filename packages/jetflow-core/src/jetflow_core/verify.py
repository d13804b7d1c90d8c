"""What the target says of a step: it chooses after rows that may decide a token, and trees are walked along its choices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from jetflow_core.batch import Segment
from jetflow_core.logprobs import TokenLogprobs, token_logprobs
from jetflow_core.model import Decoder
from jetflow_core.processing import ProcessedRow, process
from jetflow_core.sampling import Choice, choose
from jetflow_core.scheduler import Share
from jetflow_core.step_clock import StepClock
from jetflow_core.tree import DraftTree, Ints, accept


@dataclass(frozen=True)
class Verified:
    """The outcome of one share: its rows that are now part of the prefix, in order, and the tokens that follow.

    `rows` counts within the segment. `tokens` is empty while a prompt is not finished; it ends in −1 where the logits were not
    finite. A tree with such logits is `poisoned`: nothing of it is kept, since a drafted token alone may be to blame (zero weight
    times a value that is not finite is not zero), and its anchor has to be tried without a draft.

    `logprobs` has one entry a token where the request asks for them. `prompt_logprobs` are those of the prompt's tokens that this
    step is the first to know, in order.
    """

    share: Share
    segment: Segment
    rows: Ints
    tokens: list[int]
    poisoned: bool = False
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])

    @property
    def failed(self) -> bool:
        """Whether the target gave no finite logits to choose from."""
        return bool(self.tokens) and self.tokens[-1] < 0


def verify(
    model: Decoder,
    vocab_size: int,
    shares: Sequence[Share],
    segments: Sequence[Segment],
    hidden: Tensor,
    clock: StepClock,
) -> list[Verified]:
    """Decide the tokens of a step from the target's final `hidden` states [T, C] of all its rows.

    Ids from `vocab_size` on are padding of the LM head and are never chosen. The logits count to the phase "verify" of `clock`,
    the rest to "accept".
    """
    starts = np.cumsum([0, *(len(segment.ids) for segment in segments)])
    decisions = [
        decision
        for share, segment, start in zip(shares, segments, starts, strict=False)
        if (decision := _decision(share, segment, int(start))) is not None
    ]
    rows = [decision.first_row + np.arange(len(decision.tree)) for decision in decisions]
    bounds = [0, *itertools.accumulate(len(own) for own in rows)]
    clock.lap("accept")
    logits = _logits(model, vocab_size, hidden, rows)
    clock.lap("verify")

    def choose_after(active: Sequence[int], nodes: Sequence[int]) -> list[int]:
        """The target's token after node `nodes[k]` of tree `active[k]`."""
        picked = torch.tensor([bounds[i] + node for i, node in zip(active, nodes, strict=True)])
        walking = [(k, decisions[i], node) for k, (i, node) in enumerate(zip(active, nodes, strict=True))]
        options = [row for k, decision, node in walking if (row := _options(k, decision, node)) is not None]
        choices = [_choice(k, decision, node) for k, decision, node in walking if decision.samples]
        return choose(process(logits.index_select(0, picked.to(logits.device)), options), choices).tolist()

    outcomes = accept([decision.tree for decision in decisions], choose_after)
    walked = {decision.share.request.id: outcome for decision, outcome in zip(decisions, outcomes, strict=True)}
    logprobs = _output_logprobs(logits, decisions, bounds, outcomes)
    verified: list[Verified] = []
    for share, segment, start in zip(shares, segments, starts, strict=False):
        request_id = share.request.id
        path, tokens = walked.get(request_id, ([], []))
        if segment.tree is not None and -1 in tokens:
            verified.append(Verified(share, segment, np.arange(0), [], poisoned=True))
            continue
        rows_kept = np.arange(len(segment.ids)) if segment.tree is None else np.array(path)
        prompt = _prompt_logprobs(model, vocab_size, share, segment, int(start), hidden)
        verified.append(Verified(share, segment, rows_kept, tokens, False, logprobs.get(request_id), prompt))
    clock.lap("accept")
    return verified


@dataclass(frozen=True)
class _Decision:
    """A tree to walk: node n is row `first_row` + n of the flat batch, at position `position` + its depth."""

    share: Share
    tree: DraftTree
    first_row: int
    position: int

    @property
    def samples(self) -> bool:
        return self.share.request.params.temperature > 0


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


def _options(row: int, decision: _Decision, node: int) -> ProcessedRow | None:
    """What the request's options do to the logits at `node`, chosen from row `row`; None for a plain request."""
    request, tree = decision.share.request, decision.tree
    banned = request.end_ids if _position(decision, node) < request.earliest_end else ()
    if not banned and not request.params.logit_bias and request.counts is None:
        return None
    path: list[int] = []
    while node > 0:
        path.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return ProcessedRow(row, request.params, request.counts, path, banned)


def _choice(row: int, decision: _Decision, node: int) -> Choice:
    request = decision.share.request
    return Choice(slice(row, row + 1), request.params, torch.tensor([_position(decision, node)]), request.seed)


def _position(decision: _Decision, node: int) -> int:
    """Absolute position of the token that follows `node`."""
    return decision.position + int(decision.tree.depths[node]) + 1


def _output_logprobs(
    logits: Tensor,
    decisions: Sequence[_Decision],
    bounds: Sequence[int],
    outcomes: Sequence[tuple[list[int], list[int]]],
) -> dict[str, list[TokenLogprobs]]:
    """Per request id that asks for them, the log-probabilities of its new tokens."""
    asked = [
        (decision.share.request, bound + np.array(path), tokens)
        for decision, bound, (path, tokens) in zip(decisions, bounds, outcomes, strict=False)
        if decision.share.request.params.logprobs is not None and -1 not in tokens
    ]
    if not asked:
        return {}
    rows = torch.from_numpy(np.concatenate([rows for _, rows, _ in asked])).to(logits.device)
    chosen = [token for _, _, tokens in asked for token in tokens]
    tops = [request.params.logprobs or 0 for request, _, tokens in asked for _ in tokens]
    entries = iter(token_logprobs(logits[rows], chosen, tops))
    return {request.id: list(itertools.islice(entries, len(tokens))) for request, _, tokens in asked}


# Logits of a prompt made at once: bounds the memory that a long chunk takes.
_PROMPT_LOGITS_AT_ONCE = 2**24


def _prompt_logprobs(
    model: Decoder, vocab_size: int, share: Share, segment: Segment, first_row: int, hidden: Tensor
) -> list[TokenLogprobs]:
    """Log-probabilities of the prompt tokens after the last one known, where asked for; the segment starts in `first_row`."""
    request = share.request
    if request.prompt_logprobs is None:
        return []
    # The row of one position knows the token of the next. What a resumed request reads again is known already.
    first = len(request.prompt_logprobs) - 1
    last = min(segment.prefix + share.known, len(request.prompt_ids) - 1)
    assert first >= segment.prefix or first >= last, f"request {request.id} skipped prompt tokens it has to score"
    found: list[TokenLogprobs] = []
    size = max(1, _PROMPT_LOGITS_AT_ONCE // vocab_size)
    for start in range(first, last, size):
        tokens = request.prompt_ids[start + 1 : min(start + size, last) + 1]
        row = first_row + start - segment.prefix
        logits = model.logits(hidden[row : row + len(tokens)])[:, :vocab_size]
        found += token_logprobs(logits, tokens, [request.params.prompt_logprobs or 0] * len(tokens))
    return found
