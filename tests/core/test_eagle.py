"""The EAGLE head: lossless like any drafter, its context in pages, its tree grown by levels, its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetflow_core.eagle import EagleHead
from jetflow_core.eagle_config import EagleConfig
from jetflow_core.eagle_drafter import EagleDrafter
from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.head import DraftHead
from jetflow_core.heads import load_head
from jetflow_core.llm import LLM, check_head
from jetflow_core.model import Decoder
from jetflow_core.sampling import SamplingParams
from jetflow_core.tree import DraftTree
from jetflow_core.weights import CheckpointError
from tiny import KINDS, PARAMS, PROMPTS, VOCAB, tiny_eagle, tiny_head, tiny_model


def plain(model: Decoder) -> list[list[int]]:
    """Every prompt decoded without a head."""
    engine = Engine(model, config=EngineConfig(budget=0))
    return [each.token_ids for each in LLM(engine).generate(PROMPTS, PARAMS)]


MODEL = tiny_model(seed=7)
PLAIN = plain(MODEL)
HEAD = tiny_eagle(MODEL, draft_vocab=torch.arange(0, VOCAB - 1, 2))
HEAD.pack()


def echo_head(model: Decoder) -> EagleHead:
    """A head whose features of committed positions are the last tap of the target."""
    head = tiny_eagle(model, depth=6, expanded=4)
    width = model.config.hidden_size
    head.fc.dense.zero_()
    head.fc.dense[:, width:] = torch.eye(width)
    return head


@settings(max_examples=6, deadline=None)
@given(
    budget=st.integers(0, 40),
    page=st.sampled_from([1, 2, 8, 16, 64]),
    chunk=st.integers(6, 80),
    pool=st.sampled_from([110, 130, 400]),
    running=st.integers(1, 5),
)
def test_any_schedule_gives_the_text_of_plain_decoding(
    budget: int, page: int, chunk: int, pool: int, running: int
) -> None:
    config = EngineConfig(
        budget=budget, page_size=page, max_batch_tokens=chunk, num_pages=-(-pool // page), max_running=running
    )
    engine = Engine(MODEL, head=HEAD, config=config)
    assert [each.token_ids for each in LLM(engine).generate(PROMPTS, PARAMS)] == PLAIN
    engine.check_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_target_is_served_losslessly(kind: str) -> None:
    model = tiny_model(kind, seed=3)
    head = tiny_eagle(model)
    head.pack()
    engine = Engine(model, head=head, config=EngineConfig(drafter="head", budget=12, max_running=4))
    assert [each.token_ids for each in LLM(engine).generate(PROMPTS, PARAMS)] == plain(model)


def test_preempted_requests_end_alike() -> None:
    prompts, params = [[3], [4, 4, 4], [5, 6], [7]], SamplingParams(max_tokens=30)
    expected = LLM(Engine(MODEL, config=EngineConfig(budget=0))).generate(prompts, params)
    config = EngineConfig(drafter="head", budget=8, page_size=4, num_pages=20, max_batch_tokens=64)
    engine = Engine(MODEL, head=HEAD, config=config)
    completions = LLM(engine).generate(prompts, params)
    assert [each.token_ids for each in completions] == [each.token_ids for each in expected]
    assert engine.stats.preemptions > 0


def proposed(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[DraftTree]:
    """The trees that the engine drafts for `prompt`."""
    trees: list[DraftTree] = []
    drafter = engine.drafter
    assert isinstance(drafter, EagleDrafter)
    propose = drafter.propose

    def recorded(jobs: Sequence[object]) -> list[DraftTree]:
        trees.extend(propose(jobs))  # type: ignore[arg-type]
        return trees[-len(jobs) :]

    drafter.propose = recorded  # type: ignore[method-assign, assignment]
    LLM(engine).generate([prompt], params)
    drafter.propose = propose  # type: ignore[method-assign]
    return trees


def test_a_prefix_cache_hit_drafts_as_a_full_prefill() -> None:
    prompt, params = PROMPTS[4], SamplingParams(max_tokens=12)
    config = EngineConfig(drafter="head", budget=9, page_size=8, max_batch_tokens=40)
    engine = Engine(MODEL, head=HEAD, config=config)
    first = proposed(engine, prompt, params)
    LLM(engine).generate([PROMPTS[2]], params)
    again = proposed(engine, prompt, params)
    assert engine.stats.hit_tokens >= 56
    assert len(first) == len(again) > 0
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-4, atol=1e-4)


def test_the_context_is_what_one_pass_over_the_committed_tokens_gives() -> None:
    """After chunks, trees and moves: features, keys and values of a fresh prefill of the same tokens."""
    head = echo_head(MODEL)
    engine = Engine(
        MODEL,
        head=head,
        config=EngineConfig(drafter="head", budget=12, page_size=4, max_batch_tokens=16, max_running=4),
    )
    engine.add(PROMPTS[2], SamplingParams(max_tokens=30))
    while not engine.scheduler.running or engine.scheduler.running[0].num_output < 20:
        engine.step()
    request = engine.scheduler.running[0]
    assert request.accepted > 0
    fresh = Engine(MODEL, head=head, config=EngineConfig(drafter="head", budget=0, page_size=4))
    fresh.add(request.tokens[:-1], SamplingParams(max_tokens=2))
    fresh.step()
    other = fresh.scheduler.running[0]
    positions = np.arange(request.num_cached)
    mine, theirs = (np.array(r.blocks)[positions // 4] * 4 + positions % 4 for r in (request, other))
    a, b = engine.drafter, fresh.drafter
    assert isinstance(a, EagleDrafter)
    assert isinstance(b, EagleDrafter)
    torch.testing.assert_close(a.features[mine], b.features[theirs], rtol=1e-4, atol=1e-4)
    pages = [each.cache.pages.flatten(2, 3) for each in (a, b)]
    torch.testing.assert_close(pages[0][:, :, mine], pages[1][:, :, theirs], rtol=1e-4, atol=1e-4)


def test_trees_are_ranked_limited_and_grown_from_the_best_nodes() -> None:
    head = tiny_eagle(MODEL, depth=4, expanded=3)
    sizes = {}
    for budget in (1, 7, 30):
        config = EngineConfig(drafter="head", budget=budget, candidates=5, max_batch_tokens=64)
        trees = proposed(Engine(MODEL, head=head, config=config), PROMPTS[1], SamplingParams(max_tokens=6))
        sizes[budget] = trees[0]
        # The last token needs no draft, so at most 4, 3, … tokens are drafted deep.
        assert all(tree.depths.max() <= 5 - step for step, tree in enumerate(trees) if step)
        for tree in trees:
            assert (np.diff(tree.scores) <= 0).all()
            for depth in range(1, 4):
                assert len(set(tree.parents[tree.depths == depth + 1])) <= 3
    assert [len(tree) - 1 for tree in sizes.values()] == [1, 7, 30]
    assert sizes[30].depths.max() > 1
    for budget in (1, 7):
        cut = sizes[30].cut(budget)
        np.testing.assert_array_equal(cut.tokens, sizes[budget].tokens)
        np.testing.assert_array_equal(cut.parents, sizes[budget].parents)
        np.testing.assert_allclose(cut.scores, sizes[budget].scores, rtol=1e-5, atol=1e-5)


def test_a_deep_tree_needs_more_than_one_word_of_mask() -> None:
    head = tiny_eagle(MODEL, depth=7, expanded=9)
    assert head.config.tree_slots == 55
    engine = Engine(MODEL, head=head, config=EngineConfig(drafter="head", budget=60, max_batch_tokens=512))
    assert [each.token_ids for each in LLM(engine).generate(PROMPTS, PARAMS)] == PLAIN


@pytest.mark.parametrize("width", [1, 2, 9])
def test_the_engine_may_expand_more_or_fewer_nodes_of_a_level(width: int) -> None:
    head = tiny_eagle(MODEL, depth=4, expanded=3)
    config = EngineConfig(drafter="head", budget=400, draft_width=width)
    engine = Engine(MODEL, head=head, config=config)
    assert engine.scheduler.draft_slots == 1 + 3 * width
    tree = proposed(engine, PROMPTS[1], SamplingParams(max_tokens=12))[0]
    assert max(len(set(tree.parents[tree.depths == depth])) for depth in (2, 3, 4)) == width
    assert [each.token_ids for each in LLM(engine).generate(PROMPTS, PARAMS)] == PLAIN
    with pytest.raises(ValueError, match=r"draft_width is 2, but only an EAGLE head's tree grows level by level"):
        Engine(MODEL, head=tiny_head(MODEL), config=EngineConfig(draft_width=2))


def test_features_that_are_not_finite_draft_nothing() -> None:
    head = tiny_eagle(MODEL)
    head.fc.dense[0] = torch.nan
    engine = Engine(MODEL, head=head, config=EngineConfig(drafter="head", budget=6))
    trees = proposed(engine, PROMPTS[1], SamplingParams(max_tokens=6))
    assert {len(tree) for tree in trees} == {1}


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [None, torch.arange(1, 90, 3)])
def test_a_saved_head_loads_as_what_it_is(tmp_path: Path, vocab: torch.Tensor | None) -> None:
    assert MODEL.lm_head.weight is not None
    head = tiny_eagle(MODEL, draft_vocab=vocab)
    head.save(tmp_path / "head")
    loaded = load_head(tmp_path / "head", MODEL.embed, MODEL.lm_head.weight)
    assert isinstance(loaded, EagleHead)
    assert loaded.config == head.config
    assert EagleConfig.from_hf(head.config.to_hf(), "here") == head.config
    for name, tensor in head.named_parameters():
        if name != "_rows.weight":  # the target's own rows: shared, not stored
            torch.testing.assert_close(loaded.get_parameter(name), tensor.to(torch.bfloat16).to(tensor.dtype))
    hidden = torch.randn(2, 32)
    assert torch.equal(loaded.logits(hidden), head.logits(hidden))
    loaded.save(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "head" / name).read_bytes()


def test_a_jetflow_head_loads_as_what_it_is(tmp_path: Path) -> None:
    assert MODEL.lm_head.weight is not None
    tiny_head(MODEL).save(tmp_path)
    assert isinstance(load_head(tmp_path, MODEL.embed, MODEL.lm_head.weight), DraftHead)


def stored(tmp_path: Path, **changes: object) -> Path:
    """A head's folder with changes to its configuration; those of `own` go into its nested part."""
    tiny_eagle(MODEL).save(tmp_path)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text())
    own = changes.pop("own", {})
    assert isinstance(own, dict)
    data["eagle_config"] |= own
    path.write_text(json.dumps(data | changes))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"own": {"depth": None}}, r"required key eagle_config\.depth is missing"),
        ({"own": {"depth": 0}}, r"config\.json: depth = 0: must be positive"),
        ({"own": {"expanded": "many"}}, r"eagle_config\.expanded = 'many': expected an integer"),
        ({"own": {"width": 3}}, r"eagle_config\.width = 3: unknown; known are depth"),
        (
            {"own": {"target_layer_ids": [2, 1]}},
            r"target_layer_ids = \[2, 1\]: must be distinct layers in rising order",
        ),
        ({"own": {"draft_vocab_size": 1000}}, r"draft_vocab_size = 1000: must be in 1 … 97"),
        ({"own": {"draft_temperature": 0}}, r"draft_temperature = 0\.0: must be a finite number above 0"),
        ({"num_hidden_layers": 2}, r"num_hidden_layers = 2: an EAGLE head has one layer"),
        ({"intermediate_size": 40}, r"midlayer\.mlp\.gate_proj\.weight: expected shape \[40, 32\], found \[48, 32\]"),
        ({"hidden_size": 16}, r"hidden_size 16, its target has 32"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, r"EAGLE heads of other makers are not supported"),
        ({"architectures": 5}, r"architectures = 5: expected a list of strings"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    assert MODEL.lm_head.weight is not None
    with pytest.raises(ValueError, match=message):
        load_head(stored(tmp_path, **changes), MODEL.embed, MODEL.lm_head.weight)


def test_a_file_is_no_head(tmp_path: Path) -> None:
    assert MODEL.lm_head.weight is not None
    (tmp_path / "head.gguf").touch()
    with pytest.raises(CheckpointError, match="a draft head is a folder"):
        load_head(tmp_path / "head.gguf", MODEL.embed, MODEL.lm_head.weight)


def test_a_head_of_another_target_is_refused() -> None:
    with pytest.raises(ValueError, match="belongs to a target with 4 layers, this one has 6"):
        check_head(tiny_eagle(MODEL), tiny_model(num_layers=6).config, "here")
