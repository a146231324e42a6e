"""Many partitions get other replicas at once: how long each of them is silent, on a clock that moves only when all wait.

Each storage has the threads of a real one and a disk that needs a while for every flush, one after the other. So what is
counted is how much stands in the way of a transaction, on this machine as on any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulation.storages import KEY, SimPort, SimStorage
from tests.simulation.test_store import Appender
from tests.unit.timeless import run
from waltzd.cluster import Cluster
from waltzd.coordinator_memory import MemoryTree
from waltzd.disk_sim import SimDisk
from waltzd.meta import ClusterMeta, ReplicaSets, Role
from waltzd.server.store import Store
from waltzd.server.store_settings import StoreSettings, Turns
from waltzd.server.ticker import Ticker

PARTITIONS, SERVERS = 32, 2
RATE = 200.0
"""Transactions a second, over all partitions."""
THREADS = 4
FLUSH_SECONDS = 0.002
COORDINATOR_SECONDS = 0.005
SILENT_SECONDS = 0.3


class SlowDisk:
    """In the place of the threads of a storage."""

    def __init__(self, disk: SimDisk) -> None:
        self.flushes = 0
        self._threads = asyncio.Semaphore(THREADS)
        self._disk = asyncio.Lock()
        disk.observer = self._see

    def _see(self, kind: str, path: str) -> None:
        self.flushes += kind.startswith("flush")

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        async with self._threads:
            before = self.flushes
            try:
                return function(*arguments)
            finally:
                for _ in range(self.flushes - before):
                    async with self._disk:
                        await asyncio.sleep(FLUSH_SECONDS)


class Plant:
    def __init__(self) -> None:
        self.storages = {
            f"s{n}": SimStorage(f"s{n}", partitions=PARTITIONS, seed=n, segment_bytes=1 << 20) for n in range(5)
        }
        self.disks: dict[str, SlowDisk] = {}
        self.tree = MemoryTree()
        self.cluster = Cluster(self.tree.connect())
        self.stores: list[Store[Appender]] = []
        self.log: list[str] = []
        self.waits: dict[int, float] = {}
        """The longest that a transaction of each partition has waited since it was looked at last."""

    async def start(self) -> None:
        for number, (name, storage) in enumerate(self.storages.items()):
            await storage.start(create=number < 3)
            assert storage.keeper is not None
            disk = self.disks[name] = SlowDisk(storage.disk)
            keeper: Any = storage.keeper
            keeper._run_writing = keeper._arrivals._run_writing = disk.run
            for lane in keeper._lanes.values():
                lane._run_blocking = disk.run
        await Cluster.create(
            self.cluster.coordinator,
            ClusterMeta(name="test", key=KEY, partitions=PARTITIONS, created="2026-01-01T00:00:00Z"),
            storages=[storage.meta for storage in self.storages.values()],
            replicas=ReplicaSets(partitions={n: dict.fromkeys(("s0", "s1", "s2"), Role.MEMBER) for n in range(PARTITIONS)}),
        )
        settings = StoreSettings(partitions=PARTITIONS, key=KEY)
        servers = [(Cluster(self.tree.connect()), replace(settings, turns=Turns()), Ticker(1.0)) for _ in range(SERVERS)]
        for number in range(PARTITIONS):
            cluster, mine, ticker = servers[number % SERVERS]
            store: Store[Appender] = Store(
                number, 1, cluster=cluster, connect=lambda meta: SimPort(self.storages[meta.name]), settings=mine,
                ticker=ticker, make_pipeline=Appender, say=self.log.append,
            )  # fmt: skip
            self.stores.append(store)
            await store.start()
        while not all(store._pipeline for store in self.stores):
            await asyncio.sleep(0.1)
        self.tree.pause = lambda: asyncio.sleep(COORDINATOR_SECONDS)

    async def write(self, number: int) -> None:
        clock, pause = asyncio.get_running_loop().time, PARTITIONS / RATE
        await asyncio.sleep(pause * number / PARTITIONS)
        while True:
            begun, pipeline = clock(), self.stores[number]._pipeline
            assert pipeline is not None, "the partition is closed"
            assert pipeline.ended is None
            await pipeline.committed(pipeline.append(1, size=500))
            self.waits[number] = max(self.waits.get(number, 0.0), clock() - begun)
            await asyncio.sleep(max(0.0, pause - (clock() - begun)))

    async def change(self, change: Callable[[dict[str, Role]], dict[str, Role]], seconds: float = 120) -> float:
        """Of all partitions at once; how long the slowest transaction took until all of them have opened so."""
        self.waits.clear()
        wanted = set[str]()
        for number in range(PARTITIONS):
            roles, version = await self.cluster.replica_set(number)
            after = change(dict(roles))
            wanted = set(after)
            await self.cluster.save_replica_set(number, after, version)
        async with asyncio.timeout(seconds):
            while any(set(store._session.core.meta.members) != wanted for store in self.stores if store._session):
                await asyncio.sleep(0.1)
        return max(self.waits.values())


def test_no_partition_is_silent_for_long_while_all_of_them_move() -> None:
    async def story() -> None:
        plant = Plant()
        await plant.start()
        writers = [asyncio.create_task(plant.write(number)) for number in range(PARTITIONS)]
        try:
            await asyncio.sleep(2)
            still = max(plant.waits.values())
            more = await plant.change(lambda roles: {**roles, "s3": Role.LEARNER, "s4": Role.LEARNER})
            fewer = await plant.change(lambda roles: {name: roles[name] for name in ("s2", "s3", "s4")})
            assert max(more, fewer) < still + SILENT_SECONDS, plant.log
            assert {store._session.session for store in plant.stores if store._session} <= {3, 4}, "one for each change"
        finally:
            tasks = [*writers, *(store.task for store in plant.stores)]
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            for storage in plant.storages.values():
                await storage.stop()
        assert [end for end in ends if isinstance(end, AssertionError)] == []

    run(story())
