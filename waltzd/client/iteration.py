"""Transactions one after the other, for code that would rather iterate than keep a view: a range that is there, or all that
comes.

A scan reads by id, a stretch at a time, and needs no mount. A feed is a line of its own, with a client id of its own,
beside the partitions of the client: so it displaces none of them. What it is given waits in a place for one batch; while
that is taken, the credit of its mount bounds the rest, here and at the server. Probes of operators are in neither."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from copy import copy
from typing import Any, Generic

from waltzd.client.partition import PartitionClient
from waltzd.client.reader import Reading
from waltzd.client.view import E, Transaction, checked_position
from waltzd.errors import ClientClosed
from waltzd.protocol.batches import PROBE_HEADER
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY

READ_MAX = 1000
"""How many transactions a scan reads at once: what it holds in memory, beside the 4 MiB of `read_some`."""


class Arrivals:
    """The view behind a feed: it keeps nothing, and hands on one batch after the other."""

    def __init__(self, after: Position) -> None:
        self._after = after
        self._batch: Sequence[Transaction[Any]] | None = None
        self._is_over = False
        self._changed = asyncio.Event()

    # -- called by the line

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
        """Nothing comes any more, and nothing is taken; the batch that is here is still handed on."""
        self._is_over = True
        self._changed.set()

    # -- for who iterates

    async def next(self) -> Sequence[Transaction[Any]] | None:
        """What came; None at the end."""
        while self._batch is None and not self._is_over:
            await self._change()
        batch, self._batch = self._batch, None
        self._changed.set()
        return batch

    async def _change(self) -> None:
        """Both sides never wait at once: one waits for a batch, the other for a place."""
        self._changed.clear()
        await self._changed.wait()


class Feeding(Reading[E], Generic[E]):
    """What a client iterates over. `Client` has all of this."""

    _feeds: dict[PartitionClient, Arrivals]

    async def _begin_feed(self, partition: int, arrivals: Arrivals) -> PartitionClient:
        raise AssertionError("a client makes the lines")

    def scan(
        self, partition: int, *, after: int = EMPTY, to: int | None = None, with_locks: bool = False
    ) -> AsyncGenerator[Transaction[E], None]:
        """Iterate over the committed transactions of a range, in order. Needs no view and no partitions of one's own.

        A group may be cut at both ends. Probes of operators are left out, so an id may be missing.

        Args:
            partition: Which partition.
            after: A position: the first transaction is the one behind it. The default is the beginning of the log. A plain
                integer is a position of the first timeline of the log (`Position`).
            to: The last id; without one, all that is committed when the iteration begins. An empty range has none.
            with_locks: As of `read`.

        Raises:
            BeyondLog: `to` is not committed yet.
            OtherTimeline: `after` is on another timeline of the log, or an operator ended the log while it was read.
            CannotConnect: The owner did not answer within `submit_seconds`, while iterating.
            BadArgument, ClientClosed: Positions make no sense, there is no such partition, or the client is not open.

        Example:
            ```python
            async for transaction in client.scan(0, after=await client.position_at(0, midnight)):
                print(transaction.id, transaction.payload)
            ```
        """
        return _each(self._scan(partition, after=after, to=to, with_locks=with_locks))

    def feed(self, partition: int, *, after: int) -> AsyncGenerator[Transaction[E], None]:
        """Iterate over all transactions behind a position, in order, and then over each that is committed, for ever.

        It goes on through fail-overs, needs no view and no partitions of one's own, and costs a mount of the server while
        it runs. Code that takes its time holds up nobody: transactions wait in the log, and not in memory. Probes of
        operators are left out, so an id may be missing. It ends when the client is closed; when the code breaks off, at
        once with `contextlib.aclosing`, else soon.

        Args:
            partition: Which partition.
            after: The position behind which it begins: -1 for the beginning of the log, `await client.end_position(…)`
                for what comes from now on, or what a `PositionFile` has kept. A plain integer is a position of the first
                timeline of the log (`Position`).

        Raises:
            ClientAhead: The position is above the end of the log: it comes from another cluster. While iterating.
            OtherTimeline: The position is above the fork of its timeline: an operator ended the log below. While iterating.
            NotGranted: The policy of the cluster does not let this client read the partition. While iterating.
            BadArgument, ClientClosed: It is no position, there is no such partition, or the client is not open.

        Example:
            ```python
            async for transaction in client.feed(0, after=file.position(0)):
                await index.add(transaction.id, transaction.payload)
                file.save(0, transaction.position)
            ```
        """
        return _each(self.feed_batches(partition, after=after))

    def _scan(
        self, partition: int, *, after: int = EMPTY, to: int | None = None, with_locks: bool = False
    ) -> AsyncGenerator[Sequence[Transaction[E]], None]:
        self._check_reading(partition)
        return self._stretches(partition, checked_position(after), None if to is None else checked_position(to), with_locks)

    async def _stretches(
        self, partition: int, position: Position, to: int | None, with_locks: bool
    ) -> AsyncGenerator[Sequence[Transaction[E]], None]:
        end = await self._reader.end_position(partition, confirmed=to is None, since=position)
        after, last = int(position), int(end) if to is None else to
        while after < last:
            self._check_reading(partition)  # it may have been closed since
            up_to = min(last, after + READ_MAX)
            found = await self._reader.some(partition, after + 1, up_to, with_locks=with_locks, timeline=end.timeline)
            after = found[-1].id
            yield [one for one in found if one.kind != PROBE_HEADER]

    def feed_batches(self, partition: int, *, after: int) -> AsyncGenerator[Sequence[Transaction[E]], None]:
        """As `feed`, with all that has come meanwhile at once: for work that costs as much for many as for one, such as a
        flush of a disk. A batch has one transaction at least and `apply_batch_max` at most; a group is whole.

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
        self._check_reading(partition)  # it may have been closed since
        arrivals = Arrivals(after)
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
