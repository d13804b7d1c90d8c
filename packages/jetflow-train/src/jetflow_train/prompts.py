"""Prompt files: JSONL with `id` and `turns` (the user's messages; the first one is asked)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from jetflow_core.tokenizer import Tokenizer
from jetflow_train.data import read_jsonl

SAMPLES = Path(__file__).parent / "prompts.jsonl"
EVALUATION = Path(__file__).parent / "evaluation.jsonl"


@dataclass(frozen=True)
class Prompt:
    """A user message under a name."""

    id: str
    text: str


def read_prompts(path: Path, suffix: str = "", limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file, `suffix` appended to each.

    Raises ValueError naming file and line for a missing key or an empty file.
    """
    prompts: list[Prompt] = []
    for number, value in read_jsonl(path):
        if limit is not None and len(prompts) == limit:
            break
        turns = value.get("turns")
        if "id" not in value or not isinstance(turns, list) or not turns:
            raise ValueError(f"{path}, line {number}: a prompt needs 'id' and a non-empty list 'turns'")
        first = cast("list[object]", turns)[0]
        if not isinstance(first, str) or not first.strip():
            raise ValueError(f"{path}, line {number}: the first turn must be a text")
        prompts.append(Prompt(str(value["id"]), first + suffix))
    if not prompts:
        raise ValueError(f"{path}: no prompts in this file")
    return prompts


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[Prompt], max_length: int, source: str) -> list[list[int]]:
    """Token ids under the chat template, the assistant's turn opened. Raises ValueError for one that leaves no room."""
    encoded = [tokenizer.encode_chat([{"role": "user", "content": prompt.text}]) for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if len(ids) >= max_length:
            raise ValueError(
                f"{source}: prompt {prompt.id} has {len(ids)} tokens, the limit is {max_length} with its answer; "
                "raise max_length or remove it"
            )
    return encoded
