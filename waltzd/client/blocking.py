"""The client for applications without an event loop: the names of `waltzd.client.client`, and each call blocks.

One thread of the process runs the event loop of all blocking clients until the process ends: a thread of gRPC may call
back after the last call. A method of a blocking class is declared once, as a method of its asyncio class: `blocking`
takes the arguments, the documentation and the type of the result from there."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from functools import partial, wraps
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload
from uuid import UUID

from waltzd.client.client import Client
from waltzd.client.delivery import DeliveredTransaction, Delivery
from waltzd.client.follower import call_here
from waltzd.client.loop import LoopThread
from waltzd.client.pending import Outcomes
from waltzd.client.routes import Connect, Partitions
from waltzd.client.settings import ClientSettings, Tls
from waltzd.client.subscription import Handling, Subscription
from waltzd.client.view import E, Partitioner, Serializer, Transaction, View, partition_by_hash
from waltzd.errors import BadArgument
from waltzd.protocol.batches import FeedMode, Topology
from waltzd.protocol.groups import Mode as GroupMode
from waltzd.protocol.locks import AppendOutcome, Lock, Mode, Outcome
from waltzd.protocol.positions import Position

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


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

    def check_caller(self) -> None:
        """Refuse a call that would wait for ever."""
        self.check_process()
        if threading.current_thread() is self.thread:
            raise BadArgument("a blocking call on the thread of the loop would wait for itself: use the asyncio client")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            self.check_caller()
        except BadArgument:
            work.close()
            raise
        return self.wait_for(work)


_started: _LoopThread | None = None
_starting = threading.Lock()


def loop_thread() -> _LoopThread:
    """Return the thread of the event loop of this process."""
    global _started
    with _starting:
        _started = _started or _LoopThread()
    _started.check_process()
    return _started


# -- methods that are declared by an asyncio method ------------------------------------------------------------------------


class BlockingMethod(Protocol[P, T_co]):
    """A method with the arguments `P` and the result `T_co`, as type checkers and editors see it."""

    def __get__(self, instance: object, owner: type | None = None) -> Callable[P, T_co]: ...


@overload
def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> BlockingMethod[P, T]: ...
@overload
def blocking(method: Callable[Concatenate[Any, P], T]) -> BlockingMethod[P, T]: ...
def blocking(method: Callable[..., Any]) -> Any:
    """Return a method that calls `method` of `self._inner` on the event loop and waits for the result."""

    @wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return self._thread.run(call_here(partial(method, self._inner, *arguments, **named)))

    return call


def declared_by(method: Callable[Concatenate[Any, P], Any]) -> Callable[[Callable[..., T]], BlockingMethod[P, T]]:
    """Give the decorated method the arguments and the documentation of `method`, and keep its result."""
    return wraps(method)  # type: ignore[return-value]


def _batches(thread: _LoopThread, begin: Callable[[], AsyncGenerator[T, None]]) -> Generator[T, None, None]:
    """Iterate over an asynchronous generator that `begin` makes on the event loop."""
    batches: AsyncGenerator[T, None] = thread.run(call_here(begin))

    async def following() -> T | None:
        return await anext(batches, None)

    try:
        while (batch := thread.run(following())) is not None:
            yield batch
    finally:  # not waited for: the garbage collector may run this on the thread of the loop
        asyncio.run_coroutine_threadsafe(batches.aclose(), thread.loop)


def _each(thread: _LoopThread, begin: Callable[[], AsyncGenerator[Sequence[T], None]]) -> Generator[T, None, None]:
    with closing(_batches(thread, begin)) as batches:
        for batch in batches:
            yield from batch


class BlockingClient(Generic[E]):
    """`Client` for applications without an event loop: the same calls, and each blocks until it has its result.

    Arguments, results and errors of each method are those of the method of `Client` with the same name. What that
    method returns as an awaitable or an asynchronous iterator, this one returns as the result or an iterator.

    Use it as a context manager. Any thread may call any method. The view runs on threads of the client, for one
    transaction of a partition at a time, and may itself call the client. The functions of a command run on the thread
    that called `submit`, except `on_applied`, which runs on a thread of the client. A process that was forked after its
    first client was made cannot use a client: start processes with `spawn`.

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
        """Create a client. All arguments but `threads` are those of `Client`. Functions of the view are plain or
        `async`.

        Args:
            threads: Number of threads for the view: calls that may run at once, each for another partition.

        Raises:
            BadArgument, BadConfig: As in `Client`; or this process was forked from one that had a client.
        """
        self._thread = loop_thread()
        self._threads = threads
        self._is_shut = False
        self._pool = ThreadPoolExecutor(threads, "waltz-view")
        self._left_behind: dict[int, Future[Any]] = {}
        """Call of the view that still runs although it was cancelled, by partition."""
        self._inner: Client[E] = Client(
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
        self._inner._call = self._call_on_pool

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
        """Open the client; see `Client.open`."""
        if self._is_shut:
            self._pool, self._is_shut = ThreadPoolExecutor(self._threads, "waltz-view"), False
        self._thread.run(self._inner.open(timeout=timeout))

    def close(self) -> None:
        """Close the client; see `Client.close`. It may be opened again."""
        try:
            self._thread.run(self._inner.close())
        finally:
            self._is_shut = True
            self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- the cluster

    @property
    def client_id(self) -> int:
        """Number that the cluster gave this client, and never gives to another one."""
        return self._inner.client_id

    @property
    def cluster(self) -> str:
        """Name of the cluster."""
        return self._inner.cluster

    @property
    def cluster_key(self) -> UUID:
        """Key of the cluster, which no other cluster has."""
        return self._inner.cluster_key

    @property
    def topology(self) -> Topology:
        """Servers and the owners of all partitions, as the client saw them last."""
        return self._inner.topology

    @property
    def partition_count(self) -> int:
        """Number of partitions of the cluster."""
        return self._inner.partition_count

    @property
    def partitions(self) -> tuple[int, ...]:
        """Partitions of this client."""
        return self._inner.partitions

    def partition_of(self, key: Any) -> int:
        """Return the partition in which `append(…, key=key)` writes."""
        return self._inner.partition_of(key)

    channel = blocking(Client[E].channel)
    """Return the partitions that a channel contains at this moment; see `Client.channel`."""
    set_partitions = blocking(Client[E].set_partitions)
    """Set the partitions of this client; see `Client.set_partitions`."""
    status = blocking(Client[E].status)
    """Return the state of each partition, and whether all of them are `ready`; see `Client.status`."""

    # -- writing

    @declared_by(Client[E].submit)
    def submit(self, command: Any, **options: Any) -> Outcome:
        caller = _Caller(self._thread)
        return caller.serve(self._inner._submit(caller.call, (command,), is_atomic=False, **options))

    @declared_by(Client[E].submit_atomic)
    def submit_atomic(self, commands: Sequence[Any], **options: Any) -> Outcome:
        caller = _Caller(self._thread)
        return caller.serve(self._inner._submit(caller.call, tuple(commands), is_atomic=True, **options))

    def position(self, partition: int) -> Position:
        """Return the position of the view; see `Client.position`. Read it *before* the view and give it to `append`."""
        return self._inner.position(partition)

    # The view runs on another thread, so a checked lock needs a position that was read before the view.

    @declared_by(Client[E].append)
    def append(self, payload: E, **options: Any) -> AppendOutcome:
        options["locks"] = tuple(options.get("locks", ()))
        _check_position(options.get("position"), options["locks"])
        outcome: AppendOutcome = self._thread.run(call_here(partial(self._inner.append, payload, **options)))
        return outcome

    @declared_by(Client[E].append_many)
    def append_many(self, payloads: Sequence[E], **options: Any) -> Outcomes:
        _check_positions(options)
        outcome: Outcomes = self._thread.run(call_here(partial(self._inner.append_many, payloads, **options)))
        return outcome

    @declared_by(Client[E].append_atomic)
    def append_atomic(self, payloads: Sequence[E], **options: Any) -> AppendOutcome:
        _check_positions(options)
        outcome: AppendOutcome = self._thread.run(call_here(partial(self._inner.append_atomic, payloads, **options)))
        return outcome

    # -- waiting

    @property
    def has_pending(self) -> bool:
        """True while something that was submitted has no outcome."""
        return self._inner.has_pending

    flush = blocking(Client[E].flush)
    """Wait until everything that was submitted before this call has an outcome; see `Client.flush`."""
    wait_caught_up = blocking(Client[E].wait_caught_up)
    """Wait until the view has applied everything that any client had committed when this was called; see
    `Client.wait_caught_up`."""
    wait_applied = blocking(Client[E].wait_applied)
    """Wait until this client's view has applied a transaction of any client; see `Client.wait_applied`."""
    wait_stopped = blocking(Client[E].wait_stopped)
    """Wait until an error stops a partition, and raise the error; see `Client.wait_stopped`."""

    # -- reading

    end_position = blocking(Client[E].end_position)
    """Ask the owner for the highest committed id of a partition, -1 if it is empty; see `Client.end_position`."""
    position_at = blocking(Client[E].position_at)
    """Ask the owner for the position before the first transaction of a time or later; see `Client.position_at`."""
    read = blocking(Client[E].read)
    """Read one committed transaction by its id; see `Client.read`."""
    history = blocking(Client[E].history)
    """Return the committed transactions that marked a lock; see `Client.history`."""
    last = blocking(Client[E].last)
    """Return the id of the last committed transaction that marked a lock; see `Client.last`."""
    read_ids = blocking(Client[E].read_ids)
    """Read committed transactions by their ids; see `Client.read_ids`."""
    read_some = blocking(Client[E].read_some)
    """Read committed transactions of a range of ids or of times; see
    `Client.read_some`."""

    @declared_by(Client[E].scan)
    def scan(self, partition: int, **options: Any) -> Generator[Transaction[E], None, None]:
        return _each(self._thread, partial(self._inner._scan, partition, **options))

    @declared_by(Client[E].feed)
    def feed(self, partition: int, **options: Any) -> Generator[Transaction[E], None, None]:
        return _each(self._thread, partial(self._inner.feed_batches, partition, **options))

    @declared_by(Client[E].feed_batches)
    def feed_batches(self, partition: int, **options: Any) -> Generator[Sequence[Transaction[E]], None, None]:
        return _batches(self._thread, partial(self._inner.feed_batches, partition, **options))

    def fetch(self, transaction: Transaction[Any]) -> bytes:
        """Return the payload of a transaction, also of one that was fed as a head."""
        return self._thread.run(transaction.fetch())

    # -- consumer groups

    create_group = blocking(Client[E].create_group)
    """Create a consumer group, unless it exists with the same settings; see `Client.create_group`."""
    group_status = blocking(Client[E].group_status)
    """Return the state of a consumer group in each of its partitions; see `Client.group_status`."""
    parked = blocking(Client[E].parked)
    """Return the transactions that a consumer group has set aside; see `Client.parked`."""
    replay = blocking(Client[E].replay)
    """Deliver parked transactions again; see `Client.replay`."""

    @declared_by(Client[E].subscribe)
    def subscribe(self, group: str, **options: Any) -> BlockingSubscription[E]:
        subscribe = partial(self._inner.subscribe, group, **options)
        return BlockingSubscription(self._thread.run(call_here(subscribe)), self._thread)

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
        """Process a group with a handler on threads of the client; see `Client.handle`. At most `threads` calls run at
        once. Call `run` on the result. A thread cannot be cancelled: a call that takes longer than `timeout` has
        failed, and runs on."""

        async def make() -> Handling[E]:  # not by `call_here`, which would await the handling
            return self._inner.handle(
                group,
                lambda delivery: handler(BlockingDelivery(delivery, self._thread)),
                concurrency=concurrency,
                timeout=timeout,
                partitions=partitions,
                max_in_flight=max_in_flight,
                member=member,
            )

        return BlockingHandling(self._thread.run(make()), self._thread)


def _check_position(position: int | None, locks: Sequence[Lock]) -> None:
    if position is None and any(lock.mode is not Mode.APPEND for lock in locks):
        raise BadArgument(
            "a READ or WRITE lock needs the position that was read before the view; give `position`, or use `submit`"
        )


def _check_positions(options: dict[str, Any]) -> None:
    if options.get("locks") is not None:
        options["locks"] = [tuple(some) for some in options["locks"]]
        _check_position(options.get("position"), [lock for some in options["locks"] for lock in some])


# -- consumer groups -------------------------------------------------------------------------------------------------------


class BlockingDelivery(DeliveredTransaction[E]):
    """`Delivery` for threads: `BlockingClient.subscribe` and `BlockingClient.handle` give it, and any thread may settle
    it.

    Arguments and errors of each method are those of the method of `Delivery` with the same name."""

    __slots__ = ("_inner", "_thread")

    def __init__(self, inner: Delivery[E], thread: _LoopThread) -> None:
        super().__init__(inner.transaction, inner.group, inner.attempt, inner._source)
        self._inner = inner
        self._thread = thread

    ack = blocking(Delivery[E].ack)
    """Acknowledge the delivery; see `Delivery.ack`."""
    nack = blocking(Delivery[E].nack)
    """Report a failure of the delivery; see `Delivery.nack`."""
    reject = blocking(Delivery[E].reject)
    """Reject the delivery; see `Delivery.reject`."""
    extend = blocking(Delivery[E].extend)
    """Extend the delivery; see `Delivery.extend`."""


class BlockingSubscription(Generic[E]):
    """`Subscription` for threads. `BlockingClient.subscribe` makes it.

    Iterate over it directly, or use it as a context manager and iterate inside, from as many threads as you like.
    Arguments and errors of each method are those of the method of `Subscription` with the same name.

    Example:
        ```python
        with client.subscribe("mailer") as subscription:
            for deliveries in subscription.batches():
                store(deliveries)
                with suppress(DeliveryLate):  # after a fail-over: some come again
                    subscription.ack(deliveries)
        ```
    """

    def __init__(self, inner: Subscription[E], thread: _LoopThread) -> None:
        self._inner = inner
        self._thread = thread

    @property
    def group(self) -> str:
        """Name of the group."""
        return self._inner.group

    @property
    def member(self) -> str:
        """Name of this member, which operators see; known when the subscription is open."""
        return self._inner.member

    @property
    def mode(self) -> GroupMode:
        """Mode of the group; known when the subscription is open."""
        return self._inner.mode

    @property
    def partitions(self) -> tuple[int, ...]:
        """Partitions that this member consumes."""
        return self._inner.partitions

    @property
    def troubles(self) -> dict[int, str]:
        """Reasons why a partition delivers nothing; see `Subscription.troubles`."""
        return self._inner.troubles

    open = blocking(Subscription[E].open)
    """Join the group; see `Subscription.open`."""
    close = blocking(Subscription[E].close)
    """Send the last acknowledgements and leave the group; see `Subscription.close`."""

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Iterator[BlockingDelivery[E]]:
        """Iterate over the deliveries until the subscription or its client is closed."""
        return (BlockingDelivery(one, self._thread) for one in _each(self._thread, partial(self._inner.batches, most=1)))

    @declared_by(Subscription[E].batches)
    def batches(self, **options: Any) -> Generator[list[BlockingDelivery[E]], None, None]:
        for batch in _batches(self._thread, partial(self._inner.batches, **options)):
            yield [BlockingDelivery(one, self._thread) for one in batch]

    def ack(self, deliveries: Sequence[BlockingDelivery[E]], *, durable: bool = False) -> None:
        """Acknowledge deliveries; see `Subscription.ack`."""
        self._thread.run(self._inner.ack([one._inner for one in deliveries], durable=durable))

    def nack(self, deliveries: Sequence[BlockingDelivery[E]], *, delay: float | None = None, reason: str = "") -> None:
        """Return deliveries; see `Subscription.nack`."""
        self._thread.run(self._inner.nack([one._inner for one in deliveries], delay=delay, reason=reason))

    def reject(self, deliveries: Sequence[BlockingDelivery[E]], reason: str) -> None:
        """Reject deliveries; see `Subscription.reject`."""
        self._thread.run(self._inner.reject([one._inner for one in deliveries], reason))

    def extend(self, deliveries: Sequence[BlockingDelivery[E]]) -> None:
        """Extend deliveries; see `Subscription.extend`."""
        self._thread.run(self._inner.extend([one._inner for one in deliveries]))


class BlockingHandling(Generic[E]):
    """`Handling` for threads, with `run` in place of `await`. `BlockingClient.handle` makes it.

    Example:
        ```python
        handling = client.handle("mailer", send, concurrency=8)
        signal.signal(signal.SIGTERM, lambda *_: handling.stop())
        handling.run()
        ```
    """

    def __init__(self, inner: Handling[E], thread: _LoopThread) -> None:
        self._inner = inner
        self._thread = thread

    run = blocking(Handling[E].run)
    """Process deliveries until `stop` is called or the client is closed; see `Handling.run`."""

    def stop(self) -> None:
        """Stop the handling; see `Handling.stop`. Any thread and any signal handler may call it."""
        self._thread.loop.call_soon_threadsafe(self._inner.stop)


# -- threads ---------------------------------------------------------------------------------------------------------------


class _Caller:
    """Calls functions of a command on the thread that waits for their submit. So threads that wait for each other
    cannot use up a pool."""

    def __init__(self, thread: _LoopThread) -> None:
        thread.check_caller()
        self._loop = thread.loop
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
    """Return the partition of a call of the view, whose first argument is a partition, a transaction, or transactions
    of one partition."""
    first = arguments[0] if arguments else None
    if isinstance(first, Sequence) and first:
        first = first[0]
    if isinstance(first, Transaction):
        return first.partition
    return first if isinstance(first, int) else None


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function and turn a StopIteration into a RuntimeError, as coroutines do: a future refuses StopIteration,
    so the caller would wait for ever."""
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
