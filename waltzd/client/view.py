"""Transactions as an application reads and writes them: views, commands, and the values of payloads.

A view has a position, and applies each transaction once, in order (`waltzd.client.follower` feeds it). A command builds
a transaction: it reads the view and returns what to write under which locks. Nothing here knows a connection."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import islice, repeat
from operator import index
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias
from uuid import UUID

from waltzd.errors import BadArgument
from waltzd.errors.operations import BadFrame
from waltzd.format.batch import Flags
from waltzd.format.checksum import I64, crc32
from waltzd.format.record import HEAD_BYTES, NO_TIME, TRAILER_BYTES, LockColumns, Run, heads
from waltzd.protocol.batches import PROBE_KIND, HeadFeed
from waltzd.protocol.locks import Lock, LoggedLock, Mode, Outcome, Rejected
from waltzd.protocol.positions import Position, timeline_of
from waltzd.protocol.quorum import EMPTY
from waltzd.protocol.timelines import FIRST, Lineage

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    E = TypeVar("E", default=bytes)
    E_co = TypeVar("E_co", covariant=True, default=bytes)
    E_contra = TypeVar("E_contra", contravariant=True, default=bytes)
else:  # Python 3.11 and 3.12 have no defaults of type variables
    from typing import TypeVar

    E, E_co, E_contra = TypeVar("E"), TypeVar("E_co", covariant=True), TypeVar("E_contra", contravariant=True)

KIND_MIN, KIND_MAX = -(1 << 31), (1 << 31) - 1
POSITION_MAX = (1 << 63) - 1
EPOCH, MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)


class Serializer(Protocol[E]):
    """Translation between values and payloads: the argument `serializer` of a client.

    A `Serializer[E]` is for values of the type E, and makes its client a `Client[E]`: the values that such a client
    appends, builds, reads and feeds have that type. Without a serializer, values are bytes. `waltzd.serializers` has
    some.

    Two more methods are called if they exist. `kind_of(value)` returns the kind of a transaction that is given none.
    `is_foreign(payload)` returns whether another application wrote a payload (`Transaction.is_foreign`).

    Example:
        ```python
        class Text:
            def encode(self, value: str) -> bytes:
                return value.encode()

            def decode(self, payload: bytes) -> str:
                return payload.decode()
        ```
    """

    def encode(self, value: E, /) -> bytes:
        """Return the payload of a value."""
        ...

    def decode(self, payload: bytes, /) -> E:
        """Return the value of a payload. `Transaction.value` raises what this raises."""
        ...


Partitioner: TypeAlias = Callable[[Any, int], int]
"""Function that returns the partition of a key, given the number of partitions."""


def partition_by_hash(key: Any, count: int) -> int:
    """Return the partition of a key, as the default partitioner.

    Clients in every language must compute the same number: the first 8 bytes, big-endian, of BLAKE2b over the key, modulo
    the number of partitions. Text is encoded as UTF-8, an integer as 8 bytes, big-endian, and a UUID as its text."""
    if isinstance(key, str):
        raw = key.encode()
    elif isinstance(key, int):
        raw = (key & (1 << 64) - 1).to_bytes(8, "big")
    elif isinstance(key, bytes):
        raw = key
    elif isinstance(key, UUID):
        raw = str(key).encode()
    else:
        raise BadArgument(
            f"a key must be a text, bytes, an integer or a UUID, not {type(key).__name__}, or give another partitioner"
        )
    return int.from_bytes(blake2b(raw, digest_size=8).digest(), "big") % count


def key_of(key: Any, locks: Sequence[Lock]) -> Any:
    """Return the key of a transaction that names no partition: its own key, or else the name of its locks. So
    transactions with a lock in common are in one partition, where locks hold."""
    if key is not None:
        return key
    names = sorted({lock.name for lock in locks})
    if not names:
        raise BadArgument(
            "the transaction has no partition, key or locks; give one of them (the key defaults to the name of the locks)"
        )
    if len(names) > 1:
        raise BadArgument(
            f"locks hold within one partition, and the locks {', '.join(names)} give no default key",
            next_step="give the partition, or one key for all transactions that have one of these locks",
        )
    return names[0]


def encoded(value: Any, serializer: Serializer[Any] | None) -> bytes:
    """Return the payload of a value."""
    payload = value if serializer is None else serializer.encode(value)
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, bytearray | memoryview):
        return bytes(payload)
    raise BadArgument(f"a payload must be bytes, not {type(payload).__name__}, or give the client a serializer")


def kind_of(value: Any, serializer: Serializer[Any] | None) -> int:
    """Return the kind that the serializer gives to a value; 0 if it gives none."""
    function: Callable[[Any], int] | None = getattr(serializer, "kind_of", None)
    return 0 if function is None else checked_kind(function(value))


def checked_kind(kind: int) -> int:
    if kind == PROBE_KIND:
        raise BadArgument(f"the kind {PROBE_KIND:#x} is reserved for probes of operators, which no application is fed")
    return _checked_integer(kind, KIND_MIN, KIND_MAX, "a kind is an integer of 32 bits with a sign; {} does not fit")


def checked_position(position: int) -> Position:
    checked = _checked_integer(position, EMPTY, POSITION_MAX, "a position is -1 or an id, not {}")
    return Position(checked, timeline_of(position))


def checked_id(id: int) -> int:
    return _checked_integer(id, 0, POSITION_MAX, "ids start at 0; {} is none")


def checked_time(time: datetime | int) -> int:
    """Return a time in microseconds since 1970, the earliest time of a log."""
    if isinstance(time, datetime):
        if time.utcoffset() is None:
            raise BadArgument(f"the time {time.isoformat()} has no time zone; use for example `datetime.now(UTC)`")
        return max(0, (time - EPOCH) // MICROSECOND)
    return _checked_integer(
        time, 0, POSITION_MAX, "a time is a datetime with a time zone, or microseconds since 1970, not {}"
    )


def _checked_integer(value: int, lowest: int, highest: int, what: str) -> int:
    """Return an integer, also one of numpy. Refuse what does not fit into a frame: a frame that cannot be made holds up
    all transactions in it."""
    try:
        found = index(value)
    except TypeError:
        raise BadArgument(what.format(repr(value))) from None
    if not lowest <= found <= highest:
        raise BadArgument(what.format(found))
    return found


# -- what comes --------------------------------------------------------------------------------------------------------


class Transaction(Generic[E_co]):
    """One committed transaction, as views and reads get it. A `Transaction[E]` has a `value` of the type E.

    Example:
        ```python
        transaction = await client.read(partition=0, id=17)
        print(transaction.kind, transaction.payload)
        ```

    Attributes:
        partition: Partition of the transaction.
        id: Id in its partition: 0, 1, 2, … without a gap.
        kind: Kind that was appended beside the payload: an integer of 32 bits with a sign.
        length: Bytes of the payload.
        payload_crc: CRC-32 of the payload.
        request: Request id, unique in its partition: (client, generation, sequence).
        time_us: Time at which its owner took it, in microseconds since 1970; see `time`. It never decreases within a
            partition. None in format 0.
        follows: Whether it belongs to the atomic append of the transaction before it.
        locks: Its locks, if a read asked for them, else None.
        timeline: Identity of the timeline of the log in which it has its id: `UUID(int=0)`, the first one, until an
            operator ends the log below an acknowledged id. After a read by id alone it is the first one.
        lineage: All timelines of the log, if it was fed; else None.
    """

    __slots__ = (
        "_fetch",
        "_payload",
        "_serializer",
        "follows",
        "id",
        "kind",
        "length",
        "lineage",
        "locks",
        "partition",
        "payload_crc",
        "request",
        "time_us",
        "timeline",
    )

    def __init__(
        self,
        partition: int,
        id: int,
        kind: int,
        length: int,
        payload_crc: int,
        request: tuple[int, int, int],
        payload: bytes | None,
        fetch: Callable[[Transaction[Any]], Awaitable[bytes]] | None,
        serializer: Serializer[Any] | None,
        time_us: int | None = None,
        follows: bool = False,
        locks: tuple[LoggedLock, ...] | None = None,
        lineage: Lineage | None = None,
        timeline: UUID = FIRST,
    ) -> None:
        self.lineage = lineage
        self.timeline = timeline
        self.partition = partition
        self.id = id
        self.kind = kind
        self.length = length
        self.payload_crc = payload_crc
        self.request = request
        self.time_us = time_us
        self.follows = follows
        self.locks = locks
        self._payload = payload
        self._fetch = fetch
        self._serializer = serializer

    def __repr__(self) -> str:
        return f"Transaction(partition={self.partition}, id={self.id}, kind={self.kind}, length={self.length})"

    @property
    def position(self) -> Position:
        """Id together with its timeline: the position that a view or a follower keeps."""
        return Position(self.id, self.timeline)

    @property
    def time(self) -> datetime | None:
        """Time at which its owner took it, in UTC. None in format 0."""
        return None if self.time_us is None else EPOCH + self.time_us * MICROSECOND

    @property
    def payload(self) -> bytes:
        """Bytes of the payload.

        Raises:
            BadArgument: It was fed as a head (`FeedMode.HEADS`), and `fetch` was not awaited yet.
        """
        if self._payload is None:
            raise BadArgument(f"the payload of {self!r} was not fed (FeedMode.HEADS): use `await transaction.fetch()`")
        return self._payload

    @property
    def value(self) -> E_co:
        """Payload as the client's serializer decodes it; the bytes if there is no serializer. It raises what `payload`
        and the serializer raise."""
        payload: Any = self.payload
        value: E_co = payload if self._serializer is None else self._serializer.decode(payload)
        return value

    @property
    def is_foreign(self) -> bool:
        """True for a probe of an operator, and for what the serializer finds foreign because it has a `prefix`.
        Views, feeds, scans and consumer groups pass over foreign transactions. The payload of a head is not examined."""
        if self.kind == PROBE_KIND:
            return True
        function: Callable[[bytes], bool] | None = getattr(self._serializer, "is_foreign", None)
        return function is not None and self._payload is not None and function(self._payload)

    async def fetch(self) -> bytes:
        """Return the payload; fetch it from the owner and check it if it did not come with the feed.

        Raises:
            CannotConnect: The owner did not answer within `submit_seconds`.
            WaltzError: The payload that came does not match the head of the transaction.
        """
        if self._payload is None:
            assert self._fetch is not None
            payload = await self._fetch(self)
            if len(payload) != self.length or crc32(payload) != self.payload_crc:
                raise BadFrame(f"the payload of {self!r} does not match its head")
            self._payload = payload
        return self._payload


def transactions_of(
    run: Run,
    partition: int,
    serializer: Serializer[Any] | None,
    lineage: Lineage | None = None,
    *,
    timeline: UUID = FIRST,
) -> list[Transaction[Any]]:
    """Return the transactions of a run. Payloads are copied, so that a transaction that is kept does not keep the whole
    run."""
    raw, ends = bytes(run.data), run.bounds.tolist()
    timeline = timeline if lineage is None else lineage.current
    rows = zip(heads(run).tolist(), ends, ends[1:], _times(run.times), _flags(run.follows), _locks(run.locks), strict=False)
    return [
        Transaction(
            partition,
            id_,
            header,
            length,
            crc,
            (client, generation, sequence),
            raw[start + HEAD_BYTES : end - TRAILER_BYTES],
            None,
            serializer,
            time,
            follows,
            locks,
            lineage,
            timeline,
        )
        for (id_, client, generation, _, sequence, header, length, crc), start, end, time, follows, locks in rows
    ]


def transactions_of_heads(
    frame: HeadFeed,
    partition: int,
    serializer: Serializer[Any] | None,
    fetch: Callable[[Transaction[Any]], Awaitable[bytes]],
    lineage: Lineage | None = None,
) -> list[Transaction[Any]]:
    """Return transactions without payloads; `Transaction.fetch` fetches them."""
    timeline = FIRST if lineage is None else lineage.current
    rows = zip(frame.heads.tolist(), _times(frame.times), _flags(frame.follows), strict=False)
    return [
        Transaction(
            partition,
            id_,
            header,
            length,
            crc,
            (client, generation, sequence),
            None,
            fetch,
            serializer,
            time,
            follows,
            lineage=lineage,
            timeline=timeline,
        )
        for (id_, client, generation, _, sequence, header, length, crc), time, follows in rows
    ]


def _times(times: I64 | None) -> Iterable[int | None]:
    return repeat(None) if times is None else [None if time == NO_TIME else time for time in times.tolist()]


def _flags(follows: Flags | None) -> Iterable[bool]:
    return repeat(False) if follows is None else follows.tolist()


def _locks(columns: LockColumns | None) -> Iterable[tuple[LoggedLock, ...] | None]:
    if columns is None:
        return repeat(None)
    locks = map(LoggedLock, columns.ids.tolist(), map(Mode, columns.modes.tolist()))
    return [tuple(islice(locks, count)) for count in columns.counts.tolist()]


class Grouped(Protocol):
    @property
    def follows(self) -> bool: ...


def end_of_part(transactions: Sequence[Grouped], start: int, most: int) -> int:
    """Return the end of a part that begins at `start`. A part has at most `most` transactions, or one larger atomic
    append."""
    stop = end = min(start + most, len(transactions))
    while start < end < len(transactions) and transactions[end].follows:
        end -= 1
    if end > start:
        return end
    while stop < len(transactions) and transactions[stop].follows:
        stop += 1
    return stop


class Decision(enum.Enum):
    """Decision about a transaction that the view could not apply: the result of `failed`.

    A transaction cannot be skipped: a view that wants to ignore one returns from `apply`.

    Example:
        ```python
        def failed(self, transaction, error):
            return Decision.RETRY if isinstance(error, OSError) else Decision.STOP
        ```
    """

    RETRY = "retry"
    """Try it again after a pause, for ever; later transactions wait."""
    STOP = "stop"
    """Stop this partition before the transaction, until `set_partitions` removes and adds the partition."""


class View(Protocol[E_contra]):
    """State that an application keeps from the log: the argument `view` of a client. Each method may be plain or
    `async`.

    A `View[E]` takes transactions whose values have the type E.

    Three more methods are called if they exist. `opened(cluster)` gets the key of the cluster, a UUID, before
    `position` is called; a view that was filled from another cluster raises there. `apply_batch(transactions)` takes
    several at once, in order, and all of an atomic append together; if it raises, `position` is called to see how far
    it came. `failed(transaction, error)` returns a `Decision` each time that `apply` raised; without it the decision is
    `RETRY`.

    Foreign transactions (`Transaction.is_foreign`) are not applied, so ids between two transactions may be missing. A
    view whose attribute `takes_foreign` is true gets them, too, to raise its position: it must apply nothing of them.

    Example:
        ```python
        class Counter:
            def __init__(self):
                self.positions, self.count = {}, 0

            def position(self, partition):
                return self.positions.get(partition, -1)

            def apply(self, transaction):
                self.count += 1
                self.positions[transaction.partition] = transaction.position
        ```
    """

    def position(self, partition: int, /) -> int | Awaitable[int]:
        """Return the position of the last transaction in the view (`Transaction.position`), -1 if it is empty. It is
        called whenever the partition is activated. A plain integer is a position of the first timeline of the log."""
        ...

    def apply(self, transaction: Transaction[E_contra], /) -> object:
        """Apply a transaction to the view, together with its id, which `position` must return from now on.

        It is called for one transaction of a partition at a time, in the order of ids. A view that must apply an atomic
        append together has `apply_batch`."""
        ...


# -- what goes ---------------------------------------------------------------------------------------------------------


class Builder(Generic[E_contra]):
    """Transaction that `Command.build` fills in. `payload` must be set. A `Builder[E]` takes values of the type E."""

    __slots__ = ("_home", "_kind", "_kind_of_payload", "_locks", "_payload", "_reason", "_serializer", "position")

    def __init__(
        self,
        position: int,
        serializer: Serializer[Any] | None = None,
        locks: Iterable[Lock] = (),
        home: str | None = None,
    ) -> None:
        """Create an empty builder; `home` is the only name that its locks may have, or None for any."""
        self.position = position
        """Highest id that the view contained when the build began. Every checked lock is compared with it."""
        self._kind: int | None = None
        self._kind_of_payload = 0
        self._locks = tuple(locks)
        self._home = home
        self._payload: bytes | None = None
        self._reason = ""
        self._serializer = serializer

    def decline(self, reason: str = "") -> Literal[False]:
        """Decline to build a transaction; end `build` with `return builder.decline("…")`. `submit` returns `Declined` with
        this reason when it has confirmed the answer: before, `build` is called again if the view was behind.

        Returns:
            False.

        Raises:
            BadArgument: The reason is no text.
        """
        if not isinstance(reason, str):
            raise BadArgument(f"the reason of a declined command is a text, not {reason!r}")
        self._reason = reason
        return False

    @property
    def kind(self) -> int:
        """Kind of the transaction: an integer of 32 bits with a sign, kept beside the payload. If it is not set, it is
        the kind of the payload's event type, or 0."""
        return self._kind_of_payload if self._kind is None else self._kind

    @kind.setter
    def kind(self, kind: int) -> None:
        self._kind = checked_kind(kind)

    @property
    def locks(self) -> tuple[Lock, ...]:
        """Locks of the transaction; those of the command if they are not set. See `read_lock`, `write_lock` and
        `append_lock`."""
        return self._locks

    @locks.setter
    def locks(self, locks: Iterable[Lock]) -> None:
        found = tuple(locks)
        if self._home is not None and any(lock.name != self._home for lock in found):
            raise BadArgument(
                f"the name of the locks, {self._home}, chose the partition; `build` set locks of another name",
                next_step="give it a key or a partition, the same for all transactions that have one of these locks",
            )
        self._locks = found

    def _hold(self, locks: Sequence[Lock]) -> None:
        """Add locks after the partition was chosen, by the locks of the application."""
        self._locks = (*self._locks, *locks)

    @property
    def payload(self) -> bytes:
        """Payload of the transaction. Set it to bytes, or to a value for the client's serializer."""
        if self._payload is None:
            raise BadArgument("`build` returned True without a payload; set builder.payload")
        return self._payload

    @payload.setter
    def payload(self, value: E_contra) -> None:
        self._payload = encoded(value, self._serializer)
        self._kind_of_payload = kind_of(value, self._serializer)


class Command(ABC, Generic[E_co]):
    """One intention of the application, for any number of attempts: the argument of `submit`. A `Command[E]` builds
    values of the type E.

    Each method may be plain or `async`. Only `build` is required.

    Example:
        ```python
        class Withdraw(Command):
            def __init__(self, accounts, name, amount):
                self.accounts, self.name, self.amount = accounts, name, amount
                self.locks = [write_lock("account", name)]

            def build(self, builder):
                if self.accounts[self.name] < self.amount:
                    return builder.decline("not enough money")
                builder.payload = b"%s %d" % (self.name, self.amount)
                return True
        ```
    """

    key: Any = None
    """Key from which the client's partitioner chooses the partition; the name of `locks` if it is None."""
    locks: Sequence[Lock] = ()
    """Locks of every attempt, unless `build` sets others. **They hold within one partition**, so transactions with a
    lock in common need the same key; locks with the same name have the same key by default.

    Commands of one client that declare the same write lock here are built one after another, each when the view contains
    the one before. So they do not conflict with each other, and each is built once."""

    def partition(self, count: int) -> int | None:
        """Return the partition, given the number of partitions; None to choose it by `key` or `locks`."""
        return None

    @abstractmethod
    def build(self, builder: Builder[E_co]) -> bool | Awaitable[bool]:
        """Read the view as it is now, and set payload, kind and locks.

        It is called again for each attempt, so it must change nothing but the builder.

        Returns:
            True to send the transaction, False if there is nothing to do; see `Builder.decline`.
        """

    def on_lock_failure(self, rejected: Rejected) -> object:  # optional
        """Note that a lock failed. Unless this was the last attempt, `build` is called again."""

    def on_outcome(self, outcome: Outcome) -> object:  # optional
        """Note the outcome that `submit` is about to return. It is called once, and before `on_applied`."""

    def on_applied(self, id: int) -> object:  # optional
        """Note that the view of this client has applied the transaction."""


def partition_of(command: Command[Any], of_key: Callable[[Any], int], count: int) -> int:
    """Return the partition of a command; `of_key` returns that of a key."""
    partition = command.partition(count)
    return of_key(key_of(command.key, command.locks)) if partition is None else partition


def builder_of(command: Command[Any], position: int, serializer: Serializer[Any] | None, count: int) -> Builder[Any]:
    """Return a builder for another attempt. If the name of its locks chose the partition, its locks may have no other
    name."""
    is_placed = command.key is not None or command.partition(count) is not None
    return Builder(position, serializer, command.locks, None if is_placed else key_of(None, command.locks))


def is_overridden(command: Command[Any], name: str) -> bool:
    return getattr(type(command), name) is not getattr(Command, name)
