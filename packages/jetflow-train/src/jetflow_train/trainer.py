"""The training loop: blocks in, forward KL on conditioned and marginal logits, AdamW, checkpoints, held-out measures.

Everything random is drawn from generators keyed by (seed, epoch, row), so the position (epoch, cursor) is all that a
resumed run needs to go on with the same blocks. The schedule follows the share of the run that is done: steps of
`steps`, or minutes of `minutes`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetflow_core.head import DraftHead
from jetflow_train.blocks import BlockBatch, BlockRules, block_hidden, pack_blocks, sample_anchors, sample_lengths
from jetflow_train.checkpoint import export_head, load_checkpoint, save_checkpoint
from jetflow_train.config import HeadOptions
from jetflow_train.data import Row, is_held_out
from jetflow_train.features import FeatureStore, RowFeatures
from jetflow_train.losses import draft_index, forward_kl, sparse_teacher
from jetflow_train.masters import MasterWeights
from jetflow_train.simulate import forced_metrics, replayed_tau

FORCED_ROWS, FORCED_ANCHORS = 24, 8
REPLAYED_ROWS, REPLAYED_TOKENS, REPLAYED_BUDGETS = 8, 48, (8, 32)
STEPS_PER_LOG = 20


@dataclass
class Position:
    """Where a run stands: everything but weights and optimiser that the next step depends on."""

    step: int = 0
    elapsed: float = 0.0  # seconds of the run so far, earlier sessions included
    epoch: int = 0
    epoch_rows: int = 0  # rows that were available when the epoch began
    cursor: int = 0  # next document in the epoch's order
    blocks: int = 0  # blocks seen


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
    weights beside a head of another dtype. Raises ValueError for an output folder that cannot be written or whose
    checkpoint belongs to another run.
    """

    def __init__(
        self, head: DraftHead, tables: tuple[Tensor, Tensor], store: FeatureStore, rows: list[Row], options: HeadOptions
    ) -> None:
        self.head, self.store, self.rows, self.options = head, store, rows, options
        self.output = Path(options.output)
        self.rules = BlockRules(
            options.block_size, head.config.mask_token_id, head.config.causal, options.gamma, options.truncate
        )
        self._device = head.norm.weight.device
        self._index = draft_index(head.draft_vocab, head.config.vocab_size, self._device)
        self._tables, lm_head = tables, tables[1]
        self._lm_rows = lm_head if head.draft_vocab is None else lm_head[head.draft_vocab]
        self._masters = MasterWeights({name: p for name, p in head.named_parameters() if p.requires_grad})
        matrices = [p for p in self._masters.named.values() if p.ndim > 1]
        vectors = [p for p in self._masters.named.values() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95), fused=True)
        self.position = Position()
        self._order: list[int] = []
        self._logged: list[tuple[float, float, float, int]] = []
        self._busy = 0.0
        self._clock = time.monotonic()
        try:
            self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{self.output}: cannot write the output folder ({error})") from error

    # -- the run ------------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        """The share of the run that is done."""
        if self.options.steps is not None:
            return self.position.step / self.options.steps
        assert self.options.minutes is not None
        return self._elapsed() / (60 * self.options.minutes)

    def run(self, report: Callable[[Trainer, dict[str, Any] | None], object] = lambda trainer, record: None) -> None:
        """Train to the end; resumes from the output folder's checkpoint.

        `report` is called after every step, with a metrics record when there is one.

        An interrupt (KeyboardInterrupt) saves a checkpoint before it goes on.
        """
        self.resume()
        self._clock = time.monotonic() - self.position.elapsed
        last_save = last_evaluation = self._elapsed()
        try:
            while self.progress < 1:
                record = self.step()
                report(self, None if record is None else self._record(record))
                if self._elapsed() - last_save > 60 * self.options.checkpoint_minutes:
                    self.save()
                    last_save = self._elapsed()
                if self._elapsed() - last_evaluation > 60 * self.options.evaluate_minutes:
                    report(self, self._record(self.evaluate()))
                    last_evaluation = self._elapsed()
        except KeyboardInterrupt:
            self.save()
            raise
        report(self, self._record(self.evaluate()))
        self.save()

    def step(self) -> dict[str, Any] | None:
        """One optimiser step; a metrics record every `STEPS_PER_LOG` of them."""
        rate = learning_rate(self.progress, self.options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        began = time.perf_counter()
        batch = self.next_batch()
        conditional, marginal = self.losses(batch)
        loss = conditional + self.options.marginal_weight * marginal
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._masters.collect_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self._masters.named.values(), self.options.clip)
        value = float(loss.detach())
        if not (math.isfinite(value) and math.isfinite(float(norm))):
            names = ", ".join(self.rows[row].id for row in batch.rows)
            raise ValueError(
                f"step {self.position.step}: loss {value}, gradient norm {float(norm)} on rows {names}; the run stops here, "
                "its last checkpoint is intact; lower the learning rate or look at these rows"
            )
        self.optimizer.step()
        self._masters.publish()
        self.position.step += 1
        self.position.blocks += batch.blocks
        self._logged.append((float(conditional.detach()), float(marginal.detach()), float(norm), batch.blocks))
        self._busy += time.perf_counter() - began
        if len(self._logged) < STEPS_PER_LOG:
            return None
        columns = list(zip(*self._logged, strict=True))
        record = {
            "loss": sum(columns[0]) / len(columns[0]),
            "marginal_loss": sum(columns[1]) / len(columns[1]),
            "grad_norm": sum(columns[2]) / len(columns[2]),
            "learning_rate": rate,
            "blocks_per_second": sum(columns[3]) / self._busy,
        }
        self._logged, self._busy = [], 0.0
        return record

    def losses(self, batch: BlockBatch) -> tuple[Tensor, Tensor]:
        """(conditioned, marginal) forward KL, each a weighted mean over the batch's slots."""
        hidden = block_hidden(self.head, batch)[batch.slots]
        teacher = sparse_teacher(batch.teacher_ids, batch.teacher_logp, self._index, self.options.teacher_temperature)
        weight = batch.weight / batch.weight.sum()
        conditioned = self.head.condition(hidden, batch.previous)
        conditional = forward_kl(conditioned, self._lm_rows, teacher, weight)
        if self.head.pairwise is None or self.options.marginal_weight == 0:
            return conditional, conditional.new_zeros(())
        return conditional, forward_kl(hidden, self._lm_rows, teacher, weight)

    # -- data ---------------------------------------------------------------------------------------------------------

    def next_batch(self) -> BlockBatch:
        """The next documents' blocks, about `blocks` of them."""
        items: list[tuple[RowFeatures, Tensor, Tensor]] = []
        blocks = 0
        while blocks < self.options.blocks:
            row = self._next_row()
            features = self.store[row]
            generator = torch.Generator().manual_seed(hash((self.options.seed, self.position.epoch, row)) & 0x7FFFFFFF)
            anchors = sample_anchors(features, min(self.options.anchors, self.options.blocks - blocks), generator)
            items.append((features, anchors, sample_lengths(anchors, len(features.tokens), self.rules, generator)))
            blocks += len(anchors)
        return pack_blocks(items, self.rules, self._device)

    def _next_row(self) -> int:
        position = self.position
        if position.cursor >= len(self._order):
            if self._order:
                position.epoch += 1
            position.epoch_rows = self.store.refresh()
            position.cursor = 0
            self._shuffle()
        position.cursor += 1
        return self._order[position.cursor - 1]

    def _shuffle(self) -> None:
        """The epoch's order of training rows: a function of seed, epoch and the rows that were available."""
        training = [row for row in range(self.position.epoch_rows) if not self._held_out(row)]
        if not training:
            raise ValueError("no training rows: all are held out or none has features yet; lower held_out or add rows")
        generator = torch.Generator().manual_seed(hash((self.options.seed, self.position.epoch)) & 0x7FFFFFFF)
        self._order = [training[i] for i in torch.randperm(len(training), generator=generator).tolist()]

    def _held_out(self, row: int) -> bool:
        return is_held_out(self.rows[row].id, self.options.held_out)

    # -- measures -----------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, Any]:
        """Held-out metrics: teacher-forced, and τ of greedy decoding replayed on held-out greedy rows, if there are any."""
        held = [row for row in range(len(self.store)) if self._held_out(row)]
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
        drafting = DraftHead.load(self.output / "head", *self._tables)
        drafting.pack()
        tau = replayed_tau(drafting, [self.store[row] for row in greedy], self.rules, REPLAYED_BUDGETS, REPLAYED_TOKENS)
        return {"held_out": asdict(forced), "replayed_tau": tau}

    def _record(self, values: dict[str, Any]) -> dict[str, Any]:
        position = asdict(self.position) | {"elapsed": round(self._elapsed(), 1)}
        record = {**position, **values}
        with (self.output / "metrics.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
        return record

    def _elapsed(self) -> float:
        return time.monotonic() - self._clock

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the checkpoint, and the head as it is into `head/`."""
        self.position.elapsed = self._elapsed()
        save_checkpoint(
            self.output / "checkpoint.pt",
            {
                "options": self._identity(),
                "position": asdict(self.position),
                "head": {name: p.detach() for name, p in self._masters.named.items()},
                "optimizer": self.optimizer.state_dict(),
            },
        )
        export_head(self.output / "head", self.head)

    def resume(self) -> bool:
        """Load the output folder's checkpoint if there is one. Raises ValueError when it belongs to another run."""
        path = self.output / "checkpoint.pt"
        if not path.exists():
            return False
        state = load_checkpoint(path)
        for key, value in self._identity().items():
            if state["options"].get(key) != value:
                raise ValueError(
                    f"{path}: that run had {key} = {state['options'].get(key)!r}, this one has {value!r}; "
                    "name another output folder, or delete the checkpoint"
                )
        try:
            self._masters.load(state["head"])
        except KeyError as error:
            raise ValueError(
                f"{path}: that run's head does not fit this target ({error.args[0]}); "
                "name another output folder, or delete the checkpoint"
            ) from error
        self.optimizer.load_state_dict(state["optimizer"])
        self.position = Position(**{each.name: state["position"][each.name] for each in fields(Position)})
        self._shuffle()
        return True

    def _identity(self) -> dict[str, Any]:
        """Settings that must not change within a run."""
        free = {"output", "features", "data", "target", "device", "minutes", "steps"}
        free |= {"checkpoint_minutes", "evaluate_minutes"}
        values = {key: value for key, value in asdict(self.options).items() if key not in free}
        config, dtype = self.head.config, str(self.head.norm.weight.dtype).removeprefix("torch.")
        return values | {"mask_token_id": config.mask_token_id, "taps": list(config.target_layer_ids), "dtype": dtype}
