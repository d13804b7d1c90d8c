"""A wrong argument is named before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kernel_reference as reference
import pytest
import torch

import jetflow_triton as ops
from jetflow_triton import attention, kv, moe


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
    ("moe_experts", (X, GATE_UP.mT.contiguous().mT, DOWN, zeros(3, 2), CHOSEN), ValueError, "must be contiguous"),
    ("moe_experts", (X, GATE_UP, DOWN.to("meta"), zeros(3, 2), CHOSEN), ValueError, "down is on meta, x on cpu"),
    ("kv_write", (HEADS, HEADS, CACHE, CACHE, POSITIONS.to("meta")), ValueError, "slots is on meta, k on cpu"),
    ("kv_write", (HEADS, HEADS, CACHE, CACHE.long(), POSITIONS), TypeError, "v_cache is torch.int64"),
    ("kv_write", (zeros(3, 2, 16)[..., ::2], HEADS, CACHE, CACHE, POSITIONS), ValueError, "contiguous last"),
    ("kv_move", (KV, POSITIONS, POSITIONS.to("meta")), ValueError, "target is on meta, kv on cpu"),
    ("kv_move", (zeros(2, 2, 4, 32, 2, 8)[:, :, :, ::2], POSITIONS, POSITIONS), ValueError, "kv has shape"),
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
        ("k_cache", zeros(9, 32, 2, 16)[:, ::2], ValueError, "must be contiguous"),  # a page in pieces
        ("q", zeros(3, 4, 32)[..., ::2], ValueError, "q needs a contiguous last dimension"),
        ("window", 0, ValueError, "window is 0"),
        ("positions", None, ValueError, "positions is None"),
        ("positions", zeros(2, dtype=LONG), ValueError, "positions has 2 entries"),
        ("positions", zeros(3), TypeError, "positions is"),
        *[
            (name, torch.empty(shape, dtype=dtype, device="meta"), ValueError, f"{name} is on meta, q on cpu")
            for name, shape, dtype in (
                ("k_cache", (9, 16, 2, 16), torch.float32),
                ("block_tables", (1, 2), torch.int32),
                ("query_start", (2,), torch.int32),
                ("prefix_lens", (1,), torch.int32),
                ("tree_mask", (3, 1), torch.int32),
                ("positions", (3,), torch.int64),
            )
        ],
    ],
)
def test_wrong_argument_of_attention(field: str, value: object, error: type[Exception], message: str) -> None:
    call = reference.random_call([[-1, 0, 1]], [20], window=9)
    if field == "k_cache" and isinstance(value, torch.Tensor):
        call.v_cache = zeros(*value.shape)
    setattr(call, field, value)
    with pytest.raises(error, match=message):
        ops.tree_attention(*call.args())


def test_a_mask_that_cannot_reach_is_refused_before_a_launch() -> None:
    """Without a look at the values: some tree has the mean length at least."""
    call = reference.random_call([[-1, *range(39)], []], [3, 3])
    call.tree_mask = call.tree_mask[:, :0]
    call.q, call.block_tables = call.q.to("meta"), call.block_tables.to("meta")
    with pytest.raises(ValueError, match="tree_mask has 0 words a row for the 40 queries of 2 sequences"):
        _on_meta(call)


def _on_meta(call: reference.Ragged) -> None:
    ops.tree_attention(*(arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in call.args()))


BAD_VALUES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "slots holds": ("kv_write", (HEADS, HEADS, CACHE, CACHE, torch.tensor([0, 64, -1]))),
    "target holds": ("kv_move", (KV, POSITIONS, torch.tensor([0, 64, -1]))),
    "source holds": ("kv_move", (KV, torch.tensor([0, -1, 1]), torch.tensor([0, 1, 2]))),
    "experts holds": ("moe_experts", (X, GATE_UP, DOWN, zeros(3, 2), CHOSEN + 4)),
}
BAD_LAYOUTS: list[tuple[str, list[Any], str]] = [
    ("block_tables", [[0, 9]], r"block_tables has blocks 0 … 9 for sequence 0"),
    ("block_tables", [[-1, 0]], r"block_tables has blocks -1 … 0"),
    ("block_tables", [[0]], r"block_tables has 1 blocks of 16 for the 23 slots"),
    ("query_start", [0, 2], r"query_start is \[0, 2\]: it must rise from 0 to the 3 queries"),
    ("query_start", [1, 3], r"query_start is \[1, 3\]"),
    ("prefix_lens", [-1], r"prefix_lens has -1"),
]


@pytest.fixture(params=["on the CPU", "in debug mode"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of ops that got past their checks; in debug mode as for a GPU, where only debug mode reads values."""
    calls: list[str] = []
    if request.param == "on the CPU":
        yield calls
        return
    for module in (attention, kv, moe):
        monkeypatch.setattr(module, "uses_op", lambda _: True)
        for op in ("tree_attention", "kv_write", "kv_move", "moe_experts"):
            monkeypatch.setattr(module, f"_{op}", lambda *_, op=op: calls.append(op), raising=False)
    with ops.debug_checks():
        yield calls


@pytest.mark.parametrize("message", BAD_VALUES)
def test_values_out_of_range(message: str, launched: list[str]) -> None:
    name, args = BAD_VALUES[message]
    with pytest.raises(ValueError, match=message):
        getattr(ops, name)(*args)
    assert not launched


@pytest.mark.parametrize(("field", "value", "message"), BAD_LAYOUTS)
def test_layouts_out_of_range(field: str, value: list[Any], message: str, launched: list[str]) -> None:
    call = reference.random_call([[-1, 0, 1]], [20])
    setattr(call, field, torch.tensor(value, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        ops.tree_attention(*call.args())
    assert not launched


def test_a_mask_shorter_than_one_of_the_trees(launched: list[str]) -> None:
    call = reference.random_call([[-1, *range(39)], [-1]], [3, 3])
    call.tree_mask = call.tree_mask[:, :1].contiguous()
    with pytest.raises(ValueError, match="tree_mask has 1 words a row for the 40 queries of sequence 0"):
        ops.tree_attention(*call.args())
    assert not launched


def test_right_values_pass_in_debug_mode_and_nothing_is_read_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "uses_op", lambda _: True)
    calls: list[object] = []
    monkeypatch.setattr(kv, "_kv_move", lambda *args: calls.append(args))
    right, wrong = torch.tensor([0, 1, 63]), torch.tensor([0, 1, 64])
    ops.kv_move(KV, right, wrong)  # taken on trust
    with ops.debug_checks():
        ops.kv_move(KV, right, right)
        with ops.debug_checks(False):
            ops.kv_move(KV, right, wrong)
        with pytest.raises(ValueError, match="target holds values from 0 to 64: -1 … 63 are valid"):
            ops.kv_move(KV, right, wrong)
    ops.kv_move(KV, right, wrong)
    assert len(calls) == 4
