"""The server from outside: real processes on a real ZooKeeper, their names, their partitions and their ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any
from uuid import UUID

import pytest

from tests.process.server import ServerDaemon
from tests.process.zookeeper import LocalZooKeeper, free_port
from waltzd.client import loop
from waltzd.cluster.cluster import CHANNELS, ROOT, Cluster
from waltzd.cluster.coordinator import Set
from waltzd.cluster.documents import ClusterMeta
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.errors import EXIT_CONFLICT, EXIT_NOT_FOUND, EXIT_TIMEOUT, EXIT_USAGE, CannotConnect, ForeignCluster
from waltzd.errors.operations import LevelUnknown
from waltzd.protocol.descriptions import ServerDescription
from waltzd.wire.servers import ServerAdminClient

KEY = UUID("00112233-4455-6677-8899-aabbccddeeff")
PARTITIONS = 4
PATIENCE_SECONDS = 60
"""After so long a test gives up; none of them measures how long something took."""

MakeServer = Callable[..., ServerDaemon]


def run(work: Coroutine[Any, Any, None]) -> None:
    loop.run(asyncio.wait_for(work, 2 * PATIENCE_SECONDS))


class World:
    """A cluster of its own on the shared ZooKeeper."""

    def __init__(self, zookeeper: LocalZooKeeper, root: str, make_server: MakeServer) -> None:
        self.hosts, self.root = zookeeper.hosts, root
        self._make = make_server
        loop.run(self._create())

    @contextlib.asynccontextmanager
    async def cluster(self) -> AsyncIterator[Cluster]:
        coordinator = ZooKeeperCoordinator(self.hosts, self.root)
        await coordinator.start()
        try:
            yield Cluster(coordinator)
        finally:
            await coordinator.close()

    async def _create(self) -> None:
        async with self.cluster() as cluster:
            meta = ClusterMeta(name="test", key=KEY, partitions=PARTITIONS, created="2026-01-01")
            await Cluster.create(cluster.coordinator, meta)

    def server(self, name: str, **settings: object) -> ServerDaemon:
        return self._make(name, hosts=self.hosts, cluster=self.root, **settings)


@pytest.fixture
def world(zookeeper: LocalZooKeeper, make_server: MakeServer, request: pytest.FixtureRequest) -> World:
    return World(zookeeper, f"/server/{request.node.name.replace('[', '-').replace(']', '')}", make_server)


async def until(admin: ServerAdminClient, is_so: Callable[[ServerDescription], bool]) -> ServerDescription:
    found: ServerDescription | None = None
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                found = await admin.describe()
                if is_so(found):
                    return found
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"this did not become so: {found}") from None


def owns(*partitions: int) -> Callable[[ServerDescription], bool]:
    return lambda found: tuple(owned.partition for owned in found.partitions) == partitions


def counts(number: int) -> Callable[[ServerDescription], bool]:
    return lambda found: len(found.partitions) == number


# -- a life ------------------------------------------------------------------------------------------------------------


def test_a_server_takes_everything_and_ends_when_it_is_told_to(world: World) -> None:
    server = world.server("one", preferred="1-2").start()

    async def look() -> None:
        async with server.admin(KEY) as admin, world.cluster() as cluster:
            found = await until(admin, owns(0, 1, 2, 3))
            assert (found.name, found.cluster_key, found.is_connected, found.is_draining) == ("one", KEY, True, False)
            assert found.is_leader
            assert {owned.generation for owned in found.partitions} == {1}
            registered = (await cluster.servers())["one"]
            assert (registered.listen, registered.admin_listen) == (server.listen, server.admin_listen)
            assert (registered.preferred, registered.instance) == ((1, 2), found.instance)

    async def look_again() -> None:
        async with world.cluster() as cluster:
            assert await cluster.servers() == {}
            assert await cluster.leader() is None

    run(look())
    assert server.stop() == 0
    run(look_again())
    assert "stopped" in server.log
    assert "Traceback" not in server.log


def test_partitions_are_shared_moved_and_taken_over(world: World) -> None:
    one, two = world.server("one").start(), world.server("two", preferred="0").start()

    async def share() -> None:
        async with one.admin(KEY) as first, two.admin(KEY) as second:
            await until(first, counts(2))
            shared = await until(second, counts(2))
            assert 0 in [owned.partition for owned in shared.partitions]
            await first.drain(True)
            await until(first, counts(0))
            assert (await until(second, counts(4))).is_draining is False
            assert (await first.describe()).is_draining
            await first.drain(False)
            await until(first, counts(2))
            async with one.admin(UUID(int=1)) as stranger:
                with pytest.raises(ForeignCluster):
                    await stranger.drain(True)

    async def take_over() -> None:
        async with two.admin(KEY) as second:
            found = await until(second, counts(4))
            assert found.is_leader
            assert max(owned.generation for owned in found.partitions) > 1

    run(share())
    one.kill()
    run(take_over())
    assert two.stop() == 0


def test_a_server_that_stops_waits_until_another_has_its_partitions(world: World) -> None:
    one, two = world.server("one").start(), world.server("two").start()

    async def settle() -> None:
        async with one.admin(KEY) as first, two.admin(KEY) as second:
            await until(first, counts(2))
            await until(second, counts(2))

    async def look() -> None:
        async with two.admin(KEY) as second:
            await until(second, counts(4))

    run(settle())
    assert one.stop() == 0
    run(look())
    assert "server one gives its partitions away: moved partitions" in one.log + two.log
    assert "no server took over" not in one.log


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_name_belongs_to_one_process(world: World) -> None:
    first, second = world.server("one").start(), world.server("one")
    second.spawn()
    assert second.wait() == EXIT_CONFLICT
    assert f"W2023 another server named one is running; its address for operators is {first.admin_listen}" in second.log
    assert first.stop() == 0


def test_a_server_that_was_killed_is_back_at_once(world: World) -> None:
    """The coordinator still holds the old one for alive: for a minute, if it had to find out by itself."""
    first = world.server("one", session_seconds=60).start()

    async def look(server: ServerDaemon) -> None:
        async with server.admin(KEY) as admin:
            found = await until(admin, counts(4))
            assert {owned.generation for owned in found.partitions} == {1}

    run(look(first))
    first.kill()
    second = world.server("one").start()
    run(look(second))
    assert "server one replaced the entry of an ended process in the list of servers" in second.log
    assert second.stop() == 0


def test_a_server_that_slept_while_another_took_its_name_ends(world: World) -> None:
    first = world.server("one").start()
    first.send(signal.SIGSTOP)
    second = world.server("one").start()
    first.send(signal.SIGCONT)
    assert first.wait() == EXIT_CONFLICT
    assert "W2023 another server named one took the place of this one" in first.log

    async def look() -> None:
        async with second.admin(KEY) as admin:
            await until(admin, counts(4))

    run(look())
    assert second.stop() == 0


# -- starts that cannot be ---------------------------------------------------------------------------------------------


def test_a_cluster_that_was_never_created(zookeeper: LocalZooKeeper, make_server: MakeServer) -> None:
    server = make_server("one", hosts=zookeeper.hosts, cluster="/server/nothing")
    server.spawn()
    assert server.wait() == EXIT_NOT_FOUND
    assert "W2026 the coordinator has no cluster at this root" in server.log
    assert "where a cluster was, restore its newest documents" in server.log


def test_no_zookeeper(make_server: MakeServer) -> None:
    server = make_server("one", hosts=f"127.0.0.1:{free_port()}", cluster="/waltz")
    server.spawn()
    assert server.wait() == EXIT_TIMEOUT
    assert "W4001 no ZooKeeper answers at 127.0.0.1:" in server.log


def test_an_address_that_is_taken(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = world.server("one", admin_listen=f"127.0.0.1:{other.getsockname()[1]}")
        server.spawn()
        assert server.wait() == EXIT_CONFLICT
    assert "W4002 cannot listen on" in server.log


def test_a_preference_for_a_partition_that_does_not_exist(world: World) -> None:
    server = world.server("one", preferred="3-4")
    server.spawn()
    assert server.wait() == EXIT_USAGE
    assert "W1002 preferred: there is no partition 4; cluster test has 4" in server.log


# -- without the coordinator -------------------------------------------------------------------------------------------


def test_it_goes_on_while_zookeeper_is_silent(world: World, zookeeper: LocalZooKeeper) -> None:
    server = world.server("one").start()

    async def work() -> None:
        async with server.admin(KEY) as admin:
            await until(admin, counts(4))
            zookeeper.pause()
            try:
                found = await until(admin, lambda found: not found.is_connected)
                assert len(found.partitions) == 4
                assert not found.is_leader
                with pytest.raises(CannotConnect):
                    await admin.drain(True)
                assert not (await admin.describe()).is_draining
            finally:
                zookeeper.resume()
            found = await until(admin, lambda found: found.is_connected and found.is_leader)
            assert {owned.generation for owned in found.partitions} == {1}

    run(work())
    assert server.stop() == 0


def test_a_server_takes_no_part_in_a_cluster_of_a_newer_level(world: World) -> None:
    """Nothing is written: it is in neither of the two lists of servers."""

    async def raise_level() -> None:
        async with world.cluster() as cluster:
            root = await cluster.coordinator.get(ROOT)
            assert root is not None
            future = json.dumps({**json.loads(root.data), "level": 9, "colour": "blue"}).encode()
            await cluster.coordinator.commit([Set(ROOT, future, root.version)])

    async def untouched() -> None:
        async with world.cluster() as cluster:
            assert await cluster.servers() == await cluster.expected_servers() == {}
            assert await cluster.coordinator.get(CHANNELS) is None
            with pytest.raises(LevelUnknown, match="the cluster has level 9"):
                await cluster.meta()

    run(raise_level())
    server = world.server("one")
    server.spawn()
    assert server.wait() == EXIT_CONFLICT
    assert f"{LevelUnknown.code} /: the cluster has level 9" in server.log
    tool = [sys.executable, "-m", "waltzctl", "channel", "set", "orders", "0", "--yes", "--coordinator", world.hosts]
    done = subprocess.run([*tool, "--root", world.root], capture_output=True, text=True, check=False)
    assert (done.returncode, LevelUnknown.code in done.stderr) == (EXIT_CONFLICT, True), done.stderr
    run(untouched())
