"""What is said on an append stream, as bytes: who calls, records, marks, and why it ends."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from uuid import UUID

from waltzd.buffer import Buffer
from waltzd.errors import BadFrame, WaltzError
from waltzd.link import Frame, run_of
from waltzd.messages import packed_error, unpacked_error
from waltzd.record import Run

VERSION = 1
_HELLO = struct.Struct(">B16siq")
_RECORDS = struct.Struct(">qqI")
_MARK = struct.Struct(">q")
HELLO_BYTES = _HELLO.size


@dataclass(frozen=True)
class Hello:
    key: UUID
    partition: int
    session: int

    def encode(self) -> bytes:
        return _HELLO.pack(VERSION, self.key.bytes, self.partition, self.session)

    @staticmethod
    def decode(content: Buffer) -> Hello:
        if len(content) != _HELLO.size:
            raise BadFrame(f"a stream begins with {len(content)} bytes; {_HELLO.size} say who calls")
        version, key, partition, session = _HELLO.unpack(content)
        if version != VERSION:
            raise BadFrame(f"a stream of version {version}; this storage knows {VERSION}")
        return Hello(UUID(bytes=key), partition, session)


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
