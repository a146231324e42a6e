"""How fast replicas copy: what a command of an operator says, what servers make of it, and how it ends.

What a server refuses before it takes part: other servers, storages and clusters of versions that do not fit.

The roster: names that are connected are written down, seldom, and the leader forgets those that were away for long.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tests.unit import timeless
from waltzctl.placement.mover import MoveOptions, Moving, Throttle
from waltzctl.shell.options import command_of
from waltzd.cluster.clients import SEEN_SECONDS
from waltzd.cluster.cluster import ROOT, Cluster
from waltzd.cluster.coordinator import Create, Delete, Set
from waltzd.cluster.documents import ClusterMeta, CopyRate, ServerMeta
from waltzd.cluster.memory import MemoryCoordinator, MemoryTree
from waltzd.errors import BadArgument, CannotConnect
from waltzd.errors.operations import CoordinatorRefused, IncompatibleVersion, LevelUnknown, NodeMissing
from waltzd.protocol.document import encode
from waltzd.server.reconcile import FORGET_SECONDS, CopyRateLimit, NameRecorder, Reconciler, VersionCheck
from waltzd.server.registration import Registration

META = ClusterMeta(name="test", key=UUID(int=7), partitions=4, created="2026-01-01")
MB = 1_000_000


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):  # the clock stands still meanwhile
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come about")


@pytest.mark.parametrize(("configured", "bounded"), [(0, 10 * MB), (64 * MB, 10 * MB), (MB, MB)])
def test_a_bound_lasts_as_long_as_the_session_that_set_it(configured: int, bounded: int) -> None:
    """However the command ends: nobody has to take it back."""

    async def work() -> None:
        tree = MemoryTree()
        pace = CopyRateLimit(await Cluster.create(tree.connect(), META), configured)
        watching = asyncio.create_task(pace.reconciler.run())
        command = tree.connect()
        assert pace.bytes_per_second == configured
        await Throttle(Cluster(command), 10 * MB).share(1)
        await until(lambda: pace.bytes_per_second == bounded)
        command.expire()
        await until(lambda: pace.bytes_per_second == configured)
        watching.cancel()
        await asyncio.wait([watching])

    timeless.run(work())


def test_a_bound_on_moves_outlives_the_command_until_it_is_lifted() -> None:
    async def work() -> None:
        tree = MemoryTree()
        cluster = await Cluster.create(tree.connect(), META)
        command = tree.connect()
        await Throttle(Cluster(command), 10 * MB, lasts=True).share(2)
        command.expire()
        found = await cluster.copy_rate()
        assert found is not None
        assert found.bytes_per_second == 5 * MB, "owners go on copying when a tool was killed, and not faster"
        for _ in range(2):
            await Throttle(cluster, None).lift()
            assert await cluster.copy_rate() is None

    timeless.run(work())


def test_what_is_copied_at_once_shares_it() -> None:
    async def work() -> None:
        tree = MemoryTree()
        cluster = await Cluster.create(tree.connect(), META)
        throttle = Throttle(cluster, 10 * MB)

        async def each() -> int | None:
            found = await cluster.copy_rate()
            return None if found is None else found.bytes_per_second

        await throttle.share(0)
        assert await each() is None, "nobody copies"
        await throttle.share(4)
        assert await each() == 2_500_000
        await throttle.share(1)
        assert await each() == 10 * MB
        await throttle.share(100 * MB)
        assert await each() == 1, "never without a bound"
        await Throttle(cluster, None).share(1)
        assert await each() == 1, "a command that says nothing changes nothing"

    timeless.run(work())


def test_the_last_one_counts_and_is_said_again_to_a_new_session() -> None:
    async def work() -> None:
        tree = MemoryTree()
        await Cluster.create(tree.connect(), META)
        first, second = tree.connect(), tree.connect()
        killed, running = Throttle(Cluster(first), MB), Throttle(Cluster(second), 2 * MB)
        await killed.share(1)
        await running.share(1)
        found = await Cluster(first).copy_rate()
        assert found is not None
        assert found.bytes_per_second == 2 * MB
        assert "@" in found.who
        first.expire()
        assert await Cluster(second).copy_rate() == found
        second.expire()
        second.reconnect()
        assert await Cluster(second).copy_rate() is None
        await running.share(1)
        assert await Cluster(second).copy_rate() == found

    timeless.run(work())


def test_two_at_the_same_moment_and_a_cluster_that_is_gone() -> None:
    async def work() -> None:
        tree = MemoryTree()
        cluster = await Cluster.create(tree.connect(), META)
        rates = [CopyRate(bytes_per_second=number, who="a@b") for number in range(1, 9)]
        await asyncio.gather(*(Cluster(tree.connect()).set_copy_rate(rate) for rate in rates))
        assert await cluster.copy_rate() in rates
        await cluster.delete()
        with pytest.raises(NodeMissing):
            await cluster.set_copy_rate(rates[0])

    timeless.run(work())


def options_of(*words: str) -> MoveOptions:
    found: list[MoveOptions] = []

    def move(*, options: Moving) -> int:
        found.append(options)
        return 0

    command_of("move", move).main(list(words), standalone_mode=False)
    return found[0]


def test_how_it_is_typed() -> None:
    assert options_of() == MoveOptions()
    assert options_of("--rate", "50MB", "--timeout", "3") == MoveOptions(timeout=3, bytes_per_second=50 * MB)
    assert options_of("--rate", "1MiB/s").bytes_per_second == 1 << 20
    for wrong in ("fast", "0", "-1MB"):
        with pytest.raises(BadArgument, match="--rate"):
            options_of("--rate", wrong)


def test_a_server_that_may_not_look_any_more_does_not_ask_without_end() -> None:
    """An operator gave the documents to credentials that this server does not have: each wait is refused at once."""

    async def work() -> None:
        asked = acted = 0

        async def wait(seen: object | None) -> object:
            nonlocal asked
            asked += 1
            await asyncio.sleep(0)
            if asked > 1000 or loop.time() - began >= 60:
                return await asyncio.Future()
            raise CoordinatorRefused("the node belongs to others")

        async def act() -> None:
            nonlocal acted
            acted += 1

        loop = asyncio.get_running_loop()
        began = loop.time()
        reconciler = Reconciler("policy", wait=wait, act=act)
        following = asyncio.create_task(reconciler.run())
        await asyncio.sleep(61)
        following.cancel()
        await asyncio.wait([following])
        assert 10 < asked < 100
        assert acted == 0
        assert reconciler.trouble == "the node belongs to others"

    timeless.run(work())


def test_a_server_two_minor_versions_away_is_refused_by_name() -> None:
    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)
        check = VersionCheck(cluster, "one", 0)
        for name, version in (("one", "0.9.0"), ("two", "0.0.0"), ("three", "0.2.0")):  # its own last entry may be of any
            await cluster.register_server(
                ServerMeta(name=name, listen="a:1", admin_listen="a:2", instance=UUID(int=1), version=version)
            )
            await check.check_servers()
        await cluster.register_server(
            ServerMeta(name="zero", listen="a:1", admin_listen="a:2", instance=UUID(int=1), version="0.3.0")
        )
        with pytest.raises(IncompatibleVersion, match=r"^server zero runs version 0\.3\.0, and this is version 0\.1"):
            await check.check_servers()

    timeless.run(work())


async def unannounced() -> tuple[MemoryCoordinator, Cluster, Registration, VersionCheck]:
    """Return the coordinator of a server that is not in the list, another look at its cluster, and what registers it."""

    async def nobody_answers(meta: ServerMeta) -> bool:
        return False

    tree = MemoryTree()
    first, other = tree.connect(), await Cluster.create(tree.connect(), META)
    check = VersionCheck(Cluster(first), "one", 0)
    server = ServerMeta(name="one", listen="a:1", admin_listen="a:2", instance=UUID(int=1), version="0.1.0")
    return (
        first,
        other,
        Registration(Cluster(first), server, is_alive=nobody_answers, check_servers=check.check_servers),
        check,
    )


@pytest.mark.parametrize("is_back", [False, True], ids=["at its start", "after its coordinator session was lost"])
def test_a_server_that_meets_another_version_in_the_list_leaves_it_and_ends(is_back: bool) -> None:
    """The other one registers between the look and the registration, or while the session of this one is lost."""

    async def work() -> None:
        first, other, registration, check = await unannounced()
        await check.check_servers()
        if is_back:
            await registration.announce()
            first.lapse()
        await other.register_server(replace(registration.server, name="zero", version="0.3.0"))
        if is_back:
            first.expire()
        with pytest.raises(IncompatibleVersion, match=r"^server zero runs version 0\.3\.0, and this is version 0\.1"):
            await registration.reconciler.run()
        assert (await other.servers()).keys() == {"zero"}
        assert not registration.is_announced

    timeless.run(work())


@pytest.mark.parametrize("lost", ["unreadable", "list"])
def test_a_server_is_in_the_list_again_when_what_stood_in_its_way_is_gone(lost: str) -> None:
    """The document of another server that nobody can read, or a list of servers that was deleted by hand."""

    async def work() -> None:
        _, other, registration, _ = await unannounced()
        await registration.announce()
        following = asyncio.create_task(registration.reconciler.run())
        await asyncio.sleep(1)
        assert registration.is_announced
        if lost == "list":
            await other.coordinator.commit([Delete("/servers/one", 0), Delete("/servers", 0)])
        else:
            await other.coordinator.commit([Create("/servers/two", b"?"), Delete("/servers/one", 0)])
        await asyncio.sleep(1)
        assert not registration.is_announced
        if lost == "list":
            await other.coordinator.commit([Create("/servers", b"")])
        else:
            await other.coordinator.commit([Delete("/servers/two", 0)])
        await asyncio.sleep(1)
        assert registration.is_announced
        assert (await other.servers()).keys() == {"one"}
        following.cancel()
        await asyncio.wait([following])

    timeless.run(work())


def test_older_storages_are_refused_from_the_moment_in_which_the_level_is_raised() -> None:
    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)
        levels: list[int] = []
        check = VersionCheck(cluster, "one", 0)
        check.on_rise = lambda check_storage: levels.append(check.level)
        check.check_storage("s1", "")
        following = asyncio.create_task(check.reconciler.run())
        await asyncio.sleep(1)
        await cluster.change_root(META, replace(META, level=1))
        await asyncio.sleep(1)
        check.check_storage("s1", "0.1.0")
        with pytest.raises(IncompatibleVersion, match=r"storage s1 runs version before 0\.1"):
            check.check_storage("s1", "")
        await cluster.coordinator.commit([Set(ROOT, encode(META), 1)])  # an older document was restored
        await asyncio.sleep(1)
        with pytest.raises(IncompatibleVersion):
            check.check_storage("s1", "")
        assert levels == [1]
        following.cancel()
        await asyncio.wait([following])

    timeless.run(work())


def test_a_server_ends_when_the_cluster_is_finalized_for_a_newer_version() -> None:
    async def work() -> None:
        cluster = await Cluster.create(MemoryTree().connect(), META)
        following = asyncio.create_task(VersionCheck(cluster, "one", 0).reconciler.run())
        await asyncio.sleep(1)
        future = json.dumps({**json.loads(encode(META)), "level": 7, "colour": "blue"}).encode()
        await cluster.coordinator.commit([Set(ROOT, future, 0)])
        with pytest.raises(LevelUnknown, match="the cluster has level 7"):
            await following

    timeless.run(work())


class Names:
    def __init__(self) -> None:
        self.noted: list[str] = []
        self.forgot = 0
        self.error: CannotConnect | None = None

    async def note_seen(self, name: str) -> None:
        if self.error is not None:
            raise self.error
        self.noted.append(name)

    async def forget(self) -> list[str]:
        self.forgot += 1
        return ["old"]


class Connected:
    names: list[str] = []  # noqa: RUF012  a test sets it


def made(is_leader: bool = True) -> tuple[NameRecorder, Names, Connected]:
    names: Any = Names()
    connected: Any = Connected()
    return NameRecorder(names, connected, is_leader=lambda: is_leader), names, connected


def test_a_name_is_looked_up_once_in_some_minutes_while_it_is_connected() -> None:
    async def story() -> None:
        roster, names, connected = made()
        connected.names = ["ann", "bob"]
        for second in range(0, SEEN_SECONDS + 60, 60):
            await roster.record_names(10_000.0 + second)
        assert names.noted == ["ann", "bob", "ann", "bob"]
        connected.names = ["bob"]
        await roster.record_names(10_700.0)
        connected.names = ["ann", "bob"]
        await roster.record_names(10_760.0)
        assert names.noted[4:] == ["ann"], "it went and came again"

    asyncio.run(story())


@pytest.mark.parametrize("is_leader", [True, False])
def test_only_the_leader_forgets_and_seldom(is_leader: bool) -> None:
    async def story() -> None:
        roster, names, _ = made(is_leader)
        for second in range(0, 2 * int(FORGET_SECONDS), 60):
            await roster.record_names(10_000.0 + second)
        assert names.forgot == (2 if is_leader else 0)

    asyncio.run(story())


def test_what_could_not_be_written_is_written_later() -> None:
    async def story() -> None:
        roster, names, connected = made()
        connected.names = ["ann"]
        names.error = CannotConnect("away")
        with pytest.raises(CannotConnect):
            await roster.record_names(10_000.0)
        names.error = None
        await roster.record_names(10_060.0)
        assert names.noted == ["ann"]

    asyncio.run(story())
