"""Restores the files of one replica from an archive: fetch, check, set the key of the cluster, and cut at a mark.

Files are written to a folder of their own, which becomes a replica only when a hard state is written into it and it is
renamed (`waltzd.storage.replica.restored`). So nothing counts before everything is there. Segments that a killed run
left are checked again, record by record, and kept; the last segment, which may be cut, is always written again.

Each object is compared with the SHA-256 in the manifest, which was computed from checked records, so the records are not
checked again. A new key changes the header of each file, so the digest in its footer and the chain of footers change as
well. Batches and records carry no key and stay equal.

Whole segments are written to their files while they are fetched, a few concurrently. They are finished in order: footer,
flush, index. A segment without an index is not finished, whatever its bytes are. The caller passes a function that runs
blocking calls on threads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain
from typing import Protocol, TypeVar
from uuid import UUID

import numpy as np

from waltzd.archive.archived_segment import MemoryFile, segment_entry
from waltzd.archive.cut_point import ArchivedLog, UnsealedRecords, batch_places, place_of
from waltzd.archive.manifest import Entry
from waltzd.archive.verification import chain_flaws
from waltzd.disk.seam import Buffer, Disk, join, opened
from waltzd.errors import WaltzError
from waltzd.errors.operations import ArchiveDamaged, FlushFailed, HeaderDamaged, ObjectAbsent
from waltzd.format.batch import Head
from waltzd.format.footer import END_BYTES, NO_HASH, Footer, FooterBuilder, footer_at, footer_bytes, read_footer
from waltzd.format.layout import (
    BATCHES,
    HEADER_BYTES,
    NO_MARK,
    FileHeader,
    check_header,
    index_name,
    index_offset,
    segment_name,
)
from waltzd.format.scan import scan

AHEAD = 3
"""Number of objects that are fetched concurrently."""
READ_BYTES = 8 << 20
"""Bytes of one request: fewer mean more requests, more mean larger buffers that are allocated each time."""
STEP_BYTES = 1 << 20
"""Bytes that are hashed twice and written before the next ones, while they are in the caches of the processor."""
OnBytes = Callable[[int], None]
"""Callback with the number of bytes of the store that were restored since the last call."""
T = TypeVar("T")


class RunOnThread(Protocol):
    """Function that runs a blocking call on a thread, or at once."""

    def __call__(self, function: Callable[..., T], /, *arguments: object) -> Awaitable[T]: ...


@dataclass(frozen=True, kw_only=True)
class RestoredPartition:
    """The restored files of one partition."""

    last_id: int
    newest: int
    """First id of the newest segment."""
    segments: int
    kept: int = 0
    """Number of segments that an earlier run left, and that were checked again."""


@dataclass(frozen=True, kw_only=True)
class _SegmentCopy:
    """A segment that is to be written. The hash of the footer before is not in `footer` yet."""

    header: FileHeader
    last_id: int
    data: Sequence[Buffer] | None
    """Bytes of the file without the footer; None if they are in the file already."""
    index: Sequence[Buffer]
    footer: Footer | None
    stored: int
    """Size of the segment in the store."""


async def restore_partition(
    disk: Disk, log: ArchivedLog, mark: int, *, key: UUID, folder: str, run: RunOnThread, on_bytes: OnBytes = lambda _: None
) -> RestoredPartition:
    """Restore all segments of a log up to a mark at which it can be cut. Everything but the name of the folder is
    flushed."""
    await run(check_chain, log, mark)
    if not disk.exists(folder):
        disk.make_directory(folder)
    pieces = [piece for piece in log.pieces if piece.first <= mark]
    await run(_clear, disk, folder, pieces, mark)
    front, kept, newest, segments = NO_HASH, 0, 0, 0
    ahead: deque[asyncio.Task[_SegmentCopy]] = deque()
    place = 0
    while place < len(pieces):  # an earlier run has finished the first segments
        found = await run(_kept, disk, log, pieces[place], mark, key, folder, front)
        if found is None:
            break
        front, newest = found, pieces[place].first
        on_bytes(pieces[place].size)
        place, kept, segments = place + 1, kept + 1, segments + 1
    at = place
    try:
        while place < len(pieces):
            while at < len(pieces) and len(ahead) < AHEAD:
                ahead.append(asyncio.ensure_future(run(_copied, disk, folder, log, pieces[at], mark, key)))
                at += 1
            copy = await ahead.popleft()
            front = await run(_write, disk, folder, copy, front)
            on_bytes(copy.stored)
            newest, place, segments = copy.header.first_id, place + 1, segments + 1
    finally:
        for task in ahead:
            task.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
    last_id = min(mark, log.manifest.last)
    for rest in log.rest:
        for copy in await run(_unsealed_segments, log, rest, mark, key):
            front = await run(_write, disk, folder, copy, front)
            on_bytes(copy.stored)
            newest, segments, last_id = copy.header.first_id, segments + 1, copy.last_id
    if last_id < mark:
        raise ArchiveDamaged(f"partition {log.partition}: the store ends at id {last_id}; the cut is at {mark}")
    if not segments:
        header = FileHeader(created_ms=disk.now_ms(), key=key, partition=log.partition, first_id=0)
        empty = _SegmentCopy(
            header=header, last_id=NO_MARK, data=(header.encode(),), index=(header.encode(),), footer=None, stored=0
        )
        await run(_write, disk, folder, empty, front)
        segments = 1
    await run(disk.flush_directory, folder)
    return RestoredPartition(last_id=last_id, newest=newest, segments=segments, kept=kept)


def check_chain(log: ArchivedLog, mark: int) -> None:
    """Raise `ArchiveDamaged` if the segments up to the mark do not belong to one log: a footer names another footer than
    that of the segment in front of it."""
    pieces = [piece for piece in log.pieces if piece.first <= mark]
    for flaw in chain_flaws(log.archive, pieces):
        raise ArchiveDamaged(
            f"{flaw.name} {flaw.detail}",
            not_done="nothing was restored",
            next_step="list such segments with `waltzctl archive verify`, and restore to an id before the first of them",
        )


def _clear(disk: Disk, folder: str, pieces: Sequence[Entry], mark: int) -> None:
    """Remove files that do not belong to the restored log, and the last segment, which may have been cut elsewhere."""
    whole = [piece for piece in pieces if piece.last <= mark][: len(pieces) - 1]
    names = {name(piece.first) for piece in whole for name in (segment_name, index_name)}
    for name in disk.names(folder):
        if name not in names:
            disk.remove(join(folder, name))


# -- what is there already ---------------------------------------------------------------------------------------------


def _kept(disk: Disk, log: ArchivedLog, piece: Entry, mark: int, key: UUID, folder: str, front: bytes) -> bytes | None:
    """Return the hash of the footer of a segment that an earlier run finished; None if it is missing or wrong."""
    data, index = (opened(disk, join(folder, name(piece.first))) for name in (segment_name, index_name))
    try:
        if data is None or index is None or index.size() != index_offset(piece.last - piece.first + 1):
            return None
        raw = data.read(0, data.size())
        if index.read(0, HEADER_BYTES) != raw[:HEADER_BYTES]:
            return None
        expected = FileHeader(created_ms=0, key=key, partition=log.partition, first_id=piece.first)
        found = segment_entry(raw, b"", expected=expected, last_id=piece.last, path=data.path)
        if (found.crc, found.record_bytes) != (piece.crc, piece.record_bytes):
            return None
        footer = read_footer(data) if FileHeader.decode(raw, data.path).version == BATCHES else None
        if footer is not None and footer.before != front:
            return None
        data.flush()  # a killed run may have written the bytes without a flush
        index.flush()
        return NO_HASH if footer is None else footer.hash
    except FlushFailed:
        raise
    except WaltzError:  # an incomplete file, or one of another log
        return None
    finally:
        for file in (data, index):
            if file is not None:
                file.close()


# -- out of the store --------------------------------------------------------------------------------------------------


def _copied(disk: Disk, folder: str, log: ArchivedLog, piece: Entry, mark: int, key: UUID) -> _SegmentCopy:
    """Fetch a segment and write it to its file; if it is cut, return its bytes up to the cut instead."""
    if mark < piece.last or not piece.index_bytes:
        return _fetched(log, piece, mark, key)
    where, size = _where(log, piece), piece.size - piece.index_bytes
    steps = _steps(log, piece, where)
    first = next(steps)
    try:
        header = _header(log, piece, first, key, where)
    except WaltzError:
        for _ in steps:  # raises another error if the object has a wrong hash
            pass
        raise
    footer_size = footer_bytes(log.archive.bytes_of(piece, size - END_BYTES, END_BYTES)) if header.version == BATCHES else 0
    end, at, behind = size - (footer_size or 0), 0, list[bytes]()
    raw = header.encode()
    hashing = sha256(raw)
    with closing(disk.create(join(folder, segment_name(piece.first)))) as file:
        file.write(0, raw)
        for step in chain((first,), steps):
            own = step[max(0, HEADER_BYTES - at) : max(0, end - at)]
            if own:
                file.write(max(HEADER_BYTES, at), own)
                if header.version == BATCHES:
                    hashing.update(own)
            behind.append(bytes(step[max(0, end - at) :]))
            at += len(step)
    rest = b"".join(behind)
    footer = None
    if header.version == BATCHES:
        footer = Footer.decode(rest[: size - end])
        if footer is None or footer.offset != end:
            raise ArchiveDamaged(f"{where} has no sound footer")
        footer = replace(footer, digest=hashing.digest())
    entries = rest[size - end + HEADER_BYTES :]
    return _SegmentCopy(
        header=header, last_id=piece.last, data=None, index=(raw, entries), footer=footer, stored=piece.size
    )  # fmt: skip


def _where(log: ArchivedLog, piece: Entry) -> str:
    return f"{log.archive.where(piece)}, which holds the ids {piece.first} to {piece.last},"


def _steps(log: ArchivedLog, piece: Entry, where: str) -> Iterator[memoryview]:
    """Yield the bytes of an object; raise `ArchiveDamaged` at the end if their hash is wrong."""
    hashing, at = sha256(), 0
    while at < piece.size:
        try:  # at the end one byte more, to detect a longer object
            read = memoryview(log.archive.bytes_of(piece, at, min(READ_BYTES, piece.size + 1 - at)))
        except ObjectAbsent as error:
            raise ArchiveDamaged(f"{where} is not there") from error
        if not read:
            break
        for start in range(0, len(read), STEP_BYTES):
            step = read[start : start + STEP_BYTES]
            hashing.update(step)
            yield step
        at += len(read)
    if at != piece.size or hashing.hexdigest() != piece.sha256:
        raise ArchiveDamaged(f"{where} has other bytes than the manifest states")


def _header(log: ArchivedLog, piece: Entry, data: memoryview, key: UUID, where: str) -> FileHeader:
    source = FileHeader(created_ms=0, key=log.archive.label.cluster, partition=log.partition, first_id=piece.first)
    try:
        return replace(check_header(bytes(data[:HEADER_BYTES]), where, source), key=key)
    except HeaderDamaged as error:
        raise ArchiveDamaged(error.message) from error


def _fetched(log: ArchivedLog, piece: Entry, mark: int, key: UUID) -> _SegmentCopy:
    """Fetch a segment up to the cut into memory."""
    where = _where(log, piece)
    raw = memoryview(b"".join(_steps(log, piece, where)))
    size = piece.size - piece.index_bytes
    data, index = raw[:size], raw[size + HEADER_BYTES :]
    header = _header(log, piece, data, key, where)
    footer = None
    if header.version == BATCHES:
        length = footer_bytes(data[-END_BYTES:])
        footer = None if length is None else footer_at(MemoryFile(where, data), size - length, size)
        if footer is None:
            raise ArchiveDamaged(f"{where} has no sound footer")
        data = data[: footer.offset]
    if mark < piece.last:
        data, footer = data[: _end(header, footer, data, index, mark, where)], None
    last_id = min(mark, piece.last)
    entries: Buffer = index[: index_offset(last_id - piece.first + 1) - HEADER_BYTES]
    if not piece.index_bytes:
        entries = _entries(header, data, last_id, where)
    return _copy(header, data[HEADER_BYTES:], entries, footer, last_id, piece.size)


def _copy(
    header: FileHeader, records: Buffer, entries: Buffer, footer: Footer | None, last_id: int, stored: int
) -> _SegmentCopy:
    raw = header.encode()
    if footer is not None:
        hashing = sha256(raw)
        hashing.update(records)
        footer = replace(footer, digest=hashing.digest())
    return _SegmentCopy(
        header=header, last_id=last_id, data=(raw, records), index=(raw, entries), footer=footer, stored=stored
    )  # fmt: skip


def _end(header: FileHeader, footer: Footer | None, data: memoryview, index: memoryview, mark: int, where: str) -> int:
    """Return the offset of the first byte after the mark."""
    if footer is not None:
        found = place_of(data, BATCHES, footer.batches.tolist(), mark, where)
        if found is None:
            raise ArchiveDamaged(f"{where}: no batch ends at id {mark}")
        return found
    number = mark + 1 - header.first_id
    known = np.frombuffer(index[8 * number : 8 * number + 8], ">i8").tolist()
    found = place_of(data, header.version, [at for at in known if 0 <= at < len(data)], mark, where)
    return found if found is not None else int(_places(header, data, mark + 1, where)[-1])


def _entries(header: FileHeader, data: Buffer, last_id: int, where: str) -> bytes:
    """Return the entries of a new index, for a segment without an index in the store."""
    return _places(header, data, last_id, where).astype(">i8").tobytes()


def _places(header: FileHeader, data: Buffer, last_id: int, where: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the index entries of all records up to an id."""
    found = [np.zeros(0, np.int64)]

    scan(
        MemoryFile(where, data),
        segment_first_id=header.first_id,
        next_id=header.first_id,
        offset=HEADER_BYTES,
        end=len(data),
        version=header.version,
        on_span=lambda span: found.append(span.entries),
    )
    entries = np.concatenate(found)[: last_id - header.first_id + 1]
    if len(entries) <= last_id - header.first_id:
        raise ArchiveDamaged(f"{where} has no sound record {header.first_id + len(entries)}")
    return entries


# -- what no segment has -----------------------------------------------------------------------------------------------


def _unsealed_segments(log: ArchivedLog, rest: UnsealedRecords, mark: int, key: UUID) -> list[_SegmentCopy]:
    """Build segments from unsealed records up to the mark. The last batch of a segment is flagged."""
    if rest.first > mark:
        return []
    where = f"what was saved of partition {log.partition} behind its segments"
    if rest.version != BATCHES:
        header = FileHeader(created_ms=0, key=key, partition=log.partition, first_id=rest.first)
        data = memoryview(header.encode() + rest.data)
        entries = _places(header, data, min(mark + 1, rest.last), where)
        end = len(data) if mark >= rest.last else int(entries[-1])
        last_id = min(mark, rest.last)
        kept = entries[: last_id - rest.first + 1].astype(">i8").tobytes()
        return [_copy(header, data[HEADER_BYTES:end], kept, None, last_id, end - HEADER_BYTES)]
    found, own = list[_SegmentCopy](), list[tuple[int, Head]]()
    for at in batch_places(rest.data, 0, where):
        head = Head.decode(rest.data, at)
        assert head is not None
        if head.last_id > mark:
            break
        own.append((at, head))
        if head.is_last:
            found.append(_segment(log, key, memoryview(rest.data), own, where))
            own = []
    if own:
        found.append(_segment(log, key, memoryview(rest.data), own, where))
    if not found or found[-1].last_id != min(mark, rest.last):
        raise ArchiveDamaged(f"{where}: no batch ends at id {mark}")
    return found


def _segment(log: ArchivedLog, key: UUID, data: memoryview, own: Sequence[tuple[int, Head]], where: str) -> _SegmentCopy:
    first, last = own[0][1], own[-1][1]
    header = FileHeader(
        created_ms=first.time // 1000, key=key, partition=log.partition, first_id=first.first_id, version=BATCHES
    )
    records = data[own[0][0] : own[-1][0] + last.size]
    raw = header.encode()
    footer = None
    if last.is_last:
        builder = FooterBuilder(raw)
        for at, head in own:
            builder.add(head, (data[at : at + head.size],))
        footer = builder.footer(NO_HASH)
    entries = _entries(header, raw + bytes(records), last.last_id, where)
    return _copy(header, records, entries, footer, last.last_id, len(records))


# -- into files --------------------------------------------------------------------------------------------------------


def _write(disk: Disk, folder: str, copy: _SegmentCopy, front: bytes) -> bytes:
    """Write and flush both files of a segment, the index last; return the hash of the footer."""
    first_id, after = copy.header.first_id, NO_HASH
    path = join(folder, segment_name(first_id))
    with closing(disk.create(path) if copy.data is not None else disk.open(path, write=True)) as file:
        if copy.data is not None:
            file.write_many(0, copy.data)
        if copy.footer is not None:
            footer = replace(copy.footer, before=front)
            file.write(copy.footer.offset, footer.encode())
            after = footer.hash
        file.flush()
    with closing(disk.create(join(folder, index_name(first_id)))) as file:
        file.write_many(0, copy.index)
        file.flush()
    disk.flush_directory(folder)
    return after
