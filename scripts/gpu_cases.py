"""What `gpu_check.py` compares: for each op arguments on the CPU, its twin, and how far the kernel may be off."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "triton"))

import kernel_reference as reference

import jetflow_triton as ops
from jetflow_triton import activation, kv, moe, norm, rope
from jetflow_triton.attention import tree_attention_twin
from jetflow_triton.choice import accept_walk_twin, sample_twin
from jetflow_triton.exact_attention import tree_attention_exact_twin
from jetflow_triton.linear import linear_twin
from jetflow_triton.logprobs import topk_logprobs_twin
from jetflow_triton.roofline import Model

TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 6e-3, torch.float32: 2e-5}
"""Absolute and relative, of results of order 1: a few units in the last place of the dtype."""

ROWS = (1, 2, 7, 16, 33, 300)
"""Row counts at which a row must have the same bits."""

CHECKED = Model("checked", 1024, 2, 8, 2, 128, 768, 5000, 32, 4)
TINY = Model("tiny", 64, 2, 4, 2, 16, 48, 200, 8, 2)
TINY_DENSE = Model("tiny dense", 64, 2, 4, 2, 16, 96, 200)
Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    """One op: how its arguments are made, and what is asked of its results."""

    twin: Callable[..., Any]
    build: Callable[[Model, int, torch.dtype], Arguments]  # on the CPU, for a number of rows
    factor: float = 1.0  # of the dtype's tolerance; 0: the same bits
    wide: bool = False  # results are float32 whatever the dtype, and held to its tolerance
    rows: tuple[int, ...] = ()  # arguments that have a row a token: a row's result must not depend on the others
    gradients: tuple[int, ...] = ()  # arguments whose gradients are compared too


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison; `run` returns the error, of which `allowed` is all right."""

    name: str
    allowed: float
    run: Callable[[], float]


def normal(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal values, drawn in float32."""
    return (torch.randn(*shape) * scale).to(dtype)


def heads_of(model: Model, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k and v as views of one fused projection."""
    fused = normal(dtype, rows, model.heads + 2 * model.kv_heads, model.width)
    return fused.split((model.heads, model.kv_heads, model.kv_heads), 1)


def build_norm(model: Model, rows: int, dtype: torch.dtype) -> Arguments:
    return normal(dtype, rows, model.hidden), torch.rand(model.hidden).to(dtype), 1e-6


def build_add_norm(model: Model, rows: int, dtype: torch.dtype) -> Arguments:
    x, weight, eps = build_norm(model, rows, dtype)
    return x, normal(dtype, rows, model.hidden), weight, eps


def build_rope(model: Model, rows: int, dtype: torch.dtype) -> Arguments:
    q, k, _ = heads_of(model, rows, dtype)
    gains = torch.rand(2, model.width).to(dtype)
    angles = torch.randn(512, model.width // 2)
    return q, k, torch.randint(0, 512, (rows,)), torch.cat((angles.cos(), angles.sin()), 1), *gains, 1e-6


def build_write(model: Model, rows: int, dtype: torch.dtype) -> Arguments:
    _, k, v = heads_of(model, rows, dtype)
    blocks = -(-rows // 16) + 1
    slots = torch.randperm(blocks * 16)[:rows]
    slots[rows // 2] = -1
    return k, v, *torch.zeros(2, blocks, 16, model.kv_heads, model.width, dtype=dtype), slots


def build_move(model: Model, rows: int, dtype: torch.dtype) -> Arguments:
    blocks = -(-rows // 16) + 1
    cache = normal(dtype, model.layers, 2, blocks, 16, model.kv_heads, model.width)
    source, target = torch.randperm(blocks * 16)[:rows], torch.randperm(blocks * 16)[:rows]
    target[rows // 2] = -1
    return cache, source, target


def build_linear(model: Model, rows: int, dtype: torch.dtype) -> Arguments:
    weight = normal(dtype, 3 * model.hidden + 8, model.hidden, scale=model.hidden**-0.5)
    return normal(dtype, rows, model.hidden), weight, normal(dtype, weight.shape[0])


def build_topk(model: Model, rows: int, dtype: torch.dtype) -> Arguments:
    """Hidden states made of four rows of the table, in steps that no rounding turns around: the order is certain."""
    table, tokens = normal(dtype, model.vocab, model.hidden, scale=model.hidden**-0.5), model.vocab - 7
    first = torch.randint(0, tokens, (rows,))
    hidden = torch.zeros(rows, model.hidden)
    for rank in range(4):
        hidden += (12.0 - 2 * rank) * table[(first + 17 * rank) % tokens].float()
    return hidden.to(dtype), table, 4, tokens


def build_sample(model: Model, rows: int, dtype: torch.dtype) -> Arguments:
    """Every combination of the filters, on and off, and rows that take the largest."""

    def mixed(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (rows,))]

    seeds, positions = torch.randint(-(2**62), 2**62, (rows,)), torch.randint(0, 1000, (rows,))
    columns = (mixed(0.0, 0.7, 1.3), mixed(0, 5, 50).long(), mixed(1.0, 0.9, 0.3), mixed(0.0, 0.05))
    return normal(dtype, rows, model.vocab, scale=3.0), *columns, seeds, positions


def build_walk(model: Model, rows: int, dtype: torch.dtype) -> Arguments:
    """Trees side by side, an empty one among them; a node's token is its rank among its siblings."""
    generator = torch.Generator().manual_seed(rows)
    sizes = [rows // 3, 0, rows - rows // 3]
    trees = [reference.random_parents(size, generator) if size else [] for size in sizes]
    tokens = torch.tensor([tree[:i].count(parent) for tree in trees for i, parent in enumerate(tree)])
    starts = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0).to(torch.int32)
    parents = torch.tensor([parent for tree in trees for parent in tree])
    return tokens, parents, starts, torch.randint(0, 2, (rows,)), 40


def build_route(model: Model, rows: int, dtype: torch.dtype) -> Arguments:
    return normal(dtype, rows, model.experts), model.top_k, True


def build_experts(model: Model, rows: int, dtype: torch.dtype) -> Arguments:
    gate_up = normal(dtype, model.experts, 2 * model.inner, model.hidden, scale=model.hidden**-0.5)
    down = normal(dtype, model.experts, model.hidden, model.inner, scale=model.inner**-0.5)
    routed = moe.moe_route_twin(torch.randn(rows, model.experts), model.top_k, True)
    return normal(dtype, rows, model.hidden), gate_up, down, *routed


SPECS: dict[str, Spec] = {
    "rms_norm": Spec(norm.rms_norm_twin, build_norm, rows=(0,), gradients=(0, 1)),
    "add_rms_norm": Spec(norm.add_rms_norm_twin, build_add_norm, rows=(0, 1), gradients=(0, 1, 2)),
    "silu_mul": Spec(
        activation.silu_mul_twin,
        lambda model, rows, dtype: (normal(dtype, rows, 2 * model.inner),),
        rows=(0,),
        gradients=(0,),
    ),
    "qk_norm_rope": Spec(rope.qk_norm_rope_twin, build_rope, 4, rows=(0, 1, 2), gradients=(0, 1, 4, 5)),
    "kv_write": Spec(kv.kv_write_twin, build_write, 0),
    "kv_move": Spec(kv.kv_move_twin, build_move, 0),
    "linear": Spec(linear_twin, build_linear, rows=(0,)),
    "topk_logprobs": Spec(topk_logprobs_twin, build_topk, 4),
    "sample": Spec(sample_twin, build_sample, 0, rows=tuple(range(7))),
    "accept_walk": Spec(accept_walk_twin, build_walk, 0),
    "moe_route": Spec(moe.moe_route_twin, build_route, wide=True, rows=(0,)),
    "moe_experts": Spec(moe.moe_experts_twin, build_experts, 2, rows=(0, 3, 4)),
}

OPS = (
    "tree_attention",
    "tree_attention_exact",
    "distill_loss",
    *sorted(SPECS, key=lambda op: not op.startswith(("moe", "linear"))),
)
"""All ops, those that take longest first."""


def cases(op: str, model: Model, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """All comparisons of an op in one dtype."""
    if op.startswith("tree_attention"):
        yield from attention_cases(op, model, dtype, device)
        return
    if op == "distill_loss":
        yield from distill_cases(model, dtype, device)
        return
    spec = SPECS[op]
    tolerance = spec.factor * TOLERANCE[torch.float32 if spec.wide else dtype]
    for rows in (1, 40, 600):
        yield Case(f"{rows} rows", tolerance, partial(against_twin, op, spec, model, rows, dtype, device))
    if spec.rows:
        exact = 0.0 if device == "cuda" else tolerance  # the kernels promise the same bits, not all twins do
        yield Case("a row at any number of rows", exact, partial(row_invariance, op, spec, model, dtype, device))
    if spec.gradients:
        yield Case("gradients", 4 * tolerance, partial(gradients, op, spec, model, dtype, device))


def against_twin(op: str, spec: Spec, model: Model, rows: int, dtype: torch.dtype, device: str) -> float:
    """The op on the device against its twin on the CPU."""
    return compare(getattr(ops, op), spec.twin, spec.build(model, rows, dtype), device)


def compare(op: Callable[..., Any], twin: Callable[..., Any], args: Arguments, device: str) -> float:
    """The largest error; of an op that returns nothing, in the arguments that it writes to."""
    moved = to_device(args, device)
    results = op(*moved)
    expected = twin(*args)
    if expected is None:
        results, expected = moved, args
    return max(errors_of(results, expected))


def errors_of(results: Any, expected: Any) -> Iterator[float]:
    """The error of each tensor of a result."""
    if isinstance(expected, Tensor):
        results, expected = (results,), (expected,)
    for result, wanted in zip(results, expected, strict=True):
        if isinstance(wanted, Tensor):
            yield error_of(result.cpu(), wanted)


def error_of(result: Tensor, wanted: Tensor) -> float:
    """`max |result − wanted| / (1 + |wanted|)`; integers are right or infinitely wrong, and so are NaN and shapes."""
    if result.shape != wanted.shape or result.dtype is not wanted.dtype:
        return float("inf")
    if torch.equal(result, wanted):
        return 0.0
    if not wanted.is_floating_point():
        return float("inf")
    result, wanted = result.double(), wanted.double()
    wrong = torch.where(result == wanted, 0.0, (result - wanted).abs() / (1 + wanted.abs()))
    return float(wrong.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def row_invariance(op: str, spec: Spec, model: Model, dtype: torch.dtype, device: str) -> float:
    """A row computed among fewer others, at the same place and at another one, against the row among all."""
    args = to_device(spec.build(model, ROWS[-1], dtype), device)
    call = getattr(ops, op)
    everything = as_tuple(call(*args))
    worst = 0.0
    for rows in ROWS:
        for part in (slice(0, rows), slice(ROWS[-1] - rows, None)):
            some = call(*(arg[part] if i in spec.rows else arg for i, arg in enumerate(args)))
            wanted = tuple(whole[part].cpu() for whole in everything)
            worst = max(worst, *errors_of(as_tuple(some), wanted))
    return worst


def gradients(op: str, spec: Spec, model: Model, dtype: torch.dtype, device: str) -> float:
    """Gradients of the sum of the results' sines, on the device and through the twin."""
    args = spec.build(model, 33, dtype)

    def backward(call: Callable[..., Any], args: Arguments) -> tuple[Tensor, ...]:
        wanted = [args[i].detach().requires_grad_() for i in spec.gradients]
        given = [wanted[spec.gradients.index(i)] if i in spec.gradients else arg for i, arg in enumerate(args)]
        results = as_tuple(call(*given))
        loss = torch.stack([part.float().sin().sum() for part in results]).sum()
        return torch.autograd.grad(loss, wanted)

    results = backward(getattr(ops, op), to_device(args, device))
    return max(errors_of(results, backward(spec.twin, args)))


ATTENTION = {"tree_attention": tree_attention_twin, "tree_attention_exact": tree_attention_exact_twin}


def attention_cases(op: str, model: Model, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Widths, page sizes, trees and chains, groups of heads, a window; and that a sequence does not feel its neighbours."""
    tolerance = TOLERANCE[dtype]
    plain = Shape(model.heads, model.kv_heads, model.width, 16, True)
    shapes = [
        Shape(model.heads, model.kv_heads, width, page, masked)
        for width in ((64, 80, 96, 128, 256) if model.width >= 64 else (model.width,))
        for page, masked in ((16, True), (256, False))
    ]
    shapes += [Shape(32, 4, model.width, 64, True), Shape(6, 2, model.width, 16, True)]
    if op == "tree_attention":
        shapes.append(replace(plain, window=50))
    for shape in shapes:
        yield Case(str(shape), tolerance, partial(attention_error, op, model, shape, dtype, device))
    yield Case(
        "a query that sees nothing", tolerance, partial(attention_error, op, model, plain, dtype, device, blind=True)
    )
    yield Case("neighbours", 0.0, partial(attention_alone, op, model, plain, dtype, device))
    if op == "tree_attention_exact":
        yield Case("a path as a plain sequence", 0.0, partial(path_error, op, model, plain, dtype, device))


@dataclass(frozen=True, slots=True)
class Shape:
    """What the attention kernel is compiled for."""

    heads: int
    kv_heads: int
    width: int
    page: int
    masked: bool
    window: int | None = None

    def __str__(self) -> str:
        kind = "trees" if self.masked else "chains"
        window = f", window {self.window}" if self.window else ""
        return f"{kind}, {self.heads}/{self.kv_heads} heads of {self.width}, page {self.page}{window}"


def ragged(model: Model, shape: Shape, dtype: torch.dtype) -> reference.Ragged:
    """Trees of every kind in one batch: large, one node, none, without a prefix, across a split's border."""
    generator = torch.Generator().manual_seed(shape.width)
    large = model.width >= 64
    counts, prefixes = ([64, 1, 0, 7, 130], [1500, 600, 20, 0, 513]) if large else ([9, 1, 0, 3], [40, 16, 2, 0])
    trees = [reference.random_parents(n, generator) if n else [] for n in counts]
    return reference.random_call(
        trees,
        prefixes,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        width=shape.width,
        page=shape.page,
        dtype=dtype,
        masked=shape.masked,
        window=shape.window,
    )


def attention_error(
    op: str, model: Model, shape: Shape, dtype: torch.dtype, device: str, *, blind: bool = False
) -> float:
    call = ragged(model, shape, dtype)
    if blind:  # the last node of the batch: no prefix, not even itself
        call.prefix_lens[-1], call.tree_mask[-1] = 0, 0
    return compare(getattr(ops, op), ATTENTION[op], arguments_of(op, call), device)


def arguments_of(op: str, call: reference.Ragged) -> Arguments:
    """What the op takes of a call: exact attention knows no window."""
    return call.args() if op == "tree_attention" else call.args()[:8]


def attention_alone(op: str, model: Model, shape: Shape, dtype: torch.dtype, device: str) -> float:
    call = reference.Ragged(*to_device(ragged(model, shape, dtype).args(), device))
    run = getattr(ops, op)
    together = run(*arguments_of(op, call)).cpu()
    worst = 0.0
    for b, (first, last) in enumerate(pairwise(call.query_start.tolist())):
        if last > first:
            worst = max(worst, error_of(run(*arguments_of(op, call.alone(b))).cpu(), together[first:last]))
    return worst


def path_error(op: str, model: Model, shape: Shape, dtype: torch.dtype, device: str) -> float:
    """Nodes of a tree, and the same tokens as a chain behind the prefix."""
    parents = reference.random_parents(40, torch.Generator().manual_seed(1))
    call = reference.random_call(
        [parents],
        [600 if model.width >= 64 else 90],
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        width=shape.width,
        dtype=dtype,
    )
    run, worst = getattr(ops, op), 0.0
    together = run(*to_device(arguments_of(op, call), device)).cpu()
    for leaf in sorted(set(range(40)) - set(parents))[:5]:
        path = reference.path_to(leaf, parents)
        plain = run(*to_device(arguments_of(op, reference.as_sequence(call, path)), device)).cpu()
        worst = max(worst, error_of(together[path], plain))
    return worst


def distill_cases(model: Model, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Every divergence, from a dense and from a sparse teacher, with its gradient."""
    for kind in ("forward_kl", "reverse_kl", "cross_entropy", "total_variation"):
        for sparse in (False, True):
            name = f"{kind}, {'sparse' if sparse else 'dense'} teacher"
            yield Case(name, 4 * TOLERANCE[dtype], partial(distill_error, kind, sparse, model, dtype, device))


def distill_error(kind: str, sparse: bool, model: Model, dtype: torch.dtype, device: str) -> float:
    rows, heat = 33, {"temperature": 1.3, "teacher_temperature": 0.9}
    teacher_hidden, table, _, _ = build_topk(model, rows, dtype)  # its likeliest token is certain
    hidden, weights = normal(dtype, rows, model.hidden), torch.rand(rows)
    logprobs, ids = torch.log_softmax(teacher_hidden.float() @ table.float().T, 1).topk(8)
    ids[:, 5] = -1
    teacher = {"teacher_hidden": teacher_hidden, "teacher_lm_head": table}
    if sparse:
        teacher = {"teacher_ids": ids, "teacher_logprobs": logprobs}

    def run(device: str) -> tuple[Tensor, Tensor]:
        student = hidden.to(device, copy=True).requires_grad_()
        moved = {name: x.to(device) for name, x in (teacher | {"weights": weights}).items()}
        loss = ops.distill_loss(student, table.to(device), kind=kind, **heat, **moved)
        (gradient,) = torch.autograd.grad(loss, student)
        return loss.detach(), gradient

    return max(errors_of(run(device), run("cpu")))


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    """One result or several, as several."""
    return (results,) if isinstance(results, Tensor) else tuple(results)


def to_device(args: Arguments, device: str) -> Arguments:
    """The arguments, tensors copied (ops may write to them), views of a larger tensor still views of one."""
    return tuple(copied(arg, device) if isinstance(arg, Tensor) else arg for arg in args)


def copied(x: Tensor, device: str) -> Tensor:
    """`x` with its strides and whatever lies between its rows."""
    storage = x.untyped_storage()
    flat = torch.empty(0, dtype=x.dtype).set_(storage, 0, (storage.nbytes() // x.itemsize,))
    return flat.to(device, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())
