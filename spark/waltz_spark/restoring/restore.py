"""Segments from an archive, byte for byte: the inverse of a lossless export. Needs no Spark and no cluster.

Each segment and its index are written beside their names, checked against the manifest while they are, and take their
names when they are on the disk, the index first: a segment that has its name is whole. So a restore that was stopped goes
on where it was, and nothing that is there is ever written over. What comes out is an archive, not a replica: it has no
control file and no promise, so it has no vote, and no daemon takes it for a storage.

Of a segment of format 1 the archive has what stood in front of the records of each batch, and the hashes of its footer.
Each batch is proven again as a storage would, and the footer is made of them: it has to be the one that was there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from waltz_spark.exporting.archive import Rows, form_in, records
from waltz_spark.exporting.destination import Destination
from waltz_spark.exporting.manifest import Manifest, Piece, SegmentHead, check_whole
from waltz_spark.log.origin import Span
from waltzd.disk.seam import Disk, File, join
from waltzd.errors import (
    AlreadyThere,
    ArchiveUnfit,
    DirectoryHeld,
    DiskFull,
    ExportDamaged,
    NoSuchPartition,
    SegmentIncomplete,
    WaltzError,
)
from waltzd.format.batch import HEAD_BYTES, Batch, End, Head, batch_at, why_wrong
from waltzd.format.checksum import crc32, joined_crc
from waltzd.format.footer import END_BYTES, FRONT_BYTES, HASH_BYTES, FooterBuilder, read_footer
from waltzd.format.index import offsets_of, read_index
from waltzd.format.layout import BATCHES, HEADER_BYTES, INDEX_ENTRY_BYTES, NEW_SUFFIX, FileHeader, index_name, segment_name
from waltzd.format.record import OVERHEAD_BYTES, Run, join_runs
from waltzd.format.scan import scan

MARKER = "waltz-restore.json"
"""Says which export is being restored here."""
_CHECK_BYTES, _CHECK_ENTRIES = 4 << 20, 1 << 14
_ID_BYTES = 8
_NOT_RESTORED = "the segment with these ids was not restored; those before it are whole"
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One segment to make: the files of the export that hold it, in order."""

    partition: int
    head: SegmentHead
    pieces: tuple[Piece, ...]

    @property
    def span(self) -> Span:
        return Span(self.pieces[0].span.first, self.pieces[-1].span.last)

    @property
    def data_bytes(self) -> int:
        return sum(piece.data_bytes for piece in self.pieces)

    @property
    def crc(self) -> int:
        found = 0
        for piece in self.pieces:
            found = joined_crc(found, piece.crc, piece.data_bytes)
        return found

    @property
    def fronts(self) -> tuple[int, int]:
        """What stands in front of the records of all batches: how many bytes, and their checksum."""
        size = crc = 0
        for piece in self.pieces:
            if piece.fronts is not None:
                size, crc = size + piece.fronts.size, joined_crc(crc, piece.fronts.crc, piece.fronts.size)
        return size, crc

    @property
    def footer(self) -> bytes:
        """SHA-256 of the footer before and of its own; empty where the segment has none."""
        last = self.pieces[-1].fronts
        return b"" if last is None else last.footer

    @property
    def bytes(self) -> int:
        """Of both files. At most: how many batches there are is not known."""
        fronts, _ = self.fronts
        footer = FRONT_BYTES + END_BYTES + fronts // HEAD_BYTES * 4 if self.footer else 0
        return 2 * HEADER_BYTES + self.data_bytes + fronts + footer + INDEX_ENTRY_BYTES * self.span.count


@dataclass(frozen=True, kw_only=True)
class Restored:
    segment: Segment
    was_there: bool
    """From a restore that was stopped."""


# -- what there is to do -----------------------------------------------------------------------------------------------


def segments_of(found: Manifest, partitions: Collection[int] | None = None) -> list[Segment]:
    """What an export can be made into. Pure. Everything that is wrong is found here, before a byte is written."""
    check_whole(found, "the archive", not_done="nothing was written")
    if found.shape.format != "parquet" or not found.shape.lossless:
        how = f"--format {found.shape.format}" + (" --lossless" if found.shape.lossless else "")
        raise ArchiveUnfit(f"the export was made with {how}; only --format parquet --lossless keeps segments as they were")
    missing = sorted(set(partitions or ()) - set(found.partitions))
    if missing:
        raise NoSuchPartition(
            f"the export holds no partition {', '.join(map(str, missing))}",
            not_done="nothing was written",
            next_step=f"it holds {', '.join(map(str, found.partitions)) or 'none at all'}",
        )
    pieces = [piece for piece in found.pieces if partitions is None or piece.partition in partitions]
    groups = groupby(pieces, key=lambda piece: (piece.partition, piece.segment))
    made = [_segment(found, partition, head, tuple(group)) for (partition, head), group in groups]
    for before, after in pairwise(made):
        if before.partition == after.partition and after.head.first == before.head.first:
            raise SegmentIncomplete(
                f"partition {after.partition}: ids {before.span.first} to {before.span.last} and those from "
                f"{after.span.first} on come from two different segments that both begin at id {after.head.first}"
            )
    return made


def _segment(found: Manifest, partition: int, head: SegmentHead | None, pieces: tuple[Piece, ...]) -> Segment:
    if head is None:
        raise ArchiveUnfit(f"{pieces[0].path} says that it is lossless and not which segment it comes from")
    first = pieces[0].span.first
    header = FileHeader.decode(head.header, f"the header that {pieces[0].path} keeps")
    if (header.key, header.partition, header.first_id) != (found.cluster, partition, head.first):
        raise ExportDamaged(
            f"{pieces[0].path} keeps the header of a segment of partition {header.partition} of cluster {header.key} from "
            f"id {header.first_id} on, which is not that of its records",
            not_done="nothing was written",
        )
    if first != head.first:
        raise SegmentIncomplete(
            f"partition {partition}: the segment that begins at id {head.first} is in the export from id {first} on only"
        )
    if any((piece.fronts is None) is (head.format == BATCHES) for piece in pieces) or any(
        piece.fronts.footer for piece in pieces[:-1] if piece.fronts is not None
    ):
        raise ExportDamaged(
            f"{pieces[0].path} and what follows contradict each other: their segment is of format {head.format}, and what "
            "they keep of its batches and of its footer is not that of such a segment",
            not_done="nothing was written",
        )
    return Segment(partition=partition, head=head, pieces=pieces)


# -- doing it ----------------------------------------------------------------------------------------------------------


def restore(
    archive: Destination, found: Manifest, segments: Sequence[Segment], disk: Disk, directory: str, on_progress: OnProgress
) -> Generator[Restored, None, None]:
    """Writes the segments, one after the other, under a lock on the marker."""
    marker, has_begun = _prepare(disk, directory, found)
    try:
        there = [has_begun and _is_there(disk, directory, segment) for segment in segments]
        _check_room(disk, directory, [segment for segment, is_there in zip(segments, there, strict=True) if not is_there])
        total, done = sum(segment.data_bytes for segment in segments), 0
        for segment, was_there in zip(segments, there, strict=True):
            if not was_there:
                for count in _write(archive, found, segment, disk, directory):
                    on_progress(done + count, total)
            done += segment.data_bytes
            on_progress(done, total)
            yield Restored(segment=segment, was_there=was_there)
    finally:
        marker.close()


def _prepare(disk: Disk, directory: str, found: Manifest) -> tuple[File, bool]:
    """The marker, locked until it is closed, and whether a restore of this export was at work here before."""
    said = json.dumps({"restored": "waltz-export", "export": str(found.export), "cluster": str(found.cluster)}).encode()
    if not disk.exists(directory):
        disk.make_directory(directory)
        disk.flush_directory(directory.rpartition("/")[0] or "/")
    names, path = set(disk.names(directory)), join(directory, MARKER)
    if names and MARKER not in names:
        raise AlreadyThere(f"{directory} is not empty")
    marker = disk.open(path, write=True) if MARKER in names else disk.create(path)
    try:
        marker.lock()
        there = marker.read(0, marker.size())
        if there == said:
            return marker, True
        if not said.startswith(there) or names - {MARKER}:
            raise AlreadyThere(f"{directory} is where another export was restored to: {path} says which")
        marker.write(0, said)  # nothing is there, or what the first moment of a restore left
        marker.flush()
        disk.flush_directory(directory)
    except DirectoryHeld as error:
        marker.close()
        raise AlreadyThere(
            f"another process restores to {directory} at this moment", next_step="wait until it is done"
        ) from error
    except WaltzError:
        marker.close()
        raise
    return marker, False


def _check_room(disk: Disk, directory: str, segments: Iterable[Segment]) -> None:
    needed, free = sum(segment.bytes for segment in segments), disk.free_bytes(directory)
    if needed > free:
        raise DiskFull(
            f"{directory} needs {needed} bytes more, and its file system has {free}",
            not_done="no segment was written",
            next_step="make room, or restore fewer partitions at once with --partitions",
        )


def _names(directory: str, segment: Segment) -> tuple[str, str]:
    inner = join(directory, str(segment.partition))
    return join(inner, segment_name(segment.head.first)), join(inner, index_name(segment.head.first))


def _check_directory(disk: Disk, directory: str, segment: Segment) -> None:
    """A link would lead out of the directory that was named."""
    found = [entry for entry in disk.list(directory) if entry.name == str(segment.partition)]
    if not all(entry.is_directory for entry in found):
        raise AlreadyThere(f"{join(directory, str(segment.partition))} is there, and is no directory")


def _is_there(disk: Disk, directory: str, segment: Segment) -> bool:
    """Whether a restore before this one finished the segment. A file that is there and differs is an error."""
    _check_directory(disk, directory, segment)
    path, index_path = _names(directory, segment)
    if not disk.exists(path):
        return False
    file = disk.open(path)
    try:
        size = file.size()
        is_right = file.read(0, HEADER_BYTES) == segment.head.header
        if segment.head.format == BATCHES:
            is_right = is_right and _are_batches(disk, index_path, segment, file, size)
        else:
            is_right = is_right and size == HEADER_BYTES + segment.data_bytes and _crc_of(file, size) == segment.crc
            is_right = is_right and _is_index(disk, index_path, segment, file, size)
    finally:
        file.close()
    if not is_right:
        raise AlreadyThere(
            f"{path} or its index is there, and is not what the export holds of ids {segment.span.first} to "
            f"{segment.span.last} of partition {segment.partition}",
            next_step="restore into another directory; an export that has grown since needs a new one, too",
        )
    return True


def _crc_of(file: File, size: int) -> int:
    crc = 0
    for offset in range(HEADER_BYTES, size, _CHECK_BYTES):
        crc = crc32(file.read(offset, min(_CHECK_BYTES, size - offset)), crc)
    return crc


def _are_batches(disk: Disk, index_path: str, segment: Segment, file: File, size: int) -> bool:
    """Whether batches, footer and index are those of the archive, and nothing else is there."""
    if not disk.exists(index_path):
        return False
    size_of_fronts = crc = front_crc = 0
    index = disk.open(index_path)
    is_index = index.size() == HEADER_BYTES + INDEX_ENTRY_BYTES * segment.span.count
    is_index = is_index and index.read(0, HEADER_BYTES) == (segment.head.index_header or segment.head.header)

    def see(offset: int, batch: Batch) -> None:
        nonlocal size_of_fronts, crc, front_crc, is_index
        size_of_fronts, front_crc = size_of_fronts + batch.head.lead, crc32(batch.preamble, front_crc)
        crc = crc32(batch.run.data, crc)
        entries = read_index(index, batch.first_id - segment.head.first, len(batch))
        is_index = is_index and np.array_equal(entries, offsets_of(offset + batch.head.lead, batch.run))

    try:
        stop = scan(
            file, segment_first_id=segment.head.first, next_id=segment.head.first, offset=HEADER_BYTES, end=size,
            version=BATCHES, on_batch=see,
        )  # fmt: skip
    finally:
        index.close()
    footer = read_footer(file)
    there = b"" if footer is None else footer.before + footer.hash
    end = size if footer is None else footer.offset
    return (
        is_index
        and (stop.next_id - 1, stop.offset, there) == (segment.span.last, end, segment.footer)
        and (crc, (size_of_fronts, front_crc)) == (segment.crc, segment.fronts)
    )


def _is_index(disk: Disk, path: str, segment: Segment, file: File, size: int) -> bool:
    """Whether it says where each record of the segment begins: at each entry stands the id that belongs there."""
    if not disk.exists(path) or disk.size(path) != HEADER_BYTES + INDEX_ENTRY_BYTES * segment.span.count:
        return False
    index = disk.open(path)
    try:
        header = index.read(0, HEADER_BYTES)
        entries = np.frombuffer(index.read(HEADER_BYTES, INDEX_ENTRY_BYTES * segment.span.count), ">i8").astype(np.int64)
    finally:
        index.close()
    if header != (segment.head.index_header or segment.head.header) or entries[0] != HEADER_BYTES:
        return False
    if (np.diff(entries) < OVERHEAD_BYTES).any() or entries[-1] > size - OVERHEAD_BYTES:
        return False
    return all(
        _ids_at(file, entries[at : at + _CHECK_ENTRIES]) == segment.span.first + at
        for at in range(0, len(entries), _CHECK_ENTRIES)
    )


def _ids_at(file: File, offsets: np.ndarray[Any, Any]) -> int | None:
    """The id at the first of these offsets, if those that follow stand at the others."""
    start = int(offsets[0])
    raw = file.read(start, int(offsets[-1]) - start + _ID_BYTES)
    every = np.ndarray((len(raw) - _ID_BYTES + 1,), ">i8", buffer=raw, strides=(1,))
    ids = every[offsets - start].astype(np.int64)
    return int(ids[0]) if (np.diff(ids) == 1).all() else None


def _write(archive: Destination, found: Manifest, segment: Segment, disk: Disk, directory: str) -> Iterator[int]:
    """Yields how many bytes of records are written so far."""
    path, index_path = _names(directory, segment)
    inner = path.rpartition("/")[0]
    if not disk.exists(inner):
        disk.make_directory(inner)
        disk.flush_directory(directory)
    _check_directory(disk, directory, segment)
    for name in (path + NEW_SUFFIX, index_path + NEW_SUFFIX):
        if disk.exists(name):
            disk.remove(name)  # and not written to: it could be another name of any file
    if disk.exists(index_path):
        disk.remove(index_path)  # a restore was stopped between the two names; the segment did not get its own
    file, index = disk.create(path + NEW_SUFFIX), disk.create(index_path + NEW_SUFFIX)
    try:
        file.write(0, segment.head.header)
        index.write(0, segment.head.index_header or segment.head.header)
        rows = (
            each for piece in segment.pieces for each in records(archive, form_in(found), piece, not_done=_NOT_RESTORED)
        )
        if segment.head.format == BATCHES:
            yield from _write_batches(segment, rows, file, index)
        else:
            yield from _write_records(rows, file, index)
        file.flush()
        index.flush()
    finally:
        file.close()
        index.close()
    disk.rename(index_path + NEW_SUFFIX, index_path)
    disk.flush_directory(inner)
    disk.rename(path + NEW_SUFFIX, path)
    disk.flush_directory(inner)


def _write_records(rows: Iterable[Rows], file: File, index: File) -> Iterator[int]:
    offset, index_offset = HEADER_BYTES, HEADER_BYTES
    for each in rows:
        entries = offsets_of(offset, each.run).astype(">i8").tobytes()
        file.write(offset, each.run.data)
        index.write(index_offset, entries)
        offset, index_offset = offset + len(each.run.data), index_offset + len(entries)
        yield offset - HEADER_BYTES


def _write_batches(segment: Segment, rows: Iterable[Rows], file: File, index: File) -> Iterator[int]:
    builder, index_offset, done = FooterBuilder(segment.head.header), HEADER_BYTES, 0
    end: End | None = None
    is_last = False
    for batch in _batches(segment, rows):
        wrong = "there is another one behind the last of its segment" if is_last else why_wrong(batch, end, deeply=False)
        if wrong:
            raise _unfit(segment, f"the batch of ids {batch.first_id} to {batch.last_id} is not as it was: {wrong}")
        entries = offsets_of(builder.offset + batch.head.lead, batch.run).astype(">i8").tobytes()
        file.write_many(builder.offset, batch.pieces)
        index.write(index_offset, entries)
        builder.add(batch.head, batch.pieces)
        end, is_last = batch.end(end or End()), batch.head.is_last
        index_offset, done = index_offset + len(entries), done + len(batch.run.data)
        yield done
    if segment.footer:
        footer = builder.footer(segment.footer[:HASH_BYTES])
        if not is_last or footer.hash != segment.footer[HASH_BYTES:]:
            raise _unfit(segment, "its batches do not make up the footer that it had")
        file.write(builder.offset, footer.encode())


def _batches(segment: Segment, rows: Iterable[Rows]) -> Iterator[Batch]:
    """As they were, one after the other. Files may be cut within one."""
    front, head = b"", None
    runs: list[Run] = []
    for each in rows:
        if each.fronts is None:
            raise _unfit(segment, "a file has no column of batches")
        begins = np.flatnonzero(each.fronts.is_valid().to_numpy(zero_copy_only=False)).tolist()
        cuts = sorted({0, *begins, len(each.run)})
        for start, stop in pairwise(cuts):
            if start in begins:
                front = each.fronts[start].as_py()
                if runs or (head := Head.decode(front)) is None or len(front) != head.lead:
                    raise _unfit(segment, f"no batch begins at id {each.run.first_id + start} as its file says")
            runs.append(each.run.part(start, stop))
            if head is None or runs[0].first_id != head.first_id or runs[-1].last_id > head.last_id:
                raise _unfit(segment, f"nothing says to which batch id {each.run.first_id + start} belongs")
            if runs[-1].last_id == head.last_id:
                whole = join_runs(runs)
                batch = batch_at(memoryview(front + bytes(whole.data)), head, whole.bounds) if _fits(head, whole) else None
                if batch is None:
                    raise _unfit(segment, f"the batch of ids {head.first_id} to {head.last_id} has another size")
                yield batch
                head, runs = None, []
    if runs:
        raise SegmentIncomplete(
            f"partition {segment.partition}: the segment that begins at id {segment.head.first} is in the export up to the"
            f" middle of a batch, of which ids from {runs[-1].last_id + 1} on are missing"
        )


def _fits(head: Head, run: Run) -> bool:
    return head.record_bytes == len(run.data)


def _unfit(segment: Segment, what: str) -> ExportDamaged:
    return ExportDamaged(
        f"partition {segment.partition}, the segment that begins at id {segment.head.first}: {what}",
        not_done=_NOT_RESTORED, partition=segment.partition, first_id=segment.span.first, last_id=segment.span.last,
    )  # fmt: skip
