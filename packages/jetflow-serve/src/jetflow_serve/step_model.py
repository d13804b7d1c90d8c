"""What a step of the engine calls, with the bytes and FLOPs of each call, from the roofline's costs of our ops.

A plain step is the target's pass over one row a request. A speculative step of budget n is the draft (the head's pass over a
block a request and the scores of its candidates), the target's pass over n + 1 rows a request, and the commit: the accepted
nodes' K/V move, and their taps become the head's context. What the host does in between is a number of the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jetflow_serve.shapes import HeadShape, Shape
from jetflow_triton.roofline import OPS, Cost, Load, Model
from jetflow_triton.roofline.costs import CANDIDATES, ITEM, distinct_experts, kv_move, matrices, product

Kind = Literal["product", "experts", "attention", "other"]
Phase = Literal["target", "draft", "commit"]


@dataclass(frozen=True, slots=True)
class Call:
    """`times` equal calls of an op.

    `rows` share each weight that is read. `scored`: FLOPs of attention that scores every row against every slot of its
    sequence, seen or not; elsewhere those of the definition.
    """

    phase: Phase
    kind: Kind
    times: int
    cost: Cost
    rows: float
    scored: float


def decode_step(
    shape: Shape, batch: int, nodes: int, context: int, accepted: float = 0.0, *, observed: bool = True
) -> Iterator[Call]:
    """A step of `batch` requests behind `context` tokens, with `nodes` drafted nodes each, of which `accepted` are.

    Without nodes it is a plain step, in which a head that may draft later takes in the committed tokens if it has `observed` all.
    """
    head = shape.head
    load = Load(batch, nodes + 1, context)
    if head is not None and nodes:
        yield from draft_pass(head, batch, context)
    yield from target_pass(shape, load)
    if nodes:
        for model in shape.stacks:
            yield _call("commit", kv_move(model, load), batch)
    if head is not None and (nodes or observed):
        yield from observe(head, round(batch * (accepted + 1)))


def target_pass(shape: Shape, load: Load) -> Iterator[Call]:
    """All layers, the LM head and the greedy choice for every row."""
    for model in shape.stacks:
        yield from _layers("target", model, load)
    first = shape.stacks[0]
    yield _call("target", OPS["rms_norm"].cost(first, load), load.tokens)
    yield _product("target", load.tokens, first.vocab, first.hidden)
    logits = load.tokens * first.vocab
    yield _call("target", _moving(logits * ITEM, logits, load.tokens), load.tokens)
    yield _call("target", OPS["accept_walk"].cost(first, load), load.tokens)


def draft_pass(head: HeadShape, batch: int, context: int) -> Iterator[Call]:
    """The head's layers over a block a request, the draft vocabulary's logits, and the scores of the candidates."""
    model, depths = head.layers, head.block - 1
    load = Load(batch, head.block, context)
    yield from _layers("draft", model, load)
    yield _call("draft", OPS["rms_norm"].cost(model, load), load.tokens)
    rows = batch * depths
    logits = rows * model.vocab
    yield _product("draft", rows, model.vocab, model.hidden)
    for moved in (ITEM + 4, 4, 4):  # to float32, then read for the sum and for the best
        yield _call("draft", _moving(moved * logits, logits, rows), rows)
    if head.pairwise:
        yield from _transitions(head, batch)


def observe(head: HeadShape, tokens: int) -> Iterator[Call]:
    """Taps of `tokens` committed tokens become keys and values of every head layer, with one product for all layers."""
    model = head.layers
    width = 2 * model.kv_heads * model.width
    load = Load(1, tokens, 0)
    yield _product("commit", tokens, model.hidden, head.taps)
    yield _call("commit", OPS["rms_norm"].cost(model, load), tokens)
    yield _product("commit", tokens, model.layers * width, model.hidden)
    keys = tokens * width * ITEM  # half of it in, half of it out
    yield _call("commit", _moving(keys, 4 * tokens * width, tokens), tokens, model.layers)
    yield _call("commit", OPS["kv_write"].cost(model, load), tokens, model.layers)


def _transitions(head: HeadShape, batch: int) -> Iterator[Call]:
    """The correction of depth 1, and the K × K transitions of every later depth."""
    model, inner, later = head.layers, head.pairwise, head.block - 2
    yield _product("draft", batch, 2 * inner, model.hidden, times=2)
    yield _product("draft", batch, model.hidden, inner)
    if later < 1:
        return
    rows = batch * later
    yield _product("draft", rows, 2 * inner, model.hidden)
    pairs = rows * CANDIDATES
    yield _call("draft", _moving(pairs * 4 * inner * ITEM, pairs * 2 * inner, pairs), pairs, 2)  # gather and add
    yield _call("draft", _moving(pairs * 3 * inner * ITEM, pairs * 5 * inner, pairs), pairs)  # silu(g) · u
    scores = pairs * CANDIDATES
    moved = 3 * pairs * inner * ITEM + scores * ITEM  # the output rows gathered, then both factors read
    yield _call("draft", Cost(moved, 2 * scores * inner, moved, 2 * scores * inner, rows, 2), rows)
    yield _call("draft", _moving(scores * 12, 4 * scores, pairs), pairs, 3)  # normalised


def _layers(phase: Phase, model: Model, load: Load) -> Iterator[Call]:
    """The ops that every layer of a decoder calls."""
    for name, op in OPS.items():
        per_layer = _per_layer(name, model)
        if per_layer == 0:
            continue
        cost, kind = op.cost(model, load), _kind(name)
        rows = load.tokens
        if kind == "experts":
            rows = load.tokens * model.top_k / distinct_experts(model, load.tokens)
        scored = cost.flops
        if kind == "attention":
            scored = 4 * load.tokens * model.heads * model.width * (load.context + load.budget)
        yield Call(phase, kind, per_layer * model.layers, cost, rows, scored)


def _per_layer(name: str, model: Model) -> int:
    """Calls of an op of the sheet in one decoder layer."""
    own = {"add_rms_norm": 2, "qk_norm_rope": 1, "kv_write": 1, "tree_attention": 1}
    own |= {f"linear {matrix}": 1 for matrix in matrices(model) if matrix != "head"}
    own |= {"moe_route": 1, "moe_experts": 1} if model.experts else {"silu_mul": 1}
    return own.get(name, 0)


def _kind(name: str) -> Kind:
    if name.startswith("linear "):
        return "product"
    return "experts" if name == "moe_experts" else "attention" if name == "tree_attention" else "other"


def _product(phase: Phase, rows: int, out: int, width: int, times: int = 1) -> Call:
    cost = product(rows, out, width)
    return Call(phase, "product", times, cost, rows, cost.flops)


def _call(phase: Phase, cost: Cost, rows: float, times: int = 1) -> Call:
    return Call(phase, "other", times, cost, rows, cost.flops)


def _moving(moved: float, flops: float, programs: float) -> Cost:
    """One launch that goes once through its data."""
    return Cost(moved, flops, moved, flops, programs, 1)
