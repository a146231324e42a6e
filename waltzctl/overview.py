"""A cluster as a whole, as one value: what the coordinator has written down, and what its processes say of themselves.

It is put together from many answers that are a moment apart, so it may not agree with itself while things move. A process
that does not answer is part of the picture, with the reason; only a coordinator that does not answer is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

from waltzctl.certificate import first_contact
from waltzd.cluster import Cluster
from waltzd.coordinator import Coordinator
from waltzd.errors import ForeignCluster, WaltzError
from waltzd.meta import ClusterMeta, Role, ServerMeta, StorageMeta
from waltzd.owner import OwnedPartition, ServerDescription
from waltzd.replica import StorageDescription
from waltzd.server_admin import ServerAdminClient
from waltzd.storages import AdminClient
from waltzd.tls import Tls

CALL_SECONDS = 5.0
CALLS_MAX = 32
"""So many processes are asked at once."""
OPEN = "OPEN"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ServerView:
    meta: ServerMeta
    said: ServerDescription | None
    error: WaltzError | None


@dataclass(frozen=True, kw_only=True)
class StorageView:
    meta: StorageMeta
    said: StorageDescription | None
    error: WaltzError | None


@dataclass(frozen=True, kw_only=True)
class PartitionView:
    partition: int
    owner: str | None
    generation: int
    replicas: Mapping[str, Role]
    said: OwnedPartition | None
    """By its owner."""

    @property
    def is_open(self) -> bool:
        return self.said is not None and self.said.step == OPEN and not self.said.waiting

    @property
    def counting(self) -> int:
        """Replicas whose acknowledgements make transactions committed."""
        return sum(replica.counts for replica in self.said.replicas) if self.said is not None else 0

    @property
    def waiting(self) -> str:
        """Why it is not open, in one sentence."""
        if self.owner is None:
            return "no server owns it"
        if self.said is None:
            return f"its owner {self.owner} does not say how it is"
        return "" if self.is_open else self.said.waiting or f"{self.owner} is recovering it"


@dataclass(frozen=True, kw_only=True)
class Overview:
    meta: ClusterMeta
    leader: str | None
    servers: tuple[ServerView, ...]
    storages: tuple[StorageView, ...]
    partitions: tuple[PartitionView, ...]

    @property
    def closed(self) -> list[PartitionView]:
        return [partition for partition in self.partitions if not partition.is_open]

    @property
    def short(self) -> list[PartitionView]:
        """Open, with replicas missing that should count."""
        return [
            partition
            for partition in self.partitions
            if partition.is_open and partition.counting < sum(role is Role.MEMBER for role in partition.replicas.values())
        ]

    @property
    def silent(self) -> dict[str, WaltzError]:
        """Servers and storages that do not answer, by name, and why."""
        servers = {view.meta.name: view.error for view in self.servers if view.error is not None}
        return servers | {view.meta.name: view.error for view in self.storages if view.error is not None}

    @property
    def is_healthy(self) -> bool:
        return not self.silent and not self.closed and not self.short


async def look(coordinator: Coordinator, *, tls: Tls | None = None) -> Overview:
    cluster = Cluster(coordinator)
    meta = await cluster.meta()
    if tls is not None and tls.identity.key != meta.key:
        raise ForeignCluster(
            f"the certificate belongs to the cluster {tls.identity.key}; the one at this root is {meta.name}, {meta.key}",
            not_done="nothing was asked of any daemon",
            next_step="use a certificate of that cluster, or another --root",
        )
    assignment, _ = await cluster.assignment()
    sets, _ = await cluster.replicas()
    leader = await cluster.leader()
    servers, storages = await asyncio.gather(
        _each(await cluster.servers(), lambda server: _server(server, meta.key, tls)),
        _each(await cluster.storages(), lambda storage: _storage(storage, meta.key, tls)),
    )
    owned = {
        (view.meta.name, found.partition): found
        for view in servers
        if view.said is not None
        for found in view.said.partitions
    }
    return Overview(
        meta=meta,
        leader=leader.name if leader is not None else None,
        servers=tuple(servers),
        storages=tuple(storages),
        partitions=tuple(
            PartitionView(
                partition=partition,
                owner=owner.server,
                generation=owner.generation,
                replicas=sets.partitions.get(partition, {}),
                said=owned.get((owner.server, partition)) if owner.server is not None else None,
            )
            for partition, owner in enumerate(assignment.owners)
        ),
    )


N = TypeVar("N", ServerMeta, StorageMeta)


async def _each(metas: Mapping[str, N], ask: Callable[[N], Awaitable[T]]) -> list[T]:
    """All of them, a few at a time, in the order of their names."""
    turn = asyncio.Semaphore(CALLS_MAX)

    async def one(meta: N) -> T:
        async with turn:
            return await ask(meta)

    return await asyncio.gather(*(one(meta) for _, meta in sorted(metas.items())))


async def _server(meta: ServerMeta, key: UUID, tls: Tls | None) -> ServerView:
    async with ServerAdminClient(meta.admin_listen, key, seconds=CALL_SECONDS, tls=tls) as admin:
        try:
            async with first_contact(meta.admin_listen, tls):
                said = await admin.describe()
        except WaltzError as error:
            return ServerView(meta=meta, said=None, error=error)
    if said.instance != meta.instance:
        stranger = ForeignCluster(f"another process than server {meta.name} answers at {meta.admin_listen}")
        return ServerView(meta=meta, said=None, error=stranger)
    return ServerView(meta=meta, said=said, error=None)


async def _storage(meta: StorageMeta, key: UUID, tls: Tls | None) -> StorageView:
    async with AdminClient(meta.admin_listen, key, seconds=CALL_SECONDS, tls=tls, name=meta.name) as admin:
        try:
            async with first_contact(meta.admin_listen, tls):
                said = await admin.describe()
        except WaltzError as error:
            return StorageView(meta=meta, said=None, error=error)
    if said.cluster_key != key:
        stranger = ForeignCluster(f"the storage at {meta.admin_listen} has the cluster key {said.cluster_key}")
        return StorageView(meta=meta, said=None, error=stranger)
    return StorageView(meta=meta, said=said, error=None)
