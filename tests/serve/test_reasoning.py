"""Reasoning is told apart from the answer: in any pieces, opened by prompt or model, finished or not, only where it exists."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetflow_serve.chat import ChatParser, ChatStyle, Reasoning, Text, Thinking
from serve.support import CHAT, CHATML, END, MODEL, ScriptedEngine, byte_tokenizer, events, serving

# As Qwen3: the model opens the block itself; switched off, the prompt holds an empty one.
MAY = CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
OPENED = CHATML.replace(
    "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
)  # as DeepSeek-R1 and Qwen3-Thinking
THOUGHT = "<think>\nLet me see.\n</think>\n\nParis."


def split(text: str, thinking: Thinking) -> tuple[str, str]:
    """Reasoning and content, letter by letter."""
    parser = ChatParser(ChatStyle(thinking=thinking))
    pieces = [piece for letter in text for piece in parser.push(letter)] + parser.flush()
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return reasoning, "".join(piece.text for piece in pieces if isinstance(piece, Text))


def reference(text: str, opened: bool) -> tuple[str, str]:
    """The same in one look at the whole text."""
    match = re.match(r"\s*<think>(.*)" if not opened else r"(?:\s*<think>)?(.*)", text, re.DOTALL)
    if match is None:
        return "", text
    thought, end, answer = match[1].partition("</think>")
    return thought.strip(), answer.lstrip() if end else ""


@given(st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "a", " ", "\n", "é "]), max_size=9).map("".join))
def test_streaming_equals_one_look_at_the_whole(text: str) -> None:
    assert split(text, "may") == reference(text, opened=False)
    assert split(text, "opened") == reference(text, opened=True)
    assert split(text, "never") == ("", text)


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        ("may", THOUGHT, ("Let me see.", "Paris.")),
        ("may", "Paris.", ("", "Paris.")),
        ("may", " Paris: <think>", ("", " Paris: <think>")),
        ("may", "<think>\n\n</think>\n\nParis.", ("", "Paris.")),
        ("may", "<think>\nLet me", ("Let me", "")),
        ("opened", "Let me see.\n</think>\n\nParis.", ("Let me see.", "Paris.")),
        ("opened", THOUGHT, ("Let me see.", "Paris.")),  # some models repeat the tag
        ("opened", "Let me see. </thi", ("Let me see. </thi", "")),
        ("may", "", ("", "")),
        ("opened", "", ("", "")),
    ],
)
def test_cases(thinking: Thinking, text: str, expected: tuple[str, str]) -> None:
    assert split(text, thinking) == expected


# -- over HTTP --------------------------------------------------------------------------------------------------------


def ask(template: str, text: str, **options: Any) -> Any:
    """The first choice of an answer that is `text`."""
    tokenizer = byte_tokenizer(template)
    engine = ScriptedEngine(lambda _: [*tokenizer.encode(text, allow_special=False), END], 3, tokenizer=tokenizer)
    body = {"messages": [{"role": "user", "content": "Capital of France?"}]} | options
    with serving(engine) as running, running.client() as client:
        choice = client.post(CHAT, json=body).json()["choices"][0]
        deltas = [chunk["choices"][0]["delta"] for chunk in events(client.post(CHAT, json=body | {"stream": True}))]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (choice["message"].get(name) or "")
    return choice


def answer(*args: Any, **options: Any) -> tuple[str | None, str | None]:
    message = ask(*args, **options)["message"]
    return message.get("reasoning_content"), message["content"]


def test_a_block_of_the_model() -> None:
    assert answer(MAY, THOUGHT) == ("Let me see.", "Paris.")
    assert answer(MAY, "Paris.") == (None, "Paris.")


def test_a_block_that_the_prompt_opened() -> None:
    assert answer(OPENED, "Let me see.\n</think>\n\nParis.") == ("Let me see.", "Paris.")


def test_an_unfinished_block_is_reasoning() -> None:
    choice = ask(OPENED, "Let me see.", max_tokens=6)
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "Let me"}
    assert choice["finish_reason"] == "length"


def test_thinking_switched_off() -> None:
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    assert answer(MAY, "<think> is a tag.", **options) == (None, "<think> is a tag.")


def test_a_model_that_does_not_think_keeps_its_text() -> None:
    assert answer(CHATML, THOUGHT) == (None, THOUGHT)


def test_a_request_decides() -> None:
    assert answer(MAY, THOUGHT, separate_reasoning=False) == (None, THOUGHT)
    assert answer(OPENED, "Hm.\n</think>\n\nParis.", separate_reasoning=False) == (None, "Hm.\n</think>\n\nParis.")
    assert answer(CHATML, THOUGHT, separate_reasoning=True) == ("Let me see.", "Paris.")
    assert answer(MAY, THOUGHT, separate_reasoning=None) == ("Let me see.", "Paris.")


READS = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}",
)


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (READS, "<think>Let me see.</think>"),
        (MAY, "<think>\nLet me see.\n</think>\n\n"),  # knows blocks, but not the field
        (CHATML, None),
    ],
)
@pytest.mark.parametrize("content", ["Paris.", None])
def test_earlier_reasoning(template: str, written: str | None, content: str | None) -> None:
    seen: list[str] = []
    tokenizer = byte_tokenizer(template)

    def script(prompt: list[int]) -> list[int]:
        seen.append(tokenizer.decode(prompt))
        return [END]

    messages = [
        {"role": "assistant", "content": content, "reasoning_content": "Let me see."},
        {"role": "user", "content": "Sure?"},
    ]
    with serving(ScriptedEngine(script, tokenizer=tokenizer)) as running, running.client() as client:
        response = client.post(CHAT, json={"messages": messages})
    if written is None:
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    else:
        assert seen[0].startswith(f"assistant\n{written}{content or ''}\nuser\nSure?")


def test_the_official_client_reads_it() -> None:
    tokenizer = byte_tokenizer(MAY)
    engine = ScriptedEngine(lambda _: [*tokenizer.encode(THOUGHT, allow_special=False), END], tokenizer=tokenizer)
    with serving(engine) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        message: Any = (
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "?"}]).choices[0].message
        )
    assert (message.reasoning_content, message.content) == ("Let me see.", "Paris.")
