"""A cluster for clients to talk to, without servers: a true log for each partition, and faults at chosen moments.

It keeps the rules that servers keep towards clients (locks, barriers, displacement, credit, outcomes before the feed) in
the plainest way, one record at a time. Whenever something travels between a client and a server, `fault` is asked by the
name of the moment, and may answer with one of `FAULTS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import numpy as np

from waltzd.cluster.groups import GroupMeta, MadeGroup
from waltzd.errors import (
    BeyondLog,
    CannotConnect,
    ClientAhead,
    Displaced,
    ForeignCluster,
    NeedsBatches,
    NotReady,
    WaltzError,
)
from waltzd.errors.operations import BadFrame, NotOwner, SessionEnded, WrongPeer
from waltzd.format.checksum import crc32
from waltzd.format.record import NO_TIME, LockColumns, Run, encode_run, heads
from waltzd.protocol.batches import (
    INTRODUCTION,
    AppendBatch,
    ClientFrame,
    Committals,
    Credit,
    Feed,
    FeedMode,
    HeadFeed,
    Introduction,
    Limits,
    Mounted,
    MountRequest,
    PartitionLocation,
    Refusals,
    Refused,
    Registration,
    ServerAddress,
    ServerFrame,
    Topology,
)
from waltzd.protocol.locks import History, HistoryPart, MarkedPage, Mode, Reason
from waltzd.protocol.peers import AttendPort
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST, NEVER_FORKED
from waltzd.server.core.step import HybridClock, check_seen

KEY = UUID(int=7)
FAULTS = ("drop", "drop after", "late", "end", "crash", "move")
"""The link breaks before or after what travels has arrived; arrives long after the link broke; the session ends with a
word, or without; the partition moves to another server."""


@dataclass(frozen=True)
class Entry:
    client: int
    sequence: int
    header: int
    payload: bytes
    mark: int
    locks: tuple[tuple[int, int], ...]
    time: int = NO_TIME
    follows: bool = False
    """Goes on with the group of the one before."""


class FakePartition:
    def __init__(self, number: int, cluster: FakeCluster) -> None:
        self.number = number
        self.cluster = cluster
        self.log: list[Entry] = []
        self.committed = -1
        self.generation = 1
        self.session = 1
        self.owner = number % len(cluster.addresses)
        self.format = cluster.format
        self.clock = HybridClock(0)
        self.ahead = 0
        """So many microseconds the clock of its owner is ahead of that of the cluster."""
        self.is_ready = True
        self.mounts: dict[int, FakeMount] = {}
        self.late: list[tuple[FakeMount, AppendBatch]] = []
        self.marks: dict[int, int] = {}
        self.floor = -1
        self.is_holding = False
        """Commits nothing by itself."""
        self.stays_down = False
        """Does not recover."""
        self.lineage = NEVER_FORKED
        self.taken = 0
        """Batches that were looked at."""

    @property
    def place(self) -> PartitionLocation:
        return PartitionLocation(
            generation=self.generation, server=f"s{self.owner}", address=self.cluster.addresses[self.owner]
        )

    @property
    def payloads(self) -> list[bytes]:
        return [entry.payload for entry in self.log]

    def run(self, first_id: int, last_id: int, *, with_locks: bool = False) -> Run:
        entries = self.log[first_id : last_id + 1]
        locks = [lock for entry in entries for lock in entry.locks]
        columns = LockColumns(
            np.array([len(entry.locks) for entry in entries], np.int64),
            np.array([id_ for id_, _ in locks], np.uint64),
            np.array([mode for _, mode in locks], np.uint8),
        )
        found = self._records(first_id, entries)
        if self.format == 0:
            return found
        return replace(
            found,
            times=np.array([entry.time for entry in entries], np.int64),
            follows=np.array([entry.follows for entry in entries], np.bool_),
            locks=columns if with_locks else None,
            goes_on=last_id != self.whole(last_id),
        )

    def _records(self, first_id: int, entries: Sequence[Entry]) -> Run:
        requests = [(entry.client, self.generation, self.number, entry.sequence) for entry in entries]
        return encode_run(
            first_id,
            requests=np.array(requests, np.int32).reshape(-1, 4),
            headers=np.array([entry.header for entry in entries], np.int32),
            lengths=np.array([len(entry.payload) for entry in entries], np.int64),
            data_crcs=np.array([crc32(entry.payload) for entry in entries], np.uint32),
            payloads=b"".join(entry.payload for entry in entries),
        )

    def write(self, *payloads: bytes) -> None:
        """Somebody else's transactions, committed at once."""
        self.log += [
            Entry(9999, len(self.log) + i, 0, payload, -1, (), self.next_time()) for i, payload in enumerate(payloads)
        ]
        self.commit()

    def write_group(self, *payloads: bytes) -> None:
        """The same as one group."""
        time, first = self.next_time(), len(self.log)
        self.log += [Entry(9999, first + i, 0, payload, -1, (), time, i > 0) for i, payload in enumerate(payloads)]
        self.commit()

    def next_time(self, seen: int = 0) -> int:
        now = self.cluster.now + self.ahead
        check_seen(seen, max(now, self.clock.last))
        return NO_TIME if self.format == 0 else self.clock.next(now, seen)

    def find_time(self, time: int) -> int:
        before = [id_ for id_, entry in enumerate(self.log[: self.committed + 1]) if entry.time < time]
        return before[-1] if before else -1

    def whole(self, mark: int) -> int:
        """The highest mark up to this one that stands inside no group."""
        while mark + 1 < len(self.log) and self.log[mark + 1].follows:
            mark -= 1
        return mark

    def append(self, mount: FakeMount, batch: AppendBatch) -> None:
        self.taken += 1
        if self.mounts.get(mount.client) is not mount or mount.session != self.session:
            return  # an older mount, or an older session: whatever it sent is ignored
        batch.check(self.cluster.limits)
        if batch.first_sequence <= mount.last_sequence:
            raise BadFrame("sequence numbers must rise")
        follows = [False] * len(batch) if batch.follows is None else [bool(flag) for flag in batch.follows]
        if any(follows) and self.format == 0:
            raise NeedsBatches("a group, in a session of format 0")
        time = self.next_time(batch.seen_time)
        mount.last_sequence = batch.first_sequence + len(batch) - 1
        lock_at = data_at = 0
        groups: list[list[tuple[int, Entry]]] = []
        for row in range(len(batch)):
            count, length, mark = int(batch.lock_counts[row]), int(batch.lengths[row]), int(batch.marks[row])
            payload = bytes(batch.payloads[data_at : data_at + length])
            assert crc32(payload) == int(batch.data_crcs[row])
            locks = tuple((int(batch.lock_ids[i]), int(batch.lock_modes[i])) for i in range(lock_at, lock_at + count))
            lock_at, data_at = lock_at + count, data_at + length
            sequence = batch.first_sequence + row
            if mark >= len(self.log):
                raise ClientAhead(f"mark {mark} of {len(self.log)}")
            entry = Entry(mount.client, sequence, int(batch.headers[row]), payload, mark, locks, time, follows[row])
            if not follows[row]:
                groups.append([])
            groups[-1].append((sequence, entry))
        for group in groups:
            self._decide(mount, group)
        mount.wake.set()
        if not self.is_holding:
            self.cluster.later(self.commit)

    def _decide(self, mount: FakeMount, group: Sequence[tuple[int, Entry]]) -> None:
        """All of it or nothing, against what was there before it."""
        refusals = [self._refusal(entry.mark, entry.locks) for _, entry in group]
        refusal = max([found for found in refusals if found is not None], key=lambda found: found[1], default=None)
        for sequence, entry in group:
            if refusal is not None:
                mount.refusals.append((sequence, *refusal))
                continue
            for lock, mode in entry.locks:
                if mode != Mode.READ:
                    self.marks[lock] = len(self.log)
            self.log.append(entry)
            mount.sequences[len(self.log) - 1] = sequence

    def _refusal(self, mark: int, locks: tuple[tuple[int, int], ...]) -> tuple[int, int, int] | None:
        """By the lock that was marked last, as an owner says it."""
        found = [(self.marks.get(lock, self.floor), lock) for lock, mode in locks if mode != Mode.APPEND]
        marked, lock = max(found, key=lambda one: one[0], default=(-1, 0))
        if marked <= mark:
            return None
        if lock not in self.marks:
            return Reason.OWNER_CHANGED, marked, lock
        return (Reason.CONFLICT if marked <= self.committed else Reason.IN_FLIGHT), marked, lock

    def commit(self, mark: int | None = None) -> None:
        mark = len(self.log) - 1 if mark is None else self.whole(min(mark, len(self.log) - 1))
        if mark > self.committed:
            self.committed = mark
            for mount in self.mounts.values():
                mount.wake.set()

    def join(self, mount: FakeMount, request: MountRequest) -> None:
        if request.cluster_key != KEY:
            raise ForeignCluster("another key")
        if self.cluster.addresses[self.owner] != mount.address or request.generation != self.generation:
            place = self.place
            raise NotOwner("not here", owner=place.server, address=place.address, generation=place.generation)
        if not self.is_ready:
            raise NotReady("recovering")
        shared, timeline = self.lineage.shared_to(request.timeline or FIRST), request.timeline or FIRST
        if request.asks and timeline in self.lineage and shared is not None:
            mount.next_id = min(request.mark, shared) + 1
        else:
            mount.next_id = request.mark + 1
            self.lineage.check(timeline, request.mark, what="the client", partition=self.number)
        if mount.next_id > len(self.log):
            raise ClientAhead(f"mark {request.mark} of {len(self.log)}")
        older = self.mounts.get(request.client)
        if older is not None and older.number >= request.number:
            raise Displaced("older than the present one")
        if older is not None:
            older.end(Displaced("a newer one came"))
        self.mounts[request.client] = mount

    def end_session(self, *, keep: int | None = None, silently: bool = False, move: bool = False) -> None:
        """Some of what is not committed may survive; the rest is lost. After a while there is a new session."""
        last = self.committed if keep is None else max(self.committed, self.whole(min(keep, len(self.log) - 1)))
        del self.log[last + 1 :]
        self.session += 1
        self.is_ready = False
        mounts, self.mounts = self.mounts, {}
        for mount in mounts.values():
            mount.end(None if silently else SessionEnded("the session ended"))
        if move:
            self.generation += 1
            self.owner = (self.owner + 1) % len(self.cluster.addresses)
        self.marks, self.floor = {}, last
        self.cluster.later(self.reopen, 5)

    def fork(self, mark: int) -> None:
        """An operator ends the log there, and it goes on under another timeline."""
        del self.log[mark + 1 :]
        self.committed = min(self.committed, mark)
        self.end_session(silently=True)
        self.lineage = self.lineage.forked(
            identity=UUID(int=1000 + self.session), fork=mark, session=self.session, cause="a test", began="", who=""
        )

    def reopen(self) -> None:
        if self.stays_down:
            return
        self.is_ready = True
        self.commit()
        late, self.late = self.late, []
        for mount, batch in late:
            self.append(mount, batch)


class FakeCluster:
    def __init__(
        self,
        *,
        partitions: int = 1,
        servers: int = 2,
        fault: Callable[[str], str | None] = lambda moment: None,
        choose: Callable[[int], int] = lambda count: count - 1,
        seconds: float = 0.001,
        format: int = 0,
    ) -> None:
        self.format = format
        self.now = 1_700_000_000_000_000
        """What the clocks of all owners show, in microseconds since 1970."""
        self.addresses = [f"s{number}:1" for number in range(servers)]
        self.partitions = [FakePartition(number, self) for number in range(partitions)]
        self.limits = Limits(payload_bytes_max=1000, locks_max=4, frame_bytes_max=2000)
        self.fault = fault
        self.choose = choose
        self.seconds = seconds
        self.moments: list[str] = []
        self.clients = 0
        self.down: set[str] = set()
        self.open_ports = 0
        self.open_mounts = 0
        self.feed_records = 3
        self.run_records = 1000
        self.late_by = 3
        self.mount_requests: list[MountRequest] = []

    def later(self, work: Callable[[], None], times: int = 1) -> None:
        asyncio.get_running_loop().call_later(self.seconds * times, work)

    def connect(self, address: str, key: UUID | None) -> FakeServer:
        return FakeServer(self, address)

    def strike(self, moment: str, partition: FakePartition) -> str | None:
        """What happens at this moment; the faults of the partition are done here."""
        self.moments.append(moment)
        fault = self.fault(moment)
        assert fault is None or fault in FAULTS
        if fault in ("end", "crash", "move") and partition.is_ready:
            keep = partition.committed + self.choose(len(partition.log) - partition.committed)
            partition.end_session(keep=keep, silently=fault == "crash", move=fault == "move")
        return fault


class FakeServer:
    def __init__(self, cluster: FakeCluster, address: str) -> None:
        self.cluster = cluster
        self.address = address
        self.is_closed = False
        cluster.open_ports += 1

    async def _reach(self) -> None:
        await asyncio.sleep(self.cluster.seconds)
        if self.address in self.cluster.down or self.address not in self.cluster.addresses:
            raise CannotConnect(f"{self.address} is down")

    async def locate(self) -> Topology:
        await self._reach()
        return Topology(
            cluster="fake",
            cluster_key=KEY,
            places=tuple(partition.place for partition in self.cluster.partitions),
            servers=tuple(ServerAddress(f"s{i}", address) for i, address in enumerate(self.cluster.addresses)),
        )

    def expect(self, name: str | None, streams: str = "") -> None:
        pass

    async def register(self, introduction: Introduction = INTRODUCTION) -> Registration:
        await self._reach()
        self.cluster.clients += 1
        return Registration(self.cluster.clients, b"token")

    def mount(self) -> FakeMount:
        return FakeMount(self.cluster, self.address)

    def attend(self) -> AttendPort:
        raise AssertionError("there are no groups here")

    async def make_group(self, meta: GroupMeta) -> MadeGroup:
        raise AssertionError("there are no groups here")

    async def get_group(self, name: str) -> MadeGroup:
        raise AssertionError("there are no groups here")

    async def group_status(self, name: str, partition: int) -> Any:
        raise AssertionError("there are no groups here")

    async def parked(self, name: str, partition: int, after: int, count: int) -> Any:
        raise AssertionError("there are no groups here")

    async def replay(self, name: str, partition: int, ids: Sequence[int]) -> Any:
        raise AssertionError("there are no groups here")

    async def _owned(self, number: int) -> FakePartition:
        await self._reach()
        partition = self.cluster.partitions[number]
        if partition.place.address != self.address:
            raise NotOwner("not here")
        if not partition.is_ready:
            raise NotReady("recovering")
        return partition

    async def high_water_mark(self, partition: int, *, confirmed: bool = False, since: Position | None = None) -> Position:
        found = await self._owned(partition)
        if since is not None:
            found.lineage.check(since.timeline, since, what="the reader", partition=partition)
        return Position(found.committed, found.lineage.current)

    async def find_time(self, partition: int, time: int) -> Position:
        found = await self._owned(partition)
        if found.format == 0:
            raise NeedsBatches("nothing here has a time")
        return Position(found.find_time(time), found.lineage.current)

    async def history(
        self, partition: int, lock: int, *, after: int, before: int | None, limit: int, newest_first: bool, confirmed: bool
    ) -> HistoryPart:
        found = await self._owned(partition)
        end = found.committed if before is None else min(found.committed, before - 1)
        marked = [
            id_
            for id_, entry in enumerate(found.log[: end + 1])
            if id_ > after and any(bits == lock and mode != Mode.READ for bits, mode in entry.locks)
        ]
        ids = tuple(marked[::-1] if newest_first else marked)
        position = Position(end, found.lineage.current)
        history = History(partition=partition, ids=ids[:limit], end=position, has_more=len(ids) > limit)
        return HistoryPart(history=history)

    async def fetch_marked(self, *_arguments: Any, **_options: Any) -> MarkedPage:
        """Answer as a server of an older version."""
        raise WrongPeer("the other side does not know this call")

    async def fetch(
        self,
        partition: int,
        first_id: int,
        last_id: int | None = None,
        *,
        with_locks: bool = False,
        timeline: UUID | None = None,
    ) -> AsyncGenerator[Run, None]:
        found = await self._owned(partition)
        last = found.committed if last_id is None else last_id
        if timeline is not None:
            found.lineage.check(timeline, last, what="the reader", partition=partition)
        if last > found.committed:
            raise BeyondLog(f"there is nothing above {found.committed}")
        for first in range(first_id, last + 1, self.cluster.run_records):
            yield found.run(first, min(last, first + self.cluster.run_records - 1), with_locks=with_locks)

    async def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        self.cluster.open_ports -= 1


class FakeMount:
    """Both ends of a mount."""

    def __init__(self, cluster: FakeCluster, address: str) -> None:
        self.cluster = cluster
        self.address = address
        self.partition: FakePartition | None = None
        self.client = self.number = self.session = -1
        self.last_sequence = -1
        self.feed = FeedMode.NONE
        self.credit = self.next_id = 0
        self.sequences: dict[int, int] = {}
        """Ids that were given on this mount, and not told yet."""
        self.refusals: list[tuple[int, int, int, int]] = []
        self.greeting: Mounted | None = None
        self.wake = asyncio.Event()
        self.is_over = False
        self.error: WaltzError | None = None
        self.is_counted = False

    # -- the client's end

    async def send(self, frames: Sequence[ClientFrame]) -> None:
        await asyncio.sleep(self.cluster.seconds)
        for frame in frames:
            self._check()
            if self.address in self.cluster.down:
                raise CannotConnect("down")
            partition = self.partition
            if isinstance(frame, MountRequest):
                partition = self.cluster.partitions[frame.partition]
            assert partition is not None
            fault = self.cluster.strike(f"to the server: {type(frame).__name__}", partition)
            if fault == "late" and isinstance(frame, AppendBatch):
                partition.late.append((self, frame))
                self.cluster.later(partition.reopen, self.cluster.late_by)
            elif fault not in ("drop", "late"):
                self._check()
                self._arrive(frame)
            if fault in ("drop", "drop after", "late"):
                self._break()
                raise CannotConnect("the link broke")

    @property
    def may_post(self) -> bool:
        return False

    def post(self, frames: Sequence[ClientFrame]) -> None:
        raise AssertionError("it takes nothing without waiting")

    def hear(self, taker: Callable[[Sequence[ServerFrame]], None]) -> None:
        """All frames are received."""

    def _check(self) -> None:
        if self.is_over and self.error is None:
            raise CannotConnect("the link is broken")

    async def receive(self) -> Sequence[ServerFrame] | None:
        while True:
            await asyncio.sleep(self.cluster.seconds)
            if self.is_over and self.error is None:
                return None
            frames = self._ready()
            if frames and self.partition is not None:
                fault = self.cluster.strike(f"to the client: {type(frames[0]).__name__}", self.partition)
                if fault in ("drop", "drop after", "late"):
                    self._break()
                    return None
            if self.error is not None:
                frames.append(Refused(self.error, self.last_sequence + 1))
                self._break()
            if frames:
                return frames
            self.wake.clear()
            await self.wake.wait()

    def cancel(self) -> None:
        self._break()

    # -- the server's end

    def _arrive(self, frame: ClientFrame) -> None:
        try:
            match frame:
                case MountRequest():
                    self._mount(frame)
                case AppendBatch():
                    assert self.partition is not None
                    self.partition.append(self, frame)
                case Credit(size):
                    self.credit += size
                    self.wake.set()
                case _:
                    raise BadFrame("not expected from a client")
        except WaltzError as error:
            self.end(error)

    def _mount(self, request: MountRequest) -> None:
        self.cluster.mount_requests.append(request)
        self.client, self.number = request.client, request.number
        partition = self.cluster.partitions[request.partition]
        partition.join(self, request)
        self.partition = partition
        self.session = partition.session
        self.feed, self.credit = request.feed, request.credit
        self.greeting = Mounted(
            session=partition.session,
            barrier=len(partition.log) - 1,
            limits=self.cluster.limits,
            format=partition.format,
            timelines=partition.lineage.later,
        )
        self.is_counted = True
        self.cluster.open_mounts += 1
        self.wake.set()

    def _ready(self) -> list[ServerFrame]:
        frames: list[ServerFrame] = []
        if self.greeting is not None:
            frames, self.greeting = [self.greeting], None
        partition = self.partition
        if partition is None:
            return frames
        done = [id_ for id_ in self.sequences if id_ <= partition.committed] if partition.session == self.session else []
        if done:
            sequences = [self.sequences.pop(id_) for id_ in done]
            time = max(0, *[partition.log[id_].time for id_ in done])
            frames.append(Committals(np.array(sequences, np.int64), np.array(done, np.int64), time))
        if self.refusals:
            columns = list(zip(*self.refusals, strict=True))
            self.refusals = []
            kinds = (np.int64, np.uint8, np.int64, np.uint64)
            frames.append(Refusals(*[np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]))
        last = min(partition.committed, self.next_id + self.cluster.feed_records - 1)
        if self.feed is not FeedMode.NONE and self.credit > 0 and last >= self.next_id and self.error is None:
            run = partition.run(self.next_id, last)
            self.next_id = last + 1
            if self.feed is FeedMode.RECORDS:
                self.credit -= len(run.data)
                frames.append(Feed(run))
            else:
                found = heads(run)
                self.credit -= found.nbytes
                frames.append(HeadFeed(found, run.times, run.follows, run.goes_on))
        return frames

    def end(self, error: WaltzError | None) -> None:
        """The server has its last word, or breaks the link without one."""
        if self.is_over:
            return
        if error is None:
            self._break()
        else:
            self.error = error
            self.wake.set()

    def _break(self) -> None:
        self.is_over = True
        self.error = None
        self.wake.set()
        if self.is_counted:
            self.is_counted = False
            self.cluster.open_mounts -= 1
