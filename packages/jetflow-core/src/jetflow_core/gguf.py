"""GGUF checkpoints: configuration from metadata, tensors by Hugging Face names, dequantised to bfloat16 when taken."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

from jetflow_core.config import ModelConfig, RopeConfig
from jetflow_core.config_fields import Fields, located
from jetflow_core.gguf_file import GgufFile, GgufTensor, read_gguf
from jetflow_core.gguf_tokenizer import read_tokenizer
from jetflow_core.tensor_source import CheckpointError, TensorSource
from jetflow_core.tokenizer import Tokenizer

PIECE = 1 << 18  # elements dequantised at a time
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


def open_gguf(path: Path) -> tuple[ModelConfig, TensorSource, Tokenizer]:
    """Open a GGUF model of architecture llama, qwen3 or qwen3moe.

    Raises `CheckpointError` naming the file and what is damaged or not supported in it.
    """
    file = read_gguf(path)
    try:
        with located(str(path)):
            config = _model_config(file)
            tokenizer = read_tokenizer(file, config)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return config, GgufSource(file, config), tokenizer


# -- configuration ----------------------------------------------------------------------------------------------------


def _model_config(file: GgufFile) -> ModelConfig:
    source = str(file.path)
    every = Fields(file.metadata, source)
    name = every.string("general.architecture")
    if name not in _ARCHITECTURES:
        raise every.error("general.architecture", f"supported are {', '.join(_ARCHITECTURES)}")
    fields = Fields(_below(file.metadata, f"{name}."), source, f"{name}.")
    ids = Fields(_below(file.metadata, "tokenizer.ggml."), source, "tokenizer.ggml.")
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    rotated = fields.integer("rope.dimension_count", fields.integer("attention.key_length", hidden // max(heads, 1)))
    head_dim = fields.integer("attention.key_length", rotated)
    if rotated != head_dim or fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.error("rope.dimension_count", f"key, value and rotary width must be equal, keys have {head_dim}")
    sparse = name == "qwen3moe"
    if not sparse and fields.integer("expert_count", 0):
        raise fields.error("expert_count", f"experts are not supported for architecture {name}")
    with located(source):
        return ModelConfig(
            architecture=_ARCHITECTURES[name],
            vocab_size=fields.integer("vocab_size", len(ids.strings("tokens", ()))),
            hidden_size=hidden,
            intermediate_size=fields.integer("feed_forward_length"),
            num_layers=fields.integer("block_count"),
            num_heads=heads,
            num_kv_heads=fields.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position_embeddings=fields.integer("context_length"),
            rms_norm_eps=_shortest(fields.number("attention.layer_norm_rms_epsilon")),
            rope=_rope(fields),
            qk_norm=name != "llama",
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            tie_word_embeddings="output.weight" not in file.tensors,
            num_experts=fields.integer("expert_count") if sparse else 0,
            num_experts_per_tok=fields.integer("expert_used_count") if sparse else 0,
            moe_intermediate_size=fields.integer("expert_feed_forward_length") if sparse else 0,
            norm_topk_prob=sparse,  # GGUF has no key for it: the format's own runtime always renormalises
            dtype="bfloat16",
            bos_token_id=ids.maybe_integer("bos_token_id"),
            eos_token_ids=tuple(ids.integer(key) for key in ("eos_token_id", "eot_token_id") if ids.has(key)),
        )


def _below(metadata: Mapping[str, object], prefix: str) -> dict[str, object]:
    return {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}


def _shortest(value: float) -> float:
    """The shortest decimal of the float32 in the file: 1e-05 as in the original configuration, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def _rope(fields: Fields) -> RopeConfig:
    theta = _shortest(fields.number("rope.freq_base", 10000.0))
    kind = fields.string("rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta)
    if kind not in ("linear", "yarn"):
        raise fields.error("rope.scaling.type", "supported are none, linear and yarn")
    for key in fields.data:
        if key.startswith("rope.scaling.") and key.rsplit(".", 1)[1] not in (
            "type",
            "factor",
            "original_context_length",
            "finetuned",
        ):
            raise fields.error(key, "not supported")
    factor = _shortest(fields.number("rope.scaling.factor"))
    original = fields.integer("rope.scaling.original_context_length") if kind == "yarn" else None
    return RopeConfig(theta, kind, factor, original)


# -- tensors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A tensor, or one expert's rows of a stacked one, and how many heads to undo the rotary row order for."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    first_row: int = 0
    permuted_heads: int = 0


class GgufSource(TensorSource):
    """A GGUF file's tensors under Hugging Face names, in bfloat16."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        super().__init__()
        self._path = file.path
        self._parts: dict[str, _Part] = {}
        for name, tensor in file.tensors.items():
            self._parts.update(_parts(name, tensor, config))

    @property
    def path(self) -> Path:
        return self._path

    def names(self) -> frozenset[str]:
        return frozenset(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._parts[name].shape

    def read(self, name: str) -> torch.Tensor:
        part = self._parts[name]
        try:
            values = _dequantize(self._path, part)
        except NotImplementedError:
            kind = part.tensor.kind.name
            raise CheckpointError(f"{self._path}: tensor {name}: type {kind} is not supported") from None
        except (OSError, EOFError) as error:
            raise CheckpointError(f"{self._path}: tensor {name}: cannot be read: {error}") from None
        if part.permuted_heads:
            # Rows of a head lie as (pair, half); Hugging Face's half rotation wants (half, pair).
            rows = values.view(part.permuted_heads, part.shape[0] // part.permuted_heads // 2, 2, -1)
            values = rows.transpose(1, 2).reshape(part.shape)
        return values


def _dequantize(path: Path, part: _Part) -> torch.Tensor:
    """Read `part` in pieces that fit a cache, so that float32 values never exist for the whole tensor."""
    tensor = part.tensor
    block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
    values = torch.empty(math.prod(part.shape), dtype=torch.bfloat16)
    step = PIECE // block * block
    with path.open("rb") as file:
        file.seek(tensor.start + part.first_row * tensor.row_bytes)
        for start in range(0, len(values), step):
            stop = min(start + step, len(values))
            raw = bytearray((stop - start) // block * block_bytes)
            if file.readinto(raw) != len(raw):
                raise EOFError("the file shrank while it was read")
            # One long row: blocks follow one another across the rows of a tensor.
            floats = dequantize(np.frombuffer(raw, np.uint8).reshape(1, -1), tensor.kind)
            values[start:stop] = torch.from_numpy(floats.reshape(-1))
    return values.view(part.shape)


def _parts(name: str, tensor: GgufTensor, config: ModelConfig) -> dict[str, _Part]:
    """The Hugging Face tensors in the GGUF tensor `name`; an unknown name stays, to be reported as left over."""
    *block, kind, suffix = name.split(".") if "." in name else (name, "")
    if not block and kind in _TOP:
        return {f"{_TOP[kind]}.{suffix}": _Part(tensor, tensor.shape)}
    layer = f"model.layers.{block[1]}" if len(block) == 2 and block[0] == "blk" else None
    if layer and kind in _EXPERTS and len(tensor.shape) == 3:
        experts, rows, _ = tensor.shape
        return {
            f"{layer}.mlp.experts.{expert}.{_EXPERTS[kind]}.{suffix}": _Part(tensor, tensor.shape[1:], expert * rows)
            for expert in range(experts)
        }
    if layer and kind in _BLOCK:
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(kind, 0)
        permuted = heads if config.architecture == "LlamaForCausalLM" else 0
        if permuted and (tensor.shape[0] % (2 * heads)):
            raise CheckpointError(f"{config.architecture}: tensor {name}: {tensor.shape[0]} rows for {heads} heads")
        return {f"{layer}.{_BLOCK[kind]}.{suffix}": _Part(tensor, tensor.shape, permuted_heads=permuted)}
    return {name: _Part(tensor, tensor.shape)}
