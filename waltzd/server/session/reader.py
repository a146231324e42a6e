"""Committed records of one partition for readers behind the log cache: from any replica that can give them, or the
archive.

A replica that fails or is too slow is asked last from then on, until it has answered again. So a storage that hangs costs
one deadline, not one for each read. The error of a storage that cannot give records is about that storage: a reader never
gets it as if it were about the partition.

Below the trim floor replicas have nothing. Trimmed records are read from the archive (`archive_lane`), from the very id
on that the last replica refused. The floor of a replica is learned when it is opened, or when it refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

from waltzd.errors import ArchiveAway, CannotConnect, NeedsBatches, NotReady, OnlyInArchive, Trimmed, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.format.key_index import LockMarks, LockQuery
from waltzd.format.record import Run
from waltzd.protocol.descriptions import Archived
from waltzd.protocol.peers import LockHistory, ReplicaPort
from waltzd.protocol.quorum import EMPTY
from waltzd.server.core.log_cache import LogCache
from waltzd.server.core.progress import Marks
from waltzd.server.core.recovery import Recovery
from waltzd.server.session.archive_fetcher import ArchiveFetcher
from waltzd.server.session.copier import timely
from waltzd.server.session.settings import SETTLED_SECONDS, SessionSettings

T = TypeVar("T")
READ_AGAIN_SECONDS = 0.05


class Source(Protocol):
    """A replica, as far as a reader needs it."""

    @property
    def port(self) -> ReplicaPort: ...
    @property
    def is_readable(self) -> bool: ...


async def nothing_archived() -> Archived | None:
    return None


class ReplicaReader:
    """The part of `ReplicatedLog` that readers use."""

    partition: int
    settings: SessionSettings
    core: Recovery
    marks: Marks | None
    open_cache: LogCache | None
    replicators: Mapping[str, Source]
    ended: BaseException | None
    opened_at: float
    say: Callable[[str], None]

    def __init__(self) -> None:
        self._unwell: dict[str, None] = {}
        """Replicas that failed a reader, in the order of their failures."""
        self._refused: dict[str, int] = {}
        """First id that a replica may have, after it refused the id before."""
        self._archived: Archived | None = None
        """Reach of the archive when it was last asked for; None before."""
        self._told = ""
        self.ask_archived: Callable[[], Awaitable[Archived | None]] = nothing_archived
        """Asks the coordinator how far the archive reaches."""

    @property
    def session(self) -> int:
        """Session id. It rises when a session gives way to the next one of the same owner, with no other owner between."""
        return self.core.session

    @property
    def committed(self) -> int:
        return self.open_cache.committed if self.open_cache is not None else EMPTY

    async def read(
        self, first_id: int, last_id: int, chunk_bytes: int, *, with_locks: bool = False
    ) -> AsyncGenerator[Run, None]:
        """Yield committed records from any replica that can give them. Raise `Trimmed` at an id that no replica has any
        more."""
        assert last_id <= self.committed
        failed: dict[str, WaltzError] = {}
        while first_id <= last_id:
            name = await self._source(first_id, failed)
            until, port = min(last_id, self.core.held(name)), self.replicators[name].port
            runs = port.read(
                self.partition, first_id, until, session=self.session, frame_bytes=chunk_bytes, with_locks=with_locks
            )
            try:
                async for run in timely(runs, self.settings.storage_seconds, name):
                    yield run
                    first_id = run.last_id + 1
                self._unwell.pop(name, None)
            except Trimmed as error:
                self._has_refused(name, first_id, error)
            except WaltzError as error:
                self._has_failed(name, error, failed)

    def is_trimmed(self, id_: int) -> bool:
        """Return whether readable replicas have held this id, and none of them has it any more."""
        held = self._held(id_)
        return bool(held) and all(self._floor(name) > id_ for name in held)

    def _held(self, id_: int) -> list[str]:
        """Return the readable replicas that have reached this id, whatever they have trimmed since."""
        return [
            name
            for name, replicator in sorted(self.replicators.items())
            if replicator.is_readable and self.core.held(name) >= id_
        ]

    async def read_archived(self, first_id: int, last_id: int, chunk_bytes: int, *, with_locks: bool = False) -> Run:
        """Return committed records from `first_id` on that replicas have trimmed, at least one. Raise `ArchiveAway` for a
        fault that may pass."""
        lane = self._lane(first_id)
        try:
            known = await self._reaching(first_id)
            last_id = min(last_id, known.last_id)
            run = await lane.read(self.partition, known, first_id, last_id, chunk_bytes, with_locks=with_locks)
        except WaltzError as error:
            self._tell(f"{error.code} {error.message}")
            raise
        self._tell("")
        return run

    def _lane(self, first_id: int) -> ArchiveFetcher:
        """Return the archive that has an id which replicas have trimmed."""
        lane = self.settings.archive
        if self.settings.needed_from is not None:
            floor = self._lowest(first_id)
            raise Trimmed(
                f"the group log begins at id {floor}; id {first_id} is no longer needed for the positions of the groups",
                next_step="begin at the id that the message names",
                floor=floor,
            )
        if lane is None:
            raise OnlyInArchive(
                f"partition {self.partition}: id {first_id} is only in the archive, and this server has no `archive` in "
                f"its configuration; its storages have the ids from {self._lowest(first_id)} on",
                partition=self.partition,
                first_id=first_id,
                floor=self._lowest(first_id),
            )
        return lane

    def _tell(self, trouble: str) -> None:
        """Log each change of the trouble once, however many readers meet it."""
        if trouble and trouble != self._told:
            self.say(f"the archive cannot be read: {trouble}")
        elif self._told and not trouble:
            self.say("the archive can be read again")
        self._told = trouble

    async def _reaching(self, id_: int) -> Archived:
        """Return the reach of an archive that has this id."""
        if self._archived is None or self._archived.last_id < id_:
            try:
                self._archived = await self.ask_archived()
            except CannotConnect as error:
                raise ArchiveAway(f"how far the archive reaches is not known: {error.message}") from error
        known = self._archived
        if known is None or known.last_id < id_:
            reaches = "there is none" if known is None else f"it reaches to id {known.last_id}"
            raise ArchiveAway(
                f"id {id_} of partition {self.partition} is on no replica that can be read, and of the archive the "
                f"coordinator says that {reaches}",
                next_step="put the document of the archive back: `waltzctl cluster load-metadata`",
            )
        return known

    def _has_refused(self, name: str, id_: int, error: Trimmed) -> None:
        self._refused[name] = max(id_ + 1, error.number("floor") or 0, self._refused.get(name, 0))

    def _floor(self, name: str) -> int:
        """Return the first id that a replica has, as far as is known."""
        status = self.core.status(name)
        return max(0 if status is None else status.floor, self._refused.get(name, 0))

    def _lowest(self, id_: int) -> int:
        """Return the first id after this one that a replica has."""
        return min((floor for floor in map(self._floor, self.replicators) if floor > id_), default=id_ + 1)

    async def read_locks(self, last_id: int, bytes_max: int) -> LockHistory | None:
        """Return the locks of transactions up to `last_id`, where a batch ends. Return None if the log has no batch
        there, or only the archive has it."""

        async def ask(port: ReplicaPort) -> LockHistory | None:
            found = await port.read_locks(self.partition, last_id, session=self.session, bytes_max=bytes_max)
            if found is not None and not 0 <= found.first_id == last_id - len(found.locks) + 1:
                raise BadFrame(f"the locks of ids up to {last_id} were asked for, and others came")
            return found

        try:
            return await self._ask(last_id, ask)
        except Trimmed:
            return None

    async def find_marks(self, query: LockQuery, turns: asyncio.Semaphore) -> LockMarks:
        """Return committed transactions that marked a lock: an answer to the start of the query, for at least one id.
        `turns`: turns of readers of replicas; the archive is read outside of them."""

        async def ask(port: ReplicaPort) -> LockMarks | int:
            try:
                found = await port.find_marks(self.partition, query, session=self.session)
            except Trimmed as error:
                return error.number("floor") or query.next_id + 1
            ids = found.ids[::-1] if query.newest_first else found.ids
            if not query.first_id <= found.through <= query.last_id or any(
                not query.first_id <= id_ <= query.last_id for id_ in ids[:1] + ids[-1:]
            ):
                raise BadFrame(f"the marks of a lock up to id {query.last_id} were asked for, and others came")
            return found

        try:
            async with turns:
                found = await self._ask(query.last_id, ask)
        except Trimmed:
            found = query.last_id + 1
        if isinstance(found, LockMarks):
            return found
        lane, known = self._lane(query.next_id), await self._reaching(query.next_id)
        return await lane.find_marks(self.partition, known, query.within(0, min(found - 1, known.last_id)))

    async def find_time(self, time: int, last_id: int) -> int:
        """Return the highest id before the first transaction at or after `time`, among those up to `last_id`."""

        async def ask(port: ReplicaPort) -> tuple[int, int]:
            try:
                return await port.find_time(self.partition, time, session=self.session), 0
            except Trimmed as error:  # it may be in front of all that the replica has
                return -1, error.number("floor") or last_id + 1

        try:
            mark, floor = await self._ask(last_id, ask)
        except Trimmed:
            mark, floor = -1, last_id + 1
        if floor == 0:
            return mark
        lane = self.settings.archive
        if lane is None:
            raise OnlyInArchive(
                f"partition {self.partition}: that time is in front of id {floor}, where only the archive reaches, and "
                "this server has no `archive` in its configuration",
                partition=self.partition,
                floor=floor,
            )
        return await lane.find_time(self.partition, await self._reaching(floor - 1), time, floor - 1)

    async def _ask(self, id_: int, ask: Callable[[ReplicaPort], Awaitable[T]]) -> T:
        """Return the answer of any replica that holds this id."""
        failed: dict[str, WaltzError] = {}
        while True:
            name = await self._source(id_, failed)
            try:
                found = await ask(self.replicators[name].port)
                self._unwell.pop(name, None)
                return found
            except NeedsBatches:
                raise  # the log has no batches there, so no other replica has
            except Trimmed as error:
                self._has_refused(name, id_, error)
            except WaltzError as error:
                self._has_failed(name, error, failed)

    async def _source(self, id_: int, failed: dict[str, WaltzError]) -> str:
        """Return a replica that holds this id and has not failed; wait for one while the session begins."""
        while True:
            name = self._choose(id_, failed)
            if name is not None:
                return name
            if any(self._floor(name) > id_ for name in self._held(id_)):  # and all other replicas have failed
                raise Trimmed(f"partition {self.partition}: no replica that can be read gives id {id_} any more")
            if not self._is_beginning:
                why = "; ".join(f"{name}: {error.code} {error.message}" for name, error in failed.items())
                raise NotReady(f"no replica gives ids from {id_} on: {why or 'none that holds them can be read'}")
            failed.clear()
            await asyncio.sleep(READ_AGAIN_SECONDS)

    def _has_failed(self, name: str, error: WaltzError, failed: dict[str, WaltzError]) -> None:
        failed[name] = error
        self._unwell[name] = self._unwell.pop(name, None)

    def _choose(self, first_id: int, failed: Mapping[str, WaltzError]) -> str | None:
        able = [name for name in self._held(first_id) if name not in failed and self._floor(name) <= first_id]
        well = [name for name in able if name not in self._unwell]
        if well:
            return well[self.partition % len(well)]  # partitions spread over the storages
        return next((name for name in self._unwell if name in able), None)

    @property
    def _is_beginning(self) -> bool:
        """Return whether the session is not open yet, or opened a moment ago. Storages refuse calls of the former session
        from the first contact on, while replicators of the new one are not ready: that is no failure."""
        is_settled = self.marks is not None and asyncio.get_running_loop().time() - self.opened_at > SETTLED_SECONDS
        return self.ended is None and not is_settled
