"""Storage daemon without its network: every call that a server or an operator can make, as an awaitable.

The daemon has three kinds of work. A change of a replica takes its turn in the `AppendQueue` of that replica. Reads,
digests and verification run beside the queues on threads of their own, a piece at a time, and never take an appender's
turn. Changes of the directory (a replica is created or removed) come one at a time. Work that writes runs to its end even
if its caller gives up: a thread cannot be stopped, and two threads may never write to one file.

A flush that fails ends the process, wherever the failure is detected: `on_fatal` never returns in a daemon.
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

from waltzd.archive.store import Store
from waltzd.daemon import alarm, readiness
from waltzd.daemon.alarm import Trouble
from waltzd.daemon.config import StorageConfig
from waltzd.disk.seam import Buffer, Disk
from waltzd.errors import BadArgument, BeyondLog, Displaced, ForeignCluster, NoSuchPartition, TooLarge, WaltzError
from waltzd.errors.operations import (
    Draining,
    FlushFailed,
    PartitionDamaged,
    ReadFailed,
    TooManyCallers,
    TooManyFiles,
    Unsafe,
)
from waltzd.format.finding import Finding
from waltzd.format.key_index import LockMarks, LockQuery
from waltzd.format.layout import NO_SESSION, VERSIONS, first_id_of
from waltzd.format.record import Digest, Hashing, Run
from waltzd.protocol.descriptions import (
    Archived,
    PartitionDescription,
    ReplicaStatus,
    SetAside,
    Statistics,
    StorageDescription,
)
from waltzd.protocol.histogram import Durations
from waltzd.protocol.peers import NOBODY, Contact, Content, Link, LockHistory, runs_of
from waltzd.protocol.timelines import Lineage
from waltzd.storage.append_queue import AppendQueue, InlineFlushPolicy, RunBlocking, RunHere, Stream, refuse
from waltzd.storage.archiver import Archiver
from waltzd.storage.offline.verify import Marks, PartitionReport, verify_partition
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.hard_state import check_jump
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.repair import Installation
from waltzd.storage.replica.segment import Suspect
from waltzd.storage.restorer import Restorer
from waltzd.storage.scrub import KeyIndexer, Scrub
from waltzd.wire.flow_control import Budget
from waltzd.wire.streams import PIECE_BYTES, timely
from waltzd.wire.tasks import call_on

T = TypeVar("T")
ANSWER_BYTES_MAX = 64 << 20
ANSWER_SECONDS_MAX = 5.0
"""Seconds after which a digest ends early, however long the log and however slow the disk."""
APPENDERS_MAX = 16
"""Append streams for each partition: each may have one message in memory beside what is queued, and an owner has one or two
of them, with those that a broken connection has not ended yet."""
LEAVE_SECONDS = 2.0
"""How long an owner's append stream may take to end before files are deleted."""
MARKS_MAX = 20_000
"""Ids in one answer about a lock."""
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
        run_here: RunHere | None = None,
        clock: Callable[[], int] = monotonic_ns,
        streams_loop: asyncio.AbstractEventLoop | None = None,
        store: Store | None = None,
        run_archiving: RunBlocking | None = None,
        run_restoring: RunBlocking | None = None,
        run_scrubbing: RunBlocking | None = None,
    ) -> None:
        """`streams_loop`: event loop of queues and streams; None for the loop of all other calls. `run_here`: makes that
        loop write and flush by itself; None if it must not wait for the disk. `store`: store of the archive."""
        self._disk = disk
        self._directory = directory
        self._config = config
        self._run_writing = run_writing
        self._run_reading = run_reading
        self._on_fatal = on_fatal
        self._queues: dict[int, AppendQueue] = {}
        self._streams: dict[Stream, None] = {}
        self._queued = Budget(config.queue_bytes_max)
        self._policy = InlineFlushPolicy(run_here, clock)
        self.streams_loop = streams_loop
        self._readers: dict[object, None] = {}
        """Reads that are under way, from the event loops of calls and of streams."""
        self._piece_bytes = min(config.read_chunk_bytes, PIECE_BYTES)
        self._changing = asyncio.Lock()
        """Lock of the directory: held by each change of it, and by work during which it must not change."""
        self._arriving: dict[int, object] = {}
        """The newest segment file on its way to each partition."""
        self._proving = asyncio.Semaphore(max(1, config.flush_threads // 2))
        self._started_ns = monotonic_ns()
        self._version = version("waltzd")  # of what runs, also when the package has been replaced since
        self._aside_since = {one.name: self._started_ns for one in directory.aside()}
        """Since when it is known of each directory that it was set aside."""
        self.answered, self.streamed = Statistics(), Statistics()
        """What calls have done, and what streams and queues have: each is counted on its own loop."""
        self._flushes = Durations()
        """Durations of writing and flushing a group, of all queues."""
        self.archiver = Archiver(self, directory.control.header.key, disk, store, run_archiving or run_reading)
        self.scrub = Scrub(self, disk, run_scrubbing or run_reading, period_seconds=config.scrub_seconds, clock=disk.now_ms)
        self.key_indexer = KeyIndexer(self, run_scrubbing or run_reading, self._write)
        self.restorer = Restorer(self, disk, run_restoring or run_reading, on_fatal)
        self.is_draining = False

    @property
    def statistics(self) -> Statistics:
        return replace(self.answered.plus(self.streamed), flush=self._flushes.histogram())

    def start(self) -> None:
        for partition in self._directory.partitions():
            self._start_queue(partition)

    def _start_queue(self, partition: Partition) -> None:
        queue = AppendQueue(
            partition,
            run_blocking=self._run_writing,
            on_fatal=self._on_fatal,
            statistics=self.streamed,
            flushes=self._flushes,
            budget=self._queued,
            policy=self._policy,
            loop=self.streams_loop,
        )
        self._queues[partition.number] = queue
        call_on(self.streams_loop, queue.start)

    def refuse_new(self) -> None:
        """Refuse new calls, and end append streams once their queued frames are written."""
        self.is_draining = True
        call_on(self.streams_loop, self._dismiss, Draining("the storage is shutting down"))

    def _dismiss(self, error: WaltzError) -> None:
        for stream in self._streams:
            stream.leave(error)

    async def close(self) -> None:
        """Finish queued work and leave clean marks. A partition that is just being made or removed is finished first."""
        async with self._changing:
            for queue in self._queues.values():
                await queue.close()
            await self._write(self._directory.close)

    # -- checks of every call

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

    async def _write(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function on a thread that writes, without waiting for queued appends."""
        return await self._whole(self._run_writing(function, *arguments))

    async def _whole(self, work: Awaitable[T]) -> T:
        """Wait until the work has ended, even if the caller is cancelled. A failed flush ends the process."""
        step, gone = asyncio.ensure_future(work), None
        while not step.done():
            try:
                await asyncio.wait((step,))
            except asyncio.CancelledError as error:
                gone = error
        failure = None if step.cancelled() else step.exception()
        if isinstance(failure, FlushFailed):
            self._on_fatal(failure)
        elif gone is not None:
            raise gone
        return step.result()

    async def _change(self, change: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """One at a time, and none after the end has begun."""
        async with self._changing:
            self._check_open()
            return await self._whole(change())

    async def take_name(self, name: str) -> None:
        async with self._changing:
            await self._write(self._directory.take_name, name)

    def queue_of(self, number: int) -> AppendQueue | None:
        """Return the queue of a replica; None while the replica is created, removed or refused."""
        return self._queues.get(number)

    def _queue(self, number: int) -> AppendQueue:
        self._directory.partition(number)  # raises with the reason if the replica is missing or refused
        queue = self._queues.get(number)
        if queue is None:
            raise NoSuchPartition(f"partition {number} is being created or removed on this storage")
        return queue

    # -- the replica protocol

    def status(self, number: int) -> ReplicaStatus:
        """Return the status of a replica. It changes no durable state."""
        return self._queue(number).partition.status()

    def quiet(self, numbers: Sequence[int]) -> list[int]:
        """Return the partitions with a replica here that have no append stream now. A server asks this about another server
        that it suspects to be dead."""
        if len(numbers) > self._directory.control.header.partitions + 1:  # and the group log
            raise TooLarge(f"{len(numbers)} partitions were named; the cluster has fewer")
        found = {number: self._queues.get(number) for number in numbers}
        return [
            number
            for number, queue in found.items()
            if queue is not None and not any(stream.is_of(queue) for stream in list(self._streams))
        ]

    async def open_session(
        self, number: int, session: int, partitions: int, *, create: bool = False, caller: int = 0, secret: bytes = b""
    ) -> ReplicaStatus:
        ours = self._directory.control.header.partitions
        if partitions != ours:
            raise ForeignCluster(f"this storage belongs to a cluster of {ours} partitions; the caller says {partitions}")
        if create and number not in self._queues:
            check_jump(NO_SESSION, session)
            await self.make_replica(self._directory.ensure_partition, number)
        return await self._contact(number, session, caller, secret)

    async def fence(self, number: int, session: int) -> ReplicaStatus:
        """For an operator's rescue: also below a promised session that has not begun."""
        return await self._contact(number, session, by_operator=True)

    async def _contact(
        self, number: int, session: int, caller: int = 0, secret: bytes = b"", *, by_operator: bool = False
    ) -> ReplicaStatus:
        queue = self._queue(number)
        partition = queue.partition
        contact = await queue.fence(lambda: partition.fence(session, caller, secret, by_operator=by_operator))
        # A tail can be long. Proving it takes a turn for each segment, and half of the threads: the rest stays free for the
        # appends of other partitions.
        is_more = True
        while is_more:
            async with self._proving:
                is_more = await queue.call(partition.prove_next)
        partition.check_session(session, contact)
        return replace(partition.status(), contact=contact)

    def _owned(self, number: int, session: int, contact: Contact) -> AppendQueue:
        """For a call of the owner, which shows that it is one."""
        queue = self._queue(number)
        queue.partition.check_contact(session, contact)
        return queue

    def readable(self, number: int, session: int | None, contact: Contact) -> AppendQueue:
        """Return the queue of a replica for a reader. A reader with a session must be of the current session, but need not
        be of its latest contact."""
        return self._queue(number) if session is None else self._owned(number, session, replace(contact, number=0))

    async def set_low_mark(self, number: int, session: int, mark: int, *, contact: Contact = NOBODY) -> ReplicaStatus:
        queue = self._owned(number, session, contact)
        return await queue.call(lambda: queue.partition.set_low_mark(session, mark, contact.number))

    async def truncate(self, number: int, session: int, mark: int, *, contact: Contact = NOBODY) -> ReplicaStatus:
        queue = self._owned(number, session, contact)
        return await queue.call(lambda: queue.partition.truncate(session, mark, contact.number))

    async def fork(self, number: int, session: int, lineage: Lineage, *, contact: Contact = NOBODY) -> ReplicaStatus:
        queue = self._owned(number, session, contact)
        return await self._whole(queue.call(lambda: queue.partition.fork(session, lineage, contact.number)))

    async def trim(
        self,
        number: int,
        session: int,
        floor: int,
        archived: Archived | None = None,
        *,
        needs_none: bool = False,
        contact: Contact = NOBODY,
    ) -> ReplicaStatus:
        """Raise the start of the log to this floor, as far as the archive is proven to hold what is below, or the log
        needs no archive. Readers with an open segment continue; later readers get `Trimmed`."""
        queue = self._owned(number, session, contact)
        partition, proven, damaged, why = queue.partition, floor, tuple[int, ...](), ""
        if not needs_none and floor > partition.first_id:
            proven, damaged, why = await self.archiver.proven(queue, session, floor, archived)
        status = await self._whole(
            queue.call(lambda: partition.trim(session, floor, contact.number, proven=proven, damaged=damaged, why=why))
        )
        while await self._whole(queue.call(queue.partition.unlink_next)):
            continue
        return status

    async def install_segment(
        self,
        number: int,
        session: int,
        first_id: int,
        file_bytes: int,
        pieces: AsyncIterator[Buffer],
        *,
        contact: Contact = NOBODY,
    ) -> ReplicaStatus:
        """Take a whole segment file, behind the last id or in the place of a damaged one. The first piece is asked for when
        the replica has a place for it.

        The file is received and proven beside the log; only its begin and its end take a turn of the queue. A newer file
        for the same replica ends the one before, whose sender has gone or will ask again."""
        queue = self._owned(number, session, contact)
        partition = queue.partition
        turn = self._arriving[number] = object()
        installation: Installation | None = None

        def begin() -> Installation:
            nonlocal installation  # set also when the caller gives up meanwhile
            installation = partition.begin_installation(session, first_id, file_bytes, contact.number)
            return installation

        try:
            installation = await self._whole(queue.call(begin))
            async for piece in timely(pieces):
                self._check_open()
                partition.check_installation(session, installation)
                if self._arriving.get(number) is not turn:
                    raise Displaced(
                        f"another segment file for partition {number} was begun",
                        not_done="nothing of this file was kept",
                        next_step="send one file at a time to each replica",
                    )
                await self._write(installation.write, piece)
            await self._write(installation.prove)
            return await self._whole(queue.call(lambda: partition.install(session, installation)))
        finally:
            if self._arriving.get(number) is turn:
                del self._arriving[number]
            if installation is not None:  # once it has its place this does nothing
                await self._write(installation.abandon)

    async def append(self, number: int, session: int, link: Link, *, contact: Contact = NOBODY) -> None:
        """Serve one append stream until its end, or an error, which the sender is told."""
        try:
            queue = self._owned(number, session, contact)
            if sum(stream.is_of(queue) for stream in self._streams) >= APPENDERS_MAX:
                why = f"partition {number} has {APPENDERS_MAX} append streams already"
                raise TooManyCallers(why, next_step="an owner needs one or two")
        except WaltzError as error:
            await refuse(link, error)
            raise
        stream = Stream(session, contact.number or queue.partition.contact, queue, link, self._config)
        self._streams[stream] = None
        try:
            await stream.serve()
        finally:
            del self._streams[stream]

    # -- reading

    @contextlib.contextmanager
    def _reader(self) -> Iterator[None]:
        """Bounds the number of readers; what each of them has in memory is bounded, too."""
        if len(self._readers) >= READERS_MAX:
            why = f"{READERS_MAX} readers are being served already"
            raise TooManyCallers(why, next_step="try again when others are done")
        reader = object()
        self._readers[reader] = None
        try:
            yield
        finally:
            del self._readers[reader]

    async def read(
        self,
        number: int,
        session: int | None,
        first_id: int,
        last_id: int | None,
        frame_bytes: int,
        *,
        contact: Contact = NOBODY,
        with_locks: bool = False,
        timeline: UUID | None = None,
    ) -> AsyncGenerator[Run, None]:
        """Read for a reader of any kind. `timeline`: the one whose log is read; None for that of the replica."""

        def read(partition: Partition, first_id: int, last_id: int, size: int) -> Run:
            return partition.read(first_id, last_id, size, session=session, with_locks=with_locks)

        queue = self.readable(number, session, contact)
        if timeline is not None:
            last = queue.partition.readable_to(session) if last_id is None else last_id
            queue.partition.lineage.check(timeline, last, what="a reader", partition=number)
        async with contextlib.aclosing(self._read(queue, session, first_id, last_id, frame_bytes, read)) as runs:
            async for run in runs:
                assert isinstance(run, Run)
                yield run

    async def read_whole(
        self,
        number: int,
        session: int,
        first_id: int,
        last_id: int | None,
        frame_bytes: int,
        *,
        contact: Contact = NOBODY,
    ) -> AsyncGenerator[Content, None]:
        """Read for another replica: whole batches where the log has batches."""

        def read(partition: Partition, first_id: int, last_id: int, size: int) -> Content:
            return partition.read_whole(first_id, last_id, size, session=session)

        queue = self.readable(number, session, contact)
        async with contextlib.aclosing(self._read(queue, session, first_id, last_id, frame_bytes, read)) as contents:
            async for content in contents:
                yield content

    async def _read(
        self,
        queue: AppendQueue,
        session: int | None,
        first_id: int,
        last_id: int | None,
        frame_bytes: int,
        read: Callable[[Partition, int, int, int], Content],
    ) -> AsyncGenerator[Content, None]:
        with self._reader():
            partition = queue.partition
            size = min(frame_bytes or self._config.read_chunk_bytes, self._config.frame_bytes_max)
            if size < 0 or (last_id is not None and last_id < first_id):
                raise BadArgument(f"ids {first_id} to {last_id} in frames of {frame_bytes} bytes make no range")
            limit = partition.readable_to(session)
            last_id = limit if last_id is None else last_id
            if first_id == limit + 1 and last_id == limit:
                if session is not None:
                    partition.check_session(session)
                return
            at = first_id
            while at <= last_id:
                content = await self._answer(queue, read, partition, at, last_id, size)
                runs = runs_of(content)
                self.answered.read_records += sum(map(len, runs))
                self.answered.read_bytes += sum(len(run.data) for run in runs)
                yield content
                at = runs[-1].last_id + 1
                if at > limit:
                    limit = partition.readable_to(session)
                    if at <= last_id and limit < last_id:  # a reader that is slower than the log grows would never end
                        why = f"partition {partition.number} ends at id {limit}; id {last_id} is not here"
                        raise BeyondLog(why, last_id=limit)

    async def read_locks(
        self, number: int, session: int, last_id: int, bytes_max: int, *, contact: Contact = NOBODY
    ) -> LockHistory | None:
        with self._reader():
            queue = self.readable(number, session, contact)
            size = min(bytes_max, self._config.frame_bytes_max)
            return await self._answer(queue, lambda: queue.partition.read_locks(last_id, size, session=session))

    async def find_marks(self, number: int, session: int, query: LockQuery, *, contact: Contact = NOBODY) -> LockMarks:
        with self._reader():
            queue = self.readable(number, session, contact)
            query = replace(query, limit=min(query.limit, MARKS_MAX))
            found = await self._answer(queue, lambda: queue.partition.find_marks(query, session=session))
            await self.key_indexer.index_missed(queue.partition)
            return found

    async def find_time(self, number: int, session: int, time: int, *, contact: Contact = NOBODY) -> int:
        with self._reader():
            queue = self.readable(number, session, contact)
            return await self._answer(queue, lambda: queue.partition.find_time(time, session=session))

    async def _answer(self, queue: AppendQueue, read: Callable[..., T], *arguments: Any) -> T:
        """Return what `read` returns. If it meets wrong bytes, examine the segment and read once more."""
        partition = queue.partition
        try:
            return await self._run_reading(read, *arguments)
        except Suspect as question:
            await self.examine(queue, question.first_id)
            try:
                return await self._run_reading(read, *arguments)
            except Suspect:
                raise PartitionDamaged(
                    f"partition {partition.number}: what is read from the segment at id {question.first_id} is not what "
                    "stands there"
                ) from None

    async def examine(self, queue: AppendQueue, first_id: int) -> None:
        """Damage ends the append streams: the owner opens the replica again, learns of it and heals it, even while no
        record is written."""
        partition = queue.partition
        await queue.call(lambda: partition.examine(first_id))
        status = partition.status()
        if first_id in status.damaged_segments:
            finding = status.findings[0]
            await queue.refuse_all(
                PartitionDamaged(
                    f"partition {partition.number} is damaged: {finding.sentence()}",
                    first_id=finding.first_id,
                    last_id=finding.last_id,
                )
            )

    async def digest(self, number: int, first_id: int, last_id: int) -> Digest:
        """Return a hash of committed records. It ends after a bounded number of bytes or seconds, or before a damaged
        or uncommitted id, and names the last id that it covers, from which the caller continues. Raise if it cannot
        cover any id.

        Each piece is read and hashed in a turn of its own, so that other readers come between."""
        queue = self._queue(number)
        if not 0 <= first_id <= last_id:
            raise BadArgument(f"ids {first_id} to {last_id} are no range")
        hashing, clock = Hashing(first_id), asyncio.get_running_loop().time

        def read(first_id: int) -> Run:
            return queue.partition.read(first_id, last_id, self._config.read_chunk_bytes, session=None)

        ends = clock() + ANSWER_SECONDS_MAX
        with self._reader():
            while hashing.next_id <= last_id:
                try:
                    run = await self._answer(queue, read, hashing.next_id)
                except (PartitionDamaged, BeyondLog):
                    if hashing.next_id == first_id:
                        raise
                    break
                await self._run_reading(hashing.add, run)
                # at least one piece is hashed, so that repeated calls come to an end
                if hashing.bytes >= ANSWER_BYTES_MAX or clock() >= ends:
                    break
        return hashing.digest()

    def segments(self, number: int, session: int | None, *, contact: Contact = NOBODY) -> list[tuple[int, int, int]]:
        partition = self.readable(number, session, contact).partition
        return [
            (first_id, last_id, partition.bytes_of(first_id))
            for first_id, last_id in partition.sealed_segments()
            if session is not None or last_id <= partition.visible_mark
        ]

    async def fetch_segment(
        self, number: int, session: int, first_id: int, *, contact: Contact = NOBODY
    ) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a sealed segment file. The receiver verifies its records."""
        with self._reader():
            queue = self.readable(number, session, contact)
            file = self._disk.open(queue.partition.sealed_path(first_id))
            try:
                offset, size = 0, file.size()
                while offset < size:
                    data = await self._run_reading(file.read, offset, self._piece_bytes)
                    if not data:
                        raise ReadFailed(f"{file.path} had {size} bytes and ends at {offset} now")
                    yield data
                    self.streamed.read_bytes += len(data)
                    offset += len(data)
            except ReadFailed as error:
                if not isinstance(error, TooManyFiles):
                    await self.examine(queue, first_id)
                raise
            finally:
                file.close()

    # -- administration

    async def create_partition(self, number: int) -> None:
        await self.make_replica(self._directory.create_partition, number)

    async def make_replica(self, make: Callable[[int], Partition | None], number: int) -> None:
        async def change() -> None:
            partition = await self._write(make, number)
            if partition is not None:
                self._start_queue(partition)

        await self._change(change)

    async def remove_partition(self, number: int, *, delete_files: bool) -> str | None:
        """Files are deleted only where no owner appends to them: for that one they are a replica that counts."""

        async def change() -> str | None:
            if delete_files:
                await self._check_left(number)
            queue = self._queues.pop(number, None)
            if queue is not None:
                await queue.close()
                await queue.refuse_all(NoSuchPartition(f"partition {number} was taken off this storage"))
            return await self._write(lambda: self._directory.remove_partition(number, delete_files=delete_files))

        return await self._change(change)

    async def _check_left(self, number: int) -> None:
        """Wait a moment until the owner, which was told to leave, closes its append stream; raise `Unsafe` if it does
        not."""
        queue = self._queues.get(number)
        waiting = asyncio.get_running_loop().time() + LEAVE_SECONDS
        while queue is not None and any(stream.is_of(queue) for stream in list(self._streams)):
            if asyncio.get_running_loop().time() >= waiting:
                raise Unsafe(
                    f"the owner of partition {number} appends to this replica",
                    not_done="its files are as they were",
                    next_step="take it off without deleting its files: they are set aside, and can be deleted later",
                )
            await asyncio.sleep(LEAVE_SECONDS / 20)

    async def delete_aside(self, names: Sequence[str]) -> tuple[SetAside, ...]:
        return await self._change(lambda: self._write(self._directory.delete_aside, names))

    async def set_available(self, number: int, available: bool) -> None:
        async with self._changing:
            if number in self._queues:
                await self._queues[number].call(lambda: self._directory.set_available(number, available))
            else:  # the replica is refused, and its flags can be set nevertheless
                await self._write(self._directory.set_available, number, available)

    async def verify(self, number: int) -> AsyncIterator[Finding | PartitionReport]:
        """Check one partition up to its last id, while appends continue. Yield the findings, and the report at the end.

        The queue examines each finding between two appends: the replica adds it to its damage report, and the owner
        repairs it."""
        queue = self._queue(number)
        partition = queue.partition
        cuts = partition.cuts
        examined: dict[int, None] = {}
        told: list[Finding] = []
        found = verify_partition(
            self._disk,
            partition.directory,
            number,
            partition.key,
            durable_id=partition.last_id,
            marks=Marks(named=(("the last id of this replica", partition.last_id),), begin=partition.first_id),
        )
        while True:
            result: Finding | PartitionReport | None = await self._run_reading(next, found, None)
            if cuts != partition.cuts:
                message = f"partition {number} was cut while it was verified"
                raise BeyondLog(message, next_step="verify it again", not_done="it is not checked")
            if result is None:
                return
            if isinstance(result, PartitionReport):
                result.findings = told
            elif _is_below(result, partition.first_id):
                continue  # trimmed meanwhile
            else:
                told.append(result)
                for first_id in partition.concerned(result):
                    if first_id not in examined:
                        examined[first_id] = None
                        await self.examine(queue, first_id)
            yield result

    async def check_in_place(self) -> None:
        async with self._changing:
            await self._whole(self._run_reading(self._directory.check_in_place))

    async def keep_reserve(self) -> None:
        await self._write(self._directory.keep_reserve)

    async def unready(self) -> list[str]:
        """Return the reasons why the storage is not ready; empty if it is ready."""
        return await self._run_reading(self._unready)

    def _unready(self) -> list[str]:
        directory = self._directory
        return readiness.of_storage(
            is_draining=self.is_draining,
            free_bytes=self._disk.free_bytes(directory.path),
            free_bytes_min=self._config.free_bytes_min,
            full=[partition.number for partition in directory.partitions() if partition.status().is_full],
            refused={number: error.message for number, error in directory.errors().items() if error is not None},
        )

    async def troubles(self) -> dict[int, list[Trouble]]:
        """Return the troubles of each partition, by its number."""
        return await self._run_reading(self._troubles)

    def _troubles(self) -> dict[int, list[Trouble]]:
        found = {
            number: alarm.of_replica(damage=None, refused=error.message, code=error.code)
            for number, error in self._directory.errors().items()
            if error is not None
        }
        for partition in self._directory.partitions():
            if partition.findings:
                damage = partition.findings[0].sentence()
                found[partition.number] = alarm.of_replica(damage=damage, refused=None, code=PartitionDamaged.code)
        return found

    async def describe(self) -> StorageDescription:
        return await self._run_reading(self._describe)

    def _describe(self) -> StorageDescription:
        directory, header = self._directory, self._directory.control.header
        return StorageDescription(
            cluster_key=header.key,
            partitions=header.partitions,
            directory=directory.path,
            version=self._version,
            free_bytes=self._disk.free_bytes(directory.path),
            uptime_ms=(monotonic_ns() - self._started_ns) // 1_000_000,
            is_draining=self.is_draining,
            assigned=tuple(self._describe_one(number, refused) for number, refused in directory.errors().items()),
            statistics=self.statistics,
            instance=directory.instance,
            free_bytes_min=self._config.free_bytes_min,
            name=directory.name,
            set_aside=self._aside(),
            formats=VERSIONS,
            keeps_group_log=True,
            scrub=self.scrub.status(),
        )

    def _aside(self) -> tuple[SetAside, ...]:
        """Return the directories that are set aside, with the time since each was first seen by this process."""
        now, there = monotonic_ns(), self._directory.aside()
        self._aside_since = {one.name: self._aside_since.get(one.name, now) for one in there}
        return tuple(replace(one, kept_ms=(now - self._aside_since[one.name]) // 1_000_000) for one in there)

    def _describe_one(self, number: int, refused: WaltzError | None) -> PartitionDescription:
        queue = self._queues.get(number)
        if refused is not None or queue is None:
            story = f"partition {number}: refused, {refused.message}" if refused else f"partition {number}: being changed"
            return PartitionDescription(
                partition=number, status=None, refused=refused, story=story, queued_bytes=0, disk_bytes=0
            )
        return PartitionDescription(
            partition=number,
            status=queue.partition.status(),
            refused=None,
            story=queue.partition.describe(),
            queued_bytes=queue.queued_bytes,
            disk_bytes=sum(e.size for e in self._disk.list(queue.partition.directory) if not e.is_directory),
        )


def _is_below(finding: Finding, floor: int) -> bool:
    """Return whether a finding is about ids below the floor."""
    first_id = first_id_of(finding.path.rpartition("/")[2]) if finding.first_id is None else finding.first_id
    return first_id is not None and first_id < floor
