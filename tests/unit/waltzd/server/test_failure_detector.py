"""Servers that look out for each other and elect a leader, over a coordinator that goes on believing in everybody: whose
port refuses, and what storages say, is set by the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from uuid import UUID

import pytest

from tests.unit import timeless
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, Membership, ReplicaSets, ServerMeta, StorageMeta
from waltzd.cluster.memory import MemoryCoordinator, MemoryTree
from waltzd.errors import CannotConnect
from waltzd.server import election, failure_detector
from waltzd.server.election import Election
from waltzd.server.failure_detector import FailureDetector, open_probe
from waltzd.server.registration import Registration

META = ClusterMeta(name="c", key=UUID(int=9), partitions=3, created="now")
STORAGES = [StorageMeta(name=name, listen=f"{name}:1", admin_listen=f"{name}:2", group=name) for name in "abc"]


@dataclass
class Way:
    """What anybody who connects to a server meets."""

    is_refusing: bool = False
    is_silent: bool = False
    refusals: int = 0
    """So many connections are refused still."""
    is_taken: bool = False
    """Another process listens at the address."""
    lines: list[asyncio.Event] = field(default_factory=list)

    async def ended(self) -> None:
        self.lines.append(asyncio.Event())
        await self.lines[-1].wait()

    def close(self) -> None: ...

    def cut(self, *, is_refusing: bool = False, is_silent: bool = False) -> None:
        self.is_refusing, self.is_silent = is_refusing, is_silent
        for line in self.lines:
            line.set()


class Network:
    def __init__(self) -> None:
        self.tree = MemoryTree()
        self.ways: dict[str, Way] = {}
        self.quiet = dict.fromkeys("abc", True)
        """Which storages say that streams have ended."""
        self.asked = 0
        self.coordinators: list[MemoryCoordinator] = []

    async def open_probe(self, server: ServerMeta) -> Way:
        await asyncio.sleep(0)
        way = self.ways[server.name]
        if way.is_refusing or way.refusals:
            way.refusals = max(0, way.refusals - 1)
            raise ConnectionRefusedError
        if way.is_silent:
            raise CannotConnect("silence")
        return way

    async def is_alive(self, server: ServerMeta) -> bool:
        await asyncio.sleep(0)
        return not self.ways[server.name].is_taken

    async def ask(self, storage: StorageMeta, numbers: Sequence[int]) -> Sequence[int]:
        self.asked += 1
        return numbers if self.quiet[storage.name] else ()

    @contextlib.asynccontextmanager
    async def running(self, name: str, instance: int = 1) -> AsyncIterator[FailureDetector]:
        self.ways[name] = Way()
        self.coordinators.append(self.tree.connect())
        cluster = Cluster(self.coordinators[-1])
        meta = ServerMeta(name=name, listen=f"{name}:1", admin_listen=f"{name}:2", instance=UUID(int=instance), version="1")
        looking = FailureDetector(cluster, name, open_probe=self.open_probe, ask_storage=self.ask, is_alive=self.is_alive)
        registration = Registration(cluster, meta, is_alive=never)
        await registration.announce()
        electing = Election(cluster, name, META.partitions, looking)
        async with asyncio.TaskGroup() as tasks:
            both = [tasks.create_task(work) for work in (looking.run(), electing.reconciler.run())]
            yield looking
            for task in both:
                task.cancel()


async def never(server: ServerMeta) -> bool:
    return False


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "AGAIN_SECONDS", 0.001)
    monkeypatch.setattr(failure_detector, "UNREACHABLE_SECONDS", 0.001)
    monkeypatch.setattr(election, "TURN_SECONDS", 0.001)


def run(work: Coroutine[None, None, None]) -> None:
    timeless.run(asyncio.wait_for(work, 30))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0.005)


class Trio:
    """Three servers with a partition each; "one" leads."""

    def __init__(self) -> None:
        self.network = Network()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Network]:
        replicas = ReplicaSets(partitions={number: dict.fromkeys("abc", Membership.MEMBER) for number in range(3)})
        self.cluster = await Cluster.create(self.network.tree.connect(), META, storages=STORAGES, replicas=replicas)
        async with contextlib.AsyncExitStack() as stack:
            self.looking = [
                await stack.enter_async_context(self.network.running(name, number))
                for number, name in enumerate(("one", "three", "two"), 1)
            ]
            await settle()
            assert await self.owners() == {"one", "two", "three"}
            assert await self.leader() == "one"
            yield self.network

    async def owners(self) -> set[str | None]:
        assignment, _ = await self.cluster.assignment()
        return {owner.server for owner in assignment.owners}

    async def leader(self) -> str:
        found = await self.cluster.leader()
        assert found is not None
        return found.name


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_server_that_died_is_replaced_while_the_coordinator_believes_in_it(name: str) -> None:
    async def work() -> None:
        trio = Trio()
        async with trio.running() as network:
            network.quiet["c"] = False
            network.ways[name].cut(is_refusing=True)
            await settle()
            assert name not in await trio.owners()
            assert await trio.leader() != name or name == "two"
            assert name in await trio.cluster.servers()

    run(work())


def test_a_leader_that_is_silent_keeps_its_place() -> None:
    async def work() -> None:
        trio = Trio()
        async with trio.running() as network:
            network.ways["one"].cut(is_silent=True)
            await settle()
            assert await trio.leader() == "one"
            assert await trio.owners() == {"one", "two", "three"}
            assert network.asked == 0

    run(work())


def test_a_blip_that_breaks_everything_at_once_moves_nothing() -> None:
    async def work() -> None:
        trio = Trio()
        async with trio.running() as network:
            network.ways["one"].refusals = 2  # of the two others, once each
            network.ways["one"].cut()
            await settle()
            assert network.asked > 0
            assert await trio.leader() == "one"
            assert await trio.owners() == {"one", "two", "three"}

    run(work())


def test_two_that_refuse_each_other_do_not_take_the_lead_from_each_other_for_ever() -> None:
    """Who has become the leader again after its place was taken lives."""

    async def work() -> None:
        trio = Trio()
        async with trio.running() as network:
            led: list[str] = []
            for name in ("one", "two", "three"):
                network.ways[name].cut(is_refusing=True)
            for _ in range(400):
                await asyncio.sleep(0.001)
                found = await trio.cluster.leader()
                if found is not None and led[-1:] != [found.name]:
                    led.append(found.name)
            last = led[-1]
            assert len(led) <= 2 * 3 * 3, "each of them learns of each other one once"
            await settle()
            assert await trio.leader() == last

    run(work())


def test_a_refusing_port_alone_moves_nothing() -> None:
    async def work() -> None:
        trio = Trio()
        async with trio.running() as network:
            network.quiet.update(b=False, c=False)
            network.ways["one"].cut(is_refusing=True)
            await settle()
            assert network.asked > 0
            assert await trio.leader() == "one"
            assert await trio.owners() == {"one", "two", "three"}

    run(work())


def test_who_was_suspected_wrongly_takes_part_again_and_is_left_alone_for_a_while() -> None:
    async def work() -> None:
        trio = Trio()
        async with trio.running() as network:
            network.ways["two"].cut(is_refusing=True)
            await settle()
            assert await trio.owners() == {"one", "three"}
            network.ways["two"].cut()
            await settle()
            assert await trio.owners() == {"one", "two", "three"}
            _, version = await trio.cluster.assignment()
            for _ in range(5):
                network.ways["two"].cut(is_refusing=True)
                await settle()
                network.ways["two"].cut()
                await settle()
            assert (await trio.cluster.assignment())[1] == version, "a way that comes and goes moves nothing"

    run(work())


def test_a_server_that_was_started_again_is_not_the_one_whose_port_refused() -> None:
    async def work() -> None:
        trio = Trio()
        async with trio.running() as network:
            network.ways["two"].cut(is_refusing=True)
            await settle()
            two = (await trio.cluster.servers())["two"]
            assert trio.looking[0].is_gone(two)
            assert not trio.looking[0].is_gone(replace(two, instance=UUID(int=77)))

    run(work())


def test_a_server_that_was_started_again_and_dies_is_replaced_like_any_other() -> None:
    """What is known of the process before, its long rest among others, is not said of the new one."""

    async def work() -> None:
        trio = Trio()
        async with trio.running() as network:
            network.ways["two"].cut(is_refusing=True)
            await settle()
            assert await trio.owners() == {"one", "three"}
            async with network.running("two", 22):
                await settle()
                assert await trio.owners() == {"one", "two", "three"}
                network.ways["two"].cut(is_refusing=True)
                await settle()
                assert await trio.owners() == {"one", "three"}

    run(work())


def test_a_stranger_at_the_address_of_a_dead_server_is_given_nothing() -> None:
    async def work() -> None:
        trio = Trio()
        async with trio.running() as network:
            network.ways["two"].cut(is_refusing=True)
            await settle()
            network.ways["two"].is_taken = True
            network.ways["two"].cut()
            await settle()
            assert await trio.owners() == {"one", "three"}
            network.ways["two"].is_taken = False
            await settle()
            assert await trio.owners() == {"one", "two", "three"}

    run(work())


def test_where_nobody_could_take_over_nothing_moves() -> None:
    async def work() -> None:
        trio = Trio()
        async with trio.running() as network:
            for name in ("one", "two", "three"):
                network.ways[name].cut(is_refusing=True)
            await settle()
            assert len(await trio.owners()) >= 1
            assert None not in await trio.owners()

    run(work())


def test_nobody_is_suspected_while_the_coordinator_is_away() -> None:
    async def work() -> None:
        trio = Trio()
        async with trio.running() as network:
            await settle()
            for coordinator in network.coordinators:
                coordinator.disconnect()
            network.ways["two"].cut(is_refusing=True)
            await settle()
            assert [dict(one.suspected) for one in trio.looking] == [{}, {}, {}]

    run(work())


@pytest.mark.parametrize("listen", ["waltz..example:1", f"{'a' * 64}.example:1", "nonsense"])
def test_an_address_to_which_nobody_can_connect_proves_nothing_and_ends_no_server(listen: str) -> None:
    meta = ServerMeta(name="one", listen=listen, admin_listen="one:2", instance=UUID(int=1), version="1")

    async def work() -> None:
        with pytest.raises(CannotConnect):
            await open_probe(meta)

    run(work())
