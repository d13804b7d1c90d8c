"""Measures the tiles of the matrix products on this machine's GPU and writes them into the tile table.

    python -m jetflow_triton.tune [--experts 128 --width 2048 --inner 768 --top-k 8] [--dtype bfloat16] [--table FILE]

Nothing else ever tunes. A tile that changes a bit of the result is left out, so that a row keeps its bits whatever the
number of rows; a tile that the GPU cannot run is left out too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from jetflow_triton.moe import moe_route
from jetflow_triton.tiles import TABLE, Tile, add_entry, read_table, tile_for, write_table

TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096)
CANDIDATES = tuple(
    Tile(block_m, block_n, block_k, warps, stages)
    for block_m, warps in ((16, 4), (16, 8), (32, 4), (64, 2), (64, 4))
    for block_n in (32, 64, 128)
    for block_k in (64, 128)
    for stages in (2, 3, 4, 5)
)
Run = Callable[[Tile], Tensor]
Measure = Callable[[Callable[[], object]], float]


def fastest(run: Run, reference: Tile, candidates: Iterable[Tile], measure: Measure) -> Tile:
    """The quickest of the tiles that run and give the bits that `reference` gives; `reference` if none is quicker."""
    expected = run(reference)
    best, least = reference, measure(lambda: run(reference))
    for tile in candidates:
        try:
            if not torch.equal(run(tile), expected):
                continue
            time = measure(lambda tile=tile: run(tile))
        except Exception as error:  # more shared memory or registers than this GPU has: the compiler's own types
            sys.stderr.write(f"  {tile}: {type(error).__name__}\n")
            continue
        if time < least:
            best, least = tile, time
    return best


def tune_experts(
    experts: int, width: int, inner: int, top_k: int, dtype: torch.dtype, device: torch.device, measure: Measure
) -> dict[int, Tile]:
    """The best tile of `moe_experts` by the mean number of rows an expert, as `tile_for` looks it up."""
    from jetflow_triton.kernels import moe  # noqa: PLC0415 -- needs triton

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    gate_up, down = normal(experts, 2 * inner, width), normal(experts, width, inner)
    tiles: dict[int, Tile] = {}
    for tokens in sorted(TOKENS, reverse=True):
        rows = -(-tokens * top_k // experts)
        if rows in tiles:
            continue
        x = normal(tokens, width) * width**-0.5
        weights, chosen = moe_route(normal(tokens, experts), top_k, True)
        reference = tile_for("moe_experts", rows, (experts, width, inner), dtype, torch.device("cpu"))

        def run(tile: Tile, x: Tensor = x, weights: Tensor = weights, chosen: Tensor = chosen) -> Tensor:
            return moe.moe_experts(x, gate_up, down, weights, chosen, tile=tile)

        tiles[rows] = fastest(run, reference, CANDIDATES, measure)
        sys.stderr.write(f"{tokens} tokens, {rows} rows an expert: {tiles[rows]}\n")
    return tiles


def _microseconds(call: Callable[[], object]) -> float:
    from triton.testing import do_bench  # noqa: PLC0415 -- needs triton

    return float(do_bench(call, warmup=10, rep=50, return_mode="median")) * 1000  # pyright: ignore[reportArgumentType]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jetflow_triton.tune", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--experts", type=int, default=128, help="experts of a layer (Qwen3-30B-A3B: 128)")
    parser.add_argument("--width", type=int, default=2048, help="model width (2048)")
    parser.add_argument("--inner", type=int, default=768, help="inner width of an expert (768)")
    parser.add_argument("--top-k", type=int, default=8, help="experts of a token (8)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--table", type=Path, default=TABLE, help="the table to add to (the package's own)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 written, 2 refused."""
    options = _options(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("jetflow_triton.tune: no GPU here (torch.cuda.is_available() is false); nothing was written\n")
        return 2
    shape = (options.experts, options.width, options.inner)
    if min(*shape, options.top_k) < 1 or options.top_k > options.experts:
        sys.stderr.write("jetflow_triton.tune: sizes are 1 or more, and --top-k is at most --experts\n")
        return 2
    dtype: torch.dtype = getattr(torch, options.dtype)
    try:
        table = read_table(options.table if options.table.exists() else TABLE)
        tiles = tune_experts(*shape, options.top_k, dtype, torch.device("cuda"), _microseconds)
        add_entry(table, "moe_experts", torch.cuda.get_device_name(), dtype.itemsize, shape, tiles)
        write_table(table, options.table)
    except (OSError, ValueError, ImportError) as error:
        sys.stderr.write(f"jetflow_triton.tune: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
