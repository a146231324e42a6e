"""The audit log of a real storage with certificates: who asked for what, what was refused, and a file whose chain holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.certificates import Authority, Files
from tests.process.daemon import KEY, PARTITIONS, Daemon
from tests.process.test_storage import append, runs_of
from waltzctl.watching.audit import examined
from waltzd.client import loop
from waltzd.errors import NoSuchPartition, NotPermitted
from waltzd.protocol.address import parse_address
from waltzd.protocol.audit import AuditLines
from waltzd.protocol.role import Role
from waltzd.wire.storages import AdminClient, AppendStream, ReplicaClient
from waltzd.wire.streams import Hello

MakeDaemon = Callable[..., Daemon]


def admin(daemon: Daemon, files: Files, role: Role) -> AdminClient:
    return AdminClient(daemon.admin_listen, KEY, seconds=10, tls=files.tls(role))


def told(found: AuditLines) -> list[tuple[str, str, str, str | None]]:
    """The daemon's lines about itself are left out, and of a name its end."""
    return [
        (line.who.partition("/role/")[2], line.what, line.partitions, line.code)
        for line in found.lines
        if not line.what.startswith("audit/")
    ]


def test_who_did_what_and_was_refused_what(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    daemon = make_daemon(**authority.issue(KEY, Role.STORAGE, "s1").settings).start()
    ann, eve = authority.issue(KEY, Role.OPERATOR, "ann"), authority.issue(KEY, Role.OBSERVER, "eve")
    one, app = authority.issue(KEY, Role.SERVER, "one"), authority.issue(KEY, Role.CLIENT, "app")

    address = parse_address(daemon.stream_listen)
    host_and_port = address.host, address.port

    async def work() -> AuditLines:
        async with admin(daemon, ann, Role.OPERATOR) as operator:
            assert await operator.create_partitions([0, 1, 2]) == dict.fromkeys((0, 1, 2))
            async with ReplicaClient(daemon.listen, KEY, seconds=10, tls=one.tls(Role.SERVER)) as owner:
                await owner.open(0, 1, partitions=PARTITIONS)
                await owner.set_low_mark(0, 1, -1)
                stream = owner.append(0, 1)
                await append(stream, runs_of(5), 29)
                stream.cancel()
            while not any(line.what == "Replica/Append/end" for line in (await operator.audit()).lines):
                await asyncio.sleep(0.05)
            async with ReplicaClient(daemon.listen, KEY, seconds=10, tls=ann.tls(Role.OPERATOR)) as reader:
                assert [run.last_id async for run in reader.read(0, 0)] == [29]
            results = await operator.remove_partitions([1, 3], delete_files=True)
            assert isinstance(results[3], NoSuchPartition)
            await operator.describe()
        async with admin(daemon, eve, Role.OBSERVER) as observer:
            await observer.describe()
            await observer.events()
            for _ in range(20):
                with pytest.raises(NotPermitted):
                    await observer.remove_partitions([0], delete_files=True)
            with pytest.raises(NotPermitted):
                await observer.audit()
        async with admin(daemon, app, Role.CLIENT) as stranger:
            with pytest.raises(NotPermitted):
                await stranger.describe()
        intruder = AppendStream(*host_and_port, Hello(KEY, 0, 1), tls=app.tls(Role.CLIENT), name=None)
        await intruder.start()
        with pytest.raises(NotPermitted):
            await intruder.receive()
        intruder.cancel()
        async with admin(daemon, ann, Role.OPERATOR) as operator:
            return await operator.audit()

    found = loop.run(asyncio.wait_for(work(), 60))
    assert told(found) == [
        ("operator/ann", "StorageAdmin/CreatePartitions", "0-2", None),
        ("server/one", "Replica/Open", "0", None),
        ("server/one", "Replica/SetLowMark", "0", None),
        ("server/one", "Replica/Append", "0", None),
        ("server/one", "Replica/Append/end", "0", None),
        ("operator/ann", "Replica/Read", "0", None),
        ("operator/ann", "StorageAdmin/RemovePartitions", "3", NoSuchPartition.code),
        ("observer/eve", "StorageAdmin/RemovePartitions", "", NotPermitted.code),
        ("observer/eve", "StorageAdmin/Audit", "", NotPermitted.code),
        ("client/app", "StorageAdmin/Describe", "", NotPermitted.code),
        ("client/app", "Replica/Stream", "", NotPermitted.code),
    ]
    assert all(line.peer.startswith("127.0.0.1:") for line in found.lines if line.who)
    assert daemon.log.count("eve at 127.0.0.1") == 2, "the first refusal of each kind is an event"
    daemon.stop()
    path = Path(str(daemon.settings["directory"])) / "audit.log"
    verdict = examined(path, found.head)
    assert verdict.is_well
    assert verdict.chain.is_from_the_start
    assert b'"times":19' in path.read_bytes(), "the others are counted"
    changed = path.read_text().replace("operator/ann", "operator/bob", 1)
    path.write_text(changed)
    assert not examined(path, None).is_well


def test_without_certificates_nobody_has_a_name_and_restarts_go_on(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()

    async def create(number: int) -> AuditLines:
        async with AdminClient(daemon.admin_listen, KEY, seconds=10) as operator:
            await operator.create_partitions([number])
            return await operator.audit()

    loop.run(create(0))
    daemon.kill()
    daemon.start()
    found = loop.run(create(1))
    who = [(line.who, line.partitions) for line in found.lines if line.what == "StorageAdmin/CreatePartitions"]
    assert who[-1] == ("anonymous", "1")
    daemon.stop()
    assert examined(Path(str(daemon.settings["directory"])) / "audit.log", found.head).is_well
