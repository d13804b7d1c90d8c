"""Which target an option names, and what it is asked through."""

from __future__ import annotations

from pathlib import Path

from jetflow_core.demo import demo_model
from jetflow_core.tokenizer import Tokenizer
from jetflow_core.weights import Checkpoint


def target_path(target: str | None) -> str | Path:
    """The target to load: what the option says, or the demo model."""
    return demo_model() if target is None else target


def target_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a target that prompts are for. Raises ValueError when it has none."""
    if checkpoint.tokenizer is None:
        raise ValueError(
            f"{checkpoint.path}: this target has no tokenizer.json, without which it cannot be asked anything"
        )
    return checkpoint.tokenizer
