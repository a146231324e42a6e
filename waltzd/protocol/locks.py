"""Locks, the outcomes of transactions, and the explanation of a lock by an owner. Pure.

A lock is 64 bits and a mode. READ is checked: "my decision depends on this". WRITE is checked and marks: "I read this and
change it". APPEND marks without being checked: "I change this in any case", so appenders never conflict with each other,
and readers notice.

A transaction contains the highest id that its client has seen. Each lock has a mark, the id of the last transaction that
marked it; the transaction is rejected if a mark is above the id that the client has seen. The lock table holds the marks of
recently marked locks. For any other lock it returns its floor, an *estimate*: the lock was marked at or below the floor, or
never. So a rejection by an estimate may be needless, but every acceptance is correct.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field, fields
from functools import lru_cache
from hashlib import blake2b
from operator import index
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast
from uuid import UUID

from waltzd.errors import BadArgument, OutcomeUnknown, TransactionDeclined, TransactionRefused
from waltzd.format.layout import ID_MAX
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import FIRST


class Mode(enum.IntEnum):
    READ = 1
    WRITE = 2
    APPEND = 3


LockId: TypeAlias = int | str | UUID


@dataclass(frozen=True)
class Lock:
    """A thing of the application that transactions conflict over: a name, an id and a mode. Use `read_lock`,
    `write_lock` and `append_lock` to make one.

    **Locks hold within one partition**: two transactions in different partitions never conflict. So the name says what
    stays together in one partition, and the id which thing of it is meant. A transaction that names neither partition
    nor key goes to the partition of the name of its locks.

    The id is an integer, a text or a UUID. A UUID is the same as its text; `7` and `"7"` are two locks.

    Raises:
        BadArgument: The name is no text, the id none of these, or the mode no `Mode`.

    Example:
        ```python
        builder.locks = [write_lock("account", 7), read_lock("exchange rate"), append_lock("journal")]
        ```
    """

    name: str
    """Name of the set of things that stay together in one partition. Its part before the first dot is the namespace that a
    policy can name."""
    id: LockId = 0
    """Id of the thing: an integer, a text or a UUID."""
    mode: Mode = Mode.WRITE
    """Whether it is checked, marked, or both."""

    def __post_init__(self) -> None:
        if type(self.mode) is not Mode:
            raise BadArgument(f"the mode of a lock is READ, WRITE or APPEND, not {self.mode!r}")
        lock_hash(self.name, self.id)  # an invalid lock is refused here, where it is made

    @property
    def hash(self) -> int:
        """The 64 bits that the log contains for the lock."""
        return lock_hash(self.name, self.id)


class LoggedLock(NamedTuple):
    """A lock of a transaction as it is in the log: without its name. Compare it with `Lock.hash`."""

    hash: int
    """The 64 bits of `Lock.hash`."""
    mode: Mode
    """Whether it was checked, marked, or both."""


def read_lock(name: str, id: LockId = 0) -> Lock:
    """Return a lock that is checked: the transaction is rejected if one that its client had not seen has marked it."""
    return Lock(name, id, Mode.READ)


def write_lock(name: str, id: LockId = 0) -> Lock:
    """Return a lock that is checked like a `read_lock`, and marked by the transaction."""
    return Lock(name, id, Mode.WRITE)


def append_lock(name: str, id: LockId = 0) -> Lock:
    """Return a lock that is marked without being checked: it never causes a rejection of this transaction."""
    return Lock(name, id, Mode.APPEND)


NAMESPACE_BITS = 16
_ID_BITS = 64 - NAMESPACE_BITS


def lock_hash(name: str, id: LockId) -> int:
    """Return the 64 bits of a lock.

    The highest 16 bits are the namespace. The lower 48 are a BLAKE2b of 6 bytes, big-endian, over the id and the UTF-8 of
    the whole name. An integer id is 8 bytes, big-endian; a text is the 8 bytes of BLAKE2b over its UTF-8; a UUID is hashed
    as its text. Clients in all languages must compute these bits, or they miss each other's locks."""
    try:
        if isinstance(id, UUID):
            id = str(id)
        if isinstance(name, str) and not isinstance(id, bool):
            return _hash(name, id if isinstance(id, str) else index(id))
    except (TypeError, UnicodeEncodeError):
        pass  # the error is raised below
    raise BadArgument(f"a lock has a name of text, and an integer, a text or a UUID as its id, not {name!r} and {id!r}")


@lru_cache(maxsize=1 << 16)
def _hash(name: str, id: int | str) -> int:
    if isinstance(id, str):
        raw = blake2b(id.encode(), digest_size=8).digest()
    else:
        raw = (id & (1 << 64) - 1).to_bytes(8, "big")
    raw = blake2b(raw + name.encode(), digest_size=6).digest()
    return namespace_of(name.partition(".")[0]) << _ID_BITS | int.from_bytes(raw, "big")


@lru_cache(maxsize=1 << 12)
def namespace_of(prefix: str) -> int:
    """Return the namespace of a lock's prefix, the part of its name before the first dot: a BLAKE2b of 2 bytes, big-endian,
    over its UTF-8. Servers check grants by it, because they never get the name."""
    return int.from_bytes(blake2b(prefix.encode(), digest_size=2).digest(), "big")


LOCK_ID_MIN, LOCK_ID_MAX = -(1 << 63), (1 << 64) - 1
_MARKED = re.compile(r"(?P<bits>[0-9a-fA-F]{16})|(?:(?:read|write|append):)?(?P<name>.+):(?P<id>[^:]+)", re.DOTALL)
_INTEGER = re.compile(r"-?[0-9]+")


def marked_lock(text: str) -> Lock | int:
    """Parse a lock whose mode does not matter: `NAME:ID`, also with a mode in front, or the 16 hex digits of its hash."""
    found = _MARKED.fullmatch(text)
    if found is None:
        raise BadArgument(
            f"{text[:40]!r} is not a lock",
            not_done="nothing was read",
            next_step="write it as NAME:ID, like account:17, or as the 16 hex digits that `waltzctl txn get --locks` shows",
        )
    return int(found["bits"], 16) if found["bits"] else Lock(found["name"], lock_id(found["id"]))


def lock_id(text: str) -> int | str:
    """Parse the id of a lock: an integer if it looks like one, else a text."""
    if not _INTEGER.fullmatch(text):
        return text
    if len(text) > len(str(LOCK_ID_MIN)) or not LOCK_ID_MIN <= (number := int(text)) <= LOCK_ID_MAX:
        raise BadArgument(f"an integer as the id of a lock has 64 bits; {text[:40]} does not fit")
    return number


class Reason(enum.IntEnum):
    """Reason of a rejection: `Rejected.reason`. Each reason but NOT_IN_LOG concerns a lock of the transaction."""

    CONFLICT = 1
    """A committed transaction that the client's view did not contain marked the lock."""
    IN_FLIGHT = 2
    """A transaction that is not decided yet marked the lock."""
    TOO_FAR_BEHIND = 3
    """The client's view is so old that the lock table no longer remembers whether the lock was marked since."""
    OWNER_CHANGED = 4
    """The partition has a new owner, whose lock table begins above the position of the client's view."""
    NOT_IN_LOG = 5
    """The transaction is not in the log and never will be: a fail-over came between, or an operator ended the log below
    the transaction, or below the id that the transaction relied on."""


@dataclass(frozen=True)
class Token:
    """The place of a committed transaction, to wait for it in a view: here or in another process.

    `str(token)` is a short text that fits into an HTTP header or a cookie, and `Token.parse` reads it. It means something
    in one cluster only, and it is no secret.

    Raises:
        BadArgument: A number is no integer from 0 on.

    Example:
        ```python
        response.headers["x-log-token"] = str(outcome.token)
        await client.wait_applied(Token.parse(request.headers["x-log-token"]), timeout=2)
        ```
    """

    partition: int
    """The partition that holds it."""
    id: int
    """Its id there; of a group, that of the last one."""
    timeline: UUID = FIRST
    """The timeline of the log in which it has that id."""

    def __post_init__(self) -> None:
        for number in (self.partition, self.id):
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 63:
                raise BadArgument(f"a token has a partition and an id, both integers from 0 on, not {number!r}")

    def __str__(self) -> str:
        known = f"{self.partition}-{self.id}"
        return known if self.timeline == FIRST else f"{known}-{self.timeline.hex}"

    @classmethod
    def parse(cls, text: str) -> Token:
        """Parse the text of a token.

        Raises:
            BadArgument: The text is not a token.
        """
        found = _TOKEN.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise BadArgument(f"{str(text)[:60]!r} is no token of a committed transaction: it looks like 3-1024")
        return cls(int(found[1]), int(found[2]), FIRST if found[3] is None else UUID(found[3]))


_TOKEN = re.compile(r"([0-9]{1,10})-([0-9]{1,19})(?:-([0-9a-f]{32}))?", re.ASCII)


class _AnyOutcome:
    """Methods of all outcomes.

    Two outcomes of one class are equal if their contents are, and their partitions. The partition is not compared if one
    of them has none, because a program made it itself: `assert outcome == Committed(0)`."""

    partition: int | None
    timeline: UUID = FIRST

    @property
    def ok(self) -> bool:
        """True for `Committed`, False for any other outcome."""
        return isinstance(self, Committed)

    def or_raise(self) -> Committed:
        """Return the outcome if it is `Committed`; raise an error that contains the cause otherwise.

        Raises:
            TransactionRefused: The transaction was rejected.
            TransactionDeclined: `Command.build` declined; the message is its reason.
            OutcomeUnknown: The transaction was sent, and its outcome is unknown: it may be in the log.

        Example:
            ```python
            committed = (await client.append(b"hello", key="alice")).or_raise()
            ```
        """
        where = "the partition" if self.partition is None else f"partition {self.partition}"
        match self:
            case Committed():
                return self
            case Rejected(reason, conflict_id, lock):
                name = "" if lock is None else f", lock {lock:016x}"
                conflict = "" if conflict_id == EMPTY else f", transaction {conflict_id}"
                raise TransactionRefused(f"{where} rejected the transaction: {reason.name}{name}{conflict}")
            case Declined(reason):
                raise TransactionDeclined(reason or "the command declined, and gave no reason")
        raise OutcomeUnknown(f"{where} did not report the outcome of the transaction in time")

    def __bool__(self) -> NoReturn:
        raise TypeError(f"an outcome is neither true nor false ({self!r}): use `outcome.ok`, or `match` its class")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _AnyOutcome) or type(other) is not type(self):
            return NotImplemented
        is_placed = self.partition is not None and other.partition is not None
        places = (self.partition, self.timeline), (other.partition, other.timeline)
        return self._content() == other._content() and (not is_placed or places[0] == places[1])

    def __hash__(self) -> int:
        return hash((type(self), self._content()))

    def _content(self) -> tuple[object, ...]:
        return tuple(getattr(self, one.name) for one in fields(cast(Any, self)) if one.compare)


@dataclass(frozen=True, eq=False)
class Committed(_AnyOutcome):
    """Outcome: the transaction is on the disks of a majority and keeps this id for ever. An atomic append has this id and
    the following ones.

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
    """Id in its partition; for a group, the id of the first transaction."""
    count: int = 1
    """Number of transactions: 1, or the size of the group."""
    partition: int | None = field(default=None, compare=False)
    """Partition of the transaction; None only in an outcome that a program made itself."""
    is_applied: bool = field(default=False, compare=False)
    """Whether the client's view had the transaction when the call returned. True only after `submit` with
    `wait="applied"`."""
    timeline: UUID = field(default=FIRST, compare=False)
    """The timeline of the log in which it has this id; another one after an operator has ended the log below it."""

    @property
    def ids(self) -> range:
        """Ids of the transaction, or of all transactions of the group."""
        return range(self.id, self.id + self.count)

    @property
    def token(self) -> Token:
        """Token for `Client.wait_applied` and `SqlView.wait`; for a group, the token of its last transaction.

        Raises:
            BadArgument: The program made this outcome itself, without a partition.
        """
        if self.partition is None:
            raise BadArgument(f"{self!r} does not say in which partition it is")
        return Token(self.partition, self.ids[-1], self.timeline)


def token_of(given: Token | Committed) -> Token:
    """Return the token of a committed outcome; raise `BadArgument` for anything else."""
    if isinstance(given, Token):
        return given
    if isinstance(given, Committed):
        return given.token
    raise BadArgument(f"only what is committed comes into a view: wait for a `Committed` or its token, not for {given!r}")


@dataclass(frozen=True, eq=False)
class Rejected(_AnyOutcome):
    """The outcome of a transaction, or a group, that is not in the log and never will be."""

    reason: Reason
    """Reason of the rejection."""
    conflict_id: int = -1
    """The view must hold this id before another attempt can succeed."""
    lock: int | None = None
    """The hash of the lock that failed."""
    partition: int | None = field(default=None, compare=False)
    """Partition of the transaction; None only in an outcome that a program made itself."""


@dataclass(frozen=True, eq=False)
class Unknown(_AnyOutcome):
    """The outcome of a transaction, or a group, that was sent and not decided before the deadline: it may be in the log or
    not, and the client did not send it again. A group is in the log as a whole, or not at all."""

    partition: int | None = field(default=None, compare=False)
    """Partition of the transaction; None only in an outcome that a program made itself."""


@dataclass(frozen=True, eq=False)
class Declined(_AnyOutcome):
    """The result of `submit` if `Command.build` declined: it called `Builder.decline`, or returned False. Nothing was
    sent.

    The answer is confirmed: the view had applied everything that any client had committed when `submit` was called.
    It is not confirmed with `fresh=False`, in a call of the view itself, or by a client without a view."""

    reason: str = ""
    """Reason that `build` gave to `Builder.decline`; empty if it gave none."""
    token: Token | None = field(default=None, compare=False)
    """Place of the last transaction that the view contained, to show the same state elsewhere (`Client.wait_applied`).
    None if the view was empty, or the client has no view."""
    partition: int | None = field(default=None, compare=False)
    """Partition of the command; None only in an outcome that a program made itself."""


AppendOutcome: TypeAlias = Committed | Rejected | Unknown
"""Result of `append`: the transaction is in the log, is not, or that is unknown."""
Outcome: TypeAlias = AppendOutcome | Declined
"""Result of `submit`. A type checker verifies that a `match` with `assert_never` has a case for each."""


HISTORY_IDS_MAX = 10_000
"""Largest `limit` of a history."""


@dataclass(frozen=True, kw_only=True)
class History:
    """Committed transactions that marked a lock: the result of `Client.history`.

    A READ lock marks nothing, so a transaction that only read under the lock is not listed. The log keeps 64 bits of a
    lock; a transaction under another lock with the same bits is listed too, which is very rare."""

    partition: int
    """Partition of the lock."""
    ids: tuple[int, ...]
    """Ids of the transactions, ascending; descending with `newest_first`."""
    end: Position
    """Highest id that was considered, or -1. Give it to `append` as `position`: the locks of that transaction are then
    checked against everything that is not in this history."""
    has_more: bool = False
    """Whether `limit` ended the answer. Continue with `after=ids[-1]`, or `through=ids[-1] - 1` with `newest_first`."""


@dataclass(frozen=True, kw_only=True)
class HistoryPart:
    """Answer of an owner to the start of a request for a history."""

    history: History
    through: int | None = None
    """Last id that was considered, in the direction of the request; None if the answer is complete."""


MARKED_LOCKS_MAX = 1000
"""Largest number of locks of a `MarkedQuery`."""
MARKED_MAX = 1000
"""Largest `limit` of a `MarkedQuery`."""


@dataclass(frozen=True, kw_only=True)
class MarkedQuery:
    """A question for committed transactions that marked all locks of one of several groups.

    The locks of an answer are a necessary condition: among transactions of old segments some may have marked only one lock
    of a group."""

    groups: tuple[tuple[int, ...], ...]
    """Groups of locks, by their 64 bits. No group is empty."""
    first_id: int = 0
    last_id: int = ID_MAX
    limit: int
    """Largest number of transactions in the answer; at least 1."""
    newest_first: bool = False


@dataclass(frozen=True, kw_only=True)
class MarkedPage:
    """Answer of an owner to the start of a `MarkedQuery`."""

    records: tuple[memoryview, ...]
    """Whole records by ascending id, or descending with `newest_first`."""
    end: Position
    """Highest id that was considered: the high-water mark, or the last id of the query."""
    through: int | None = None
    """Last id that was considered, in the direction of the query; None if the answer is complete."""


@dataclass(frozen=True, kw_only=True)
class LockExplanation:
    """The state of a lock in the lock table of its partition's owner."""

    lock: int
    """64 bits of the lock."""
    mark: int
    """Id of the transaction that marked the lock; if it is an estimate, no higher id marked it. -1 if none did."""
    reason: Reason
    """Reason with which a transaction is rejected whose client has seen less than `mark`."""
    committed: int
    last_id: int
    """Highest id that was assigned, committed or not."""
    session: int
    low_mark: int
    """Mark at which the session, and its lock table, began."""
    floor: int
    locks: int
    locks_max: int

    @property
    def is_exact(self) -> bool:
        """True if `mark` is no estimate: the table has the lock, or no transaction can have marked it."""
        return self.reason in (Reason.CONFLICT, Reason.IN_FLIGHT) or self.mark == EMPTY

    @property
    def marker(self) -> int | None:
        """Id of the transaction that marked the lock; None if unknown."""
        return self.mark if self.is_exact and self.mark != EMPTY else None

    @property
    def is_in_flight(self) -> bool:
        return self.mark > self.committed

    def accepts(self, mode: Mode, seen: int) -> bool:
        """Return whether this lock would now accept a transaction whose client has seen ids up to `seen`."""
        return mode is Mode.APPEND or self.mark <= seen
