"""Which rows and how many anchors every optimiser step takes: numbers only, the same on every rank.

The order is a function of (seed, epoch, rows available), so a position (epoch, cursor) is all that a resumed run needs
to go on with the same blocks, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from jetflow_train.blocks import anchor_count
from jetflow_train.config import HeadOptions
from jetflow_train.data import Row, is_held_out


@dataclass(frozen=True)
class Position:
    """Where a run stands: everything but weights, optimiser and slot acceptance that the next step depends on."""

    step: int = 0
    elapsed: float = 0.0  # seconds of the run so far, earlier sessions included
    epoch: int = 0
    epoch_rows: int = 0  # rows that were available when the epoch began
    cursor: int = 0  # next document in the epoch's order
    blocks: int = 0  # blocks seen
    best_tau: float = 0.0  # of the head in `best/`


@dataclass(frozen=True)
class Draw:
    """`count` anchors of row `row`, drawn with `seed`."""

    row: int
    count: int
    seed: int


class DataOrder:
    """Walks the training rows of `rows`, epoch by epoch; `available` says how many there are when an epoch begins."""

    def __init__(self, rows: Sequence[Row], options: HeadOptions, available: Callable[[], int]) -> None:
        self._rows, self._options, self._available = rows, options, available
        self._order: list[int] = []
        self._made_for: tuple[int, int] | None = None

    def draw(self, position: Position) -> tuple[list[Draw], Position]:
        """The documents of the step at `position`, `blocks` anchors together, and the position after it."""
        draws: list[Draw] = []
        epoch, rows, cursor = position.epoch, position.epoch_rows, position.cursor
        wanted = self._options.blocks
        while wanted:
            if rows == 0 or cursor >= len(self._order_of(epoch, rows)):
                epoch += rows > 0
                rows, cursor = self._available(), 0
            row = self._order_of(epoch, rows)[cursor]
            cursor += 1
            count = min(anchor_count(self._rows[row]), self._options.anchors, wanted)
            draws.append(Draw(row, count, hash((self._options.seed, epoch, row)) & 0x7FFFFFFF))
            wanted -= count
        blocks = position.blocks + self._options.blocks
        return draws, replace(
            position, step=position.step + 1, epoch=epoch, epoch_rows=rows, cursor=cursor, blocks=blocks
        )

    def held_out(self, row: int) -> bool:
        """Whether a row is kept for evaluation."""
        return is_held_out(self._rows[row], self._options.held_out)

    def _order_of(self, epoch: int, available: int) -> list[int]:
        """An epoch's order of training rows. Raises ValueError when there are none."""
        if self._made_for != (epoch, available):
            training = [row for row in range(available) if not self.held_out(row) and anchor_count(self._rows[row])]
            if not training:
                raise ValueError(
                    "no training rows: all are held out, masked or without features yet; lower held_out or add rows"
                )
            generator = torch.Generator().manual_seed(hash((self._options.seed, epoch)) & 0x7FFFFFFF)
            self._order = [training[i] for i in torch.randperm(len(training), generator=generator).tolist()]
            self._made_for = epoch, available
        return self._order
