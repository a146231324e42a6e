"""Outcomes and latencies, counted while a load runs. Pure: moments are given to it.

A latency is counted in one of some thousand buckets whose width grows with the value, so every percentile is right to
within one part in a hundred, however long a run is and however many producers it has.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from waltzd.client.pending import IS_COMMITTED, IS_UNKNOWN, Outcomes
from waltzd.protocol.locks import AppendOutcome, Committed, Reason, Rejected

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

    def add(self, seconds: float, times: int = 1) -> None:
        """Count `times` transactions that took `seconds` each."""
        bucket = int(np.log2(seconds / LEAST_SECONDS) * STEPS) if seconds > LEAST_SECONDS else 0
        self._counts[min(bucket, STEPS * DOUBLINGS - 1)] += times
        self.count += times
        self.highest = max(self.highest, seconds)

    def merge(self, other: Latencies) -> None:
        """Add what `other` has counted."""
        self._counts += other._counts
        self.count += other.count
        self.highest = max(self.highest, other.highest)

    def percentile(self, percent: float) -> float:
        """Return the time within which at least `percent` of a hundred ended; 0 when nothing was counted."""
        if self.count == 0:
            return 0.0
        rank = max(1, int(np.ceil(self.count * percent / 100)))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(LEAST_SECONDS * float(2.0 ** ((bucket + 1) / STEPS)), self.highest)


class Counters:
    """Outcomes of one load. `begin` drops what was counted during the warm-up."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Length of the measurement, once `end` was called."""
        self.begin(0.0)

    def begin(self, now: float) -> None:
        self.committed = 0
        self.refused: Counter[str] = Counter()
        """Rejected transactions, by reason."""
        self.unknown = 0
        self.latencies = Latencies()
        self._begun = now

    def end(self, now: float) -> None:
        self.seconds = now - self._begun

    @property
    def attempts(self) -> int:
        return self.committed + self.refused.total() + self.unknown

    def one(self, outcome: AppendOutcome, seconds: float) -> None:
        match outcome:
            case Committed():
                self._commit(1, seconds)
            case Rejected(reason):
                self.refused[reason.name] += 1
            case _:
                self.unknown += 1

    def many(self, outcomes: Outcomes, seconds: float) -> None:
        """Count a batch, which was handed over and answered as one."""
        self._commit(outcomes.committed, seconds)
        if outcomes.committed < len(outcomes):
            for row in (outcomes.reasons != IS_COMMITTED).nonzero()[0].tolist():
                if outcomes.reasons[row] == IS_UNKNOWN:
                    self.unknown += 1
                else:
                    self.refused[Reason(int(outcomes.reasons[row])).name] += 1

    def _commit(self, count: int, seconds: float) -> None:
        if count:
            self.committed += count
            self.latencies.add(seconds, count)
