"""The commands as functions: train a head from rows, and the whole recipe in one go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jetflow_core.model import load_model
from jetflow_train.checkpoint import export_head
from jetflow_train.config import EvaluateOptions, HeadOptions, RegenerateOptions
from jetflow_train.data import Row, read_rows, spread
from jetflow_train.evaluate import Measurement, evaluate
from jetflow_train.features import build_features
from jetflow_train.heads import head_config, new_head, target_tables, training_dtype
from jetflow_train.regenerate import regenerate
from jetflow_train.targets import target_path
from jetflow_train.trainer import Trainer


@dataclass(frozen=True)
class Progress:
    """Where the commands tell of their progress; a silent one by default."""

    rows: Callable[[int, int, int], object] = lambda done, total, tokens: None
    features: Callable[[int, int], object] = lambda done, total: None
    training: Callable[[Trainer, dict[str, Any] | None], object] = lambda trainer, record: None
    decoding: Callable[[int, int], object] = lambda done, total: None


def prepare(options: HeadOptions, progress: Progress) -> Trainer:
    """Target, rows, features and a fresh head, ready to run (or to resume from the output folder's checkpoint)."""
    model = load_model(target_path(options.target), "float32", options.device)
    limit = min(options.max_length, model.config.max_position_embeddings)
    rows = spread(read_rows([Path(file) for file in options.data], model.config.vocab_size, limit))
    config = head_config(model, options)
    dtype = training_dtype(options.dtype, model.embed.device)
    head = new_head(model, config, rows, options.seed, dtype)
    store = build_features(
        Path(options.features) if options.features else Path(options.output) / "features",
        model,
        rows,
        config.target_layer_ids,
        options.teacher_top,
        _counter(progress, rows),
    )
    return Trainer(head, target_tables(model, dtype), store, rows, options)


def train_head(options: HeadOptions, progress: Progress) -> Path:
    """Train, and return the folder of the exported head."""
    trainer = prepare(options, progress)
    trainer.run(progress.training)
    return trainer.output / "head"


def run_recipe(
    regenerating: RegenerateOptions, training: HeadOptions, evaluating: EvaluateOptions, progress: Progress
) -> tuple[list[Measurement], list[Measurement], Path]:
    """Regenerate, train and evaluate; (measurements before training, after it, the head's folder)."""
    regenerate(regenerating, progress.rows)
    trainer = prepare(training, progress)
    untrained = trainer.output / "untrained-head"
    export_head(untrained, trainer.head)  # a checkpoint is loaded later, by run
    trainer.run(progress.training)
    del trainer
    budgets = tuple(budget for budget in evaluating.budgets if budget)
    before = evaluate(replace(evaluating, head=str(untrained), budgets=budgets[:1], output=None), progress.decoding)
    after = evaluate(evaluating, progress.decoding)
    return before, after, Path(training.output) / "head"


def _counter(progress: Progress, rows: list[Row]) -> Callable[[], None]:
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        progress.features(done, len(rows))

    return count
