"""The client of an application, for asyncio: submits transactions, follows the partitions, finds servers by itself.

Here is what an application calls; each partition has a `waltzd.client.partition` of its own, and all of them share what
`waltzd.client.routes` knows. What a caller is told is always certain: `Committed` and `Rejected` are facts about the log,
an error means that nothing was sent, and `Unknown` says that nobody could find out in time. The client never talks to the
coordinator, and never sends the same transaction twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from waltzd.client.outbox import Bundle, Outcomes, Request
from waltzd.client.partition import Line, PartitionState
from waltzd.client.routes import Connect, Whereabouts, addresses_of, pause_seconds
from waltzd.client.settings import ClientSettings
from waltzd.client.view import (
    Builder,
    Call,
    Declined,
    Handler,
    Partitioner,
    Serializer,
    Transaction,
    TransactionContext,
    call_here,
    checked_header,
    checked_id,
    checked_mark,
    encoded,
    partition_by_hash,
    transactions_of,
)
from waltzd.errors import BadArgument, BadFrame, CannotConnect, ClientClosed, NotMounted
from waltzd.format.record import Run
from waltzd.protocol.batches import FeedMode, Registration, Topology
from waltzd.protocol.locks import Committed, Lock, Mode, Outcome, Reason, Rejected
from waltzd.protocol.peers import ServerPort
from waltzd.wire.servers import ServerClient

Partitions: TypeAlias = Literal["all"] | Iterable[int]
READ_IDS_MAX, READ_BYTES = 10_000, 4 << 20
"""How much is read at once."""
_log = logging.getLogger("waltz.client")


class Client:
    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        handler: Handler | None = None,
        feed: FeedMode | None = None,
        partitions: Partitions = "all",
        serializer: Serializer | None = None,
        partitioner: Partitioner = partition_by_hash,
        settings: ClientSettings | None = None,
        connect: Connect = ServerClient,
        call: Call = call_here,
    ) -> None:
        """`servers`: some of the cluster's servers, "host:port,host:port". `handler`: the application's view; without one
        there is no feed (`FeedMode.NONE`), and with one whole records are fed unless `feed` says HEADS. `connect` and
        `call` say how servers are reached and how the application's code is called; tests have their own."""
        self.settings = settings or ClientSettings()
        self._feed = feed or (FeedMode.NONE if handler is None else FeedMode.RECORDS)
        if not isinstance(self._feed, FeedMode):
            raise BadArgument(f"feed is one of FeedMode, not {feed!r}")
        if (handler is None) != (self._feed is FeedMode.NONE):
            raise BadArgument(f"FeedMode.{self._feed.name} goes {'with' if handler is None else 'without'} a handler")
        self._wanted = partitions if isinstance(partitions, str) else tuple(partitions)
        self._handler = handler
        self._serializer = serializer
        self._partitioner = partitioner
        self._call = call
        self._where = Whereabouts(addresses_of(servers), connect, call_seconds=self.settings.call_seconds)
        self._lines: dict[int, Line] = {}
        self._active: tuple[int, ...] = ()
        self._changing = asyncio.Lock()
        self._registration: Registration | None = None
        self._closed: ClientClosed | None = ClientClosed("the client is not open yet")
        self._submits: dict[int, asyncio.Future[None]] = {}
        self._submit_count = 0

    # -- life

    async def open(self) -> None:
        """Find the cluster, and begin with the partitions that were asked for. They become ready by themselves; nothing
        waits for one whose owner is not there. Without any the client has no id, and needs none to read."""
        if self._closed is None:
            raise BadArgument("the client is open already")
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.settings.submit_seconds
        try:
            await self._where.open(deadline - clock())
            self._where.keep_fresh()
            self._closed = None
            await self._set_partitions(self._wanted, deadline - clock())
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Wait a while for what is under way, then end: what is undecided by then stays unknown."""
        reason = self._closed = ClientClosed("the client is closed")
        try:
            async with self._changing:
                active, self._active = self._active, ()
                await asyncio.gather(*[self._lines[partition].deactivate(reason) for partition in active])
        finally:
            await self._where.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- what it is

    @property
    def client_id(self) -> int:
        assert self._registration is not None, "a client has an id when it is open and has partitions"
        return self._registration.client

    @property
    def cluster(self) -> str:
        return self._where.topology.cluster

    @property
    def topology(self) -> Topology:
        """The cluster as it was seen last."""
        return self._where.topology

    @property
    def partition_count(self) -> int:
        """How many partitions the cluster has."""
        return self._where.partitions

    @property
    def partitions(self) -> tuple[int, ...]:
        """Those that this client has."""
        return self._active

    async def set_partitions(self, partitions: Partitions) -> None:
        """Have these and no others. Those that go away finish what is under way first; for those that come, the handler is
        asked for its mark. One that was stopped by an error begins again when it is taken out and in."""
        await self._set_partitions(partitions, self.settings.submit_seconds)

    async def _set_partitions(self, partitions: Partitions, seconds: float) -> None:
        wanted = self._numbers(partitions)
        async with self._changing:
            self._check_open()
            if wanted and self._registration is None:
                self._registration = await self._where.register(seconds)
            going = [partition for partition in self._active if partition not in wanted]
            coming = [partition for partition in wanted if partition not in self._active]
            self._active = tuple(partition for partition in self._active if partition in wanted)
            reasons = [NotMounted(f"partition {partition} was taken from this client") for partition in going]
            await asyncio.gather(
                *[self._lines[partition].deactivate(reason) for partition, reason in zip(going, reasons, strict=True)]
            )
            for partition in coming:
                assert self._registration is not None
                await self._line_of(partition).activate(self._registration)
                self._active = tuple(sorted((*self._active, partition)))

    def _numbers(self, partitions: Partitions) -> tuple[int, ...]:
        if isinstance(partitions, str):
            if partitions != "all":
                raise BadArgument(f'partitions are "all" or numbers, not {partitions!r}')
            return tuple(range(self.partition_count))
        found = set(partitions)
        for partition in found:
            self._check_number(partition)
        return tuple(sorted(found))

    def _line_of(self, partition: int) -> Line:
        if partition not in self._lines:
            self._lines[partition] = Line(
                partition,
                whereabouts=self._where,
                settings=self.settings,
                feed=self._feed,
                handler=self._handler,
                serializer=self._serializer,
                call=self._call,
                fetch=self._fetch,
            )
        return self._lines[partition]

    def _check_number(self, partition: int) -> None:
        if not hasattr(partition, "__index__") or not 0 <= partition < self.partition_count:
            raise BadArgument(f"there is no partition {partition!r}; the cluster has {self.partition_count}, from 0 on")

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ClientClosed(self._closed.message)

    def _line(self, partition: int) -> Line:
        self._check_open()
        self._check_number(partition)
        line = self._lines.get(partition)
        if line is None or partition not in self._active:
            raise NotMounted(f"this client does not have partition {partition}; it has {_some(self._active)}")
        return line

    # -- writing

    async def submit(self, context: TransactionContext) -> Outcome | Declined:
        """Build the context's transaction against the current view and append it; build it again when a lock failed or a
        fail-over lost it. The last outcome counts."""
        return await self.submit_with(self._call, context)

    async def submit_with(self, call: Call, context: TransactionContext) -> Outcome | Declined:
        """The same, calling the context's own functions with `call`."""
        partition = context.partition(self.partition_count)
        if partition is None:
            partition = self._partitioner(context.key, self.partition_count)
        line = self._line(partition)
        async with self._counted():
            outcome = await self._attempt(line, context, call)
        await _tell(line, call, context.on_completion, outcome)
        if isinstance(outcome, Committed) and _is_overridden(context, "on_application"):
            line.announce(outcome.id, context.on_application)
        return outcome

    async def _attempt(self, line: Line, context: TransactionContext, call: Call) -> Outcome | Declined:
        """As often as it takes, and as is allowed."""
        attempt = 0
        while True:
            attempt += 1
            epoch = await line.ready_epoch()
            outcome = await self._build_and_send(line, context, call)
            if not isinstance(outcome, Rejected):
                return outcome
            if outcome.reason is not Reason.LOST:
                await _tell(line, call, context.on_lock_failure, outcome)
                if not line.has_view:
                    return outcome
            if attempt >= self.settings.attempts_max:
                return outcome
            if outcome.reason is not Reason.LOST:
                try:
                    await line.caught_up(outcome.conflict_id, epoch)
                except TimeoutError:
                    return outcome
            if attempt > 1:
                await asyncio.sleep(pause_seconds(attempt - 2, self.client_id, line.partition, self._submit_count))

    async def _build_and_send(self, line: Line, context: TransactionContext, call: Call) -> Outcome | Declined:
        await line.enter(1)
        try:
            builder = Builder(line.mark, self._serializer)
            if not await call(context.build, builder):
                return Declined()
            mark = self._checked_mark(line, builder.mark if line.has_view else None, builder.locks)
            waiter = self._add(line, mark, builder.data, builder.header, builder.locks)
        finally:
            line.leave(1)
        return await waiter

    def mark(self, partition: int) -> int:
        """What the view of a partition holds, at least: its handler has applied everything up to here. Read it before the
        view, and give it to `append`, when there is an `await` in between."""
        return self._line(partition).mark

    def append(
        self,
        data: Any,
        *,
        partition: int | None = None,
        key: Any = None,
        header: int = 0,
        locks: Iterable[Lock] = (),
        mark: int | None = None,
    ) -> Coroutine[Any, Any, Outcome]:
        """Append one transaction, once. Name the partition, or a key for the partitioner. `mark`: what the transaction
        relies on; if it is not given, what the handler has applied at the moment of this call."""
        line = self._line(self._choose(partition, key))
        locks = tuple(locks)
        mark = self._checked_mark(line, mark, locks)
        return self._append(line, mark, encoded(data, self._serializer), checked_header(header), locks)

    async def _append(self, line: Line, mark: int, data: bytes, header: int, locks: Sequence[Lock]) -> Outcome:
        await line.enter(1)
        try:
            waiter = self._add(line, mark, data, header, locks)
        finally:
            line.leave(1)
        return await waiter

    def append_many(
        self,
        payloads: Sequence[Any],
        *,
        partition: int | None = None,
        key: Any = None,
        headers: Sequence[int] | None = None,
        locks: Sequence[Iterable[Lock]] | None = None,
        mark: int | None = None,
    ) -> Coroutine[Any, Any, Outcomes]:
        """Append many transactions to one partition, each for itself, in this order; one await for all of them. Some may
        be committed and others not."""
        line = self._line(self._choose(partition, key))
        for name, column in (("headers", headers), ("locks", locks)):
            if column is not None and len(column) != len(payloads):
                raise BadArgument(f"there are {len(payloads)} payloads and {len(column)} {name}")
        headers = None if headers is None else [checked_header(header) for header in headers]
        each = None if locks is None else [tuple(some) for some in locks]
        mark = self._checked_mark(line, mark, [lock for some in each or () for lock in some])
        return self._append_many(line, mark, [encoded(data, self._serializer) for data in payloads], headers, each)

    async def _append_many(
        self,
        line: Line,
        mark: int,
        payloads: Sequence[bytes],
        headers: Sequence[int] | None,
        locks: Sequence[Sequence[Lock]] | None,
    ) -> Outcomes:
        if not payloads:
            return Outcomes.unknown(0)
        await line.enter(len(payloads))
        try:
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[Outcomes] = loop.create_future()
            deadline = loop.time() + self.settings.submit_seconds
            line.add(Bundle(mark, payloads, headers, locks, waiter, deadline))
        finally:
            line.leave(len(payloads))
        return await waiter

    def _add(self, line: Line, mark: int, data: bytes, header: int, locks: Sequence[Lock]) -> asyncio.Future[Outcome]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Outcome] = loop.create_future()
        ids, modes = tuple([lock.hash for lock in locks]), tuple([int(lock.mode) for lock in locks])
        line.add(Request(mark, data, header, ids, modes, waiter, loop.time() + self.settings.submit_seconds))
        return waiter

    def _choose(self, partition: int | None, key: Any) -> int:
        if (partition is None) == (key is None):
            raise BadArgument("name either the partition or the key of a transaction")
        return partition if partition is not None else self._partitioner(key, self.partition_count)

    def _checked_mark(self, line: Line, mark: int | None, locks: Sequence[Lock]) -> int:
        if mark is None:
            if not line.has_view and any(lock.mode is not Mode.APPEND for lock in locks):
                raise BadArgument("a READ or WRITE lock needs a mark to be compared with: give a handler, or a mark")
            return line.mark
        return checked_mark(mark)

    # -- waiting

    @property
    def has_pending(self) -> bool:
        """Something was submitted and is not decided."""
        return bool(self._submits) or any(self._lines[partition].outbox.rows for partition in self._active)

    async def flush(self, seconds: float | None = None) -> None:
        """Until everything that was submitted before is decided; `CannotConnect` when that takes longer than `seconds`
        (`submit_seconds` if it is not given)."""
        if not self.has_pending:
            return
        limit = self.settings.submit_seconds if seconds is None else seconds
        waits = [self._lines[partition].drained() for partition in self._active]
        try:
            async with asyncio.timeout(limit):
                await asyncio.gather(*waits, *[asyncio.shield(done) for done in self._submits.values()])
        except TimeoutError:
            undecided = [partition for partition in self._active if self._lines[partition].outbox.rows]
            raise CannotConnect(
                f"after {limit:g} seconds, transactions of partitions {_some(undecided)} are undecided"
            ) from None

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        """`flush` waits for it, also between two attempts."""
        self._submit_count += 1
        number = self._submit_count
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._submits[number] = done
        try:
            yield
        finally:
            del self._submits[number]
            done.set_result(None)

    # -- reading

    async def high_water_mark(self, partition: int) -> int:
        """The owner's highest committed id."""
        self._check_open()
        self._check_number(partition)

        async def ask(port: ServerPort) -> int:
            return await port.high_water_mark(partition)

        return await self._where.ask(partition, "HighWaterMark", ask, self.settings.submit_seconds)

    async def read(self, partition: int, id: int) -> Transaction:
        """One committed transaction; `BeyondLog` when there is none of this id yet."""
        return (await self.read_some(partition, id, id))[0]

    async def read_some(self, partition: int, first_id: int, last_id: int) -> list[Transaction]:
        """The first of these committed transactions, one at least, and so many as are not too much at once; `BeyondLog`
        where one of those is not there yet."""
        self._check_open()
        self._check_number(partition)
        first_id, last_id = checked_id(first_id), checked_id(last_id)
        if last_id < first_id:
            raise BadArgument(f"there are no ids from {first_id} to {last_id}")
        last_id = min(last_id, first_id + READ_IDS_MAX - 1)

        async def ask(port: ServerPort) -> list[Run]:
            runs: list[Run] = []
            next_id = first_id
            async with aclosing(port.fetch(partition, first_id, last_id)) as found:
                async for run in found:
                    if run.first_id != next_id or run.last_id > last_id:
                        break
                    runs.append(run)
                    next_id = run.last_id + 1
                    if sum(len(run.data) for run in runs) >= READ_BYTES:
                        return runs
            if next_id <= last_id:
                raise BadFrame(f"the owner of partition {partition} answered something else than transaction {next_id}")
            return runs

        runs = await self._where.ask(partition, "Fetch", ask, self.settings.submit_seconds)
        return [found for run in runs for found in transactions_of(run, partition, self._serializer)]

    async def _fetch(self, transaction: Transaction) -> bytes:
        return (await self.read(transaction.partition, transaction.id)).payload

    # -- for people

    def describe(self) -> tuple[PartitionState, ...]:
        """Every partition of this client."""
        return tuple(self._lines[partition].state() for partition in self._active)


async def _tell(line: Line, call: Call, listener: Callable[[Any], object], outcome: Outcome | Declined) -> None:
    """Nothing about the transaction changes by what the application raises here."""
    try:
        await call(listener, outcome)
    except Exception:  # noqa: BLE001  # the application's code
        _log.exception("%s of a transaction of partition %d failed", listener.__name__, line.partition)


def _is_overridden(context: TransactionContext, name: str) -> bool:
    return getattr(type(context), name) is not getattr(TransactionContext, name)


def _some(partitions: Sequence[int]) -> str:
    names = [str(partition) for partition in partitions[:10]]
    more = f" and {len(partitions) - 10} more" if len(partitions) > 10 else ""
    return (", ".join(names) + more) or "none"
