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
from jetflow_core.base_head import BaseHead, layer_tensors
from jetflow_core.config import HeadConfig
from jetflow_core.layers import MLP, Attend, Attention, DecoderLayer, DecoderStack, Linear, RMSNorm
from jetflow_core.tensor_source import TensorSource
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


class DraftHead(BaseHead[HeadConfig]):
    """Qwen3-style layers over a block of slots, with the target's fused hidden states as extra context keys and values.

    Raises ValueError as `BaseHead` does, and for a mask token outside the target's table.
    """

    def __init__(self, config: HeadConfig, embed: Tensor, lm_head: Tensor, draft_vocab: Tensor | None = None) -> None:
        super().__init__(config, embed, lm_head, draft_vocab)
        width = config.hidden_size
        if config.mask_token_id >= embed.shape[0]:
            raise ValueError(
                f"draft head has mask_token_id {config.mask_token_id}, the target's table has {embed.shape[0]} rows"
            )
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = DecoderStack(_layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.pairwise = (
            PairwiseMLP(width, config.pairwise_size, config.rms_norm_eps, config.pairwise_order)
            if config.branch_conditioning == "pairwise"
            else None
        )
        self.mask_embed = nn.Parameter(torch.zeros(width)) if config.learned_mask else None
        self._output_table: Tensor | None = None
        self._token_table: Tensor | None = None
        self._before_table: Tensor | None = None

    def reset_parameters(self, std: float = 0.02) -> None:
        """Initialise for training: normal weights, and corrections that start at zero."""
        super().reset_parameters(std)
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
        stacked = self._project_context(features).view(
            len(features), config.num_layers, 2, config.num_kv_heads, config.head_dim
        )
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

    @classmethod
    def _open(cls, path: str | Path) -> tuple[HeadConfig, TensorSource]:
        return open_head(path)

    def pack(self) -> None:
        """Prepare for inference: stacked and packed weights, and both ends of the pairwise MLP as tables over the draft ids.

        The tables are the tokens' parts of its first layer [V', 2P], and its last projection seen through the LM head [V', P].
        """
        if self.pairwise is not None:
            embed = self._target["embed"]
            with torch.no_grad():
                previous = embed if self.draft_vocab is None else embed[self.draft_vocab]
                self._token_table = self.pairwise.token_part(previous)
                if self.pairwise.before is not None:
                    self._before_table = self.pairwise.before_part(previous)
                self._output_table = self._rows.dense @ self.pairwise.down.dense
        super().pack()

    def _context_weight(self) -> Tensor:
        """The k and v rows [L·2·Hk·D, C] of every layer's fused projection."""
        first = self.config.num_heads * self.config.head_dim
        return torch.cat([layer.attention.qkv.dense[first:] for layer in self.layers])

    def _named_tensors(self) -> list[tuple[str, Tensor]]:
        named: list[tuple[str, Tensor]] = [
            ("fc.weight", self.fc.dense),
            ("hidden_norm.weight", self.hidden_norm.weight),
            ("norm.weight", self.norm.weight),
        ]
        for index, layer in enumerate(self.layers):
            assert isinstance(layer.feed_forward, MLP)
            named.append((f"layers.{index}.input_layernorm.weight", layer.input_norm.weight))
            named += layer_tensors(f"layers.{index}", layer.attention, layer.post_attention_norm, layer.feed_forward)
        if self.pairwise is not None:
            named += [
                ("pairwise.norm.weight", self.pairwise.norm.weight),
                ("pairwise.previous.weight", self.pairwise.previous.dense),
                ("pairwise.hidden.weight", self.pairwise.hidden.dense),
                ("pairwise.down.weight", self.pairwise.down.dense),
            ]
            if self.pairwise.before is not None:
                named.append(("pairwise.before.weight", self.pairwise.before.dense))
        if self.mask_embed is not None:
            named.append(("mask_embed", self.mask_embed))
        return named


def _layer(config: HeadConfig) -> DecoderLayer:
    width, eps = config.hidden_size, config.rms_norm_eps
    attention = Attention(width, config.num_heads, config.num_kv_heads, config.head_dim, eps, qk_norm=True)
    return DecoderLayer(attention, MLP(width, config.intermediate_size), width, eps)
