"""The JetFlow draft head: one forward over [anchor, MASK, …] gives the logits of every draft depth.

Shapes: T tokens, C head width (= the target's), K taps, V target vocabulary, V' draft vocabulary, P pairwise inner width.
Source: PAPER "Method" (arXiv 2606.18394) and the DFlash/JetSpec checkpoint layout; the pairwise conditioning is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import jetflow_triton as ops
from jetflow_core.config import HeadConfig
from jetflow_core.head_files import draft_rows, read_draft_vocab, read_weights, write_head
from jetflow_core.layers import MLP, Attend, Attention, DecoderLayer, DecoderStack, Linear, RMSNorm
from jetflow_core.rope import rope_table
from jetflow_core.weights import open_head


class PairwiseMLP(nn.Module):
    """Corrects a depth's hidden state for the token that precedes it on a branch, and of order 2 for the one before that too.

    delta = down(silu(g) · u) with (g, u) = previous(norm(e₁)) + before(norm(e₂)) + hidden(h), where e₁ and e₂ embed the tokens
    one and two back. The parts are separate, so that a token's is a row of a table over the draft vocabulary and a depth's is
    computed once.
    """

    def __init__(self, width: int, inner: int, eps: float, order: int = 1) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps)
        self.previous = Linear(width, 2 * inner)
        self.before = Linear(width, 2 * inner) if order == 2 else None
        self.hidden = Linear(width, 2 * inner)
        self.down = Linear(inner, width)

    def token_part(self, embedding: Tensor) -> Tensor:
        """[T, C] embeddings of the tokens one back to [T, 2P]."""
        return self.previous(self.norm(embedding))

    def before_part(self, embedding: Tensor) -> Tensor:
        """[T, C] embeddings of the tokens two back to [T, 2P]; of order 2 only."""
        assert self.before is not None
        return self.before(self.norm(embedding))


@dataclass(frozen=True)
class SecondOrder:
    """Corrections of the logits of K candidates a depth after pairs of candidates, for R blocks of D depths.

    `token_table` and `before_table` [V', 2P] are the parts of tokens one and two back, `hidden_part` [R, D, 2P] and `anchor_part`
    [R, 2P] (the anchor two back) those of the blocks; `rows` [R, D, P, K] are the candidates' output rows and `ids` [R, D, K]
    their draft ids.
    """

    token_table: Tensor
    before_table: Tensor
    hidden_part: Tensor
    anchor_part: Tensor
    rows: Tensor
    ids: Tensor

    def __call__(self, depth: int, owner: Tensor, place: Tensor, before: Tensor, parents: Tensor) -> Tensor:
        """[N, K] for the candidates at `depth` (2 or more) after N nodes, the `place` [N]-th ones of their block `owner` [N].

        `before` and `parents` [N] are the candidates of depths − 2 and − 1 that precede; at depth 2 the anchor is two back.
        """
        part = self.token_table[self.ids[owner, depth - 2, parents]] + self.hidden_part[owner, depth - 1]
        if depth == 2:
            part += self.anchor_part[owner]
        else:
            part += self.before_table[self.ids[owner, depth - 3, before]]
        inner = ops.silu_mul(part)
        if len(self.ids) == 1:
            return inner @ self.rows[0, depth - 1]
        # One product for all blocks: a block's nodes side by side, places that it has no node for left empty.
        padded = inner.new_zeros(len(self.ids), int(place.max()) + 1, inner.shape[1])
        padded[owner, place] = inner
        return torch.bmm(padded, self.rows[:, depth - 1])[owner, place]


class DraftHead(nn.Module):
    """Qwen3-style layers over a block of slots, with the target's fused hidden states as extra context keys and values.

    `embed` and `lm_head` [V, C] belong to the target: frozen, shared, never stored with the head.
    Raises ValueError when the target's tables do not fit the configuration.
    """

    def __init__(self, config: HeadConfig, embed: Tensor, lm_head: Tensor, draft_vocab: Tensor | None = None) -> None:
        super().__init__()
        width = config.hidden_size
        if embed.shape[1] != width or lm_head.shape[1] != width:
            raise ValueError(
                f"draft head has hidden_size {width}, its target has {embed.shape[1]}: they do not belong together"
            )
        if config.mask_token_id >= embed.shape[0]:
            raise ValueError(
                f"draft head has mask_token_id {config.mask_token_id}, the target's table has {embed.shape[0]} rows"
            )
        self.config = config
        self.fc = Linear(len(config.target_layer_ids) * config.target_hidden_size, width)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = DecoderStack(_layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.pairwise = (
            PairwiseMLP(width, config.pairwise_size, config.rms_norm_eps, config.pairwise_order)
            if config.branch_conditioning == "pairwise"
            else None
        )
        self.mask_embed = nn.Parameter(torch.zeros(width)) if config.learned_mask else None
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", _table(config), persistent=False)
        self._target = {
            "embed": embed,
            "lm_head": lm_head,
        }  # a plain dict keeps the target's tables out of the parameters
        self.draft_vocab: Tensor | None = None
        self._rows = Linear(width, lm_head.shape[0])
        self.set_draft_vocab(draft_vocab)
        self._context: Linear | None = None
        self._output_table: Tensor | None = None
        self._token_table: Tensor | None = None
        self._before_table: Tensor | None = None

    def set_draft_vocab(self, ids: Tensor | None) -> None:
        """Restrict the logits to the target ids [V'], each once; None scores the whole vocabulary."""
        self._rows.weight = nn.Parameter(draft_rows(self._target["lm_head"], ids), requires_grad=False)
        self.draft_vocab = ids

    def reset_parameters(self, std: float = 0.02) -> None:
        """Initialise for training: normal weights, and corrections that start at zero."""
        for module in self.modules():
            if isinstance(module, Linear) and module is not self._rows and module.weight is not None:
                nn.init.normal_(module.weight, std=std)
        if self.pairwise is not None and self.pairwise.down.weight is not None:
            nn.init.zeros_(self.pairwise.down.weight)
        if self.mask_embed is not None:
            nn.init.normal_(self.mask_embed, std=std)

    # -- forward ------------------------------------------------------------------------------------------------------

    def fuse(self, taps: Tensor) -> Tensor:
        """Context features [T, C] of concatenated target taps [T, K·Ct]."""
        return self.hidden_norm(self.fc(taps))

    def context_kv(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys (normed, rotated) and values [T, Hk, D] of context `features` [T, C] for every layer.

        The features are the same for all layers, so one product with the stacked projections serves them all.
        """
        config = self.config
        packed = self._context
        stacked = functional.linear(features, self._context_weight()) if packed is None else packed(features)
        stacked = stacked.view(len(features), config.num_layers, 2, config.num_kv_heads, config.head_dim)
        no_query = features.new_empty(len(features), 0, config.head_dim)
        pairs: list[tuple[Tensor, Tensor]] = []
        for index, layer in enumerate(self.layers):
            attention = layer.attention
            _, k = ops.qk_norm_rope(
                no_query,
                stacked[:, index, 0],
                positions,
                self.cos_sin,
                attention.q_norm,
                attention.k_norm,
                attention.eps,
            )
            pairs.append((k, stacked[:, index, 1]))
        return pairs

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, C] (after the final norm) of block slots `input_ids` [T] at absolute `positions` [T]."""
        x = functional.embedding(input_ids, self._target["embed"])
        if self.mask_embed is not None:
            x = torch.where((input_ids == self.config.mask_token_id)[:, None], self.mask_embed, x)
        return self.layers(x, positions, self.cos_sin, attend, self.norm)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits [T, V'] of hidden states [T, C]."""
        return self._rows(hidden)

    def condition(self, hidden: Tensor, previous: Tensor, before: Tensor) -> Tensor:
        """Hidden states [T, C] corrected for the target ids one (`previous` [T]) and two back (`before` [T], which counts for
        conditioning of order 2 only); unchanged without conditioning.
        """
        pairwise = self.pairwise
        if pairwise is None:
            return hidden
        embed = self._target["embed"]
        parts = pairwise.token_part(functional.embedding(previous, embed)) + pairwise.hidden(hidden)
        if pairwise.before is not None:
            parts = parts + pairwise.before_part(functional.embedding(before, embed))
        return hidden + pairwise.down(ops.silu_mul(parts))

    def transitions(self, hidden: Tensor, logits: Tensor, parents: Tensor, children: Tensor) -> Tensor:
        """Conditional logits [..., P, K] of draft ids `children` [..., K] after draft ids `parents` [..., P] at hidden [..., C].

        `logits` [..., K] are the children's marginal logits at `hidden`. Equals `logits(condition(hidden, parent))` at the
        children's columns: the LM-head rows times the correction's last projection are a table, so a pair of tokens costs one
        dot product of width P. Needs `pack`.
        """
        assert self.pairwise is not None
        assert self._token_table is not None
        assert self._output_table is not None
        # `embedding` copies rows whole; on a CPU, indexing takes three times as long.
        before = functional.embedding(parents, self._token_table)
        inner = (before + self.pairwise.hidden(hidden)[..., None, :]).flatten(0, -2)
        inner = ops.silu_mul(inner).view(*parents.shape, -1)
        return logits[..., None, :] + inner @ functional.embedding(children, self._output_table).transpose(-1, -2)

    def second_order(self, hidden: Tensor, anchors: Tensor, ids: Tensor) -> SecondOrder:
        """Corrections of the logits of draft ids `ids` [R, D, K] after pairs of them, given `hidden` [R, D, C] and the anchors'
        target ids [R]. For conditioning of order 2; needs `pack`.
        """
        assert self.pairwise is not None
        assert self._token_table is not None
        assert self._before_table is not None
        assert self._output_table is not None
        anchor = self.pairwise.before_part(functional.embedding(anchors, self._target["embed"]))
        rows = self._output_table[ids].transpose(-1, -2)
        return SecondOrder(self._token_table, self._before_table, self.pairwise.hidden(hidden), anchor, rows, ids)

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write `config.json` and `model.safetensors` (bfloat16, the public DFlash tensor names) into the folder `path`.

        Raises OSError when the disk refuses.
        """
        write_head(path, self.config.to_hf(), _named_tensors(self), self.draft_vocab)

    @classmethod
    def load(cls, path: str | Path, embed: Tensor, lm_head: Tensor) -> DraftHead:
        """Read a head folder (or hub id) for the target whose tables are given, in the tables' dtype and device.

        Raises CheckpointError naming file and tensor for anything missing, extra or mis-shaped.
        """
        config, source = open_head(path)
        draft_vocab = read_draft_vocab(source, config.draft_vocab_size, embed.device)
        try:
            head = cls(config, embed, lm_head, draft_vocab)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        read_weights(source, _named_tensors(head))
        return head.to(device=embed.device, dtype=embed.dtype).requires_grad_(False).float_tables()

    def float_tables(self) -> DraftHead:
        """Keep the rotary table in float32 after a cast of the module."""
        self.cos_sin = _table(self.config).to(self.cos_sin.device)
        return self

    def pack(self) -> None:
        """Prepare for inference: stacked and packed weights, and both ends of the pairwise MLP as tables over the draft ids.

        The tables are the tokens' parts of its first layer [V', 2P], and its last projection seen through the LM head [V', P].
        """
        self._context = Linear(self.config.hidden_size, len(self._context_weight()))
        self._context.weight = nn.Parameter(self._context_weight().detach(), requires_grad=False)
        if self.pairwise is not None:
            embed = self._target["embed"]
            with torch.no_grad():
                previous = embed if self.draft_vocab is None else embed[self.draft_vocab]
                self._token_table = self.pairwise.token_part(previous)
                if self.pairwise.before is not None:
                    self._before_table = self.pairwise.before_part(previous)
                self._output_table = self._rows.dense @ self.pairwise.down.dense
        self._target.pop("lm_head", None)  # `_rows` holds what drafting needs of it
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def _context_weight(self) -> Tensor:
        """The k and v rows [L·2·Hk·D, C] of every layer's fused projection."""
        first = self.config.num_heads * self.config.head_dim
        return torch.cat([layer.attention.qkv.dense[first:] for layer in self.layers])


def _table(config: HeadConfig) -> Tensor:
    """Rotary rows for every context position and for the block that hangs off the last of them."""
    limit = config.max_position_embeddings
    return rope_table(config.rope, config.head_dim, limit + config.block_size, limit)


def _layer(config: HeadConfig) -> DecoderLayer:
    width, eps = config.hidden_size, config.rms_norm_eps
    attention = Attention(width, config.num_heads, config.num_kv_heads, config.head_dim, eps, qk_norm=True)
    return DecoderLayer(attention, MLP(width, config.intermediate_size), width, eps)


def _named_tensors(head: DraftHead) -> list[tuple[str, Tensor]]:
    """Every stored tensor under its file name; fused projections appear as the views of their parts."""
    config = head.config
    sizes = [config.num_heads * config.head_dim] + [config.num_kv_heads * config.head_dim] * 2
    named: list[tuple[str, Tensor]] = [
        ("fc.weight", head.fc.dense),
        ("hidden_norm.weight", head.hidden_norm.weight),
        ("norm.weight", head.norm.weight),
    ]
    for index, layer in enumerate(head.layers):
        assert isinstance(layer.feed_forward, MLP)
        prefix, attention = f"layers.{index}", layer.attention
        named += [
            (f"{prefix}.self_attn.{name}_proj.weight", part)
            for name, part in zip("qkv", attention.qkv.dense.split(sizes), strict=True)
        ]
        assert attention.q_norm is not None
        assert attention.k_norm is not None
        gate, up = layer.feed_forward.gate_up.dense.chunk(2)
        named += [
            (f"{prefix}.self_attn.o_proj.weight", attention.o.dense),
            (f"{prefix}.self_attn.q_norm.weight", attention.q_norm),
            (f"{prefix}.self_attn.k_norm.weight", attention.k_norm),
            (f"{prefix}.input_layernorm.weight", layer.input_norm.weight),
            (f"{prefix}.post_attention_layernorm.weight", layer.post_attention_norm.weight),
            (f"{prefix}.mlp.gate_proj.weight", gate),
            (f"{prefix}.mlp.up_proj.weight", up),
            (f"{prefix}.mlp.down_proj.weight", layer.feed_forward.down.dense),
        ]
    if head.pairwise is not None:
        named += [
            ("pairwise.norm.weight", head.pairwise.norm.weight),
            ("pairwise.previous.weight", head.pairwise.previous.dense),
            ("pairwise.hidden.weight", head.pairwise.hidden.dense),
            ("pairwise.down.weight", head.pairwise.down.dense),
        ]
        if head.pairwise.before is not None:
            named.append(("pairwise.before.weight", head.pairwise.before.dense))
    if head.mask_embed is not None:
        named.append(("mask_embed", head.mask_embed))
    return named
