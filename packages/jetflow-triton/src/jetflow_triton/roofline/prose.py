"""The sheet's sentences, with their numbers computed where they are said."""

from __future__ import annotations

from collections.abc import Iterator

from jetflow_triton.roofline import costs
from jetflow_triton.roofline.costs import ACCEPTED, DEPTH, FILLED, ITEM, OPS, ROWS, SHARE, SPLIT, Cost
from jetflow_triton.roofline.shapes import H100, H200, LAUNCH, QWEN3_8B, QWEN3_30B_A3B, Load, Model

DENSE, SPARSE = QWEN3_8B, QWEN3_30B_A3B


def introduction() -> Iterator[str]:
    """What the tables hold, a paragraph each."""
    yield "Written by `python -m jetflow_triton.roofline`; `--csv` gives every row. A test holds this file to the command."
    yield (
        "**Floor.** `max(bytes / bandwidth, FLOPs / peak)` of one call in bfloat16: inputs read once, outputs written once, "
        "the arithmetic of the definition. No implementation is faster. "
        f"{H100.name}: {H100.bandwidth / 1e12} TB/s; {H200.name}: {H200.bandwidth / 1e12} TB/s; both: "
        f"{H100.flops / 1e12:.0f} TFLOP/s dense, {H100.processors} multiprocessors (SMs)."
    )
    yield (
        "**Design.** What our kernels make of it, before any measurement. *Asked MB*: what their programs read and write, "
        "repeats and intermediates included. *Issued GFLOP*: padded rows and columns included. *Programs* share the bulk "
        "of the work, *launches* follow each other. The design time charges the floor's bytes to memory, what is asked to "
        f"the L2 cache ({H100.cache_bandwidth / 1e12} TB/s), issued FLOPs to the SMs that have a program (an SM draws at "
        f"most {SHARE} times its share of a bandwidth), and {LAUNCH * 1e6:.0f} µs a launch in a captured graph. It is a model to "
        "find losses with; `scripts/gpu_check.py` sets measured times beside both."
    )
    yield (
        "**Step.** `batch` sequences, each with `budget` tree nodes behind `context` cached tokens. "
        f"{ACCEPTED} nodes of each are accepted, a node sees {DEPTH} nodes of its tree, tokens choose their experts "
        "uniformly."
    )


def losses() -> Iterator[str]:
    """Where the design stays behind the floor, on an H100."""
    yield launches()
    yield large_trees()
    yield small_trees()
    yield short_prefixes()
    yield merging()
    yield one_by_one()
    yield many_rows()
    yield distinct()
    yield crowded_experts()
    yield logits()
    yield choosing()
    yield teaching()
    yield (
        "**`kv_move`.** Passes through a scratch tensor so that moves may overlap: twice the bytes and two launches, "
        "once a step."
    )
    cost = costs.rms_norm(DENSE, Load(32, 256, 0))
    yield (
        "**`rms_norm`, `qk_norm_rope`.** Every row reads the weight, every program its row of the angles: up to "
        f"{number(cost.loads / cost.bytes)}x the bytes, from L2."
    )


def launches() -> str:
    """Small kernels are all launch."""
    load, parts = Load(1, 16, 8192), []
    for model in (DENSE, SPARSE):
        count = sum(calls * cost.launches for _, calls, cost in step(model, load))
        floor = sum(calls * cost.floor(H100) for _, calls, cost in step(model, load))
        parts.append(f"{count:,} of {model.name} ({ms(count * LAUNCH)}, {count * LAUNCH / floor:.0%} of the floor)")
    norm = costs.add_rms_norm(DENSE, Load(1, 64, 8192))
    return (
        f"**Launches.** A step at batch 1, budget 16, context 8,192 is {' or '.join(parts)}. The small ops are little "
        f"else: `add_rms_norm` on 64 rows of {DENSE.name} has a floor of {us(norm.floor(H100))} and a design of "
        f"{us(norm.expected(H100))}."
    )


def large_trees() -> str:
    """Several tiles of one tree read the same K/V."""
    sizes = [DENSE.heads // DENSE.kv_heads, SPARSE.heads // SPARSE.kv_heads]
    queries = " or ".join(f"{ROWS // size} queries of {size} heads" for size in sizes)
    reads = [" or ".join(str(nodes * size // ROWS) for size in sizes) for nodes in (64, 256)]
    rate, cost = ROWS * H100.cache_bandwidth, costs.tree_attention(DENSE, Load(1, 256, 32768))
    return (
        f"**`tree_attention`, large trees.** A program's {ROWS} rows are {queries} ({DENSE.name} or {SPARSE.name}). A tree "
        f"of 64 nodes reads its K/V {reads[0]} times, of 256 nodes {reads[1]} times, all but the first time from L2. "
        f"{ROWS} FLOPs a byte at {H100.cache_bandwidth / 1e12} TB/s are at most {number(rate / 1e12)} TFLOP/s, "
        f"{rate / H100.flops:.0%} of the peak: budget 256 at context 32,768 takes {us(cost.expected(H100))} where the "
        f"floor is {us(cost.floor(H100))} ({DENSE.name}). A taller tile would halve this; one height for all trees is "
        "what keeps a row's bits."
    )


def small_trees() -> str:
    """A few queries do not fill a tile."""
    cost = costs.tree_attention(DENSE, Load(1, 1, 8192))
    return (
        f"**`tree_attention`, small trees.** One node of {DENSE.name} fills {DENSE.heads // DENSE.kv_heads} of {ROWS} "
        f"rows: {number(cost.issued / cost.flops)}x the FLOPs, at no cost, since memory decides "
        f"({us(cost.issued / H100.flops)} of tensor cores under {us(cost.bytes / H100.bandwidth)} of reading at context "
        "8,192)."
    )


def short_prefixes() -> str:
    """Fixed splits do not fill the GPU."""
    short, long = (costs.tree_attention(DENSE, Load(1, 16, context)) for context in (1024, 8192))
    return (
        f"**`tree_attention`, short prefixes.** Splits are {SPLIT} slots whatever the batch. At batch 1, budget 16 and "
        f"context 1,024 that is {short.programs:.0f} programs for {H100.processors} SMs and a design of "
        f"{us(short.expected(H100))} against {us(short.floor(H100))}; at context 8,192 it is {long.programs:.0f} programs "
        f"and {us(long.expected(H100))} against {us(long.floor(H100))}."
    )


def merging() -> str:
    """Partial results pass through memory."""
    load = Load(1, 64, 8192)
    kept = costs.partial_bytes(DENSE, load)
    cached = (load.context + load.budget) * 2 * DENSE.kv_heads * DENSE.width * ITEM
    return (
        "**`tree_attention`, merge.** Where splits are spread over the grid, their float32 results are written and read "
        f"again, and a second kernel merges them: at batch 1, budget 64, context 8,192 {mb(kept)} beside {mb(cached)} of "
        f"K/V ({DENSE.name}). From {FILLED} programs on, a program goes through its splits alone and keeps them in "
        "registers."
    )


def one_by_one() -> str:
    """Exact attention is in no hurry."""
    load = Load(1, 64, 8192)
    cost = costs.tree_attention_exact(DENSE, load)
    return (
        "**`tree_attention_exact`.** One program goes through a tile's whole prefix, and through the last "
        f"{costs.slots_one_by_one(load)} slots one at a time outside the tensor cores: at batch 1, budget 64, context "
        f"8,192 {cost.programs:.0f} programs and {us(cost.expected(H100))} against {us(cost.floor(H100))} "
        f"({DENSE.name}), without the waiting in between, which the model does not know. That is the price of exact mode."
    )


def many_rows() -> str:
    """The row-invariant product beyond one tile."""
    few, many = (costs.linear("gate_up")(DENSE, Load(batch, 64, 0)) for batch in (1, 8))
    return (
        f"**`linear`.** Its tile is {ROWS} rows at any number of rows. Up to {ROWS} rows it reads the weight once; x is "
        f"read again for every {costs.linear_block(2 * DENSE.inner)} columns: {number(few.loads / few.bytes)}x the bytes "
        f"for `gate_up` of {DENSE.name} at 64 rows, from L2. Beyond, the weight is read once a tile of rows: 512 rows take "
        f"{us(many.expected(H100))} where the floor is {us(many.floor(H100))}. That is the price of exact mode; the "
        "default mode's products are the vendor library's."
    )


def distinct() -> str:
    """What a tree costs a mixture of experts."""
    read = ", ".join(f"{n} tokens {costs.distinct_experts(SPARSE, n):.1f}" for n in (4, 16, 64))
    return (
        f"**`moe_experts`, weights.** T tokens are expected to read `E (1 - (1 - k/E)^T)` of {SPARSE.experts} experts: "
        f"1 token {SPARSE.top_k}, {read}. That is the floor's, not the design's: up to some 64 tokens each further node "
        "costs its experts, beyond them nearly nothing."
    )


def crowded_experts() -> str:
    """Padding, and tiles too small for many tokens."""
    few, many = (costs.moe_experts(SPARSE, Load(batch, nodes, 0)) for batch, nodes in ((1, 64), (32, 256)))
    tile, large = (costs.expert_tile(SPARSE, tokens) for tokens in (64, 8192))
    return (
        f"**`moe_experts`, tiles.** 64 tokens give an expert {64 * SPARSE.top_k // SPARSE.experts} rows on average, in "
        f"tiles of {tile.block_m}: {number(few.issued / few.flops)}x the FLOPs, hidden by the weights "
        f"({us(few.issued / H100.flops)} under {us(few.bytes / H100.bandwidth)}). At 8,192 tokens the tile is "
        f"{large.block_m} rows by {large.block_n} columns, asks for {number(many.loads / many.bytes)}x the bytes and takes "
        f"{us(many.expected(H100))} where the floor is {us(many.floor(H100))}. Four launches a layer (sort, gate and up, "
        f"down, combine) are {us(4 * LAUNCH)}."
    )


def logits() -> str:
    """Log-probabilities without one more pass over memory."""
    cost = costs.topk_logprobs(DENSE, Load(1, 64, 0))
    return (
        f"**`topk_logprobs`.** The library's product writes the logits, the kernels read them: "
        f"{mb(2 * 64 * DENSE.vocab * ITEM)} beside the table's {mb(DENSE.vocab * DENSE.hidden * ITEM)} for 64 rows of "
        f"{DENSE.name}; each of {-(-DENSE.vocab // costs.PART)} parts of a row passes its {costs.CANDIDATES} best on. In "
        f"all {number(cost.loads / cost.bytes)}x the bytes and {cost.launches} launches."
    )


def choosing() -> str:
    """Small tensors, many launches."""
    cost = costs.sample(DENSE, Load(1, 64, 0))
    walk = costs.accept_walk(DENSE, Load(8, 64, 0))
    return (
        f"**`sample`, `accept_walk`.** torch prepares the parameters of `sample` in {costs.SAMPLE_PREPARATION} launches: "
        f"{us(cost.expected(H100))} for 64 rows where the floor is {us(cost.floor(H100))}. A row is read twice; a top-k or "
        "top-p adds up to 31 readings of it, a bisection each, from L2. A tree's walk is one program and a chain of "
        f"dependent reads: {walk.bytes / 1e3:.0f} KB at batch 8 are nothing, the {walk.launches} launches are."
    )


def teaching() -> str:
    """Logits that are not kept."""
    load = Load(32, 256, 0)
    cost = costs.distill_loss(DENSE, load)
    whole, kept = load.tokens * DENSE.vocab * 4, costs.DISTILL_AT_ONCE * ITEM * 2
    return (
        f"**`distill_loss`.** {load.tokens:,} rows of {DENSE.name} have {whole / 1e9:.1f} GB of float32 logits, and the "
        f"teacher's as many; {mb(kept)} of both exist at a time. For that the tables are read again for every "
        f"{costs.DISTILL_AT_ONCE // DENSE.vocab} rows and each logit in several passes: "
        f"{number(cost.loads / cost.bytes)}x the bytes, {ms(cost.loads / H100.cache_bandwidth)} beside "
        f"{ms(cost.flops / H100.flops)} of products."
    )


def step(model: Model, load: Load) -> list[tuple[str, int, Cost]]:
    """The ops that one decode step calls, how often, and the cost of a call."""
    found = ((name, op.calls(model), op) for name, op in OPS.items())
    return [(name, calls, op.cost(model, load)) for name, calls, op in found if calls]


def number(x: float) -> str:
    """About three digits."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def us(seconds: float) -> str:
    """Microseconds."""
    return f"{number(seconds * 1e6)} µs"


def ms(seconds: float) -> str:
    """Milliseconds."""
    return f"{number(seconds * 1e3)} ms"


def mb(amount: float) -> str:
    """Megabytes."""
    return f"{number(amount / 1e6)} MB"
