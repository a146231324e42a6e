"""Consumer groups for applications without an event loop: as `waltzd.client.subscription`, and each call blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import closing
from datetime import datetime
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar
from uuid import UUID

from waltzd.client.consumer_groups import ConsumerGroups
from waltzd.client.delivery import Delivery
from waltzd.client.handler import Handling
from waltzd.client.routes import Partitions
from waltzd.client.subscription import Subscription
from waltzd.client.view import E, Transaction
from waltzd.protocol.groups import Mode
from waltzd.protocol.timelines import Lineage

T = TypeVar("T")


class Runner(Protocol):
    """The thread of the loop."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    def run(self, work: Coroutine[Any, Any, T]) -> T: ...


class BlockingDelivery(Generic[E]):
    """As `Delivery`, and each call blocks. `BlockingClient.subscribe` and `BlockingClient.handle` give them; any thread may
    settle them."""

    __slots__ = ("_inner", "_runner")

    def __init__(self, inner: Delivery[E], runner: Runner) -> None:
        self._inner = inner
        self._runner = runner

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._inner.group

    @property
    def attempt(self) -> int:
        """Which try this is, from 1 on; a change of owner does not count as one."""
        return self._inner.attempt

    @property
    def transaction(self) -> Transaction[E]:
        """What was appended. Its `request`, `follows` and `locks` are not told here."""
        return self._inner.transaction

    @property
    def cluster(self) -> UUID:
        """The key of the cluster that has the group."""
        return self._inner.cluster

    @property
    def partition(self) -> int:
        """The partition of the transaction."""
        return self._inner.partition

    @property
    def id(self) -> int:
        """Its id in the partition: with the group and the partition it names the work, also when it comes again."""
        return self._inner.id

    @property
    def lineage(self) -> Lineage | None:
        """As `Delivery.lineage`."""
        return self._inner.lineage

    @property
    def header(self) -> int:
        """The 32 bits that were appended beside the payload."""
        return self._inner.header

    @property
    def time(self) -> datetime | None:
        """When the owner took the transaction; None in format 0."""
        return self._inner.time

    @property
    def payload(self) -> bytes:
        """The bytes of the transaction."""
        return self._inner.payload

    @property
    def value(self) -> E:
        """The payload as the client's serializer has decoded it; the bytes without a serializer."""
        return self._inner.value

    def ack(self, *, durable: bool = False) -> None:
        """As `Delivery.ack`."""
        self._runner.run(self._inner.ack(durable=durable))

    def nack(self, *, delay: float | None = None, reason: str = "") -> None:
        """As `Delivery.nack`."""
        self._runner.run(self._inner.nack(delay=delay, reason=reason))

    def reject(self, reason: str) -> None:
        """As `Delivery.reject`."""
        self._runner.run(self._inner.reject(reason))

    def extend(self) -> None:
        """As `Delivery.extend`."""
        self._runner.run(self._inner.extend())


class BlockingSubscription(Generic[E]):
    """As `Subscription`, and each call blocks. `BlockingClient.subscribe` makes it.

    Iterate over it directly, or use it as a context manager and iterate inside, from as many threads as you like.

    Example:
        ```python
        with client.subscribe("mailer") as subscription:
            for deliveries in subscription.batches():
                store(deliveries)
                with suppress(DeliveryLate):  # after a fail-over: some come again
                    subscription.ack(deliveries)
        ```
    """

    def __init__(self, inner: Subscription[E], runner: Runner) -> None:
        self._inner = inner
        self._runner = runner

    @property
    def group(self) -> str:
        """The name of the group."""
        return self._inner.group

    @property
    def member(self) -> str:
        """What this member is called where operators look; known when it is open."""
        return self._inner.member

    @property
    def mode(self) -> Mode:
        """Of the group; known when it is open."""
        return self._inner.mode

    @property
    def partitions(self) -> tuple[int, ...]:
        """Where this member attends."""
        return self._inner.partitions

    @property
    def troubles(self) -> dict[int, str]:
        """As `Subscription.troubles`."""
        return self._inner.troubles

    def open(self) -> None:
        """As `Subscription.open`."""
        self._runner.run(self._inner.open())

    def close(self) -> None:
        """As `Subscription.close`. Another thread that iterates over it has no more."""
        self._runner.run(self._inner.close())

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Iterator[BlockingDelivery[E]]:
        """The deliveries, one by one, until the subscription or its client is closed."""
        with closing(self._batches(1)) as batches:
            for batch in batches:
                yield from batch

    def batches(self, *, most: int = 1000) -> Generator[list[BlockingDelivery[E]], None, None]:
        """As `Subscription.batches`.

        Args:
            most: How many a batch has at most.
        """
        return self._batches(most)

    def _batches(self, most: int) -> Generator[list[BlockingDelivery[E]], None, None]:
        batches = self._inner.batches(most=most)

        async def following() -> list[Delivery[E]] | None:
            return await anext(batches, None)

        try:
            while (batch := self._runner.run(following())) is not None:
                yield [BlockingDelivery(one, self._runner) for one in batch]
        finally:  # without waiting for it: this may be collected on the thread of the loop
            asyncio.run_coroutine_threadsafe(batches.aclose(), self._runner.loop)

    def ack(self, deliveries: Sequence[BlockingDelivery[E]], *, durable: bool = False) -> None:
        """As `Subscription.ack`."""
        self._runner.run(self._inner.ack(_inner(deliveries), durable=durable))

    def nack(self, deliveries: Sequence[BlockingDelivery[E]], *, delay: float | None = None, reason: str = "") -> None:
        """As `Subscription.nack`."""
        self._runner.run(self._inner.nack(_inner(deliveries), delay=delay, reason=reason))

    def reject(self, deliveries: Sequence[BlockingDelivery[E]], reason: str) -> None:
        """As `Subscription.reject`."""
        self._runner.run(self._inner.reject(_inner(deliveries), reason))

    def extend(self, deliveries: Sequence[BlockingDelivery[E]]) -> None:
        """As `Subscription.extend`."""
        self._runner.run(self._inner.extend(_inner(deliveries)))


def _inner(deliveries: Sequence[BlockingDelivery[E]]) -> list[Delivery[E]]:
    return [one._inner for one in deliveries]


class BlockingHandling(Generic[E]):
    """As `Handling`, with `run` in the place of `await`. `BlockingClient.handle` makes it.

    Example:
        ```python
        handling = client.handle("mailer", send, concurrency=8)
        signal.signal(signal.SIGTERM, lambda *_: handling.stop())
        handling.run()
        ```
    """

    def __init__(self, inner: Handling[E], runner: Runner) -> None:
        self._inner = inner
        self._runner = runner

    def run(self) -> None:
        """As `Handling.run`: until `stop` is called, from another thread or a signal handler, or the client is closed."""
        self._runner.run(self._inner.run())

    def stop(self) -> None:
        """As `Handling.stop`, from any thread."""
        self._runner.loop.call_soon_threadsafe(self._inner.stop)


async def subscribe(
    client: ConsumerGroups[E], group: str, *, partitions: Partitions | None, max_in_flight: int | None, member: str | None
) -> Subscription[E]:
    """On the loop of the client."""
    return client.subscribe(group, partitions=partitions, max_in_flight=max_in_flight, member=member)


async def handle(
    client: ConsumerGroups[E], group: str, handler: Callable[[BlockingDelivery[E]], Any], runner: Runner, **settings: Any
) -> Handling[E]:
    """On the loop of the client; the handler runs where the client calls the application's code."""
    return client.handle(group, lambda one: handler(BlockingDelivery(one, runner)), **settings)
