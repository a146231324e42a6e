"""The records of one segment from its file, and the detection of damage.

The index gives the offsets of records as a hint only: each record is checked by id, length and checksum. If the check
fails, or there is no index, the records are scanned from the last valid one. Only the scan reports damage, because a wrong
index is no damage of records.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeAlias
from uuid import UUID

import numpy as np

from waltz_spark.log.batch_segment import Batches, InvalidBatch
from waltz_spark.log.origin import BATCH_BYTES, Extent, Span
from waltzd.disk.seam import Disk, File, join, opened
from waltzd.errors import Trimmed, WaltzError
from waltzd.errors.operations import HeaderDamaged, PartitionDamaged
from waltzd.format.index import read_index
from waltzd.format.layout import BATCHES, HEADER_BYTES, FileHeader, index_entries, index_name, segment_ids, segment_name
from waltzd.format.record import HEAD_BYTES, OVERHEAD_BYTES, Run, first_bad, id_and_length, join_runs
from waltzd.format.scan import scan, survey
from waltzd.storage.replica.hard_state import read_hard_state

ENTRIES_MIN = 64
Ask: TypeAlias = "Callable[[Extent, Callable[[Segment], int | None]], int | None]"


@dataclass(frozen=True)
class SegmentPlace:
    directory: str
    """Directory of the partition; empty if its segments are in an archive."""
    partition: int
    key: UUID | None
    """Key of the cluster that the headers must have; None if it is unknown."""


def read_segment_runs(
    disk: Disk, place: SegmentPlace, span: Span, *, batch_bytes: int, with_locks: bool = False
) -> Generator[Run, None, None]:
    """Yield every record of the span in order; raise `PartitionDamaged` for invalid ones. Each run owns its memory."""
    first_ids = segment_ids(disk.names(place.directory))
    next_id = span.first
    while next_id <= span.last:
        position = bisect_right(first_ids, next_id) - 1
        following = first_ids[position + 1] if position + 1 < len(first_ids) else None
        stop = span.last if following is None else min(span.last, following - 1)
        if position < 0:
            raise _in_front(disk, place, Span(next_id, stop))
        with closing(Segment.open(disk, place, first_ids[position], following)) as segment:
            yield from segment.runs(Span(next_id, stop), batch_bytes, with_locks=with_locks)
        next_id = stop + 1


def first_at(extents: Sequence[Extent], start: int, time: int, ask: Ask) -> int:
    """Return the first id of this time or a later one among consecutive extents; `start` if all are later.

    A binary search: times never fall, and records without a time come first. `ask` opens the segment of an extent."""
    low, high = 0, len(extents)
    while low < high:
        middle = (low + high) // 2
        first = ask(extents[middle], Segment.first_time)
        low, high = (low, middle) if first is not None and first >= time else (middle + 1, high)
    if low == 0:
        return start
    extent = extents[low - 1]
    found = ask(extent, lambda segment: segment.first_at(time))
    return extent.span.last + 1 if found is None else min(found, extent.span.last + 1)


def _in_front(disk: Disk, place: SegmentPlace, span: Span) -> WaltzError:
    """Return the error for ids before the first segment, which are missing or were trimmed."""
    hard_state, _ = read_hard_state(disk, place.directory, place.partition, place.key, is_expected=False)
    if hard_state is None or span.first >= hard_state.floor:
        return _missing(place, place.directory, span)
    return Trimmed(
        f"{place.directory}: id {span.first} of partition {place.partition} is only in the archive; this replica has ids "
        f"from {hard_state.floor} on",
        not_done=f"no row from id {span.first} on was returned",
        floor=hard_state.floor,
    )


def _missing(place: SegmentPlace, path: str, span: Span) -> PartitionDamaged:
    ids = f"id {span.first}" if span.count == 1 else f"ids {span.first} to {span.last}"
    return PartitionDamaged(
        f"{path}: {ids} of partition {place.partition} {'is' if span.count == 1 else 'are'} missing",
        not_done=f"no row from id {span.first} on was returned",
        partition=place.partition, first_id=span.first, last_id=span.last,
    )  # fmt: skip


class Segment:
    def __init__(self, file: File, index: File | None, place: SegmentPlace, first_id: int, following: int | None) -> None:
        """`following`: first id of the next segment, if there is one. `close` closes the files."""
        self._place = place
        self._first_id = first_id
        self._following = following
        self._file = file
        self._index = index
        try:
            self._version = self._check_header()
            self._size = self._file.size()
            entries = index_entries(self._index.size()) if self._index is not None else 0
            self._record_bytes = max(OVERHEAD_BYTES, self._size // max(1, entries))
        except BaseException:
            self.close()
            raise

    @staticmethod
    def open(disk: Disk, place: SegmentPlace, first_id: int, following: int | None) -> Segment:
        file = disk.open(join(place.directory, segment_name(first_id)))
        return Segment(file, opened(disk, join(place.directory, index_name(first_id))), place, first_id, following)

    @staticmethod
    def at(disk: Disk, place: SegmentPlace, id_: int) -> Segment:
        """Open the segment with the id."""
        first_ids = segment_ids(disk.names(place.directory))
        position = bisect_right(first_ids, id_) - 1
        if position < 0:
            raise _in_front(disk, place, Span(id_, id_))
        return Segment.open(disk, place, first_ids[position], next(iter(first_ids[position + 1 :]), None))

    def close(self) -> None:
        self._file.close()
        if self._index is not None:
            self._index.close()

    @property
    def _batches(self) -> Batches | None:
        return Batches(self._file, self._index, self._first_id) if self._version == BATCHES else None

    def first_time(self) -> int | None:
        return None if self._batches is None else self._batches.first_time()

    def first_at(self, time: int) -> int | None:
        return None if self._batches is None else self._batches.first_at(time, BATCH_BYTES)

    def _check_header(self) -> int:
        path = self._file.path
        found = FileHeader.decode(self._file.read(0, HEADER_BYTES), path)
        key = self._place.key or found.key
        expected = FileHeader(created_ms=0, key=key, partition=self._place.partition, first_id=self._first_id)
        if replace(found, created_ms=0, version=expected.version) != expected:
            raise HeaderDamaged(
                f"the header of {path} says cluster {found.key}, partition {found.partition}, first id {found.first_id}; "
                f"it should be cluster {expected.key}, partition {expected.partition}, first id {expected.first_id}",
                not_done=f"no row from id {self._first_id} of partition {expected.partition} on was returned",
            )
        return found.version

    def runs(self, span: Span, batch_bytes: int, *, with_locks: bool) -> Iterator[Run]:
        if self._batches is not None:
            for each in self._batches.runs(span, bytes_max=batch_bytes, with_locks=with_locks):
                if isinstance(each, InvalidBatch):
                    raise self._damage(each.next_id, each.offset)
                yield each
            return
        next_id = span.first
        offset = HEADER_BYTES if next_id == self._first_id else None
        while next_id <= span.last:
            found = self._by_index(next_id, offset, span.last, batch_bytes)
            if found is None:
                if offset is None:
                    offset = self._offset_of(next_id, batch_bytes)
                found = offset, self._by_walk(next_id, offset, batch_bytes)
            start, run = found
            offset = start + len(run.data)
            run = run.part(0, min(len(run), span.last - next_id + 1))
            next_id = run.last_id + 1
            yield run

    # -- by the index

    def _by_index(self, next_id: int, offset: int | None, last_id: int, bytes_max: int) -> tuple[int, Run] | None:
        """Read records at the offsets of the index, at least one; return None if the bytes do not confirm them."""
        if self._index is None:
            return None
        count = min(last_id - next_id + 1, bytes_max // self._record_bytes + ENTRIES_MIN)
        starts = read_index(self._index, next_id - self._first_id, count + 1)
        if len(starts) == 0 or starts[0] < HEADER_BYTES or (offset is not None and starts[0] != offset):
            return None
        if len(starts) <= count:  # the end of the last record follows from its head
            starts = np.append(starts, self._end_by_head(next_id + len(starts) - 1, int(starts[-1])))
        sizes = np.diff(starts)
        impossible = np.flatnonzero((sizes < OVERHEAD_BYTES) | (starts[1:] > self._size))
        if len(impossible):
            starts = starts[: impossible[0] + 1]
        if len(starts) < 2:
            return None
        start = int(starts[0])
        taken = max(1, int(np.searchsorted(starts, start + bytes_max, "right")) - 1)
        bounds = starts[: taken + 1] - start
        if bounds[-1] > bytes_max and self._end_by_head(next_id, start) != starts[1]:
            return None  # do not allocate the size in an index
        raw = self._file.read(start, int(bounds[-1]))
        if len(raw) != bounds[-1]:
            return None
        run = Run(next_id, memoryview(raw), bounds)
        bad = first_bad(run)
        return None if bad == 0 else (start, run if bad is None else run.part(0, bad))

    def _end_by_head(self, id_: int, start: int) -> int:
        """Return the end of a record according to its head; -1 if it is not the record of this id."""
        head = self._file.read(start, HEAD_BYTES) if 0 < start < self._size else b""
        if len(head) < HEAD_BYTES:
            return -1
        found, length = id_and_length(head)
        return start + OVERHEAD_BYTES + length if found == id_ and length >= 0 else -1

    # -- by a scan

    def _offset_of(self, id_: int, batch_bytes: int) -> int:
        """Return the offset of a record by scanning all records before it."""
        next_id, offset = self._first_id, HEADER_BYTES
        while next_id < id_:
            run = self._by_walk(next_id, offset, batch_bytes)
            if run.last_id >= id_:
                return offset + int(run.bounds[id_ - next_id])
            next_id, offset = run.last_id + 1, offset + len(run.data)
        return offset

    def _by_walk(self, next_id: int, offset: int, bytes_max: int) -> Run:
        """Scan records from an offset, at least one. The caller knows that they are there, so a failure is damage."""
        window = max(bytes_max, OVERHEAD_BYTES)
        found: list[Run] = []
        while True:
            scan(
                self._file,
                segment_first_id=self._first_id,
                next_id=next_id,
                offset=offset,
                end=min(self._size, offset + window),
                chunk_bytes=window,
                on_span=lambda span: found.append(Run(span.first_id, memoryview(bytes(span.run.data)), span.run.bounds)),
            )
            if found:
                run = join_runs(found)
                return run.part(0, max(1, int(np.searchsorted(run.bounds, bytes_max, "right")) - 1))
            if offset + window >= self._size:
                raise self._damage(next_id, offset)
            window *= 2  # a record larger than the window, or damage: only the rest of the file can tell

    def _damage(self, next_id: int, offset: int) -> PartitionDamaged:
        if offset >= self._size:
            last_id = next_id if self._following is None else self._following - 1
            return _missing(self._place, self._file.path, Span(next_id, max(next_id, last_id)))
        found = survey(
            self._file, first_id=self._first_id, end=self._size, next_id=next_id, offset=offset, id_limit=self._following,
            index=self._index, version=self._version,
        )  # fmt: skip
        if found.gaps:
            gap = found.gaps[0]
            last_byte, last_id = gap.last_byte, max(next_id, gap.last_id)
        else:
            last_byte, last_id = self._size - 1, next_id if self._following is None else self._following - 1
        ids = f"record of id {next_id}" if last_id == next_id else f"records of ids {next_id} to {last_id}"
        return PartitionDamaged(
            f"{self._file.path}: bytes {offset} to {last_byte} are not the {ids} of partition {self._place.partition}",
            not_done=f"no row from id {next_id} on was returned",
            partition=self._place.partition, first_id=next_id, last_id=last_id, first_byte=offset, last_byte=last_byte,
        )  # fmt: skip
