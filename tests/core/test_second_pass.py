"""The second pass: lossless like any drafter, masks below the tree's nodes, and the rule by which trees grow again."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetflow_core.drafter import DraftJob, HeadDrafter
from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.head import DraftHead
from jetflow_core.llm import LLM
from jetflow_core.merging import MergedDrafter
from jetflow_core.sampling import SamplingParams
from jetflow_core.second_pass import EXPANDED, Expansion, regrown, slotted
from jetflow_core.tree import Candidates, DraftTree, ancestor_mask, grown_trees
from tiny import MASK, PARAMS, PROMPTS, VOCAB, tiny_eagle, tiny_head, tiny_model

MODEL = tiny_model(seed=7)


@cache
def plain() -> list[list[int]]:
    """Every prompt decoded without a head."""
    return [each.token_ids for each in LLM(Engine(MODEL, config=EngineConfig(budget=0))).generate(PROMPTS, PARAMS)]


@cache
def head_of(order: int = 1, conditioning: str = "pairwise") -> DraftHead:
    """A head whose draft vocabulary, in no order, leaves half of the tokens out but holds the mask's."""
    vocab = torch.arange(0, VOCAB, 2).roll(5).flip(0)
    head = tiny_head(MODEL, order=order, conditioning=conditioning, draft_vocab=vocab)
    head.pack()
    return head


# -- lossless ---------------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(
    order=st.sampled_from([1, 2]),
    budget=st.sampled_from([1, 8, 40, 70, "auto"]),
    page=st.sampled_from([1, 8, 16]),
    chunk=st.integers(6, 80),
    pool=st.sampled_from([130, 180, 500]),
    running=st.integers(1, 5),
    depth=st.sampled_from([None, 1, 3]),
)
def test_any_schedule_gives_the_text_of_plain_decoding(
    order: int, budget: int, page: int, chunk: int, pool: int, running: int, depth: int | None
) -> None:
    config = EngineConfig(
        draft_passes=2,
        draft_depth=depth,
        budget=budget,
        page_size=page,
        max_batch_tokens=chunk,
        num_pages=-(-pool // page),
        max_running=running,
    )
    llm = LLM(Engine(MODEL, head=head_of(order), config=config))
    for _ in range(2):  # the second time out of the prefix cache
        assert [each.token_ids for each in llm.generate(PROMPTS, PARAMS)] == plain()
        llm.engine.check_idle()


def test_preempted_requests_end_alike() -> None:
    prompts, params = [[3], [4, 4, 4], [5, 6], [7]], SamplingParams(max_tokens=40)
    expected = LLM(Engine(MODEL, config=EngineConfig(budget=0))).generate(prompts, params)
    config = EngineConfig(drafter="head", draft_passes=2, budget=8, page_size=4, num_pages=26, max_batch_tokens=64)
    engine = Engine(MODEL, head=head_of(), config=config)
    completions = LLM(engine).generate(prompts, params)
    assert [each.token_ids for each in completions] == [each.token_ids for each in expected]
    assert engine.stats.preemptions > 0
    assert engine.phases.seconds["draft"] > 0


# -- the pass ---------------------------------------------------------------------------------------------------------


def drafter_of(head: DraftHead, passes: int, blocks: int = 200) -> HeadDrafter:
    drafter = HeadDrafter(head, blocks, 1, 8, passes=passes)
    generator = torch.Generator().manual_seed(0)
    for keys, values in drafter.cache.layers:
        keys.normal_(generator=generator)
        values.normal_(generator=generator)
    return drafter


def jobs_of(*budgets: int, max_depth: int = 5) -> list[DraftJob]:
    """Requests that share the first ten slots' context, each with slots of its own behind it."""
    return [
        DraftJob([*range(10), 20 + n], [*range(10), *range(10 + 66 * n, 76 + 66 * n)], budget, max_depth)
        for n, budget in enumerate(budgets)
    ]


@pytest.mark.parametrize("conditioning", ["pairwise", "none"])
@pytest.mark.parametrize("max_depth", [1, 3, 9])
def test_trees_are_ranked_within_their_limits_and_those_of_each_request_alone(
    conditioning: str, max_depth: int
) -> None:
    head = head_of(conditioning=conditioning)
    jobs = jobs_of(1, 12, 60, max_depth=max_depth)
    trees = drafter_of(head, 2, 210).propose(jobs)
    for tree, job in zip(trees, jobs, strict=True):
        assert len(tree) <= 1 + job.budget
        assert tree.depths.max() <= min(max_depth, 5)
        assert (np.diff(tree.scores) <= 0).all()
        for nodes in (0, 1, 7, len(tree)):
            assert len(tree.cut(nodes)) == min(1 + nodes, len(tree))  # a tree of its own, or DraftTree says why not
        (alone,) = drafter_of(head, 2, 210).propose([job])
        np.testing.assert_array_equal(tree.tokens, alone.tokens)
        np.testing.assert_allclose(tree.scores, alone.scores, rtol=1e-4, atol=1e-5)


def test_a_second_pass_finds_children_that_the_depths_candidates_lack() -> None:
    job = jobs_of(40)
    first, second = (drafter_of(head_of(), passes).propose(job)[0] for passes in (1, 2))
    named = {(int(depth), int(token)) for depth, token in zip(first.depths, first.tokens, strict=True)}
    assert {(int(depth), int(token)) for depth, token in zip(second.depths, second.tokens, strict=True)} - named
    # Depth 1 has one history, which the first pass knows already.
    shallow = [tree.scores[tree.depths == 1][:3] for tree in (first, second)]
    np.testing.assert_allclose(*shallow, rtol=1e-4)


def test_nothing_is_drafted_from_what_is_not_finite() -> None:
    drafter = drafter_of(head_of(), 2)
    drafter.cache.layers[0][1][0] = torch.nan
    assert len(drafter.propose(jobs_of(12))[0]) == 1


def test_slots_hang_below_their_nodes_and_see_their_branches() -> None:
    tree = DraftTree(np.array([7, MASK, 8, 9]), np.array([-1, 0, 1, 0]), np.array([0, 1, 2, 1]), np.zeros(4))
    segment = slotted(tree, np.array([0, 1, 3]), MASK, 30, [0])
    assert segment.ids.tolist() == [7, MASK, 9, MASK, MASK, MASK]
    assert segment.depths.tolist() == [0, 1, 1, 1, 2, 2]
    assert segment.tree is not None
    bits = [f"{row:06b}"[::-1] for row in ancestor_mask(segment.tree, 1)[:, 0]]
    assert bits == ["100000", "110000", "101000", "100100", "110010", "101001"]


# -- growing again ----------------------------------------------------------------------------------------------------

Path = tuple[int, ...]


def paths(tree: DraftTree) -> list[Path]:
    """Every node's tokens from the root's child on."""
    found: list[Path] = [()]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        found.append((*found[parent], token))
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    first=st.integers(0, 30),
    count=st.integers(1, 12),
    width=st.integers(1, 4),
    budget=st.integers(0, 50),
)
def test_the_best_nodes_of_the_rule_are_chosen(seed: int, first: int, count: int, width: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    depths, tokens = 4, 3
    names = np.stack([rng.permutation(9)[:tokens] for _ in range(depths)])[None]

    def log_q(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return -rng.exponential(size=shape).astype(np.float32)

    candidates = Candidates.of_tables(names, log_q(1, tokens), log_q(1, depths - 1, tokens, tokens))
    tree = grown_trees([5], candidates, [first], [depths])[0]
    nodes = np.nonzero(tree.depths[:count] < depths)[0]
    table = log_q(len(nodes), 9)
    below = np.argsort(-table, axis=1)[:, :width]
    known = np.nonzero(np.isin(tree.parents, nodes))[0]
    slot = {int(node): row for row, node in enumerate(nodes)}
    known_logp = np.array([table[slot[int(tree.parents[c])], tree.tokens[c]] for c in known], dtype=np.float32)
    grown = regrown(tree, Expansion(nodes, below, np.take_along_axis(table, below, 1), known, known_logp), budget)

    own = paths(tree)
    expected: dict[Path, float] = {(): 0.0}
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        step = table[slot[parent], tree.tokens[node]] if parent in slot else tree.scores[node] - tree.scores[parent]
        expected[own[node]] = expected[own[parent]] + float(step)
    for node, row in slot.items():
        for token in below[row].tolist():
            expected.setdefault((*own[node], token), expected[own[node]] + float(table[row, token]))
    best = sorted(expected, key=lambda path: (-expected[path], len(path)))[: budget + 1]
    assert set(paths(grown)) == set(best)
    np.testing.assert_allclose(grown.scores, [expected[path] for path in paths(grown)], rtol=1e-6)
    assert (np.diff(grown.scores) <= 0).all()


# -- what is refused, and what is reserved ----------------------------------------------------------------------------


def test_slots_for_the_tree_and_its_masks_are_reserved() -> None:
    engine = Engine(MODEL, head=head_of(), config=EngineConfig(draft_passes=2))
    assert isinstance(engine.drafter, MergedDrafter)
    assert engine.scheduler.draft_slots == 2 * (1 + EXPANDED)


def test_passes_that_no_head_has_are_refused() -> None:
    for passes in (0, 3):
        with pytest.raises(ValueError, match=f"draft_passes is {passes}: use 1, or 2"):
            EngineConfig(draft_passes=passes)
    config = EngineConfig(draft_passes=2)
    with pytest.raises(ValueError, match=r"bidirectional .*: use draft_passes 1, or a causal head, .*--prefix"):
        Engine(MODEL, head=tiny_head(MODEL, causal=False), config=config)
    with pytest.raises(ValueError, match=r"EAGLE head .*: use draft_passes 1"):
        Engine(MODEL, head=tiny_eagle(MODEL), config=config)
