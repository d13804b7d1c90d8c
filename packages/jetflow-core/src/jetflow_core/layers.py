"""Building blocks shared by the target model and the draft head.

Shapes: T tokens of a flat batch, C model width, Hq/Hk query and key/value heads, D head width, I inner width, E experts.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import jetflow_triton as ops
from jetflow_triton.linear import by_row_blocks


class Attend(Protocol):
    """How a layer's queries meet keys and values: a paged cache in serving, a masked product in training."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention output [T, Hq, D] of rotated q [T, Hq, D] over rotated k and v [T, Hk, D] and what came before."""
        ...


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (AVX512-BF16 or AMX; on ARM, what oneDNN says).

    On x86 oneDNN also accepts bfloat16 where it has to emulate it, several times slower than float32.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if platform.machine().lower() in ("x86_64", "amd64"):
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


PIECE = 4096
"""Rows of a weight in exact mode: of a model of width 576, 4.5 MiB in bfloat16."""


class Linear(nn.Module):
    """y = x Wᵀ + b with weight [out_features, in_features].

    `pack` re-lays the weight once for oneDNN's small-batch products (CPU inference only): a forward over 16 rows then costs
    about twice one over a single row instead of four times. CPUs without native bfloat16 products keep a packed float32
    weight and accumulate in float32, which is both faster and no less exact than their bfloat16 fallback.

    An `exact` one gives a row the same bits whatever rows are beside it. Set that before `pack`: its blocks of a few rows go over
    the weight one after the other, so a long weight is packed in pieces that stay in the CPU's cache meanwhile.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.exact = False
        self._packed: list[tuple[Tensor, Tensor | None]] = []  # weight and bias of each piece
        self._compute_dtype = torch.float32

    @property
    def dense(self) -> nn.Parameter:
        """The weight itself; a packed one is gone."""
        assert self.weight is not None, "the weight has been packed for inference"
        return self.weight

    def pack(self) -> None:
        """Replace the weight by its packed form. Does nothing off the CPU or without oneDNN; training must not call it."""
        if self.weight is None or self.weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return
        native = self.weight.dtype == torch.bfloat16 and has_native_bfloat16()
        self._compute_dtype = torch.bfloat16 if native else torch.float32
        with torch.no_grad():
            dense = self.weight.detach().to(self._compute_dtype)
            size = PIECE if self.exact else len(dense)
            biases = [None] * len(dense) if self.bias is None else self.bias.to(self._compute_dtype).split(size)
            for piece, bias in zip(dense.split(size), biases, strict=False):
                packed = torch.ops.mkldnn._reorder_linear_weight(piece.contiguous(), 16)
                self._packed.append((packed, bias))
        self.weight = self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in_features] to [..., out_features]."""
        if not self._packed:
            return (ops.linear if self.exact else functional.linear)(x, self.dense, self.bias)
        if x.shape[0] == 0:
            return x.new_zeros(0, sum(weight.shape[0] for weight, _ in self._packed))
        rows = x if x.dtype is self._compute_dtype else x.to(self._compute_dtype)
        if len(self._packed) == 1:
            product = self._product(rows, *self._packed[0])
        else:
            product = torch.cat([self._product(rows, weight, bias) for weight, bias in self._packed], dim=-1)
        return product if x.dtype is self._compute_dtype else product.to(x.dtype)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The overload itself: its packet would be resolved anew at every call.
        linear = torch.ops.mkldnn._linear_pointwise.default
        if not self.exact:
            return linear(x, weight, bias, "none", [], "")
        return by_row_blocks(lambda rows: linear(rows, weight, bias, "none", [], ""), x)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned weight [C]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [T, C]."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (normalised x + residual, x + residual)."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with fused q/k/v projection and optional per-head q/k norm (Qwen3 has it, Llama has not)."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        qk_norm: bool,
        bias: bool = False,
        inputs: int | None = None,
    ) -> None:
        """`inputs`: width of what is attended from, where it is not the `width` of the output."""
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.eps = num_heads, num_kv_heads, head_dim, eps
        self.qkv = Linear(inputs or width, (num_heads + 2 * num_kv_heads) * head_dim, bias)
        self.o = Linear(num_heads * head_dim, width, bias)
        self.q_norm = nn.Parameter(torch.ones(head_dim)) if qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(head_dim)) if qk_norm else None

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor, layer: int, attend: Attend) -> Tensor:
        """Attention output [T, C] of x [T, C] at absolute `positions` [T]."""
        heads = self.num_heads, self.num_kv_heads, self.num_kv_heads
        q, k, v = self.qkv(x).view(x.shape[0], sum(heads), self.head_dim).split(heads, dim=1)
        q, k = ops.qk_norm_rope(q, k, positions, cos_sin, self.q_norm, self.k_norm, self.eps)
        return self.o(attend(layer, q, k, v).reshape(x.shape[0], -1))


class MLP(nn.Module):
    """SwiGLU feed-forward layer with fused gate and up projections."""

    def __init__(self, width: int, inner: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * inner, bias)
        self.down = Linear(inner, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [T, C] to [T, C]."""
        return self.down(ops.silu_mul(self.gate_up(x)))


class MoE(nn.Module):
    """Mixture of SwiGLU experts with softmax top-k routing (Qwen3-MoE)."""

    def __init__(self, width: int, inner: int, num_experts: int, top_k: int, renormalize: bool) -> None:
        super().__init__()
        self.router = Linear(width, num_experts)
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * inner, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, inner))
        self.top_k, self.renormalize = top_k, renormalize
        self.exact = False

    def forward(self, x: Tensor) -> Tensor:
        """Map x [T, C] to [T, C]."""
        weights, experts = ops.moe_route(self.router(x), self.top_k, self.renormalize)
        return ops.moe_experts(x, self.gate_up, self.down, weights, experts, self.exact)


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward (dense or sparse), with the residual stream carried beside the input."""

    def __init__(self, attention: Attention, feed_forward: MLP | MoE, width: int, eps: float) -> None:
        super().__init__()
        self.input_norm = RMSNorm(width, eps)
        self.attention = attention
        self.post_attention_norm = RMSNorm(width, eps)
        self.feed_forward = feed_forward

    def forward(
        self, x: Tensor, delta: Tensor | None, positions: Tensor, cos_sin: Tensor, layer: int, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Return (residual stream, update still to be added), so that every addition fuses with the norm after it."""
        if delta is None:
            normed = self.input_norm(x)
        else:
            normed, x = self.input_norm.add(delta, x)
        normed, x = self.post_attention_norm.add(self.attention(normed, positions, cos_sin, layer, attend), x)
        return x, self.feed_forward(normed)


class DecoderStack(nn.ModuleList):
    """The layers of a decoder or a head, run in order."""

    def __iter__(self) -> Iterator[DecoderLayer]:
        """The layers, typed."""
        return cast("Iterator[DecoderLayer]", super().__iter__())

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        attend: Attend,
        norm: RMSNorm,
        tap_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """Return (norm of the last residual stream [T, C], the streams after `tap_layers` side by side [T, K·C])."""
        delta: Tensor | None = None
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(self):
            x, update = layer(x, delta, positions, cos_sin, index, attend)
            if index in tap_layers:
                taps[index] = x + update
            delta = update
        hidden = norm(x) if delta is None else norm.add(delta, x)[0]
        tapped = torch.cat([taps[index] for index in tap_layers], dim=-1) if tap_layers else x.new_empty(len(x), 0)
        return hidden, tapped
