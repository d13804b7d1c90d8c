"""Sampling parameters, and the target's own choice of a token per row of logits.

The choice at a position is a function of that row's logits, the parameters, the seed and the position, and of nothing
else: Gumbel-max (argmax of logit + noise draws from the softmax) with noise that is a hash of (seed, position, token).
So sampled text is the same token for token with or without speculation, in any batch and at any node of a tree.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import UnionType

import torch
from torch import Tensor

import jetflow_triton as ops
from jetflow_core.logprobs import MAX_TOP
from jetflow_triton.choice import greedy


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

    Bias, penalties and bans are in the logits already (`processing.process`); `jetflow_triton.sample` applies temperature and
    filters. Rows that no choice covers are greedy. Ties go to the lowest id. A row with a NaN or +inf, or without any finite
    logit, gives −1 (nothing can be chosen from it); other rows are not affected. `logits` is not changed.
    """
    if not choices:
        return greedy(logits)
    rows = len(logits)
    temperature, top_k, seeds, positions = [0.0] * rows, [0] * rows, [0] * rows, [0] * rows
    top_p, min_p = [1.0] * rows, [0.0] * rows
    for choice in choices:
        assert choice.rows.stop - choice.rows.start == len(choice.positions), "a choice needs one position per row"
        for row, position in zip(range(choice.rows.start, choice.rows.stop), choice.positions.tolist(), strict=True):
            params = choice.params
            temperature[row], top_k[row], top_p[row], min_p[row] = (
                params.temperature,
                params.top_k,
                params.top_p,
                params.min_p,
            )
            seeds[row], positions[row] = (choice.seed + 2**63) % 2**64 - 2**63, position

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    return ops.sample(
        logits,
        column(temperature, torch.float64),
        column(top_k, torch.int64),
        column(top_p, torch.float64),
        column(min_p, torch.float64),
        column(seeds, torch.int64),
        column(positions, torch.int64),
    )
