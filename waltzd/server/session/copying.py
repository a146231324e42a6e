"""Records from one replica to another, through the owner: sealed segments as files, the rest as records.

The bytes are never taken apart and no checksum is made anew: what the source gave is checked on its way in and checked
again by the storage that gets it. What is in memory at once is one piece. A source that fails is told apart from a target
that fails: with another source the copy goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TypeVar

from waltzd.disk.seam import Buffer
from waltzd.errors import CannotConnect, ForeignCluster, TooLarge, UnfitSegment, WaltzError
from waltzd.format.record import Run
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.peers import AppendPort, ReplicaPort

T = TypeVar("T")
SIZE_NOT_KNOWN = 0
PAUSE_SECONDS = 0.25
"""The bound is looked at again so often: it may have been lifted in the middle of a long pause."""


class SourceFailed(Exception):
    """The replica that was read from failed, not the one that was written to."""

    def __init__(self, error: WaltzError) -> None:
        super().__init__(str(error))
        self.error = error


async def timely(things: AsyncIterator[T], seconds: float, who: str) -> AsyncGenerator[T, None]:
    """The same things; `who` has failed when the next one takes too long."""
    iterator = aiter(things)
    try:
        while True:
            try:
                async with asyncio.timeout(seconds):
                    thing = await anext(iterator)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise CannotConnect(f"{who} sent nothing for {seconds:.0f} seconds") from None
            yield thing
    finally:
        if isinstance(iterator, AsyncGenerator):
            await iterator.aclose()


class Copier:
    """Copies to one replica in one session. `copied` is told how far the replica has it on disk."""

    def __init__(
        self,
        target: ReplicaPort,
        *,
        partition: int,
        session: int,
        source: Callable[[str], ReplicaPort],
        committed: Callable[[], int],
        copied: Callable[[int], None],
        header: Callable[[int], bytes],
        seconds: float,
        bytes_per_second: Callable[[], int],
    ) -> None:
        self._target = target
        self._partition = partition
        self._session = session
        self._source = source
        self._committed = committed
        self._copied = copied
        self._header = header
        self._seconds = seconds
        self._bytes_per_second = bytes_per_second
        self._sent = -1
        """The last id that the target owes us a mark for."""

    async def copy(self, first_id: int, last_id: int, source: str) -> None:
        """The ids `first_id` to `last_id`."""
        segments = {first: (last, size) for first, last, size in await self._segments(source) if last <= last_id}
        while first_id <= last_id:
            if first_id in segments:
                last, size = segments[first_id]
                try:
                    await self._install(first_id, size, self._file(source, first_id))
                except (UnfitSegment, TooLarge, ForeignCluster):
                    # Record by record the source looks at what it gives: if its file is damaged, it learns of it.
                    await self._append(self._records(source, first_id, last), last)
            else:
                last = min([last_id, *(first - 1 for first in segments if first > first_id)])
                await self._append(self._records(source, first_id, last), last)
            self._copied(last)
            first_id = last + 1

    async def heal(self, segment: int, last_id: int, sources: tuple[str, ...]) -> ReplicaStatus:
        """Replace one damaged segment by what the first source that can gives, up to `last_id`. It is made anew from
        records: segments need not end at the same ids on every storage."""
        ends = {first: last for first, last, _ in await self._target.segments(self._partition, session=self._session)}
        last_id = min(last_id, ends.get(segment, last_id))
        failed: SourceFailed | None = None
        for source in sources:
            try:
                return await self._install(segment, SIZE_NOT_KNOWN, self._segment(source, segment, last_id))
            except SourceFailed as error:
                failed = error
        assert failed is not None
        raise CannotConnect(f"the damaged segment {segment} could not be replaced: {failed.error.message}") from failed

    async def _segment(self, source: str, first_id: int, last_id: int) -> AsyncIterator[Buffer]:
        yield self._header(first_id)
        async for run in self._records(source, first_id, last_id):
            yield run.data
            await self._throttle(len(run.data))

    async def _install(self, first_id: int, size: int, pieces: AsyncIterator[Buffer]) -> ReplicaStatus:
        return await self._target.install_segment(self._partition, self._session, first_id, size, pieces)

    async def _append(self, runs: AsyncIterator[Run], last_id: int) -> None:
        stream = self._target.append(self._partition, self._session)
        self._sent = -1
        sending = asyncio.create_task(self._send(stream, runs))
        receiving = asyncio.create_task(self._receive(stream, last_id))
        try:
            await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_EXCEPTION)
        finally:
            stream.cancel()
            sending.cancel()
            receiving.cancel()
            ends = await asyncio.gather(sending, receiving, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _send(self, stream: AppendPort, runs: AsyncIterator[Run]) -> None:
        async for run in runs:
            await stream.send(run, self._committed())
            self._sent = run.last_id
            await self._throttle(len(run.data))

    async def _receive(self, stream: AppendPort, last_id: int) -> None:
        held = -1
        while True:
            is_owed = self._sent > held
            try:
                async with asyncio.timeout(self._seconds):
                    mark = await stream.receive()
            except TimeoutError:
                if not is_owed:  # nothing was sent: the bound makes us pause, or the source is slow
                    continue
                raise CannotConnect(f"a copy was not acknowledged for {self._seconds:.0f} seconds") from None
            if mark is None:
                raise CannotConnect("the storage ended the stream of a copy")
            held = mark
            self._copied(mark)
            if mark >= last_id:
                return

    async def _throttle(self, size: int) -> None:
        left = float(size)
        while left >= 1 and (rate := self._bytes_per_second()):
            seconds = min(left / rate, PAUSE_SECONDS)
            await asyncio.sleep(seconds)
            left -= seconds * rate

    # -- what the source gives

    async def _segments(self, source: str) -> list[tuple[int, int, int]]:
        try:
            return await self._source(source).segments(self._partition, session=self._session)
        except WaltzError as error:
            raise SourceFailed(error) from error

    async def _records(self, source: str, first_id: int, last_id: int) -> AsyncIterator[Run]:
        # While a pause for the bound lasts nothing is acknowledged, so no frame may be worth more than a moment of it.
        rate = self._bytes_per_second()
        frame_bytes = max(1, rate // 4) if rate else 0
        try:
            port = self._source(source)
            runs = port.read(self._partition, first_id, last_id, session=self._session, frame_bytes=frame_bytes)
            async for run in timely(runs, self._seconds, source):
                yield run
        except WaltzError as error:
            raise SourceFailed(error) from error

    async def _file(self, source: str, first_id: int) -> AsyncIterator[Buffer]:
        try:
            pieces = self._source(source).fetch_segment(self._partition, first_id, session=self._session)
            async for piece in timely(pieces, self._seconds, source):
                yield piece
                await self._throttle(len(piece))
        except WaltzError as error:
            raise SourceFailed(error) from error
