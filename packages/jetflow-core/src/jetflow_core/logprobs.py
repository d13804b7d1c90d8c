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

    The token itself is in `top` only when it is one of the best.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def token_logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """What row k of `logits` [n, V] (raw, any float dtype) says of `tokens[k]`, with the `tops[k]` best of the row."""
    normaliser = logits.float().logsumexp(dim=-1, keepdim=True)
    own = logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])
    best = logits.topk(min(max(tops), logits.shape[-1]), dim=-1)
    columns = (
        tokens,
        (own.float() - normaliser).squeeze(-1).tolist(),
        best.indices.tolist(),
        (best.values.float() - normaliser).tolist(),
        tops,
    )
    return [
        TokenLogprobs(token, logprob, list(zip(ids[:top], values[:top], strict=True)))
        for token, logprob, ids, values, top in zip(*columns, strict=True)
    ]
