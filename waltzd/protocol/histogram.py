"""How long many things took, in few numbers: one count for each range of seconds. Pure.

The bounds are fixed, so that histograms of different processes and moments can be added and subtracted, and a count of one
always means the same as that of another: they are part of the wire. Five for each factor of ten keep a quantile within
about a third of the truth, from a write to a fast disk to a call that timed out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from waltzd.errors import BadFrame

BOUNDS = (*(float(f"{digits}e{power}") for power in range(-5, 1) for digits in ("5", "8", "12.5", "20", "32")), 60.0)
"""The longest of each range, in seconds: 50 µs, 80 µs, 125 µs, …, 32 s, 60 s. One more range stands behind the last."""


@dataclass(frozen=True)
class Histogram:
    """What was counted until some moment."""

    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    seconds: float = 0.0
    """All of them together."""

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        return self.seconds / self.count if self.count else None

    def more(self, seconds: float, count: int = 1) -> Histogram:
        """With `count` more that took so long, each. Where there are many, gather them with `Durations`."""
        at = bisect_left(BOUNDS, seconds)
        counts = (*self.counts[:at], self.counts[at] + count, *self.counts[at + 1 :])
        return Histogram(counts, self.seconds + seconds * count)

    def minus(self, earlier: Histogram) -> Histogram:
        """What came since an earlier moment. Where less is counted now, the count began again in between: all of it
        is new."""
        if any(now < then for now, then in zip(self.counts, earlier.counts, strict=True)):
            return self
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Histogram(counts, max(0.0, self.seconds - earlier.seconds))

    def plus(self, other: Histogram) -> Histogram:
        counts = tuple(one + more for one, more in zip(self.counts, other.counts, strict=True))
        return Histogram(counts, self.seconds + other.seconds)

    def quantile(self, q: float) -> float | None:
        """The seconds that a share `q` of them did not exceed, as if they were spread evenly over each range; None when
        nothing was counted. Beyond the last bound the bound is all that is known."""
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
        """The counts as they travel; nothing at all where nothing was counted."""
        return self.counts if self.count else ()

    @classmethod
    def decode(cls, counts: Sequence[int], seconds: float) -> Histogram:
        """What `encode` made, from whoever sent it."""
        if not counts:
            return cls()
        if len(counts) != len(BOUNDS) + 1 or min(counts) < 0 or not seconds >= 0.0:
            raise BadFrame(f"{len(counts)} counts that last {seconds} seconds are no histogram; it has {len(BOUNDS) + 1}")
        return cls(tuple(counts), seconds)


class Durations:
    """Where durations are gathered: a bisection and two additions each."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """`count` things took so long, each."""
        self._counts[bisect_left(BOUNDS, seconds)] += count
        self._seconds += seconds * count

    def histogram(self) -> Histogram:
        return Histogram(tuple(self._counts), self._seconds)
