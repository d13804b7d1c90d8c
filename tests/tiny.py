"""Tiny random models and heads, shared by the tests of every package."""

from __future__ import annotations

from typing import Any

import torch

from jetflow_core.config import HeadConfig, ModelConfig, RopeConfig
from jetflow_core.eagle import EagleHead
from jetflow_core.eagle_config import EagleConfig
from jetflow_core.head import DraftHead
from jetflow_core.model import Decoder
from jetflow_core.sampling import SamplingParams

VOCAB = 97
MASK = 96
KINDS = ("dense", "moe", "llama")

# Requests of every kind: short and long prompts, greedy and sampled answers.
PROMPTS = [
    [3],
    list(range(5, 10)),
    [int(i * 7 % 90) for i in range(40)],
    [4, 4, 4],
    [int(i * i % 90) for i in range(64)],
]
PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=0.8, seed=1),
    SamplingParams(max_tokens=17, temperature=1.2, top_p=0.9, top_k=20, seed=2),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=30, temperature=0.7, min_p=0.05, seed=3),
]


def tiny_config(kind: str = "dense", **changes: object) -> ModelConfig:
    """A four-layer model of width 32 with `VOCAB` tokens: Qwen3 dense, Qwen3 MoE (layer 0 and even layers dense) or Llama."""
    architecture = {"dense": "Qwen3ForCausalLM", "moe": "Qwen3MoeForCausalLM", "llama": "LlamaForCausalLM"}[kind]
    fields: dict[str, object] = {
        "architecture": architecture,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(),
        "qk_norm": kind != "llama",
    }
    if kind == "moe":
        fields |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        }
    return ModelConfig(**(fields | changes))  # type: ignore[arg-type]


def tiny_model(kind: str = "dense", seed: int = 0, **changes: object) -> Decoder:
    """Random float32 weights, wide enough that greedy text varies."""
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(tiny_config(kind, **changes)).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.3, generator=generator)
    model.set_max_positions(model.config.max_position_embeddings)
    return model


def head_shape(model: Decoder, draft_vocab: torch.Tensor | None) -> dict[str, Any]:
    """What the configurations of both kinds of heads for `model` share."""
    target = model.config
    return {
        "target_layer_ids": (0, 2),
        "num_target_layers": target.num_layers,
        "target_hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(),
        "draft_vocab_size": None if draft_vocab is None else len(draft_vocab),
    }


def tiny_head(
    model: Decoder,
    *,
    causal: bool = True,
    conditioning: str = "pairwise",
    draft_vocab: torch.Tensor | None = None,
    order: int = 1,
    block_size: int = 6,
    seed: int = 0,
) -> DraftHead:
    """A two-layer random head for `model`, ready to draft."""
    config = HeadConfig(
        **head_shape(model, draft_vocab),
        block_size=block_size,
        mask_token_id=MASK,
        num_layers=2,
        causal=causal,
        branch_conditioning=conditioning,
        pairwise_size=16 if conditioning == "pairwise" else 0,
        pairwise_order=order,
        learned_mask=True,
    )
    assert model.lm_head.weight is not None
    head = DraftHead(config, model.embed, model.lm_head.weight, draft_vocab)
    torch.manual_seed(seed)
    head.reset_parameters(0.2)
    if head.pairwise is not None:
        assert head.pairwise.down.weight is not None
        torch.nn.init.normal_(head.pairwise.down.weight, std=0.2)
    return head.requires_grad_(False).to(model.embed.dtype).float_tables()


def tiny_eagle(
    model: Decoder, *, draft_vocab: torch.Tensor | None = None, depth: int = 5, expanded: int = 3, seed: int = 0
) -> EagleHead:
    """A random EAGLE head for `model`, ready to draft."""
    config = EagleConfig(**head_shape(model, draft_vocab), depth=depth, expanded=expanded)
    assert model.lm_head.weight is not None
    head = EagleHead(config, model.embed, model.lm_head.weight, draft_vocab)
    torch.manual_seed(seed)
    head.reset_parameters(0.2)
    return head.requires_grad_(False).to(model.embed.dtype).float_tables()
