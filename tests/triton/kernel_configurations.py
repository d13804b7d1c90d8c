"""Launches at production shapes, on meta tensors: what the offline compiler is given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jetflow_triton.kernels import activation, attention, exact_attention, kv, moe, norm, rope

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def indices(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return meta(*shape, dtype=dtype)


def tree(
    tokens: int,
    width: int = 128,
    *,
    batch: int = 1,
    kv_heads: int = 8,
    page: int = 16,
    words: int = 2,
    context: int = 4096,
    window: int | None = None,
    misplaced: bool = False,
    dtype: torch.dtype = BF16,
) -> Tensor:
    """32 query heads, `tokens` nodes in all. Without mask words the trees are chains.

    `misplaced` index tensors are slices whose memory is aligned to their own items only.
    """
    cache = meta(1000, page, kv_heads, width, dtype=dtype)
    mask = indices(tokens, words) if words else None
    tables = indices(batch, context // page)
    skipped = int(misplaced)
    starts, prefixes = indices(batch + 1 + skipped)[skipped:], indices(batch + skipped)[skipped:]
    q, positions = meta(tokens, 32, width, dtype=dtype), indices(tokens, dtype=torch.int64)
    return attention.tree_attention(q, cache, cache, tables, starts, prefixes, mask, width**-0.5, window, positions)


def exact_tree(tokens: int, kv_heads: int = 8, words: int = 2, context: int = 4096) -> Tensor:
    """One tree or chain in exact mode, 32 query heads of 128."""
    cache, mask = meta(1000, 16, kv_heads, 128), indices(tokens, words) if words else None
    return exact_attention.tree_attention_exact(
        meta(tokens, 32, 128), cache, cache, indices(1, context // 16), indices(2), indices(1), mask, 128**-0.5
    )


def experts(tokens: int, dtype: torch.dtype = BF16) -> Tensor:
    """Qwen3-30B-A3B: 128 experts of 768, 8 a token, width 2048."""
    gate_up, down = meta(128, 2 * 768, 2048, dtype=dtype), meta(128, 2048, 768, dtype=dtype)
    return moe.moe_experts(
        meta(tokens, 2048, dtype=dtype), gate_up, down, meta(tokens, 8, dtype=FP32), indices(tokens, 8)
    )


def rows(dtype: torch.dtype = BF16, tokens: int = 64) -> None:
    """Qwen3-8B, every op that goes row by row; the router of Qwen3-30B-A3B."""
    x, weight = meta(tokens, 4096, dtype=dtype), meta(4096, dtype=dtype)
    norm.rms_norm(x, weight, 1e-6)
    norm.add_rms_norm(x, x, weight, 1e-6)
    q, k, v = meta(tokens, 48, 128, dtype=dtype).split((32, 8, 8), 1)
    gain = meta(128, dtype=dtype)
    rope.qk_norm_rope(q, k, indices(tokens, dtype=torch.int64), meta(40960, 128, dtype=FP32), gain, gain, 1e-6)
    activation.silu_mul(meta(tokens, 2 * 12288, dtype=dtype))
    cache, slots = meta(99, 16, 8, 128, dtype=dtype), indices(tokens, dtype=torch.int64)
    kv.kv_write(k, v, cache, cache, slots)
    kv.kv_move(meta(36, 2, 99, 16, 8, 128, dtype=dtype), slots, slots)
    moe.moe_route(meta(tokens, 128, dtype=dtype), 8, True)


CONFIGURATIONS: dict[str, Callable[[], object]] = {
    "rows, bf16": rows,
    "rows, fp16": lambda: rows(FP16),
    "tree, 8B": lambda: tree(64),
    "tree, 8B, fp16, page 64": lambda: tree(64, page=64, dtype=FP16),
    "tree, 8B, window": lambda: tree(64, window=1024),
    "tree, 8B, fp32": lambda: tree(64, dtype=FP32),
    "32 trees, 8B": lambda: tree(512, batch=32),
    "chain, 8B": lambda: tree(4096, words=0),
    "tree, 30B-A3B": lambda: tree(64, kv_heads=4),
    "tree, 30B-A3B, page 64": lambda: tree(64, kv_heads=4, page=64),
    "chain, 30B-A3B": lambda: tree(4096, kv_heads=4, words=0),
    "tree, width 64": lambda: tree(64, 64),
    "tree, width 80": lambda: tree(64, 80),
    "tree, width 96": lambda: tree(64, 96),
    "tree, width 256": lambda: tree(64, 256),
    "chain, width 256": lambda: tree(4096, 256, words=0),
    "exact tree, 8B": lambda: exact_tree(64),
    "exact tree, 30B-A3B": lambda: exact_tree(64, 4),
    "experts, 1 token": lambda: experts(1),
    "experts, 1 token, fp16": lambda: experts(1, FP16),
    "experts, 512 tokens": lambda: experts(512),
    "experts, 4096 tokens": lambda: experts(4096),
    "experts, 1 token, fp32": lambda: experts(1, FP32),
}

PRODUCTS = {"tree_attention_kernel", "tree_attention_exact_kernel", "gate_up_kernel", "down_kernel"}
"""Kernels whose products belong on the tensor cores."""
