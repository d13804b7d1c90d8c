"""Ragged batches: a tree's rows equal running every root-to-node path as a plain sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetflow_core.batch import PagedAttention, Segment, build_batch
from jetflow_core.kv_cache import KVCache
from jetflow_core.tree import DraftTree
from tiny import KINDS, VOCAB, tiny_model

PAGE = 4
MODELS = {kind: tiny_model(kind) for kind in KINDS}


def random_tree(size: int, seed: int) -> DraftTree:
    rng = np.random.default_rng(seed)
    parents, tokens, depths = [-1], [int(rng.integers(VOCAB))], [0]
    children: set[tuple[int, int]] = set()
    while len(tokens) < size:
        parent, token = int(rng.integers(len(tokens))), int(rng.integers(VOCAB))
        if (parent, token) not in children:
            children.add((parent, token))
            parents.append(parent)
            tokens.append(token)
            depths.append(depths[parent] + 1)
    return DraftTree(np.array(tokens), np.array(parents), np.array(depths), np.zeros(size))


def path_to(tree: DraftTree, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return path[::-1]


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    shapes=st.lists(st.tuples(st.integers(0, 13), st.integers(1, 40)), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_every_path_of_every_tree_is_a_plain_sequence(kind: str, shapes: list[tuple[int, int]], seed: int) -> None:
    model, config = MODELS[kind], MODELS[kind].config
    rng = np.random.default_rng(seed)
    cache = KVCache(4, 80, PAGE, config.num_kv_heads, config.head_dim, torch.float32, torch.device("cpu"))
    cache.pages.fill_(float("nan"))  # nothing unwritten may be read
    pages = rng.permutation(80).tolist()
    prompts = [rng.integers(0, VOCAB, size=prefix).tolist() for prefix, _ in shapes]
    blocks = [[pages.pop() for _ in range((prefix + size) // PAGE + 1)] for prefix, size in shapes]
    trees = [random_tree(size, seed + i) for i, (_, size) in enumerate(shapes)]
    # A prefill of the prompts (some may be empty), then all trees in one ragged batch.
    chains = [Segment.chain(p, 0, b) for p, b in zip(prompts, blocks, strict=True) if p]
    if chains:
        batch = build_batch(chains, PAGE, torch.device("cpu"))
        assert batch.tree_mask is None
        model(batch.input_ids, batch.positions, PagedAttention(cache, batch, config.head_dim))
    segments = [Segment.of_tree(t, len(p), b) for t, p, b in zip(trees, prompts, blocks, strict=True)]
    batch = build_batch(segments, PAGE, torch.device("cpu"))
    hidden, _ = model(batch.input_ids, batch.positions, PagedAttention(cache, batch, config.head_dim))
    row = 0
    for tree, prompt in zip(trees, prompts, strict=True):
        for node in range(len(tree)):
            if node % 7 == 0 or node == len(tree) - 1:
                plain, _ = model.forward_sequence(torch.tensor(prompt + path_to(tree, node)))
                torch.testing.assert_close(hidden[row + node], plain[-1], rtol=2e-4, atol=2e-4)
        row += len(tree)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_chains_beside_trees_keep_their_own_mask(bidirectional: bool) -> None:
    tree = random_tree(5, 0)
    batch = build_batch(
        [Segment.chain([1, 2, 3], 6, [0, 1, 2]), Segment.of_tree(tree, 2, [3, 4])],
        PAGE,
        torch.device("cpu"),
        bidirectional=bidirectional,
    )
    assert batch.tree_mask is not None
    assert batch.tree_mask[:3, 0].tolist() == ([7, 7, 7] if bidirectional else [1, 3, 7])
    assert batch.query_start.tolist() == [0, 3, 8]
    assert batch.positions.tolist() == [6, 7, 8, *(2 + tree.depths).tolist()]
    assert batch.slots.tolist() == [6, 7, 8, 14, 15, 16, 17, 18]
    assert batch.block_tables.tolist() == [[0, 1, 2], [3, 4, 0]]
