"""The partitions of a server: what is started, handed over and refused while the assignment changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any, cast
from uuid import UUID

import pytest

from tests.unit import timeless
from tests.unit.fake_owned_logs import OwnedLogs
from waltzd.cluster.cluster import ASSIGNMENT, CLIENT_IDS, IDS, ROOT, Cluster
from waltzd.cluster.coordinator import Create, Set
from waltzd.cluster.documents import Assignment, ClusterMeta, Ownership, ServerMeta, Unfinished
from waltzd.cluster.memory import MemoryTree
from waltzd.errors import CannotConnect, NoSuchPartition, NotReady
from waltzd.errors.operations import MetadataUnfinished, NotOwner
from waltzd.protocol.batches import PartitionLocation
from waltzd.protocol.document import encode
from waltzd.server import reconcile
from waltzd.server.ownership import PartitionOwner
from waltzd.server.registration import Registration

META = ClusterMeta(name="test", key=UUID(int=7), partitions=4, created="2026-01-01")


def server(name: str, *, is_draining: bool = False) -> ServerMeta:
    return ServerMeta(
        name=name,
        listen=f"{name}:1",
        admin_listen=f"{name}:2",
        instance=UUID(int=len(name)),
        version="1",
        is_draining=is_draining,
    )


async def nobody_answers(meta: ServerMeta) -> bool:
    return False


class World:
    """A cluster in memory in which the test is the leader, and one server that follows."""

    def __init__(self) -> None:
        self.tree = MemoryTree()
        self.outside = self.tree.connect()
        self.coordinator = self.tree.connect()
        self.owned_logs = OwnedLogs()
        cluster = Cluster(self.coordinator, clock=lambda: 0.0)
        self.registration = Registration(cluster, server("one"), is_alive=nobody_answers)
        self.owner: Any = PartitionOwner(
            cluster, META, self.registration, make_owned_log=cast(Any, self.owned_logs), close_seconds=0.05
        )
        self.cluster = Cluster(self.outside)

    async def assign(self, *owners: tuple[str | None, int]) -> None:
        _, version = await self.cluster.assignment()
        await self.cluster.save_assignment(Assignment(owners=tuple(Ownership(*owner) for owner in owners)), version)
        await settle()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        await Cluster.create(self.outside, META)
        await self.owner.read()
        await self.registration.announce()
        async with asyncio.TaskGroup() as tasks:
            following = [tasks.create_task(self.registration.reconciler.run()), tasks.create_task(self.owner.run())]
            await settle()
            yield self
            for task in following:
                task.cancel()
        await settle()
        assert [owned.name for owned in self.owned_logs.running if not owned.task.done()] == [], "no log outlives its owner"


async def settle() -> None:
    for _ in range(300):
        await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, None]) -> None:
    """On a clock that stands still while anybody has something to do: no patience ends in the middle of a step."""
    timeless.run(asyncio.wait_for(work, 30))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "AGAIN_SECONDS", 0)


NOBODY = (None, 0)

# -- following ---------------------------------------------------------------------------------------------------------


def test_owned_logs_follow_the_assignment() -> None:
    async def work() -> None:
        async with World().running() as world:
            assert world.owner.owned == []
            await world.assign(("one", 1), ("one", 1), ("two", 1), NOBODY)
            assert world.owned_logs.take() == ["start 0 in 1", "start 1 in 1"]
            await world.assign(("one", 1), ("two", 2), ("one", 2), NOBODY)
            assert world.owned_logs.take() == ["hand over 1 in 1", "start 2 in 2"]
            assert world.owner.owned == [0, 2]
            assert [found.partition for found in world.owner.describe()] == [0, 2]
            await world.assign(("one", 3), ("two", 2), ("one", 2), NOBODY)
            assert world.owned_logs.take() == ["hand over 0 in 1", "start 0 in 3"]
            await world.owner.close()
            assert world.owned_logs.take() == ["hand over 0 in 3", "hand over 2 in 2"]
            assert world.owner.owned == []

    run(work())


def test_the_next_owner_knows_whether_the_last_one_is_there_to_hand_over() -> None:
    async def work() -> None:
        world = World()
        await Cluster.create(world.outside, META)
        await world.assign(("two", 1), ("gone", 1), NOBODY, ("one", 1))
        await world.cluster.register_server(server("two"))
        async with _running_in(world):
            assert world.owned_logs.find(3).previous_owner_alive() is False, "our own, from before a restart"
            await world.assign(("one", 2), ("one", 2), ("one", 1), ("one", 1))
            alive = {owned.partition: owned.previous_owner_alive() for owned in world.owned_logs.running}
            assert alive == {0: True, 1: False, 2: False, 3: False}

    run(work())


@contextlib.asynccontextmanager
async def _running_in(world: World) -> AsyncIterator[None]:
    await world.owner.read()
    await world.registration.announce()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(world.owner.run())
        await settle()
        yield
        following.cancel()


def test_one_that_does_not_close_holds_up_no_other_and_is_closed_at_once() -> None:
    async def work() -> None:
        async with World().running() as world:
            await world.assign(("one", 1), ("one", 1), NOBODY, NOBODY)
            world.owned_logs.take()
            world.owned_logs.stuck = {0}
            await world.assign(("one", 3), ("two", 2), ("one", 1), NOBODY)
            assert world.owned_logs.take() == ["hand over 1 in 1", "start 2 in 1"]
            await asyncio.sleep(0.2)
            await settle()
            assert world.owned_logs.take() == ["close 0 in 1", "start 0 in 3"]

    run(work())


def test_away_and_back_before_the_close_was_done() -> None:
    """The generation that was skipped is never opened, and there are never two logs."""

    async def work() -> None:
        async with World().running() as world:
            await world.assign(("one", 1), NOBODY, NOBODY, NOBODY)
            world.owned_logs.stuck = {0}
            await world.assign(("two", 2), NOBODY, NOBODY, NOBODY)
            await world.assign(("one", 3), NOBODY, NOBODY, NOBODY)
            await world.assign(("two", 4), NOBODY, NOBODY, NOBODY)
            await world.assign(("one", 5), NOBODY, NOBODY, NOBODY)
            world.owned_logs.stuck.clear()
            await asyncio.sleep(0.2)
            await settle()
            assert world.owned_logs.told == ["start 0 in 1", "close 0 in 1", "start 0 in 5"]

    run(work())


@pytest.mark.parametrize("fault", [ValueError("a mistake"), None])
def test_a_store_that_ends_by_itself_ends_the_host(fault: Exception | None) -> None:
    async def work() -> None:
        world = World()
        await Cluster.create(world.outside, META)
        await world.assign(("one", 1), ("one", 1), NOBODY, NOBODY)
        running = asyncio.create_task(world.owner.run())
        await settle()
        world.owned_logs.find(1).fail(fault)
        with pytest.raises(ExceptionGroup) as caught:
            await running
        assert [type(error) for error in caught.value.exceptions] == [ValueError if fault else AssertionError]
        await settle()
        assert all(owned.task.done() for owned in world.owned_logs.running)
        await world.owner.close()  # does not wait for what is gone
        assert world.owner.owned == []

    run(work())


# -- without the coordinator -------------------------------------------------------------------------------------------


def test_without_the_coordinator_it_goes_on_and_begins_nothing_new() -> None:
    async def work() -> None:
        async with World().running() as world:
            await world.assign(("one", 1), NOBODY, NOBODY, NOBODY)
            world.coordinator.disconnect()
            assert world.owner.is_degraded
            await world.assign(("one", 1), ("one", 1), NOBODY, NOBODY)
            assert world.owner.pipeline(0, 1) == "pipeline 0 in 1"
            assert world.owner.owned == [0]
            with pytest.raises(CannotConnect, match="client ids come from the coordinator"):
                await world.owner.register()
            world.coordinator.reconnect()
            await settle()
            assert not world.owner.is_degraded
            assert world.owner.owned == [0, 1]
            assert await world.owner.register() == 1
            assert await world.owner.register() == 2

    run(work())


def test_a_lost_coordinator_session_does_not_touch_what_is_still_ours() -> None:
    async def work() -> None:
        async with World().running() as world:
            await world.assign(("one", 1), ("one", 1), NOBODY, NOBODY)
            world.owned_logs.take()
            world.coordinator.disconnect()
            world.coordinator.expire()
            await world.assign(("one", 1), ("two", 2), NOBODY, NOBODY)
            assert world.owned_logs.take() == []
            world.coordinator.reconnect()
            await settle()
            assert world.owned_logs.take() == ["hand over 1 in 1"]
            assert await world.cluster.servers() == {"one": server("one")}

    run(work())


def test_documents_that_cannot_be_understood_change_nothing() -> None:
    async def work() -> None:
        async with World().running() as world:
            await world.assign(("one", 1), NOBODY, NOBODY, NOBODY)
            world.owned_logs.take()
            found = await world.outside.get(ASSIGNMENT)
            assert found is not None
            await world.outside.commit([Set(ASSIGNMENT, b"[]", found.version)])
            await settle()
            assert world.owner.reconciler.trouble.startswith(ASSIGNMENT)
            assert world.owner.pipeline(0, 1) == "pipeline 0 in 1"
            assert world.owned_logs.take() == []

    run(work())


# -- who asks ----------------------------------------------------------------------------------------------------------


def test_only_what_is_ours_is_given_out() -> None:
    async def work() -> None:
        async with World().running() as world:
            await world.cluster.register_server(server("two"))
            await world.assign(("one", 5), ("two", 3), ("gone", 2), NOBODY)
            host = world.owner
            assert host.pipeline(0, 5) == host.pipeline(0, None) == "pipeline 0 in 5"
            refused = [
                (0, 4, {"partition": "0", "generation": "5", "owner": "one", "address": "one:1"}),
                (0, 6, {"partition": "0"}),
                (1, None, {"partition": "1", "generation": "3", "owner": "two", "address": "two:1"}),
                (2, 2, {"partition": "2", "generation": "2", "owner": "gone"}),
                (3, None, {"partition": "3", "generation": "0"}),
            ]
            for partition, generation, facts in refused:
                with pytest.raises(NotOwner) as caught:
                    host.pipeline(partition, generation)
                assert caught.value.facts == facts
            for outside in (-1, 4):
                with pytest.raises(NoSuchPartition):
                    host.pipeline(outside, None)

    run(work())


def test_what_is_not_open_yet_says_so() -> None:
    async def work() -> None:
        world = World()
        with pytest.raises(NotReady, match="has just started"):
            world.owner.pipeline(0, None)
        with pytest.raises(NotReady, match="has just started"):
            world.owner.topology()
        await Cluster.create(world.outside, META)
        await world.assign(("one", 1), NOBODY, NOBODY, NOBODY)
        await world.owner.read()
        with pytest.raises(NotReady, match="partition 0 is being taken over"):
            world.owner.pipeline(0, 1)
        async with _running_in(world):
            world.owned_logs.find(0).is_open = False
            with pytest.raises(NotReady, match="recovering"):
                world.owner.pipeline(0, 1)
            world.owned_logs.stuck = {0}
            await world.assign(("one", 3), NOBODY, NOBODY, NOBODY)
            assert [found.generation for found in world.owner.describe()] == [1], "what is being closed is still shown"
            with pytest.raises(NotReady, match="being taken over"):
                world.owner.pipeline(0, 3)
            await world.assign(("two", 4), NOBODY, NOBODY, NOBODY)
            with pytest.raises(NotOwner, match="belongs to server two"):
                world.owner.pipeline(0, 3)

    run(work())


def test_everybody_is_told_where_the_partitions_are() -> None:
    async def work() -> None:
        async with World().running() as world:
            await world.cluster.register_server(server("two"))
            await world.assign(("one", 5), ("two", 3), ("gone", 2), NOBODY)
            found = world.owner.topology()
            assert (found.cluster, found.cluster_key) == ("test", META.key)
            assert found.places == (
                PartitionLocation(generation=5, server="one", address="one:1"),
                PartitionLocation(generation=3, server="two", address="two:1"),
                PartitionLocation(generation=2, server="gone", address=None),
                PartitionLocation(generation=0, server=None, address=None),
            )
            assert [server.address for server in found.servers] == ["one:1", "two:1"]

    run(work())


# -- leaving -----------------------------------------------------------------------------------------------------------


def test_draining_waits_until_others_have_everything() -> None:
    async def work() -> None:
        async with World().running() as world:
            await world.cluster.register_server(server("two"))
            await world.assign(("one", 1), ("one", 1), NOBODY, NOBODY)
            draining = asyncio.create_task(world.owner.drain(3600))
            await settle()
            assert (await world.cluster.servers())["one"].is_draining
            assert world.owner.pipeline(0, 1) == "pipeline 0 in 1", "it serves until it is relieved"
            await world.assign(("two", 2), ("one", 1), NOBODY, NOBODY)
            assert not draining.done()
            await world.assign(("two", 2), ("two", 2), NOBODY, NOBODY)
            assert await draining is True
            assert world.owner.owned == []

    run(work())


def test_draining_does_not_wait_for_nobody() -> None:
    async def work() -> None:
        async with World().running() as world:
            await world.cluster.register_server(server("two", is_draining=True))
            await world.assign(("one", 1), NOBODY, NOBODY, NOBODY)
            assert await world.owner.drain(3600) is False
            assert world.owner.pipeline(0, 1) == "pipeline 0 in 1"

    run(work())


def test_draining_does_not_wait_for_ever() -> None:
    async def work() -> None:
        async with World().running() as world:
            await world.cluster.register_server(server("two"))
            await world.assign(("one", 1), NOBODY, NOBODY, NOBODY)
            assert await world.owner.drain(0.05) is False

    run(work())


def test_nothing_is_begun_while_it_closes() -> None:
    async def work() -> None:
        async with World().running() as world:
            await world.assign(("one", 1), NOBODY, NOBODY, NOBODY)
            world.owned_logs.take()
            world.owned_logs.stuck = {0}
            closing = asyncio.create_task(world.owner.close())
            await world.assign(("one", 1), ("one", 1), NOBODY, NOBODY)
            with pytest.raises(NotOwner, match="is closing partition 0"):
                world.owner.pipeline(0, 1)
            await closing
            assert world.owned_logs.take() == ["close 0 in 1"]

    run(work())


def test_a_change_of_others_is_no_concern_of_ours() -> None:
    async def work() -> None:
        async with World().running() as world:
            await world.assign(("one", 1), ("two", 1), NOBODY, NOBODY)
            owned = world.owned_logs.find(0)
            await world.assign(("one", 1), ("three", 2), ("two", 1), NOBODY)
            await world.cluster.register_server(server("three"))
            await world.registration.change(preferred=(3,))
            await settle()
            assert world.owned_logs.running == [owned]
            assert (await world.cluster.servers())["one"] == replace(server("one"), preferred=(3,))

    run(work())


def test_a_coordinator_that_lost_everything_changes_nothing_and_is_joined_again() -> None:
    """The empty one ends the session: what it does not have was taken away by nobody."""

    def wipe(world: World) -> None:
        world.tree._entries = {}
        world.coordinator.expire()

    async def work() -> None:
        async with World().running() as world:
            await world.assign(("one", 1), NOBODY, NOBODY, NOBODY)
            before = world.owner.topology()
            assert before.places[0].address == "one:1"
            wipe(world)
            await settle()
            assert world.owner.topology() == before, "clients still find the owner"
            assert world.tree.find(CLIENT_IDS) is None

            mark = Unfinished(key=META.key, unfinished="waltzctl cluster load-metadata", began="2026-01-01")
            await world.outside.commit([Create(ROOT, encode(mark)), Create(IDS, b"")])
            with pytest.raises(MetadataUnfinished):
                await Cluster(world.coordinator).read_counter()
            assert world.tree.find(CLIENT_IDS) is None, "the command that puts them back writes this one as well"

            world.tree._entries = {}
            world.coordinator.expire()
            await settle()
            await Cluster.create(world.outside, META)
            await settle()
            assert list(await world.cluster.servers()) == ["one"]

    run(work())
