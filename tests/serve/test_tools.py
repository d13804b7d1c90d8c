"""Tool calls: told apart from text wherever the pieces' borders lie, and sent as OpenAI clients expect them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetflow_serve.chat import Call, ChatParser, ChatStyle, Piece, Reasoning, Text
from serve.support import CHAT, END, MODEL, WITH_TOOLS, ScriptedEngine, byte_tokenizer, events, serving

TOOLS = ChatStyle(tools=frozenset({"look", "add"}))
LOOK = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
ADD = '<tool_call>{"arguments":{"a": 1.0, "b": [2, null]}, "name": "add"}</tool_call>'


def parse(text: str, style: ChatStyle = TOOLS, cuts: list[int] | None = None) -> list[Piece]:
    """The merged pieces of `text` given in pieces that end at `cuts`."""
    parser = ChatParser(style)
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts or []), len(text)]
    pieces = [piece for a, b in pairwise(bounds) for piece in parser.push(text[a:b])]
    merged: list[Piece] = []
    for piece in pieces + parser.flush():
        last = merged[-1] if merged else None
        if isinstance(piece, Call) or last is None or type(last) is not type(piece):
            merged.append(piece)
        else:
            assert not isinstance(last, Call)
            merged[-1] = type(piece)(last.text + piece.text)
    return merged


fragments = st.sampled_from(
    [LOOK, ADD, "<tool_call>", "</tool_call>", "<think>", "</think>", "<tool", "_call>", "</", "<", "a", " ", "\n", '"', "{}",
     '{"name": "look", "arguments": {"at": "</tool_call>"}}', '{"name": "look"', "\\", "é"]
)  # fmt: skip
texts = st.lists(fragments, max_size=8).map("".join)
styles = st.builds(
    ChatStyle,
    tools=st.sampled_from([frozenset(), TOOLS.tools]),
    thinking=st.sampled_from(["never", "may", "opened"]),
    separate=st.booleans(),
)


@given(texts, styles, st.lists(st.integers(0, 400), max_size=12))
def test_the_pieces_borders_change_nothing(text: str, style: ChatStyle, cuts: list[int]) -> None:
    whole = parse(text, style)
    assert parse(text, style, cuts) == whole
    assert parse(text, style, list(range(len(text)))) == whole


@given(texts, styles)
def test_what_is_no_call_and_no_reasoning_stays_as_it_is(text: str, style: ChatStyle) -> None:
    pieces = parse(text, style)
    if not any(isinstance(piece, Call | Reasoning) for piece in pieces) and not (
        style.separate and style.thinking != "never"
    ):
        assert pieces == ([Text(text)] if text else [])
    calls = [piece for piece in pieces if isinstance(piece, Call)]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert all(call.name in style.tools and isinstance(json.loads(call.arguments), dict) for call in calls)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LOOK, [Call(0, "look", '{"at": "sky"}')]),
        (f"Let me see.\n\n{LOOK}\n{ADD}\n",
         [Text("Let me see."), Call(0, "look", '{"at": "sky"}'), Call(1, "add", '{"a": 1.0, "b": [2, null]}')]),
        (f"{LOOK} and more", [Call(0, "look", '{"at": "sky"}'), Text("and more")]),
        ('<tool_call>{"name": "look"}</tool_call>', [Call(0, "look", "{}")]),
        ('<tool_call>{"name": "look", "arguments": {}}', [Call(0, "look", "{}")]),  # the end tag may be missing
        ('<tool_call>{"name": "look", "arguments": {"at": "</tool_call>\\""}}</tool_call>',
         [Call(0, "look", '{"at": "</tool_call>\\""}')]),
        ('<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>', [Call(0, "look", '{"at": "é"}')]),
        (f"<tool_call> no, {LOOK}", [Text("<tool_call> no,"), Call(0, "look", '{"at": "sky"}')]),
    ],
)  # fmt: skip
def test_calls(text: str, expected: list[Piece]) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "body",
    [
        "",
        "look",
        "[1]",
        "{}",
        '{"name": "unknown", "arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"name": ["look"], "arguments": {}}',
        '{"name": "look", "arguments": "{}"}',
        '{"name": "look", "arguments": null}',
        '{"name": "look", "arguments": {"a": NaN}}',
        '{"name": "look", "arguments": {"a": 1e999}}',
        '{"name": "look", "arguments": {"a": "\\ud800"}}',
        '{"name": "look", "arguments": {"a": "unfinished}}',
        '{"name": "look", "arguments": ' + '{"a":' * 100_000,
    ],
)
def test_malformed_calls_are_text(body: str) -> None:
    text = f" <tool_call>{body}</tool_call> "
    assert parse(text) == [Text(text)]


# -- over HTTP --------------------------------------------------------------------------------------------------------

FUNCTIONS: Any = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "add"}},
]
QUESTION: Any = [{"role": "user", "content": "What is up?"}]


def engine(text: str, per_step: int = 3) -> ScriptedEngine:
    tokenizer = byte_tokenizer(WITH_TOOLS)
    return ScriptedEngine(
        lambda _: [*tokenizer.encode(text, allow_special=False), END], per_step, tokenizer=tokenizer, max_model_len=4096
    )


def test_the_official_client_gets_calls_and_answers_them() -> None:
    prompts: list[str] = []
    scripted = engine(f"Let me see.\n{LOOK}\n{ADD}")
    script, tokenizer = scripted.script, scripted.tokenizer
    assert script is not None
    scripted.script = lambda prompt: (prompts.append(tokenizer.decode(prompt)), script(prompt))[1]
    with serving(scripted) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        choice = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=FUNCTIONS).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        calls: Any = choice.message.tool_calls
        assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("function", "look", {"at": "sky"}),
            ("function", "add", {"a": 1.0, "b": [2, None]}),
        ]
        assert len({call.id for call in calls}) == 2
        results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "blue"} for call in calls]
        history = [*QUESTION, choice.message.model_dump(exclude_none=True), *results]
        client.chat.completions.create(model=MODEL, messages=history, tools=FUNCTIONS, tool_choice="auto")
    assert '<call>look {"at": "sky"}</call><call>add {"a": 1.0, "b": [2, null]}</call>' in prompts[1]


def test_streamed_calls_come_in_openai_pieces() -> None:
    with serving(engine(f"Hm.\n{LOOK}{ADD}")) as running:
        with (
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client,
            client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=FUNCTIONS) as stream,
        ):
            final = stream.get_final_completion().choices[0]  # put together by the client itself
        assert final.finish_reason == "tool_calls"
        assert final.message.content == "Hm."
        assert [call.function.arguments for call in final.message.tool_calls or []] == [
            '{"at": "sky"}',
            '{"a": 1.0, "b": [2, null]}',
        ]
        with running.client() as client:
            body = {"messages": QUESTION, "tools": FUNCTIONS, "stream": True}
            deltas = [chunk["choices"][0]["delta"] for chunk in events(client.post(CHAT, json=body))]
    pieces = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [piece["index"] for piece in pieces] == [0, 0, 1, 1]
    assert all(piece["id"].startswith("call_") and piece["type"] == "function" for piece in pieces[::2])
    assert [piece["function"] for piece in pieces[:2]] == [
        {"name": "look", "arguments": ""},
        {"arguments": '{"at": "sky"}'},
    ]
    assert not any("id" in piece or "type" in piece for piece in pieces[1::2])


def test_without_tools_calls_are_text_and_length_stays_length() -> None:
    with serving(engine(LOOK)) as running, running.client() as client:

        def ask(**options: Any) -> Any:
            return client.post(CHAT, json={"messages": QUESTION} | options).json()["choices"][0]

        for options in ({}, {"tools": FUNCTIONS, "tool_choice": "none"}):
            choice = ask(**options)
            assert (choice["message"]["content"], choice["finish_reason"]) == (LOOK, "stop")
            assert "tool_calls" not in choice["message"]
        choice = ask(tools=FUNCTIONS)
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
        cut = ask(tools=FUNCTIONS, max_tokens=20)
        assert (cut["message"]["content"], cut["finish_reason"]) == (LOOK[:20], "length")
        whole = ask(tools=FUNCTIONS, max_tokens=len(LOOK))  # the limit came right after the call
        assert (len(whole["message"]["tool_calls"]), whole["finish_reason"]) == (1, "length")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_choice_that_needs_constrained_decoding_is_refused(choice: Any) -> None:
    with serving(engine("")) as running, running.client() as client:
        body = {"messages": QUESTION, "tools": FUNCTIONS, "tool_choice": choice}
        error = client.post(CHAT, json=body).json()["error"]
    assert (error["param"], error["code"]) == ("tool_choice", "unsupported_value")
