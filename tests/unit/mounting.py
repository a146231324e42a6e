"""An owned partition without storages and network: a session whose commits the test decides, and links in memory.

`Reader` is the client's end. It checks the order of what it hears, and keeps it, so that a test can say what came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import numpy as np

from tests.unit import timeless
from waltzd.cluster.documents import PartitionMeta
from waltzd.errors import CannotConnect, NotReady, WaltzError
from waltzd.errors.operations import NotOwner
from waltzd.format.batch import Batch, End, Piece, encode_batch
from waltzd.format.checksum import crc32
from waltzd.format.key_index import LockMarks, LockQuery, marks_of
from waltzd.format.record import LockColumns, Run, encode_payloads, join_runs
from waltzd.protocol.batches import (
    AppendBatch,
    ClientFrame,
    Committals,
    Feed,
    FeedMode,
    HeadFeed,
    Limits,
    Mounted,
    MountRequest,
    PartitionLocation,
    Refusals,
    Refused,
    ServerAddress,
    ServerFrame,
    SingleAppend,
    Topology,
)
from waltzd.protocol.locks import Mode, Reason
from waltzd.protocol.peers import LockHistory
from waltzd.protocol.role import Identity, Role
from waltzd.server.clients.authorizer import Authorizer
from waltzd.server.clients.calls import ServerCalls, token_of
from waltzd.server.clients.pipeline import Capacity, Pipeline, PipelineSettings
from waltzd.server.clients.registry import ClientRegistry
from waltzd.server.core.log_cache import LogCache
from waltzd.server.session.replicated_log import ReplicatedLog
from waltzd.server.session.settings import SessionSettings

KEY = UUID(int=7)
LIMITS = Limits(payload_bytes_max=1 << 16, locks_max=10, frame_bytes_max=1 << 18)
PLENTY = 1 << 40

LockColumn = Sequence[tuple[int, Mode]]


def batch_of(
    *payloads: bytes,
    first: int = 0,
    marks: Sequence[int] | int = -1,
    locks: Sequence[LockColumn] = (),
    header: int = 0,
    groups: Sequence[int] = (),
    seen_time: int = 0,
) -> AppendBatch:
    """A batch with a payload for each transaction; `locks` has one list for each, or is left out, and `groups` says how
    many stand together."""
    count = len(payloads)
    rows = list(locks) or [()] * count
    assert len(rows) == count
    return AppendBatch(
        first_sequence=first,
        marks=np.full(count, marks, np.int64) if isinstance(marks, int) else np.array(marks, np.int64),
        headers=np.full(count, header, np.int32),
        lengths=np.array([len(payload) for payload in payloads], np.int64),
        data_crcs=np.array([crc32(payload) for payload in payloads], np.uint32),
        lock_counts=np.array([len(row) for row in rows], np.int64),
        lock_ids=np.array([lock for row in rows for lock, _ in row], np.uint64),
        lock_modes=np.array([mode for row in rows for _, mode in row], np.uint8),
        payloads=b"".join(payloads),
        follows=np.array([number > 0 for size in groups for number in range(size)], np.bool_) if groups else None,
        seen_time=seen_time,
    )


def single_of(batch: AppendBatch) -> SingleAppend:
    """The transaction of a batch of one as it travels alone."""
    assert len(batch) == 1
    return SingleAppend(
        batch.first_sequence,
        int(batch.marks[0]),
        int(batch.headers[0]),
        int(batch.data_crcs[0]),
        batch.lock_ids.tolist(),
        batch.lock_modes.tobytes(),
        batch.payloads,
        batch.seen_time,
    )


def piece_of(
    tail: LogCache,
    payloads: Sequence[bytes],
    *,
    time: int | None,
    locks: Sequence[Sequence[tuple[int, int]]] = (),
    groups: Sequence[int] = (),
    segment_bytes_max: int = 1 << 20,
) -> Piece:
    """What fits behind the tail: a batch of this time, or a run where there is none."""
    run = encode_payloads(tail.next_id, payloads)
    if time is None:
        return run
    columns = batch_of(*payloads, locks=[[(lock, Mode(mode)) for lock, mode in row] for row in locks], groups=groups)
    return encode_batch(
        run,
        session=1,
        generation=1,
        committed=tail.committed,
        time=time,
        before=tail.end or End(),
        locks=LockColumns(columns.lock_counts, columns.lock_ids, columns.lock_modes),
        follows=columns.follows,
        segment_bytes_max=segment_bytes_max,
    )


class FakeSession(ReplicatedLog):
    """An open session. What is appended is committed when the test says so, or at once."""

    def __init__(
        self, *, next_id: int = 0, tail_bytes: int = 1 << 20, commits_at_once: bool = True, end: End | None = None
    ) -> None:
        """`end`: of the log in format 1, which this session then writes."""
        meta = PartitionMeta(generation=5, session=11, opened=11, low_mark=next_id - 1)
        super().__init__(3, meta, {}, SessionSettings(partitions=4, key=KEY), say=lambda sentence: None)
        self.open_cache = LogCache(next_id, tail_bytes, end)
        self.format = 0 if end is None else 1
        self.histories: list[LockHistory] = []
        """What replicas say of locks, the newest first."""
        self.old_marks: dict[int, int] | None = None
        """Last marks in the log before this session, by lock; None where no replica answers."""
        self.lookups: list[LockQuery] = []
        self.lookup_gate: asyncio.Event | None = None
        """Look-ups of locks wait for it."""
        self.times: dict[int, int] = {}
        """What replicas answer about a time."""
        self.commits_at_once = commits_at_once
        self.pieces: list[Piece] = []
        """Everything that was ever appended here."""
        self.reads: list[tuple[int, int]] = []
        self.reads_at_once = self.reads_at_once_max = 0
        self.fault: WaltzError | None = None
        self.gate: asyncio.Event | None = None
        """Reads from storages wait for it."""

    def append(self, piece: Piece) -> None:
        super().append(piece)
        self.pieces.append(piece)
        if self.commits_at_once:
            self.commit(piece.last_id)

    @property
    def runs(self) -> list[Run]:
        return [piece if isinstance(piece, Run) else piece.run_with_locks for piece in self.pieces]

    @property
    def batches(self) -> list[Batch]:
        return [piece for piece in self.pieces if isinstance(piece, Batch)]

    def whole(self) -> Run:
        return join_runs(self.runs)

    def payloads(self) -> list[bytes]:
        run = self.whole()
        return [run.record(number).payload for number in range(len(run))]

    async def read_locks(self, last_id: int, bytes_max: int) -> LockHistory | None:
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault
        return self.histories.pop(0) if self.histories else None

    async def find_marks(self, query: LockQuery, turns: asyncio.Semaphore) -> LockMarks:
        """Answer for at most four ids at a time, newest first."""
        assert query.newest_first
        assert query.last_id <= self.committed
        self.lookups.append(query)
        await asyncio.sleep(0)
        if self.lookup_gate is not None:
            await self.lookup_gate.wait()
        if self.old_marks is None:
            raise NotReady("nobody")
        marks = {self.old_marks[query.lock]} if query.lock in self.old_marks else set[int]()
        for batch in self.batches:
            found = marks_of(batch.first_id, batch.locks)
            marks |= {int(id_) for lock, id_ in zip(found.locks, found.ids, strict=True) if int(lock) == query.lock}
        low = max(query.first_id, query.last_id - 3)
        ids = sorted((id_ for id_ in marks if low <= id_ <= query.last_id), reverse=True)[: query.limit]
        return LockMarks(ids=tuple(ids), through=ids[-1] if len(ids) == query.limit else low)

    async def find_time(self, time: int, last_id: int) -> int:
        await asyncio.sleep(0)
        return self.times[time]

    async def read(
        self, first_id: int, last_id: int, chunk_bytes: int, *, with_locks: bool = False
    ) -> AsyncGenerator[Run, None]:
        assert first_id <= last_id <= self.committed
        self.reads.append((first_id, last_id))
        self.reads_at_once += 1
        self.reads_at_once_max = max(self.reads_at_once, self.reads_at_once_max)
        try:
            if self.gate is not None:
                await self.gate.wait()
            whole = self.whole()
            while first_id <= last_id:
                await asyncio.sleep(0)
                if self.fault is not None:
                    raise self.fault
                start = first_id - whole.first_id
                stop = start + 1
                while stop <= last_id - whole.first_id and whole.bounds[stop + 1] - whole.bounds[start] <= chunk_bytes:
                    stop += 1
                found = whole.part(start, stop)
                yield found if with_locks else replace(found, locks=None)
                first_id += stop - start
        finally:
            self.reads_at_once -= 1


class MemoryLink:
    """Both ends of a mount. The server waits when the client has left `room` messages unread."""

    def __init__(self, room: int = 4) -> None:
        self.peer = "memory"
        self.identity = ""
        self.quiet_seconds: float | None = None
        self._room = room
        self._in: deque[Sequence[ClientFrame] | WaltzError | None] = deque()
        self._out: deque[Sequence[ServerFrame]] = deque()
        self._changed = asyncio.Condition()
        self.is_cut = False
        self._taker: Callable[[SingleAppend], bool] | None = None

    # -- the server's end

    takes_singles = True

    def hear_singles(self, taker: Callable[[SingleAppend], bool]) -> None:
        self._taker = taker

    async def receive(self) -> Sequence[ClientFrame] | None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._in or self.is_cut)
            if self.is_cut:
                raise CannotConnect("the client has gone")
            found = self._in.popleft()
            self._changed.notify_all()
        if isinstance(found, WaltzError):
            raise found
        return found

    async def send(self, frames: Sequence[ServerFrame]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._out) < self._room or self.is_cut)
            if self.is_cut:
                raise CannotConnect("the client has gone")
            self._out.append(frames)
            self._changed.notify_all()

    @property
    def may_post(self) -> bool:
        return False

    def post(self, frames: Sequence[ServerFrame]) -> None:
        raise AssertionError("it takes nothing without waiting")

    # -- the client's end

    async def say(self, *frames: ClientFrame) -> None:
        await self._put(frames)

    async def say_nonsense(self, error: WaltzError) -> None:
        await self._put(error)

    async def finish(self) -> None:
        await self._put(None)

    async def _put(self, what: Sequence[ClientFrame] | WaltzError | None) -> None:
        one = what[0] if isinstance(what, tuple) and len(what) == 1 else None
        if isinstance(one, SingleAppend) and self._taker is not None and not self._in and self._taker(one):
            return
        async with self._changed:
            self._in.append(what)
            self._changed.notify_all()

    async def hear(self) -> Sequence[ServerFrame]:
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._out))
            found = self._out.popleft()
            self._changed.notify_all()
            return found

    async def cut(self) -> None:
        async with self._changed:
            self.is_cut = True
            self._changed.notify_all()

    @property
    def unread(self) -> int:
        return len(self._out)

    @property
    def untaken(self) -> int:
        """Messages that the server has not received."""
        return len(self._in)


class Reader:
    """A client of one partition that remembers what it heard."""

    def __init__(self, room: Room, link: MemoryLink, serving: asyncio.Task[None]) -> None:
        self._room = room
        self.link = link
        self.serving = serving
        self.frames: list[ServerFrame] = []
        self.messages: list[Sequence[ServerFrame]] = []
        self.mounted: Mounted | None = None
        self.committed: dict[int, int] = {}
        self.refused: dict[int, tuple[Reason, int, int]] = {}
        self.ids: list[int] = []
        self.payloads: list[bytes] = []
        self.end: WaltzError | None = None
        self.untaken: int | None = None

    async def say(self, *frames: ClientFrame) -> None:
        await self.link.say(*frames)

    async def hear(self) -> Sequence[ServerFrame]:
        """One message, with its order checked."""
        frames = await self.link.hear()
        order = [Mounted, Committals, Refusals, Feed, HeadFeed, Refused]
        places = [next(at for at, kind in enumerate(order) if isinstance(frame, kind)) for frame in frames]
        assert places == sorted(set(places)), "at most one of each kind, in their order"
        assert self.end is None, "nothing comes behind a refusal"
        self.messages.append(frames)
        for frame in frames:
            self.frames.append(frame)
            self._take(frame)
        return frames

    def _take(self, frame: ServerFrame) -> None:
        match frame:
            case Mounted():
                assert self.mounted is None
                self.mounted = frame
            case Committals(sequences, ids):
                for sequence, id_ in zip(sequences.tolist(), ids.tolist(), strict=True):
                    assert sequence not in self.committed
                    assert sequence not in self.refused
                    self.committed[sequence] = id_
            case Refusals(sequences, reasons, conflict_ids, locks):
                for sequence, *row in zip(
                    sequences.tolist(), reasons.tolist(), conflict_ids.tolist(), locks.tolist(), strict=True
                ):
                    assert sequence not in self.committed
                    assert sequence not in self.refused
                    self.refused[sequence] = (Reason(row[0]), row[1], row[2])
            case Feed(run):
                for number in range(len(run)):
                    record = run.record(number)
                    self.ids.append(record.id)
                    self.payloads.append(record.payload)
            case HeadFeed(heads):
                self.ids += heads["id"].tolist()
            case Refused(error, untaken):
                self.end, self.untaken = error, untaken

    async def until(self, is_enough: Callable[[Reader], bool]) -> None:
        while not is_enough(self):
            await self.hear()

    async def settle(self) -> None:
        """Hear what there is, until the server has nothing more to do."""
        for _ in range(20):
            await self._room.quiet()
            while self.link.unread:
                await self.hear()

    async def leave(self) -> None:
        await self.link.cut()
        await asyncio.gather(self.serving, return_exceptions=True)


class Room:
    """A server with one partition, numbered 3, of generation 5."""

    def __init__(self, session: FakeSession, *, callers_max: int = 100, cold_reads_max: int = 8, **settings: Any) -> None:
        self.session = session
        self.fatal: list[BaseException] = []
        self.capacity = Capacity(callers_max, cold_reads_max=cold_reads_max)
        self.pipe = Pipeline(
            session, PipelineSettings(**{"limits": LIMITS, **settings}), self.capacity, on_fatal=self.fatal.append
        )
        self.authorizer = Authorizer.free()
        self.registry = ClientRegistry()
        self.calls = ServerCalls(self, self.authorizer, self.registry)
        self.registered = 0
        self.epochs: dict[str, int] = {}
        """As the coordinator has them."""
        self.readers: list[Reader] = []

    @property
    def queued_bytes(self) -> int:
        """What waits for a step."""
        return self.pipe._intake.used

    @property
    def inflight_bytes(self) -> int:
        """What has ids and is not committed."""
        return self.pipe._inflight_bytes

    # -- the owner that is asked

    def topology(self) -> Topology:
        place = PartitionLocation(generation=5, server="one", address="127.0.0.1:1")
        nobody = PartitionLocation(generation=0, server=None, address=None)
        return Topology(
            cluster="test",
            cluster_key=KEY,
            places=(nobody, nobody, nobody, place),
            servers=(ServerAddress("one", "127.0.0.1:1"),),
        )

    client_secret = b"secret"
    newest_client = 0
    """Client number that tests set, to let others register."""

    async def register(self) -> int:
        self.registered += 1
        return self.registered

    async def raise_epoch(self, name: str) -> int:
        self.epochs[name] = self.epochs.get(name, 0) + 1
        return self.epochs[name]

    async def newest_epoch(self, name: str) -> int:
        return self.epochs.get(name, 0)

    def pipeline(self, partition: int, generation: int | None) -> Pipeline:
        if partition != 3 or generation not in (None, 5):
            raise NotOwner(f"partition {partition}, generation {generation} is not here", owner="two")
        return self.pipe

    # -- what tests do

    async def knock(self, *frames: ClientFrame, room: int = 4, identity: str = "") -> Reader:
        """A stream that begins with these frames."""
        link = MemoryLink(room)
        link.identity = identity
        reader = Reader(self, link, asyncio.create_task(self.calls.mount(link)))
        self.readers.append(reader)
        await link.say(*frames)
        return reader

    async def mount(
        self,
        client: int = 1,
        *,
        number: int = 1,
        mark: int | None = None,
        feed: FeedMode = FeedMode.NONE,
        credit: int = PLENTY,
        room: int = 4,
        name: str = "",
        epoch: int = 0,
        instance: str = "",
    ) -> Reader:
        """A mount that was let in; `name`: of its certificate, if it has one."""
        identity = Identity(KEY, Role.CLIENT, name).uri if name else ""
        request = mount_request(
            client,
            number=number,
            mark=self.pipe.committed if mark is None else mark,
            feed=feed,
            credit=credit,
            epoch=epoch,
            instance=instance,
            token=token_of(self.client_secret, client, identity, epoch),
        )
        reader = await self.knock(request, room=room, identity=identity)
        await reader.hear()
        assert reader.mounted is not None, reader.end
        return reader

    async def quiet(self) -> None:
        """Let everything that can go on go on."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for reader in self.readers:
            await reader.leave()
        self.pipe.close(NotOwner("the test is over"))
        await self.quiet()
        assert self.capacity.callers == 0
        assert self.fatal == []


def mount_request(
    client: int = 1,
    *,
    number: int = 1,
    mark: int = -1,
    feed: FeedMode = FeedMode.NONE,
    credit: int = PLENTY,
    key: UUID = KEY,
    partition: int = 3,
    generation: int = 5,
    token: bytes | None = None,
    identity: str = "",
    asks: bool = False,
    epoch: int = 0,
    instance: str = "",
) -> MountRequest:
    """`token`: if it is not given, the one that belongs to the client id and the identity."""
    return MountRequest(
        cluster_key=key,
        partition=partition,
        generation=generation,
        client=client,
        token=token_of(Room.client_secret, client, identity) if token is None else token,
        number=number,
        mark=mark,
        feed=feed,
        credit=credit,
        epoch=epoch,
        instance=instance,
        asks=asks,
    )


def in_room(
    test: Callable[[Room], Coroutine[Any, Any, None]], session: Callable[[], FakeSession] = FakeSession, **settings: Any
) -> None:
    """Run a test against a room, and leave nothing behind."""

    async def run() -> None:
        room = Room(session(), **settings)
        async with asyncio.timeout(20):
            try:
                await test(room)
            finally:
                await room.close()

    timeless.run(run())
