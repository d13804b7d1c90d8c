"""The demo's name, and the draft head for it that ships here."""

from __future__ import annotations

from pathlib import Path

DEMO_NAME = "SmolLM2-135M-Instruct"
HEAD_FOLDER = Path(__file__).parent / "demo_head"


def demo_head() -> Path | None:
    """The folder of the head for the demo model, None when this installation has none."""
    files = ("config.json", "model.safetensors")
    return HEAD_FOLDER if all((HEAD_FOLDER / name).is_file() for name in files) else None
