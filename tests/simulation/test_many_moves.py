"""Many partitions get other replicas at once: how long each of them is silent, on a clock that moves only when all wait.

Each storage has the threads of a real one and a disk that needs a while for every flush, one after the other. So what is
counted is how much stands in the way of a transaction, on this machine as on any other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulation.cell import KEY, Appender, SimPort, SimStorage, story
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, Membership, ReplicaSets
from waltzd.cluster.memory import MemoryTree
from waltzd.disk.simulated import SimDisk
from waltzd.server.session.change_signal import PeriodicTimer
from waltzd.server.session.owned import OwnedLog
from waltzd.server.session.settings import RenewalTurns, SessionSettings

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
        self.owned_logs: list[OwnedLog[Appender]] = []
        self.log: list[str] = []
        self.waits: dict[int, float] = {}
        """The longest that a transaction of each partition has waited since it was looked at last."""

    async def start(self) -> None:
        for number, (name, storage) in enumerate(self.storages.items()):
            await storage.start(create=number < 3)
            assert storage.calls is not None
            disk = self.disks[name] = SlowDisk(storage.disk)
            calls: Any = storage.calls
            calls._run_writing = disk.run
            for queue in calls._queues.values():
                queue._run_blocking = disk.run
        await Cluster.create(
            self.cluster.coordinator,
            ClusterMeta(name="test", key=KEY, partitions=PARTITIONS, created="2026-01-01T00:00:00Z"),
            storages=[storage.meta for storage in self.storages.values()],
            replicas=ReplicaSets(
                partitions={n: dict.fromkeys(("s0", "s1", "s2"), Membership.MEMBER) for n in range(PARTITIONS)}
            ),
        )
        settings = SessionSettings(partitions=PARTITIONS, key=KEY)
        servers = [
            (Cluster(self.tree.connect()), replace(settings, turns=RenewalTurns()), PeriodicTimer(1.0))
            for _ in range(SERVERS)
        ]
        for number in range(PARTITIONS):
            cluster, mine, timer = servers[number % SERVERS]
            owned: OwnedLog[Appender] = OwnedLog(
                number, 1, cluster=cluster, connect=lambda meta: SimPort(self.storages[meta.name]), settings=mine,
                timer=timer, make_pipeline=Appender, say=self.log.append,
            )  # fmt: skip
            self.owned_logs.append(owned)
            await owned.start()
        while not all(owned._pipeline for owned in self.owned_logs):
            await asyncio.sleep(0.1)
        self.tree.pause = lambda: asyncio.sleep(COORDINATOR_SECONDS)

    async def write(self, number: int) -> None:
        clock, pause = asyncio.get_running_loop().time, PARTITIONS / RATE
        await asyncio.sleep(pause * number / PARTITIONS)
        while True:
            begun, pipeline = clock(), self.owned_logs[number]._pipeline
            assert pipeline is not None, "the partition is closed"
            assert pipeline.ended is None
            await pipeline.committed(pipeline.append(1, size=500))
            self.waits[number] = max(self.waits.get(number, 0.0), clock() - begun)
            await asyncio.sleep(max(0.0, pause - (clock() - begun)))

    async def change(self, change: Callable[[dict[str, Membership]], dict[str, Membership]], seconds: float = 120) -> float:
        """Of all partitions at once; how long the slowest transaction took until all of them have opened so."""
        self.waits.clear()
        wanted = set[str]()
        for number in range(PARTITIONS):
            roles, version = await self.cluster.replica_set(number)
            after = change(dict(roles))
            wanted = set(after)
            await self.cluster.save_replica_set(number, after, version)
        async with asyncio.timeout(seconds):
            while any(set(owned._session.log.core.meta.members) != wanted for owned in self.owned_logs if owned._session):
                await asyncio.sleep(0.1)
        return max(self.waits.values())


@story
async def test_no_partition_is_silent_for_long_while_all_of_them_move() -> None:
    plant = Plant()
    await plant.start()
    writers = [asyncio.create_task(plant.write(number)) for number in range(PARTITIONS)]
    try:
        await asyncio.sleep(2)
        still = max(plant.waits.values())
        more = await plant.change(lambda roles: {**roles, "s3": Membership.LEARNER, "s4": Membership.LEARNER})
        fewer = await plant.change(lambda roles: {name: roles[name] for name in ("s2", "s3", "s4")})
        assert max(more, fewer) < still + SILENT_SECONDS, plant.log
        sessions = {owned._session.log.session for owned in plant.owned_logs if owned._session}
        assert sessions <= {3, 4}, "one for each change"
    finally:
        tasks = [*writers, *(owned.task for owned in plant.owned_logs)]
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for storage in plant.storages.values():
            await storage.stop()
    assert [end for end in ends if isinstance(end, AssertionError)] == []
