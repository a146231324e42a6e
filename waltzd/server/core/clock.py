"""The hybrid clock of a partition: the time that each batch carries. Pure: the shell brings what its own clock shows.

A batch gets the highest of three times: that of the batch before, what the owner's clock shows, and the highest time that
the client has seen in any partition and passes on. So time never falls within a partition, a fail-over included, and an
effect is never earlier than its cause, across partitions too. It decides nothing: a wrong clock makes times wrong, and no
transaction.
"""

from __future__ import annotations

from waltzd.errors import ClockAhead

AHEAD_MAX = 60_000_000
"""So many microseconds a client's time may be ahead of the owner's clock. One wrong clock must not push the time of the
whole cluster into the future."""


def check_seen(seen: int, now: int) -> None:
    """Refuse what a client passes on as the highest time that it has seen."""
    if seen > now + AHEAD_MAX:
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
