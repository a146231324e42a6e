"""How fast a replica may copy: by the configuration, or slower while a command of an operator says so.

The command's bound is an ephemeral document. While the coordinator cannot be asked, what was read last counts.
"""

from __future__ import annotations

from waltzd.cluster.cluster import COPY_RATE, Cluster
from waltzd.server.reconcile import Reconciler


class CopyPace:
    def __init__(self, cluster: Cluster, most: int) -> None:
        """`most`: of each replica that copies, in bytes a second, by the configuration; 0 sets no bound."""
        self._cluster = cluster
        self._most = most
        self._said = 0
        self.reconciler = Reconciler("how fast replicas copy", wait=self._wait, act=self._read)

    @property
    def bytes_per_second(self) -> int:
        """Now; 0 for no bound."""
        return min((bound for bound in (self._most, self._said) if bound), default=0)

    async def _wait(self, seen: object | None) -> object:
        return await self._cluster.wait_for_change([COPY_RATE], seen)

    async def _read(self) -> None:
        found = await self._cluster.copy_rate()
        self._said = 0 if found is None else found.bytes_per_second
