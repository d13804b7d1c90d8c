"""Devices of the simulator: what one call costs on a GPU by its data sheet, or on this machine by measurement."""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from jetflow_serve.step_model import Call
from jetflow_triton.roofline import B200, H100, H200
from jetflow_triton.roofline import Device as Chip

Kernels = Literal["design", "floor"]


class Device(Protocol):
    """Where a step runs.

    `memory`: bytes for weights and caches, None where that is not checked. `draft_host`: seconds that the host adds to a step
    that drafts.
    """

    @property
    def name(self) -> str: ...

    @property
    def memory(self) -> float | None: ...

    @property
    def draft_host(self) -> float: ...

    @property
    def source(self) -> str:
        """Where the numbers are from, for the reader of a prediction."""
        ...

    def seconds(self, call: Call) -> float:
        """Of all its `times`."""
        ...


def step_seconds(device: Device, calls: Iterable[Call], *, drafts: bool) -> float:
    """Of a whole step, in which the host drafts or does not."""
    return sum(device.seconds(call) for call in calls) + (device.draft_host if drafts else 0.0)


BANDWIDTH_SHARE = 0.9  # of the data sheet's; OpenCL-Benchmark reads 3.61 of 4.02 TB/s on a GH200, whose GPU is an H100
FLOPS_SHARE = 0.75  # of the data sheet's dense figure, as FlashAttention-3 reaches on an H100 (arXiv 2407.08608)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU in front of a captured graph, so the host adds nothing to a step.

    `chip` has the data sheet's rates, of which `BANDWIDTH_SHARE` and `FLOPS_SHARE` are attained. Dense products are the vendor
    library's: as fast as the chip allows, and a launch. With `kernels` "design" our own kernels take what the roofline says of
    them, with "floor" what no kernel can beat, and their launches.
    """

    chip: Chip
    memory: float
    kernels: Kernels = "design"
    draft_host: float = 0.0

    @property
    def name(self) -> str:
        return self.chip.name

    @property
    def source(self) -> str:
        chip = self.chip
        return (
            f"data sheet: {chip.bandwidth / 1e12:g} TB/s, {chip.flops / 1e12:g} TFLOP/s dense bfloat16, of which "
            f"{BANDWIDTH_SHARE:.0%} and {FLOPS_SHARE:.0%} are attained; {chip.launch * 1e6:g} µs a launch in a CUDA graph; "
            f"{self.memory / 1e9:g} GB"
        )

    def seconds(self, call: Call) -> float:
        chip, cost = self._attained, call.cost
        if call.kind == "product" or self.kernels == "floor":
            return call.times * (cost.floor(chip) + cost.launches * chip.launch)
        return call.times * cost.expected(chip)

    @property
    def _attained(self) -> Chip:
        chip = self.chip
        return replace(chip, bandwidth=BANDWIDTH_SHARE * chip.bandwidth, flops=FLOPS_SHARE * chip.flops)


@dataclass(frozen=True, slots=True)
class Measured:
    """A machine whose numbers come from a calibration (`jetflow_serve.calibrate`).

    `product_flops[i]`: FLOP/s of products with `rows[i]` rows, their overhead included. Every other call takes `per_call` seconds
    and `per_byte` for what it moves, attention besides `per_score` for every FLOP of what it scores.
    """

    name: str
    rows: tuple[int, ...]
    product_flops: tuple[float, ...]
    per_call: float
    per_byte: float
    per_score: float
    draft_host: float
    source: str
    memory: float | None = None

    def __post_init__(self) -> None:
        rising = all(0 < low < high for low, high in itertools.pairwise((*self.rows, math.inf)))
        if not self.rows or not rising or len(self.rows) != len(self.product_flops):
            raise ValueError("rows must be row counts in rising order, one for each of product_flops")
        if not all(0 < rate < math.inf for rate in self.product_flops):
            raise ValueError("product_flops must be FLOP/s above 0")
        prices = self.per_call, self.per_byte, self.per_score, self.draft_host
        if not all(0 <= seconds < math.inf for seconds in prices):
            raise ValueError("per_call, per_byte, per_score and draft_host must be seconds, 0 or more")
        if self.memory is not None and not self.memory > 0:
            raise ValueError("memory must be bytes above 0, or null")

    def seconds(self, call: Call) -> float:
        cost = call.cost
        if call.kind in ("product", "experts"):
            return call.times * cost.flops / self._product_rate(call.rows)
        scored = call.scored if call.kind == "attention" else 0.0
        return call.times * (self.per_call + cost.bytes * self.per_byte + scored * self.per_score)

    def _product_rate(self, rows: float) -> float:
        """FLOP/s of a product with `rows` rows: between measured row counts, a weight's time is linear in the rows."""
        inside = min(max(rows, self.rows[0]), self.rows[-1])
        after = bisect.bisect_right(self.rows, inside, hi=len(self.rows) - 1)
        ends = [(self.rows[i], self.rows[i] / self.product_flops[i]) for i in (max(after - 1, 0), after)]
        (low, low_time), (high, high_time) = ends
        share = (inside - low) / (high - low) if high > low else 0.0
        return inside / (low_time + share * (high_time - low_time))


GPUS = {
    "h100": Gpu(H100, 80e9),
    "h200": Gpu(H200, 141e9),
    "b200": Gpu(B200, 180e9),
}


def find_device(name: str, kernels: Kernels) -> Device:
    """The GPU called `name`, or the measured machine in the JSON file of that name. Raises ValueError."""
    if name.lower() in GPUS:
        return replace(GPUS[name.lower()], kernels=kernels)
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"there is no device {name!r}: use {', '.join(GPUS)}, here, or a file that --save-profile wrote"
        )
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        return Measured(**data | {key: tuple(data[key]) for key in ("rows", "product_flops")})
    except (TypeError, KeyError, ValueError, RecursionError) as error:  # JSONDecodeError is a ValueError
        raise ValueError(
            f"{path} is not a device profile: {error}; make one with --device-profile here --save-profile"
        ) from error


def save_profile(device: Measured, path: Path) -> None:
    """Write what `find_device` reads."""
    path.write_text(json.dumps(asdict(device), indent=2) + "\n", encoding="utf-8")
