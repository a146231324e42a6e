"""Contents of the frames on a storage's streams: appended records, and segment files.

A segment file is sent in pieces. The receiver grants credit for each piece, so only a few are in memory at either end
however slow one of them is. Both ends keep reading, because an end that does not read gives no heartbeat. The sender
notices at once if the receiver refuses the file.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np

from waltzd.disk.seam import Buffer
from waltzd.errors import CannotConnect
from waltzd.errors.operations import BadFrame
from waltzd.format.batch import Batch, parse_batches
from waltzd.format.checksum import I64, crc32
from waltzd.format.record import OVERHEAD_BYTES, Run, bounds_of
from waltzd.protocol.peers import NOBODY, SECRET_BYTES, Contact, RecordsFrame, run_of
from waltzd.wire.codec import unpacked_error
from waltzd.wire.frames import Connection, Kind

VERSION = 2
_HELLO = struct.Struct(f">B16siqq{SECRET_BYTES}s64sqq")
_RECORDS = struct.Struct(">qqI")
_BATCHES = struct.Struct(">qI")
_MARK = struct.Struct(">q")
_PIECE = struct.Struct(">qI")
_WHOLE = struct.Struct(">q")
FIRST_BYTES = _HELLO.size
"""Size of the first frame of a stream."""
PIECE_BYTES = 500 << 10
"""Largest piece of a segment file. Two of them with their heads fit into what a connection receives before it stops
reading, and an end that stops reading gives no heartbeat."""
PIECE_SECONDS = 60.0
"""Seconds of silence after which the sender of a segment file is given up."""
PIECES_AHEAD = 2
"""Number of pieces in flight before the receiver has taken the first."""


@dataclass(frozen=True)
class Hello:
    """First frame of a stream: the caller, and what it asks for."""

    key: UUID
    partition: int
    session: int
    contact: Contact = NOBODY
    storage: str = ""
    """Name of the storage that is meant; empty if the caller does not know it."""
    first_id: int = 0
    """First id of the segment; 0 if the stream is not for a file."""
    file_bytes: int = 0
    """Size of the file to install; 0 if the sender does not know it."""

    def encode(self) -> bytes:
        name = self.storage.encode("ascii")
        return _HELLO.pack(
            VERSION, self.key.bytes, self.partition, self.session, self.contact.number, self.contact.secret, name,
            self.first_id, self.file_bytes,
        )  # fmt: skip

    @staticmethod
    def decode(content: Buffer) -> Hello:
        if len(content) != _HELLO.size:
            raise BadFrame(f"the first frame of a stream has {len(content)} bytes, not {_HELLO.size}")
        version, key, partition, session, number, secret, storage, first_id, file_bytes = _HELLO.unpack(content)
        if version != VERSION:
            raise BadFrame(f"a stream has version {version}; this storage supports {VERSION}")
        if not storage.isascii():
            raise BadFrame("the first frame of a stream has a malformed name")
        if first_id < 0 or file_bytes < 0:
            raise BadFrame(
                f"the first frame of a stream has first id {first_id} and {file_bytes} file bytes; both must be 0 or more"
            )
        name = storage.rstrip(b"\0").decode("ascii")
        return Hello(UUID(bytes=key), partition, session, Contact(number, secret), name, first_id, file_bytes)


def records_parts(run: Run, committed: int) -> list[Buffer]:
    return [_RECORDS.pack(run.first_id, committed, len(run)), run.sent_lengths, run.data]


def batches_parts(batches: Sequence[Batch], committed: int) -> list[Buffer]:
    lengths = [batch.sent_lengths for batch in batches]
    pieces = [piece for batch in batches for piece in batch.pieces]
    return [_BATCHES.pack(committed, sum(map(len, batches))), *lengths, *pieces]


def _split(content: Buffer, head: struct.Struct) -> tuple[tuple[int, ...], memoryview, memoryview]:
    """Split a frame into its head, which ends with a number of records, their lengths and what follows."""
    if len(content) < head.size:
        raise BadFrame(f"a frame of records has {len(content)} bytes; its head alone has {head.size}")
    values = head.unpack_from(content)
    behind = head.size + 4 * values[-1]
    if behind > len(content):
        raise BadFrame(f"a frame announces {values[-1]} records, and has only {len(content)} bytes")
    view = memoryview(content)
    return values, view[head.size : behind], view[behind:]


def batches_of(content: Buffer) -> RecordsFrame:
    (committed, count), lengths, batches = _split(content, _BATCHES)
    if count == 1:
        bounds: I64 | tuple[int, int] = 0, int.from_bytes(lengths, "big") + OVERHEAD_BYTES
    else:
        bounds = bounds_of(np.frombuffer(lengths, ">u4").astype(np.int64))
    found = parse_batches(batches, bounds)
    if sum(map(len, found)) != count:
        raise BadFrame(f"a frame announces {count} records, and its batches have {sum(map(len, found))}")
    return RecordsFrame(found, committed)


def records_of(content: Buffer) -> RecordsFrame:
    (first_id, committed, _), lengths, records = _split(content, _RECORDS)
    return RecordsFrame(run_of(first_id, lengths, records), committed)


def mark_bytes(mark: int) -> bytes:
    return _MARK.pack(mark)


def mark_of(content: Buffer) -> int:
    if len(content) != _MARK.size:
        raise BadFrame(f"a mark has {len(content)} bytes")
    return int(_MARK.unpack(content)[0])


def piece_parts(offset: int, data: Buffer) -> list[Buffer]:
    return [_PIECE.pack(offset, crc32(data)), data]


def piece_of(content: Buffer, offset: int) -> memoryview:
    """Return the bytes of a piece; raise `BadFrame` if it has another offset or fails its checksum."""
    if len(content) <= _PIECE.size:
        raise BadFrame(f"a piece of a segment file has {len(content)} bytes")
    at, crc = _PIECE.unpack_from(content)
    data = memoryview(content)[_PIECE.size :]
    if at != offset or crc32(data) != crc:
        raise BadFrame(f"a segment file was damaged on the way, at byte {offset}")
    return data


def whole_bytes(size: int) -> bytes:
    return _WHOLE.pack(size)


def check_whole(content: Buffer, size: int) -> None:
    if len(content) != _WHOLE.size or _WHOLE.unpack(content)[0] != size:
        raise BadFrame(f"a segment file ended early, at byte {size}")


async def received(connection: Connection) -> AsyncGenerator[Buffer, None]:
    """Yield the verified bytes of a file. Raise the error of the sender, or `BadFrame` if the file ended early."""
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
                raise unpacked_error(content)
            case None:
                raise BadFrame(f"a segment file ended early, at byte {offset}")
            case kind, _:
                raise BadFrame(f"a frame has the kind {kind.name} where a piece of a file is expected")


class FileSender:
    def __init__(self, connection: Connection, *, receiver: str, seconds: float | None = None) -> None:
        """Prepare to send a file. `seconds` bounds each wait for the receiver; None waits as long as it lives."""
        self._connection = connection
        self._receiver = receiver
        self._seconds = seconds
        self._leave = asyncio.Semaphore(0)

    async def send(self, pieces: AsyncIterator[Buffer]) -> tuple[Kind, Buffer] | None:
        """Send a file; return the receiver's last frame, or None if it closed the connection. That frame may arrive
        before everything was sent. The first piece is requested once the receiver has granted credit. Errors of
        `pieces` are raised unchanged."""
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
        """Send a frame; return False if the connection is lost. `_listen` receives the reason."""
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
        return CannotConnect(f"{self._receiver} took nothing of a segment file for {self._seconds or 0:.0f} seconds")


async def timely(pieces: AsyncIterator[Buffer]) -> AsyncIterator[Buffer]:
    """Yield the pieces of a segment file; raise `CannotConnect` if the sender is silent for too long."""
    iterator = aiter(pieces)
    while True:
        try:
            async with asyncio.timeout(PIECE_SECONDS):
                piece = await anext(iterator)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise CannotConnect(
                f"the sender of a segment file was silent for {PIECE_SECONDS:.0f} seconds",
                not_done="nothing of the file was kept",
            ) from None
        yield piece
