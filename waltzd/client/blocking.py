"""The client for applications without a loop of their own: the same names as `waltzd.client.client`, and each call blocks.

One thread of the process runs the loop of all blocking clients, for as long as the process lives: a thread of gRPC may
still call back after the last call."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from datetime import datetime
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar
from uuid import UUID

from waltzd.client.blocking_groups import (
    BlockingDelivery,
    BlockingHandling,
    BlockingSubscription,
    handle,
    subscribe,
)
from waltzd.client.client import Client
from waltzd.client.consumer_groups import Start
from waltzd.client.follower import call_here
from waltzd.client.loop import LoopThread
from waltzd.client.pending import Outcomes
from waltzd.client.routes import Connect, Partitions
from waltzd.client.settings import ClientSettings, Tls
from waltzd.client.status import ClientStatus
from waltzd.client.submits import Wait
from waltzd.client.view import (
    Command,
    E,
    Partitioner,
    Serializer,
    Transaction,
    View,
    partition_by_hash,
)
from waltzd.errors import BadArgument
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.locks import AppendOutcome, Committed, Lock, Mode, Outcome, Token
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY

T = TypeVar("T")


class _LoopThread(LoopThread):
    def __init__(self) -> None:
        super().__init__("waltz-loop")
        self._process = os.getpid()

    def check_process(self) -> None:
        if os.getpid() != self._process:
            raise BadArgument(
                "this process was forked from one that had a client: neither its threads nor gRPC came along. Start "
                "processes with `spawn`, or fork before the first client is made"
            )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if os.getpid() != self._process:
            work.close()
            self.check_process()
        if threading.current_thread() is self.thread:
            work.close()
            raise BadArgument("a blocking call on the thread of the loop would wait for itself: use the asyncio client")
        return self.wait_for(work)


_started: _LoopThread | None = None
_starting = threading.Lock()


def loop_thread() -> _LoopThread:
    """The one of this process."""
    global _started
    with _starting:
        _started = _started or _LoopThread()
    _started.check_process()
    return _started


class BlockingClient(Generic[E]):
    """`Client` for applications without an event loop: the same calls, and each blocks until it has its result.

    Use it as a context manager. All methods may be called from any thread. The view runs on threads of the client, for
    one transaction of a partition at a time, and may itself call the client. The functions of a command run on the thread
    that called `submit`, except `on_applied`, which runs on a thread of the client. A process that is forked after its
    first client cannot use one: start processes with `spawn`.

    Arguments, results and errors of each method are those of the method of `Client` with the same name.

    Example:
        ```python
        with BlockingClient("server-1:55180,server-2:55180") as client:
            outcome = client.append(b"hello", key="alice")
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
        threads: int = 32,
    ) -> None:
        """All arguments but the last are those of `Client`. Functions of the view are plain or `async`.

        Args:
            threads: How many views may be at work at once, each for another partition.

        Raises:
            BadArgument, BadConfig: As of `Client`; or this process was forked from one that had a client.
        """
        self._thread = loop_thread()
        self._threads = threads
        self._is_shut = False
        self._pool = ThreadPoolExecutor(threads, "waltz-view")
        self._left_behind: dict[int, Future[Any]] = {}
        """By partition, the call of the view that still runs although it was cancelled."""
        self._client: Client[E] = Client(
            servers,
            view=view,
            feed=feed,
            partitions=partitions,
            serializer=serializer,
            partitioner=partitioner,
            settings=settings,
            tls=tls,
            connect=connect,
        )
        self._client._call = self._call_on_pool

    async def _call_on_pool(self, function: Callable[..., Any], *arguments: Any) -> Any:
        partition = _partition_in(arguments)
        # One call at a time for each partition, also when the one before was cancelled.
        while partition is not None and (left := self._left_behind.get(partition)) is not None:
            await asyncio.gather(asyncio.wrap_future(left), return_exceptions=True)
            if self._left_behind.get(partition) is left:
                del self._left_behind[partition]
        running = self._pool.submit(copy_context().run, _called, function, *arguments)
        try:
            result = await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if not running.cancel() and not running.done() and partition is not None:
                self._left_behind[partition] = running  # a thread cannot be cancelled
            raise
        return await result if inspect.isawaitable(result) else result

    # -- life

    def open(self, *, timeout: float | None = None) -> None:
        """As `Client.open`."""
        if self._is_shut:
            self._pool, self._is_shut = ThreadPoolExecutor(self._threads, "waltz-view"), False
        self._thread.run(self._client.open(timeout=timeout))

    def close(self) -> None:
        """As `Client.close`. The client may be opened again."""
        try:
            self._thread.run(self._client.close())
        finally:
            self._is_shut = True
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- what it is

    @property
    def client_id(self) -> int:
        """The number that the cluster gave this client, unique for ever."""
        return self._client.client_id

    @property
    def cluster(self) -> str:
        """The name of the cluster."""
        return self._client.cluster

    @property
    def cluster_key(self) -> UUID:
        """The key of the cluster, which no other cluster has."""
        return self._client.cluster_key

    @property
    def partition_count(self) -> int:
        """How many partitions the cluster has."""
        return self._client.partition_count

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions that this client has."""
        return self._client.partitions

    def partition_of(self, key: Any) -> int:
        """As `Client.partition_of`."""
        return self._client.partition_of(key)

    def channel(self, name: str) -> tuple[int, ...]:
        """As `Client.channel`."""
        return self._thread.run(self._client.channel(name))

    def set_partitions(self, partitions: Partitions, *, timeout: float | None = None) -> None:
        """As `Client.set_partitions`."""
        self._thread.run(self._client.set_partitions(partitions, timeout=timeout))

    # -- writing

    def submit(
        self,
        command: Command[E],
        *,
        fresh: bool | None = None,
        wait: Wait = "committed",
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> Outcome:
        """As `Client.submit`. The command's functions run on this thread, `on_applied` on one of the client's."""
        caller = _Caller(self._thread.loop)
        return caller.serve(
            self._client._submit_with(
                caller.call, command, fresh=fresh, wait=wait, timeout=timeout, idempotency_key=idempotency_key
            )
        )

    def submit_atomic(
        self,
        commands: Sequence[Command[E]],
        *,
        fresh: bool | None = None,
        wait: Wait = "committed",
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> Outcome:
        """As `Client.submit_atomic`. The commands' functions run as those of `submit`."""
        caller = _Caller(self._thread.loop)
        return caller.serve(
            self._client._submit_atomic_with(
                caller.call, commands, fresh=fresh, wait=wait, timeout=timeout, idempotency_key=idempotency_key
            )
        )

    def position(self, partition: int) -> Position:
        """As `Client.position`. Read it *before* the view and give it to `append`."""
        return self._client.position(partition)

    def append(
        self,
        payload: E,
        *,
        partition: int | None = None,
        key: Any = None,
        header: int = 0,
        locks: Iterable[Lock] = (),
        position: int | None = None,
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> AppendOutcome:
        """As `Client.append`, but with a READ or WRITE lock `position` must be given, and must have been read before the
        view was: the view is at work on another thread. `submit` does that by itself."""
        locks = tuple(locks)
        _check_position(position, locks)
        return self._ask(
            self._client.append,
            payload,
            partition=partition,
            key=key,
            header=header,
            locks=locks,
            position=position,
            timeout=timeout,
            idempotency_key=idempotency_key,
        )

    def append_many(
        self,
        payloads: Sequence[E],
        *,
        partition: int | None = None,
        key: Any = None,
        headers: Sequence[int] | None = None,
        locks: Sequence[Iterable[Lock]] | None = None,
        position: int | None = None,
        timeout: float | None = None,
    ) -> Outcomes:
        """As `Client.append_many`; `position` as of `append`."""
        each = None if locks is None else [tuple(some) for some in locks]
        _check_position(position, [lock for some in each or () for lock in some])
        return self._ask(
            self._client.append_many,
            payloads,
            partition=partition,
            key=key,
            headers=headers,
            locks=each,
            position=position,
            timeout=timeout,
        )

    def append_atomic(
        self,
        payloads: Sequence[E],
        *,
        partition: int | None = None,
        key: Any = None,
        headers: Sequence[int] | None = None,
        locks: Sequence[Iterable[Lock]] | None = None,
        position: int | None = None,
        timeout: float | None = None,
        idempotency_key: str | None = None,
    ) -> AppendOutcome:
        """As `Client.append_atomic`; `position` as of `append`."""
        each = None if locks is None else [tuple(some) for some in locks]
        _check_position(position, [lock for some in each or () for lock in some])
        return self._ask(
            self._client.append_atomic,
            payloads,
            partition=partition,
            key=key,
            headers=headers,
            locks=each,
            position=position,
            timeout=timeout,
            idempotency_key=idempotency_key,
        )

    # -- waiting

    @property
    def has_pending(self) -> bool:
        """Whether something that was submitted has no outcome yet."""
        return self._client.has_pending

    def flush(self, *, timeout: float | None = None) -> None:
        """As `Client.flush`."""
        self._thread.run(self._client.flush(timeout=timeout))

    def wait_caught_up(self, partition: int | None = None, *, timeout: float | None = None) -> None:
        """As `Client.wait_caught_up`."""
        self._thread.run(self._client.wait_caught_up(partition, timeout=timeout))

    def wait_applied(self, token: Token | Committed, *, timeout: float | None = None) -> None:
        """As `Client.wait_applied`."""
        self._thread.run(self._client.wait_applied(token, timeout=timeout))

    def wait_stopped(self, *, timeout: float | None = None) -> None:
        """As `Client.wait_stopped`, on a thread that does nothing else."""
        self._thread.run(self._client.wait_stopped(timeout=timeout))

    # -- reading

    def end_position(self, partition: int, *, confirmed: bool = True, timeout: float | None = None) -> Position:
        """As `Client.end_position`."""
        return self._thread.run(self._client.end_position(partition, confirmed=confirmed, timeout=timeout))

    def position_at(self, partition: int, time: datetime | int, *, timeout: float | None = None) -> Position:
        """As `Client.position_at`."""
        return self._thread.run(self._client.position_at(partition, time, timeout=timeout))

    def read(self, partition: int, id: int, *, with_locks: bool = False, timeout: float | None = None) -> Transaction[E]:
        """As `Client.read`."""
        return self._thread.run(self._client.read(partition, id, with_locks=with_locks, timeout=timeout))

    def read_some(
        self,
        partition: int,
        first_id: int | None = None,
        last_id: int | None = None,
        *,
        from_time: datetime | int | None = None,
        until_time: datetime | int | None = None,
        with_locks: bool = False,
        timeout: float | None = None,
    ) -> list[Transaction[E]]:
        """As `Client.read_some`."""
        return self._thread.run(
            self._client.read_some(
                partition,
                first_id,
                last_id,
                from_time=from_time,
                until_time=until_time,
                with_locks=with_locks,
                timeout=timeout,
            )
        )

    def scan(
        self, partition: int, *, after: int = EMPTY, to: int | None = None, with_locks: bool = False
    ) -> Generator[Transaction[E], None, None]:
        """As `Client.scan`."""
        return self._each(partial(self._client._scan, partition, after=after, to=to, with_locks=with_locks))

    def feed(self, partition: int, *, after: int) -> Generator[Transaction[E], None, None]:
        """As `Client.feed`. It ends at once when the code breaks off, and when another thread closes the client."""
        return self._each(partial(self._client.feed_batches, partition, after=after))

    def feed_batches(self, partition: int, *, after: int) -> Generator[Sequence[Transaction[E]], None, None]:
        """As `Client.feed_batches`; it ends as `feed` does."""
        return self._batches(partial(self._client.feed_batches, partition, after=after))

    def _each(
        self, begin: Callable[[], AsyncGenerator[Sequence[Transaction[E]], None]]
    ) -> Generator[Transaction[E], None, None]:
        with closing(self._batches(begin)) as batches:
            for batch in batches:
                yield from batch

    def _batches(
        self, begin: Callable[[], AsyncGenerator[Sequence[Transaction[E]], None]]
    ) -> Generator[Sequence[Transaction[E]], None, None]:
        batches: AsyncGenerator[Sequence[Transaction[E]], None] = self._thread.run(call_here(begin))

        async def following() -> Sequence[Transaction[E]] | None:
            return await anext(batches, None)

        try:
            while (batch := self._thread.run(following())) is not None:
                yield batch
        finally:  # without waiting for it: this may be collected on the thread of the loop
            asyncio.run_coroutine_threadsafe(batches.aclose(), self._thread.loop)

    # -- consumer groups

    def create_group(
        self,
        name: str,
        *,
        mode: Literal["ordered", "queue", "keyed"],
        partitions: Partitions = "all",
        start: Start = "first",
        headers: Sequence[int] = (),
        key: Literal["header", "lock"] = "header",
        ack_wait: float = 30.0,
        max_in_flight: int = 100,
        deliver_max: int = 5,
        back_off: Sequence[float] = (1.0, 5.0, 30.0),
        exhausted: Literal["park", "stop"] = "park",
    ) -> bool:
        """As `Client.create_group`."""
        return self._thread.run(
            self._client.create_group(
                name,
                mode=mode,
                partitions=partitions,
                start=start,
                headers=headers,
                key=key,
                ack_wait=ack_wait,
                max_in_flight=max_in_flight,
                deliver_max=deliver_max,
                back_off=back_off,
                exhausted=exhausted,
            )
        )

    def subscribe(
        self,
        group: str,
        *,
        partitions: Partitions | None = None,
        max_in_flight: int | None = None,
        member: str | None = None,
    ) -> BlockingSubscription[E]:
        """As `Client.subscribe`: `for delivery in client.subscribe("mailer"): …`."""
        work = subscribe(self._client, group, partitions=partitions, max_in_flight=max_in_flight, member=member)
        return BlockingSubscription(self._thread.run(work), self._thread)

    def handle(
        self,
        group: str,
        handler: Callable[[BlockingDelivery[E]], Any],
        *,
        concurrency: int = 1,
        timeout: float | None = None,
        partitions: Partitions | None = None,
        max_in_flight: int | None = None,
        member: str | None = None,
    ) -> BlockingHandling[E]:
        """As `Client.handle`, on threads of the client, as many at once as it has `threads`. Call `run` on what it returns.
        A thread cannot be cancelled: one that takes longer than `timeout` runs on, and has failed."""
        work = handle(
            self._client,
            group,
            handler,
            self._thread,
            concurrency=concurrency,
            timeout=timeout,
            partitions=partitions,
            max_in_flight=max_in_flight,
            member=member,
        )
        return BlockingHandling(self._thread.run(work), self._thread)

    def fetch(self, transaction: Transaction[Any]) -> bytes:
        """As `Transaction.fetch`: the payload of a transaction, also of one that was fed as a head."""
        return self._thread.run(transaction.fetch())

    def status(self) -> ClientStatus:
        """As `Client.status`."""

        async def status() -> ClientStatus:
            return self._client.status()

        return self._thread.run(status())

    def _ask(self, function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any, **named: Any) -> T:
        """Call it on the loop, and wait for what it awaits."""
        found: T = self._thread.run(call_here(partial(function, *arguments, **named)))
        return found


def _check_position(position: int | None, locks: Sequence[Lock]) -> None:
    if position is None and any(lock.mode is not Mode.APPEND for lock in locks):
        raise BadArgument(
            "a READ or WRITE lock needs the position that was read before the view: give `position`, or use `submit`"
        )


class _Caller:
    """A thread that waits for a coroutine, and meanwhile runs what the coroutine asks it to run: so threads that wait for
    each other cannot use up a pool."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._work: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        result: asyncio.Future[Any] = self._loop.create_future()
        self._work.put((partial(_called, function, *arguments), result))
        found = await result
        return await found if inspect.isawaitable(found) else found

    def serve(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.add_done_callback(lambda _: self._work.put(None))
        try:
            while (item := self._work.get()) is not None:
                function, result = item
                try:
                    found, error = function(), None
                except Exception as failure:  # noqa: BLE001  # the application's code
                    found, error = None, failure
                self._loop.call_soon_threadsafe(_settle, result, found, error)
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _partition_in(arguments: Sequence[Any]) -> int | None:
    """Of a call of the view: its first argument is a partition, a transaction, or several of one partition."""
    first = arguments[0] if arguments else None
    if isinstance(first, Sequence) and first:
        first = first[0]
    if isinstance(first, Transaction):
        return first.partition
    return first if isinstance(first, int) else None


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    """As in a coroutine: no future takes a StopIteration, so the caller would wait for ever."""
    try:
        return function(*arguments)
    except StopIteration as error:
        raise RuntimeError("the application's code raised StopIteration") from error


def _settle(result: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
    if result.done():
        return
    if error is None:
        result.set_result(found)
    else:
        result.set_exception(error)
