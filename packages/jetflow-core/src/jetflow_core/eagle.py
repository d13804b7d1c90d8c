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
from torch import Tensor, nn
from torch.nn import functional

import jetflow_triton as ops
from jetflow_core.eagle_config import EagleConfig
from jetflow_core.head_files import draft_rows, read_draft_vocab, read_weights, write_head
from jetflow_core.layers import MLP, Attend, Attention, Linear, RMSNorm
from jetflow_core.rope import rope_table
from jetflow_core.weights import open_eagle


class EagleHead(nn.Module):
    """The layer and what leads into and out of it.

    `embed` and `lm_head` [V, C] belong to the target: frozen, shared, never stored with the head.
    Raises ValueError when the target's tables do not fit the configuration.
    """

    def __init__(self, config: EagleConfig, embed: Tensor, lm_head: Tensor, draft_vocab: Tensor | None = None) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        if embed.shape[1] != width or lm_head.shape[1] != width:
            raise ValueError(
                f"draft head has hidden_size {width}, its target has {embed.shape[1]}: they do not belong together"
            )
        self.config = config
        self.fc = Linear(len(config.target_layer_ids) * config.target_hidden_size, width)
        self.embed_norm = RMSNorm(width, eps)
        self.feature_norm = RMSNorm(width, eps)
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        self.attention = Attention(width, *heads, eps, qk_norm=True, inputs=2 * width)
        self.post_attention_norm = RMSNorm(width, eps)
        self.feed_forward = MLP(width, config.intermediate_size)
        self.norm = RMSNorm(width, eps)
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", _table(config), persistent=False)
        self._target = {"embed": embed}  # a plain dict keeps the target's table out of the parameters
        self.draft_vocab = draft_vocab
        self._rows = Linear(width, lm_head.shape[0])
        self._rows.weight = nn.Parameter(draft_rows(lm_head, draft_vocab), requires_grad=False)
        self._context: Linear | None = None

    def reset_parameters(self, std: float = 0.02) -> None:
        """Initialise for training: normal weights."""
        for module in self.modules():
            if isinstance(module, Linear) and module is not self._rows and module.weight is not None:
                nn.init.normal_(module.weight, std=std)

    # -- forward ------------------------------------------------------------------------------------------------------

    def fuse(self, taps: Tensor) -> Tensor:
        """Features [T, C] of concatenated target taps [T, K·Ct]."""
        return self.fc(taps)

    def context_kv(self, input_ids: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values [T, Hk, D] of `input_ids` [T] at `positions` [T] after `features` [T, C]."""
        config, attention = self.config, self.attention
        pairs = self._pairs(input_ids, features)
        packed = self._context
        stacked = functional.linear(pairs, self._context_weight()) if packed is None else packed(pairs)
        k, v = stacked.view(len(pairs), 2, config.num_kv_heads, config.head_dim).unbind(1)
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

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits [T, V'] of hidden states [T, C]."""
        return self._rows(hidden)

    def _pairs(self, input_ids: Tensor, features: Tensor) -> Tensor:
        """The layer's input [T, 2C]: embedding and feature, each normed."""
        embedding = functional.embedding(input_ids, self._target["embed"])
        return torch.cat([self.embed_norm(embedding), self.feature_norm(features)], dim=-1)

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write `config.json` and `model.safetensors` (bfloat16, EAGLE-3's tensor names) into the folder `path`.

        Raises OSError when the disk refuses.
        """
        write_head(path, self.config.to_hf(), _named_tensors(self), self.draft_vocab)

    @classmethod
    def load(cls, path: str | Path, embed: Tensor, lm_head: Tensor) -> EagleHead:
        """Read a head folder (or hub id) for the target whose tables are given, in the tables' dtype and device.

        Raises CheckpointError naming file and tensor for anything missing, extra or mis-shaped.
        """
        config, source = open_eagle(path)
        draft_vocab = read_draft_vocab(source, config.draft_vocab_size, embed.device)
        try:
            head = cls(config, embed, lm_head, draft_vocab)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        read_weights(source, _named_tensors(head))
        return head.to(device=embed.device, dtype=embed.dtype).requires_grad_(False).float_tables()

    def float_tables(self) -> EagleHead:
        """Keep the rotary table in float32 after a cast of the module."""
        self.cos_sin = _table(self.config).to(self.cos_sin.device)
        return self

    def pack(self) -> None:
        """Prepare for inference: packed weights, and those of the context's keys and values by themselves."""
        weight = self._context_weight().detach()
        self._context = Linear(weight.shape[1], weight.shape[0])
        self._context.weight = nn.Parameter(weight, requires_grad=False)
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def _context_weight(self) -> Tensor:
        """The k and v rows [2·Hk·D, 2C] of the fused projection."""
        return self.attention.qkv.dense[self.config.num_heads * self.config.head_dim :]


def _table(config: EagleConfig) -> Tensor:
    """Rotary rows for every context position and for the tree that hangs off the last of them."""
    limit = config.max_position_embeddings
    return rope_table(config.rope, config.head_dim, limit + config.block_size, limit)


def _named_tensors(head: EagleHead) -> list[tuple[str, Tensor]]:
    """Every stored tensor under its file name; fused projections appear as the views of their parts."""
    config, attention = head.config, head.attention
    sizes = [config.num_heads * config.head_dim] + [config.num_kv_heads * config.head_dim] * 2
    assert attention.q_norm is not None
    assert attention.k_norm is not None
    gate, up = head.feed_forward.gate_up.dense.chunk(2)
    layer = [
        ("input_layernorm.weight", head.embed_norm.weight),
        ("hidden_norm.weight", head.feature_norm.weight),
        *(
            (f"self_attn.{name}_proj.weight", part)
            for name, part in zip("qkv", attention.qkv.dense.split(sizes), strict=True)
        ),
        ("self_attn.o_proj.weight", attention.o.dense),
        ("self_attn.q_norm.weight", attention.q_norm),
        ("self_attn.k_norm.weight", attention.k_norm),
        ("post_attention_layernorm.weight", head.post_attention_norm.weight),
        ("mlp.gate_proj.weight", gate),
        ("mlp.up_proj.weight", up),
        ("mlp.down_proj.weight", head.feed_forward.down.dense),
    ]
    ends = [("fc.weight", head.fc.dense), ("norm.weight", head.norm.weight)]
    return [*ends, *((f"midlayer.{name}", tensor) for name, tensor in layer)]
