"""A cluster for tests without an event loop, and clients on loops of their own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from waltzd import BlockingClient, Client, Committed, Rejected, Transaction, write_lock
from waltzd.errors import BadArgument, CannotConnect
from waltzd.testing import BlockingCluster, LocalCluster


class View:
    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def position(self, partition: int) -> int:
        return -1

    def apply(self, transaction: Transaction) -> None:
        self.seen.append(transaction.payload)


@pytest.mark.waltz(partitions=2)
def test_a_blocking_application_meets_what_goes_wrong(blocking_waltz_cluster: BlockingCluster) -> None:
    cluster, view = blocking_waltz_cluster, View()
    with cluster.client(view=view, partitions=[1]) as client:
        assert isinstance(client, BlockingClient)
        assert client.append(b"one", partition=1) == Committed(0)
        cluster.force_next_lock_failure(1)
        refused = client.append(b"two", partition=1, locks=[write_lock("stock")], position=0)
        assert isinstance(refused, Rejected)
        killed = cluster.kill_owner(1)
        assert not cluster.is_alive(killed)
        assert client.append(b"three", partition=1) == Committed(1)
        assert [record.payload for record in cluster.log(1)] == [b"one", b"three"]
        cluster.start_server(killed)
        assert cluster.is_alive(killed)
    with pytest.raises(BadArgument, match="there is no partition 7"):
        cluster.force_next_lock_failure(7)


def test_a_client_may_live_on_a_loop_of_its_own() -> None:
    """As under Starlette's `TestClient`, which runs the application on another thread."""

    async def application(cluster: BlockingCluster) -> list[bytes]:
        view = View()
        async with cluster.asyncio_client(view=view) as client:
            for number in range(5):
                assert isinstance(await client.append(b"%d" % number, partition=2), Committed)
            while len(view.seen) < 5:
                await asyncio.sleep(0.001)
            assert await client.end_position(2) == 4
            found = await client.read_some(2, after=0, through=3)
            assert [transaction.payload for transaction in found] == [b"1", b"2", b"3"]
            assert await client.position_at(2, 0) == -1
        return view.seen

    with BlockingCluster() as cluster, ThreadPoolExecutor(2) as threads:
        seen = threads.submit(asyncio.run, application(cluster)).result()
        assert seen == [b"0", b"1", b"2", b"3", b"4"]
        assert len(cluster.log(2)) == 5
        for name in cluster.server_names:
            cluster.kill_server(name)
        with pytest.raises(CannotConnect):
            threads.submit(asyncio.run, _ask(cluster)).result()


async def _ask(cluster: BlockingCluster) -> None:
    await cluster.connect(cluster.servers[0], None).locate()


def test_what_belongs_to_one_loop_is_refused_on_another_at_once() -> None:
    async def story(cluster: LocalCluster) -> None:
        async with cluster.client() as client:

            async def elsewhere() -> None:
                for call in (
                    lambda: client.set_partitions([0]),
                    lambda: client.flush(),
                    lambda: client.end_position(0),
                    lambda: client.position_at(0, 0),
                    lambda: client.read(0, 0),
                    lambda: client.close(),
                ):
                    with pytest.raises(BadArgument, match="another event loop"):
                        await call()

            await asyncio.to_thread(asyncio.run, elsewhere())
            assert await client.append(b"it goes on", partition=0) == Committed(0)

    LocalCluster().run(story)


def test_a_closed_client_may_be_opened_on_another_loop() -> None:
    with BlockingCluster() as cluster:
        client: Client = cluster.asyncio_client()

        async def once(number: int) -> None:
            async with client:
                assert await client.append(b"x", partition=0) == Committed(number)

        for number in range(2):
            asyncio.run(once(number))
