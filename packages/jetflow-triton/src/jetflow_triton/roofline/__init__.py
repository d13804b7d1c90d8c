"""What each op must cost at real shapes, and what our kernels' design adds: `python -m jetflow_triton.roofline`."""

from jetflow_triton.roofline.costs import OPS, Cost, Op
from jetflow_triton.roofline.shapes import B200, H100, H200, LOADS, MODELS, QWEN3_8B, QWEN3_30B_A3B, Device, Load, Model

__all__ = [
    "B200",
    "H100",
    "H200",
    "LOADS",
    "MODELS",
    "OPS",
    "QWEN3_8B",
    "QWEN3_30B_A3B",
    "Cost",
    "Device",
    "Load",
    "Model",
    "Op",
]
