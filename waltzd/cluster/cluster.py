"""What a cluster's documents in the coordinator are, as typed operations: values with the versions they were read at.

Nothing is remembered here and nothing is decided here. Every change is a compare-and-set: the caller gives the version that
it read, and gets `ChangedMeanwhile` when another one was faster. Changes that belong together are one transaction.
`CannotConnect` from a change means that it may have been made: read again.
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
    Assignment,
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
from waltzd.errors import (
    BadArgument,
    BadMetadata,
    ChangedMeanwhile,
    NameInUse,
    NodeExists,
    NodeMissing,
    TooManyCallers,
    Unsafe,
    WaltzError,
)
from waltzd.protocol.document import Document, decode, encode

ROOT = "/"
SERVERS = "/servers"
ASSIGNMENT = "/assignment"
STORAGES = "/storages"
REPLICAS = "/replicas"
PARTITIONS = "/partitions"
IDS = "/ids"
CLIENT_IDS = f"{IDS}/client"
CLIENTS = "/clients"
"""Which applications there are, by name."""
EXPECTED = "/expected"
"""Which servers should be up: one document for each that ever was, as it announced itself last. The list of servers forgets
those that are gone, because entries are ephemeral. This one keeps a server until an operator takes it out."""
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
"""What stands right below the root of a cluster. Anything else there is not this cluster's."""
_WITH_NODES = (SERVERS, STORAGES)
"""To wait for a change of these is to wait for a change of each node below them, too."""
CLIENT_ID_MAX = (1 << 31) - 1
CLIENT_NUMBERS_KEPT = CLIENT_ID_MAX // 4 * 3
"""Client numbers that follow one before its holder is refused: about three years of the clock. The id is given out again
after `CLIENT_ID_MAX` numbers, so an owner that knows an older number than others do still refuses the holder in time."""
CLIENT_NUMBERS_UNKNOWN = CLIENT_ID_MAX // 8
"""Client numbers that other servers may have given out and this one has not heard of."""
CLIENT_IDS_PER_SECOND = 16
"""The counter of client ids never lags behind the clock, by so many a second. An older document that is put back may
therefore not give out an id a second time, unless more than so many were given out each second since it was current."""
CLIENT_IDS_JUMP_MAX = 1 << 30
"""A counter that is so far above the clock, and above what was read before, was not counted up to there. Ids begin
again after `CLIENT_ID_MAX` of them, so one that jumps gives out ids of clients that live."""
CLIENT_IDS_BEYOND_MAX = 1 << 27
"""So many client ids a server gives out beyond `CLIENT_IDS_PER_SECOND`, a sixteenth of all, until it is started again."""
CLIENT_IDS_AHEAD = 1 << 20
"""A counter that is made anew begins so far above all that is known of the one that was deleted."""
ATTEMPTS_MAX = 100
"""Every lost race for a client id means that another server gave one out: so many in a row are no accident."""
READS_MAX = 64
"""So many documents are asked for at a time."""
CREATED_AT_ONCE = 2000
"""Documents of partitions in one transaction."""
HISTORY_MAX = 1000
"""Entries that are kept: the oldest go first."""
NO_VERSION = -1
"""Of a document that is not there."""

D = TypeVar("D", bound=Document)
M = TypeVar("M", ServerMeta, StorageMeta)
N = TypeVar("N")
K = TypeVar("K")
R = TypeVar("R")


def client_of(number: int) -> int:
    """Return the client id of a client number."""
    return (number - 1) % CLIENT_ID_MAX + 1


def lap_of(number: int) -> int:
    """Return how many times all client ids had been given out before this number."""
    return (number - 1) // CLIENT_ID_MAX


def number_of(client: int, newest: int) -> int:
    """Return the highest number of a client id that may have been given out, where `newest` is the newest one known."""
    highest = max(newest + CLIENT_NUMBERS_UNKNOWN, CLIENT_ID_MAX)
    return highest - (highest - client) % CLIENT_ID_MAX


def replicas_path(partition: int) -> str:
    return f"{REPLICAS}/{partition}"


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
    def __init__(self, coordinator: Coordinator, *, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970. Only client ids are drawn with it."""
        self.coordinator = coordinator
        self._clock = clock
        self._counting = asyncio.Lock()
        self._counter: Counter | None = None
        """As it was read last."""
        self._counted = 0
        """The highest `next` that was ever read or written here."""
        self._beyond = self._beyond_at = 0.0
        """Client ids given out here beyond what the clock allows for, and when that was, by the time of the loop."""

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
        """Write down a new cluster, whole or not at all, unless it has thousands of partitions: their documents follow. To
        repeat it with the same key is no mistake, and completes it. If `replicas` has an entry under the number after
        the partitions, the cluster has a group log from the start (`waltzd.cluster.group_log`)."""
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
                continue  # by the command that began it
        return cluster

    async def meta(self) -> ClusterMeta:
        node = await self.coordinator.get(ROOT)
        if node is None:
            raise NodeMissing("the coordinator has no cluster at this root", path=ROOT)
        return decode_root(node.data)

    async def set_format(self, format: int, *, before: ClusterMeta) -> None:
        """Which format the next session of each partition writes. It only rises, and only if the document is still what it
        was."""
        if format < before.format:
            raise Unsafe(f"the cluster writes format {before.format}, and there is no way back to format {format}")
        version = await self._version_of(ROOT)  # first, so that it notices a change after this look
        if await self.meta() != before:
            raise ChangedMeanwhile("the document of the cluster was changed by somebody else meanwhile")
        await self.coordinator.commit([Set(ROOT, encode(replace(before, format=format)), version)])

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
            raise ChangedMeanwhile(f"{path} was registered by somebody else", path=path)
        await self.coordinator.commit([Set(path, encode(meta), node.version)])

    async def unregister_server(self, name: str) -> None:
        """Take back the registration that this coordinator session made, if there is one."""
        found = await self.server(name)
        if found is not None and found.is_mine:
            with suppress(NodeMissing):
                await self.coordinator.commit([Delete(f"{SERVERS}/{name}", found.version)])

    async def expected_servers(self) -> dict[str, ServerMeta]:
        """All servers that should be up, by name."""
        return await self._below(EXPECTED, ServerMeta)

    async def forget_server(self, name: str) -> None:
        """It is not expected any more, until it announces itself again."""
        path = f"{EXPECTED}/{name}"
        await self.coordinator.commit([Delete(path, await self._version_of(path))])

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

    async def storages(self, unreadable: dict[str, WaltzError] | None = None) -> dict[str, StorageMeta]:
        """`unreadable` gets those whose documents cannot be understood, by their paths; without it that is an error."""
        return await self._below(STORAGES, StorageMeta, unreadable)

    async def add_storage(self, meta: StorageMeta) -> None:
        """Also in the place of a document that cannot be understood."""
        path = f"{STORAGES}/{meta.name}"
        unreadable: dict[str, WaltzError] = {}
        await self.storages(unreadable)
        version = await self._version_of(path) if path in unreadable else NO_VERSION
        try:
            await self.coordinator.commit([put(path, encode(meta), version)])
        except NodeExists as error:
            raise NameInUse(f"the cluster has a storage {meta.name} already") from error

    async def update_storage(self, meta: StorageMeta, *, before: StorageMeta) -> None:
        """Its address or group is another one now; the name says which storage it is. Only if it is still what it was."""
        path = f"{STORAGES}/{meta.name}"
        version = await self._version_of(path)  # first, so that it notices a change after this look
        if (await self.storages()).get(meta.name) != before:
            raise ChangedMeanwhile(f"the storage {meta.name} was changed by somebody else meanwhile")
        await self.coordinator.commit([Set(path, encode(meta), version)])

    async def remove_storage(self, name: str, *, moves: int | None = None) -> None:
        """Refused while partitions have replicas there, also when one is given to it at this moment. `moves`: and when
        moves are no longer what they were in this version."""
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
        """Of all partitions that have a document, and its version. `unreadable` gets those that cannot be understood."""
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
        """The version that it has now; `NO_VERSION` makes the document anew. Every storage that is named must be in the
        cluster at that moment."""
        checks: list[Change] = []
        for name in sorted(roles):
            node = await self.coordinator.get(f"{STORAGES}/{name}")
            if node is None:
                raise BadArgument(f"the cluster has no storage {name}")
            checks.append(Check(f"{STORAGES}/{name}", node.version))
        path, data = replicas_path(partition), encode(ReplicaSet(roles))
        if version == NO_VERSION:  # it was deleted: who looks through all of them has to notice that there is one more
            checks += [Set(REPLICAS, b"", await self._version_of(REPLICAS)), Create(path, data)]
        else:
            checks.append(Set(path, data, version))
        await self.coordinator.commit(checks)
        return version + 1

    # -- partitions ----------------------------------------------------------------------------------------------------

    async def partition(self, partition: int) -> tuple[PartitionMeta | None, int]:
        """None, and `NO_VERSION`, when no owner ever wrote one."""
        return await self._perhaps(partition_path(partition), PartitionMeta, None)

    async def save_partition(
        self,
        partition: int,
        meta: PartitionMeta,
        version: int | None,
        *,
        replicas: tuple[Mapping[str, Membership], int] | None = None,
    ) -> int:
        """The version that it has now. Without a version, or with `NO_VERSION`, it is the first. With `replicas`, who
        holds the partition from then on, both change or neither."""
        before = NO_VERSION if version is None else version
        changes = [put(partition_path(partition), encode(meta), before)]
        if replicas is not None:
            changes.append(Set(replicas_path(partition), encode(ReplicaSet(replicas[0])), replicas[1]))
        await self.coordinator.commit(changes)
        return before + 1

    # -- clients -------------------------------------------------------------------------------------------------------

    @property
    def client_secret(self) -> bytes:
        """What tokens of client ids are made with."""
        assert self._counter is not None, "`read_counter` comes first"
        return self._counter.secret.bytes

    async def read_counter(self) -> int:
        """Its version. A document that an operator has deleted or spoiled is made anew, with what was in it."""
        try:
            found, version = await self._document(CLIENT_IDS, Counter)
            if found.secret == NO_SECRET:  # documents of an archive, as another program put them back
                return await self._count_anew(self._counter or replace(found, secret=uuid4()))
            self._counter = self._above_all_given(found, version)
        except NodeMissing:
            version = await self._count_anew(self._counter or Counter(1, uuid4()))
        except BadMetadata as error:
            if self._counter is None or "schema" in error.facts:  # others know what is in it
                raise
            version = await self._count_anew(self._counter)
        return version

    async def _count_anew(self, known: Counter) -> int:
        """Clients that live keep their ids, so it goes on above all of them; and their tokens, so the secret stays. Servers
        notice at once that it is gone; where none of them lives, the secret is lost, and is another one."""
        root = await self._version_of(ROOT)  # an operator who deletes the cluster means this document, too
        await self.meta()  # a command that puts the documents back writes this one as well
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
        """Return the counter as it has to go on when its node has this version.

        An operator who puts an older document back raises the version of the node. A server gives out one id with each
        write, and never begins below the clock, so the writes between the two versions bound what was given out since.
        Versions begin again when a node was deleted, and then the writes are not known."""
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
        """The highest client number that this server knows of; others may have given out newer ones."""
        return max(self._counted, self._drawn_by_now)

    async def new_client_id(self) -> int:
        """Return the client id of a new client number."""
        return client_of(await self.new_client_number())

    async def new_client_number(self) -> int:
        """Return a number that was never given out. `client_of` makes a client id of it, `lap_of` says how many older
        numbers have the same id. A number is lost when the answer of the coordinator is. One at a time: of many who race
        for the counter all but one go in vain, and are there again for the next race.

        Compare-and-set alone excludes that two get the same number. When the document went back, the version of its node
        excludes it, what this server knows of it, and the clock: what was counted since then was counted in time that has
        passed. A document that jumps ahead, to where ids begin again, is refused. A clock that is wrong does no harm: one
        that is behind changes nothing, one that is ahead leaves ids out. Ids begin again after 2^31 of them. The clock
        alone takes four years for that, and one server adds no more than `CLIENT_IDS_BEYOND_MAX`, however many are asked
        for. A client that lives longer is refused after `CLIENT_NUMBERS_KEPT` of them. An outcome is looked for only in
        what was written after the request, so an id out of use is free."""
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

    # -- what operators want, and what they did ------------------------------------------------------------------------

    async def preferences(self) -> tuple[Preferences, int]:
        return await self._perhaps(PREFERRED, Preferences, Preferences(partitions={}))

    async def save_preferences(self, preferences: Preferences, version: int) -> None:
        await self.coordinator.commit([put(PREFERRED, encode(preferences), version)])

    async def moves(self) -> tuple[Moves, int]:
        return await self._perhaps(MOVES, Moves, Moves(partitions={}))

    async def save_moves(
        self, moves: Moves, version: int, *, replicas: Mapping[int, int] | None = None, there: Iterable[str] = ()
    ) -> None:
        """`replicas`: only if these partitions have the replicas that they had in these versions. `there`: only if there
        are these documents."""
        checks = [Check(path, await self._version_of(path)) for path in there]
        await self.coordinator.commit([*checks, *_unchanged(replicas or {}), put(MOVES, encode(moves), version)])

    async def copy_rate(self) -> CopyRate | None:
        return (await self._perhaps(COPY_RATE, CopyRate, None))[0]

    async def set_copy_rate(self, rate: CopyRate, *, lasts: bool = False) -> None:
        """The last one set counts. It holds for as long as this coordinator session does; one that `lasts`, until it is
        lifted, because owners go on copying for a move that is written down, also when its command was interrupted."""
        while True:
            node = await self.coordinator.get(COPY_RATE)
            there: list[Change] = [] if node is None else [Delete(COPY_RATE, node.version)]
            try:
                await self.coordinator.commit([*there, Create(COPY_RATE, encode(rate), ephemeral=not lasts)])
            except ChangedMeanwhile as error:
                if node is None and not isinstance(error, NodeExists):
                    raise  # there is no cluster any more
                continue  # it went, or another command has set it, at the same moment
            return

    async def lift_copy_rate(self) -> None:
        """No bound any more; another command may have lifted it, or set another one, at the same moment."""
        node = await self.coordinator.get(COPY_RATE)
        if node is not None:
            with suppress(ChangedMeanwhile):
                await self.coordinator.commit([Delete(COPY_RATE, node.version)])

    async def policy(self) -> tuple[PolicyDocument | None, int]:
        """None, and `NO_VERSION`, where there is none."""
        return await self._perhaps(POLICY, PolicyDocument, None)

    async def policy_version(self) -> int:
        """Also of one that cannot be understood."""
        node = await self.coordinator.get(POLICY)
        return NO_VERSION if node is None else node.version

    async def save_policy(self, policy: PolicyDocument | None, version: int) -> None:
        """Only if it still has this version; None takes it away."""
        if policy is None:
            await self.coordinator.commit([Delete(POLICY, version)])
        else:
            await self.coordinator.commit([put(POLICY, encode(policy), version)])

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
                for name in names[: -(HISTORY_MAX - 1)]:
                    path = f"{HISTORY}/{name}"
                    changes.append(Delete(path, await self._version_of(path)))
                await self.coordinator.commit(changes)
            except (NodeExists, NodeMissing):
                continue  # another command wrote an entry, or made room, at the same moment
            return number

    async def end_history(self, number: int, entry: HistoryEntry) -> None:
        path = f"{HISTORY}/{number:010}"
        await self.coordinator.commit([Set(path, encode(entry), await self._version_of(path))])

    async def close_history(self, number: int, *, ended: str, outcome: str) -> None:
        """Say how this entry ended, unless that is said already: its own command may do so at the same moment."""
        path = f"{HISTORY}/{number:010}"
        node = await self.coordinator.get(path)
        if node is None:
            return  # it has made room
        entry = decode(HistoryEntry, node.data, path)
        if entry.ended is None:
            with suppress(ChangedMeanwhile, NodeMissing):
                await self.coordinator.commit(
                    [Set(path, encode(replace(entry, ended=ended, outcome=outcome)), node.version)]
                )

    # -- its end -------------------------------------------------------------------------------------------------------

    async def delete(self) -> int:
        """Take every document of the cluster away, whole or not at all; how many there were."""
        await self.check_alone()
        paths = await self.paths()
        await self.coordinator.commit([Delete(path, await self._version_of(path)) for path in reversed(paths)])
        return len(paths)

    # -- who may change it ---------------------------------------------------------------------------------------------

    async def open_nodes(self) -> list[str]:
        """The paths of all nodes that a process without credentials may read or change, the root first."""
        paths = await self.paths()
        are_open = await self.each(paths, self.coordinator.is_open)
        return [path for path, is_open in zip(paths, are_open, strict=True) if is_open]

    async def unclosed_nodes(self) -> list[str]:
        """The paths of all nodes that do not belong to our credentials alone: open ones, and those of a name or a password
        that is replaced."""
        paths = await self.paths()
        are_ours = await self.each(paths, self.coordinator.is_ours)
        return [path for path, is_ours in zip(paths, are_ours, strict=True) if not is_ours]

    async def secure(self) -> int:
        """Close every node, the root first, since what is created from then on is closed; how many were not."""
        await self.check_alone()
        closed = 0
        while found := await self.unclosed_nodes():
            for path in found:
                with suppress(NodeMissing):  # it went away meanwhile
                    await self.coordinator.protect(path)
                    closed += 1
        return closed

    async def paths(self) -> list[str]:
        """Of all nodes, each behind the one that it is below."""
        paths = [ROOT]
        level = [ROOT]
        while level:
            # Who only reads does not see the counter of client ids; nothing stands below it.
            level = [path for path in level if path != CLIENT_IDS]
            names = await self.each(level, self.coordinator.children)
            level = [f"{path.rstrip('/')}/{name}" for path, below in zip(level, names, strict=True) for name in below]
            paths += level
        return paths

    async def check_alone(self) -> None:
        if strange := set(await self.coordinator.children(ROOT)) - _OURS:
            step = "see what it is, another cluster perhaps: only when it is gone can these documents be deleted"
            raise Unsafe(f"what is not this cluster's stands below its root: {', '.join(sorted(strange))}", next_step=step)

    # -- changes -------------------------------------------------------------------------------------------------------

    async def wait_for_change(self, paths: Sequence[str], seen: object | None) -> object:
        """Like the coordinator's. Ask for a token first, then read, then wait with it: nothing is missed."""
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

    async def wait_for_counter(self, seen: object | None) -> object:
        """For the counter of client ids to go or to come, not for each id that is drawn."""
        return await self.wait_for_change([IDS], seen)

    async def wait_for_policy(self, seen: object | None) -> object:
        return await self.wait_for_change([POLICY, CHANNELS, ROOT], seen)

    async def wait_for_replicas(self, partition: int, seen: object | None) -> object:
        """For a replica that comes, goes or changes its role, for a storage that does or has another address, and for
        another format of what is written."""
        return await self.wait_for_change([replicas_path(partition), STORAGES, ROOT], seen)

    async def wait_for_partition(self, partition: int, seen: object | None) -> object:
        return await self.wait_for_change([partition_path(partition)], seen)

    # -- many documents ------------------------------------------------------------------------------------------------

    async def each(self, keys: Iterable[K], ask: Callable[[K], Awaitable[R]]) -> list[R]:
        """The answers for all of them, in their order, a bounded number at a time."""
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
            if node is None:  # it has gone since
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


def untouched(path: str, version: int) -> list[Change]:
    """It has this version, or is not there."""
    return [Create(path, b""), Delete(path, 0)] if version == NO_VERSION else [Check(path, version)]


def put(path: str, data: bytes, version: int) -> Change:
    """A document that may not be there yet."""
    return Create(path, data) if version == NO_VERSION else Set(path, data, version)


def _named(kind: type[M], data: bytes, path: str) -> M:
    """A document that says its own name."""
    meta = decode(kind, data, path)
    if meta.name != path.rpartition("/")[2]:
        raise BadMetadata(f"{path}: name is {meta.name}, which belongs elsewhere", path=path, field="name")
    return meta
