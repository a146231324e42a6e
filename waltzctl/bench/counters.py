"""Outcomes and latencies, counted while a load runs, a window at a time. Pure: moments are given to it.

A latency is counted in one of some thousand buckets, whose width grows with the value: every percentile is right to within
one part in a hundred, however long a run is and however many producers it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from waltzd.client.pending import IS_COMMITTED, IS_UNKNOWN, Outcomes
from waltzd.protocol.locks import AppendOutcome, Committed, Reason, Rejected

WINDOW_SECONDS = 1.0
LEAST_SECONDS = 1e-6
STEPS = 128
"""Buckets for each doubling."""
DOUBLINGS = 32
"""From one microsecond to more than an hour; a longer time counts as that."""
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


@dataclass(frozen=True, kw_only=True)
class Window:
    """A second of a run."""

    second: float
    """Its end, from the beginning."""
    rate: float
    p50: float
    p99: float


class Counters:
    """`begin` throws away what came before."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.begin(0.0)

    def begin(self, now: float) -> None:
        self.committed = 0
        self.refused: Counter[str] = Counter()
        self.unknown = 0
        self.latencies = Latencies()
        self.windows: list[Window] = []
        self._begun = self._window_begun = now
        self._window = Latencies()
        self._window_committed = 0

    @property
    def attempts(self) -> int:
        return self.committed + self.refused.total() + self.unknown

    def one(self, outcome: AppendOutcome, seconds: float) -> None:
        match outcome:
            case Committed():
                self.commit(1, seconds)
            case Rejected(reason):
                self.refused[reason.name] += 1
            case _:
                self.unknown += 1

    def many(self, outcomes: Outcomes, seconds: float) -> None:
        """All of them were handed over together, and answered together."""
        self.commit(outcomes.committed, seconds)
        if outcomes.committed < len(outcomes):
            for row in (outcomes.reasons != IS_COMMITTED).nonzero()[0].tolist():
                if outcomes.reasons[row] == IS_UNKNOWN:
                    self.unknown += 1
                else:
                    self.refused[Reason(int(outcomes.reasons[row])).name] += 1

    def commit(self, count: int, seconds: float) -> None:
        if count:
            self.committed += count
            self._window_committed += count
            self._window.add(seconds, count)

    def tick(self, now: float) -> None:
        """To be called often; about each second becomes a window."""
        if now - self._window_begun >= WINDOW_SECONDS:
            self._close(now)

    def end(self, now: float) -> None:
        """The rest becomes the last window, if it is long enough to mean anything."""
        if now - self._window_begun >= WINDOW_SECONDS / 2:
            self._close(now)
        else:
            self.latencies.merge(self._window)
        self.seconds = now - self._begun

    def _close(self, now: float) -> None:
        self.latencies.merge(self._window)
        self.windows.append(
            Window(
                second=now - self._begun,
                rate=self._window_committed / (now - self._window_begun),
                p50=self._window.percentile(50),
                p99=self._window.percentile(99),
            )
        )
        self._window, self._window_committed, self._window_begun = Latencies(), 0, now
