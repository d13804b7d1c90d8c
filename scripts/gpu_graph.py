"""A decode step as a CUDA graph: captured once, replayed with other sequences, trees and values in the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu_cases import Case, error_of, normal, reference, to_device
from torch import Tensor

import jetflow_triton as ops
from jetflow_triton.roofline import Model

KINDS = ("dense", "sparse")
BATCHES = (([9, 1, 6], [700, 5, 130]), ([4, 8, 4], [0, 1100, 31]))  # nodes and prefixes of two steps of equal size
MAX_PREFIX = 1200
Tensors = dict[str, Tensor]


def cases(kind: str, model: Model, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Both steps, replayed from one captured graph, against running them without one."""
    for number in range(len(BATCHES)):
        name = f"replay of step {number} equals the step itself"
        yield Case(name, 0.0, partial(replay_error, kind, model, dtype, device, number))


def replay_error(kind: str, model: Model, dtype: torch.dtype, device: str, number: int) -> float:
    """Captures step 0, then replays step `number` in its tensors."""
    weights = on(device, make_weights(kind, model, dtype))
    steps = [on(device, make_inputs(model, dtype, seed)) for seed in range(len(BATCHES))]
    wanted = decode(kind, model, weights, {name: x.clone() for name, x in steps[number].items()})
    static = {name: x.clone() for name, x in steps[0].items()}
    replay, results = captured(partial(decode, kind, model, weights, static), device)
    for name, x in steps[number].items():
        static[name].copy_(x)
    results = replay() or results
    return max(error_of(results[name].cpu(), x.cpu()) for name, x in wanted.items())


def captured(step: Callable[[], Tensors], device: str) -> tuple[Callable[[], Tensors | None], Tensors]:
    """The step's graph, and the tensors that its replay fills; without a GPU, the step itself."""
    if device != "cuda":
        return step, {}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph.replay, results


def make_inputs(model: Model, dtype: torch.dtype, seed: int) -> Tensors:
    """What changes from one step to the next, the cache included."""
    generator = torch.Generator().manual_seed(seed)
    counts, prefixes = BATCHES[seed]
    trees = [reference.random_parents(count, generator) for count in counts]
    call = reference.random_call(trees, prefixes, heads=1, kv_heads=1, width=2)  # for its trees and lengths
    pages = -(-MAX_PREFIX // 16)
    tables = torch.randperm(len(counts) * pages, generator=generator).view(len(counts), pages)
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    logical = torch.cat([prefix + torch.arange(count) for prefix, count in zip(prefixes, counts, strict=True)])
    slots = tables[owner, logical // 16] * 16 + logical % 16
    moved = torch.arange(2, 6 + 2 * seed)  # step 1 moves more nodes than step 0
    target = torch.full((8,), -1)
    target[: len(moved)] = slots[moved - 1]
    source = torch.zeros(8, dtype=torch.int64)
    source[: len(moved)] = slots[moved]
    rows = sum(counts)
    return {
        "x": normal(dtype, rows, model.hidden),
        "kv": normal(dtype, model.layers, 2, tables.numel(), 16, model.kv_heads, model.width),
        "tables": tables.to(torch.int32),
        "starts": call.query_start,
        "prefixes": call.prefix_lens,
        "mask": call.tree_mask,
        "positions": call.positions,
        "slots": slots,
        "tokens": torch.tensor([tree[:i].count(parent) for tree in trees for i, parent in enumerate(tree)]),
        "parents": torch.tensor([parent for tree in trees for parent in tree]),
        "temperature": torch.rand(rows),
        "top_k": torch.randint(0, 20, (rows,)),
        "top_p": 1 - torch.rand(rows) / 4,
        "min_p": torch.rand(rows) / 20,
        "seeds": torch.randint(0, 2**60, (rows,)),
        "source": source,
        "target": target,
    }


def make_weights(kind: str, model: Model, dtype: torch.dtype) -> Tensors:
    """One layer's weights, which all layers use, and the embedding."""

    def matrix(*shape: int) -> Tensor:
        return normal(dtype, *shape, scale=shape[-1] ** -0.5)

    heads, inner = model.heads * model.width, model.inner
    angles = torch.outer(torch.arange(2.0 * MAX_PREFIX), 10000.0 ** (-torch.arange(model.width // 2) / model.width * 2))
    shared = {
        "norm": torch.rand(model.hidden).to(dtype),
        "gain": torch.rand(model.width).to(dtype),
        "table": torch.cat((angles.cos(), angles.sin()), 1),
        "qkv": matrix(heads + 2 * model.kv_heads * model.width, model.hidden),
        "o": matrix(model.hidden, heads),
        "head": matrix(model.vocab, model.hidden),
    }
    if kind == "dense":
        return shared | {"gate_up": matrix(2 * inner, model.hidden), "down": matrix(model.hidden, inner)}
    return shared | {
        "router": matrix(model.experts, model.hidden),
        "gate_up": matrix(model.experts, 2 * inner, model.hidden),
        "down": matrix(model.experts, model.hidden, inner),
    }


def decode(kind: str, model: Model, weights: Tensors, inputs: Tensors) -> Tensors:
    """The ops of a step in their order: layers, head, choice, and the accepted nodes moved."""
    residual, kv, eps = inputs["x"], inputs["kv"], 1e-6
    x = ops.rms_norm(residual, weights["norm"], eps)
    for layer in range(model.layers):
        x = attend(model, weights, inputs, kv[layer], x)
        x, residual = ops.add_rms_norm(x, residual, weights["norm"], eps)
        if kind == "dense":
            x = ops.linear(ops.silu_mul(ops.linear(x, weights["gate_up"])), weights["down"])
        else:
            routed = ops.moe_route(ops.linear(x, weights["router"]), model.top_k, True)
            x = ops.moe_experts(x, weights["gate_up"], weights["down"], *routed)
        x, residual = ops.add_rms_norm(x, residual, weights["norm"], eps)
    logits = ops.linear(x, weights["head"])
    filters = (inputs[name] for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "positions"))
    choices = ops.sample(logits, *filters) % 3  # tokens are ranks among siblings, so that walks go on
    path, lengths, bonus = ops.accept_walk(inputs["tokens"], inputs["parents"], inputs["starts"], choices, 8)
    logprobs, ids, logsumexp = ops.topk_logprobs(x, weights["head"], 4)
    ops.kv_move(kv, inputs["source"], inputs["target"])
    results = {"hidden": x, "kv": kv, "choices": choices, "path": path, "lengths": lengths, "bonus": bonus}
    return results | {"logprobs": logprobs, "ids": ids, "logsumexp": logsumexp}


def attend(model: Model, weights: Tensors, inputs: Tensors, cache: Tensor, x: Tensor) -> Tensor:
    """The attention block of one layer."""
    heads = ops.linear(x, weights["qkv"]).unflatten(1, (-1, model.width))
    q, k, v = heads.split((model.heads, model.kv_heads, model.kv_heads), 1)
    gain = weights["gain"]
    q, k = ops.qk_norm_rope(q, k, inputs["positions"], weights["table"], gain, gain, 1e-6)
    ops.kv_write(k, v, cache[0], cache[1], inputs["slots"])
    layout = (inputs["tables"], inputs["starts"], inputs["prefixes"], inputs["mask"])
    return ops.linear(ops.tree_attention(q, cache[0], cache[1], *layout, model.width**-0.5).flatten(1), weights["o"])


def on(device: str, tensors: Tensors) -> Tensors:
    """Copies of the tensors there."""
    return dict(zip(tensors, to_device(tuple(tensors.values()), device), strict=True))
