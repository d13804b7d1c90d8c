"""Heads that differ in one thing, trained on the same data for the same steps with the same seed, and compared.

    OUTPUT/features/        target features, shared by all variants with the same rows and taps
    OUTPUT/NAME/            a variant's run: head/, metrics.jsonl, training.png; trained.json when it is finished
    OUTPUT/NAME/replayed.json, decoded.json   its measures
    OUTPUT/ablation.md, ablation.json, ablation.png

What is there under the same settings is not made again, so a killed run goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from jetflow_core import host
from jetflow_core.heads import load_head
from jetflow_core.model import Decoder, build_model
from jetflow_core.weights import open_checkpoint
from jetflow_train.checkpoint import checkpoints
from jetflow_train.config import AblateOptions, EvaluateOptions, HeadOptions
from jetflow_train.data import Row, is_held_out, read_rows, rows_fingerprint, spread
from jetflow_train.evaluate import PACKAGES, evaluate, read_workloads
from jetflow_train.features import RowFeatures
from jetflow_train.files import replace_file
from jetflow_train.heads import head_shape, target_tables, training_dtype
from jetflow_train.plots import can_plot, draw_training
from jetflow_train.recipe import Progress, new_trainer, run_training
from jetflow_train.record import dataset_of
from jetflow_train.simulate import answer_features, head_rules, replayed_rounds
from jetflow_train.targets import target_path, target_tokenizer
from jetflow_train.variants import CORPUS, MATCHED, REGENERATED, VARIANTS, Variant

Rounds = dict[int, list[tuple[int, int]]]  # budget: (tokens committed, target passes) of every row
PLACES = {"output", "features", "data", "device", "checkpoint_minutes", "evaluate_minutes", "keep", "tensorboard"}


@dataclass(frozen=True)
class Outcome:
    """One variant: its options, how training ended, and τ replayed per data set and decoded per workload."""

    variant: Variant
    options: HeadOptions
    trained: dict[str, Any]
    replayed: dict[str, Rounds]
    decoded: dict[str, Any] | None  # an `Evaluation` as JSON


@dataclass(frozen=True)
class Comparison:
    """All variants, in order, with what they have in common."""

    facts: dict[str, str | int | bool]
    base: HeadOptions
    rows: dict[str, int]  # of every kind of data
    outcomes: list[Outcome]


def ablate(options: AblateOptions, base: HeadOptions, progress: Progress) -> Comparison:
    """Load the target and rows, then train and measure every variant. `base` holds what the heads share.

    Raises ValueError for unknown variants, heads that the target cannot have, data and workloads that do not fit, no held-out
    greedy rows, and results in the output folder that were made with other settings.
    """
    base = replace(
        base,
        target=options.target,
        device=options.device,
        steps=None if options.minutes else options.steps,
        minutes=options.minutes,
        evaluate_minutes=1e9,  # the end is soon enough
        keep=1,
    )
    variants = chosen(options, base)
    checkpoint = open_checkpoint(target_path(options.target))
    for variant in variants:
        try:
            head_shape(checkpoint.config, variant_options(variant, base))
        except ValueError as error:
            raise ValueError(f"variant {variant.name}: {error}; name the others with --only") from error
    if options.decode:
        asked, positions = decoding_options(options, Path(options.output)), checkpoint.config.max_position_embeddings
        read_workloads(target_tokenizer(checkpoint), asked, positions)
    model = build_model(checkpoint, base.target_dtype, options.device)
    limit = min(base.max_length, model.config.max_position_embeddings)
    files = {REGENERATED: options.regenerated} | ({CORPUS: options.corpus} if options.corpus else {})
    rows = {
        kind: spread(read_rows([Path(file) for file in names], model.config.vocab_size, limit, checkpoint.tokenizer))
        for kind, names in files.items()
    }
    rows |= matched_rows(rows[REGENERATED], rows.get(CORPUS, []))
    probes = held_out_rows(rows[REGENERATED], base.held_out, options.rows)
    outcomes: list[Outcome] = []
    bench = _Bench(model, probes, options, base, progress)
    for number, variant in enumerate(variants, start=1):
        progress.stage(f"[{number}/{len(variants)}] {variant.name}")
        outcomes.append(bench.outcome(variant, rows[variant.data]))
    facts = {"target": options.target or "demo model"}
    facts |= host.describe(model.embed.device, training_dtype(base.dtype, model.embed.device), PACKAGES)
    return Comparison(facts, base, {kind: len(each) for kind, each in rows.items()}, outcomes)


def chosen(options: AblateOptions, base: HeadOptions) -> list[Variant]:
    """The variants to compare: those asked for, without what equals the base or has no data.

    Raises ValueError for names that are unknown or need corpus data that is not given.
    """
    known = {variant.name: variant for variant in VARIANTS}
    if unknown := set(options.only) - known.keys():
        raise ValueError(f"variant {min(unknown)!r} is unknown: there are {', '.join(known)}")
    needy = [name for name in options.only if known[name].data != REGENERATED]
    if needy and not options.corpus:
        raise ValueError(f"variant {needy[0]!r} needs answers that are not the target's own: give --corpus")
    return [
        variant
        for name, variant in known.items()
        if (not options.only or name in options.only)
        and (options.corpus or variant.data == REGENERATED)
        and (variant.name == "base" or variant.data != REGENERATED or variant_options(variant, base) != base)
    ]


def variant_options(variant: Variant, base: HeadOptions) -> HeadOptions:
    """The base with the variant's changes."""
    return replace(base, **variant.changes)


def matched_rows(regenerated: Sequence[Row], corpus: Sequence[Row]) -> dict[str, list[Row]]:
    """Of the prompts in both, the target's own coldest answer (MATCHED) and one other answer (CORPUS); {} without a corpus.

    Raises ValueError when they have no prompt in common.
    """
    if not corpus:
        return {}
    own = {row.prompt_key: row for row in reversed(regenerated)}  # `spread` puts the coldest answer first
    other = {row.prompt_key: row for row in reversed(corpus)}
    common = own.keys() & other.keys()
    if not common:
        raise ValueError(
            "the corpus answers none of the regenerated prompts; regenerate with its very prompts, suffix included"
        )
    pairs = ((MATCHED, own), (CORPUS, other))
    return {kind: spread([row for key, row in each.items() if key in common]) for kind, each in pairs}


def decoding_options(options: AblateOptions, head: Path) -> EvaluateOptions:
    """How `head` decodes workloads."""
    return EvaluateOptions(
        target=options.target,
        device=options.device,
        head=str(head),
        prompts=options.prompts,
        budgets=options.budgets,
        limit=options.limit,
        max_tokens=options.max_tokens,
    )


def held_out_rows(rows: Sequence[Row], held_out: float, count: int) -> dict[str, list[Row]]:
    """Up to `count` held-out greedy rows of each data set. Raises ValueError when there is none at all."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.temperature == 0 and is_held_out(row, held_out) and len(row.output_ids) > 1:
            found.setdefault(dataset_of(row.id), []).append(row)
    if not found:
        raise ValueError(
            "no held-out greedy rows to compare on: regenerate at temperature 0 too, or raise held_out in [head]"
        )
    return {name: each[:count] for name, each in sorted(found.items())}


class _Bench:
    """Trains and measures one variant after another."""

    def __init__(
        self,
        model: Decoder,
        probes: Mapping[str, Sequence[Row]],
        options: AblateOptions,
        base: HeadOptions,
        progress: Progress,
    ) -> None:
        self._model, self._probes, self._options, self._base, self._progress = model, probes, options, base, progress
        self._tables: tuple[Tensor, Tensor] = target_tables(model, training_dtype(base.dtype, model.embed.device))
        self._features: dict[tuple[int, ...], dict[str, list[RowFeatures]]] = {}

    def outcome(self, variant: Variant, rows: list[Row]) -> Outcome:
        """Everything about `variant`, made now or found."""
        options = variant_options(variant, self._base)
        folder = Path(self._options.output) / variant.name
        features = Path(self._options.output) / "features" / f"{variant.data}-{options.taps}"
        run = replace(options, output=str(folder), features=str(features))
        settings = {key: value for key, value in asdict(run).items() if key not in PLACES}
        identity = _plain({**settings, "rows": rows_fingerprint(rows)})
        if changed := _other(folder / "trained.json", identity):
            raise ValueError(
                f"{folder}: that head was trained with another {changed}; name another output folder, or delete this one"
            )
        trained = _once(folder / "trained.json", identity, lambda: self._train(run, rows))
        for path in checkpoints(folder):  # a finished run needs none, and each is several times the head
            path.unlink()
        probes = rows_fingerprint([row for each in self._probes.values() for row in each])
        seen = {
            "head": identity,
            "probes": probes,
            "budgets": self._options.budgets,
            "tokens": self._options.row_tokens,
        }
        replayed = _once(folder / "replayed.json", _plain(seen), lambda: self._replay(folder / "head"))
        decoded = self._decoded(folder, identity) if self._options.decode else None
        return Outcome(variant, options, trained, _rounds(replayed), decoded)

    def _train(self, options: HeadOptions, rows: list[Row]) -> dict[str, Any]:
        trainer = new_trainer(self._model, rows, options, self._progress)
        last: dict[str, Any] = {}
        speeds: list[float] = []

        def tell(trainer: Any, record: dict[str, Any] | None) -> None:
            if record is not None:
                last.update(record)
                speeds.extend([record["blocks_per_second"]] if "blocks_per_second" in record else [])
            self._progress.training(trainer, record)

        run_training(trainer, replace(self._progress, training=tell))
        if can_plot():
            draw_training(trainer.output)
        keys = ("step", "blocks", "elapsed", "held_out")
        return {key: last.get(key) for key in keys} | {
            "blocks_per_second": sum(speeds) / len(speeds) if speeds else None
        }

    def _replay(self, folder: Path) -> dict[str, Rounds]:
        head = load_head(folder, *self._tables)
        head.pack()
        options, taps = self._options, head.config.target_layer_ids
        if taps not in self._features:
            self._features[taps] = {
                name: [answer_features(self._model, row, taps) for row in rows] for name, rows in self._probes.items()
            }
        return {
            name: replayed_rounds(head, items, head_rules(head), options.budgets, options.row_tokens)
            for name, items in self._features[taps].items()
        }

    def _decoded(self, folder: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
        asked = decoding_options(self._options, folder / "head")
        seen = _plain({"head": identity, **asdict(asked)})
        return _once(folder / "decoded.json", seen, lambda: asdict(evaluate(asked, self._progress.decoding)))


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON reads it back, so that it can be compared with what a file holds."""
    return json.loads(json.dumps(value))


def _once(path: Path, identity: dict[str, Any], make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The value in the file `path` when it was made for `identity`, else a new one, which is put there."""
    found = _read(path)
    if found is not None and found["identity"] == identity:
        return found["value"]
    value = _plain(make())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (json.dumps({"identity": identity, "value": value}, indent=1) + "\n").encode())
    except OSError as error:
        raise ValueError(f"{path}: cannot write the result ({error})") from error
    return value


def _other(path: Path, identity: Mapping[str, Any]) -> str | None:
    """The first setting in which the result at `path` differs; None when it does not or there is none."""
    found = _read(path)
    if found is None:
        return None
    known: Mapping[str, Any] = found["identity"]
    return next((key for key in (*identity, *known) if known.get(key) != identity.get(key)), None)


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot read this result ({error}); delete it to make it again") from error
    if not isinstance(found, dict) or {"identity", "value"} - found.keys():
        raise ValueError(f"{path}: cannot read this result (not one of an ablation); delete it to make it again")
    return found


def _rounds(value: Mapping[str, Mapping[str, Sequence[Sequence[int]]]]) -> dict[str, Rounds]:
    return {
        name: {int(budget): [(tokens, passes) for tokens, passes in pairs] for budget, pairs in each.items()}
        for name, each in value.items()
    }
