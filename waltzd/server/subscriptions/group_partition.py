"""One active group in one partition of this server; it lives no longer than the pipeline of the partition.

`DeliveryTracker` decides which member gets what and `GroupStateWriter` what is written; this module adds the clock, the
log and the streams of members. It first claims the group by an entry in the group log. Nothing is delivered until that
is committed. Then it takes turns, each without waiting: release overdue deliveries, offer new transactions of the log,
deliver to members. A turn follows every event that may change something: a commit, an acknowledgement, a timer. Two
tasks run beside the turns. One writes state changes, one entry at a time. The other reads records that have left the
log cache, so that turns never wait for a disk.

An acknowledgement is answered at once, except one that parks a transaction or stops the group: that change is durable
on a majority first.

Records that are being delivered are kept in decoded blocks (`RecordCache`). A block read for one member serves all, and
its columns are decoded once.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from waltzd.cluster.groups import GroupMeta
from waltzd.errors import (
    BadArgument,
    Displaced,
    GroupBeyondLog,
    NeedsBatches,
    NoSuchGroup,
    NotReady,
    OtherTimeline,
    WaltzError,
)
from waltzd.errors.operations import ChangedMeanwhile
from waltzd.format.record import HEAD_BYTES, NO_TIME, OVERHEAD_BYTES, TRAILER_BYTES, HeadArray, Run, heads
from waltzd.protocol.batches import PROBE_KIND
from waltzd.protocol.groups import (
    EPOCHS_OF_A_RESET,
    RESET_DRAWS,
    Ack,
    AckKind,
    AckResult,
    Change,
    Changed,
    GroupMember,
    GroupPartitionStatus,
    KeyedBy,
    Mode,
    reset_epoch,
)
from waltzd.protocol.timelines import Lineage
from waltzd.server.clients.pipeline import Pipeline
from waltzd.server.groups.delivery_tracker import Delivery, DeliveryTracker
from waltzd.server.groups.state import GroupState
from waltzd.server.groups.state_log import Key, settings_of
from waltzd.server.groups.state_writer import GroupStateWriter
from waltzd.server.subscriptions.checkpointer import GroupCheckpointer, StateLogSource
from waltzd.wire.tasks import tell_failure

CACHE_BYTES = 4 << 20
CACHE_BLOCKS_MIN = 8
"""Number of blocks that are kept whatever their size, because several members may wait for one each."""
BLOCK_COST_BYTES = 1 << 10
"""Memory of a block beside its records."""


class RecordBlock:
    """Consecutive records, with their heads as columns."""

    __slots__ = ("bounds", "first_id", "heads", "last_id", "run", "times")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.first_id, self.last_id = run.first_id, run.last_id
        self.heads: HeadArray = heads(run)
        self.bounds: list[int] = run.bounds.tolist()
        self.times: list[int] | None = None if run.times is None else run.times.tolist()

    def payload(self, id: int) -> memoryview:
        at = id - self.first_id
        return self.run.data[self.bounds[at] + HEAD_BYTES : self.bounds[at + 1] - TRAILER_BYTES]

    def length(self, id: int) -> int:
        at = id - self.first_id
        return self.bounds[at + 1] - self.bounds[at] - OVERHEAD_BYTES

    def time(self, id: int) -> int:
        return NO_TIME if self.times is None else self.times[id - self.first_id]

    @property
    def size(self) -> int:
        return len(self.run.data) + BLOCK_COST_BYTES


class RecordCache:
    """The blocks that were read last, bounded in bytes. Blocks may overlap."""

    def __init__(self, bytes_max: int = CACHE_BYTES) -> None:
        self._bytes_max = bytes_max
        self._blocks: OrderedDict[int, RecordBlock] = OrderedDict()
        """Blocks by first id, the newest last."""
        self._firsts: list[int] = []
        self._bytes = 0

    def put(self, block: RecordBlock) -> None:
        older = self._blocks.pop(block.first_id, None)
        if older is not None:
            self._bytes -= older.size
            if older.last_id > block.last_id:
                block = older
        self._blocks[block.first_id] = block
        self._bytes += block.size
        while self._bytes > self._bytes_max and len(self._blocks) > CACHE_BLOCKS_MIN:
            self._bytes -= self._blocks.popitem(last=False)[1].size
        self._firsts = sorted(self._blocks)

    def find(self, id: int) -> RecordBlock | None:
        at = bisect_right(self._firsts, id) - 1
        while at >= 0:
            block = self._blocks[self._firsts[at]]
            if block.last_id >= id:
                return block
            at -= 1
        return None


log = logging.getLogger("waltz.server")
READ_AGAIN_SECONDS, READ_AGAIN_SECONDS_MAX = 0.2, 10.0
IDLE_SECONDS = 5.0
"""Seconds that an idle group partition is kept, so that a member that reconnects finds it."""
OFFER_BYTES = 256 << 10
OFFERS_MAX = 2000
"""Largest number of transactions offered in one turn, so that other partitions get their turn."""
AGAIN_MAX = 100
"""Largest number of replayed transactions offered in one turn; each of them may take a block of its own."""
AHEAD_MIN = 256
"""Transactions offered ahead, in addition to twice the room of all members. A keyed group takes as many as the tracker
allows, because transactions of one key wait for each other."""
READ_MAX = 4096
"""Largest number of ids requested from the reader at once."""


class GroupPartitionHost(StateLogSource, Protocol):
    """Owner of the group partition."""

    def forget(self, group_partition: GroupPartition) -> None:
        """Forget a group partition that has ended."""
        ...


class Consumer(Protocol):
    """The stream of one member, as its group partition uses it. No call waits."""

    name: str
    changed: asyncio.Event
    """Set when the stream may have more to send."""

    def give(self, delivery: Delivery) -> None: ...
    def kept(self, kept: int) -> None:
        """Report that changes up to this number are durable on a majority."""
        ...

    def pause(self, reason: str) -> None: ...
    def prolong(self) -> None:
        """Extend the deliveries that could not be sent yet, so that they do not expire."""
        ...

    def dismiss(self, error: WaltzError) -> None: ...
    def describe(self) -> GroupMember: ...


class GroupPartition:
    def __init__(
        self,
        key: Key,
        meta: GroupMeta,
        pipeline: Pipeline,
        coordinator: GroupPartitionHost,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self.key = key
        self.meta = meta
        self.pipeline = pipeline
        self.error: WaltzError | None = None
        """Why the group partition has ended; None while it is active."""
        self._other: OtherTimeline | GroupBeyondLog | None = None
        """Error of a group that is of another timeline or above the end of the log, and delivers nothing before a reset;
        None otherwise."""
        self.paused = ""
        """Why deliveries are paused without an operator's doing; empty while they are not."""
        self.delivered = self.acknowledged = self.failed = 0
        self._coordinator = coordinator
        self._on_fatal = on_fatal
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._checkpointer = GroupCheckpointer(key, coordinator, over=self.end, kept=self._tell_kept, say=self._say)
        self._tracker: DeliveryTracker
        """Set once the group is claimed."""
        self._members: dict[str, Consumer] = {}
        self._going: dict[Consumer, None] = {}
        """Streams that have left and are still told which of their acknowledgements are durable."""
        self._claimed: asyncio.Future[None] = self._loop.create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._turn_due: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._cache = RecordCache()
        self._wanted: dict[tuple[int, int], None] = {}
        """Ranges of ids to read from storages, in the order of the requests."""
        self._want = asyncio.Event()
        self._unread = ""
        """Why records cannot be read; empty while they can."""
        self._idle_since: float | None = self._now()
        self._kinds = np.array(sorted(meta.kinds), dtype=np.int64) if meta.kinds else None
        self._needs_locks = meta.mode is Mode.KEYED and meta.key is KeyedBy.LOCK

    def start(self) -> None:
        self.pipeline.attach(self)
        self._tasks = [self._task(self._keep(), "keeping"), self._task(self._read(), "reading")]

    def _task(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{what} of group {self.key.name} in partition {self.key.partition}")
        tell_failure(task, self._on_fatal)
        return task

    async def ready(self) -> None:
        """Wait until the group is claimed; raise if it cannot be."""
        await asyncio.shield(self._claimed)
        if self.error is not None:
            raise self.error

    def end(self, error: WaltzError) -> None:
        """End the group partition and dismiss its members with this error."""
        if self.error is not None:
            return
        self.error = error
        self.pipeline.detach(self)
        self._coordinator.forget(self)
        for handle in (self._turn_due, self._timer):
            if handle is not None:
                handle.cancel()
        for task in self._tasks:
            task.cancel()
        if not self._claimed.done():
            self._claimed.set_result(None)
        self._checkpointer.end(error)
        for member in [*self._members.values(), *self._going]:
            member.dismiss(error)

    def check(self) -> None:
        """Assert the invariants; called after every event of a simulation."""
        if self.error is None and self._is_claimed:
            self._tracker.check()
            assert self._tracker.state is self._state

    # -- the claim -----------------------------------------------------------------------------------------------------

    @property
    def _is_claimed(self) -> bool:
        return self._claimed.done() and self.error is None

    async def _keep(self) -> None:
        if await self._checkpointer.claim(self._new_writer):
            self._tracker = DeliveryTracker(settings_of(self.meta), self._state)
            self._claimed.set_result(None)
            await self._checkpointer.run()

    async def _new_writer(self) -> GroupStateWriter:
        state_log, key = self._coordinator.state_log, self.key
        meta, made_at = state_log.groups.get(key.name, (None, None))
        if meta is None or made_at != key.made_at:
            raise NoSuchGroup(f"the group {key.name} was deleted", group=key.name)
        start = meta.start(key.partition)
        lineage = self.pipeline.session.lineage
        writer = GroupStateWriter(key, state_log, after=start, now=self._now(), lineage=lineage)
        self._other = other_timeline(key, writer.state, lineage)
        if self._other is None:
            try:
                check_group_partition(meta, key.partition, self.pipeline, writer.state.reach)
            except GroupBeyondLog as error:
                self._other = error  # it is claimed nevertheless: only an owner can reset it
        # After the state was read: a successor of this owner may have written it, and then this session has ended.
        await self.pipeline.confirm()
        if writer.dropped is not None:
            self._say(
                f"moves to timeline {lineage.number} of the log, which forks behind id {writer.dropped.fork}: nothing "
                f"above was acknowledged, and of its state up to id {writer.dropped.reach} "
                f"{writer.dropped.parked} parked transactions are dropped"
            )
        return writer

    @property
    def state(self) -> GroupState | None:
        """Return the current state, which may be ahead of the group log; None before the claim."""
        return self._state if self._is_claimed else None

    @property
    def _state(self) -> GroupState:
        return self._checkpointer.writer.state

    def look(self) -> None:
        """End this group partition if the group log shows that another owner has claimed the group."""
        if self._is_claimed and self._checkpointer.is_deposed:
            self.end(self._checkpointer.deposed())

    def _say(self, trouble: str) -> None:
        log.warning("group %s, partition %d: %s", self.key.name, self.key.partition, trouble)

    def _tell_kept(self, kept: int) -> None:
        for member in [*self._members.values(), *self._going]:
            member.kept(kept)
        if self.paused:
            self.touch()

    # -- turns ---------------------------------------------------------------------------------------------------------

    def touch(self) -> None:
        """Take a turn soon, because something may have changed."""
        if self._turn_due is None and self.error is None:
            self._turn_due = self._loop.call_soon(self._take_turn)

    def committed(self) -> None:
        """Take a turn after a commit, if there are members. Called by the pipeline."""
        if self._members:
            self.touch()

    def _take_turn(self) -> None:
        self._turn_due = None
        if not self._is_claimed:
            return
        try:
            self._turn()
        except Exception as error:  # noqa: BLE001  a mistake of ours
            self._on_fatal(error)

    def _turn(self) -> None:
        tracker, now, before = self._tracker, self._now(), self._aside()
        expired = tracker.expire(now)
        self.failed += expired
        if expired:
            self._checkpointer.changed(expired, is_urgent=self._aside() != before)
        self._pause()
        if self._members and not self.paused:
            self._offer()
            for delivery in tracker.deliver(now):
                self.delivered += 1
                self._members[delivery.member].give(delivery)
        self._set_timer(tracker.wake(is_paused=bool(self.paused)))

    def _aside(self) -> tuple[int, str]:
        """Return the part of the state whose change must be durable before it is answered."""
        return len(self._tracker.state.parked), self._tracker.state.stopped

    def _pause(self) -> None:
        paused = ""
        if self._checkpointer.writer.must_pause:
            paused = f"acknowledgements wait for the group log: {self._checkpointer.trouble or 'it is slow'}"
        paused = paused or self._unread or self._other_reason
        told = paused or (f"the group has stopped: {self._tracker.state.stopped}" if self._tracker.state.stopped else "")
        self.paused = paused
        for member in self._members.values():
            member.pause(told)

    @property
    def _other_reason(self) -> str:
        return "" if self._other is None else f"the group has stopped: {' '.join(self._other.lines())}"

    def _set_timer(self, at: float | None) -> None:
        if at is None or self.error is not None:
            return
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.touch()

    # -- offering ----------------------------------------------------------------------------------------------------

    def _ahead(self) -> int:
        """Return how many more transactions to offer."""
        tracker = self._tracker
        if self.meta.mode is Mode.KEYED:
            return tracker.room
        room = sum(tracker.room_of(name) for name in self._members)
        return min(tracker.room, AHEAD_MIN + 2 * room - tracker.waiting)

    def _offer(self) -> None:
        """Offer transactions that are in memory, and request the rest from the reader."""
        tracker, tail = self._tracker, self.pipeline.session.cache
        again = tracker.again
        for id in again[:AGAIN_MAX]:
            block = self._block(id)
            if block is None:
                self.want(id, id)  # a turn follows, which offers it and the next ones
                break
            self._offer_block(block, id, id)
        else:
            if len(again) > AGAIN_MAX:
                self.touch()
                return
        offered = 0
        while (room := self._ahead()) > 0 and (first := tracker.upcoming) <= self.pipeline.committed:
            if offered >= OFFERS_MAX:
                self.touch()
                return
            last = min(self.pipeline.committed, first + min(room, OFFERS_MAX) - 1)
            block = self._cache.find(first)
            if block is None and first < tail.first_id:
                self.want(first, min(last + READ_MAX, tail.first_id - 1))
                return
            if block is None:
                run = tail.runs_from(first, last, OFFER_BYTES, with_locks=self._needs_locks)[0]
                block = RecordBlock(run)
                self._cache.put(block)
            offered += self._offer_block(block, first, min(last, block.last_id))

    def _offer_block(self, block: RecordBlock, first: int, last: int) -> int:
        """Offer ids of a block; return how many there were."""
        tracker = self._tracker
        headers = block.heads["header"][first - block.first_id : last - block.first_id + 1]
        wanted = headers != PROBE_KIND
        if self._kinds is not None:
            wanted &= np.isin(headers, self._kinds)
        keys = self._keys(block, first, last, headers)
        before = tracker.state.reach
        for at, is_wanted in enumerate(wanted.tolist()):
            id = first + at
            if id == tracker.upcoming or tracker.is_again(id):
                tracker.offer(id, keys[at] if keys is not None else None, is_wanted=is_wanted)
        if tracker.state.reach != before:
            self._checkpointer.changed(0)
        return last - first + 1

    def _keys(self, block: RecordBlock, first: int, last: int, headers: Any) -> Sequence[Hashable | None] | None:
        if self.meta.mode is not Mode.KEYED:
            return None
        if not self._needs_locks:
            found: list[Hashable | None] = headers.tolist()
            return found
        locks = block.run.locks
        if locks is None:
            return [None] * (last - first + 1)
        starts = np.cumsum(locks.counts) - locks.counts
        part = slice(first - block.first_id, last - block.first_id + 1)
        ids = locks.ids
        return [
            int(ids[start]) if count else None
            for start, count in zip(starts[part].tolist(), locks.counts[part].tolist(), strict=True)
        ]

    def _block(self, id: int) -> RecordBlock | None:
        """Return a block with the record of this id, if it is in memory."""
        found = self._cache.find(id)
        tail = self.pipeline.session.cache
        if found is None and tail.first_id <= id <= self.pipeline.committed:
            run = tail.runs_from(id, self.pipeline.committed, OFFER_BYTES, with_locks=self._needs_locks)[0]
            found = RecordBlock(run)
            self._cache.put(found)
        return found

    def want(self, first: int, last: int) -> None:
        """Request records that are not in memory. A turn follows when they were read, and members look again."""
        self._wanted[first, last] = None
        self._want.set()

    def _forget_wanted(self) -> None:
        """Drop the requests for records after the position was moved: one that cannot be read may not be needed any more.
        What is still needed is requested again."""
        self._wanted.clear()
        self._cannot_read("")
        for member in self._members.values():
            member.changed.set()

    async def _read(self) -> None:
        """Read the requested ranges one by one, sharing the disks with all readers of this server."""
        cold = self.pipeline.cold_reader(with_locks=self._needs_locks)
        pause = READ_AGAIN_SECONDS
        while True:
            await self._want.wait()
            self._want.clear()
            while self._wanted:
                first, last = next(iter(self._wanted))
                if self._block(first) is None:
                    try:
                        run: Run = await cold.read(first, min(last, self.pipeline.committed))
                    except WaltzError as error:
                        if (first, last) in self._wanted:
                            self._cannot_read(f"id {first} cannot be read: {error.message}")
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, READ_AGAIN_SECONDS_MAX)
                        continue
                    self._cache.put(RecordBlock(run))
                pause = READ_AGAIN_SECONDS
                self._cannot_read("")
                self._wanted.pop((first, last), None)
                self.touch()
                for member in self._members.values():
                    member.changed.set()

    def _cannot_read(self, why: str) -> None:
        """Set or clear the reason why records cannot be read. Deliveries that could not be sent meanwhile do not
        expire."""
        if why != self._unread:
            self._unread = why
            if why:
                self._say(why)
            self.touch()
        if why and self._is_claimed:
            for member in self._members.values():
                member.prolong()

    # -- members -------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._state.epoch

    def join(self, member: Consumer, room: int | None, *, tells_begun: bool) -> int:
        """Add a member and return how many deliveries it gets at a time. A newer stream displaces an older one of the
        same name."""
        if self.error is not None:
            raise self.error
        if isinstance(self._other, GroupBeyondLog):
            raise self._other
        older = self._members.get(member.name)
        if older is not None:
            self.leave(older, is_lost=True)
            older.dismiss(Displaced(f"member {member.name} of group {self.key.name} has connected again"))
        self._members[member.name] = member
        self._tracker.join(member.name, room, tells_begun=tells_begun)
        self._idle_since = None
        self.touch()
        return self._tracker.room_of(member.name)

    def leave(self, member: Consumer, *, is_lost: bool) -> None:
        """Remove a member. `is_lost` is True if it did not leave by itself."""
        if self._members.get(member.name) is not member:
            return
        del self._members[member.name]
        if self.error is not None:
            return
        self._going[member] = None
        before = self._aside()
        if failed := self._tracker.leave(member.name, self._now(), is_lost=is_lost):
            self.failed += failed
            self._checkpointer.changed(failed, is_urgent=self._aside() != before)
        if not self._members:
            self._idle_since = self._now()
        self.touch()

    def forget(self, member: Consumer) -> None:
        """Forget a stream that has ended."""
        self._going.pop(member, None)

    def begin(self, member: Consumer, ack: Ack) -> None:
        """Record that deliveries were handed to the application. It is not written: a change of owner counts as no
        failure."""
        for first, last in zip(ack.firsts.tolist(), ack.lasts.tolist(), strict=True):
            self._tracker.begin(member.name, ack.epoch, ack.tag, first, last)

    def acknowledge(self, member: Consumer, ack: Ack) -> tuple[AckResult, int, bool]:
        """Apply an acknowledgement. Return its result, the number of the change that makes it durable, and whether the
        answer has to wait for that."""
        tracker, now, result, before = self._tracker, self._now(), AckResult(ack.number), self._aside()
        delay = None if ack.delay_ms is None else ack.delay_ms / 1000
        name, epoch, tag, handed_back = member.name, ack.epoch, ack.tag, tracker.handed_back
        for first, last in zip(ack.firsts.tolist(), ack.lasts.tolist(), strict=True):
            match ack.verb:
                case AckKind.ACKNOWLEDGE:
                    one = tracker.acknowledge(name, epoch, tag, first, last, now)
                case AckKind.REFUSE:
                    one = tracker.refuse(name, epoch, tag, first, last, now, reason=ack.reason, delay=delay)
                case AckKind.REJECT:
                    one = tracker.reject(name, epoch, tag, first, last, now, reason=ack.reason)
                case AckKind.EXTEND:
                    one = tracker.extend(name, epoch, tag, first, last, now)
            result = AckResult(
                ack.number,
                result.taken + one.taken,
                result.done + one.done,
                result.late + one.late,
                result.unknown + one.unknown,
                one.is_old,
            )
        is_aside, number = self._aside() != before, self._checkpointer.writer.changes
        if result.taken and ack.verb is not AckKind.EXTEND:
            number = self._checkpointer.changed(result.taken, is_urgent=is_aside)
        if ack.verb is AckKind.ACKNOWLEDGE:
            self.acknowledged += result.taken
        elif ack.verb is not AckKind.EXTEND:
            self.failed += result.taken - (tracker.handed_back - handed_back)
        self.touch()
        return result, number, is_aside

    @property
    def kept(self) -> int:
        return self._checkpointer.writer.kept

    @property
    def changes(self) -> int:
        return self._checkpointer.writer.changes

    @property
    def work(self) -> int:
        """Return a number that rises with the cost of the acknowledgements of members."""
        return self._tracker.work

    def write_now(self) -> None:
        """Write acknowledgements at once, because a member waits for them."""
        self._checkpointer.write_now()

    def unsettled(self, name: str) -> int | None:
        """Return the highest id that a member acknowledged and that is not settled, because it waits for earlier ones.
        Always None unless the group is ordered."""
        return self._tracker.unsettled(name) if self.meta.mode is Mode.ORDERED else None

    def is_waiting(self, id: int, name: str) -> bool:
        """Return whether an acknowledgement of a member waits for earlier deliveries."""
        return self._tracker.is_waiting(id, name)

    def is_settled(self, id: int) -> bool:
        return self._tracker.state.open.get(id) is None

    def is_out(self, delivery: Delivery) -> bool:
        return self._tracker.is_out(delivery)

    def extend(self, delivery: Delivery) -> None:
        """Extend a delivery that could not be sent yet."""
        self._tracker.extend(delivery.member, self.epoch, delivery.tag, delivery.id, delivery.id, self._now())

    def block(self, id: int) -> RecordBlock | None:
        return self._block(id)

    # -- operators -----------------------------------------------------------------------------------------------------

    async def change(self, change: Change, ids: Sequence[int], epoch: int = 0) -> Changed:
        await self.ready()
        if change is Change.RESET:
            return await self._reset(_only(ids, "a reset"), epoch)
        if self._other is not None:
            raise self._other
        tracker, now = self._tracker, self._now()
        match change:
            case Change.REPLAY:
                count = len(tracker.replay(ids or list(tracker.state.parked)))
            case Change.DISCARD:
                count = len(tracker.discard(ids or list(tracker.state.parked)))
            case Change.SKIP:
                last = _only(ids, "a skip")
                self._check_id(last)
                count = tracker.lose(last + 1, now)
                self._forget_wanted()
            case Change.GO_ON:
                count = 1 if tracker.state.stopped else 0
                if count:
                    tracker.resume()
            case _:
                raise BadArgument(f"unknown change of a group: {change!r}")
        number = self._checkpointer.changed(max(1, count), is_urgent=True)
        self.touch()
        await self._checkpointer.kept(number)
        return Changed(count, self.epoch, tracker.state.floor)

    def _check_id(self, id: int) -> None:
        if not -1 <= id <= self.pipeline.committed:
            raise GroupBeyondLog(
                f"id {id} is not in partition {self.key.partition}, whose high-water mark is {self.pipeline.committed}",
                not_done="the group stays as it is",
                high_water_mark=self.pipeline.committed,
            )

    async def _reset(self, after: int, epoch: int) -> Changed:
        """Move the group to another position, in a new epoch. Acknowledgements of earlier deliveries do not count then,
        and members join again. If the group has reached `epoch`, the reset is done already, and its answer was lost."""
        self._check_id(after)
        count = 0

        def begin(old: GroupState) -> GroupState:
            nonlocal count
            if epoch and self._is_reset(old.epoch, epoch):
                return old
            count = abs(old.floor - after)
            state = GroupState(after=after, epoch=epoch or old.epoch + 1, timeline=self.pipeline.session.lineage.current)
            shared = self.pipeline.session.lineage.shared_to(old.timeline)
            kept = after if shared is None else min(after, shared)
            state.parked = {id: one for id, one in old.parked.items() if id <= kept}
            return state

        is_new = await self._checkpointer.reset(begin)
        state, number = self._state, self._checkpointer.writer.changes
        if is_new:
            self._tracker, self._other = DeliveryTracker(settings_of(self.meta), state), None
            self._forget_wanted()
            if self._claimed.done():  # before it is written, a new owner could choose the same epoch
                self._claimed = self._loop.create_future()
                self._tasks.append(self._task(self._open_again(number), "reset"))
            for member in list(self._members.values()):
                self._send_away(member)
        await self._checkpointer.kept(number)
        return Changed(count, state.epoch, state.floor)

    def _is_reset(self, known: int, epoch: int) -> bool:
        """Return whether the reset that begins `epoch` is done, by the `known` epoch of the group. Raise if it never can
        be."""
        if known >= epoch + EPOCHS_OF_A_RESET:
            raise ChangedMeanwhile(
                f"group {self.key.name} was reset in partition {self.key.partition} after this command read its state, or "
                f"the command could not read it: its epoch is {known}, and this reset was to begin epoch {epoch}",
                not_done="this reset was not done, or it was done before the other one",
            )
        if epoch > reset_epoch(known, RESET_DRAWS - 1):
            raise BadArgument(f"a reset cannot begin epoch {epoch} of a group in epoch {known}")
        return known >= epoch

    async def _open_again(self, number: int) -> None:
        """Let members join once this change is durable on a majority."""
        with suppress(WaltzError):  # the partition has ended, and its error was raised to callers
            await self._checkpointer.kept(number)
            self._claimed.set_result(None)
            self.touch()  # a member may have joined while the change began, and nothing was delivered until now

    def _send_away(self, member: Consumer) -> None:
        """Dismiss a member, because its deliveries are of an earlier epoch."""
        del self._members[member.name]
        self._idle_since = self._now()
        member.dismiss(NotReady(f"group {self.key.name} was reset in partition {self.key.partition}: join again"))

    async def rewrite(self) -> None:
        """Write the whole state as a snapshot."""
        await self._checkpointer.rewrite()

    def tend(self) -> None:
        """End the group partition if it is idle and everything is written."""
        if not self._is_claimed or self._members or self._idle_since is None:
            return
        if self._now() - self._idle_since < IDLE_SECONDS:
            return
        if not self._checkpointer.is_level:
            self._checkpointer.write_now()
            return
        self.end(NotReady(f"group {self.key.name} is idle in partition {self.key.partition}: join again"))

    # -- status ----------------------------------------------------------------------------------------------------------

    def describe(self) -> GroupPartitionStatus | None:
        if not self._is_claimed:
            return None
        state, tracker, oldest = self._state, self._tracker, self._tracker.oldest
        age = 0.0 if oldest is None else self._now() - oldest + tracker.settings.ack_wait
        return GroupPartitionStatus(
            partition=self.key.partition,
            epoch=state.epoch,
            reach=state.reach,
            floor=state.floor,
            open=state.open.ids,
            parked=len(state.parked),
            stopped=state.stopped if self._other is None else self._other.message,
            is_at_work=True,
            paused="" if self._other is not None else self.paused,
            in_flight=tracker.in_flight,
            unwritten=self._checkpointer.writer.unwritten,
            oldest_ms=max(0, round(1000 * age)),
            delivered=self.delivered,
            acknowledged=self.acknowledged,
            failed=self.failed,
            members=tuple(member.describe() for member in self._members.values()),
        )

    def held(self, name: str) -> int:
        return self._tracker.held(name)


def _only(ids: Sequence[int], what: str) -> int:
    if len(ids) != 1 or ids[0] < -1:
        raise BadArgument(f"{what} takes one id, not {len(ids)}", not_done="the group stays as it is")
    return ids[0]


def other_timeline(key: Key, state: GroupState, lineage: Lineage) -> OtherTimeline | None:
    """Return why a group cannot continue: it acknowledged transactions that are no longer in the log. Return None if it
    can."""
    shared = lineage.shared_to(state.timeline)
    if shared is None or state.acknowledged_above(shared) == 0:
        return None
    try:
        lineage.check(
            state.timeline, state.reach, what=f"group {key.name}", partition=key.partition,
            next_step=f"undo what its members did for the transactions above id {shared}, and reset the group to that id: "
            f"`waltzctl group reset {key.name} --partitions {key.partition} --after {shared}`",
        )  # fmt: skip
    except OtherTimeline as error:
        return error
    return None


def check_group_partition(meta: GroupMeta, partition: int, pipeline: Pipeline, after: int) -> None:
    """Raise if the log of a partition lacks what the group needs. `after` is the position of the group."""
    if meta.mode is Mode.KEYED and meta.key is KeyedBy.LOCK and pipeline.session.format == 0:
        raise NeedsBatches(
            f"group {meta.name} is keyed by locks, and partition {partition} writes format 0, which keeps none",
            not_done="nothing was delivered",
        )
    if after > pipeline.last_id:
        raise GroupBeyondLog(
            f"group {meta.name} is at id {after} of partition {partition}, which has no id above {pipeline.last_id}",
            partition=partition,
            last_id=pipeline.last_id,
        )
