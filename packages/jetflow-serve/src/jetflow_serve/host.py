"""What a measurement was made on: a speed-up without its hardware, dtype and versions says nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jetflow_core import host

if TYPE_CHECKING:
    from jetflow_core.llm import LLM

PACKAGES = ("jetflow-serve", "jetflow-core", "jetflow-triton", "torch")


def describe(llm: LLM) -> dict[str, str | int | bool]:
    """Hardware, dtype and versions behind `llm`'s numbers, in print order."""
    return host.describe(llm.engine.device, llm.engine.model.embed.dtype, PACKAGES)
