"""What a request's options do to a row of logits before a token is chosen from it.

In this order, that of vLLM's sampler: `logit_bias` is added, ends that come too early become −inf, then the penalties. The
repetition penalty (arXiv 1909.05858, as in Hugging Face's processor) divides the positive and multiplies the negative logits of
all tokens of prompt and output; frequency and presence penalty (OpenAI) take `count · frequency + presence` from those of the
output's tokens.

At a node of a draft tree, the output is what the request has generated and the drafted tokens from there to the node: the same
tokens that step-by-step decoding would have generated there.
"""

from __future__ import annotations

import math
from array import array
from collections import ChainMap
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jetflow_core.sampling import SamplingParams


class TokenCounts:
    """The distinct tokens of a request, and how often each was generated (0 times: it is in the prompt only)."""

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        self._ids, self._counts = array("q"), array("q")
        self._places: MutableMapping[int, int] = {}
        for token in prompt_ids:
            self._place(token)

    def add(self, token: int) -> None:
        """Count a generated token."""
        self._counts[self._place(token)] += 1

    def after(self, path: Iterable[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(ids, counts) as they would be had the tokens of `path` been generated too."""
        then = TokenCounts()
        then._ids, then._counts, then._places = self._ids[:], self._counts[:], ChainMap({}, self._places)
        for token in path:
            then.add(token)
        return np.asarray(then._ids), np.asarray(then._counts)

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token)
            self._counts.append(0)
        return place


@dataclass(frozen=True)
class ProcessedRow:
    """A row of logits and what changes it: `counts` before the drafted tokens of `path`, `banned` ids that may not be chosen."""

    row: int
    params: SamplingParams
    counts: TokenCounts | None
    path: Iterable[int]
    banned: Sequence[int]


def process(logits: Tensor, rows: Sequence[ProcessedRow]) -> Tensor:
    """`logits` [R, V], the caller's own copy, with `rows` changed: float32 when there are any, as they are otherwise.

    Only the entries that an option names are read and written, for all rows at once.
    """
    if not rows:
        return logits
    logits = logits.float()
    _add(logits, rows)
    _penalise(logits, [row for row in rows if row.counts is not None])
    return logits


def _add(logits: Tensor, rows: Sequence[ProcessedRow]) -> None:
    entries = [(r.row, token, value) for r in rows for token, value in r.params.logit_bias.items()]
    entries += [(r.row, token, -math.inf) for r in rows for token in r.banned]
    if entries:
        index, tokens, values = zip(*entries, strict=True)
        place = torch.tensor([index, tokens], device=logits.device)
        # A token may be there twice, biased and banned or as two kinds of end: the sum is right.
        logits.index_put_(tuple(place), torch.tensor(values, device=logits.device), accumulate=True)


def _penalise(logits: Tensor, rows: Sequence[ProcessedRow]) -> None:
    if not rows:
        return
    tables = [row.counts.after(row.path) for row in rows if row.counts is not None]
    sizes = [len(ids) for ids, _ in tables]
    limits = torch.finfo(torch.float32)

    def column(values: Sequence[float]) -> NDArray[np.float64]:
        return np.repeat(np.array(values, dtype=np.float64), sizes)

    counts = np.concatenate([counts for _, counts in tables])
    repetition = column([row.params.repetition_penalty for row in rows]).clip(limits.tiny, limits.max)
    taken = counts * column([row.params.frequency_penalty for row in rows])
    taken += (counts > 0) * column([row.params.presence_penalty for row in rows])
    index = np.stack([np.repeat([row.row for row in rows], sizes), np.concatenate([ids for ids, _ in tables])])
    place = tuple(torch.from_numpy(index).to(logits.device))
    factor, minus = torch.from_numpy(np.stack([repetition, taken]).astype(np.float32)).to(logits.device)
    before = logits[place]
    after = torch.where(before > 0, before / factor, before * factor) - minus
    # Only the model makes an infinite logit: a penalty never does, however large.
    logits[place] = torch.where(before.isfinite(), after.clamp(limits.min, limits.max), before)
