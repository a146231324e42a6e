"""What an application sees of the log: transactions that come to it, and transactions that it makes.

A handler keeps a view: it says where it stands, and applies each transaction once, in order. A context makes a
transaction: it looks at the view and says what should be written under which locks. The `Follower` hands what was fed to
the handler, one transaction of a partition at a time, each id exactly next. What waits for it is bounded by the credit of
the mount. A transaction that cannot be applied stands in the way of those behind it, on purpose: it is tried again with
growing pauses, each failure is reported with its id, or the partition is parked when the application says so. Nothing here
knows a connection."""

from __future__ import annotations

import asyncio
import enum
import heapq
import inspect
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import index
from typing import Any, Protocol, TypeAlias

from waltzd.errors import BadArgument, BadFrame, PartitionParked
from waltzd.format.checksum import crc32
from waltzd.format.record import HEAD_BYTES, TRAILER_BYTES, HeadArray, Run, heads
from waltzd.protocol.locks import Lock, Outcome, Rejected
from waltzd.protocol.quorum import EMPTY

HEADER_MIN, HEADER_MAX = -(1 << 31), (1 << 31) - 1
MARK_MAX = (1 << 63) - 1


class Serializer(Protocol):
    """The application's own way between values and payloads: the argument `serializer` of a client.

    Example:
        ```python
        class Json:
            def encode(self, value):
                return json.dumps(value).encode()

            def decode(self, data):
                return json.loads(data)
        ```
    """

    def encode(self, value: Any) -> bytes:
        """The payload of a value."""
        ...

    def decode(self, data: bytes) -> Any:
        """The value of a payload."""
        ...


Partitioner: TypeAlias = Callable[[Any, int], int]
"""The partition of a key, given the number of partitions."""


def partition_by_hash(key: Any, count: int) -> int:
    """The default partitioner. Any client in any language must compute the same: the first 8 bytes, big-endian, of BLAKE2b
    over the key, modulo the number of partitions. Text is taken as UTF-8, an integer as its 8 bytes, big-endian."""
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
    """An index of Python: numpy's integers too, no fractions. What passes must fit into a frame, because a frame that
    cannot be made holds up all transactions that were to travel in it."""
    try:
        found = index(value)
    except TypeError:
        raise BadArgument(what.format(repr(value))) from None
    if not lowest <= found <= highest:
        raise BadArgument(what.format(found))
    return found


# -- what comes --------------------------------------------------------------------------------------------------------


class Transaction:
    """One committed transaction, as a handler is given it and as reads return it.

    Example:
        ```python
        transaction = await client.read(partition=0, id=17)
        print(transaction.header, transaction.payload)
        ```

    Attributes:
        partition: The partition that holds it.
        id: Its place there: 0, 1, 2, … without a gap.
        header: The 32 bits that were appended beside the payload.
        length: Bytes of the payload.
        data_crc: CRC-32 of the payload.
        request: Which client asked for it: (client, generation, sequence), unique in its partition.
    """

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
        """The bytes.

        Raises:
            BadArgument: It was fed as a head (`FeedMode.HEADS`), and `data` was not awaited yet.
        """
        if self._payload is None:
            raise BadArgument(f"the payload of {self!r} was not fed (FeedMode.HEADS): use `await transaction.data()`")
        return self._payload

    @property
    def value(self) -> Any:
        """The payload as the client's serializer decodes it; the bytes without a serializer. Raises as `payload`."""
        return self.payload if self._serializer is None else self._serializer.decode(self.payload)

    async def data(self) -> bytes:
        """The bytes, fetched from the owner and checked if they did not come with the feed.

        Raises:
            CannotConnect: The owner did not answer within `submit_seconds`.
            BadFrame: What it sent is not what the head speaks of.
        """
        if self._payload is None:
            assert self._fetch is not None
            data = await self._fetch(self)
            if len(data) != self.length or crc32(data) != self.data_crc:
                raise BadFrame(f"the payload of {self!r} is not the one that its head speaks of")
            self._payload = data
        return self._payload


def transactions_of(run: Run, partition: int, serializer: Serializer | None) -> list[Transaction]:
    """The records of a run. Payloads are copied: a transaction that is kept must not keep the whole run."""
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
    """The same without payloads; `Transaction.data` fetches them."""
    return [
        Transaction(partition, id_, header, length, crc, (client, generation, sequence), None, fetch, serializer)
        for id_, client, generation, _, sequence, header, length, crc in array.tolist()
    ]


class Decision(enum.Enum):
    """What to do with a transaction that the handler could not apply: the answer of `failed`.

    It cannot be left out: a handler that wants to ignore a transaction returns from `apply`.

    Example:
        ```python
        def failed(self, transaction, error):
            return Decision.RETRY if isinstance(error, OSError) else Decision.PARK
        ```
    """

    RETRY = "retry"
    """Try it again after a pause, for ever; what is behind it waits."""
    PARK = "park"
    """Stop this partition in front of it, until `set_partitions` takes it out and in."""


class Handler(Protocol):
    """An application's view of the log: the argument `handler` of a client. Each method may be plain or `async`.

    Two more methods are used where they exist. `apply_batch(transactions)` takes several at once, in order; when it fails,
    `mark` is asked how far it came. `failed(transaction, error)` returns a `Decision` each time `apply` failed; without it
    the answer is `RETRY`.

    Example:
        ```python
        class Counter:
            def __init__(self):
                self.marks, self.count = {}, 0

            def mark(self, partition):
                return self.marks.get(partition, -1)

            def apply(self, transaction):
                self.count += 1
                self.marks[transaction.partition] = transaction.id
        ```
    """

    def mark(self, partition: int) -> int | Awaitable[int]:
        """The id of the last transaction in the view, -1 for an empty one. Asked whenever the partition is activated."""
        ...

    def apply(self, transaction: Transaction) -> object:
        """Take a transaction into the view, together with its id, which `mark` must return from now on.

        Called for one transaction of a partition at a time, in the order of their ids.
        """
        ...


# -- what goes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Declined:
    """What `submit` returns when `TransactionContext.build` returned False: there was nothing to do, and nothing was
    sent."""


class Builder:
    """A transaction in the making: what `TransactionContext.build` fills in (see there). `data` must be set."""

    __slots__ = ("_data", "_header", "_locks", "_serializer", "mark")

    def __init__(self, mark: int, serializer: Serializer | None = None) -> None:
        self.mark = mark
        """The highest id that the view held when the building began: every checked lock is compared with it."""
        self._header = 0
        self._locks: tuple[Lock, ...] = ()
        self._data: bytes | None = None
        self._serializer = serializer

    @property
    def header(self) -> int:
        """32 bits with a sign that travel beside the payload; 0 if they are not set."""
        return self._header

    @header.setter
    def header(self, header: int) -> None:
        self._header = checked_header(header)

    @property
    def locks(self) -> tuple[Lock, ...]:
        """See `read_lock`, `write_lock` and `append_lock`; none if they are not set."""
        return self._locks

    @locks.setter
    def locks(self, locks: Iterable[Lock]) -> None:
        self._locks = tuple(locks)

    @property
    def data(self) -> bytes:
        """The payload. Set it to bytes, or to what the client's serializer takes."""
        if self._data is None:
            raise BadArgument("the context returned True and gave the transaction no data: set builder.data")
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        self._data = encoded(value, self._serializer)


class TransactionContext(ABC):
    """One intention of the application, for as many attempts as it takes: the argument of `submit`.

    Each method may be plain or `async`. Only `build` must be there.

    Example:
        ```python
        class Withdraw(TransactionContext):
            def __init__(self, accounts, name, amount):
                self.accounts, self.key, self.amount = accounts, name, amount

            def build(self, builder):
                if self.accounts[self.key] < self.amount:
                    return False
                builder.data = b"%d" % self.amount
                builder.locks = [write_lock(self.key)]
                return True
        ```
    """

    key: Any = None
    """What the client's partitioner makes a partition of."""

    def partition(self, count: int) -> int | None:
        """The partition, given how many there are; None leaves it to the client's partitioner and `key`."""
        return None

    @abstractmethod
    def build(self, builder: Builder) -> bool | Awaitable[bool]:
        """Look at the view as it is now and set data, header and locks.

        Called again for each attempt, so it must change nothing but the builder.

        Returns:
            False when there is nothing to do.
        """

    def on_lock_failure(self, rejected: Rejected) -> object:  # noqa: B027  # may be left out
        """A lock failed; unless this was the last attempt, `build` is called again."""

    def on_completion(self, outcome: Outcome | Declined) -> object:  # noqa: B027  # may be left out
        """`submit` is about to return this. Called once, and before `on_application`."""

    def on_application(self, id: int) -> object:  # noqa: B027  # may be left out
        """The handler of this client has applied it."""


Call: TypeAlias = Callable[..., Awaitable[Any]]
"""How code of the application is called: on the loop, or on another thread."""
Load: TypeAlias = Callable[[], list[Transaction]]

PAUSE_MIN, PAUSE_MAX = 0.1, 10.0
TURN = 64
"""So many transactions are applied before other tasks on the loop have their turn."""
_log = logging.getLogger("waltz.client")


class _Stopped(Exception):
    """`stop` was called."""


async def call_here(function: Callable[..., Any], *arguments: Any) -> Any:
    result = function(*arguments)
    return await result if inspect.isawaitable(result) else result


def shielded(call: Call) -> Call:
    """The same for a task that must outlive the application's own: when one of those was cancelled, that is a failure like
    any other, and does not cancel ours."""

    async def shielded_call(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await call(function, *arguments)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RuntimeError("something that the application's code waited for was cancelled") from error

    return shielded_call


async def ask_mark(handler: Handler, call: Call, partition: int) -> int:
    mark = await call(handler.mark, partition)
    if not isinstance(mark, int) or mark < EMPTY:
        raise BadArgument(f"the handler says that its mark of partition {partition} is {mark!r}: no integer from -1 on")
    return mark


class Follower:
    def __init__(
        self, partition: int, handler: Handler, *, call: Call, batch_max: int, consumed: Callable[[int], None]
    ) -> None:
        """`consumed`: called with the size that `put` was given, when that is applied."""
        self.applied = EMPTY
        self._partition = partition
        self._handler = handler
        self._call = shielded(call)
        self._batch_max = batch_max
        self._consumed = consumed
        self._apply_batch: Callable[[Sequence[Transaction]], Any] | None = getattr(handler, "apply_batch", None)
        self._inbox: deque[tuple[int, Load]] = deque()
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._count = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._announcements: list[tuple[int, int, Callable[[int], Any]]] = []

    # -- from the feed

    def put(self, size: int, load: Load) -> None:
        self._inbox.append((size, load))
        self._wake.set()

    def stop(self) -> None:
        """Finish the call of the application that is under way, and no more."""
        self._stopping.set()
        self._wake.set()

    # -- waiting for an id

    async def reached(self, id: int) -> None:
        """Until the transaction with this id is applied."""
        if id > self.applied:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._count += 1
            heapq.heappush(self._waiting, (id, self._count, future))
            await future

    def release(self) -> None:
        """End every `reached`: after a fail-over the id may never come."""
        waiting, self._waiting = self._waiting, []
        for _, _, future in waiting:
            if not future.done():
                future.set_result(None)

    def announce(self, id: int, listener: Callable[[int], Any]) -> None:
        """Call `listener` when this id is applied."""
        self._count += 1
        heapq.heappush(self._announcements, (id, self._count, listener))
        self._wake.set()

    def inherit(self, older: Follower) -> None:
        """The announcements outlive a partition that is taken out and in: the view may have their ids by then."""
        self._announcements, older._announcements = older._announcements, []

    @property
    def announcements(self) -> int:
        return len(self._announcements)

    # -- applying

    async def run(self, mark: int) -> None:
        """Until `stop`; ends with `PartitionParked` when the application gives up."""
        self.applied = mark
        try:
            while True:
                await self._make_announcements()
                self._check()
                if self._inbox:
                    size, load = self._inbox.popleft()
                    await self._apply(load())
                    self._consumed(size)
                    await asyncio.sleep(0)
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except _Stopped:
            return

    def _check(self) -> None:
        if self._stopping.is_set():
            raise _Stopped

    async def _apply(self, transactions: list[Transaction]) -> None:
        if self._apply_batch is None:
            await self._apply_each(transactions)
            return
        for start in range(0, len(transactions), self._batch_max):
            self._check()
            part = transactions[start : start + self._batch_max]
            try:
                await self._call(self._apply_batch, part)
            except Exception as error:  # noqa: BLE001  # the application's code
                _log.warning("%s could not be applied together: %r; applying them one by one", _names(part), error)
                mark = await self._persist(part[0], self._ask_mark)
                await self._apply_each([transaction for transaction in part if transaction.id > mark])
            await self._reached(part[-1].id)

    async def _apply_each(self, transactions: list[Transaction]) -> None:
        for number, transaction in enumerate(transactions, 1):
            self._check()
            await self._persist(transaction, self._handler.apply, transaction)
            await self._reached(transaction.id)
            if number % TURN == 0:
                await asyncio.sleep(0)

    async def _ask_mark(self) -> int:
        mark = await ask_mark(self._handler, self._call, self._partition)
        if mark < self.applied:
            raise BadArgument(f"the handler's mark of partition {self._partition} went back from {self.applied} to {mark}")
        return mark

    async def _reached(self, id: int) -> None:
        assert id >= self.applied
        self.applied = id
        while self._waiting and self._waiting[0][0] <= id:
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
        await self._make_announcements()

    async def _make_announcements(self) -> None:
        while self._announcements and self._announcements[0][0] <= self.applied:
            id_, _, listener = heapq.heappop(self._announcements)
            try:
                await self._call(listener, id_)
            except Exception:  # noqa: BLE001  # the application's code
                _log.exception("on_application of transaction %d of partition %d failed", id_, self._partition)

    # -- failing

    async def _persist(self, transaction: Transaction, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call it until it works, or the application says that it never will."""
        pause = PAUSE_MIN
        while True:
            try:
                return await self._call(function, *arguments)
            except Exception as error:
                if await self._decide(transaction, error) is Decision.PARK:
                    raise PartitionParked(
                        f"{_names([transaction])} could not be applied: {error!r}",
                        partition=self._partition,
                        id=transaction.id,
                    ) from error
                _log.warning("%s could not be applied: %r; trying again in %.1f s", _names([transaction]), error, pause)
            await self._pause(pause)
            pause = min(2 * pause, PAUSE_MAX)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return
        raise _Stopped

    async def _decide(self, transaction: Transaction, error: Exception) -> Decision:
        failed = getattr(self._handler, "failed", None)
        if failed is None:
            return Decision.RETRY
        try:
            decision: Decision = await self._call(failed, transaction, error)
        except Exception:  # noqa: BLE001  # the application's code
            _log.exception("`failed` of the handler failed as well, on %s", _names([transaction]))
            return Decision.PARK
        return decision


def _names(transactions: Sequence[Transaction]) -> str:
    first, last = transactions[0], transactions[-1]
    if first is last:
        return f"transaction {first.id} of partition {first.partition}"
    return f"transactions {first.id} to {last.id} of partition {first.partition}"
