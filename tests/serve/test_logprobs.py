"""Log-probabilities over HTTP: those of the engine, beside the text they belong to, in both of OpenAI's forms."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from random import Random
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.llm import LLM, Completion
from jetflow_core.sampling import SamplingParams
from jetflow_core.tokenizer import Detokenizer
from jetflow_serve.logprobs import Entry, LogprobTrack
from serve.support import END, MODEL, Running, byte_tokenizer, serving
from tiny import tiny_head, tiny_model

TOKENIZER = byte_tokenizer()
PROMPT = TOKENIZER.encode_chat([{"role": "user", "content": "hi"}])


def make_engine(budget: int) -> Engine:
    model = tiny_model(vocab_size=260)
    head = tiny_head(model)
    head.pack()
    return Engine(model, TOKENIZER, head, EngineConfig(budget=budget, page_size=4))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(make_engine(budget=6)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def chat(client: openai.OpenAI, **options: Any) -> Any:
    options = {"max_completion_tokens": 16, "temperature": 0, "logprobs": True} | options
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], **options)


def offline(prompt: list[int], **params: Any) -> Completion:
    """The reference: the engine alone, without speculation."""
    return LLM(make_engine(budget=0)).generate([prompt], SamplingParams(**params))[0]


def spelling(choice: Any) -> str:
    """The text that the tokens with log-probabilities spell."""
    return b"".join(bytes(own.bytes) for own in choice.logprobs.content).decode(errors="replace")


def test_chat_logprobs_are_the_engines(client: openai.OpenAI) -> None:
    reference = offline(PROMPT, max_tokens=16, logprobs=4)
    choice = chat(client, top_logprobs=4).choices[0]
    assert reference.logprobs is not None
    assert len(choice.logprobs.content) == len(reference.token_ids) == 16
    for own, expected in zip(choice.logprobs.content, reference.logprobs, strict=True):
        assert bytes(own.bytes) == TOKENIZER.token_bytes(expected.token_id)
        assert own.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert [bytes(top.bytes) for top in own.top_logprobs] == [
            TOKENIZER.token_bytes(token) for token, _ in expected.top
        ]
        assert [top.logprob for top in own.top_logprobs] == pytest.approx(
            [value for _, value in expected.top], abs=1e-4
        )
    assert spelling(choice) == choice.message.content


def test_without_top_there_are_no_alternatives(client: openai.OpenAI) -> None:
    content = chat(client).choices[0].logprobs.content
    assert len(content) == 16
    assert all(own.top_logprobs == [] for own in content)
    assert chat(client, logprobs=False).choices[0].logprobs is None


@pytest.mark.parametrize("stop", [None, "stop"])
def test_streamed_logprobs_join_to_the_whole(client: openai.OpenAI, stop: str | None) -> None:
    options: dict[str, Any] = {"top_logprobs": 2, "temperature": 1, "seed": 3}
    text = chat(client, **options).choices[0].message.content
    options["stop"] = None if stop is None else [text[8:11]]
    whole = chat(client, **options).choices[0]
    entries: list[Any] = []
    shown = b""
    for chunk in chat(client, stream=True, **options):
        choice = chunk.choices[0]
        added = choice.logprobs.content if choice.logprobs else []
        entries += added
        shown += b"".join(bytes(own.bytes) for own in added)
        assert not added or choice.delta.content or choice.finish_reason
    assert entries == whole.logprobs.content
    if stop is None:
        assert shown.decode(errors="replace") == whole.message.content


def test_nothing_past_the_end_is_listed(client: openai.OpenAI) -> None:
    text = chat(client).choices[0].message.content
    cut = chat(client, stop=[text[5:7]]).choices[0]
    assert (spelling(cut), cut.finish_reason) == (text[: text.index(text[5:7])], "stop")
    letter = next(char for char in text if char.isascii())
    (end,) = TOKENIZER.encode(letter, allow_special=False)
    ended = chat(client, extra_body={"stop_token_ids": [end]}).choices[0]
    assert spelling(ended) == ended.message.content == text[: text.index(letter)]
    biased = chat(client, logit_bias={str(END): 100}, extra_body={"min_tokens": 3})
    assert (biased.usage.completion_tokens, len(biased.choices[0].logprobs.content)) == (4, 3)  # the end has no text


def test_logprobs_are_the_models_whatever_the_options(client: openai.OpenAI) -> None:
    """Bias and penalties choose the tokens; what the model thinks of them stays what it is."""
    plain = chat(client, top_logprobs=20).choices[0].logprobs.content[0]
    second = plain.top_logprobs[1]
    (token,) = [number for number in range(256) if TOKENIZER.token_bytes(number) == bytes(second.bytes)]
    forced = (
        chat(client, top_logprobs=20, logit_bias={str(token): 100}, max_completion_tokens=1)
        .choices[0]
        .logprobs.content[0]
    )
    assert (forced.bytes, forced.logprob) == (second.bytes, pytest.approx(second.logprob, abs=1e-4))
    assert forced.top_logprobs == plain.top_logprobs


cut_characters = st.tuples(st.sampled_from(["é", "你", "👩", "a"]), st.integers(1, 4)).map(
    lambda cut: TOKENIZER.encode(cut[0], allow_special=False)[: cut[1]]
)
pieces = st.integers(0, 255).map(lambda byte: [byte]) | cut_characters | st.just([END])


@given(
    st.lists(pieces, max_size=8).map(lambda parts: list(chain(*parts))),
    st.sampled_from(["stop", "length"]),
    st.randoms(),
)
def test_tokens_stand_where_their_characters_do(ids: list[int], finish: str, random: Random) -> None:
    """Tokens of one offset spell the text from there to the next offset, however broken the bytes, in any pieces."""
    track, detokenizer = LogprobTrack(TOKENIZER), Detokenizer(TOKENIZER)
    text, held = "", ""
    entries: list[Entry] = []
    for token in ids:
        track.add(token, None)
        held += detokenizer.push(token)
        cut = random.randint(0, len(held))  # some is held back, as before a stop string
        entries += track.take(held[:cut], None)
        text, held = text + held[:cut], held[cut:]
    rest = held + detokenizer.flush()
    entries += track.take(rest, finish)
    text += rest
    offsets = [entry.offset for entry in entries]
    assert offsets == sorted(offsets)
    assert [entry.token for entry in entries] == ids[: len(entries)]
    assert set(ids[len(entries) :]) <= ({END} if finish == "stop" else set())
    for start, end in pairwise(sorted({*offsets, len(text)})):
        tokens = [entry.token for entry in entries if entry.offset == start and entry.token != END]
        assert b"".join(map(TOKENIZER.token_bytes, tokens)).decode(errors="replace") == text[start:end]


# -- the legacy form --------------------------------------------------------------------------------------------------


def complete(client: openai.OpenAI, **options: Any) -> Any:
    options = {"prompt": "abc", "max_tokens": 12, "temperature": 0, "logprobs": 3} | options
    return client.completions.create(model=MODEL, **options)


def test_legacy_logprobs(client: openai.OpenAI) -> None:
    reference = offline(TOKENIZER.encode("abc", allow_special=True), max_tokens=12, logprobs=3)
    choice = complete(client).choices[0]
    own = choice.logprobs
    assert reference.logprobs is not None
    assert own.token_logprobs == pytest.approx([entry.logprob for entry in reference.logprobs], abs=1e-4)
    for name, logprob, top, offset in zip(
        own.tokens, own.token_logprobs, own.top_logprobs, own.text_offset, strict=True
    ):
        assert top[name] == logprob  # greedy: the likeliest of the three
        assert len(top) == 3
        assert name.startswith("bytes:\\x") or choice.text[offset : offset + 1] in (name, "\ufffd")
    assert own.text_offset == sorted(own.text_offset)


def test_a_token_that_is_not_among_the_top_is_added(client: openai.OpenAI) -> None:
    own = complete(client, logprobs=0).choices[0].logprobs
    assert own.top_logprobs == [{name: value} for name, value in zip(own.tokens, own.token_logprobs, strict=True)]
    (token,) = TOKENIZER.encode("~", allow_special=False)
    own = complete(client, logprobs=1, max_tokens=1, logit_bias={str(token): 100}).choices[0].logprobs
    assert own.tokens == ["~"]
    assert len(own.top_logprobs[0]) in (1, 2)
    assert own.top_logprobs[0]["~"] == own.token_logprobs[0] <= max(own.top_logprobs[0].values())


def test_streamed_legacy_logprobs_join_to_the_whole(client: openai.OpenAI) -> None:
    whole = complete(client, echo=True).choices[0]
    parts = [chunk.choices[0] for chunk in complete(client, echo=True, stream=True)]
    assert "".join(part.text for part in parts) == whole.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [entry for part in parts if part.logprobs for entry in getattr(part.logprobs, name)]
        assert joined == getattr(whole.logprobs, name)


@pytest.mark.parametrize("prompt", ["aé!<|im_end|>b", TOKENIZER.encode("aé!<|im_end|>b", allow_special=True)])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_scores_the_prompt(client: openai.OpenAI, prompt: Any, max_tokens: int) -> None:
    ids = TOKENIZER.encode("aé!<|im_end|>b", allow_special=True)
    reference = offline(ids, max_tokens=1, prompt_logprobs=2)
    answer = complete(client, prompt=prompt, echo=True, max_tokens=max_tokens, logprobs=2)
    choice, own = answer.choices[0], answer.choices[0].logprobs
    assert choice.text.startswith("aé!<|im_end|>b")
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == max_tokens
    assert own.tokens[:6] == ["a", "bytes:\\xc3", "bytes:\\xa9", "!", "<|im_end|>", "b"]
    assert own.text_offset[:6] == [0, 1, 1, 2, 3, 13]
    assert len(own.tokens) == 6 + max_tokens
    assert own.token_logprobs[0] is own.top_logprobs[0] is None
    assert reference.prompt_logprobs is not None
    expected = [entry.logprob for entry in reference.prompt_logprobs[1:] if entry is not None]
    assert own.token_logprobs[1:6] == pytest.approx(expected, abs=1e-4)
    assert own.text_offset[6:7] in ([], [14])


def test_scoring_a_batch_of_prompts(client: openai.OpenAI) -> None:
    """What evaluation harnesses do: no new tokens, the prompts' own log-probabilities."""
    prompts = [TOKENIZER.encode(text, allow_special=True) for text in ("abc", "a", "abcabcabcabc")]
    choices = complete(client, prompt=prompts, echo=True, max_tokens=0, logprobs=1).choices
    assert [choice.text for choice in choices] == ["abc", "a", "abcabcabcabc"]
    assert [len(choice.logprobs.tokens) for choice in choices] == [3, 1, 12]
    assert choices[2].logprobs.token_logprobs[1:3] == pytest.approx(choices[0].logprobs.token_logprobs[1:], abs=1e-4)
