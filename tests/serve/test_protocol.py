"""Which request bodies are taken, and that every other one is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from jetflow_serve.errors import ApiError, from_validation
from jetflow_serve.protocol import ChatRequest, CompletionRequest

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi"}


def refused(schema: type[BaseModel], body: dict[str, Any]) -> ApiError:
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    error = from_validation(caught.value.errors())
    assert error.status_code == 400
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"05": 1}),
        ("logit_bias", {"5": True}),
        ("logprobs", 1),
        ("top_logprobs", 3),
        ("top_logprobs", 21),
        ("separate_reasoning", "yes"),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("parallel_tool_calls", False),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy"}),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "high"),
        ("web_search_options", {}),
        ("store", True),
        ("metadata", {"a": 1}),
        ("verbosity", "high"),
        ("service_tier", "flex"),
        ("no_such_field", 1),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("min_p", 1.1),
        ("seed", 2**63),
        ("seed", 1.5),
        ("n", 0),
        ("n", 129),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop_token_ids", [-1]),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("echo", True),
        ("best_of", 2),
        ("suffix", "x"),
        ("prompt", "x"),
        ("messages", []),
        ("messages", "hi"),
        ("model", 5),
    ],
)
def test_chat_refuses(field: str, value: Any) -> None:
    error = refused(ChatRequest, CHAT | {field: value})
    assert str(error.body.error.param).split(".")[0] == field
    assert field in error.body.error.message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "messages.0.role"),
        ({"role": "user"}, "messages.0.content"),
        ({"role": "user", "content": 5}, "messages.0.content"),
        ({"role": "user", "content": []}, "messages.0.content"),
        ({"role": "user", "content": "x", "mood": "good"}, "messages.0.mood"),
        ({"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
         "messages.0.tool_calls"),
        ({"role": "user", "content": "x", "reasoning_content": "y"}, "messages.0.reasoning_content"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "messages.0.tool_call_id"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "messages.0.refusal"),
    ],
)  # fmt: skip
def test_message_refusals_name_the_field(message: dict[str, Any], param: str) -> None:
    error = refused(ChatRequest, {"messages": [message]})
    assert error.body.error.param == param


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "null", '"{}"', "[" * 5000, '{"a":' * 70 + "1" + "}" * 70])
def test_arguments_of_earlier_calls_are_json_objects(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    error = refused(ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert error.body.error.param == "messages.0.tool_calls.0.function.arguments"


def test_image_parts_are_refused_by_type() -> None:
    part = {"type": "image_url", "image_url": {"url": "x"}}
    error = refused(ChatRequest, {"messages": [{"role": "user", "content": [part]}]})
    assert str(error.body.error.param).startswith("messages.0.content.0")
    assert "text" in error.body.error.message


NEUTRAL = {
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "store": False,
    "metadata": {"run": "7"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "verbosity": "medium",
    "service_tier": "auto",
    "user": "somebody",
    "functions": [],
}


def test_neutral_values_are_taken() -> None:
    ChatRequest.model_validate(CHAT | NEUTRAL | {"logprobs": False, "top_logprobs": 0})
    ChatRequest.model_validate(CHAT | dict.fromkeys([*NEUTRAL, "logprobs", "stop", "seed", "n", "max_tokens"]))
    CompletionRequest.model_validate(TEXT | {"echo": False, "suffix": None, "logprobs": None, "best_of": 2, "n": 2})


def test_stream_options() -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    ChatRequest.model_validate(CHAT | {"stream": True, "stream_options": usage})
    error = refused(ChatRequest, CHAT | {"stream": True, "stream_options": usage | {"include_usage": False}})
    assert error.body.error.param == "stream_options.continuous_usage_stats"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("echo", 1),
        ("suffix", "end"),
        ("logprobs", True),
        ("logprobs", 21),
        ("top_logprobs", 1),
        ("best_of", 0),
        ("best_of", 129),
        ("response_format", {"type": "text"}),
        ("messages", []),
        ("tools", []),
    ],
)
def test_completion_refuses(field: str, value: Any) -> None:
    assert refused(CompletionRequest, TEXT | {field: value}).body.error.param == field


def test_best_of_is_not_less_than_n_nor_more_in_a_stream() -> None:
    assert CompletionRequest.model_validate(TEXT | {"best_of": 3}).candidates() == 3
    assert CompletionRequest.model_validate(TEXT | {"n": 3}).candidates() == 3
    assert refused(CompletionRequest, TEXT | {"best_of": 2, "n": 3}).body.error.param == "best_of"
    assert refused(CompletionRequest, TEXT | {"best_of": 3, "n": 2, "stream": True}).body.error.param == "best_of"
    CompletionRequest.model_validate(TEXT | {"best_of": 2, "n": 2, "stream": True})


@pytest.mark.parametrize("prompt", [None, [], [[]], [["a"]], [1, "a"], [-1], [1.5], [True], {"a": 1}, 5, [[1], "a"]])
def test_bad_prompts(prompt: Any) -> None:
    error = refused(CompletionRequest, {"prompt": prompt})
    assert str(error.body.error.param).split(".")[0] == "prompt"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", ""], ["a", ""]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompt_forms(prompt: Any, expected: Any) -> None:
    assert CompletionRequest.model_validate({"prompt": prompt}).prompts() == expected


def test_two_names_of_the_limit_must_agree() -> None:
    agree = ChatRequest.model_validate(CHAT | {"max_tokens": 5, "max_completion_tokens": 5})
    assert agree.limit() == 5
    assert refused(ChatRequest, CHAT | {"max_tokens": 5, "max_completion_tokens": 6}).body.error.param == "max_tokens"


def test_nesting_has_a_limit() -> None:
    deep: Any = {}
    for _ in range(63):
        deep = {"a": deep}
    ChatRequest.model_validate(CHAT | {"chat_template_kwargs": deep})
    assert "64 levels" in refused(ChatRequest, CHAT | {"chat_template_kwargs": {"a": deep}}).body.error.message
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": [deep]}}}
    assert str(refused(ChatRequest, CHAT | {"tools": [tool]}).body.error.param).startswith("tools")


def test_lone_surrogates_do_not_break_the_error() -> None:
    assert "unicode" in refused(ChatRequest, CHAT | json.loads('{"\\ud800": 1}')).body.error.message
    assert b"ud800" in ApiError(404, "no model '\ud800'", param="\ud800").response().body


def test_schema_names_the_neutral_values() -> None:
    schema = ChatRequest.model_json_schema()["properties"]
    assert schema["store"]["enum"] == [False, None]
    assert ChatRequest.model_json_schema()["additionalProperties"] is False
