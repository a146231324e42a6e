"""Daemons under a service manager: what they tell it, and what SIGHUP does to certificates and connections."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from tests.process.certificates import Authority, Files
from tests.process.daemon import KEY, PARTITIONS, Daemon
from tests.process.ear import PATIENCE_SECONDS, Ear
from tests.process.server import ServerDaemon
from tests.process.test_storage import append, runs_of
from tests.process.zookeeper import LocalZooKeeper, free_port
from waltzd.client import loop
from waltzd.client.client import Client
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, Membership, ReplicaSets, StorageMeta
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.errors import EXIT_TIMEOUT, CannotConnect, NoSuchPartition, WaltzError
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.locks import Committed
from waltzd.protocol.role import Role
from waltzd.wire.servers import ServerClient
from waltzd.wire.storages import AdminClient, AppendStream, ReplicaClient
from waltzd.wire.streams import Hello

MakeDaemon = Callable[..., Daemon]
MakeServer = Callable[..., ServerDaemon]
FAULTIO = Path(__file__).with_name("faultio.c")


@pytest.fixture
def ear(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ear]:
    """Daemons that are started from now on have this manager."""
    address = f"@waltz-{uuid4()}"
    with contextlib.closing(Ear(address)) as made:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        monkeypatch.setenv("WATCHDOG_USEC", "2000000")
        yield made


def wait_for(log: Callable[[], str], text: str, *, times: int = 1) -> None:
    """A process writes its log when it comes to it."""
    end = time.monotonic() + PATIENCE_SECONDS
    while log().count(text) < times:
        assert time.monotonic() < end, f"{text!r} is not in the log:\n{log()}"
        time.sleep(0.01)


def hang_up(daemon: Daemon) -> None:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGHUP)


# -- what the manager hears --------------------------------------------------------------------------------------------


def test_a_hangup_before_the_certificates_are_followed_ends_no_server(make_server: MakeServer, ear: Ear) -> None:
    """A service manager takes an end by SIGHUP for a clean one, and would start the server no more."""
    server = make_server("one", hosts=f"127.0.0.1:{free_port()}", cluster="/waltz")
    process = server.spawn()
    ear.until("STATUS=waiting for the coordinator")
    process.send_signal(signal.SIGHUP)
    assert server.wait() == EXIT_TIMEOUT


def test_a_standard_output_that_takes_nothing_keeps_no_storage_from_starting(make_daemon: MakeDaemon, ear: Ear) -> None:
    """A file on a full disk, or a pipe whose reader has gone."""
    daemon = make_daemon()
    output = daemon.spawn().stdout
    assert output is not None
    output.close()
    ear.until("READY=1")
    assert daemon.stop() == 0
    assert "standard output takes no line (Broken pipe), and this daemon goes on: waltzd storage is ready" in daemon.log


def test_a_storage_tells_its_life(make_daemon: MakeDaemon, ear: Ear) -> None:
    daemon = make_daemon().start()
    assert ear.until("READY=1") == [f"STATUS=opening {daemon.directory}", "READY=1"]
    assert ear.until("STATUS")[-1] == f"STATUS=keeps 0 partitions in {daemon.directory}"
    ear.until("WATCHDOG=1")
    hang_up(daemon)
    begun = [text for text in ear.until("READY=1") if text.startswith("RELOADING=1\nMONOTONIC_USEC=")]
    assert len(begun) == 1
    assert daemon.stop() == 0
    ear.until("STOPPING=1")
    assert ear.until("STATUS") == ["STATUS=finishing what is under way"]
    assert "this daemon has none" in daemon.log


def test_a_server_tells_its_life(
    zookeeper: LocalZooKeeper, make_daemon: MakeDaemon, make_server: MakeServer, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as others:
        others.delenv("NOTIFY_SOCKET")
        storage = make_daemon().start()
    make_cluster(zookeeper, storage, "/supervised/life")
    server = make_server("one", hosts=zookeeper.hosts, cluster="/supervised/life").start()
    heard = ear.until("READY=1")
    assert heard == [f"STATUS=waiting for the coordinator at {zookeeper.hosts}", "READY=1"]
    everything = f"owns {PARTITIONS} partitions, {PARTITIONS} of them open"
    ear.until(f"STATUS={everything}")
    ear.until("WATCHDOG=1")
    server.send(signal.SIGHUP)
    ear.until("RELOADING=1")
    ear.until("READY=1")
    storage.kill()
    ear.until(f"STATUS={everything}; storages that do not answer: s1")
    storage.settings |= {"listen": storage.listen, "admin_listen": storage.admin_listen}
    with monkeypatch.context() as others:
        others.delenv("NOTIFY_SOCKET")
        storage.start()
    ear.until(f"STATUS={everything}")
    assert server.stop() == 0
    ear.until("STOPPING=1")
    assert ear.until("STATUS") == ["STATUS=giving the partitions to other servers"]


def test_a_flush_that_hangs_ends_the_signs_of_life(make_daemon: MakeDaemon, ear: Ear, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler to build the shim that makes flushes slow")
    shim, page = tmp_path / "faultio.so", tmp_path / "page"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(shim), str(FAULTIO), "-ldl"], check=True)
    page.write_bytes(struct.pack("5i", 0, 0, 0, 0, 0))
    daemon = make_daemon()
    daemon.environment = {"LD_PRELOAD": str(shim), "FAULTIO_PATH": ".seg", "FAULTIO_PAGE": str(page)}
    daemon.start()

    async def append_some() -> None:
        async with daemon.replicas() as replicas, daemon.admin() as admin:
            assert await admin.create_partitions([0]) == {0: None}
            await replicas.open(0, 1, partitions=PARTITIONS)
            await replicas.set_low_mark(0, 1, -1)
            stream = replicas.append(0, 1)
            assert await append(stream, runs_of(1)) == 9
            with page.open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
                shared[:4] = struct.pack("i", 3_600_000)
            await stream.start()
            await stream.send(runs_of(1, first_id=10)[0], -1)
            await asyncio.to_thread(ear.until, "STATUS=a write or flush hangs: the disk does not answer")
            stream.cancel()  # before, it could have taken the frame along

    loop.run(append_some())
    assert "no more signs of life" in daemon.log
    assert daemon.process is not None
    assert daemon.process.poll() is None, "to end it is the manager's business"


# -- certificates ------------------------------------------------------------------------------------------------------


def put(old: Files, new: Files) -> None:
    """As a tool would: each file whole, under its name at once."""
    for path, other in ((old.ca, new.ca), (old.certificate, new.certificate), (old.key, new.key)):
        beside = path.with_suffix(".next")
        shutil.copy(other, beside)
        os.replace(beside, path)


def own_ca(files: Files) -> Files:
    """With a file of authorities of its own, so that it can be replaced alone."""
    ca = files.certificate.with_suffix(".ca")
    shutil.copy(files.ca, ca)
    return Files(files.certificate, files.key, ca)


async def knock(daemon: Daemon, files: Files) -> tuple[type[WaltzError] | None, type[WaltzError] | None]:
    """What a server with this certificate gets: from the port for calls, and from the port for streams."""
    tls = files.tls(Role.SERVER)
    host, _, port = daemon.stream_listen.rpartition(":")
    called: type[WaltzError] | None = None
    async with ReplicaClient(daemon.listen, KEY, seconds=10, tls=tls) as client:
        try:
            await client.open(3, 1, partitions=PARTITIONS)
        except WaltzError as error:
            called = type(error)
    stream = AppendStream(host, int(port), Hello(KEY, 3, 1), tls=tls, name=None)
    try:
        await stream.start()
        found = await stream.receive()
        return called, CannotConnect if found is None else None
    except WaltzError as error:
        return called, type(error)
    finally:
        stream.cancel()


LET_IN = (NoSuchPartition, NoSuchPartition)
"""The partition that `knock` asks for is not there: a caller that hears so was let in."""
KEPT_OUT = (CannotConnect, CannotConnect)


def test_a_storage_takes_another_authority_and_drops_nobody(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    files = own_ca(old.issue(KEY, Role.STORAGE, "s1"))
    server, next_server = old.issue(KEY, Role.SERVER, "one"), new.issue(KEY, Role.SERVER, "one")
    operator = old.issue(KEY, Role.OPERATOR, "ann").tls(Role.OPERATOR)
    daemon = make_daemon(**files.settings).start()

    async def work() -> None:
        async with AdminClient(daemon.admin_listen, KEY, tls=operator) as admin:
            assert await admin.create_partitions([0]) == {0: None}
        assert await knock(daemon, server) == LET_IN
        assert await knock(daemon, next_server) == KEPT_OUT
        async with ReplicaClient(daemon.listen, KEY, seconds=10, tls=server.tls(Role.SERVER)) as client:
            await client.open(0, 1, partitions=PARTITIONS)
            await client.set_low_mark(0, 1, -1)
            stream = client.append(0, 1)
            assert await append(stream, runs_of(1)) == 9
            put(files, new.issue(KEY, Role.STORAGE, "s1"))
            hang_up(daemon)
            wait_for(lambda: daemon.log, "was replaced; new connections use it")
            assert await knock(daemon, server) == KEPT_OUT
            assert await knock(daemon, next_server) == LET_IN
            assert await append(stream, runs_of(1, first_id=10)) == 19, "a stream goes on"
            assert (await client.status(0)).last_id == 19, "and so does an open connection"
            files.certificate.write_text("half a fi")
            hang_up(daemon)
            wait_for(lambda: daemon.log, "stays in use")
            assert await knock(daemon, next_server) == LET_IN
            hang_up(daemon)
            wait_for(lambda: daemon.log, "stays in use", times=2)
            assert await append(stream, runs_of(1, first_id=20)) == 29

    loop.run(work())
    assert daemon.stop() == 0


def make_cluster(zookeeper: LocalZooKeeper, storage: Daemon, root: str, admin: Files | None = None) -> None:
    tls = None if admin is None else admin.tls(Role.OPERATOR)

    async def create() -> None:
        async with AdminClient(storage.admin_listen, KEY, tls=tls) as client:
            await client.create_partitions(range(PARTITIONS))
        coordinator = ZooKeeperCoordinator(zookeeper.hosts, root)
        await coordinator.start()
        try:
            meta = ClusterMeta(name="supervised", key=KEY, partitions=PARTITIONS, created="2026-01-01")
            place = StorageMeta(name="s1", listen=storage.listen, admin_listen=storage.admin_listen, group="g")
            sets = {number: {"s1": Membership.MEMBER} for number in range(PARTITIONS)}
            await Cluster.create(coordinator, meta, storages=[place], replicas=ReplicaSets(partitions=sets))
        finally:
            await coordinator.close()

    loop.run(create())


def test_a_cluster_moves_to_another_authority(
    zookeeper: LocalZooKeeper, make_daemon: MakeDaemon, make_server: MakeServer, tmp_path: Path
) -> None:
    """Every daemon gets new files and SIGHUP. Then the storage starts anew, so that the server has to connect to it again:
    both ends of that connection know the new authority only."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    kept, owner = own_ca(old.issue(KEY, Role.STORAGE, "s1")), own_ca(old.issue(KEY, Role.SERVER, "one"))
    storage = make_daemon(**kept.settings).start()
    make_cluster(zookeeper, storage, "/supervised/moved", old.issue(KEY, Role.OPERATOR, "ann"))
    server = make_server("one", hosts=zookeeper.hosts, cluster="/supervised/moved", **owner.settings).start()

    async def write(files: Files) -> None:
        tls = files.tls(Role.CLIENT)

        def connect(address: str, key: UUID | None) -> ServerClient:
            return ServerClient(address, key, tls=tls)

        async with Client(server.listen, feed=FeedMode.NONE, connect=connect) as client:
            for partition in range(PARTITIONS):
                assert isinstance(await client.append(b"signed", partition=partition), Committed)

    loop.run(write(old.issue(KEY, Role.CLIENT, "app")))
    put(kept, new.issue(KEY, Role.STORAGE, "s1"))
    put(owner, new.issue(KEY, Role.SERVER, "one"))
    hang_up(storage)
    server.send(signal.SIGHUP)
    for log in (lambda: storage.log, lambda: server.log):
        wait_for(log, "was replaced; new connections use it")
    application = new.issue(KEY, Role.CLIENT, "app")
    loop.run(write(application))
    storage.settings |= {"listen": storage.listen, "admin_listen": storage.admin_listen}
    assert storage.stop() == 0
    storage.start()
    loop.run(write(application))

    async def refused() -> None:
        outsider = old.issue(KEY, Role.CLIENT, "app", file="late").tls(Role.CLIENT)
        async with ServerClient(server.listen, KEY, seconds=10, tls=outsider) as client:
            with pytest.raises(CannotConnect):
                await client.locate()

    loop.run(refused())
    assert server.stop() == 0
