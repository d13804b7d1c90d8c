"""Log-probabilities beside the text they belong to, in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jetflow_core.logprobs import TokenLogprobs
from jetflow_core.tokenizer import Detokenizer, Tokenizer
from jetflow_serve.bodies import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprob

LOWEST = -9999.0  # what OpenAI writes for "next to impossible"; JSON has no infinity


@dataclass(frozen=True)
class Entry:
    """A token, where its text begins in the answer (in characters), and what the model made of it (None: not asked)."""

    token: int
    offset: int
    logprobs: TokenLogprobs | None


class LogprobTrack:
    """Holds back the entries of a text until the characters they belong to are given out.

    Tokens without characters of their own (the end, a stop string) are left out when an answer ends with "stop".
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0, skip_special: bool = True) -> None:
        """`start`: characters before the text. `skip_special`: control tokens have none."""
        self._detokenizer = Detokenizer(tokenizer, skip_special)
        self._silent = tokenizer.special_ids if skip_special else frozenset[int]()
        self._certain = start  # characters that no further token changes
        self._shown = start
        self._waiting: list[Entry] = []

    def add(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Note a token, at the first character that it adds or completes."""
        before = self._detokenizer.peek()
        pushed = self._detokenizer.push(token)
        after = pushed + self._detokenizer.peek()
        place = _common(before, after)
        if len(after) <= len(before) and token not in self._silent:  # the bytes so far belong to one character
            place = min(place, max(0, len(after) - 1))
        offset = self._certain + place
        self._certain += len(pushed)
        # Bytes that looked like characters of their own turn out to be the beginning of this one.
        self._waiting = [replace(entry, offset=min(entry.offset, offset)) for entry in self._waiting]
        self._waiting.append(Entry(token, offset, logprobs))

    def take(self, text: str, finish: str | None) -> list[Entry]:
        """Entries whose characters have begun, now that `text` is out as well."""
        self._shown += len(text)
        count = sum(entry.offset < self._shown for entry in self._waiting)  # offsets ascend
        if finish == "length":
            count = len(self._waiting)
        out, self._waiting = self._waiting[:count], self._waiting[count:]
        return out


def _common(one: str, other: str) -> int:
    """Length of the beginning that two texts share."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def prompt_entries(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], added: int, length: int
) -> list[Entry]:
    """Entries of an echoed prompt of `length` characters whose first `added` tokens the tokenizer put there by itself."""
    track = LogprobTrack(tokenizer, skip_special=False)
    for token, own in zip(tokens[added:], logprobs[added:], strict=True):
        track.add(token, own)
    written = [replace(entry, offset=min(entry.offset, length)) for entry in track.take("", "length")]
    return [Entry(token, 0, own) for token, own in zip(tokens[:added], logprobs[:added], strict=True)] + written


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token; OpenAI's `bytes:\\xf0\\x9f` where it is no whole text."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[Entry]) -> ChatLogprobs:
    """The chat form."""

    def fields(token: int, logprob: float) -> dict[str, object]:
        name, raw = token_name(tokenizer, token), list(tokenizer.token_bytes(token))
        return {"token": name, "logprob": max(logprob, LOWEST), "bytes": raw}

    content: list[TokenLogprob] = []
    for own in (entry.logprobs for entry in entries):
        assert own is not None, "only the first token of a prompt has no probability"
        top = [TopLogprob.model_validate(fields(*pair)) for pair in own.top]
        content.append(TokenLogprob.model_validate({**fields(own.token_id, own.logprob), "top_logprobs": top}))
    return ChatLogprobs(content=content, refusal=None)


def text_logprobs(tokenizer: Tokenizer, entries: Sequence[Entry]) -> TextLogprobs:
    """The legacy form. The token itself is always among the top ones; of tokens with the same text the likeliest counts."""
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        own = entry.logprobs
        if own is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token, logprob in [*own.top, (own.token_id, own.logprob)]:
            top.setdefault(token_name(tokenizer, token), max(logprob, LOWEST))
        tops.append(top)
    return TextLogprobs(
        tokens=[token_name(tokenizer, entry.token) for entry in entries],
        token_logprobs=[None if entry.logprobs is None else max(entry.logprobs.logprob, LOWEST) for entry in entries],
        top_logprobs=tops,
        text_offset=[entry.offset for entry in entries],
    )
