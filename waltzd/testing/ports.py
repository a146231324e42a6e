"""Servers and storages as their callers see them, within one process: calls are direct, and frames and runs are handed
over without a copy.

Every mount runs through a server's port, so faults are injected here: a lock that fails, a feed that pauses, a
connection that breaks before an outcome. The server behind it is the real one and does not know of the faults.

The port of a storage injects delays:

`pause` makes every call, frame and mark wait; `resume` lets them continue.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from uuid import UUID

import numpy as np

from waltzd.dcb import NAME as EVENTS
from waltzd.disk.seam import Buffer
from waltzd.errors import CannotConnect, WaltzError
from waltzd.protocol.batches import (
    AppendBatch,
    ClientFrame,
    Committals,
    Feed,
    HeadFeed,
    MountRequest,
    Refusals,
    ServerFrame,
    SingleAppend,
)
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.groups import DeliveryFrame, JoinRequest, MemberFrame
from waltzd.protocol.locks import NAMESPACE_BITS, Mode, Reason, namespace_of
from waltzd.protocol.peers import Contact, Content, RecordsFrame
from waltzd.protocol.role import Identity
from waltzd.server.clients.calls import ServerCalls
from waltzd.server.clients.service import LogService
from waltzd.server.session.change_signal import ChangeSignal
from waltzd.storage.calls import StorageCalls
from waltzd.storage.service import ReplicaService
from waltzd.wire.calls import Call, Transport
from waltzd.wire.servers import Servers
from waltzd.wire.servicer import Host, Origin, answered
from waltzd.wire.storages import Replicas
from waltzd.wire.tasks import on_loop


class LocalTransport(Transport):
    """Calls within one process: request and result are handed over as they are.

    The proxies and the services are those of the daemons; only gRPC between them is missing. Faults are injected in two
    places: before a call reaches its host, and before an answer comes back. There a transport may wait, or raise the error
    of a broken connection.
    """

    def __init__(self, origin: Origin | None = None) -> None:
        """Create a transport; `origin` is what a certificate would tell of the caller."""
        self._origin = origin or Origin()

    @abstractmethod
    async def _reach(self) -> Host:
        """Return the current host: it may have been restarted since the last call."""

    @abstractmethod
    async def _pass(self) -> None:
        """Let an answer come back."""

    async def _ask(self, call: Call[R], request: Any, seconds: float | None = None) -> R:
        value: R = await answered(await self._reach(), call, request, self._origin)
        await self._pass()
        return value

    async def _each(self, call: Call[R], request: Any) -> AsyncGenerator[R, None]:
        async with aclosing(answered(await self._reach(), call, request, self._origin)) as values:
            async for value in values:
                await self._pass()
                yield value


_numbers = itertools.count(1)
FRAMES_MAX = 4
"""Limit of frames in flight; above it the sender waits."""


class StorageEndpoint:
    """Entry to one storage: open, or paused with every caller waiting."""

    def __init__(self, name: str, calls: StorageCalls, on_fatal: Callable[[BaseException], None]) -> None:
        self.name = name
        self.calls = calls
        self.service = ReplicaService(calls, clock=lambda: 0)
        self.on_fatal = on_fatal
        self._open = asyncio.Event()
        self._open.set()
        self._streams: dict[asyncio.Task[None], None] = {}

    def pause(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        await self._open.wait()

    def serve(self, partition: int, session: int, contact: Contact, link: _StorageLink) -> asyncio.Task[None]:
        task = asyncio.create_task(self._serve(partition, session, contact, link), name=f"append stream at {self.name}")
        self._streams[task] = None
        task.add_done_callback(lambda done: self._streams.pop(done))
        return task

    async def _serve(self, partition: int, session: int, contact: Contact, link: _StorageLink) -> None:
        try:
            await self.calls.append(partition, session, link, contact=contact)
        except WaltzError as error:
            link.end(error)
        except Exception as error:
            self.on_fatal(error)
            raise
        finally:
            link.end(None)

    async def close(self) -> None:
        streams = list(self._streams)
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await self.calls.close()


class StoragePort(LocalTransport, Replicas):
    """Port to the replicas of one storage. `cut` breaks the connection for good."""

    def __init__(self, door: StorageEndpoint, key: UUID, owner_key: bytes) -> None:
        LocalTransport.__init__(self)
        Replicas.__init__(self, key, owner_key, number=next(_numbers))
        self._door = door
        self._is_cut = False
        self._streams: list[DirectAppend] = []

    async def _reach(self) -> Host:
        await self._pass()
        return self._door.service

    async def _pass(self) -> None:
        await self._door.passed()
        if self._is_cut:
            raise CannotConnect(f"the connection to {self._door.name} is gone")

    async def _calls(self) -> StorageCalls:
        await self._pass()
        self._door.calls.check_key(self._key)
        return self._door.calls

    def append(self, partition: int, session: int) -> DirectAppend:
        stream = DirectAppend(self._door, self._calls, partition, session, self._contact(partition, session))
        self._streams = [known for known in self._streams if not known.is_over] + [stream]
        return stream

    async def fetch_segment(self, partition: int, first_id: int, *, session: int) -> AsyncIterator[Buffer]:
        calls, contact = await self._calls(), self._contact(partition, session)
        async with aclosing(calls.fetch_segment(partition, session, first_id, contact=contact)) as pieces:
            async for piece in pieces:
                await self._pass()
                yield piece

    async def install_segment(
        self, partition: int, session: int, first_id: int, file_bytes: int, pieces: AsyncIterator[Buffer]
    ) -> ReplicaStatus:
        calls, contact = await self._calls(), self._contact(partition, session)
        status = await calls.install_segment(partition, session, first_id, file_bytes, pieces, contact=contact)
        await self._pass()
        return status

    async def close(self) -> None:
        for stream in self._streams:
            stream.cancel()

    def cut(self) -> None:
        """Break the connection: nothing that the dead server still sends arrives."""
        self._is_cut = True
        for stream in self._streams:
            stream.cancel()


class DirectAppend:
    """One append stream, as the server holds it."""

    def __init__(
        self,
        door: StorageEndpoint,
        enter: Callable[[], Coroutine[Any, Any, StorageCalls]],
        partition: int,
        session: int,
        contact: Contact,
    ) -> None:
        self._door = door
        self._enter = enter
        self._partition = partition
        self._session = session
        self._contact = contact
        self._link = _StorageLink(door)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        return self._link.is_over

    async def start(self) -> None:
        if self._task is None and not self._link.is_over:
            await self._enter()
            self._task = self._door.serve(self._partition, self._session, self._contact, self._link)

    async def send(self, content: Content, committed: int) -> None:
        await self.start()
        await self._link.put(RecordsFrame(content, committed))

    @property
    def may_post(self) -> bool:
        return False

    def post(self, content: Content, committed: int) -> None:
        raise AssertionError("it takes nothing without waiting")

    async def receive(self) -> int | None:
        return await self._link.take()

    def hear(self, taker: Callable[[int], None]) -> None:
        """Ignore the taker: the server receives the marks."""

    def cancel(self) -> None:
        self._link.end(CannotConnect(f"the append stream to {self._door.name} was given up here"))
        if self._task is not None:
            self._task.cancel()


class _StorageLink:
    """Link between the ends of a stream: frames in one direction, the newest mark and then the end in the other one."""

    def __init__(self, door: StorageEndpoint) -> None:
        self.is_over = False
        self._door = door
        self._frames: deque[RecordsFrame] = deque()
        self._mark: int | None = None
        self._refused: WaltzError | None = None
        self._signal = ChangeSignal()

    # -- the storage's end

    async def receive(self) -> RecordsFrame | None:
        while not self._frames:
            if self.is_over:
                return None
            await self._signal.wait(self._signal.version)
        await self._door.passed()
        frame = self._frames.popleft()
        self._signal.notify()
        return frame

    def hear(self, taker: Callable[[RecordsFrame], bool]) -> None:
        """Do nothing: in this transport the storage fetches each frame itself."""

    async def send(self, durable_id: int) -> None:
        await self._door.passed()
        self._mark = durable_id
        self._signal.notify()

    @property
    def may_post(self) -> bool:
        return False  # nothing arrives at once

    def post(self, durable_id: int) -> None:
        raise AssertionError("`post` was called although `may_post` is False")

    async def refuse(self, error: WaltzError) -> None:
        await self._door.passed()
        self.end(error)

    # -- the server's end

    def end(self, error: WaltzError | None) -> None:
        """End the stream; the first reason is kept."""
        if not self.is_over:
            self.is_over, self._refused = True, error
            self._signal.notify()

    async def put(self, frame: RecordsFrame) -> None:
        while len(self._frames) >= FRAMES_MAX and not self.is_over:
            await self._signal.wait(self._signal.version)
        if self.is_over:
            raise self._refused or CannotConnect(f"{self._door.name} has ended the stream")
        self._frames.append(frame)
        self._signal.notify()

    async def take(self) -> int | None:
        while self._mark is None:
            if self.is_over:
                if self._refused is not None:
                    raise self._refused
                return None
            await self._signal.wait(self._signal.version)
        mark, self._mark = self._mark, None
        return mark


R = TypeVar("R")
Up = TypeVar("Up")
Down = TypeVar("Down")
EXCERPT_BYTES = 60
"""Bytes of a payload that a warning shows."""
MESSAGES_MAX = 4
"""Limit of messages in flight in each direction; above it the sender waits."""


class WrittenLocks:
    """Partitions to which clients sent each WRITE lock. A lock holds within one partition, so a lock that was sent to two
    protects nothing."""

    def __init__(self) -> None:
        self._payloads: dict[int, dict[int, bytes]] = {}
        """Payload of the first transaction, by lock and partition."""

    def note(self, partition: int, batch: AppendBatch) -> None:
        writes = np.flatnonzero(batch.lock_modes == int(Mode.WRITE))
        row_of = np.repeat(np.arange(len(batch)), batch.lock_counts)
        ends = np.cumsum(batch.lengths)
        for at in writes.tolist():
            places = self._payloads.setdefault(int(batch.lock_ids[at]), {})
            if partition not in places:
                row = int(row_of[at])
                payload = memoryview(batch.payloads)[int(ends[row] - batch.lengths[row]) : int(ends[row])]
                places[partition] = bytes(payload[:EXCERPT_BYTES])

    def in_several(self) -> list[str]:
        """Return a sentence for each lock that was sent to several partitions; locks of event stores (`waltzd.dcb`) are
        left out, because a store for each tenant has the same ones."""
        return [
            f"the lock {lock:016x} was written in several partitions, and locks hold within one partition only: "
            + ", ".join(f"in partition {partition} by {payload!r}" for partition, payload in sorted(places.items()))
            for lock, places in self._payloads.items()
            if len(places) > 1 and lock >> 64 - NAMESPACE_BITS != namespace_of(EVENTS)
        ]


@dataclass
class InjectedFaults:
    """Faults to inject: their number, by partition."""

    lock_failures: dict[int, int] = field(default_factory=dict)
    lost_answers: dict[int, int] = field(default_factory=dict)
    is_feed_suspended: bool = False
    written: WrittenLocks = field(default_factory=WrittenLocks)

    @staticmethod
    def strikes(bad: dict[int, int], partition: int) -> bool:
        left = bad.get(partition, 0)
        if left:
            bad[partition] = left - 1
        return left > 0


class ServerEndpoint:
    """Entry to one server while it runs. `slam` breaks every connection at once."""

    def __init__(
        self, address: str, calls: ServerCalls, luck: InjectedFaults, on_fatal: Callable[[BaseException], None]
    ) -> None:
        self.address = address
        self.luck = luck
        self.is_shut = False
        self._calls = calls
        self._on_fatal = on_fatal
        self._streams: dict[DirectStream[Any, Any], asyncio.Task[None]] = {}

    @property
    def calls(self) -> ServerCalls:
        if self.is_shut:
            raise CannotConnect(f"no server listens at {self.address}")
        return self._calls

    def serve(self, stream: DirectStream[Any, Any]) -> None:
        task = asyncio.create_task(self._serve(stream), name=f"{stream.what} at {self.address}")
        self._streams[stream] = task
        task.add_done_callback(lambda _: self._streams.pop(stream))

    async def _serve(self, stream: DirectStream[Any, Any]) -> None:
        try:
            await stream.serve(self.calls)
        except WaltzError:
            return  # the stream has reported it to the client
        except Exception as error:
            self._on_fatal(error)
            raise
        finally:
            stream.link.end()

    def give_up(self, stream: DirectStream[Any, Any]) -> None:
        if stream in self._streams:
            self._streams[stream].cancel()

    def look(self) -> None:
        """Apply changed faults to the streams."""
        for stream in self._streams:
            stream.link.signal.notify()

    def break_connections(self, partition: int | None = None) -> None:
        for stream in list(self._streams):
            if partition is None or stream.partition == partition:
                stream.break_off()

    async def slam(self) -> None:
        self.is_shut = True
        tasks = list(self._streams.values())
        self.break_connections()
        await asyncio.gather(*tasks, return_exceptions=True)


class ServerPort(LocalTransport, Servers):
    """Port to a server for a client on any event loop: calls run on the loop of the cluster. The door is looked up at
    each call, because the server may have restarted."""

    def __init__(
        self,
        find: Callable[[], ServerEndpoint],
        key: UUID | None,
        address: str,
        identity: Identity | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Create a port. `identity` is what a certificate would tell of the caller. `loop` is that of the cluster; None
        for that of the caller."""
        LocalTransport.__init__(self, Origin(identity))
        Servers.__init__(self, key)
        self.address = address
        self._find = find
        self._loop = loop

    async def _reach(self) -> Host:
        await asyncio.sleep(0)
        return LogService(self._find().calls)

    async def _pass(self) -> None:
        """Let an answer come back at once: outcomes are lost by streams only."""

    async def _ask(self, call: Call[R], request: Any, seconds: float | None = None) -> R:
        return await on_loop(self._loop, super()._ask(call, request))

    async def _each(self, call: Call[R], request: Any) -> AsyncGenerator[R, None]:
        values = super()._each(call, request)

        async def next_value() -> R | None:
            return await anext(values, None)

        try:
            while (value := await on_loop(self._loop, next_value())) is not None:
                yield value
        finally:
            await on_loop(self._loop, _close(values))

    def expect(self, name: str | None, streams: str = "") -> None:
        """Ignore the name of the server: there are no certificates here."""

    def mount(self) -> DirectMount:
        return DirectMount(self._find, self._origin.uri, self._loop)

    def attend(self) -> DirectAttend:
        return DirectAttend(self._find, self._origin.uri, self._loop)

    async def close(self) -> None:
        await asyncio.sleep(0)


async def _close(values: AsyncGenerator[Any, None]) -> None:
    await values.aclose()


class DirectStream(Generic[Up, Down]):
    """One stream, as the client holds it, on any event loop. `link` is the end of the server."""

    what = "a stream"

    def __init__(
        self, find: Callable[[], ServerEndpoint], identity: str = "", loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """Create a stream; `loop` is that of the server, None for that of the client."""
        self._loop = loop
        self.partition = -1
        self.link: _Link[Up, Down] = _Link(identity)
        self._find = find
        self._door: ServerEndpoint | None = None
        self._broken: WaltzError | None = None

    async def serve(self, calls: ServerCalls) -> None:
        """Serve the stream at the server."""
        raise AssertionError("a stream is of some kind")

    # -- as the client uses it

    async def send(self, frames: Sequence[Up]) -> None:
        await on_loop(self._loop, self._send(frames))

    async def receive(self) -> Sequence[Down] | None:
        return await on_loop(self._loop, self._receive())

    def cancel(self) -> None:
        if self._loop is None or self._loop is asyncio.get_running_loop():
            self._give_up()
        else:
            self._loop.call_soon_threadsafe(self._give_up)

    async def _send(self, frames: Sequence[Up]) -> None:
        if self._broken is not None:
            raise self._broken
        if self._door is None:
            self._begin(frames)
        for message in self._unlucky(frames):
            await self.link.put(message)

    def _begin(self, frames: Sequence[Up]) -> None:
        match frames:
            case [MountRequest(partition=partition) | JoinRequest(partition=partition)]:
                self.partition = partition
        door = self._find()
        door.calls.locate(self.link.identity)  # raises when no server is there
        self._door = door
        door.serve(self)

    async def _receive(self) -> Sequence[Down] | None:
        while True:
            if self._broken is not None:
                raise self._broken
            held = self._released()
            if held:
                return held
            message = self.link.next_message()
            if message is None:
                if self.link.is_over:
                    return None
                await self.link.signal.wait(self.link.signal.version)
                continue
            frames = self._what_arrives(message)
            if frames:
                return frames

    def _give_up(self) -> None:
        self._broken = self._broken or CannotConnect(f"{self.what} was cancelled by the client")
        self.link.end()
        if self._door is not None:
            self._door.give_up(self)

    # -- faults

    def break_off(self) -> None:
        """Break the stream, as when a cable is cut: what is in flight is lost in both directions."""
        assert self._door is not None
        self._broken = CannotConnect(f"the connection to {self._door.address} was lost")
        self.link.end()
        self._door.give_up(self)

    def _released(self) -> Sequence[Down]:
        """Return what was held back and may go on now."""
        return ()

    def _what_arrives(self, message: Sequence[Down]) -> Sequence[Down]:
        return message

    def _unlucky(self, frames: Sequence[Up]) -> Iterable[Sequence[Up]]:
        """Return what arrives at the server of frames that were sent together."""
        return (frames,)


class DirectAttend(DirectStream[MemberFrame, DeliveryFrame]):
    """Stream of a member of a consumer group."""

    what = "the stream of a member"

    async def serve(self, calls: ServerCalls) -> None:
        await calls.attend(self.link)


class DirectMount(DirectStream[ClientFrame, ServerFrame]):
    """Stream of one mount."""

    what = "the mount"

    def __init__(
        self, find: Callable[[], ServerEndpoint], identity: str = "", loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        super().__init__(find, identity, loop)
        self._held: deque[ServerFrame] = deque()
        """Feed that is held back; the credit of the client bounds it."""

    async def serve(self, calls: ServerCalls) -> None:
        await calls.mount(self.link)

    @property
    def may_post(self) -> bool:
        return False

    def post(self, frames: Sequence[ClientFrame]) -> None:
        raise AssertionError("`post` was called although `may_post` is False")

    def hear(self, taker: Callable[[Sequence[ServerFrame]], None]) -> None:
        """Do nothing: in this transport the client fetches each frame itself."""

    @property
    def _is_suspended(self) -> bool:
        return self._door is not None and self._door.luck.is_feed_suspended

    def _released(self) -> Sequence[ServerFrame]:
        return [self._held.popleft()] if self._held and not self._is_suspended else ()

    def _what_arrives(self, message: Sequence[ServerFrame]) -> list[ServerFrame]:
        assert self._door is not None
        luck = self._door.luck
        if any(isinstance(frame, Committals) for frame in message) and luck.strikes(luck.lost_answers, self.partition):
            self.break_off()
            assert self._broken is not None
            raise self._broken
        feeds = [frame for frame in message if isinstance(frame, Feed | HeadFeed)]
        if not feeds or not (luck.is_feed_suspended or self._held):
            return list(message)
        self._held.extend(feeds)
        return [frame for frame in message if not isinstance(frame, Feed | HeadFeed)]

    def _unlucky(self, frames: Sequence[ClientFrame]) -> Iterator[Sequence[ClientFrame]]:
        """Return the frames; if a lock is to fail, without the atomic append that has the lock."""
        assert self._door is not None
        luck = self._door.luck
        for number, frame in enumerate(frames):
            if isinstance(frame, AppendBatch):
                luck.written.note(self.partition, frame)
            row = first_checked(frame) if isinstance(frame, AppendBatch) else None
            if row is None or not luck.strikes(luck.lock_failures, self.partition):
                continue
            assert isinstance(frame, AppendBatch)
            start, stop = group_around(frame, row)
            before = [*frames[:number], *([rows(frame, 0, start)] if start > 0 else [])]
            if before:
                yield before
            self.link.answer(_refusal(frame, row, start, stop))
            behind = [*([rows(frame, stop, len(frame))] if stop < len(frame) else []), *frames[number + 1 :]]
            if behind:
                yield behind
            return
        yield frames


class _Link(Generic[Up, Down]):
    """End of a stream at the server, and what is in flight between both ends."""

    def __init__(self, identity: str) -> None:
        self.peer = "a client in this process"
        self.identity = identity
        self.quiet_seconds = None
        self.takes_singles = False
        self.signal = ChangeSignal()
        self.is_over = False
        self._up: deque[Sequence[Up]] = deque()
        self._down: deque[Sequence[Down]] = deque()

    async def receive(self) -> Sequence[Up] | None:
        while not self._up:
            if self.is_over:
                return None
            await self.signal.wait(self.signal.version)
        message = self._up.popleft()
        self.signal.notify()
        return message

    def hear_singles(self, taker: Callable[[SingleAppend], bool]) -> None:
        """Ignore the taker: all frames are received."""

    async def send(self, frames: Sequence[Down]) -> None:
        while len(self._down) >= MESSAGES_MAX and not self.is_over:
            await self.signal.wait(self.signal.version)
        if self.is_over:
            raise CannotConnect("the client has gone")
        self.post(frames)

    @property
    def may_post(self) -> bool:
        return len(self._down) < MESSAGES_MAX and not self.is_over

    def post(self, frames: Sequence[Down]) -> None:
        self._down.append(list(frames))
        self.signal.notify()

    async def put(self, message: Sequence[Up]) -> None:
        while len(self._up) >= MESSAGES_MAX and not self.is_over:
            await self.signal.wait(self.signal.version)
        if self.is_over:
            raise CannotConnect("the server has ended the stream")
        self._up.append(message)
        self.signal.notify()

    def answer(self, frame: Down) -> None:
        """Insert a frame that the server did not send."""
        self._down.append([frame])
        self.signal.notify()

    def next_message(self) -> Sequence[Down] | None:
        if not self._down:
            return None
        message = self._down.popleft()
        self.signal.notify()
        return message

    def end(self) -> None:
        self.is_over = True
        self.signal.notify()


# -- batches taken apart -----------------------------------------------------------------------------------------------


def first_checked(batch: AppendBatch) -> int | None:
    """Return the first transaction with a lock that can fail."""
    ends = np.cumsum(batch.lock_counts)
    checked = np.flatnonzero(batch.lock_modes != int(Mode.APPEND))
    return int(np.searchsorted(ends, checked[0], side="right")) if len(checked) else None


def group_around(batch: AppendBatch, row: int) -> tuple[int, int]:
    """Return the first row of the atomic append that has this row, and the row after its last."""
    starts = range(len(batch)) if batch.follows is None else np.flatnonzero(~batch.follows).tolist()
    return max(at for at in starts if at <= row), min((at for at in starts if at > row), default=len(batch))


def rows(batch: AppendBatch, start: int, stop: int) -> AppendBatch:
    data = np.concatenate([[0], np.cumsum(batch.lengths)])
    locks = np.concatenate([[0], np.cumsum(batch.lock_counts)])
    of_locks = slice(int(locks[start]), int(locks[stop]))
    return AppendBatch(
        first_sequence=batch.first_sequence + start,
        marks=batch.marks[start:stop],
        headers=batch.headers[start:stop],
        lengths=batch.lengths[start:stop],
        data_crcs=batch.data_crcs[start:stop],
        lock_counts=batch.lock_counts[start:stop],
        lock_ids=batch.lock_ids[of_locks],
        lock_modes=batch.lock_modes[of_locks],
        payloads=memoryview(batch.payloads)[int(data[start]) : int(data[stop])],
        follows=None if batch.follows is None else batch.follows[start:stop],
        seen_time=batch.seen_time,
    )


def _refusal(batch: AppendBatch, row: int, start: int, stop: int) -> Refusals:
    """Return a rejection as if the lock table did not reach back far enough, which may happen to any client. It names
    the lock of this row, and rejects the atomic append that begins with `start`."""
    locks = np.concatenate([[0], np.cumsum(batch.lock_counts)])
    modes = batch.lock_modes[int(locks[row]) : int(locks[row + 1])]
    lock = int(locks[row]) + int(np.flatnonzero(modes != int(Mode.APPEND))[0])
    count = stop - start
    return Refusals(
        sequences=np.arange(batch.first_sequence + start, batch.first_sequence + stop),
        reasons=np.full(count, int(Reason.TOO_FAR_BEHIND), np.uint8),
        conflict_ids=np.repeat(batch.marks[row], count),
        locks=np.repeat(batch.lock_ids[lock], count),
    )
