"""A partition's documents, as the owner of its session keeps them: each change is made to what it knows, or not at all.

Whoever else changed the partition's own document owns it now, and that ends the session. What operators say about its
replicas is another matter: it is read again, and what was to be saved is decided anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from waltzd.cluster import Cluster
from waltzd.errors import CannotConnect, ChangedMeanwhile
from waltzd.meta import PartitionMeta, ReplicaSets, Role

PAUSES = 20
"""The longest pause before the coordinator is asked again, in first pauses."""


class Documents:
    def __init__(
        self,
        cluster: Cluster,
        partition: int,
        *,
        version: int,
        replicas: tuple[ReplicaSets, int],
        retry_seconds: float,
    ) -> None:
        """`version` is that of the partition's own document."""
        self._cluster = cluster
        self._partition = partition
        self._version = version
        self._replicas = replicas
        self._retry_seconds = retry_seconds

    @property
    def can_be_saved(self) -> bool:
        """As far as anybody knows."""
        return self._cluster.coordinator.is_connected

    @property
    def roles(self) -> Mapping[str, Role]:
        return self._replicas[0].partitions.get(self._partition, {})

    def read(self, replicas: ReplicaSets, version: int) -> None:
        """Operators have changed where replicas are."""
        self._replicas = replicas, version

    async def save(self, wanted: PartitionMeta, *, promote: bool = False, check: Callable[[], None]) -> None:
        """Compare-and-set; with `promote`, together with the learners that it makes members. When the answer is lost, look
        what is there. `check` raises when nothing may be saved any more."""
        # With the version that it was made from: what an operator saves meanwhile must not be undone by it.
        replicas = self._promoted(wanted) if promote else None
        pause = self._retry_seconds
        while True:
            try:
                self._version = await self._cluster.save_partition(
                    self._partition, wanted, self._version, replicas=replicas
                )
                break
            except CannotConnect:
                check()
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSES * self._retry_seconds)
                if await self._is_saved(wanted):
                    break
        if replicas is not None and replicas[1] == self._replicas[1]:
            self._replicas = replicas[0], replicas[1] + 1

    async def _is_saved(self, wanted: PartitionMeta) -> bool:
        try:
            found, version = await self._cluster.partition(self._partition)
        except CannotConnect:
            return False
        if found == wanted:
            self._version = version
            return True
        if version != self._version:
            raise ChangedMeanwhile(f"somebody else changed the document of partition {self._partition}")
        return False

    def _promoted(self, wanted: PartitionMeta) -> tuple[ReplicaSets, int] | None:
        """The replica sets in which the learners that are admitted are members; None when nothing changes."""
        sets, version = self._replicas
        mine = self.roles
        new = {name: Role.MEMBER if name in wanted.members else role for name, role in mine.items()}
        if new == dict(mine):
            return None
        return replace(sets, partitions={**sets.partitions, self._partition: new}), version
