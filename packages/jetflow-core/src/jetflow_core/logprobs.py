"""Log-probabilities of tokens that were chosen or read, with the most probable ones beside them.

They are the log-softmax, in float32, of the model's raw logits over its real vocabulary (rows of a padded LM head left out):
before bias, penalties, temperature and filters, so they say what the model thinks and not what the sampling options make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_TOP = 20


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of `token_id` at its position, and there the `top` (token, log-probability) pairs, best first.

    Of equal ones the lower id comes first. The token itself is in `top` only when it is one of the best.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def token_logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """What row k of `logits` [n, V] (raw, any float dtype) says of `tokens[k]`, with the `tops[k]` best of the row."""
    own = logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None]).squeeze(-1).tolist()
    normalisers = logits.float().logsumexp(dim=-1).tolist()
    best = _best(logits, min(max(tops), logits.shape[-1]))
    return [
        TokenLogprobs(token, logit - normaliser, [(other, value - normaliser) for other, value in pairs[:top]])
        for token, logit, normaliser, pairs, top in zip(tokens, own, normalisers, best, tops, strict=True)
    ]


def _best(logits: Tensor, top: int) -> list[list[tuple[int, float]]]:
    """The `top` largest (id, logit) of every row; of equal ones the lower ids, as in a greedy choice (torch leaves it open)."""
    best: list[list[tuple[int, float]]] = [[] for _ in logits]
    if top == 0:
        return best
    rows, ids = (logits >= logits.topk(top, dim=-1).values[:, -1:]).nonzero(as_tuple=True)  # ids rise within a row
    for row, token, value in zip(rows.tolist(), ids.tolist(), logits[rows, ids].tolist(), strict=True):
        best[row].append((token, value))
    return [sorted(pairs, key=lambda pair: -pair[1])[:top] for pairs in best]
