"""Outcomes of the transactions of one partition for as long as this process owns it, over all of its sessions.

Outcomes are counted once for each batch or frame, never for each transaction. Only outcomes that clients were sent are
counted: a transaction that was in flight when its session ended counts as an attempt only, although the next session may
find it in the log.
"""

from __future__ import annotations

from waltzd.protocol.descriptions import PartitionStatistics
from waltzd.protocol.histogram import Durations, Histogram
from waltzd.protocol.locks import Reason


class AllCounters:
    """Counters of all partitions that this process has owned."""

    def __init__(self) -> None:
        self._newest: dict[int, Counters] = {}
        self._earlier = Histogram()
        """Commit durations of partitions that were given away and came back."""

    def begin(self, partition: int) -> Counters:
        """Return new counters for a partition that is taken over. If it was here before, it was closed."""
        if partition in self._newest:
            self._earlier = self._earlier.plus(self._newest[partition].statistics().commit)
        found = self._newest[partition] = Counters()
        return found

    def commit(self) -> Histogram:
        """Return the commit durations of all partitions. Counts only rise, whichever partitions come and go."""
        found = self._earlier
        for counters in self._newest.values():
            found = found.plus(counters.statistics().commit)
        return found


class Counters:
    def __init__(self) -> None:
        self.attempts = 0
        self.refused = dict.fromkeys(Reason, 0)
        self._committed = 0
        self._committed_bytes = 0
        self._fed = 0
        self._fed_bytes = 0
        self._commit = Durations()

    def committed(self, count: int, size: int, seconds: float) -> None:
        """Count committed transactions of one batch, `seconds` after it arrived. `size`: bytes of their records."""
        self._committed += count
        self._committed_bytes += size
        self._commit.add(seconds, count)

    def fed(self, count: int, size: int) -> None:
        self._fed += count
        self._fed_bytes += size

    def statistics(self) -> PartitionStatistics:
        return PartitionStatistics(
            attempts=self.attempts,
            committed=self._committed,
            committed_bytes=self._committed_bytes,
            refused={reason.name: count for reason, count in self.refused.items()},
            fed=self._fed,
            fed_bytes=self._fed_bytes,
            commit=self._commit.histogram(),
        )
