"""Which target an option names."""

from __future__ import annotations

from pathlib import Path

from jetflow_core.demo import demo_model


def target_path(target: str | None) -> str | Path:
    """The target to load: what the option says, or the demo model."""
    return demo_model() if target is None else target
