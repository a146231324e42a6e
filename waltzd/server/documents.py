"""A partition's documents, as the owner of its session keeps them: each change is made to what it knows, or not at all.

Whoever else changed the partition's own document owns it now, and that ends the session. What operators say about its
replicas is another matter: it is read again, and what was to be saved is decided anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from waltzd.cluster import Cluster, partition_path
from waltzd.coordinator import Check
from waltzd.errors import CannotConnect, ChangedMeanwhile, MetadataBehind, StaleSession, WaltzError
from waltzd.meta import PartitionMeta, Role, StorageMeta
from waltzd.operator_documents import NO_VERSION

PAUSES = 20
"""The longest pause before the coordinator is asked again, in first pauses."""


class Documents:
    def __init__(self, cluster: Cluster, partition: int, *, version: int, retry_seconds: float) -> None:
        """`version` is that of the partition's own document. `read` must follow."""
        self.storages: Mapping[str, StorageMeta] = {}
        self._cluster = cluster
        self._partition = partition
        self._version = version
        self._replicas: tuple[Mapping[str, Role], int] = {}, NO_VERSION
        self._retry_seconds = retry_seconds

    @property
    def can_be_saved(self) -> bool:
        """As far as anybody knows."""
        return self._cluster.coordinator.is_connected

    @property
    def roles(self) -> Mapping[str, Role]:
        return self._replicas[0]

    async def read(self) -> None:
        """What operators say, and may have changed: where the replicas are, and where the storages."""
        self._replicas, self.storages = await asyncio.gather(
            self._cluster.replica_set(self._partition), self._cluster.storages()
        )

    async def save(self, wanted: PartitionMeta, *, promote: bool = False, check: Callable[[], None]) -> bool:
        """Compare-and-set; with `promote`, together with the learners that it makes members. When the answer is lost, look
        what is there. `check` raises when nothing may be saved any more. False: an operator has changed the replicas since
        they were read; now they are read again, and nothing is saved."""
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
            except ChangedMeanwhile:
                if replicas is None:
                    raise
            try:
                if await self._is_saved(wanted):
                    break
                if replicas is not None and (found := await self._cluster.replica_set(self._partition))[1] != replicas[1]:
                    self._replicas = found
                    return False
            except CannotConnect:
                continue
        if replicas is not None and replicas[1] == self._replicas[1]:
            self._replicas = replicas[0], replicas[1] + 1
        return True

    async def explained(self, error: WaltzError, session: int) -> WaltzError:
        """Why a storage knows of a session that is none of ours: another owner took it, or, if the partition's document is
        still as we left it, it stands in one that was lost."""
        is_stale = isinstance(error, StaleSession)
        try:
            await self._check_newest()
        except ChangedMeanwhile:
            if is_stale:
                return error
            raise
        if not is_stale:
            return error
        name, promised = error.facts.get("storage"), error.number("promised_session")
        return MetadataBehind(
            f"storage {name} has promised itself to session {promised} of partition {self._partition}; the coordinator "
            f"knows of none above {session}",
            storage=name,
        )

    async def _check_newest(self) -> None:
        """Like a change: the coordinator does not answer that with an older view."""
        path = partition_path(self._partition)
        if self._version != NO_VERSION:
            await self._cluster.coordinator.commit([Check(path, self._version)])
        elif await self._cluster.coordinator.get(path) is not None:
            raise ChangedMeanwhile(f"somebody else made {path}", path=path)

    async def _is_saved(self, wanted: PartitionMeta) -> bool:
        found, version = await self._cluster.partition(self._partition)
        if found == wanted:
            self._version = version
            return True
        if version != self._version:
            raise ChangedMeanwhile(f"somebody else changed the document of partition {self._partition}")
        return False

    def _promoted(self, wanted: PartitionMeta) -> tuple[Mapping[str, Role], int] | None:
        """The roles in which the learners that are admitted are members, and the version that they were made from: what an
        operator saves meanwhile must not be undone. None when nothing changes."""
        roles, version = self._replicas
        new = {name: Role.MEMBER if name in wanted.members else role for name, role in roles.items()}
        return None if new == dict(roles) else (new, version)
