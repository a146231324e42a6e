"""Servers that come, go, sleep, lose contact and are replaced, in an order that a seed decides. When all is well again,
there is one leader, an even assignment, and every partition is open at exactly the server that it was given to.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import Any, cast
from uuid import UUID

import pytest

from tests.tiers import in_turns
from tests.unit.fake_owned_logs import OwnedLogs
from waltzd.cluster.assignment import plan, transferred
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, Preferences, ServerMeta
from waltzd.cluster.memory import MemoryTree
from waltzd.errors import CannotConnect, WaltzError
from waltzd.errors.operations import ChangedMeanwhile, NameInUse
from waltzd.server import reconcile
from waltzd.server.election import Election
from waltzd.server.ownership import PartitionOwner
from waltzd.server.registration import Registration

PARTITIONS = 7
META = ClusterMeta(name="test", key=UUID(int=7), partitions=PARTITIONS, created="2026-01-01")
NAMES = ("one", "two", "three")
STEPS = 25


class Process:
    def __init__(self, world: World, name: str, instance: int) -> None:
        self.world = world
        self.coordinator = world.tree.connect()
        self.cluster = Cluster(self.coordinator)
        self.owned_logs = OwnedLogs()
        self.meta = ServerMeta(
            name=name,
            listen=f"{name}:{instance}",
            admin_listen=f"{name}:{instance}",
            instance=UUID(int=instance),
            version="1",
            preferred=tuple(range(instance % 4)),
        )
        self.registration = Registration(self.cluster, self.meta, is_alive=self._is_alive)
        self.election = Election(self.cluster, name, PARTITIONS)
        self.owner = PartitionOwner(self.cluster, META, self.registration, make_owned_log=cast(Any, self.owned_logs))
        self.task = asyncio.create_task(self._live())

    async def _is_alive(self, meta: ServerMeta) -> bool:
        await asyncio.sleep(0)
        return any(other.meta.instance == meta.instance and other.is_alive for other in self.world.processes)

    @property
    def is_alive(self) -> bool:
        return not self.task.done()

    async def _live(self) -> None:
        await self.owner.read()
        await self.registration.announce()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.registration.reconciler.run())
            tasks.create_task(self.election.reconciler.run())
            tasks.create_task(self.owner.run())


class World:
    def __init__(self, random: Random) -> None:
        self.random = random
        self.tree = MemoryTree()
        self.outside = Cluster(self.tree.connect())
        self.processes: list[Process] = []
        self.ended: list[Process] = []
        """Gone, while the coordinator does not know it yet."""
        self.generations = [0] * PARTITIONS
        self.one_at_a_time = asyncio.Lock()

    def start(self) -> None:
        self.processes.append(Process(self, self.random.choice(NAMES), len(self.processes) + 1))

    def step(self) -> None:
        living = [process for process in self.processes if process.is_alive]
        if not living or self.random.random() < 0.3:
            self.start()
            return
        process = self.random.choice(living)
        events = ["kill", "expire", "disconnect", "reconnect", "lose", "drain", "end", "prefer", "transfer"]
        match self.random.choice(events):
            case "kill":
                process.task.cancel()
                self.ended.append(process)
            case "expire":
                process.coordinator.expire()
            case "disconnect":
                process.coordinator.disconnect()
            case "reconnect":
                process.coordinator.reconnect()
            case "lose":
                process.coordinator.lose_answer()
            case "drain":
                self.spawned = asyncio.create_task(self._drain(process, self.random.random() < 0.7))
            case "end":
                if self.ended:
                    self.ended.pop(0).coordinator.expire()
            case "prefer":
                drawn = self.random.sample(range(PARTITIONS), self.random.randint(0, PARTITIONS))
                wishes = Preferences(partitions={number: self.random.choice(NAMES) for number in drawn})
                self.spawned = asyncio.create_task(self._prefer(wishes))
            case "transfer":
                self.spawned = asyncio.create_task(self._transfer(self.random.randrange(PARTITIONS), process.meta.name))

    async def _prefer(self, wishes: Preferences) -> None:
        """Nobody else sets them, so nobody is faster."""
        async with self.one_at_a_time:
            _, version = await self.outside.preferences()
            await self.outside.save_preferences(wishes, version)

    async def _transfer(self, number: int, name: str) -> None:
        """By hand, also to a server that has gone or drains meanwhile."""
        assignment, version = await self.outside.assignment()
        preferences, _ = await self.outside.preferences()
        after = transferred(assignment, await self.outside.servers(), preferences, [number], name)
        try:
            await self.outside.save_assignment(after, version)
        except ChangedMeanwhile:
            return

    async def _drain(self, process: Process, is_draining: bool) -> None:
        try:
            await process.registration.change(is_draining=is_draining)
        except (CannotConnect, NameInUse, ChangedMeanwhile):
            return

    async def settle(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        assignment, _ = await self.outside.assignment()
        generations = [ownership.generation for ownership in assignment.owners]
        assert all(now >= was for now, was in zip(generations, self.generations, strict=True))
        self.generations = generations
        for process in self.processes:
            if process.task.done() and not process.task.cancelled():
                error = process.task.exception()
                assert error is not None
                check_end(error)

    async def heal(self) -> list[Process]:
        for process in self.processes:
            process.coordinator.reconnect()
        for _ in range(2):  # a server that finds its name taken ends only now
            for process in self.processes:
                if not process.is_alive:
                    await process.coordinator.close()
            await self.settle(2000)
        living = [process for process in self.processes if process.is_alive]
        for process in [*living, *living]:  # once more, because an answer may still be lost
            await self._drain(process, False)
        await self.settle(2000)
        return living


def check_end(error: BaseException) -> None:
    """A process ends by itself only because of its name, or because it could not start."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            check_end(part)
        return
    assert isinstance(error, NameInUse | CannotConnect), repr(error)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "AGAIN_SECONDS", 0)


async def live_and_look(seed: int) -> None:
    random = Random(seed)
    world = World(random)
    await Cluster.create(world.outside.coordinator, META)
    world.start()
    for _ in range(STEPS):
        world.step()
        await world.settle(random.choice([0, 1, 5, 20, 200]))
    living = await world.heal()

    names = [process.meta.name for process in living]
    assert len(names) == len(set(names)), "a name belongs to one process"
    assert await world.outside.servers() == {process.meta.name: process.registration.server for process in living}
    assignment, _ = await world.outside.assignment()
    preferences, _ = await world.outside.preferences()
    assert plan(assignment, await world.outside.servers(), PARTITIONS, preferences) == assignment
    if living:
        assert sum(process.election.is_leader for process in living) == 1
        counts = Counter(ownership.server for ownership in assignment.owners)
        assert set(counts) == set(names)
        assert max(counts.values()) - min(counts.values()) <= 1
    for process in living:
        due = {
            partition: ownership.generation
            for partition, ownership in enumerate(assignment.owners)
            if ownership.server == process.meta.name
        }
        assert {owned.partition: owned.generation for owned in process.owned_logs.running} == due
        assert process.owner.owned == sorted(due)
        watches = (
            process.owner.reconciler,
            process.owner.servers_reconciler,
            process.election.reconciler,
            process.registration.reconciler,
        )
        assert [each.trouble for each in watches] == [""] * 4
    for process in world.processes:
        process.task.cancel()
    for ended in await asyncio.gather(*(process.task for process in world.processes), return_exceptions=True):
        assert isinstance(ended, asyncio.CancelledError | WaltzError | BaseExceptionGroup)


@pytest.mark.parametrize("seed", in_turns(range(60), of=3))
def test_all_is_well_when_all_is_over(seed: int) -> None:
    asyncio.run(asyncio.wait_for(live_and_look(seed), 60))
