"""Checkpoints on disk: safetensors headers, shards, folders, hub ids, and every way they can be wrong."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from jetflow_core.safetensors_file import open_safetensors, read_header
from jetflow_core.weights import CheckpointError, open_checkpoint, open_head

GOLDEN = Path(__file__).parent / "golden" / "qwen3"


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with an arbitrary header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(start: int, stop: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a tiny checkpoint that a test may damage."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "model"))


# -- safetensors ------------------------------------------------------------------------------------------------------


def test_tensors_equal_the_reference_reader(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.randn(2, 2, 2).to(torch.float16),
        "d": torch.arange(5),
        "e": torch.arange(3, dtype=torch.int32),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = open_safetensors(tmp_path)
    assert source.names() == tensors.keys()
    for name, tensor in tensors.items():
        taken = source.take(name, tuple(tensor.shape), integer=name in "de")
        assert taken.dtype == tensor.dtype
        assert torch.equal(taken, tensor)
    source.finish(lambda name: False)


def test_a_taken_tensor_is_the_callers_own(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    source = open_safetensors(tmp_path)
    source.take("a", (4,)).zero_()
    assert torch.equal(source.take("a", (4,)), torch.ones(4))


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "not valid JSON"),
        (b"\xff", b"", "not valid JSON"),
        (b"[" * 50_000, b"", "not valid JSON"),
        (b"[]", b"", "not a JSON object"),
        ({"a": 3}, b"", "tensor a: its header entry is not an object"),
        ({"a": {**entry(0, 4), "dtype": "F7"}}, b"\0" * 4, "tensor a: unknown dtype 'F7'"),
        ({"a": {**entry(0, 4), "dtype": ["F32"]}}, b"\0" * 4, "tensor a: unknown dtype"),
        ({"a": {**entry(0, 4), "shape": 1}}, b"\0" * 4, "tensor a: shape must be a list"),
        ({"a": {**entry(0, 4), "shape": [1] * 9}}, b"\0" * 4, "shape must be a list of at most 8"),
        ({"a": {**entry(0, 4), "shape": [-1]}}, b"\0" * 4, r"impossible shape \[-1\]"),
        ({"a": {**entry(0, 4), "shape": [1.0]}}, b"\0" * 4, "impossible shape"),
        ({"a": {**entry(0, 4), "shape": [True]}}, b"\0" * 4, "impossible shape"),
        ({"a": {**entry(0, 4), "data_offsets": [0]}}, b"\0" * 4, "data_offsets must be two numbers"),
        ({"a": {**entry(0, 4), "data_offsets": [-4, 0]}}, b"\0" * 4, "impossible data_offsets"),
        ({"a": {**entry(0, 4), "data_offsets": [0, 1 << 70]}}, b"\0" * 4, "impossible data_offsets"),
        ({"a": entry(0, 8, [1])}, b"\0" * 8, r"F32 \[1\] takes 4 bytes, data_offsets \[0, 8\] give 8"),
        ({"a": entry(8, 4, [1])}, b"\0" * 8, "takes 4 bytes"),
        ({"a": entry(0, 4, [1 << 31, 1 << 31])}, b"\0" * 4, "takes 18446744073709551616 bytes"),
        ({"a": entry(0, 1 << 40)}, b"\0" * 4, "tensor a ends at byte .* truncated"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, b"\0" * 12, "tensor b at byte .* overlaps"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, b"\0" * 12, "tensor b at byte .* leaves a gap"),
        ({"a": entry(4, 8)}, b"\0" * 8, "tensor a at byte .* leaves a gap"),
        ({"a": entry(0, 4)}, b"\0" * 9, "5 bytes follow the last tensor"),
        (b'{"a": %s, "a": %s}' % ((json.dumps(entry(0, 4)).encode(),) * 2), b"\0" * 4, "a appears twice"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    path = write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        read_header(path)


@pytest.mark.parametrize("length", [3, 1 << 20, 1 << 62, (1 << 64) - 1])
def test_header_longer_than_the_file(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "model.safetensors", {}, length=length)
    with pytest.raises(CheckpointError, match=r"truncated: header of|not valid JSON"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_file_shorter_than_a_length(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file or truncated"):
        read_header(path)


NUMBERS = st.one_of(st.integers(-1, 20), st.sampled_from([1 << 32, 1 << 63, 1 << 64, 10**30]), st.floats(), st.none())
HOSTILE = st.dictionaries(
    st.sampled_from(["a", "b", "__metadata__"]),
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "U8", "I64", "F4", ""]),
            "shape": st.lists(NUMBERS, max_size=3) | st.none(),
            "data_offsets": st.lists(NUMBERS, max_size=3) | st.none(),
        }
    )
    | NUMBERS,
)


@settings(max_examples=200)
@given(header=HOSTILE | st.binary(max_size=40), data=st.binary(max_size=24), length=st.none() | st.integers(0, 1 << 63))
def test_hostile_files_are_refused_or_read(
    hostile_folder: Path, header: object, data: bytes, length: int | None
) -> None:
    """Whatever the bytes, the outcome is a `CheckpointError` or tensors that lie inside the file."""
    path = write(hostile_folder / "model.safetensors", header, data, length)
    try:
        source = open_safetensors(hostile_folder)
    except CheckpointError:
        return
    entries = read_header(path)
    assert sum(item.stop - item.start for item in entries.values()) <= len(data) + 40
    for name, item in entries.items():
        if item.dtype in ("F32", "BF16", "I64"):
            assert source.read(name).numel() * source.read(name).element_size() == item.stop - item.start


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def test_take_names_what_was_expected_and_found(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "ids": torch.zeros(2).long()}, tmp_path / "model.safetensors")
    source = open_safetensors(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor b is missing \(expected shape \[2, 3\]\)"):
        source.take("b", (2, 3))
    with pytest.raises(CheckpointError, match=r"tensor a: expected shape \[3, 2\], found \[2, 3\]"):
        source.take("a", (3, 2))
    with pytest.raises(CheckpointError, match=r"tensor ids: expected dtype float32, .* found torch\.int64"):
        source.take("ids", (2,))
    with pytest.raises(CheckpointError, match=r"tensor a: expected dtype int64, int32, found torch\.float32"):
        source.take("a", (2, 3), integer=True)


def test_unsupported_dtype(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, dtype=torch.float64)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensor a: dtype F64 is not supported"):
        open_safetensors(tmp_path).take("a", (2,))


def test_finish_names_what_nobody_took(tmp_path: Path) -> None:
    save_file({name: torch.zeros(1) for name in "abcdefgh"}, tmp_path / "model.safetensors")
    source = open_safetensors(tmp_path)
    source.take("a", (1,))
    source.finish(lambda name: name > "a")
    with pytest.raises(CheckpointError, match="6 tensors do not belong to the configured model: c, d, e, f, g, …"):
        source.finish(lambda name: name == "b")


def test_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1000)}, path)
    source = open_safetensors(tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="tensor a: the file shrank"):
        source.take("a", (1000,))


# -- shards -----------------------------------------------------------------------------------------------------------


def shard(folder: Path) -> dict[str, str]:
    """Split a folder's `model.safetensors` into two shards with an index; returns the weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_equal_the_single_file(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    shard(folder)
    source = open_safetensors(folder)
    assert source.names() == whole.keys()
    assert all(torch.equal(source.take(name, tuple(tensor.shape)), tensor) for name, tensor in whole.items())


def test_wrong_indexes(folder: Path) -> None:
    weight_map = shard(folder)
    name, file = next(iter(weight_map.items()))
    other = next(value for value in weight_map.values() if value != file)
    damages: list[tuple[object, str]] = [
        (None, "weight_map is missing or empty"),
        ({}, "weight_map is missing or empty"),
        ({**weight_map, name: "../model-0.safetensors"}, "is not the name of a safetensors file in this folder"),
        ({**weight_map, name: "/etc/passwd"}, "is not the name of a safetensors file in this folder"),
        ({**weight_map, name: "weights.bin"}, "is not the name of a safetensors file in this folder"),
        ({**weight_map, name: 3}, "is not the name of a safetensors file in this folder"),
        ({**weight_map, name: "model-9.safetensors"}, r"the file model-9\.safetensors is missing"),
        ({**weight_map, name: other}, f"tensor {name}: weight_map says"),
        ({**weight_map, "extra": file}, f"tensor extra is missing from {file}"),
        ({key: value for key, value in weight_map.items() if key != name}, f"tensor {name}: weight_map says None"),
    ]
    for damage, message in damages:
        write_index(folder, damage)
        with pytest.raises(CheckpointError, match=message):
            open_safetensors(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        open_safetensors(folder)


# -- folders ----------------------------------------------------------------------------------------------------------


def test_folder(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.num_layers == 3
    assert checkpoint.tokenizer is None
    assert "model.norm.weight" in checkpoint.tensors.names()


def test_generation_config_adds_end_tokens(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert open_checkpoint(folder).config.eos_token_ids == (2, 5)
    (folder / "generation_config.json").write_text('{"eos_token_id": 97}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id = 97"):
        open_checkpoint(folder)


def test_missing_parts_are_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle.*convert it to safetensors"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth", "model.pkl"])
def test_pickles_are_refused_unread(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"pickles can run code .* use a folder"):
        open_checkpoint(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="not a checkpoint; use a folder"):
        open_checkpoint(path)


@pytest.mark.parametrize("model", ["nowhere", "/nowhere/at/all", "./nowhere/model", "a/b/c", "org/model.gguf", "org/"])
def test_what_is_neither_path_nor_hub_id(model: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder or file, nor a hub id"):
        open_checkpoint(model)


def test_hub_errors_are_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(repository: str, allow_patterns: list[str]) -> str:
        assert not any("bin" in pattern or pattern == "*" for pattern in allow_patterns)
        raise LocalEntryNotFoundError("cannot find it in the cache\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"^org/name: .*: cannot find it in the cache; check the name") as caught:
        open_checkpoint("org/name")
    assert "\n" not in str(caught.value)


def test_hub_ids_open_what_was_fetched(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repository, allow_patterns: str(folder))
    assert open_checkpoint("org/name").path == folder


# -- heads ------------------------------------------------------------------------------------------------------------

HEAD: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "num_target_layers": 6,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 49, "target_layer_ids": [1, 3], "causal_head": True},
}


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("prefix", ["", "model."])
def test_head_names_with_and_without_prefix(tmp_path: Path, prefix: str) -> None:
    config, source = open_head(write_head(tmp_path, HEAD, {f"{prefix}fc.weight": torch.ones(8, 16)}))
    assert config.causal
    assert source.names() == {"fc.weight"}
    assert torch.equal(source.take("fc.weight", (8, 16)), torch.ones(8, 16))
    source.finish(lambda name: False)


def test_head_with_both_names_is_refused(tmp_path: Path) -> None:
    tensors = {"fc.weight": torch.ones(1), "model.fc.weight": torch.ones(1)}
    with pytest.raises(CheckpointError, match="with and without the prefix"):
        open_head(write_head(tmp_path, HEAD, tensors))


def test_speculators_head(tmp_path: Path) -> None:
    """Copies of the target's tables are left out and vocabulary offsets become ids."""
    data = {
        "transformer_layer_config": {key: HEAD[key] for key in HEAD if key not in ("dflash_config", "block_size")},
        "aux_hidden_state_layer_ids": [2, 4],
        "mask_token_id": 49,
        "block_size": 4,
        "draft_vocab_size": 3,
    }
    tensors = {
        "fc.weight": torch.ones(8, 16),
        "embed_tokens.weight": torch.ones(50, 8),
        "lm_head.weight": torch.ones(3, 8),
        "t2d": torch.zeros(50, dtype=torch.bool),
        "d2t": torch.tensor([1, 4, 40]),
    }
    config, source = open_head(write_head(tmp_path, data, tensors))
    assert (config.target_layer_ids, config.draft_vocab_size) == ((1, 3), 3)
    assert source.names() == {"fc.weight", "d2t"}
    assert source.take("d2t", (3,), integer=True).tolist() == [1, 5, 42]


def test_bad_heads(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        open_head(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**HEAD, "block_size": 0}))
    with pytest.raises(CheckpointError, match=r"config\.json: block_size = 0"):
        open_head(tmp_path)
    path = tmp_path / "head.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="a draft head is a folder"):
        open_head(path)
