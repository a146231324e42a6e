"""Refusal of versions that do not work with this server: of a cluster, of other servers, and of storages.

The rules are those of `waltzd.protocol.level`. The hard part are two servers that start at once: each looks at the list of
servers before it writes anything, and again whenever it has put itself into the list, so at least one of them sees both
versions. A server whose registration expired looks in the same way when it registers again: another one may have joined.
A storage does not read the level, and one of an older version may start just before it rises: a server that reads a higher
level checks the storages that it is connected to again.
"""

from __future__ import annotations

from collections.abc import Callable

from waltzd.cluster.cluster import ROOT, Cluster
from waltzd.protocol.level import THIS, Program
from waltzd.server.reconcile import Reconciler


class VersionCheck:
    def __init__(self, cluster: Cluster, name: str, level: int, program: Program = THIS) -> None:
        """`name`: this server. `level`: level of the cluster, as it was read. `program`: version of this server."""
        self._cluster = cluster
        self._name = name
        self.level = level
        """Level of the cluster when it was last read."""
        self._program = program
        self.on_rise: Callable[[Callable[[str, str], None]], None] = lambda check: None
        """Called with `check_storage` when a higher level was read, before anything else can use it."""
        self.reconciler = Reconciler("level", wait=lambda seen: cluster.wait_for_change([ROOT], seen), act=self.read)

    async def read(self) -> None:
        """Read the level again; raise `LevelUnknown` if the cluster was finalized for a newer version meanwhile."""
        level = (await self._cluster.meta()).level
        if level > self.level:
            self.level = level
            self.on_rise(self.check_storage)

    async def check_servers(self) -> None:
        """Raise `IncompatibleVersion` if a server that is up is more than one minor version away from this one."""
        for name, meta in sorted((await self._cluster.servers()).items()):
            if name != self._name:
                self._program.check_server(name, meta.version)

    def check_storage(self, name: str, version: str) -> None:
        """Raise `IncompatibleVersion` if replicas on this storage must not be used."""
        self._program.check_storage(name, version, self.level)
