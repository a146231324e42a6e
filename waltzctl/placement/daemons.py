"""Daemons of a cluster, as the commands that place, rescue and restore replicas reach them.

All calls of these commands to running daemons go through `Daemons`. A simulation overrides its snapshots and `admin`, and
runs the commands themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from uuid import UUID

from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzctl.snapshot.collector import snapshot_from_daemons, take_snapshot
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, ServerMeta, StorageMeta
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.wire.storages import AdminClient
from waltzd.wire.tls import Tls

POLL_SECONDS = 0.2


class Daemons:
    def __init__(self, tls: Tls | None) -> None:
        self._tls = tls

    async def take_snapshot(self, cluster: Cluster) -> ClusterSnapshot:
        """Take a snapshot by the documents in ZooKeeper."""
        return await take_snapshot(cluster.coordinator, tls=self._tls)

    async def ask(
        self, meta: ClusterMeta, storages: Collection[StorageMeta], servers: Collection[ServerMeta]
    ) -> ClusterSnapshot:
        """Take a snapshot of these daemons, whose documents are lost or do not exist yet."""
        return await snapshot_from_daemons(meta, servers, storages, {}, tls=self._tls)

    def admin(self, key: UUID, storage: StorageMeta) -> AbstractAsyncContextManager[AdminClient]:
        """Return a connection to the admin port of a storage. `key`: key of the cluster."""
        return AdminClient(storage.admin_listen, key, tls=self._tls, name=storage.name)

    async def fence(self, key: UUID, storage: StorageMeta, partition: int, session: int) -> ReplicaStatus:
        async with self.admin(key, storage) as admin:
            return await admin.fence(partition, session)

    async def pause(self) -> None:
        """Wait before the next snapshot, so that the daemons can make progress."""
        await asyncio.sleep(POLL_SECONDS)
