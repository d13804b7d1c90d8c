"""Text and token ids: encoding that keeps control tokens out of user text, chat prompts, incremental decoding."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import cast

import tokenizers

from jetflow_core.chat_template import ChatTemplate, Message, prepare_messages
from jetflow_core.config_fields import Fields, read_json
from jetflow_core.model_config import ModelConfig
from jetflow_core.tensor_source import CheckpointError
from jetflow_core.token_bytes import TokenBytes

_PRIVATE = range(0xF0000, 0xFFF00, 0x100)  # supplementary private-use characters, in blocks
REPLACEMENT = "\ufffd"


class Tokenizer:
    """A `tokenizers` tokenizer with its special ids and chat template. Safe to use from several threads.

    Attributes:
        size: number of ids known; rows of a padded vocabulary beyond it have no text.
        byte_ids: ids of single-byte tokens (`<0x0A>`); none in byte-level vocabularies.
        special_ids: ids of control tokens (`<|im_end|>` and the like), left out of decoded text.
        eos_token_ids: ids that end a generation.
        bos_token_id: the id a sequence starts with, or None.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Wrap `inner`.

        Args:
            inner: the tokenizer; truncation and padding that its file asks for are switched off.
            eos_token_ids: ids that end a generation.
            special_tokens: texts of named tokens ("bos_token", "eos_token", …), which templates may print.
            chat_template: jinja source, or None for a model without chat.
        """
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._lock = threading.Lock()
        added = {token.content: (number, token) for number, token in inner.get_added_tokens_decoder().items()}
        self._special = {content: token for content, (_, token) in added.items() if token.special and content}
        self._special_ids = {content: added[content][0] for content in self._special}
        self._named = dict(special_tokens or {})
        self._template = None if chat_template is None else ChatTemplate(chat_template)
        self.size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids = frozenset(self._special_ids.values())
        # Tokens that stand for one byte, in vocabularies that spell unknown characters so.
        bytes_found = (inner.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_ids = frozenset(number for number in bytes_found if number is not None)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.bos_token_id = inner.token_to_id(self._named["bos_token"]) if "bos_token" in self._named else None

    # -- text ---------------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, allow_special: bool, add_special: bool = False) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any text. A lone surrogate, which no UTF-8 text holds, raises `ValueError`.
            allow_special: whether control tokens written in `text` become their ids; otherwise they are plain text.
            add_special: whether to add what the tokenizer puts around a sequence (a BOS token for some families).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text holds a lone surrogate at position {error.start}, which is not valid Unicode"
            ) from None
        with self._lock:  # the switch is a property of the shared tokenizer
            self._inner.encode_special_tokens = not allow_special
            return self._inner.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; ids beyond `size` have none, bytes that are no character become U+FFFD."""
        return self._inner.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for, control tokens spelled out; they need not be whole characters."""
        return self._token_bytes(token)

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self._inner)

    # -- chat ---------------------------------------------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        """Whether chat prompts can be made."""
        return self._template is not None

    @property
    def template_variables(self) -> frozenset[str]:
        """Names the chat template reads, e.g. "tools" and "enable_thinking"; empty without a template."""
        return frozenset() if self._template is None else self._template.variables

    @property
    def template_thinks(self) -> bool:
        """Whether the chat template knows `<think>` blocks, so that answers may begin with one."""
        return self._template is not None and self._template.thinks

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: OpenAI-style messages: role, content (text or a list of text parts), tool_calls, ….
            tools: OpenAI-style function declarations.
            add_generation_prompt: whether to open the assistant's turn.
            kwargs: further variables the template reads, e.g. `enable_thinking`.

        Raises:
            ValueError: without a template; for a role, field or variable the template cannot express; for a template
                that fails, reaches for what the sandbox forbids, or does too much work.
        """
        template = self._required_template()
        return template.render(prepare_messages(messages, template), tools, add_generation_prompt, self._named, kwargs)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> list[int]:
        """Token ids of a conversation: the template's control tokens as ids, those typed in a message as plain text.

        Arguments and errors are those of `apply_chat_template`.
        """
        template = self._required_template()
        prepared = prepare_messages(messages, template)
        guard = _Guard(tuple(self._special), (prepared, tools, kwargs))
        text = template.render(
            cast("list[dict[str, object]]", guard.hide(prepared)),
            cast("Sequence[Mapping[str, object]] | None", guard.hide(tools)),
            add_generation_prompt,
            self._named,
            cast("dict[str, object]", guard.hide(kwargs)),
        )
        if not guard.used:
            return self.encode(text, allow_special=True)
        return self._encode_hidden(text, guard)

    def _encode_hidden(self, text: str, guard: _Guard) -> list[int]:
        """Encode around the template's own control tokens, restoring the hidden ones as plain text between them."""
        pieces = self._special_pattern.split(text)  # text, control token, text, …
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            if index % 2:
                ids.append(self._special_ids[piece])
                continue
            # Some control tokens swallow the white space beside them.
            after = piece.lstrip() if index and self._special[pieces[index - 1]].rstrip else piece
            last = index + 1 == len(pieces) or not self._special[pieces[index + 1]].lstrip
            ids += self.encode(guard.restore(after if last else after.rstrip()), allow_special=False)
        return ids

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        contents = sorted(self._special, key=len, reverse=True)  # the longest wins, as in the tokenizer
        return re.compile("(" + "|".join(map(re.escape, contents)) + ")")

    def _required_template(self) -> ChatTemplate:
        if self._template is None:
            raise ValueError("this model has no chat template; use plain completions")
        return self._template


class _Guard:
    """Hides control tokens inside user text from a template and from the encoder.

    Each character of a control token found in user text becomes a private-use character that the text does not hold,
    one for one, so that a template which splits, strips or measures the text still works. A beginning or end that could
    form a control token together with the template's text next to it is hidden as well.
    """

    def __init__(self, special: Sequence[str], user: object) -> None:
        self.used = False
        alphabet = sorted({character for content in special for character in content})
        texts = "".join(_strings(user))
        free = (base for base in _PRIVATE if not any(base <= ord(character) < base + 0x100 for character in set(texts)))
        base = next(free, None)
        if base is None or len(alphabet) > 0x100:
            raise ValueError(
                "the messages use up all private-use characters; control tokens in them cannot be told apart"
            )
        self._hidden = {ord(character): base + index for index, character in enumerate(alphabet)}
        self._shown = {value: key for key, value in self._hidden.items()}
        heads = {content[:size] for content in special for size in range(1, len(content))}
        tails = {content[size:] for content in special for size in range(1, len(content))}
        whole = sorted(special, key=len, reverse=True)
        choices = [
            *map(re.escape, whole),
            *(rf"\A{re.escape(tail)}" for tail in sorted(tails, key=len, reverse=True)),
            *(rf"{re.escape(head)}\Z" for head in sorted(heads, key=len, reverse=True)),
        ]
        self._pattern = re.compile("|".join(choices)) if special else None

    def hide(self, value: object) -> object:
        """`value` with control tokens hidden in every string it holds, keys included."""
        if isinstance(value, str):
            return value if self._pattern is None else self._pattern.sub(self._hide_match, value)
        if isinstance(value, Mapping):
            items = cast("Mapping[object, object]", value).items()
            return {self.hide(key): self.hide(item) for key, item in items}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in cast("Sequence[object]", value)]
        return value

    def _hide_match(self, match: re.Match[str]) -> str:
        self.used = True
        return match.group().translate(self._hidden)

    def restore(self, text: str) -> str:
        """`text` with the hidden characters shown again."""
        return text.translate(self._shown)


def _strings(value: object) -> list[str]:
    """Every string inside nested JSON-like data."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value).items()
        return [text for pair in pairs for item in pair for text in _strings(item)]
    if isinstance(value, list | tuple):
        return [text for item in cast("Sequence[object]", value) for text in _strings(item)]
    return []


class Detokenizer:
    """Turns ids that arrive one by one into text, never giving out half a character.

    The pieces given out, joined, are `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset[int]()
        # The ids behind the last piece given out are decoded again as context: some decoders drop a space at the start.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Add an id; returns the new text, empty while a character is incomplete."""
        if token in self._skip:
            return ""
        self._pending.append(token)
        new = self._new_text()
        # A run of byte tokens is decoded as a whole: one wrong byte at its end changes what the earlier ones mean.
        if not new or new.endswith(REPLACEMENT) or token in self._tokenizer.byte_ids:
            return ""
        self._context, self._pending = self._pending, []
        self._context_text = self._tokenizer.decode(self._context, skip_special=False)
        return new

    def peek(self) -> str:
        """What `flush` would return now."""
        return self._new_text()

    def flush(self) -> str:
        """The rest at the end of the ids: U+FFFD for a character that never became complete."""
        rest = self._new_text()
        self._context, self._context_text, self._pending = [], "", []
        return rest

    def _new_text(self) -> str:
        text = self._tokenizer.decode(self._context + self._pending, skip_special=False)
        return text[len(self._context_text) :]


# -- files ------------------------------------------------------------------------------------------------------------


def load_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder (`tokenizer.json`), or None when the folder has none.

    Raises `CheckpointError` naming the file when it is malformed or knows more ids than the model has rows.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for any malformed file
        raise CheckpointError(f"{path}: not a tokenizer file: {error}") from None
    try:
        named, template = _read_tokenizer_config(folder)
        tokenizer = build_tokenizer(inner, named, template, config)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: {error}") from None
    if tokenizer.size > config.vocab_size:
        raise CheckpointError(f"{path}: knows {tokenizer.size} ids, the model has vocab_size = {config.vocab_size}")
    return tokenizer


def build_tokenizer(
    inner: tokenizers.Tokenizer, named: Mapping[str, str], template: str | None, config: ModelConfig
) -> Tokenizer:
    """A `Tokenizer` whose end tokens are the model's and its own `eos_token`."""
    own = inner.token_to_id(named["eos_token"]) if "eos_token" in named else None
    eos = (*config.eos_token_ids, *(() if own is None else (own,)))
    return Tokenizer(inner, eos_token_ids=eos, special_tokens=named, chat_template=template)


def _read_tokenizer_config(folder: Path) -> tuple[dict[str, str], str | None]:
    """Named special tokens and the chat template: `chat_template.jinja` if there, else the config's."""
    path = folder / "tokenizer_config.json"
    data = read_json(path) if path.is_file() else {}
    named: dict[str, str] = {}
    for key, value in data.items():
        # Older files spell a token as an object.
        text = cast("dict[str, object]", value).get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            named[key] = text
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return named, separate.read_text(encoding="utf-8")
    return named, _pick_template(data.get("chat_template"), str(path))


def _pick_template(value: object, source: str) -> str | None:
    """A template, or the one called "default" of a list of named ones."""
    if isinstance(value, list):
        entries = [Fields(cast("dict[str, object]", entry), source) for entry in cast("list[object]", value)]
        value = next((entry.string("template") for entry in entries if entry.string("name") == "default"), None)
    if value is not None and not isinstance(value, str):
        raise ValueError("chat_template: expected a string or a list of named templates")
    return value
