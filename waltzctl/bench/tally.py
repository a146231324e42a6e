"""What is counted while a load runs: outcomes and latencies, a window at a time. Pure: it is told what time it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from waltzctl.bench.figures import Latencies
from waltzd.client.outbox import IS_COMMITTED, IS_UNKNOWN, Outcomes
from waltzd.protocol.locks import Committed, Outcome, Reason, Rejected

WINDOW_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Window:
    """A second of a run."""

    second: float
    """Its end, from the beginning."""
    rate: float
    p50: float
    p99: float


class Tally:
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

    def one(self, outcome: Outcome, seconds: float) -> None:
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
        """Call it often; about each second becomes a window."""
        if now - self._window_begun >= WINDOW_SECONDS:
            self._close(now)

    def end(self, now: float) -> None:
        """What is left becomes the last window, if it is long enough to say anything."""
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
