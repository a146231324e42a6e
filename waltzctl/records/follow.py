"""Read transactions of a cluster through its servers, with the client library.

The client finds the owners, survives fail-overs, checks every record and delivers each id once, in order. Its buffer is
bounded for a range of any length.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import typer

from waltzctl.health.poll import LOST, known_of
from waltzctl.shell.cluster_target import ClusterTarget, check_operator, first_contact, using
from waltzctl.shell.moment import Within
from waltzctl.shell.numbers import check_partitions
from waltzctl.show.terminal import printable
from waltzctl.snapshot import last_seen
from waltzctl.snapshot.cluster_snapshot import timeline_sentence
from waltzd import Client, ClientSettings, Transaction
from waltzd.client import loop
from waltzd.cluster.cluster import Cluster
from waltzd.errors.operations import BadMetadata, NoServerUp
from waltzd.protocol.timelines import Timeline
from waltzd.wire.servers import ServerClient

LOOK_SECONDS = 1.0
"""Interval at which a reader that receives nothing reports why."""
CALL_SECONDS = 10.0
CLOSE_SECONDS = 2.0
LOOK_BACK = 256
"""Transactions read in one call to find the first of a group."""
IDS_AT_ONCE = 100
"""Transactions held in memory when they are read by their ids."""
T = TypeVar("T")


async def mark_for(client: Client, partition: int, last_id: int | None) -> int:
    """Return the high-water mark. A majority is asked to confirm it only if `last_id` is None or above what the owner
    knows; so lower ids can be read without a majority."""
    committed = await client.end_position(partition, confirmed=False)
    if last_id is None or last_id > committed:
        committed = await client.end_position(partition)
    return committed


async def stretch(
    client: Client, partition: int, times: Within, committed: int, *, newest: int | None = None
) -> tuple[int, int]:
    """Return the first and last id in a range of time, or its newest ids. The range is empty if the first is above the
    last."""
    first = 0 if times.since is None else await client.position_at(partition, times.since) + 1
    last = committed if times.before is None else min(committed, await client.position_at(partition, times.before))
    return first if newest is None else max(first, last - newest + 1), last


async def between(
    client: Client, partition: int, first_id: int, last_id: int, *, with_locks: bool = False
) -> AsyncGenerator[Transaction, None]:
    """Yield committed transactions, with calls that need no registered client."""
    while first_id <= last_id:
        for transaction in await client.read_some(partition, after=first_id - 1, through=last_id, with_locks=with_locks):
            yield transaction
        first_id = transaction.id + 1


async def each(client: Client, partition: int, ids: Sequence[int]) -> AsyncGenerator[Transaction, None]:
    """Yield committed transactions in the order of `ids`, with calls that need no registered client."""
    for at in range(0, len(ids), IDS_AT_ONCE):
        for transaction in await client.read_ids(partition, ids[at : at + IDS_AT_ONCE]):
            yield transaction


class Groups:
    """Finds the first id of the group of each transaction; transactions are passed in the order of their ids."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._last: dict[int, tuple[int, int]] = {}
        """Partition → id of the last transaction passed, and first id of its group."""

    async def first_of(self, transaction: Transaction) -> int:
        partition, id_ = transaction.partition, transaction.id
        last_id, first = self._last.get(partition, (-1, -1))
        if not transaction.follows:
            first = id_
        elif last_id != id_ - 1:
            first = await self._find_first(partition, id_)
        self._last[partition] = id_, first
        return first

    async def _find_first(self, partition: int, id_: int) -> int:
        """Find the first id of a group in whose middle the reading began."""
        end = id_ - 1
        while True:
            begin = max(0, end - LOOK_BACK + 1)
            found = [one async for one in between(self._client, partition, begin, end)]
            first = next((one.id for one in reversed(found) if not one.follows), None)
            if first is not None:
                return first
            end = begin - 1


class Feed:
    """View without state that hands on every transaction."""

    def __init__(self) -> None:
        self._after: dict[int, int] = {}
        self._arrived: asyncio.Queue[Sequence[Transaction]] = asyncio.Queue(1)
        self._is_wanted = False
        self._silent: dict[int, None] = {}

    # -- called by the client

    def position(self, partition: int) -> int:
        return self._after[partition]

    async def apply(self, transaction: Transaction) -> None:
        await self.apply_batch([transaction])

    async def apply_batch(self, transactions: Sequence[Transaction]) -> None:
        if self._is_wanted:
            await self._arrived.put(transactions)

    # -- called by the reader

    async def beyond(self, client: Client, after: Mapping[int, int]) -> AsyncGenerator[Transaction, None]:
        """Yield the transactions above these ids, without an end."""
        self._after, self._is_wanted = dict(after), True
        await client.set_partitions(after)
        try:
            while True:
                for transaction in await self._next(client):
                    yield transaction
        finally:
            # The client waits for the view: this must not block.
            self._is_wanted = False
            self._empty()
            await client.set_partitions(())
            self._empty()

    def _empty(self) -> None:
        while not self._arrived.empty():
            self._arrived.get_nowait()

    async def _next(self, client: Client) -> Sequence[Transaction]:
        while True:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    return await self._arrived.get()
            except TimeoutError:
                self._check_states(client)

    def _check_states(self, client: Client) -> None:
        for state in client.status():
            if state.stopped is not None:
                raise state.stopped
            if state.is_ready == (state.partition in self._silent):
                self._report_state(state.partition, state.sentence, is_ready=state.is_ready)

    def _report_state(self, partition: int, sentence: str, *, is_ready: bool) -> None:
        """Report a change of the connection once."""
        if is_ready:
            del self._silent[partition]
            typer.echo(f"partition {partition} is available again", err=True)
        else:
            self._silent[partition] = None
            typer.echo(f"partition {partition}: {sentence}", err=True)


def with_client(
    target: ClusterTarget, action: Callable[[Client], Awaitable[T]], *, feed: Feed | None = None, seconds: float,
    typed: int | None = None, is_appending: bool = False, shows_timelines: bool = False,
) -> T:  # fmt: skip
    """Run an action with a client, as an application would. ZooKeeper is only asked for the servers, and whether the
    partition `typed` exists. `seconds` is the time to wait for a partition that is not open. With `tells_timelines` the
    timelines of the partition are printed to standard error."""
    check_operator(target.tls, "read or append transactions")
    # The errors of the client contain all that it would log.
    logging.getLogger("waltz.client").addHandler(logging.NullHandler())
    try:
        addresses, timelines = using(target, lambda cluster: _contact(cluster, typed))
        for one in timelines if shows_timelines else ():
            typer.echo(printable(f"partition {typed}, {timeline_sentence(one)}"), err=True)
    except LOST as error:
        known = known_of(target, last_seen.load(target.where))
        if known is None or not known.servers:
            raise
        addresses = [server.listen for server in known.servers]
        typer.echo(f"{error.code} {printable(error.message)}: using the servers that are known from before", err=True)

    async def run() -> T:
        partitions = (typed,) if is_appending and typed is not None else ()
        async with opened(target, addresses, feed=feed, partitions=partitions, seconds=seconds) as client:
            return await action(client)

    return loop.run(run())


@asynccontextmanager
async def opened(
    target: ClusterTarget,
    addresses: Sequence[str],
    *,
    feed: Feed | None = None,
    partitions: Sequence[int] = (),
    seconds: float,
) -> AsyncIterator[Client]:
    """Open a client of the servers at these addresses."""
    client = Client(
        addresses,
        view=feed,
        partitions=partitions,
        settings=ClientSettings(
            submit_seconds=seconds, call_seconds=min(seconds, CALL_SECONDS), close_seconds=CLOSE_SECONDS
        ),
        connect=lambda address, key: ServerClient(address, key, seconds=min(seconds, CALL_SECONDS), tls=target.tls),
    )
    async with first_contact(addresses[0], target.tls):
        await client.open()
    try:
        yield client
    finally:
        await client.close()


async def _contact(cluster: Cluster, typed: int | None) -> tuple[list[str], tuple[Timeline, ...]]:
    """Return the addresses of the servers, and the timelines of the partition `typed` after the first. An unreadable
    document is ignored: reading must still work."""
    addresses = await addresses_of(cluster, typed)
    if typed is None:
        return addresses, ()
    try:
        meta, _ = await cluster.partition(typed)
    except BadMetadata:
        return addresses, ()
    return addresses, () if meta is None else meta.timelines


async def addresses_of(cluster: Cluster, typed: int | None) -> list[str]:
    """Return the addresses of the servers that are up."""
    meta = await cluster.meta()
    if typed is not None:
        check_partitions([typed], meta.partitions, not_done="nothing was asked")
    servers = await cluster.servers()
    if not servers:
        raise NoServerUp(f"no server of the cluster {meta.name} is up")
    return [server.listen for _, server in sorted(servers.items())]
