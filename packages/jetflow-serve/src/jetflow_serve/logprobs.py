"""Log-probabilities beside the text they belong to, in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Holds back the entries of one sequence until the text they belong to is given out.

    Tokens without text of their own (the end, a stop string) are left out when the answer ends with "stop".
    """

    def __init__(self, tokenizer: Tokenizer, start: int) -> None:
        """`start`: characters of the echoed prompt before the generated text."""
        self._detokenizer = Detokenizer(tokenizer)
        self._length = start
        self._shown = start
        self._waiting: list[Entry] = []

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], text: str, finish: str | None
    ) -> list[Entry]:
        """Entries whose text has begun, now that `text` is out as well."""
        for token, own in zip(tokens, logprobs, strict=True):
            self._waiting.append(Entry(token, self._length, own))
            self._length += len(self._detokenizer.push(token))
        self._shown += len(text)
        if finish == "length":
            out, self._waiting = self._waiting, []
            return out
        count = sum(entry.offset < self._shown for entry in self._waiting)  # offsets ascend
        out, self._waiting = self._waiting[:count], self._waiting[count:]
        return out


def prompt_entries(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], silent: int, length: int
) -> list[Entry]:
    """Entries of an echoed prompt of `length` characters whose first `silent` tokens the tokenizer added by itself."""
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    entries: list[Entry] = []
    offset = 0
    for index, (token, own) in enumerate(zip(tokens, logprobs, strict=True)):
        entries.append(Entry(token, min(offset, length), own))
        if index >= silent:
            offset += len(detokenizer.push(token))
    return entries


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
