"""Progress bars of the commands."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from tqdm import tqdm

from jetflow_train.recipe import Progress
from jetflow_train.trainer import Trainer


class Bars:
    """One bar at a time, each with its own unit; text goes above it."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._name = ""

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def say(self, text: str) -> None:
        """Print below the finished bars."""
        self._close()
        sys.stdout.write(text + "\n")

    def note(self, text: str) -> None:
        """Print above the bar."""
        tqdm.write(text, file=sys.stdout)

    def progress(self) -> Progress:
        """The bars as the commands want them."""
        return Progress(
            stage=self.say,
            rows=self.rows,
            note=self.note,
            features=self.features,
            training=self.training,
            decoding=self.decoding,
        )

    def rows(self, done: int, total: int, tokens: int) -> None:
        """Regeneration."""
        self._show("regenerate", done, total, "row")

    def features(self, done: int, total: int) -> None:
        """Feature extraction."""
        self._show("features", done, total, "row")

    def turns(self, done: int, total: int) -> None:
        """Measurement of training speed."""
        self._show("throughput", done, total, "round")

    def decoding(self, done: int, total: int) -> None:
        """Evaluation."""
        self._show("evaluate", done, total, "prompt")

    def training(self, trainer: Trainer, record: dict[str, Any] | None) -> None:
        """Training, in percent of its length, with the latest loss or held-out measures."""
        bar = self._show("train", round(100 * min(trainer.progress, 1.0)), 100, "%")
        if record is None:
            return
        if "loss" in record:
            bar.set_postfix_str(f"KL {record['loss']:.3f}, {record['blocks_per_second']:.0f} blocks/s")
        elif "held_out" in record:
            values: dict[int, float] = record.get("replayed_tau", {})  # absent without greedy held-out rows
            tau = ", ".join(f"{value:.2f} at budget {budget}" for budget, value in values.items())
            text = f"held out: KL {record['held_out']['conditional_kl']:.3f}"
            bar.write(text + (f", replayed τ {tau}" if tau else ""), file=sys.stdout)

    def _show(self, name: str, done: int, total: int, unit: str) -> tqdm[Any]:
        if self._bar is None or self._name != name or done < self._bar.n:
            self._close()
            self._bar, self._name = tqdm(total=total, desc=name, unit=unit, initial=done), name
        self._bar.update(done - self._bar.n)
        return self._bar

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None
