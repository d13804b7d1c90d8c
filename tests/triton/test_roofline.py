"""The roofline's formulas against figures worked out by hand, against the launches, and the committed sheet."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from math import ceil, prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jetflow_triton.roofline import H100, H200, LOADS, MODELS, OPS, QWEN3_8B, QWEN3_30B_A3B, Cost, Load, costs
from jetflow_triton.roofline.__main__ import main
from jetflow_triton.roofline.sheet import csv, markdown, table

STEP = Load(1, 64, 8192)
CASES = [(model, name) for model in MODELS for name, op in OPS.items() if op.calls(model) is not None]


def cost(name: str, load: Load = STEP) -> Cost:
    model = QWEN3_30B_A3B if OPS[name].calls(QWEN3_8B) is None else QWEN3_8B
    return OPS[name].cost(model, load)


HAND = {  # bytes and FLOPs of one call at batch 1, budget 64, context 8192, on Qwen3-8B where it has the op
    "rms_norm": (64 * 4096 * 2 * 2 + 4096 * 2, 64 * 4096 * 4),
    "add_rms_norm": (64 * 4096 * 4 * 2 + 4096 * 2, 64 * 4096 * 5),
    "silu_mul": (64 * 12288 * 3 * 2, 64 * 12288 * 5),
    "qk_norm_rope": (64 * 40 * 128 * 2 * 2 + 64 * (128 * 4 + 8), 64 * 40 * 128 * 8),
    "kv_write": (64 * 8 * 128 * 2 * 2 * 2 + 64 * 8, 0),
    "kv_move": (4 * 36 * 2 * 8 * 128 * 2 * 2, 0),
    # 4,096 bytes of K and V a slot; q and the output; two mask words a row. A node sees the prefix and 8 nodes.
    "tree_attention": (8256 * 4096 + 64 * 4096 * 2 * 2 + 64 * 2 * 4, 4 * 64 * 4096 * 8200),
    "tree_attention_exact": (8256 * 4096 + 64 * 4096 * 2 * 2 + 64 * 2 * 4, 4 * 64 * 4096 * 8200),
    "linear qkv": (6144 * 4096 * 2 + 64 * (6144 + 4096) * 2, 2 * 64 * 6144 * 4096),
    "linear o": (4096 * 4096 * 2 + 64 * (4096 + 4096) * 2, 2 * 64 * 4096 * 4096),
    "linear gate_up": (24576 * 4096 * 2 + 64 * (24576 + 4096) * 2, 2 * 64 * 24576 * 4096),
    "linear down": (12288 * 4096 * 2 + 64 * (12288 + 4096) * 2, 2 * 64 * 12288 * 4096),
    "linear head": (151936 * 4096 * 2 + 64 * (151936 + 4096) * 2, 2 * 64 * 151936 * 4096),
    "linear router": (128 * 2048 * 2 + 64 * (128 + 2048) * 2, 2 * 64 * 128 * 2048),
    # two tables, two hidden states in and a float32 gradient out, a weight a row
    "distill_loss": (2 * 151936 * 4096 * 2 + 64 * (2 * 4096 * 2 + 4096 * 4 + 4), 6 * 64 * 151936 * 4096),
    "sample": (64 * 151936 * 2 + 64 * 40, 30 * 64 * 151936),
    "accept_walk": (64 * 24 + 8 * 8 + 2 * 8, 0),
    # 32 candidates a row: a float32 and an int64 each, and the row's logsumexp
    "topk_logprobs": (151936 * 4096 * 2 + 64 * (4096 * 2 + 32 * 12 + 4), 2 * 64 * 151936 * 4096),
    "moe_route": (64 * (128 * 2 + 8 * 8), 64 * 128 * 5),
    # 125.94 of 128 experts, 9,437,184 bytes each
    "moe_experts": (128 * (1 - (15 / 16) ** 64) * 9437184 + 64 * (2048 * 2 * 2 + 8 * 8), 64 * 8 * 6 * 768 * 2048),
}


@pytest.mark.parametrize("name", OPS)
def test_by_hand(name: str) -> None:
    assert (cost(name).bytes, cost(name).flops) == pytest.approx(HAND[name])


def test_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    gate_up = cost("linear gate_up")  # 205 MB, 12.9 GFLOP
    assert gate_up.floor(H100) == pytest.approx(204996608 / 3.35e12)
    assert gate_up.floor(H200) == pytest.approx(204996608 / 4.8e12)
    crowd = cost("linear gate_up", Load(32, 256, 8192))
    assert crowd.floor(H100) == crowd.floor(H200) == pytest.approx(2 * 8192 * 24576 * 4096 / 989e12)


def test_design_of_one_call_by_hand() -> None:
    """Attention of one node, batch 1, context 1024: one tile, 8 KV heads, 2 splits, 16 programs for 132 SMs."""
    call = OPS["tree_attention"].cost(QWEN3_8B, Load(1, 1, 1024))
    assert call.programs == 16
    assert call.launches == 2
    assert call.issued == 4 * 64 * 8 * 128 * (1024 + 64)
    partial = 2 * 2 * 1 * 32 * 130 * 4  # written and read, 2 splits, 130 floats a head
    assert call.loads == 1025 * 4096 + 4096 * 2 * 2 + 4 * 8 + partial
    reach = 2 * 16 / 132
    memory = (1025 * 4096 + 4096 * 2 * 2 + 4) / (3.35e12 * reach)
    assert call.expected(H100) == pytest.approx(memory + 2 * 2e-6)


def test_distinct_experts() -> None:
    assert costs.distinct_experts(QWEN3_30B_A3B, 1) == pytest.approx(8)
    assert costs.distinct_experts(QWEN3_30B_A3B, 16) == pytest.approx(82.42, abs=0.01)
    assert costs.distinct_experts(QWEN3_30B_A3B, 10**6) == pytest.approx(128)


@pytest.mark.parametrize(("tokens", "chance", "block"), [(1, 0.25, 4), (6, 0.25, 2), (8, 0.5, 3), (7, 0.9, 16)])
def test_expected_tiles_counts_every_outcome(tokens: int, chance: float, block: int) -> None:
    total = 0.0
    for joined in product((0, 1), repeat=tokens):
        size = sum(joined)
        total += chance**size * (1 - chance) ** (tokens - size) * ceil(size / block)
    assert costs.expected_tiles(tokens, chance, block) == pytest.approx(total)


@pytest.mark.parametrize(("model", "name"), CASES)
def test_design_is_never_below_the_floor(model: costs.Model, name: str) -> None:
    for load in LOADS:
        call = OPS[name].cost(model, load)
        assert call.loads >= call.bytes * (1 - 1e-9), load
        assert call.issued >= call.flops * (1 - 1e-9), load
        for device in (H100, H200):
            assert call.expected(device) > call.floor(device) > 0


def test_committed_sheet_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["roofline"])
    main()
    committed = Path(__file__).parents[2] / "docs" / "roofline.md"
    printed = capsys.readouterr().out
    assert printed == "\n".join(markdown()) + "\n"
    assert committed.read_text(encoding="utf-8") == printed, "run: python -m jetflow_triton.roofline > docs/roofline.md"


def test_csv_has_every_row(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["roofline", "--csv"])
    main()
    header, *lines = capsys.readouterr().out.splitlines()
    assert [header, *lines] == list(csv())
    assert len(lines) == len(list(table())) == 27 * len(CASES)
    assert {len(line.split(",")) for line in (header, *lines)} == {16}
    row = next(line for line in lines if line.startswith("Qwen3-8B,1,64,8192,linear gate_up,36,"))
    assert row.split(",")[6:8] == ["204996608", "12884901888"]


def test_every_table_row_has_its_columns() -> None:
    tables = [block.splitlines() for block in "\n".join(markdown()).split("\n\n") if block.startswith("|")]
    assert len(tables) == 1 + len(MODELS) + 1
    for lines in tables:
        assert len({line.count("|") for line in lines}) == 1


# The design's numbers are those of the launchers, which need triton to be imported but no GPU.


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def indices(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return meta(*shape, dtype=dtype)


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Programs of each launch, which is recorded instead of started."""
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter launches in another way")
    started: list[int] = []

    def record(_self: object, *_args: object, grid: tuple[int, ...], **_kwargs: object) -> None:
        started.append(prod(grid))

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", record)
    return started


def calls(load: Load) -> dict[str, Callable[[], object]]:
    from jetflow_triton.kernels import (
        activation,
        attention,
        choice,
        distill,
        exact_attention,
        kv,
        linear,
        logprobs,
        moe,
        norm,
        rope,
    )

    dense, sparse, tokens = QWEN3_8B, QWEN3_30B_A3B, load.tokens
    slots = indices(tokens, dtype=torch.int64)
    page_count = ceil((load.context + load.budget) / 16)
    q, k = meta(tokens, 32, 128), meta(tokens, 8, 128)
    cache, moved = meta(9, 16, 8, 128), indices(load.batch * 4, dtype=torch.int64)
    x, hidden, lm_head = meta(tokens, 2048), meta(tokens, 4096), meta(dense.vocab, 4096)
    routed = (meta(tokens, 8, dtype=torch.float32), indices(tokens, 8))
    layout = (indices(load.batch, page_count), indices(load.batch + 1), indices(load.batch))
    mask = indices(tokens, ceil(load.budget / 32))
    products = {
        f"linear {name}": lambda shape=shape: linear.linear(meta(tokens, shape[1]), meta(*shape), None)
        for model in MODELS
        for name, shape in costs.matrices(model).items()
        if model is dense or name == "router"
    }
    table, column = meta(4096, 128, dtype=torch.float32), meta(tokens, dtype=torch.float32)
    return products | {
        "rms_norm": lambda: norm.rms_norm(hidden, meta(4096), 1e-6),
        "add_rms_norm": lambda: norm.add_rms_norm(hidden, hidden, meta(4096), 1e-6),
        "silu_mul": lambda: activation.silu_mul(meta(tokens, 2 * dense.inner)),
        "qk_norm_rope": lambda: rope.qk_norm_rope(q, k, slots, table, meta(128), meta(128), 1e-6),
        "kv_write": lambda: kv.kv_write(k, k, cache, cache, slots),
        "kv_move": lambda: kv.kv_move(meta(36, 2, 9, 16, 8, 128), moved, moved),
        "tree_attention": lambda: attention.tree_attention(q, cache, cache, *layout, mask, 128**-0.5),
        "tree_attention_exact": lambda: exact_attention.tree_attention_exact(q, cache, cache, *layout, mask, 128**-0.5),
        "sample": lambda: choice.sample(meta(tokens, dense.vocab), column, slots, column, column, slots, slots),
        "accept_walk": lambda: choice.accept_walk(slots, slots, layout[1], slots, costs.DEPTH),
        "distill_loss": lambda: distill.distill_loss(
            hidden, lm_head, hidden, lm_head, None, None, column, "forward_kl", 1.0, 1.0, True
        ),
        "topk_logprobs": lambda: logprobs.topk_logprobs(hidden, lm_head, costs.CANDIDATES),
        "moe_route": lambda: moe.moe_route(meta(tokens, 128), 8, True),
        "moe_experts": lambda: moe.moe_experts(x, meta(128, 1536, 2048), meta(128, 2048, sparse.inner), *routed),
    }


class LibraryLaunches(TorchDispatchMode):
    """Counts what torch would launch: everything but views and uninitialised memory."""

    FREE = frozenset(("empty", "new_empty", "promote_types", "slice", "select", "split", "t", "unbind", "view"))

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in self.FREE
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("load", [Load(1, 16, 1024), Load(1, 64, 8192), Load(8, 64, 8192), Load(32, 256, 1024)])
@pytest.mark.parametrize("name", OPS)
def test_launches_are_as_stated(grids: list[int], name: str, load: Load) -> None:
    call = calls(load)[name]
    with LibraryLaunches() as library:
        call()
    stated = cost(name, load)
    assert len(grids) + library.count == stated.launches
    if name not in ("topk_logprobs", "distill_loss"):  # their bulk is the library's
        # Grids are upper bounds where the host does not know the sizes: a tile a sequence or expert, a split a row.
        assert max(grids) >= stated.programs * 0.99


def test_kernel_constants_are_as_stated(grids: list[int]) -> None:
    from jetflow_triton import exact_attention
    from jetflow_triton.kernels import attention, distill, linear, logprobs

    assert distill.LOGITS_AT_ONCE == costs.DISTILL_AT_ONCE
    assert (exact_attention.SPAN, exact_attention.LAG) == (costs.SPAN, costs.LAG)
    assert (logprobs.PART, logprobs.LOGITS_AT_ONCE) == (costs.PART, costs.AT_ONCE)
    assert (attention.ROWS, linear.ROWS) == (costs.ROWS, costs.ROWS)
    assert (attention.SPLIT, attention.FILLED) == (costs.SPLIT, costs.FILLED)
    assert attention.tile_for(128, 2).block_n == costs.BLOCK
    for model in MODELS:
        for out, _ in costs.matrices(model).values():
            assert linear.tile_for(out, 2).block_n == costs.linear_block(out)
