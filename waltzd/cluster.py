"""What a cluster's documents in the coordinator are, as typed operations: values with the versions they were read at.

Nothing is remembered here and nothing is decided here. Every change is a compare-and-set: whoever changes a document gives
the version that it read, and gets `ChangedMeanwhile` when somebody was faster. Changes that belong together are one
transaction. `CannotConnect` from a change means that it may have been made: read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar
from uuid import uuid4

from waltzd.coordinator import Change, Check, Coordinator, Create, Delete, Set
from waltzd.copy_rate import COPY_RATE
from waltzd.document import decode, encode, is_name
from waltzd.errors import (
    BadArgument,
    BadMetadata,
    ChangedMeanwhile,
    NameInUse,
    NodeExists,
    NodeMissing,
    StorageInUse,
    Unsafe,
)
from waltzd.expected import EXPECTED, expecting
from waltzd.meta import (
    Assignment,
    ClusterMeta,
    Counter,
    HistoryEntry,
    Leader,
    Moves,
    Ownership,
    PartitionMeta,
    Preferences,
    ReplicaSets,
    ServerMeta,
    StorageMeta,
)

ROOT = "/"
SERVERS = "/servers"
ASSIGNMENT = "/assignment"
STORAGES = "/storages"
REPLICAS = "/replicas"
PARTITIONS = "/partitions"
CLIENT_IDS = "/ids/client"
LEADER = "/election/leader"
PREFERRED = "/preferred"
MOVES = "/moves"
HISTORY = "/history"
HISTORY_MAX = 1000
"""Entries that are kept: the oldest go first."""
_FOLDERS = (SERVERS, EXPECTED, STORAGES, PARTITIONS, "/ids", "/election", HISTORY)
_OURS = {path.split("/")[1] for path in (*_FOLDERS, ASSIGNMENT, REPLICAS, PREFERRED, MOVES, COPY_RATE)}
"""What stands right below the root of a cluster. Whatever else does is somebody else's."""
_WITH_NODES = (SERVERS, STORAGES)
"""To wait for a change of these is to wait for a change of each node below them, too."""
NO_VERSION = -1
"""Of a document that is not there."""
CLIENT_ID_MAX = (1 << 31) - 1
ATTEMPTS_MAX = 100
"""Every lost race for a client id means that somebody else got one: so many in a row are no accident."""

D = TypeVar("D", ClusterMeta, ServerMeta, Assignment, StorageMeta, ReplicaSets, PartitionMeta, Leader, Counter)
W = TypeVar("W", Preferences, Moves)
"""Documents that are only there once somebody wanted something."""


def partition_path(partition: int) -> str:
    return f"{PARTITIONS}/{partition}"


@dataclass(frozen=True)
class Registered:
    """A document that goes away with the coordinator session of the server that wrote it."""

    meta: ServerMeta
    version: int
    is_mine: bool


@dataclass(frozen=True)
class Leadership:
    name: str
    version: int
    is_mine: bool


class Cluster:
    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._counting = asyncio.Lock()

    # -- the cluster ---------------------------------------------------------------------------------------------------

    @classmethod
    async def create(
        cls,
        coordinator: Coordinator,
        meta: ClusterMeta,
        *,
        storages: Collection[StorageMeta] = (),
        replicas: ReplicaSets | None = None,
    ) -> Cluster:
        """Write down a new cluster, whole or not at all. To repeat it with the same key is no mistake."""
        replicas = replicas or ReplicaSets(partitions={})
        _check_sets(meta, storages, replicas)
        owners = Assignment(owners=(Ownership(None, 0),) * meta.partitions)
        changes = [
            Create(ROOT, encode(meta)),
            *(Create(folder, b"") for folder in _FOLDERS),
            Create(ASSIGNMENT, encode(owners)),
            Create(REPLICAS, encode(replicas)),
            Create(CLIENT_IDS, encode(Counter(1, uuid4()))),
            *(Create(f"{STORAGES}/{storage.name}", encode(storage)) for storage in storages),
        ]
        cluster = cls(coordinator)
        try:
            await coordinator.commit(changes)
        except NodeExists as error:
            there = await cluster.meta()
            if there.key != meta.key:
                raise NameInUse(
                    f"the coordinator holds a cluster at this root already: {there.name}, key {there.key}"
                ) from error
        return cluster

    async def meta(self) -> ClusterMeta:
        node = await self.coordinator.get(ROOT)
        if node is None:
            raise NodeMissing("the coordinator has no cluster at this root", path=ROOT)
        return decode(ClusterMeta, node.data, ROOT)

    # -- servers -------------------------------------------------------------------------------------------------------

    async def servers(self) -> dict[str, ServerMeta]:
        """All servers that are up, by name."""
        return await self._below(SERVERS, ServerMeta)

    async def server(self, name: str) -> Registered | None:
        path = f"{SERVERS}/{name}"
        node = await self.coordinator.get(path)
        return None if node is None else Registered(_named(ServerMeta, node.data, path), node.version, node.is_mine)

    async def register_server(self, meta: ServerMeta) -> None:
        """Announce a server, for as long as this coordinator session lasts. `NodeExists` when the name is taken."""
        await self.coordinator.commit(await self._announcing(meta))

    async def replace_server(self, meta: ServerMeta, version: int) -> None:
        """Announce a server in the place of a registration that was read with this version."""
        await self.coordinator.commit([Delete(f"{SERVERS}/{meta.name}", version), *await self._announcing(meta)])

    async def _announcing(self, meta: ServerMeta) -> list[Change]:
        """It is up from now on, and expected also when this coordinator session is over."""
        own = Create(f"{SERVERS}/{meta.name}", encode(meta), ephemeral=True)
        return [own, *await expecting(self.coordinator, meta)]

    async def update_server(self, meta: ServerMeta) -> None:
        """Change the registration that this coordinator session made."""
        path = f"{SERVERS}/{meta.name}"
        node = await self.coordinator.get(path)
        if node is None:
            raise NodeMissing(f"{path} is not registered", path=path)
        if not node.is_mine:
            raise ChangedMeanwhile(f"{path} was registered by somebody else", path=path)
        await self.coordinator.commit([Set(path, encode(meta), node.version)])

    async def unregister_server(self, name: str) -> None:
        """Take back the registration that this coordinator session made, if there is one."""
        found = await self.server(name)
        if found is not None and found.is_mine:
            with suppress(NodeMissing):
                await self.coordinator.commit([Delete(f"{SERVERS}/{name}", found.version)])

    async def leader(self) -> Leadership | None:
        node = await self.coordinator.get(LEADER)
        return None if node is None else Leadership(decode(Leader, node.data, LEADER).name, node.version, node.is_mine)

    async def become_leader(self, name: str, *, over: int | None = None) -> bool:
        """Whether this coordinator session is the leader now. `over`: the version of a leadership to put an end to."""
        create: list[Change] = [Create(LEADER, encode(Leader(name)), ephemeral=True)]
        changes = create if over is None else [Delete(LEADER, over), *create]
        try:
            await self.coordinator.commit(changes)
        except ChangedMeanwhile:
            found = await self.leader()
            return found is not None and found.is_mine
        return True

    # -- who owns what -------------------------------------------------------------------------------------------------

    async def assignment(self) -> tuple[Assignment, int]:
        return await self._document(ASSIGNMENT, Assignment)

    async def save_assignment(self, assignment: Assignment, version: int) -> int:
        """The version that it has now."""
        await self.coordinator.commit([Set(ASSIGNMENT, encode(assignment), version)])
        return version + 1

    # -- storages and replicas -----------------------------------------------------------------------------------------

    async def storages(self) -> dict[str, StorageMeta]:
        return await self._below(STORAGES, StorageMeta)

    async def add_storage(self, meta: StorageMeta) -> None:
        try:
            await self.coordinator.commit([Create(f"{STORAGES}/{meta.name}", encode(meta))])
        except NodeExists as error:
            raise NameInUse(f"the cluster has a storage {meta.name} already") from error

    async def update_storage(self, meta: StorageMeta, *, before: StorageMeta) -> None:
        """Its address or group is another one now; the name says which storage it is. Only if it is still what it was."""
        path = f"{STORAGES}/{meta.name}"
        version = await self._version(path)  # first: who changes it after this look is noticed by it
        if (await self.storages()).get(meta.name) != before:
            raise ChangedMeanwhile(f"the storage {meta.name} was changed by somebody else meanwhile")
        await self.coordinator.commit([Set(path, encode(meta), version)])

    async def remove_storage(self, name: str) -> None:
        """Refused while partitions have replicas there, also when one is given to it at this moment."""
        replicas, version = await self.replicas()
        held = [partition for partition, names in sorted(replicas.partitions.items()) if name in names]
        if held:
            raise StorageInUse(f"partitions {', '.join(map(str, held))} have replicas on {name}", storage=name)
        path = f"{STORAGES}/{name}"
        await self.coordinator.commit([Check(REPLICAS, version), Delete(path, await self._version(path))])

    async def replicas(self) -> tuple[ReplicaSets, int]:
        return await self._document(REPLICAS, ReplicaSets)

    async def save_replicas(self, replicas: ReplicaSets, version: int) -> int:
        """The version that it has now. Every storage that is named must be in the cluster at that moment."""
        await self.coordinator.commit([*await self._checks(replicas), Set(REPLICAS, encode(replicas), version)])
        return version + 1

    # -- partitions ----------------------------------------------------------------------------------------------------

    async def partition(self, partition: int) -> tuple[PartitionMeta | None, int]:
        """None, and `NO_VERSION`, when no owner ever wrote one."""
        path = partition_path(partition)
        node = await self.coordinator.get(path)
        return (None, NO_VERSION) if node is None else (decode(PartitionMeta, node.data, path), node.version)

    async def save_partition(
        self,
        partition: int,
        meta: PartitionMeta,
        version: int | None,
        *,
        replicas: tuple[ReplicaSets, int] | None = None,
    ) -> int:
        """The version that it has now. Without a version, or with `NO_VERSION`, it is the first. With `replicas`, both
        change or neither."""
        before = NO_VERSION if version is None else version
        changes = [_put(partition_path(partition), encode(meta), before)]
        if replicas is not None:
            changes += [*await self._checks(replicas[0]), Set(REPLICAS, encode(replicas[0]), replicas[1])]
        await self.coordinator.commit(changes)
        return before + 1

    # -- clients -------------------------------------------------------------------------------------------------------

    async def client_secret(self) -> bytes:
        """What tokens of client ids are made with."""
        counter, _ = await self._document(CLIENT_IDS, Counter)
        return counter.secret.bytes

    async def new_client_id(self) -> int:
        """An id that nobody else ever had or will have. One is lost when the answer of the coordinator is. One at a time:
        of many who race for the counter all but one go in vain, and are there again for the next race."""
        async with self._counting:
            return await self._next_client_id()

    async def _next_client_id(self) -> int:
        for _ in range(ATTEMPTS_MAX):
            counter, version = await self._document(CLIENT_IDS, Counter)
            if counter.next > CLIENT_ID_MAX:
                raise BadMetadata(f"{CLIENT_IDS}: all {CLIENT_ID_MAX} client ids have been given out", path=CLIENT_IDS)
            try:
                await self.coordinator.commit([Set(CLIENT_IDS, encode(replace(counter, next=counter.next + 1)), version)])
            except NodeMissing:
                raise
            except ChangedMeanwhile:
                continue
            return counter.next
        raise ChangedMeanwhile(f"{CLIENT_IDS} was changed by others {ATTEMPTS_MAX} times in a row")

    # -- what operators want and did -----------------------------------------------------------------------------------

    async def preferences(self) -> tuple[Preferences, int]:
        return await self._wish(PREFERRED, Preferences, Preferences(partitions={}))

    async def save_preferences(self, preferences: Preferences, version: int) -> None:
        await self.coordinator.commit([_put(PREFERRED, encode(preferences), version)])

    async def moves(self) -> tuple[Moves, int]:
        return await self._wish(MOVES, Moves, Moves(partitions={}))

    async def save_moves(self, moves: Moves, version: int, *, replicas_version: int | None = None) -> None:
        """With `replicas_version`, only if the replicas are what they were when this was planned."""
        checks: list[Change] = [] if replicas_version is None else [Check(REPLICAS, replicas_version)]
        await self.coordinator.commit([*checks, _put(MOVES, encode(moves), version)])

    async def history(self, newest: int = HISTORY_MAX) -> list[tuple[int, HistoryEntry]]:
        """The newest entries, oldest first."""
        found = []
        for name in (await self.coordinator.children(HISTORY))[-newest:]:
            node = await self.coordinator.get(f"{HISTORY}/{name}")
            if node is not None:  # else it has made room since
                found.append((int(name), decode(HistoryEntry, node.data, f"{HISTORY}/{name}")))
        return found

    async def begin_history(self, entry: HistoryEntry) -> int:
        """The number of the entry."""
        while True:
            names = await self.coordinator.children(HISTORY)
            number = int(names[-1]) + 1 if names else 1
            changes: list[Change] = [Create(f"{HISTORY}/{number:010}", encode(entry))]
            try:
                for path in [f"{HISTORY}/{name}" for name in names[: -(HISTORY_MAX - 1)]]:
                    changes.append(Delete(path, await self._version(path)))
                await self.coordinator.commit(changes)
            except (NodeExists, NodeMissing):
                continue  # somebody else wrote an entry, or made room, at the same moment
            return number

    async def end_history(self, number: int, entry: HistoryEntry) -> None:
        path = f"{HISTORY}/{number:010}"
        await self.coordinator.commit([Set(path, encode(entry), await self._version(path))])

    async def delete(self) -> int:
        """Take every document of the cluster away, whole or not at all; how many there were."""
        await self.check_alone()
        paths = [ROOT]
        for path in paths:  # grows while it is walked
            paths += [f"{path.rstrip('/')}/{name}" for name in await self.coordinator.children(path)]
        await self.coordinator.commit([Delete(path, await self._version(path)) for path in reversed(paths)])
        return len(paths)

    async def check_alone(self) -> None:
        if strange := set(await self.coordinator.children(ROOT)) - _OURS:
            step = "see what it is, another cluster perhaps: only when it is gone can these documents be deleted"
            raise Unsafe(f"what is not this cluster's stands below its root: {', '.join(sorted(strange))}", next_step=step)

    # -- changes -------------------------------------------------------------------------------------------------------

    async def wait_for_change(self, paths: Sequence[str], seen: object | None) -> object:
        """Like the coordinator's, for `SERVERS`, `ASSIGNMENT`, `STORAGES`, `REPLICAS`, `LEADER` and `partition_path(p)`.
        Ask for a token first, then read, then wait with it: nothing is missed."""
        found: list[str] = []
        for path in paths:
            found.append(path)
            if path in _WITH_NODES:
                found += [f"{path}/{name}" for name in await self.coordinator.children(path)]
        return await self.coordinator.wait_for_change(found, seen)

    async def wait_for_servers(self, seen: object | None) -> object:
        """For a server that comes, goes, or announces something else."""
        return await self.wait_for_change([SERVERS], seen)

    async def wait_for_assignment(self, seen: object | None) -> object:
        return await self.wait_for_change([ASSIGNMENT], seen)

    async def wait_for_replicas(self, seen: object | None) -> object:
        """For a replica that comes, goes or changes its role, and for a storage that does or has another address."""
        return await self.wait_for_change([REPLICAS, STORAGES], seen)

    async def wait_for_partition(self, partition: int, seen: object | None) -> object:
        return await self.wait_for_change([partition_path(partition)], seen)

    # -- below ---------------------------------------------------------------------------------------------------------

    async def _document(self, path: str, kind: type[D]) -> tuple[D, int]:
        node = await self.coordinator.get(path)
        if node is None:
            raise NodeMissing(f"the coordinator has no document {path}", path=path)
        return decode(kind, node.data, path), node.version

    async def _wish(self, path: str, kind: type[W], nothing: W) -> tuple[W, int]:
        node = await self.coordinator.get(path)
        return (nothing, NO_VERSION) if node is None else (decode(kind, node.data, path), node.version)

    async def _version(self, path: str) -> int:
        node = await self.coordinator.get(path)
        if node is None:
            raise NodeMissing(f"the coordinator has no document {path}", path=path)
        return node.version

    async def _below(self, folder: str, kind: type[N]) -> dict[str, N]:
        found: dict[str, N] = {}
        for name in await self.coordinator.children(folder):
            node = await self.coordinator.get(f"{folder}/{name}")
            if node is not None:  # else it has gone since
                found[name] = _named(kind, node.data, f"{folder}/{name}")
        return found

    async def _checks(self, replicas: ReplicaSets) -> list[Change]:
        """Conditions for a commit: the storages are there, and nobody removes them at the same time."""
        checks: list[Change] = []
        for name in sorted({name for names in replicas.partitions.values() for name in names}):
            node = await self.coordinator.get(f"{STORAGES}/{name}")
            if node is None:
                raise BadArgument(f"the cluster has no storage {name}")
            checks.append(Check(f"{STORAGES}/{name}", node.version))
        return checks


N = TypeVar("N", ServerMeta, StorageMeta)


def _put(path: str, data: bytes, version: int) -> Change:
    """A document that may not be there yet."""
    return Create(path, data) if version == NO_VERSION else Set(path, data, version)


def _named(kind: type[N], data: bytes, path: str) -> N:
    """A document that says its own name."""
    meta = decode(kind, data, path)
    if meta.name != path.rpartition("/")[2]:
        raise BadMetadata(f"{path}: name is {meta.name}, which belongs elsewhere", path=path, field="name")
    return meta


def _check_sets(meta: ClusterMeta, storages: Collection[StorageMeta], replicas: ReplicaSets) -> None:
    """What a person may have mistyped."""
    names = [storage.name for storage in storages]
    for name in [meta.name, *names]:
        if not is_name(name):
            raise BadArgument(f"{name!r} is not a name: letters, digits, dots, dashes and underscores, at most 64")
    if len(set(names)) != len(names):
        raise BadArgument("two storages have the same name")
    for partition, members in replicas.partitions.items():
        if not 0 <= partition < meta.partitions:
            raise BadArgument(f"there is no partition {partition}: the cluster has {meta.partitions}")
        for name in members:
            if name not in names:
                raise BadArgument(f"partition {partition} cannot have a replica on {name}: there is no such storage")
