"""The likeliest tokens of a hidden state and their exact log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from jetflow_triton.checks import check_devices, check_rows
from jetflow_triton.dispatch import register, uses_op

ROWS_AT_ONCE = 64  # rows whose float32 logits exist at the same time on the CPU


def topk_logprobs(
    hidden: Tensor, lm_head: Tensor, k: int, vocab_size: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The `k` largest entries of `log_softmax(hidden @ lm_headᵀ)` over the whole vocabulary; equal ones by the lower id.

    Logits are rounded to the dtype of `hidden`, as those of a separate LM head are, so the first id is the token that
    greedy decoding takes; softmax and logsumexp are float32. The logits are written once, in that dtype.

    Args:
        hidden: `[T, C]`.
        lm_head: `[V, C]` contiguous, dtype of `hidden`.
        k: entries a row, 1 … `vocab_size`.
        vocab_size: rows of the table that are tokens; those from there on are padding and never chosen. None: all V.

    Returns:
        Log-probabilities `[T, k]` float32 in falling order, ids `[T, k]` int64, logsumexp `[T]` float32 (so that
        `logit - logsumexp` is any other token's log-probability). A token of logit −inf has log-probability −inf, in a
        row of nothing else too.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape, device, `k` or `vocab_size` does not fit.

    Example:
        >>> logprobs, ids, logsumexp = topk_logprobs(torch.randn(5, 64), torch.randn(1000, 64), k=3)
        >>> logprobs.shape, ids.dtype, bool((logprobs <= 0).all())
        (torch.Size([5, 3]), torch.int64, True)
    """
    _check(hidden, lm_head, k, vocab_size)
    return (_topk_logprobs if uses_op(hidden) else topk_logprobs_twin)(hidden, lm_head, k, vocab_size)


def topk_logprobs_twin(
    hidden: Tensor, lm_head: Tensor, k: int, vocab_size: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain-torch `topk_logprobs`, some rows at a time."""
    tokens, table = hidden.shape[0], lm_head[:vocab_size]
    logprobs = hidden.new_empty(tokens, k, dtype=torch.float32)
    ids = hidden.new_empty(tokens, k, dtype=torch.int64)
    logsumexp = hidden.new_empty(tokens, dtype=torch.float32)
    for start in range(0, tokens, ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        logits = functional.linear(hidden[part], table).float()
        logsumexp[part] = torch.logsumexp(logits, -1)
        values, ids[part] = _topk(logits, k)
        logprobs[part] = torch.where(values == -torch.inf, values, values - logsumexp[part, None])
    return logprobs, ids, logsumexp


def _topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`torch.topk` with equal values in the order of their ids, which torch leaves open (at the k-th place too)."""
    kth = logits.topk(k).values[:, -1:]
    within = ~(logits < kth)  # k a row, more where others equal the k-th (and in a row with NaN)
    counts = within.sum(-1)
    row, token = within.nonzero(as_tuple=True)  # ids rise within a row
    place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    ids = row.new_zeros(len(logits), int(counts.max()))
    ids[row, place] = token
    values = logits.gather(1, ids).masked_fill_(torch.arange(ids.shape[1]) >= counts[:, None], -torch.inf)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], ids.gather(1, order[:, :k])


def _check(hidden: Tensor, lm_head: Tensor, k: int, vocab_size: int | None) -> None:
    check_rows("hidden", hidden, 2)
    check_rows("lm_head", lm_head, 2)
    if lm_head.shape[1] != hidden.shape[1]:
        raise ValueError(f"lm_head has shape {tuple(lm_head.shape)}: [V, {hidden.shape[1]}] is needed to match hidden")
    if lm_head.dtype != hidden.dtype:
        raise TypeError(f"lm_head is {lm_head.dtype}, hidden is {hidden.dtype}: cast one of them")
    if not lm_head.is_contiguous():
        raise ValueError("lm_head must be contiguous: call .contiguous() on it once")
    check_devices(hidden=hidden, lm_head=lm_head)
    rows = lm_head.shape[0]
    if vocab_size is not None and not 1 <= vocab_size <= rows:
        raise ValueError(f"vocab_size is {vocab_size}: lm_head has rows for 1 … {rows}")
    if not 1 <= k <= (vocab_size or rows):
        raise ValueError(f"k is {k}: 1 … {vocab_size or rows} tokens can be chosen")


def _shape(hidden: Tensor, lm_head: Tensor, k: int, vocab_size: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    tokens = hidden.shape[0]
    return (
        hidden.new_empty((tokens, k), dtype=torch.float32),
        hidden.new_empty((tokens, k), dtype=torch.int64),
        hidden.new_empty((tokens,), dtype=torch.float32),
    )


_topk_logprobs = register(
    "topk_logprobs(Tensor hidden, Tensor lm_head, int k, int? vocab_size=None) -> (Tensor, Tensor, Tensor)",
    topk_logprobs_twin,
    "logprobs.topk_logprobs",
    _shape,
)
