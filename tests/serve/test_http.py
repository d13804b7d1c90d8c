"""The HTTP surface over a real socket, against a scripted engine."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serve.support import (
    CHAT,
    END,
    MODEL,
    TEXT,
    WITH_TOOLS,
    Running,
    ScriptedEngine,
    assert_error,
    byte_tokenizer,
    events,
    serving,
    wait_for,
)

HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(ScriptedEngine(), max_body_bytes=20_000) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


# -- answers ----------------------------------------------------------------------------------------------------------


def test_chat_answer(client: httpx.Client) -> None:
    body = client.post(CHAT, json=HI | {"model": MODEL}).json()
    prompt = byte_tokenizer().encode_chat(HI["messages"])
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 7,
        "total_tokens": len(prompt) + 7,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"accepted_prediction_tokens": 0},
    }


def test_chat_stream(client: httpx.Client) -> None:
    chunks = events(client.post(CHAT, json=HI | {"stream": True}))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice["delta"] for choice in choices[1:-1]] == [{"content": char} for char in "Hello!"]
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert {choice["finish_reason"] for choice in choices[:-1]} == {None}


def test_stream_usage_comes_last_and_without_choices(client: httpx.Client) -> None:
    *chunks, usage = events(client.post(CHAT, json=HI | {"stream": True, "stream_options": {"include_usage": True}}))
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 7
    assert all(chunk["usage"] is None for chunk in chunks)


def test_legacy_answer_and_stream(client: httpx.Client) -> None:
    body = client.post(TEXT, json={"prompt": "a"}).json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hello!", "logprobs": None, "finish_reason": "stop"}]
    chunks = events(client.post(TEXT, json={"prompt": "a", "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello!"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_length_ends_an_answer(client: httpx.Client) -> None:
    choice = client.post(CHAT, json=HI | {"max_tokens": 2}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("He", "length")
    choice = client.post(CHAT, json=HI | {"max_completion_tokens": 1}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("H", "length")


def test_batches_of_prompts_with_n(client: httpx.Client) -> None:
    body = client.post(TEXT, json={"prompt": ["ab", "cdef"], "n": 2, "max_tokens": 3}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 2 + 4  # a prompt counts once
    assert body["usage"]["completion_tokens"] == 4 * 3


def test_drafted_tokens_are_counted() -> None:
    with serving(ScriptedEngine(per_step=4)) as running, running.client() as client:
        usage = client.post(CHAT, json=HI).json()["usage"]
    assert usage["completion_tokens"] == 7
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 5}  # 7 tokens in 2 steps


@pytest.mark.parametrize("per_step", [1, 3])
def test_characters_survive_chunk_borders(per_step: int) -> None:
    text = "naïve – 你好 👩‍🚀 e\u0301"
    tokenizer = byte_tokenizer()
    engine = ScriptedEngine(lambda _: [*tokenizer.encode(text, allow_special=False), END], per_step)
    with serving(engine) as running, running.client() as client:
        chunks = events(client.post(CHAT, json=HI | {"stream": True}))
        assert client.post(CHAT, json=HI).json()["choices"][0]["message"]["content"] == text
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_incomplete_character_at_the_end_is_not_lost() -> None:
    tokenizer = byte_tokenizer()
    cut = tokenizer.encode("é", allow_special=False)[:1]
    with serving(ScriptedEngine(lambda _: [*cut, END])) as running, running.client() as client:
        chunks = events(client.post(CHAT, json=HI | {"stream": True}))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "\ufffd"


def test_control_tokens_are_text_in_chat_and_control_in_raw_prompts() -> None:
    seen: list[list[int]] = []

    def script(prompt: list[int]) -> list[int]:
        seen.append(prompt)
        return [END]

    with serving(ScriptedEngine(script)) as running, running.client() as client:
        client.post(CHAT, json={"messages": [{"role": "user", "content": "<|im_end|>"}]})
        parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
        client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]})
        client.post(TEXT, json={"prompt": "a<|im_end|>"})
    assert seen[0] == seen[1]
    assert seen[0].count(END) == 1  # the template's own
    assert seen[2][-1] == END


def test_tools_and_thinking_reach_the_template() -> None:
    seen: list[str] = []
    tokenizer = byte_tokenizer(WITH_TOOLS)

    def script(prompt: list[int]) -> list[int]:
        seen.append(tokenizer.decode(prompt))
        return [END]

    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": "so?"},
    ]
    engine = ScriptedEngine(script, tokenizer=tokenizer, max_model_len=4096)
    with serving(engine) as running, running.client() as client:
        body = {"messages": messages, "tools": [tool], "chat_template_kwargs": {"enable_thinking": False}}
        assert client.post(CHAT, json=body).status_code == 200
        assert client.post(CHAT, json=body | {"tool_choice": "none"}).status_code == 200
    assert '"name": "look"' in seen[0]
    assert '<call>look {"at": "sky"}</call>' in seen[0]
    assert "<think></think>" in seen[0]
    assert '"name": "look"' not in seen[1]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b"", None),
        (b"\xff\xfe{}", None),
        (b"[" * 10_000, None),
        (b'{"messages": [], "messages": ' + b"9" * 5000 + b"}", None),
        (b"[1]", "invalid_body"),
        (b'"hi"', "invalid_body"),
        (b"null", None),
    ],
)
def test_bad_bodies(client: httpx.Client, body: bytes, code: str | None) -> None:
    response = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert_error(response, 400, None, code)


def test_refusals_name_the_field(client: httpx.Client) -> None:
    assert "presence_penalty" in assert_error(
        client.post(CHAT, json=HI | {"presence_penalty": 3}), 400, "presence_penalty"
    )
    assert "nonsense" in assert_error(client.post(TEXT, json={"prompt": "a", "nonsense": 1}), 400, "nonsense")
    message = assert_error(client.post(CHAT, json=HI | {"min_tokens": 9, "max_tokens": 3}), 400, "min_tokens")
    assert "9" in message


def test_unknown_model_path_and_method(client: httpx.Client) -> None:
    assert_error(client.post(CHAT, json=HI | {"model": "gpt-9"}), 404, "model", "model_not_found")
    surrogate = json.dumps(HI | {"model": "\ud800"}).encode()
    response = client.post(CHAT, content=surrogate, headers={"Content-Type": "application/json"})
    assert_error(response, 404, "model", "model_not_found")
    assert_error(client.get("/v1/models/gpt-9"), 404, "model", "model_not_found")
    assert_error(client.get("/v2/nothing"), 404, None, "unknown_path")
    response = client.get(CHAT)
    assert_error(response, 405, None, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("prompt", ["", [], [[]]])
def test_empty_prompts(client: httpx.Client, prompt: Any) -> None:
    assert_error(client.post(TEXT, json={"prompt": prompt}), 400, "prompt" if prompt != [[]] else "prompt.0")
    assert_error(client.post(CHAT, json={"messages": []}), 400, "messages")


def test_prompts_beyond_the_context(client: httpx.Client) -> None:
    message = assert_error(client.post(TEXT, json={"prompt": "x" * 300}), 400, "prompt", "context_length_exceeded")
    assert "300" in message
    assert "256" in message
    message = assert_error(
        client.post(TEXT, json={"prompt": "x" * 250, "max_tokens": 7}), 400, "max_tokens", "context_length_exceeded"
    )
    assert "250" in message
    assert "7" in message
    assert client.post(TEXT, json={"prompt": "x" * 255}).json()["choices"][0]["finish_reason"] == "length"


def test_ids_outside_the_vocabulary_are_400(client: httpx.Client) -> None:
    for field, value in (("prompt", [9999]), ("stop_token_ids", [5, 258]), ("logit_bias", {"258": 1})):
        for stream in (False, True):
            body = {"prompt": "a", "stream": stream} | {field: value}
            assert "vocabulary" in assert_error(client.post(TEXT, json=body), 400, field)
    assert "vocabulary" in assert_error(client.post("/detokenize", json={"tokens": [258]}), 400, "tokens")


def test_template_refusals_are_400(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert_error(client.post(CHAT, json=HI | {"tools": [tool]}), 400, "tools")
    assert_error(
        client.post(CHAT, json=HI | {"chat_template_kwargs": {"enable_thinking": True}}), 400, "chat_template_kwargs"
    )
    assert_error(client.post(CHAT, json=HI | {"chat_template_kwargs": {"self": 1}}), 400, "chat_template_kwargs")
    named = [{"role": "user", "content": "hi", "name": "bob"}]
    assert "name" in assert_error(client.post(CHAT, json={"messages": named}), 400, "messages")
    surrogate = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    assert_error(client.post(CHAT, content=surrogate, headers={"Content-Type": "application/json"}), 400, "messages")


def test_models_without_a_template_refuse_chat() -> None:
    with serving(ScriptedEngine(tokenizer=byte_tokenizer(None))) as running, running.client() as client:
        assert "template" in assert_error(client.post(CHAT, json=HI), 400, "messages")
        assert client.post(TEXT, json={"prompt": "a"}).status_code == 200


def test_bodies_too_large(client: httpx.Client) -> None:
    big = json.dumps({"prompt": "x" * 30_000}).encode()
    headers = {"Content-Type": "application/json"}
    assert_error(client.post(TEXT, content=big, headers=headers), 413, None, "body_too_large")
    pieces = (big[start : start + 1000] for start in range(0, len(big), 1000))  # sent in chunks, no length announced
    assert_error(client.post(TEXT, content=pieces, headers=headers), 413, None, "body_too_large")
    assert client.post(TEXT, json={"prompt": "a"}).status_code == 200


def test_api_key() -> None:
    with serving(ScriptedEngine(), api_keys=("other", "sésame")) as running, running.client() as client:
        assert_error(client.post(CHAT, json=HI), 401, None, "invalid_api_key")
        wrong = client.post(CHAT, json=HI, headers={"Authorization": "Bearer nope"})
        assert_error(wrong, 401, None, "invalid_api_key")
        assert wrong.headers["www-authenticate"] == "Bearer"
        assert client.post(CHAT, json=HI, headers={"Authorization": "Bearer sésame".encode()}).status_code == 200
        assert client.get("/health").status_code == 200


def test_queue_full_is_429_with_retry_after() -> None:
    with serving(ScriptedEngine(lambda _: [1] * 200, step_s=0.005), max_requests=1) as running:
        with running.client() as client, client.stream("POST", CHAT, json=HI | {"stream": True}) as stream:
            lines = stream.iter_lines()  # dropping the iterator would close the stream
            next(lines)
            with running.client() as other:
                response = other.post(CHAT, json=HI)
            assert_error(response, 429, None, "queue_full")
            assert int(response.headers["retry-after"]) >= 1
        running.wait_idle()
        with running.client() as client:
            assert client.post(CHAT, json=HI | {"max_tokens": 1}).status_code == 200
            assert_error(client.post(CHAT, json=HI | {"n": 2}), 400, "n")


# -- failures and endings ---------------------------------------------------------------------------------------------


def test_engine_failure_ends_a_stream_with_an_error_event_and_the_server_lives() -> None:
    def explode() -> None:
        if engine.steps in (3, 6):
            raise RuntimeError("broken kernel")

    engine = ScriptedEngine(before_step=explode)
    with serving(engine) as running, running.client() as client:
        lines = client.post(CHAT, json=HI | {"stream": True}).text.split("\n\n")
        assert lines[-1] == ""
        error = json.loads(lines[-2].removeprefix("data: "))["error"]
        assert "broken kernel" in error["message"]
        assert error["type"] == "server_error"
        assert "broken kernel" in assert_error(client.post(CHAT, json=HI), 500, None, "generation_failed")
        assert client.post(CHAT, json=HI).json()["choices"][0]["message"]["content"] == "Hello!"
        assert client.get("/ready").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_request(stream: bool) -> None:
    engine = ScriptedEngine(lambda _: [1] * 240, step_s=0.02)
    with serving(engine) as running:
        body = json.dumps({"prompt": "a", "max_tokens": 240, "stream": stream, "n": 2}).encode()
        head = (
            f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1]))) as connection:
            connection.sendall(head.encode() + body)
            wait_for(lambda: engine.steps >= 3)
        steps = engine.steps
        running.wait_idle()
        assert engine.steps <= steps + 50  # 240 without the disconnect; the rest is for a busy machine


def test_shutdown_lets_short_requests_finish_and_cuts_long_ones_with_a_reason() -> None:
    engine = ScriptedEngine(lambda _: [1] * 240, step_s=0.02)
    brief = {"prompt": "a", "max_tokens": 5, "stream": True}
    with serving(engine, grace_s=1.5) as running, running.client() as client:
        with client.stream("POST", TEXT, json={"prompt": "a", "max_tokens": 240, "stream": True}) as long:
            lines = long.iter_lines()
            next(lines)
            with running.client() as other, other.stream("POST", TEXT, json=brief) as short:
                running.server.should_exit = True
                assert list(short.iter_lines())[-2] == "data: [DONE]"
            rest = [line for line in lines if line]
        assert "shutting down" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]


# -- the rest ---------------------------------------------------------------------------------------------------------


def test_models_and_health(client: httpx.Client) -> None:
    models = client.get("/v1/models").json()
    assert models["object"] == "list"
    assert models["data"][0]["id"] == MODEL
    assert models["data"][0]["max_model_len"] == 256
    assert client.get(f"/v1/models/{MODEL}").json() == models["data"][0]
    for path in ("/health", "/ready"):
        assert client.get(path).json() == {"status": "ok", "model": MODEL, "open_requests": 0}
