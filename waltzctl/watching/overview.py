"""A cluster as a whole, as one value: what the coordinator has written down, and what its processes say of themselves.

It is put together from many answers that are a moment apart, so it may not agree with itself while things move. A process
that does not answer is part of the picture, with the reason; only a coordinator that does not answer is an error. Then
`look_without` shows what the processes say by themselves, where somebody still knows their addresses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar
from uuid import UUID

from waltzctl.aloud import waiting_aloud
from waltzctl.certificate import first_contact
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.coordinator import Coordinator
from waltzd.cluster.documents import ClusterMeta, Role, ServerMeta, StorageMeta
from waltzd.errors import ForeignCluster, WaltzError
from waltzd.protocol.descriptions import OwnedPartition, ServerDescription, StorageDescription
from waltzd.protocol.quorum import majority
from waltzd.wire.servers import ServerAdminClient
from waltzd.wire.storages import AdminClient
from waltzd.wire.tls import Tls

CALL_SECONDS = 5.0
"""Of each call: whoever does not answer by then is silent, and nobody waits longer for the picture."""
CALLS_MAX = 32
"""So many processes are asked at once."""
OPEN = "OPEN"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Call:
    """When a process was asked, and how long its answer took, with the time to connect."""

    middle_ms: float = 0.0
    """Half way between question and answer, by the clock of this machine, since 1970."""
    milliseconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ServerView:
    meta: ServerMeta
    said: ServerDescription | None
    error: WaltzError | None
    call: Call = Call()


@dataclass(frozen=True, kw_only=True)
class StorageView:
    meta: StorageMeta
    said: StorageDescription | None
    error: WaltzError | None
    call: Call = Call()


@dataclass(frozen=True, kw_only=True)
class PartitionView:
    partition: int
    owner: str | None
    generation: int
    replicas: Mapping[str, Role]
    said: OwnedPartition | None
    """By its owner."""
    refusing: frozenset[str] = frozenset()
    """Storages that answer, and say that they do not serve this replica: it was taken offline, is refused, or is not there.
    While nothing is written an owner does not notice it; whoever asks both sides knows more."""

    @property
    def is_open(self) -> bool:
        """It takes transactions: its owner says so, and no majority of the storages says otherwise."""
        return self.owner_says_open and not self._lacks_majority

    @property
    def owner_says_open(self) -> bool:
        return self.said is not None and self.said.step == OPEN and not self.said.waiting

    @property
    def counted(self) -> frozenset[str]:
        """Storages whose acknowledgements make transactions committed."""
        replicas = self.said.replicas if self.said is not None else ()
        return frozenset(replica.storage for replica in replicas if replica.counts) - self.refusing

    @property
    def counting(self) -> int:
        return len(self.counted)

    @property
    def state(self) -> str:
        """In one word."""
        if self.said is None:
            return "unknown"
        return "open" if self.is_open else "waiting" if self.said.step == OPEN else self.said.step.lower()

    @property
    def waiting(self) -> str:
        """Why it is not open, in one sentence."""
        if not self.owner_says_open or not self._lacks_majority:
            return self.owner_waiting
        members = self._members
        some, total = len(self.counted & members), len(members)
        return (
            f"{some} of {total} replicas can take them, and {majority(total)} have to: {', '.join(sorted(self.refusing))} "
            f"{'does' if len(self.refusing) == 1 else 'do'} not serve, which an owner notices when it writes there"
        )

    @property
    def owner_waiting(self) -> str:
        """The same, as far as its owner knows."""
        if self.owner is None:
            return "no server owns it"
        if self.said is None:
            return f"its owner {self.owner} does not say how it is"
        return "" if self.owner_says_open else self.said.waiting or f"{self.owner} is recovering it"

    @property
    def _members(self) -> frozenset[str]:
        return frozenset(name for name, role in self.replicas.items() if role is Role.MEMBER)

    @property
    def _lacks_majority(self) -> bool:
        """What storages refuse leaves no majority."""
        return bool(self.refusing) and len(self.counted & self._members) < majority(len(self._members))


@dataclass(frozen=True, kw_only=True)
class Overview:
    meta: ClusterMeta
    leader: str | None
    servers: tuple[ServerView, ...]
    storages: tuple[StorageView, ...]
    partitions: tuple[PartitionView, ...]
    moves: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Replicas that are on their way: where those of a partition shall be in the end."""
    missing: tuple[ServerMeta, ...] = ()
    """Servers that should be up and are not in the coordinator's list, as they announced themselves last."""
    unreadable: Mapping[str, WaltzError] = field(default_factory=dict)
    """Documents of the coordinator that cannot be understood, by their paths."""

    @property
    def nodes(self) -> tuple[ServerView | StorageView, ...]:
        return (*self.servers, *self.storages)

    @property
    def spoiled(self) -> dict[str, list[int]]:
        """Documents that are gone or spoiled, as a sentence, and the partitions whose owners go on with what they said."""
        found: dict[str, list[int]] = {error.message: [] for error in self.unreadable.values()}
        for view in self.partitions:
            if view.said is not None and view.said.trouble:
                found.setdefault(view.said.trouble, []).append(view.partition)
        return found

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
        return bool(self.partitions) and not (self.silent or self.closed or self.short or self.missing or self.spoiled)

    def level(self, number: int) -> frozenset[str]:
        """Who holds everything that is committed: the owner says so, and the storage itself says that it serves. A storage
        that is silent may stand still, and is no help."""
        return self.partitions[number].counted & {view.meta.name for view in self.storages if _serves(view, number)}


def _serves(storage: StorageView, number: int) -> bool:
    replicas = storage.said.assigned if storage.said is not None else ()
    return any(
        held.partition == number and held.refused is None and (held.status is None or held.status.is_available)
        for held in replicas
    )


def compared(partitions: Iterable[PartitionView], storages: Iterable[StorageView]) -> tuple[PartitionView, ...]:
    """With what the storages say of the replicas that owners count."""
    answering = [view for view in storages if view.said is not None]
    return tuple(
        replace(
            found,
            refusing=frozenset(
                view.meta.name
                for view in answering
                if view.meta.name in found.counted and not _serves(view, found.partition)
            ),
        )
        for found in partitions
    )


async def look(
    coordinator: Coordinator, *, tls: Tls | None = None, seconds: float = CALL_SECONDS, aloud: bool = False
) -> Overview:
    """`aloud`: say on standard error whom it waits for."""
    cluster = Cluster(coordinator)
    meta = await cluster.meta()
    if tls is not None and tls.identity.key != meta.key:
        raise ForeignCluster(
            f"the certificate belongs to the cluster {tls.identity.key}; the one at this root is {meta.name}, {meta.key}",
            not_done="nothing was asked of any daemon",
            next_step="use a certificate of that cluster, or another --root",
        )
    unreadable: dict[str, WaltzError] = {}
    (assignment, _), (sets, _), leader, (moves, _), expected, storage_metas = await asyncio.gather(
        cluster.assignment(),
        cluster.replicas(unreadable),
        cluster.leader(),
        cluster.moves(),
        cluster.expected_servers(),
        cluster.storages(unreadable),
    )
    server_metas = await cluster.servers()  # behind: who comes meanwhile is not missing
    servers, storages = await asyncio.gather(
        _each(
            server_metas.values(),
            lambda server: _server(server, meta.key, tls, seconds, is_registered=True),
            waits=seconds if aloud else None,
        ),
        _each(
            storage_metas.values(),
            lambda storage: _storage(storage, meta.key, tls, seconds),
            waits=seconds if aloud else None,
        ),
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
        partitions=compared(
            (
                PartitionView(
                    partition=partition,
                    owner=owner.server,
                    generation=owner.generation,
                    replicas=sets.partitions.get(partition, {}),
                    said=owned.get((owner.server, partition)) if owner.server is not None else None,
                )
                for partition, owner in enumerate(assignment.owners)
            ),
            storages,
        ),
        moves=moves.partitions,
        missing=tuple(meta for name, meta in sorted(expected.items()) if name not in server_metas),
        unreadable=dict(sorted(unreadable.items())),
    )


async def look_without(
    meta: ClusterMeta,
    servers: Collection[ServerMeta],
    storages: Collection[StorageMeta],
    replicas: Mapping[int, Mapping[str, Role]],
    *,
    tls: Tls | None = None,
    seconds: float = CALL_SECONDS,
) -> Overview:
    """Without the coordinator: who owns a partition is whoever says so, and of several the one of the newest generation."""
    server_views, storage_views = await asyncio.gather(
        _each(servers, lambda server: _server(server, meta.key, tls, seconds, is_registered=False)),
        _each(storages, lambda storage: _storage(storage, meta.key, tls, seconds)),
    )
    owned: dict[int, tuple[str, OwnedPartition]] = {}
    for view in server_views:
        for found in view.said.partitions if view.said is not None else ():
            if found.partition not in owned or owned[found.partition][1].generation < found.generation:
                owned[found.partition] = view.meta.name, found
    leaders = [view.meta.name for view in server_views if view.said is not None and view.said.is_leader]
    return Overview(
        meta=meta,
        leader=leaders[0] if len(leaders) == 1 else None,
        servers=tuple(server_views),
        storages=tuple(storage_views),
        partitions=compared(
            (_unassigned(number, owned.get(number), replicas.get(number)) for number in range(meta.partitions)),
            storage_views,
        ),
    )


def _unassigned(
    number: int, owned: tuple[str, OwnedPartition] | None, replicas: Mapping[str, Role] | None
) -> PartitionView:
    name, said = owned if owned is not None else (None, None)
    if not replicas:  # nobody remembers them
        replicas = {replica.storage: Role(replica.role) for replica in said.replicas} if said is not None else {}
    return PartitionView(
        partition=number, owner=name, generation=said.generation if said is not None else 0, replicas=replicas, said=said
    )


N = TypeVar("N", ServerMeta, StorageMeta)


async def _each(metas: Collection[N], ask: Callable[[N], Awaitable[T]], *, waits: float | None = None) -> list[T]:
    """All of them, a few at a time, in the order of their names."""
    turn = asyncio.Semaphore(CALLS_MAX)

    silent = {meta.name: None for meta in sorted(metas, key=lambda meta: meta.name)}

    async def one(meta: N) -> T:
        async with turn:
            answer = await ask(meta)
        del silent[meta.name]
        return answer

    def whom() -> str:
        return f"waiting for {', '.join(silent)}, for {waits:g} seconds at most" if waits is not None else ""

    async with waiting_aloud(whom):
        return await asyncio.gather(*(one(meta) for meta in sorted(metas, key=lambda meta: meta.name)))


class _Clock:
    """Of one call."""

    def __init__(self) -> None:
        self._wall_ms, self._started = time.time() * 1000, time.perf_counter()

    def stop(self) -> Call:
        milliseconds = (time.perf_counter() - self._started) * 1000
        return Call(middle_ms=self._wall_ms + milliseconds / 2, milliseconds=milliseconds)


async def _server(meta: ServerMeta, key: UUID, tls: Tls | None, seconds: float, *, is_registered: bool) -> ServerView:
    """One that is registered is the very process that did it."""
    clock = _Clock()
    async with ServerAdminClient(meta.admin_listen, key, seconds=seconds, tls=tls, name=meta.name) as admin:
        try:
            async with first_contact(meta.admin_listen, tls):
                said = await admin.describe()
        except WaltzError as error:
            return ServerView(meta=meta, said=None, error=error, call=clock.stop())
    call = clock.stop()
    if said.cluster_key != key or said.name != meta.name or (is_registered and said.instance != meta.instance):
        stranger = ForeignCluster(f"another process than server {meta.name} answers at {meta.admin_listen}")
        return ServerView(meta=meta, said=None, error=stranger, call=call)
    return ServerView(meta=meta, said=said, error=None, call=call)


async def _storage(meta: StorageMeta, key: UUID, tls: Tls | None, seconds: float) -> StorageView:
    clock = _Clock()
    async with AdminClient(meta.admin_listen, key, seconds=seconds, tls=tls, name=meta.name) as admin:
        try:
            async with first_contact(meta.admin_listen, tls):
                said = await admin.describe()
        except WaltzError as error:
            return StorageView(meta=meta, said=None, error=error, call=clock.stop())
    call = clock.stop()
    if said.cluster_key != key:
        stranger = ForeignCluster(f"the storage at {meta.admin_listen} has the cluster key {said.cluster_key}")
        return StorageView(meta=meta, said=None, error=stranger, call=call)
    return StorageView(meta=meta, said=said, error=None, call=call)
