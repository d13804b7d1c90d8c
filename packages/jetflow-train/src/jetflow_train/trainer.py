"""The training loop: blocks in, a divergence on conditioned and marginal logits, AdamW, checkpoints, held-out measures.

Everything random is drawn from generators keyed by (seed, epoch, row), so the position is all that a resumed run needs
to go on with the same blocks. The schedule follows the share of the run that is done: steps of `steps`, or minutes of
`minutes`. A step's documents are dealt out to ranks and micro-batches, and its loss is one weighted mean over all of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from jetflow_core.heads import Head, load_head
from jetflow_train.blocks import (
    BlockBatch,
    pack_blocks,
    sample_anchors,
    sample_lengths,
    sample_prefixes,
)
from jetflow_train.calibration import calibrate
from jetflow_train.checkpoint import GO_ON, checkpoints, export_head, load_checkpoint, save_checkpoint, unreadable
from jetflow_train.config import HeadOptions
from jetflow_train.data import Row
from jetflow_train.distributed import ALONE, Ranks, deal
from jetflow_train.features import Features, RowFeatures
from jetflow_train.files import append_line, check_folder, cut_partial_line, sole_use
from jetflow_train.heads import set_draft_temperature, target_mark
from jetflow_train.losses import Divergence, SlotAcceptance, draft_index, slot_hits
from jetflow_train.masters import MasterWeights
from jetflow_train.order import DataOrder, Draw, Position
from jetflow_train.simulate import forced_metrics, head_rules, replayed_tau
from jetflow_train.states import slot_states
from jetflow_triton.distill import Kind

FORCED_ROWS, FORCED_ANCHORS = 24, 8
REPLAYED_ROWS, REPLAYED_TOKENS, REPLAYED_BUDGETS = 8, 48, (8, 32)
CALIBRATED_TOKENS = 96  # of the same rows: a temperature is fitted on every node that they draft
MAIN_BUDGET = REPLAYED_BUDGETS[-1]  # `best/` is the best head at this one
STEPS_PER_LOG = 20
TABLE = "target's table"  # in a checkpoint, among the settings that must not change
STEPS_PER_ACCEPTANCE = 8  # under D-PACE: a measurement costs another product with the LM head


@dataclass(frozen=True)
class StepTotals:
    """What one step's blocks add up to, over ranks and micro-batches, before it is divided by `weight`."""

    conditional: float
    marginal: float
    weight: float
    hits: Tensor | None  # for `SlotAcceptance`, when it was measured


def learning_rate(progress: float, options: HeadOptions) -> float:
    """The rate at `progress` in [0, 1]: a linear warm-up, then a cosine to `final_rate` of the peak."""
    if progress < options.warmup:
        return options.learning_rate * max(progress / options.warmup, 0.01)
    done = min((progress - options.warmup) / max(1 - options.warmup, 1e-9), 1.0)
    floor = options.final_rate
    return options.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


class Trainer:
    """Trains `head` on the rows of `store` that are not held out. `rows` are the store's rows, in order.

    `tables` are the target's input table and LM head [V, C] in the head's dtype; optimiser and checkpoints keep float32 master
    weights beside a head of another dtype. All `ranks` step together; the first of them writes and measures.
    Raises ValueError for an output folder that cannot be written or whose checkpoint belongs to another run.
    """

    def __init__(
        self,
        head: Head,
        tables: tuple[Tensor, Tensor],
        store: Features,
        rows: list[Row],
        options: HeadOptions,
        ranks: Ranks = ALONE,
    ) -> None:
        self.head, self.store, self.rows, self.options, self.ranks = head, store, rows, options, ranks
        self.output = Path(options.output)
        self.rules = replace(head_rules(head), gamma=options.gamma, truncate=options.truncate, prefix=options.prefix)
        self.position = Position()
        self._whole = True  # no step is half done
        self._device = head.norm.weight.device
        self._index = draft_index(head.draft_vocab, head.config.vocab_size, self._device)
        self._tables, lm_head = tables, tables[1]
        self.target = target_mark(tables[0])
        self._lm_rows = lm_head if head.draft_vocab is None else lm_head[head.draft_vocab]
        self._divergence = Divergence(
            cast("Kind", options.loss), options.draft_temperature, options.teacher_temperature
        )
        self.acceptance = SlotAcceptance(options.block_size - 1, options.gamma)
        self._masters = MasterWeights({name: p for name, p in head.named_parameters() if p.requires_grad})
        self.optimizer = _optimizer(self._masters, options)
        self.order = DataOrder(rows, options, lambda: int(ranks.agree(store.refresh())))
        self._log = _StepLog()
        self._clock = time.monotonic()
        check_folder(self.output)

    # -- the run ------------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        """The share of the run that is done."""
        if self.options.steps is not None:
            return self.position.step / self.options.steps
        assert self.options.minutes is not None
        return self.position.elapsed / (60 * self.options.minutes)

    def run(self, report: Callable[[Trainer, dict[str, Any] | None], object] = lambda trainer, record: None) -> None:
        """Train to the end; resumes from the output folder's newest checkpoint.

        `report` is called after every step, with a metrics record when there is one.

        An interrupt (KeyboardInterrupt) saves a checkpoint before it goes on. Raises ValueError when another run writes there.
        """
        with sole_use(self.output) if self.ranks.leads else nullcontext():
            self._run(report)

    def _run(self, report: Callable[[Trainer, dict[str, Any] | None], object]) -> None:
        self.resume()
        self.ranks.share(self._masters.named.values())
        self._masters.publish()
        self._clock = time.monotonic() - self.position.elapsed
        last_save = last_evaluation = self.position.elapsed
        try:
            while self.progress < 1:
                record = self.step()
                report(self, None if record is None else self._record(record))
                if self.position.elapsed - last_save > 60 * self.options.checkpoint_minutes:
                    self.save()
                    last_save = self.position.elapsed
                if self.position.elapsed - last_evaluation > 60 * self.options.evaluate_minutes:
                    self._measure(report)
                    last_evaluation = self.position.elapsed
        except KeyboardInterrupt:
            if self._whole:  # else the last checkpoint is what a resumed run starts from
                self.save()
            raise
        self._measure(report)

    def step(self) -> dict[str, Any] | None:
        """One optimiser step; a metrics record every `STEPS_PER_LOG` of them.

        Raises ValueError, on all ranks, when loss or gradient is not finite.
        """
        began = time.perf_counter()
        rate = learning_rate(self.progress, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        draws, after = self.order.draw(self.position)
        totals = self._accumulate(draws)
        assert totals.weight > 0, "every block has a slot that counts"
        for gradient in self._masters.gradients():
            gradient.div_(totals.weight)
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters.named.values(), self.options.clip))
        conditional, marginal = totals.conditional / totals.weight, totals.marginal / totals.weight
        if not math.isfinite(norm):
            self._refuse(conditional + self.options.marginal_weight * marginal, norm, [draw.row for draw in draws])
        self._whole = False
        self.optimizer.step()
        self._masters.publish()
        if totals.hits is not None:
            self.acceptance.add(totals.hits)
        self.position = replace(after, elapsed=self.ranks.agree(self._elapsed()))
        self._whole = True
        self._log.add(conditional, marginal, norm, self.options.blocks, time.perf_counter() - began)
        return self._log.record(rate) if len(self._log) == STEPS_PER_LOG else None

    def _accumulate(self, draws: Sequence[Draw]) -> StepTotals:
        """Forward and backward of the step's blocks: gradients and totals are summed over micro-batches and ranks."""
        options, ranks = self.options, self.ranks
        measured = options.d_pace and self.position.step % STEPS_PER_ACCEPTANCE == 0
        hits = torch.zeros(2, options.block_size - 1, dtype=torch.float64)
        totals = torch.zeros(3, dtype=torch.float64)
        broken = torch.zeros(ranks.world, dtype=torch.float64)
        self._masters.clear_gradients()
        parts = deal([draw.count for draw in draws], ranks.world * options.accumulate)
        for part in parts[ranks.rank * options.accumulate : (ranks.rank + 1) * options.accumulate]:
            if not part:
                continue
            batch = self.pack([draws[item] for item in part])
            conditional, marginal, conditioned = self.losses(batch)
            (conditional + options.marginal_weight * marginal).backward()
            self._masters.collect_gradients()
            totals += torch.tensor([float(conditional.detach()), float(marginal.detach()), float(batch.weight.sum())])
            if measured:
                best = self._index[batch.teacher_ids[:, 0]]
                hits += slot_hits(conditioned.detach(), self._lm_rows, best, batch.depth, hits.shape[1])
        self.store.follow()
        broken[ranks.rank] = not totals.isfinite().all()
        ranks.add([totals, broken, hits, *self._masters.gradients()])
        if broken.any():
            bad = [part for number, part in enumerate(parts) if broken[number // options.accumulate]]
            self._refuse(math.nan, math.nan, [draws[item].row for part in bad for item in part])
        conditional, marginal, weight = totals.tolist()
        return StepTotals(conditional, marginal, weight, hits if measured else None)

    def _refuse(self, loss: float, norm: float, rows: Sequence[int]) -> None:
        names = ", ".join(self.rows[row].id for row in rows)
        raise ValueError(
            f"step {self.position.step}: loss {loss}, gradient norm {norm} on rows {names}; the run stops here, "
            "what it saved before is intact; lower the learning rate or look at these rows"
        )

    def losses(self, batch: BlockBatch) -> tuple[Tensor, Tensor, Tensor]:
        """(conditioned, marginal) divergences, each summed over the batch's slots by weight, and the conditioned states."""
        conditioned, hidden = slot_states(self.head, batch)
        teacher = self._index[batch.teacher_ids], batch.teacher_logp
        conditional = self._divergence(conditioned, self._lm_rows, *teacher, batch.weight)
        if hidden is conditioned or self.options.marginal_weight == 0:
            return conditional, conditional.new_zeros(()), conditioned
        return conditional, self._divergence(hidden, self._lm_rows, *teacher, batch.weight), conditioned

    def pack(self, draws: Sequence[Draw]) -> BlockBatch:
        """The blocks of `draws`."""
        rules = replace(self.rules, reach=self.acceptance.reach()) if self.options.d_pace else self.rules
        items: list[tuple[RowFeatures, Tensor, Tensor]] = []
        prefixes: list[Tensor] = []
        for draw in draws:
            features = self.store[draw.row]
            generator = torch.Generator().manual_seed(draw.seed)
            anchors = sample_anchors(features, draw.count, generator)
            ends = features.ends(anchors)
            known = sample_prefixes(anchors, ends, rules, generator)
            lengths = sample_lengths(anchors, ends, rules, generator, known)
            items.append((features, anchors, lengths))
            prefixes.append(known)
        return pack_blocks(items, rules, self._device, prefixes)

    # -- measures -----------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, Any]:
        """Held-out metrics: teacher-forced, and τ of greedy decoding replayed on held-out greedy rows, if there are any.

        From those rows the head's draft temperature is fitted too.
        """
        held = [row for row in range(len(self.store)) if self.order.held_out(row)]
        if not held:
            return {}
        forced = forced_metrics(
            self.head,
            [self.store[row] for row in held[:FORCED_ROWS]],
            self.rules,
            FORCED_ANCHORS,
            self.options.teacher_temperature,
        )
        greedy = [row for row in held if self.rows[row].temperature == 0][:REPLAYED_ROWS]
        if not greedy:
            return {"held_out": asdict(forced)}
        # Replayed with the exported head, read back as serving reads it: what is measured is what will be used.
        export_head(self.output / "head", self.head)
        drafting = load_head(self.output / "head", *self._tables)
        drafting.pack()
        items = [self.store[row] for row in greedy]
        tau = replayed_tau(drafting, items, self.rules, REPLAYED_BUDGETS, REPLAYED_TOKENS)
        values = {"held_out": asdict(forced), "replayed_tau": tau}
        fitted = calibrate(drafting, items, self.rules, MAIN_BUDGET, CALIBRATED_TOKENS)
        temperature = 1.0 if fitted is None else round(fitted.temperature, 3)
        set_draft_temperature(self.head, temperature)
        return values if fitted is None else values | {"calibration": asdict(fitted)}

    def _measure(self, report: Callable[[Trainer, dict[str, Any] | None], object]) -> None:
        """Evaluate, keep the head if it is the best so far, and save. The other ranks wait at their next sum."""
        if self.ranks.leads:
            values = self.evaluate()
            tau = values.get("replayed_tau", {}).get(MAIN_BUDGET, 0.0)
            if tau > self.position.best_tau:
                export_head(self.output / "best", self.head)
                self.position = replace(self.position, best_tau=tau)
            report(self, self._record(values))
        self.store.follow()
        self.save()

    def _record(self, values: dict[str, Any]) -> dict[str, Any]:
        record = asdict(self.position) | {"elapsed": round(self._elapsed(), 1)} | values
        if self.ranks.leads:
            path = self.output / "metrics.jsonl"
            try:
                with path.open("ab", buffering=0) as stream:
                    append_line(stream, path, cut_partial_line(path), json.dumps(record).encode() + b"\n")
            except OSError as error:
                raise ValueError(f"{path}: cannot write the metrics ({error}); {GO_ON}") from error
        return record

    def _elapsed(self) -> float:
        return time.monotonic() - self._clock

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the checkpoint, and the head as it is into `head/`; the first rank does."""
        if not self.ranks.leads:
            return
        state = {
            "options": self._identity(),
            "position": asdict(self.position),
            "head": {name: p.detach() for name, p in self._masters.named.items()},
            "optimizer": self.optimizer.state_dict(),
            "acceptance": self.acceptance.counts,
        }
        save_checkpoint(self.output, self.position.step, state, self.options.keep)
        export_head(self.output / "head", self.head)

    def resume(self) -> bool:
        """Load the output folder's newest checkpoint if there is one. Raises ValueError when it belongs to another run."""
        found = checkpoints(self.output)
        newest = int(self.ranks.agree(len(found)))
        if newest != len(found):
            raise ValueError(f"{self.output}: not every rank sees the checkpoints there; use a folder that all share")
        if not found:
            return False
        path = found[-1]
        state = load_checkpoint(path)
        # A run from before an option existed had its default, and one that did not note its target is trusted.
        had = {each.name: each.default for each in fields(HeadOptions)} | {TABLE: self.target} | state["options"]
        for key, value in self._identity().items():
            if had.get(key) != value:
                raise ValueError(
                    f"{path}: that run had {key} = {had.get(key)!r}, this one has {value!r}; "
                    "name another output folder, or delete the checkpoints"
                )
        try:
            self._masters.load(state["head"])
        except KeyError as error:
            raise ValueError(
                f"{path}: that run's head does not fit this target ({error.args[0]}); "
                "name another output folder, or delete the checkpoints"
            ) from error
        try:
            self.optimizer.load_state_dict(state["optimizer"])
            position = Position(**{each.name: state["position"][each.name] for each in fields(Position)})
        except (KeyError, ValueError) as error:
            raise unreadable(path, error) from error
        if position.epoch_rows > len(self.rows):
            raise ValueError(
                f"{path}: that run had {position.epoch_rows} rows, this one has {len(self.rows)}; "
                "give it the same data, or name another output folder"
            )
        self.acceptance.counts, self.position = state["acceptance"], position
        return True

    def _identity(self) -> dict[str, Any]:
        """Settings that must not change within a run."""
        free = {"output", "features", "online", "data", "target", "device", "minutes", "steps", "accumulate", "keep"}
        free |= {"checkpoint_minutes", "evaluate_minutes", "tensorboard"}
        values = {key: value for key, value in asdict(self.options).items() if key not in free}
        config, dtype = self.head.config, str(self.head.norm.weight.dtype).removeprefix("torch.")
        ids = self.head.draft_vocab
        vocabulary = None if ids is None else hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()[:16]
        return values | {
            "mask_token_id": self.rules.mask_token_id,
            "taps": list(config.target_layer_ids),
            "dtype": dtype,
            "draft vocabulary": vocabulary,
            TABLE: self.target,
        }


class _StepLog:
    """Losses, norms and times of the steps since the last metrics record."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, float, float, int, float]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, conditional: float, marginal: float, norm: float, blocks: int, seconds: float) -> None:
        self._steps.append((conditional, marginal, norm, blocks, seconds))

    def record(self, rate: float) -> dict[str, Any]:
        """The record of the steps so far, which are then forgotten."""
        conditional, marginal, norm, blocks, seconds = zip(*self._steps, strict=True)
        self._steps = []
        count = len(conditional)
        return {
            "loss": sum(conditional) / count,
            "marginal_loss": sum(marginal) / count,
            "grad_norm": sum(norm) / count,
            "learning_rate": rate,
            "blocks_per_second": sum(blocks) / sum(seconds),
        }


def _optimizer(masters: MasterWeights, options: HeadOptions) -> torch.optim.AdamW:
    matrices = [p for p in masters.named.values() if p.ndim > 1]
    vectors = [p for p in masters.named.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)
