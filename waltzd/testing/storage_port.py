"""A storage as a server sees it, within one process: calls are direct, and runs are handed over without a copy.

`pause` makes every call, frame and mark wait; `resume` lets them continue."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any
from uuid import UUID

from waltzd.disk.seam import Buffer
from waltzd.errors import CannotConnect, WaltzError
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.peers import Contact, Content, RecordsFrame
from waltzd.server.session.change_signal import ChangeSignal
from waltzd.storage.calls import StorageCalls
from waltzd.storage.service import ReplicaService
from waltzd.testing.transport import LocalTransport
from waltzd.wire.servicer import Host
from waltzd.wire.storages import Replicas

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
