"""Exact mode: speculation, batching and chunking change no bit, in half precision too."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hinted import hinted_engine
from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.llm import LLM, Completion
from jetflow_core.model import Decoder
from jetflow_core.sampling import SamplingParams
from jetflow_triton.exact_attention import LAG
from tiny import KINDS, tiny_head, tiny_model

PROMPTS = [[3], [int(i * i % 90) for i in range(64)], [int(i * 7 % 90) for i in range(150)]]
PARAMS = [
    SamplingParams(max_tokens=20, logprobs=2),
    SamplingParams(max_tokens=20, logprobs=2),
    SamplingParams(max_tokens=20, temperature=0.8, seed=1, logprobs=2),
]
HALVES = [torch.bfloat16, torch.float16]


@cache
def reference(kind: str, dtype: torch.dtype) -> tuple[Decoder, list[Completion]]:
    """A model in exact mode, and what it says one prompt and one token at a time."""
    model = tiny_model(kind, hidden_size=64).to(dtype)
    model.set_max_positions(256)  # the rotary table stays float32
    model.set_exact()
    plain = [
        LLM(Engine(model, config=EngineConfig(budget=0, max_batch_tokens=16, max_running=1))).generate(
            [prompt], params
        )[0]
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    return model, plain


@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(HALVES),
    budget=st.integers(0, 40),
    page=st.sampled_from([2, 16]),
    chunk=st.integers(5, 200),
    seed=st.integers(0, 99),
)
def test_log_probabilities_are_equal_to_the_bit(
    kind: str, dtype: torch.dtype, budget: int, page: int, chunk: int, seed: int
) -> None:
    model, plain = reference(kind, dtype)
    truth = {tuple(prompt): completion.token_ids for prompt, completion in zip(PROMPTS, plain, strict=True)}
    config = EngineConfig(
        budget=budget, page_size=page, max_batch_tokens=chunk, num_pages=-(-400 // page), max_running=4
    )
    engine = hinted_engine(model, config, truth, seed)
    for completion, expected in zip(LLM(engine).generate(PROMPTS, PARAMS), plain, strict=True):
        assert completion.token_ids == expected.token_ids
        assert completion.logprobs == expected.logprobs
    engine.check_idle()


def test_packed_weights_are_exact_too() -> None:
    model = tiny_model("llama", hidden_size=64).to(torch.bfloat16)
    model.set_exact()
    model.pack()
    everything = torch.randn(33, 64).bfloat16()
    layer = model.layers[0].feed_forward
    for rows in (1, 2, 7, 16):
        assert torch.equal(layer(everything[:rows]), layer(everything)[:rows])


def test_a_head_that_drafts_deeper_than_exact_attention_goes_is_refused() -> None:
    model = tiny_model()
    model.set_exact()
    with pytest.raises(ValueError, match=f"drafts {LAG + 1} tokens deep.*{LAG}"):
        Engine(model, head=tiny_head(model, block_size=LAG + 2))
