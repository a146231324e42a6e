"""From batches to the log: the order in which transactions get their ids, in one open session.

Batches queue. One step takes what is queued, decides the locks, gives ids and builds one run, in format 1 one batch of
the log, which goes to the replicas. When the session reports it committed, the mounts get their outcomes. There is no
timer: while one step works the next one gathers, and a batch that arrives alone gets its ids in the call that brings it.
Bytes in flight to the replicas are bounded: above the bound no step is made, so the queue fills, so mounts are not read
any more. A step never waits and never fails half-way.

Everything here ends with the session. A transaction that has an id and was not answered by then is not answered: the log
has the outcome. A transaction without an id was not appended: its mount reports that, and the client sends it to the next
owner.

`Counters` count the outcomes of one partition for as long as this process owns it, over all of its sessions.

Outcomes are counted once for each batch or frame, never for each transaction. Only outcomes that clients were sent are
counted: a transaction that was in flight when its session ended counts as an attempt only, although the next session may
find it in the log.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from waltzd.errors import (
    BadArgument,
    BeyondLog,
    ClientAhead,
    Displaced,
    NeedsBatches,
    NotReady,
    Superseded,
    TooLarge,
    WaltzError,
)
from waltzd.errors.operations import BadFrame, SessionEnded, TooManyCallers
from waltzd.format.batch import GROUPS_BYTES_MAX, Batch, End, encode_batch
from waltzd.format.checksum import I64
from waltzd.format.key_index import LockMarks, LockQuery
from waltzd.format.layout import GROUP_SEGMENT_BYTES
from waltzd.format.record import Run
from waltzd.protocol.batches import AppendBatch, Committals, Limits, Refusals, ServerFrame, SingleCommittal
from waltzd.protocol.descriptions import PartitionStatistics
from waltzd.protocol.histogram import Durations, Histogram
from waltzd.protocol.locks import MARKED_MAX, LockExplanation, MarkedPage, MarkedQuery, Reason
from waltzd.protocol.positions import Position
from waltzd.protocol.quorum import EMPTY, EVERYTHING
from waltzd.server.clients.feed import ColdReader, records
from waltzd.server.clients.lookups import LOOKUP_SECONDS, LOOKUPS_MAX, LockLookups, Waiting
from waltzd.server.clients.registry import QuotaUsage
from waltzd.server.core.locks import FOUND_MAX, NOTHING_REFUSED, LockTable
from waltzd.server.core.recent_marks import OlderMarks, RecentMarks, join_marks
from waltzd.server.core.step import HybridClock, QueuedBatch, build, check_seen, groups_of, locks_of
from waltzd.server.session.confirmation import SessionConfirmation
from waltzd.server.session.replicated_log import ReplicatedLog
from waltzd.wire.flow_control import Budget
from waltzd.wire.tasks import tell_failure


class AllCounters:
    """Counters of all partitions that this process has owned."""

    def __init__(self) -> None:
        self._newest: dict[int, Counters] = {}
        self._earlier = Histogram()
        """Commit durations of partitions that were given away and came back."""

    def begin(self, partition: int) -> Counters:
        """Return new counters for a partition that is taken over. If it was here before, it was closed."""
        if partition in self._newest:
            self._earlier = self._earlier.plus(self._newest[partition].statistics().commit)
        found = self._newest[partition] = Counters()
        return found

    def commit(self) -> Histogram:
        """Return the commit durations of all partitions. Counts only rise, whichever partitions come and go."""
        found = self._earlier
        for counters in self._newest.values():
            found = found.plus(counters.statistics().commit)
        return found


class Counters:
    def __init__(self) -> None:
        self.attempts = 0
        self.refused = dict.fromkeys(Reason, 0)
        self._committed = 0
        self._committed_bytes = 0
        self._fed = 0
        self._fed_bytes = 0
        self._commit = Durations()

    def committed(self, count: int, size: int, seconds: float) -> None:
        """Count committed transactions of one batch, `seconds` after it arrived. `size`: bytes of their records."""
        self._committed += count
        self._committed_bytes += size
        self._commit.add(seconds, count)

    def fed(self, count: int, size: int) -> None:
        self._fed += count
        self._fed_bytes += size

    def statistics(self) -> PartitionStatistics:
        return PartitionStatistics(
            attempts=self.attempts,
            committed=self._committed,
            committed_bytes=self._committed_bytes,
            refused={reason.name: count for reason, count in self.refused.items()},
            fed=self._fed,
            fed_bytes=self._fed_bytes,
            commit=self._commit.histogram(),
        )


T = TypeVar("T")
STEP_ROWS_MAX = 4096
NUMBER_JUMP_MAX = 1_000_000
"""Largest rise of the number from one mount of a client to the next one here, as it may have tried other owners
meanwhile. A number that is far too high would lock the client out for good."""
STEP_BYTES_MAX = 1 << 20
"""Bytes of one step, which keeps the event loop busy for some milliseconds at most. Other partitions of this server need
the loop as well. A group of transactions is not cut for that."""
LOCKS_BYTES = 128 << 10
"""Bytes of the log that are read at a time to complete a new lock table."""
HISTORY_SECONDS = 2.0
"""Time after which the owner answers the start of a history, well within the deadline of one call."""
MARKED_BYTES_MAX = 1 << 20
"""Bytes of records at which an answer by lock ends."""
ANSWERS_BYTES_MAX = 64 << 20
"""Bytes of all answers by lock and of all lists of parked transactions that a server has in memory until their callers have
taken them."""
ANSWERS_PARTS = 4
"""Divisor of these bytes: one name may have a quarter of them, so a name that does not read leaves some to others."""
ANSWER_SECONDS = 5.0
"""Time that an answer waits for answers before it to be taken."""
READS_BYTES_MAX = 16 << 20
"""Bytes of records that all reads by id of a server have in memory until their callers take them: many get small chunks."""
CHUNK_BYTES_MIN = 16 << 10
"""Size of a chunk that many readers do not lower. A larger record is a chunk."""
MARKED_AT_ONCE = 32
"""Records that have left the log cache and that one question reads at once."""
REACH_SECONDS = 1.0
"""Time that a question waits for a commit."""
LOCKS_READS_MAX = 4000
"""Limit of reads of `LOCKS_BYTES` for a new lock table: a log with few locks is not read back to its beginning."""


def microseconds() -> int:
    """Return microseconds since 1970, by the clock of this machine."""
    return time.time_ns() // 1000


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    limits: Limits
    lock_table_size: int = 50_000
    lock_history_bytes: int = LOCKS_BYTES
    lookups_max: int = LOOKUPS_MAX
    """Locks of a partition that are looked up in the log at a time, in format 1; 0 turns look-ups off."""
    lookup_seconds: float = LOOKUP_SECONDS
    found_locks_max: int = FOUND_MAX
    """Locks of a partition in memory that were looked up."""
    inflight_bytes_max: int = 16 << 20
    """Bytes in flight to the replicas. The same number may wait in the queue."""
    mount_bytes_max: int = 8 << 20
    """Bytes that one mount may have sent and that are not answered."""
    feed_frame_bytes: int = 256 << 10
    cold_chunk_bytes: int = 256 << 10
    segment_bytes_max: int = 64 << 20
    """Size of a segment in format 1."""
    clock: Callable[[], int] = microseconds

    def of_group_log(self) -> PipelineSettings:
        return replace(self, segment_bytes_max=min(self.segment_bytes_max, GROUP_SEGMENT_BYTES))


class Capacity:
    """Limits of one server for all its partitions: callers, and concurrent reads from storages."""

    def __init__(self, callers_max: int, *, cold_reads_max: int = 8) -> None:
        self.callers = 0
        """Mounts, and reads by id that are in progress."""
        self.reads = 0
        """Reads by id that are in progress."""
        self.cold_turns = asyncio.Semaphore(cold_reads_max)
        """Turns of readers. One turn is one chunk from a storage, which bounds the load of many readers."""
        self._answers = Budget(ANSWERS_BYTES_MAX)
        self._callers_max = callers_max

    def enter(self, usage: QuotaUsage) -> None:
        """Count one more caller of this name; raise if there is no room."""
        usage.check_room(self.callers, self._callers_max)
        self.callers += 1
        usage.callers += 1

    def leave(self, usage: QuotaUsage) -> None:
        assert self.callers > 0
        self.callers -= 1
        usage.callers -= 1

    def chunk_bytes(self, most: int) -> int:
        """Return the size of the next chunk of a read by id."""
        return min(most, max(CHUNK_BYTES_MIN, READS_BYTES_MAX // max(1, self.reads)))

    async def take_answer(self, usage: QuotaUsage, size: int) -> Budget:
        """Wait for the turn of an answer, and take `size` bytes for it; return the budget."""
        if usage.answers is None:
            usage.answers = Budget(ANSWERS_BYTES_MAX // ANSWERS_PARTS, within=self._answers)
        try:
            await usage.answers.take(size, ANSWER_SECONDS)
        except TimeoutError:
            raise TooManyCallers(
                f"the callers of {usage.principal.name}, or of the whole server, have not taken "
                f"{usage.answers.used >> 20} MiB of answers; one more waited for {ANSWER_SECONDS:g} seconds",
                next_step="read the answers that are under way, or ask fewer questions at a time",
            ) from None
        return usage.answers


class MountHandle:
    """A mount, as its pipeline sees it. Outcomes gather here until the mount sends them; no call blocks."""

    def __init__(
        self, client: int, number: int, mark: int, usage: QuotaUsage, *, epoch: int = 0, lap: int = 0, is_fed: bool = True
    ) -> None:
        self.client = client
        self.lap = lap
        """Lap of the client id. A mount of a later lap belongs to another client."""
        self.number = number
        self.mark = mark
        self.usage = usage
        self.epoch = epoch
        """Epoch of the instance; 0 if any number of instances may live."""
        self.is_fed = is_fed
        """Whether its feed has credit left. If not, it is not notified of commits of other mounts."""
        self.untaken = 0
        """Sequence number below which each batch is refused or has an id. When the mount is over, all other batches never
        get one."""
        self.error: WaltzError | None = None
        """Error that ended the mount; None while it lives."""
        self.over = asyncio.Event()
        self.waiting: Waiting[Any] | None = None
        """Batches that wait for a look-up of a lock; None if none do."""
        self.changed = asyncio.Event()
        """Set when there may be something to send."""
        self.notify: Callable[[], None] = self.changed.set
        """Called when there may be something to send, and nothing more follows at once."""
        self._committals: list[tuple[I64 | range, int, int]] = []
        self._refusals: list[Refusals] = []
        self._cost = 0

    @property
    def is_over(self) -> bool:
        """Return whether nothing more is accepted from it: its queued batches are dropped."""
        return self.over.is_set()

    def committed(self, sequences: I64 | range, first_id: int, time: int, cost: int) -> None:
        """Add an outcome: these transactions have the ids from `first_id` on. `cost`: cost of the requests that it
        answers. The caller then calls `notify`, or sets `changed`."""
        self._committals.append((sequences, first_id, time))
        self._cost += cost

    def rejected(self, refusals: Refusals, cost: int) -> None:
        self._refusals.append(refusals)
        self._cost += cost
        self.changed.set()

    def refuse(self, error: WaltzError) -> None:
        """End the mount: outcomes that were decided are still sent, then this error."""
        if not self.is_over:
            self.error = error
            self.over.set()
            self.changed.set()

    @property
    def has_news(self) -> bool:
        """Return whether a commit may give it something to send: records of the feed, or an outcome."""
        return self.is_fed or bool(self._committals)

    def outcomes(self) -> tuple[list[ServerFrame], int]:
        """Return the gathered outcomes, as at most one frame of each kind, and the cost of what they answer."""
        frames: list[ServerFrame] = []
        cost, self._cost = self._cost, 0
        if self._committals:
            frames.append(_joined_committals(self._committals))
            self._committals = []
        if self._refusals:
            frames.append(_joined_refusals(self._refusals))
            self._refusals = []
        return frames, cost


def _joined_committals(found: list[tuple[I64 | range, int, int]]) -> Committals:
    if len(found) == 1:
        sequences, first_id, time = found[0]
        if len(sequences) == 1:
            return SingleCommittal(int(sequences[0]), first_id, time)
        return Committals(np.asarray(sequences), np.arange(first_id, first_id + len(sequences)), time)
    return Committals(
        np.concatenate([sequences for sequences, _, _ in found]),
        np.concatenate([np.arange(first_id, first_id + len(sequences)) for sequences, first_id, _ in found]),
        max(time for _, _, time in found),
    )


def _joined_refusals(found: list[Refusals]) -> Refusals:
    if len(found) == 1:
        return found[0]
    return Refusals(
        np.concatenate([one.sequences for one in found]),
        np.concatenate([one.reasons for one in found]),
        np.concatenate([one.conflict_ids for one in found]),
        np.concatenate([one.locks for one in found]),
    )


class CommitListener(Protocol):
    """Work beside the mounts of a pipeline that ends with it. No call blocks."""

    def committed(self) -> None: ...
    def end(self, error: WaltzError) -> None: ...


class _Reaching:
    """Wait for the commit of one id."""

    def __init__(self, id_: int, committed: Callable[[], int]) -> None:
        self.over = asyncio.Event()
        self._id = id_
        self._mark = committed

    def committed(self) -> None:
        if self._mark() >= self._id:
            self.over.set()

    def end(self, error: WaltzError) -> None:
        self.over.set()


class Pipeline:
    def __init__(
        self,
        session: ReplicatedLog,
        settings: PipelineSettings,
        capacity: Capacity,
        *,
        on_fatal: Callable[[BaseException], None],
        counters: Counters | None = None,
    ) -> None:
        """`on_fatal` is called with an internal error, because a pipeline that stands still must not look like one that
        works. `counters`: counters of earlier sessions, which this session adds to; None if there are none."""
        self.counters = counters or Counters()
        self.session = session
        self.settings = settings
        self.capacity = capacity
        self.committed = session.committed
        """Mark up to which outcomes were passed to the mounts, so the feed may go as far."""
        self.ended: WaltzError | None = None
        looks_up = settings.lookups_max > 0 and session.format > 0
        self._locks = LockTable(
            settings.lock_table_size, session.low_mark, looks_up=looks_up, found_max=settings.found_locks_max
        )
        self._recent = RecentMarks()
        """Marks of the newest committed transactions, for questions by lock."""
        self._older = OlderMarks()
        self._record_bytes = MARKED_BYTES_MAX // MARKED_AT_ONCE
        """Size of a record, as last read for a question by lock: large ones are read a few at a time."""
        self._lookups: LockLookups[MountHandle] | None = None
        """Look-ups of locks that the table does not know; None in format 0."""
        if looks_up:
            self._lookups = LockLookups(
                self._locks,
                session,
                capacity.cold_turns,
                lookups_max=settings.lookups_max,
                bytes_max=settings.inflight_bytes_max,
                seconds=settings.lookup_seconds,
                on_ready=self._schedule_step,
                on_fatal=self._fail,
            )
        self._clock = HybridClock((session.cache.end or End()).time)
        self._intake = Budget(settings.inflight_bytes_max)
        self._queue: deque[QueuedBatch[MountHandle]] = deque()
        self._flights: deque[QueuedBatch[MountHandle]] = deque()
        self._inflight_bytes = 0
        self._mounts: dict[int, MountHandle] = {}
        self._listeners: dict[CommitListener, None] = {}
        self._epochs: dict[str, int] = {}
        """Names of which only the newest instance may live, to their highest known epoch."""
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self._turn: asyncio.Handle | None = None
        """Scheduled step; None if there is none."""
        self._is_held = False
        self._on_fatal = on_fatal
        self._confirmation = SessionConfirmation(session)
        session.on_commit(self._on_commit)
        session.on_rise = self._on_rise
        self._warming = asyncio.create_task(self._warm_up(), name=f"lock table of partition {session.partition}")
        tell_failure(self._warming, on_fatal)

    def hold(self) -> None:
        """Give out no more ids. Batches that have ids are still answered; all other batches are not appended."""
        self._is_held = True
        if self._turn is not None:
            self._turn.cancel()

    def close(self, error: WaltzError) -> None:
        """End every mount with this error, and append nothing more."""
        if self.ended is not None:
            return
        self.ended = error
        self.hold()
        self._warming.cancel()
        if self._lookups is not None:
            self._lookups.close()
        self._queue.clear()
        self._flights.clear()
        for mount in list(self._mounts.values()):
            mount.refuse(error)
        for listener in list(self._listeners):
            listener.end(error)

    def attach(self, listener: CommitListener) -> None:
        """Notify a listener of every commit, and of the end."""
        if self.ended is not None:
            raise self.ended
        self._listeners[listener] = None

    def detach(self, listener: CommitListener) -> None:
        self._listeners.pop(listener, None)

    def check(self) -> None:
        """Assert the invariants of the pipeline."""
        self._locks.check()
        self._recent.check()
        assert self._recent.next_id <= self.committed + 1
        if self._lookups is not None:
            self._lookups.check()
        assert self.committed <= self.session.committed <= self.last_id
        assert self._inflight_bytes >= 0

    # -- mounts

    @property
    def mounts(self) -> int:
        return len(self._mounts)

    @property
    def last_id(self) -> int:
        """Highest id that was given out, committed or not."""
        return self.session.cache.next_id - 1

    def join(self, mount: MountHandle) -> int:
        """Add a mount, and return its barrier. What an earlier mount of the same client sent has an id up to the barrier,
        or never gets one."""
        if self.ended is not None:
            raise self.ended
        older = self._mounts.get(mount.client)
        if older is not None and (older.lap, older.number) >= (mount.lap, mount.number):
            raise Displaced(
                f"client {mount.client} has mounted partition {self.session.partition} with the number {older.number}; "
                f"{mount.number} is not newer"
                if older.lap == mount.lap
                else f"the client id {mount.client} was given out again, and its new holder has mounted the partition"
            )
        is_again = older is not None and older.lap == mount.lap
        if older is not None and is_again and mount.number > older.number + NUMBER_JUMP_MAX:
            raise BadFrame(
                f"client {mount.client} mounts partition {self.session.partition} with the number {mount.number}, far "
                f"above {older.number}, the number of its mount before"
            )
        self.check_mark(mount.mark)
        self.check_epoch(mount.usage.principal.name, mount.epoch)
        if not is_again:
            self.capacity.enter(mount.usage)
        self._mounts[mount.client] = mount
        if older is not None:
            if not is_again:
                self.capacity.leave(older.usage)
            older.refuse(Displaced(f"client {mount.client} has mounted the partition again"))
        return self.last_id

    def leave(self, mount: MountHandle) -> None:
        if self._mounts.get(mount.client) is mount:
            del self._mounts[mount.client]
            self.capacity.leave(mount.usage)

    # -- instances of which only the newest may live

    def knows_epoch(self, name: str) -> bool:
        """Return whether the newest epoch of a name is known. Otherwise earlier owners may have admitted newer instances:
        ask the coordinator, after this log was opened."""
        return name in self._epochs

    def displace_older(self, name: str, epoch: int, *, all_of_them: bool = False) -> None:
        """Refuse instances of this name with a lower epoch from now on; batches that have ids stay. `all_of_them`: refuse
        also instances without an epoch."""
        self._epochs[name] = max(epoch, self._epochs.get(name, 0))
        for mount in list(self._mounts.values()):
            if mount.usage.principal.name == name and mount.epoch < self._epochs[name] and (mount.epoch or all_of_them):
                mount.refuse(self._superseded(name))

    def check_epoch(self, name: str, epoch: int) -> None:
        """Raise `Superseded` if a newer instance of this name was admitted. Epoch 0 is of an instance that displaces none
        and is never displaced."""
        if 0 < epoch < self._epochs.get(name, 0):
            raise self._superseded(name)

    def _superseded(self, name: str) -> Superseded:
        return Superseded(
            f"a newer instance of {name} has mounted partition {self.session.partition}, with epoch {self._epochs[name]}",
            partition=self.session.partition,
            epoch=self._epochs[name],
        )

    def check_mark(self, mark: int) -> None:
        if mark > self.last_id:
            raise ClientAhead(
                f"the client claims to have seen id {mark} of partition {self.session.partition}, whose last id is "
                f"{self.last_id}",
                mark=mark,
                last_id=self.last_id,
            )

    def check_seen(self, seen: int) -> None:
        """Raise `ClockAhead` if the time would move the log far ahead of the clocks of its owner and storages."""
        check_seen(seen, self._now(), self._clock.last)

    def _now(self) -> int:
        return self.session.storage_clocks.corrected(self.settings.clock(), self._time())

    def check_groups(self, batch: AppendBatch) -> None:
        if batch.follows is None or not batch.follows.any():
            return
        if self.session.format == 0:
            raise NeedsBatches(f"partition {self.session.partition} writes format 0, which has no groups of transactions")
        if batch.bytes > GROUPS_BYTES_MAX:
            raise TooLarge(f"a batch with groups has {batch.bytes} bytes; {GROUPS_BYTES_MAX} are allowed")

    # -- what mounts put in

    async def append(self, mount: MountHandle, batch: AppendBatch, cost: int) -> None:
        """Queue a batch whose columns and payloads were checked; wait while too much is queued."""
        arrived = self._time()
        if mount.waiting is not None:
            await mount.waiting.over.wait()
        await self._intake.take(cost)
        if mount.is_over:
            self._intake.give(cost)
        else:
            self._put(mount, batch, cost, arrived)

    def append_now(self, mount: MountHandle, batch: AppendBatch, cost: int) -> bool:
        """Do as `append` if that needs no waiting; else return False, and nothing is done."""
        if mount.waiting is not None or not self._intake.take_now(cost):
            return False
        self._put(mount, batch, cost, self._time())
        return True

    def _put(self, mount: MountHandle, batch: AppendBatch, cost: int, arrived: float) -> None:
        self._queue.append(QueuedBatch(mount, batch, cost, arrived))
        if len(self._mounts) == 1 and not self._flights and self._turn is None and not self._is_held:
            self._take_turn()  # no other request could share the batch, so there is no reason to wait
        else:
            self._schedule_step()

    # -- steps

    def _schedule_step(self) -> None:
        """Schedule a step, if one may be taken, for after the other callbacks of the loop: what they bring joins it."""
        has_room = self._inflight_bytes < self.settings.inflight_bytes_max
        is_ready = self._queue or (self._lookups is not None and self._lookups.ready)
        if is_ready and has_room and self._turn is None and not self._is_held:
            self._turn = self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        try:
            self._step(self._gather())
        except Exception as error:  # noqa: BLE001  a mistake of ours
            self._fail(error)
        self._schedule_step()

    def _fail(self, error: BaseException) -> None:
        self.hold()
        self._on_fatal(error)

    def _gather(self) -> list[QueuedBatch[MountHandle]]:
        """Return the batches at the head of the queue that fit into one step."""
        taken: list[QueuedBatch[MountHandle]] = []
        ready = self._lookups.ready if self._lookups is not None else ()
        rows = size = 0
        while ready or self._queue:
            item = ready[0] if ready else self._queue[0]
            rows += len(item.batch)
            size += item.batch.bytes
            if taken and (rows > STEP_ROWS_MAX or size > STEP_BYTES_MAX):
                break
            if self._lookups is not None and ready:
                self._lookups.take_ready()
            else:
                self._queue.popleft()
                self._intake.give(item.cost)
            if not item.mount.is_over:
                taken.append(item)
        return taken

    def _step(self, items: list[QueuedBatch[MountHandle]]) -> None:
        session, next_id, seen = self.session, self.session.cache.next_id, 0
        taken: list[QueuedBatch[MountHandle]] = []
        for each in items:
            item = each if self._lookups is None else self._lookups.decidable(each, self.committed)
            accepted = 0 if item is None else self._decide(item, next_id)
            if item is not None and accepted:
                taken.append(item)
                next_id += accepted
                seen = max(seen, item.batch.seen_time)
        if not taken:
            return
        first_id = session.cache.next_id
        run = build(first_id, taken, partition=session.partition, generation=session.generation)
        time = self._clock.next(self._now(), seen) if session.format > 0 else 0
        piece = self._encode(run, taken, time) if session.format > 0 else run
        for item in taken:
            item.take_off(first_id, time)
            self._flights.append(item)
            self._inflight_bytes += item.cost
            first_id += len(item.sequences)
        session.append(piece)

    def _encode(self, run: Run, items: list[QueuedBatch[MountHandle]], time: int) -> Batch:
        session = self.session
        return encode_batch(
            run,
            session=session.session,
            generation=session.generation,
            committed=session.committed,
            time=time,
            before=session.cache.end or End(),
            locks=locks_of(items),
            follows=groups_of(items),
            segment_bytes_max=self.settings.segment_bytes_max,
        )

    def _decide(self, item: QueuedBatch[MountHandle], next_id: int) -> int:
        """Decide the locks of a batch, and note its refusals for its mount; return how many rows are accepted."""
        batch = item.batch
        self.counters.attempts += len(batch)
        item.mount.untaken = batch.first_sequence + len(batch)
        refusals = self._locks.decide(batch, next_id, self.committed)
        if refusals is NOTHING_REFUSED:
            return item.decide(refusals.sequences)
        refused = len(refusals.sequences)
        for reason, count in enumerate(np.bincount(refusals.reasons).tolist()):
            if count:
                self.counters.refused[Reason(reason)] += count
        item.mount.rejected(refusals, item.cost if refused == len(batch) else 0)
        return item.decide(refusals.sequences - batch.first_sequence)

    async def _warm_up(self) -> None:
        """Complete the lock table from the locks in the log, a piece at a time and in turns with readers. If no replica
        gives them, the table stays as it is: correct, and stricter than necessary."""
        locks, session = self._locks, self.session
        for _ in range(LOCKS_READS_MAX if session.cache.end is not None else 0):
            async with self.capacity.cold_turns:
                try:
                    history = await session.read_locks(locks.lowest, self.settings.lock_history_bytes)
                except NotReady as error:
                    session.say(f"the lock table has no marks below {locks.lowest}: {error.message}")
                    return
            if history is None or not locks.lower(history):
                return
            await asyncio.sleep(0)

    # -- outcomes

    def _on_commit(self, mark: int) -> None:
        if self.ended is not None:
            return
        self._answer(mark)
        self.committed = mark
        for mount in self._mounts.values():
            if not mount.has_news:
                continue
            if self._flights:
                mount.changed.set()
            else:
                mount.notify()  # nothing comes behind it that could travel with it
        for listener in self._listeners:
            listener.committed()
        self._schedule_step()

    def _answer(self, mark: int) -> None:
        """Pass outcomes up to `mark` to their mounts, in the order of the log."""
        flights = self._flights
        if not flights:
            return
        now = self._time()
        while flights:
            item = flights[0]
            if item.last_id <= mark:
                item.mount.committed(item.sequences, item.first_id, item.time, item.cost)
                self._inflight_bytes -= item.cost
                self.counters.committed(len(item.sequences), item.bytes, now - item.arrived)
            else:
                if item.first_id <= mark:
                    count = mark - item.first_id + 1
                    item.mount.committed(item.sequences[:count], item.first_id, item.time, 0)
                    self.counters.committed(count, 0, now - item.arrived)
                    item.sequences, item.first_id = item.sequences[count:], mark + 1
                return
            flights.popleft()

    def _on_rise(self) -> None:
        """End all mounts: each was told that there are no groups, so its client has to mount again."""
        for mount in list(self._mounts.values()):
            mount.refuse(
                SessionEnded(f"partition {self.session.partition} writes format {self.session.format} from now on")
            )

    # -- reading by id

    async def confirm(self) -> None:
        """Wait for proof that `committed` is not below any id that was acknowledged before this call."""
        if self.ended is None:
            await self._confirmation.confirm()
        if self.ended is not None:
            raise self.ended

    async def read(
        self, first_id: int, last_id: int | None, *, with_locks: bool = False, usage: QuotaUsage | None = None
    ) -> AsyncGenerator[Run, None]:
        """Yield committed records; without `last_id`, up to the high-water mark of this moment. `usage`: quotas that the
        reader uses up; None if the server itself reads."""
        if self.ended is not None:
            raise self.ended
        committed = self.committed
        if first_id < 0 or (last_id is not None and last_id < first_id):
            raise BadArgument(f"there are no ids from {first_id} to {last_id}")
        until = committed if last_id is None else last_id
        if until > committed or first_id > committed + 1:
            raise BeyondLog(
                f"ids from {first_id} to {until} of partition {self.session.partition} were asked for; its high-water mark "
                f"is {committed}",
                high_water_mark=committed,
            )
        if usage is not None:
            self.capacity.enter(usage)
        self.capacity.reads += 1
        try:
            found = records(
                self.session,
                self.cold_reader(with_locks=with_locks),
                first_id,
                until,
                chunk_bytes=lambda: self.capacity.chunk_bytes(self.settings.cold_chunk_bytes),
                with_locks=with_locks,
            )
            async with aclosing(found):
                async for run in found:
                    yield run
        finally:
            self.capacity.reads -= 1
            if usage is not None:
                self.capacity.leave(usage)

    def cold_reader(self, *, with_locks: bool = False) -> ColdReader:
        return ColdReader(self.session, self.capacity.cold_turns, self.settings.cold_chunk_bytes, with_locks=with_locks)

    async def find_time(self, time: int) -> int:
        """Return the highest id before the first committed transaction at or after `time`."""
        if self.ended is not None:
            raise self.ended
        if self.session.format == 0:
            raise NeedsBatches(f"partition {self.session.partition} writes format 0, which has no times")
        committed = self.committed
        mark, is_certain = self.session.cache.find_time(time)
        if not is_certain:
            async with self.capacity.cold_turns:
                mark = min(mark, await self.session.find_time(time, mark))
        return min(mark, committed)

    async def find_marks(self, query: LockQuery, *, usage: QuotaUsage | None = None) -> tuple[LockMarks, int]:
        """Return committed transactions that marked a lock, and the highest id of the range that is committed. The newest
        transactions are in memory; for older ones a replica or the archive is asked. The answer covers the start of the
        range up to where `HISTORY_SECONDS` end, or where no replica and no archive can answer now, but at least one id.
        The caller asks again for the rest, so a long log and an archive that is away for a while cost time and no
        answer."""
        if self.ended is not None:
            raise self.ended
        if self.session.format == 0:
            raise self._needs_batches()
        end = min(self.committed, query.last_id)
        rest = replace(query, last_id=end)
        through, ids = rest.next_id, list[int]()
        if usage is not None:
            self.capacity.enter(usage)
        until = self._time() + HISTORY_SECONDS
        is_begun = False
        try:
            while not rest.is_done:
                part = self._find_in_memory(rest)
                if part is None:
                    older = rest.within(0, self._recent.first_id - 1) if self._recent.next_id > end else rest
                    async with asyncio.timeout_at(until if is_begun else None):
                        part = await self.session.find_marks(older, self.capacity.cold_turns)
                ids += part.ids
                rest, through, is_begun = rest.after(part), part.through, True
        except (TimeoutError, WaltzError):
            if not is_begun:
                raise  # else the next question meets it
        finally:
            if usage is not None:
                self.capacity.leave(usage)
        self._note_whole(query, end, through, ids)
        return LockMarks(ids=tuple(ids), through=through), end

    def _note_whole(self, query: LockQuery, end: int, through: int, ids: list[int]) -> None:
        """Keep an answer that has all marks of a lock, unless all of the log is in memory."""
        is_whole = query.first_id == 0 and not query.newest_first and through == end and len(ids) < query.limit
        if is_whole and self._recent.first_id > 0:
            self._older.learn(query.lock, end, ids)

    def _needs_batches(self) -> NeedsBatches:
        return NeedsBatches(f"partition {self.session.partition} writes format 0, which keeps no locks")

    def _answer_from_memory(self, query: LockQuery) -> LockMarks | None:
        """Return the whole answer to a query of committed ids; None if a part of it is not in memory."""
        rest, ids = query, list[int]()
        while (part := self._find_in_memory(rest)) is not None:
            ids += part.ids
            if rest.is_answered_by(part):
                return LockMarks(ids=tuple(ids), through=part.through)
            rest = rest.after(part)
        return None

    def _find_in_memory(self, query: LockQuery) -> LockMarks | None:
        """Return an answer to the start of a query of committed ids from memory; None if its next id is not there. Above
        its newest mark in the lock table a lock has none."""
        newest = self._locks.newest_mark(query.lock)
        if query.next_id > newest:
            through = max(query.first_id, newest + 1) if query.newest_first else query.last_id
            return LockMarks(ids=(), through=through)
        return self._find_recent(query) or self._older.find(query)

    def _find_recent(self, query: LockQuery) -> LockMarks | None:
        """Return an answer to the start of a query of committed ids from memory; None if its next id is not there."""
        recent, cache = self._recent, self.session.cache
        if recent.next_id <= self.committed:
            start = recent.next_id if recent.next_id >= cache.first_batch_id else cache.first_batch_id
            recent.add(cache.batches_from(start, self.committed, EVERYTHING))
        if not recent.first_id <= query.next_id < recent.next_id:
            return None
        return recent.find(query.within(recent.first_id, recent.next_id - 1))

    async def find_marked(
        self, query: MarkedQuery, *, usage: QuotaUsage | None = None, held: ExitStack | None = None
    ) -> MarkedPage:
        """Return committed transactions that marked all locks of a group: an answer to the start of the query, for at
        least one id. `held`: is to be closed once the caller has taken the answer; None if that is at once."""
        if self.ended is not None:
            raise self.ended
        if self.session.format == 0:
            raise self._needs_batches()
        end, newest_first = min(self.committed, query.last_id), query.newest_first
        known = Position(end, self.session.lineage.current)
        if query.first_id > end:
            return MarkedPage(records=(), end=known)
        answers, size = None, 0
        if usage is not None:
            self.capacity.enter(usage)
        try:
            if usage is not None and held is not None:
                answers = await self.capacity.take_answer(usage, MARKED_BYTES_MAX)
            marks = await self._marks_of(query, end)
            joined = join_marks(query.groups, marks, newest_first=newest_first)
            ids, through = joined.ids[: query.limit], joined.through
            records = await self._records(ids)
            size = min(sum(map(len, records)), MARKED_BYTES_MAX)
            if len(records) < len(joined.ids):
                through = ids[len(records) - 1]
        finally:
            if usage is not None:
                self.capacity.leave(usage)
            if answers is not None and held is not None:
                answers.give(MARKED_BYTES_MAX - size)
                held.callback(answers.give, size)
        is_whole = through == (query.first_id if newest_first else end)
        return MarkedPage(records=tuple(records), end=known, through=None if is_whole else through)

    async def _marks_of(self, query: MarkedQuery, end: int) -> dict[int, LockMarks]:
        """Return the marks of each lock of a query, up to `end`. Only locks with marks that are not in memory cost a
        task."""
        marks: dict[int, LockMarks] = {}
        # Of a group of several locks only some ids may remain, so the limit of the answer would make short steps.
        limit = query.limit if all(len(group) == 1 for group in query.groups) else MARKED_MAX
        asked = LockQuery(lock=0, first_id=query.first_id, last_id=end, limit=limit, newest_first=query.newest_first)
        older: list[LockQuery] = []
        for lock in dict.fromkeys(lock for group in query.groups for lock in group):
            one = replace(asked, lock=lock)
            part = self._answer_from_memory(one)
            if part is None:
                older.append(one)
            else:
                marks[lock] = part
                self._note_whole(one, end, part.through, list(part.ids))
        if len(older) == 1:
            marks[older[0].lock], _ = await self.find_marks(older[0])
        elif older:
            for one, (part, _) in zip(older, await _together([self.find_marks(one) for one in older]), strict=True):
                marks[one.lock] = part
        return marks

    async def _records(self, ids: Sequence[int]) -> list[memoryview]:
        """Return the records of committed transactions in this order, at least one, up to `MARKED_BYTES_MAX`."""
        found: list[memoryview] = []
        size = 0
        while len(found) < len(ids) and size < MARKED_BYTES_MAX:
            id_, cache = ids[len(found)], self.session.cache
            if id_ >= cache.first_id:
                more = [cache.record(id_)]
            else:
                count = max(1, min(MARKED_AT_ONCE, (MARKED_BYTES_MAX - size) // self._record_bytes))
                cold = [one for one in ids[len(found) : len(found) + count] if one < cache.first_id]
                more = await self._cold_records(cold)
                self._record_bytes = sum(map(len, more)) // len(more)
            found += more
            size += sum(map(len, more))
        return found

    async def _cold_records(self, ids: Sequence[int]) -> list[memoryview]:
        """Return the records of transactions that have left the log cache. Ids in a row are read together."""
        wanted = sorted(ids)
        starts = [at for at, id_ in enumerate(wanted) if at == 0 or wanted[at - 1] != id_ - 1]
        spans = [(wanted[start], wanted[stop - 1]) for start, stop in zip(starts, [*starts[1:], len(wanted)], strict=True)]
        by_id: dict[int, memoryview] = {}

        async def read(first_id: int, last_id: int) -> None:
            async with aclosing(self.read(first_id, last_id)) as runs:
                async for run in runs:
                    for number in range(len(run)):
                        by_id[run.first_id + number] = run.data[int(run.bounds[number]) : int(run.bounds[number + 1])]

        await _together([read(first_id, last_id) for first_id, last_id in spans])
        return [by_id[id_] for id_ in ids]

    async def reach(self, id_: int) -> None:
        """Wait until an id that was given out is committed, at most `REACH_SECONDS`."""
        if self.ended is not None or not self.committed < id_ <= self.last_id:
            return
        waiting = _Reaching(id_, lambda: self.committed)
        self.attach(waiting)
        try:
            async with asyncio.timeout(REACH_SECONDS):
                await waiting.over.wait()
        except TimeoutError:
            return
        finally:
            self.detach(waiting)

    # -- reports

    async def explain_exactly(self, lock: int) -> LockExplanation:
        """Return what is known of a lock. If the table has only an estimate, its last mark is looked up in the log; the
        estimate stays if the log does not answer."""
        found = self.explain(lock)
        if found.is_exact or found.is_in_flight or self.session.format == 0:
            return found
        query = LockQuery(lock=lock, last_id=found.mark, limit=1, newest_first=True)
        mark = EMPTY
        try:
            while mark == EMPTY and not query.is_done:
                part, _ = await self.find_marks(query)
                mark, query = part.ids[0] if part.ids else EMPTY, query.after(part)
        except WaltzError:
            return found
        return replace(found, mark=mark, reason=Reason.CONFLICT)

    def explain(self, lock: int) -> LockExplanation:
        """Return what the table has for a lock at this moment."""
        if self.ended is not None:
            raise self.ended
        mark, reason = self._locks.explain(lock, self.committed)
        return LockExplanation(
            lock=lock,
            mark=mark,
            reason=reason,
            committed=self.committed,
            last_id=self.last_id,
            session=self.session.session,
            low_mark=self.session.low_mark,
            floor=self._locks.floor,
            locks=len(self._locks),
            locks_max=self.settings.lock_table_size,
        )


async def _together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of works that run at the same time. When one of them fails, end the others before this returns:
    the caller holds its share of the server only until then."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
