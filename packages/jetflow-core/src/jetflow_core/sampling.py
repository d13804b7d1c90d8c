"""Sampling parameters, and the target's own choice of a token per row of logits.

The choice at a position is a function of that row's logits, the parameters, the seed and the position, and of nothing
else: Gumbel-max (argmax of logit + noise draws from the softmax) with noise that is a hash of (seed, position, token).
So sampled text is the same token for token with or without speculation, in any batch and at any node of a tree.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import UnionType

import torch
from torch import Tensor

from jetflow_core.logprobs import MAX_TOP


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. Raises ValueError for a value outside its range.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` None: drawn at random per request.
    `max_tokens` None: as many as the context allows; 0: the prompt is read and nothing generated. No end before
    `min_tokens` tokens. `stop`: strings that end the text and are never part of it. `stop_token_ids` end the request as an
    EOS does; `ignore_eos` concerns the EOS alone.

    `logit_bias` (token id to −100 … 100) is added to the logits. `repetition_penalty` (over prompt and output, 1 is off),
    then `presence_penalty` and `frequency_penalty` (over the output, 0 is off) follow; `processing` has the arithmetic.

    `logprobs`: None, or for every output token its log-probability and the n most probable tokens (0: its own alone).
    `prompt_logprobs`: the same for the prompt's tokens but the first. They come from the raw logits (see `logprobs.py`).
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict[int, float], hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None

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
            _check_int("max_tokens", self.max_tokens, 0, None, "an integer >= 0 or None")
        limit = self.max_tokens
        _check_int("min_tokens", self.min_tokens, 0, limit, f"an integer >= 0 and <= max_tokens ({limit})")
        _check_tuple("stop", self.stop, "a tuple of non-empty strings")
        for text in self.stop:
            if not _is_a(str, text) or text == "":
                raise _out_of_range("stop", self.stop, "a tuple of non-empty strings")
        _check_tuple("stop_token_ids", self.stop_token_ids, "a tuple of token ids >= 0")
        for token in self.stop_token_ids:
            if not _is_a(int, token) or _is_a(bool, token) or token < 0:
                raise _out_of_range("stop_token_ids", self.stop_token_ids, "a tuple of token ids >= 0")
        if not _is_a(bool, self.ignore_eos):
            raise _out_of_range("ignore_eos", self.ignore_eos, "True or False")
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -2.0, 2.0, "a number from -2 to 2")
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, sys.float_info.max, "a finite number > 0")
        if self.repetition_penalty == 0:
            raise _out_of_range("repetition_penalty", self.repetition_penalty, "a finite number > 0")
        _check_bias(self.logit_bias)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_TOP, f"an integer from 0 to {MAX_TOP} or None")

    @property
    def penalises(self) -> bool:
        """Whether a choice depends on the tokens before it other than through the logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _out_of_range(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{name} is {value!r}; it must be {allowed}")


def _check_number(name: str, value: object, low: float, high: float, allowed: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise _out_of_range(name, value, allowed)


def _check_int(name: str, value: object, low: int, high: int | None, allowed: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise _out_of_range(name, value, allowed)


def _check_bias(value: object) -> None:
    allowed = "a dict of token ids >= 0 to numbers from -100 to 100"
    if not isinstance(value, dict):
        raise _out_of_range("logit_bias", value, allowed)
    for token, bias in value.items():
        is_id = _is_a(int, token) and not _is_a(bool, token) and token >= 0
        if not is_id or not _is_a(int | float, bias) or _is_a(bool, bias) or not -100 <= bias <= 100:
            raise _out_of_range("logit_bias", {token: bias}, allowed)


def _check_tuple(name: str, value: object, allowed: str) -> None:
    if not isinstance(value, tuple):
        raise _out_of_range(name, value, allowed)


def _is_a(kind: type | UnionType, value: object) -> bool:
    return isinstance(value, kind)


@dataclass
class Choice:
    """One request's rows of the logits, and what their choice depends on.

    `positions` [n] int64: absolute position of the token being chosen, per row (siblings in a tree share theirs).
    """

    rows: slice
    params: SamplingParams
    positions: Tensor
    seed: int


def choose(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    """The chosen token of every row of `logits` [R, V] (any float dtype), as int64 [R] on the same device.

    Bias, penalties and bans are in the logits already (`processing.process`); temperature and filters are applied here.
    Rows that no choice covers are greedy. Ties go to the lowest id. A row with a NaN or +inf, or without any finite logit, gives
    −1 (nothing can be chosen from it); other rows are not affected. `logits` is not changed.
    """
    chosen = _greedy(logits)
    sampled = [choice for choice in choices if choice.params.temperature > 0]
    if sampled:
        everything = _sampled_rows(sampled, logits.device)
        token_steps = (torch.arange(logits.shape[-1], device=logits.device) + 1) * _GOLDEN
        at_once = _LOGITS_AT_ONCE.get(logits.device.type, 2**25) // logits.shape[-1]
        for part in everything.split(max(1, at_once)):
            chosen[part.index] = _sample(logits[part.index].float(), part, token_steps)
    return chosen


# Logits worked on at once: what a core's cache holds on the CPU, what bounds the temporary memory elsewhere.
_LOGITS_AT_ONCE = {"cpu": 2**16}


def _greedy(logits: Tensor) -> Tensor:
    """Lowest id of the largest logit per row, −1 where that is not finite (torch ranks NaN above everything)."""
    value, token = logits.max(dim=-1)  # several times faster than argmax on the CPU, and also the first of equals
    return torch.where(value.isfinite(), token, -1)


@dataclass
class _Rows:
    """Sampled rows: `index` [n] into the logits, noise key [n] int64, the other columns [n, 1]."""

    index: Tensor
    keys: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def split(self, size: int) -> Iterator[_Rows]:
        columns = (self.index, self.keys, self.temperature, self.top_k, self.top_p, self.min_p)
        for parts in zip(*(column.split(size) for column in columns), strict=True):
            yield _Rows(*parts)


def _sampled_rows(choices: Sequence[Choice], device: torch.device) -> _Rows:
    counts = torch.tensor([len(choice.positions) for choice in choices])

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(counts)[:, None].to(device)

    for c in choices:
        assert c.rows.stop - c.rows.start == len(c.positions), "a choice needs one position per row"
    index = [torch.arange(c.rows.start, c.rows.stop) for c in choices]
    smallest = torch.finfo(torch.float32).tiny
    return _Rows(
        torch.cat(index).to(device),
        torch.cat([_row_keys(c.seed, c.positions) for c in choices]).to(device),
        column([max(c.params.temperature, smallest) for c in choices], torch.float32),
        column([c.params.top_k for c in choices], torch.int64),
        column([c.params.top_p for c in choices], torch.float64),
        column([math.log(c.params.min_p) if c.params.min_p else -math.inf for c in choices], torch.float32),
    )


def _sample(logits: Tensor, rows: _Rows, token_steps: Tensor) -> Tensor:
    """Gumbel-max over the tokens that the filters keep, float32 [n, V] -> [n]."""
    best = logits.amax(dim=-1, keepdim=True)
    # The largest becomes 0 before the division, so that no temperature, however small, overflows.
    scaled = (logits - best).div_(rows.temperature)
    # Gumbel noise is −log of an exponential variable.
    scores = _filter(scaled, rows).sub(_log_exponential(rows.keys[:, None] + token_steps))
    return torch.where(best.isfinite(), scores.argmax(dim=-1, keepdim=True), -1).squeeze(-1)


def _filter(scaled: Tensor, rows: _Rows) -> Tensor:
    """`scaled` [n, V] (largest 0) with −inf for what top-k, then top-p within that, then min-p exclude.

    Equal logits share a fate: top-k keeps all that equal the k-th, and top-p keeps a token when the tokens more
    probable than it hold less than `top_p` together.
    """
    top_k = rows.top_k.clamp(max=scaled.shape[-1])
    if largest := int(top_k.max()):
        kth = scaled.topk(largest, dim=-1).values.gather(-1, (top_k - 1).clamp(min=0))
        scaled = scaled.masked_fill((scaled < kth) & (top_k > 0), -math.inf)
    if bool((rows.top_p < 1).any()):
        probs = scaled.softmax(dim=-1)
        scaled = scaled.masked_fill((probs < _nucleus_floor(probs, rows.top_p)) & (rows.top_p < 1), -math.inf)
    if bool((rows.min_p > -math.inf).any()):
        scaled = scaled.masked_fill(scaled < rows.min_p, -math.inf)
    return scaled


_NUCLEUS_HEAD = 1024


def _nucleus_floor(probs: Tensor, top_p: Tensor) -> Tensor:
    """Probability of the last token of the nucleus, [n, V], [n, 1] -> [n, 1]."""
    # Few tokens hold top_p of the mass in nearly every row: sort the whole vocabulary only where they do not.
    head = probs.topk(min(_NUCLEUS_HEAD, probs.shape[-1]), dim=-1).values.double()
    floor = _last_within(head, top_p)
    wide = (head.sum(dim=-1) < top_p.squeeze(-1)).nonzero().squeeze(-1)
    if len(wide):
        floor[wide] = _last_within(probs[wide].sort(dim=-1, descending=True).values.double(), top_p[wide])
    return floor


def _last_within(ordered: Tensor, top_p: Tensor) -> Tensor:
    """Last of the descending probabilities with less than `top_p` before it, [n, k] -> [n, 1] float32."""
    before = ordered.cumsum(dim=-1) - ordered
    last = (before < top_p).sum(dim=-1, keepdim=True) - 1
    return ordered.gather(-1, last.clamp(min=0)).float()


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def _row_keys(seed: int, positions: Tensor) -> Tensor:
    """A hash of (seed, position) per row, int64."""
    signed = (seed + 2**63) % 2**64 - 2**63
    start = _mix(torch.tensor(signed, dtype=torch.int64, device=positions.device))
    return _mix(start + (positions + 1) * _GOLDEN)


def _log_exponential(counter: Tensor) -> Tensor:
    """Log of a standard exponential variable per int64 counter, float32: a pure function, element by element."""
    # Small uniforms make the winners (log1p(−w) ≈ −w), and floats are finest there. Never 0, never 1.
    uniform = _mix(counter).float().abs_().mul_(2.0**-63).clamp_(2.0**-64, 1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_()


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on int64, whose products wrap around."""
    x = (x ^ _shift_right(x, 30)).mul_(0xBF58476D1CE4E5B9 - 2**64)
    x ^= _shift_right(x, 27)
    x *= 0x94D049BB133111EB - 2**64
    x ^= _shift_right(x, 31)
    return x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift that fills with zeros (torch's own repeats the sign)."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
