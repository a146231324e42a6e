"""The records of one segment from its file, in either format, and the detection of damage.

The index gives the offsets of records as a hint only: each record is checked by id and length, and by its checksum or that
of its batch. Where the index does not help, records are followed from the start of the segment. Only the survey of the data
reports damage, because a wrong index is no damage of records.

Times, groups and locks of batches become columns, many batches at a time: a quiet log has one batch for each
transaction.

The slow twin, for one batch, is `waltzd.format.batch.Batch.run_with_locks`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeAlias
from uuid import UUID

import numpy as np

from waltz_spark.log.origin import BATCH_BYTES, Extent, Span
from waltzd.disk.seam import Disk, File, join, opened
from waltzd.errors import Trimmed, WaltzError
from waltzd.errors.operations import HeaderDamaged, PartitionDamaged
from waltzd.format.batch import HEAD_BYTES, Flags, Head, are_locks, decode_groups, decode_locks
from waltzd.format.batch import HEAD_BYTES as BATCH_HEAD_BYTES
from waltzd.format.checksum import I64
from waltzd.format.footer import read_footer
from waltzd.format.index import places_of, read_index
from waltzd.format.layout import BATCHES, HEADER_BYTES, FileHeader, index_entries, index_name, segment_ids, segment_name
from waltzd.format.record import OVERHEAD_BYTES, LockColumns, Run, first_bad, id_and_length
from waltzd.format.scan import BATCH_BYTES_MAX, is_sound_record, survey, whole_records
from waltzd.format.span import BatchSpan, whole_batches
from waltzd.storage.replica.hard_state import read_hard_state

_ONE_BYTES = 5
"""Bytes before the ids of locks if all records have the same number of locks: the form of the counts, and the count."""


def columns_of(span: BatchSpan, *, with_locks: bool) -> Run | None:
    """Return the records of the sound batches as one run; None if a section of locks is invalid despite its checksum,
    because of a faulty owner."""
    times = np.repeat(span.head["time"][: span.count].astype(np.int64), span.records)
    locks = _locks(span) if with_locks else None
    if with_locks and locks is None:
        return None
    return replace(span.run, times=times, follows=_follows(span), locks=locks)


def _follows(span: BatchSpan) -> Flags | None:
    head, records = span.head[: span.count], span.records
    grouped = np.flatnonzero(head["group_bytes"])
    if not len(grouped):
        return None
    found = np.zeros(int(records.sum()), np.bool_)
    behind = np.cumsum(records)
    for number in grouped.tolist():
        start = int(span.at[number]) + HEAD_BYTES + int(head["lock_bytes"][number])
        count, stop = int(records[number]), int(span.at[number] + span.lead[number])
        flags = decode_groups(span.raw[start:stop], count)
        assert flags is not None
        found[behind[number] - count : behind[number]] = flags
    return found


def _locks(span: BatchSpan) -> LockColumns | None:
    records = span.records
    behind = np.cumsum(records)
    sizes, starts = span.head["lock_bytes"][: span.count].astype(np.int64), span.at[: span.count] + HEAD_BYTES
    parts: list[tuple[I64, LockColumns]] = []
    """Batches with the same number of locks for each record, and their locks."""
    forms = np.frombuffer(span.raw, np.uint8)[starts]
    has_one = (records == 1) & (sizes >= _ONE_BYTES) & (forms == 0)
    for size in np.unique(sizes[has_one]).tolist():
        numbers = np.flatnonzero(has_one & (sizes == size))
        found = _locks_of_ones(span.raw, starts[numbers], size)
        if found is None:
            return None
        parts.append((numbers, found))
    for number in np.flatnonzero((sizes > 0) & ~has_one).tolist():
        raw, count = span.raw[int(starts[number]) : int(starts[number] + sizes[number])], int(records[number])
        found = decode_locks(raw, count) if are_locks(raw, count) else None
        if found is None:
            return None
        parts.append((np.array([number]), found))
    return _in_order(parts, behind - records, int(behind[-1]))


def _locks_of_ones(raw: memoryview, starts: I64, size: int) -> LockColumns | None:
    """Return the locks of batches with one record and equal sizes, as columns: a quiet log has no other batches."""
    every = np.ndarray((len(raw) - size + 1,), f"V{size}", buffer=raw, strides=(1,))
    rows = np.ascontiguousarray(every[starts]).view(np.uint8).reshape(-1, size)
    each = 4 * (size - _ONE_BYTES) // 33  # of 8 bytes and 2 bits
    counts = np.ascontiguousarray(rows[:, 1:_ONE_BYTES]).view(">u4").ravel()
    if each == 0 or (counts != each).any() or _ONE_BYTES + 8 * each + (each + 3) // 4 != size:
        return None
    ids = np.ascontiguousarray(rows[:, _ONE_BYTES : _ONE_BYTES + 8 * each]).view(">u8").astype(np.uint64)
    packed = rows[:, _ONE_BYTES + 8 * each :]
    modes = (packed[:, :, None] >> np.array([6, 4, 2, 0], np.uint8) & 3).reshape(len(rows), -1)[:, :each]
    if (modes == 0).any():
        return None
    return LockColumns(np.full(len(rows), each, np.int64), ids.ravel(), modes.astype(np.uint8).ravel())


def _in_order(parts: Sequence[tuple[I64, LockColumns]], firsts: I64, records: int) -> LockColumns:
    """Merge locks in the order of records. `firsts`: index of the first record of each batch."""
    counts = np.zeros(records, np.int64)
    places = []
    for numbers, found in parts:
        each = len(found) // len(numbers)
        rows = (firsts[numbers][:, None] + np.arange(each)).ravel()
        counts[rows] = found.counts
        places.append(rows)
    starts = np.cumsum(counts) - counts
    ids, modes = np.zeros(int(counts.sum()), np.uint64), np.zeros(int(counts.sum()), np.uint8)
    for rows, (_, found) in zip(places, parts, strict=True):
        within = np.arange(len(found.ids)) - np.repeat(np.cumsum(found.counts) - found.counts, found.counts)
        at = np.repeat(starts[rows], found.counts) + within
        ids[at], modes[at] = found.ids, found.modes
    return LockColumns(counts, ids, modes)


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
    next_id = span.first
    while next_id <= span.last:
        with closing(Segment.at(disk, place, Span(next_id, span.last))) as segment:
            part = segment.part(Span(next_id, span.last))
            yield from segment.runs(part, batch_bytes, with_locks=with_locks)
        next_id = part.last + 1


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
    def at(disk: Disk, place: SegmentPlace, span: Span) -> Segment:
        """Open the segment with the first id of the span."""
        first_ids = segment_ids(disk.names(place.directory))
        position = bisect_right(first_ids, span.first) - 1
        following = next(iter(first_ids[position + 1 :]), None)
        if position < 0:
            raise _in_front(disk, place, span if following is None else span.cut(Span(0, following - 1)))
        file = disk.open(join(place.directory, segment_name(first_ids[position])))
        index = opened(disk, join(place.directory, index_name(first_ids[position])))
        return Segment(file, index, place, first_ids[position], following)

    def close(self) -> None:
        self._file.close()
        if self._index is not None:
            self._index.close()

    def part(self, span: Span) -> Span:
        """Return the ids of the span that are in front of the next segment."""
        return span if self._following is None else span.cut(Span(span.first, self._following - 1))

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

    # -- records

    def runs(self, span: Span, batch_bytes: int, *, with_locks: bool) -> Iterator[Run]:
        """Yield the records of the span; raise `PartitionDamaged` where the data does not have the next one."""
        next_id, offset = self._start(span.first)
        before: tuple[int, int] | None = None
        needed = BATCH_HEAD_BYTES
        while next_id <= span.last:
            likely = 2 * self._record_bytes * (span.last - next_id + 1)
            size = max(min(batch_bytes, likely), needed)
            raw = memoryview(self._file.read(offset, min(size, self._size - offset)))
            found: BatchSpan | Run | None
            if self._version == BATCHES:
                found = self._batches(raw, next_id, offset, span.last, before)
                run = None if found is None else columns_of(found, with_locks=with_locks)
            else:
                found = run = self._records(raw, next_id, offset, span.last)
            if found is None or run is None:
                needed = self._size_by_head(raw, next_id)
                if size < needed <= self._size - offset:
                    continue
                raise self._damage(next_id, offset)
            before, end = (None, len(found.data)) if isinstance(found, Run) else (found.last, len(found.bytes))
            needed, next_id, offset = BATCH_HEAD_BYTES, run.last_id + 1, offset + end
            first, stop = max(0, span.first - run.first_id), min(len(run), span.last - run.first_id + 1)
            if stop > first:
                yield run.part(first, stop)

    def _start(self, id_: int) -> tuple[int, int]:
        """Return the first id of the record or batch that holds an id, and where it begins: as the index says if the data
        agrees, else the start of the segment."""
        entries = self._entries(id_, 2) if id_ > self._first_id else np.zeros(0, np.int64)
        if len(entries) and self._version == BATCHES:
            offset = int(places_of(entries)[1][0])
            head = self._head(offset)
            if head is not None and head.first_id <= id_ <= head.last_id:
                return head.first_id, offset
        elif len(entries) and is_sound_record(self._file, offset := int(entries[0]), self._size, id_):
            end = offset + self._size_by_head(self._file.read(offset, OVERHEAD_BYTES), id_)
            if end in entries[1:] or len(entries) == 1:  # a payload can look like a record, but no entry is behind it
                return id_, offset
        return self._first_id, HEADER_BYTES

    def _entries(self, id_: int, count: int) -> I64:
        """Return the entries of the index from an id on; empty without an index."""
        return np.zeros(0, np.int64) if self._index is None else read_index(self._index, id_ - self._first_id, count)

    def _records(self, raw: memoryview, next_id: int, offset: int, last_id: int) -> Run | None:
        """Return the sound records of format 0 at the start of `raw`; None without."""
        count = last_id - next_id + 1
        hint = self._entries(next_id, min(count, len(raw) // self._record_bytes + ENTRIES_MIN)) - offset
        bounds = whole_records(raw, hint)[: count + 1]
        run = Run(next_id, raw[: int(bounds[-1])], bounds)
        bad = first_bad(run)
        run = run if bad is None else run.part(0, bad)
        return run if len(run) else None

    def _batches(
        self, raw: memoryview, next_id: int, offset: int, last_id: int, before: tuple[int, int] | None
    ) -> BatchSpan | None:
        """Return the sound batches at the start of `raw`; None without. `before`: see `BatchSpan`."""
        at = whole_batches(raw, last_id)[0]
        if len(at) == 1:
            return None
        found = BatchSpan(raw[: at[-1]], np.array(at), before, offset)
        found.keep_to(BATCH_BYTES_MAX)
        if not found.count or found.first_id != next_id:
            return None
        entries = self._entries(next_id, found.next_id - next_id)
        return found if found.find_starts(places_of(entries)[0] - offset) else None

    def _size_by_head(self, raw: bytes | memoryview, next_id: int) -> int:
        """Return the size of the record or batch that `raw` begins with, according to its head; 0 if it is another one."""
        if self._version == BATCHES:
            head = Head.decode(raw)
            return head.size if head is not None and head.first_id == next_id else 0
        id_, length = id_and_length(raw) if len(raw) >= OVERHEAD_BYTES else (next_id, -OVERHEAD_BYTES)
        return OVERHEAD_BYTES + length if id_ == next_id else 0

    def _head(self, offset: int) -> Head | None:
        is_inside = HEADER_BYTES <= offset < self._size
        return Head.decode(self._file.read(offset, BATCH_HEAD_BYTES)) if is_inside else None

    # -- times

    def first_time(self) -> int | None:
        """Return the time of the first batch; None in format 0, or if the batch is damaged."""
        head = self._head(HEADER_BYTES) if self._version == BATCHES else None
        return None if head is None else head.time

    def first_at(self, time: int) -> int | None:
        """Return the id of the first record of that time or later; None if there is none, as in format 0. A footer has the
        places of the heads; without one, or if a head is damaged, they are followed."""
        footer = read_footer(self._file) if self._version == BATCHES else None
        low, high = 0, 0 if footer is None else len(footer.batches)
        found = None
        while low < high:
            assert footer is not None
            middle = (low + high) // 2
            head = self._head(int(footer.batches[middle]))
            if head is None:
                return self._first_by_heads(time)
            if head.time >= time:
                found, high = head.first_id, middle
            else:
                low = middle + 1
        return found if footer is not None else self._first_by_heads(time)

    def _first_by_heads(self, time: int) -> int | None:
        offset = HEADER_BYTES
        raw, start = b"", 0
        while self._version == BATCHES:
            if offset + BATCH_HEAD_BYTES > start + len(raw):
                raw, start = self._file.read(offset, BATCH_BYTES), offset
            head = Head.decode(raw, offset - start)
            if head is None:
                return None
            if head.time >= time:
                return head.first_id
            offset += head.size
        return None

    # -- damage

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
