"""The tile table: what is looked up, what the tuner keeps, and that it needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jetflow_triton import tiles, tune
from jetflow_triton.tiles import Tile, nearest, tile_for

SMALL, LARGE, OTHER = Tile(16, 64, 64, 4, 3), Tile(64, 64, 64, 4, 3), Tile(32, 32, 32, 2, 2)
CPU = torch.device("cpu")


def table() -> list[dict]:
    entries: dict[str, list[dict]] = {}
    tiles.add_entry(entries, "op", "", 2, (8, 512), {4: SMALL, 64: LARGE})
    tiles.add_entry(entries, "op", "", 2, (128, 4096), {4: OTHER})
    tiles.add_entry(entries, "op", "Some GPU", 2, (8, 512), {4: LARGE})
    return entries["op"]


@pytest.mark.parametrize(
    ("rows", "shape", "name", "expected"),
    [
        (1, (8, 512), "", SMALL),
        (16, (8, 512), "", SMALL),  # as near to 4 as to 64: the smaller
        (17, (9, 600), "", LARGE),
        (4096, (8, 512), "Unknown GPU", LARGE),
        (4096, (100, 2000), "", OTHER),
        (1, (100, 2000), "Some GPU", LARGE),  # what was measured on it, whatever the shape
    ],
)
def test_the_nearest_entry(rows: int, shape: tuple[int, ...], name: str, expected: Tile) -> None:
    assert nearest(table(), rows, shape, 2, name) == expected


def test_a_new_measurement_replaces_the_old() -> None:
    entries = {"op": table()}
    tiles.add_entry(entries, "op", "", 2, (8, 512), {4: OTHER})
    assert len(entries["op"]) == 3
    assert nearest(entries["op"], 64, (8, 512), 2, "") == OTHER


def test_a_table_is_written_and_read(tmp_path: Path) -> None:
    committed = tiles.read_table()
    tiles.write_table(committed, tmp_path / "tiles.json")
    assert tiles.read_table(tmp_path / "tiles.json") == committed
    assert (tmp_path / "tiles.json").read_text() == tiles.TABLE.read_text()


@given(st.integers(0, 1 << 16), st.tuples(*[st.integers(1, 1 << 14)] * 3))
def test_every_size_has_a_tile(rows: int, shape: tuple[int, int, int]) -> None:
    """Powers of two that a dot takes, whose rows add up alike: one step of K for each item size."""
    for dtype, depth in ((torch.bfloat16, 64), (torch.float16, 64), (torch.float32, 32)):
        tile = tile_for("moe_experts", rows, shape, dtype, CPU)
        assert tile.block_k == depth
        for size in (tile.block_m, tile.block_n, tile.block_k):
            assert size >= 16
            assert size & (size - 1) == 0
        assert tile_for("moe_experts", rows, shape, dtype, CPU) is tile  # remembered


def test_the_tuner_keeps_the_quickest_tile_with_the_same_bits() -> None:
    times = {SMALL: 3.0, LARGE: 1.0, OTHER: 2.0}
    last: list[Tile] = []

    def run(tile: Tile) -> torch.Tensor:
        if tile.stages == 9:
            raise RuntimeError("out of resource: shared memory")
        last[:] = [tile]
        return torch.tensor(1.0 if tile != LARGE else 1.0 + 1e-7)

    def measure(call: object) -> float:
        assert callable(call)
        call()
        return times[last[0]]

    too_large = Tile(64, 64, 64, 4, 9)
    assert tune.fastest(run, SMALL, [too_large, LARGE, OTHER], measure) == OTHER
    assert tune.fastest(run, OTHER, [SMALL], measure) == OTHER


def test_the_tuner_needs_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = tiles.TABLE.read_bytes()
    assert tune.main([]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert tiles.TABLE.read_bytes() == before


@pytest.mark.parametrize("wrong", [["--inner", "0"], ["--experts", "4", "--top-k", "5"]])
def test_the_tuner_refuses_sizes(
    wrong: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert tune.main(wrong) == 2
    assert "sizes are" in capsys.readouterr().err


def test_the_tuner_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    monkeypatch.setattr(tune, "tune_experts", lambda *_: {1: SMALL, 64: LARGE})
    path = tmp_path / "tiles.json"
    assert tune.main(["--table", str(path), "--experts", "16"]) == 0
    assert nearest(tiles.read_table(path)["moe_experts"], 64, (16, 2048, 768), 2, "Some GPU") == LARGE
    assert tune.main(["--table", str(tmp_path / "missing" / "tiles.json")]) == 2
