"""Segment files over a plain connection, a piece at a time.

Whoever receives gives leave for each piece, so that only a few are in memory at either end however slow one of them is,
and nobody stops reading: who does not read gives no sign of life. The sender of a file hears at once when the other side
wants no more of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from waltzd.buffer import Buffer
from waltzd.errors import BadFrame, CannotConnect
from waltzd.framing import Connection, Kind
from waltzd.stream_frame import PIECE_BYTES, PIECES_AHEAD, check_whole, piece_of, piece_parts, refusal_of, whole_bytes


async def received(connection: Connection) -> AsyncGenerator[Buffer, None]:
    """The bytes of a file, checked. Raises what the sender said, or that it ended early."""
    offset = 0
    for _ in range(PIECES_AHEAD):
        await connection.send(Kind.GO_ON)
    while True:
        match await connection.receive():
            case Kind.PIECE, content:
                piece = piece_of(content, offset)
                offset += len(piece)
                yield piece
                await connection.send(Kind.GO_ON)
            case Kind.WHOLE, content:
                check_whole(content, offset)
                return
            case Kind.REFUSED, content:
                raise refusal_of(content)
            case None:
                raise BadFrame(f"a segment file ended early, at byte {offset}")
            case kind, _:
                raise BadFrame(f"a frame of the kind {kind.name} in the place of a piece of a file")


class FileSender:
    def __init__(self, connection: Connection, *, receiver: str, seconds: float | None = None) -> None:
        """`seconds`: how long the receiver may take for a piece, and for its answer; None for as long as it lives."""
        self._connection = connection
        self._receiver = receiver
        self._seconds = seconds
        self._leave = asyncio.Semaphore(0)

    async def send(self, pieces: AsyncIterator[Buffer]) -> tuple[Kind, Buffer] | None:
        """The receiver's last frame, which may come before all was sent; None when it has closed the connection. The
        first piece is asked for when the receiver has given leave. What is wrong with the pieces is raised as it is."""
        listening = asyncio.create_task(self._listen())
        sending = asyncio.create_task(self._send(pieces))
        try:
            await asyncio.wait((listening, sending), return_when=asyncio.FIRST_COMPLETED)
            if not listening.done():
                sending.result()
                await asyncio.wait((listening,), timeout=self._seconds)
                if not listening.done():
                    raise self._too_slow()
            return listening.result()
        finally:
            listening.cancel()
            sending.cancel()
            await asyncio.gather(listening, sending, return_exceptions=True)

    async def _listen(self) -> tuple[Kind, Buffer] | None:
        while (found := await self._connection.receive()) is not None:
            if found[0] is not Kind.GO_ON:
                return found
            self._leave.release()
        return None

    async def _send(self, pieces: AsyncIterator[Buffer]) -> None:
        offset = 0
        await self._may_go_on()
        async for data in pieces:
            view = memoryview(data)
            for at in range(0, len(view), PIECE_BYTES):
                part = view[at : at + PIECE_BYTES]
                if not await self._put(Kind.PIECE, piece_parts(offset, part)):
                    return
                offset += len(part)
                await self._may_go_on()
        await self._put(Kind.WHOLE, (whole_bytes(offset),))

    async def _put(self, kind: Kind, parts: list[Buffer] | tuple[Buffer, ...]) -> bool:
        """Whether it can be sent. Why not is heard by who listens."""
        try:
            await self._connection.send(kind, parts)
        except CannotConnect:
            return False
        return True

    async def _may_go_on(self) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._leave.acquire()
        except TimeoutError:
            raise self._too_slow() from None

    def _too_slow(self) -> CannotConnect:
        return CannotConnect(f"{self._receiver} did not go on with a segment file for {self._seconds or 0:.0f} seconds")
