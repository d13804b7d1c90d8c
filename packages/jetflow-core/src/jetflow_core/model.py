"""The target decoder: Qwen3 dense, Qwen3 MoE and the Llama family as one module, and its loader.

Shapes: T tokens of a flat batch, C model width, K taps, V vocabulary rows.
Source: Hugging Face's Qwen3ForCausalLM, Qwen3MoeForCausalLM and LlamaForCausalLM define names and arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from jetflow_core.config import ModelConfig
from jetflow_core.layers import (
    MLP,
    Attend,
    Attention,
    DecoderLayer,
    DecoderStack,
    Linear,
    MoE,
    RMSNorm,
    has_native_bfloat16,
)
from jetflow_core.rope import rope_table
from jetflow_core.weights import Checkpoint, TensorSource, open_checkpoint


class Decoder(nn.Module):
    """A causal decoder. `embed` [V, C] is the input table; `lm_head` shares it when the configuration ties them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.exact = False
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = DecoderStack(_layer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", torch.empty(0), persistent=False)

    def set_max_positions(self, positions: int) -> None:
        """Build the rotary table (always float32) for absolute positions below `positions`."""
        config = self.config
        table = rope_table(config.rope, config.head_dim, positions, config.max_position_embeddings)
        self.cos_sin = table.to(self.embed.device)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, tap_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return (final hidden [T, C] after the last norm, taps [T, K·C]) of `input_ids` [T] at `positions` [T].

        A tap is the residual stream after the named layer, as Hugging Face's `hidden_states[id + 1]`.
        """
        x = functional.embedding(input_ids, self.embed)
        return self.layers(x, positions, self.cos_sin, attend, self.norm, tap_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [T, V] of final hidden states [T, C]."""
        return self.lm_head(hidden)

    def forward_sequence(self, input_ids: Tensor, tap_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """`forward` over one whole sequence [T] from position 0 without a cache: training features and reference outputs."""
        positions = torch.arange(len(input_ids), device=input_ids.device)
        return self(input_ids, positions, _attend_sequence, tap_layers)

    def set_exact(self) -> None:
        """Make every row's bits a function of that row alone: see `docs/architecture.md`, "Numerics"."""
        self.exact = True
        for module in self.modules():
            if isinstance(module, Linear | MoE):
                module.exact = True

    def pack(self) -> None:
        """Re-lay every weight for CPU inference (see `Linear.pack`)."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()


def _attend_sequence(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def _layer(config: ModelConfig, index: int) -> DecoderLayer:
    width, eps = config.hidden_size, config.rms_norm_eps
    attention = Attention(
        width,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        eps,
        qk_norm=config.qk_norm,
        bias=config.attention_bias,
    )
    if config.is_sparse(index):
        feed_forward: MLP | MoE = MoE(
            width, config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok, config.norm_topk_prob
        )
    else:
        feed_forward = MLP(width, config.intermediate_size, config.mlp_bias)
    return DecoderLayer(attention, feed_forward, width, eps)


# -- loading ----------------------------------------------------------------------------------------------------------


def resolve_dtype(dtype: str, stored: str, device: torch.device) -> torch.dtype:
    """The dtype to run in. "auto" keeps the checkpoint's, except on CPUs without native half-precision products: float32."""
    if dtype == "auto":
        if device.type == "cpu" and not (stored == "bfloat16" and has_native_bfloat16()):
            return torch.float32
        dtype = stored
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in known:
        raise ValueError(f"dtype {dtype!r} is unknown: use auto, {', '.join(known)}")
    return known[dtype]


def resolve_device(device: str) -> torch.device:
    """The device to run on; "auto" is CUDA where there is one. Raises ValueError for a device this machine lacks."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: torch sees no CUDA device here; use --device cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is unknown: use auto, cpu or cuda") from error


def load_model(path: str | Path, dtype: str = "auto", device: str = "auto") -> Decoder:
    """Load a target from a folder, a GGUF file or a hub id. See `open_checkpoint` for the errors."""
    return build_model(open_checkpoint(path), dtype, device)


def build_model(checkpoint: Checkpoint, dtype: str = "auto", device: str = "auto") -> Decoder:
    """Fill a decoder from `checkpoint`, tensor by tensor, without a second copy of the weights in memory."""
    config, place = checkpoint.config, resolve_device(device)
    target_dtype, default_dtype = resolve_dtype(dtype, config.dtype, place), torch.get_default_dtype()
    torch.set_default_dtype(target_dtype)  # the weights are made in their final dtype: no second copy
    try:
        with torch.device(place):
            model = Decoder(config).requires_grad_(False)
    finally:
        torch.set_default_dtype(default_dtype)
    _fill(model, checkpoint.tensors)
    model.set_max_positions(config.max_position_embeddings)
    return model


def _fill(model: Decoder, source: TensorSource) -> None:
    """Copy every tensor into its place; fused projections are filled part by part."""
    config = model.config

    def fill(target: Tensor, name: str) -> None:
        target.copy_(source.take(name, tuple(target.shape)))

    fill(model.embed, "model.embed_tokens.weight")
    fill(model.norm.weight, "model.norm.weight")
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed
    else:
        fill(model.lm_head.dense, "lm_head.weight")
    for index, layer in enumerate(model.layers):
        _fill_layer(layer, f"model.layers.{index}", config, fill)
    tied = config.tie_word_embeddings
    source.finish(lambda name: name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"))


def _fill_layer(layer: DecoderLayer, prefix: str, config: ModelConfig, fill: Callable[[Tensor, str], None]) -> None:
    attention, feed_forward = layer.attention, layer.feed_forward
    fill(layer.input_norm.weight, f"{prefix}.input_layernorm.weight")
    fill(layer.post_attention_norm.weight, f"{prefix}.post_attention_layernorm.weight")
    sizes = [config.num_heads * config.head_dim] + [config.num_kv_heads * config.head_dim] * 2
    _fill_parts(attention.qkv, sizes, [f"{prefix}.self_attn.{name}_proj" for name in "qkv"], fill)
    _fill_parts(attention.o, [config.hidden_size], [f"{prefix}.self_attn.o_proj"], fill)
    if attention.q_norm is not None and attention.k_norm is not None:
        fill(attention.q_norm, f"{prefix}.self_attn.q_norm.weight")
        fill(attention.k_norm, f"{prefix}.self_attn.k_norm.weight")
    if isinstance(feed_forward, MLP):
        inner = config.intermediate_size
        _fill_parts(feed_forward.gate_up, [inner, inner], [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], fill)
        _fill_parts(feed_forward.down, [config.hidden_size], [f"{prefix}.mlp.down_proj"], fill)
        return
    fill(feed_forward.router.dense, f"{prefix}.mlp.gate.weight")
    for expert in range(config.num_experts):
        gate, up = feed_forward.gate_up[expert].chunk(2)
        fill(gate, f"{prefix}.mlp.experts.{expert}.gate_proj.weight")
        fill(up, f"{prefix}.mlp.experts.{expert}.up_proj.weight")
        fill(feed_forward.down[expert], f"{prefix}.mlp.experts.{expert}.down_proj.weight")


def _fill_parts(linear: Linear, sizes: list[int], names: list[str], fill: Callable[[Tensor, str], None]) -> None:
    for part, name in zip(linear.dense.split(sizes), names, strict=True):
        fill(part, f"{name}.weight")
    if linear.bias is not None:
        for part, name in zip(linear.bias.split(sizes), names, strict=True):
            fill(part, f"{name}.bias")
