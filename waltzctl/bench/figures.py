"""Latencies of many transactions in little room, and what is told of them. Pure.

A latency is counted in one of some thousand buckets, whose width grows with the value: every percentile is right to within
one part in a hundred, however long a run is and however many producers it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEAST_SECONDS = 1e-6
STEPS = 128
"""Buckets for each doubling."""
DOUBLINGS = 32
"""From one microsecond to more than an hour; what is longer is counted as that."""
PERCENTILES = (50.0, 99.0, 99.9)


class Latencies:
    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(STEPS * DOUBLINGS, np.int64)
        self.count = 0
        self.highest = 0.0
        self._total = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """So many transactions took this long."""
        self._counts[_bucket(seconds)] += times
        self.count += times
        self.highest = max(self.highest, seconds)
        self._total += seconds * times

    def merge(self, other: Latencies) -> None:
        self._counts += other._counts
        self.count += other.count
        self.highest = max(self.highest, other.highest)
        self._total += other._total

    @property
    def mean(self) -> float:
        return self._total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """At least so many of a hundred took no longer; 0 when there are none."""
        if self.count == 0:
            return 0.0
        rank = max(1, int(np.ceil(self.count * percent / 100)))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return float(min(_upper(bucket), self.highest))

    def percentiles(self, wanted: Sequence[float] = PERCENTILES) -> dict[float, float]:
        return {percent: self.percentile(percent) for percent in wanted}


def _bucket(seconds: float) -> int:
    if seconds <= LEAST_SECONDS:
        return 0
    return min(int(np.log2(seconds / LEAST_SECONDS) * STEPS), STEPS * DOUBLINGS - 1)


def _upper(bucket: int) -> float:
    """The longest that is counted there."""
    return LEAST_SECONDS * float(2.0 ** ((bucket + 1) / STEPS))
