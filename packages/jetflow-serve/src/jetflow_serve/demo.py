"""The demo's name, the draft head for it that ships here, and the node budgets where nobody says otherwise."""

from __future__ import annotations

from pathlib import Path

DEMO_NAME = "SmolLM2-135M-Instruct"
HEAD_FOLDER = Path(__file__).parent / "demo_head"
# Draft nodes a pass that cost little more than a single token on that hardware. A CPU without native bfloat16 products is
# bound by arithmetic much sooner.
GPU_BUDGET, NATIVE_BF16_BUDGET, PLAIN_CPU_BUDGET = 64, 16, 8


def demo_head() -> Path | None:
    """The folder of the head for the demo model, None when this installation has none."""
    files = ("config.json", "model.safetensors")
    return HEAD_FOLDER if all((HEAD_FOLDER / name).is_file() for name in files) else None
