"""Sealed segments on their way into an archive: the checks before an upload, and reads of the archived bytes. Pure.

An archived segment is never written again and may become the last copy, so every byte is checked before its upload: in
format 1 the digest in the footer, the whole footer and each batch, in format 0 each record. The index is archived
unchecked, because it can be rebuilt. The key index is made from the checked bytes: the file beside the segment may be
wrong, and the manifest vouches for what is archived. A *piece* is the manifest entry of an archived segment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from uuid import UUID

from waltzd.archive.manifest import Entry
from waltzd.disk.seam import Buffer
from waltzd.errors import ForeignCluster
from waltzd.errors.operations import ArchiveDamaged, HeaderDamaged, UnfitSegment
from waltzd.format.batch import parse_batches
from waltzd.format.checksum import crc32
from waltzd.format.footer import END_BYTES, Footer, FooterBuilder, footer_at, footer_bytes
from waltzd.format.key_index import KeyHeader, key_index_of
from waltzd.format.layout import BATCHES, HEADER_BYTES, INDEX_ENTRY_BYTES, FileHeader, check_header
from waltzd.format.record import Run, walk
from waltzd.format.scan import scan
from waltzd.format.span import BatchSpan, Span
from waltzd.protocol.peers import Content


class MemoryFile:
    """Bytes in memory with the reading methods of a file."""

    def __init__(self, path: str, data: Buffer) -> None:
        self.path = path
        self._data = memoryview(data).cast("B")

    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self._data[offset : offset + size])

    def read_into(self, offset: int, buffer: memoryview) -> int:
        piece = self._data[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)


def segment_entry(data: Buffer, index: Buffer, *, expected: FileHeader, last_id: int, path: str) -> Entry:
    """Check a segment, and return the manifest entry of the object that holds it with its index. Raise `UnfitSegment`
    unless the bytes are the sound records from `expected.first_id` to `last_id`. An incomplete index is left out."""
    raw = memoryview(data).cast("B")
    try:
        header = check_header(bytes(raw[:HEADER_BYTES]), path, expected)
    except (HeaderDamaged, ForeignCluster) as error:
        raise UnfitSegment(error.message) from error
    if header.encode() != raw[:HEADER_BYTES]:
        raise UnfitSegment(f"{path} has bytes that are not zero in the reserved part of its header")
    hashing = sha256()  # one pass for two digests: the bytes that the footer covers are the start of the object
    held, end, crc, record_bytes = MemoryFile(path, raw), len(raw), 0, 0
    builder = FooterBuilder(raw[:HEADER_BYTES], is_hashing=False)
    footer: Footer | None = None
    if header.version == BATCHES:
        end -= footer_bytes(raw[-END_BYTES:]) or 0
        footer = footer_at(held, end, len(raw))
        if footer is None or (footer.first_id, footer.last_id) != (expected.first_id, last_id):
            raise UnfitSegment(f"{path} has no sound footer of the ids {expected.first_id} to {last_id}")
    hashing.update(raw[:end])
    if footer is not None and hashing.digest() != footer.digest:
        raise UnfitSegment(f"{path} has other bytes than its footer states")

    def add(span: Span) -> None:
        nonlocal crc, record_bytes
        for records in span.record_pieces:
            crc = crc32(records, crc)
            record_bytes += len(records)
        if isinstance(span, BatchSpan):
            builder.add_span(span)

    stop = scan(
        held,
        segment_first_id=expected.first_id,
        next_id=expected.first_id,
        offset=HEADER_BYTES,
        end=end,
        version=header.version,
        on_span=add,
    )
    if stop.offset != end or stop.next_id != last_id + 1:
        raise UnfitSegment(f"{path} has no sound record {stop.next_id} at byte {stop.offset}")
    if footer is not None and replace(builder.footer(footer.before), digest=footer.digest).encode() != raw[end:]:
        raise UnfitSegment(f"{path} has a footer that is not that of its batches")
    hashing.update(raw[end:])
    kept = index_to_keep(index, records=last_id - expected.first_id + 1)
    hashing.update(kept)
    size = len(raw) + len(kept)
    return Entry(
        level=0, first=expected.first_id, last=last_id, record_bytes=record_bytes, crc=crc, segments=1, stored_bytes=size,
        size=size, index_bytes=len(kept), sha256=hashing.hexdigest(),
    )  # fmt: skip


def keyed(piece: Entry, data: Buffer, cluster: UUID, partition: int) -> tuple[Entry, bytes]:
    """Return a piece with its key index, and the bytes of that index. `data`: the checked bytes of the object. Segments of
    format 0 have no locks: return the piece unchanged, and no bytes."""
    footer = footer_in(data, piece)
    if footer is None:
        return piece, b""
    header = KeyHeader(
        key=cluster, partition=partition, first_id=piece.first, last_id=piece.last, footer=footer.hash
    )  # fmt: skip
    raw = key_index_of(MemoryFile("", memoryview(data)[: footer.offset]), header)
    assert raw is not None, "the batches were checked"
    stored = piece.size + len(raw)
    return replace(piece, key_bytes=len(raw), key_sha256=sha256(raw).hexdigest(), stored_bytes=stored), raw


def unkeyed(piece: Entry) -> Entry:
    """Return a piece without its key index, as `segment_entry` returns it."""
    return replace(piece, key_bytes=0, key_sha256="", stored_bytes=piece.size)


FOOTER_BYTES = 64 << 10
"""Number of bytes at the end of a segment that are read for its footer, which is rarely larger."""


def footer_of(read: Callable[[int, int], bytes], piece: Entry, where: str) -> Footer | None:
    """Read the footer of a piece by `read(offset, size)` of its object; return None if the segment has format 0."""
    end = piece.size - piece.index_bytes
    start = max(0, end - FOOTER_BYTES)
    raw = read(start, end - start)
    size = footer_bytes(raw[-END_BYTES:]) if len(raw) == end - start else None
    if size is not None and len(raw) < size <= end:
        raw = read(end - size, size)
    found = None if size is None else Footer.decode(raw[len(raw) - size :])
    if found is not None and (found.first_id, found.last_id) == (piece.first, piece.last):
        return found
    header = read(0, HEADER_BYTES)
    if len(header) == HEADER_BYTES and FileHeader.decode(header, where).version != BATCHES:
        return None
    raise ArchiveDamaged(f"{where} has no sound footer of the ids {piece.first} to {piece.last}")


def footer_in(data: Buffer, piece: Entry) -> Footer | None:
    """Return the footer in the checked bytes of a piece; None if the segment has format 0."""
    raw = memoryview(data).cast("B")[: piece.size - piece.index_bytes]
    size = footer_bytes(raw[-END_BYTES:])
    return None if size is None else Footer.decode(raw[-size:])


def content_of(data: Buffer, piece: Entry) -> Content:
    """Return all records in the bytes of a piece whose hash was compared."""
    footer = footer_in(data, piece)
    raw = memoryview(data).cast("B")[HEADER_BYTES : piece.size - piece.index_bytes if footer is None else footer.offset]
    return Run(piece.first, raw, walk(raw)) if footer is None else parse_batches(raw)


def records_hash(data: Buffer, piece: Entry, first_id: int, last_id: int, where: str) -> str:
    """Return the SHA-256 of the records from `first_id` to `last_id` in the bytes of a piece."""
    raw = memoryview(data).cast("B")[: piece.size - piece.index_bytes]
    version = FileHeader.decode(bytes(raw[:HEADER_BYTES]), where).version
    size = footer_bytes(raw[-END_BYTES:]) if version == BATCHES else None
    hashing = sha256()

    def add(span: Span) -> None:
        run = span.run
        low, high = max(first_id, run.first_id), min(last_id, run.last_id)
        if low <= high:
            hashing.update(run.data[run.bounds[low - run.first_id] : run.bounds[high + 1 - run.first_id]])

    scan(
        MemoryFile(where, raw),
        segment_first_id=piece.first,
        next_id=piece.first,
        offset=HEADER_BYTES,
        end=len(raw) - (size or 0),
        version=version,
        on_span=add,
    )
    return hashing.hexdigest()


def index_to_keep(index: Buffer, *, records: int) -> memoryview:
    """Return the part of an index that belongs to the records; empty if it is incomplete."""
    size = HEADER_BYTES + INDEX_ENTRY_BYTES * records
    return memoryview(index).cast("B")[: size if len(index) >= size else 0]
