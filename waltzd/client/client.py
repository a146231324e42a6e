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
from waltzd.client.mount import Seen
from waltzd.client.partition import Line, PartitionStatus
from waltzd.client.pending import Bundle, Group, Outcomes, group_of, no_outcomes, request, request_of
from waltzd.client.reading import Reader
from waltzd.client.routes import Connect, Routes, addresses_of, pause_seconds, some
from waltzd.client.settings import ClientSettings
from waltzd.client.view import (
    Builder,
    Command,
    Declined,
    Partitioner,
    Serializer,
    Transaction,
    View,
    checked_header,
    checked_position,
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
    after a fail-over, and feeds the `view`, if there is one. All calls belong to the event loop that opened it.

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
        view: View | None = None,
        feed: FeedMode | None = None,
        partitions: Partitions = "all",
        serializer: Serializer | None = None,
        partitioner: Partitioner = partition_by_hash,
        settings: ClientSettings | None = None,
        connect: Connect = ServerClient,
    ) -> None:
        """Nothing is connected before `open`.

        Args:
            servers: Some servers of the cluster, `"host:port,host:port"` or a list. The others are found through them.
            view: The application's view, fed with every committed transaction. Without one there is no feed.
            feed: `FeedMode.RECORDS` (the default with a view), or `FeedMode.HEADS`, which leaves the payloads out until
                they are asked for.
            partitions: `"all"`, or the numbers of the partitions to have.
            serializer: Turns values into payloads and back. Without one, payloads are bytes.
            partitioner: `partitioner(key, count)` chooses the partition of a key. The default is the same in every
                language, so that all clients agree.
            settings: Deadlines and limits.
            connect: How a server is reached. `LocalCluster.connect` reaches one in the same process.

        Raises:
            BadArgument: An address is no `host:port`, or `feed` and `view` do not fit each other.
        """
        self.settings = settings or ClientSettings()
        self._feed = feed or (FeedMode.NONE if view is None else FeedMode.RECORDS)
        if not isinstance(self._feed, FeedMode):
            raise BadArgument(f"feed is one of FeedMode, not {feed!r}")
        if (view is None) != (self._feed is FeedMode.NONE):
            raise BadArgument(f"FeedMode.{self._feed.name} goes {'with' if view is None else 'without'} a view")
        self._wanted = partitions if isinstance(partitions, str) else tuple(partitions)
        self._view = view
        self._serializer, self._partitioner = serializer, partitioner
        self._call: Call = call_here
        seconds, introduction = self.settings.call_seconds, self.settings.introduction
        self._routes = Routes(addresses_of(servers), connect, call_seconds=seconds, introduction=introduction)
        self._seen = Seen()
        self._reader = Reader(self._routes, serializer, self._seen, seconds=self.settings.submit_seconds)
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
            BadArgument: The client is open already, a partition does not exist, or the view's position makes no sense.
            Exception: What the view's `opened` or `position` raises.
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

        A partition that goes away finishes what is under way first. For one that comes, the view is asked for its position.
        A partition that was stopped by an error begins again when it is taken out and in.

        Args:
            partitions: `"all"`, or numbers.

        Raises:
            BadArgument: A partition does not exist, or the view's position makes no sense.
            CannotConnect: This is the first partition, and no server gave out a client id in time.
            ClientClosed: The client is not open.
            Exception: What the view's `opened` or `position` raises.
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
                await introduce(self._view, self._call, self._routes.topology.cluster_key)
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
                view=self._view,
                serializer=self._serializer,
                call=self._call,
                fetch=self._fetch,
                seen=self._seen,
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

    async def submit(self, command: Command) -> Outcome | Declined:
        """Append the transaction that a command builds, and build it again where that may help.

        `command.build` looks at the current view. When a lock fails, the client waits until the view holds what was in the
        way and calls `build` again; likewise when a fail-over lost the transaction. A client without a view has nothing
        to wait for: a failed lock is the outcome.

        Args:
            command: What to write; see `Command`.

        Returns:
            The outcome of the last attempt, or `Declined` when `build` returned False.

        Raises:
            NotSent: The partition took nothing for `submit_seconds`: its owner is away, or too much is undecided.
            TooLarge: The payload or the number of locks is above the limits of the server.
            BadArgument: `build` set something that makes no sense, or a checked lock has no position to be compared with.
            NotMounted, ClientClosed: This client does not have the partition, or is not open.
            PartitionParked, ClientAhead, Superseded: The partition was stopped; see `status`.
            Exception: What `build` raises.
        """
        return await self._submit_with(self._call, command)

    async def _submit_with(self, call: Call, command: Command) -> Outcome | Declined:
        """As `submit`, with another way to call the command's functions."""
        return await self._submit(call, (command,), is_group=False)

    async def submit_group(self, commands: Sequence[Command]) -> Outcome | Declined:
        """Append the transactions of several commands as one group: all of them are in the log, in a row, or none is.

        Every command builds against the view as it is before the group; what the others build is not in it. When a lock of
        one fails, or a fail-over lost them, all of them are built again, as with `submit`. The partition has to write
        format 1.

        Args:
            commands: What to write, in this order. All of them must mean the same partition.

        Returns:
            One outcome for all of them: `Committed` with the first id and their number, the rejection, `Unknown`, or
            `Declined` when `build` of one returned False. Every command is told it.

        Raises:
            BadArgument: There is no command, they mean different partitions, or as of `submit`.
            NeedsBatches: The partition writes format 0. Nothing was sent.
            TooLarge: The group is larger than a frame of the server, or as of `submit`. Nothing was sent.
            NotSent, NotMounted, ClientClosed, PartitionParked, ClientAhead: As of `submit`.
            Exception: What `build` raises.
        """
        return await self._submit_group_with(self._call, commands)

    async def _submit_group_with(self, call: Call, commands: Sequence[Command]) -> Outcome | Declined:
        """As `submit_group`, with another way to call the commands' functions."""
        return await self._submit(call, tuple(commands), is_group=True)

    async def _submit(self, call: Call, commands: Sequence[Command], *, is_group: bool) -> Outcome | Declined:
        line = self._line(self._partition_of(commands))
        async with self._counted():
            outcome = await self._attempt(line, commands, call, is_group)
        for number, command in enumerate(commands):
            await tell(line.partition, call, command.on_completion, outcome)
            if isinstance(outcome, Committed) and is_overridden(command, "on_application"):
                line.announce(outcome.id + number, command.on_application)
        return outcome

    def _partition_of(self, commands: Sequence[Command]) -> int:
        count, found = self.partition_count, set()
        for command in commands:
            partition = command.partition(count)
            found.add(self._partitioner(command.key, count) if partition is None else partition)
        if len(found) != 1:
            raise BadArgument(_NO_GROUP if not found else f"a group is in one partition, not in {some(sorted(found))}")
        return found.pop()

    async def _attempt(self, line: Line, commands: Sequence[Command], call: Call, is_group: bool) -> Outcome | Declined:
        """As often as it takes, and as is allowed."""
        attempt = 0
        while True:
            attempt += 1
            epoch = await line.ready_epoch()
            outcome = await self._build_and_send(line, commands, call, is_group)
            if not isinstance(outcome, Rejected):
                return outcome
            if outcome.reason is not Reason.LOST:
                for command in commands:
                    await tell(line.partition, call, command.on_lock_failure, outcome)
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
        self, line: Line, commands: Sequence[Command], call: Call, is_group: bool
    ) -> Outcome | Declined:
        await line.enter(len(commands))
        try:
            positions: list[int] = []
            builders: list[Builder] = []
            for command in commands:
                builder = Builder(line.position, self._serializer)
                if not await call(command.build, builder):
                    return Declined()
                positions.append(self._checked_position(line, builder.position if line.has_view else None, builder.locks))
                builders.append(builder)
            make = group_of(positions, builders) if is_group else request_of(positions[0], builders[0])
            waiter: asyncio.Future[Outcome] = line.add(make)
        finally:
            line.leave(len(commands))
        return await waiter

    def position(self, partition: int) -> int:
        """The highest id of a partition that the view has applied; without a view, that is known to be committed.

        Read it *before* the view and give it to `append`: then locks are compared with what the view showed, even if it
        has moved on since.

        Raises:
            NotMounted, ClientClosed: This client does not have the partition, or is not open.
        """
        return self._line(partition).position

    def append(
        self,
        payload: Any,
        *,
        partition: int | None = None,
        key: Any = None,
        header: int = 0,
        locks: Iterable[Lock] = (),
        position: int | None = None,
    ) -> Coroutine[Any, Any, Outcome]:
        """Append one transaction, once: nothing is built again when a lock fails.

        Args:
            payload: Bytes, or what the serializer takes.
            partition: Which partition; or give `key`.
            key: The partitioner makes a partition of it.
            header: 32 bits with a sign that travel beside the payload.
            locks: See `read_lock`, `write_lock` and `append_lock`.
            position: The highest id that the decision behind this transaction has seen: READ and WRITE locks fail when a
                later transaction marked them. The default is `position(partition)` at the moment of this call.

        Returns:
            An awaitable of `Committed`, `Rejected` or `Unknown`.

        Raises:
            BadArgument: An argument makes no sense. Raised by the call; all others by the `await`.
            NotSent: The partition took nothing for `submit_seconds`.
            TooLarge: The payload or the number of locks is above the limits of the server.
            NotMounted, ClientClosed: This client does not have the partition, or is not open.
            PartitionParked, ClientAhead, Superseded: The partition was stopped; see `status`.
        """
        line = self._line(self._choose(partition, key))
        locks = tuple(locks)
        position = self._checked_position(line, position, locks)
        return line.send(1, request(position, encoded(payload, self._serializer), checked_header(header), locks))

    def append_many(
        self,
        payloads: Sequence[Any],
        *,
        partition: int | None = None,
        key: Any = None,
        headers: Sequence[int] | None = None,
        locks: Sequence[Iterable[Lock]] | None = None,
        position: int | None = None,
    ) -> Coroutine[Any, Any, Outcomes]:
        """Append many transactions to one partition, in this order, with one `await` for all of them.

        Each is a transaction of its own: some may be committed and others rejected. This costs much less than as many
        calls of `append`.

        Args:
            payloads: As `payload` of `append`, one for each transaction.
            partition: Which partition; or give `key`.
            key: The partitioner makes a partition of it.
            headers: One for each payload, or None for zeros.
            locks: The locks of each payload, or None for none.
            position: As of `append`, for all of them.

        Returns:
            An awaitable of `Outcomes`: columns with a row for each payload.

        Raises:
            BadArgument: An argument makes no sense. Raised by the call; all others by the `await`.
            NotSent: The partition took nothing for `submit_seconds`.
            TooLarge: One payload, or its number of locks, is above the limits of the server.
            NotMounted, ClientClosed: This client does not have the partition, or is not open.
            PartitionParked, ClientAhead, Superseded: The partition was stopped; see `status`.
        """
        line, position, data, headers, each = self._columns(payloads, partition, key, headers, locks, position)
        if not data:
            return no_outcomes()
        return line.send(len(data), partial(Bundle, position, data, headers, each))

    def append_group(
        self,
        payloads: Sequence[Any],
        *,
        partition: int | None = None,
        key: Any = None,
        headers: Sequence[int] | None = None,
        locks: Sequence[Iterable[Lock]] | None = None,
        position: int | None = None,
    ) -> Coroutine[Any, Any, Outcome]:
        """Append a group, once: all of these transactions are in the log, in a row, or none is.

        When the lock of one fails, the group is rejected. The partition has to write format 1.

        Args:
            payloads: As of `append_many`, one for each transaction.
            partition: Which partition; or give `key`.
            key: As of `append_many`.
            headers: As of `append_many`.
            locks: As of `append_many`.
            position: As of `append_many`.

        Returns:
            An awaitable of one outcome: `Committed` with the first id and their number, `Rejected`, or `Unknown`.

        Raises:
            BadArgument: There is no payload, or an argument makes no sense. Raised by the call; all others by the `await`.
            NeedsBatches: The partition writes format 0. Nothing was sent.
            TooLarge: The group is larger than a frame of the server, or as of `append`. Nothing was sent.
            NotSent, NotMounted, ClientClosed, PartitionParked, ClientAhead: As of `append`.
        """
        line, position, data, headers, each = self._columns(payloads, partition, key, headers, locks, position)
        if not data:
            raise BadArgument(_NO_GROUP)
        return line.send(len(data), partial(Group, position, data, headers, each))

    def _columns(
        self,
        payloads: Sequence[Any],
        partition: int | None,
        key: Any,
        headers: Sequence[int] | None,
        locks: Sequence[Iterable[Lock]] | None,
        position: int | None,
    ) -> tuple[Line, int, list[bytes], Sequence[int] | None, list[tuple[Lock, ...]] | None]:
        """The arguments of `append_many`, checked."""
        line = self._line(self._choose(partition, key))
        for name, column in (("headers", headers), ("locks", locks)):
            if column is not None and len(column) != len(payloads):
                raise BadArgument(f"there are {len(payloads)} payloads and {len(column)} {name}")
        headers = None if headers is None else [checked_header(header) for header in headers]
        each = None if locks is None else [tuple(some) for some in locks]
        position = self._checked_position(line, position, [lock for some in each or () for lock in some])
        return line, position, [encoded(payload, self._serializer) for payload in payloads], headers, each

    def partition_of(self, key: Any) -> int:
        """The partition in which `append(…, key=key)` writes."""
        return self._partitioner(key, self.partition_count)

    def _choose(self, partition: int | None, key: Any) -> int:
        if (partition is None) == (key is None):
            raise BadArgument("name either the partition or the key of a transaction")
        return partition if partition is not None else self.partition_of(key)

    def _checked_position(self, line: Line, position: int | None, locks: Sequence[Lock]) -> int:
        if position is None:
            if not line.has_view and any(lock.mode is not Mode.APPEND for lock in locks):
                raise BadArgument(
                    "a READ or WRITE lock needs a position to be compared with: give the client a view, or a position"
                )
            return line.position
        return checked_position(position)

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

    async def end_position(self, partition: int, *, confirmed: bool = True) -> int:
        """The highest committed id of a partition, -1 when it is empty, from its owner. Needs no partitions of one's own.

        It is not below any id that anybody was told before this was called: the owner asks a majority of the storages
        whether it was replaced. With `confirmed=False` it answers what it knows, which is faster, and old when it was
        paused and replaced.

        Raises:
            CannotConnect: The owner did not answer within `submit_seconds`.
            BadArgument, ClientClosed: There is no such partition, or the client is not open.
        """
        self._check_reading(partition)
        return await self._reader.end_position(partition, confirmed=confirmed)

    async def position_at(self, partition: int, time: datetime | int) -> int:
        """The highest id in front of the first transaction of that time or later: what comes behind it is not earlier.

        A view that begins at a time returns it from `position`. What was written before the partition went over to format 1
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
        return await self._reader.position_at(partition, time)

    async def read(self, partition: int, id: int, *, with_locks: bool = False) -> Transaction:
        """One committed transaction by its id. Needs no view and no partitions of one's own.

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
            from_time: Those of this time and later; a time as of `position_at`.
            until_time: Those before this time.
            with_locks: As of `read`.

        Raises:
            BeyondLog: One of these is not committed yet.
            NeedsBatches: As of `position_at`.
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

    def status(self) -> tuple[PartitionStatus, ...]:
        """The state of every partition of this client, for people and for monitoring."""
        return tuple(self._lines[partition].status() for partition in self._active)
