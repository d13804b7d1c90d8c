"""Which model, head, drafter and budget the command line asks for, and how they are loaded."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jetflow_core.budget import Budget
from jetflow_core.demo import demo_model
from jetflow_core.engine import DrafterKind, EngineConfig
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
    "draft_passes",
    "draft_depth",
    "draft_cutoff",
    "draft_temperature",
)


@dataclass(frozen=True)
class ModelChoice:
    """A model, what drafts for it and its head; `note` is what the user should know about the choice."""

    model: str
    head: str | None
    budget: Budget
    name: str
    note: str | None = None
    drafter: DrafterKind = "auto"

    @property
    def drafts_by(self) -> str:
        """Who drafts, for a reader: the head's name, "lookup", or both."""
        return {"lookup": "lookup", "head+lookup": f"head {self.head} and lookup"}.get(
            self.drafter, f"head {self.head}"
        )


def choose_model(
    model: str | None,
    head: str | None,
    budget: Budget | None,
    name: str | None = None,
    drafter: DrafterKind | None = None,
) -> ModelChoice:
    """Fill in what was left out: the demo, its head, and where something drafts a budget that follows the load.

    Raises ValueError when drafting is asked for without a drafter, a head for a drafter that has none or without one that it
    needs, and when the demo is not installed.
    """
    note, drafter = None, drafter or "auto"
    if model is None and head is None and drafter != "lookup":
        shipped = demo_head()
        head = str(shipped) if shipped else None
        if shipped is None and drafter == "auto":
            note = "this installation has no draft head for the demo model: decoding without speculation (budget 0)"
    _check_drafter(drafter, head, budget)
    path = str(demo_model()) if model is None else model
    served = name or (DEMO_NAME if model is None else _short_name(model))
    if budget is None:
        budget = "auto" if head or drafter == "lookup" else 0
    return ModelChoice(path, head, budget, served, note, drafter)


def _check_drafter(drafter: DrafterKind, head: str | None, budget: Budget | None) -> None:
    """Raise ValueError where drafter, head and budget do not go together."""
    if drafter == "lookup" and head is not None:
        raise ValueError("--drafter lookup uses no draft head: leave out --head, or use --drafter head+lookup")
    if drafter in ("head", "head+lookup") and head is None:
        raise ValueError(f"--drafter {drafter} needs a draft head: name one with --head, or use --drafter lookup")
    if drafter == "auto" and head is None and budget:
        raise ValueError(
            f"--budget {budget} needs a draft head: name one with --head, use --drafter lookup, or use --budget 0"
        )


def engine_config(choice: ModelChoice, options: Namespace) -> EngineConfig:
    """The budget and drafter of `choice` with the command line's limits. Raises ValueError for values out of range."""
    given = {name: getattr(options, name) for name in ENGINE_OPTIONS if getattr(options, name) is not None}
    return EngineConfig(budget=choice.budget, drafter=choice.drafter, **given)


def check_budgets(budgets: Sequence[int], options: Namespace) -> None:
    """Raise ValueError for `--budgets` beyond what one target pass of the engine takes, which would silently be cut."""
    tokens = options.max_batch_tokens or EngineConfig.max_batch_tokens
    if max(budgets, default=0) >= tokens:
        raise ValueError(
            f"--budgets {max(budgets)}: a target pass takes {tokens} tokens, so {tokens - 1} nodes beside the anchor at most; "
            "lower it, or raise --max-batch-tokens"
        )


def load(choice: ModelChoice, options: Namespace) -> LLM:
    """Load `choice` with the command line's dtype, device and limits. Raises ValueError."""
    return LLM.load(
        choice.model,
        head=choice.head,
        dtype=options.dtype,
        device=options.device,
        exact=options.exact,
        config=engine_config(choice, options),
    )


def _short_name(model: str) -> str:
    """A hub id as it is; of a path, the folder's or file's own name."""
    path = Path(model)
    return path.name.removesuffix(".gguf") if path.exists() else model
