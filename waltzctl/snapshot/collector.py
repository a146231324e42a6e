"""Takes snapshots of a cluster: reads its documents in ZooKeeper and asks all daemons at the same time.

Only an unreachable ZooKeeper raises. `snapshot_from_daemons` then collects what the daemons report, if the caller still
knows their addresses.

The documents that a snapshot needs are read in one go and cached until one of them changes.

Documents hardly ever change, and a cluster with a thousand partitions has more than a thousand of them. A caller that
takes snapshots repeatedly caches them and waits for a change notice. The order matters: get a token, read, wait with
the token. A change before the read is read; a later change ends the wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Self, TypeVar
from uuid import UUID

from waltzctl.shell.cluster_target import ClusterTarget, first_contact, using
from waltzctl.shell.progress import waiting_aloud
from waltzctl.snapshot.cluster_snapshot import Call, ClusterSnapshot, PartitionView, ServerView, StorageView, compared
from waltzd.cluster.cluster import (
    ASSIGNMENT,
    CHANNELS,
    EXPECTED,
    LEADER,
    MOVES,
    POLICY,
    REPLICAS,
    ROOT,
    SERVERS,
    STORAGES,
    Cluster,
    channels_of,
    replicas_path,
)
from waltzd.cluster.coordinator import Coordinator
from waltzd.cluster.documents import Assignment, ClusterMeta, Membership, Moves, ReplicaSets, ServerMeta, StorageMeta
from waltzd.errors import ForeignCluster, WaltzError
from waltzd.errors.operations import BadMetadata
from waltzd.protocol.descriptions import OwnedPartition
from waltzd.wire.servers import ServerAdminClient
from waltzd.wire.storages import AdminClient
from waltzd.wire.tls import Tls

PATHS = (ROOT, ASSIGNMENT, LEADER, MOVES, POLICY, CHANNELS, REPLICAS, EXPECTED, STORAGES, SERVERS)


@dataclass(frozen=True, kw_only=True)
class Documents:
    meta: ClusterMeta
    assignment: Assignment
    sets: ReplicaSets
    leader: str | None
    moves: Moves
    expected: Mapping[str, ServerMeta]
    storages: Mapping[str, StorageMeta]
    servers: Mapping[str, ServerMeta]
    unreadable: Mapping[str, WaltzError]
    """Documents that cannot be decoded: path → error."""


async def read(cluster: Cluster) -> Documents:
    meta = await cluster.meta()
    unreadable: dict[str, WaltzError] = {}
    (assignment, _), (sets, _), leader, (moves, _), expected, storages = await asyncio.gather(
        cluster.assignment(),
        cluster.replicas(unreadable),
        cluster.leader(),
        cluster.moves(),
        cluster.expected_servers(),
        cluster.storages(unreadable),
    )
    for path, ask in ((POLICY, cluster.policy), (CHANNELS, partial(channels_of, cluster.coordinator))):
        try:
            await ask()
        except BadMetadata as error:
            unreadable[path] = error
    return Documents(
        meta=meta,
        assignment=assignment,
        sets=sets,
        leader=leader.name if leader is not None else None,
        moves=moves,
        expected=expected,
        storages=storages,
        servers=await cluster.servers(),  # read last, so that a server that registers meanwhile is not missing
        unreadable=dict(sorted(unreadable.items())),
    )


def paths_of(found: Documents) -> list[str]:
    """Return the paths of all documents. Waiting for the folder of servers or storages waits for each document in it."""
    numbers = {*range(len(found.assignment.owners)), *found.sets.partitions}
    return [*PATHS, *(f"{EXPECTED}/{name}" for name in sorted(found.expected)), *map(replicas_path, sorted(numbers))]


class DocumentCache:
    """Cache of the documents between snapshots. Watching costs more than one read, so it begins only after two
    successive reads returned equal documents."""

    def __init__(self) -> None:
        self._before: Documents | None = None
        self._trusted: Documents | None = None
        self._watching: asyncio.Task[None] | None = None

    async def read(self, cluster: Cluster) -> Documents:
        if self._trusted is not None and cluster.coordinator.is_connected:
            return self._trusted
        found = await read(cluster)
        if found == self._before and self._watching is None:
            self._watching = asyncio.create_task(self._watch(cluster))
        self._before = found
        return found

    async def _watch(self, cluster: Cluster) -> None:
        try:
            with suppress(WaltzError):  # the next read raises it
                paths = paths_of(await read(cluster))
                token = await cluster.wait_for_change(paths, None)
                found = await read(cluster)
                if paths_of(found) == paths:
                    self._trusted = found
                    await cluster.wait_for_change(paths, token)
        finally:
            self._trusted = self._watching = None

    async def forget(self) -> None:
        """Drop the cached documents and stop watching."""
        self._trusted = self._before = None
        if self._watching is not None:
            watching = self._watching
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


CALL_SECONDS = 5.0
"""Seconds for one call; a daemon that does not answer within them is recorded as silent."""
CALLS_MAX = 32
"""Daemons asked at the same time."""
T = TypeVar("T")
N = TypeVar("N", ServerMeta, StorageMeta)
C = TypeVar("C", ServerAdminClient, AdminClient)


def snapshot_of(target: ClusterTarget) -> ClusterSnapshot:
    """Take a snapshot for a command that only shows something."""
    return using(target, lambda cluster: take_snapshot(cluster.coordinator, tls=target.tls))


class AdminConnections:
    """Connections to the admin ports of daemons, kept open from one snapshot to the next, because connecting costs more
    than asking. A connection is closed if a call over it failed or the last snapshot did not use it. Use it as `async
    with`."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], ServerAdminClient | AdminClient] = {}
        self._used: set[tuple[str, str]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._used.clear()
        await self.rest()

    @asynccontextmanager
    async def to(
        self, kind: type[C], meta: ServerMeta | StorageMeta, key: UUID, tls: Tls | None, seconds: float
    ) -> AsyncIterator[C]:
        """Lend a connection for one call; connect if none is open."""
        place = f"{kind.__name__} {meta.name}", meta.admin_listen
        found = self._open.pop(place, None)
        if not isinstance(found, kind):
            found = kind(meta.admin_listen, key, seconds=seconds, tls=tls, name=meta.name)
        try:
            async with first_contact(meta.admin_listen, tls):
                yield found
        except BaseException:
            await found.close()
            raise
        self._open[place] = found
        self._used.add(place)

    async def rest(self) -> None:
        """Close connections that were not used since the last call of this method."""
        for place in [place for place in self._open if place not in self._used]:
            await self._open.pop(place).close()
        self._used.clear()


async def take_snapshot(
    coordinator: Coordinator,
    *,
    tls: Tls | None = None,
    seconds: float = CALL_SECONDS,
    aloud: bool = False,
    contacts: AdminConnections | None = None,
    documents: Callable[[Cluster], Awaitable[Documents]] = read,
) -> ClusterSnapshot:
    """Take a snapshot; raise if ZooKeeper does not answer. With `aloud`, name on standard error the daemons that have
    not answered yet. `contacts` and `documents` may keep connections and documents from one snapshot to the next."""
    if contacts is None:
        async with AdminConnections() as passing:
            return await take_snapshot(
                coordinator, tls=tls, seconds=seconds, aloud=aloud, contacts=passing, documents=documents
            )
    cluster = Cluster(coordinator)
    found = await documents(cluster)
    meta, assignment, sets = found.meta, found.assignment, found.sets
    if tls is not None and tls.identity.key != meta.key:
        raise ForeignCluster(
            f"the certificate belongs to the cluster {tls.identity.key}; the one at this root is {meta.name}, {meta.key}",
            not_done="nothing was asked of any daemon",
            next_step="use a certificate of that cluster, or another --root",
        )
    servers, storages = await asyncio.gather(
        _each(
            found.servers.values(),
            lambda server: _server(contacts, server, meta.key, tls, seconds, is_registered=True),
            waits=seconds if aloud else None,
        ),
        _each(
            found.storages.values(),
            lambda storage: _storage(contacts, storage, meta.key, tls, seconds),
            waits=seconds if aloud else None,
        ),
    )
    await contacts.rest()
    owned = {
        (view.meta.name, one.partition): one
        for view in servers
        if view.reported is not None
        for one in view.reported.partitions
    }
    return ClusterSnapshot(
        meta=meta,
        leader=found.leader,
        servers=tuple(servers),
        storages=tuple(storages),
        partitions=compared(
            (
                PartitionView(
                    partition=partition,
                    owner=owner.server,
                    generation=owner.generation,
                    replicas=sets.partitions.get(partition, {}),
                    reported=owned.get((owner.server, partition)) if owner.server is not None else None,
                    is_group_log=partition == meta.partitions,
                )
                for partition, owner in enumerate(assignment.owners)
            ),
            storages,
        ),
        moves=found.moves.partitions,
        missing=tuple(meta for name, meta in sorted(found.expected.items()) if name not in found.servers),
        unreadable=found.unreadable,
    )


async def snapshot_from_daemons(
    meta: ClusterMeta,
    servers: Collection[ServerMeta],
    storages: Collection[StorageMeta],
    replicas: Mapping[int, Mapping[str, Membership]],
    *,
    tls: Tls | None = None,
    seconds: float = CALL_SECONDS,
) -> ClusterSnapshot:
    """Take a snapshot without ZooKeeper. The owner of a partition is the server that reports it; if several do, the one
    with the highest generation."""
    async with AdminConnections() as contacts:
        server_views, storage_views = await asyncio.gather(
            _each(servers, lambda server: _server(contacts, server, meta.key, tls, seconds, is_registered=False)),
            _each(storages, lambda storage: _storage(contacts, storage, meta.key, tls, seconds)),
        )
    owned: dict[int, tuple[str, OwnedPartition]] = {}
    for view in server_views:
        for found in view.reported.partitions if view.reported is not None else ():
            if found.partition not in owned or owned[found.partition][1].generation < found.generation:
                owned[found.partition] = view.meta.name, found
    has_group_log = meta.partitions in owned or meta.partitions in replicas
    numbers = range(meta.partitions + has_group_log)
    leaders = [view.meta.name for view in server_views if view.reported is not None and view.reported.is_leader]
    return ClusterSnapshot(
        meta=meta,
        leader=leaders[0] if len(leaders) == 1 else None,
        servers=tuple(server_views),
        storages=tuple(storage_views),
        partitions=compared(
            (
                replace(
                    _unassigned(number, owned.get(number), replicas.get(number)), is_group_log=number == meta.partitions
                )
                for number in numbers
            ),
            storage_views,
        ),
    )


def _unassigned(
    number: int, owned: tuple[str, OwnedPartition] | None, replicas: Mapping[str, Membership] | None
) -> PartitionView:
    """Return a partition as its owner reports it. `replicas` are remembered from earlier; they may have moved since, and
    count only if the owner reports none."""
    name, reported = owned if owned is not None else (None, None)
    if reported is not None and reported.replicas:
        roles = {str(role): role for role in Membership}  # a replica that leaves has none of them
        replicas = {one.storage: roles[one.role] for one in reported.replicas if one.role in roles}
    return PartitionView(
        partition=number,
        owner=name,
        generation=reported.generation if reported is not None else 0,
        replicas=replicas or {},
        reported=reported,
    )


async def _each(metas: Collection[N], ask: Callable[[N], Awaitable[T]], *, waits: float | None = None) -> list[T]:
    """Ask all of them, `CALLS_MAX` at a time; return the answers in the order of their names."""
    turn = asyncio.Semaphore(CALLS_MAX)

    silent = {meta.name: None for meta in sorted(metas, key=lambda meta: meta.name)}

    async def one(meta: N) -> T:
        async with turn:
            answer = await ask(meta)
        del silent[meta.name]
        return answer

    def waited_for() -> str:
        return f"waiting for {', '.join(silent)}, for {waits:g} seconds at most" if waits is not None else ""

    async with waiting_aloud(waited_for):
        return await asyncio.gather(*(one(meta) for meta in sorted(metas, key=lambda meta: meta.name)))


class _Clock:
    """Stopwatch of one call."""

    def __init__(self) -> None:
        self._wall_ms, self._started = time.time() * 1000, time.perf_counter()

    def stop(self) -> Call:
        milliseconds = (time.perf_counter() - self._started) * 1000
        return Call(middle_ms=self._wall_ms + milliseconds / 2, milliseconds=milliseconds)


async def _server(
    contacts: AdminConnections, meta: ServerMeta, key: UUID, tls: Tls | None, seconds: float, *, is_registered: bool
) -> ServerView:
    """Ask one server. With `is_registered`, the process that answers must be the one that registered."""
    clock = _Clock()
    try:
        async with contacts.to(ServerAdminClient, meta, key, tls, seconds) as admin:
            reported = await admin.describe()
    except WaltzError as error:
        return ServerView(meta=meta, reported=None, error=error, call=clock.stop())
    call = clock.stop()
    if reported.cluster_key != key or reported.name != meta.name or (is_registered and reported.instance != meta.instance):
        stranger = ForeignCluster(f"another process than server {meta.name} answers at {meta.admin_listen}")
        return ServerView(meta=meta, reported=None, error=stranger, call=call)
    return ServerView(meta=meta, reported=reported, error=None, call=call)


async def _storage(
    contacts: AdminConnections, meta: StorageMeta, key: UUID, tls: Tls | None, seconds: float
) -> StorageView:
    clock = _Clock()
    try:
        async with contacts.to(AdminClient, meta, key, tls, seconds) as admin:
            reported = await admin.describe()
    except WaltzError as error:
        return StorageView(meta=meta, reported=None, error=error, call=clock.stop())
    call = clock.stop()
    if reported.cluster_key != key:
        stranger = ForeignCluster(f"the storage at {meta.admin_listen} has the cluster key {reported.cluster_key}")
        return StorageView(meta=meta, reported=None, error=stranger, call=call)
    return StorageView(meta=meta, reported=reported, error=None, call=call)
