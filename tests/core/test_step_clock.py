"""Where the time of steps goes."""

from __future__ import annotations

import time
from itertools import count

import pytest

from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.sampling import SamplingParams
from jetflow_core.step_clock import PHASES, StepClock
from tiny import tiny_head, tiny_model


def test_a_mark_ends_a_phase_and_what_lies_between_steps_is_nobodys() -> None:
    ticks = count()
    clock = StepClock(lambda: float(next(ticks)))  # a second a reading
    next(ticks)
    clock.begin()
    clock.lap("plan")
    clock.lap("draft")
    clock.lap("draft")
    clock.end()
    first = clock.times
    assert first.steps == 1
    assert first.seconds == dict.fromkeys(PHASES, 0.0) | {"plan": 1.0, "draft": 2.0, "other": 1.0}
    clock.begin()
    clock.lap("commit")
    clock.end()
    later = clock.times - first
    assert later.steps == 1
    assert later.seconds == dict.fromkeys(PHASES, 0.0) | {"commit": 1.0, "other": 1.0}
    assert (first + later) == clock.times


@pytest.mark.parametrize("budget", [0, 6])
def test_an_engines_phases_add_up_to_its_steps(budget: int) -> None:
    model = tiny_model()
    head = tiny_head(model)
    head.pack()
    engine = Engine(model, head=head, config=EngineConfig(budget=budget))
    engine.add([1, 2, 3], SamplingParams(max_tokens=12))
    assert engine.phases.steps == 0
    engine.step()
    prefill, wall, steps = engine.phases, 0.0, 0
    while engine.has_work:
        started = time.perf_counter()
        engine.step()
        wall += time.perf_counter() - started
        steps += 1
    times = engine.phases - prefill
    assert times.steps == steps
    assert {phase for phase in PHASES if times.seconds[phase] > 0} == set(PHASES) - (
        set() if budget else {"draft", "tree"}
    )
    assert 0.8 * wall < sum(times.seconds.values()) <= wall
    assert engine.step() == []
    assert engine.phases.steps == steps + 1  # an idle call is no step
