"""The device-side acceptance walk goes where the engine's own goes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jetflow_triton as ops
from jetflow_core.tree import DraftTree, accept


def random_tree(size: int, generator: np.random.Generator) -> DraftTree:
    parents, depths, tokens = [-1], [0], [50]
    for node in range(1, size):
        parent = int(generator.integers(0, node))
        parents.append(parent)
        depths.append(depths[parent] + 1)
        tokens.append(parents[:node].count(parent))
    return DraftTree(np.array(tokens), np.array(parents), np.array(depths), np.zeros(size))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 40), max_size=6), st.integers(0, 10**6))
def test_accept_walk_equals_accept(sizes: list[int], seed: int) -> None:
    generator = np.random.default_rng(seed)
    trees = [random_tree(size, generator) for size in sizes]
    chosen = [generator.integers(-1, 3, size) for size in sizes]
    expected = accept(trees, lambda active, nodes: [int(chosen[i][n]) for i, n in zip(active, nodes, strict=True)])
    depth = max((int(tree.depths.max()) for tree in trees), default=0)
    flat = [
        torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *parts]))
        for parts in ([t.tokens for t in trees], [t.parents for t in trees], chosen)
    ]
    starts = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0).to(torch.int32)
    path, lengths, bonus = ops.accept_walk(flat[0], flat[1], starts, flat[2], depth)
    for b, (nodes, tokens) in enumerate(expected):
        assert path[b, : int(lengths[b])].tolist() == nodes
        assert [*flat[0][int(starts[b]) + path[b, 1 : int(lengths[b])]].tolist(), int(bonus[b])] == tokens
