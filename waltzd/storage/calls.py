"""Segment files that arrive: a piece at a time to a file beside the log, then one turn in the lane to give it its place.

Receiving and proving take nobody's turn. One file at a time for each replica: a newer one ends the one before, whose sender
has gone or will ask again.

Changes of what a storage has, one at a time, and each to its end, also when whoever asked gives up.

A thread goes on all the same when a caller is gone: a replica that it made and that nobody puts to work would be refused
until the next start.

Digests of what a replica holds, a piece at a time.

Each piece is read and hashed in a turn of its own on a thread for readers, so that whoever else reads comes between, and
appends, which have other threads, are never held up. An answer ends after so many bytes or seconds: it says how far it
came, and the caller goes on from there. So a call has an end however long the log is and however slow the disk.

The storage daemon without its network: every call that a server or an operator can make, as an awaitable.

Reads run beside the lanes and never take an appender's turn. A flush that fails ends the process, from wherever it is
noticed: `on_fatal` does not come back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from time import monotonic_ns
from typing import Any, TypeVar
from uuid import UUID

from waltzd.daemon import alarm, readiness
from waltzd.daemon.alarm import Trouble
from waltzd.daemon.config import StorageConfig
from waltzd.disk.seam import Buffer, Disk
from waltzd.errors import (
    BadArgument,
    BeyondLog,
    CannotConnect,
    Displaced,
    Draining,
    FlushFailed,
    ForeignCluster,
    NoSuchPartition,
    PartitionDamaged,
    ReadFailed,
    TooManyCallers,
    WaltzError,
)
from waltzd.format.digest import Digest, Hashing
from waltzd.format.finding import Finding
from waltzd.format.layout import NO_SESSION
from waltzd.format.record import Run
from waltzd.protocol.descriptions import PartitionDescription, ReplicaStatus, SetAside, Statistics, StorageDescription
from waltzd.protocol.peers import Link
from waltzd.storage.lane import Lane, RunBlocking, Stream, refuse
from waltzd.storage.offline.verify import Marks, PartitionReport, verify_partition
from waltzd.storage.replica.directory import Directory, PartitionLine
from waltzd.storage.replica.healing import Installation
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.promise import check_jump
from waltzd.storage.replica.segment import Suspect
from waltzd.wire.budget import Budget
from waltzd.wire.frames import PIECE_BYTES

T = TypeVar("T")
PIECE_SECONDS = 60.0
"""How long a sender may take for its next piece."""


class Arrivals:
    def __init__(
        self, *, run_writing: RunBlocking, on_fatal: Callable[[BaseException], None], check_open: Callable[[], None]
    ) -> None:
        """`check_open` raises when the daemon takes no more work."""
        self._run_writing = run_writing
        self._on_fatal = on_fatal
        self._check_open = check_open
        self._turns: dict[int, object] = {}

    async def take(
        self, lane: Lane, session: int, contact: int, first_id: int, file_bytes: int, pieces: AsyncIterator[Buffer]
    ) -> ReplicaStatus:
        partition = lane.partition
        turn = self._turns[partition.number] = object()
        begun: list[Installation] = []

        def begin() -> None:
            begun.append(partition.begin_installation(session, first_id, file_bytes, contact))

        try:
            await self._whole(lane.call(begin))
            installation = begun[0]
            async for piece in _timely(pieces):
                self._check_open()
                partition.check_installation(session, installation)
                if self._turns.get(partition.number) is not turn:
                    raise Displaced(
                        f"another segment file for partition {partition.number} was begun",
                        not_done="nothing of this file was kept",
                        next_step="send one file at a time to each replica",
                    )
                await self._whole(self._run_writing(installation.write, piece))
            await self._whole(self._run_writing(installation.prove))
            return await self._whole(lane.call(lambda: partition.install(session, installation)))
        finally:
            if self._turns.get(partition.number) is turn:
                del self._turns[partition.number]
            for installation in begun:  # once it has its place this does nothing
                await self._whole(self._run_writing(installation.abandon))

    async def _whole(self, work: Awaitable[T]) -> T:
        """To its end, also when the caller has gone: no two threads may have a hand in the same files."""
        step = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(step)
        except FlushFailed as error:
            self._on_fatal(error)
            raise
        except asyncio.CancelledError:
            await asyncio.wait((step,))
            if not step.cancelled() and isinstance(failure := step.exception(), FlushFailed):
                self._on_fatal(failure)
            raise


async def _timely(pieces: AsyncIterator[Buffer]) -> AsyncIterator[Buffer]:
    iterator = aiter(pieces)
    while True:
        try:
            async with asyncio.timeout(PIECE_SECONDS):
                piece = await anext(iterator)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise CannotConnect(
                f"the sender of a segment file was silent for {PIECE_SECONDS:.0f} seconds",
                not_done="nothing of the file was kept",
            ) from None
        yield piece


class Changes:
    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """For whoever wants no change meanwhile."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def whole(self, may_begin: Callable[[], None], change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """`may_begin` raises when it is too late for one."""
        await self.turn.acquire()
        try:
            may_begin()
            task = asyncio.create_task(change())
        except BaseException:
            self.turn.release()
            raise
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self.turn.release()
        if not task.cancelled():
            task.exception()  # who asked may not be there to hear of it


ANSWER_BYTES_MAX = 64 << 20
ANSWER_SECONDS_MAX = 5.0


async def hashed(
    read: Callable[[int], Awaitable[Run]], run_blocking: Callable[..., Awaitable[None]], first_id: int, last_id: int
) -> Digest:
    """`read` gives sound records from an id on. What is damaged or not known to be committed ends the digest in front of
    it, and is an error where the digest would begin."""
    if not 0 <= first_id <= last_id:
        raise BadArgument(f"ids {first_id} to {last_id} are no range")
    hashing, clock = Hashing(first_id), asyncio.get_running_loop().time
    ends = clock() + ANSWER_SECONDS_MAX
    while hashing.next_id <= last_id:
        try:
            run = await read(hashing.next_id)
        except (PartitionDamaged, BeyondLog):
            if hashing.next_id == first_id:
                raise
            break
        await run_blocking(hashing.add, run)
        if hashing.bytes >= ANSWER_BYTES_MAX or clock() >= ends:
            break
    return hashing.digest()


APPENDERS_MAX = 16
"""Append streams for each partition: each may have one message in memory beside what is queued, and an owner has one or two
of them, with those that a broken connection has not ended yet."""
READERS_MAX = 256
"""Streams that read, on the whole storage: each may have one frame in memory."""


class StorageCalls:
    def __init__(
        self,
        disk: Disk,
        directory: Directory,
        config: StorageConfig,
        *,
        run_writing: RunBlocking,
        run_reading: RunBlocking,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._config = config
        self._run_writing = run_writing
        self._run_reading = run_reading
        self._on_fatal = on_fatal
        self._lanes: dict[int, Lane] = {}
        self._streams: dict[Stream, None] = {}
        self._queued = Budget(config.queue_bytes_max)
        self._readers = 0
        self._piece_bytes = min(config.read_chunk_bytes, PIECE_BYTES)
        self._changes = Changes()
        self._arrivals = Arrivals(run_writing=run_writing, on_fatal=on_fatal, check_open=self._check_open)
        self._proving = asyncio.Semaphore(max(1, config.flush_threads // 2))
        self._started_ns = monotonic_ns()
        self.statistics = Statistics()
        self.is_draining = False

    def start(self) -> None:
        for partition in self._directory.partitions():
            self._start_lane(partition)

    def _start_lane(self, partition: Partition) -> None:
        lane = Lane(
            partition,
            run_blocking=self._run_writing,
            on_fatal=self._on_fatal,
            statistics=self.statistics,
            budget=self._queued,
        )
        self._lanes[partition.number] = lane
        lane.start()

    def refuse_new(self) -> None:
        """No new calls; append streams end once what they queued is done."""
        self.is_draining = True
        for stream in self._streams:
            stream.leave(Draining("the storage is shutting down"))

    async def close(self) -> None:
        """Finish what is queued and leave clean marks. A partition that is just being made or removed is finished first."""
        async with self._changes.turn:
            for lane in self._lanes.values():
                await lane.close()
            await self._run_writing(self._directory.close)

    # -- who asks, for what

    @property
    def directory(self) -> Directory:
        return self._directory

    @property
    def config(self) -> StorageConfig:
        return self._config

    def _check_open(self) -> None:
        if self.is_draining:
            raise Draining("the storage is shutting down")

    def check_key(self, key: UUID) -> None:
        self._check_open()
        ours = self._directory.control.header.key
        if key != ours:
            raise ForeignCluster(f"this storage belongs to the cluster {ours}; the caller says {key}", key=ours)

    async def take_name(self, name: str) -> None:
        async with self._changes.turn:
            await self._run_writing(self._directory.take_name, name)

    def _lane(self, number: int) -> Lane:
        self._directory.partition(number)  # says why there is none
        lane = self._lanes.get(number)
        if lane is None:
            raise NoSuchPartition(f"partition {number} is being created or removed on this storage")
        return lane

    # -- the replica protocol

    def status(self, number: int) -> ReplicaStatus:
        """Where the replica stands. It is bound to nothing by that, and nothing is proven."""
        return self._lane(number).partition.status()

    async def open_session(
        self, number: int, session: int, partitions: int, *, create: bool = False, caller: int = 0
    ) -> ReplicaStatus:
        ours = self._directory.control.header.partitions
        if partitions != ours:
            raise ForeignCluster(f"this storage belongs to a cluster of {ours} partitions; the caller says {partitions}")
        if create and number not in self._lanes:
            check_jump(NO_SESSION, session)
            await self._make(self._directory.ensure_partition, number)
        return await self._contact(number, session, caller)

    async def fence(self, number: int, session: int) -> ReplicaStatus:
        """For an operator's rescue: also where a higher session was promised."""
        return await self._contact(number, session, by_operator=True)

    async def _contact(self, number: int, session: int, caller: int = 0, *, by_operator: bool = False) -> ReplicaStatus:
        lane = self._lane(number)
        partition = lane.partition
        contact = await lane.call(lambda: partition.fence(session, caller, by_operator=by_operator))
        lane.fence()
        # A tail can be long. Proving it takes a turn for each segment and half of the threads, so that everybody else's
        # appends find theirs.
        is_more = True
        while is_more:
            async with self._proving:
                is_more = await lane.call(partition.prove_next)
        partition.check_session(session, contact)
        return replace(partition.status(), contact=contact)

    async def set_low_mark(self, number: int, session: int, mark: int, *, contact: int = 0) -> ReplicaStatus:
        lane = self._lane(number)
        return await lane.call(lambda: lane.partition.set_low_mark(session, mark, contact))

    async def truncate(self, number: int, session: int, mark: int, *, contact: int = 0) -> ReplicaStatus:
        lane = self._lane(number)
        return await lane.call(lambda: lane.partition.truncate(session, mark, contact))

    async def install_segment(
        self, number: int, session: int, first_id: int, file_bytes: int, pieces: AsyncIterator[Buffer], *, contact: int = 0
    ) -> ReplicaStatus:
        """A whole segment file, to stand behind the last id or where one is damaged. The first piece is asked for when
        the replica has agreed to take it."""
        return await self._arrivals.take(self._lane(number), session, contact, first_id, file_bytes, pieces)

    async def append(self, number: int, session: int, link: Link, *, contact: int = 0) -> None:
        """Serve one append stream until the sender has no more, or something ends it; the sender is told what."""
        try:
            lane = self._lane(number)
            lane.partition.check_session(session, contact)
            if sum(stream.is_of(lane) for stream in self._streams) >= APPENDERS_MAX:
                raise TooManyCallers(
                    f"partition {number} has {APPENDERS_MAX} append streams already", next_step="an owner needs one or two"
                )
        except WaltzError as error:
            await refuse(link, error)
            raise
        stream = Stream(session, contact or lane.partition.contact, lane, link, self._config)
        self._streams[stream] = None
        try:
            await stream.serve()
        finally:
            del self._streams[stream]

    # -- reading

    @contextlib.contextmanager
    def _reader(self) -> Iterator[None]:
        """A place among those that read: what each of them has in memory is bounded, and so are they."""
        if self._readers >= READERS_MAX:
            raise TooManyCallers(
                f"{READERS_MAX} readers are being served already", next_step="try again when others are done"
            )
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1

    async def read(
        self, number: int, session: int | None, first_id: int, last_id: int | None, frame_bytes: int
    ) -> AsyncIterator[Run]:
        with self._reader():
            async for run in self._read(number, session, first_id, last_id, frame_bytes):
                yield run

    async def _read(
        self, number: int, session: int | None, first_id: int, last_id: int | None, frame_bytes: int
    ) -> AsyncIterator[Run]:
        lane = self._lane(number)
        partition = lane.partition
        size = min(frame_bytes or self._config.read_chunk_bytes, self._config.frame_bytes_max)
        if size < 0 or (last_id is not None and last_id < first_id):
            raise BadArgument(f"ids {first_id} to {last_id} in frames of {frame_bytes} bytes make no range")
        limit = partition.last_id if session is not None else min(partition.last_id, partition.visible_mark)
        last_id = limit if last_id is None else last_id
        if first_id == limit + 1 and last_id == limit:
            if session is not None:
                partition.check_session(session)
            return
        at = first_id
        while at <= last_id:
            run = await self._read_one(lane, at, last_id, size, session)
            self.statistics.read_records += len(run)
            self.statistics.read_bytes += len(run.data)
            yield run
            at = run.last_id + 1
            if at > limit:
                limit = partition.last_id if session is not None else min(partition.last_id, partition.visible_mark)
                if at > limit and at <= last_id:
                    raise BeyondLog(f"partition {number} ends at id {limit}; id {at} is not here", last_id=limit)

    async def _read_one(self, lane: Lane, first_id: int, last_id: int, size: int, session: int | None) -> Run:
        partition = lane.partition

        def read() -> Run:
            return partition.read(first_id, last_id, size, session=session)

        try:
            found: Run = await self._run_reading(read)
        except Suspect as question:
            await self._examine(lane, question.first_id)
            try:
                found = await self._run_reading(read)
            except Suspect:
                raise PartitionDamaged(
                    f"partition {partition.number}: what is read from the segment at id {question.first_id} is not what "
                    "stands there"
                ) from None
        return found

    async def _examine(self, lane: Lane, first_id: int) -> None:
        """Damage ends the append streams: the owner opens the replica again, learns of it and heals it, also where nothing
        is written at the moment."""
        partition = lane.partition
        await lane.call(lambda: partition.examine(first_id))
        status = partition.status()
        if first_id in status.damaged_segments:
            finding = status.findings[0]
            lane.refuse_all(
                PartitionDamaged(
                    f"partition {partition.number} is damaged: {finding.sentence()}",
                    first_id=finding.first_id,
                    last_id=finding.last_id,
                )
            )

    async def digest(self, number: int, first_id: int, last_id: int) -> Digest:
        """A hash of records that are known to be committed, from `first_id` as far as one answer goes."""
        lane = self._lane(number)
        with self._reader():
            return await hashed(
                lambda at: self._read_one(lane, at, last_id, self._config.read_chunk_bytes, None),
                self._run_reading,
                first_id,
                last_id,
            )

    def segments(self, number: int, session: int | None) -> list[tuple[int, int, int]]:
        partition = self._lane(number).partition
        if session is not None:
            partition.check_session(session)
        return [
            (first_id, last_id, partition.bytes_of(first_id))
            for first_id, last_id in partition.sealed_segments()
            if session is not None or last_id <= partition.visible_mark
        ]

    async def fetch_segment(self, number: int, session: int, first_id: int) -> AsyncGenerator[bytes, None]:
        """A sealed segment as it is. Its records are proven by whoever receives it."""
        with self._reader():
            partition = self._lane(number).partition
            partition.check_session(session)
            file = self._disk.open(partition.sealed_path(first_id))
            try:
                offset, size = 0, file.size()
                while offset < size:
                    data: bytes = await self._run_reading(file.read, offset, self._piece_bytes)
                    if not data:
                        raise ReadFailed(f"{file.path} had {size} bytes and ends at {offset} now")
                    yield data
                    self.statistics.read_bytes += len(data)
                    offset += len(data)
            finally:
                file.close()

    # -- administration

    async def create_partition(self, number: int) -> None:
        await self._make(self._directory.create_partition, number)

    async def _make(self, make: Callable[[int], Partition | None], number: int) -> None:
        async def change() -> None:
            try:
                partition: Partition | None = await self._run_writing(make, number)
            except FlushFailed as error:
                self._on_fatal(error)
                raise
            if partition is not None:
                self._start_lane(partition)

        await self._changes.whole(self._check_open, change)

    async def remove_partition(self, number: int, *, delete_files: bool) -> str | None:
        async def change() -> str | None:
            lane = self._lanes.pop(number, None)
            if lane is not None:
                await lane.close()
                lane.refuse_all(NoSuchPartition(f"partition {number} was taken off this storage"))
            try:
                aside: str | None = await self._run_writing(
                    lambda: self._directory.remove_partition(number, delete_files=delete_files)
                )
            except FlushFailed as error:
                self._on_fatal(error)
                raise
            return aside

        return await self._changes.whole(self._check_open, change)

    async def delete_aside(self, names: Sequence[str]) -> tuple[SetAside, ...]:
        async def change() -> tuple[SetAside, ...]:
            try:
                deleted: tuple[SetAside, ...] = await self._run_writing(self._directory.delete_aside, names)
            except FlushFailed as error:
                self._on_fatal(error)
                raise
            return deleted

        return await self._changes.whole(self._check_open, change)

    async def set_available(self, number: int, available: bool) -> None:
        async with self._changes.turn:
            if number in self._lanes:
                await self._lanes[number].call(lambda: self._directory.set_available(number, available))
            else:  # its data is refused, its flags can be set
                try:
                    await self._run_writing(self._directory.set_available, number, available)
                except FlushFailed as error:
                    self._on_fatal(error)
                    raise

    async def verify(self, number: int) -> AsyncIterator[Finding | PartitionReport]:
        """Everything of one partition that is on the disk, while it goes on being written; the report comes last.

        What is found is examined in its turn: from then on the replica knows of it, so that its owner heals it."""
        lane = self._lane(number)
        partition = lane.partition
        cuts = partition.cuts
        examined: dict[int, None] = {}
        found = verify_partition(
            self._disk,
            partition.directory,
            number,
            partition.key,
            durable_id=partition.last_id,
            marks=Marks(named=(("what this replica had on disk", partition.floor),)),
        )
        while True:
            result: Finding | PartitionReport | None = await self._run_reading(next, found, None)
            if cuts != partition.cuts:
                message = f"partition {number} was cut while it was verified"
                raise BeyondLog(message, next_step="verify it again", not_done="it is not checked")
            if result is None:
                return
            if isinstance(result, Finding):
                for first_id in partition.concerned(result):
                    if first_id not in examined:
                        examined[first_id] = None
                        await self._examine(lane, first_id)
            yield result

    async def check_in_place(self) -> None:
        async with self._changes.turn:
            await self._run_reading(self._directory.check_in_place)

    async def keep_reserve(self) -> None:
        await self._run_writing(self._directory.keep_reserve)

    async def unready(self) -> list[str]:
        """Why it is of little use now; nothing when it is ready."""
        found: list[str] = await self._run_reading(self._unready)
        return found

    def _unready(self) -> list[str]:
        directory = self._directory
        return readiness.of_storage(
            is_draining=self.is_draining,
            free_bytes=self._disk.free_bytes(directory.path),
            free_bytes_min=self._config.free_bytes_min,
            full=[partition.number for partition in directory.partitions() if partition.status().is_full],
            refused={line.partition: line.error.message for line in directory.lines() if line.error is not None},
        )

    async def troubles(self) -> dict[int, list[Trouble]]:
        """What is wrong with replicas, by partition."""
        found: dict[int, list[Trouble]] = await self._run_reading(self._troubles)
        return found

    def _troubles(self) -> dict[int, list[Trouble]]:
        found = {
            line.partition: alarm.of_replica(damage=None, refused=line.error.message, code=line.error.code)
            for line in self._directory.lines()
            if line.error is not None
        }
        for partition in self._directory.partitions():
            if partition.findings:
                damage = partition.findings[0].sentence()
                found[partition.number] = alarm.of_replica(damage=damage, refused=None, code=PartitionDamaged.code)
        return found

    async def describe(self) -> StorageDescription:
        found: StorageDescription = await self._run_reading(self._describe)
        return found

    def _describe(self) -> StorageDescription:
        directory, header = self._directory, self._directory.control.header
        return StorageDescription(
            cluster_key=header.key,
            partitions=header.partitions,
            directory=directory.path,
            version=version("waltz"),
            free_bytes=self._disk.free_bytes(directory.path),
            uptime_ms=(monotonic_ns() - self._started_ns) // 1_000_000,
            is_draining=self.is_draining,
            assigned=tuple(self._describe_one(line) for line in directory.lines()),
            statistics=self.statistics,
            instance=directory.instance,
            free_bytes_min=self._config.free_bytes_min,
            name=directory.name,
            set_aside=directory.aside(),
        )

    def _describe_one(self, line: PartitionLine) -> PartitionDescription:
        number, refused, lane = line.partition, line.error, self._lanes.get(line.partition)
        if refused is not None or lane is None:
            story = f"partition {number}: refused, {refused.message}" if refused else f"partition {number}: being changed"
            return PartitionDescription(
                partition=number, status=None, refused=refused, story=story, queued_bytes=0, disk_bytes=0
            )
        return PartitionDescription(
            partition=number,
            status=lane.partition.status(),
            refused=None,
            story=lane.partition.describe(),
            queued_bytes=lane.queued_bytes,
            disk_bytes=sum(e.size for e in self._disk.list(lane.partition.directory) if not e.is_directory),
        )
