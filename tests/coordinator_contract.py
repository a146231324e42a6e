"""What every coordinator keeps to, as stories. `tests/unit` runs them in memory, `tests/process` against a real ZooKeeper.

A story gets a `World`: sessions of the same coordinator, and what can happen to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol
from uuid import uuid4

import pytest

from waltzd.cluster.clients import KEPT_SECONDS, SEEN_SECONDS, ClientNames, client_path
from waltzd.cluster.cluster import (
    ATTEMPTS_MAX,
    CLIENT_ID_MAX,
    CLIENT_IDS,
    CLIENTS,
    HISTORY_MAX,
    LEADER,
    MOVES,
    NO_VERSION,
    PREFERRED,
    SERVERS,
    Cluster,
    replicas_path,
)
from waltzd.cluster.coordinator import COMMIT_BYTES_MAX, Change, Check, Coordinator, Create, Delete, Set
from waltzd.cluster.documents import (
    Assignment,
    ClusterMeta,
    Counter,
    HistoryEntry,
    Membership,
    Moves,
    Ownership,
    PartitionMeta,
    Preferences,
    ReplicaSets,
    ServerMeta,
    StorageMeta,
)
from waltzd.cluster.groups import begin_group_log, has_group_log, logs_of
from waltzd.errors import BadArgument, CannotConnect, TooLarge
from waltzd.errors.operations import (
    BadMetadata,
    ChangedMeanwhile,
    CoordinatorRefused,
    NameInUse,
    NodeExists,
    NodeMissing,
    Unsafe,
)
from waltzd.protocol.document import decode, encode

DEADLINE_SECONDS = 60
"""Of a story as a whole: none waits for ever."""


class World(Protocol):
    async def connect(self) -> Coordinator:
        """Another session. The cluster's root is there."""
        ...

    async def connect_elsewhere(self, root: str) -> Coordinator:
        """A session on a root that is not there yet."""
        ...

    async def connect_as(self, credentials: str | None, root: str) -> Coordinator:
        """The coordinator of `connect_elsewhere`, by a process that shows these credentials, or none."""
        ...

    async def expire(self, coordinator: Coordinator) -> None:
        """The coordinator gives this session up; return when it has a new one."""
        ...

    async def interrupt(self, coordinator: Coordinator) -> None:
        """Nobody reaches the coordinator; return when this session knows."""
        ...

    async def resume(self, coordinator: Coordinator) -> None:
        """Return when this session is in contact again."""
        ...


Story = Callable[[World], Awaitable[None]]
STORIES: list[Story] = []


def story(function: Story) -> Story:
    STORIES.append(function)
    return function


async def tell(function: Story, world: World) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        await function(world)


async def until(coordinator: Coordinator, is_so: Callable[[], bool]) -> None:
    change = asyncio.Event()
    forget = coordinator.on_change(change.set)
    while not is_so():
        change.clear()
        await change.wait()
    forget()


async def data_at(coordinator: Coordinator, path: str) -> bytes | None:
    node = await coordinator.get(path)
    return None if node is None else node.data


async def has_begun(coordinator: Coordinator) -> None:
    """A wait that was started before has looked, and waits: calls of one session are answered in their order."""
    for _ in range(20):
        await coordinator.get("/")


# -- documents ---------------------------------------------------------------------------------------------------------


@story
async def a_document_has_a_version_for_every_change(world: World) -> None:
    one, two = await world.connect(), await world.connect()
    assert await one.get("/a") is None
    assert await one.children("/") == []
    assert await one.children("/a") == []
    await one.commit([Create("/a", b"first")])
    await one.commit([Set("/a", b"second", 0)])
    node = await two.get("/a")
    assert node is not None
    assert (node.data, node.version, node.is_mine) == (b"second", 1, False)
    with pytest.raises(ChangedMeanwhile):
        await two.commit([Set("/a", b"late", 0)])
    with pytest.raises(ChangedMeanwhile):
        await two.commit([Delete("/a", 0)])
    await two.commit([Delete("/a", 1)])
    assert await one.get("/a") is None


@story
async def a_node_that_is_created_again_is_another_one(world: World) -> None:
    one = await world.connect()
    await one.commit([Create("/a", b"")])
    first = await one.get("/a")
    await one.commit([Delete("/a", 0)])
    await one.commit([Create("/a", b"")])
    second = await one.get("/a")
    assert first is not None
    assert second is not None
    assert first.version == second.version == 0
    assert first.created < second.created


@story
async def what_cannot_be_is_refused(world: World) -> None:
    one = await world.connect()
    await one.commit([Create("/a", b"")])
    with pytest.raises(NodeExists):
        await one.commit([Create("/a", b"")])
    for change in (Create("/b/c", b""), Set("/b", b"", 0), Delete("/b", 0), Check("/b", 0)):
        with pytest.raises(NodeMissing):
            await one.commit([change])
    await one.commit([Create("/a/b", b"")])
    with pytest.raises(ChangedMeanwhile, match="below"):
        await one.commit([Delete("/a", 0)])
    await one.commit([Create("/e", b"", ephemeral=True)])
    with pytest.raises(CoordinatorRefused):
        await one.commit([Create("/e/f", b"")])
    with pytest.raises(TooLarge):
        await one.commit([Set("/a", bytes(COMMIT_BYTES_MAX), 0), Set("/a/b", b"1", 0)])
    assert await one.children("/a") == ["b"]
    assert await data_at(one, "/a/b") == b""


@story
async def a_large_document_fits(world: World) -> None:
    one = await world.connect()
    large = bytes(range(256)) * (COMMIT_BYTES_MAX // 256)
    await one.commit([Create("/a", large)])
    assert await data_at(one, "/a") == large


@story
async def a_transaction_is_done_whole_or_not_at_all(world: World) -> None:
    one = await world.connect()
    await one.commit([Create("/a", b"a"), Create("/b", b"b"), Create("/b/c", b"c")])
    await one.commit([Check("/a", 0), Set("/b", b"B", 0), Delete("/b/c", 0), Create("/d", b"d")])
    assert await one.children("/") == ["a", "b", "d"]
    changes = (Set("/a", b"A", 0), Delete("/d", 0), Create("/e", b""))
    for broken in (Check("/b", 0), Set("/b", b"", 0), Delete("/b", 0)):
        for at in range(len(changes) + 1):
            with pytest.raises(ChangedMeanwhile):
                await one.commit([*changes[:at], broken, *changes[at:]])
    with pytest.raises(NodeExists):
        await one.commit([*changes, Create("/a", b"")])
    assert await one.children("/") == ["a", "b", "d"]
    assert await data_at(one, "/a") == b"a"


@story
async def changes_of_one_transaction_see_each_other(world: World) -> None:
    one = await world.connect()
    await one.commit([Create("/a", b"1")])
    await one.commit([Delete("/a", 0), Create("/a", b"2"), Set("/a", b"3", 0), Check("/a", 1)])
    node = await one.get("/a")
    assert node is not None
    assert (node.data, node.version) == (b"3", 1)


# -- sessions ----------------------------------------------------------------------------------------------------------


@story
async def an_ephemeral_node_lives_as_long_as_its_session(world: World) -> None:
    one, two = await world.connect(), await world.connect()
    await one.commit([Create("/e", b"one", ephemeral=True)])
    node, seen = await one.get("/e"), await two.get("/e")
    assert node is not None
    assert seen is not None
    assert (node.is_mine, seen.is_mine) == (True, False)
    await two.commit([Set("/e", b"by two", 0)])
    token = await two.wait_for_change(["/e"], None)
    await one.close()
    await two.wait_for_change(["/e"], token)
    assert await two.get("/e") is None


@story
async def what_an_expired_session_created_is_gone(world: World) -> None:
    one, two = await world.connect(), await world.connect()
    await one.commit([Create("/e", b"", ephemeral=True), Create("/p", b"")])
    session, told = one.session, list[int]()
    one.on_change(lambda: told.append(one.session))
    await world.expire(one)
    assert one.session > session
    assert told[-1] == one.session
    assert one.is_connected
    assert await two.children("/") == ["p"]
    await one.commit([Create("/e", b"again", ephemeral=True)])
    node = await one.get("/e")
    assert node is not None
    assert node.is_mine


@story
async def a_new_session_ends_every_wait(world: World) -> None:
    one = await world.connect()
    token = await one.wait_for_change(["/a"], None)
    waiting = asyncio.create_task(one.wait_for_change(["/a"], token))
    await has_begun(one)
    await world.expire(one)
    assert await waiting != token


@story
async def without_contact_calls_say_so_and_waits_go_on(world: World) -> None:
    one = await world.connect()
    await one.commit([Create("/a", b"")])
    session = one.session
    token = await one.wait_for_change(["/a"], None)
    waiting = asyncio.create_task(one.wait_for_change(["/a"], token))
    await has_begun(one)
    told: list[bool] = []
    forget = one.on_change(lambda: told.append(one.is_connected))
    await world.interrupt(one)
    later = asyncio.create_task(one.wait_for_change(["/a"], token))
    calls = (one.get("/a"), one.children("/"), one.commit([Set("/a", b"1", 0)]), one.wait_for_change(["/a"], None))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [CannotConnect] * 4
    await world.resume(one)
    assert told == [False, True] * (len(told) // 2)  # each change once; a peer that was paused may drop contact again
    forget()
    if one.session == session:
        with suppress(CannotConnect):  # contact was dropped again
            await one.commit([Set("/a", b"2", 0)])  # the one that was refused was never sent
    assert token not in (await waiting, await later)


@story
async def after_the_end_nothing_goes(world: World) -> None:
    one, two = await world.connect(), await world.connect()
    token = await one.wait_for_change(["/a"], None)
    waiting = asyncio.create_task(one.wait_for_change(["/a"], token))
    await has_begun(one)
    await one.close()
    await one.close()
    assert not one.is_connected
    for call in (waiting, one.get("/a"), one.commit([Create("/a", b"")]), one.wait_for_change(["/a"], None)):
        with pytest.raises(CannotConnect):
            await call
    assert await two.get("/a") is None


# -- waiting for a change ----------------------------------------------------------------------------------------------


@story
async def every_kind_of_change_is_noticed(world: World) -> None:
    one, two = await world.connect(), await world.connect()
    await one.commit([Create("/a", b"")])
    for change in (
        Set("/a", b"1", 0),
        Set("/a", b"1", 1),  # the same data again
        Create("/a/b", b""),
        Delete("/a/b", 0),
        Delete("/a", 2),
        Create("/a", b""),
    ):
        before = await one.wait_for_change(["/a"], None)
        waiting = asyncio.create_task(one.wait_for_change(["/a"], before))
        await has_begun(one)
        await two.commit([change])
        assert await waiting != before
        await two.commit([Create("/x", b"")])  # and what changed before the wait begins
        assert await one.wait_for_change(["/a"], before) != before
        await two.commit([Delete("/x", 0)])


@story
async def what_changed_and_changed_back_is_noticed(world: World) -> None:
    one, two = await world.connect(), await world.connect()
    await two.commit([Create("/a", b"")])
    before = await one.wait_for_change(["/a"], None)
    await two.commit([Create("/a/b", b"")])
    await two.commit([Delete("/a/b", 0)])
    middle = await one.wait_for_change(["/a"], before)
    await two.commit([Delete("/a", 0)])
    await two.commit([Create("/a", b"")])
    await one.wait_for_change(["/a"], middle)


@story
async def no_change_is_missed_in_a_storm(world: World) -> None:
    """The last state is always seen, by everybody, however the changes and the waits fall."""
    one, two = await world.connect(), await world.connect()
    rounds = 60
    await two.commit([Create("/n", b"0"), Create("/f", b"")])

    async def follow_data() -> None:
        seen = None
        while True:
            seen = await one.wait_for_change(["/n", "/f"], seen)
            if await data_at(one, "/n") == b"%d" % rounds:
                return

    async def follow_children() -> None:
        seen = None
        while True:
            seen = await one.wait_for_change(["/f"], seen)
            if await one.children("/f") == ["last"]:
                return

    followers = [asyncio.create_task(follow()) for follow in (follow_data, follow_children) * 4]
    for number in range(rounds):
        await two.commit([Set("/n", b"%d" % (number + 1), number)])
        await two.commit([Create(f"/f/{number}", b"", ephemeral=number % 2 == 0)])
        await two.commit([Delete(f"/f/{number}", 0)])
    await two.commit([Create("/f/last", b"")])
    await asyncio.gather(*followers)


@story
async def a_wait_that_was_given_up_leaves_the_others(world: World) -> None:
    one, two = await world.connect(), await world.connect()
    token = await one.wait_for_change(["/a"], None)
    given_up = asyncio.create_task(one.wait_for_change(["/a"], token))
    waiting = asyncio.create_task(one.wait_for_change(["/a"], token))
    await has_begun(one)
    given_up.cancel()
    await two.commit([Create("/a", b"")])
    assert await waiting != token
    assert given_up.cancelled()


# -- the cluster's documents -------------------------------------------------------------------------------------------

ONE = StorageMeta(name="one", listen="127.0.0.1:1", admin_listen="127.0.0.1:2", group="a")
TWO = StorageMeta(name="two", listen="127.0.0.1:3", admin_listen="127.0.0.1:4", group="b")
SETS = ReplicaSets(partitions={0: {"one": Membership.MEMBER}, 1: {"one": Membership.MEMBER}})


def a_cluster(name: str = "test", partitions: int = 2) -> ClusterMeta:
    return ClusterMeta(name=name, key=uuid4(), partitions=partitions, created="2026-01-01T00:00:00Z")


def a_server(name: str) -> ServerMeta:
    return ServerMeta(name=name, listen="127.0.0.1:5", admin_listen="127.0.0.1:6", instance=uuid4(), version="1")


async def created(world: World, root: str = "/waltz/test") -> Cluster:
    return await Cluster.create(await world.connect_elsewhere(root), a_cluster(), storages=[ONE, TWO], replicas=SETS)


@story
async def two_clusters_that_are_created_at_once_do_not_mix(world: World) -> None:
    coordinators = [await world.connect_elsewhere("/waltz/raced") for _ in range(4)]
    metas = [a_cluster(f"c{number}", number + 1) for number in range(4)]
    results = await asyncio.gather(
        *(Cluster.create(at, meta) for at, meta in zip(coordinators, metas, strict=True)), return_exceptions=True
    )
    winners = [meta for meta, result in zip(metas, results, strict=True) if isinstance(result, Cluster)]
    assert [type(result) for result in results].count(NameInUse) == 3
    assert len(winners) == 1
    for coordinator in coordinators:
        cluster = Cluster(coordinator)
        assert await cluster.meta() == winners[0]
        assert len((await cluster.assignment())[0].owners) == winners[0].partitions
    await Cluster.create(coordinators[0], winners[0])  # said twice is no mistake


@story
async def a_new_cluster_has_a_group_log_where_replicas_are_named_for_it(world: World) -> None:
    meta, replicas = a_cluster(), {0: {"one": Membership.MEMBER}, 2: {"two": Membership.MEMBER}}
    coordinator = await world.connect_elsewhere("/waltz/groups")
    cluster = await Cluster.create(coordinator, meta, storages=[ONE, TWO], replicas=ReplicaSets(partitions=replicas))
    assignment, _ = await cluster.assignment()
    assert has_group_log(assignment, meta)
    assert logs_of(assignment, meta) == range(3)
    assert (await cluster.replicas())[0].partitions == {**replicas, 1: {}}
    assert not await begin_group_log(cluster, meta, {"one": Membership.MEMBER}), "it has one already"
    await Cluster.create(coordinator, meta, storages=[ONE, TWO], replicas=ReplicaSets(partitions=replicas))
    assert (await cluster.assignment())[0] == assignment


@story
async def the_group_log_is_in_the_first_of_the_transactions_that_create_a_cluster(world: World) -> None:
    meta, everywhere = a_cluster(), {number: {"one": Membership.MEMBER} for number in range(3)}
    coordinator = await world.connect_elsewhere("/waltz/portions")
    commit, commits = coordinator.commit, 0

    async def commit_one(changes: Sequence[Change]) -> None:
        nonlocal commits
        commits += 1
        if commits > 1:
            raise CannotConnect("the session broke after the first transaction")
        await commit(changes)

    async def create() -> Cluster:
        return await Cluster.create(coordinator, meta, storages=[ONE], replicas=ReplicaSets(partitions=everywhere))

    with pytest.MonkeyPatch.context() as small:
        small.setattr("waltzd.cluster.cluster.CREATED_AT_ONCE", 1)
        with pytest.MonkeyPatch.context() as broken:
            broken.setattr(coordinator, "commit", commit_one)
            with pytest.raises(CannotConnect):
                await create()
        cluster = Cluster(coordinator)
        assignment, _ = await cluster.assignment()
        assert has_group_log(assignment, meta)
        assert (await cluster.replicas())[0].partitions == {2: everywhere[2]}
        await create()
    assert (await cluster.replicas())[0].partitions == everywhere
    assert (await cluster.assignment())[0] == assignment


@story
async def there_is_no_cluster_until_it_is_created(world: World) -> None:
    cluster = Cluster(await world.connect_elsewhere("/waltz/none"))
    for call in (cluster.meta(), cluster.assignment(), cluster.replicas(), cluster.new_client_id()):
        with pytest.raises(NodeMissing):
            await call
    assert await cluster.servers() == {}


@story
async def what_a_person_mistypes_is_refused_whole(world: World) -> None:
    coordinator = await world.connect_elsewhere("/waltz/wrong")
    for storages, partitions in (
        ([ONE, ONE], {}),
        ([ONE], {0: {"two": Membership.MEMBER}}),
        ([ONE], {3: {"one": Membership.MEMBER}}),
        ([StorageMeta(name="a/b", listen="x:1", admin_listen="x:2", group="g")], {}),
    ):
        with pytest.raises(BadArgument):
            await Cluster.create(coordinator, a_cluster(), storages=storages, replicas=ReplicaSets(partitions=partitions))
    assert await coordinator.get("/") is None


@story
async def servers_come_and_go(world: World) -> None:
    here, there = await created(world), Cluster(await world.connect_elsewhere("/waltz/test"))
    old, new = a_server("s"), a_server("s")
    seen = await here.wait_for_servers(None)
    await there.register_server(old)
    seen = await here.wait_for_servers(seen)
    assert await here.servers() == {"s": old}
    with pytest.raises(NodeExists):
        await here.register_server(new)
    with pytest.raises(ChangedMeanwhile):
        await here.update_server(new)
    found = await here.server("s")
    assert found is not None
    assert not found.is_mine
    await here.replace_server(new, found.version)
    await here.update_server(new)
    with pytest.raises(ChangedMeanwhile):
        await there.update_server(old)
    await there.unregister_server("s")  # of somebody else now
    seen = await here.wait_for_servers(None)
    assert await there.servers() == {"s": new}
    assert await there.expected_servers() == {"s": new}, "also when its coordinator session is over, until it is taken out"
    await here.update_server(new)  # a change of a server is a change of the servers
    seen = await here.wait_for_servers(seen)
    await here.unregister_server("s")
    await here.wait_for_servers(seen)
    await here.unregister_server("s")
    assert await here.server("s") is None
    assert await here.expected_servers() == {"s": new}
    await here.forget_server("s")
    assert await here.expected_servers() == {}


@story
async def one_leads(world: World) -> None:
    here, there = await created(world), Cluster(await world.connect_elsewhere("/waltz/test"))
    assert await here.leader() is None
    assert sorted(await asyncio.gather(here.become_leader("a"), there.become_leader("b"))) == [False, True]
    leader = await here.leader()
    assert leader is not None
    assert leader.is_mine == (leader.name == "a")
    first, second = (here, there) if leader.is_mine else (there, here)
    assert await first.become_leader(leader.name)
    seen = await second.wait_for_change([LEADER], None)
    assert await second.become_leader("next", over=leader.version)
    await second.wait_for_change([LEADER], seen)
    assert not await first.become_leader("again", over=7)
    found = await first.leader()
    assert found is not None
    assert found.name == "next"


@story
async def a_document_is_changed_by_who_read_it_last(world: World) -> None:
    cluster = await created(world)
    assignment, version = await cluster.assignment()
    assert assignment.owners == (Ownership(None, 0), Ownership(None, 0))
    mine = Assignment(owners=(Ownership("s", 1), Ownership(None, 0)))
    seen = await cluster.wait_for_assignment(None)
    assert await cluster.save_assignment(mine, version) == version + 1
    await cluster.wait_for_assignment(seen)
    with pytest.raises(ChangedMeanwhile):
        await cluster.save_assignment(assignment, version)
    assert await cluster.assignment() == (mine, version + 1)


@story
async def a_storage_with_replicas_stays(world: World) -> None:
    cluster = await created(world)
    with pytest.raises(Unsafe, match="0, 1"):
        await cluster.remove_storage("one")
    with pytest.raises(NameInUse):
        await cluster.add_storage(TWO)
    moved = StorageMeta(name="two", listen="127.0.0.9:9", admin_listen="127.0.0.9:10", group="b")
    seen = await cluster.wait_for_replicas(1, None)
    await cluster.update_storage(moved, before=TWO)
    with pytest.raises(ChangedMeanwhile, match="two was changed by another process"):
        await cluster.update_storage(replace(TWO, group="c"), before=TWO)
    await cluster.wait_for_replicas(1, seen)
    assert await cluster.storages() == {"one": ONE, "two": moved}
    alone, version = await cluster.replica_set(1)
    both = {**alone, "two": Membership.LEARNER}
    version = await cluster.save_replica_set(1, both, version)
    with pytest.raises(Unsafe):
        await cluster.remove_storage("two")
    version = await cluster.save_replica_set(1, alone, version)
    await cluster.remove_storage("two")
    with pytest.raises(BadArgument, match="no storage two"):
        await cluster.save_replica_set(1, both, version)
    with pytest.raises(NodeMissing):
        await cluster.update_storage(moved, before=moved)


@story
async def the_format_of_a_cluster_rises_and_its_owners_notice(world: World) -> None:
    cluster = await created(world)
    before = await cluster.meta()
    seen = await cluster.wait_for_replicas(1, None)
    await cluster.set_format(1, before=before)
    await cluster.wait_for_replicas(1, seen)
    now = await cluster.meta()
    assert now == replace(before, format=1)
    with pytest.raises(ChangedMeanwhile):
        await cluster.set_format(1, before=before)
    with pytest.raises(Unsafe, match="no way back"):
        await cluster.set_format(0, before=now)
    assert await cluster.meta() == now


@story
async def a_storage_is_not_removed_while_a_replica_is_given_to_it(world: World) -> None:
    await _given_and_removed(world, is_new=False)


@story
async def a_storage_is_not_removed_while_a_document_that_was_deleted_is_made_anew(world: World) -> None:
    await _given_and_removed(world, is_new=True)


async def _given_and_removed(world: World, *, is_new: bool) -> None:
    cluster, other = await created(world), Cluster(await world.connect_elsewhere("/waltz/test"))
    _, version = await cluster.replica_set(0)
    if is_new:
        await cluster.coordinator.commit([Delete(replicas_path(0), version)])
        version = NO_VERSION
    results = await asyncio.gather(
        cluster.save_replica_set(0, {"two": Membership.MEMBER}, version),
        other.remove_storage("two"),
        return_exceptions=True,
    )
    assert [isinstance(result, Exception) for result in results].count(True) == 1
    names = await cluster.storages()
    sets, _ = await cluster.replicas()
    assert all(name in names for replicas in sets.partitions.values() for name in replicas)


@story
async def a_partition_and_its_replicas_change_together(world: World) -> None:
    cluster = await created(world)
    assert await cluster.partition(1) == (None, -1)
    seen = await cluster.wait_for_partition(1, None)
    first = PartitionMeta(generation=1, session=1)
    assert await cluster.save_partition(1, first, None) == 0
    await cluster.wait_for_partition(1, seen)
    with pytest.raises(NodeExists):
        await cluster.save_partition(1, first, None)
    roles, version = await cluster.replica_set(1)
    changed = {"one": Membership.LEARNER}
    second = PartitionMeta(generation=1, session=2, members=("one",))
    with pytest.raises(ChangedMeanwhile):
        await cluster.save_partition(1, second, 0, replicas=(changed, version + 1))
    assert await cluster.partition(1) == (first, 0)
    assert await cluster.save_partition(1, second, 0, replicas=(changed, version)) == 1
    with pytest.raises(ChangedMeanwhile):
        await cluster.save_partition(1, second, 0, replicas=(roles, version + 1))
    assert await cluster.partition(1) == (second, 1)
    assert await cluster.replica_set(1) == (changed, version + 1)
    sets, versions = await cluster.replicas()
    assert sets.partitions == {**SETS.partitions, 1: changed}
    assert versions == {0: version, 1: version + 1}


@story
async def client_ids_are_never_given_twice(world: World) -> None:
    await created(world)
    clusters = [Cluster(await world.connect_elsewhere("/waltz/test"), clock=lambda: 0.0) for _ in range(3)]
    ids = await asyncio.gather(*(cluster.new_client_id() for cluster in clusters for _ in range(5)))
    assert sorted(ids) == list(range(1, 16))


@story
async def client_ids_are_never_given_twice_when_no_server_remembers_what_was_in_the_document(world: World) -> None:
    """An operator puts an older document back, or creates it again, when all servers were started again. The clock says
    nothing: clients came faster than it allows for."""
    coordinator = (await created(world)).coordinator

    async def given_by_a_new_server(count: int) -> list[int]:
        server = Cluster(coordinator, clock=lambda: 1.0)
        return [await server.new_client_id() for _ in range(count)]

    given = await given_by_a_new_server(5)
    kept = await coordinator.get(CLIENT_IDS)
    assert kept is not None
    for is_deleted in (False, False, True):
        given += await given_by_a_new_server(30)
        node = await coordinator.get(CLIENT_IDS)
        assert node is not None
        if is_deleted:
            await coordinator.commit([Delete(CLIENT_IDS, node.version)])
            await coordinator.commit([Create(CLIENT_IDS, kept.data)])
        else:
            await coordinator.commit([Set(CLIENT_IDS, kept.data, node.version)])
    given += await given_by_a_new_server(5)
    assert given == sorted(set(given))


@story
async def client_ids_are_never_given_twice_when_the_document_went_back(world: World) -> None:
    """The coordinator itself went back, with the versions of its nodes, and neither servers nor clients noticed. Whatever
    has changed since then, a living client shares its id with nobody."""
    now = 1_700_000_000.0
    cluster = Cluster((await created(world)).coordinator, clock=lambda: now)
    before = [await cluster.new_client_id() for _ in range(3)]
    node = await cluster.coordinator.get(CLIENT_IDS)
    assert node is not None
    now += 60
    before += [await cluster.new_client_id() for _ in range(100)]  # many at once
    now += 10
    kept = replace(decode(Counter, node.data, CLIENT_IDS), written=node.version + 101)
    await cluster.coordinator.commit([Set(CLIENT_IDS, encode(kept), node.version + 100)])
    now -= 2  # another server's clock
    after = [await cluster.new_client_id() for _ in range(100)]
    assert len({*before, *after}) == 203
    assert max(before) < min(after)
    now -= 1_000_000
    assert await cluster.new_client_id() == max(after) + 1, "a clock that is behind changes nothing"
    now = 1e12
    assert 0 < await cluster.new_client_id() < 1 << 31
    now = 1.0
    assert 0 < await cluster.new_client_id() < 1 << 31, "a clock that was ahead once has not used up what there is"


@story
async def client_ids_are_never_given_twice_by_a_server_that_remembers_more_than_the_document(world: World) -> None:
    """Somebody puts a lower number there, again and again, while clients come faster than the clock allows for."""
    cluster = await created(world)
    forger = Cluster(await world.connect_elsewhere("/waltz/test"), clock=lambda: 0.0)
    server = Cluster(cluster.coordinator, clock=lambda: 0.0)
    given = []
    for _ in range(5):
        given += [await server.new_client_id() for _ in range(20)]
        node = await forger.coordinator.get(CLIENT_IDS)
        assert node is not None
        secret = decode(Counter, node.data, CLIENT_IDS).secret
        forged = Counter(1, secret, written=node.version + 1)
        await forger.coordinator.commit([Set(CLIENT_IDS, encode(forged), node.version)])
    assert len(set(given)) == len(given)


@story
async def a_counter_that_jumps_to_where_ids_begin_again_gives_out_none(world: World) -> None:
    cluster = await created(world)
    server = Cluster(cluster.coordinator)
    alive = await server.new_client_id()
    node = await cluster.coordinator.get(CLIENT_IDS)
    assert node is not None
    counter = decode(Counter, node.data, CLIENT_IDS)
    ahead = replace(counter, next=counter.next - 1 + CLIENT_ID_MAX)
    await cluster.coordinator.commit([Set(CLIENT_IDS, encode(ahead), node.version)])
    for one in (server, Cluster(await world.connect_elsewhere("/waltz/test"))):
        with pytest.raises(BadMetadata, match="has counted to"):
            await one.new_client_id()
    await cluster.coordinator.commit([Delete(CLIENT_IDS, node.version + 1)])
    assert await server.new_client_id() > alive, "what is deleted is written anew by a server that knows better"


@story
async def client_ids_go_on_when_an_operator_deletes_or_spoils_their_document(world: World) -> None:
    """Above all that were given out, and with tokens that still count."""
    coordinator = (await created(world)).coordinator
    now = 1.0
    first, second = (Cluster(coordinator, clock=lambda: now) for _ in range(2))
    await first.read_counter()
    secret, seen = first.client_secret, await first.wait_for_counter(None)
    ids = [await first.new_client_id() for _ in range(3)]
    for spoiled in (None, b"{oops"):
        node = await coordinator.get(CLIENT_IDS)
        assert node is not None
        change = Delete(CLIENT_IDS, node.version) if spoiled is None else Set(CLIENT_IDS, spoiled, node.version)
        await coordinator.commit([change])
        if spoiled is not None:
            with pytest.raises(BadMetadata):  # one that starts knows neither the numbers nor the secret
                await Cluster(coordinator).read_counter()
        else:
            async with asyncio.timeout(DEADLINE_SECONDS):
                seen = await first.wait_for_counter(seen)
        ids += [await first.new_client_id(), await second.new_client_id()]
        assert first.client_secret == second.client_secret == secret
    assert ids == sorted(set(ids))

    await coordinator.commit([Delete(CLIENT_IDS, await second.read_counter())])
    await coordinator.commit([Delete("/ids", 0)])
    now += 2 * 86_400
    ids.append(await Cluster(coordinator, clock=lambda: now).new_client_id())  # nobody knows what was in it
    assert ids == sorted(set(ids))


@story
async def client_ids_of_a_newer_version_are_left_alone(world: World) -> None:
    cluster = await created(world)
    version = await cluster.read_counter()
    await cluster.coordinator.commit([Set(CLIENT_IDS, b'{"schema": 2}', version)])
    with pytest.raises(BadMetadata):
        await cluster.new_client_id()


@story
async def no_client_id_is_drawn_where_the_cluster_was_deleted(world: World) -> None:
    cluster = await created(world)
    await cluster.read_counter()
    await cluster.delete()
    with pytest.raises(NodeMissing):
        await cluster.new_client_id()


@story
async def a_crowd_of_clients_gets_its_ids(world: World) -> None:
    """Those of one server wait for each other: if they raced, each round would serve one, and most would give up."""
    cluster = Cluster((await created(world)).coordinator, clock=lambda: 0.0)
    ids = await asyncio.gather(*(cluster.new_client_id() for _ in range(3 * ATTEMPTS_MAX)))
    assert sorted(ids) == list(range(1, 3 * ATTEMPTS_MAX + 1))


@story
async def what_a_new_server_announces_is_not_missed(world: World) -> None:
    """Neither that it is there, nor what it changes before anybody has looked at it again."""
    cluster, other = await created(world), Cluster(await world.connect_elsewhere("/waltz/test"))
    token = await cluster.wait_for_change([SERVERS, MOVES], None)
    waiting = asyncio.create_task(cluster.wait_for_change([SERVERS, MOVES], token))
    await has_begun(cluster.coordinator)
    await other.register_server(a_server("x"))
    token = await waiting
    await other.update_server(a_server("x"))
    token = await cluster.wait_for_change([SERVERS, MOVES], token)
    waiting = asyncio.create_task(cluster.wait_for_change([SERVERS, MOVES], token))
    await has_begun(cluster.coordinator)
    latest = a_server("x")
    await other.update_server(latest)
    await waiting
    assert await cluster.servers() == {"x": latest}


# -- what operators want and did ---------------------------------------------------------------------------------------


@story
async def what_is_preferred_is_there_once_somebody_prefers(world: World) -> None:
    cluster, other = await created(world), Cluster(await world.connect_elsewhere("/waltz/test"))
    nothing, version = await cluster.preferences()
    assert (nothing, version) == (Preferences(partitions={}), NO_VERSION)
    seen = await cluster.wait_for_change([PREFERRED], None)
    first = Preferences(partitions={1: "s"})
    await other.save_preferences(first, version)
    seen = await cluster.wait_for_change([PREFERRED], seen)
    with pytest.raises(ChangedMeanwhile):
        await cluster.save_preferences(nothing, version)
    assert await cluster.preferences() == (first, 0)
    await cluster.save_preferences(nothing, 0)
    await cluster.wait_for_change([PREFERRED], seen)
    with pytest.raises(ChangedMeanwhile):
        await other.save_preferences(first, 0)
    assert await other.preferences() == (nothing, 1)


@story
async def moves_are_for_the_replicas_that_they_were_planned_for(world: World) -> None:
    cluster, other = await created(world), Cluster(await world.connect_elsewhere("/waltz/test"))
    nothing, version = await cluster.moves()
    assert (nothing, version) == (Moves(partitions={}), NO_VERSION)
    seen = await cluster.wait_for_change([MOVES], None)
    wanted = Moves(partitions={0: ("one", "two")})
    roles, replicas_version = await cluster.replica_set(0)
    now = await other.save_replica_set(0, roles, replicas_version)
    with pytest.raises(ChangedMeanwhile):
        await cluster.save_moves(wanted, version, replicas={0: replicas_version})
    assert await cluster.moves() == (nothing, NO_VERSION)
    await cluster.save_moves(wanted, version, replicas={0: now, 1: 0})
    await cluster.wait_for_change([MOVES], seen)
    assert await other.moves() == (wanted, 0)
    with pytest.raises(ChangedMeanwhile):
        await other.save_moves(nothing, NO_VERSION)
    await other.save_moves(nothing, 0)
    assert await cluster.moves() == (nothing, 1)


def an_entry(subject: str) -> HistoryEntry:
    return HistoryEntry(
        began="2026-01-01", ended=None, who="a@b", verb="test", subject=subject, reason=None, steps=("x",), outcome="begun"
    )


@story
async def history_is_in_the_order_in_which_it_began(world: World) -> None:
    clusters = [await created(world), *[Cluster(await world.connect_elsewhere("/waltz/test")) for _ in range(2)]]
    assert await clusters[0].history() == []
    numbers = await asyncio.gather(*(cluster.begin_history(an_entry("s")) for cluster in clusters for _ in range(4)))
    assert sorted(numbers) == list(range(1, 13)), "two at once get two entries"
    ended = replace(an_entry("s"), ended="2026-01-02", outcome="done")
    await clusters[1].end_history(5, ended)
    found = await clusters[2].history()
    assert [number for number, _ in found] == list(range(1, 13))
    assert dict(found)[5] == ended
    assert dict(found)[6] == an_entry("s")
    assert [number for number, _ in await clusters[0].history(newest=3)] == [10, 11, 12]


@story
async def history_makes_room(world: World) -> None:
    cluster = await created(world)
    path = "/history/{:010}"
    entry = await cluster.begin_history(an_entry("first"))
    node = await cluster.coordinator.get(path.format(entry))
    assert node is not None
    for first in range(2, HISTORY_MAX + 3, 100):
        numbers = range(first, min(first + 100, HISTORY_MAX + 3))
        await cluster.coordinator.commit([Create(path.format(number), node.data) for number in numbers])
    newest = await cluster.begin_history(an_entry("newest"))
    assert newest == HISTORY_MAX + 3
    names = await cluster.coordinator.children("/history")
    assert [int(name) for name in names] == list(range(4, HISTORY_MAX + 4)), "the oldest ones went"


def names_of(cluster: Cluster, now: Callable[[], float]) -> ClientNames:
    return ClientNames(cluster.coordinator, clock=now)


@story
async def epochs_rise_whoever_gives_them_out(world: World) -> None:
    clusters = [await created(world), *[Cluster(await world.connect_elsewhere("/waltz/test")) for _ in range(2)]]
    names = [names_of(cluster, lambda: 0.0) for cluster in clusters]
    assert await names[0].newest_epoch("ann") == 0
    found = await asyncio.gather(*(one.raise_epoch("ann") for one in names for _ in range(4)))
    assert sorted(found) == list(range(1, 13)), "each is given out once"
    assert [await one.newest_epoch("ann") for one in names] == [12] * 3
    assert await names[1].newest_epoch("bob") == 0
    await names[2].note_seen("ann")
    assert await names[0].newest_epoch("ann") == 12, "to be seen changes no epoch"


@story
async def an_epoch_is_not_given_out_again_when_its_document_was_lost_or_spoiled(world: World) -> None:
    cluster = await created(world)
    clock = [1000.0]
    names = names_of(cluster, lambda: clock[0])
    assert [await names.raise_epoch("ann") for _ in range(3)] == [1000, 1001, 1002]
    clock[0] = 2000.0
    path = client_path("ann")
    await cluster.coordinator.commit([Delete(path, 2)])
    assert await names.newest_epoch("ann") == 0
    assert await names.raise_epoch("ann") == 2000
    clock[0] = 3000.0
    await cluster.coordinator.commit([Set(path, b"nonsense", 0)])
    with pytest.raises(BadMetadata):
        await names.newest_epoch("ann")
    assert await names.raise_epoch("ann") == 3000


@story
async def what_is_newest_is_not_what_was_newest_when_it_was_read(world: World) -> None:
    """Another one raises it between the read and the answer."""
    cluster, other = await created(world), Cluster(await world.connect_elsewhere("/waltz/test"))
    elsewhere = names_of(other, lambda: 0.0)
    await elsewhere.raise_epoch("ann")

    class Late:
        """Answers reads with what was true before."""

        is_late = True

        def __getattr__(self, name: str) -> object:
            return getattr(cluster.coordinator, name)

        async def get(self, path: str) -> object:
            node = await cluster.coordinator.get(path)
            if self.is_late and path == client_path("ann"):
                self.is_late = False
                await elsewhere.raise_epoch("ann")
            return node

    late: Any = Late()
    assert await ClientNames(late, clock=lambda: 0.0).newest_epoch("ann") == 2
    assert not late.is_late


@story
async def names_are_written_seldom_and_forgotten_after_long(world: World) -> None:
    cluster = await created(world)
    clock = [1_000_000.0]
    names = names_of(cluster, lambda: clock[0])

    async def version(name: str) -> int:
        node = await cluster.coordinator.get(client_path(name))
        assert node is not None
        return node.version

    await names.note_seen("ann")
    await names.note_seen("bob")
    clock[0] += SEEN_SECONDS - 1
    await names.note_seen("ann")
    assert await version("ann") == 0
    clock[0] += 1
    await names.note_seen("ann")
    assert await version("ann") == 1
    found = await names.all()
    assert (found["ann"].first_seen, found["ann"].last_seen) == (1_000_000, 1_000_000 + SEEN_SECONDS)
    clock[0] = 1_000_000 + KEPT_SECONDS
    assert await names.forget() == ["bob"]
    assert list(await names.all()) == ["ann"]
    await names.raise_epoch("ann")
    clock[0] += KEPT_SECONDS - 1
    assert await names.forget() == []


@story
async def a_cluster_of_an_older_version_gets_a_place_for_names(world: World) -> None:
    cluster = await created(world)
    node = await cluster.coordinator.get(CLIENTS)
    assert node is not None
    await cluster.coordinator.commit([Delete(CLIENTS, node.version)])
    names = names_of(cluster, lambda: 0.0)
    assert await names.newest_epoch("ann") == 0
    assert await names.all() == {}
    assert await names.forget() == []
    assert await names.raise_epoch("ann") == 1
    assert await names.newest_epoch("ann") == 1


@story
async def a_cluster_is_not_deleted_with_what_others_made_below_it(world: World) -> None:
    cluster = await created(world)
    coordinator = cluster.coordinator
    await coordinator.commit([Create("/payments", b"another cluster"), Create("/payments/replicas", b"its own")])
    with pytest.raises(Unsafe, match="payments"):
        await cluster.delete()
    assert (await cluster.meta()).name
    assert (await coordinator.get("/payments/replicas")) is not None
    await coordinator.commit([Delete("/payments/replicas", 0), Delete("/payments", 0)])
    assert await cluster.delete() > 0


CREDENTIALS = "waltz:a-long-random-password"


@story
async def a_closed_cluster_is_nobody_elses(world: World) -> None:
    """Made with credentials: whoever has none, or others, reads nothing and changes nothing."""
    root = "/waltz/closed"
    cluster = await Cluster.create(await world.connect_as(CREDENTIALS, root), a_cluster())
    await cluster.save_preferences(Preferences(partitions={0: "s"}), NO_VERSION)
    await cluster.begin_history(an_entry("s"))
    server = Cluster(await world.connect_as(CREDENTIALS, root))
    await server.register_server(a_server("s"))  # an ephemeral node
    assert await cluster.open_nodes() == []
    assert await server.new_client_id() > 0
    for stranger in (await world.connect_as(None, root), await world.connect_as("eve:another-password", root)):
        for path in ("/", CLIENT_IDS, "/history", f"{SERVERS}/s", PREFERRED):
            with pytest.raises(CoordinatorRefused):
                await stranger.get(path)
            with pytest.raises(CoordinatorRefused):
                await stranger.children(path)
            with pytest.raises(CoordinatorRefused):
                await stranger.commit([Set(path, b"forged", 0)])
            with pytest.raises(CoordinatorRefused):
                await stranger.commit([Create(f"{path.rstrip('/')}/forged", b"")])
    assert await cluster.delete() > 0


@story
async def an_open_cluster_is_closed_while_it_is_used(world: World) -> None:
    """What is created is as open as the root: processes get their credentials one after the other."""
    root = "/waltz/opened"
    old, new = [Cluster(await world.connect_as(credentials, root)) for credentials in (None, CREDENTIALS)]
    await Cluster.create(old.coordinator, a_cluster())
    assert (old.coordinator.has_credentials, new.coordinator.has_credentials) == (False, True)
    await new.register_server(a_server("s"))
    assert list(await old.servers()) == ["s"]
    found = await old.open_nodes()
    assert found[0] == "/"
    assert {CLIENT_IDS, SERVERS, f"{SERVERS}/s", "/history"} <= set(found)
    assert await new.secure() == len(found)
    assert (await new.open_nodes(), await new.secure()) == ([], 0)
    with pytest.raises(CoordinatorRefused):
        await old.meta()
    await new.register_server(a_server("t"))
    assert await new.open_nodes() == []


@story
async def a_cluster_that_is_deleted_leaves_nothing(world: World) -> None:
    cluster, other = await created(world), Cluster(await world.connect_elsewhere("/waltz/test"))
    await cluster.save_preferences(Preferences(partitions={0: "s"}), NO_VERSION)
    await cluster.begin_history(an_entry("s"))
    await other.register_server(a_server("s"))
    await cluster.save_partition(1, PartitionMeta(generation=1, session=1), None)
    paths = ["/"]
    for path in paths:
        paths += [f"{path.rstrip('/')}/{name}" for name in await cluster.coordinator.children(path)]
    assert await cluster.delete() == len(paths)
    for path in paths:
        assert await other.coordinator.get(path) is None, path
    for call in (cluster.delete(), cluster.meta()):
        with pytest.raises(NodeMissing):
            await call
    await Cluster.create(other.coordinator, a_cluster())
