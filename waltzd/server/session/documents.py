"""A partition's documents in the coordinator, as its owner keeps them: each change is made to the version that it knows.

Another process that changed the partition's own document is its owner now, and that ends the session. The list of replicas
is the operators': when that changed, it is read again, and what was to be saved is decided anew. A document that was
deleted or spoiled ends nothing: the owner goes on with what it said, and writes its partition's own two documents anew.

Versions tell changes of one document apart, not one document from another: where all of them were lost and put back,
versions begin again, and one may have the very version that an owner remembers. So after a new coordinator session, and
after a document was gone, the owner looks before it saves: its own document is the one that says what it saved last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from waltzd.cluster.cluster import ASSIGNMENT, NO_VERSION, STORAGES, Cluster, partition_path, put, replicas_path
from waltzd.cluster.coordinator import Check
from waltzd.cluster.documents import Membership, PartitionMeta, StorageMeta
from waltzd.errors import (
    BadArgument,
    BadMetadata,
    CannotConnect,
    ChangedMeanwhile,
    NodeMissing,
    NotOwner,
    WaltzError,
)
from waltzd.protocol.document import encode

PAUSES = 20
"""The longest pause before the coordinator is asked again, in first pauses."""


class Documents:
    def __init__(
        self,
        cluster: Cluster,
        partition: int,
        *,
        version: int,
        known: PartitionMeta | None = None,
        retry_seconds: float,
    ) -> None:
        """`known` is what the partition's own document says, in this `version`. `read` must follow."""
        self.storages: Mapping[str, StorageMeta] = {}
        self.format = 0
        """Of the segments that a new session writes, as far as the document of the cluster was read."""
        self._cluster = cluster
        self._partition = partition
        self._version = version
        self._known = known
        """What our document says in that version."""
        self._seen_in: int | None = None
        """The coordinator session in which that was last certain; None: it was gone since."""
        self._replicas: tuple[Mapping[str, Membership], int] = {}, NO_VERSION
        self._retry_seconds = retry_seconds
        self._troubles: dict[str, str] = {}
        """By the path of each document that is gone or spoiled."""
        self._turn = asyncio.Lock()
        self._noting: asyncio.Task[None] | None = None
        self._unsure: PartitionMeta | None = None
        """What was saved once, without an answer: it may be there."""

    @property
    def can_be_saved(self) -> bool:
        """As far as is known: the coordinator is connected."""
        return self._cluster.coordinator.is_connected

    @property
    def roles(self) -> Mapping[str, Membership]:
        return self._replicas[0]

    async def read_leaving(self) -> frozenset[str]:
        """Return the replicas that leave the partition when all of its goal is level. Return none if the partition does not
        move, or if its goal is not all assigned yet. The answer holds for the list of replicas as it is known now."""
        try:
            goal = (await self._cluster.moves())[0].partitions.get(self._partition, ())
        except (CannotConnect, BadMetadata):
            return frozenset()
        return frozenset(self.roles.keys() - set(goal)) if goal and self.roles.keys() >= set(goal) else frozenset()

    @property
    def trouble(self) -> str:
        """Which documents are gone or spoiled, in one sentence."""
        return "; ".join(self._troubles.values())

    @property
    def has_to_write(self) -> bool:
        """One of them is this partition's own."""
        return not self._troubles.keys().isdisjoint((partition_path(self._partition), replicas_path(self._partition)))

    @property
    def addresses(self) -> dict[str, str]:
        """Where owners reach the storages."""
        return {name: meta.listen for name, meta in self.storages.items()}

    async def read(self) -> None:
        """Where the replicas are, and where the storages: operators may have changed both."""
        self._seen_in = self._cluster.coordinator.session
        self._replicas, self.storages, _ = await asyncio.gather(
            self._cluster.replica_set(self._partition), self._cluster.storages(), self.read_format()
        )

    async def read_format(self) -> None:
        """For a session that begins. It only rises; where the document cannot be read, the log goes on as it is."""
        try:
            self.format = max(self.format, (await self._cluster.meta()).format)
        except (CannotConnect, NodeMissing, BadMetadata):
            return

    async def look_again(self) -> str:
        """The same while a session lives. What is gone, or cannot be understood, stays as it is known; a sentence says what
        is new of that."""
        before = self.trouble
        own, replicas, troubles = partition_path(self._partition), replicas_path(self._partition), dict[str, str]()
        try:
            self._replicas = await self._cluster.replica_set(self._partition)
        except (NodeMissing, BadMetadata) as error:
            troubles[replicas] = error.message
        try:
            if (await self._cluster.partition(self._partition))[0] is None and self._version != NO_VERSION:
                troubles[own] = f"the coordinator has no document {own}"
        except BadMetadata as error:
            troubles[own] = error.message
        unreadable: dict[str, WaltzError] = {}
        storages = await self._cluster.storages(unreadable)
        for name in sorted(self.roles.keys() & self.storages.keys() - storages.keys()):
            path = f"{STORAGES}/{name}"
            storages[name] = self.storages[name]
            spoiled = unreadable.get(path)
            troubles[path] = spoiled.message if spoiled is not None else f"the coordinator has no document {path}"
        self.storages, self._troubles = storages, troubles
        if own in troubles:
            self._seen_in = None
        if self.trouble == before:
            return ""
        return f"{self.trouble}; going on with what is known" if self.trouble else "its documents are there again"

    async def save(
        self,
        wanted: PartitionMeta,
        *,
        promote: bool = False,
        leaving: frozenset[str] = frozenset(),
        check: Callable[[], None],
    ) -> bool:
        """Compare-and-set; with `promote`, together with the learners that it makes members, and without the replicas of
        `leaving` if `wanted` has exactly the rest of the list as members. When the answer is lost, look what is there.
        `check` raises when nothing may be saved any more. False: the list of replicas has changed; it was read again, and
        nothing is saved."""
        async with self._turn:
            return await self._save(wanted, self._promoted(wanted, leaving) if promote else None, check)

    async def _save(
        self, wanted: PartitionMeta, replicas: tuple[Mapping[str, Membership], int] | None, check: Callable[[], None]
    ) -> bool:
        pause = self._retry_seconds
        while True:
            try:
                if self.has_to_write:
                    await self._write_anew(wanted)
                else:
                    await self._check_ours()
                    self._version = await self._cluster.save_partition(
                        self._partition, wanted, self._version, replicas=replicas
                    )
                    self._known = wanted
                    break
            except (CannotConnect, NodeMissing, BadMetadata, BadArgument):  # the last: documents of storages are gone, too
                check()
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSES * self._retry_seconds)
            except ChangedMeanwhile:
                check()
            try:
                if await self._is_saved(wanted):
                    break
            except CannotConnect:
                continue
            if replicas is not None and replicas[1] != self._replicas[1]:
                return False
        if replicas is not None and replicas[1] == self._replicas[1]:
            self._replicas = replicas[0], replicas[1] + 1
        return True

    async def _is_saved(self, wanted: PartitionMeta) -> bool:
        """Look what is there: `wanted`, what was there before, or what ends the session."""
        await self.look_again()
        if self.has_to_write:
            return False
        found, version = await self._cluster.partition(self._partition)
        unsure, self._unsure = self._unsure, None
        if found in (wanted, unsure):
            self._version, self._known, self._seen_in = version, found, self._cluster.coordinator.session
            return found == wanted
        if version != self._version or found != self._known:
            raise ChangedMeanwhile(f"another process changed the document of partition {self._partition}")
        return False

    async def _check_ours(self) -> None:
        """Before a save that relies on a version: `ChangedMeanwhile` where another document may have it by now."""
        session = self._cluster.coordinator.session
        if session == self._seen_in or self._version == NO_VERSION:
            return
        found, version = await self._cluster.partition(self._partition)
        if found is None:
            return  # the save fails, and looks again
        if found not in (self._known, self._unsure):
            raise ChangedMeanwhile(f"the document of partition {self._partition} is not the one that was saved last")
        self._version, self._known, self._seen_in = version, found, session

    async def _write_anew(self, meta: PartitionMeta) -> None:
        """The owner of the session knows all that stood there. Sessions are taken under the newest generation only, and the
        assignment, checked in the same transaction, says that this is ours: so no session is forgotten by this write."""
        coordinator, number = self._cluster.coordinator, self._partition
        own, replicas = partition_path(number), replicas_path(number)
        troubles = self._troubles  # a look that comes meanwhile puts others in their place
        if replicas in troubles:
            node = await coordinator.get(replicas)
            before = NO_VERSION if node is None else node.version
            self._replicas = self.roles, await self._cluster.save_replica_set(number, self.roles, before)
            del troubles[replicas]
        if own in troubles:
            node = await coordinator.get(own)
            assignment, version = await self._cluster.assignment()
            newest = assignment.owners[number].generation
            if newest > meta.generation:
                raise NotOwner(f"partition {number} was given to another server; its document is not ours to write")
            if newest < meta.generation:  # who knows what else it has forgotten
                raise BadMetadata(f"{ASSIGNMENT} went back in time: partition {number} has generation {newest}", path=own)
            before = NO_VERSION if node is None else node.version
            await coordinator.commit([Check(ASSIGNMENT, version), put(own, encode(meta), before)])
            self._version, self._known, self._seen_in = before + 1, meta, coordinator.session
            del troubles[own]

    def note(
        self,
        make: Callable[[], PartitionMeta],
        saved: Callable[[PartitionMeta], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Save in one attempt, beside everything else, what can as well be saved later. `make` is asked when its turn has
        come. `failed` hears of another owner's newer session only."""

        def look(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                failed(error)

        if self._noting is None or self._noting.done():
            self._noting = asyncio.create_task(self._note(make, saved), name=f"marks of partition {self._partition}")
            self._noting.add_done_callback(look)

    async def _note(self, make: Callable[[], PartitionMeta], saved: Callable[[PartitionMeta], None]) -> None:
        async with self._turn:
            wanted = make()
            if await self._save_once(wanted):
                saved(wanted)

    def close(self) -> None:
        if self._noting is not None:
            self._noting.cancel()

    async def _save_once(self, wanted: PartitionMeta) -> bool:
        """When the answer is lost, the next save looks what is there."""
        try:
            if self.has_to_write:
                return False
            if self._unsure is None or not await self._is_saved(wanted):
                await self._check_ours()
                self._unsure = wanted
                self._version = await self._cluster.save_partition(self._partition, wanted, self._version)
                self._known, self._unsure = wanted, None
            return True
        except (CannotConnect, BadMetadata):
            return False
        except ChangedMeanwhile:
            try:
                found, _ = await self._cluster.partition(self._partition)
            except (CannotConnect, BadMetadata):
                return False
            if found is not None and found.session > wanted.session:
                raise
            return False

    async def check_newest(self) -> None:
        """`ChangedMeanwhile` when the partition's document is not as we left it. Asked as a change is, which the
        coordinator does not answer from an older view."""
        path = partition_path(self._partition)
        if self._version != NO_VERSION:
            await self._cluster.coordinator.commit([Check(path, self._version)])
        elif await self._cluster.coordinator.get(path) is not None:
            raise ChangedMeanwhile(f"another process made {path}", path=path)

    def _promoted(self, wanted: PartitionMeta, leaving: frozenset[str]) -> tuple[Mapping[str, Membership], int] | None:
        """The list in which admitted learners are members and those that have left are gone, and the version that it was
        made from: what an operator saves meanwhile must not be undone. None when nothing changes."""
        roles, version = self._replicas
        gone = leaving if set(wanted.members) == roles.keys() - leaving else frozenset[str]()
        new = {
            name: Membership.MEMBER if name in wanted.members else role for name, role in roles.items() if name not in gone
        }
        return None if new == dict(roles) else (new, version)
