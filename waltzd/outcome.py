"""What can become of a transaction that was submitted, and why one was refused. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias


class Reason(enum.IntEnum):
    """Why a transaction is not in the log."""

    REAL = 1
    """A lock was marked by a committed transaction that the client had not seen."""
    IN_FLIGHT = 2
    """A lock was marked by a transaction that is not decided yet."""
    FLOOR = 3
    """The lock table no longer knows this lock: the client lags further behind than the table reaches."""
    NEW_OWNER = 4
    """The lock table is new, and the client lags behind the mark with which it began."""
    LOST = 5
    """It never reached the log: a fail-over came between."""


@dataclass(frozen=True)
class Committed:
    """It is on the disks of a majority, under this id, for ever."""

    id: int


@dataclass(frozen=True)
class Rejected:
    """It is not in the log and never will be. `conflict_id`: the client must have seen this id before it tries again."""

    reason: Reason
    conflict_id: int = -1
    lock: int | None = None
    """The hash of the lock that failed."""


@dataclass(frozen=True)
class Unknown:
    """The connection was lost before the answer came; the next mount decides."""


Outcome: TypeAlias = Committed | Rejected | Unknown
