"""The main job on the real thing: the demo model, the shipped head, the served answer, and not one token changed."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from jetflow_core.demo import demo_model
from jetflow_core.engine import EngineConfig
from jetflow_core.llm import LLM
from jetflow_core.sampling import SamplingParams
from jetflow_serve.demo import demo_head

QUESTIONS = [
    "What is the capital of France?",
    "A train travels 60 miles in 1.5 hours. What is its average speed? Reason step by step.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Give three tips for writing a good cover letter.",
    "If Tom has 3 boxes with 12 pencils each and gives away 7 pencils, how many are left?",
    "Explain in two sentences why the sky is blue.",
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    head = demo_head()
    assert head is not None, "the draft head of the demo model ships with jetflow-serve"
    config = EngineConfig(max_model_len=1024, num_pages=640)
    return LLM.load(demo_model(), head=head, dtype="float32", config=config)


def prompts(llm: LLM) -> list[list[int]]:
    return [llm.tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_batched_speculation_changes_no_token(llm: LLM, temperature: float) -> None:
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=32) for i in range(len(QUESTIONS))]
    plain = llm.generate(prompts(llm), params, budget=0)
    drafted = llm.generate(prompts(llm), params, budget=16)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert [c.text for c in drafted] == [c.text for c in plain]
    llm.engine.check_idle()


def test_the_shipped_head_earns_its_keep(llm: LLM) -> None:
    """Several tokens per target pass on ordinary questions; a broken context, mask or position brings this to about 1."""
    done = llm.generate(prompts(llm), SamplingParams(max_tokens=48), budget=16)
    tokens = sum(c.usage.completion_tokens for c in done)
    assert tokens / sum(c.usage.target_steps for c in done) > 1.8


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """`jetflow-serve` as a user starts it, on a free port; on a busy machine the budget `auto` may not draft at all."""
    command = [sys.executable, "-m", "jetflow_serve", "--port", "0", "--budget", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            seen: list[str] = []
            for line in process.stdout:
                seen.append(line)
                if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                    break
            else:
                pytest.fail("the server ended: " + "".join(seen))
            url = f"http://127.0.0.1:{found.group(1)}"
            for _ in range(300):
                try:
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                except httpx.ConnectError:
                    time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait(30)


def test_a_chat_client_gets_paris_streamed(server: str) -> None:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTIONS[0]}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert (usage.completion_tokens_details.accepted_prediction_tokens or 0) > 0


def test_an_echoed_prompt_is_spelled_by_its_tokens(server: str) -> None:
    prompt = "naïve – 你好 👩‍🚀 12345\n\tdef f(x): return x"
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        answer = client.completions.create(model=model, prompt=prompt, echo=True, max_tokens=0, logprobs=1)
    own = answer.choices[0].logprobs
    assert answer.choices[0].text == prompt
    assert own is not None
    assert own.tokens is not None
    assert own.text_offset is not None
    assert own.token_logprobs is not None
    spelled = b"".join(
        bytes.fromhex(name.removeprefix("bytes:").replace("\\x", "")) if name.startswith("bytes:\\x") else name.encode()
        for name in own.tokens
    )
    assert spelled == prompt.encode()
    assert any(name.startswith("bytes:") for name in own.tokens)  # some characters take several tokens
    assert own.text_offset == sorted(own.text_offset)
    assert own.token_logprobs[0] is None
    assert all(value is not None and value < 0 for value in own.token_logprobs[1:])
