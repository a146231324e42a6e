"""Sizes, deadlines and turns that all partitions of a server share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from uuid import UUID

from waltzd.server.session.archive_lane import ArchiveLane

PATIENCE_SECONDS = 0.3
"""How long a session that could open waits for replicas that are nearly level."""
RENEWAL_PATIENCE_SECONDS = 0.1
"""The same while transactions wait for a planned new session."""
DRAIN_SECONDS = 0.2
"""How long a planned new session holds back what comes until all in flight is committed. The next attempt takes longer."""
WAIT_SECONDS_MIN = 0.001
"""The shortest wait for a time of a clock that is not the loop's: a shorter one may end before that clock has moved, and
whoever waits in a loop would go round without a pause."""
SETTLED_SECONDS = 2.0
"""How old a session is before it gives way to another one for the sake of a new member."""
ACKNOWLEDGED_SECONDS = 10.0
"""While marks move: how often the partition's document is told how far each replica has acknowledged. A replica that then
holds less is known to have forgotten something, whatever becomes of the owner."""
TICK_SECONDS = 1.0
"""How often the links of an open session are looked at."""
GROUP_SESSION_BYTES = 8 << 20
"""`session_bytes_max` of the group log, at most."""
RENEWALS_MAX = 1
"""So many partitions of one server begin a planned new session at a time. Two of them flush beside each other on the same
storages, and both are silent for longer (docs/performance.md)."""


class RenewalTurns:
    """To begin a planned new session. A partition that gets none is told when there may be one."""

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
    """In seconds; it goes on while this process is stopped and, on Linux, while the machine sleeps."""
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
    """For each partition."""
    session_bytes_max: int = 1 << 30
    """A planned new session after so many bytes, so that replicas have little to prove when they come back."""
    storage_seconds: float = 10.0
    """How long a storage may take to answer anything."""
    retry_seconds: float = 0.2
    """The first pause after a replica failed, or the coordinator did not answer; it doubles a few times."""
    lease_seconds: float = 0.0
    """How long confirmed reads need no round after the last one, or after an acknowledged append; 0: they always do."""
    clock: Callable[[], float] = since_boot
    """For leases."""
    hand_over_seconds: float = 1.0
    """How long a new owner waits for the old one to close, and the old one for what is in flight."""
    catch_up_bytes_per_second: Callable[[], int] = unbounded
    """How fast one replica copies from another just now; 0 for as fast as it can."""
    trim_seconds: float = 10.0
    """Between two looks whether storages need not keep something any more: policies are days, or many segments."""
    turns: RenewalTurns = field(default_factory=RenewalTurns)
    archive: ArchiveLane | None = None
    """Where readers find what storages have trimmed."""
    backup_seconds: float = 0.0
    """How often a storage is asked to upload what is committed and not archived yet; 0: never."""
    needed_from: Callable[[], int] | None = None
    """Of the group log: the first id that whoever reads it needs. What is below goes, also where there is no archive. None:
    of a partition, where only what is archived may go."""
    wall: Callable[[], int] = wall_clock
    """Microseconds since 1970, for the moments of backups and the age of what storages keep."""

    def of_group_log(self, needed_from: Callable[[], int]) -> SessionSettings:
        """It stays short: new sessions begin often, so that what may go is on all replicas soon. Nobody reads below its
        floor, so no archive is asked for that."""
        size = min(self.session_bytes_max, GROUP_SESSION_BYTES)
        return replace(self, session_bytes_max=size, archive=None, needed_from=needed_from)
