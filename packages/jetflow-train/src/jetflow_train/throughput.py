"""Training speed against a plain loop on the same blocks: whole blocks, and autograd through softmax over the vocabulary."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from jetflow_core import host
from jetflow_core.model import build_model
from jetflow_core.weights import open_checkpoint
from jetflow_train.blocks import BlockBatch
from jetflow_train.config import HeadOptions, ThroughputOptions
from jetflow_train.data import read_rows, spread
from jetflow_train.evaluate import PACKAGES
from jetflow_train.features import build_features
from jetflow_train.heads import head_config, new_head, target_tables, training_dtype
from jetflow_train.states import slot_states
from jetflow_train.targets import target_path
from jetflow_train.trainer import Trainer


class PlainTrainer(Trainer):
    """The loop as one writes it first. Everything but the loss is the trainer's own, its attention included."""

    def losses(self, batch: BlockBatch) -> tuple[Tensor, Tensor, Tensor]:
        """The forward KL of `Trainer.losses` from a `[slots, vocabulary]` tensor of float32 logits."""
        conditioned, hidden = slot_states(self.head, batch)
        teacher = torch.zeros(len(hidden), self.head.config.vocab_size, device=hidden.device)
        teacher.scatter_(1, batch.teacher_ids, teacher_probabilities(batch.teacher_logp, self.options))

        def divergence(states: Tensor) -> Tensor:
            log_q = torch.log_softmax(self.head.logits(states).float(), dim=-1)
            return (batch.weight * (torch.xlogy(teacher, teacher) - teacher * log_q).sum(dim=-1)).sum()

        if hidden is conditioned or self.options.marginal_weight == 0:
            return divergence(conditioned), hidden.new_zeros(()), conditioned
        return divergence(conditioned), divergence(hidden), conditioned


def teacher_probabilities(logp: Tensor, options: HeadOptions) -> Tensor:
    """The sparse teacher's probabilities [J, M] of its log-probabilities."""
    heat = options.teacher_temperature
    return logp.exp() if heat == 1.0 else torch.softmax(logp / heat, dim=-1)


@dataclass(frozen=True)
class Speed:
    """Blocks a second of one way to train: the median of all turns, and of the turns' ratios to the plain loop's."""

    name: str
    blocks_per_second: float
    ratio: float


def measure_throughput(
    options: ThroughputOptions, base: HeadOptions, on_turn: Callable[[int, int], object] = lambda done, total: None
) -> tuple[dict[str, str | int | bool], list[Speed]]:
    """Train in turns, `steps` steps a turn: (what was measured on, speeds with the plain loop first).

    `base` holds the head and its objective, which is the forward KL here. Raises ValueError as training does.
    """
    checkpoint = open_checkpoint(target_path(options.target))
    model = build_model(checkpoint, base.target_dtype, options.device)
    limit = min(base.max_length, model.config.max_position_embeddings)
    files = [Path(file) for file in options.data]
    rows = spread(read_rows(files, model.config.vocab_size, limit, checkpoint.tokenizer))[: options.rows]
    dtype = training_dtype(base.dtype, model.embed.device)
    base = replace(base, loss="forward_kl", prefix=0.0, held_out=0.0, output=options.output, draft_temperature=1.0)
    config = head_config(model, base)
    store = build_features(Path(options.output) / "features", model, rows, config.target_layer_ids, base.teacher_top)

    def trainer(kind: type[Trainer], changed: HeadOptions) -> Trainer:
        head = new_head(model, head_config(model, changed), rows, changed.seed, dtype)
        return kind(head, target_tables(model, dtype), store, rows, changed)

    whole = replace(base, draft_vocab_size=None, truncate=False)
    ways = {
        "plain loop": trainer(PlainTrainer, whole),
        "fused loss": trainer(Trainer, whole),
        "fused loss, draft vocabulary, cut blocks": trainer(Trainer, base),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, options.rounds):  # the first turn warms up
        for name, way in ways.items():
            began = time.perf_counter()
            for _ in range(options.steps):
                way.step()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - began)
        on_turn(turn + 1, options.rounds)
    facts: dict[str, str | int | bool] = {"target": options.target or "demo model", "blocks a step": base.blocks}
    facts |= host.describe(model.embed.device, dtype, PACKAGES)
    return facts, summarise_speeds(seconds, base.blocks * options.steps)


def summarise_speeds(seconds: dict[str, list[float]], blocks: int) -> list[Speed]:
    """Speeds of ways that took `seconds` for `blocks` blocks, turn by turn; the first is what the others are held to."""
    plain = next(iter(seconds.values()))
    return [
        Speed(
            name,
            blocks / statistics.median(times),
            statistics.median(a / b for a, b in zip(plain, times, strict=True)),
        )
        for name, times in seconds.items()
    ]


def speed_table(facts: dict[str, str | int | bool], speeds: list[Speed]) -> str:
    """The measurement as text."""
    wide = max(len(each.name) for each in speeds)
    lines = [f"{each.name:{wide}}  {each.blocks_per_second:8.1f} blocks/s  {each.ratio:5.2f}x" for each in speeds]
    return "\n".join([*lines, ", ".join(f"{key} {value}" for key, value in facts.items())])
