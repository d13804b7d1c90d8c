"""The commands as functions: train a head from rows, and the whole recipe in one go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jetflow_core.model import Decoder, build_model
from jetflow_core.weights import open_checkpoint
from jetflow_train.checkpoint import export_head
from jetflow_train.config import EvaluateOptions, HeadOptions, RegenerateOptions
from jetflow_train.data import Row, read_rows, spread
from jetflow_train.distributed import ALONE, Ranks, joined
from jetflow_train.evaluate import Evaluation, evaluate, read_workloads
from jetflow_train.features import Features, OnlineFeatures, build_features
from jetflow_train.files import check_folder
from jetflow_train.heads import (
    continued_head,
    head_config,
    head_shape,
    new_head,
    target_mark,
    target_tables,
    training_dtype,
)
from jetflow_train.record import read_record, training_record, write_record
from jetflow_train.regenerate import regenerate
from jetflow_train.targets import target_path, target_tokenizer
from jetflow_train.tensorboard import require_tensorboard, scalar_log
from jetflow_train.trainer import MAIN_BUDGET, Trainer


@dataclass(frozen=True)
class Progress:
    """Where the commands tell of their progress; a silent one by default."""

    stage: Callable[[str], object] = lambda text: None
    rows: Callable[[int, int, int], object] = lambda done, total, tokens: None
    note: Callable[[str], object] = lambda text: None
    features: Callable[[int, int], object] = lambda done, total: None
    training: Callable[[Trainer, dict[str, Any] | None], object] = lambda trainer, record: None
    decoding: Callable[[int, int], object] = lambda done, total: None


def prepare(options: HeadOptions, progress: Progress, ranks: Ranks = ALONE) -> Trainer:
    """Target, rows, features and a fresh head (or `init`), ready to run or to resume from the output folder's checkpoint."""
    if options.tensorboard:
        require_tensorboard()  # before the work, not after it
    if ranks.leads:
        check_folder(Path(options.output))
    checkpoint = open_checkpoint(target_path(options.target))
    model = build_model(checkpoint, options.target_dtype, ranks.device(options.device))
    limit = min(options.max_length, model.config.max_position_embeddings)
    files = [Path(file) for file in options.data]
    rows = spread(read_rows(files, model.config.vocab_size, limit, checkpoint.tokenizer))
    return new_trainer(model, rows, options, progress, ranks)


def new_trainer(
    model: Decoder, rows: list[Row], options: HeadOptions, progress: Progress, ranks: Ranks = ALONE
) -> Trainer:
    """Features of `rows` and a fresh head (or `init`) for `model`: a run that has not begun."""
    config = head_config(model, options)
    dtype = training_dtype(options.dtype, model.embed.device)
    if options.init is None:
        head = new_head(model, config, rows, options.seed, dtype)
    else:
        head = continued_head(options.init, model, config, dtype)
        known = read_record(Path(options.init)) or {}
        if known.get("target_mark", target_mark(model.embed)) != target_mark(model.embed):
            progress.note(f"note: init {options.init} was trained for another target, {known['target']}")
    wanted = model, rows, config.target_layer_ids, options.teacher_top
    if options.online:
        store: Features = OnlineFeatures(*wanted, ranks)
    else:
        folder = Path(options.features) if options.features else Path(options.output) / "features"
        store = build_features(folder, *wanted, _counter(progress, rows), ranks)
    return Trainer(head, target_tables(model, dtype), store, rows, options, ranks)


def train_head(options: HeadOptions, progress: Progress) -> Path | None:
    """Train, together with the other processes that `torchrun` started; the folder of the exported head (None on all
    ranks but the first).
    """
    with joined(options.device) as ranks:
        if not ranks.leads:
            prepare(options, Progress(), ranks).run()
            return None
        return run_training(prepare(options, progress, ranks), progress)


def run_training(trainer: Trainer, progress: Progress) -> Path:
    """Run `trainer` to its end; the head's folder, with the record of what it was trained on and how it did."""
    head, options = trainer.output / "head", trainer.options
    recorded = False

    def tell(trainer: Trainer, record: dict[str, Any] | None) -> None:
        nonlocal recorded
        measured = record if record is not None and "loss" not in record else None
        if measured is not None or not recorded:  # not before a step was made: the folder may be another run's
            made = training_record(trainer.rows, options, measured, trainer.target)
            write_record(head, made)
            if measured is not None and measured["best_tau"] == measured.get("replayed_tau", {}).get(MAIN_BUDGET):
                write_record(trainer.output / "best", made)
            recorded = True
        if record is not None:
            log(record)
        progress.training(trainer, record)

    with scalar_log(trainer.output / "tensorboard", options.tensorboard) as log:
        trainer.run(tell)
    return head


def run_recipe(
    regenerating: RegenerateOptions, training: HeadOptions, evaluating: EvaluateOptions, progress: Progress
) -> tuple[Evaluation, Evaluation, Path]:
    """Regenerate, train and evaluate; (evaluation of the untrained head at the first budget, of the trained one, its folder).

    Raises ValueError as its parts do; for a head that does not fit the target, and workloads that cannot be decoded, before
    anything is made.
    """
    # What cannot be is said before the work.
    checkpoint = open_checkpoint(target_path(training.target))
    head_shape(checkpoint.config, training)
    read_workloads(target_tokenizer(checkpoint), evaluating, checkpoint.config.max_position_embeddings)
    regenerate(regenerating, progress.rows, progress.note)
    trainer = prepare(training, progress)
    untrained = trainer.output / "untrained-head"
    export_head(untrained, trainer.head)  # a checkpoint is loaded later, by run
    head = run_training(trainer, progress)
    del trainer
    drafting = next((budget for budget in evaluating.budgets if budget), 0)
    before = replace(evaluating, head=str(untrained), budgets=tuple(dict.fromkeys((0, drafting))), output=None)
    return evaluate(before, progress.decoding), evaluate(evaluating, progress.decoding), head


def _counter(progress: Progress, rows: list[Row]) -> Callable[[], None]:
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        progress.features(done, len(rows))

    return count
