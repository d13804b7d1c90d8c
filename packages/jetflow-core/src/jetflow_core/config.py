"""Model, head and engine configurations: frozen, validated, parsed from Hugging Face `config.json` files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and optional long-context scaling (`type` is "default", "linear" or "yarn")."""

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """A Qwen3 dense, Qwen3 MoE or Llama decoder. `num_experts == 0` means dense everywhere."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def is_sparse(self, layer: int) -> bool:
        """Whether decoder layer `layer` is a mixture of experts (Hugging Face's `Qwen3MoeDecoderLayer` rule)."""
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )


@dataclass(frozen=True)
class HeadConfig:
    """A JetFlow draft head (`causal`) or a DFlash one (bidirectional), with its link to the target.

    `target_layer_ids` are tapped target layers (a tap is the *output* of that layer). Slot k of a block with its
    anchor at position a predicts the token at a + k, for k in 1 … block_size − 1.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    target_hidden_size: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    causal: bool = True
    branch_conditioning: str = "pairwise"  # "none" | "pairwise"
    pairwise_size: int = 0  # inner width of the pairwise MLP
    draft_vocab_size: int | None = None  # None: the target's whole vocabulary
    learned_mask: bool = False  # an own embedding for the mask slots instead of the target's row
