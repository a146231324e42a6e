"""The footer of a sealed segment of format 1: its ids, times, and batch offsets, and a hash chain over all segments before.

    0  magic `WZF1`                4     40 first time, µs                      8
    4  batches                     4     48 last time                           8
    8  first id                    8     56 SHA-256 of everything in front     32
    16 last id                     8     88 SHA-256 of the footer before       32
    24 records                     8    120 offset of each batch               4 each
    32 offset of this footer       8        bytes of this footer 4 · CRC-32 of everything before in it 4 · magic `WZFE` 4

A footer follows from the batches and from the footer of the segment before, so it can be rebuilt, and is equal on all
replicas. It is written after the data was flushed. The SHA-256 of the footer before covers all bytes of that footer; it is
zero in the first segment of a log, and after a segment of format 0. So one footer proves the whole log before it. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from waltzd.disk.seam import Buffer, Readable
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
    """Offset of the footer in the file, which is the end of the data."""
    digest: bytes
    """SHA-256 of everything in front of the footer in its file."""
    before: bytes
    """SHA-256 of the footer of the segment before; zeros if there is none."""
    batches: I64
    """Offset of each batch."""

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
        """SHA-256 of this footer, which the next footer names."""
        return sha256(self.encode()).digest()

    @staticmethod
    def decode(raw: Buffer) -> Footer | None:
        """Decode all bytes of a footer; return None if they are no sound footer."""
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
    """Return the size of the footer that ends with these `END_BYTES` bytes; None if no footer ends so."""
    if len(end) != END_BYTES:
        return None
    size, _, end_magic = _END.unpack(end)
    return size if end_magic == _END_MAGIC and size >= FRONT_BYTES + END_BYTES else None


class FooterBuilder:
    """Builder of a footer, which takes the header and the batches of a segment in their order."""

    def __init__(self, header: Buffer, *, is_hashing: bool = True) -> None:
        """`is_hashing`: False saves the SHA-256 of batches given to `add_span`; the footer then has a wrong digest."""
        self._hash = sha256(header)
        self._is_hashing = is_hashing
        self._offset = len(header)
        self._batches: list[int] = []
        self._first: Head | None = None
        self._last: Head | None = None

    def add(self, head: Head, pieces: Sequence[Buffer]) -> None:
        """Add the next batch; `pieces` are all its bytes."""
        self._batches.append(self._offset)
        self._first, self._last = self._first or head, head
        for piece in pieces:
            self._hash.update(piece)
            self._offset += len(piece)

    def add_span(self, span: BatchSpan) -> None:
        """Add the next batches."""
        count = span.count
        self._batches += (span.at[:count] + span.offset).tolist()
        self._first, self._last = self._first or span.head_of(0), span.head_of(count - 1)
        if self._is_hashing:
            self._hash.update(span.bytes)
        self._offset += len(span.bytes)

    @property
    def offset(self) -> int:
        """Offset at which the next batch, or the footer, begins."""
        return self._offset

    def footer(self, before: bytes) -> Footer:
        """Return the footer of all batches that were added. `before`: SHA-256 of the footer of the segment before."""
        assert self._first is not None
        assert self._last is not None
        return Footer(
            first_id=self._first.first_id, last_id=self._last.last_id, first_time=self._first.time,
            last_time=self._last.time, offset=self._offset, digest=self._hash.digest(), before=before,
            batches=np.array(self._batches, np.int64),
        )  # fmt: skip


def footer_at(file: Readable, offset: int, end: int) -> Footer | None:
    """Return the footer that fills the bytes from `offset` to `end`; None if they are not a sound footer of this place."""
    size = end - offset
    if not FRONT_BYTES + END_BYTES <= size <= FRONT_BYTES + END_BYTES + offset:
        return None
    found = Footer.decode(file.read(offset, size))
    return found if found is not None and found.offset == offset and _has_places(found) else None


def _has_places(footer: Footer) -> bool:
    """Return whether the batches fill the data, each with room for at least one record."""
    ends = np.append(footer.batches, footer.offset)
    return len(ends) > 1 and ends[0] == HEADER_BYTES and bool((np.diff(ends) >= HEAD_BYTES + OVERHEAD_BYTES).all())


def read_footer(file: Readable) -> Footer | None:
    """Return the footer at the end of the file, without reading the batches; None if there is no sound footer."""
    end = file.size()
    size = footer_bytes(file.read(max(0, end - END_BYTES), END_BYTES))
    return None if size is None or size > end - HEADER_BYTES else footer_at(file, end - size, end)
