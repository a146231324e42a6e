"""Iteration over transactions without a view: over a range of the log, or over everything that is committed from now
on.

A scan reads by id, some transactions at a time, and needs no mount. A feed has a partition client and a client id of
its own, so it does not displace the mounts of the client. It buffers one batch; while the application processes a
batch, the credit of the mount bounds the rest, here and at the server. Foreign transactions are left out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from copy import copy
from typing import Any, Generic

from waltzd.client.partition import PartitionClient
from waltzd.client.reader import ReadMethods
from waltzd.client.view import E, Transaction, checked_position
from waltzd.errors import ClientClosed
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY

READ_MAX = 1000
"""Transactions that a scan reads at once. Together with the 4 MiB of `read_some` this bounds its memory."""


class FeedBuffer:
    """View of a feed: it keeps nothing, and hands over one batch at a time."""

    def __init__(self, after: Position) -> None:
        self._after = after
        self._batch: Sequence[Transaction[Any]] | None = None
        self._is_over = False
        self._changed = asyncio.Event()

    # -- called by the partition client

    def position(self, partition: int) -> Position:
        return self._after

    async def apply(self, transaction: Transaction[Any]) -> None:
        await self.apply_batch([transaction])

    async def apply_batch(self, transactions: Sequence[Transaction[Any]]) -> None:
        while self._batch is not None and not self._is_over:
            await self._change()
        if not self._is_over:
            self._batch, self._after = transactions, transactions[-1].position
            self._changed.set()

    def end(self) -> None:
        """End the feed: nothing is taken any more. A batch that is buffered is still handed over."""
        self._is_over = True
        self._changed.set()

    # -- called by the reader

    async def next(self) -> Sequence[Transaction[Any]] | None:
        """Return the next batch; None at the end."""
        while self._batch is None and not self._is_over:
            await self._change()
        batch, self._batch = self._batch, None
        self._changed.set()
        return batch

    async def _change(self) -> None:
        """Wait for the other side. One side waits for a batch or the other one for a place, never both."""
        self._changed.clear()
        await self._changed.wait()


class IterationMethods(ReadMethods[E], Generic[E]):
    """Methods of a client for iteration; `Client` inherits them."""

    _feeds: dict[PartitionClient, FeedBuffer]

    async def _begin_feed(self, partition: int, arrivals: FeedBuffer) -> PartitionClient:
        raise AssertionError("the client class makes partition clients")

    def scan(
        self, partition: int, *, after: int = EMPTY, through: int | None = None, with_locks: bool = False
    ) -> AsyncGenerator[Transaction[E], None]:
        """Iterate over the committed transactions of a range, in order. It needs no view and no partitions of the
        client.

        The range may begin or end inside an atomic append. Foreign transactions (`Transaction.is_foreign`) are left out,
        so ids may be missing.

        Args:
            partition: Partition to read.
            after: Position before the first transaction; the default is the beginning of the log. A plain integer is a
                position of the first timeline of the log (`Position`).
            through: Id of the last transaction; without it, the highest id that is committed when the iteration begins.
            with_locks: See `read`.

        Raises:
            BeyondLog: `through` is not committed yet.
            OtherTimeline: `after` is on another timeline of the log, or an operator ended the log while it was read.
            CannotConnect: The owner did not answer within `submit_seconds`, while iterating.
            BadArgument, ClientClosed: A position is wrong, there is no such partition, or the client is not open.

        Example:
            ```python
            async for transaction in client.scan(0, after=await client.position_at(0, midnight)):
                print(transaction.id, transaction.payload)
            ```
        """
        return _each(self._scan(partition, after=after, through=through, with_locks=with_locks))

    def feed(self, partition: int, *, after: int) -> AsyncGenerator[Transaction[E], None]:
        """Iterate over all transactions after a position, in order, and then over each new one, until the client is
        closed.

        The feed continues through fail-overs, needs no view and no partitions of the client, and uses a mount of the
        server while it runs. Slow code delays no other reader: transactions wait in the log, not in memory. Foreign
        transactions (`Transaction.is_foreign`) are left out, so ids may be missing. After a `break` the feed ends at
        once if it was opened with `contextlib.aclosing`, else soon.

        Args:
            partition: Partition to follow.
            after: Position before the first transaction: -1 for the beginning of the log, `await
                client.end_position(…)` for what is committed from now on, or the position of a `PositionFile`. A plain
                integer is a position of the first timeline of the log (`Position`).

        Raises:
            ClientAhead: The position is above the end of the log: it is of another cluster. While iterating.
            OtherTimeline: The position is above the fork of its timeline: an operator ended the log below it. While
                iterating.
            NotGranted: The policy of the cluster does not allow this client to read the partition. While iterating.
            BadArgument, ClientClosed: `after` is no position, there is no such partition, or the client is not open.

        Example:
            ```python
            async for transaction in client.feed(0, after=file.position(0)):
                await index.add(transaction.id, transaction.payload)
                file.save(0, transaction.position)
            ```
        """
        return _each(self.feed_batches(partition, after=after))

    def _scan(
        self, partition: int, *, after: int = EMPTY, through: int | None = None, with_locks: bool = False
    ) -> AsyncGenerator[Sequence[Transaction[E]], None]:
        self._check_reading(partition)
        end = None if through is None else checked_position(through)
        return self._stretches(partition, checked_position(after), end, with_locks)

    async def _stretches(
        self, partition: int, position: Position, through: int | None, with_locks: bool
    ) -> AsyncGenerator[Sequence[Transaction[E]], None]:
        end = await self._reader.end_position(partition, confirmed=through is None, since=position)
        after, last = int(position), int(end) if through is None else through
        while after < last:
            self._check_reading(partition)  # the client may have been closed since
            found = await self._reader.some(
                partition,
                after=after,
                through=min(last, after + READ_MAX),
                with_locks=with_locks,
                timeline=end.timeline,
            )
            after = found[-1].id
            yield [one for one in found if not one.is_foreign]

    def feed_batches(self, partition: int, *, after: int) -> AsyncGenerator[Sequence[Transaction[E]], None]:
        """Iterate as `feed` does, over batches of all transactions that have arrived.

        Use it if a batch costs about the same as one transaction, such as a flush of a disk. A batch has at least one
        transaction and at most `apply_batch_max`; it never ends inside an atomic append.

        Example:
            ```python
            async for transactions in client.feed_batches(0, after=file.position(0)):
                await index.add_all(transactions)
                file.save(0, transactions[-1].position)
            ```
        """
        self._check_reading(partition)
        return self._batches(partition, checked_position(after))

    async def _batches(self, partition: int, after: Position) -> AsyncGenerator[Sequence[Transaction[E]], None]:
        self._check_reading(partition)  # the client may have been closed since
        arrivals = FeedBuffer(after)
        client = await self._begin_feed(partition, arrivals)
        try:
            while (batch := await arrivals.next()) is not None:
                yield batch
            if client.stopped is not None and not isinstance(client.stopped, ClientClosed):
                raise copy(client.stopped)
        finally:
            arrivals.end()
            self._feeds.pop(client, None)
            await client.deactivate(ClientClosed("the feed was ended"))


async def _each(batches: AsyncGenerator[Sequence[Transaction[E]], None]) -> AsyncGenerator[Transaction[E], None]:
    async with aclosing(batches):
        async for batch in batches:
            for transaction in batch:
                yield transaction
