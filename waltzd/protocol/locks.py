"""Locks, the outcomes that follow from them, and how an owner explains one. Pure.

A lock is 64 bits and a mode. READ is checked: "my decision depends on this". WRITE is checked and marks: "I read this and
change it". APPEND marks without being checked: "I change this in any case", so appenders never conflict with each other,
and readers notice.

A transaction says up to which id its client has seen the log; each of its locks has a mark, and the transaction is refused
when a mark is above that. The table knows the marks of the locks that were marked last. For any other lock it answers with
its floor, an *estimate*: the lock was marked there or before, or never. So with an estimate a refusal may be needless, and
every acceptance is right.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from operator import index
from typing import NamedTuple, TypeAlias

from waltzd.errors import BadArgument
from waltzd.protocol.quorum import EMPTY


class Mode(enum.IntEnum):
    READ = 1
    WRITE = 2
    APPEND = 3


@dataclass(frozen=True)
class Lock:
    """Something of the application that transactions conflict over: a name, a number and a mode. Use `read_lock`,
    `write_lock` and `append_lock` to make one.

    Raises:
        BadArgument: The mode is no `Mode`.

    Example:
        ```python
        builder.locks = [write_lock("account", 7), read_lock("exchange rate"), append_lock("journal")]
        ```
    """

    name: str
    id: int
    mode: Mode = Mode.WRITE

    def __post_init__(self) -> None:
        if type(self.mode) is not Mode:
            raise BadArgument(f"the mode of a lock is READ, WRITE or APPEND, not {self.mode!r}")

    @property
    def hash(self) -> int:
        """The 64 bits by which the log knows it. `BadArgument` when the name is no text or the number no integer."""
        return lock_hash(self.name, self.id)


class LoggedLock(NamedTuple):
    """A lock of a transaction as the log keeps it: without its name. `Lock.hash` says which one it is."""

    hash: int
    """The 64 bits of `Lock.hash`."""
    mode: Mode


def read_lock(name: str, id: int = 0) -> Lock:
    """A lock that is checked: the transaction is rejected when one that its client had not seen has marked it."""
    return Lock(name, id, Mode.READ)


def write_lock(name: str, id: int = 0) -> Lock:
    """A lock that is checked like a `read_lock`, and marked by the transaction."""
    return Lock(name, id, Mode.WRITE)


def append_lock(name: str, id: int = 0) -> Lock:
    """A lock that is marked without being checked: the transaction cannot fail by it, and readers notice."""
    return Lock(name, id, Mode.APPEND)


NAMESPACE_BITS = 16
_ID_BITS = 64 - NAMESPACE_BITS


@lru_cache(maxsize=1 << 16)
def lock_hash(name: str, id: int) -> int:
    """The namespace in the highest 16 bits; in the 48 below it a BLAKE2b of 6 bytes, big-endian, over the id (8 bytes,
    big-endian) and the UTF-8 of the whole name.

    Any client in any language must compute the same, or two of them do not see each other's locks."""
    try:
        raw = (index(id) & (1 << 64) - 1).to_bytes(8, "big") + name.encode()
    except (TypeError, AttributeError, UnicodeEncodeError) as error:
        raise BadArgument(f"a lock has a name of text and an integer, not {name!r} and {id!r}") from error
    return namespace_of(name.partition(".")[0]) << _ID_BITS | int.from_bytes(blake2b(raw, digest_size=6).digest(), "big")


@lru_cache(maxsize=1 << 12)
def namespace_of(prefix: str) -> int:
    """A BLAKE2b of 2 bytes, big-endian, over the UTF-8 of the part of a lock's name in front of its first dot: by it a
    server tells whose lock it is, though it never learns the name."""
    return int.from_bytes(blake2b(prefix.encode(), digest_size=2).digest(), "big")


class Reason(enum.IntEnum):
    """Why a transaction was rejected: `Rejected.reason`. All but LOST speak of a lock."""

    CONFLICT = 1
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
    """The outcome of a transaction that is on the disks of a majority, under this id, for ever; of a group, under this id
    and those behind it.

    Example:
        ```python
        match await client.append(b"hello", key="alice"):
            case Committed(id):
                print(f"it is transaction {id}")
            case Rejected(reason, conflict_id):
                print(f"{reason.name}: transaction {conflict_id} was in the way")
            case Unknown():
                print("look for it in the view before trying again")
        ```
    """

    id: int
    count: int = 1
    """Of how many transactions: 1, or all those of a group."""

    @property
    def ids(self) -> range:
        """The ids of all of them."""
        return range(self.id, self.id + self.count)


@dataclass(frozen=True)
class Rejected:
    """The outcome of a transaction, or a group, that is not in the log and never will be."""

    reason: Reason
    conflict_id: int = -1
    """The view must hold this id before another attempt can succeed."""
    lock: int | None = None
    """The hash of the lock that failed."""


@dataclass(frozen=True)
class Unknown:
    """The outcome of a transaction, or a group, that was sent and not decided before the deadline: it may be in the log or
    not, and the client did not send it again. A group is in the log as a whole, or not at all."""


Outcome: TypeAlias = Committed | Rejected | Unknown


@dataclass(frozen=True, kw_only=True)
class LockExplanation:
    lock: int
    """Its 64 bits."""
    mark: int
    """Marked by this transaction; or, in an estimate, by none above it. -1: by none at all."""
    reason: Reason
    """Why a transaction whose client has seen less would be refused."""
    committed: int
    last_id: int
    """The highest id that was given out, committed or not."""
    session: int
    low_mark: int
    """Where the session began, and the table with it."""
    floor: int
    locks: int
    locks_max: int

    @property
    def is_exact(self) -> bool:
        """The table has the lock; or its floor is below all ids, so that nothing can have marked it."""
        return self.reason in (Reason.CONFLICT, Reason.IN_FLIGHT) or self.mark == EMPTY

    @property
    def marker(self) -> int | None:
        """The transaction that marked it, where that is known."""
        return self.mark if self.is_exact and self.mark != EMPTY else None

    @property
    def is_in_flight(self) -> bool:
        return self.mark > self.committed

    def accepts(self, mode: Mode, seen: int) -> bool:
        """Whether this lock would let a transaction pass at this moment, whose client has seen the log up to `seen`."""
        return mode is Mode.APPEND or self.mark <= seen
