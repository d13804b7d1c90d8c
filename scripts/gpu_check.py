"""Checks every Triton kernel on a GPU against its plain-torch twin, then times it at Qwen3 shapes.

    uv run python scripts/gpu_check.py

Each line is printed as soon as it is known. Exit status: 0 all right, 1 a kernel is wrong, 2 no GPU.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "triton"))

import kernel_reference as reference

import jetflow_triton as ops
from jetflow_triton import activation, attention, kv, moe, norm, rope

TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
Check = Callable[[], None]


def on_gpu(value: Any) -> Any:
    return value.cuda() if isinstance(value, Tensor) else value


def same(op: Callable[..., Any], twin: Callable[..., Any], args: tuple[Any, ...], tolerance: float) -> None:
    """The op on the GPU equals its twin on the CPU; inputs that are written to count as results."""
    moved = tuple(map(on_gpu, args))
    results, expected = op(*moved), twin(*args)
    if expected is None:
        results, expected = moved, args
    elif isinstance(expected, Tensor):
        results, expected = (results,), (expected,)
    for result, wanted in zip(results, expected, strict=True):
        if isinstance(wanted, Tensor):
            torch.testing.assert_close(result.cpu(), wanted, atol=tolerance, rtol=tolerance)


def row_checks(dtype: torch.dtype) -> Iterator[tuple[str, Check]]:
    tolerance = TOLERANCE[dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    x, weight = normal(7, 4096), torch.rand(4096).to(dtype)
    yield "rms_norm", lambda: same(ops.rms_norm, norm.rms_norm_twin, (x, weight, 1e-6), tolerance)
    yield (
        "add_rms_norm",
        lambda: same(ops.add_rms_norm, norm.add_rms_norm_twin, (x, x.flip(0), weight, 1e-6), tolerance),
    )
    yield "silu_mul", lambda: same(ops.silu_mul, activation.silu_mul_twin, (normal(7, 2 * 3000),), tolerance)
    q, k, v = normal(9, 48, 128).split((32, 8, 8), 1)
    gains = torch.rand(2, 128).to(dtype)
    rotary = (q, k, torch.arange(9) * 5, torch.randn(64, 128), gains[0], gains[1], 1e-6)
    yield "qk_norm_rope", lambda: same(ops.qk_norm_rope, rope.qk_norm_rope_twin, rotary, 4 * tolerance)
    slots = torch.tensor([5, -1, 33, 0, 63, 7, 8, 9, 10])
    write = (k, v, torch.zeros(4, 16, 8, 128, dtype=dtype), torch.zeros(4, 16, 8, 128, dtype=dtype), slots)
    yield "kv_write", lambda: same(ops.kv_write, kv.kv_write_twin, write, 0.0)
    move = (normal(3, 2, 4, 16, 8, 128), torch.tensor([5, 6, 7, 9]), torch.tensor([6, 5, -1, 7]))
    yield "kv_move", lambda: same(ops.kv_move, kv.kv_move_twin, move, 0.0)
    yield "moe_route", lambda: same(ops.moe_route, moe.moe_route_twin, (normal(33, 128), 8, True), 1e-5)


def expert_check(dtype: torch.dtype, tokens: int) -> Check:
    def check() -> None:
        x, count = torch.randn(tokens, 256).to(dtype), 16
        gate_up, down = torch.randn(count, 384, 256).to(dtype) / 16, torch.randn(count, 256, 192).to(dtype) / 14
        args = (x, gate_up, down, *moe.moe_route_twin(torch.randn(tokens, count), 4, True))
        same(ops.moe_experts, moe.moe_experts_twin, args, 2 * TOLERANCE[dtype])
        moved = tuple(map(on_gpu, args))
        assert torch.equal(ops.moe_experts(*moved), ops.moe_experts(*moved)), "two runs differ in bits"

    return check


def attention_check(dtype: torch.dtype, width: int, page: int, masked: bool) -> Check:
    def check() -> None:
        generator = torch.Generator().manual_seed(width)
        counts, prefixes = [64, 1, 0, 7, 130], [1500, 600, 20, 0, 513]
        trees = [reference.random_parents(n, generator) if n else [] for n in counts]
        call = reference.random_call(
            trees, prefixes, heads=8, kv_heads=2, width=width, page=page, dtype=dtype, masked=masked
        )
        same(ops.tree_attention, attention.tree_attention_twin, call.args(), TOLERANCE[dtype])
        call = reference.Ragged(*map(on_gpu, call.args()))
        together = ops.tree_attention(*call.args())
        for b in range(len(counts)):
            first, last = call.query_start[b : b + 2].tolist()
            alone = ops.tree_attention(*call.alone(b).args())
            assert torch.equal(together[first:last], alone), f"sequence {b} depends on its neighbours"

    return check


def checks() -> Iterator[tuple[str, Check]]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        label = str(dtype).removeprefix("torch.")
        for name, check in row_checks(dtype):
            yield f"{name} {label}", check
        for tokens in (1, 40, 600):
            yield f"moe_experts {label}, {tokens} tokens", expert_check(dtype, tokens)
        for width in (64, 80, 96, 128, 256):
            for page, masked in ((16, True), (256, False)):
                name = f"tree_attention {label}, width {width}, page {page}, {'tree' if masked else 'chain'}"
                yield name, attention_check(dtype, width, page, masked)


def microseconds(call: Callable[[], object]) -> float:
    """Median of a captured graph of the call, so that launch overhead of Python is left out."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(20):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 100)
    return sorted(times)[len(times) // 2]


def report(name: str, moved: int, call: Callable[[], object]) -> None:
    """One line: time, and bytes that must be moved a second."""
    time = microseconds(call)
    print(f"{name:58s} {time:9.1f} us {moved / time / 1e3:9.0f} GB/s", flush=True)


def attention_speed(batch: int, nodes: int, prefix: int) -> None:
    """Qwen3-8B: 32 query heads, 8 KV heads, width 128, bfloat16."""
    pages = -(-(prefix + nodes) // 16)
    cache = torch.randn(2, batch * pages, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    parents = reference.random_parents(nodes, torch.Generator().manual_seed(0))
    mask = reference.ancestor_mask([parents] * batch, -(-nodes // 32)).cuda()
    tables = torch.randperm(batch * pages, device="cuda").to(torch.int32).view(batch, pages)
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * nodes
    prefixes = torch.full((batch,), prefix, device="cuda", dtype=torch.int32)
    q = torch.randn(batch * nodes, 32, 128, device="cuda", dtype=torch.bfloat16)
    moved = batch * (prefix + nodes) * 8 * 128 * 2 * 2 + 2 * q.nbytes
    report(
        f"tree_attention, batch {batch}, {nodes} nodes, prefix {prefix}",
        moved,
        lambda: ops.tree_attention(q, cache[0], cache[1], tables, starts, prefixes, mask, 128**-0.5),
    )


def expert_speed(tokens: int) -> None:
    """Qwen3-30B-A3B: 128 experts of 768, 8 a token, width 2048, bfloat16."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 40

    x, gate_up, down = normal(tokens, 2048), normal(128, 1536, 2048), normal(128, 2048, 768)
    weights, chosen = ops.moe_route(normal(tokens, 128), 8, True)
    moved = int(chosen.unique().numel()) * 3 * 768 * 2048 * 2
    report(f"moe_experts, {tokens} tokens", moved, lambda: ops.moe_experts(x, gate_up, down, weights, chosen))


def row_speed(tokens: int) -> None:
    """Qwen3-8B, bfloat16."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, weight, gate_up, heads = normal(tokens, 4096), normal(4096), normal(tokens, 24576), normal(tokens, 48, 128)
    q, k, v = heads.split((32, 8, 8), 1)
    table, positions = torch.randn(4096, 128, device="cuda"), torch.arange(tokens, device="cuda")
    cache, gain = normal(2, 512, 16, 8, 128), normal(128)
    report(f"add_rms_norm, {tokens} tokens", 4 * x.nbytes, lambda: ops.add_rms_norm(x, x, weight, 1e-6))
    report(f"silu_mul, {tokens} tokens", gate_up.nbytes * 3 // 2, lambda: ops.silu_mul(gate_up))
    moved = 2 * (q.nbytes + k.nbytes)
    report(f"qk_norm_rope, {tokens} tokens", moved, lambda: ops.qk_norm_rope(q, k, positions, table, gain, gain, 1e-6))
    report(f"kv_write, {tokens} tokens", 4 * k.nbytes, lambda: ops.kv_write(k, v, cache[0], cache[1], positions))


def run_checks() -> int:
    failed = 0
    for name, check in checks():
        torch.manual_seed(0)
        try:
            check()
        except Exception:
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc(limit=3)}", flush=True)
        else:
            print(f"ok      {name}", flush=True)
    return failed


def main() -> int:
    if not torch.cuda.is_available():
        print("No GPU: torch.cuda.is_available() is false, nothing was checked.")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    failed = run_checks()
    print(f"\n{failed} checks failed\n", flush=True)
    for tokens in (1, 64, 2048):
        row_speed(tokens)
    for tokens in (1, 16, 64, 1024):
        expert_speed(tokens)
    for batch, nodes, prefix in (
        (1, 1, 1024),
        (1, 64, 1024),
        (1, 64, 8192),
        (1, 64, 32768),
        (32, 16, 4096),
        (1, 2048, 0),
    ):
        attention_speed(batch, nodes, prefix)
    return 1 if failed else 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
