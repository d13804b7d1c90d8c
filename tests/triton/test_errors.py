"""A wrong argument is named before anything runs."""

from __future__ import annotations

from typing import Any

import kernel_reference as reference
import pytest
import torch

import jetflow_triton as ops


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


X, W, LONG = zeros(3, 8), zeros(8), torch.int64
HEADS, TABLE, POSITIONS = zeros(3, 2, 8), zeros(9, 8), zeros(3, dtype=LONG)
CACHE, KV = zeros(4, 16, 2, 8), zeros(2, 2, 4, 16, 2, 8)
GATE_UP, DOWN, CHOSEN = zeros(4, 24, 8), zeros(4, 8, 12), zeros(3, 2, dtype=torch.int32)

CASES: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("rms_norm", (X.long(), W, 1e-6), TypeError, "x is torch.int64"),
    ("rms_norm", (X, zeros(7), 1e-6), ValueError, "weight has shape"),
    ("rms_norm", (X, W.int(), 1e-6), TypeError, "weight is"),
    ("add_rms_norm", (X, zeros(2, 8), W, 1e-6), ValueError, "residual has shape"),
    ("add_rms_norm", (X, X.half(), W, 1e-6), TypeError, "residual is"),
    ("silu_mul", (zeros(3, 7),), ValueError, "gate_up has shape"),
    ("silu_mul", (zeros(3, 0),), ValueError, "gate_up has shape"),
    ("qk_norm_rope", (HEADS, HEADS.half(), POSITIONS, TABLE, None, None, 1e-6), TypeError, "k is"),
    ("qk_norm_rope", (HEADS, zeros(3, 2, 6), POSITIONS, TABLE, None, None, 1e-6), ValueError, "k has shape"),
    ("qk_norm_rope", (HEADS, HEADS, POSITIONS.float(), TABLE, None, None, 1e-6), TypeError, "positions is"),
    ("qk_norm_rope", (HEADS, HEADS, POSITIONS[:2], TABLE, None, None, 1e-6), ValueError, "positions has 2"),
    ("qk_norm_rope", (HEADS, HEADS, POSITIONS, TABLE.half(), None, None, 1e-6), TypeError, "cos_sin is"),
    ("qk_norm_rope", (HEADS, HEADS, POSITIONS, TABLE[:, :6], None, None, 1e-6), ValueError, "cos_sin has shape"),
    ("qk_norm_rope", (HEADS, HEADS, POSITIONS, TABLE, zeros(4), None, 1e-6), ValueError, "q_weight has shape"),
    ("qk_norm_rope", (HEADS.mT.contiguous().mT, HEADS, POSITIONS, TABLE, None, None, 1e-6), ValueError, "contiguous"),
    ("qk_norm_rope", (zeros(3, 2, 7), zeros(3, 2, 7), POSITIONS, TABLE, None, None, 1e-6), ValueError, "head width 7"),
    ("kv_write", (HEADS, HEADS[:2], CACHE, CACHE, POSITIONS), ValueError, "v has shape"),
    ("kv_write", (HEADS, HEADS, CACHE[..., :4], CACHE, POSITIONS), ValueError, "v_cache has shape"),
    ("kv_write", (HEADS, HEADS, *zeros(2, 4, 16, 1, 8), POSITIONS), ValueError, "k_cache has shape"),
    ("kv_write", (HEADS, HEADS, CACHE, CACHE, POSITIONS.int()), TypeError, "slots is torch.int32"),
    ("kv_write", (HEADS, HEADS, CACHE, CACHE, POSITIONS[:1]), ValueError, "slots has 1"),
    ("kv_write", (HEADS, HEADS, CACHE[:, ::2], CACHE[:, ::2], POSITIONS), ValueError, "must be contiguous"),
    ("kv_move", (KV[:, :1], POSITIONS, POSITIONS), ValueError, "kv has shape"),
    ("kv_move", (KV, POSITIONS.int(), POSITIONS), TypeError, "source is"),
    ("kv_move", (KV, POSITIONS, POSITIONS[:1]), ValueError, "target has 1"),
    ("moe_route", (X, 9, True), ValueError, "top_k is 9"),
    ("moe_route", (X, 0, True), ValueError, "top_k is 0"),
    ("moe_experts", (X, GATE_UP[:, :, :4], DOWN, zeros(3, 2), CHOSEN), ValueError, "gate_up has shape"),
    ("moe_experts", (X, GATE_UP, DOWN[:3], zeros(3, 2), CHOSEN), ValueError, "down has shape"),
    ("moe_experts", (X.half(), GATE_UP, DOWN, zeros(3, 2), CHOSEN), TypeError, "one dtype is needed"),
    ("moe_experts", (X, GATE_UP, DOWN, zeros(3, 1), CHOSEN), ValueError, "weights has shape"),
    ("moe_experts", (X, GATE_UP, DOWN, zeros(3, 2).half(), CHOSEN), TypeError, "weights is"),
    ("moe_experts", (X, GATE_UP, DOWN, zeros(3, 2), CHOSEN.float()), TypeError, "experts is"),
    ("moe_experts", (X, GATE_UP, DOWN, zeros(3, 2), CHOSEN[:2]), ValueError, "experts has shape"),
]


@pytest.mark.parametrize(("name", "args", "error", "message"), CASES)
def test_wrong_argument(name: str, args: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(ops, name)(*args)


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("q", zeros(3, 3, 16), ValueError, "k_cache has shape"),
        ("q", zeros(3, 4, 16).half(), TypeError, "one dtype is needed"),
        ("v_cache", zeros(1, 16, 2, 16), ValueError, "v_cache has shape"),
        ("block_tables", zeros(1, 2, dtype=LONG), TypeError, "block_tables is torch.int64"),
        ("block_tables", zeros(2, 2, dtype=torch.int32), ValueError, "block_tables has 2 rows"),
        (
            "block_tables",
            zeros(1, 1, dtype=torch.int32),
            ValueError,
            "block_tables has 1 blocks of 16 for the 23 slots",
        ),
        ("query_start", zeros(3, dtype=torch.int32), ValueError, "query_start 3 entries"),
        ("prefix_lens", zeros(1), TypeError, "prefix_lens is"),
        ("tree_mask", zeros(2, 1, dtype=torch.int32), ValueError, "tree_mask has 2 rows for 3 queries"),
        ("tree_mask", zeros(3, 1), TypeError, "tree_mask is"),
        ("tree_mask", zeros(3, 0, dtype=torch.int32), ValueError, "tree_mask has 0 words a row for the 3 queries"),
    ],
)
def test_wrong_argument_of_attention(field: str, value: torch.Tensor, error: type[Exception], message: str) -> None:
    call = reference.random_call([[-1, 0, 1]], [20])
    setattr(call, field, value)
    with pytest.raises(error, match=message):
        ops.tree_attention(*call.args())
