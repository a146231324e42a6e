"""The documents of a cluster in the coordinator, as typed operations: values with the versions at which they were read.

There is no cache and no decision here. Every change is a compare-and-set: the caller passes the version that it read, and
gets `ChangedMeanwhile` if another process changed the document first. Changes that belong together are one transaction.
`CannotConnect` from a change means that its outcome is unknown: read the document again.

One document of each partition records how far its archive reaches.

Writing this document is the last step of an upload: what it names is in the store, was read back and was verified. A
document only goes forward: the next version has a higher manifest number or a higher floor. When two owners write at the
same time, the compare-and-set on the version rejects one of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar
from uuid import uuid4

from waltzd.cluster.coordinator import Change, Check, Coordinator, Create, Delete, Node, Set
from waltzd.cluster.documents import (
    NO_SECRET,
    ArchiveMeta,
    Assignment,
    ChannelsDocument,
    ClusterMeta,
    CopyRate,
    Counter,
    HistoryEntry,
    Leader,
    Membership,
    Moves,
    Ownership,
    PartitionMeta,
    PolicyDocument,
    Preferences,
    ReplicaSet,
    ReplicaSets,
    ServerMeta,
    StorageMeta,
    check_sets,
    decode_root,
)
from waltzd.errors import BadArgument, WaltzError
from waltzd.errors.operations import (
    BadMetadata,
    ChangedMeanwhile,
    NameInUse,
    NodeExists,
    NodeMissing,
    TooManyCallers,
    Unsafe,
)
from waltzd.protocol.channels import NO_CHANNELS, Channels
from waltzd.protocol.descriptions import Archived
from waltzd.protocol.document import Document, decode, encode
from waltzd.protocol.level import THIS, Program
from waltzd.protocol.timelines import Lineage

ROOT = "/"
SERVERS = "/servers"
ASSIGNMENT = "/assignment"
STORAGES = "/storages"
REPLICAS = "/replicas"
PARTITIONS = "/partitions"
IDS = "/ids"
CLIENT_IDS = f"{IDS}/client"
CLIENTS = "/clients"
"""Folder of the documents of applications, by name."""
EXPECTED = "/expected"
"""Folder of the servers that should be up, with their last registration. `SERVERS` has ephemeral nodes, for servers that
are up; a document here exists until an operator removes the server."""
PREFERRED = "/preferred"
MOVES = "/moves"
COPY_RATE = "/copy-rate"
HISTORY = "/history"
POLICY, CHANNELS = "/policy", "/channels"
ARCHIVES = "/archives"
ELECTION = "/election"
LEADER = f"{ELECTION}/leader"
FOLDERS = (SERVERS, EXPECTED, STORAGES, REPLICAS, PARTITIONS, IDS, CLIENTS, ELECTION, HISTORY, ARCHIVES)
_OURS = {path.split("/")[1] for path in (*FOLDERS, ASSIGNMENT, PREFERRED, MOVES, COPY_RATE, POLICY, CHANNELS)}
"""Names directly below the root of a cluster. Any other node there does not belong to the cluster."""
_WITH_NODES = (SERVERS, STORAGES)
"""Folders for which waiting for a change includes each node below them."""
CLIENT_ID_MAX = (1 << 31) - 1
CLIENT_NUMBERS_KEPT = CLIENT_ID_MAX // 4 * 3
"""Client numbers after which a client is refused: about three years of the clock. Its id is issued again only after
`CLIENT_ID_MAX` numbers, so an owner whose newest known number is older than others' still refuses it in time."""
CLIENT_NUMBERS_UNKNOWN = CLIENT_ID_MAX // 8
"""Client numbers that other servers may have issued without this one knowing."""
CLIENT_IDS_PER_SECOND = 16
"""Lowest rate, by the clock, at which the counter of client ids rises. A restored older document therefore issues no id
twice, unless ids were issued faster than this since it was current."""
CLIENT_IDS_JUMP_MAX = 1 << 30
"""Highest plausible lead of the counter over the clock and over earlier reads. Ids repeat after `CLIENT_ID_MAX` numbers, so
a counter with a larger lead could issue ids of connected clients, and is refused."""
CLIENT_IDS_BEYOND_MAX = 1 << 27
"""Client ids that a server issues beyond `CLIENT_IDS_PER_SECOND` until it is restarted: a sixteenth of all."""
CLIENT_IDS_AHEAD = 1 << 20
"""Distance of a new counter above all that is known of one that was deleted."""
ATTEMPTS_MAX = 100
"""Lost races for a client id in a row before a call fails. For each one, another server issued an id."""
READS_MAX = 64
"""Documents that are read concurrently."""
CREATED_AT_ONCE = 2000
"""Documents of partitions that are created in one transaction."""
HISTORY_MAX = 1000
"""Entries of the history that are kept; the oldest are deleted first."""
NO_VERSION = -1
"""Version of a document that does not exist."""

D = TypeVar("D", bound=Document)
M = TypeVar("M", ServerMeta, StorageMeta)
N = TypeVar("N")
K = TypeVar("K")
R = TypeVar("R")


def client_of(number: int) -> int:
    """Return the client id of a client number."""
    return (number - 1) % CLIENT_ID_MAX + 1


def lap_of(number: int) -> int:
    """Return how many times all client ids had been issued before this number."""
    return (number - 1) // CLIENT_ID_MAX


def number_of(client: int, newest: int) -> int:
    """Return the highest number of a client id that may have been issued, given the newest known number."""
    highest = max(newest + CLIENT_NUMBERS_UNKNOWN, CLIENT_ID_MAX)
    return highest - (highest - client) % CLIENT_ID_MAX


def replicas_path(partition: int) -> str:
    return f"{REPLICAS}/{partition}"


def partition_path(partition: int) -> str:
    return f"{PARTITIONS}/{partition}"


@dataclass(frozen=True)
class Registered:
    """The registration of a server: an ephemeral document with its version."""

    meta: ServerMeta
    version: int
    is_mine: bool


@dataclass(frozen=True)
class Leadership:
    name: str
    version: int
    is_mine: bool


class Cluster:
    def __init__(
        self, coordinator: Coordinator, *, clock: Callable[[], float] = time.time, program: Program = THIS
    ) -> None:
        """`clock`: seconds since 1970, used for client ids only. `program`: version of this process."""
        self.coordinator = coordinator
        self._clock = clock
        self._program = program
        self._counting = asyncio.Lock()
        self._counter: Counter | None = None
        """Counter of client ids as it was last read."""
        self._counted = 0
        """Highest `next` of the counter that was read or written here."""
        self._beyond = self._beyond_at = 0.0
        """Client ids issued here beyond the rate of the clock, and the loop time at which that was computed."""

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
        """Create a cluster in one transaction; the documents of thousands of partitions follow in further ones.

        A repeated call with the same key completes an interrupted one. If `replicas` has an entry for the number after the
        partitions, the cluster has a group log from the start (`waltzd.cluster.groups`)."""
        replicas = replicas or ReplicaSets(partitions={})
        check_sets(meta, storages, replicas)
        owners = Assignment(owners=(Ownership(None, 0),) * (meta.partitions + (meta.partitions in replicas.partitions)))
        changes = [
            *(Create(ROOT, encode(meta)), *(Create(folder, b"") for folder in FOLDERS)),
            Create(ASSIGNMENT, encode(owners)),
            Create(CLIENT_IDS, encode(Counter(1, uuid4()))),
            *(Create(f"{STORAGES}/{storage.name}", encode(storage)) for storage in storages),
        ]
        sets = [
            Create(replicas_path(partition), encode(ReplicaSet(replicas.partitions.get(partition, {}))))
            for partition in (*range(meta.partitions, len(owners.owners)), *range(meta.partitions))
        ]
        cluster = cls(coordinator)
        try:
            await coordinator.commit([*changes, *sets[:CREATED_AT_ONCE]])
        except NodeExists as error:
            there = await cluster.meta()
            if there.key != meta.key:
                what = f"the coordinator holds a cluster at this root already: {there.name}, key {there.key}"
                raise NameInUse(what) from error
        for first in range(CREATED_AT_ONCE, len(sets), CREATED_AT_ONCE):
            try:
                await coordinator.commit(sets[first : first + CREATED_AT_ONCE])
            except NodeExists:
                continue  # an earlier, interrupted call created them
        return cluster

    async def meta(self) -> ClusterMeta:
        node = await self.coordinator.get(ROOT)
        if node is None:
            raise NodeMissing("the coordinator has no cluster at this root", path=ROOT)
        return decode_root(node.data, program=self._program)

    async def set_format(self, format: int, *, before: ClusterMeta) -> None:
        """Set the format that the next session of each partition writes. It can only rise.

        Raises:
            Unsafe: The format is lower than the current one.
            ChangedMeanwhile: The document is not `before` any more.
        """
        if format < before.format:
            raise Unsafe(f"the cluster writes format {before.format}, and there is no way back to format {format}")
        await self.change_root(before, replace(before, format=format))

    async def change_root(self, before: ClusterMeta, wanted: ClusterMeta) -> None:
        """Replace the document of the cluster; raise `ChangedMeanwhile` if it is not `before` any more."""
        assert wanted.level >= before.level, "a level only rises"
        version = await self._version_of(ROOT)  # first, so that it notices a change after this look
        if await self.meta() != before:
            raise ChangedMeanwhile("the document of the cluster was changed by another process meanwhile")
        await self.coordinator.commit([Set(ROOT, encode(wanted), version)])

    # -- servers -------------------------------------------------------------------------------------------------------

    async def servers(self) -> dict[str, ServerMeta]:
        """Return the servers that are up, by name."""
        return await self._below(SERVERS, ServerMeta)

    async def server(self, name: str) -> Registered | None:
        path = f"{SERVERS}/{name}"
        node = await self.coordinator.get(path)
        return None if node is None else Registered(_named(ServerMeta, node.data, path), node.version, node.is_mine)

    async def register_server(self, meta: ServerMeta) -> None:
        """Register a server while this coordinator session lasts; raise `NodeExists` if the name is taken."""
        await self.coordinator.commit(await self._announcing(meta))

    async def replace_server(self, meta: ServerMeta, version: int) -> None:
        """Replace a registration that was read at this version."""
        await self.coordinator.commit([Delete(f"{SERVERS}/{meta.name}", version), *await self._announcing(meta)])

    async def _announcing(self, meta: ServerMeta) -> list[Change]:
        """Return the changes that register a server as up, and as expected after this coordinator session has ended."""
        own = Create(f"{SERVERS}/{meta.name}", encode(meta), ephemeral=True)
        path, data = f"{EXPECTED}/{meta.name}", encode(meta)
        node = await self.coordinator.get(path)
        if node is not None:
            return [own, Set(path, data, node.version)]
        folder = [] if await self.coordinator.get(EXPECTED) is not None else [Create(EXPECTED, b"")]
        return [own, *folder, Create(path, data)]

    async def update_server(self, meta: ServerMeta) -> None:
        """Change the registration that this coordinator session made."""
        path = f"{SERVERS}/{meta.name}"
        node = await self.coordinator.get(path)
        if node is None:
            raise NodeMissing(f"{path} is not registered", path=path)
        if not node.is_mine:
            raise ChangedMeanwhile(f"{path} was registered by another process", path=path)
        await self.coordinator.commit([Set(path, encode(meta), node.version)])

    async def unregister_server(self, name: str) -> None:
        """Delete the registration that this coordinator session made, if there is one."""
        found = await self.server(name)
        if found is not None and found.is_mine:
            with suppress(NodeMissing):
                await self.coordinator.commit([Delete(f"{SERVERS}/{name}", found.version)])

    async def expected_servers(self) -> dict[str, ServerMeta]:
        """Return the servers that should be up, by name."""
        return await self._below(EXPECTED, ServerMeta)

    async def forget_server(self, name: str) -> None:
        """Remove a server from those that should be up, until it registers again."""
        path = f"{EXPECTED}/{name}"
        await self.coordinator.commit([Delete(path, await self._version_of(path))])

    async def leader(self) -> Leadership | None:
        node = await self.coordinator.get(LEADER)
        return None if node is None else Leadership(decode(Leader, node.data, LEADER).name, node.version, node.is_mine)

    async def become_leader(self, name: str, *, over: int | None = None) -> bool:
        """Try to become the leader; return whether this session is. `over`: version of a leadership to end first."""
        create: list[Change] = [Create(LEADER, encode(Leader(name)), ephemeral=True)]
        changes = create if over is None else [Delete(LEADER, over), *create]
        try:
            await self.coordinator.commit(changes)
        except ChangedMeanwhile:
            found = await self.leader()
            return found is not None and found.is_mine
        return True

    # -- owners --------------------------------------------------------------------------------------------------------

    async def assignment(self) -> tuple[Assignment, int]:
        return await self._document(ASSIGNMENT, Assignment)

    async def save_assignment(self, assignment: Assignment, version: int) -> int:
        """Write the assignment and return its new version."""
        await self.coordinator.commit([Set(ASSIGNMENT, encode(assignment), version)])
        return version + 1

    # -- storages and replicas -----------------------------------------------------------------------------------------

    async def storages(self, unreadable: dict[str, WaltzError] | None = None) -> dict[str, StorageMeta]:
        """Return all storages by name. Corrupt documents are added to `unreadable` by path; without it they raise."""
        return await self._below(STORAGES, StorageMeta, unreadable)

    async def add_storage(self, meta: StorageMeta) -> None:
        """Add a storage; replace its document if that is corrupt. Raise `NameInUse` if another one has its addresses."""
        path = f"{STORAGES}/{meta.name}"
        unreadable: dict[str, WaltzError] = {}
        check_addresses(await self.storages(unreadable), meta)
        version = await self._version_of(path) if path in unreadable else NO_VERSION
        try:
            await self.coordinator.commit([put(path, encode(meta), version)])
        except NodeExists as error:
            raise NameInUse(f"the cluster has a storage {meta.name} already") from error

    async def update_storage(self, meta: StorageMeta, *, before: StorageMeta) -> None:
        """Change the address or the group of a storage; raise `ChangedMeanwhile` if it is not `before` any more."""
        path = f"{STORAGES}/{meta.name}"
        version = await self._version_of(path)  # first, so that it notices a change after this look
        if (await self.storages()).get(meta.name) != before:
            raise ChangedMeanwhile(f"the storage {meta.name} was changed by another process meanwhile")
        await self.coordinator.commit([Set(path, encode(meta), version)])

    async def remove_storage(self, name: str, *, moves: int | None = None) -> None:
        """Remove a storage; raise `Unsafe` while partitions have replicas there.

        The transaction also fails if a replica is added at the same moment, or if the moves do not have version `moves`."""
        all_of_them = Check(REPLICAS, await self._version_of(REPLICAS))
        replicas, versions = await self.replicas()
        held = [partition for partition, names in sorted(replicas.partitions.items()) if name in names]
        if held:
            raise Unsafe(
                f"partitions {', '.join(map(str, held))} have replicas on {name}",
                next_step="move its replicas to other storages first",
                storage=name,
            )
        path = f"{STORAGES}/{name}"
        aimed = [] if moves is None else untouched(MOVES, moves)
        gone = Delete(path, await self._version_of(path))
        await self.coordinator.commit([all_of_them, *aimed, *_unchanged(versions), gone])

    async def replica_set(self, partition: int) -> tuple[Mapping[str, Membership], int]:
        found, version = await self._document(replicas_path(partition), ReplicaSet)
        return found.replicas, version

    async def replicas(self, unreadable: dict[str, WaltzError] | None = None) -> tuple[ReplicaSets, dict[int, int]]:
        """Return all replica sets and their versions. Corrupt documents are added to `unreadable` by path, or raise."""
        names = await self.coordinator.children(REPLICAS)
        if not names:
            await self._version_of(REPLICAS)  # there is no cluster at all
        sets: dict[int, Mapping[str, Membership]] = {}
        versions: dict[int, int] = {}

        async def read(number: int) -> None:
            try:
                sets[number], versions[number] = await self.replica_set(number)
            except BadMetadata as error:
                if unreadable is None:
                    raise
                unreadable[replicas_path(number)] = error

        numbers = sorted(int(name) for name in names if name.isdecimal())
        await self.each(numbers, read)
        return ReplicaSets(partitions={number: sets[number] for number in numbers if number in sets}), versions

    async def save_replica_set(self, partition: int, roles: Mapping[str, Membership], version: int) -> int:
        """Write the replica set of a partition and return its new version; with `NO_VERSION`, create the document.

        Every storage that is named must be in the cluster at that moment."""
        checks: list[Change] = []
        for name in sorted(roles):
            node = await self.coordinator.get(f"{STORAGES}/{name}")
            if node is None:
                raise BadArgument(f"the cluster has no storage {name}")
            checks.append(Check(f"{STORAGES}/{name}", node.version))
        path, data = replicas_path(partition), encode(ReplicaSet(roles))
        if version == NO_VERSION:  # the document was deleted: changing REPLICAS notifies readers of all sets
            checks += [Set(REPLICAS, b"", await self._version_of(REPLICAS)), Create(path, data)]
        else:
            checks.append(Set(path, data, version))
        await self.coordinator.commit(checks)
        return version + 1

    # -- partitions ----------------------------------------------------------------------------------------------------

    async def partition(self, partition: int) -> tuple[PartitionMeta | None, int]:
        """Return the document of a partition; None and `NO_VERSION` if no owner has written one."""
        return await self._perhaps(partition_path(partition), PartitionMeta, None)

    async def save_partition(
        self,
        partition: int,
        meta: PartitionMeta,
        version: int | None,
        *,
        replicas: tuple[Mapping[str, Membership], int] | None = None,
    ) -> int:
        """Write the document of a partition and return its new version; with None or `NO_VERSION`, create it.

        `replicas` is a replica set, and its version, to write in the same transaction."""
        before = NO_VERSION if version is None else version
        changes = [put(partition_path(partition), encode(meta), before)]
        if replicas is not None:
            changes.append(Set(replicas_path(partition), encode(ReplicaSet(replicas[0])), replicas[1]))
        await self.coordinator.commit(changes)
        return before + 1

    # -- clients -------------------------------------------------------------------------------------------------------

    @property
    def client_secret(self) -> bytes:
        """Key of the tokens of client ids."""
        assert self._counter is not None, "`read_counter` comes first"
        return self._counter.secret.bytes

    async def read_counter(self) -> int:
        """Read the counter of client ids and return its version. Restore the document if it was deleted or is corrupt."""
        try:
            found, version = await self._document(CLIENT_IDS, Counter)
            if found.secret == NO_SECRET:  # another program restored the documents of an archive
                return await self._count_anew(self._counter or replace(found, secret=uuid4()))
            self._counter = self._above_all_given(found, version)
        except NodeMissing:
            version = await self._count_anew(self._counter or Counter(1, uuid4()))
        except BadMetadata as error:
            if self._counter is None or "schema" in error.facts:  # a newer version wrote it, or nothing is known of it
                raise
            version = await self._count_anew(self._counter)
        return version

    async def _count_anew(self, known: Counter) -> int:
        """Restore the counter of client ids and return the version of its document.

        Connected clients keep their ids, so the counter continues above all of them; and their tokens, so the secret
        stays. Servers notice a deleted counter at once; if no server is up, the secret is lost, and a new one is made."""
        root = await self._version_of(ROOT)  # do not restore it in a cluster that is deleted
        await self.meta()  # a command that restores the documents writes this one as well
        folder = [] if await self.coordinator.get(IDS) is not None else [Create(IDS, b"")]
        node = await self.coordinator.get(CLIENT_IDS)
        before = NO_VERSION if node is None else node.version
        there = known.next if known.next <= max(self._counted, self._drawn_by_now) + CLIENT_IDS_JUMP_MAX else 0
        drawn = max(there, self._counted, self._drawn_by_now) + CLIENT_IDS_AHEAD
        counter = replace(known, next=drawn, written=before + 1)
        await self.coordinator.commit([Check(ROOT, root), *folder, put(CLIENT_IDS, encode(counter), before)])
        self._counter = counter
        return before + 1

    def _above_all_given(self, counter: Counter, version: int) -> Counter:
        """Return the counter that is safe to continue with, given the version of its node.

        Restoring an older document raises the version of the node. A server issues one id with each write, and never below
        the clock, so the writes between the two versions limit the ids that were issued since. Versions restart when a node
        was deleted; the number of writes is then unknown."""
        writes = version - counter.written
        if writes == 0:
            return counter
        first = max(counter.next, self._drawn_by_now)
        return replace(counter, next=first + (writes if writes > 0 else CLIENT_IDS_AHEAD))

    @property
    def _drawn_by_now(self) -> int:
        return int(self._clock() * CLIENT_IDS_PER_SECOND)

    @property
    def newest_client(self) -> int:
        """Highest client number that this server knows; other servers may have issued newer ones."""
        return max(self._counted, self._drawn_by_now)

    async def new_client_id(self) -> int:
        """Return the client id of a new client number."""
        return client_of(await self.new_client_number())

    async def new_client_number(self) -> int:
        """Issue a client number that was never issued before, and return it.

        `client_of` returns its client id, `lap_of` how many older numbers have the same id. If the coordinator's answer is
        lost, the number is unused. Calls run one at a time, because only one caller can win a race for the counter.

        Compare-and-set ensures that no number is issued twice. If the document was restored to an older state, three values
        ensure it: the version of the node, the counter that this server remembers, and the clock, because time has passed
        since that state. A document that jumps ahead to where ids repeat is refused. A clock that is behind has no effect,
        one that is ahead skips ids. Ids repeat after 2^31 numbers; at the rate of the clock that takes four years, and one
        server adds at most `CLIENT_IDS_BEYOND_MAX`. A client that lives longer is refused after `CLIENT_NUMBERS_KEPT`
        numbers. Outcomes are looked up only in transactions after the request, so an unused id can be issued again."""
        async with self._counting:
            now = asyncio.get_running_loop().time()
            self._beyond = max(0.0, self._beyond - CLIENT_IDS_PER_SECOND * (now - self._beyond_at))
            self._beyond_at = now
            if self._beyond >= CLIENT_IDS_BEYOND_MAX:
                raise TooManyCallers(
                    f"this server has given out {CLIENT_IDS_BEYOND_MAX} client ids more than {CLIENT_IDS_PER_SECOND} a "
                    "second: at that pace ids would begin again while clients have them",
                    not_done="no client id was given out",
                    next_step="see with `waltzctl client list` who registers without end, and take its grants; "
                    f"{CLIENT_IDS_PER_SECOND} ids a second are given out meanwhile",
                )
            self._beyond += 1
            return await self._next_client_number()

    def _check_jump(self, counter: Counter) -> None:
        known = max(self._counted, self._drawn_by_now)
        if counter.next > known + CLIENT_IDS_JUMP_MAX:
            raise BadMetadata(
                f"{CLIENT_IDS} has counted to {counter.next}, and cannot be above {known + CLIENT_IDS_JUMP_MAX} yet: "
                f"clients that "
                "live would lose their ids to others",
                not_done="no client id was given out",
                next_step="see who changed the document, and delete it: the servers write it anew; if the clock of "
                "this server is years behind, set it",
                path=CLIENT_IDS,
            )
        self._counted = max(self._counted, counter.next)

    async def _next_client_number(self) -> int:
        for _ in range(ATTEMPTS_MAX):
            try:
                version = await self.read_counter()
                assert self._counter is not None
                self._check_jump(self._counter)
                drawn = max(self._counter.next, self._counted, self._drawn_by_now)
                counter = replace(self._counter, next=drawn + 1, written=version + 1)
                await self.coordinator.commit([Set(CLIENT_IDS, encode(counter), version)])
            except ChangedMeanwhile as error:
                if error.facts.get("path") == ROOT:
                    raise
                continue
            self._counter, self._counted = counter, counter.next
            return drawn
        raise ChangedMeanwhile(f"{CLIENT_IDS} was changed by others {ATTEMPTS_MAX} times in a row")

    # -- documents of operators ----------------------------------------------------------------------------------------

    async def preferences(self) -> tuple[Preferences, int]:
        return await self._perhaps(PREFERRED, Preferences, Preferences(partitions={}))

    async def save_preferences(self, preferences: Preferences, version: int) -> None:
        await self.coordinator.commit([put(PREFERRED, encode(preferences), version)])

    async def moves(self) -> tuple[Moves, int]:
        return await self._perhaps(MOVES, Moves, Moves(partitions={}))

    async def save_moves(
        self, moves: Moves, version: int, *, replicas: Mapping[int, int] | None = None, there: Iterable[str] = ()
    ) -> None:
        """Write the moves, on conditions: the replica sets of `replicas` have these versions, and the documents `there`
        exist."""
        checks = [Check(path, await self._version_of(path)) for path in there]
        await self.coordinator.commit([*checks, *_unchanged(replicas or {}), put(MOVES, encode(moves), version)])

    async def copy_rate(self) -> CopyRate | None:
        return (await self._perhaps(COPY_RATE, CopyRate, None))[0]

    async def set_copy_rate(self, rate: CopyRate, *, lasts: bool = False) -> None:
        """Set the limit for copying; it replaces an earlier one.

        It is deleted with this coordinator session. One that `lasts` stays until `lift_copy_rate`: owners keep copying for
        a recorded move after its command was interrupted."""
        while True:
            node = await self.coordinator.get(COPY_RATE)
            there: list[Change] = [] if node is None else [Delete(COPY_RATE, node.version)]
            try:
                await self.coordinator.commit([*there, Create(COPY_RATE, encode(rate), ephemeral=not lasts)])
            except ChangedMeanwhile as error:
                if node is None and not isinstance(error, NodeExists):
                    raise  # there is no cluster any more
                continue  # it was deleted, or another command set it, at the same moment
            return

    async def lift_copy_rate(self) -> None:
        """Remove the limit for copying, unless another command removed or replaced it at the same moment."""
        node = await self.coordinator.get(COPY_RATE)
        if node is not None:
            with suppress(ChangedMeanwhile):
                await self.coordinator.commit([Delete(COPY_RATE, node.version)])

    async def policy(self) -> tuple[PolicyDocument | None, int]:
        """Return the policy and its version; None and `NO_VERSION` if there is none."""
        return await self._perhaps(POLICY, PolicyDocument, None)

    async def policy_version(self) -> int:
        """Return the version of the policy, even if it is corrupt."""
        node = await self.coordinator.get(POLICY)
        return NO_VERSION if node is None else node.version

    async def save_policy(self, policy: PolicyDocument | None, version: int, *, channels: int | None = None) -> None:
        """Write the policy, or delete it with None, if its document still has this version, and that of the channels, of
        which grants speak, the version `channels`."""
        if policy is None:
            await self.coordinator.commit([Delete(POLICY, version)])
        else:
            checks = [] if channels is None else untouched(CHANNELS, channels)
            await self.coordinator.commit([*checks, put(POLICY, encode(policy), version)])

    async def history(self, newest: int = HISTORY_MAX) -> list[tuple[int, HistoryEntry]]:
        """Return the newest entries, oldest first."""
        found = []
        for name in (await self.coordinator.children(HISTORY))[-newest:]:
            node = await self.coordinator.get(f"{HISTORY}/{name}")
            if node is not None:  # else it was deleted since
                found.append((int(name), decode(HistoryEntry, node.data, f"{HISTORY}/{name}")))
        return found

    async def begin_history(self, entry: HistoryEntry) -> int:
        """Add an entry to the history and return its number."""
        while True:
            names = await self.coordinator.children(HISTORY)
            number = int(names[-1]) + 1 if names else 1
            folder = [] if names or await self.coordinator.get(HISTORY) is not None else [Create(HISTORY, b"")]
            changes: list[Change] = [*folder, Create(f"{HISTORY}/{number:010}", encode(entry))]
            try:
                for name in names[: -(HISTORY_MAX - 1)]:
                    path = f"{HISTORY}/{name}"
                    changes.append(Delete(path, await self._version_of(path)))
                await self.coordinator.commit(changes)
            except (NodeExists, NodeMissing) as error:
                if folder and isinstance(error, NodeMissing):
                    raise  # there is no cluster any more
                continue  # another command added or deleted an entry at the same moment
            return number

    async def end_history(self, number: int, entry: HistoryEntry) -> None:
        path = f"{HISTORY}/{number:010}"
        await self.coordinator.commit([Set(path, encode(entry), await self._version_of(path))])

    async def close_history(self, number: int, *, ended: str, outcome: str) -> None:
        """Record how a command ended, unless that is recorded already: the command may do so itself at the same moment."""
        path = f"{HISTORY}/{number:010}"
        node = await self.coordinator.get(path)
        if node is None:
            return  # it was deleted, as one of the oldest
        entry = decode(HistoryEntry, node.data, path)
        if entry.ended is None:
            with suppress(ChangedMeanwhile, NodeMissing):
                await self.coordinator.commit(
                    [Set(path, encode(replace(entry, ended=ended, outcome=outcome)), node.version)]
                )

    # -- its end -------------------------------------------------------------------------------------------------------

    async def versions(self) -> dict[str, int]:
        """Return the version of every node, each after its parent."""
        await self.check_alone()
        return {path: await self._version_of(path) for path in await self.paths()}

    async def delete(self, versions: Mapping[str, int] | None = None) -> int:
        """Delete every document of the cluster in one transaction; return their number. Raise `ChangedMeanwhile` if a
        document was created or changed since the nodes had these `versions`."""
        if versions is None:
            versions = await self.versions()
        await self.coordinator.commit([Delete(path, versions[path]) for path in reversed(list(versions))])
        return len(versions)

    # -- access control ------------------------------------------------------------------------------------------------

    async def open_nodes(self) -> list[str]:
        """Return the paths of the nodes that a process without credentials may read or change, the root first."""
        paths = await self.paths()
        are_open = await self.each(paths, self.coordinator.is_open)
        return [path for path, is_open in zip(paths, are_open, strict=True) if is_open]

    async def unclosed_nodes(self) -> list[str]:
        """Return the paths of the nodes that do not belong to the credentials of this process alone: open nodes, and those
        of a name or a password that is being replaced."""
        paths = await self.paths()
        are_ours = await self.each(paths, self.coordinator.is_ours)
        return [path for path, is_ours in zip(paths, are_ours, strict=True) if not is_ours]

    async def secure(self) -> int:
        """Close every node, the root first, so that new nodes are closed, too; return how many were open."""
        await self.check_alone()
        closed = 0
        while found := await self.unclosed_nodes():
            for path in found:
                with suppress(NodeMissing):  # it was deleted meanwhile
                    await self.coordinator.protect(path)
                    closed += 1
        return closed

    async def paths(self) -> list[str]:
        """Return the paths of all nodes, each after its parent."""
        paths = [ROOT]
        level = [ROOT]
        while level:
            # Read-only names cannot list the node of the counter of client ids; it has no children.
            level = [path for path in level if path != CLIENT_IDS]
            names = await self.each(level, self.coordinator.children)
            level = [f"{path.rstrip('/')}/{name}" for path, below in zip(level, names, strict=True) for name in below]
            paths += level
        return paths

    async def check_alone(self) -> None:
        """Raise `Unsafe` if a node below the root does not belong to this cluster."""
        if strange := set(await self.coordinator.children(ROOT)) - _OURS:
            step = "see what it is, another cluster perhaps: only when it is gone can these documents be deleted"
            raise Unsafe(f"what is not this cluster's stands below its root: {', '.join(sorted(strange))}", next_step=step)

    # -- changes -------------------------------------------------------------------------------------------------------

    async def wait_for_change(self, paths: Sequence[str], seen: object | None) -> object:
        """Wait as `Coordinator.wait_for_change`. Get a token first, then read, then wait with it: no change is missed."""
        found: list[str] = []
        for path in paths:
            found.append(path)
            if path in _WITH_NODES:
                found += [f"{path}/{name}" for name in await self.coordinator.children(path)]
        return await self.coordinator.wait_for_change(found, seen)

    async def confirm(self, versions: Mapping[str, int]) -> None:
        """Raise `ChangedMeanwhile` unless these documents have these versions; `NO_VERSION` if they do not exist. ZooKeeper
        may answer a read with an old document, but commits a check on the newest one only."""
        checks = [change for path, version in sorted(versions.items()) for change in untouched(path, version)]
        await self.coordinator.commit(checks)

    async def wait_for_servers(self, seen: object | None) -> object:
        """Wait for a server that comes, goes, or changes its registration."""
        return await self.wait_for_change([SERVERS], seen)

    async def wait_for_assignment(self, seen: object | None) -> object:
        return await self.wait_for_change([ASSIGNMENT], seen)

    async def wait_for_counter(self, seen: object | None) -> object:
        """Wait for the counter of client ids to be deleted or created, not for each id that is issued."""
        return await self.wait_for_change([IDS], seen)

    async def wait_for_policy(self, seen: object | None) -> object:
        return await self.wait_for_change([POLICY, CHANNELS, ROOT], seen)

    async def wait_for_replicas(self, partition: int, seen: object | None) -> object:
        """Wait for a change of the partition's replica set, of a storage, or of the format that the cluster writes."""
        return await self.wait_for_change([replicas_path(partition), STORAGES, ROOT], seen)

    async def wait_for_partition(self, partition: int, seen: object | None) -> object:
        return await self.wait_for_change([partition_path(partition)], seen)

    # -- many documents ------------------------------------------------------------------------------------------------

    async def each(self, keys: Iterable[K], ask: Callable[[K], Awaitable[R]]) -> list[R]:
        """Call `ask` for each key, `READS_MAX` at a time; return the results in the order of the keys."""
        turns = asyncio.Semaphore(READS_MAX)

        async def one(key: K) -> R:
            async with turns:
                return await ask(key)

        return await asyncio.gather(*map(one, keys))

    # -- below ---------------------------------------------------------------------------------------------------------

    async def _document(self, path: str, kind: type[D]) -> tuple[D, int]:
        node = await self._node(path)
        return decode(kind, node.data, path), node.version

    async def _version_of(self, path: str) -> int:
        return (await self._node(path)).version

    async def _node(self, path: str) -> Node:
        node = await self.coordinator.get(path)
        if node is None:
            raise NodeMissing(f"the coordinator has no document {path}", path=path)
        return node

    async def _perhaps(self, path: str, kind: type[D], nothing: N) -> tuple[D | N, int]:
        node = await self.coordinator.get(path)
        return (nothing, NO_VERSION) if node is None else (decode(kind, node.data, path), node.version)

    async def _below(self, folder: str, kind: type[M], unreadable: dict[str, WaltzError] | None = None) -> dict[str, M]:
        found: dict[str, M] = {}
        for name in await self.coordinator.children(folder):
            path = f"{folder}/{name}"
            node = await self.coordinator.get(path)
            if node is None:  # it was deleted since
                continue
            try:
                found[name] = _named(kind, node.data, path)
            except BadMetadata as error:
                if unreadable is None:
                    raise
                unreadable[path] = error
        return found


def _unchanged(versions: Mapping[int, int]) -> list[Change]:
    return [Check(replicas_path(partition), version) for partition, version in sorted(versions.items())]


def check_addresses(storages: Mapping[str, StorageMeta], storage: StorageMeta) -> None:
    """Refuse two names for one storage: its acknowledgements under both names would be on one disk, and count twice."""
    for name, other in storages.items():
        if name != storage.name and {storage.listen, storage.admin_listen} & {other.listen, other.admin_listen}:
            raise NameInUse(
                f"{storage.listen} or {storage.admin_listen} is an address of the storage {name} already",
                next_step="give each storage addresses of its own",
            )


def untouched(path: str, version: int) -> list[Change]:
    """Return changes that only check that a document has this version, or does not exist."""
    return [Create(path, b""), Delete(path, 0)] if version == NO_VERSION else [Check(path, version)]


def put(path: str, data: bytes, version: int) -> Change:
    """Return the change that writes a document, or creates it with `NO_VERSION`."""
    return Create(path, data) if version == NO_VERSION else Set(path, data, version)


def _named(kind: type[M], data: bytes, path: str) -> M:
    """Decode a document that contains its own name; raise `BadMetadata` if the name does not match the path."""
    meta = decode(kind, data, path)
    if meta.name != path.rpartition("/")[2]:
        raise BadMetadata(f"{path}: name is {meta.name}, which belongs elsewhere", path=path, field="name")
    return meta


# -- channels ----------------------------------------------------------------------------------------------------------


async def channels_of(coordinator: Coordinator) -> tuple[Channels, int]:
    """Return the channels and the version of their document; no channels and `NO_VERSION` if there is no document."""
    document, version = await channels_document(coordinator)
    return document.channels, version


async def channels_document(coordinator: Coordinator) -> tuple[ChannelsDocument, int]:
    """Return the document of the channels as `channels_of` does."""
    node = await coordinator.get(CHANNELS)
    if node is None:
        return ChannelsDocument(channels=NO_CHANNELS), NO_VERSION
    return decode(ChannelsDocument, node.data, CHANNELS), node.version


async def save_channels(coordinator: Coordinator, document: ChannelsDocument, version: int, *, policy: int) -> None:
    """Write the channels if their document has `version` and the policy has version `policy`: grants depend on both."""
    await coordinator.commit([*untouched(POLICY, policy), put(CHANNELS, encode(document), version)])


def archive_path(partition: int) -> str:
    return f"{ARCHIVES}/{partition}"


async def archived(coordinator: Coordinator, partition: int) -> tuple[ArchiveMeta | None, int]:
    """Return the document and its version; None and `NO_VERSION` if nothing of the partition is archived."""
    path = archive_path(partition)
    node = await coordinator.get(path)
    return (None, NO_VERSION) if node is None else (decode(ArchiveMeta, node.data, path), node.version)


async def all_archived(coordinator: Coordinator) -> Mapping[int, ArchiveMeta]:
    names = [name for name in await coordinator.children(ARCHIVES) if name.isdecimal()]
    found = {int(name): (await archived(coordinator, int(name)))[0] for name in names}
    return {partition: meta for partition, meta in sorted(found.items()) if meta is not None}


def said(meta: ArchiveMeta) -> Archived:
    """Return the document in the form that owners and storages exchange."""
    return Archived(
        archive=meta.archive, number=meta.number, sha256=meta.sha256, last_id=meta.last, timeline=meta.timeline
    )  # fmt: skip


def shared_with(meta: ArchiveMeta | None, lineage: Lineage) -> Archived | None:
    """Return the part of the archive that belongs to the log of this lineage; None if no part does.

    That is all of it if the document names the current timeline, otherwise everything up to the fork. Use it for reading
    and comparing only: what counts as archived is what `of_timeline` returns."""
    if meta is None or meta.timeline not in lineage:
        return None
    shared = lineage.shared_to(meta.timeline)
    last_id = meta.last if shared is None else min(meta.last, shared)
    if last_id < 0:
        return None
    return replace(said(meta), last_id=last_id)


def of_timeline(meta: ArchiveMeta | None, lineage: Lineage) -> ArchiveMeta | None:
    """Return the document if it names the current timeline of the log, otherwise None."""
    return meta if meta is not None and meta.timeline == lineage.current else None


def _goes_on(meta: ArchiveMeta, before: ArchiveMeta) -> bool:
    """Return whether `meta` may replace `before`: more is archived, the floor rises, or another timeline begins."""
    if meta.timeline != before.timeline:
        return meta.archive == before.archive
    if meta.archive != before.archive or meta.floor < before.floor:
        return False
    if meta.number == before.number:
        return (meta.sha256, meta.last) == (before.sha256, before.last) and meta.floor > before.floor
    return meta.number > before.number and meta.last >= before.last


async def save_archived(
    coordinator: Coordinator, partition: int, meta: ArchiveMeta, before: ArchiveMeta | None, version: int
) -> int:
    """Write the document and return its new version. `before` is the document that was read at `version`."""
    if before is not None and not _goes_on(meta, before):
        raise BadMetadata(
            f"the archive of partition {partition} reaches to id {before.last} by the manifest {before.number} of "
            f"{before.archive}, with the floor {before.floor}; it does not go back to id {meta.last} by the manifest "
            f"{meta.number} of {meta.archive}, with the floor {meta.floor}"
        )
    folder: list[Change] = []
    if (
        version == NO_VERSION and await coordinator.get(ARCHIVES) is None
    ):  # a cluster of an older version has no such folder
        folder = [Create(ARCHIVES, b"")]
    try:
        await coordinator.commit([*folder, put(archive_path(partition), encode(meta), version)])
    except ChangedMeanwhile:
        found, newest = await archived(coordinator, partition)
        if found == meta:  # our own write, whose answer was lost
            return newest
        raise
    return version + 1
