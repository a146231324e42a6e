"""Records from one replica to another, through the owner: sealed segments as files, other records as runs or whole
batches.

The bytes are copied as they are, with their checksums: they are checked when they arrive here, and again by the storage
that receives them. One piece is in memory at a time. A failure of the source is distinguished from a failure of the
target: with another source the copy continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeVar
from uuid import UUID

from waltzd.disk.seam import Buffer
from waltzd.errors import CannotConnect, ForeignCluster, TooLarge, WaltzError
from waltzd.errors.operations import BadFrame, UnfitSegment
from waltzd.format.batch import Batch, Piece
from waltzd.format.layout import BATCHES, VERSION, FileHeader
from waltzd.format.record import Run
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.protocol.peers import AppendPort, Content, ReplicaPort, runs_of

T = TypeVar("T")
SIZE_NOT_KNOWN = 0
PAUSE_SECONDS = 0.25
"""Interval in which the rate limit is read again, since it may be lifted during a long pause."""
FRAME_BYTES = 1 << 20
"""Bytes of batches in one message to a storage, unless one batch is larger."""


class SourceFailed(Exception):
    """A failure of the replica that was read from, not of the one that was written to."""

    def __init__(self, error: WaltzError) -> None:
        super().__init__(str(error))
        self.error = error


async def timely(things: AsyncIterator[T], seconds: float, source: str) -> AsyncGenerator[T, None]:
    """Yield the same items; raise `CannotConnect` for `source` when the next item takes too long."""
    iterator = aiter(things)
    try:
        while True:
            try:
                async with asyncio.timeout(seconds):
                    thing = await anext(iterator)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise CannotConnect(f"{source} sent nothing for {seconds:.0f} seconds") from None
            yield thing
    finally:
        if isinstance(iterator, AsyncGenerator):
            await iterator.aclose()


class Copier:
    """Copies to one replica in one session. `copied` is called with the id up to which the replica has it on disk."""

    def __init__(
        self,
        target: ReplicaPort,
        *,
        partition: int,
        session: int,
        source: Callable[[str], ReplicaPort],
        committed: Callable[[], int],
        copied: Callable[[int], None],
        key: UUID,
        seconds: float,
        bytes_per_second: Callable[[], int],
    ) -> None:
        self._target = target
        self._partition = partition
        self._session = session
        self._source = source
        self._committed = committed
        self._copied = copied
        self._key = key
        self._seconds = seconds
        self._bytes_per_second = bytes_per_second
        self._sent = -1
        """Last id for which the target owes an acknowledgement."""

    async def copy(self, first_id: int, last_id: int, source: str) -> None:
        """Copy the ids `first_id` to `last_id`."""
        segments = {first: (last, size) for first, last, size in await self._segments(source) if last <= last_id}
        while first_id <= last_id:
            if first_id in segments:
                last, size = segments[first_id]
                try:
                    await self._install(first_id, size, self._file(source, first_id))
                except (UnfitSegment, TooLarge, ForeignCluster):
                    # The source checks records that it reads one by one, so it notices that its file is damaged.
                    await self._append(self._records(source, first_id, last), last)
            else:
                last = min([last_id, *(first - 1 for first in segments if first > first_id)])
                await self._append(self._records(source, first_id, last), last)
            self._copied(last)
            first_id = last + 1

    async def heal(self, segment: int, last_id: int, sources: tuple[str, ...]) -> ReplicaStatus:
        """Replace one damaged segment by what the first able source gives, up to `last_id`."""
        ends = {first: last for first, last, _ in await self._target.segments(self._partition, session=self._session)}
        last_id = min(last_id, ends.get(segment, last_id))
        failed: SourceFailed | None = None
        for source in sources:
            try:
                return await self._heal(segment, last_id, source)
            except SourceFailed as error:
                failed = error
        assert failed is not None
        raise CannotConnect(f"the damaged segment {segment} could not be replaced: {failed.error.message}") from failed

    async def _heal(self, segment: int, last_id: int, source: str) -> ReplicaStatus:
        """Replace one damaged segment from one source. A segment of format 1 is the same on every storage. A segment of
        format 0 is built anew from records, because it need not end at the same id everywhere. A replica that lost the
        head of a batch knows one id of it, and needs the whole batch."""
        sealed = {first: (last, size) for first, last, size in await self._segments(source) if last <= last_id}
        async with aclosing(self._pieces(source, segment, last_id, may_exceed=True)) as pieces:
            first = await anext(pieces, None)
            if first is None:
                raise SourceFailed(CannotConnect(f"{source} gave nothing of the segment at id {segment}"))
            if not (isinstance(first, Batch) and segment in sealed):
                return await self._install(segment, SIZE_NOT_KNOWN, self._segment(segment, first, pieces))
        return await self._install(segment, sealed[segment][1], self._file(source, segment))

    async def _segment(self, first_id: int, first: Piece, others: AsyncIterator[Piece]) -> AsyncIterator[Buffer]:
        """Yield a segment file built from pieces of one format; pieces of another format are in another segment. Its time
        is that of its first batch, because there is no clock here, and 0 for records of format 0."""
        milliseconds, version = (first.head.time // 1000, BATCHES) if isinstance(first, Batch) else (0, VERSION)
        yield FileHeader(
            created_ms=milliseconds, key=self._key, partition=self._partition, first_id=first_id, version=version
        ).encode()
        piece: Piece | None = first
        while piece is not None and isinstance(piece, Run) == isinstance(first, Run):
            for data in (piece.data,) if isinstance(piece, Run) else piece.pieces:
                yield data
                await self._throttle(len(data))
            piece = await anext(others, None)

    async def _install(self, first_id: int, size: int, pieces: AsyncIterator[Buffer]) -> ReplicaStatus:
        return await self._target.install_segment(self._partition, self._session, first_id, size, pieces)

    async def _append(self, contents: AsyncIterator[Content], last_id: int) -> None:
        stream = self._target.append(self._partition, self._session)
        self._sent = -1
        sending = asyncio.create_task(self._send(stream, contents))
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

    async def _send(self, stream: AppendPort, contents: AsyncIterator[Content]) -> None:
        async for content in contents:
            await stream.send(content, self._committed())
            self._sent = runs_of(content)[-1].last_id
            await self._throttle(sum(len(run.data) for run in runs_of(content)))

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

    @property
    def _frame_bytes(self) -> int:
        """Limit of a frame under the rate limit, because nothing is acknowledged during a pause; 0 if the source may
        choose."""
        rate = self._bytes_per_second()
        return max(1, rate // 4) if rate else 0

    async def _records(self, source: str, first_id: int, last_id: int) -> AsyncIterator[Content]:
        """Yield runs as they come, and as many batches together as fill a frame."""
        bytes_max = min(self._frame_bytes or FRAME_BYTES, FRAME_BYTES)
        batches: list[Batch] = []
        size = 0
        async for piece in self._pieces(source, first_id, last_id):
            if isinstance(piece, Run):  # runs of format 0 come before all batches
                yield piece
                continue
            size += piece.size
            if batches and size > bytes_max:
                yield tuple(batches)
                batches, size = [], piece.size
            batches.append(piece)
        if batches:
            yield tuple(batches)

    async def _pieces(
        self, source: str, first_id: int, last_id: int, *, may_exceed: bool = False
    ) -> AsyncGenerator[Piece, None]:
        """Yield pieces of the log from one source. `may_exceed`: the batch that holds `last_id` may end after it."""
        at = first_id
        try:
            port, session = self._source(source), self._session
            found = port.read_whole(self._partition, first_id, last_id, session=session, frame_bytes=self._frame_bytes)
            async for piece in timely(found, self._seconds, source):
                if piece.last_id > last_id and not may_exceed:
                    raise BadFrame(f"{source} has a batch of ids {piece.first_id} to {piece.last_id}: {last_id} ends none")
                yield piece
                at = piece.last_id + 1
            if at <= last_id:
                raise CannotConnect(
                    f"{source} gave ids from {first_id} to {at - 1} where those up to {last_id} were asked for"
                )
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
