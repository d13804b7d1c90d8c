"""Tile sizes of the matrix products: the nearest measured size in a committed table. Nothing is tuned during a call.

`tiles.json` holds, for each op, entries `{"device", "itemsize", "shape", "rows": {rows: [m, n, k, warps, stages]}}`.
`device` is a name as torch gives it, or empty: sizes that fit every supported GPU. `python -m jetflow_triton.tune`
measures a GPU and writes its entries. All tiles of an op add up a row in the same order, so the choice never shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache, lru_cache
from math import log2
from pathlib import Path
from typing import Any

import torch

TABLE = Path(__file__).with_name("tiles.json")


@dataclass(frozen=True, slots=True)
class Tile:
    """Block sizes of one product, and how a program runs them."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def tile_for(op: str, rows: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tile:
    """The tile for `rows` rows of `op`, by table look-up.

    Args:
        op: a key of the table.
        rows: rows of the product (a group's mean for grouped products).
        shape: the constant sizes of the product, in the op's own order, as in its entries.
        dtype: of the operands; only its size counts.
        device: entries measured on a GPU of its name come first, then those for any GPU.

    Returns:
        Of the entry nearest in shape, the tile nearest in rows (ratios; the smaller of two equally near).
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return _lookup(op, rows, tuple(shape), dtype.itemsize, name)


def nearest(entries: Sequence[Mapping[str, Any]], rows: int, shape: tuple[int, ...], itemsize: int, name: str) -> Tile:
    """`tile_for` on entries that are at hand."""
    fitting = [entry for entry in entries if entry["itemsize"] == itemsize]
    named = [entry for entry in fitting if entry["device"] == name] or [e for e in fitting if not e["device"]]
    assert named, f"no tile for operands of {itemsize} bytes"
    entry = min(named, key=lambda e: sum(_ratio(a, b) for a, b in zip(shape, e["shape"], strict=True)))
    size = min(sorted(map(int, entry["rows"])), key=lambda size: _ratio(rows, size))
    return Tile(*entry["rows"][str(size)])


def add_entry(
    table: dict[str, list[dict[str, Any]]],
    op: str,
    device: str,
    itemsize: int,
    shape: Sequence[int],
    tiles: Mapping[int, Tile],
) -> None:
    """Puts measured tiles, by rows, into a table in place of an earlier measurement of the same shape and device."""
    key = {"device": device, "itemsize": itemsize, "shape": list(shape)}
    kept = [entry for entry in table.get(op, []) if {name: entry[name] for name in key} != key]
    entry = {**key, "rows": {str(rows): list(astuple(tile)) for rows, tile in sorted(tiles.items())}}
    table[op] = [*kept, entry]


def read_table(path: Path = TABLE) -> dict[str, list[dict[str, Any]]]:
    """The table as it is stored."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_table(table: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Stores a table, an entry a line."""
    ops = [
        f"  {json.dumps(op)}: [\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in entries) + "\n  ]"
        for op, entries in table.items()
    ]
    path.write_text("{\n" + ",\n".join(ops) + "\n}\n", encoding="utf-8")


def _ratio(a: int, b: int) -> float:
    return abs(log2(max(a, 1) / max(b, 1)))


@lru_cache(maxsize=4096)
def _lookup(op: str, rows: int, shape: tuple[int, ...], itemsize: int, name: str) -> Tile:
    return nearest(_committed()[op], rows, shape, itemsize, name)


@cache
def _committed() -> dict[str, list[dict[str, Any]]]:
    return read_table()
