"""An EAGLE-3-style draft head: one decoder layer, run once a depth, whose output is its own next input.

Position p holds the token there and the *feature* before it, at p − 1: what the target's taps fuse to where the target has been,
and the head's own output where it has not. Both go into the layer's attention side by side; the feature is the residual stream.
The output at p is the feature at p and, normed, gives the logits of the token at p + 1.

Shapes: T tokens, C head width (= the target's), K taps of width Ct, V target vocabulary, V' draft vocabulary.
Source: "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (Li et al. 2025), its
layer and tensor names. Ours are the norms of queries and keys, and that the logits come from the target's LM head.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import jetflow_triton as ops
from jetflow_core.base_head import BaseHead, layer_tensors
from jetflow_core.eagle_config import EagleConfig
from jetflow_core.layers import MLP, Attend, Attention, RMSNorm
from jetflow_core.tensor_source import TensorSource
from jetflow_core.weights import open_eagle


class EagleHead(BaseHead[EagleConfig]):
    """The layer and what leads into and out of it."""

    def __init__(self, config: EagleConfig, embed: Tensor, lm_head: Tensor, draft_vocab: Tensor | None = None) -> None:
        super().__init__(config, embed, lm_head, draft_vocab)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.embed_norm = RMSNorm(width, eps)
        self.feature_norm = RMSNorm(width, eps)
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        self.attention = Attention(width, *heads, eps, qk_norm=True, inputs=2 * width)
        self.post_attention_norm = RMSNorm(width, eps)
        self.feed_forward = MLP(width, config.intermediate_size)
        self.norm = RMSNorm(width, eps)

    # -- forward ------------------------------------------------------------------------------------------------------

    def fuse(self, taps: Tensor) -> Tensor:
        """Features [T, C] of concatenated target taps [T, K·Ct]."""
        return self.fc(taps)

    def context_kv(self, input_ids: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values [T, Hk, D] of `input_ids` [T] at `positions` [T] after `features` [T, C]."""
        config, attention = self.config, self.attention
        pairs = self._pairs(input_ids, features)
        k, v = self._project_context(pairs).view(len(pairs), 2, config.num_kv_heads, config.head_dim).unbind(1)
        no_query = pairs.new_empty(len(pairs), 0, config.head_dim)
        norms = attention.q_norm, attention.k_norm, attention.eps
        _, k = ops.qk_norm_rope(no_query, k, positions, self.cos_sin, *norms)
        return k, v

    def forward(self, input_ids: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The features [T, C] at `positions` [T] of `input_ids` [T], given the `features` [T, C] before them."""
        attended = self.attention(self._pairs(input_ids, features), positions, self.cos_sin, 0, attend)
        normed, x = self.post_attention_norm.add(attended, features)
        return x + self.feed_forward(normed)

    def hidden(self, features: Tensor) -> Tensor:
        """Hidden states [T, C], which an LM head turns into logits, of the head's own `features` [T, C]."""
        return self.norm(features)

    def _pairs(self, input_ids: Tensor, features: Tensor) -> Tensor:
        """The layer's input [T, 2C]: embedding and feature, each normed."""
        embedding = functional.embedding(input_ids, self._target["embed"])
        return torch.cat([self.embed_norm(embedding), self.feature_norm(features)], dim=-1)

    # -- files --------------------------------------------------------------------------------------------------------

    @classmethod
    def _open(cls, path: str | Path) -> tuple[EagleConfig, TensorSource]:
        return open_eagle(path)

    def _context_weight(self) -> Tensor:
        """The k and v rows [2·Hk·D, 2C] of the fused projection."""
        return self.attention.qkv.dense[self.config.num_heads * self.config.head_dim :]

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        return [
            ("fc.weight", self.fc.dense),
            ("norm.weight", self.norm.weight),
            ("midlayer.input_layernorm.weight", self.embed_norm.weight),
            ("midlayer.hidden_norm.weight", self.feature_norm.weight),
            *layer_tensors("midlayer", self.attention, self.post_attention_norm, self.feed_forward),
        ]
