"""Sampling parameters, and the target's own choice of a token per row of logits.

The choice at a position is a function of that row's logits, the parameters, the seed and the position, and of nothing
else: Gumbel-max (argmax of logit + noise draws from the softmax) with noise that is a hash of (seed, position, token).
So sampled text is the same token for token with or without speculation, in any batch and at any node of a tree.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. Raises ValueError for a value outside its range.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` None: drawn at random per request.
    `max_tokens` None: as many as the context allows. No end before `min_tokens` tokens. `stop`: strings that end the
    text and are never part of it. `stop_token_ids` end the request as an EOS does; `ignore_eos` concerns the EOS alone.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, sys.float_info.max, "a finite number >= 0")
        _check_number("top_p", self.top_p, 0.0, 1.0, "a number with 0 < top_p <= 1")
        if self.top_p == 0:
            raise _out_of_range("top_p", self.top_p, "a number with 0 < top_p <= 1")
        _check_int("top_k", self.top_k, 0, None, "an integer >= 0 (0 is off)")
        _check_number("min_p", self.min_p, 0.0, 1.0, "a number with 0 <= min_p <= 1")
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1, "an integer of 64 bits or None")
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None, "an integer >= 1 or None")
        limit = self.max_tokens
        _check_int("min_tokens", self.min_tokens, 0, limit, f"an integer >= 0 and <= max_tokens ({limit})")
        _check_tuple("stop", self.stop, str, "a tuple of non-empty strings")
        if "" in self.stop:
            raise _out_of_range("stop", self.stop, "a tuple of non-empty strings")
        _check_tuple("stop_token_ids", self.stop_token_ids, int, "a tuple of token ids >= 0")
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, None, "a tuple of token ids >= 0")
        if not isinstance(self.ignore_eos, bool):
            raise _out_of_range("ignore_eos", self.ignore_eos, "True or False")


def _out_of_range(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{name} is {value!r}; it must be {allowed}")


def _check_number(name: str, value: object, low: float, high: float, allowed: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise _out_of_range(name, value, allowed)


def _check_int(name: str, value: object, low: int, high: int | None, allowed: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise _out_of_range(name, value, allowed)


def _check_tuple(name: str, value: object, kind: type, allowed: str) -> None:
    if not isinstance(value, tuple) or not all(isinstance(item, kind) for item in value):
        raise _out_of_range(name, value, allowed)


@dataclass
class Choice:
    """One request's rows of the logits, and what their choice depends on.

    `positions` [n] int64: absolute position of the token being chosen, per row (siblings in a tree share theirs).
    `end_ids` (EOS and stop ids) may not be chosen at positions below `earliest_end`.
    """

    rows: slice
    params: SamplingParams
    positions: Tensor
    earliest_end: int
    end_ids: tuple[int, ...]
    seed: int


def choose(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    """The chosen token of every row of `logits` [R, V] (any float dtype), as int64 [R] on the same device.

    Rows that no choice covers are greedy. Ties go to the lowest id. A row with a NaN or +inf, or without any finite
    logit, gives −1 (nothing can be chosen from it); other rows are not affected. `logits` is not changed.
    """
    chosen = _greedy(logits)
    for choice in choices:
        banned = _banned_rows(choice)
        if banned is None and choice.params.temperature == 0:
            continue
        own = logits[choice.rows]
        if banned is not None:
            own = own.clone()
            ends = torch.tensor(choice.end_ids, device=logits.device)
            own[banned.to(logits.device)[:, None], ends] = -math.inf
        chosen[choice.rows] = _greedy(own) if choice.params.temperature == 0 else _sample(own, choice)
    return chosen


def _greedy(logits: Tensor) -> Tensor:
    """Lowest id of the largest logit per row, −1 where that is not finite (torch ranks NaN above everything)."""
    best = logits.argmax(dim=-1)
    finite = logits.gather(-1, best[:, None]).squeeze(-1).isfinite()
    return torch.where(finite, best, -1)


def _banned_rows(choice: Choice) -> Tensor | None:
    """Indices of the rows too early to end, or None."""
    if choice.params.min_tokens == 0 or not choice.end_ids:
        return None
    rows = (choice.positions < choice.earliest_end).nonzero().squeeze(-1)
    return rows if len(rows) else None


def _sample(logits: Tensor, choice: Choice) -> Tensor:
    """Gumbel-max over the tokens that the filters keep, [n, V] -> [n]."""
    params = choice.params
    values = logits.float()
    best = values.amax(dim=-1, keepdim=True)
    # The largest becomes 0 before the division, so that no temperature, however small, overflows.
    scaled = (values - best) / max(params.temperature, torch.finfo(torch.float32).tiny)
    rows, tokens = (scaled >= _threshold(scaled, params)).nonzero(as_tuple=True)
    keys = _row_keys(choice.seed, choice.positions.to(logits.device))
    scores = torch.full(scaled.shape, -math.inf, dtype=torch.float64, device=logits.device)
    scores[rows, tokens] = scaled[rows, tokens].double() + _gumbel(keys[rows], tokens)
    return torch.where(best.squeeze(-1).isfinite(), scores.argmax(dim=-1), -1)


def _threshold(scaled: Tensor, params: SamplingParams) -> Tensor:
    """Smallest logit kept per row, [n, V] -> [n, 1]: top-k, then top-p within it, then min-p; equal logits share a fate.

    Top-p keeps a token when the tokens more probable than it hold less than `top_p` together.
    """
    # Below this a token cannot win against the largest, whatever their noise.
    floor = scaled.new_full((len(scaled), 1), -_NOISE_SPAN)
    top_k = min(params.top_k, scaled.shape[-1])
    if top_k:
        floor = torch.maximum(floor, scaled.topk(top_k, dim=-1).values[:, -1:])
    if params.top_p < 1:
        ordered = scaled.masked_fill(scaled < floor, -math.inf).sort(dim=-1, descending=True).values
        probs = ordered.double().softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs
        last = ((before < params.top_p) & (probs > 0)).sum(dim=-1, keepdim=True) - 1
        floor = torch.maximum(floor, ordered.gather(-1, last.clamp(min=0)))
    if params.min_p > 0:
        floor = floor.clamp(min=math.log(params.min_p))
    return floor


# Uniforms have 52 bits: noise lies in [−log(53 log 2), 53 log 2] = [−3.61, 36.74], a span of 40.4.
_UNIFORM_BITS = 52
_NOISE_SPAN = 41.0
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def _row_keys(seed: int, positions: Tensor) -> Tensor:
    """A hash of (seed, position) per row, int64."""
    signed = (seed + 2**63) % 2**64 - 2**63
    start = _mix(torch.tensor(signed, dtype=torch.int64, device=positions.device))
    return _mix(start + (positions + 1) * _GOLDEN)


def _gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise of (key, token), float64, elementwise."""
    bits = _shift_right(_mix(keys + (tokens + 1) * _GOLDEN), 64 - _UNIFORM_BITS)
    # The half keeps the uniform off 0, and 53 bits in all off 1: both ends are exact in float64.
    uniform = (bits.double() + 0.5) * 2.0**-_UNIFORM_BITS
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on int64, whose products wrap around."""
    x = (x ^ _shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift_right(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift that fills with zeros (torch's own repeats the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
