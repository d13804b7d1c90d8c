"""Prompt files: JSONL of `{"id", "turns"}` (the first turn is asked), `{"messages"}` or `{"prompt"}`.

A chat's trailing answers are taken off: what is asked is the conversation before them. `tools` and `chat_template_kwargs`
go into the template; an object without an `id` gets one from its content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jetflow_core.tokenizer import Tokenizer
from jetflow_train.chats import Chat, content_key, read_chat
from jetflow_train.data import read_jsonl

SAMPLES = Path(__file__).parent / "prompts.jsonl"
EVALUATION = Path(__file__).parent / "evaluation.jsonl"


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for an answer, under a name."""

    id: str
    chat: Chat


def read_prompts(path: Path, suffix: str = "", limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file, `suffix` appended to the last message of each.

    Raises ValueError naming file and line for a missing key or an empty file.
    """
    prompts: list[Prompt] = []
    for number, value in read_jsonl(path):
        if limit is not None and len(prompts) == limit:
            break
        where = f"{path}, line {number}"
        chat = _first_turn(value, where) if "turns" in value else _question(value, where)
        prompts.append(Prompt(str(value.get("id", content_key(value))), _with_suffix(chat, suffix, where)))
    if not prompts:
        raise ValueError(f"{path}: no prompts in this file")
    return prompts


def _first_turn(value: dict[str, Any], where: str) -> Chat:
    turns = value["turns"]
    if "id" not in value or not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: a prompt needs 'id' and a non-empty list 'turns'")
    if not isinstance(turns[0], str) or not turns[0].strip():
        raise ValueError(f"{where}: the first turn must be a text")
    return read_chat({**value, "messages": [{"role": "user", "content": turns[0]}]}, where)


def _question(value: dict[str, Any], where: str) -> Chat:
    if "messages" not in value and "prompt" not in value:
        raise ValueError(f"{where}: a prompt needs 'id' and a non-empty list 'turns', or 'messages', or 'prompt'")
    chat = read_chat(value, where).question
    if not chat.messages:
        raise ValueError(f"{where}: nothing in 'messages' asks for an answer")
    return chat


def _with_suffix(chat: Chat, suffix: str, where: str) -> Chat:
    if not suffix:
        return chat
    last = chat.messages[-1]
    if not isinstance(last.get("content"), str):
        raise ValueError(f"{where}: the suffix needs a last message of plain text")
    return replace(chat, messages=[*chat.messages[:-1], {**last, "content": last["content"] + suffix}])


def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], max_length: int, source: str, remedy: str
) -> list[list[int]]:
    """Token ids under the chat template, the assistant's turn opened.

    Raises ValueError for a prompt that the template cannot express, or that leaves no room; `remedy` says what makes room.
    """
    encoded: list[list[int]] = []
    for prompt in prompts:
        try:
            ids = prompt.chat.encode(tokenizer, opened=True)
        except ValueError as error:
            raise ValueError(f"{source}: prompt {prompt.id}: {error}") from error
        if len(ids) >= max_length:
            raise ValueError(
                f"{source}: prompt {prompt.id} has {len(ids)} tokens, the limit is {max_length} with its answer; "
                f"{remedy}, or remove it"
            )
        encoded.append(ids)
    return encoded
