"""Rotary position tables with linear, YaRN and Llama 3 scaling.

Sources: RoFormer (rotary embedding), "YaRN: Efficient Context Window Extension" (Peng et al.) sections 3.2–3.4; the parameter
names and defaults are those of Hugging Face configurations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jetflow_core.config import RopeConfig


def _yarn_frequencies(rope: RopeConfig, head_dim: int, frequencies: Tensor, max_positions: int) -> Tensor:
    """Blend interpolated (long wavelengths) and original (short wavelengths) frequencies."""
    original = rope.original_max_position_embeddings or max_positions

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)
    interpolate = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return frequencies / rope.factor * interpolate + frequencies * (1 - interpolate)


def _llama3_frequencies(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3's scaling: short wavelengths kept, long ones interpolated, a linear blend between."""
    assert rope.original_max_position_embeddings is not None
    rotations = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequencies / rope.factor * (1 - keep) + frequencies * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Factor on cos and sin that stands for YaRN's attention temperature."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def rope_table(rope: RopeConfig, head_dim: int, positions: int, max_position_embeddings: int) -> Tensor:
    """Return the float32 table [positions, head_dim] whose rows are cat(cos, sin) of the half-rotation layout.

    `max_position_embeddings` stands in for YaRN's original length where the configuration names none. Always computed in
    float32: bfloat16 frequencies lose long-range positions.
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    scale = 1.0
    if rope.type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.type == "yarn":
        frequencies = _yarn_frequencies(rope, head_dim, frequencies, max_position_embeddings)
        scale = _yarn_attention_factor(rope)
    elif rope.type == "llama3":
        frequencies = _llama3_frequencies(rope, frequencies)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1)
