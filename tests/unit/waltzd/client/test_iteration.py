"""Iterating over the log: what a feed and a scan hand on is the log, in order, and they hold nothing up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from tests.unit.fake_server import FakeCluster
from tests.unit.timeless import run
from tests.unit.waltzd.client.test_client import SETTINGS, View, until, with_client
from waltzd.client import iteration
from waltzd.client.blocking import BlockingClient
from waltzd.client.client import Client
from waltzd.client.settings import ClientSettings
from waltzd.client.view import Transaction
from waltzd.errors import BadArgument, BeyondLog, ClientAhead, ClientClosed
from waltzd.protocol.batches import PROBE_KIND
from waltzd.testing import LocalCluster


async def taken(feed: AsyncGenerator[Transaction, None], count: int) -> list[int]:
    return [(await anext(feed)).id for _ in range(count)]


def test_a_feed_goes_on_from_what_is_there_to_what_comes() -> None:
    view = View()

    async def test(client: Client, fake: FakeCluster) -> None:
        await client.append_many([b"%d" % number for number in range(5)], partition=0)
        async with aclosing(client.feed(0, after=1)) as feed, aclosing(client.feed(0, after=-1)) as other:
            assert await taken(feed, 3) == [2, 3, 4]
            waiting = asyncio.create_task(anext(feed))
            await asyncio.sleep(5)
            assert not waiting.done()
            await client.append(b"5", partition=0)
            assert (await waiting).payload == b"5"
            assert await taken(other, 6) == list(range(6))
            assert fake.open_mounts == 2 + len(client.partitions)
        await until(lambda: fake.open_mounts == len(client.partitions))
        await until(lambda: len(view.payloads()) == 6)  # its mount was not displaced

    with_client(test, view=view)


def test_a_feed_of_batches_hands_on_all_that_has_come_meanwhile() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        await client.append(b"0", partition=0)
        async with aclosing(client.feed_batches(0, after=-1)) as batches:
            assert [one.id for one in await anext(batches)] == [0]
            await client.append_many([b"x"] * 25, partition=0)
            await asyncio.sleep(5)
            found = [await anext(batches)]
            while found[-1][-1].id < 25:
                found.append(await anext(batches))
            assert [one.id for batch in found for one in batch] == list(range(1, 26))
            assert len(found) < 10
            assert max(map(len, found)) <= 10

    with_client(test, settings=ClientSettings(apply_batch_max=10, close_seconds=3))


def test_a_feed_goes_on_through_a_fail_over() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        await client.append(b"0", partition=0)
        async with aclosing(client.feed(0, after=-1)) as feed:
            assert await taken(feed, 1) == [0]
            fake.partitions[0].end_session(move=True)
            await client.append(b"1", partition=0)
            assert await taken(feed, 1) == [1]

    with_client(test)


def test_who_iterates_slowly_holds_nothing_in_memory_and_nobody_up() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        async with aclosing(client.feed(0, after=-1)) as feed:
            await client.append(b"x" * 100, partition=0)
            assert await taken(feed, 1) == [0]
            await client.append_many([b"x" * 100] * 500, partition=0)
            await asyncio.sleep(5)
            (line,) = client._feeds
            assert line.status().received < 100
            assert await taken(feed, 500) == list(range(1, 501))

    with_client(test, settings=ClientSettings(feed_bytes_max=1000, close_seconds=3))


def test_a_feed_ends_with_its_client_although_nobody_takes_what_came() -> None:
    async def work() -> None:
        fake = FakeCluster()
        client = Client("s0:1", connect=fake.connect, settings=ClientSettings(feed_bytes_max=1000))
        await client.open()
        feed = client.feed(0, after=-1)
        await client.append_many([b"x" * 100] * 100, partition=0)
        assert await taken(feed, 1) == [0]
        await asyncio.sleep(5)
        begun = asyncio.get_running_loop().time()
        await client.close()
        assert asyncio.get_running_loop().time() - begun < 1
        rest = [transaction.id async for transaction in feed]
        assert rest == list(range(1, 1 + len(rest)))
        assert (fake.open_ports, fake.open_mounts) == (0, 0)
        with pytest.raises(ClientClosed):
            client.feed(0, after=-1)

    run(work())


def test_who_breaks_off_gives_the_mount_back() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        await client.append(b"0", partition=0)
        async for transaction in client.feed(0, after=-1):
            assert transaction.id == 0
            break
        await until(lambda: fake.open_mounts == len(client.partitions) and not client._feeds)

    with_client(test)


def test_a_position_that_no_log_has_is_refused() -> None:
    async def test(client: Client, fake: FakeCluster) -> None:
        await client.append(b"0", partition=0)
        with pytest.raises(ClientAhead):
            await anext(client.feed(0, after=7))
        for after in (-2, 1.5):
            with pytest.raises(BadArgument):
                client.feed(0, after=after)  # type: ignore[arg-type]
        with pytest.raises(BadArgument, match="there is no partition 9"):
            client.feed(9, after=-1)
        with pytest.raises(BeyondLog):
            await anext(client.scan(0, through=7))
        assert (await client.append(b"1", partition=0)).ok  # the client itself goes on

    with_client(test)


def test_a_scan_has_the_range_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration, "READ_MAX", 3)

    async def test(client: Client, fake: FakeCluster) -> None:
        assert [transaction async for transaction in client.scan(0)] == []
        await client.append_many([b"%d" % number for number in range(10)], partition=0)
        for after in range(-1, 11):
            for through in [None, *range(-1, 10)]:
                last = 9 if through is None else through
                found = [transaction.id async for transaction in client.scan(0, after=after, through=through)]
                assert found == list(range(after + 1, last + 1))
        scan = client.scan(0)
        assert (await anext(scan)).payload == b"0"
        await client.append(b"later", partition=0)
        assert [transaction.id async for transaction in scan] == list(range(1, 10))

    with_client(test, settings=SETTINGS)


def test_neither_hands_on_what_operators_try(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(cluster: LocalCluster) -> None:
        async with cluster.client(partitions=[0]) as client:
            await client.append(b"0", partition=0)
            monkeypatch.setattr(f"{Client.append.__module__}.checked_kind", int)
            await client.append(b"probe", partition=0, kind=PROBE_KIND)
            await client.append(b"2", partition=0)
            assert [one.id async for one in client.scan(0)] == [0, 2]
            async with aclosing(client.feed(0, after=-1)) as feed:
                assert await taken(feed, 2) == [0, 2]

    LocalCluster(partitions=1).run(story)


def test_the_blocking_twins_are_generators() -> None:
    fake = FakeCluster()
    with BlockingClient("s0:1", connect=fake.connect, settings=SETTINGS) as client:
        client.append_many([b"%d" % number for number in range(5)], partition=0)
        assert [one.payload for one in client.scan(0, after=1, through=3)] == [b"2", b"3"]
        for transaction in client.feed(0, after=2):
            if transaction.id == 4:
                break
        batches = client.feed_batches(0, after=1)
        assert [one.id for one in next(batches)] == [2, 3, 4]
        batches.close()
        feed = client.feed(0, after=3)
        assert next(feed).payload == b"4"
        threading.Timer(0.05, client.close).start()
        assert list(feed) == []
        with pytest.raises(ClientClosed):
            next(client.scan(0))
    assert (fake.open_ports, fake.open_mounts) == (0, 0)
