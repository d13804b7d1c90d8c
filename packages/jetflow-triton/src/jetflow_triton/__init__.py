"""Kernels for tree speculative decoding: Triton on a GPU, a plain-torch twin elsewhere."""

from jetflow_triton.activation import silu_mul
from jetflow_triton.attention import tree_attention
from jetflow_triton.checks import debug_checks
from jetflow_triton.choice import accept_walk, sample
from jetflow_triton.distill import distill_loss
from jetflow_triton.exact_attention import tree_attention_exact
from jetflow_triton.kv import kv_move, kv_write
from jetflow_triton.linear import linear
from jetflow_triton.logprobs import topk_logprobs
from jetflow_triton.moe import moe_experts, moe_route
from jetflow_triton.norm import add_rms_norm, rms_norm
from jetflow_triton.rope import qk_norm_rope

__all__ = [
    "accept_walk",
    "add_rms_norm",
    "debug_checks",
    "distill_loss",
    "kv_move",
    "kv_write",
    "linear",
    "moe_experts",
    "moe_route",
    "qk_norm_rope",
    "rms_norm",
    "sample",
    "silu_mul",
    "topk_logprobs",
    "tree_attention",
    "tree_attention_exact",
]
