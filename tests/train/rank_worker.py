"""What every rank of the distributed tests runs, under `torchrun`: each scenario in turn, results into a folder."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from training_tiny import tiny_model, tiny_options, tiny_rows

from jetflow_train.data import spread
from jetflow_train.distributed import ALONE, Ranks, joined
from jetflow_train.features import Features, OnlineFeatures, RowFeatures, build_features
from jetflow_train.heads import head_config, new_head, target_tables
from jetflow_train.trainer import Trainer

ROWS = spread(tiny_rows(70))  # two shards of features, of different sizes
SCENARIOS: dict[str, dict[str, object]] = {
    "shared": {"blocks": 12},
    "one document a step": {"blocks": 4, "d_pace": True},  # the second rank has nothing to do
    "micro-batches": {"blocks": 24, "accumulate": 2, "prefix": 0.5, "loss": "reverse_kl"},
    "online": {"blocks": 12},
}


def trainer(folder: Path, changes: dict[str, object], online: bool, ranks: Ranks = ALONE) -> Trainer:
    # Clipping would hide what gradients are divided by, as AdamW does.
    model, options = tiny_model(), tiny_options(steps=3, output=str(folder / "run"), clip=math.inf, **changes)
    config = head_config(model, options)
    head = new_head(model, config, ROWS, options.seed)
    if online:
        store: Features = OnlineFeatures(model, ROWS, config.target_layer_ids, options.teacher_top, ranks)
    else:
        store = build_features(
            folder / "features", model, ROWS, config.target_layer_ids, options.teacher_top, ranks=ranks
        )
    assert ranks is ALONE or isinstance(next(model.layers.parameters()), DTensor)
    return Trainer(head, target_tables(model), store, ROWS, options, ranks)


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.head.named_parameters() if p.requires_grad}


def gradients(run: Trainer) -> dict[str, torch.Tensor]:
    """Those of the last step."""
    return {name: p.grad.clone() for name, p in run.head.named_parameters() if p.grad is not None}


class Poisoned:
    """A store whose row `bad` has a tap that is no number."""

    def __init__(self, store: Features, bad: int) -> None:
        self.store, self.bad = store, bad

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> RowFeatures:
        features = self.store[index]
        return replace(features, taps=features.taps * torch.nan) if index == self.bad else features

    def refresh(self) -> int:
        return self.store.refresh()

    def follow(self) -> None:
        self.store.follow()


def thread_names() -> list[str]:
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def scenarios(folder: Path, ranks: Ranks) -> None:
    for name, changes in SCENARIOS.items():
        run = trainer(folder / name, changes, name == "online", ranks)
        run.run()
        torch.save(weights(run), folder / name / f"weights-{ranks.rank}.pt")
        torch.save(gradients(run), folder / name / f"gradients-{ranks.rank}.pt")
    run = trainer(folder / "shared", SCENARIOS["shared"], False, ranks)
    draws, _ = run.order.draw(run.position)
    run.store = Poisoned(run.store, draws[1].row)
    run.step()


def main(folder: Path) -> None:
    try:
        with joined("cpu") as ranks:
            scenarios(folder, ranks)
    except ValueError as error:
        (folder / f"error-{ranks.rank}").write_text(str(error))
    (folder / f"threads-{ranks.rank}").write_text(" ".join(thread_names()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
