"""Legacy completions beyond plain text: batches, `n`, `best_of`, echo, token ids, no new tokens; and the tokenizer's routes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.llm import LLM
from jetflow_core.sampling import SamplingParams
from serve.support import CHAT, MODEL, TEXT, Running, ScriptedEngine, assert_error, byte_tokenizer, events, serving
from tiny import tiny_head, tiny_model

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """Of a server whose engine says "Hello!"."""
    with serving(ScriptedEngine()) as running, running.client() as client:
        yield client


def make_engine(budget: int) -> Engine:
    model = tiny_model(vocab_size=260)
    head = tiny_head(model)
    head.pack()
    return Engine(model, TOKENIZER, head, EngineConfig(budget=budget, page_size=4))


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    with serving(make_engine(budget=6)) as running:
        yield running


@pytest.fixture(scope="module")
def official(real: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def complete(client: openai.OpenAI, **options: Any) -> Any:
    return client.completions.create(**({"model": MODEL, "prompt": "abc", "max_tokens": 8, "temperature": 1} | options))


def offline(text: str, **params: Any) -> Any:
    options = {"max_tokens": 8, "temperature": 1.0} | params
    ids = TOKENIZER.encode(text, allow_special=True)
    return LLM(make_engine(budget=0)).generate([ids], SamplingParams(**options))[0]


def test_choices_of_a_batch_are_numbered_prompt_by_prompt(official: openai.OpenAI) -> None:
    answer = complete(official, prompt=["abc", "xyz"], n=2, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = [offline(text, seed=seed).text for text in ("abc", "xyz") for seed in (5, 6)]
    assert [choice.text for choice in answer.choices] == expected
    texts = [""] * 4
    for chunk in complete(official, prompt=["abc", "xyz"], n=2, seed=5, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_best_of_returns_the_likeliest(official: openai.OpenAI) -> None:
    for n in (1, 2):
        answer = complete(official, prompt=["abc", "xyz"], n=n, best_of=4, seed=5)
        assert [choice.index for choice in answer.choices] == list(range(2 * n))
        for number, text in enumerate(("abc", "xyz")):
            drawn = [offline(text, seed=seed, logprobs=0) for seed in range(5, 9)]
            drawn.sort(key=lambda one: -sum(entry.logprob for entry in one.logprobs) / len(one.logprobs))
            own = answer.choices[number * n : (number + 1) * n]
            assert [choice.text for choice in own] == [one.text for one in drawn[:n]]
            assert all(choice.logprobs is None for choice in own)
        assert answer.usage.prompt_tokens == 6
        assert answer.usage.completion_tokens >= 8  # all four draws of both prompts are paid for
        assert answer.usage.completion_tokens == sum(
            len(offline(text, seed=seed).token_ids) for text in ("abc", "xyz") for seed in range(5, 9)
        )


def test_echo(client: httpx.Client) -> None:
    ids = TOKENIZER.encode("é<|im_end|>", allow_special=True)
    body = {"prompt": [ids, ids[:2]], "echo": True, "n": 2}
    choices = client.post(TEXT, json=body).json()["choices"]
    assert [choice["text"] for choice in choices] == ["é<|im_end|>Hello!"] * 2 + ["éHello!"] * 2
    texts = [""] * 4
    for chunk in events(client.post(TEXT, json=body | {"stream": True})):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [choice["text"] for choice in choices]
    assert client.post(TEXT, json={"prompt": "é", "echo": True}).json()["choices"][0]["text"] == "éHello!"


def test_no_new_tokens(official: openai.OpenAI) -> None:
    answer = complete(official, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)
    assert complete(official, max_tokens=0, echo=True).choices[0].text == "abc"
    parts = list(complete(official, max_tokens=0, echo=True, stream=True))
    assert "".join(part.choices[0].text for part in parts) == "abc"
    assert parts[-1].choices[0].finish_reason == "length"


def test_penalties_and_bias_reach_the_engine(official: openai.OpenAI) -> None:
    options: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": -0.5, "max_tokens": 24, "temperature": 0}
    expected = offline("abc", **options, repetition_penalty=1.3, logit_bias={97: 4.0, 98: -100})
    answer = complete(official, **options, logit_bias={"97": 4, "98": -100}, extra_body={"repetition_penalty": 1.3})
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].text != offline("abc", max_tokens=24, temperature=0.0).text


def test_usage_in_every_event(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(client.post(TEXT, json={"prompt": "ab", "stream": True, "stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) == [1, 2, 3, 4, 5, 6, 7]
    assert chunks[-1]["usage"] == last["usage"]
    assert last["choices"] == []


def test_a_shared_prompt_is_reported_as_cached(official: openai.OpenAI) -> None:
    for cached in (0, 40):  # of 44 tokens in pages of 4; the last one always goes through the model
        usage: Any = complete(official, prompt="once upon a time there was a page of a cache", max_tokens=1).usage
        assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (44, cached)


# -- /tokenize and /detokenize ----------------------------------------------------------------------------------------


def test_tokenize_is_what_a_completion_starts_from(client: httpx.Client) -> None:
    ids = TOKENIZER.encode("a<|im_end|>é", allow_special=True)
    body = client.post("/tokenize", json={"prompt": "a<|im_end|>é", "model": MODEL}).json()
    assert body == {"count": len(ids), "max_model_len": 256, "tokens": ids}
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "a<|im_end|>é"}
    ids = client.post("/tokenize", json=HI).json()["tokens"]
    assert ids == TOKENIZER.encode_chat(HI["messages"])
    assert client.post(CHAT, json=HI).json()["usage"]["prompt_tokens"] == len(ids)
    closed = client.post("/tokenize", json=HI | {"add_generation_prompt": False}).json()["tokens"]
    assert closed == TOKENIZER.encode_chat(HI["messages"], add_generation_prompt=False)
    assert client.post("/tokenize", json={"prompt": "x" * 1000}).json()["count"] == 1000  # beyond the context: how far?


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, "nonsense"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ("/tokenize", HI | {"prompt": "a"}, "prompt"),
        ("/tokenize", HI | {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("/tokenize", HI | {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_tokenize_refusals_name_the_field(client: httpx.Client, path: str, body: Any, param: str) -> None:
    content = json.dumps(body).encode()
    assert_error(client.post(path, content=content, headers={"Content-Type": "application/json"}), 400, param)
