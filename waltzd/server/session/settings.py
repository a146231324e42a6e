"""Sizes, deadlines and turns that all partitions of a server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from uuid import UUID

from waltzd.server.session.archive_fetcher import ArchiveFetcher

PATIENCE_SECONDS = 0.3
"""Time that a session which could open waits for replicas that are nearly level."""
RENEWAL_PATIENCE_SECONDS = 0.1
"""The value of `PATIENCE_SECONDS` for a planned new session, during which transactions wait. It doubles, up to
`hand_over_seconds`, while a replica for which the session began is too slow to take part in it."""
DRAIN_SECONDS = 0.2
"""Time for which a planned new session holds back new records until all in flight is committed. The next attempt takes
longer."""
WAIT_SECONDS_MIN = 0.001
"""Shortest wait for a time of a clock other than the event loop's. A shorter wait may end before that clock has moved,
and a loop around it would spin."""
SETTLED_SECONDS = 2.0
"""Age from which a session may give way to another one for a replica that came later. It doubles with the patience."""
ACKNOWLEDGED_SECONDS = 10.0
"""Interval in which the partition's document gets how far each replica has acknowledged, while that rises. A replica that
later holds less has forgotten something, even if the owner is lost."""
TICK_SECONDS = 1.0
"""Interval in which the replicators of an open session are checked."""
GROUP_SESSION_BYTES = 8 << 20
"""Upper limit of `session_bytes_max` for the group log."""
RENEWALS_MAX = 1
"""Partitions of one server that begin a planned new session at a time. With two, both flush on the same storages, and
both pause for longer (docs/performance.md)."""
RECOVERIES_MAX = 16
"""Partitions of one server that are recovered at a time. All at once, none would be open before the last one; fewer than
this, and the processor would wait for the storages."""
RECOVERY_SECONDS_MAX = 1.0
"""Time after which the next partition is recovered, too, while this one still waits for its replicas."""


class RenewalTurns:
    """Limits how many partitions begin a planned new session at a time. A partition that has to wait is notified when it
    may try again."""

    def __init__(self, most: int = RENEWALS_MAX) -> None:
        self._free = most
        self._waiting: dict[Callable[[], None], None] = {}

    def take(self, ring: Callable[[], None]) -> bool:
        if self._free:
            self._free -= 1
            self._waiting.pop(ring, None)
            return True
        self._waiting[ring] = None
        return False

    def give_back(self) -> None:
        self._free += 1
        if self._waiting:
            ring = next(iter(self._waiting))
            del self._waiting[ring]
            ring()


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def since_boot() -> float:
    """Return seconds of a clock that goes on while this process is stopped and, on Linux, while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


def wall_clock() -> int:
    return time.time_ns() // 1000


def unbounded() -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    partitions: int
    key: UUID
    tail_bytes_max: int = 16 << 20
    """Bytes of the log cache of each partition."""
    session_bytes_max: int = 1 << 30
    """Bytes after which a planned new session begins, so that replicas have little to prove when they return."""
    storage_seconds: float = 10.0
    """Deadline of every call to a storage."""
    retry_seconds: float = 0.2
    """First pause after a replica failed, or the coordinator did not answer; it doubles a few times."""
    lease_seconds: float = 0.0
    """Time for which confirmed reads need no questions to storages after the last ones, or after an acknowledged append;
    0 if they always do."""
    clock: Callable[[], float] = since_boot
    """Clock of leases, in seconds."""
    hand_over_seconds: float = 1.0
    """Time for which a new owner waits until the old one has closed, and the old one for what is in flight."""
    catch_up_bytes_per_second: Callable[[], int] = unbounded
    """Present rate at which one replica copies from another; 0 for no limit."""
    trim_seconds: float = 10.0
    """Interval in which the trim floor is computed again. Retention policies are days, or many segments."""
    turns: RenewalTurns = field(default_factory=RenewalTurns)
    recoveries: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(RECOVERIES_MAX))
    """Turns of partitions at being recovered, first come, first served."""
    level: Callable[[], int] = lambda: 0
    """Present level of the cluster (`waltzd.protocol.level`); it may lag, and never falls."""
    archive: ArchiveFetcher | None = None
    """Reader of records that storages have trimmed; None without an archive."""
    backup_seconds: float = 0.0
    """Interval in which a storage uploads what is committed and not archived yet; 0 for never."""
    needed_from: Callable[[], int] | None = None
    """For the group log: the first id that its readers need. What is below is removed, also without an archive. None for
    a partition, where only archived records may be removed."""
    wall: Callable[[], int] = wall_clock
    """Clock in microseconds since 1970, for the moments of backups and the age of records."""

    def of_group_log(self, needed_from: Callable[[], int]) -> SessionSettings:
        """Return the settings of the group log. It stays short: new sessions begin often, so that all replicas soon have
        what may be removed. No reader needs records below its floor, so there is no archive to read. It is recovered
        without a turn, because the groups of all partitions wait for it."""
        size = min(self.session_bytes_max, GROUP_SESSION_BYTES)
        turn = asyncio.Semaphore()
        return replace(self, session_bytes_max=size, recoveries=turn, archive=None, needed_from=needed_from)
