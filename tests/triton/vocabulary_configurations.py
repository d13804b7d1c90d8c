"""Launches of the kernels between a hidden state and a token at production shapes, on meta tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from kernel_configurations import BF16, FP16, FP32, indices, meta
from torch import Tensor

from jetflow_triton.kernels import choice, distill, logprobs
from jetflow_triton.kernels import linear as linear_kernels

PRODUCTS = {"linear_kernel"}
"""Kernels whose products belong on the tensor cores."""


def linear(tokens: int, width: int, columns: int, dtype: torch.dtype = BF16) -> Tensor:
    return linear_kernels.linear(meta(tokens, width, dtype=dtype), meta(columns, width, dtype=dtype), None)


def topk(tokens: int, k: int, dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    """Qwen3-8B's LM head."""
    return logprobs.topk_logprobs(meta(tokens, 4096, dtype=dtype), meta(151936, 4096, dtype=dtype), k, 151669)


def choices(trees: int, nodes: int, dtype: torch.dtype = BF16) -> None:
    """A token after every node of the trees, then the walks."""
    rows, long = trees * nodes, torch.int64
    one, count = meta(rows, dtype=FP32), indices(rows, dtype=long)
    choice.sample(meta(rows, 151936, dtype=dtype), one, count, one, one, count, count)
    choice.accept_walk(count, count, indices(trees + 1), count, 16)


def distillation(kind: str, *, sparse: bool, dtype: torch.dtype = BF16) -> None:
    """Qwen3-8B's LM head, 2048 slots, against the target's hidden states or its 64 likeliest tokens."""
    hidden, table = meta(2048, 4096, dtype=dtype), meta(151936, 4096, dtype=dtype)
    entries = (None, None, indices(2048, 64, dtype=torch.int64), meta(2048, 64, dtype=FP32))
    teacher = entries if sparse else (hidden, table, None, None)
    distill.distill_loss(hidden, table, *teacher, meta(2048, dtype=FP32), kind, 1.0, 1.0, True)


CONFIGURATIONS: dict[str, Callable[[], object]] = {
    "linear, 8B, qkv": lambda: linear(64, 4096, 6144),
    "linear, 8B, gate and up": lambda: linear(64, 4096, 24576),
    "linear, 8B, down, fp16": lambda: linear(1, 12288, 4096, FP16),
    "linear, 30B-A3B, qkv, prefill": lambda: linear(4096, 2048, 5120),
    "linear, 8B, o, fp32": lambda: linear(64, 4096, 4096, FP32),
    "top-k, 32 of 151936": lambda: topk(16, 32),
    "top-k, 20 of 151936, fp16": lambda: topk(300, 20, FP16),
    "sample and walk, 8 trees of 64": lambda: choices(8, 64),
    "sample and walk, one tree, fp32": lambda: choices(1, 33, FP32),
    "distillation, forward KL, dense": lambda: distillation("forward_kl", sparse=False),
    "distillation, forward KL, sparse": lambda: distillation("forward_kl", sparse=True),
    "distillation, reverse KL, dense, fp16": lambda: distillation("reverse_kl", sparse=False, dtype=FP16),
    "distillation, cross-entropy, dense": lambda: distillation("cross_entropy", sparse=False),
    "distillation, total variation, dense": lambda: distillation("total_variation", sparse=False),
}
