"""Whatever a client sends, the answer is a success or an error in OpenAI's shape, never a 5xx."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jetflow_serve.protocol import ChatRequest, CompletionRequest
from serve.support import WITH_TOOLS, ScriptedEngine, byte_tokenizer, serving

GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
}
FIELDS = {
    "/v1/chat/completions": sorted(ChatRequest.model_fields),
    "/v1/completions": sorted(CompletionRequest.model_fields),
}
leaves = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8) | st.just("\ud800")
)
words = st.sampled_from(["role", "content", "user", "assistant", "type", "text", "function", "name", "id", "arguments"])
values = st.recursive(
    leaves | words, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4), max_leaves=8
)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    engine = ScriptedEngine(tokenizer=byte_tokenizer(WITH_TOOLS), max_model_len=4096)
    with serving(engine) as running, running.client() as client:
        yield client


def check(response: httpx.Response) -> None:
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert error["type"] == "invalid_request_error"


def post(client: httpx.Client, path: str, body: Any) -> httpx.Response:
    content = json.dumps(body).encode()  # NaN and lone surrogates included
    return client.post(path, content=content, headers={"Content-Type": "application/json"})


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_fields(client: httpx.Client, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(GOOD)))
    changes = data.draw(st.dictionaries(st.sampled_from(FIELDS[path]), values, min_size=1, max_size=3))
    check(post(client, path, GOOD[path] | changes))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(GOOD)), values)
def test_random_bodies(client: httpx.Client, path: str, body: Any) -> None:
    response = post(client, path, body)
    assert response.status_code == 400
    check(response)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(GOOD)), st.binary(max_size=40))
def test_random_bytes(client: httpx.Client, path: str, body: bytes) -> None:
    response = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    check(response)


@pytest.mark.parametrize("depth", [60, 70, 320, 480, 900])
def test_deep_nesting(client: httpx.Client, depth: int) -> None:
    deep: Any = {}
    for _ in range(depth):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    body = GOOD["/v1/chat/completions"]
    check(post(client, "/v1/chat/completions", body | {"tools": [tool]}))
    check(post(client, "/v1/chat/completions", body | {"chat_template_kwargs": {"enable_thinking": deep}}))
    check(post(client, "/v1/chat/completions", body | {"logit_bias": deep, "prediction": deep}))
