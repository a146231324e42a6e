"""The coordinator loses every document of a cluster that has a group log; what is put back has it, with all its entries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from tests.simulation.lost_metadata import wipe
from tests.unit.waltzd.testing.test_group_log import as_server
from waltzctl.placement.daemons import Daemons
from waltzctl.placement.metadata import loading, rebuilding
from waltzctl.shell.change import Change
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, StorageView
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, ServerMeta, StorageMeta
from waltzd.cluster.metadata import SavedDocuments, read, read_documents, write
from waltzd.testing import LocalCluster

COUNT = 7


class Hands(Daemons):
    """What the tools ask of daemons, without a network."""

    def __init__(self, local: LocalCluster) -> None:
        super().__init__(None)
        self._local = local

    async def ask(
        self, meta: ClusterMeta, storages: Collection[StorageMeta], servers: Collection[ServerMeta]
    ) -> ClusterSnapshot:
        views = [
            StorageView(meta=one, reported=await self._local._storages[one.name].calls.describe(), error=None)
            for one in sorted(storages, key=lambda one: one.name)
        ]
        return ClusterSnapshot(meta=meta, leader=None, servers=(), storages=tuple(views), partitions=())

    @asynccontextmanager
    async def admin(self, _key: UUID, storage: StorageMeta) -> AsyncIterator[Any]:
        yield self._local._storages[storage.name].calls


async def saved_of(local: LocalCluster) -> SavedDocuments:
    return read(write(await read_documents(Cluster(local.tree.connect()), moment="then")), "file")


async def written(local: LocalCluster) -> None:
    async with as_server(local) as client:
        for number in range(COUNT):
            await client.append(b"%d" % number, partition=client.number)


async def put_back(local: LocalCluster, change: Callable[[Cluster], Awaitable[Change]]) -> None:
    """Everything is lost, and an operator makes this change; then the servers come again, with all that was written."""
    for name in local.server_names:
        await local.kill_server(name)
    wipe(local)  # type: ignore[arg-type]
    cluster = Cluster(local.tree.connect())
    made = await change(cluster)
    assert not made.plan.refusals
    await made.do(cluster, lambda *_: None)
    assignment, _ = await cluster.assignment()
    assert len(assignment.owners) == local.meta.partitions + 1
    for name in local.server_names:
        await local.start_server(name)
    await local.wait_until_ready()
    found = await local.log(local.meta.partitions)
    assert [record.payload for record in found] == [b"%d" % number for number in range(COUNT)]


def test_what_was_saved_has_the_group_log() -> None:
    async def story(local: LocalCluster) -> None:
        await written(local)
        saved = await saved_of(local)
        assert saved.logs == 3
        await put_back(local, lambda cluster: loading(cluster, Hands(local), saved, file="file", where="", who="test"))

    LocalCluster(partitions=2).run(story)


def test_documents_that_are_older_than_the_group_log_are_completed_from_storages() -> None:
    async def story(local: LocalCluster) -> None:
        saved = await saved_of(local)
        assert saved.logs == 2
        await local.make_group_log()
        await written(local)
        await put_back(local, lambda cluster: loading(cluster, Hands(local), saved, file="file", where="", who="test"))

    LocalCluster(partitions=2, groups=False).run(story)


def test_documents_that_are_made_of_what_storages_hold_have_the_group_log() -> None:
    async def story(local: LocalCluster) -> None:
        await written(local)
        storages = await Cluster(local.tree.connect()).storages()
        await put_back(
            local,
            lambda cluster: rebuilding(cluster, Hands(local), local.meta, storages, replicas=3, where="", who="test"),
        )

    LocalCluster(partitions=2).run(story)
