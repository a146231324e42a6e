"""A server with certificates between a storage and an application that have them too: the whole way of a transaction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from tests.process.certificates import Authority, Files
from tests.process.daemon import KEY, PARTITIONS, Daemon
from tests.process.server import ServerDaemon
from tests.process.zookeeper import LocalZooKeeper
from waltzd import storages
from waltzd.client import Client
from waltzd.cluster import Cluster
from waltzd.errors import NotPermitted
from waltzd.frame import FeedMode
from waltzd.meta import ClusterMeta, ReplicaSets, StorageMeta
from waltzd.meta import Role as ReplicaRole
from waltzd.outcome import Committed
from waltzd.role import Role
from waltzd.server_admin import ServerAdminClient
from waltzd.servers import ServerClient
from waltzd.storages import AdminClient
from waltzd.zookeeper import ZooKeeperCoordinator


def connect(files: Files) -> Callable[[str, UUID | None], ServerClient]:
    tls = files.tls(Role.CLIENT)
    return lambda address, key: ServerClient(address, key, tls=tls)


def test_a_transaction_travels_between_certificates(
    zookeeper: LocalZooKeeper,
    make_daemon: Callable[..., Daemon],
    make_server: Callable[..., ServerDaemon],
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "ca")
    storage = make_daemon(**authority.issue(KEY, Role.STORAGE, "s1").settings).start()
    operator = authority.issue(KEY, Role.OPERATOR, "ann").tls(Role.OPERATOR)
    root = "/tls/cluster"

    async def create() -> None:
        async with AdminClient(storage.admin_listen, KEY, tls=operator) as admin:
            await admin.create_partitions(range(PARTITIONS))
        coordinator = ZooKeeperCoordinator(zookeeper.hosts, root)
        await coordinator.start()
        try:
            meta = ClusterMeta(name="tls", key=KEY, partitions=PARTITIONS, created="2026-01-01")
            place = StorageMeta(name="s1", listen=storage.listen, admin_listen=storage.admin_listen, group="g")
            sets = {number: {"s1": ReplicaRole.MEMBER} for number in range(PARTITIONS)}
            await Cluster.create(coordinator, meta, storages=[place], replicas=ReplicaSets(partitions=sets))
        finally:
            await coordinator.close()

    storages.run(create())
    files = authority.issue(KEY, Role.SERVER, "one")
    server = make_server("one", hosts=zookeeper.hosts, cluster=root, **files.settings).start()

    async def work() -> None:
        application = authority.issue(KEY, Role.CLIENT, "app")
        async with Client(server.listen, feed=FeedMode.NONE, connect=connect(application)) as client:
            assert isinstance(await client.append(b"over TLS", partition=0), Committed)
        async with ServerAdminClient(server.admin_listen, KEY, tls=operator) as admin:
            assert (await admin.describe()).name == "one"
        app = application.tls(Role.CLIENT)
        async with ServerAdminClient(server.admin_listen, KEY, tls=app) as admin:
            with pytest.raises(NotPermitted):
                await admin.drain(True)

    storages.run(work())
