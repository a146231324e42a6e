"""What is said on the streams of a storage, as bytes: who calls, records, marks, pieces of files, and why a stream ends."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from uuid import UUID

from waltzd.buffer import Buffer
from waltzd.checksum import crc32
from waltzd.errors import BadFrame, WaltzError
from waltzd.link import Frame, run_of
from waltzd.messages import packed_error, unpacked_error
from waltzd.record import Run

VERSION = 1
_HELLO = struct.Struct(">B16siqq64s")
_RECORDS = struct.Struct(">qqI")
_MARK = struct.Struct(">q")
_FILE = struct.Struct(">qq")
_PIECE = struct.Struct(">qI")
_WHOLE = struct.Struct(">q")
FIRST_BYTES_MAX = _HELLO.size + _FILE.size
"""Of the frame that a stream begins with."""
PIECE_BYTES = 500 << 10
"""Of a segment file at once. Two of them and what belongs to them are not more than a connection takes in before it stops
reading: whoever stops reading gives no sign of life."""
PIECES_AHEAD = 2
"""So many may be on their way before the receiver has taken the first."""


@dataclass(frozen=True)
class Hello:
    key: UUID
    partition: int
    session: int
    contact: int = 0
    """Of the answer to `Open`; 0: the present one, whichever it is."""
    storage: str = ""
    """The name of the storage that is meant; empty where the caller does not know it."""

    def encode(self) -> bytes:
        name = self.storage.encode("ascii")
        return _HELLO.pack(VERSION, self.key.bytes, self.partition, self.session, self.contact, name)

    @staticmethod
    def decode(content: Buffer) -> Hello:
        if len(content) != _HELLO.size:
            raise BadFrame(f"a stream begins with {len(content)} bytes; {_HELLO.size} say who calls")
        version, key, partition, session, contact, storage = _HELLO.unpack(content)
        if version != VERSION:
            raise BadFrame(f"a stream of version {version}; this storage knows {VERSION}")
        if not storage.isascii():
            raise BadFrame("a stream begins with a name that is none")
        return Hello(UUID(bytes=key), partition, session, contact, storage.rstrip(b"\0").decode("ascii"))


@dataclass(frozen=True)
class FileHello:
    """Who calls, for which segment file."""

    hello: Hello
    first_id: int
    file_bytes: int = 0
    """How large a file that comes will be; 0 where the sender does not know."""

    def encode(self) -> bytes:
        return self.hello.encode() + _FILE.pack(self.first_id, self.file_bytes)

    @staticmethod
    def decode(content: Buffer) -> FileHello:
        if len(content) != FIRST_BYTES_MAX:
            raise BadFrame(f"a stream begins with {len(content)} bytes; {FIRST_BYTES_MAX} say which file is meant")
        view = memoryview(content)
        first_id, file_bytes = _FILE.unpack(view[_HELLO.size :])
        if first_id < 0 or file_bytes < 0:
            raise BadFrame(f"no segment file begins at the id {first_id} and has {file_bytes} bytes")
        return FileHello(Hello.decode(view[: _HELLO.size]), first_id, file_bytes)


def records_parts(run: Run, committed: int) -> list[Buffer]:
    return [_RECORDS.pack(run.first_id, committed, len(run)), run.sent_lengths, run.data]


def records_of(content: Buffer) -> Frame:
    if len(content) < _RECORDS.size:
        raise BadFrame(f"a frame of records has {len(content)} bytes; its head alone has {_RECORDS.size}")
    first_id, committed, count = _RECORDS.unpack_from(content)
    view = memoryview(content)
    behind = _RECORDS.size + 4 * count
    if behind > len(content):
        raise BadFrame(f"a frame says that it has {count} records, and has {len(content)} bytes")
    return Frame(run_of(first_id, view[_RECORDS.size : behind], view[behind:]), committed)


def mark_bytes(mark: int) -> bytes:
    return _MARK.pack(mark)


def mark_of(content: Buffer) -> int:
    if len(content) != _MARK.size:
        raise BadFrame(f"a mark has {len(content)} bytes")
    return int(_MARK.unpack(content)[0])


def refusal_bytes(error: WaltzError) -> bytes:
    return packed_error(error)


def refusal_of(content: Buffer) -> WaltzError:
    return unpacked_error(bytes(content))


def piece_parts(offset: int, data: Buffer) -> list[Buffer]:
    return [_PIECE.pack(offset, crc32(data)), data]


def piece_of(content: Buffer, offset: int) -> memoryview:
    """The bytes that stand at this offset of the file. Refuses those that were damaged on the way."""
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
