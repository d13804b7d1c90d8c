"""The text of a chat answer taken apart as it comes: reasoning, content and tool calls.

Reasoning is a `<think>…</think>` block at the beginning, or the rest of one that the prompt opened. Tool calls are written as
Qwen3 and Hermes models do, `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. What is not a well-formed call of a declared
function stays text. The result does not depend on the pieces that the text comes in.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, NoReturn

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)

Thinking = Literal["never", "may", "opened"]


class Text(NamedTuple):
    """A piece of what the user reads."""

    text: str


class Reasoning(NamedTuple):
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class Call:
    """A whole tool call; `arguments` is the text of a JSON object."""

    index: int
    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)


Piece = Text | Reasoning | Call


@dataclass(frozen=True)
class ChatStyle:
    """What to look for in an answer. The default finds nothing: all of it is text.

    `tools`: names of the functions that may be called. `thinking`: whether the answer may begin with `<think>`, or goes on with a
    block that the prompt opened. `separate`: reasoning is told apart; otherwise it is text, tags included.
    """

    tools: Collection[str] = ()
    thinking: Thinking = "never"
    separate: bool = True


class ChatParser:
    """Takes one answer's text piece by piece. A piece that may be part of a tag, or white space before one, is held back."""

    def __init__(self, style: ChatStyle) -> None:
        self._style = style
        self._held = ""
        self._state = self._content if style.thinking == "never" else self._start
        self._trim = False  # white space that comes next is no part of the answer
        self._space = ""  # white space before a call that is not complete
        self._calls = 0

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` makes certain."""
        self._held += text
        return list(self._run(last=False))

    def flush(self) -> list[Piece]:
        """What is held back, when no more text comes."""
        return list(self._run(last=True))

    def _run(self, last: bool) -> Iterator[Piece]:
        """Let each state take what it can from the held text, until none goes on."""
        while True:
            state = self._state
            yield from state(last)
            if self._state == state:
                return

    def _start(self, last: bool) -> Iterator[Piece]:
        """Before the first word: is it `<think>`?"""
        word = self._held.lstrip()
        if len(word) < len(THINK) and THINK.startswith(word) and not last:
            return
        opened = word.startswith(THINK)
        if opened:
            word = word.removeprefix(THINK)
            if not self._style.separate:
                yield from self._give(Text, self._held[: len(self._held) - len(word)])
            self._held = word
        if opened or self._style.thinking == "opened":
            self._trim = self._style.separate
            self._state = self._reasoning
        else:
            self._state = self._content

    def _reasoning(self, last: bool) -> Iterator[Piece]:
        before, end, after = self._held.partition(END_THINK)
        if not self._style.separate:
            kept = "" if end or last else _beginning(before, END_THINK)
            yield from self._give(Text, before[: len(before) - len(kept)] + end)
        else:
            kept = "" if end or last else _tail(before, END_THINK)
            shown = before[: len(before) - len(kept)]
            yield from self._give(Reasoning, shown.rstrip() if end or last else shown)
        self._held = after if end else kept
        if end:
            self._trim = self._style.separate
            self._state = self._content

    def _content(self, last: bool) -> Iterator[Piece]:
        if not self._style.tools:
            yield from self._give(Text, self._held)
            self._held = ""
            return
        before, call, after = self._held.partition(CALL)
        if call:
            self._space = before[len(before.rstrip()) :]
            yield from self._give(Text, before.rstrip())
            self._held, self._state = after, self._call
            return
        self._held = "" if last else _tail(before, CALL)
        yield from self._give(Text, before[: len(before) - len(self._held)])

    def _call(self, last: bool) -> Iterator[Piece]:
        body, rest = self._split_call(last)
        if body is None:
            return
        parsed = _parse_call(body, self._style.tools)
        self._state = self._content
        if parsed is None:  # the tag is text, and what follows it may hold a call
            yield from self._give(Text, self._space + CALL)
        else:
            yield Call(self._calls, *parsed)
            self._calls += 1
            self._held, self._trim = rest, True

    def _split_call(self, last: bool) -> tuple[str | None, str]:
        """The call's text up to its end tag (one inside a JSON string does not count), and what follows; None: not there yet."""
        end = self._held.find(END_CALL)
        while end >= 0 and '"' in _JSON_STRING.sub("", self._held[:end]):
            end = self._held.find(END_CALL, end + 1)
        if end >= 0:
            return self._held[:end], self._held[end + len(END_CALL) :]
        return (self._held if last else None), ""

    def _give(self, kind: type[Text | Reasoning], text: str) -> Iterator[Piece]:
        if self._trim:
            text = text.lstrip()
        if text:
            self._trim = False
            yield kind(text)


def _beginning(text: str, tag: str) -> str:
    """The longest end of `text` that begins `tag`."""
    return next((tag[:size] for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), "")


def _tail(text: str, tag: str) -> str:
    """The end of `text` that is no text if `tag` follows: white space, then a beginning of the tag."""
    rest = text[: len(text) - len(_beginning(text, tag))].rstrip()
    return text[len(rest) :]


def _parse_call(body: str, tools: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments of a well-formed call of one of `tools`."""
    try:
        call = json.loads(body, parse_constant=_refuse_constant)
        arguments = json.dumps(call.get("arguments", {}), ensure_ascii=False, allow_nan=False)
        arguments.encode()
    except (ValueError, AttributeError, RecursionError):  # not JSON, no object, or no text of valid Unicode
        return None
    name = call.get("name")
    if not isinstance(name, str) or name not in tools or not arguments.startswith("{"):
        return None
    return name, arguments


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
