"""A subscription: one member of a consumer group, in all of its partitions, as an application iterates over it.

Each partition has a `PartitionConsumer`, which holds at most the deliveries that the member asked for. Deliveries are
handed out round-robin over the partitions. A delivery that cannot be decoded is rejected here, with the reason. An event
of a newer version (`EventUnknown`) is refused before it is begun: the owner gives it to another member, and counts no try.

The `ack_wait` of a delivery starts when it arrives. So queued deliveries are extended while the application takes
deliveries or waits for one. If the application hangs, they go to other members.

`Handling` runs a function for each delivery: a delivery is acknowledged when the handler returns, and tried again when
it raises.

A delivery is extended until its handler has ended. Acknowledgements are sent while the next delivery is processed. A
failure is sent before that, because in an ordered group it decides what comes next.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from copy import copy
from types import TracebackType
from typing import Any, Generic, Protocol, Self

from waltzd.client.delivery import Delivery, Reject, checked_delay, raise_late, unsettled
from waltzd.client.follower import Call, shielded
from waltzd.client.instrument import Instrument
from waltzd.client.partition_consumer import PartitionConsumer
from waltzd.client.routes import Partitions, Routes
from waltzd.client.settings import ClientSettings
from waltzd.client.view import E, Serializer
from waltzd.cluster.groups import MadeGroup
from waltzd.errors import (
    BadArgument,
    ClientClosed,
    DeliveryLate,
    EventUnknown,
    InboxPruned,
    NotInGroup,
    OtherTimeline,
    WaltzError,
)
from waltzd.protocol.channels import EVERYTHING, named_in
from waltzd.protocol.groups import AckKind, Mode

LOOK_SECONDS = 5.0
"""Seconds between two checks which partitions the channels of a group contain."""
HAND_BACK_SECONDS = 5.0
"""Seconds before an event of a newer version is delivered again."""
_log = logging.getLogger("waltz.client")


class Host(Protocol):
    """Client of a subscription."""

    settings: ClientSettings
    _routes: Routes
    _serializer: Serializer[Any] | None
    _instruments: list[Instrument]
    _subscriptions: dict[Subscription[Any], None]

    def _check_open(self) -> None: ...
    def _check_loop(self) -> None: ...
    async def _find_group(self, name: str) -> MadeGroup: ...
    async def _new_member(self) -> str: ...


class Subscription(Generic[E]):
    """A member of a consumer group: iterate over it, and settle its deliveries. `Client.subscribe` makes it.

    Iterate over it directly, or use it as an async context manager and iterate inside, in any number of tasks. When it
    ends, deliveries that are not settled go to other members at once, and do not count as failures.

    Example:
        ```python
        async with client.subscribe("mailer") as subscription:
            async for deliveries in subscription.batches():
                await store(deliveries)
                with suppress(DeliveryLate):  # after a fail-over: some come again
                    await subscription.ack(deliveries)
        ```
    """

    def __init__(
        self, host: Host, group: str, *, partitions: Partitions | None, max_in_flight: int | None, member: str | None
    ) -> None:
        self.group = group
        self.member = member or ""
        """Name of this member, which operators see; known when the subscription is open."""
        self._host = host
        self._partitions = partitions
        self._room = max_in_flight
        self._made: MadeGroup | None = None
        self._consumers: dict[int, PartitionConsumer] = {}
        self._runs: dict[int, asyncio.Task[None]] = {}
        self._ready: deque[PartitionConsumer] = deque()
        """Consumers whose queues may be taken from, each once, in the order of their turns."""
        self._tender: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._side: dict[asyncio.Task[None], None] = {}
        """Tasks that send something in the background."""
        self._more = asyncio.Event()
        self._asked = 0.0
        """Time at which a caller last tried to take a delivery."""
        self._waiting = 0
        self._is_closed = self._is_stopped = False
        self._error: WaltzError | None = None
        self.is_handled = False
        """Whether a handler takes the deliveries; then an ordered group delivers one at a time."""

    # -- life

    async def open(self) -> None:
        """Join the group. `async with` and iterating do this by themselves.

        Raises:
            NoSuchGroup: The cluster has no group of this name.
            NotGranted: The policy of the cluster does not allow this client to be a member.
            CannotConnect: No server answered in `submit_seconds`.
            BadArgument, ClientClosed: The subscription was opened before, a partition is none of the group, or the
                client is not open.
        """
        host = self._host
        host._check_loop()
        host._check_open()
        if self._tender is not None or self._is_closed:
            raise BadArgument("a subscription can be opened only once", next_step="call `subscribe` again")
        host._subscriptions[self] = None
        try:
            self._made = await host._find_group(self.group)
            self.member = self.member or await host._new_member()
            self._asked = asyncio.get_running_loop().time()
            await self._update_partitions()
        except BaseException:
            host._subscriptions.pop(self, None)
            raise
        self._tender = asyncio.create_task(self._tend(), name=f"waltz member of {self.group}")

    async def close(self) -> None:
        """Send the last acknowledgements and leave the group. What is not settled goes to other members at once."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"waltz member of {self.group} goes")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._is_closed = True
        self._more.set()
        try:
            if self._tender is not None:
                self._tender.cancel()
                await asyncio.gather(self._tender, return_exceptions=True)
            await asyncio.gather(*[self._leave(partition) for partition in list(self._runs)])
            # Behind that: an acknowledgement waits as long as no owner answers, and to leave ends the wait.
            await asyncio.gather(*list(self._side), return_exceptions=True)
        finally:
            self._host._subscriptions.pop(self, None)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- deliveries

    def __aiter__(self) -> AsyncIterator[Delivery[E]]:
        """Iterate over the deliveries until the subscription or its client is closed."""
        return self._each()

    async def _each(self) -> AsyncGenerator[Delivery[E], None]:
        is_ours = await self._begin()
        try:
            while found := await self.take(1):
                yield found[0]
        finally:
            if is_ours:
                await self.close()

    async def batches(self, *, most: int = 1000) -> AsyncGenerator[list[Delivery[E]], None]:
        """Iterate over batches: each has all deliveries of one partition that have come.

        Use it if a batch costs about the same as one delivery. Give the batch to `ack` when it is done.

        Args:
            most: Limit of deliveries in a batch.
        """
        if not isinstance(most, int) or most < 1:
            raise BadArgument(f"most must be an integer from 1 on, not {most!r}")
        is_ours = await self._begin()
        try:
            while found := await self.take(most):
                yield found
        finally:
            if is_ours:
                await self.close()

    async def _begin(self) -> bool:
        if self._tender is not None or self._is_closed:
            return False
        await self.open()
        return True

    async def take(self, most: int) -> list[Delivery[E]]:
        """Return at most `most` deliveries of one partition; an empty list at the end. Raise the error that ended the
        subscription."""
        loop = asyncio.get_running_loop()
        while not (self._is_closed or self._is_stopped):
            self._asked = loop.time()
            found = self._pick(most, self._asked)
            if found:
                if await self._has_begun(found):
                    return found
                continue
            if self._error is not None:
                raise copy(self._error)
            self._more.clear()
            self._waiting += 1
            try:
                await self._more.wait()
            finally:
                self._waiting -= 1
                self._asked = loop.time()
        return []

    def _pick(self, most: int, now: float) -> list[Delivery[E]]:
        while self._ready:
            consumer = self._ready.popleft()
            queue, found = consumer.queue, list[Delivery[E]]()
            if consumer.holds:
                continue  # it is added again when it is released
            while queue and len(found) < most:
                one = queue.popleft()
                if one._until <= now:  # another member has it by now
                    if consumer.is_ordered:
                        consumer.drop()
                elif self._is_readable(one):
                    found.append(one)
                if consumer.holds:
                    break
            if queue:
                self._ready.append(consumer)
            if found:
                if self.is_handled and consumer.is_ordered:
                    consumer.holds += 1
                return found
        return []

    async def _has_begun(self, found: list[Delivery[E]]) -> bool:
        """Report deliveries to the owner before the application gets them. Return False if they were lost meanwhile."""
        consumer = found[0]._source
        assert isinstance(consumer, PartitionConsumer)
        is_begun = False
        try:
            is_begun = await consumer.begin(found)
        except asyncio.CancelledError:
            consumer.put_back(found)
            raise
        finally:
            if not is_begun:
                consumer.holds -= self.is_handled and consumer.is_ordered
                self.arrived(consumer, 0)
        for instrument in self._host._instruments if is_begun else ():
            instrument.delivered(self.group, consumer.partition, len(found))
        return is_begun

    def _is_readable(self, one: Delivery[E]) -> bool:
        if self._host._serializer is None:
            return True
        try:
            one.value  # noqa: B018  # it is kept
        except EventUnknown as error:
            _log.warning("%r is handed back, for a member of a newer version: %s", one, error.message)
            self._aside(one.nack(delay=HAND_BACK_SECONDS, reason=error.message))
            if isinstance(one._source, PartitionConsumer) and one._source.is_ordered:
                one._source.drop()  # the owner delivers them again after this one
            return False
        except Exception as error:  # noqa: BLE001  # the application's code
            _log.warning("%r cannot be decoded and is rejected: %r", one, error)
            self._aside(one.reject(f"it cannot be decoded: {error!r}"))
            return False
        return True

    def _aside(self, work: Any) -> None:
        async def tell() -> None:
            try:
                await work
            except WaltzError as error:
                _log.info("group %s: %s", self.group, error.message)

        task = asyncio.create_task(tell())
        self._side[task] = None
        task.add_done_callback(lambda _: self._side.pop(task))

    def stop_taking(self) -> None:
        """Hand out no more deliveries."""
        self._is_stopped = True
        self._more.set()

    # -- acknowledgements

    async def ack(self, deliveries: Sequence[Delivery[E]], *, durable: bool = False) -> None:
        """Acknowledge deliveries; see `Delivery.ack`.

        Args:
            deliveries: Deliveries of this subscription, of any of its partitions.
            durable: See `Delivery.ack`.

        Raises:
            DeliveryLate: Some of them were too late; the rest is acknowledged.
        """
        await self._say(AckKind.ACKNOWLEDGE, deliveries, durable=durable)

    async def nack(self, deliveries: Sequence[Delivery[E]], *, delay: float | None = None, reason: str = "") -> None:
        """Report deliveries as failed; see `Delivery.nack`.

        Args:
            deliveries: Deliveries of this subscription.
            delay: See `Delivery.nack`.
            reason: See `Delivery.nack`.

        Raises:
            DeliveryLate: Some of them were too late.
            BadArgument: See `Delivery.nack`.
        """
        await self._say(AckKind.REFUSE, deliveries, delay=checked_delay(delay), reason=reason)

    async def reject(self, deliveries: Sequence[Delivery[E]], reason: str) -> None:
        """Reject deliveries; see `Delivery.reject`.

        Args:
            deliveries: Deliveries of this subscription.
            reason: See `Delivery.reject`.

        Raises:
            DeliveryLate: Some of them were too late.
        """
        await self._say(AckKind.REJECT, deliveries, reason=reason)

    async def extend(self, deliveries: Sequence[Delivery[E]]) -> None:
        """Extend deliveries; see `Delivery.extend`.

        Args:
            deliveries: Deliveries of this subscription.

        Raises:
            DeliveryLate: Some of them were too late.
        """
        await self._say(AckKind.EXTEND, deliveries)

    async def _say(
        self,
        verb: AckKind,
        deliveries: Sequence[Delivery[E]],
        *,
        delay: float | None = None,
        reason: str = "",
        durable: bool = False,
    ) -> None:
        each: dict[int, list[Delivery[Any]]] = {}
        for one in unsettled(deliveries, verb, durable=durable):
            each.setdefault(one.partition, []).append(one)
        found = await asyncio.gather(
            *[some[0]._source.settle(verb, some, delay=delay, reason=reason, durable=durable) for some in each.values()]
        )
        raise_late([late for some in found for late in some])

    # -- status

    @property
    def mode(self) -> Mode:
        """Mode of the group."""
        return self._group.meta.mode

    @property
    def partitions(self) -> tuple[int, ...]:
        """Partitions that this member consumes."""
        return tuple(sorted(self._consumers))

    @property
    def troubles(self) -> dict[int, str]:
        """Reason why a partition delivers nothing, by its number: its owner is away or pauses. Other partitions are
        left out."""
        each = self._consumers.items()
        told = {partition: one.trouble.message if one.trouble else one.paused for partition, one in each}
        return {partition: why for partition, why in told.items() if why}

    @property
    def _group(self) -> MadeGroup:
        assert self._made is not None, "open the subscription first"
        return self._made

    # -- its partitions

    async def _update_partitions(self) -> None:
        """Start consumers for the partitions that the group has now, and stop those it has no more."""
        routes, asked = self._host._routes, self._partitions
        of_group = await routes.numbers(self._group.meta.partitions or EVERYTHING)
        wanted = of_group if asked is None else await routes.numbers(asked)
        strange = sorted(set(wanted) - set(of_group))
        if strange and not self._consumers:
            raise BadArgument(f"partition {strange[0]} is not a partition of group {self.group}")
        wanted = tuple(partition for partition in wanted if partition in of_group)
        for partition in [one for one, run in self._runs.items() if one not in wanted or run.done()]:
            self._aside(self._leave(partition))
        for partition in wanted:
            if partition not in self._runs:
                self._consume(partition)

    def _consume(self, partition: int) -> None:
        host = self._host
        consumer = self._consumers[partition] = PartitionConsumer(
            partition,
            self._group,
            self.member,
            self._room,
            routes=host._routes,
            settings=host.settings,
            serializer=host._serializer,
            listener=self,
        )
        self._runs[partition] = asyncio.create_task(consumer.run(), name=f"waltz member {partition} of {self.group}")

    async def _leave(self, partition: int) -> None:
        run, consumer = self._runs.pop(partition), self._consumers.pop(partition)
        try:
            if not run.done():
                await consumer.leave()
        finally:
            consumer.end()
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)

    async def _tend(self) -> None:
        meta = self._group.meta
        asked = [self._partitions or ""] if isinstance(self._partitions, str | None) else self._partitions
        is_named = any(named_in(part) for part in (meta.partitions or "", *asked) if isinstance(part, str))
        try:
            while True:
                runs = list(self._runs.values())
                if runs:
                    seconds = LOOK_SECONDS if is_named else None
                    await asyncio.wait(runs, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(LOOK_SECONDS)
                for run in runs:
                    error = run.exception() if run.done() else None
                    if error is not None and not (is_named and isinstance(error, NotInGroup)):
                        raise error
                if is_named:
                    try:
                        await self._update_partitions()
                    except WaltzError as error:
                        _log.info("group %s: its current partitions could not be read: %s", self.group, error.message)
        except WaltzError as error:
            self._error = error
            _log.error("group %s: this member ends: %s", self.group, " ".join(error.lines()))
        except Exception as error:  # noqa: BLE001  # who iterates is told
            self._error = ClientClosed(f"the subscription was ended by a bug in Waltz: {error!r}")
            _log.critical("group %s: this member ends by a bug in Waltz", self.group, exc_info=error)
        if self._error is not None:
            for consumer in self._consumers.values():
                consumer.end(f"the subscription has failed: {self._error.message}")
        self._more.set()

    # -- called by consumers

    def arrived(self, consumer: PartitionConsumer, count: int) -> None:
        """Note that something may be taken from a consumer."""
        if consumer.queue and not consumer.holds and consumer not in self._ready:
            self._ready.append(consumer)
            self._more.set()

    def is_taking(self, consumer: PartitionConsumer) -> bool:
        """Return whether the application is likely to take what is queued."""
        joined = consumer.joined
        if self.is_handled or self._waiting:
            return True
        return joined is not None and asyncio.get_running_loop().time() - self._asked < joined.ack_wait_ms / 1000

    def told(self, consumer: PartitionConsumer, verb: AckKind, count: int) -> None:
        """Report to the instruments that the owner has received an acknowledgement."""
        for instrument in self._host._instruments:
            instrument.settled(self.group, consumer.partition, verb, count)

    def finished(self, one: Delivery[E]) -> None:
        """Note that a handler has ended with a delivery."""
        consumer = self._consumers.get(one.partition)
        if consumer is not None and consumer is one._source:
            consumer.in_progress.pop(one, None)
            if consumer.is_ordered:
                consumer.holds -= 1
            self.arrived(consumer, 0)


class Handling(Generic[E]):
    """A handler that processes a consumer group: await it, and end it with `stop`. `Client.handle` makes it.

    Example:
        ```python
        handling = client.handle("mailer", send, concurrency=8)
        loop.add_signal_handler(signal.SIGTERM, handling.stop)
        await handling
        ```
    """

    def __init__(
        self,
        subscription: Subscription[E],
        handler: Callable[[Delivery[E]], Any],
        call: Call,
        *,
        concurrency: int,
        timeout: float | None,
    ) -> None:
        if not isinstance(concurrency, int) or concurrency < 1:
            raise BadArgument(f"concurrency must be at least 1, not {concurrency!r}")
        if timeout is not None and not timeout > 0:
            raise BadArgument(f"timeout must be a number of seconds above 0, not {timeout!r}")
        self.subscription = subscription
        """Subscription that the deliveries come from."""
        subscription.is_handled = True
        self._handler = handler
        self._call = shielded(call)
        self._concurrency = concurrency
        self._timeout = timeout
        self._acknowledging: dict[asyncio.Task[None], None] = {}
        self._is_stopped = False

    def __await__(self) -> Generator[Any, None, None]:
        return self.run().__await__()

    async def run(self) -> None:
        """Process deliveries until `stop` is called or the client is closed.

        If the caller is cancelled, the running calls of the handler are cancelled; their deliveries go to other members
        at once.

        Raises:
            NoSuchGroup, NotGranted, CannotConnect, BadArgument, ClientClosed: See `Subscription.open`; also while it
                runs.
            OtherTimeline: The inbox of the handler holds transactions that are not in the log any more.
        """
        if self._is_stopped:
            return
        async with self.subscription:
            workers = [asyncio.create_task(self._work(), name="waltz handler") for _ in range(self._concurrency)]
            try:
                await asyncio.gather(*workers)
                await asyncio.gather(*list(self._acknowledging))
            finally:
                for worker in [*workers, *self._acknowledging]:
                    worker.cancel()
                await asyncio.gather(*workers, *list(self._acknowledging), return_exceptions=True)

    def stop(self) -> None:
        """Take no more deliveries. Running calls are finished and settled, then `run` returns. Call it on the event
        loop."""
        self._is_stopped = True
        self.subscription.stop_taking()

    async def _work(self) -> None:
        while not self._is_stopped:
            found = await self.subscription.take(1)
            if not found:
                return
            await self._handle(found[0])

    async def _handle(self, one: Delivery[E]) -> None:
        source = one._source
        assert isinstance(source, PartitionConsumer)
        source.in_progress[one] = None
        try:
            try:
                async with asyncio.timeout(self._timeout) as limit:
                    await self._call(self._handler, one)
            except (Reject, InboxPruned) as error:
                await self._settle(one.reject(str(error)))
            except OtherTimeline as error:
                if await self._is_ours(one):  # the inbox belongs to another timeline: a retry does not help
                    raise
                _log.warning("%r comes again, with the timelines of its owner: %s", one, error.message)
            except Exception as error:  # noqa: BLE001  # the application's code
                if isinstance(error, TimeoutError) and limit.expired():
                    error = TimeoutError(f"the handler took longer than {self._timeout:g} seconds")
                _log.warning("the handler of group %s failed for %r", one.group, one, exc_info=error)
                await self._settle(one.nack(reason=f"{type(error).__name__}: {error}"))
            else:
                task = asyncio.create_task(self._settle(one.ack()))
                self._acknowledging[task] = None
                task.add_done_callback(lambda _: self._acknowledging.pop(task))
        finally:
            self.subscription.finished(one)

    async def _is_ours(self, one: Delivery[E]) -> bool:
        """Return whether the owner confirms that this member has a delivery. Of one that came before a fork the log may
        have more timelines than the delivery knows."""
        try:
            async with asyncio.timeout(self.subscription._host.settings.submit_seconds):
                await one.extend()
        except (TimeoutError, DeliveryLate):
            return False
        return True

    async def _settle(self, ack: Awaitable[None]) -> None:
        """Wait for the answer, at most `submit_seconds`: an acknowledgement is sent to the next owner in any case."""
        seconds = self.subscription._host.settings.submit_seconds
        try:
            async with asyncio.timeout(seconds):
                await ack
        except TimeoutError:
            _log.warning("group %s: no owner has answered in %g seconds", self.subscription.group, seconds)
        except WaltzError as error:
            _log.warning("%s %s", error.code, error.message)
