"""The asyncio client of an application.

Each partition has a `PartitionClient` (`waltzd.client.partition`); all of them share `waltzd.client.routes`. The client
connects to servers only, never to the coordinator.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from copy import copy
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self
from uuid import UUID

from waltzd.client.consumer_groups import ConsumerGroups
from waltzd.client.follower import Call, call_here, call_opened
from waltzd.client.instrument import Instrument, Instruments
from waltzd.client.iteration import FeedBuffer, IterationMethods
from waltzd.client.keys import Keys, hashes_of, key_locks
from waltzd.client.mount import SeenTime
from waltzd.client.partition import ClientStatus, PartitionClient
from waltzd.client.pending import AnyRequest, AtomicRequest, BatchRequest, Outcomes, no_outcomes, request
from waltzd.client.reader import Reader
from waltzd.client.routes import Connect, Partitions, Routes, addresses_of, some
from waltzd.client.settings import ClientSettings, Tls
from waltzd.client.submits import IdempotencyKey, Submits, Wait, deadline_of, mark_of, own_position
from waltzd.client.view import (
    Command,
    E,
    Partitioner,
    Serializer,
    Transaction,
    View,
    checked_kind,
    encoded,
    key_of,
    kind_of,
    partition_by_hash,
    partition_of,
)
from waltzd.errors import BadArgument, CannotConnect, ClientClosed, NotMounted, WaltzError
from waltzd.protocol.batches import FeedMode, Registration, Topology
from waltzd.protocol.channels import BLAKE2B, KeyHash, key_function, key_partitions
from waltzd.protocol.locks import AppendOutcome, Committed, Lock, Outcome, Token, token_of
from waltzd.protocol.positions import Position

if TYPE_CHECKING:
    from waltzd.client.subscription import Subscription


_NO_TRANSACTION = "an atomic append needs at least one transaction"


class Client(IterationMethods[E], ConsumerGroups[E], Generic[E]):
    """The asyncio client of an application: it submits transactions, follows partitions, and finds the servers.

    A `Client[E]` takes and returns values of type E, which its serializer turns into payloads; a plain `Client` uses
    bytes.

    Use it as an async context manager. While it is open it keeps a connection for each of its partitions, finds the new
    owner after a fail-over, and feeds the `view`, if there is one. All calls belong to the event loop that opened it.

    Outcomes are certain. `Committed` and `Rejected` are facts about the log; an exception means that nothing was sent;
    `Unknown` means that the deadline (`ClientSettings.submit_seconds`) passed before the log could be asked. The client
    never sends a transaction twice.

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
        view: View[E] | None = None,
        feed: FeedMode | None = None,
        partitions: Partitions = "all",
        serializer: Serializer[E] | None = None,
        partitioner: Partitioner = partition_by_hash,
        settings: ClientSettings | None = None,
        tls: Tls | None = None,
        connect: Connect | None = None,
    ) -> None:
        """Create a client; `open` connects it.

        Args:
            servers: Some servers of the cluster, `"host:port,host:port"` or a list. They report all other servers.
            view: View of the application, which is fed with every committed transaction. Without a view there is no
                feed.
            feed: `FeedMode.RECORDS` (the default with a view), or `FeedMode.HEADS`, which leaves out payloads until
                they are fetched.
            partitions: `"all"`, numbers, and names of channels: `[0, 3]`, `"orders"` or `"0-3,orders"`. A client of
                exactly one channel hashes keys within the channel, as `waltzctl channel list` shows; any other client
                hashes them over all partitions of the cluster.
            serializer: Turns values into payloads and back. Without a serializer, payloads are bytes.
            partitioner: `partitioner(key, count)` chooses the partition of a key, as a number below `count`: the
                number of partitions of the cluster, or of the channel. The default is the same in every language, so
                that all clients agree.
            settings: Timeouts and limits.
            tls: Certificate of this application, if the cluster uses TLS; without it, connections are in plain text.
            connect: Function that connects to a server, in place of `tls`. `LocalCluster.connect` connects within the
                process.

        Raises:
            BadArgument: An address is no `host:port`; `feed` does not fit `view`; or both `tls` and `connect` are
                given.
            BadConfig: The files of `tls` are missing, or do not belong together (`waltzd.errors.operations`).
        """
        self.settings = settings or ClientSettings()
        self._feed = feed or (FeedMode.NONE if view is None else FeedMode.RECORDS)
        if not isinstance(self._feed, FeedMode):
            raise BadArgument(f"feed must be a FeedMode, not {feed!r}")
        if (view is None) != (self._feed is FeedMode.NONE):
            raise BadArgument(f"FeedMode.{self._feed.name} needs {'a view' if view is None else 'no view'}")
        self._wanted = partitions if isinstance(partitions, str) else tuple(partitions)
        self._view = view
        self._serializer, self._partitioner = serializer, partitioner
        self._call: Call = call_here
        seconds, introduction = self.settings.call_seconds, self.settings.introduction
        if tls is not None and connect is not None:
            raise BadArgument("both `tls` and `connect` are given; give one of them")
        self._routes = Routes(
            addresses_of(servers), connect or _connect_with(tls), call_seconds=seconds, introduction=introduction
        )
        self._seen = SeenTime()
        self._reader = Reader(self._routes, serializer, self._seen, seconds=self.settings.submit_seconds)
        self._instruments: list[Instrument] = []
        self._clients: dict[int, PartitionClient] = {}
        self._keys: dict[int, Keys] = {}
        self._feeds: dict[PartitionClient, FeedBuffer] = {}
        self._subscriptions: dict[Subscription[Any], None] = {}
        self._active: tuple[int, ...] = ()
        self._key_hash: KeyHash | None = None
        """Hash of the keys of the client's channel; None if keys are hashed over all partitions of the cluster."""
        self._changing = asyncio.Lock()
        self._registration: Registration | None = None
        self._closed: ClientClosed | None = ClientClosed("the client is not open yet")
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop that called `open()`; None while the client is closed."""
        self._submits = Submits(self.settings, serializer, lambda: self.partition_count)
        self._stops: dict[asyncio.Future[None], None] = {}
        """Futures of callers that wait for a partition to stop."""

    # -- life

    async def open(self, *, timeout: float | None = None) -> None:
        """Find the cluster, and start the partitions of the client.

        A partition becomes ready when its owner answers; `open` does not wait for that. A client without partitions can
        only read.

        Args:
            timeout: Seconds to look for the cluster; `submit_seconds` if it is not given.

        Raises:
            CannotConnect: No server answered in time, or none assigned a client id.
            ForeignCluster: The servers belong to different clusters.
            TlsMismatch: One side uses TLS and the other does not, or a certificate is refused.
            BadArgument: The client is open already, a partition does not exist, or the view's position is no position.
            NoSuchChannel: The cluster has no channel of a name that was given.
            Exception: What the view's `opened` or `position` raises.
        """
        if self._closed is None:
            raise BadArgument("the client is open already")
        self._loop = asyncio.get_running_loop()
        clock = self._loop.time
        deadline = clock() + (self.settings.submit_seconds if timeout is None else timeout)
        try:
            await self._routes.open(deadline - clock())
            self._routes.keep_fresh()
            self._closed = None
            await self._set_partitions(self._wanted, deadline - clock())
        except BaseException as error:
            await self.close()
            if isinstance(error, WaltzError):
                raise error.with_traceback(None) from None  # without the frames of the client
            raise

    async def close(self) -> None:
        """Wait up to `close_seconds` for outcomes, then close; what is undecided by then is `Unknown`. Call it on the
        event loop of the client. A second call does nothing."""
        self._check_loop()
        reason = self._closed = ClientClosed("the client is closed")
        try:
            await asyncio.gather(*[one.close() for one in list(self._subscriptions)])
            async with self._changing:
                active, self._active = self._active, ()
                for arrivals in self._feeds.values():  # a feed that waits for its reader would not end
                    arrivals.end()
                ending = [*[self._clients[partition] for partition in active], *self._feeds]
                await asyncio.gather(*[client.deactivate(reason) for client in ending])
                await self._submits.close()
        finally:
            self._tell_stops()
            self._reader.close()
            await self._routes.close()
            self._loop = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- the cluster

    @property
    def client_id(self) -> int:
        """Number that the cluster gave this client, and never gives to another one. An open client with partitions has
        one."""
        assert self._registration is not None, "a client has an id when it is open and has partitions"
        return self._registration.client

    @property
    def cluster(self) -> str:
        """Name of the cluster."""
        return self._routes.topology.cluster

    @property
    def cluster_key(self) -> UUID:
        """Key of the cluster, which no other cluster has."""
        return self._routes.topology.cluster_key

    @property
    def topology(self) -> Topology:
        """Servers and the owners of all partitions, as the client saw them last."""
        return self._routes.topology

    @property
    def partition_count(self) -> int:
        """Number of partitions of the cluster."""
        return self._routes.partitions

    @property
    def partitions(self) -> tuple[int, ...]:
        """Partitions of this client."""
        return self._active

    async def channel(self, name: str) -> tuple[int, ...]:
        """Return the partitions that a channel contains at this moment.

        Raises:
            NoSuchChannel: The cluster has no channel of this name, or the policy grants this client nothing in its
                partitions.
            CannotConnect, ClientClosed: No server answered in time, or the client is not open.
        """
        self._check_open()
        self._check_loop()
        return await self._routes.numbers(name)

    async def set_partitions(self, partitions: Partitions, *, timeout: float | None = None) -> None:
        """Set the partitions of this client.

        A partition that is removed finishes its requests first. For a partition that is added, the view is asked for
        its position. To restart a partition that was stopped by an error, remove it and add it again.

        Args:
            partitions: `"all"`, numbers, and names of channels. A channel is resolved now: when it changes, call this
                again. Keys are hashed as `Client` says.
            timeout: Seconds to ask for a client id; `submit_seconds` if it is not given.

        Raises:
            BadArgument: A partition does not exist, or the view's position is no position.
            NoSuchChannel: The cluster has no channel of a name that was given.
            CannotConnect: This is the first partition, and no server assigned a client id in time.
            ClientClosed: The client is not open.
            Exception: What the view's `opened` or `position` raises.
        """
        await self._set_partitions(partitions, self.settings.submit_seconds if timeout is None else timeout)

    async def _set_partitions(self, partitions: Partitions, seconds: float) -> None:
        self._check_loop()
        found = await self._routes.numbers(partitions)
        for partition in found:
            self._check_number(partition)
        wanted, key_hash = tuple(sorted(found)), self._routes.keys_of(partitions)
        async with self._changing:
            self._check_open()
            self._key_hash = key_hash
            if wanted and self._registration is None:
                self._registration = await self._routes.register(seconds)
            going = [partition for partition in self._active if partition not in wanted]
            coming = [partition for partition in wanted if partition not in self._active]
            self._active = tuple(partition for partition in self._active if partition in wanted)
            reasons = [NotMounted(f"partition {partition} was removed from this client") for partition in going]
            await asyncio.gather(
                *[self._clients[partition].deactivate(reason) for partition, reason in zip(going, reasons, strict=True)]
            )
            if coming:
                await call_opened(self._view, self._call, self._routes.topology.cluster_key)
            for partition in coming:
                assert self._registration is not None
                await self._client_of(partition).activate(self._registration)
                self._active = tuple(sorted((*self._active, partition)))

    def _client_of(self, partition: int) -> PartitionClient:
        if partition not in self._clients:
            self._clients[partition] = self._new_client(partition, self._feed, self._view, self._call, self._instruments)
            self._clients[partition].on_stop = self._tell_stops
        return self._clients[partition]

    def _new_client(
        self, partition: int, feed: FeedMode, view: View[E] | None, call: Call, instruments: Instruments = ()
    ) -> PartitionClient:
        return PartitionClient(
            partition,
            routes=self._routes,
            settings=self.settings,
            feed=feed,
            view=view,
            serializer=self._serializer,
            call=call,
            fetch=self._fetch,
            seen=self._seen,
            instruments=instruments,
        )

    async def _begin_feed(self, partition: int, arrivals: FeedBuffer) -> PartitionClient:
        registration = await self._routes.register(self.settings.submit_seconds)
        self._check_open()
        client = self._new_client(partition, FeedMode.RECORDS, arrivals, call_here)
        client.on_stop = arrivals.end
        self._feeds[client] = arrivals
        await client.activate(registration)
        return client

    def _check_number(self, partition: int) -> None:
        if not hasattr(partition, "__index__") or not 0 <= partition < self.partition_count:
            raise BadArgument(
                f"there is no partition {partition!r}; the cluster has partitions 0 to {self.partition_count - 1}"
            )

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ClientClosed(self._closed.message)

    def _check_loop(self) -> None:
        """Refuse a call on another event loop, where it would wait for ever."""
        if self._loop not in (None, asyncio.get_running_loop()):
            why = "this client was opened on another event loop, and works only there"
            raise BadArgument(why, next_step="open a client on each event loop; without an event loop use BlockingClient")

    def _check_reading(self, partition: int) -> None:
        self._check_open()
        self._check_loop()
        self._check_number(partition)

    def _active_client(self, partition: int, key: Any = None) -> PartitionClient:
        """Return the client of a partition; `key` chose the partition, if it is given."""
        self._check_open()
        self._check_number(partition)
        client = self._clients.get(partition)
        if client is None or partition not in self._active:
            what = (
                "partition {0} is not a partition of this client" if key is None else "key {1!r} belongs to partition {0}"
            )
            raise NotMounted(
                f"{what.format(partition, key)}; this client has only {some(self._active)}",
                next_step=f"open the client with partition {partition} in `partitions`, or call `set_partitions`",
            )
        return client

    # -- writing

    async def submit(
        self,
        command: Command[E],
        *,
        fresh: bool | None = None,
        wait: Wait = "committed",
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> Outcome:
        """Append the transaction that a command builds, and build it again if that may help.

        `command.build` reads the current view. If a lock fails, the client waits until the view has applied the
        conflicting transaction, and calls `build` again; also if a fail-over lost the transaction. A client without a
        view has nothing to wait for, and a call of the view cannot wait for it: a failed lock is the outcome.

        Commands that declare the same write lock (`Command.locks`) wait for each other in the order of their calls: the
        functions of a command must not wait for the `submit` of another one with the same lock.

        If the caller is cancelled, a transaction that was not sent is withdrawn. One that was sent is decided, and the
        functions of the command are called as if the caller had stayed.

        Args:
            command: What to write; see `Command`.
            fresh: True: before the build, the view applies everything that any client had committed when `submit` was
                called. This asks the owner, which asks a majority. False: build on the view as it is, also to decline.
                By default the view of the partition must have caught up once, because a view that was just opened is
                empty; after that, `build` sees the view as it is, and only an answer "no" is confirmed on a view that
                contains everything. By default a call of the view itself does not wait for the view, which would wait
                for itself; with True it does, until the timeout.
            wait: `"applied"`: return when this client's view has applied the transaction; then `is_applied` of the
                outcome is True. If that takes longer than `timeout`, the outcome is returned with `is_applied` False:
                it is committed. Do not ask for this in a call of the view.
            timeout: Seconds for the whole call, with the waiting for the view. Without it, each attempt and each wait
                has `submit_seconds`. What was sent by then and has no outcome is `Unknown`.
            idempotency_key: See `append`. If a transaction with this key is in the partition already, its outcome is
                returned, and `build` is not called once the view has applied that transaction. To find it, the client
                reads the log of the partition, beside the feed.

        Returns:
            The outcome of the last attempt, or `Declined` if `build` declined.

        Raises:
            NotSent: The partition took nothing in time: its owner is away, too much is undecided, or the view did not
                become fresh.
            TooLarge: The payload or the number of locks is above the limits of the servers.
            BadArgument: `build` returned nothing, or set a wrong value; a checked lock has no position to be compared
                with; or this client has no view to wait for.
            NotMounted, ClientClosed: The partition is not a partition of this client, or the client is not open.
            OtherTimeline: An operator ended the log below what `build` has seen. Decide anew.
            ViewStopped, ClientAhead, Superseded: The partition was stopped; see `status`.
            Exception: What `build` raises.
        """
        return await self._submit(
            self._call, (command,), is_atomic=False, fresh=fresh, wait=wait, timeout=timeout,
            idempotency_key=idempotency_key,
        )  # fmt: skip

    async def submit_atomic(
        self,
        commands: Sequence[Command[E]],
        *,
        fresh: bool | None = None,
        wait: Wait = "committed",
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> Outcome:
        """Append the transactions of several commands atomically: the log has all of them, in a row, or none.

        Each command builds on the view before the first of them. If a lock of one fails, or a fail-over lost them, all
        are built again, as with `submit`. The partition must write format 1.

        Args:
            commands: What to write, in this order. All commands must have the same partition.
            fresh: See `submit`.
            wait: See `submit`.
            timeout: See `submit`.
            idempotency_key: See `submit`; one key for all of them.

        Returns:
            One outcome for all of them: `Committed` with the first id and the number of transactions, `Rejected`,
                `Unknown`,
            or `Declined` if `build` of one declined. `on_outcome` of every command is called with it.

        Raises:
            BadArgument: There is no command, the commands have different partitions, or see `submit`.
            NeedsBatches: The partition writes format 0. Nothing was sent.
            TooLarge: The transactions together are larger than a frame of the servers, or see `submit`. Nothing was
                sent.
            NotSent, NotMounted, ClientClosed, ViewStopped, ClientAhead: See `submit`.
            Exception: What `build` raises.
        """
        return await self._submit(
            self._call, tuple(commands), is_atomic=True, fresh=fresh, wait=wait, timeout=timeout,
            idempotency_key=idempotency_key,
        )  # fmt: skip

    async def _submit(
        self,
        call: Call,
        commands: Sequence[Command[E]],
        *,
        is_atomic: bool,
        fresh: bool | None = None,
        wait: Wait = "committed",
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> Outcome:
        """Submit `commands`; `call` calls their functions. A `WaltzError` is raised without the frames of the client."""
        self._check_loop()
        client = self._active_client(self._partition_of(commands))
        once = None
        if idempotency_key is not None:
            once = IdempotencyKey(lambda: self._keys_of(client.partition), key_locks(idempotency_key))
        try:
            return await self._submits.submit(
                client, commands, call, later=self._call, is_atomic=is_atomic, fresh=fresh, wait=wait, timeout=timeout,
                once=once,
            )  # fmt: skip
        except WaltzError as error:
            raise error.with_traceback(None) from None

    def _partition_of(self, commands: Sequence[Command[E]]) -> int:
        count = self.partition_count
        found = {partition_of(command, self.partition_of, count) for command in commands}
        if len(found) != 1:
            where = f"the commands of an atomic append have the partitions {some(sorted(found))}; they must have one"
            raise BadArgument(where if found else _NO_TRANSACTION)
        return found.pop()

    def position(self, partition: int) -> Position:
        """Return the highest id of a partition that the view has applied; without a view, the highest id known to be
        committed.

        Read it *before* the view and give it to `append`: then locks are compared with what the view showed, even if
        the view has moved on since.

        Raises:
            NotMounted, ClientClosed: The partition is not a partition of this client, or the client is not open.
        """
        return self._active_client(partition).position

    def append(
        self,
        payload: E,
        *,
        partition: int | None = None,
        key: Any = None,
        kind: int | None = None,
        locks: Iterable[Lock] = (),
        position: int | None = None,
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> Coroutine[Any, Any, AppendOutcome]:
        """Append one transaction, in one attempt: if a lock fails, it is rejected.

        Args:
            payload: Bytes, or a value for the serializer.
            partition: Partition; or give `key`.
            key: Key from which the partitioner chooses the partition. With neither, the key is the name of the locks;
                see `Lock`.
            kind: Integer of 32 bits with a sign that is kept beside the payload; the meaning is the application's. The
                default is the kind of the payload's event type (`EventType`), or 0.
            locks: See `read_lock`, `write_lock` and `append_lock`.
            position: Highest id that the decision for this transaction has seen. READ and WRITE locks fail if a later
                transaction marked them. The default is `position(partition)` at this call. A `Position` of another
                timeline is refused; a plain integer is an id of the current log.
            timeout: Seconds for the call; `submit_seconds` if it is not given. What was sent by then and has no outcome
                is `Unknown`; what was not sent raises `NotSent`.
            idempotency_key: Text that identifies the request of the caller. If a transaction with the same key is in
                the partition already, nothing is appended, and the outcome is `Committed` with the id of that
                transaction: after `Unknown`, after a restart, from another process, through any fail-over. A key is
                kept for `ClientSettings.idempotency_seconds` from its first use, within one partition: give the
                `partition` or `key` of that use again. Payloads are not compared. The client needs the right to read,
                and the partition must write format 1.

        Returns:
            An awaitable of `Committed`, `Rejected` or `Unknown`.

        Raises:
            BadArgument: An argument is wrong. Raised by the call; all other errors by the `await`.
            NeedsBatches: The partition writes format 0, which has no idempotency keys. Nothing was sent.
            NotSent: The partition took nothing in time.
            TooLarge: The payload or the number of locks is above the limits of the servers.
            NotMounted, ClientClosed: The partition is not a partition of this client, or the client is not open.
            OtherTimeline: An operator ended the log below `position`, or below the view. Decide anew.
            ViewStopped, ClientAhead, Superseded: The partition was stopped; see `status`.
        """
        locks = tuple(locks)
        client = self._choose(partition, key, locks)
        body = encoded(payload, self._serializer)
        kind = kind_of(payload, self._serializer) if kind is None else checked_kind(kind)
        if idempotency_key is not None:
            own = key_locks(idempotency_key)
            position = own_position(client, position, locks)
            return self._once(client, own, position, 1, lambda at: request(at, body, kind, (*locks, *own)), timeout)
        position = mark_of(client, position, locks)
        return client.send(1, position, request(position, body, kind, locks), deadline_of(timeout))

    def append_many(
        self,
        payloads: Sequence[E],
        *,
        partition: int | None = None,
        key: Any = None,
        kinds: Sequence[int] | None = None,
        locks: Sequence[Iterable[Lock]] | None = None,
        position: int | None = None,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, Outcomes]:
        """Append many independent transactions to one partition, in this order, with one `await`.

        Some may be committed and others rejected. This costs much less than one call of `append` for each.

        Args:
            payloads: See `payload` of `append`; one for each transaction.
            partition: Partition; or give `key`.
            key: See `append`.
            kinds: Kind of each transaction; None for those of the event types, or zeros.
            locks: Locks of each transaction, or None for none.
            position: See `append`; one for all of them.
            timeout: See `append`.

        Returns:
            An awaitable of `Outcomes`: columns with a row for each payload.

        Raises:
            BadArgument: An argument is wrong. Raised by the call; all other errors by the `await`.
            NotSent: The partition took nothing in time.
            TooLarge: A payload, or its number of locks, is above the limits of the servers.
            NotMounted, ClientClosed: The partition is not a partition of this client, or the client is not open.
            ViewStopped, ClientAhead, Superseded: The partition was stopped; see `status`.
        """
        client, position, data, kinds, each = self._columns(payloads, partition, key, kinds, locks, position)
        if not data:
            return no_outcomes()
        return client.send(len(data), position, partial(BatchRequest, position, data, kinds, each), deadline_of(timeout))

    def append_atomic(
        self,
        payloads: Sequence[E],
        *,
        partition: int | None = None,
        key: Any = None,
        kinds: Sequence[int] | None = None,
        locks: Sequence[Iterable[Lock]] | None = None,
        position: int | None = None,
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> Coroutine[Any, Any, AppendOutcome]:
        """Append several transactions atomically, in one attempt: the log has all of them, in a row, or none.

        If the lock of one fails, all are rejected. The partition must write format 1.

        Args:
            payloads: See `append_many`; one for each transaction.
            partition: Partition; or give `key`.
            key: See `append_many`.
            kinds: See `append_many`.
            locks: See `append_many`.
            position: See `append_many`.
            timeout: See `append`.
            idempotency_key: See `append`; one key for all of them.

        Returns:
            An awaitable of one outcome: `Committed` with the first id and the number of transactions, `Rejected`, or
                `Unknown`.

        Raises:
            BadArgument: There is no payload, or an argument is wrong. Raised by the call; all other errors by the
                `await`.
            NeedsBatches: The partition writes format 0. Nothing was sent.
            TooLarge: The transactions together are larger than a frame of the servers, or see `append`. Nothing was
                sent.
            NotSent, NotMounted, ClientClosed, ViewStopped, ClientAhead: See `append`.
        """
        given = position
        client, position, data, kinds, each = self._columns(payloads, partition, key, kinds, locks, position)
        if not data:
            raise BadArgument(_NO_TRANSACTION)
        if idempotency_key is not None:
            own, all_locks = key_locks(idempotency_key), [list(some) for some in each or [()] * len(data)]
            checked = own_position(client, given, [lock for some in all_locks for lock in some])
            all_locks[0] += own

            def make(at: int) -> Callable[[asyncio.Future[AppendOutcome], float], AnyRequest]:
                return partial(AtomicRequest, at, data, kinds, all_locks)

            return self._once(client, own, checked, len(data), make, timeout)
        return client.send(len(data), position, partial(AtomicRequest, position, data, kinds, each), deadline_of(timeout))

    def _columns(
        self,
        payloads: Sequence[E],
        partition: int | None,
        key: Any,
        kinds: Sequence[int] | None,
        locks: Sequence[Iterable[Lock]] | None,
        position: int | None,
    ) -> tuple[PartitionClient, int, list[bytes], Sequence[int] | None, list[tuple[Lock, ...]] | None]:
        """Return the checked arguments of `append_many`, and the client of the partition."""
        for name, column in (("kinds", kinds), ("locks", locks)):
            if column is not None and len(column) != len(payloads):
                raise BadArgument(f"there are {len(payloads)} payloads and {len(column)} {name}")
        if kinds is not None:
            kinds = [checked_kind(kind) for kind in kinds]
        elif self._serializer is not None:
            kinds = [kind_of(payload, self._serializer) for payload in payloads]
        each = None if locks is None else [tuple(some) for some in locks]
        flat = [lock for some in each or () for lock in some]
        client = self._choose(partition, key, flat)
        position = mark_of(client, position, flat)
        return client, position, [encoded(payload, self._serializer) for payload in payloads], kinds, each

    async def _once(
        self,
        client: PartitionClient,
        own: Sequence[Lock],
        position: int | None,
        count: int,
        make: Callable[[int], Callable[[asyncio.Future[AppendOutcome], float], AnyRequest]],
        timeout: float | None,
    ) -> AppendOutcome:
        """Append a request, unless a transaction with its idempotency key is in the log."""
        deadline = deadline_of(self.settings.submit_seconds if timeout is None else timeout)
        assert deadline is not None

        def send(at: int) -> Coroutine[Any, Any, AppendOutcome]:
            return client.send(count, at, make(at), deadline)

        with self._submits.counted():
            await client.ready_epoch(deadline)  # keys belong to a timeline, which the mount reports
            if position is not None and position > client.mount.known:
                await client.prove(position, deadline)
            return await self._keys_of(client.partition).append(hashes_of(own), position, count, send, deadline)

    def _keys_of(self, partition: int) -> Keys:
        timeline, known = self._clients[partition].mount.timeline, self._keys.get(partition)
        if known is None or known.timeline not in (None, timeline):  # keys of another timeline do not count
            self._keys[partition] = Keys(
                partition,
                self._reader,
                seconds=self.settings.idempotency_seconds,
                wait_seconds=self.settings.submit_seconds,
            )
        return self._keys[partition]

    def partition_of(self, key: Any) -> int:
        """Return the partition in which `append(…, key=key)` writes: one of the client's channel if it has exactly one
        channel, else one of the cluster.

        Raises:
            BadArgument: The partitioner does not take the key; or the channel has another hash function, which a newer
                program gave it.
        """
        if self._key_hash is None:
            return self._partitioner(key, self.partition_count)
        function, partitions = key_function(self._key_hash), key_partitions(self._key_hash)
        if self._partitioner is partition_by_hash and function != BLAKE2B:
            raise BadArgument(
                f"the keys of the channel are hashed by {function}, which this version does not know",
                next_step="install a newer version, or name the partition",
            )
        at = self._partitioner(key, len(partitions))
        if not 0 <= at < len(partitions):
            raise BadArgument(f"the partitioner chose {at!r} from {len(partitions)} partitions of the channel")
        return partitions[at]

    def _partition_of_lock(self, lock: Lock) -> int:
        return self.partition_of(key_of(None, [lock]))

    def _choose(self, partition: int | None, key: Any, locks: Sequence[Lock]) -> PartitionClient:
        if partition is not None and key is not None:
            raise BadArgument("a transaction was given both a partition and a key; give one of them")
        if partition is not None:
            return self._active_client(partition)
        key = key_of(key, locks)
        return self._active_client(self.partition_of(key), key)

    async def _fetch(self, transaction: Transaction[Any]) -> bytes:
        (found,) = await self._reader.some(
            transaction.partition, after=transaction.id - 1, through=transaction.id, timeline=transaction.timeline
        )
        return found.payload

    # -- status

    def status(self) -> ClientStatus:
        """Return the state of each partition, and whether all of them are `ready`. It is cheap enough for a health
        check."""
        return ClientStatus([self._clients[each].status() for each in self._active], is_open=self._closed is None)

    @property
    def has_pending(self) -> bool:
        """True while something that was submitted has no outcome."""
        return bool(self._submits.under_way) or any(self._clients[partition].has_pending for partition in self._active)

    async def flush(self, *, timeout: float | None = None) -> None:
        """Wait until everything that was submitted before this call has an outcome.

        Args:
            timeout: Seconds to wait; `submit_seconds` if it is not given.

        Raises:
            CannotConnect: Something is still undecided at the timeout. It goes on, and its own caller gets the outcome.
        """
        self._check_loop()
        if not self.has_pending:
            return
        limit = self.settings.submit_seconds if timeout is None else timeout
        waits = [self._clients[partition].flushed() for partition in self._active]
        try:
            async with asyncio.timeout(limit):
                await asyncio.gather(*waits, *[asyncio.shield(done) for done in self._submits.under_way])
        except TimeoutError:
            undecided = [partition for partition in self._active if self._clients[partition].has_pending]
            raise CannotConnect(
                f"after {limit:g} seconds, transactions of partitions {some(undecided)} are undecided"
            ) from None

    async def wait_caught_up(self, partition: int | None = None, *, timeout: float | None = None) -> None:
        """Wait until the view has applied everything that any client had committed when this was called.

        Args:
            partition: Partition to wait for; all partitions of this client if it is not given.
            timeout: Seconds to wait; `submit_seconds` if it is not given.

        Raises:
            NotApplied: The timeout passed before the view was there. The message says whether the view fails.
            CannotConnect: The owner did not report in time what is committed.
            BadArgument: This client has no view.
            NotMounted, ClientClosed: The partition is not a partition of this client, or the client is not open.
            ViewStopped, ClientAhead, Superseded: A partition was stopped; see `status`.
        """
        self._check_loop()
        self._check_open()
        clients = [self._active_client(each) for each in (self._active if partition is None else (partition,))]
        seconds = self.settings.submit_seconds if timeout is None else timeout
        waits = [asyncio.create_task(client.wait_caught_up(seconds)) for client in clients]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def wait_applied(self, token: Token | Committed, *, timeout: float | None = None) -> None:
        """Wait until this client's view has applied a transaction of any client: then a read of the view shows it.

        Args:
            token: Token of the transaction (`outcome.token`, `Token.parse`), or the outcome itself.
            timeout: Seconds to wait; `submit_seconds` if it is not given.

        Raises:
            NotApplied: The timeout passed. The transaction is committed, and the view will apply it.
            BeyondLog: The log has no such transaction: the token is of another cluster, or made up.
            OtherTimeline: An operator ended the log below the transaction: it is not in the log any more.
            CannotConnect: The owner did not report in time whether there is such a transaction.
            BadArgument: `token` is no token, there is no such partition, or this client has no view.
            NotMounted, ClientClosed: The partition is not a partition of this client, or the client is not open.
            ViewStopped, ClientAhead, Superseded: The partition was stopped; see `status`.
        """
        self._check_loop()
        token = token_of(token)
        seconds = self.settings.submit_seconds if timeout is None else timeout
        await self._active_client(token.partition).wait_applied(Position(token.id, token.timeline), seconds)

    async def wait_stopped(self, *, timeout: float | None = None) -> None:
        """Wait until an error stops a partition, and raise the error. Return when the client is closed.

        A service that must not run without its view waits for this beside its work.

        Args:
            timeout: Seconds after which to return; none if it is not given.

        Raises:
            ViewStopped, ClientAhead, Superseded, WaltzError: The error that stopped a partition, also before this call.
            ClientClosed: The client is not open.

        Example:
            ```python
            async with asyncio.TaskGroup() as group:
                group.create_task(client.wait_stopped())
                group.create_task(serve())
            ```
        """
        self._check_loop()
        self._check_open()
        try:
            async with asyncio.timeout(timeout):
                while self._closed is None:
                    for partition in self._active:
                        if (stopped := self._clients[partition].stopped) is not None:
                            raise copy(stopped)
                    bell: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._stops[bell] = None
                    try:
                        await bell
                    finally:
                        self._stops.pop(bell, None)
        except TimeoutError:
            return

    def _tell_stops(self) -> None:
        bells, self._stops = self._stops, {}
        for bell in bells:
            if not bell.done():
                bell.set_result(None)


def _connect_with(tls: Tls | None) -> Connect:
    # gRPC and the messages take half as long to load as everything else here: not where a client is only imported.
    from waltzd.wire import tls as wire_tls
    from waltzd.wire.servers import ServerClient

    if tls is None:
        return ServerClient
    certificate, key, ca = [os.fspath(path) for path in (tls.certificate, tls.key, tls.ca)]
    return partial(ServerClient, tls=wire_tls.Tls(certificate, key, ca, role=None))
