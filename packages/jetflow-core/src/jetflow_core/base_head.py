"""What all kinds of draft heads have in common: the target's tables, the draft vocabulary, and a folder to be kept in.

Shapes: C head width (= the target's), V target vocabulary, V' draft vocabulary.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, Self, TypeVar

import torch
from safetensors.torch import save as serialize
from torch import Tensor, nn
from torch.nn import functional

from jetflow_core.eagle_config import EagleConfig
from jetflow_core.head_config import HeadConfig
from jetflow_core.layers import MLP, Attention, Linear, RMSNorm
from jetflow_core.rope import rope_table
from jetflow_core.tensor_source import TensorSource

Config = TypeVar("Config", HeadConfig, EagleConfig)


class BaseHead(nn.Module, ABC, Generic[Config]):
    """The ends of a head: `fc` takes the target's taps in, the target's own LM head gives the logits.

    `embed` and `lm_head` [V, C] belong to the target: frozen, shared, never stored with the head. `draft_vocab` [V'] restricts
    the logits to those target ids, each once; None scores the whole vocabulary.
    Raises ValueError when the target's tables do not fit the configuration or the draft vocabulary.
    """

    def __init__(self, config: Config, embed: Tensor, lm_head: Tensor, draft_vocab: Tensor | None = None) -> None:
        super().__init__()
        width = config.hidden_size
        if embed.shape[1] != width or lm_head.shape[1] != width:
            raise ValueError(
                f"draft head has hidden_size {width}, its target has {embed.shape[1]}: they do not belong together"
            )
        self.config = config
        self.fc = Linear(len(config.target_layer_ids) * config.target_hidden_size, width)
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", _table(config), persistent=False)
        self._target = {"embed": embed}  # a plain dict keeps the target's table out of the parameters
        self.draft_vocab = draft_vocab
        self._rows = Linear(width, lm_head.shape[0])
        self._rows.weight = nn.Parameter(_draft_rows(lm_head, draft_vocab), requires_grad=False)
        self._context: Linear | None = None

    def reset_parameters(self, std: float = 0.02) -> None:
        """Initialise for training: normal weights."""
        for module in self.modules():
            if isinstance(module, Linear) and module is not self._rows and module.weight is not None:
                nn.init.normal_(module.weight, std=std)

    def float_tables(self) -> Self:
        """Keep the rotary table in float32 after a cast of the module."""
        self.cos_sin = _table(self.config).to(self.cos_sin.device)
        return self

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits [T, V'] of hidden states [T, C]."""
        return self._rows(hidden)

    def pack(self) -> None:
        """Prepare for inference: packed weights, and those of the context's keys and values by themselves."""
        weight = self._context_weight().detach()
        self._context = Linear(weight.shape[1], weight.shape[0])
        self._context.weight = nn.Parameter(weight, requires_grad=False)
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def _project_context(self, inputs: Tensor) -> Tensor:
        """The keys and values of context positions, side by side."""
        packed = self._context
        return functional.linear(inputs, self._context_weight()) if packed is None else packed(inputs)

    @abstractmethod
    def _context_weight(self) -> Tensor:
        """The k and v rows of every fused projection."""

    # -- files --------------------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def _open(cls, path: str | Path) -> tuple[Config, TensorSource]:
        """The configuration and the tensors in a head folder or hub id. Raises CheckpointError."""

    @abstractmethod
    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        """Every stored tensor under its file name; fused projections appear as the views of their parts."""

    def save(self, path: Path) -> None:
        """Write `config.json` and `model.safetensors` (bfloat16, the public tensor names) into the folder `path`.

        Raises OSError when the disk refuses.
        """
        path.mkdir(parents=True, exist_ok=True)
        stored = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in self._named_tensors()}
        if self.draft_vocab is not None:
            stored["d2t"] = self.draft_vocab.clone()
        # Not by safetensors' own save_file, whose files only their owner may read: a server may run as another user.
        (path / "model.safetensors").write_bytes(serialize(stored, metadata={"format": "pt"}))
        (path / "config.json").write_text(json.dumps(self.config.to_hf(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, embed: Tensor, lm_head: Tensor) -> Self:
        """Read a head folder (or hub id) for the target whose tables are given, in the tables' dtype and device.

        Raises CheckpointError naming file and tensor for anything missing, extra or mis-shaped.
        """
        config, source = cls._open(path)
        draft_vocab = None
        if config.draft_vocab_size is not None:
            stored = source.take("d2t", (config.draft_vocab_size,), integer=True)
            draft_vocab = stored.to(embed.device, torch.int64)
        try:
            head = cls(config, embed, lm_head, draft_vocab)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        with torch.no_grad():
            for name, tensor in head._named_tensors():
                tensor.copy_(source.take(name, tuple(tensor.shape)))
        source.finish(lambda name: False)
        return head.to(device=embed.device, dtype=embed.dtype).requires_grad_(False).float_tables()


def layer_tensors(
    prefix: str, attention: Attention, post_attention_norm: RMSNorm, mlp: MLP
) -> list[tuple[str, Tensor]]:
    """The tensors of a decoder layer, but for the norms of its input, under their file names."""
    keys = attention.num_kv_heads * attention.head_dim
    q, k, v = attention.qkv.dense.split([attention.num_heads * attention.head_dim, keys, keys])
    gate, up = mlp.gate_up.dense.chunk(2)
    assert attention.q_norm is not None
    assert attention.k_norm is not None
    named = {
        "self_attn.q_proj": q,
        "self_attn.k_proj": k,
        "self_attn.v_proj": v,
        "self_attn.o_proj": attention.o.dense,
        "self_attn.q_norm": attention.q_norm,
        "self_attn.k_norm": attention.k_norm,
        "post_attention_layernorm": post_attention_norm.weight,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": mlp.down.dense,
    }
    return [(f"{prefix}.{name}.weight", tensor) for name, tensor in named.items()]


def _draft_rows(lm_head: Tensor, ids: Tensor | None) -> Tensor:
    """The rows [V', C] of the target's `lm_head` [V, C] for the draft vocabulary `ids` [V'] of target ids; all without one.

    Raises ValueError unless `ids` are int64, each once and below V.
    """
    if ids is None:
        return lm_head.detach()
    if (
        ids.dtype != torch.int64
        or ids.ndim != 1
        or len(ids) == 0
        or int(ids.min()) < 0
        or int(ids.max()) >= len(lm_head)
    ):
        raise ValueError(f"draft vocabulary must hold int64 ids below {len(lm_head)}")
    if len(ids.unique()) < len(ids):
        raise ValueError("draft vocabulary holds an id twice")
    return lm_head[ids].detach()


def _table(config: HeadConfig | EagleConfig) -> Tensor:
    """Rotary rows for every context position and for the drafted ones that hang off the last of them."""
    limit = config.max_position_embeddings
    return rope_table(config.rope, config.head_dim, limit + config.block_size, limit)
