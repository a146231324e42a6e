"""The hybrid clock of a partition: the time that each batch carries. Pure: the shell brings what its own clock shows.

A batch gets the highest of three times: that of the batch before, what the owner's clock shows, and the highest time that
the client has seen in any partition and passes on. So time never falls within a partition, a fail-over included, and an
effect is never earlier than its cause, across partitions too. It decides nothing: a wrong clock makes times wrong, and no
transaction.
"""

from __future__ import annotations

from collections.abc import Mapping

from waltzd.errors.operations import ClockAhead

AHEAD_MAX = 60_000_000
"""Microseconds that a client's time may be ahead of the owner's clock. One wrong clock must not push the time of the
whole cluster into the future."""
OWN_AHEAD_MAX = 10_000_000
"""Microseconds that an owner's clock may be ahead of the median of the clocks of its storages, or behind it. Clocks that
are synchronized over a network differ by less, and people do not notice a time that is wrong by so little."""


class StorageClocks:
    """Clocks of the storages of a partition, advanced by the owner's steady clock from when they were last read: at the
    start of a session, and again while they correct the owner's clock. They bound that clock: if it is wrong or jumps, the
    time of the log is not pushed into the future, and does not stand still either. What was written while it stood still
    would look older than it is, and would be trimmed too early."""

    def __init__(self) -> None:
        self._ahead: dict[str, int] = {}
        """Storage to microseconds by which its clock is ahead of the owner's steady clock. The steady clock has no fixed
        origin."""

    def note(self, name: str, time: int, steady: float) -> None:
        """Note the clock of a storage. `time`: microseconds since 1970; 0 if the storage reports none. `steady`: seconds
        of the owner's steady clock."""
        if time > 0:
            self._ahead[name] = time - round(1e6 * steady)

    def bounded(self, own: int, steady: float) -> int:
        """Return the time of the owner's clock, or the highest time that the storages' clocks allow if that is less."""
        known = median(self._ahead)
        return own if known is None else min(own, known + round(1e6 * steady) + OWN_AHEAD_MAX)

    def corrected(self, own: int, steady: float) -> int:
        """Return the time of the owner's clock, or the nearest time that the storages' clocks allow. If their number is
        even, the owner's clock is one of those that decide, so that a single wrong clock is outvoted. The clock of one
        storage alone sets no lower bound."""
        if len(self._ahead) < 2:
            return self.bounded(own, steady)
        clocks = [ahead + round(1e6 * steady) for ahead in self._ahead.values()]
        middle = sorted(clocks if len(clocks) % 2 else [*clocks, own])[len(clocks) // 2]
        return min(max(own, middle - OWN_AHEAD_MAX), middle + OWN_AHEAD_MAX)


def median(values: Mapping[str, int]) -> int | None:
    """Return the lower median; None if there are no values."""
    return sorted(values.values())[(len(values) - 1) // 2] if values else None


def check_seen(seen: int, now: int, last: int = 0) -> None:
    """Raise `ClockAhead` if the highest time that a client has seen would move the log far ahead of `now`. `last`: the
    time of the log. A time that is not above `last` moves nothing."""
    if seen > last and seen > now + AHEAD_MAX:
        raise ClockAhead(
            f"the client has seen a time {(seen - now) / 1e6:.0f} seconds ahead of this server's clock; "
            f"{AHEAD_MAX // 1_000_000} are allowed"
        )


class HybridClock:
    def __init__(self, last: int) -> None:
        """`last`: the time of the last batch of the log."""
        self.last = last

    def next(self, now: int, seen: int = 0) -> int:
        """Return the time of the next batch. `seen` has passed `check_seen`."""
        self.last = max(self.last, now, seen)
        return self.last
