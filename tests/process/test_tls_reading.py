"""Reading a cluster with certificates as analysts do it: what an operator may, and what an application may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from waltz_spark.exporting.opening import open_origin
from waltz_spark.log.live_origin import LiveOrigin, Route
from waltz_spark.log.origin import Catalog, Span

from tests.process.certificates import Authority, Files
from tests.process.daemon import KEY, PARTITIONS, Daemon
from tests.process.server import ServerDaemon
from tests.process.zookeeper import LocalZooKeeper
from waltzd.client import loop
from waltzd.client.client import Client
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, Membership, ReplicaSets, StorageMeta
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.errors import BadArgument, CannotConnect, LogUnreadable
from waltzd.protocol.batches import FeedMode
from waltzd.protocol.role import Role
from waltzd.wire.servers import ServerClient
from waltzd.wire.storages import AdminClient

PAYLOADS = [b"over TLS %d" % number for number in range(50)]


def options(files: Files, **place: str) -> dict[str, str]:
    return {**place, "tlsCertificate": str(files.certificate), "tlsKey": str(files.key), "tlsCa": str(files.ca)}


def opened(files: Files, **place: str) -> LiveOrigin:
    found = open_origin(options(files, **place))
    assert isinstance(found, LiveOrigin)
    return found


def impatient(files: Files, **place: str) -> LiveOrigin:
    return replace(opened(files, **place), seconds=1.0)


def read(origin: LiveOrigin, catalog: Catalog) -> list[bytes]:
    runs = [
        run
        for extent in catalog.extents
        if extent.partition == 0
        for run in origin.read(extent, extent.span, batch_bytes=1 << 20)
    ]
    return [run.record(number).payload for run in runs for number in range(len(run))]


def test_reading_with_certificates(
    zookeeper: LocalZooKeeper,
    make_daemon: Callable[..., Daemon],
    make_server: Callable[..., ServerDaemon],
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "ca")
    storage = make_daemon(**authority.issue(KEY, Role.STORAGE, "s1").settings).start()
    operator = authority.issue(KEY, Role.OPERATOR, "ann")
    application = authority.issue(KEY, Role.CLIENT, "app")
    root = "/tls/reading"

    async def create() -> None:
        async with AdminClient(storage.admin_listen, KEY, tls=operator.tls(Role.OPERATOR)) as admin:
            await admin.create_partitions(range(PARTITIONS))
        coordinator = ZooKeeperCoordinator(zookeeper.hosts, root)
        await coordinator.start()
        try:
            meta = ClusterMeta(name="tls", key=KEY, partitions=PARTITIONS, created="2026-01-01")
            place = StorageMeta(name="s1", listen=storage.listen, admin_listen=storage.admin_listen, group="g")
            sets = {number: {"s1": Membership.MEMBER} for number in range(PARTITIONS)}
            await Cluster.create(coordinator, meta, storages=[place], replicas=ReplicaSets(partitions=sets))
        finally:
            await coordinator.close()

    loop.run(create())
    server = make_server("one", hosts=zookeeper.hosts, cluster=root, **authority.issue(KEY, Role.SERVER, "one").settings)
    server.start()

    async def work() -> None:
        tls = application.tls(Role.CLIENT)
        connect = lambda address, key: ServerClient(address, key, tls=tls)  # noqa: E731
        async with Client(server.listen, feed=FeedMode.NONE, connect=connect) as client:
            for payload in PAYLOADS:
                await client.append(payload, partition=0)

    loop.run(work())
    by_coordinator = opened(operator, coordinator=zookeeper.hosts, root=root)
    catalog = by_coordinator.catalog()
    assert catalog.spans[0] == Span(0, len(PAYLOADS) - 1)
    assert Route.decode(catalog.extents[0].place).replicas == (("s1", storage.listen),)
    assert read(by_coordinator, catalog) == PAYLOADS
    by_servers = opened(application, **{"bootstrap.servers": server.listen, "storages": storage.listen})
    assert read(by_servers, by_servers.catalog()) == PAYLOADS, (
        "what no application may ask of storages comes from the owner"
    )

    stranger = Authority(tmp_path / "other").issue(KEY, Role.OPERATOR, "eve")
    with pytest.raises(CannotConnect):
        impatient(stranger, **{"bootstrap.servers": server.listen}).catalog()
    with pytest.raises(LogUnreadable, match="s1: cannot connect"):
        read(impatient(stranger, **{"bootstrap.servers": server.listen}), catalog)
    with pytest.raises(CannotConnect):
        replace(by_servers, certificate=None, seconds=1.0).catalog()
    foreign = authority.issue(UUID(int=9), Role.OPERATOR, "bob")
    with pytest.raises(CannotConnect):
        impatient(foreign, **{"bootstrap.servers": server.listen}).catalog()
    with pytest.raises(BadArgument, match="cannot read"):
        opened(replace(stranger, key=tmp_path / "no.pem"), **{"bootstrap.servers": server.listen}).catalog()
