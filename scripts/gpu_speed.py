"""What `gpu_check.py` measures: one call of each op at Qwen3 shapes, beside the floor of `jetflow_triton.roofline`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from gpu_cases import TINY, TINY_DENSE, reference
from torch import Tensor

import jetflow_triton as ops
from jetflow_triton import roofline
from jetflow_triton.roofline import Cost, Load, Model
from jetflow_triton.roofline.costs import ACCEPTED, CANDIDATES, matrices

CACHE = 100e6  # bytes that are touched before the same inputs come around again: twice the L2 cache
COPIES = 24  # at most; what fits the cache so often is in it in real use too
DTYPE = torch.bfloat16
Call = Callable[[], object]

STEPS = (Load(1, 16, 8192), Load(1, 64, 8192), Load(8, 64, 8192), Load(32, 64, 8192))
CONTEXTS = (*STEPS, Load(1, 1, 8192), Load(1, 64, 1024), Load(1, 64, 32768), Load(1, 256, 8192), Load(32, 16, 1024))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    op: str
    model: Model
    load: Load
    cost: Cost
    build: Callable[[], Call]  # a call on inputs of its own

    @property
    def name(self) -> str:
        return f"{self.model.name}, {self.load.batch} x {self.load.budget} nodes, context {self.load.context}"


def rows(op: str, device: str, quick: bool) -> Iterator[Row]:
    """The lines of one op, of the roofline's names; tiny ones if `quick`."""
    loads = CONTEXTS if op == "tree_attention" else STEPS
    for model in (TINY, TINY_DENSE) if quick else roofline.MODELS:
        if roofline.OPS[op].calls(model) is not None:
            for load in (Load(2, 3, 40),) if quick else loads:
                yield Row(op, model, load, roofline.OPS[op].cost(model, load), builder(op, model, load, device))


def builder(op: str, model: Model, load: Load, device: str) -> Callable[[], Call]:
    """Makes calls of one op, each on its own inputs."""

    def build() -> Call:
        with torch.device(device):
            return BUILDERS[op](model, load)

    return build


def normal(*shape: int) -> Tensor:
    """Small values: products stay in range."""
    return torch.randn(*shape, dtype=DTYPE) / 32


def build_norm(model: Model, load: Load) -> Call:
    x, weight = normal(load.tokens, model.hidden), normal(model.hidden)
    return lambda: ops.rms_norm(x, weight, 1e-6)


def build_add_norm(model: Model, load: Load) -> Call:
    x, residual, weight = normal(load.tokens, model.hidden), normal(load.tokens, model.hidden), normal(model.hidden)
    return lambda: ops.add_rms_norm(x, residual, weight, 1e-6)


def build_silu(model: Model, load: Load) -> Call:
    gate_up = normal(load.tokens, 2 * model.inner)
    return lambda: ops.silu_mul(gate_up)


def build_rope(model: Model, load: Load) -> Call:
    q, k, _ = _heads(model, load)
    table, positions, gain = torch.randn(4096, model.width), torch.arange(load.tokens) % 4096, normal(model.width)
    return lambda: ops.qk_norm_rope(q, k, positions, table, gain, gain, 1e-6)


def build_write(model: Model, load: Load) -> Call:
    _, k, v = _heads(model, load)
    kv = normal(2, -(-load.tokens // 16), 16, model.kv_heads, model.width)
    slots = torch.randperm(kv.shape[1] * 16)[: load.tokens]
    return lambda: ops.kv_write(k, v, kv[0], kv[1], slots)


def build_move(model: Model, load: Load) -> Call:
    kv = normal(model.layers, 2, 4 * load.batch, 16, model.kv_heads, model.width)
    moved = min(load.budget, ACCEPTED)
    source = (torch.arange(load.batch)[:, None] * 64 + 2 * torch.arange(moved) + 1).flatten()
    target = (torch.arange(load.batch)[:, None] * 64 + torch.arange(moved)).flatten()
    return lambda: ops.kv_move(kv, source, target)


def build_attention(op: str) -> Callable[[Model, Load], Call]:
    def build(model: Model, load: Load) -> Call:
        pages = -(-(load.context + load.budget) // 16)
        kv = normal(2, load.batch * pages, 16, model.kv_heads, model.width)
        mask = tree_mask(load.budget).to(kv.device).repeat(load.batch, 1)
        tables = torch.randperm(load.batch * pages).to(torch.int32).view(load.batch, pages)
        starts = torch.arange(load.batch + 1, dtype=torch.int32) * load.budget
        prefixes = torch.full((load.batch,), load.context, dtype=torch.int32)
        q, scale = normal(load.tokens, model.heads, model.width), model.width**-0.5
        return lambda: getattr(ops, op)(q, kv[0], kv[1], tables, starts, prefixes, mask, scale)

    return build


@cache
def tree_parents(nodes: int) -> list[int]:
    """One random tree."""
    with torch.device("cpu"):
        return reference.random_parents(nodes, torch.Generator().manual_seed(0))


@cache
def tree_mask(nodes: int) -> Tensor:
    """Its mask, on the CPU."""
    with torch.device("cpu"):
        return reference.ancestor_mask([tree_parents(nodes)], -(-nodes // 32))


def build_linear(name: str) -> Callable[[Model, Load], Call]:
    def build(model: Model, load: Load) -> Call:
        out, width = matrices(model)[name]
        x, weight = normal(load.tokens, width), normal(out, width)
        return lambda: ops.linear(x, weight)

    return build


def build_topk(model: Model, load: Load) -> Call:
    hidden, table = normal(load.tokens, model.hidden), normal(model.vocab, model.hidden)
    return lambda: ops.topk_logprobs(hidden, table, CANDIDATES)


def build_sample(model: Model, load: Load) -> Call:
    logits, ones, zeros = normal(load.tokens, model.vocab), torch.ones(load.tokens), torch.zeros(load.tokens)
    off, positions = torch.zeros(load.tokens, dtype=torch.int64), torch.arange(load.tokens)
    return lambda: ops.sample(logits, ones, off, ones, zeros, positions, positions)


def build_walk(model: Model, load: Load) -> Call:
    """Every node's first child is chosen, so that the walks go on."""
    parents = torch.tensor(tree_parents(load.budget))
    tokens = (parents[:, None] == parents).tril(-1).sum(1)  # the rank among its siblings
    tokens, parents = tokens.repeat(load.batch), parents.repeat(load.batch)
    starts = torch.arange(load.batch + 1, dtype=torch.int32) * load.budget
    choices = torch.zeros(load.tokens, dtype=torch.int64)
    return lambda: ops.accept_walk(tokens, parents, starts, choices, load.budget - 1)


def build_distill(model: Model, load: Load) -> Call:
    """Forward KL to a dense teacher, with its gradient."""
    hidden, teacher = normal(load.tokens, model.hidden).requires_grad_(), normal(load.tokens, model.hidden)
    tables, weights = normal(2, model.vocab, model.hidden), torch.ones(load.tokens)
    given = {"teacher_hidden": teacher, "teacher_lm_head": tables[1], "weights": weights}
    return lambda: ops.distill_loss(hidden, tables[0], **given)


def build_route(model: Model, load: Load) -> Call:
    logits = normal(load.tokens, model.experts)
    return lambda: ops.moe_route(logits, model.top_k, True)


def build_experts(model: Model, load: Load) -> Call:
    x = normal(load.tokens, model.hidden)
    gate_up, down = (
        normal(model.experts, 2 * model.inner, model.hidden),
        normal(model.experts, model.hidden, model.inner),
    )
    weights, chosen = ops.moe_route(normal(load.tokens, model.experts), model.top_k, True)
    return lambda: ops.moe_experts(x, gate_up, down, weights, chosen)


def _heads(model: Model, load: Load) -> tuple[Tensor, ...]:
    fused = normal(load.tokens, model.heads + 2 * model.kv_heads, model.width)
    return fused.split((model.heads, model.kv_heads, model.kv_heads), 1)


BUILDERS: dict[str, Callable[[Model, Load], Call]] = {
    "tree_attention": build_attention("tree_attention"),
    "moe_experts": build_experts,
    **{f"linear {name}": build_linear(name) for name in ("gate_up", "qkv", "o", "down", "router", "head")},
    "topk_logprobs": build_topk,
    "sample": build_sample,
    "accept_walk": build_walk,
    "moe_route": build_route,
    "qk_norm_rope": build_rope,
    "kv_write": build_write,
    "kv_move": build_move,
    "add_rms_norm": build_add_norm,
    "rms_norm": build_norm,
    "silu_mul": build_silu,
    "tree_attention_exact": build_attention("tree_attention_exact"),
    "distill_loss": build_distill,
}
"""By the names of the roofline, the most telling first."""


def seconds_a_call(row: Row, device: str) -> float:
    """Median time of a call in a captured graph whose calls take turns on inputs that do not all fit the L2 cache."""
    copies = int(min(COPIES, 1 + CACHE // row.cost.bytes)) if device == "cuda" else 1
    calls = [row.build() for _ in range(copies)]
    if device != "cuda":
        start = time.perf_counter()
        calls[0]()
        return time.perf_counter() - start
    calls[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(-(-COPIES // copies)):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / (copies * -(-COPIES // copies)))
    return sorted(times)[len(times) // 2]


def roofline_device(name: str) -> roofline.Device:
    """The data sheet for a GPU's name; of an unknown one, the H100's."""
    return roofline.H200 if "H200" in name else roofline.H100
