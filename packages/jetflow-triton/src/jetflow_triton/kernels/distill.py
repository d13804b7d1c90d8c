"""Divergences and their slopes over a vocabulary: a program a row, whose logits are overwritten by the slopes.

The products before and after are the library's; between them a row is read from the L2 cache once a pass: for the
normalisers, for the value, and for the slopes, each needing the one before. No sum crosses programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetflow_triton.distill import Divergence, distill_in_chunks, sparse_divergence
from jetflow_triton.kernels.common import EXACT, power_of_two

BLOCK = 4096  # vocabulary entries a step
LOGITS_AT_ONCE = 2**27  # 256 MiB in bfloat16, twice that with a dense teacher


@triton.jit
def _load(row, base, vocab, scale, SIZE: tl.constexpr):
    column = base + tl.arange(0, SIZE)
    return tl.load(row + column, mask=column < vocab, other=float("-inf")).to(tl.float32) * scale


@triton.jit
def _normaliser(row, vocab, scale, SIZE: tl.constexpr):
    """Log of the sum of exponentials, online; the largest and its lowest place."""
    peak, total, place = float("-inf"), 0.0, 0
    for base in range(0, vocab, SIZE):
        x = _load(row, base, vocab, scale, SIZE)
        top = tl.max(x, 0)
        place = tl.where(top > peak, base + tl.min(tl.where(x == top, tl.arange(0, SIZE), SIZE), 0), place)
        both = tl.maximum(peak, top)
        shift = tl.where(both == float("-inf"), 0.0, both)
        total = total * tl.exp(peak - shift) + tl.sum(tl.exp(x - shift), 0)
        peak = both
    return peak + tl.log(total), place


@triton.jit
def _dense_slope(log_q, log_p, inside, labelled, value, mean, KIND: tl.constexpr):
    """D's slope in q's tempered logits, once D (`value`) and, for total variation, q's mean sign are known."""
    q, p = tl.exp(log_q), tl.exp(log_p)
    if KIND == "cross_entropy":
        slope = q - tl.where(labelled, 1.0, 0.0)
    elif KIND == "forward_kl":
        slope = q - p
    elif KIND == "reverse_kl":
        ratio = tl.where(inside, log_q, 0.0) - tl.where(inside, log_p, 0.0)
        slope = tl.where(q > 0.0, q * (ratio - value), 0.0)
    else:
        slope = q * (tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0)) - mean)
    return slope


@triton.jit(do_not_specialize=["scale", "teacher_scale"])
def dense_kernel(
    logits,
    teacher,
    values,
    vocab,
    scale,
    teacher_scale,
    KIND: tl.constexpr,
    SLOPES: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Grid: rows."""
    place = tl.program_id(0)
    row, other = logits + place.to(tl.int64) * vocab, teacher + place.to(tl.int64) * vocab
    q_total, _ = _normaliser(row, vocab, scale, SIZE)
    p_total, label = _normaliser(other, vocab, teacher_scale, SIZE)
    value, mean = 0.0, 0.0
    if KIND == "cross_entropy":
        value = q_total - tl.load(row + label).to(tl.float32) * scale
    else:
        for base in range(0, vocab, SIZE):
            log_q = _load(row, base, vocab, scale, SIZE) - q_total
            log_p = _load(other, base, vocab, teacher_scale, SIZE) - p_total
            q, p = tl.exp(log_q), tl.exp(log_p)
            inside = base + tl.arange(0, SIZE) < vocab
            log_q, log_p = tl.where(inside, log_q, 0.0), tl.where(inside, log_p, 0.0)
            if KIND == "forward_kl":
                value += tl.sum(tl.where(p > 0.0, p * (log_p - log_q), 0.0), 0)
            elif KIND == "reverse_kl":
                value += tl.sum(tl.where(q > 0.0, q * (log_q - log_p), 0.0), 0)
            else:
                value += tl.sum(tl.abs(q - p), 0) * 0.5
                mean += tl.sum(tl.where(q > p, q, tl.where(q < p, -q, 0.0)), 0) * 0.5
    tl.store(values + place, value)
    if SLOPES:
        tl.debug_barrier()  # every thread has read the logit of the label
        for base in range(0, vocab, SIZE):
            column = base + tl.arange(0, SIZE)
            inside = column < vocab
            log_q = _load(row, base, vocab, scale, SIZE) - q_total
            log_p = log_q
            if KIND != "cross_entropy":
                log_p = _load(other, base, vocab, teacher_scale, SIZE) - p_total
            slope = _dense_slope(log_q, log_p, inside, column == label, value, mean, KIND)
            tl.store(row + column, slope.to(logits.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["scale"])
def normaliser_kernel(logits, normalisers, vocab, scale, SIZE: tl.constexpr):
    """Grid: rows."""
    place = tl.program_id(0)
    total, _ = _normaliser(logits + place.to(tl.int64) * vocab, vocab, scale, SIZE)
    tl.store(normalisers + place, total)


@triton.jit(do_not_specialize=["scale", "entries"])
def sparse_slopes_kernel(
    logits, normalisers, factors, ids, slopes, vocab, scale, entries, SIZE: tl.constexpr, ENTRIES: tl.constexpr
):
    """Grid: rows. `factor · q`, but the given slopes at the teacher's entries."""
    place = tl.program_id(0).to(tl.int64)
    row = logits + place * vocab
    total, factor = tl.load(normalisers + place), tl.load(factors + place)
    for base in range(0, vocab, SIZE):
        column = base + tl.arange(0, SIZE)
        q = tl.exp(_load(row, base, vocab, scale, SIZE) - total)
        tl.store(row + column, (factor * q).to(logits.dtype.element_ty), mask=column < vocab)
    tl.debug_barrier()  # other threads have written where the entries go
    entry = tl.arange(0, ENTRIES)
    token = tl.load(ids + place * entries + entry, mask=entry < entries, other=-1)
    slope = tl.load(slopes + place * entries + entry, mask=token >= 0, other=0.0)
    tl.store(row + token, slope.to(logits.dtype.element_ty), mask=token >= 0)


def _dense(logits: Tensor, teacher: Tensor, how: Divergence) -> Tensor:
    """Launches `dense_kernel`."""
    rows, vocab = logits.shape
    values = logits.new_empty(rows, dtype=torch.float32)
    dense_kernel[(rows,)](
        logits,
        teacher,
        values,
        vocab,
        1.0 / how.temperature,
        1.0 / how.teacher_temperature,
        KIND=how.kind,
        SLOPES=how.slopes,
        SIZE=min(BLOCK, power_of_two(vocab)),
        num_warps=8,
        **EXACT,
    )
    return values


def _sparse(logits: Tensor, ids: Tensor, probs: Tensor, how: Divergence) -> Tensor:
    """Launches `normaliser_kernel` and `sparse_slopes_kernel`; between them a few operations on the entries alone."""
    rows, vocab = logits.shape
    scale, size = 1.0 / how.temperature, min(BLOCK, power_of_two(vocab))
    normalisers = logits.new_empty(rows, dtype=torch.float32)
    normaliser_kernel[(rows,)](logits, normalisers, vocab, scale, SIZE=size, num_warps=8, **EXACT)
    log_q = logits.gather(1, ids.clamp_min(0)).float() * scale - normalisers[:, None]
    values, factors, extra = sparse_divergence(log_q, probs, ids, how.kind)
    if how.slopes:
        sparse_slopes_kernel[(rows,)](
            logits,
            normalisers,
            factors.contiguous(),
            ids.contiguous(),
            (factors[:, None] * log_q.exp() + extra).contiguous(),
            vocab,
            scale,
            ids.shape[1],
            SIZE=size,
            ENTRIES=power_of_two(ids.shape[1]),
            num_warps=8,
            **EXACT,
        )
    return values


def distill_loss(hidden: Tensor, lm_head: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Runs the kernels over chunks of rows that fit `LOGITS_AT_ONCE`."""
    return distill_in_chunks(_dense, _sparse, max(1, LOGITS_AT_ONCE // lm_head.shape[0]), hidden, lm_head, *args)
