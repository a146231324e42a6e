"""From batches to the log: the order in which transactions get their ids, in one open session.

Batches queue. One step takes what is there, decides the locks, gives ids and builds one run, which goes to the replicas;
when the session says that it is committed, the mounts get their outcomes. There is no timer: while one step is at work the
next one gathers. Bytes on the way to the replicas are bounded: above the bound no step is made, so the queue fills, so
mounts are not read any more. A step never waits and never fails half-way.

Everything here dies with the session. What has an id and was not answered by then is answered by nobody: the log itself
tells. What has none was not taken: its mount says so, and the client sends it to the next owner.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from waltzd.checksum import I64
from waltzd.errors import BadArgument, BadFrame, BeyondLog, ClientAhead, Displaced, WaltzError
from waltzd.frame import AppendBatch, Limits, Refusals
from waltzd.lock_explanation import LockExplanation
from waltzd.outcome import Reason
from waltzd.record import Run
from waltzd.server.budget import Budget
from waltzd.server.capacity import Capacity
from waltzd.server.feed import ColdReader, records
from waltzd.server.locks import LockTable
from waltzd.server.step import Portion, build
from waltzd.server.store import OpenSession
from waltzd.server.tally import Tally

STEP_ROWS_MAX = 4096
NUMBER_JUMP_MAX = 1_000_000
"""Between two mounts of a client that meet here: so often it may have tried elsewhere meanwhile. A number that is far too
high would keep the client out for good."""
STEP_BYTES_MAX = 1 << 20
"""One step holds the loop for some milliseconds at most; the other partitions of this server need it, too."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    limits: Limits
    lock_table_size: int = 50_000
    inflight_bytes_max: int = 16 << 20
    """On the way to the replicas; as much again may wait in the queue."""
    mount_bytes_max: int = 8 << 20
    """What one mount may have received and not answered."""
    feed_frame_bytes: int = 256 << 10
    cold_chunk_bytes: int = 256 << 10


class Member(Protocol):
    """A mount, as the pipeline sees it. All calls are made on the loop and none waits."""

    @property
    def client(self) -> int: ...
    @property
    def number(self) -> int: ...
    @property
    def mark(self) -> int: ...
    @property
    def is_over(self) -> bool:
        """Nothing more is taken from it: what it has in the queue is dropped."""
        ...

    def taken(self, next_sequence: int) -> None:
        """Everything below is refused, or has an id; what is not below when it is over never gets one."""
        ...

    def committed(self, sequences: I64, first_id: int, cost: int) -> None:
        """These have the ids from `first_id` on. `cost` is what is answered with this."""
        ...

    def rejected(self, refusals: Refusals, cost: int) -> None: ...
    def flushed(self, number: int, mark: int, cost: int) -> None: ...
    def look(self) -> None:
        """The committed mark has risen."""
        ...

    def refuse(self, error: WaltzError) -> None:
        """It is over, and this is why."""
        ...


@dataclass(frozen=True, eq=False)
class _Batch:
    member: Member
    batch: AppendBatch
    cost: int
    arrived: float


@dataclass(frozen=True, eq=False)
class _Flush:
    member: Member
    number: int
    cost: int


@dataclass(frozen=True, eq=False)
class _Flight:
    """Transactions of one mount that have ids and are not committed."""

    member: Member
    sequences: I64
    first_id: int
    cost: int
    bytes: int
    """Of their records; counted with the last of them."""
    arrived: float

    @property
    def last_id(self) -> int:
        return self.first_id + len(self.sequences) - 1


@dataclass(frozen=True, kw_only=True)
class PipelineDescription:
    mounts: int
    last_id: int
    committed: int
    queued_bytes: int
    inflight_bytes: int
    waiting: str
    """What the next step waits for; empty when it waits for nothing."""
    locks: int
    lock_floor: int
    appended: int
    """In this session."""
    refused: dict[Reason, int]
    """Since this process owns the partition."""


class Pipeline:
    def __init__(
        self,
        session: OpenSession,
        settings: PipelineSettings,
        capacity: Capacity,
        *,
        on_fatal: Callable[[BaseException], None],
        tally: Tally | None = None,
    ) -> None:
        """`on_fatal` gets a mistake of ours: a pipeline that stands still must not look like one that works. `tally` is
        that of the sessions before, where there is one."""
        self.tally = tally or Tally()
        self.session = session
        self.settings = settings
        self.capacity = capacity
        self.committed = session.committed
        """Outcomes up to here are with the mounts, so the feed may go as far."""
        self.ended: WaltzError | None = None
        self._locks = LockTable(settings.lock_table_size, session.low_mark)
        self._intake = Budget(settings.inflight_bytes_max)
        self._queue: deque[_Batch | _Flush] = deque()
        self._flights: deque[_Flight | _Flush] = deque()
        self._inflight_bytes = 0
        self._members: dict[int, Member] = {}
        self._appended = 0
        self._time = asyncio.get_running_loop().time
        self._wake = asyncio.Event()
        self._on_fatal = on_fatal
        session.on_commit(self._on_commit)
        self._task = asyncio.create_task(self._work(), name=f"pipeline of partition {session.partition}")
        self._task.add_done_callback(self._look_at_the_end)

    def _look_at_the_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_fatal(error)

    def hold(self) -> None:
        """No more ids are given out. What has one is still answered; what waits, or comes, is not taken."""
        self._task.cancel()

    def close(self, error: WaltzError) -> None:
        """Every mount is told, and nothing more is appended."""
        if self.ended is not None:
            return
        self.ended = error
        self._task.cancel()
        self._queue.clear()
        self._flights.clear()
        for member in list(self._members.values()):
            member.refuse(error)

    # -- mounts

    @property
    def mounts(self) -> int:
        return len(self._members)

    @property
    def last_id(self) -> int:
        """The highest id that was given out, committed or not."""
        return self.session.tail.next_id - 1

    def join(self, member: Member) -> int:
        """The barrier: what an earlier mount of the same client sent has an id up to here, or never gets one."""
        if self.ended is not None:
            raise self.ended
        older = self._members.get(member.client)
        if older is not None and older.number >= member.number:
            raise Displaced(
                f"client {member.client} has mounted partition {self.session.partition} with the number {older.number}; "
                f"{member.number} is not newer"
            )
        if older is not None and member.number > older.number + NUMBER_JUMP_MAX:
            raise BadFrame(
                f"client {member.client} mounts partition {self.session.partition} with the number {member.number}, far "
                f"above {older.number}, the number of its mount before"
            )
        self.check_mark(member.mark)
        if older is None:
            self.capacity.enter()
        self._members[member.client] = member
        if older is not None:
            older.refuse(Displaced(f"client {member.client} has mounted the partition again"))
        return self.last_id

    def leave(self, member: Member) -> None:
        if self._members.get(member.client) is member:
            del self._members[member.client]
            self.capacity.leave()

    def check_mark(self, mark: int) -> None:
        if mark > self.last_id:
            raise ClientAhead(
                f"the client says that it has seen id {mark} of partition {self.session.partition}, whose last id is "
                f"{self.last_id}",
                mark=mark,
                last_id=self.last_id,
            )

    # -- what mounts put in

    async def append(self, member: Member, batch: AppendBatch, cost: int) -> None:
        """Queue a batch whose columns and payloads were checked; waits while too much is queued."""
        await self._enqueue(_Batch(member, batch, cost, self._time()))

    async def flush(self, member: Member, number: int, cost: int) -> None:
        await self._enqueue(_Flush(member, number, cost))

    async def _enqueue(self, item: _Batch | _Flush) -> None:
        await self._intake.take(item.cost)
        if item.member.is_over:
            self._intake.give(item.cost)
            return
        self._queue.append(item)
        self._wake.set()

    # -- steps

    async def _work(self) -> None:
        while True:
            if self._queue and self._inflight_bytes < self.settings.inflight_bytes_max:
                self._step(self._gather())
                await asyncio.sleep(0)  # the loop has others to serve, and what they bring joins the next step
            else:
                self._wake.clear()
                await self._wake.wait()

    def _gather(self) -> list[_Batch | _Flush]:
        """What is in the queue, as far as it fits into one step."""
        taken: list[_Batch | _Flush] = []
        rows = size = 0
        while self._queue:
            item = self._queue[0]
            if isinstance(item, _Batch):
                rows += len(item.batch)
                size += item.batch.bytes
                if taken and (rows > STEP_ROWS_MAX or size > STEP_BYTES_MAX):
                    break
            self._queue.popleft()
            self._intake.give(item.cost)
            if not item.member.is_over:
                taken.append(item)
        return taken

    def _step(self, items: list[_Batch | _Flush]) -> None:
        first_id = next_id = self.session.tail.next_id
        portions: list[Portion] = []
        for item in items:
            if isinstance(item, _Flush):
                self._flights.append(item)
                continue
            portion = self._decide(item, next_id)
            if portion.accepted:
                self._flights.append(
                    _Flight(item.member, portion.sequences, next_id, item.cost, portion.bytes, item.arrived)
                )
                self._inflight_bytes += item.cost
                next_id += portion.accepted
                portions.append(portion)
        self._answer(self.committed)  # a flush with nothing in front of it
        if portions:
            self._appended += next_id - first_id
            self.session.append(
                build(first_id, portions, partition=self.session.partition, generation=self.session.generation)
            )

    def _decide(self, item: _Batch, next_id: int) -> Portion:
        batch = item.batch
        self.tally.attempts += len(batch)
        item.member.taken(batch.first_sequence + len(batch))
        decision = self._locks.decide(batch, next_id, self.committed)
        if len(decision):
            for reason, count in enumerate(np.bincount(decision.reasons).tolist()):
                if count:
                    self.tally.refused[Reason(reason)] += count
            refusals = Refusals(
                decision.rows + batch.first_sequence, decision.reasons, decision.conflict_ids, decision.locks
            )
            item.member.rejected(refusals, item.cost if len(decision) == len(batch) else 0)
        return Portion(item.member.client, batch, decision.rows)

    # -- outcomes

    def _on_commit(self, mark: int) -> None:
        if self.ended is not None:
            return
        self._answer(mark)
        self.committed = mark
        for member in self._members.values():
            member.look()
        self._wake.set()

    def _answer(self, mark: int) -> None:
        """Outcomes up to `mark`, in the order of the log, to the mounts that wait for them."""
        flights = self._flights
        if not flights:
            return
        now = self._time()
        while flights:
            item = flights[0]
            if isinstance(item, _Flush):
                item.member.flushed(item.number, mark, item.cost)
            elif item.last_id <= mark:
                item.member.committed(item.sequences, item.first_id, item.cost)
                self._inflight_bytes -= item.cost
                self.tally.committed(len(item.sequences), item.bytes, now - item.arrived)
            else:
                if item.first_id <= mark:
                    count = mark - item.first_id + 1
                    item.member.committed(item.sequences[:count], item.first_id, 0)
                    self.tally.committed(count, 0, now - item.arrived)
                    flights[0] = replace(item, sequences=item.sequences[count:], first_id=mark + 1)
                return
            flights.popleft()

    # -- reading by id

    async def read(self, first_id: int, last_id: int | None) -> AsyncGenerator[Run, None]:
        """Committed records; without `last_id`, up to the high-water mark of this moment."""
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
        self.capacity.enter()
        try:
            found = records(self.session, self.cold_reader(), first_id, until, chunk_bytes=self.settings.cold_chunk_bytes)
            async with aclosing(found):
                async for run in found:
                    yield run
        finally:
            self.capacity.leave()

    def cold_reader(self) -> ColdReader:
        return ColdReader(self.session, self.capacity.cold_turns, self.settings.cold_chunk_bytes)

    # -- what others see

    def explain(self, lock: int) -> LockExplanation:
        """What is known of a lock at this moment."""
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

    def describe(self) -> PipelineDescription:
        is_full = self._inflight_bytes >= self.settings.inflight_bytes_max
        return PipelineDescription(
            mounts=self.mounts,
            last_id=self.last_id,
            committed=self.committed,
            queued_bytes=self._intake.used,
            inflight_bytes=self._inflight_bytes,
            waiting=f"{self._inflight_bytes} bytes wait for a majority of the storages" if is_full else "",
            locks=len(self._locks),
            lock_floor=self._locks.floor,
            appended=self._appended,
            refused=dict(self.tally.refused),
        )
