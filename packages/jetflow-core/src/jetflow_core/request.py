"""A request's life: its tokens, its block table, when it ends, and the text it returns."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from jetflow_core.block_pool import page_key, root_key
from jetflow_core.budget import Budget
from jetflow_core.logprobs import TokenLogprobs
from jetflow_core.processing import TokenCounts
from jetflow_core.sampling import SamplingParams

Status = Literal["waiting", "running", "finished"]
FinishReason = Literal["stop", "length"]


class Detokenizer(Protocol):
    """Incremental text of one request: never half a character."""

    def push(self, token: int, /) -> str:
        """Text that this token completes (may be empty)."""
        ...

    def flush(self) -> str:
        """What is left when no further token comes."""
        ...


@dataclass(frozen=True)
class Usage:
    """Token counts of one request so far. `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    accepted_draft_tokens: int
    target_steps: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Output:
    """What one step adds to a request: new tokens and text, and on the last one why it ended.

    `logprobs`, where asked for, has one entry a token of `token_ids`. `prompt_logprobs` comes once, with the output that ends the
    prompt: one entry a prompt token, the first None.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: str | None
    error: str | None
    usage: Usage
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Request:
    """One generation.

    The scheduler owns `status`, `arrival`, `blocks` and what concerns the prefix cache, the engine `num_cached` and the counters.
    `tokens` is prompt + output; the last one (the anchor) is not yet in the cache of a decoding request.
    """

    def __init__(
        self,
        id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_ids: Sequence[int],
        detokenizer: Callable[[], Detokenizer],
        budget: Budget = 0,
        cache_salt: str = "",
    ) -> None:
        """`budget`: draft nodes a step besides the anchor, 0 without speculation, "auto" to follow the load.
        Only requests of one `cache_salt` share pages.

        Raises ValueError for an empty prompt, ids outside the vocabulary, a prompt that leaves no room in
        `max_model_len`, and a `max_tokens` that does not fit beside the prompt.
        """
        self.id = id
        self.prompt_ids = tuple(prompt_ids)
        self.params = params
        self.auto = budget == "auto"  # then the budget policy sets `budget` before every step
        self.budget = 0 if budget == "auto" else budget
        _check_ids("prompt", self.prompt_ids, vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        _check_ids("logit_bias", list(params.logit_bias), vocab_size)
        self.max_output = _max_output(len(self.prompt_ids), params.max_tokens, max_model_len)
        self.end_ids = (() if params.ignore_eos else tuple(eos_ids)) + params.stop_token_ids
        self.earliest_end = len(self.prompt_ids) + params.min_tokens
        self.seed = secrets.randbits(63) if params.seed is None else params.seed

        self.tokens = list(self.prompt_ids)
        self.counts: TokenCounts | None = None
        if params.penalises:
            self.counts = TokenCounts(self.prompt_ids if params.repetition_penalty != 1 else ())
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self.blocks: list[int] = []
        self.num_cached = 0
        self.status: Status = "waiting"
        self.finish_reason: FinishReason | None = None
        self.arrival = -1
        self.num_registered = 0  # leading blocks whose content the pool knows
        self.computed = 0  # tokens it had cached when it was preempted, at most
        self.cached_tokens = 0
        self.sound = True  # no value that is not finite has been seen, so its pages may be shared
        self._page_keys = [root_key(cache_salt)]
        self.target_steps = 0
        self.accepted = 0
        self._detokenizer = detokenizer()
        self._text = StopFilter(params.stop)

    @property
    def anchor_position(self) -> int:
        """Absolute position of the last token."""
        return len(self.tokens) - 1

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def remaining(self) -> int:
        """Tokens still allowed by `max_tokens` and the context."""
        return self.max_output - self.num_output

    @property
    def max_slots(self) -> int:
        """Cache slots it needs at most: all its tokens except the last, which never goes through the target."""
        return len(self.prompt_ids) + max(self.max_output, 1) - 1

    @property
    def is_decoding(self) -> bool:
        """Whether only the anchor is missing from the cache."""
        return self.num_cached == self.anchor_position

    @property
    def reuses_prefix(self) -> bool:
        """Whether cached pages may stand in for its own prefill: not where every position's logits are wanted."""
        return self.params.prompt_logprobs is None

    def page_key(self, index: int, page_size: int) -> bytes:
        """Key of its full page `index`. Every page is hashed once, for tokens are only ever added."""
        assert len(self.tokens) >= (index + 1) * page_size, f"page {index} of request {self.id} is not full"
        for start in range((len(self._page_keys) - 1) * page_size, (index + 1) * page_size, page_size):
            self._page_keys.append(page_key(self._page_keys[-1], self.tokens[start : start + page_size]))
        return self._page_keys[index + 1]

    def append(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """Take accepted tokens in order up to the one that ends the request; sets `finish_reason` then.

        Returns the tokens kept and the new text. An EOS or stop id counts as a token and has no text; a stop string
        never shows, and text that may be the beginning of one is held back until that is known.
        """
        assert self.finish_reason is None, f"request {self.id} has already finished"
        if self.remaining == 0:  # max_tokens 0: only the prompt was to be read
            self.finish_reason = "length"
            return [], ""
        kept: list[int] = []
        text = ""
        for token in ids:
            kept.append(token)
            text += self._append_one(token)
            if self.finish_reason is not None:
                break
        return kept, text

    def _append_one(self, token: int) -> str:
        may_end = len(self.tokens) >= self.earliest_end
        self.tokens.append(token)
        if self.counts is not None:
            self.counts.add(token)
        if may_end and token in self.end_ids:
            self.finish_reason = "stop"
            return self._text.push(self._detokenizer.flush(), may_end) + self._text.flush()
        text = self._text.push(self._detokenizer.push(token), may_end)
        if not self._text.stopped and self.remaining == 0:
            self.finish_reason = "length"
            text += self._text.push(self._detokenizer.flush(), may_end) + self._text.flush()
        if self._text.stopped:
            self.finish_reason = "stop"
        return text

    def usage(self) -> Usage:
        """Counts so far."""
        return Usage(len(self.prompt_ids), self.num_output, self.accepted, self.target_steps, self.cached_tokens)


class StopFilter:
    """Cuts a stream of text before the stop string that is complete first, wherever the pieces' borders lie.

    The text returned so far never holds the beginning of a stop string that may still be completed.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stopped = False
        self._stop = tuple(stop)
        self._held = ""

    def push(self, piece: str, may_stop: bool = True) -> str:
        """Text that `piece` makes certain. With `may_stop` false, a stop string that ends in it is ordinary text."""
        if self.stopped:
            return ""
        seen = len(self._held)
        text = self._held + piece
        if may_stop and (start := self._first_match(text, seen)) is not None:
            self.stopped = True
            self._held = ""
            return text[:start]
        hold = self._beginning(text)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """What is held back, when no more text comes."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str, seen: int) -> int | None:
        """Start of the match that ends first, of those that end beyond `seen`; of equal ends the longest."""
        best: tuple[int, int] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else best[1]

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name} holds token id {token}, outside the vocabulary of {vocab_size} tokens")


def _max_output(prompt: int, max_tokens: int | None, max_model_len: int) -> int:
    if prompt == 0:
        raise ValueError("the prompt is empty: give at least one token")
    room = max_model_len - prompt
    if room < 1:
        raise ValueError(
            f"the prompt has {prompt} tokens and the context {max_model_len}: shorten it to {max_model_len - 1}"
        )
    if max_tokens is not None and max_tokens > room:
        raise ValueError(
            f"the prompt has {prompt} tokens and max_tokens is {max_tokens}, together more than the context of "
            f"{max_model_len}: at most {room} new tokens fit"
        )
    return room if max_tokens is None else max_tokens
