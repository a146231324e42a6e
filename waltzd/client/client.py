"""The client of an application, for asyncio: what an application calls.

Each partition has a line of its own (`waltzd.client.partition`), and all lines share `waltzd.client.routes`. The client
talks to servers only, never to the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias

from waltzd.client.follower import Call, call_here, introduce, tell
from waltzd.client.instrument import Instrument
from waltzd.client.mount import Seen
from waltzd.client.partition import Line, PartitionState
from waltzd.client.pending import Bundle, Group, Outcomes, group_of, no_outcomes, request, request_of
from waltzd.client.reading import Reader
from waltzd.client.routes import Connect, Routes, addresses_of, pause_seconds, some
from waltzd.client.settings import ClientSettings
from waltzd.client.view import (
    Builder,
    Declined,
    Handler,
    Partitioner,
    Serializer,
    Transaction,
    TransactionContext,
    checked_header,
    checked_mark,
    encoded,
    is_overridden,
    partition_by_hash,
)
from waltzd.errors import BadArgument, CannotConnect, ClientClosed, NotMounted
from waltzd.protocol.batches import FeedMode, Registration, Topology
from waltzd.protocol.locks import Committed, Lock, Mode, Outcome, Reason, Rejected
from waltzd.wire.servers import ServerClient

Partitions: TypeAlias = Literal["all"] | Iterable[int]
_NO_GROUP = "a group has at least one transaction"


class Client:
    """The asyncio client of an application: it submits transactions, follows partitions, and finds the servers.

    Use it as an async context manager. From then on it keeps a connection for each of its partitions, finds the new owner
    after a fail-over, and feeds the `handler`, if there is one. All calls belong to the event loop that opened it.

    What a caller is told is certain. `Committed` and `Rejected` are facts about the log; an exception means that nothing
    was sent; `Unknown` means that the deadline (`ClientSettings.submit_seconds`) passed before the log could be asked. The
    client never sends a transaction twice.

    Example:
        ```python
        async with Client("server-1:55180,server-2:55180") as client:
            outcome = await client.append(b"hello", key="alice")
            if isinstance(outcome, Committed):
                print(outcome.id)
        ```
    """

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
        """Nothing is connected before `open`.

        Args:
            servers: Some servers of the cluster, `"host:port,host:port"` or a list. The others are found through them.
            handler: The application's view, fed with every committed transaction. Without one there is no feed.
            feed: `FeedMode.RECORDS` (the default with a handler), or `FeedMode.HEADS`, which leaves the payloads out until
                they are asked for.
            partitions: `"all"`, or the numbers of the partitions to have.
            serializer: Turns values into payloads and back. Without one, payloads are bytes.
            partitioner: `partitioner(key, count)` chooses the partition of a key. The default is the same in every
                language, so that all clients agree.
            settings: Deadlines and limits.
            connect: How a server is reached. `LocalCluster.connect` reaches one in the same process.
            call: How the handler's functions are called. The default awaits them on the loop.

        Raises:
            BadArgument: An address is no `host:port`, or `feed` and `handler` do not fit each other.
        """
        self.settings = settings or ClientSettings()
        self._feed = feed or (FeedMode.NONE if handler is None else FeedMode.RECORDS)
        if not isinstance(self._feed, FeedMode):
            raise BadArgument(f"feed is one of FeedMode, not {feed!r}")
        if (handler is None) != (self._feed is FeedMode.NONE):
            raise BadArgument(f"FeedMode.{self._feed.name} goes {'with' if handler is None else 'without'} a handler")
        self._wanted = partitions if isinstance(partitions, str) else tuple(partitions)
        self._handler = handler
        self._serializer, self._partitioner = serializer, partitioner
        self._call = call
        seconds, introduction = self.settings.call_seconds, self.settings.introduction
        self._routes = Routes(addresses_of(servers), connect, call_seconds=seconds, introduction=introduction)
        self._seen = Seen()
        self._reader = Reader(self._routes, serializer, self._seen, seconds=self.settings.submit_seconds)
        self._instruments: list[Instrument] = []
        self._lines: dict[int, Line] = {}
        self._active: tuple[int, ...] = ()
        self._changing = asyncio.Lock()
        self._registration: Registration | None = None
        self._closed: ClientClosed | None = ClientClosed("the client is not open yet")
        self._loop: asyncio.AbstractEventLoop | None = None
        """That it lives on, while it is open."""
        self._submits: dict[int, asyncio.Future[None]] = {}
        self._submit_count = 0

    # -- life

    async def open(self) -> None:
        """Find the cluster, and begin with the partitions that were asked for.

        They become ready by themselves: `open` does not wait for a partition whose owner is away. A client without
        partitions can only read.

        Raises:
            CannotConnect: No server answered within `submit_seconds`, or none gave out a client id.
            ForeignCluster: The servers belong to different clusters.
            TlsMismatch: One side uses TLS and the other does not, or a certificate is refused.
            BadArgument: The client is open already, a partition does not exist, or the handler's mark makes no sense.
            Exception: What the handler's `opened` or `mark` raises.
        """
        if self._closed is None:
            raise BadArgument("the client is open already")
        self._loop = asyncio.get_running_loop()
        clock = self._loop.time
        deadline = clock() + self.settings.submit_seconds
        try:
            await self._routes.open(deadline - clock())
            self._routes.keep_fresh()
            self._closed = None
            await self._set_partitions(self._wanted, deadline - clock())
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Wait up to `close_seconds` for outcomes, then end: what is undecided by then is `Unknown`. May be called
        twice, and only on the event loop that the client lives on."""
        self._check_loop()
        reason = self._closed = ClientClosed("the client is closed")
        try:
            async with self._changing:
                active, self._active = self._active, ()
                await asyncio.gather(*[self._lines[partition].deactivate(reason) for partition in active])
        finally:
            await self._routes.close()
            self._loop = None

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
        """The number that the cluster gave this client, unique for ever. An open client with partitions has one."""
        assert self._registration is not None, "a client has an id when it is open and has partitions"
        return self._registration.client

    @property
    def cluster(self) -> str:
        """The name of the cluster."""
        return self._routes.topology.cluster

    @property
    def topology(self) -> Topology:
        """The servers and the owners of all partitions, as they were seen last."""
        return self._routes.topology

    @property
    def partition_count(self) -> int:
        """How many partitions the cluster has."""
        return self._routes.partitions

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions that this client has."""
        return self._active

    async def set_partitions(self, partitions: Partitions) -> None:
        """Have these partitions and no others.

        A partition that goes away finishes what is under way first. For one that comes, the handler is asked for its mark.
        A partition that was stopped by an error begins again when it is taken out and in.

        Args:
            partitions: `"all"`, or numbers.

        Raises:
            BadArgument: A partition does not exist, or the handler's mark makes no sense.
            CannotConnect: This is the first partition, and no server gave out a client id in time.
            ClientClosed: The client is not open.
            Exception: What the handler's `opened` or `mark` raises.
        """
        await self._set_partitions(partitions, self.settings.submit_seconds)

    async def _set_partitions(self, partitions: Partitions, seconds: float) -> None:
        self._check_loop()
        wanted = self._numbers(partitions)
        async with self._changing:
            self._check_open()
            if wanted and self._registration is None:
                self._registration = await self._routes.register(seconds)
            going = [partition for partition in self._active if partition not in wanted]
            coming = [partition for partition in wanted if partition not in self._active]
            self._active = tuple(partition for partition in self._active if partition in wanted)
            reasons = [NotMounted(f"partition {partition} was taken from this client") for partition in going]
            await asyncio.gather(
                *[self._lines[partition].deactivate(reason) for partition, reason in zip(going, reasons, strict=True)]
            )
            if coming:
                await introduce(self._handler, self._call, self._routes.topology.cluster_key)
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
                routes=self._routes,
                settings=self.settings,
                feed=self._feed,
                handler=self._handler,
                serializer=self._serializer,
                call=self._call,
                fetch=self._fetch,
                seen=self._seen,
                instruments=self._instruments,
            )
        return self._lines[partition]

    def _check_number(self, partition: int) -> None:
        if not hasattr(partition, "__index__") or not 0 <= partition < self.partition_count:
            raise BadArgument(f"there is no partition {partition!r}; the cluster has {self.partition_count}, from 0 on")

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ClientClosed(self._closed.message)

    def _check_loop(self) -> None:
        """What belongs to one loop waits for ever on another."""
        if self._loop not in (None, asyncio.get_running_loop()):
            why = "this client was opened on another event loop, and lives there"
            raise BadArgument(why, next_step="open one on each loop that uses one; without a loop use BlockingClient")

    def _check_reading(self, partition: int) -> None:
        self._check_open()
        self._check_loop()
        self._check_number(partition)

    def _line(self, partition: int) -> Line:
        self._check_open()
        self._check_number(partition)
        line = self._lines.get(partition)
        if line is None or partition not in self._active:
            raise NotMounted(f"this client does not have partition {partition}; it has {some(self._active)}")
        return line

    # -- writing

    async def submit(self, context: TransactionContext) -> Outcome | Declined:
        """Append the transaction that a context builds, and build it again where that may help.

        `context.build` looks at the current view. When a lock fails, the client waits until the view holds what was in the
        way and calls `build` again; likewise when a fail-over lost the transaction. Without a handler there is no view, and
        a failed lock is the outcome.

        Args:
            context: What to write; see `TransactionContext`.

        Returns:
            The outcome of the last attempt, or `Declined` when `build` returned False.

        Raises:
            NotSent: The partition took nothing for `submit_seconds`: its owner is away, or too much is undecided.
            TooLarge: The payload or the number of locks is above the limits of the server.
            BadArgument: `build` set something that makes no sense, or a checked lock has no mark to be compared with.
            NotMounted, ClientClosed: This client does not have the partition, or is not open.
            PartitionParked, ClientAhead, Superseded: The partition was stopped; see `describe`.
            Exception: What `build` raises.
        """
        return await self.submit_with(self._call, context)

    async def submit_with(self, call: Call, context: TransactionContext) -> Outcome | Declined:
        """As `submit`, with another way to call the context's functions."""
        return await self._submit(call, (context,), is_group=False)

    async def submit_group(self, contexts: Sequence[TransactionContext]) -> Outcome | Declined:
        """Append the transactions of several contexts as one group: all of them are in the log, in a row, or none is.

        Every context builds against the view as it is before the group; what the others build is not in it. When a lock of
        one fails, or a fail-over lost them, all of them are built again, as with `submit`. The partition has to write
        format 1.

        Args:
            contexts: What to write, in this order. All of them must mean the same partition.

        Returns:
            One outcome for all of them: `Committed` with the first id and their number, the rejection, `Unknown`, or
            `Declined` when `build` of one returned False. Every context is told it.

        Raises:
            BadArgument: There is no context, they mean different partitions, or as of `submit`.
            NeedsBatches: The partition writes format 0. Nothing was sent.
            TooLarge: The group is larger than a frame of the server, or as of `submit`. Nothing was sent.
            NotSent, NotMounted, ClientClosed, PartitionParked, ClientAhead: As of `submit`.
            Exception: What `build` raises.
        """
        return await self.submit_group_with(self._call, contexts)

    async def submit_group_with(self, call: Call, contexts: Sequence[TransactionContext]) -> Outcome | Declined:
        """As `submit_group`, with another way to call the contexts' functions."""
        return await self._submit(call, tuple(contexts), is_group=True)

    async def _submit(self, call: Call, contexts: Sequence[TransactionContext], *, is_group: bool) -> Outcome | Declined:
        line = self._line(self._partition_of(contexts))
        async with self._counted():
            outcome = await self._attempt(line, contexts, call, is_group)
        for number, context in enumerate(contexts):
            await tell(line.partition, call, context.on_completion, outcome)
            if isinstance(outcome, Committed) and is_overridden(context, "on_application"):
                line.announce(outcome.id + number, context.on_application)
        return outcome

    def _partition_of(self, contexts: Sequence[TransactionContext]) -> int:
        count, found = self.partition_count, set()
        for context in contexts:
            partition = context.partition(count)
            found.add(self._partitioner(context.key, count) if partition is None else partition)
        if len(found) != 1:
            raise BadArgument(_NO_GROUP if not found else f"a group is in one partition, not in {some(sorted(found))}")
        return found.pop()

    async def _attempt(
        self, line: Line, contexts: Sequence[TransactionContext], call: Call, is_group: bool
    ) -> Outcome | Declined:
        """As often as it takes, and as is allowed."""
        attempt = 0
        while True:
            attempt += 1
            epoch = await line.ready_epoch(attempt)
            outcome = await self._build_and_send(line, contexts, call, is_group)
            if not isinstance(outcome, Rejected):
                return outcome
            if outcome.reason is not Reason.LOST:
                for context in contexts:
                    await tell(line.partition, call, context.on_lock_failure, outcome)
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

    async def _build_and_send(
        self, line: Line, contexts: Sequence[TransactionContext], call: Call, is_group: bool
    ) -> Outcome | Declined:
        await line.enter(len(contexts))
        try:
            marks: list[int] = []
            builders: list[Builder] = []
            for context in contexts:
                builder = Builder(line.mark, self._serializer)
                if not await call(context.build, builder):
                    return Declined()
                marks.append(self._checked_mark(line, builder.mark if line.has_view else None, builder.locks))
                builders.append(builder)
            make = group_of(marks, builders) if is_group else request_of(marks[0], builders[0])
            waiter: asyncio.Future[Outcome] = line.add(make)
        finally:
            line.leave(len(contexts))
        return await waiter

    def mark(self, partition: int) -> int:
        """The highest id of a partition that the handler has applied; without a handler, that is known to be committed.

        Read it *before* the view and give it to `append`: then locks are compared with what the view showed, even if it
        has moved on since.

        Raises:
            NotMounted, ClientClosed: This client does not have the partition, or is not open.
        """
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
        """Append one transaction, once: nothing is built again when a lock fails.

        Args:
            data: The payload: bytes, or what the serializer takes.
            partition: Which partition; or give `key`.
            key: The partitioner makes a partition of it.
            header: 32 bits with a sign that travel beside the payload.
            locks: See `read_lock`, `write_lock` and `append_lock`.
            mark: The highest id that the decision behind this transaction has seen: READ and WRITE locks fail when a later
                transaction marked them. The default is `mark(partition)` at the moment of this call.

        Returns:
            An awaitable of `Committed`, `Rejected` or `Unknown`.

        Raises:
            BadArgument: An argument makes no sense. Raised by the call; all others by the `await`.
            NotSent: The partition took nothing for `submit_seconds`.
            TooLarge: The payload or the number of locks is above the limits of the server.
            NotMounted, ClientClosed: This client does not have the partition, or is not open.
            PartitionParked, ClientAhead, Superseded: The partition was stopped; see `describe`.
        """
        line = self._line(self._choose(partition, key))
        locks = tuple(locks)
        mark = self._checked_mark(line, mark, locks)
        return line.send(1, request(mark, encoded(data, self._serializer), checked_header(header), locks))

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
        """Append many transactions to one partition, in this order, with one `await` for all of them.

        Each is a transaction of its own: some may be committed and others rejected. This costs much less than as many
        calls of `append`.

        Args:
            payloads: As `data` of `append`, one for each transaction.
            partition: Which partition; or give `key`.
            key: The partitioner makes a partition of it.
            headers: One for each payload, or None for zeros.
            locks: The locks of each payload, or None for none.
            mark: As of `append`, for all of them.

        Returns:
            An awaitable of `Outcomes`: columns with a row for each payload.

        Raises:
            BadArgument: An argument makes no sense. Raised by the call; all others by the `await`.
            NotSent: The partition took nothing for `submit_seconds`.
            TooLarge: One payload, or its number of locks, is above the limits of the server.
            NotMounted, ClientClosed: This client does not have the partition, or is not open.
            PartitionParked, ClientAhead, Superseded: The partition was stopped; see `describe`.
        """
        line, mark, data, headers, each = self._columns(payloads, partition, key, headers, locks, mark)
        if not data:
            return no_outcomes()
        return line.send(len(data), partial(Bundle, mark, data, headers, each))

    def append_group(
        self,
        payloads: Sequence[Any],
        *,
        partition: int | None = None,
        key: Any = None,
        headers: Sequence[int] | None = None,
        locks: Sequence[Iterable[Lock]] | None = None,
        mark: int | None = None,
    ) -> Coroutine[Any, Any, Outcome]:
        """Append a group, once: all of these transactions are in the log, in a row, or none is.

        When the lock of one fails, the group is rejected. The partition has to write format 1.

        Args:
            payloads: As of `append_many`, one for each transaction.
            partition: Which partition; or give `key`.
            key: As of `append_many`.
            headers: As of `append_many`.
            locks: As of `append_many`.
            mark: As of `append_many`.

        Returns:
            An awaitable of one outcome: `Committed` with the first id and their number, `Rejected`, or `Unknown`.

        Raises:
            BadArgument: There is no payload, or an argument makes no sense. Raised by the call; all others by the `await`.
            NeedsBatches: The partition writes format 0. Nothing was sent.
            TooLarge: The group is larger than a frame of the server, or as of `append`. Nothing was sent.
            NotSent, NotMounted, ClientClosed, PartitionParked, ClientAhead: As of `append`.
        """
        line, mark, data, headers, each = self._columns(payloads, partition, key, headers, locks, mark)
        if not data:
            raise BadArgument(_NO_GROUP)
        return line.send(len(data), partial(Group, mark, data, headers, each))

    def _columns(
        self,
        payloads: Sequence[Any],
        partition: int | None,
        key: Any,
        headers: Sequence[int] | None,
        locks: Sequence[Iterable[Lock]] | None,
        mark: int | None,
    ) -> tuple[Line, int, list[bytes], Sequence[int] | None, list[tuple[Lock, ...]] | None]:
        """The arguments of `append_many`, checked."""
        line = self._line(self._choose(partition, key))
        for name, column in (("headers", headers), ("locks", locks)):
            if column is not None and len(column) != len(payloads):
                raise BadArgument(f"there are {len(payloads)} payloads and {len(column)} {name}")
        headers = None if headers is None else [checked_header(header) for header in headers]
        each = None if locks is None else [tuple(some) for some in locks]
        mark = self._checked_mark(line, mark, [lock for some in each or () for lock in some])
        return line, mark, [encoded(payload, self._serializer) for payload in payloads], headers, each

    def partition_of(self, key: Any) -> int:
        """The partition in which `append(…, key=key)` writes."""
        return self._partitioner(key, self.partition_count)

    def _choose(self, partition: int | None, key: Any) -> int:
        if (partition is None) == (key is None):
            raise BadArgument("name either the partition or the key of a transaction")
        return partition if partition is not None else self.partition_of(key)

    def _checked_mark(self, line: Line, mark: int | None, locks: Sequence[Lock]) -> int:
        if mark is None:
            if not line.has_view and any(lock.mode is not Mode.APPEND for lock in locks):
                raise BadArgument("a READ or WRITE lock needs a mark to be compared with: give a handler, or a mark")
            return line.mark
        return checked_mark(mark)

    # -- waiting

    @property
    def has_pending(self) -> bool:
        """Whether something that was submitted has no outcome yet."""
        return bool(self._submits) or any(self._lines[partition].outbox.rows for partition in self._active)

    async def flush(self, seconds: float | None = None) -> None:
        """Wait until everything that was submitted before has an outcome.

        Args:
            seconds: How long to wait; `submit_seconds` if it is not given.

        Raises:
            CannotConnect: Something is still undecided then. It stays under way, and its own caller is told.
        """
        self._check_loop()
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
                f"after {limit:g} seconds, transactions of partitions {some(undecided)} are undecided"
            ) from None

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        """`flush` waits for it, also between two attempts."""
        self._check_loop()
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

    async def high_water_mark(self, partition: int, *, confirmed: bool = True) -> int:
        """The highest committed id of a partition, -1 when it is empty, from its owner. Needs no partitions of one's own.

        It is not below any id that anybody was told before this was called: the owner asks a majority of the storages
        whether it was replaced. With `confirmed=False` it answers what it knows, which is faster, and old when it was
        paused and replaced.

        Raises:
            CannotConnect: The owner did not answer within `submit_seconds`.
            BadArgument, ClientClosed: There is no such partition, or the client is not open.
        """
        self._check_reading(partition)
        return await self._reader.high_water_mark(partition, confirmed=confirmed)

    async def mark_at(self, partition: int, time: datetime | int) -> int:
        """The highest id in front of the first transaction of that time or later: what comes behind it is not earlier.

        A handler that begins at a time returns it from `mark`. What was written before the partition went over to format 1
        has no time, and counts as earlier than any. Needs no partitions of one's own.

        Args:
            partition: Which partition.
            time: A datetime with a time zone, or microseconds since 1970.

        Raises:
            NeedsBatches: The partition writes format 0, which has no times.
            CannotConnect: The owner did not answer within `submit_seconds`.
            BadArgument, ClientClosed: The time has no time zone, there is no such partition, or the client is not open.
        """
        self._check_reading(partition)
        return await self._reader.mark_at(partition, time)

    async def read(self, partition: int, id: int, *, with_locks: bool = False) -> Transaction:
        """One committed transaction by its id. Needs no handler and no partitions of one's own.

        Args:
            partition: Which partition.
            id: Its id there.
            with_locks: Also its `locks`, as far as the log knows them: format 0 keeps none.

        Raises:
            BeyondLog: No transaction with this id is committed yet.
            CannotConnect: The owner did not answer within `submit_seconds`.
            BadArgument, ClientClosed: There is no such partition, or the client is not open.
        """
        return (await self.read_some(partition, id, id, with_locks=with_locks))[0]

    async def read_some(
        self,
        partition: int,
        first_id: int | None = None,
        last_id: int | None = None,
        *,
        from_time: datetime | int | None = None,
        until_time: datetime | int | None = None,
        with_locks: bool = False,
    ) -> list[Transaction]:
        """Some committed transactions: those from `first_id` or `from_time` on, and not beyond `last_id` or `until_time`.

        At most 10,000 come at once, and about 4 MiB. Call again from the id behind the last one to read on. A group may be
        cut. At least one comes, unless there is none in that time.

        Args:
            partition: Which partition.
            first_id: The first one; or give `from_time`.
            last_id: The last one; or give `until_time`. With neither, all that is committed.
            from_time: Those of this time and later; a time as of `mark_at`.
            until_time: Those before this time.
            with_locks: As of `read`.

        Raises:
            BeyondLog: One of these is not committed yet.
            NeedsBatches: As of `mark_at`.
            CannotConnect: The owner did not answer within `submit_seconds`.
            BadArgument, ClientClosed: Ids or times make no sense, there is no such partition, or the client is not open.
        """
        self._check_reading(partition)
        return await self._reader.some(
            partition, first_id, last_id, from_time=from_time, until_time=until_time, with_locks=with_locks
        )

    async def _fetch(self, transaction: Transaction) -> bytes:
        return (await self.read(transaction.partition, transaction.id)).payload

    # -- for people

    def describe(self) -> tuple[PartitionState, ...]:
        """The state of every partition of this client, for people and for monitoring."""
        return tuple(self._lines[partition].state() for partition in self._active)
