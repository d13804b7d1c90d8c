"""Log-softmax and top-k over a vocabulary: parts of fixed size reduced side by side, then merged in order.

A small batch leaves a GPU idle if a program owns a whole row, so a program owns a part of one. The logits come from the
library's product and are read once; next to the table they cost little (64 rows of a 4096-wide model: 1.6 %).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from jetflow_triton.kernels.common import EXACT, ceil_div, power_of_two, warps_for

PART = 4096  # vocabulary entries a program
LOGITS_AT_ONCE = 2**28  # bounds the memory of a long prefill: rows go through in turns


@triton.jit
def _take_largest(values, ids, NOBODY: tl.constexpr):
    """The largest value, the lowest id that has it, and what is left."""
    top = tl.max(values, 0)
    winner = tl.min(tl.where(values == top, ids, NOBODY), 0)
    taken = ids == winner
    return top, winner, tl.where(taken, float("-inf"), values), tl.where(taken, NOBODY, ids)


@triton.jit
def part_kernel(logits, values, ids, stats, vocab, TOP_K: tl.constexpr, SIZE: tl.constexpr):
    """Grid: rows, parts. A part's largest logits with their ids, its maximum and its sum of exponentials."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * tl.num_programs(1) + part
    column = part * SIZE + tl.arange(0, SIZE)
    inside = column < vocab
    left = tl.load(logits + row * vocab + column, mask=inside, other=float("-inf")).to(tl.float32)
    index = tl.where(inside, column, 2147483647)
    peak = tl.max(left, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(stats + place * 2, peak)
    tl.store(stats + place * 2 + 1, tl.sum(tl.exp(left - base), 0))
    for i in range(TOP_K):
        top, winner, left, index = _take_largest(left, index, 2147483647)
        tl.store(values + place * TOP_K + i, top)
        tl.store(ids + place * TOP_K + i, winner)


@triton.jit(do_not_specialize_on_alignment=["logprobs", "chosen", "logsumexp"])  # slices of results
def merge_kernel(
    values,
    ids,
    stats,
    logprobs,
    chosen,
    logsumexp,
    parts,
    vocab,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Grid: rows. The parts' sums are added as one block, in one order; their largest compete once more."""
    row = tl.program_id(0).to(tl.int64)
    part, candidate = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK)
    at = stats + (row * parts + part) * 2
    peak = tl.load(at, mask=part < parts, other=float("-inf"))
    total = tl.load(at + 1, mask=part < parts, other=0.0)
    top = tl.max(peak, 0)
    empty = top == float("-inf")
    base = tl.where(empty, 0.0, top)
    total = tl.sum(total * tl.exp(peak - base), 0)
    lse = base + tl.log(tl.where(empty, 1.0, total))
    tl.store(logsumexp + row, tl.where(empty, top, lse))
    inside = candidate < parts * TOP_K
    left = tl.load(values + row * parts * TOP_K + candidate, mask=inside, other=float("-inf"))
    index = tl.load(ids + row * parts * TOP_K + candidate, mask=inside, other=2147483647)
    for i in range(TOP_K):
        best, winner, left, index = _take_largest(left, index, 2147483647)
        tl.store(logprobs + row * TOP_K + i, best - lse)
        tl.store(chosen + row * TOP_K + i, tl.minimum(winner, vocab - 1).to(tl.int64))  # NaN has no winner


def topk_logprobs(
    hidden: Tensor, lm_head: Tensor, k: int, vocab_size: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiplies by the LM head and launches the two kernels, for as many rows at once as memory should hold."""
    tokens, table = hidden.shape[0], lm_head[:vocab_size]
    logprobs = hidden.new_empty(tokens, k, dtype=torch.float32)
    chosen = hidden.new_empty(tokens, k, dtype=torch.int64)
    logsumexp = hidden.new_empty(tokens, dtype=torch.float32)
    at_once = max(1, LOGITS_AT_ONCE // table.shape[0])
    for start in range(0, tokens, at_once):
        part = slice(start, start + at_once)
        logits = functional.linear(hidden[part], table)
        _topk(logits, k, logprobs[part], chosen[part], logsumexp[part])
    return logprobs, chosen, logsumexp


def _topk(logits: Tensor, k: int, logprobs: Tensor, chosen: Tensor, logsumexp: Tensor) -> None:
    rows, vocab = logits.shape
    parts = ceil_div(vocab, PART)
    values = logits.new_empty(rows, parts, k, dtype=torch.float32)
    ids = logits.new_empty(rows, parts, k, dtype=torch.int32)
    stats = logits.new_empty(rows, parts, 2, dtype=torch.float32)
    part_kernel[(rows, parts)](logits, values, ids, stats, vocab, TOP_K=k, SIZE=PART, num_warps=8, **EXACT)
    block = power_of_two(parts * k)
    merge_kernel[(rows,)](
        values,
        ids,
        stats,
        logprobs,
        chosen,
        logsumexp,
        parts,
        vocab,
        TOP_K=k,
        BLOCK=block,
        BLOCK_P=power_of_two(parts),
        num_warps=warps_for(block),
        **EXACT,
    )
