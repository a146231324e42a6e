"""Histograms of durations: one count for each range of seconds. Pure.

The bounds are fixed and part of the wire format, so histograms of different processes and times can be added and
subtracted. Five ranges for each factor of ten keep a quantile within about a third of its true value, from a write to a
fast disk to a call that timed out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from waltzd.errors.operations import BadFrame

BOUNDS = (*(float(f"{digits}e{power}") for power in range(-5, 1) for digits in ("5", "8", "12.5", "20", "32")), 60.0)
"""Upper bound of each range, in seconds: 50 µs, 80 µs, 125 µs, …, 32 s, 60 s. One more range has no bound."""


@dataclass(frozen=True)
class Histogram:
    """The counts up to some moment."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    seconds: float = 0.0
    """Sum of all durations."""

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        return self.seconds / self.count if self.count else None

    def more(self, seconds: float, count: int = 1) -> Histogram:
        """Return the histogram with `count` more durations of `seconds` each. Use `Durations` to add many."""
        at = bisect_left(BOUNDS, seconds)
        counts = (*self.counts[:at], self.counts[at] + count, *self.counts[at + 1 :])
        return Histogram(counts, self.seconds + seconds * count)

    def minus(self, earlier: Histogram) -> Histogram:
        """Return the durations since an earlier moment. If a count is lower than before, the process was restarted, and
        all durations are new."""
        if any(now < then for now, then in zip(self.counts, earlier.counts, strict=True)):
            return self
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Histogram(counts, max(0.0, self.seconds - earlier.seconds))

    def plus(self, other: Histogram) -> Histogram:
        """Return the sum of both."""
        counts = tuple(one + more for one, more in zip(self.counts, other.counts, strict=True))
        return Histogram(counts, self.seconds + other.seconds)

    def quantile(self, q: float) -> float | None:
        """Estimate a quantile: the seconds that a share `q` of the durations did not exceed. None without a duration.

        Durations are assumed to be spread evenly over each range; above the last bound, that bound is returned."""
        assert 0.0 <= q <= 1.0
        rank = q * self.count
        if not self.count:
            return None
        below = 0
        for at, count in enumerate(self.counts):
            if count and below + count >= rank:
                if at == len(BOUNDS):
                    return BOUNDS[-1]
                start = BOUNDS[at - 1] if at else 0.0
                return start + (BOUNDS[at] - start) * max(0.0, rank - below) / count
            below += count
        raise AssertionError("the counts add up to less than their sum")

    def encode(self) -> tuple[int, ...]:
        """Return the counts for a message; an empty tuple if all are 0."""
        return self.counts if self.count else ()

    @classmethod
    def decode(cls, counts: Sequence[int], seconds: float) -> Histogram:
        """Return the histogram of a message; raise `BadFrame` if the counts are invalid."""
        if not counts:
            return cls()
        if len(counts) != len(BOUNDS) + 1 or min(counts) < 0 or not seconds >= 0.0:
            raise BadFrame(f"{len(counts)} counts that last {seconds} seconds are no histogram; it has {len(BOUNDS) + 1}")
        return cls(tuple(counts), seconds)


class Durations:
    """A mutable histogram: adding a duration costs a bisection and two additions."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Add `count` durations of `seconds` each."""
        self._counts[bisect_left(BOUNDS, seconds)] += count
        self._seconds += seconds * count

    def histogram(self) -> Histogram:
        return Histogram(tuple(self._counts), self._seconds)
