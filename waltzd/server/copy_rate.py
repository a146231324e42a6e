"""The rate at which a replica may copy: that of the configuration, or less while a command of an operator limits it.

The limit of the command is an ephemeral document. While the coordinator cannot be asked, the last value that was read
counts.
"""

from __future__ import annotations

from waltzd.cluster.cluster import COPY_RATE, Cluster
from waltzd.server.reconcile import Reconciler


class CopyRateLimit:
    def __init__(self, cluster: Cluster, most: int) -> None:
        """`most`: limit of the configuration for each replica that copies, in bytes a second; 0 for no limit."""
        self._cluster = cluster
        self._most = most
        self._said = 0
        self.reconciler = Reconciler("how fast replicas copy", wait=self._wait, act=self._read)

    @property
    def bytes_per_second(self) -> int:
        """Rate that is in force now; 0 for no limit."""
        return min((bound for bound in (self._most, self._said) if bound), default=0)

    async def _wait(self, seen: object | None) -> object:
        return await self._cluster.wait_for_change([COPY_RATE], seen)

    async def _read(self) -> None:
        found = await self._cluster.copy_rate()
        self._said = 0 if found is None else found.bytes_per_second
