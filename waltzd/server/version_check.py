"""Refusal of versions that do not work with this server: of a cluster, of other servers, and of storages.

The rules are those of `waltzd.protocol.level`. The hard part are two servers that start at once: each looks at the list of
servers before it writes anything, and again after it is in the list, so at least one of them sees both versions.
"""

from __future__ import annotations

from waltzd.cluster.cluster import ROOT, Cluster
from waltzd.protocol.level import check_server, check_storage
from waltzd.server.reconcile import Reconciler


class VersionCheck:
    def __init__(self, cluster: Cluster, name: str, level: int) -> None:
        """`name`: this server. `level`: level of the cluster, as it was read."""
        self._cluster = cluster
        self._name = name
        self._level = level
        self.reconciler = Reconciler("level", wait=lambda seen: cluster.wait_for_change([ROOT], seen), act=self.read)

    async def read(self) -> None:
        """Read the level again; raise `LevelUnknown` if the cluster was finalized for a newer version meanwhile."""
        self._level = max(self._level, (await self._cluster.meta()).level)

    async def check_servers(self) -> None:
        """Raise `IncompatibleVersion` if a server that is up is more than one minor version away from this one."""
        for name, meta in sorted((await self._cluster.servers()).items()):
            if name != self._name:
                check_server(name, meta.version)

    def check_storage(self, name: str, version: str) -> None:
        """Raise `IncompatibleVersion` if replicas on this storage must not be used."""
        check_storage(name, version, self._level)
