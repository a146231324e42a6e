"""The audit log of a real storage with certificates: who asked for what, what was refused, and a file whose chain holds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.process.certificates import Authority, Files
from tests.process.daemon import KEY, PARTITIONS, Daemon
from tests.process.test_storage import append, runs_of
from waltzd.client import loop
from waltzd.errors import NoSuchPartition, NotPermitted
from waltzd.protocol.address import parse_address
from waltzd.protocol.audit import START, hash_of
from waltzd.protocol.role import Role
from waltzd.wire.storages import AdminClient, AppendStream, ReplicaClient
from waltzd.wire.streams import Hello

MakeDaemon = Callable[..., Daemon]


def admin(daemon: Daemon, files: Files, role: Role) -> AdminClient:
    return AdminClient(daemon.admin_listen, KEY, seconds=10, tls=files.tls(role))


def files(daemon: Daemon) -> list[Path]:
    return [Path(str(daemon.settings["directory"])) / name for name in ("audit.log", "audit-traffic.log")]


def lines(file: Path) -> list[dict[str, Any]]:
    """Return what callers did; the daemon's lines about itself are left out."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in found if not line["what"].startswith("audit/")]


def told(file: Path) -> list[tuple[str, str, str, str | None]]:
    """Return the lines of the file, each with the end of the caller's name."""
    return [
        (line["who"].partition("/role/")[2], line["what"], line["partitions"], line["code"])
        for line in lines(file)
        if line["times"] == 1
    ]


def test_who_did_what_and_was_refused_what(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    daemon = make_daemon(**authority.issue(KEY, Role.STORAGE, "s1").settings).start()
    ann, eve = authority.issue(KEY, Role.OPERATOR, "ann"), authority.issue(KEY, Role.OBSERVER, "eve")
    one, app = authority.issue(KEY, Role.SERVER, "one"), authority.issue(KEY, Role.CLIENT, "app")

    address = parse_address(daemon.stream_listen)
    host_and_port = address.host, address.port

    async def work() -> None:
        async with admin(daemon, ann, Role.OPERATOR) as operator:
            assert await operator.create_partitions([0, 1, 2]) == dict.fromkeys((0, 1, 2))
            async with ReplicaClient(daemon.listen, KEY, seconds=10, tls=one.tls(Role.SERVER)) as owner:
                await owner.open(0, 1, partitions=PARTITIONS)
                await owner.set_low_mark(0, 1, -1)
                stream = owner.append(0, 1)
                await append(stream, runs_of(5), 29)
                stream.cancel()
            while "Replica/Append/end" not in files(daemon)[1].read_text():
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
                await observer.delete_aside(["0"])
        async with admin(daemon, app, Role.CLIENT) as stranger:
            with pytest.raises(NotPermitted):
                await stranger.describe()
        intruder = AppendStream(*host_and_port, Hello(KEY, 0, 1), tls=app.tls(Role.CLIENT), name=None)
        await intruder.start()
        with pytest.raises(NotPermitted):
            await intruder.receive()
        intruder.cancel()

    loop.run(asyncio.wait_for(work(), 60))
    daemon.stop()
    people, traffic = files(daemon)
    assert told(traffic) == [
        ("server/one", "Replica/Open", "0", None),
        ("server/one", "Replica/SetLowMark", "0", None),
        ("server/one", "Replica/Append", "0", None),
        ("server/one", "Replica/Append/end", "0", None),
    ]
    assert told(people) == [
        ("operator/ann", "StorageAdmin/CreatePartitions", "0-2", None),
        ("operator/ann", "Replica/Read", "0", None),
        ("operator/ann", "StorageAdmin/RemovePartitions", "3", NoSuchPartition.code),
        ("observer/eve", "StorageAdmin/RemovePartitions", "", NotPermitted.code),
        ("observer/eve", "StorageAdmin/DeleteSetAside", "", NotPermitted.code),
        ("client/app", "StorageAdmin/Describe", "", NotPermitted.code),
        ("client/app", "Replica/Stream", "", NotPermitted.code),
    ]
    assert all(line["peer"].startswith("127.0.0.1:") for line in lines(people))
    assert daemon.log.count("eve at 127.0.0.1") == 3, (
        "the first refusal of each kind is an event, and the count of the rest"
    )
    assert [line["times"] for line in lines(people) if line["times"] > 1] == [19], "the others are counted"


def test_without_certificates_nobody_has_a_name_and_restarts_go_on(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon().start()

    async def create(number: int) -> None:
        async with AdminClient(daemon.admin_listen, KEY, seconds=10) as operator:
            await operator.create_partitions([number])

    loop.run(create(0))
    daemon.stop()
    daemon.start()
    loop.run(create(1))
    daemon.stop()
    people, _ = files(daemon)
    assert [(line["who"], line["partitions"]) for line in lines(people)] == [("anonymous", "0"), ("anonymous", "1")]
    texts = people.read_bytes().splitlines()
    assert [json.loads(text)["before"] for text in texts] == [START, *(hash_of(text) for text in texts[:-1])]
