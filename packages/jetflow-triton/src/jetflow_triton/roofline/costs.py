"""Bytes and FLOPs of the ops.

The floor of an op is `max(bytes / bandwidth, FLOPs / peak)`: its inputs read once, its outputs written once, the
arithmetic of its definition (Williams et al. 2009). Beside it stands what our kernels do: the bytes their programs ask
for (the L2 cache serves what is asked for again), the FLOPs they issue (padding included), how many programs share the
work, and how many launches there are. Operands are 2-byte floats. Pure arithmetic: needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, exp, lgamma, log

from jetflow_triton.roofline.shapes import Device, Load, Model
from jetflow_triton.tiles import Tile, nearest, read_table

ROWS = 64  # a tile's height, of attention and linear
BLOCK, SPLIT, FILLED = 64, 512, 128  # of attention: slots a block, slots a split, programs of a full grid
ITEM = 2  # bytes of bfloat16 and float16
SHARE = 2  # an SM draws at most this multiple of its share of the bandwidth: half of them saturate it
SPAN, LAG = 64, 32  # of exact attention: keys a block, latest keys that are in none
PART, AT_ONCE = 4096, 2**28  # of topk_logprobs: logits a program, logits that exist at a time
CANDIDATES = 32  # its k
DISTILL_AT_ONCE, DISTILL_TURN = 2**27, 11  # of distill_loss: logits that exist at a time, launches for them
SAMPLE_PREPARATION = 30  # launches of torch's own that prepare the columns of sample: keys, filters
DEPTH = 8  # nodes that a tree's node sees, itself among them, where the tree is large enough
ACCEPTED = 4  # nodes of a sequence that move to their final slots in a step


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call needs, and what our kernels make of it."""

    bytes: float  # that any implementation moves
    flops: float  # of the definition
    loads: float  # bytes that the programs read and write, repeats and intermediates included
    issued: float  # FLOPs that the programs run, padding included
    programs: float  # that share the bulk of the work
    launches: int

    def floor(self, device: Device) -> float:
        """Seconds below which no implementation can go."""
        return max(self.bytes / device.bandwidth, self.flops / device.flops)

    def expected(self, device: Device) -> float:
        """Seconds that the design allows: repeats from L2, idle multiprocessors idle, launches one after the other."""
        fill = min(1.0, self.programs / device.processors)
        reach = min(1.0, SHARE * fill)
        memory = self.bytes / (device.bandwidth * reach)
        cache = self.loads / (device.cache_bandwidth * reach)
        return max(memory, cache, self.issued / (device.flops * fill)) + self.launches * device.launch


def rms_norm(model: Model, load: Load) -> Cost:
    """`[T, C]` in and out, and the weight."""
    return _rows(load.tokens, 2 * model.hidden, model.hidden, 4 * model.hidden)


def add_rms_norm(model: Model, load: Load) -> Cost:
    """`[T, C]` twice in and twice out, and the weight."""
    return _rows(load.tokens, 4 * model.hidden, model.hidden, 5 * model.hidden)


def silu_mul(model: Model, load: Load) -> Cost:
    """`[T, 2I]` in, `[T, I]` out."""
    return _rows(load.tokens, 3 * model.inner, 0, 5 * model.inner)


def qk_norm_rope(model: Model, load: Load) -> Cost:
    """q and k in and out; a float32 row of the table a token, which every program of the token reads."""
    heads = model.heads + model.kv_heads
    blocks = ceil(model.heads / 16) + ceil(model.kv_heads / 16)
    table = load.tokens * (4 * model.width + 8)
    moved = load.tokens * 2 * heads * model.width * ITEM
    flops = load.tokens * heads * model.width * 8
    return Cost(moved + table, flops, moved + blocks * table, flops, load.tokens * blocks, 1)


def kv_write(model: Model, load: Load) -> Cost:
    """K and V in and out, and the slots."""
    moved = load.tokens * (4 * model.kv_heads * model.width * ITEM + 8)
    return Cost(moved, 0, moved, 0, load.tokens, 1)


def kv_move(model: Model, load: Load) -> Cost:
    """The accepted nodes of all layers, in and out; our kernels pass them through a scratch tensor."""
    moves, planes = load.batch * min(load.budget, ACCEPTED), 2 * model.layers
    moved = 2 * moves * planes * model.kv_heads * model.width * ITEM
    return Cost(moved, 0, 2 * moved, 0, moves * planes, 2)


def matrices(model: Model) -> dict[str, tuple[int, int]]:
    """The products of a step outside the experts: `(rows of the weight, columns)`."""
    heads = model.heads * model.width
    fused = heads + 2 * model.kv_heads * model.width
    shapes = {"qkv": (fused, model.hidden), "o": (model.hidden, heads), "head": (model.vocab, model.hidden)}
    if model.experts:
        return shapes | {"router": (model.experts, model.hidden)}
    return shapes | {"gate_up": (2 * model.inner, model.hidden), "down": (model.hidden, model.inner)}


def linear(name: str) -> Callable[[Model, Load], Cost]:
    """The product `name` of `matrices`, with all rows of a step."""

    def cost(model: Model, load: Load) -> Cost:
        return product(load.tokens, *matrices(model)[name])

    return cost


def product(tokens: int, out: int, width: int) -> Cost:
    """The weight `[out, width]` once, x in and out; our tile of `ROWS` rows is the same for every number of rows."""
    block = linear_block(out)
    tiles = ceil(tokens / ROWS)
    weight, x, y = out * width * ITEM, tokens * width * ITEM, tokens * out * ITEM
    return Cost(
        bytes=weight + x + y,
        flops=2 * tokens * out * width,
        loads=tiles * weight + ceil(out / block) * x + y,
        issued=2 * tiles * ROWS * ceil(out / block) * block * width,
        programs=tiles * ceil(out / block),
        launches=1,
    )


def linear_block(out: int) -> int:
    """Columns of a program of our `linear`, in a 2-byte dtype."""
    return 128 if out >= 128 * 128 else 64 if out >= 64 * 128 else 32


def tree_attention(model: Model, load: Load) -> Cost:
    """The cached K/V once, q, the mask and the output; a query sees the prefix and its ancestors.

    Our programs own `ROWS` (query, head) pairs of one KV head: a larger tree reads K/V once a tile.
    """
    group = model.heads // model.kv_heads
    tiles = load.batch * ceil(load.budget / (ROWS // group))
    line = 2 * model.kv_heads * model.width * ITEM  # K and V of one slot
    slots = load.context + load.budget
    mask = load.tokens * 4 * ceil(load.budget / 32)
    own = load.tokens * 2 * model.heads * model.width * ITEM
    partial = partial_bytes(model, load)
    visible = load.context + min(load.budget, DEPTH)
    columns = BLOCK * (ceil(load.context / BLOCK) + ceil(load.budget / BLOCK))
    return Cost(
        bytes=load.batch * slots * line + own + mask,
        flops=4 * load.tokens * model.heads * model.width * visible,
        loads=tiles * slots * line + own + mask * model.kv_heads + partial,
        issued=4 * tiles * ROWS * model.kv_heads * model.width * columns,
        programs=tiles * model.kv_heads * (ceil(load.context / SPLIT) if partial else 1),
        launches=2 if partial else 1,
    )


def tree_attention_exact(model: Model, load: Load) -> Cost:
    """As `tree_attention`; our programs go through whole blocks of keys, then through the last ones one at a time."""
    tiles = load.batch * ceil(load.budget / (ROWS * model.kv_heads // model.heads))
    same, line = tree_attention(model, load), 2 * model.kv_heads * model.width * ITEM
    again = (tiles - load.batch) * (load.context + load.budget) * line
    columns = load.context + load.budget
    return Cost(
        bytes=same.bytes,
        flops=same.flops,
        loads=same.bytes + again,
        issued=4 * tiles * ROWS * model.kv_heads * model.width * columns,
        programs=tiles * model.kv_heads,
        launches=1,
    )


def slots_one_by_one(load: Load) -> int:
    """Slots that exact attention does not cover with whole blocks of keys."""
    seen = load.context + min(load.budget, DEPTH)
    return load.context + load.budget - max(seen - LAG, 0) // SPAN * SPAN


def partial_bytes(model: Model, load: Load) -> int:
    """What attention writes and reads again to merge splits that are spread over the grid; 0 if none are."""
    splits = ceil(load.context / SPLIT)
    tiles = load.batch * ceil(load.budget / (ROWS * model.kv_heads // model.heads))
    if splits == 1 or tiles * model.kv_heads >= FILLED:
        return 0
    return 2 * splits * load.tokens * model.heads * (model.width + 2) * 4


def moe_route(model: Model, load: Load) -> Cost:
    """Logits in, weights and experts out."""
    moved = load.tokens * (model.experts * ITEM + model.top_k * 8)
    flops = load.tokens * model.experts * 5
    return Cost(moved, flops, moved, flops, load.tokens, 1)


def moe_experts(model: Model, load: Load) -> Cost:
    """The weights of the experts that some token chose, and x in and out. Tokens choose uniformly."""
    tokens, inner, hidden = load.tokens, model.inner, model.hidden
    pairs = tokens * model.top_k
    tile = expert_tile(model, tokens)
    tiles = model.experts * expected_tiles(tokens, model.top_k / model.experts, tile.block_m)
    matrix = 3 * inner * hidden * ITEM
    inputs = pairs * ITEM * (hidden * ceil(inner / tile.block_n) + inner * ceil(hidden / tile.block_n))
    between = pairs * ITEM * (inner + 2 * hidden)  # the hidden layer is written; a pair's output is written and read
    own = tokens * (2 * hidden * ITEM + model.top_k * 8)
    return Cost(
        bytes=distinct_experts(model, tokens) * matrix + own,
        flops=6 * pairs * inner * hidden,
        loads=tiles * matrix + inputs + between + own,
        issued=6 * tiles * tile.block_m * inner * hidden,
        programs=tiles * ceil(inner / tile.block_n),
        launches=4,
    )


def expert_tile(model: Model, tokens: int) -> Tile:
    """What the tile table holds for any GPU."""
    shape = (model.experts, model.hidden, model.inner)
    return nearest(read_table()["moe_experts"], ceil(tokens * model.top_k / model.experts), shape, ITEM, "")


def topk_logprobs(model: Model, load: Load) -> Cost:
    """The table once, the rows, the k best. The library multiplies; its logits are written and read."""
    tokens, vocab, hidden = load.tokens, model.vocab, model.hidden
    moved = vocab * hidden * ITEM + tokens * (hidden * ITEM + CANDIDATES * 12 + 4)
    parts = 2 * tokens * ceil(vocab / PART) * 8 * (CANDIDATES + 1)
    flops = 2 * tokens * vocab * hidden
    turns = ceil(tokens / (AT_ONCE // vocab))
    loads = moved + (turns - 1) * vocab * hidden * ITEM + 2 * tokens * vocab * ITEM + parts
    return Cost(moved, flops, loads, flops, ceil(vocab / 128), 3 * turns)


def sample(model: Model, load: Load) -> Cost:
    """The logits once and a token a row, without filters: some 30 operations a token for its noise."""
    tokens, vocab = load.tokens, model.vocab
    logits, columns = tokens * vocab * ITEM, tokens * (4 * 4 + 3 * 8)
    flops = 30 * tokens * vocab
    return Cost(logits + columns, flops, 2 * logits + columns, flops, tokens, 1 + SAMPLE_PREPARATION)


def accept_walk(model: Model, load: Load) -> Cost:
    """Tokens, parents and choices of all nodes, and the paths; a program a tree."""
    moved = load.tokens * 3 * 8 + load.batch * (DEPTH + 2) * 8
    return Cost(moved, 0, moved + load.batch * DEPTH * 8, 0, load.batch, 2)


def distill_loss(model: Model, load: Load) -> Cost:
    """Forward KL to a dense teacher and its gradient, a row a token: three products with a table, two tables.

    The library multiplies; logits and the teacher's live for a chunk of rows, are written, read in three passes and
    overwritten by the slopes, which the last product reads.
    """
    tokens, vocab, hidden = load.tokens, model.vocab, model.hidden
    table, logits = vocab * hidden * ITEM, tokens * vocab * ITEM
    own = tokens * (2 * hidden * ITEM + hidden * 4 + 4)
    turns = ceil(tokens / (DISTILL_AT_ONCE // vocab))
    flops = 6 * tokens * vocab * hidden
    loads = 3 * turns * table + 10 * logits + own
    return Cost(2 * table + own, flops, loads, flops, ceil(vocab / 128), 1 + DISTILL_TURN * turns)


def distinct_experts(model: Model, tokens: int) -> float:
    """`E (1 − (1 − k/E)^T)`: the experts that T tokens are expected to read."""
    return model.experts * (1 - (1 - model.top_k / model.experts) ** tokens)


@lru_cache(maxsize=256)
def expected_tiles(tokens: int, chance: float, block: int) -> float:
    """Tiles of `block` rows that a group needs if each token joins it with `chance`."""
    if chance >= 1:
        return ceil(tokens / block)

    def probability(size: int) -> float:
        ways = lgamma(tokens + 1) - lgamma(size + 1) - lgamma(tokens - size + 1)
        return exp(ways + size * log(chance) + (tokens - size) * log(1 - chance))

    return sum(probability(size) * ceil(size / block) for size in range(1, tokens + 1))


def _rows(tokens: int, moved: int, weight: int, flops: int) -> Cost:
    """An op that goes row by row: `moved` elements a row, and a weight that every row reads."""
    moved_bytes = tokens * moved * ITEM
    return Cost(
        moved_bytes + weight * ITEM, tokens * flops, moved_bytes + tokens * weight * ITEM, tokens * flops, tokens, 1
    )


@dataclass(frozen=True, slots=True)
class Op:
    """An op of the sheet: its cost, and how often a step calls it (0: not the default one, None: not with this model)."""

    cost: Callable[[Model, Load], Cost]
    calls: Callable[[Model], int | None]


def _in_layers(model: Model) -> int:
    return model.layers


def _if_dense(model: Model) -> int | None:
    return None if model.experts else model.layers


def _if_sparse(model: Model) -> int | None:
    return model.layers if model.experts else None


OPS: dict[str, Op] = {
    "rms_norm": Op(rms_norm, lambda _: 1),
    "add_rms_norm": Op(add_rms_norm, lambda model: 2 * model.layers),
    "qk_norm_rope": Op(qk_norm_rope, _in_layers),
    "kv_write": Op(kv_write, _in_layers),
    "tree_attention": Op(tree_attention, _in_layers),
    "tree_attention_exact": Op(tree_attention_exact, lambda _: 0),
    "linear qkv": Op(linear("qkv"), _in_layers),
    "linear o": Op(linear("o"), _in_layers),
    "linear gate_up": Op(linear("gate_up"), _if_dense),
    "linear down": Op(linear("down"), _if_dense),
    "linear router": Op(linear("router"), _if_sparse),
    "linear head": Op(linear("head"), lambda _: 1),
    "silu_mul": Op(silu_mul, _if_dense),
    "moe_route": Op(moe_route, _if_sparse),
    "moe_experts": Op(moe_experts, _if_sparse),
    "sample": Op(sample, lambda _: 1),
    "accept_walk": Op(accept_walk, lambda _: 1),
    "distill_loss": Op(distill_loss, lambda _: 0),
    "topk_logprobs": Op(topk_logprobs, lambda _: 1),
    "kv_move": Op(kv_move, lambda _: 1),
}
