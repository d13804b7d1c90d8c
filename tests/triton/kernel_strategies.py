"""Random arguments of the ops, for the twins and for the kernels under the interpreter."""

from __future__ import annotations

import kernel_reference as reference
import torch
from hypothesis import strategies as st
from torch import Tensor

SEEDS = st.integers(0, 1 << 30)


@st.composite
def attention_calls(
    draw: st.DrawFn, dtype: torch.dtype = torch.float32, nodes: int = 36, prefix: int = 140
) -> reference.Ragged:
    """Ragged batches: empty, single-node and larger trees or chains, prefixes from 0, every kind of page."""
    counts = draw(st.lists(st.integers(0, nodes), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(SEEDS))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 3), (3, 1), (1, 8)]))
    return reference.random_call(
        [reference.random_parents(n, generator) if n else [] for n in counts],
        [draw(st.integers(0, prefix)) for _ in counts],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        width=draw(st.sampled_from([8, 16, 80])),
        page=draw(st.sampled_from([16, 16, 32, 256])),
        dtype=dtype,
        masked=draw(st.booleans()),
        joined=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 100)),
        seed=draw(SEEDS),
    )


@st.composite
def expert_calls(draw: st.DrawFn, dtype: torch.dtype = torch.float32, most: int = 40) -> tuple[Tensor, ...]:
    """`(x, gate_up, down, weights, experts)` of any size, with and without idle experts."""
    tokens, count = draw(st.integers(1, most)), draw(st.sampled_from([4, 6, 8, 60, 128]))
    top_k = draw(st.integers(1, min(8, count)))
    width, inner = draw(st.sampled_from([8, 33, 48])), draw(st.sampled_from([5, 24, 70]))
    generator = torch.Generator().manual_seed(draw(SEEDS))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    scores = normal(tokens, count)
    scores[:, : count // 2] += draw(st.sampled_from([0.0, 20.0]))  # 20: half of the experts get nearly all
    weights, experts = torch.softmax(scores, -1).topk(top_k)
    x = normal(tokens, width).to(dtype)
    gate_up = (normal(count, 2 * inner, width) * width**-0.5).to(dtype)
    down = (normal(count, width, inner) * inner**-0.5).to(dtype)
    return x, gate_up, down, weights, experts.to(torch.int32)
