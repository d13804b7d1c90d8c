"""Seeded Gumbel sampling, a program a row, and the acceptance walk, a program a tree.

The filters are thresholds on how far a logit lies below the row's largest. Such distances are floats ≥ 0, which order as
their bits do, so a threshold is found by bisection over 31 bits: no sort, and no memory but the logits themselves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetflow_triton.choice import log_min_p, noise_keys
from jetflow_triton.kernels.common import EXACT, power_of_two

BLOCK = 8192  # vocabulary entries a step
TINY = tl.constexpr(1.1754943508222875e-38)
FINITE = tl.constexpr(0x7F7FFFFF)  # bits of the largest float


@triton.jit
def _mix(x):
    """The finaliser of splitmix64 on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _log_exponential(counter):
    """Log of a standard exponential variable per uint64 counter."""
    uniform = tl.abs(_mix(counter).to(tl.int64, bitcast=True).to(tl.float32)) * 1.0842021724855044e-19
    uniform = tl.minimum(tl.maximum(uniform, 5.421010862427522e-20), 0.9999999403953552)
    # −log(1 − u): the area-tangent series where the difference would lose the digits of a small u.
    s = uniform / (2.0 - uniform)
    t = s * s
    series = 1.0 / 9 + t * (1.0 / 11 + t * (1.0 / 13 + t * (1.0 / 15)))
    series = 2.0 * s * (1.0 + t * (1.0 / 3 + t * (1.0 / 5 + t * (1.0 / 7 + t * series))))
    return tl.log(tl.where(uniform < 0.5, series, -tl.log(1.0 - uniform)))


@triton.jit
def _distance(row, column, vocab, best, temperature):
    """How far entries lie below the largest, at the row's temperature: ≥ 0, inf outside the row; and the same as bits."""
    x = tl.load(row + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    distance = (best - x) / temperature
    return distance, distance.to(tl.int32, bitcast=True)


@triton.jit
def _count_upto(row, vocab, best, temperature, limit, SIZE: tl.constexpr):
    """Entries whose distance is at most `limit`."""
    count = 0
    for base in range(0, vocab, SIZE):
        _, bits = _distance(row, base + tl.arange(0, SIZE), vocab, best, temperature)
        count += tl.sum((bits <= limit).to(tl.int32), 0)
    return count


@triton.jit
def _mass_upto(row, vocab, best, temperature, limit, SIZE: tl.constexpr):
    """Their probability mass, up to the normaliser, float64."""
    mass = tl.full([], 0.0, tl.float64)
    for base in range(0, vocab, SIZE):
        distance, bits = _distance(row, base + tl.arange(0, SIZE), vocab, best, temperature)
        mass += tl.sum(tl.where(bits <= limit, tl.exp(-distance), 0.0), 0).to(tl.float64)
    return mass


@triton.jit
def _top_k_limit(row, vocab, best, temperature, top_k, SIZE: tl.constexpr):
    """A distance within which `top_k` entries lie, and besides them only equals of the farthest."""
    low, high = 0, FINITE
    while low < high:
        middle = low + (high - low) // 2
        count = _count_upto(row, vocab, best, temperature, middle, SIZE)
        if count < top_k:
            low = middle + 1
        else:
            high = middle
            low = tl.where(count == top_k, middle, low)  # found, as far as entries can tell
    return low


@triton.jit
def _top_p_limit(row, vocab, best, temperature, top_p, limit, SIZE: tl.constexpr):
    """The largest distance, `limit` at most, below which less than `top_p` of the mass within `limit` lies."""
    enough = _mass_upto(row, vocab, best, temperature, limit, SIZE) * top_p
    low, high = 0, limit
    while low < high:
        middle = low + (high - low + 1) // 2
        if _mass_upto(row, vocab, best, temperature, middle - 1, SIZE) < enough:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _largest(row, vocab, SIZE: tl.constexpr):
    """The largest entry, its lowest place, and whether the row is free of NaN."""
    best, winner, clean = float("-inf"), 0, 1
    for base in range(0, vocab, SIZE):
        column = base + tl.arange(0, SIZE)
        x = tl.load(row + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        number = tl.abs(x) >= 0.0
        clean = tl.minimum(clean, tl.min(number.to(tl.int32), 0))
        top = tl.max(tl.where(number, x, float("-inf")), 0)
        winner = tl.where(top > best, tl.min(tl.where(x == top, column, vocab), 0), winner)
        best = tl.maximum(best, top)
    return best, winner, clean


@triton.jit
def _draw(row, vocab, best, temperature, limit, log_min_p, key, SIZE: tl.constexpr):
    """The place of the largest noisy entry among those that the filters keep."""
    top_score, winner = float("-inf"), 0
    for base in range(0, vocab, SIZE):
        column = base + tl.arange(0, SIZE)
        distance, bits = _distance(row, column, vocab, best, temperature)
        noise = _log_exponential(key + (column + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
        kept = (bits <= limit) & (-distance >= log_min_p)
        score = tl.where(kept, -distance, float("-inf")) - noise
        top = tl.max(score, 0)
        winner = tl.where(top > top_score, tl.min(tl.where(score == top, column, vocab), 0), winner)
        top_score = tl.maximum(top_score, top)
    return winner


@triton.jit
def sample_kernel(logits, temperature, top_k, top_p, log_min_p, keys, tokens, stride, vocab, SIZE: tl.constexpr):
    """Grid: rows."""
    place = tl.program_id(0)
    row = logits + place.to(tl.int64) * stride
    best, token, clean = _largest(row, vocab, SIZE)
    usable = (clean != 0) & (best > float("-inf")) & (best < float("inf"))
    heat = tl.load(temperature + place).to(tl.float32)
    if usable & (heat > 0.0):
        heat = tl.maximum(heat, TINY)
        count, share = tl.load(top_k + place), tl.load(top_p + place).to(tl.float64)
        limit = 0 + FINITE
        if (count > 0) & (count < vocab):
            limit = _top_k_limit(row, vocab, best, heat, count, SIZE)
        if share < 1.0:
            limit = _top_p_limit(row, vocab, best, heat, share, limit, SIZE)
        key = tl.load(keys + place).to(tl.uint64, bitcast=True)
        token = _draw(row, vocab, best, heat, limit, tl.load(log_min_p + place), key, SIZE)
    tl.store(tokens + place, tl.where(usable, token, -1).to(tl.int64))


@triton.jit(do_not_specialize=["width"])
def accept_walk_kernel(tokens, parents, query_start, choices, path, lengths, bonus, width, SIZE: tl.constexpr):
    """Grid: trees."""
    tree = tl.program_id(0)
    start = tl.load(query_start + tree)
    size = tl.load(query_start + tree + 1) - start
    node, length, choice = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), tl.full([], -1, tl.int64)
    while (node < size) & (length < width):
        tl.store(path + tree.to(tl.int64) * width + length, node.to(tl.int64))
        choice = tl.load(choices + start + node)
        length += 1
        child = size
        base = node + 1  # children come after their parent
        while base < size:
            index = base + tl.arange(0, SIZE)
            inside = index < size
            parent = tl.load(parents + start + index, mask=inside, other=-1)
            token = tl.load(tokens + start + index, mask=inside, other=0).to(tl.int64)
            found = inside & (parent == node) & (token == choice)
            child = tl.minimum(child, tl.min(tl.where(found, index, size), 0))
            base += SIZE
        node = child
    tl.store(lengths + tree, length.to(tl.int64))
    tl.store(bonus + tree, choice)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Launches `sample_kernel`."""
    rows, vocab = logits.shape
    tokens = logits.new_empty(rows, dtype=torch.int64)
    if rows:
        size = min(BLOCK, power_of_two(vocab))
        sample_kernel[(rows,)](
            logits,
            temperature.contiguous(),
            top_k.clamp(max=vocab).to(torch.int32).contiguous(),
            top_p.contiguous(),
            log_min_p(min_p),
            noise_keys(seeds, positions),
            tokens,
            logits.stride(0),
            vocab,
            SIZE=size,
            num_warps=16 if size == BLOCK else 4,
            **EXACT,
        )
    return tokens


def accept_walk(
    tokens: Tensor, parents: Tensor, query_start: Tensor, choices: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches `accept_walk_kernel`."""
    batch = query_start.shape[0] - 1
    path = tokens.new_full((batch, max_depth + 1), -1, dtype=torch.int64)
    lengths, bonus = path.new_empty(batch), path.new_empty(batch)
    if batch:
        accept_walk_kernel[(batch,)](
            tokens.contiguous(),
            parents.contiguous(),
            query_start.contiguous(),
            choices.contiguous(),
            path,
            lengths,
            bonus,
            max_depth + 1,
            SIZE=128,
            num_warps=1,
            **EXACT,
        )
    return path, lengths, bonus
