"""Training rows: tokens and which of them carry the loss, read from JSONL (plain or gzip), and their held-out split.

A file's objects may be mixed:

    {"id", "temperature", "prompt_ids", "output_ids"}   what `regenerate` writes: the target's own answers, as tokens
    {"messages": [...]}                                  a chat, with `tools`, `chat_template_kwargs`; answers carry the loss
    {"prompt", "response"}                               one question and its answer
    {"text"}                                             raw text; all tokens but the first carry the loss

The last three are the corpus: they are tokenised with the target's tokenizer and chat template, and have no temperature.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from jetflow_core.tokenizer import Tokenizer
from jetflow_train.chats import (
    Span,
    chat_tokens,
    content_key,
    prompt_key,
    read_chat,
    text_tokens,
    tokens_key,
)

CORPUS_KEYS = ("messages", "response", "text", "turns")


@dataclass(frozen=True)
class Row:
    """A prompt and what follows it. Loss and anchors live on the tokens of `spans`.

    `temperature` is the one the target answered at; None says that the answer is not the target's own. `ignored` are
    half-open ranges of `tokens`, ascending, behind the prompt that carry no loss: later questions of a chat. `variant` is
    the JSON of the chat template's variables (thinking on or off), "" for none. Rows of one `prompt_key` have the same
    prompt content; without one it is the hash of `prompt_ids`.
    """

    id: str
    temperature: float | None
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    ignored: tuple[Span, ...] = ()
    sample: int = 0
    variant: str = ""
    prompt_key: str = ""

    def __post_init__(self) -> None:
        if not self.prompt_key:
            object.__setattr__(self, "prompt_key", tokens_key(self.prompt_ids))

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output in one sequence."""
        return self.prompt_ids + self.output_ids

    @property
    def spans(self) -> tuple[Span, ...]:
        """Half-open ranges of `tokens` that carry the loss, ascending."""
        return counted_spans(len(self.prompt_ids), len(self.prompt_ids) + len(self.output_ids), self.ignored)

    @property
    def key(self) -> RowKey:
        """What names the row."""
        return self.id, self.temperature, self.sample, self.variant


RowKey = tuple[str, float | None, int, str]


def counted_spans(start: int, end: int, ignored: Sequence[Span]) -> tuple[Span, ...]:
    """The non-empty ranges of `start` … `end` between the `ignored` ones."""
    borders = [start, *(border for span in ignored for border in span), end]
    return tuple((a, b) for a, b in zip(borders[::2], borders[1::2], strict=True) if a < b)


def read_jsonl(path: Path, *, partial_end: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a JSONL file; `.gz` is decompressed. Raises ValueError naming file and line.

    With `partial_end`, a last line without its newline is passed over: what a killed writer leaves.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    with path.open("rb") as raw:
        stream = cast(io.BufferedIOBase, gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw)
        try:
            for number, line in enumerate(stream, start=1):
                if not line.strip() or (partial_end and not line.endswith(b"\n")):
                    continue
                try:
                    value = json.loads(line)
                    if b"\\ud" in line.lower():  # perhaps half of a surrogate pair, which no text may hold
                        json.dumps(value, ensure_ascii=False).encode()
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
                if not isinstance(value, dict):
                    raise ValueError(f"{path}, line {number}: expected an object, found {type(value).__name__}")
                yield number, cast("dict[str, Any]", value)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: damaged gzip file ({error})") from error


def read_rows(paths: Iterable[Path], vocab_size: int, max_length: int, tokenizer: Tokenizer | None = None) -> list[Row]:
    """Rows of all files, in order, without repeats: of one key the first, of one content the coldest.

    Rows without two tokens in a row that carry the loss have nothing to draft and are left out; rows are cut at
    `max_length`. `tokenizer` is needed for chats and text. Raises ValueError for a missing key, ids outside the
    vocabulary, a prompt of `max_length` or more, a conversation the chat template cannot express, no usable row at all.
    """
    rows: dict[RowKey, Row] = {}
    seen = 0
    paths = list(paths)
    for path in paths:
        for number, value in read_jsonl(path):
            seen += 1
            where = f"{path}, line {number}"
            if any(key in value for key in CORPUS_KEYS) and "output_ids" not in value:
                row = _corpus_row(value, where, tokenizer)
            else:
                row = _parse_row(value, where, vocab_size)
            row = row and _cut(row, where, max_length)
            if row is not None and any(end - start >= 2 for start, end in row.spans):
                rows.setdefault(row.key, row)
    names = ", ".join(str(path) for path in paths)
    if not seen:
        raise ValueError(f"{names}: no training rows; run `jetflow-train regenerate` first")
    if not rows:
        raise ValueError(
            f"{names}: every row is masked (none of {seen} has two or more output tokens within {max_length} tokens); "
            "give rows with answers, or raise max_length"
        )
    return _without_copies(rows.values())


def _without_copies(rows: Iterable[Row]) -> list[Row]:
    """One row for each content: the coldest, since greedy rows have one more use (replayed decoding)."""
    kept: dict[tuple[tuple[int, ...], tuple[Span, ...]], Row] = {}
    for row in rows:
        other = kept.setdefault((row.tokens, row.spans), row)
        if _warmth(row) < _warmth(other):
            kept[row.tokens, row.spans] = row
    return list(kept.values())


def _warmth(row: Row) -> float:
    return float("inf") if row.temperature is None else row.temperature


def _parse_row(value: dict[str, Any], where: str, vocab_size: int) -> Row:
    _require(value, {"id", "temperature", "prompt_ids", "output_ids"}, where)
    name, temperature, sample, variant = row_key(value, where)
    prompt, output = (_token_ids(value[key], key, where, vocab_size) for key in ("prompt_ids", "output_ids"))
    if not prompt:
        raise ValueError(f"{where}: 'prompt_ids' is empty")
    return Row(name, temperature, prompt, output, (), sample, variant, str(value.get("prompt_key", "")))


def _corpus_row(value: dict[str, Any], where: str, tokenizer: Tokenizer | None) -> Row | None:
    """A chat or a text as a row; None when no token of it carries the loss."""
    if "turns" in value:
        raise ValueError(
            f"{where}: prompts have no answers to learn from; run `jetflow-train regenerate` on them first"
        )
    if tokenizer is None:
        raise ValueError(f"{where}: this target has no tokenizer; give token rows")
    name = str(value.get("id", content_key(value)))
    variant = ""
    if "text" in value:
        if not isinstance(value["text"], str):
            raise ValueError(f"{where}: 'text' must be a text")
        tokens, key = text_tokens(tokenizer, value["text"]), content_key(value["text"])
    else:
        chat = read_chat(value, where)
        variant = variant_of(chat.template_kwargs)
        try:
            tokens, key = chat_tokens(tokenizer, chat), prompt_key(tokenizer, chat)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    if not tokens.spans:
        return None
    start, end = tokens.spans[0][0], tokens.spans[-1][1]
    ignored = tuple((a[1], b[0]) for a, b in zip(tokens.spans, tokens.spans[1:], strict=False))
    return Row(name, None, tuple(tokens.ids[:start]), tuple(tokens.ids[start:end]), ignored, 0, variant, key)


def _cut(row: Row, where: str, max_length: int) -> Row:
    """The row's first `max_length` tokens. Raises ValueError when that leaves nothing of the answer."""
    prompt = len(row.prompt_ids)
    if prompt >= max_length:
        raise ValueError(
            f"{where}: the prompt has {prompt} tokens, the limit is {max_length}; raise max_length or drop it"
        )
    ignored = tuple((start, min(end, max_length)) for start, end in row.ignored if start < max_length)
    return replace(row, output_ids=row.output_ids[: max_length - prompt], ignored=ignored)


def row_key(value: dict[str, Any], where: str) -> RowKey:
    """(id, temperature, sample, variant), which names a row. Raises ValueError with `where` when the object has no such
    key.
    """
    _require(value, {"id", "temperature"}, where)
    if type(value["temperature"]) not in (int, float) or not 0 <= value["temperature"] < math.inf:
        raise ValueError(f"{where}: 'temperature' must be a number of at least 0, found {value['temperature']!r}")
    if type(value.get("sample", 0)) is not int:
        raise ValueError(f"{where}: 'sample' must be an integer, found {value['sample']!r}")
    return (
        str(value["id"]),
        float(value["temperature"]),
        value.get("sample", 0),
        variant_of(value.get("chat_template_kwargs")),
    )


def variant_of(template_kwargs: Any) -> str:
    """The chat template's variables as one text; "" for none."""
    return json.dumps(template_kwargs, sort_keys=True) if template_kwargs else ""


def _require(value: dict[str, Any], keys: set[str], where: str) -> None:
    if missing := keys - value.keys():
        raise ValueError(f"{where}: missing key {min(missing)!r}")


def _token_ids(value: Any, key: str, where: str, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in cast("list[object]", value)):
        raise ValueError(f"{where}: {key!r} must be a list of token ids")
    ids = tuple(cast("list[int]", value))
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{where}: {key!r} holds id {token}, the target's vocabulary has {vocab_size}")
    return ids


def is_held_out(row: Row, fraction: float) -> bool:
    """Whether a row is kept for evaluation: by its prompt's content, so that every answer to it falls on the same side."""
    return int.from_bytes(_draw(row), "big") < fraction * 2**64


def _draw(row: Row) -> bytes:
    """Eight uniform bytes that depend on the prompt alone."""
    return hashlib.sha256(row.prompt_key.encode()).digest()[:8]


def rows_fingerprint(rows: Sequence[Row]) -> str:
    """A hash of names, tokens and loss masks of `rows`, in order. What a chat template does to a row is in its tokens."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.key, row.prompt_ids, row.output_ids, row.ignored]).encode())
    return digest.hexdigest()


def frequent_tokens(rows: Iterable[Row], size: int, vocab_size: int, always: Iterable[int]) -> list[int]:
    """The draft vocabulary: `size` target ids, ascending: `always`, then the most frequent of those with a loss, then the
    lowest ids.

    Raises ValueError when `size` exceeds the vocabulary or cannot hold `always`.
    """
    kept = dict.fromkeys(always)
    if size > vocab_size or size < len(kept):
        raise ValueError(f"draft_vocab_size {size} must lie between {len(kept)} and the vocabulary's {vocab_size}")
    counts = Counter(token for row in rows for start, end in row.spans for token in row.tokens[start:end])
    ranked = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    for token in (*ranked, *range(vocab_size)):
        if len(kept) == size:
            break
        kept[token] = None
    return sorted(kept)


def spread(rows: Sequence[Row]) -> list[Row]:
    """Rows ordered by a hash of their prompts: held-out ones first, then the rest in a fixed, well-mixed order."""
    return sorted(rows, key=lambda row: (_draw(row), row.prompt_key, _warmth(row), row.id, row.sample, row.variant))
