"""Reading by lock, from the client through owner and storages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from waltzd import Client, Lock, append_lock, read_lock, write_lock
from waltzd.errors import BadArgument, NeedsBatches, NotGranted
from waltzd.protocol.locks import Committed, Mode
from waltzd.testing import BlockingCluster, LocalCluster


def with_cluster(story: Callable[[LocalCluster, Client], Coroutine[Any, Any, None]], **size: Any) -> None:
    async def whole() -> None:
        async with LocalCluster(**size) as cluster, cluster.client() as client:
            await story(cluster, client)

    asyncio.run(whole())


@asynccontextmanager
async def marked(client: Client, count: int, chance: random.Random) -> AsyncIterator[dict[Lock, list[int]]]:
    """Append transactions with drawn locks; yield the ids that marked each lock."""
    locks = [Lock("account", n, mode) for n in range(5) for mode in Mode]
    right: dict[Lock, list[int]] = {Lock("account", n): [] for n in range(6)}
    for number in range(count):
        own = [lock for lock in locks if chance.random() < 0.2]
        outcome = await client.append(b"%d" % number, partition=1, locks=own, position=number - 1)
        assert isinstance(outcome, Committed)
        for n in {lock.id for lock in own if lock.mode is not Mode.READ}:
            right[Lock("account", n)].append(outcome.id)
    yield right


def test_a_history_is_all_and_only_what_marked_the_lock() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        async with marked(client, 60, random.Random(3)) as right:
            for lock, ids in right.items():
                found = await client.history(lock, partition=1)
                assert (found.ids, found.end, found.has_more) == (tuple(ids), 59, False)
                assert await client.last(lock, partition=1) == (ids[-1] if ids else None)
                assert await client.last(lock, partition=1, through=29) == max(
                    (id_ for id_ in ids if id_ < 30), default=None
                )
                back = await client.history(lock.hash, partition=1, newest_first=True, limit=2, after=4, confirmed=False)
                wanted = [id_ for id_ in ids if id_ > 4][::-1]
                assert (back.ids, back.has_more) == (tuple(wanted[:2]), len(wanted) > 2)
                texts = [transaction.payload for transaction in await client.read_ids(1, found.ids[::-1])]
                assert texts == [b"%d" % id_ for id_ in reversed(found.ids)]

    with_cluster(story, partitions=2)


def test_a_history_is_known_to_the_next_owner() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        async with marked(client, 10, random.Random(4)) as right:
            await cluster.kill_owner(1)
            for lock, ids in right.items():
                assert (await client.history(lock, partition=1)).ids == tuple(ids)

    with_cluster(story, partitions=2)


def test_the_end_of_a_history_is_a_position_for_the_next_append() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        lock = write_lock("seat", 7)
        seen = await client.history(lock)
        first = await client.append(b"mine", partition=seen.partition, locks=[lock], position=seen.end)
        second = await client.append(b"too", partition=seen.partition, locks=[lock], position=seen.end)
        assert (type(first).__name__, type(second).__name__) == ("Committed", "Rejected")
        assert (await client.history(lock)).ids == (0,)

    with_cluster(story, partitions=3)


def test_a_partition_follows_from_the_name_of_a_lock() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        outcome = await client.append(b"x", locks=[append_lock("order", "a-7")])
        assert isinstance(outcome, Committed)
        found = await client.history(read_lock("order", "a-7"))
        assert (found.partition, found.ids) == (outcome.partition, (outcome.id,))
        subjects: list[Any] = [
            {"lock": 7},
            {"lock": "order"},
            {"lock": -1, "partition": 0},
            {"lock": 1 << 64, "partition": 0},
        ]
        for arguments in subjects:
            with pytest.raises(BadArgument):
                await client.history(**arguments)
        bounds: list[Any] = [{"limit": 0}, {"limit": 10_001}, {"after": -2}, {"through": -2}, {"partition": 9}]
        for wrong in bounds:
            with pytest.raises(BadArgument):
                await client.history(read_lock("order", 7), **wrong)

    with_cluster(story)


def test_format_0_keeps_no_locks() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        await client.append(b"x", partition=0, locks=[append_lock("order", 7)])
        with pytest.raises(NeedsBatches):
            await client.history(write_lock("order", 7), partition=0)

    with_cluster(story, format=0)


def test_a_history_needs_the_right_to_read() -> None:
    async def story(cluster: LocalCluster, client: Client) -> None:
        cluster.set_policy([{"names": ["writer"], "may": ["append"], "partitions": "0-3"}])
        async with cluster.client(name="writer", partitions=()) as writer:
            with pytest.raises(NotGranted):
                await writer.history(write_lock("order", 7), partition=0)

    with_cluster(story)


def test_blocking_twins() -> None:
    lock = append_lock("order", 7)
    with BlockingCluster() as cluster, cluster.client() as client:
        outcome = client.append(b"x", locks=[lock])
        assert isinstance(outcome, Committed)
        found = client.history(lock)
        assert (found.ids, client.last(lock)) == ((outcome.id,), outcome.id)
        assert [one.payload for one in client.read_ids(found.partition, found.ids)] == [b"x"]
