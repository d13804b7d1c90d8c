"""Where the time of steps goes: seconds a phase, always counted, at the price of a dozen clock readings a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["plan", "draft", "tree", "batch", "verify", "accept", "commit", "other"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of `steps` finished steps by phase.

    `plan`: budgets and scheduling. `draft`: the drafter's passes, up to candidates on the host. `tree`: candidates to trees, cut
    to their budgets. `batch`: the flat tensors of the target's pass. `verify`: that pass and its LM head. `accept`: the target's
    choices and the walks along them. `commit`: accepted K/V to their slots, the drafter's context. `other`: tokens to requests
    and text, what the budget policy and the prefix cache learn.

    These are times of the host. On a CPU they are when the work is done. A CUDA device works on after a call has returned, so
    there its time shows where the host next waits for it: a draft's in `draft`, a target pass's in `accept`, which reads the
    choices.
    """

    steps: int
    seconds: dict[Phase, float]

    def __sub__(self, earlier: PhaseTimes) -> PhaseTimes:
        """What came after `earlier`."""
        seconds: dict[Phase, float] = {phase: self.seconds[phase] - earlier.seconds[phase] for phase in PHASES}
        return PhaseTimes(self.steps - earlier.steps, seconds)

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        """Both together."""
        seconds: dict[Phase, float] = {phase: self.seconds[phase] + other.seconds[phase] for phase in PHASES}
        return PhaseTimes(self.steps + other.steps, seconds)


class StepClock:
    """Counts the seconds between marks to the phase that each mark ends."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """`now` gives seconds."""
        self._now = now
        self._steps = 0
        self._seconds: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._last = now()

    def begin(self) -> None:
        """A step begins; what passed since the last mark belongs to no phase."""
        self._last = self._now()

    def lap(self, phase: Phase) -> None:
        """The work since the last mark was `phase`."""
        now = self._now()
        self._seconds[phase] += now - self._last
        self._last = now

    def end(self) -> None:
        """A step is done; what is left of it is "other"."""
        self.lap("other")
        self._steps += 1

    @property
    def times(self) -> PhaseTimes:
        """The totals so far."""
        return PhaseTimes(self._steps, dict(self._seconds))
