"""float64 oracles, written for clarity, and random inputs. The interpreter's tests and the GPU check use them too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * weight.double()


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Pairs (i, i + D/2) as complex numbers, turned by their angle."""
    half = x.shape[2] // 2
    rows = cos_sin[positions].double()
    turned = torch.complex(x.double()[..., :half], x.double()[..., half:]) * torch.complex(
        rows[:, None, :half], rows[:, None, half:]
    )
    return torch.cat((turned.real, turned.imag), -1)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    weights, experts = [], []
    for row in torch.softmax(logits.float(), -1).tolist():
        best = sorted(range(len(row)), key=lambda e: (-row[e], e))[:top_k]
        total = sum(row[e] for e in best) if renormalize else 1.0
        weights.append([row[e] / total for e in best])
        experts.append(best)
    return torch.tensor(weights), torch.tensor(experts, dtype=torch.int32)


def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for weight, e in zip(weights[t].double(), chosen[t].tolist(), strict=True):
            out[t] += weight * (down[e].double() @ silu_mul(gate_up[e].double() @ x[t].double()))
    return out


@dataclass
class Ragged:
    """The arguments of one `tree_attention` call."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    query_start: Tensor
    prefix_lens: Tensor
    tree_mask: Tensor | None
    scale: float
    window: int | None = None
    positions: Tensor | None = None

    def args(self) -> tuple[Any, ...]:
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_tables,
            self.query_start,
            self.prefix_lens,
            self.tree_mask,
            self.scale,
            self.window,
            self.positions,
        )

    def slots(self, sequence: int) -> Tensor:
        """Physical slots of a sequence, in logical order."""
        page = self.k_cache.shape[1]
        first, last = self.query_start[sequence : sequence + 2].tolist()
        logical = torch.arange(int(self.prefix_lens[sequence]) + last - first)
        return self.block_tables[sequence].long()[logical // page] * page + logical % page

    def alone(self, sequence: int) -> Ragged:
        """The same call with one sequence only."""
        first, last = self.query_start[sequence : sequence + 2].tolist()
        return Ragged(
            self.q[first:last],
            self.k_cache,
            self.v_cache,
            self.block_tables[sequence : sequence + 1],
            torch.tensor([0, last - first], dtype=torch.int32, device=self.q.device),
            self.prefix_lens[sequence : sequence + 1],
            None if self.tree_mask is None else self.tree_mask[first:last],
            self.scale,
            self.window,
            None if self.positions is None else self.positions[first:last],
        )

    def last(self, node: int) -> Ragged:
        """Query `node` of a single plain sequence as plain decoding meets it: everything before it is committed."""
        return Ragged(
            self.q[node : node + 1],
            self.k_cache,
            self.v_cache,
            self.block_tables,
            torch.tensor([0, 1], dtype=torch.int32, device=self.q.device),
            self.prefix_lens + node,
            None,
            self.scale,
            self.window,
            None if self.positions is None else self.positions[node : node + 1],
        )


def random_parents(nodes: int, generator: torch.Generator) -> list[int]:
    """Parents before children; node 0 is the root."""
    return [-1] + [int(torch.randint(0, i, (), generator=generator)) for i in range(1, nodes)]


def path_to(node: int, parents: list[int]) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def ancestor_mask(trees: list[list[int]], words: int) -> Tensor:
    rows = torch.zeros(sum(map(len, trees)), words, dtype=torch.int64)
    row = 0
    for parents in trees:
        for node in range(len(parents)):
            for seen in path_to(node, parents):
                rows[row, seen // 32] |= 1 << (seen % 32)
            row += 1
    return torch.where(rows >= 1 << 31, rows - (1 << 32), rows).to(torch.int32)


def random_call(
    trees: list[list[int]],
    prefixes: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 16,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    masked: bool = True,
    joined: bool = False,
    window: int | None = None,
    seed: int = 0,
) -> Ragged:
    """A batch of trees with scattered (or joined) pages."""
    generator = torch.Generator().manual_seed(seed)
    counts = [len(tree) for tree in trees]
    needed = [-(-(prefix + count) // page) for prefix, count in zip(prefixes, counts, strict=True)]
    total = sum(needed) + 2
    order = torch.arange(total) if joined else torch.randperm(total, generator=generator)
    tables = torch.zeros(len(trees), max([*needed, 1]), dtype=torch.int32)
    taken = 1
    for b, count in enumerate(needed):
        tables[b, :count] = order[taken : taken + count]
        taken += count

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    depths = [[len(path_to(i, tree)) - 1 if masked else i for i in range(len(tree))] for tree in trees]
    positions = [prefix + depth for prefix, tree in zip(prefixes, depths, strict=True) for depth in tree]
    return Ragged(
        normal(sum(counts), heads, width),
        normal(total, page, kv_heads, width),
        normal(total, page, kv_heads, width),
        tables,
        torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32),
        torch.tensor(prefixes, dtype=torch.int32),
        ancestor_mask(trees, max(1, -(-max([*counts, 1]) // 32))) if masked else None,
        width**-0.5,
        window,
        torch.tensor(positions, dtype=torch.int64),
    )


def attention(call: Ragged) -> Tensor:
    """Softmax over each query's own list of slots."""
    out = torch.zeros(call.q.shape, dtype=torch.float64)
    group = call.q.shape[1] // call.k_cache.shape[2]
    k_flat, v_flat = call.k_cache.flatten(0, 1), call.v_cache.flatten(0, 1)
    starts, positions = call.query_start.tolist(), [] if call.positions is None else call.positions.tolist()
    for b, prefix in enumerate(call.prefix_lens.tolist()):
        slots = call.slots(b)
        k = k_flat[slots].double().repeat_interleave(group, 1)
        v = v_flat[slots].double().repeat_interleave(group, 1)
        for j in range(starts[b + 1] - starts[b]):
            row = starts[b] + j
            if call.tree_mask is None:
                nodes = list(range(j + 1))
            else:
                words = call.tree_mask[row].tolist()
                nodes = [i for i in range(starts[b + 1] - starts[b]) if words[i // 32] >> (i % 32) & 1]
            seen = [*range(prefix), *(prefix + i for i in nodes)]
            if call.window is not None:
                places = [*range(prefix), *(positions[starts[b] + i] for i in nodes)]
                seen = [s for s, place in zip(seen, places, strict=True) if place > positions[row] - call.window]
            if seen:
                scores = torch.einsum("hd,shd->hs", call.q[row].double(), k[seen]) * call.scale
                out[row] = torch.einsum("hs,shd->hd", torch.softmax(scores, -1), v[seen])
    return out


def as_sequence(call: Ragged, path: list[int]) -> Ragged:
    """The first sequence's prefix and one path of its tree, as a plain sequence in a cache of its own."""
    page = call.k_cache.shape[1]
    slots = call.slots(0)
    prefix = int(call.prefix_lens[0])
    taken = torch.cat((slots[:prefix], slots[[prefix + i for i in path]]))
    blocks = -(-len(taken) // page)

    def copied(cache: Tensor) -> Tensor:
        fresh = torch.zeros(blocks * page, *cache.shape[2:], dtype=cache.dtype)
        fresh[: len(taken)] = cache.flatten(0, 1)[taken]
        return fresh.view(blocks, page, *cache.shape[2:])

    return Ragged(
        call.q[path],
        copied(call.k_cache),
        copied(call.v_cache),
        torch.arange(blocks, dtype=torch.int32)[None],
        torch.tensor([0, len(path)], dtype=torch.int32),
        call.prefix_lens[:1],
        None,
        call.scale,
        call.window,
        prefix + torch.arange(len(path)),
    )
