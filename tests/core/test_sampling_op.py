"""The sampling ops of the kernel package choose the very tokens that the engine chooses."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jetflow_triton as ops
from jetflow_core.sampling import Choice, SamplingParams, choose
from jetflow_core.tree import DraftTree, accept

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-40, 0.3, 0.8, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-5]),
    top_k=st.sampled_from([0, 1, 7, 400, 10**6]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(PARAMS, st.integers(-(2**63), 2**64 - 1), st.integers(1, 4)), min_size=1, max_size=5), st.data()
)
def test_sample_equals_choose(requests: list[tuple[SamplingParams, int, int]], data: st.DataObject) -> None:
    counts = [count for _, _, count in requests]
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    logits = (torch.randn(sum(counts), 1500) * 4).to(dtype)
    logits[::5, 3] = torch.nan
    logits[:, 9::11] = -math.inf
    positions = [torch.randint(0, 10**6, (count,)) for count in counts]
    ends = torch.tensor(counts).cumsum(0).tolist()
    choices = [
        Choice(rows=slice(end - count, end), params=params, positions=own, seed=seed)
        for (params, seed, count), own, end in zip(requests, positions, ends, strict=True)
    ]

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(torch.tensor(counts))

    tokens = ops.sample(
        logits,
        column([params.temperature for params, _, _ in requests], torch.float64),
        column([params.top_k for params, _, _ in requests], torch.int64),
        column([params.top_p for params, _, _ in requests], torch.float64),
        column([params.min_p for params, _, _ in requests], torch.float64),
        column([(seed + 2**63) % 2**64 - 2**63 for _, seed, _ in requests], torch.int64),
        torch.cat(positions),
    )
    assert torch.equal(tokens, choose(logits, choices))


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
