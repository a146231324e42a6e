"""Being in the list of servers under a name of one's own, and deciding who owns what."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from waltzd.cluster.assignment import NO_PREFERENCES, transferred
from waltzd.cluster.cluster import ASSIGNMENT, NO_VERSION, PREFERRED, SERVERS, Cluster
from waltzd.cluster.coordinator import Delete, Set
from waltzd.cluster.documents import Assignment, ClusterMeta, Ownership, Preferences, ServerMeta
from waltzd.cluster.memory import MemoryCoordinator, MemoryTree
from waltzd.errors import CannotConnect
from waltzd.errors.operations import BadMetadata, ChangedMeanwhile, NameInUse, NodeMissing
from waltzd.server import reconcile
from waltzd.server.election import Election
from waltzd.server.registration import Registration

META = ClusterMeta(name="test", key=UUID(int=7), partitions=4, created="2026-01-01")


def server(name: str, instance: int = 1, *, preferred: tuple[int, ...] = ()) -> ServerMeta:
    return ServerMeta(
        name=name,
        listen=f"{name}:1",
        admin_listen=f"{name}:2",
        instance=UUID(int=instance),
        version="1",
        preferred=preferred,
    )


class Process:
    """One server process: a coordinator session with registration and election, and whether it answers when it is asked."""

    living: dict[UUID, None]
    """The processes that answer, by instance; of one test."""

    def __init__(self, tree: MemoryTree, living: dict[UUID, None], name: str, instance: int = 1) -> None:
        self.living = living
        self.coordinator = tree.connect()
        self.cluster = Cluster(self.coordinator)
        self.meta = server(name, instance)
        living[self.meta.instance] = None
        self.registration = Registration(self.cluster, self.meta, is_alive=self._is_alive)
        self.election = Election(self.cluster, name, META.partitions)

    async def _is_alive(self, meta: ServerMeta) -> bool:
        await asyncio.sleep(0)
        return meta.instance in self.living

    def die(self) -> None:
        """As after kill -9: the coordinator has not noticed yet."""
        del self.living[self.meta.instance]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Process]:
        await self.registration.announce()
        async with asyncio.TaskGroup() as tasks:
            both = [
                tasks.create_task(self.registration.reconciler.run()),
                tasks.create_task(self.election.reconciler.run()),
            ]
            yield self
            for task in both:
                task.cancel()


async def new_tree() -> tuple[MemoryTree, Cluster]:
    tree = MemoryTree()
    return tree, await Cluster.create(tree.connect(), META)


async def settle() -> None:
    """Let everybody do what there is to do."""
    for _ in range(300):
        await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "AGAIN_SECONDS", 0)


async def owners(cluster: Cluster) -> list[str | None]:
    assignment, _ = await cluster.assignment()
    return [ownership.server for ownership in assignment.owners]


# -- the list of servers -----------------------------------------------------------------------------------------------


def test_a_server_is_in_the_list_as_it_is() -> None:
    async def work() -> None:
        tree, cluster = await new_tree()
        one = Process(tree, {}, "one")
        async with one.running():
            await settle()
            assert await cluster.servers() == {"one": one.meta}
            await one.registration.change(is_draining=True, preferred=(1, 2))
            assert await cluster.servers() == {"one": replace(one.meta, is_draining=True, preferred=(1, 2))}

    run(work())


def test_it_announces_itself_again_when_the_coordinator_gave_it_up() -> None:
    async def work() -> None:
        tree, cluster = await new_tree()
        one = Process(tree, {}, "one")
        async with one.running():
            await one.registration.change(is_draining=True)
            one.coordinator.disconnect()
            one.coordinator.expire()
            assert await cluster.servers() == {}
            await settle()
            assert await cluster.servers() == {}
            one.coordinator.reconnect()
            await settle()
            assert await cluster.servers() == {"one": replace(one.meta, is_draining=True)}
            registered = await one.cluster.server("one")
            assert registered is not None
            assert registered.is_mine

    run(work())


def test_it_announces_itself_again_when_somebody_deleted_it() -> None:
    async def work() -> None:
        tree, cluster = await new_tree()
        one = Process(tree, {}, "one")
        async with one.running():
            await settle()
            await cluster.coordinator.commit([Delete(f"{SERVERS}/one", 0)])
            await settle()
            assert await cluster.servers() == {"one": one.meta}

    run(work())


def test_a_name_that_a_living_process_has_is_refused() -> None:
    async def work() -> None:
        tree, cluster = await new_tree()
        living: dict[UUID, None] = {}
        first, second = Process(tree, living, "one", 1), Process(tree, living, "one", 2)
        await first.registration.announce()
        with pytest.raises(NameInUse, match=r"another server named one is running; .* one:2"):
            await second.registration.announce()
        assert await cluster.servers() == {"one": first.meta}

    run(work())


def test_a_restarted_server_takes_the_place_of_what_it_left_behind_at_once() -> None:
    async def work() -> None:
        tree, cluster = await new_tree()
        living: dict[UUID, None] = {}
        first = Process(tree, living, "one", 1)
        await first.registration.announce()
        first.die()
        second = Process(tree, living, "one", 2)
        await second.registration.announce()
        registered = await second.cluster.server("one")
        assert registered is not None
        assert (registered.meta, registered.is_mine) == (second.meta, True)
        await first.coordinator.close()  # the old session ends only now, and takes nothing with it
        assert await cluster.servers() == {"one": second.meta}

    run(work())


async def taken_for_dead() -> tuple[Cluster, dict[UUID, None], Process, Process]:
    """Return a process that was stopped for a while and is awake again, and the one of its name that has its place."""
    tree, cluster = await new_tree()
    living: dict[UUID, None] = {}
    first = Process(tree, living, "one", 1)
    await first.registration.announce()
    first.die()
    second = Process(tree, living, "one", 2)
    await second.registration.announce()
    living[first.meta.instance] = None
    return cluster, living, first, second


def test_who_was_taken_for_dead_ends_when_it_wakes_up() -> None:
    """A process that was stopped for a while finds another one of its name in its place."""

    async def work() -> None:
        _, _, first, _ = await taken_for_dead()
        with pytest.raises(NameInUse):
            await first.registration.reconciler.run()

    run(work())


def test_who_was_taken_for_dead_takes_its_place_from_no_process_that_is_slow() -> None:
    async def work() -> None:
        cluster, living, first, second = await taken_for_dead()
        del living[second.meta.instance]  # it has much to do
        with pytest.raises(NameInUse, match="another server named one took the place of this one"):
            await first.registration.announce()
        assert await cluster.servers() == {"one": second.meta}

    run(work())


def test_an_own_registration_of_a_lost_coordinator_session_needs_no_question() -> None:
    async def work() -> None:
        tree, cluster = await new_tree()
        one = Process(tree, {}, "one")
        await one.registration.announce()
        renewed = Cluster(tree.connect())
        await Registration(renewed, one.meta, is_alive=one._is_alive).announce()
        assert await cluster.servers() == {"one": one.meta}
        registered = await renewed.server("one")
        assert registered is not None
        assert registered.is_mine, "it does not go when the lost session ends"

    run(work())


def test_two_starts_at_once_leave_one() -> None:
    async def work() -> None:
        tree, cluster = await new_tree()
        living: dict[UUID, None] = {}
        both = [Process(tree, living, "one", instance) for instance in (1, 2)]
        outcomes = await asyncio.gather(*(one.registration.announce() for one in both), return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NameInUse", "NoneType"]
        assert len(await cluster.servers()) == 1

    run(work())


def test_a_change_whose_answer_was_lost_is_taken_back() -> None:
    async def work() -> None:
        tree, cluster = await new_tree()
        one = Process(tree, {}, "one")
        async with one.running():
            await settle()
            one.coordinator.lose_answer()
            with pytest.raises(CannotConnect):
                await one.registration.change(is_draining=True)
            assert one.registration.server == one.meta
            await settle()
            assert await cluster.servers() == {"one": one.meta}

    run(work())


def test_a_cluster_that_is_not_there_is_an_error_and_no_loop() -> None:
    async def work() -> None:
        one = Process(MemoryTree(), {}, "one")
        with pytest.raises(NodeMissing):
            await one.registration.announce()

    run(work())


# -- the election ------------------------------------------------------------------------------------------------------


def leading(*processes: Process) -> list[str]:
    return [process.meta.name for process in processes if process.election.is_leader]


def test_one_leads_and_shares_out_and_another_follows_when_it_goes(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        tree, cluster = await new_tree()
        living: dict[UUID, None] = {}
        one, two = Process(tree, living, "one", 1), Process(tree, living, "two", 2)
        async with two.running():
            async with one.running():
                await settle()
                assert len(leading(one, two)) == 1
                assert sorted(str(owner) for owner in await owners(cluster)) == ["one", "one", "two", "two"]
            one.die()
            await one.coordinator.close()
            await settle()
            assert leading(one, two) == ["two"]
            assert await owners(cluster) == ["two"] * 4

    with caplog.at_level(logging.INFO, "waltz.server"):
        run(work())
    assert "server two is the leader and assigns the partitions" in caplog.text
    assert "from one to two" in caplog.text


def test_every_step_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        tree, _ = await new_tree()
        living: dict[UUID, None] = {}
        one = Process(tree, living, "one", 1)
        async with one.running():
            await settle()
            two = Process(tree, living, "two", 2)
            async with two.running():
                await settle()
                await two.registration.change(preferred=(0, 1))
                await settle()
                await two.registration.change(is_draining=True)
                await settle()
            await two.coordinator.close()
            await settle()

    with caplog.at_level(logging.INFO, "waltz.server"):
        run(work())
    told = [text for record in caplog.records if ": " in (text := record.getMessage())]
    assert told == [
        "servers that are up: one: moved partitions 0-3 to one",
        "server two came: moved partitions 2-3 from one to two",
        "server two prefers other partitions: moved partitions 0-1 from one to two; 2-3 from two to one",
        "server two gives its partitions away: moved partitions 0-1 from two to one",
        "server two went: every partition stays where it is",
    ]


def test_what_operators_prefer_is_done_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        tree, cluster = await new_tree()
        living: dict[UUID, None] = {}
        one, two = Process(tree, living, "one", 1), Process(tree, living, "two", 2)
        async with one.running():
            await one.registration.change(preferred=(0, 1))
            await settle()
            async with two.running():
                await settle()
                assert await owners(cluster) == ["one", "one", "two", "two"]
                await cluster.save_preferences(Preferences(partitions={0: "two", 9: "one"}), NO_VERSION)
                await settle()
                assert (await owners(cluster))[:2] == ["two", "one"], "it goes before what a server prefers by itself"
                await two.registration.change(is_draining=True)
                await settle()
                assert await owners(cluster) == ["one"] * 4
                await two.registration.change(is_draining=False)
                await settle()
                assert (await owners(cluster))[:2] == ["two", "one"], "it lasts"
                await cluster.save_preferences(Preferences(partitions={}), 0)
                await settle()
                assert (await owners(cluster))[:2] == ["one", "one"]

    with caplog.at_level(logging.INFO, "waltz.server"):
        run(work())
    told = [text for record in caplog.records if (text := record.getMessage()).startswith("operators")]
    assert len(told) == 2
    assert told[0].startswith("operators prefer other owners: moved partitions 0 from one to two"), told


def test_a_transfer_by_hand_lasts() -> None:
    async def work() -> None:
        tree, cluster = await new_tree()
        living: dict[UUID, None] = {}
        one, two = Process(tree, living, "one", 1), Process(tree, living, "two", 2)
        async with one.running(), two.running():
            await settle()
            assignment, version = await cluster.assignment()
            moving = [number for number, owner in enumerate(assignment.owners) if owner.server == "one"][:1]
            after = transferred(assignment, await cluster.servers(), NO_PREFERENCES, moving, "two")
            assert after.owners[moving[0]].server == "two"
            await cluster.save_assignment(after, version)
            await settle()
            assert await cluster.assignment() == (after, version + 1), "the leader leaves it alone"

    run(work())


def test_wishes_that_cannot_be_understood_hold_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    """Above all not the partitions of a server that went."""

    async def work() -> None:
        tree, cluster = await new_tree()
        living: dict[UUID, None] = {}
        one, two = Process(tree, living, "one", 1), Process(tree, living, "two", 2)
        async with one.running():
            await settle()
            async with two.running():
                await cluster.save_preferences(Preferences(partitions={0: "two"}), NO_VERSION)
                await settle()
                await cluster.coordinator.commit([Set(PREFERRED, b"{", 0)])
                await settle()
                assert (await owners(cluster))[0] == "two", "what was preferred before goes on to count"
                assert one.election.reconciler.trouble == ""
            await two.coordinator.close()
            await settle()
            assert await owners(cluster) == ["one"] * 4

    with caplog.at_level(logging.WARNING, "waltz.server"):
        run(work())
    assert "/preferred is not a JSON document" in caplog.text


def test_a_leader_that_lost_contact_knows_that_it_may_be_none() -> None:
    async def work() -> None:
        tree, cluster = await new_tree()
        living: dict[UUID, None] = {}
        one, two = Process(tree, living, "one", 1), Process(tree, living, "two", 2)
        async with one.running():
            await settle()
            async with two.running():
                await settle()
                assert leading(one, two) == ["one"]
                one.coordinator.disconnect()
                assert leading(one, two) == []
                one.coordinator.expire()
                await settle()
                assert leading(one, two) == ["two"]
                assert await owners(cluster) == ["two"] * 4
                one.coordinator.reconnect()
                await settle()
                assert leading(one, two) == ["two"]
                assert sorted(str(owner) for owner in await owners(cluster)) == ["one", "one", "two", "two"]

    run(work())


def test_a_leader_that_was_started_again_leads_at_once() -> None:
    async def work() -> None:
        tree, cluster = await new_tree()
        living: dict[UUID, None] = {}
        first = Process(tree, living, "one", 1)
        async with first.running():
            await settle()
        first.die()
        second = Process(tree, living, "one", 2)
        async with second.running():
            await settle()
            assert leading(second) == ["one"]
            assignment, version = await cluster.assignment()
            assert assignment == Assignment(owners=(Ownership("one", 1),) * 4), "what it owned, it owns"
            assert version == 1

    run(work())


class Rival(MemoryCoordinator):
    """Whenever the assignment is about to be saved, somebody else saves it before, for a number of times."""

    times = 0

    async def commit(self, changes: Any) -> None:
        if self.times and any(isinstance(change, Set) and change.path == ASSIGNMENT for change in changes):
            self.times -= 1
            found = await self.get(ASSIGNMENT)
            assert found is not None
            await super().commit([Set(ASSIGNMENT, found.data, found.version)])
        await super().commit(changes)


def test_who_was_too_late_reads_again() -> None:
    async def work() -> None:
        tree, cluster = await new_tree()
        one = Process(tree, {}, "one")
        rival = Rival(tree)
        tree._connected.append(rival)
        rival.times = 3
        await one.registration.announce()
        election = Election(Cluster(rival), "one", META.partitions)
        running = asyncio.create_task(election.reconciler.run())
        await settle()
        running.cancel()
        assert rival.times == 0
        assert await owners(cluster) == ["one"] * 4

    run(work())


def test_nobody_plans_what_cannot_be_understood(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        tree, cluster = await new_tree()
        one = Process(tree, {}, "one")
        async with one.running():
            await settle()
            good = await cluster.coordinator.get(ASSIGNMENT)
            assert good is not None
            await cluster.coordinator.commit([Set(ASSIGNMENT, b"{", good.version)])
            await settle()
            assert one.election.reconciler.trouble.startswith(ASSIGNMENT)
            with pytest.raises(BadMetadata):
                await cluster.assignment()
            await cluster.coordinator.commit([Set(ASSIGNMENT, good.data, good.version + 1)])
            await settle()
            assert one.election.reconciler.trouble == ""
            assert await owners(cluster) == ["one"] * 4

    with caplog.at_level(logging.INFO, "waltz.server"):
        run(work())
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("assignment:")]
    assert len(told) == 2
    assert "W2022" in told[0]
    assert told[1] == "assignment: in step again"


def test_an_assignment_of_another_length_is_left_alone() -> None:
    async def work() -> None:
        tree, cluster = await new_tree()
        await cluster.save_assignment(Assignment(owners=(Ownership("one", 3),) * 6), 0)
        one = Process(tree, {}, "one")
        async with one.running():
            await settle()
            assert "it has 6 partitions; the cluster has 4" in one.election.reconciler.trouble
        assert (await cluster.assignment())[1] == 1

    run(work())


# -- the loop behind both ----------------------------------------------------------------------------------------------


def test_a_watch_acts_once_for_each_change() -> None:
    """It never acts again without having waited, whatever goes wrong."""

    async def work() -> None:
        waits: list[object] = []
        outcomes: list[Exception | None] = [
            None,
            BadMetadata("x"),
            ChangedMeanwhile("x"),
            NodeMissing("x"),
            CannotConnect("x"),
        ]
        acted = 0

        async def wait(seen: object | None) -> object:
            waits.append(seen)
            return len(waits)

        async def act() -> None:
            nonlocal acted
            acted += 1
            assert len(waits) == acted
            if acted > len(outcomes):
                raise NameInUse("x")
            outcome = outcomes[acted - 1]
            if outcome is not None:
                raise outcome

        found = reconcile.Reconciler("test", wait=wait, act=act)
        with pytest.raises(NameInUse):
            await found.run()
        assert waits == [None, 1, 2, 3, 4, None], "after silence nothing is taken as seen"

    run(work())
