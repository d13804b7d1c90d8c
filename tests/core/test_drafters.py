"""Which drafter an engine builds, and that none of them changes a token."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetflow_core.drafter import HeadDrafter, head_candidates
from jetflow_core.engine import DrafterKind, Engine, EngineConfig
from jetflow_core.heads import Head
from jetflow_core.llm import LLM, Completion
from jetflow_core.lookup import LookupDrafter
from jetflow_core.merging import MergedDrafter
from jetflow_core.model import Decoder
from jetflow_core.sampling import SamplingParams
from jetflow_core.shaping import ShapedDrafter
from jetflow_core.tree import grown_trees
from tiny import KINDS, tiny_eagle, tiny_head, tiny_model

PROMPTS = [
    [3],
    [5, 6, 7, 8] * 4,
    [int(i * 7 % 11) for i in range(40)],
    [4, 4, 4],
    [*range(20, 50), *range(20, 50)],
]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.8, seed=1),
    SamplingParams(max_tokens=17, temperature=1.2, top_p=0.9, top_k=20, seed=2),
    SamplingParams(max_tokens=30, logit_bias={4: 6.0, 5: 5.0}),  # text that repeats itself
    SamplingParams(max_tokens=30, temperature=0.7, logit_bias={4: 7.0, 5: 7.0, 6: 7.0}, seed=3),
]


@cache
def reference(kind: str) -> tuple[Decoder, list[list[int]]]:
    """A model, and what it says one prompt and one token at a time."""
    model = tiny_model(kind)
    plain = LLM(Engine(model, config=EngineConfig(budget=0, max_running=1)))
    return model, [plain.generate([p], q)[0].token_ids for p, q in zip(PROMPTS, PARAMS, strict=True)]


def engine(model: Decoder, config: EngineConfig) -> Engine:
    head = None if config.drafter == "lookup" else tiny_head(model)
    if head is not None:
        head.pack()
    return Engine(model, head=head, config=config)


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    drafter=st.sampled_from(["lookup", "head+lookup"]),
    budget=st.integers(0, 40) | st.just("auto"),
    page=st.sampled_from([1, 2, 8, 16]),
    chunk=st.integers(6, 80),
    pool=st.sampled_from([100, 130, 400]),
    running=st.integers(1, 5),
    cutoff=st.sampled_from([0.0, 0.02, 0.2]),
    depth=st.sampled_from([None, 1, 3]),
    temperature=st.sampled_from([None, 0.5, 2.0]),
)
def test_any_schedule_gives_the_text_of_one_at_a_time(
    kind: str,
    drafter: DrafterKind,
    budget: int,
    page: int,
    chunk: int,
    pool: int,
    running: int,
    cutoff: float,
    depth: int | None,
    temperature: float | None,
) -> None:
    model, expected = reference(kind)
    config = EngineConfig(
        budget=budget,
        page_size=page,
        max_batch_tokens=chunk,
        num_pages=-(-pool // page),
        max_running=running,
        drafter=drafter,
        draft_cutoff=cutoff,
        draft_depth=depth,
        draft_temperature=temperature,
    )
    llm = LLM(engine(model, config))
    for _ in range(2):  # the second time out of the prefix cache
        assert [c.token_ids for c in llm.generate(PROMPTS, PARAMS)] == expected
        llm.engine.check_idle()


def spoil(head: Head, how: str) -> Head:
    """A head whose logits are worth nothing: not finite in places or all over, equal, or certain of one token."""
    own = head.logits

    def logits(hidden: Tensor) -> Tensor:
        found = own(hidden).clone()
        if how == "certain":
            found[:, 5] = 1e4
        elif how == "equal":
            found[:] = 0
        else:
            value, places = how.split(" ")
            found[{"all": ..., "some": torch.rand(found.shape) < 0.5, "rows": torch.rand(len(found)) < 0.5}[places]] = (
                float(value)
            )
        return found

    head.logits = logits  # type: ignore[method-assign]
    return head


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["pairwise", "second order", "none", "bidirectional", "eagle"]),
    how=st.sampled_from(["nan all", "nan some", "nan rows", "inf some", "-inf all", "-inf some", "equal", "certain"]),
    drafter=st.sampled_from(["head", "head+lookup"]),
    vocabulary=st.sampled_from([None, 30]),
    block=st.sampled_from([2, 6]),
    budget=st.sampled_from([1, 5, 40, 256, "auto"]),
    candidates=st.sampled_from([1, 5, 1000]),
    passes=st.sampled_from([1, 2]),
    cutoff=st.sampled_from([0.0, 0.1, 1.0]),
    temperature=st.sampled_from([None, 1e-320, 1e300]),
)
def test_a_broken_head_costs_time_and_never_a_token(
    kind: str,
    how: str,
    drafter: DrafterKind,
    vocabulary: int | None,
    block: int,
    budget: int,
    candidates: int,
    passes: int,
    cutoff: float,
    temperature: float | None,
) -> None:
    model, expected = reference("dense")
    ids = None if vocabulary is None else torch.arange(0, 90, 90 // vocabulary)
    if kind == "eagle":
        head: Head = tiny_eagle(model, draft_vocab=ids, depth=block - 1)
    else:
        conditioning = "none" if kind in ("none", "bidirectional") else "pairwise"
        order = 2 if kind == "second order" else 1
        causal = kind != "bidirectional"
        head = tiny_head(
            model, causal=causal, conditioning=conditioning, order=order, draft_vocab=ids, block_size=block
        )
    head.pack()
    config = EngineConfig(
        budget=budget,
        drafter=drafter,
        candidates=candidates,
        draft_passes=1 if kind in ("bidirectional", "eagle") else passes,
        draft_cutoff=cutoff,
        draft_temperature=temperature,
        num_pages=60,
    )
    llm = LLM(Engine(model, head=spoil(head, how), config=config))
    assert [c.token_ids for c in llm.generate(PROMPTS, PARAMS)] == expected
    llm.engine.check_idle()


def test_one_candidate_of_a_bidirectional_head_is_a_chain_of_its_argmaxes() -> None:
    """DFlash's chain."""
    head = tiny_head(tiny_model(), causal=False, conditioning="none")
    head.pack()
    hidden = torch.randn(2, 5, 32)
    found = head_candidates(head, hidden, torch.tensor([1, 2]), torch.tensor([3, 4]), 1)
    for block, tree in enumerate(grown_trees([1, 2], found, [9, 3], [5, 5])):
        argmaxes = head.logits(hidden[block]).argmax(-1)[: len(tree) - 1]
        assert tree.tokens.tolist() == [block + 1, *argmaxes.tolist()]
        assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
        assert len(tree) == (6, 4)[block]


@pytest.mark.parametrize("drafter", ["lookup", "head+lookup"])
def test_preempted_requests_draft_on(drafter: DrafterKind) -> None:
    model, expected = reference("dense")
    llm = LLM(engine(model, EngineConfig(budget=12, page_size=2, num_pages=50, drafter=drafter)))
    assert [c.token_ids for c in llm.generate(PROMPTS, PARAMS)] == expected
    assert llm.engine.stats.preemptions > 0


@pytest.mark.parametrize("drafter", ["lookup", "head+lookup"])
def test_copies_are_accepted(drafter: DrafterKind) -> None:
    model, _ = reference("dense")
    done = LLM(engine(model, EngineConfig(budget=16, drafter=drafter))).generate(PROMPTS[3:4], PARAMS[3:4])[0]
    assert done.acceptance_length > 1.5


@pytest.mark.parametrize(("kind", "drafter"), [("moe", "lookup"), ("dense", "head+lookup")])
def test_exact_mode_is_lossless_to_the_bit(kind: str, drafter: DrafterKind) -> None:
    model = tiny_model(kind, hidden_size=64).to(torch.bfloat16)
    model.set_max_positions(256)
    model.set_exact()
    params = [
        SamplingParams(max_tokens=24, logprobs=1, logit_bias={4: 6.0}),
        SamplingParams(max_tokens=12, temperature=0.8, seed=1, logprobs=1),
    ]

    def answers(config: EngineConfig) -> list[Completion]:
        return LLM(engine(model, config)).generate(PROMPTS[3:], params)

    for drafted, plain in zip(
        answers(EngineConfig(budget=40, drafter=drafter)), answers(EngineConfig(budget=0)), strict=True
    ):
        assert (drafted.token_ids, drafted.logprobs) == (plain.token_ids, plain.logprobs)


# -- which one is built -----------------------------------------------------------------------------------------------


def test_head_and_lookup_draft_where_there_is_a_head() -> None:
    model = tiny_model()
    assert Engine(model).drafter is None
    assert isinstance(Engine(model, head=tiny_head(model)).drafter, MergedDrafter)
    assert isinstance(engine(model, EngineConfig(drafter="head")).drafter, HeadDrafter)


def test_lookup_takes_no_head_and_reserves_nothing() -> None:
    model = tiny_model()
    alone, beside = (
        Engine(model, head=head, config=EngineConfig(drafter="lookup")) for head in (None, tiny_head(model))
    )
    for built in (alone, beside):
        assert isinstance(built.drafter, LookupDrafter)
        assert built.head is None
        assert built.scheduler.draft_slots == 0
    assert alone.scheduler.pool.num_blocks == beside.scheduler.pool.num_blocks


def test_both_are_merged() -> None:
    built = engine(tiny_model(), EngineConfig(drafter="head+lookup"))
    assert isinstance(built.drafter, MergedDrafter)
    assert [type(part) for part in built.drafter.parts] == [HeadDrafter, LookupDrafter]
    assert (built.drafter.tap_layers, built.scheduler.draft_slots) == ((0, 2), 6)


@pytest.mark.parametrize("drafter", ["head", "head+lookup"])
def test_a_head_that_is_asked_for_must_be_given(drafter: DrafterKind) -> None:
    with pytest.raises(ValueError, match="no draft head"):
        Engine(tiny_model(), config=EngineConfig(drafter=drafter))


def test_an_unknown_drafter_is_refused() -> None:
    with pytest.raises(ValueError, match="drafter is 'ngram': use one of auto, head, lookup"):
        EngineConfig(drafter="ngram")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"draft_depth": 0}, "draft_depth"), ({"draft_cutoff": 2.0}, "draft_cutoff"), ({"draft_temperature": 0.0}, "0.0")],
)
def test_bad_shapes_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**changes)  # type: ignore[arg-type]


def test_a_heads_own_temperature_holds_until_another_is_asked_for() -> None:
    model = tiny_model()
    head = tiny_head(model)
    head.config = replace(head.config, draft_temperature=1.5)

    def temperature(config: EngineConfig) -> float:
        drafter = Engine(model, head=head, config=config).drafter
        return drafter.shaping.temperature if isinstance(drafter, ShapedDrafter) else 1.0

    assert temperature(EngineConfig(drafter="head")) == 1.5
    assert temperature(EngineConfig(drafter="head", draft_temperature=0.8)) == 0.8
    assert temperature(EngineConfig(drafter="head", draft_temperature=1.0)) == 1.0
    merged = Engine(model, head=head, config=EngineConfig(drafter="head+lookup")).drafter
    assert isinstance(merged, MergedDrafter)
    assert [type(part) for part in merged.parts] == [ShapedDrafter, LookupDrafter]
