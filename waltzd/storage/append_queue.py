"""The queue that serializes the changes of one replica, and the append streams that feed it.

The walk of an append: `Stream` receives a frame and puts it into the `AppendQueue`, up to a bound, above which the sender
waits. While the disk is busy with one group the next one gathers, so load makes groups larger and flushes rarer, without a
timer. The queue checks the records of a group and calls `Partition.write` once, which writes and flushes once, however many
frames came in. Then the stream sends the mark.

Queues and streams live on a loop of their own, beside the one that answers everything else, so they may wait for the disk
themselves. A small group of the only queue that has work (`InlineFlushPolicy`) is written in the callback in which its
frame arrives: handing it to a task, or to a thread and back, takes as long as the flush. Large groups, calls, and the
groups of several queues that have work go to threads, and the disk flushes them side by side.

A stream ends by a message behind its marks, because a gRPC status could overtake a mark. Frames that still come are read
and ignored until the sender has noticed. A pending read is never cancelled as long as the stream is to go on: the transport
would not survive it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, Protocol, TypeVar

from waltzd.daemon.config import StorageConfig
from waltzd.errors import TooLarge, WaltzError
from waltzd.errors.operations import BadFrame, DiskFull, Draining, FlushFailed
from waltzd.format.batch import GROUPS_BYTES_MAX, Batch, Piece, why_wrong
from waltzd.format.record import Run, first_bad
from waltzd.protocol.descriptions import Statistics
from waltzd.protocol.histogram import Durations
from waltzd.protocol.peers import Link, RecordsFrame
from waltzd.storage.replica.partition import Partition
from waltzd.wire.flow_control import Budget
from waltzd.wire.tasks import on_loop, tell_failure

T = TypeVar("T")
HERE_BYTES_MAX = 64 << 10
"""Bytes of the largest group that is written on the event loop. A larger group is written on a thread, while the next is
received."""
NOTE_SECONDS = 0.05
"""Seconds until a new committed mark is written down. A write for each append would cost as much as the append itself."""
GROUP_BYTES_MAX = 2 << 20
"""Bytes of one flush. Larger groups make no append faster, and their first append waits longer."""

PARTS = 4
"""Divisor of the byte budget of a storage: one append queue may take a quarter of the budget."""


class RunBlocking(Protocol):
    """Runs a plain call without blocking the loop: on a thread, or at once in a simulation."""

    def __call__(self, function: Callable[..., T], /, *arguments: Any) -> Awaitable[T]: ...


class RunHere(Protocol):
    """Runs a plain call at once, on the thread that asks."""

    def __call__(self, function: Callable[..., T], /, *arguments: Any) -> T: ...


@dataclass
class InlineFlushPolicy:
    """Decides which queue of an event loop may write and flush on the loop itself. `run_here`: None if it must not.

    Queues that write on the loop in turn would flush one after another what threads flush in parallel. So a queue may write
    on the loop if it was the last queue to do so, or if the loop has since been idle for as long as that write took."""

    run_here: RunHere | None = None
    clock: Callable[[], int] = monotonic_ns
    queues_with_work: int = 0
    """Number of queues with work for their own task, which runs it on threads."""
    last: AppendQueue | None = None
    """Queue that wrote on the loop last, from `began_ns` to `ended_ns`."""
    began_ns: int = 0
    ended_ns: int = 0

    def allows(self, queue: AppendQueue) -> bool:
        if self.run_here is None or self.queues_with_work:
            return False
        idle_ns = self.clock() - self.ended_ns
        return self.last is None or self.last is queue or idle_ns >= self.ended_ns - self.began_ns


class Appender(Protocol):
    """The sender of frames, which waits for marks."""

    session: int
    contact: int

    def acknowledge(self, durable_id: int) -> None: ...
    def refuse(self, error: WaltzError) -> None: ...


@dataclass
class _Group:
    appender: Appender
    frames: list[RecordsFrame] = field(default_factory=list)
    bytes: int = 0

    @property
    def ends_segment(self) -> bool:
        return any(isinstance(piece, Batch) and piece.head.is_last for frame in self.frames for piece in frame.pieces)

    def bytes_between(self, above: int, up_to: int) -> int:
        """Return the bytes of the records with ids in (`above`, `up_to`], each record counted once."""
        found = 0
        for piece in (piece for frame in self.frames for piece in frame.pieces):
            first, last = max(piece.first_id, above + 1), min(piece.last_id, up_to)
            if (first, last) == (piece.first_id, piece.last_id):
                found += len(piece.data)
                above = last
            elif first <= last:
                run = piece if isinstance(piece, Run) else piece.run
                found += int(run.bounds[last + 1 - run.first_id] - run.bounds[first - run.first_id])
                above = last
        return found


@dataclass
class _Call:
    function: Callable[[], Any]
    answer: asyncio.Future[Any]


class AppendQueue:
    def __init__(
        self,
        partition: Partition,
        *,
        run_blocking: RunBlocking,
        on_fatal: Callable[[BaseException], None],
        statistics: Statistics,
        flushes: Durations,
        budget: Budget,
        policy: InlineFlushPolicy | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`flushes`: durations of writing and flushing a group. `budget`: limit of queued bytes, for all queues of a
        storage. A queue takes a part of it at most, so a flooded queue leaves some to other queues, and one frame of each
        queue may always wait. `loop`: event loop of the queue and its streams; None for the loop of each caller."""
        self.partition = partition
        self._loop = loop
        self._policy = policy or InlineFlushPolicy()
        self._has_work = False
        self._run_blocking = run_blocking
        self._on_fatal = on_fatal
        self._statistics = statistics
        self._flushes = flushes
        self._budget = Budget(budget.most // PARTS, within=budget)
        self._queue: deque[_Group | _Call] = deque()
        self._work = asyncio.Event()
        self._appenders: list[Appender] = []
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self._noting: asyncio.TimerHandle | None = None
        self._hashing: asyncio.Future[None] | None = None
        """What was flushed last, for a footer: beside the next group, which does not wait for it unless a segment ends."""

    def start(self) -> None:
        """On its loop. What is due from before is done first, on a thread: until then nothing is written here."""
        self._wake()
        self._task = asyncio.create_task(self._run(), name=f"queue of partition {self.partition.number}")
        tell_failure(self._task, self._on_fatal)

    # -- called from any loop

    @property
    def may_write_here(self) -> bool:
        """Return whether small groups may be written on the event loop."""
        return self._policy.run_here is not None

    @property
    def queued_bytes(self) -> int:
        return self._budget.used

    async def close(self) -> None:
        """Finish everything in the queue, then stop."""
        await on_loop(self._loop, self._close())

    async def call(self, function: Callable[[], T]) -> T:
        """Run a call of the partition in its turn."""
        return await on_loop(self._loop, self._call(function))

    async def fence(self, function: Callable[[], T]) -> T:
        """Run a call that opens the replica, and refuse the appenders of an earlier opening before anything else."""
        return await on_loop(self._loop, self._fence(function))

    async def refuse_all(self, error: WaltzError) -> None:
        """Refuse all appenders: the partition is removed, or its owner has to open it again."""
        await on_loop(self._loop, self._refuse_all(error))

    # -- the queue

    def join(self, appender: Appender) -> None:
        self._appenders.append(appender)

    def leave(self, appender: Appender) -> None:
        self._appenders.remove(appender)
        for item in [item for item in self._queue if isinstance(item, _Group) and item.appender is appender]:
            self._queue.remove(item)
            self._budget.give(item.bytes)

    async def append(self, appender: Appender, frame: RecordsFrame) -> None:
        """Queue a frame, or write it at once; wait while the budget is used up. The appender gets the outcome by
        `acknowledge` or `refuse`."""
        size = frame.bytes
        await self._budget.take(size)
        self._put(appender, frame, size)

    def append_now(self, appender: Appender, frame: RecordsFrame) -> bool:
        """Do as `append` if the budget has room; else return False, and nothing is done."""
        size = frame.bytes
        if not self._budget.take_now(size):
            return False
        self._put(appender, frame, size)
        return True

    def _put(self, appender: Appender, frame: RecordsFrame, size: int) -> None:
        last = self._queue[-1] if self._queue else None
        if not isinstance(last, _Group) or last.appender is not appender or last.bytes + size > GROUP_BYTES_MAX:
            last = _Group(appender)
            self._queue.append(last)
        last.frames.append(frame)
        last.bytes += size
        if self._may_write_here(last):
            self._queue.pop()
            self._write_here(last)
        else:
            self._wake()

    def _wake(self) -> None:
        if not self._has_work:
            self._has_work = True
            self._policy.queues_with_work += 1
        self._work.set()

    def _rest(self) -> None:
        self._work.clear()
        if self._has_work:
            self._has_work = False
            self._policy.queues_with_work -= 1

    async def _close(self) -> None:
        self._is_closing = True
        self._wake()
        if self._task is not None:
            await self._task

    async def _call(self, function: Callable[[], T]) -> T:
        if self._is_closing:
            raise Draining(f"partition {self.partition.number} takes no new calls")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.append(_Call(function, answer))
        self._wake()
        return await answer

    async def _fence(self, function: Callable[[], T]) -> T:
        result = await self._call(function)
        for appender in list(self._appenders):
            try:
                self.partition.check_session(appender.session, appender.contact)
            except WaltzError as error:
                appender.refuse(error)
        return result

    async def _refuse_all(self, error: WaltzError) -> None:
        for appender in self._appenders:
            appender.refuse(error)

    # -- the work

    async def _run(self) -> None:
        try:
            while True:
                await self._do_chores()
                if self._queue:
                    await self._do(self._queue.popleft())
                elif self._is_closing:
                    await self._hashed()
                    return
                else:
                    self._rest()
                    await self._work.wait()
        except FlushFailed as error:
            self._on_fatal(error)
        finally:
            self._rest()
            if self._noting is not None:
                self._noting.cancel()

    async def _do(self, item: _Group | _Call) -> None:
        if isinstance(item, _Call):
            await self._hashed()
            await self._answer(item)
        else:
            if item.ends_segment:
                await self._hashed()
            await self._write(item)
            await self._hashed()

    async def _do_chores(self) -> None:
        if self._hashing is not None and self._hashing.done():
            await self._hashed()
        if self._hashing is None and self.partition.wants_hashing:
            self._hashing = asyncio.ensure_future(self._run_blocking(self.partition.hash_flushed))
        if self.partition.wants_noting:
            await self._run_blocking(self.partition.note_committed)
        if self.partition.wants_checkpoint:
            self._statistics.checkpoints += 1
            await self._run_blocking(self.partition.checkpoint)

    async def _hashed(self) -> None:
        if self._hashing is not None:
            hashing, self._hashing = self._hashing, None
            await hashing

    async def _answer(self, call: _Call) -> None:
        try:
            result = await self._run_blocking(call.function)
        except WaltzError as error:
            if not call.answer.done():
                call.answer.set_exception(error)
            if isinstance(error, FlushFailed):
                raise
        else:
            if not call.answer.done():
                call.answer.set_result(result)

    async def _write(self, group: _Group) -> None:
        started, before = monotonic_ns(), self.partition.last_id
        self._tell(group, started, before, *await self._run_blocking(self._append_and_note, group))

    def _may_write_here(self, group: _Group) -> bool:
        may_begin = self._task is not None and not self._is_closing
        return may_begin and group.bytes <= HERE_BYTES_MAX and not group.ends_segment and self._policy.allows(self)

    def _write_here(self, group: _Group) -> None:
        policy, partition = self._policy, self.partition
        assert policy.run_here is not None
        started, before = monotonic_ns(), partition.last_id
        began = policy.clock()
        try:
            found = policy.run_here(self._append_group, group)
        except FlushFailed as error:
            self._fail(error)
            return
        self._tell(group, started, before, *found)
        policy.last, policy.began_ns, policy.ended_ns = self, began, policy.clock()
        if partition.wants_hashing or partition.wants_checkpoint:
            self._wake()
        elif self._noting is None and partition.wants_noting:
            self._noting = asyncio.get_running_loop().call_later(NOTE_SECONDS, self._note)

    def _note(self) -> None:
        self._noting = None
        if not self._has_work:  # else it is done with the next group
            assert self._policy.run_here is not None
            try:
                self._policy.run_here(self.partition.note_committed)
            except FlushFailed as error:
                self._fail(error)

    def _fail(self, error: FlushFailed) -> None:
        assert self._task is not None
        self._task.cancel()
        self._task = None  # nothing is written any more
        self._on_fatal(error)

    def _tell(self, group: _Group, started: int, before: int, durable_id: int | None, error: WaltzError | None) -> None:
        took = (monotonic_ns() - started) // 1000
        if durable_id is not None:
            group.appender.acknowledge(durable_id)
        if error is not None:
            group.appender.refuse(error)
        self._budget.give(group.bytes)
        statistics = self._statistics
        statistics.groups += 1
        statistics.group_microseconds += took
        statistics.group_microseconds_max = max(statistics.group_microseconds_max, took)
        self._flushes.add(took / 1e6)
        statistics.appended_records += self.partition.last_id - before
        statistics.appended_bytes += group.bytes_between(before, self.partition.last_id)

    def _append_and_note(self, group: _Group) -> tuple[int | None, WaltzError | None]:
        found = self._append_group(group)
        self.partition.note_committed()
        return found

    def _append_group(self, group: _Group) -> tuple[int | None, WaltzError | None]:
        """Check the records, write the sound ones. Returns how far this appender's own records are on the
        disk, and the error. Never more than its own: records that were here before were compared with nothing that it
        sent."""
        sound: list[Piece] = []
        error: WaltzError | None = None
        for piece in (piece for frame in group.frames for piece in frame.pieces):
            wrong = _why_wrong(piece)
            if wrong:
                error = BadFrame(f"an append to partition {self.partition.number} cannot be taken: {wrong}")
                break
            sound.append(piece)
        if error is not None and not sound:
            return None, error
        try:
            appender, committed = group.appender, max(frame.committed for frame in group.frames)
            self.partition.write(appender.session, sound, committed, appender.contact)
        except FlushFailed:
            raise
        except DiskFull as full:  # what went to a segment that was sealed meanwhile stays there
            kept = min(self.partition.last_id, sound[-1].last_id)
            return kept if kept >= sound[0].first_id else None, full
        except WaltzError as refused:
            return None, refused
        return sound[-1].last_id if sound else None, error


def _why_wrong(piece: Piece) -> str:
    """Return why a run or batch fails its checks; empty if it is sound."""
    if isinstance(piece, Run):
        bad = first_bad(piece)
        return "" if bad is None else f"record {piece.first_id + bad} fails its checks"
    wrong = why_wrong(piece)
    return wrong and f"the batch at id {piece.first_id}: {wrong}"


REFUSED_SECONDS = 2.0
"""Seconds a refused caller may take to end its stream."""


class Stream:
    """An appender of a queue, with a link at its other end."""

    def __init__(self, session: int, contact: int, queue: AppendQueue, link: Link, config: StorageConfig) -> None:
        self.session = session
        self.contact = contact
        self._queue = queue
        self._link = link
        self._config = config
        self._durable_id: int | None = None
        self._owes_mark = False
        self._error: WaltzError | None = None
        self._is_over = False
        self._is_waiting = False
        """Whether a frame waits for room in the queue. Frames behind it must not overtake it."""
        self._changed = asyncio.Event()
        self._leaving = asyncio.Event()
        self._leave_with: WaltzError | None = None

    def is_of(self, queue: AppendQueue) -> bool:
        return self._queue is queue

    # -- called by the queue and the daemon

    def acknowledge(self, durable_id: int) -> None:
        """Send this mark, even if it was sent before: a sender that repeats a record waits for its mark again."""
        self._durable_id = durable_id
        if self._link.may_post and not self._owes_mark and not self._is_over:
            self._link.post(durable_id)
        else:
            self._owes_mark = True
            self._changed.set()

    def refuse(self, error: WaltzError) -> None:
        if not self._is_over:
            self._error = error
            self._finish()

    def leave(self, error: WaltzError) -> None:
        """Take no more frames; end with this error when the queued ones are done."""
        self._leave_with = error
        self._leaving.set()

    def _finish(self) -> None:
        self._is_over = True
        self._changed.set()

    # -- the work

    async def serve(self) -> None:
        """Serve the stream until the caller ends it. An error ends it too: it is sent to the caller and raised."""
        self._queue.join(self)
        if self._queue.may_write_here:
            self._link.hear(self._take)
        sending = asyncio.create_task(self._send_marks())
        receiving = asyncio.create_task(self._receive_frames())
        leaving = asyncio.create_task(self._leaving.wait())
        tasks = (sending, receiving, leaving)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if receiving in done:
                receiving.result()
            if sending not in done:
                await self._queue.call(_nothing)
                if self._leave_with is not None:
                    self.refuse(self._leave_with)
                self._finish()
            await sending
            if self._error is not None:
                await refuse(self._link, self._error, receiving)
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # also where the stream is cancelled a second time
                self._is_over = True
                self._queue.leave(self)
        if self._error is not None:
            raise self._error

    async def _send_marks(self) -> None:
        while True:
            self._changed.clear()
            is_over = self._is_over
            if self._owes_mark:
                assert self._durable_id is not None
                self._owes_mark = False
                await self._link.send(self._durable_id)
            if is_over:
                return
            await self._changed.wait()

    async def _receive_frames(self) -> None:
        while True:
            try:
                frame = await self._link.receive()
                if frame is None:
                    return
                if not self._is_over and not self._leaving.is_set():
                    self._check(frame)
                    self._is_waiting = True
                    await self._queue.append(self, frame)
                    self._is_waiting = False
            except WaltzError as error:
                self.refuse(error)

    def _take(self, frame: RecordsFrame) -> bool:
        """Queue or write a frame on arrival, without a change of task. Return False if it has to wait to be received."""
        if self._is_waiting:
            return False
        if self._is_over or self._leaving.is_set():
            return True
        try:
            self._check(frame)
        except WaltzError as error:
            self.refuse(error)
            return True
        return self._queue.append_now(self, frame)

    def _check(self, frame: RecordsFrame) -> None:
        size, count = sum([len(piece.data) for piece in frame.pieces]), frame.records
        if count == 0 and isinstance(frame.content, Run):
            raise BadFrame("a frame without records")
        # An owner does not know the limits here: what it may send together is taken, or its log would stand still.
        together = max(self._config.frame_bytes_max, self._config.record_bytes_max, GROUPS_BYTES_MAX)
        if count > 1 and size > together:
            raise TooLarge(f"a frame has {size} bytes of records; {together} are allowed")
        if count == 1 and size > self._config.record_bytes_max:
            first_id = frame.pieces[0].first_id
            raise TooLarge(f"record {first_id} has {size} bytes; {self._config.record_bytes_max} are allowed")


async def refuse(link: Link, error: WaltzError, receiving: asyncio.Task[None] | None = None) -> None:
    """Send the error, and ignore further frames until the caller stops or has had the time to."""
    await link.refuse(error)
    ignoring = receiving or asyncio.create_task(_ignore(link))
    await asyncio.wait((ignoring,), timeout=REFUSED_SECONDS)
    ignoring.cancel()
    await asyncio.gather(ignoring, return_exceptions=True)


async def _ignore(link: Link) -> None:
    while True:
        try:
            if await link.receive() is None:
                return
        except WaltzError:
            continue  # it was refused already


def _nothing() -> None:
    """Do nothing: a call whose turn in the queue comes when everything before it is done."""
