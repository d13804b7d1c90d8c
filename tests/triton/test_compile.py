"""Every kernel compiled for GPUs that are not there, at production shapes, with limits on what it needs of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under the interpreter", allow_module_level=True)

from kernel_offline import compile_launches, inspect_kernel

from jetflow_triton.kernels import activation, attention, kv, moe, norm, rope

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes a program may have


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def indices(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return meta(*shape, dtype=dtype)


def tree(tokens: int, width: int, *, words: int = 2, pages: int = 256, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """32 query heads on 8 KV heads, one sequence."""
    cache = meta(1000, 16, 8, width, dtype=dtype)
    mask = indices(tokens, words) if words else None
    return attention.tree_attention(
        meta(tokens, 32, width, dtype=dtype), cache, cache, indices(1, pages), indices(2), indices(1), mask, width**-0.5
    )


def experts(tokens: int) -> Tensor:
    """Qwen3-30B-A3B."""
    gate_up, down = meta(128, 2 * 768, 2048), meta(128, 2048, 768)
    return moe.moe_experts(meta(tokens, 2048), gate_up, down, meta(tokens, 8, dtype=torch.float32), indices(tokens, 8))


def rows() -> None:
    """Qwen3-8B, every op that goes row by row."""
    norm.rms_norm(meta(64, 4096), meta(4096), 1e-6)
    norm.add_rms_norm(meta(64, 4096), meta(64, 4096), meta(4096), 1e-6)
    q, k, table = meta(64, 32, 128), meta(64, 8, 128), meta(40960, 128, dtype=torch.float32)
    rope.qk_norm_rope(q, k, indices(64, dtype=torch.int64), table, meta(128), meta(128), 1e-6)
    activation.silu_mul(meta(64, 2 * 12288))
    kv.kv_write(k, k, meta(99, 16, 8, 128), meta(99, 16, 8, 128), indices(64, dtype=torch.int64))
    slots = indices(16, dtype=torch.int64)
    kv.kv_move(meta(36, 2, 99, 16, 8, 128), slots, slots)
    moe.moe_route(meta(64, 128), 8, True)


CASES: dict[str, Callable[[], object]] = {
    "rows": rows,
    "experts, one token": lambda: experts(1),
    "experts, prefill": lambda: experts(2048),
    "tree of 64, width 128": lambda: tree(64, 128),
    "chain of 4096, width 128": lambda: tree(4096, 128, words=0),
    "tree of 64, width 64": lambda: tree(64, 64),
    "tree of 64, width 80": lambda: tree(64, 80),
    "tree of 64, width 256": lambda: tree(64, 256),
    "tree of 64, width 128, float32": lambda: tree(64, 128, dtype=torch.float32),
}
QUICK = [(90, "rows"), (90, "experts, one token"), (90, "tree of 64, width 128")]
ALL = [(capability, case) for capability in SHARED for case in CASES]


@pytest.mark.parametrize(
    ("capability", "case"), [pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.slow]) for one in ALL]
)
def test_compiles_without_spills(monkeypatch: pytest.MonkeyPatch, capability: int, case: str) -> None:
    kernels = [inspect_kernel(kernel) for kernel in compile_launches(monkeypatch, capability, CASES[case])]
    assert kernels
    for kernel in kernels:
        assert kernel.shared <= SHARED[capability], kernel
        assert kernel.spills <= (64 if "width 256" in case else 0), kernel
        products = kernel.name in {"tree_attention_kernel", "gate_up_kernel", "down_kernel"}
        assert kernel.tensor_cores == (products and "float32" not in case), kernel


def test_new_lengths_compile_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(tokens: int, pages: int, words: int) -> list[str]:
        def call() -> None:
            norm.rms_norm(meta(tokens, 256), meta(256), 1e-6)
            activation.silu_mul(meta(tokens, 256))
            kv.kv_write(
                meta(tokens, 2, 64), meta(tokens, 2, 64), *[meta(9, 16, 2, 64)] * 2, indices(tokens, dtype=torch.int64)
            )
            moves = indices(tokens, dtype=torch.int64)
            kv.kv_move(meta(2, 2, 9, 16, 2, 64), moves, moves)
            tree(tokens, 64, words=words, pages=pages)

        return [kernel.hash for kernel in compile_launches(monkeypatch, 90, call)]

    assert launch(17, 64, 1) == launch(32, 65, 2)
