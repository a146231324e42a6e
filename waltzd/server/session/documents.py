"""Documents of a partition in the coordinator, as its owner saves them: each change is made to the version that it knows.

If another process changed the partition's own document, that process is the owner now, and this session ends. The list of
replicas belongs to operators: when it changed, it is read again, and the save is decided anew. A document that was
deleted or spoiled ends nothing: the owner continues with its last content, and writes the partition's own two documents
anew.

Versions distinguish changes of one document, not one document from another. When all documents were lost and put back,
versions begin again, and a new document may have the very version that an owner remembers. So after a new coordinator
session, and after a document was gone, the owner reads before it saves: its own document has the content that it saved
last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from waltzd.cluster.cluster import ASSIGNMENT, NO_VERSION, STORAGES, Cluster, partition_path, put, replicas_path
from waltzd.cluster.coordinator import Check
from waltzd.cluster.documents import Membership, PartitionMeta, StorageMeta
from waltzd.errors import BadArgument, CannotConnect, WaltzError
from waltzd.errors.operations import BadMetadata, ChangedMeanwhile, NodeMissing, NotOwner
from waltzd.protocol.document import encode

PAUSES = 20
"""Longest pause before the coordinator is asked again, in multiples of the first pause."""


class PartitionDocuments:
    def __init__(
        self,
        cluster: Cluster,
        partition: int,
        *,
        version: int,
        known: PartitionMeta | None = None,
        retry_seconds: float,
    ) -> None:
        """`known`: content of the partition's own document in this `version`. `read` must follow."""
        self.storages: Mapping[str, StorageMeta] = {}
        self.format = 0
        """Format of the segments that a new session writes, as far as the document of the cluster was read."""
        self._cluster = cluster
        self._partition = partition
        self._version = version
        self._known = known
        """Content of our document in that version."""
        self._seen_in: int | None = None
        """Coordinator session in which `_version` and `_known` were last certain; None if the document was gone since."""
        self._replicas: tuple[Mapping[str, Membership], int] = {}, NO_VERSION
        self._retry_seconds = retry_seconds
        self._troubles: dict[str, str] = {}
        """Sentence for each document that is gone or spoiled, by its path."""
        self._turn = asyncio.Lock()
        self._noting: asyncio.Task[None] | None = None
        self._unsure: PartitionMeta | None = None
        """Content that was saved without an answer, so that it may be in the coordinator; None if there is none."""

    @property
    def can_be_saved(self) -> bool:
        """Return whether the coordinator is connected."""
        return self._cluster.coordinator.is_connected

    @property
    def roles(self) -> Mapping[str, Membership]:
        return self._replicas[0]

    async def read_leaving(self) -> frozenset[str]:
        """Return the replicas that leave the partition when all of its goal is level. Return none if the partition does
        not move, or if its goal is not wholly assigned yet. The answer holds for the list of replicas as it is known
        now."""
        try:
            goal = (await self._cluster.moves())[0].partitions.get(self._partition, ())
        except (CannotConnect, BadMetadata):
            return frozenset()
        return frozenset(self.roles.keys() - set(goal)) if goal and self.roles.keys() >= set(goal) else frozenset()

    @property
    def trouble(self) -> str:
        """Sentence that names the documents that are gone or spoiled; empty if there are none."""
        return "; ".join(self._troubles.values())

    @property
    def has_to_write(self) -> bool:
        """Return whether one of the documents that are gone or spoiled is the partition's own."""
        return not self._troubles.keys().isdisjoint((partition_path(self._partition), replicas_path(self._partition)))

    @property
    def addresses(self) -> dict[str, str]:
        """Address of each storage, for owners."""
        return {name: meta.listen for name, meta in self.storages.items()}

    async def read(self) -> None:
        """Read the lists of replicas and storages, which operators may have changed."""
        self._seen_in = self._cluster.coordinator.session
        self._replicas, self.storages, _ = await asyncio.gather(
            self._cluster.replica_set(self._partition), self._cluster.storages(), self.read_format()
        )

    async def read_format(self) -> None:
        """Read the format for a session that begins. It only rises. If the document cannot be read, the log keeps its
        format."""
        try:
            self.format = max(self.format, (await self._cluster.meta()).format)
        except (CannotConnect, NodeMissing, BadMetadata):
            return

    async def look_again(self) -> str:
        """Read the documents again while a session lives. Keep the known content of a document that is gone or spoiled.
        Return a sentence if that has changed, else an empty text."""
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
        """Save by compare-and-set. With `promote`, the list of replicas changes in the same transaction: learners become
        members, and the replicas of `leaving` go if `wanted` has exactly the rest of the list as members. When the answer
        is lost, read what was saved. `check` raises when nothing may be saved any more. Return False, without a save, if
        the list of replicas has changed and was read again."""
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
            except (CannotConnect, NodeMissing, BadMetadata, BadArgument):  # BadArgument: a storage has no document
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
        """Return whether `wanted` is saved; raise `ChangedMeanwhile` if another process saved something else."""
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
        """Raise `ChangedMeanwhile` if another document may have the known version by now. Called before a save that
        relies on it."""
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
        """Write documents that are gone or spoiled. The owner of the session knows their content. Sessions are taken
        under the newest generation only, and the assignment, checked in the same transaction, gives us the partition: so
        no session is forgotten by this write."""
        coordinator, number = self._cluster.coordinator, self._partition
        own, replicas = partition_path(number), replicas_path(number)
        troubles = self._troubles  # `look_again` may replace the dict meanwhile
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
            if newest < meta.generation:  # more than this may be lost
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
        """Save something less urgent in one attempt, beside all other work. `make` is called when its turn has come.
        `failed` is called only for a newer session of another owner."""

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
        """Save in one attempt; return whether it succeeded. When the answer is lost, the next save finds out."""
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
        """Raise `ChangedMeanwhile` if the partition's document is not as we saved it. Asked by a transaction, because the
        coordinator may answer a read from an older view."""
        path = partition_path(self._partition)
        if self._version != NO_VERSION:
            await self._cluster.coordinator.commit([Check(path, self._version)])
        elif await self._cluster.coordinator.get(path) is not None:
            raise ChangedMeanwhile(f"another process made {path}", path=path)

    def _promoted(self, wanted: PartitionMeta, leaving: frozenset[str]) -> tuple[Mapping[str, Membership], int] | None:
        """Return the list in which admitted learners are members and replicas that have left are gone, and the version
        that it was made from, so that a change by an operator is not undone. Return None when nothing changes."""
        roles, version = self._replicas
        gone = leaving if set(wanted.members) == roles.keys() - leaving else frozenset[str]()
        new = {
            name: Membership.MEMBER if name in wanted.members else role for name, role in roles.items() if name not in gone
        }
        return None if new == dict(roles) else (new, version)
