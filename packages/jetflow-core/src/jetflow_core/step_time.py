"""What a step costs on this device, learned from the steps themselves. Knows numbers, no tensor and no clock."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]

# Sizes of one bucket share an estimate: (…, 8], (8, 12], (12, 16], (16, 24] …, with the borders where kernels change tiles.
EDGES = [1, 2, 3, 4] + [base << shift for shift in range(1, 16) for base in (3, 4)]
WINDOW = 9  # newest times of a bucket; their median is its estimate, so a stall or a first compilation does not count
FRESH = 1000  # records after which a time is no longer trusted
HALF_LIFE = 250  # records
LONGEST = 3600.0  # seconds; whatever is longer is a clock that jumped
PRIOR_DOUBLING = 16.0  # until two sizes are known: a step of this many rows more costs twice as much as one of one row


@dataclass
class _Bucket:
    """Times of steps of about one size; `mean_context` and `mean_seconds` move slowly and serve the price of context."""

    samples: deque[tuple[int, float, float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    count: int = 0
    mean_context: float = 0.0
    mean_seconds: float = 0.0


class CostCurve:
    """Seconds as a rising, piecewise linear function of a size, plus a price for context.

    The size is the rows of a target pass, or the requests of a draft. A row that attends to a prefix of p cached tokens makes p
    *reads*; `per_read` seconds for each are fitted within buckets (equal sizes, different prefixes), so that long prefixes make
    every row dearer. The curve itself is the time at empty prefixes.
    """

    def __init__(self) -> None:
        self.records = 0
        self.per_read = 0.0
        self._buckets: dict[int, _Bucket] = {}
        self._covariance = self._variance = self._scale = 0.0
        self._fit: tuple[Seconds, Seconds] | None = None

    def record(self, size: int, reads: float, seconds: float) -> None:
        """Learn from one step. Times that no step takes (zero, negative, not finite, hours) are ignored."""
        if size < 1 or not 0 < seconds < LONGEST:
            return
        bucket = self._buckets.setdefault(bisect.bisect_left(EDGES, size), _Bucket())
        self._learn_context(bucket, size, reads / size, seconds)
        bucket.samples.append((self.records, size, reads, seconds))
        self.records += 1
        if self.records % 4 == 0 or len(bucket.samples) < 3:
            self._fit = None

    def known(self, size: int) -> bool:
        """Whether steps of about this size have been timed twice and not too long ago."""
        bucket = self._buckets.get(bisect.bisect_left(EDGES, size))
        return bucket is not None and sum(self.records - stamp < FRESH for stamp, *_ in bucket.samples) >= 2

    def at(self, sizes: NDArray[np.int64] | int) -> Seconds:
        """Seconds at `sizes` with empty prefixes: positive, never falling."""
        x = np.asarray(sizes, dtype=np.float64)
        if self._fit is None:
            self._fit = self._fitted()
        points, values = self._fit
        if len(points) == 0:
            return 1e-3 * (1 + x / PRIOR_DOUBLING)
        if len(points) == 1:
            return values[0] * (PRIOR_DOUBLING + x) / (PRIOR_DOUBLING + points[0])
        # Beyond what was measured the dearer of the last and the mean slope: going there has to be tried, not hoped for.
        last = (values[-1] - values[-2]) / (points[-1] - points[-2])
        mean = (values[-1] - values[0]) / (points[-1] - points[0])
        return np.interp(x, points, values) + np.maximum(x - points[-1], 0) * max(last, mean)

    def table(self) -> list[tuple[float, float]]:
        """(size, seconds) of the measured points."""
        if self._fit is None:
            self._fit = self._fitted()
        return list(zip(self._fit[0].tolist(), self._fit[1].tolist(), strict=True))

    def _learn_context(self, bucket: _Bucket, size: int, context: float, seconds: float) -> None:
        """Regress, within the bucket and forgetting slowly, the time on rows times (context − its mean)."""
        if bucket.count:
            x = size * (context - bucket.mean_context)
            y = min(max(seconds - bucket.mean_seconds, -bucket.mean_seconds / 2), bucket.mean_seconds / 2)
            decay = 0.5 ** (1 / HALF_LIFE)
            self._covariance = decay * self._covariance + x * y
            self._variance = decay * self._variance + x * x
            self._scale = decay * self._scale + (size * context) ** 2
            # Contexts that hardly differ tell nothing: the last term holds the price down until they spread by a tenth or so.
            ridge = self._variance + 0.01 * self._scale
            self.per_read = max(0.0, self._covariance / ridge) if ridge else 0.0
        bucket.count += 1
        weight = max(1 / bucket.count, 1 / HALF_LIFE)
        bucket.mean_context += weight * (context - bucket.mean_context)
        bucket.mean_seconds += weight * (seconds - bucket.mean_seconds)

    def _fitted(self) -> tuple[Seconds, Seconds]:
        """Points of the curve: a bucket's mean size and its median time without context, made monotone."""
        points: list[float] = []
        values: list[float] = []
        weights: list[float] = []
        buckets = [self._buckets[index] for index in sorted(self._buckets)]
        # A time seen once may be a stall, and a curve that it lifts keeps its size from being tried again.
        for bucket in [bucket for bucket in buckets if len(bucket.samples) > 1] or buckets:
            samples = bucket.samples
            points.append(sum(size for _, size, _, _ in samples) / len(samples))
            # At least half of a time is not context: a wrong price must not turn a curve upside down.
            times = sorted(max(seconds - self.per_read * reads, seconds / 2) for _, _, reads, seconds in samples)
            values.append(times[(len(times) - 1) // 2])  # of two the lower: one of them may be a stall
            weights.append(len(times) * 0.5 ** ((self.records - samples[-1][0]) / HALF_LIFE))
        return np.array(points), np.array(monotone(values, weights))


def monotone(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The never falling sequence nearest to `values` in weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, weight in zip(values, weights, strict=True):
        pool = (value, max(weight, 1e-9), 1)
        while pools and pools[-1][0] > pool[0]:
            mean, mass, members = pools.pop()
            total = mass + pool[1]
            pool = ((mean * mass + pool[0] * pool[1]) / total, total, members + pool[2])
        pools.append(pool)
    return [mean for mean, _, members in pools for _ in range(members)]
