"""Which model, head and budget the command line asks for, and how they are loaded."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from jetflow_core.budget import Budget
from jetflow_core.demo import demo_model
from jetflow_core.engine import EngineConfig
from jetflow_core.llm import LLM
from jetflow_serve.demo import DEMO_NAME, demo_head

ENGINE_OPTIONS = (
    "page_size",
    "num_pages",
    "max_batch_tokens",
    "max_running",
    "max_model_len",
    "cache_gib",
    "prefix_cache",
)


@dataclass(frozen=True)
class ModelChoice:
    """A model and its draft head; `note` is what the user should know about the choice."""

    model: str
    head: str | None
    budget: Budget
    name: str
    note: str | None = None


def choose_model(model: str | None, head: str | None, budget: Budget | None, name: str | None = None) -> ModelChoice:
    """Fill in what was left out: the demo, its head, and where there is a head a budget that follows the load.

    Raises ValueError when drafting is asked for without a head, or the demo is not installed.
    """
    note = None
    if model is None and head is None:
        shipped = demo_head()
        head = str(shipped) if shipped else None
        if shipped is None:
            note = "this installation has no draft head for the demo model: decoding without speculation (budget 0)"
    if head is None and budget:
        raise ValueError(f"--budget {budget} needs a draft head: name one with --head, or use --budget 0")
    path = str(demo_model()) if model is None else model
    served = name or (DEMO_NAME if model is None else _short_name(model))
    if budget is None:
        budget = "auto" if head else 0
    return ModelChoice(path, head, budget, served, note)


def load(choice: ModelChoice, options: Namespace) -> LLM:
    """Load `choice` with the command line's dtype, device and limits. Raises ValueError."""
    given = {name: getattr(options, name) for name in ENGINE_OPTIONS if getattr(options, name) is not None}
    config = EngineConfig(budget=choice.budget, **given)
    return LLM.load(
        choice.model, head=choice.head, dtype=options.dtype, device=options.device, exact=options.exact, config=config
    )


def _short_name(model: str) -> str:
    """A hub id as it is; of a path, the folder's or file's own name."""
    path = Path(model)
    return path.name.removesuffix(".gguf") if path.exists() else model
