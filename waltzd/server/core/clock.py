"""The hybrid clock of a partition: the time that each batch carries. Pure: the shell brings what its own clock shows.

A batch gets the highest of three times: that of the batch before, what the owner's clock shows, and the highest time that
the client has seen in any partition and passes on. So time never falls within a partition, a fail-over included, and an
effect is never earlier than its cause, across partitions too. It decides nothing: a wrong clock makes times wrong, and no
transaction.
"""

from __future__ import annotations

from collections.abc import Mapping

from waltzd.errors import ClockAhead

AHEAD_MAX = 60_000_000
"""So many microseconds a client's time may be ahead of the owner's clock. One wrong clock must not push the time of the
whole cluster into the future."""


OWN_AHEAD_MAX = 10_000_000
"""Microseconds that an owner's clock may be ahead of the median of its storages' clocks: more than clocks that are set by a
network differ, and less than what makes a moment wrong for people."""


class Witness:
    """What the storages of a partition say the time is, each of which told it once; they go on as the owner's steady clock
    does. So an owner whose clock is set wrong, or jumps, does not push the time of the log into the future."""

    def __init__(self) -> None:
        self._ahead: dict[str, int] = {}
        """Storage → microseconds that its clock is ahead of the owner's steady clock, which begins anywhere."""

    def heard(self, name: str, time: int, steady: float) -> None:
        """Take in what a storage tells. `time`: microseconds since 1970; 0 where it tells none. `steady`: seconds of the
        owner's steady clock."""
        if time > 0:
            self._ahead[name] = time - round(1e6 * steady)

    def bounded(self, own: int, steady: float) -> int:
        """What the owner's clock shows, as far as its storages confirm it."""
        known = median(self._ahead)
        return own if known is None else min(own, known + round(1e6 * steady) + OWN_AHEAD_MAX)


def median(values: Mapping[str, int]) -> int | None:
    """The lower one of the two in the middle; None of nothing."""
    return sorted(values.values())[(len(values) - 1) // 2] if values else None


def check_seen(seen: int, now: int, last: int = 0) -> None:
    """Refuse what a client passes on as the highest time that it has seen, where it would move the log far ahead of
    `now`. `last`: the time of the log. What is not above it moves nothing."""
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
        """The time of the next batch. `seen` was checked when it came."""
        self.last = max(self.last, now, seen)
        return self.last
