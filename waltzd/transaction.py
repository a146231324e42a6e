"""What an application sees of the log: transactions that come to it, and transactions that it makes.

A handler keeps a view: it says where it stands, and applies each transaction once, in order. A context makes a
transaction: it looks at the view and says what should be written under which locks; when a lock fails, it is asked
again, against the newer view. Nothing here knows a connection.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from operator import index
from typing import Any, Protocol, TypeAlias

from waltzd.checksum import crc32
from waltzd.errors import BadArgument, BadFrame
from waltzd.lock import Lock
from waltzd.outcome import Outcome, Rejected
from waltzd.quorum import EMPTY
from waltzd.record import HEAD_BYTES, TRAILER_BYTES, HeadArray, Run, heads

HEADER_MIN, HEADER_MAX = -(1 << 31), (1 << 31) - 1
MARK_MAX = (1 << 63) - 1


class Serializer(Protocol):
    """The application's own way between its values and bytes."""

    def encode(self, value: Any) -> bytes: ...
    def decode(self, data: bytes) -> Any: ...


Partitioner: TypeAlias = Callable[[Any, int], int]
"""The partition of a key, of so many."""


def partition_by_hash(key: Any, count: int) -> int:
    """Any client in any language must compute the same: the first 8 bytes, big-endian, of BLAKE2b over the key, modulo the
    number of partitions. Text is taken as UTF-8, an integer as its 8 bytes, big-endian."""
    if isinstance(key, str):
        raw = key.encode()
    elif isinstance(key, int):
        raw = (key & (1 << 64) - 1).to_bytes(8, "big")
    elif isinstance(key, bytes):
        raw = key
    else:
        raise BadArgument(f"a key is text, bytes or an integer, not {type(key).__name__}: give another partitioner")
    return int.from_bytes(blake2b(raw, digest_size=8).digest(), "big") % count


def encoded(value: Any, serializer: Serializer | None) -> bytes:
    """The payload that stands for a value."""
    data = value if serializer is None else serializer.encode(value)
    if isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    raise BadArgument(f"a payload is bytes, not {type(data).__name__}: give the client a serializer")


def checked_header(header: int) -> int:
    return _checked_integer(header, HEADER_MIN, HEADER_MAX, "a header has 32 bits with a sign; {} does not fit")


def checked_mark(mark: int) -> int:
    return _checked_integer(mark, EMPTY, MARK_MAX, "a mark is -1 or an id, not {}")


def checked_id(id: int) -> int:
    return _checked_integer(id, 0, MARK_MAX, "ids start at 0; {} is none")


def _checked_integer(value: int, lowest: int, highest: int, what: str) -> int:
    """Whatever Python takes as an index: numpy's integers, too, and no fractions. What passes here must fit into a frame,
    because a frame that cannot be made holds up all transactions that were to travel in it."""
    try:
        found = index(value)
    except TypeError:
        raise BadArgument(what.format(repr(value))) from None
    if not lowest <= found <= highest:
        raise BadArgument(what.format(found))
    return found


# -- what comes --------------------------------------------------------------------------------------------------------


class Transaction:
    """One committed transaction, as a handler gets it."""

    __slots__ = ("_fetch", "_payload", "_serializer", "data_crc", "header", "id", "length", "partition", "request")

    def __init__(
        self,
        partition: int,
        id: int,
        header: int,
        length: int,
        data_crc: int,
        request: tuple[int, int, int],
        payload: bytes | None,
        fetch: Callable[[Transaction], Awaitable[bytes]] | None,
        serializer: Serializer | None,
    ) -> None:
        self.partition = partition
        self.id = id
        self.header = header
        self.length = length
        self.data_crc = data_crc
        self.request = request
        self._payload = payload
        self._fetch = fetch
        self._serializer = serializer

    def __repr__(self) -> str:
        return f"Transaction(partition={self.partition}, id={self.id}, header={self.header}, length={self.length})"

    @property
    def payload(self) -> bytes:
        """The bytes. With `FeedMode.HEADS` they come only when `data` is awaited."""
        if self._payload is None:
            raise BadArgument(f"the payload of {self!r} was not fed (FeedMode.HEADS): use `await transaction.data()`")
        return self._payload

    @property
    def value(self) -> Any:
        """The payload as the client's serializer reads it."""
        return self.payload if self._serializer is None else self._serializer.decode(self.payload)

    async def data(self) -> bytes:
        """The bytes, fetched and checked if they did not come with the feed."""
        if self._payload is None:
            assert self._fetch is not None
            data = await self._fetch(self)
            if len(data) != self.length or crc32(data) != self.data_crc:
                raise BadFrame(f"the payload of {self!r} is not the one that its head speaks of")
            self._payload = data
        return self._payload


def transactions_of(run: Run, partition: int, serializer: Serializer | None) -> list[Transaction]:
    """The records of a run. Payloads are copied, so that one transaction that is kept does not keep the whole run."""
    raw, ends = bytes(run.data), run.bounds.tolist()
    rows = zip(heads(run).tolist(), ends, ends[1:], strict=False)
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
        )
        for (id_, client, generation, _, sequence, header, length, crc), start, end in rows
    ]


def transactions_of_heads(
    array: HeadArray,
    partition: int,
    serializer: Serializer | None,
    fetch: Callable[[Transaction], Awaitable[bytes]],
) -> list[Transaction]:
    """The same without payloads: they are fetched when they are wanted."""
    return [
        Transaction(partition, id_, header, length, crc, (client, generation, sequence), None, fetch, serializer)
        for id_, client, generation, _, sequence, header, length, crc in array.tolist()
    ]


class Decision(enum.Enum):
    """What to do with a transaction that the handler could not apply. There is no way to leave it out: a handler that
    wants to ignore a transaction returns from `apply`."""

    RETRY = "retry"
    """Try it again after a while, for ever: nothing behind it is applied meanwhile."""
    PARK = "park"
    """Stop this partition in front of it, until somebody activates it again."""


class Handler(Protocol):
    """An application's view. Each method may be plain or `async`. Two more are used where they exist:

    `apply_batch(transactions)`: several at once, in order. When it fails, `mark` says how far it came.
    `failed(transaction, error) -> Decision`: asked each time `apply` failed; without it the answer is RETRY."""

    def mark(self, partition: int) -> int | Awaitable[int]:
        """The id of the last transaction in the view, -1 for an empty one. Asked whenever the partition is activated."""
        ...

    def apply(self, transaction: Transaction) -> object:
        """Take it into the view. Called for one transaction of a partition at a time, in the order of their ids."""
        ...


# -- what goes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Declined:
    """The context found that there is nothing to do; nothing was sent."""


class Builder:
    """A transaction in the making."""

    __slots__ = ("_data", "_header", "_locks", "_serializer", "mark")

    def __init__(self, mark: int, serializer: Serializer | None = None) -> None:
        self.mark = mark
        """What the view held, at least, when the building began: every lock is compared with it."""
        self._header = 0
        self._locks: tuple[Lock, ...] = ()
        self._data: bytes | None = None
        self._serializer = serializer

    @property
    def header(self) -> int:
        return self._header

    @header.setter
    def header(self, header: int) -> None:
        self._header = checked_header(header)

    @property
    def locks(self) -> tuple[Lock, ...]:
        return self._locks

    @locks.setter
    def locks(self, locks: Iterable[Lock]) -> None:
        self._locks = tuple(locks)

    @property
    def data(self) -> bytes:
        if self._data is None:
            raise BadArgument("the context returned True and gave the transaction no data: set builder.data")
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        """Bytes, or what the client's serializer makes bytes of."""
        self._data = encoded(value, self._serializer)


class TransactionContext(ABC):
    """One intention of the application, for as many attempts as it takes. Each method may be plain or `async`."""

    key: Any = None
    """What the client's partitioner makes a partition of."""

    def partition(self, count: int) -> int | None:
        """The partition, of so many; None leaves it to the client's partitioner and `key`."""
        return None

    @abstractmethod
    def build(self, builder: Builder) -> bool | Awaitable[bool]:
        """Look at the view as it is now and set data, header and locks; False when there is nothing to do. Called again
        for each attempt: it must not change anything but the builder."""

    def on_lock_failure(self, rejected: Rejected) -> object:  # noqa: B027  # may be left out
        """A lock failed; unless this was the last attempt, `build` will be called again."""

    def on_completion(self, outcome: Outcome | Declined) -> object:  # noqa: B027  # may be left out
        """It is decided, or given up. Comes once, and before `on_application`."""

    def on_application(self, id: int) -> object:  # noqa: B027  # may be left out
        """The handler of this client has applied it."""
