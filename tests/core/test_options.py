"""Penalties, bias, early ends and log-probabilities at the nodes of a tree: all as in step-by-step decoding (float32).

The reference is a plain loop: a forward of the whole sequence per token, and every option spelled out on the dense row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hinted import hinted_engine
from jetflow_core import verify as verify_module
from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.llm import LLM, Completion, _join
from jetflow_core.logprobs import TokenLogprobs, token_logprobs
from jetflow_core.model import Decoder
from jetflow_core.processing import ProcessedRow, TokenCounts, process
from jetflow_core.request import Output
from jetflow_core.sampling import Choice, SamplingParams, choose
from jetflow_core.tree import DraftTree
from tiny import KINDS, VOCAB, tiny_head, tiny_model

ENDS = (7, 11, 60)  # stop ids of the requests that have any

CASES: list[tuple[list[int], SamplingParams]] = [
    ([3], SamplingParams(max_tokens=24, presence_penalty=1.5, logprobs=0)),
    ([5, 6, 7, 8, 9], SamplingParams(max_tokens=24, frequency_penalty=2.0, logprobs=3)),
    (
        [int(i * 7 % 90) for i in range(40)],
        SamplingParams(max_tokens=20, repetition_penalty=1.5, logprobs=0, prompt_logprobs=2),
    ),
    (
        [4, 4, 4],
        SamplingParams(
            max_tokens=24, repetition_penalty=0.8, presence_penalty=-1.0, temperature=0.9, seed=1, prompt_logprobs=0
        ),
    ),
    (
        [int(i * i % 90) for i in range(50)],
        SamplingParams(
            max_tokens=20,
            logit_bias={7: 6.0, 11: 4.5, 20: -100},
            min_tokens=5,
            stop_token_ids=ENDS,
            logprobs=20,
            prompt_logprobs=5,
        ),
    ),
    (
        [9, 8],
        SamplingParams(
            max_tokens=24,
            temperature=1.1,
            top_p=0.95,
            top_k=30,
            seed=4,
            presence_penalty=0.7,
            frequency_penalty=0.9,
            repetition_penalty=1.2,
            logit_bias={1: 3.0, 50: -2.5},
            min_tokens=12,
            stop_token_ids=ENDS,
            logprobs=4,
        ),
    ),
    ([30, 31], SamplingParams(max_tokens=24)),
    ([int(i * 11 % 90) for i in range(33)], SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=1)),
]


@dataclass
class Expected:
    """What the plain loop gives: tokens, why they end, and log-softmax rows [n, V] of the tokens and of the prompt."""

    tokens: list[int]
    reason: str
    rows: Tensor
    prompt_rows: Tensor


def plain_loop(model: Decoder, prompt: Sequence[int], params: SamplingParams) -> Expected:
    """One token at a time, each from a forward of all that is before it."""
    ids, tokens, rows = list(prompt), [], []
    assert params.max_tokens is not None
    reason = "length"
    while len(tokens) < params.max_tokens:
        raw = model.logits(model.forward_sequence(torch.tensor(ids))[0])[-1]
        rows.append(raw.log_softmax(-1))
        row = with_options(raw, prompt, tokens, params)
        choice = Choice(slice(0, 1), params, torch.tensor([len(ids)]), params.seed or 0)
        token = int(choose(row[None], [choice]))
        ids.append(token)
        tokens.append(token)
        if token in params.stop_token_ids:
            reason = "stop"
            break
    prompt_rows = model.logits(model.forward_sequence(torch.tensor(list(prompt)))[0]).log_softmax(-1)[:-1]
    return Expected(tokens, reason, torch.stack(rows) if rows else torch.empty(0, VOCAB), prompt_rows)


def with_options(raw: Tensor, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams) -> Tensor:
    """The options on one dense row [V], token by token."""
    row = raw.tolist()
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if len(tokens) < params.min_tokens:
        for token in params.stop_token_ids:
            row[token] = -math.inf
    for token in {*prompt, *tokens}:
        row[token] *= params.repetition_penalty if row[token] < 0 else 1 / params.repetition_penalty
    for token, count in Counter(tokens).items():
        row[token] -= count * params.frequency_penalty + params.presence_penalty
    return torch.tensor(row)


def check_entries(got: Sequence[TokenLogprobs], tokens: Sequence[int], rows: Tensor, top: int) -> None:
    """`got` is what `rows` say of `tokens`, to 1e-4; of tokens that tie, any may be among the best."""
    assert [entry.token_id for entry in got] == list(tokens)
    for entry, row in zip(got, rows, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        ids, values = [token for token, _ in entry.top], [value for _, value in entry.top]
        assert len(set(ids)) == len(ids) == top
        assert values == pytest.approx(row[ids].tolist(), abs=1e-4)
        assert values == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)


def check(done: Completion, prompt: Sequence[int], params: SamplingParams, expected: Expected) -> None:
    """A completion is what the plain loop gives, and has log-probabilities exactly where they were asked for."""
    assert done.error is None
    assert done.token_ids == expected.tokens
    assert done.finish_reason == expected.reason
    assert done.usage.completion_tokens == len(expected.tokens)
    assert (done.logprobs is None) == (params.logprobs is None)
    assert (done.prompt_logprobs is None) == (params.prompt_logprobs is None)
    if done.logprobs is not None:
        check_entries(done.logprobs, expected.tokens, expected.rows, params.logprobs or 0)
    if done.prompt_logprobs is not None:
        first, *others = done.prompt_logprobs
        assert first is None
        check_entries([e for e in others if e], prompt[1:], expected.prompt_rows, params.prompt_logprobs or 0)


def hinted_at(
    model: Decoder, config: EngineConfig, prompts: Sequence[Sequence[int]], expected: Sequence[Expected], seed: int
) -> Engine:
    return hinted_engine(model, config, {tuple(p): e.tokens for p, e in zip(prompts, expected, strict=True)}, seed)


PROMPTS, PARAMS = [prompt for prompt, _ in CASES], [params for _, params in CASES]


@pytest.fixture(scope="module", params=KINDS)
def reference(request: pytest.FixtureRequest) -> tuple[Decoder, list[Expected]]:
    model = tiny_model(request.param, seed=2)
    return model, [plain_loop(model, prompt, params) for prompt, params in CASES]


# --- all options side by side ---


@settings(max_examples=6, deadline=None)
@given(
    budget=st.integers(0, 30),
    page=st.sampled_from([1, 2, 8, 16, 64]),
    chunk=st.integers(9, 90),
    pool=st.sampled_from([100, 130, 500]),
    running=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_any_schedule_gives_what_the_plain_loop_gives(
    reference: tuple[Decoder, list[Expected]], budget: int, page: int, chunk: int, pool: int, running: int, seed: int
) -> None:
    model, expected = reference
    config = EngineConfig(
        budget=budget, page_size=page, max_batch_tokens=chunk, num_pages=-(-pool // page), max_running=running
    )
    engine = hinted_at(model, config, PROMPTS, expected, seed)
    for _ in range(2):  # the second time, beginnings may come from cached pages
        for done, *case in zip(LLM(engine).generate(PROMPTS, PARAMS), PROMPTS, PARAMS, expected, strict=True):
            check(done, *case)
    engine.check_idle()


def test_long_paths_are_accepted_with_options(reference: tuple[Decoder, list[Expected]]) -> None:
    """Otherwise the test above would show little."""
    model, expected = reference
    done = LLM(hinted_at(model, EngineConfig(budget=16), PROMPTS, expected, 0)).generate(PROMPTS, PARAMS)
    assert all(d.acceptance_length > 1.5 for d in done if len(d.token_ids) > 10)


def test_the_options_change_something(reference: tuple[Decoder, list[Expected]]) -> None:
    model, expected = reference
    plain = [SamplingParams(p.temperature, p.top_p, p.top_k, seed=p.seed, max_tokens=p.max_tokens) for p in PARAMS]
    bare = LLM(Engine(model, config=EngineConfig(budget=0))).generate(PROMPTS, plain)
    changed = [d.token_ids != e.tokens for d, e in zip(bare, expected, strict=True)]
    assert changed[:6] == [True] * 6
    assert changed[6:] == [False] * 2


tokens = st.integers(0, VOCAB - 1)


@st.composite
def options(draw: st.DrawFn) -> SamplingParams:
    """Any combination of the options, each off as often as not."""
    stops = tuple(draw(st.lists(tokens, max_size=12)))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.3])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        min_p=draw(st.sampled_from([0.0, 0.02])),
        seed=draw(st.integers(0, 9)),
        max_tokens=draw(st.integers(0, 14)),
        stop_token_ids=stops,
        presence_penalty=draw(st.just(0.0) | st.floats(-2, 2)),
        frequency_penalty=draw(st.just(0.0) | st.floats(-2, 2)),
        repetition_penalty=draw(st.just(1.0) | st.floats(0.5, 2)),
        logit_bias=draw(st.just({}) | st.dictionaries(tokens, st.floats(-100, 100), max_size=4)),
        logprobs=draw(st.none() | st.integers(0, 20)),
        prompt_logprobs=draw(st.none() | st.integers(0, 20)),
    )


@settings(max_examples=25, deadline=None)
@given(
    cases=st.lists(
        st.tuples(st.lists(tokens, min_size=1, max_size=30), options(), st.integers(0, 14)), min_size=1, max_size=3
    ),
    budget=st.integers(0, 24),
    chunk=st.integers(4, 40),
    seed=st.integers(0, 99),
)
def test_any_combination_gives_what_the_plain_loop_gives(
    cases: list[tuple[list[int], SamplingParams, int]], budget: int, chunk: int, seed: int
) -> None:
    model = tiny_model(seed=3)
    prompts = [[index, *prompt] for index, (prompt, _, _) in enumerate(cases)]
    params = [replace(p, min_tokens=min(least, p.max_tokens or 0)) for _, p, least in cases]
    expected = [plain_loop(model, *case) for case in zip(prompts, params, strict=True)]
    engine = hinted_at(
        model, EngineConfig(budget=budget, page_size=4, max_batch_tokens=chunk, max_running=3), prompts, expected, seed
    )
    alone = Engine(model, config=EngineConfig(budget=0))
    for llm in (LLM(engine), LLM(alone)):
        for done, *case in zip(llm.generate(prompts, params), prompts, params, expected, strict=True):
            check(done, *case)
        llm.engine.check_idle()


def test_preemption_anywhere_gives_every_entry_once(reference: tuple[Decoder, list[Expected]]) -> None:
    """The youngest are put back in the middle of their prompt and of their output, again and again."""
    model, expected = reference
    engine = hinted_at(
        model, EngineConfig(budget=6, page_size=4, max_batch_tokens=24, max_running=8), PROMPTS, expected, 1
    )
    ids = [engine.add(prompt, params) for prompt, params in CASES]
    outputs: dict[str, list[Output]] = {request_id: [] for request_id in ids}
    random, preempted = np.random.default_rng(0), Counter[bool]()
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        running = engine.scheduler.running
        if preempted.total() < 60 and random.random() < 0.4:
            for victim in running[: random.integers(0, max(1, len(running))) : -1]:
                preempted[victim.num_output > 0] += 1
                engine.scheduler._preempt(victim)
    assert min(preempted[True], preempted[False]) > 5, preempted
    for request_id, *case in zip(ids, PROMPTS, PARAMS, expected, strict=True):
        check(_join(outputs[request_id]), *case)
    engine.check_idle()


def test_prompts_longer_than_the_logits_made_at_once(
    reference: tuple[Decoder, list[Expected]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = reference
    monkeypatch.setattr(verify_module, "_PROMPT_LOGITS_AT_ONCE", 7 * VOCAB)
    done = LLM(hinted_at(model, EngineConfig(budget=8), PROMPTS, expected, 0)).generate(PROMPTS, PARAMS)
    for index in (2, 4, 7):
        check(done[index], *CASES[index], expected[index])


# --- ends ---


class Letters:
    """Every token reads as its number in brackets."""

    def push(self, token: int, /) -> str:
        return f"<{token}>"

    def flush(self) -> str:
        return ""


def chain_engine(model: Decoder, prompt: Sequence[int], answer: list[int], **config: Any) -> Engine:
    """Every step drafts the next eight tokens of `answer`, so that an accepted batch reaches far beyond any stop in it."""
    engine = hinted_engine(model, EngineConfig(budget=8, **config), {tuple(prompt): answer}, 0)

    def chain(job: Any) -> DraftTree:
        done = len(engine.scheduler.running[0].tokens) - len(prompt)
        ids = [job.anchor, *answer[done : done + min(8, job.max_depth)]]
        places = np.arange(len(ids))
        return DraftTree(np.array(ids), places - 1, places, np.zeros(len(ids)))

    engine.drafter._tree = chain  # type: ignore[union-attr]
    engine._detokenizer = Letters  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("place", [0, 1, 3, 6, 8, 9, 10])
@pytest.mark.parametrize("kind", ["id", "token", "part", "border"])
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_nothing_past_a_stop_inside_an_accepted_batch(place: int, kind: str, penalty: float) -> None:
    model, prompt = tiny_model(seed=5), [3, 4]
    params = SamplingParams(max_tokens=20, frequency_penalty=penalty, logprobs=2)
    expected = plain_loop(model, prompt, params)
    texts = [f"<{token}>" for token in expected.tokens]
    if kind == "id":
        kept = expected.tokens.index(expected.tokens[place]) + 1
        text = "".join(texts[: kept - 1])
        params = replace(params, stop_token_ids=(expected.tokens[place],))
    else:
        own, following = texts[place], texts[place + 1]
        stop = {"token": own, "part": own[1:], "border": own[-2:] + following[:2]}[kind]
        text = "".join(texts).split(stop, maxsplit=1)[0]
        kept = next(n for n in range(21) if stop in "".join(texts[:n]))
        params = replace(params, stop=(stop,))
    engine = chain_engine(model, prompt, expected.tokens)
    done = LLM(engine).generate([prompt], params)[0]
    assert done.text == text
    check(done, prompt, params, Expected(expected.tokens[:kept], "stop", expected.rows[:kept], expected.prompt_rows))
    engine.check_idle()


def test_outputs_of_every_step_carry_the_entries_of_their_own_tokens() -> None:
    model, prompt = tiny_model(), [int(i * 3 % 90) for i in range(30)]
    params = SamplingParams(max_tokens=19, logprobs=1, prompt_logprobs=0)
    expected = plain_loop(model, prompt, params)
    engine = chain_engine(model, prompt, expected.tokens, max_batch_tokens=9, max_running=2)
    engine.add(prompt, params)
    outputs = [output for _ in range(20) for output in engine.step()]
    assert [len(output.token_ids) for output in outputs] == [1, 9, 9]
    for output in outputs:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert [output.prompt_logprobs is None for output in outputs] == [False, True, True]


@pytest.mark.parametrize("least", range(11))
@pytest.mark.parametrize("by", ["eos", "stop id", "ignored eos"])
def test_min_tokens_is_exact_inside_a_batch(least: int, by: str) -> None:
    """A token that always wins ends the request right after `min_tokens` others, or never where it is an ignored EOS."""
    model = tiny_model(eos_token_ids=(7,) if "eos" in by else ())
    params = SamplingParams(
        max_tokens=14,
        min_tokens=least,
        logit_bias={7: 100.0},
        stop_token_ids=(7,) if by == "stop id" else (),
        ignore_eos=by == "ignored eos",
    )
    greedy = replace(params, ignore_eos=False, stop_token_ids=(7,), logit_bias={7: 100.0}, min_tokens=13)
    without = plain_loop(model, [1, 2], greedy).tokens[:13]
    assert 7 not in without
    expected = [7] * 14 if by == "ignored eos" else [*without[:least], 7]
    engine = chain_engine(model, [1, 2], without[:least] + [7] * 14)
    done = LLM(engine).generate([[1, 2]], params)[0]
    assert done.token_ids == expected
    assert done.finish_reason == ("length" if by == "ignored eos" else "stop")
    assert done.text == "".join(f"<{t}>" for t in expected if t != 7 or by == "ignored eos")


@pytest.mark.parametrize("prompt", [[3], [5, 6, 7], list(range(40))])
@pytest.mark.parametrize("budget", [0, 8])
def test_max_tokens_zero_reads_the_prompt_and_ends(prompt: list[int], budget: int) -> None:
    model = tiny_model()
    engine = Engine(
        model, head=tiny_head(model), config=EngineConfig(budget=budget, max_batch_tokens=16, max_running=4)
    )
    params = SamplingParams(max_tokens=0, prompt_logprobs=3, logprobs=3)
    done = LLM(engine).generate([prompt], params)[0]
    check(done, prompt, params, plain_loop(model, prompt, params))
    assert (done.text, done.logprobs) == ("", [])
    engine.check_idle()


@pytest.mark.parametrize("index", [1, 2, 5])
def test_drafts_beyond_the_context_with_options(index: int) -> None:
    prompt, params = CASES[index]
    model = tiny_model(max_position_embeddings=len(prompt) + 9)
    expected = plain_loop(model, prompt, replace(params, max_tokens=9, min_tokens=9))
    params = replace(params, max_tokens=None, min_tokens=9)
    engine = hinted_engine(model, EngineConfig(budget=30), {tuple(prompt): expected.tokens}, 1)
    check(LLM(engine).generate([prompt], params)[0], prompt, params, expected)


def test_a_poisoned_tree_gives_every_entry_once() -> None:
    """Its tokens are dropped with their entries, and the anchor goes again alone."""
    model, prompt, params = tiny_model(), [3], SamplingParams(max_tokens=12, logprobs=2, presence_penalty=0.5)
    expected = plain_loop(model, prompt, params)
    assert 95 not in expected.tokens
    model.embed[95] = float("nan")  # not tied to the LM head, so logits stay finite where it is not read
    engine = chain_engine(model, prompt, [*expected.tokens[:2], 95])
    done = LLM(engine).generate([prompt], params)[0]
    check(done, prompt, params, expected)


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_ids_outside_the_vocabulary_are_refused(field: str) -> None:
    engine = Engine(tiny_model(), config=EngineConfig(budget=0))
    value = {VOCAB: 1.0} if field == "logit_bias" else (VOCAB,)
    with pytest.raises(ValueError, match=f"{field} holds token id 97, outside the vocabulary of 97"):
        engine.add([1], SamplingParams(**{field: value}))  # type: ignore[arg-type]
    engine.check_idle()


# --- what a row becomes ---


@settings(max_examples=50, deadline=None)
@given(
    cases=st.lists(
        st.tuples(options(), st.lists(tokens, max_size=9), st.lists(tokens, max_size=9), st.lists(tokens, max_size=6)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_processed_row_is_the_dense_arithmetic(
    cases: list[tuple[SamplingParams, list[int], list[int], list[int]]], seed: int, dtype: torch.dtype
) -> None:
    """Whatever part of the output is generated and what part is a drafted path; other rows stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(cases) + 1, VOCAB, generator=generator) * 3).to(dtype)
    rows: list[ProcessedRow] = []
    for index, (params, prompt, generated, path) in enumerate(cases):
        counts = TokenCounts(prompt if params.repetition_penalty != 1 else ())
        for token in generated:
            counts.add(token)
        early = len(generated) + len(path) < params.min_tokens
        rows.append(
            ProcessedRow(index, params, counts if params.penalises else None, path, params.stop_token_ids * early)
        )
        counts.after([1, 2, 3])  # looking ahead changes nothing
    got = process(logits.clone(), rows)
    assert got.dtype == torch.float32
    for index, (params, prompt, generated, path) in enumerate(cases):
        expected = with_options(logits[index].float(), prompt, [*generated, *path], params)
        torch.testing.assert_close(got[index], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(got[-1], logits[-1].float())


def test_without_options_nothing_is_touched() -> None:
    logits = torch.randn(2, 9, dtype=torch.bfloat16)
    assert process(logits, []) is logits


@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_no_penalty_makes_a_logit_infinite(penalty: float) -> None:
    logits = torch.tensor([[3.0, -2.0, 0.0, math.inf, -math.inf, math.nan]])
    row = ProcessedRow(0, SamplingParams(repetition_penalty=penalty), TokenCounts(range(6)), (), ())
    got = process(logits.clone(), [row])[0]
    assert got[:3].isfinite().all()
    assert got[3:5].tolist() == [math.inf, -math.inf]
    assert got[5].isnan()


def test_the_distribution_is_that_of_the_penalised_softmax() -> None:
    """The first two tokens of many seeds, drafted by a head, against the exact probabilities of every pair."""
    model, prompt = tiny_model(seed=8), [3, 1]
    params = SamplingParams(
        max_tokens=2, temperature=4.0, top_k=3, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=1.5
    )

    def probs(generated: list[int]) -> Tensor:
        raw = model.logits(model.forward_sequence(torch.tensor([*prompt, *generated]))[0])[-1]
        row = with_options(raw, prompt, generated, params)
        kept = row.topk(3).indices
        return torch.zeros(VOCAB).index_put((kept,), (row[kept] / params.temperature).softmax(-1))

    pairs = {
        (a, b): float(p * q)
        for a, p in enumerate(probs([])) if p > 0
        for b, q in enumerate(probs([a])) if q > 0
    }  # fmt: skip
    head = tiny_head(model)
    head.pack()
    engine = Engine(model, head=head, config=EngineConfig(budget=16))
    count = 1500
    done = LLM(engine).generate([prompt] * count, [replace(params, seed=i) for i in range(count)])
    seen = Counter((d.token_ids[0], d.token_ids[1]) for d in done)
    assert seen.keys() <= pairs.keys()
    chi_square = sum((seen[pair] - p * count) ** 2 / (p * count) for pair, p in pairs.items())
    freedom = len(pairs) - 1
    assert freedom == 8
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


# --- log-probabilities ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logprobs_are_the_float32_log_softmax(dtype: torch.dtype) -> None:
    logits = (torch.randn(5, 300) * 4).to(dtype)
    rows, chosen = logits.float().log_softmax(-1), [0, 299, 7, 7, 150]
    got = token_logprobs(logits, chosen, [0, 1, 20, 3, 0])
    for entry, row, token, top in zip(got, rows, chosen, [0, 1, 20, 3, 0], strict=True):
        check_entries([entry], [token], row[None], top)
        assert [value for _, value in entry.top] == sorted((v for _, v in entry.top), reverse=True)


@pytest.mark.parametrize("top", [1, 2, 5, 20])
def test_equal_alternatives_come_by_their_ids(top: int) -> None:
    """So that under greedy choice the first of them is the chosen one, in bfloat16 too, where many logits are equal."""
    logits = torch.randint(0, 6, (30, 64)).to(torch.bfloat16)
    chosen = choose(logits, []).tolist()
    for entry, row in zip(token_logprobs(logits, chosen, [top] * 30), logits.tolist(), strict=True):
        ids = [token for token, _ in entry.top]
        assert ids == sorted(range(64), key=lambda token: (-row[token], token))[:top]
        assert entry.top[0] == (entry.token_id, entry.logprob)


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    assert len(token_logprobs(torch.randn(1, 4), [2], [20])[0].top) == 4


def test_padding_of_the_vocabulary_has_no_probability() -> None:
    model = tiny_model()
    engine = Engine(model, config=EngineConfig(budget=0))
    engine.vocab_size = 50
    prompt, params = [3, 4, 5], SamplingParams(max_tokens=6, logprobs=20, prompt_logprobs=20)
    done = LLM(engine).generate([prompt], params)[0]
    rows = model.logits(model.forward_sequence(torch.tensor([*prompt, *done.token_ids]))[0])[:-1, :50].log_softmax(-1)
    assert done.logprobs is not None
    assert done.prompt_logprobs is not None
    check_entries([e for e in done.prompt_logprobs if e] + done.logprobs, [*prompt[1:], *done.token_ids], rows, 20)


# --- what it costs where it is not used ---


class Wide(TorchDispatchMode):
    """Counts the operations that give a tensor as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.ndim and result.shape[-1] == VOCAB:
            self.seen[func.name()] += 1
        return result


@pytest.mark.parametrize("index", [0, 4, 6])
def test_a_plain_request_makes_nothing_as_wide_as_the_vocabulary(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A level of the walk gathers its rows of the logits, and no more."""
    wide, levels = Wide(), Counter[str]()
    accept, choose_level = verify_module.accept, verify_module.choose

    def watched(*args: Any) -> Any:
        with wide:
            return accept(*args)

    def counted(*args: Any) -> Tensor:
        levels["all"] += 1
        return choose_level(*args)

    monkeypatch.setattr(verify_module, "accept", watched)
    monkeypatch.setattr(verify_module, "choose", counted)
    prompt, params = CASES[index]
    LLM(Engine(tiny_model(), config=EngineConfig(budget=0))).generate([prompt], params)
    plain = {"aten::index_select": levels["all"]}
    assert (wide.seen == plain) == (index == 6)
