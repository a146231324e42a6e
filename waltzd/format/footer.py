"""The footer of a sealed segment of format 1: what it holds, where its batches are, and a chain that proves its history.

    0  magic `WZF1`                4     40 first time, µs                      8
    4  batches                     4     48 last time                           8
    8  first id                    8     56 SHA-256 of everything in front     32
    16 last id                     8     88 SHA-256 of the footer before       32
    24 records                     8    120 offset of each batch               4 each
    32 offset of this footer       8        bytes of this footer 4 · CRC-32 of everything before in it 4 · magic `WZFE` 4

All of it follows from the batches and from the footer of the segment before, so it can be made again, and is the same on
each replica. It is written behind the data, never before that is on the disk. The SHA-256 of the footer before is that of
all its bytes, and zeros where the segment in front has none: it is the first one, or of format 0. So one footer proves all
history in front of it. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from waltzd.disk.seam import Buffer, File
from waltzd.format.batch import HEAD_BYTES, Head
from waltzd.format.checksum import I64, crc32
from waltzd.format.layout import HEADER_BYTES
from waltzd.format.record import OVERHEAD_BYTES
from waltzd.format.span import BatchSpan

MAGIC = b"WZF1"
_END_MAGIC = b"WZFE"
_FRONT = struct.Struct(">4sIqqqqqq32s32s")
_END = struct.Struct(">II4s")
FRONT_BYTES = _FRONT.size
END_BYTES = _END.size
HASH_BYTES = 32
NO_HASH = bytes(HASH_BYTES)
assert FRONT_BYTES == 120


@dataclass(frozen=True, kw_only=True, eq=False)
class Footer:
    first_id: int
    last_id: int
    first_time: int
    last_time: int
    offset: int
    """Of the footer: where the data ends."""
    digest: bytes
    """SHA-256 of everything in front."""
    before: bytes
    """SHA-256 of the footer of the segment before."""
    batches: I64
    """The offset of each."""

    @property
    def records(self) -> int:
        return self.last_id - self.first_id + 1

    def encode(self) -> bytes:
        front = _FRONT.pack(
            MAGIC, len(self.batches), self.first_id, self.last_id, self.records, self.offset,
            self.first_time, self.last_time, self.digest, self.before,
        )  # fmt: skip
        body = front + self.batches.astype(">u4").tobytes()
        size = _END.pack(len(body) + END_BYTES, 0, b"")[:4]
        return body + size + crc32(body + size).to_bytes(4, "big") + _END_MAGIC

    @property
    def hash(self) -> bytes:
        """Of this footer, for the one behind."""
        return sha256(self.encode()).digest()

    @staticmethod
    def decode(raw: Buffer) -> Footer | None:
        """From all its bytes; None where they are no sound footer."""
        if len(raw) < FRONT_BYTES + END_BYTES:
            return None
        size, crc, end_magic = _END.unpack_from(raw, len(raw) - END_BYTES)
        view = memoryview(raw)
        if end_magic != _END_MAGIC or size != len(raw) or crc32(view[:-8]) != crc:
            return None
        magic, count, first_id, last_id, records, offset, first_time, last_time, digest, before = _FRONT.unpack_from(raw)
        if magic != MAGIC or size != FRONT_BYTES + 4 * count + END_BYTES or records != last_id - first_id + 1:
            return None
        return Footer(
            first_id=first_id, last_id=last_id, first_time=first_time, last_time=last_time, offset=offset, digest=digest,
            before=before, batches=np.frombuffer(view[FRONT_BYTES : FRONT_BYTES + 4 * count], ">u4").astype(np.int64),
        )  # fmt: skip


def footer_bytes(end: Buffer) -> int | None:
    """How many bytes the footer has whose last `END_BYTES` these are; None where no footer ends so."""
    if len(end) != END_BYTES:
        return None
    size, _, end_magic = _END.unpack(end)
    return size if end_magic == _END_MAGIC and size >= FRONT_BYTES + END_BYTES else None


class FooterBuilder:
    """A footer in the making: given the bytes of its segment, in their order."""

    def __init__(self, header: Buffer, *, is_hashing: bool = True) -> None:
        """`is_hashing`: False leaves the digest out, for who has it from elsewhere or does without."""
        self._hash = sha256(header)
        self._is_hashing = is_hashing
        self._offset = len(header)
        self._batches: list[int] = []
        self._first: Head | None = None
        self._last: Head | None = None

    def add(self, head: Head, pieces: Sequence[Buffer]) -> None:
        """The next batch, and all its bytes."""
        self._batches.append(self._offset)
        self._first, self._last = self._first or head, head
        for piece in pieces:
            self._hash.update(piece)
            self._offset += len(piece)

    def add_span(self, span: BatchSpan) -> None:
        """The next batches."""
        count = span.count
        self._batches += (span.at[:count] + span.offset).tolist()
        self._first, self._last = self._first or span.head_of(0), span.head_of(count - 1)
        if self._is_hashing:
            self._hash.update(span.bytes)
        self._offset += len(span.bytes)

    @property
    def offset(self) -> int:
        """Where the next batch would begin, or the footer."""
        return self._offset

    def footer(self, before: bytes) -> Footer:
        assert self._first is not None
        assert self._last is not None
        return Footer(
            first_id=self._first.first_id, last_id=self._last.last_id, first_time=self._first.time,
            last_time=self._last.time, offset=self._offset, digest=self._hash.digest(), before=before,
            batches=np.array(self._batches, np.int64),
        )  # fmt: skip


def footer_at(file: File, offset: int, end: int) -> Footer | None:
    """The footer that fills the bytes from `offset` to `end`; None where they are no sound one of this place."""
    size = end - offset
    if not FRONT_BYTES + END_BYTES <= size <= FRONT_BYTES + END_BYTES + offset:
        return None
    found = Footer.decode(file.read(offset, size))
    return found if found is not None and found.offset == offset and _has_places(found) else None


def _has_places(footer: Footer) -> bool:
    """The batches follow each other, and each has room for one record."""
    ends = np.append(footer.batches, footer.offset)
    return len(ends) > 1 and ends[0] == HEADER_BYTES and bool((np.diff(ends) >= HEAD_BYTES + OVERHEAD_BYTES).all())


def read_footer(file: File) -> Footer | None:
    """By the end of the file: of a segment that is not read. None where no sound footer stands there."""
    end = file.size()
    size = footer_bytes(file.read(max(0, end - END_BYTES), END_BYTES))
    return None if size is None or size > end - HEADER_BYTES else footer_at(file, end - size, end)
