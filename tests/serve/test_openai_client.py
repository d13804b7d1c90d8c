"""The official `openai` client against the real engine: a tiny random model with a draft head, on a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.llm import LLM
from jetflow_core.sampling import SamplingParams
from serve.support import END, MODEL, Running, byte_tokenizer, serving
from tiny import tiny_head, tiny_model

VOCAB = 260  # two rows beyond what the tokenizer knows: they must never be chosen


def make_engine(**config: Any) -> Engine:
    model = tiny_model(vocab_size=VOCAB)
    head = tiny_head(model)
    head.pack()
    return Engine(model, byte_tokenizer(), head, EngineConfig(**({"budget": 6, "page_size": 4} | config)))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(make_engine()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def ask(client: openai.OpenAI, text: str = "hi", **options: Any) -> Any:
    options = {"max_completion_tokens": 16, "temperature": 0} | options
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}], **options)


def offline(prompt: list[int], params: SamplingParams) -> str:
    """The reference: the same engine without speculation, alone."""
    return LLM(make_engine(budget=0)).generate([prompt], params)[0].text


def test_chat_equals_the_offline_answer_without_speculation(client: openai.OpenAI) -> None:
    answer = ask(client)
    prompt = byte_tokenizer().encode_chat([{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == offline(prompt, SamplingParams(max_tokens=16))
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.total_tokens == len(prompt) + answer.usage.completion_tokens
    details = answer.usage.completion_tokens_details
    assert 0 <= details.accepted_prediction_tokens < answer.usage.completion_tokens


def test_stream_joins_to_the_whole_answer(client: openai.OpenAI) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_seeds(client: openai.OpenAI) -> None:
    def sampled(**options: Any) -> list[str]:
        return [choice.message.content for choice in ask(client, temperature=1, **options).choices]

    three = sampled(seed=7, n=3)
    assert sampled(seed=7, n=3) == three
    assert [sampled(seed=seed)[0] for seed in (7, 8, 9)] == three  # answer i has the seed plus i
    assert len(set(three)) == 3
    assert sampled() != sampled()  # no seed: not the same twice
    assert len(sampled(seed=2**63 - 1, n=2)) == 2


def test_stream_of_three(client: openai.OpenAI) -> None:
    whole = ask(client, temperature=1, seed=7, n=3)
    texts = ["", "", ""]
    ends: list[str | None] = [None] * 3
    for chunk in ask(client, temperature=1, seed=7, n=3, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]


def test_completions_of_text_and_ids(client: openai.OpenAI) -> None:
    ids = byte_tokenizer().encode("abc", allow_special=True)
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    by_text = client.completions.create(prompt="abc", **options).choices[0].text
    assert client.completions.create(prompt=ids, **options).choices[0].text == by_text
    batch = client.completions.create(prompt=[ids, ids[:1]], **options)
    assert [choice.index for choice in batch.choices] == [0, 1]
    assert batch.choices[0].text == by_text == offline(ids, SamplingParams(max_tokens=12))
    default = client.completions.create(prompt="abc", model=MODEL, temperature=0, extra_body={"ignore_eos": True})
    assert default.usage is not None
    assert default.usage.completion_tokens == 16


def test_stop_strings(client: openai.OpenAI) -> None:
    text = ask(client).choices[0].message.content
    stop = text[5:7]
    cut = ask(client, stop=[stop, "never there"]).choices[0]
    assert cut.message.content == text[: text.index(stop)]
    assert cut.finish_reason == "stop"


def test_extra_sampling_options(client: openai.OpenAI) -> None:
    greedy = ask(client).choices[0].message.content
    top = ask(client, temperature=2, extra_body={"top_k": 1}).choices[0].message.content
    assert top == greedy
    letter = next(char for char in greedy if char.isascii())
    (end,) = byte_tokenizer().encode(letter, allow_special=False)
    short = ask(client, extra_body={"stop_token_ids": [end]}).choices[0]
    assert (short.finish_reason, short.message.content) == ("stop", greedy[: greedy.index(letter)])
    longer = ask(client, extra_body={"stop_token_ids": [end], "min_tokens": 10})
    assert longer.usage.completion_tokens >= 10


def test_errors_arrive_as_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="presence_penalty") as caught:
        ask(client, presence_penalty=3)
    assert caught.value.param == "presence_penalty"
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="256") as caught:
        ask(client, "x" * 400)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.completions.create(model=MODEL, prompt="")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_eight_streams_at_once_answer_as_alone(client: openai.OpenAI, server: Running) -> None:
    cases: list[dict[str, Any]] = [
        {"text": "tell me " * (i % 3 + 1) + str(i), "temperature": 0.9 * (i % 2), "seed": i, "top_p": 0.95}
        for i in range(8)
    ]

    def streamed(case: dict[str, Any]) -> str:
        chunks = ask(client, **case, stream=True, max_completion_tokens=20)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    alone = [streamed(case) for case in cases]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(streamed, cases))
    assert together == alone
    assert len(set(alone)) > 4
    server.wait_idle()


def test_leaving_a_stream_frees_its_pages(client: openai.OpenAI, server: Running) -> None:
    with ask(client, stream=True, max_completion_tokens=200, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
    server.wait_idle()
    server.engine.check_idle()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_stream_is_its_whole_answer_in_pieces(client: openai.OpenAI, data: st.DataObject) -> None:
    """Whatever the options, the chunks put together are the answer that is not streamed."""
    choices: dict[str, Any] = {
        "n": [1, 2],
        "temperature": [0, 1],
        "logprobs": [None, True],
        "stop": [None, ["a", "\ufffd\ufffd"], "e"],
        "presence_penalty": [None, 1.5],
        "logit_bias": [None, {str(END): 5, "40": 3}],
        "extra_body": [{}, {"min_tokens": 5}, {"separate_reasoning": True}],
    }
    options = {name: data.draw(st.sampled_from(values), label=name) for name, values in choices.items()}
    options = {name: value for name, value in options.items() if value is not None} | {"seed": 4}
    whole = ask(client, **options)
    folded = [{"text": "", "logprobs": [], "finish": None} for _ in whole.choices]
    *chunks, last = ask(client, **options, stream=True, stream_options={"include_usage": True})
    for choice in (chunk.choices[0] for chunk in chunks):
        one: dict[str, Any] = folded[choice.index]
        assert one["finish"] is None, "nothing comes after the end"
        one["text"] += choice.delta.content or ""
        one["logprobs"] += choice.logprobs.content if choice.logprobs else []
        one["finish"] = choice.finish_reason
    for choice, one in zip(whole.choices, folded, strict=True):
        assert one["text"] == (choice.message.content or "")
        assert one["logprobs"] == (choice.logprobs.content if choice.logprobs else [])
        assert one["finish"] == choice.finish_reason
    assert last.usage.completion_tokens == whole.usage.completion_tokens
