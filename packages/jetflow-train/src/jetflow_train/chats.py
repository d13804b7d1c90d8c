"""Conversations as tokens, with the loss mask: which of them the model itself would have to generate.

The chat template is applied as serving applies it: `Tokenizer.encode_chat` of the messages before an answer, with the
assistant's turn opened, is the very prompt that a server would be asked. The answer is what follows that prompt in the
whole conversation's tokens, up to and with the first end token. So the mask knows no template: thinking, tool
calls and headers fall on the right side of the border by construction.

Templates that rewrite earlier turns (Qwen3 drops the thinking of answered questions) are followed turn by turn: between
one answer's end and the next answer's start, prompt and conversation must hold the same tokens. Where they do
not, the border would be a guess, and the template is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from jetflow_core.tokenizer import Tokenizer

Span = tuple[int, int]


@dataclass(frozen=True)
class Chat:
    """A conversation: OpenAI-style messages, tool declarations, and further variables of the chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])

    def encode(self, tokenizer: Tokenizer, count: int | None = None, *, opened: bool) -> list[int]:
        """Token ids of the first `count` messages, with the assistant's turn `opened` or not."""
        return tokenizer.encode_chat(
            self.messages[:count], self.tools, add_generation_prompt=opened, **self.template_kwargs
        )

    @property
    def question(self) -> Chat:
        """The messages before the trailing answers: what the model is asked."""
        count = len(self.messages)
        while count and self.messages[count - 1].get("role") == "assistant":
            count -= 1
        return Chat(self.messages[:count], self.tools, self.template_kwargs)


@dataclass(frozen=True)
class Tokens:
    """Token ids and the half-open ranges of them that carry the loss, ascending."""

    ids: list[int]
    spans: list[Span]


def read_chat(value: Mapping[str, Any], where: str) -> Chat:
    """The conversation of a JSON object: `messages`, or `prompt` and perhaps `response`; `tools` and
    `chat_template_kwargs` where given. Raises ValueError beginning with `where`.
    """
    messages: Any = value.get("messages")
    if messages is None:
        for key in ("prompt", "response"):
            if key in value and not isinstance(value[key], str):
                raise ValueError(f"{where}: {key!r} must be a text")
        messages = [{"role": "user", "content": value.get("prompt", "")}]
        if "response" in value:
            messages.append({"role": "assistant", "content": value["response"]})
        if not str(messages[0]["content"]).strip():
            raise ValueError(f"{where}: 'prompt' is missing or empty")
    tools, variables = value.get("tools"), value.get("chat_template_kwargs") or {}
    if not _is_list_of_objects(messages) or not messages:
        raise ValueError(f"{where}: 'messages' must be a non-empty list of objects")
    if tools is not None and not _is_list_of_objects(tools):
        raise ValueError(f"{where}: 'tools' must be a list of objects")
    if not isinstance(variables, dict):
        raise ValueError(f"{where}: 'chat_template_kwargs' must be an object")
    if reserved := {"messages", "tools", "add_generation_prompt", "self"} & variables.keys():
        raise ValueError(f"{where}: 'chat_template_kwargs' may not set {min(reserved)!r}")
    return Chat([_template_message(each, where) for each in messages], tools or None, variables)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in cast("list[object]", value))


def _template_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message as templates read it: the arguments of tool calls are objects there, not text."""
    calls: list[Any] = []
    given: Any = message.get("tool_calls") or []
    if not isinstance(given, list):
        raise ValueError(f"{where}: 'tool_calls' must be a list of objects with a 'function'")
    for call in cast("list[Any]", given):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError(f"{where}: 'tool_calls' must be a list of objects with a 'function'")
        arguments: Any = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise ValueError(f"{where}: the arguments of a tool call are not JSON ({error})") from error
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message


def chat_tokens(tokenizer: Tokenizer, chat: Chat) -> Tokens:
    """The conversation up to its last answer, and the spans of all answers in it; no spans where there is no answer.

    A token that holds the end of a header and the beginning of an answer at once (the model would not generate it)
    counts as header. Raises ValueError for messages the template cannot express, an answer that nothing precedes, and a
    template whose borders are ambiguous.
    """
    answers = [index for index, message in enumerate(chat.messages) if message.get("role") == "assistant"]
    if not answers:
        return Tokens([], [])
    if answers[0] == 0:
        raise ValueError("messages[0] is an answer; a conversation begins with a question")
    ids = chat.encode(tokenizer, answers[-1] + 1, opened=False)
    spans = _Borders(tokenizer, chat, answers).spans(ids, len(answers), closed=True)
    return Tokens(ids[: spans[-1][1]], spans)


def text_tokens(tokenizer: Tokenizer, text: str) -> Tokens:
    """Raw text: every token but the first carries the loss."""
    ids = tokenizer.encode(text, allow_special=True, add_special=True)
    return Tokens(ids, [(1, len(ids))] if len(ids) > 1 else [])


class _Borders:
    """Finds a conversation's answers in its tokens. `answers` are the numbers of the assistant's messages."""

    def __init__(self, tokenizer: Tokenizer, chat: Chat, answers: list[int]) -> None:
        self._tokenizer, self._chat, self._answers = tokenizer, chat, answers
        self._ends = frozenset(tokenizer.eos_token_ids)
        self._tails: dict[int, list[int]] = {}

    def spans(self, ids: list[int], count: int, closed: bool) -> list[Span]:
        """Spans of the first `count` answers in `ids`, a rendering that ends with the last of them (`closed`) or goes on."""
        spans: list[Span] = []
        for number in range(count):
            before = spans[-1][1] if spans else 0
            start = before + self._opening(number, ids[before:])
            end = next((i + 1 for i in range(start, len(ids)) if ids[i] in self._ends), None)
            if end is None:
                if not closed or number + 1 < count:
                    raise self._ambiguous(number, "it does not end the answer with one of the target's end tokens")
                end = len(ids)
            spans.append((start, end))
        return spans

    def _opening(self, number: int, rest: list[int]) -> int:
        """How many tokens of `rest`, the conversation after the previous answer, come before this answer."""
        tail = self._tail(number)
        same = next((i for i, (a, b) in enumerate(zip(tail, rest, strict=False)) if a != b), min(len(tail), len(rest)))
        if same == len(tail):
            return same
        if same < len(tail) - self._header_length(number) + 1:
            raise self._ambiguous(number, "the messages before it are rendered differently in its prompt")
        missing = self._tokenizer.decode(tail[same:], skip_special=False)
        following = self._tokenizer.decode(rest[same : same + 1], skip_special=False)
        if same + 1 == len(tail) and following.startswith(missing):
            return same + 1  # one token holds the header's end and the answer's beginning
        if missing.replace("<think>", "").replace("</think>", "").strip():
            raise self._ambiguous(number, f"its prompt opens the turn with {missing!r}, the conversation does not")
        return same  # the thinking block that the prompt opens is not kept in the conversation

    def _tail(self, number: int) -> list[int]:
        """The prompt of an answer, from the previous answer's end on."""
        if number not in self._tails:
            opened = self._chat.encode(self._tokenizer, self._answers[number], opened=True)
            earlier = self.spans(opened, number, closed=False)
            self._tails[number] = opened[earlier[-1][1] if earlier else 0 :]
        return self._tails[number]

    def _header_length(self, number: int) -> int:
        """How many tokens open the assistant's turn."""
        opened, closed = (self._chat.encode(self._tokenizer, self._answers[number], opened=o) for o in (True, False))
        if opened[: len(closed)] != closed:
            raise self._ambiguous(number, "opening the assistant's turn changes what comes before it")
        return len(opened) - len(closed)

    def _ambiguous(self, number: int, reason: str) -> ValueError:
        return ValueError(
            f"messages[{self._answers[number]}]: the chat template leaves the answer's borders ambiguous: {reason}; "
            "split the conversation, or give token rows"
        )


def prompt_key(tokenizer: Tokenizer, chat: Chat) -> str:
    """What names a prompt's content: its tokens up to the first answer, whatever thinking mode it is asked in."""
    roles = [message.get("role") for message in chat.messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    return tokens_key(tokenizer.encode_chat(chat.messages[:first], chat.tools))


def tokens_key(ids: Sequence[int]) -> str:
    """A hash of token ids."""
    return content_key(list(ids))


def content_key(value: Any) -> str:
    """A hash of JSON-like data, the order of keys aside."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
