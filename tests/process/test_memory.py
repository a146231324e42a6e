"""The memory of a server stays bounded against any replica, reader or writer; measured on real processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz.hostile import connect
from tests.process.cluster import Cluster
from tests.process.unfinished import Unfinished
from waltzd.client.client import Client
from waltzd.client.loop import run
from waltzd.client.pending import Outcomes
from waltzd.format.checksum import crc32
from waltzd.protocol.batches import AppendBatch, FeedMode, Mounted, MountRequest, Registration
from waltzd.protocol.locks import Committed
from waltzd.wire.listener import SLOW_MAX
from waltzd.wire.servers import ServerClient

MIB = 1 << 20
READERS = 10
TAIL_BYTES = 16 * MIB
INFLIGHT_BYTES = 4 * MIB
PAYLOAD = bytes(4096)
WRITTEN_BYTES = 160 * MIB
ALLOWED_BYTES = 100 * MIB
"""Above what the server has at rest: the tail, what is in flight and queued, a frame for each reader, and what the
allocator keeps. A server that kept what it writes, for a replica or a reader that does not take it, would need more."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster.make(
        tmp_path_factory.mktemp("memory"),
        partitions=1,
        servers=1,
        tail_bytes_max=TAIL_BYTES,
        inflight_bytes_max=INFLIGHT_BYTES,
    )
    made.start()
    yield made
    made.close()


def resident_bytes(cluster: Cluster) -> int:
    life = cluster.local.daemons[cluster.server_names[0]].life
    assert life is not None
    pages = Path(f"/proc/{life.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most memory that the server has had while a test was inside."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.before = self.most = resident_bytes(cluster)

    async def __aenter__(self) -> Peak:
        self._task = asyncio.create_task(self._watch())
        return self

    async def _watch(self) -> None:
        while True:
            self.most = max(self.most, resident_bytes(self._cluster))
            await asyncio.sleep(0.05)

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        grown = self.most - self.before
        print(f"\nthe server grew by {grown / MIB:.0f} MiB over {self.before / MIB:.0f}")
        assert grown < ALLOWED_BYTES


async def write(cluster: Cluster, size: int) -> None:
    async with Client(servers=cluster.servers, feed=FeedMode.NONE) as client:
        rows = 200
        for _ in range(size // (rows * len(PAYLOAD))):
            outcomes: Outcomes = await client.append_many([PAYLOAD] * rows, partition=0)
            assert outcomes.committed == rows


def test_a_replica_that_is_away(cluster: Cluster) -> None:
    async def tell() -> None:
        name = cluster.storage_names[0]
        cluster.kill(name)
        async with Peak(cluster):
            await write(cluster, WRITTEN_BYTES)
            cluster.spawn(name)
            await cluster.settled()  # and while it catches up
        await cluster.equal(0)

    run(tell())


def test_readers_that_stop_reading(cluster: Cluster) -> None:
    async def tell() -> None:
        async with Client(servers=cluster.servers, feed=FeedMode.NONE) as client:
            register = ServerClient(cluster.server_addresses[0], cluster.key)
            generation = client.topology.places[0].generation
            links = []
            async with Peak(cluster):
                for _ in range(READERS):
                    link = register.mount()
                    links.append(link)
                    await link.send([mount(cluster, await register.register(), generation)])
                    frames = await link.receive()  # and nothing more is read
                    assert frames is not None
                    assert isinstance(frames[0], Mounted)
                await write(cluster, WRITTEN_BYTES // 2)
            for link in links:
                link.cancel()
            await register.close()

    run(tell())


def test_a_client_that_floods_and_takes_no_answers(cluster: Cluster) -> None:
    async def tell() -> None:
        async with Client(servers=cluster.servers, feed=FeedMode.NONE) as client:
            generation = client.topology.places[0].generation
            port = ServerClient(cluster.server_addresses[0], cluster.key)
            link = port.mount()
            await link.send([mount(cluster, await port.register(), generation, feed=FeedMode.NONE)])
            assert await link.receive() is not None
            sent = 0
            async with Peak(cluster):
                try:
                    async with asyncio.timeout(5):
                        while sent < WRITTEN_BYTES:  # small transactions: their outcomes add up
                            await link.send([batch(sent, 2000, b"x" * 16)])
                            sent += 2000
                except TimeoutError:
                    pass
                assert isinstance(await client.append(b"another client is served", partition=0), Committed)
            link.cancel()
            await port.close()

    run(tell())


@pytest.mark.parametrize("call", ["Locate", "Mount"])
def test_calls_that_never_say_what_they_want(cluster: Cluster, call: str) -> None:
    """Before, each of them could make the server keep a message that was larger than the largest one."""

    async def tell() -> None:
        async with Peak(cluster), Client(servers=cluster.servers, feed=FeedMode.NONE) as client:
            with connect(cluster.server_addresses[0]) as connection:
                callers = Unfinished(connection, f"/waltz.v1.Log/{call}", calls=60, size=4 * MIB)
                while len(callers.refused) < 60 - SLOW_MAX:
                    callers.turn()
                    await asyncio.sleep(0.01)  # at a pace that leaves the bound of memory to the server
                assert isinstance(await client.append(b"another client is served", partition=0), Committed)

    run(tell())


def mount(cluster: Cluster, client: Registration, generation: int, *, feed: FeedMode = FeedMode.RECORDS) -> MountRequest:
    return MountRequest(
        cluster_key=cluster.key,
        partition=0,
        generation=generation,
        client=client.client,
        token=client.token,
        number=1,
        mark=-1,
        feed=feed,
        credit=1 << 40,
    )


def batch(first_sequence: int, rows: int, payload: bytes) -> AppendBatch:
    return AppendBatch(
        first_sequence=first_sequence,
        marks=np.full(rows, -1, np.int64),
        headers=np.zeros(rows, np.int32),
        lengths=np.full(rows, len(payload), np.int64),
        data_crcs=np.full(rows, crc32(payload), np.uint32),
        lock_counts=np.zeros(rows, np.int64),
        lock_ids=np.zeros(0, np.uint64),
        lock_modes=np.zeros(0, np.uint8),
        payloads=payload * rows,
    )
