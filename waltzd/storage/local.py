"""A storage in the same process, as the owners of partitions see it: the calls of a `ReplicaPort`, without a network.

For tests, for the simulator and for the cluster that applications test with. Appends go through a pair of bounded queues
in the place of a connection; a `gate` can stand in for the network: it is awaited before anything passes in either
direction, and what it raises is what the caller sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias
from uuid import UUID

from waltzd.errors import CannotConnect, WaltzError
from waltzd.link import Frame
from waltzd.record import Run
from waltzd.replica import ReplicaStatus
from waltzd.storage.keeper import Keeper

Gate: TypeAlias = Callable[[], Awaitable[None]]
FRAMES_IN_FLIGHT = 64


async def _open_gate() -> None:
    return None


class LocalStorage:
    """A `ReplicaPort`."""

    def __init__(self, keeper: Keeper, key: UUID, *, gate: Gate = _open_gate) -> None:
        self._keeper = keeper
        self._key = key
        self._gate = gate

    async def _enter(self) -> None:
        await self._gate()
        self._keeper.check_key(self._key)

    async def open(self, partition: int, session: int, *, partitions: int, seconds: float | None = None) -> ReplicaStatus:
        await self._enter()
        status = await self._keeper.open_session(partition, session, partitions)
        await self._gate()
        return status

    async def set_low_mark(self, partition: int, session: int, mark: int) -> ReplicaStatus:
        await self._enter()
        status = await self._keeper.set_low_mark(partition, session, mark)
        await self._gate()
        return status

    async def truncate(self, partition: int, session: int, mark: int) -> ReplicaStatus:
        await self._enter()
        status = await self._keeper.truncate(partition, session, mark)
        await self._gate()
        return status

    def append(self, partition: int, session: int) -> LocalStream:
        return LocalStream(self, partition, session)

    async def read(
        self, partition: int, first_id: int, last_id: int | None = None, *, session: int | None = None, frame_bytes: int = 0
    ) -> AsyncIterator[Run]:
        await self._enter()
        async for run in self._keeper.read(partition, session, first_id, last_id, frame_bytes):
            await self._gate()
            yield run

    async def segments(self, partition: int, *, session: int | None = None) -> list[tuple[int, int, int]]:
        await self._enter()
        return self._keeper.segments(partition, session)

    async def fetch_segment(
        self, partition: int, first_id: int, *, offset: int = 0, session: int | None = None
    ) -> AsyncIterator[bytes]:
        await self._enter()
        async for piece in self._keeper.fetch_segment(partition, session, first_id, offset):
            await self._gate()
            yield piece.data

    async def install_segment(
        self, partition: int, session: int, first_id: int, file_bytes: int, pieces: AsyncIterator[bytes]
    ) -> ReplicaStatus:
        await self._enter()
        status = await self._keeper.install_segment(partition, session, first_id, file_bytes, pieces)
        await self._gate()
        return status

    async def close(self) -> None:
        return None

    async def serve(self, partition: int, session: int, stream: LocalStream) -> None:
        await self._enter()
        await self._keeper.append(partition, session, stream.far_end)


class LocalStream:
    """An `AppendPort`; `far_end` is the storage's end of it."""

    def __init__(self, storage: LocalStorage, partition: int, session: int) -> None:
        self._storage = storage
        self._gate = storage._gate
        self._partition = partition
        self._session = session
        self._frames: asyncio.Queue[Frame | None] = asyncio.Queue(FRAMES_IN_FLIGHT)
        self._marks: asyncio.Queue[int | WaltzError | None] = asyncio.Queue()
        self._refusal: WaltzError | None = None
        self._serving: asyncio.Task[None] | None = None
        self.far_end = _FarEnd(self._frames, self._marks, self._gate)

    async def start(self) -> None:
        await self._gate()
        if self._serving is None:
            self._serving = asyncio.create_task(self._storage.serve(self._partition, self._session, self))
            self._serving.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, WaltzError):
            raise error
        self._marks.put_nowait(error)

    async def send(self, run: Run, committed: int) -> None:
        await self.start()
        await self._gate()
        if self._refusal is not None:
            raise self._refusal
        await self._frames.put(Frame(run, committed))

    async def receive(self) -> int | None:
        if self._refusal is not None:
            raise self._refusal
        mark = await self._marks.get()
        await self._gate()
        if isinstance(mark, WaltzError):
            self._refusal = mark
            raise mark
        return mark

    async def finish(self) -> None:
        await self.start()
        await self._frames.put(None)

    def cancel(self) -> None:
        self._refusal = self._refusal or CannotConnect("the stream was cancelled")
        if self._serving is not None:
            self._serving.cancel()


class _FarEnd:
    """A `link.Link`."""

    peer = "local"

    def __init__(
        self, frames: asyncio.Queue[Frame | None], marks: asyncio.Queue[int | WaltzError | None], gate: Gate
    ) -> None:
        self._frames = frames
        self._marks = marks
        self._gate = gate

    async def receive(self) -> Frame | None:
        return await self._frames.get()

    async def send(self, durable_id: int) -> None:
        await self._gate()
        self._marks.put_nowait(durable_id)

    async def refuse(self, error: WaltzError) -> None:
        self._marks.put_nowait(error)
