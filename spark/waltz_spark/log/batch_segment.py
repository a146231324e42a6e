"""Segments of format 1 as records: many batches at a time.

A log that is quiet has a batch for each transaction, so the heads of a stretch are checked as columns: for each batch
alone there is a native pass over its records, and little else. What is given was proven by the checksums of its batch,
which imply those of its records; a batch is read whole even where only a part of it was asked for. The twin is
`waltzd.format.batch.why_wrong`, which looks at one batch.

As in format 0, the index is a hint: without it, the lengths of records are followed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from waltz_spark.log.origin import Span
from waltzd.disk.seam import File
from waltzd.format.batch import HEAD_BYTES, LAST, MAGIC, Flags, Head, are_locks, decode_groups, decode_locks
from waltzd.format.checksum import I64, crc32, crc_of_rows
from waltzd.format.index import places_of, read_index
from waltzd.format.layout import HEADER_BYTES
from waltzd.format.record import OVERHEAD_BYTES, LockColumns, Run, walk
from waltzd.format.scan import read_footer

_FRONT = struct.Struct(">4sIqI")
_HEAD = np.dtype(
    [
        ("magic", "S4"),
        ("size", ">u4"),
        ("first_id", ">i8"),
        ("records", ">i4"),
        ("session", ">i8"),
        ("generation", ">i4"),
        ("committed", ">i8"),
        ("time", ">i8"),
        ("lock_bytes", ">u4"),
        ("group_bytes", ">u4"),
        ("record_bytes", ">u4"),
        ("flags", ">u4"),
        ("before", ">u4"),
        ("section_crc", ">u4"),
        ("record_crc", ">u4"),
        ("zeros", "V16"),
        ("crc", ">u4"),
    ]
)
assert _HEAD.itemsize == HEAD_BYTES
_ONE_BYTES = 5
"""In front of the ids of locks, where all records have as many: the form of the counts, and the count."""
_ROWS_MIN = 16
"""Below this, the checksums of heads one by one are cheaper than as columns."""


@dataclass(frozen=True)
class Bad:
    """Where no sound batch with the next id stands."""

    offset: int
    next_id: int


class Batches:
    """The batches of one segment of format 1."""

    def __init__(self, file: File, index: File | None, first_id: int) -> None:
        self._file = file
        self._index = index
        self._first_id = first_id
        self._size = file.size()

    # -- reading

    def runs(self, span: Span, *, bytes_max: int, with_locks: bool) -> Iterator[Run | Bad]:
        """The records of the span, a `Bad` at the end where they cannot be proven."""
        bytes_max = max(bytes_max, HEAD_BYTES)
        found = self._start(span.first, bytes_max)
        if isinstance(found, Bad):
            yield found
            return
        offset, next_id, before = found, -1, None
        window = bytes_max
        while next_id <= span.last:
            raw = memoryview(self._file.read(offset, min(window, self._size - offset)))
            at, size_of_next = _whole(raw, span.last)
            if len(at) == 1:
                if size_of_next <= window or offset + size_of_next > self._size:
                    yield Bad(offset, max(next_id, span.first))
                    return
                if Head.decode(raw) is None:  # nothing so large is allocated on the word of a damaged one
                    yield Bad(offset, max(next_id, span.first))
                    return
                window = size_of_next
                continue
            window = bytes_max
            stretch = _Stretch(raw[: at[-1]], np.array(at, np.int64), before)
            if next_id >= 0 and stretch.count and stretch.head["first_id"][0] != next_id:
                stretch.count = 0
            run = self._run(stretch, offset, with_locks=with_locks) if stretch.count else None
            if run is None:
                yield Bad(offset, max(next_id, span.first))
                return
            before, next_id = stretch.last, run.last_id + 1
            offset += int(stretch.at[stretch.count])
            first, stop = max(0, span.first - run.first_id), min(len(run), span.last - run.first_id + 1)
            if stop > first:
                yield run.part(first, stop)
            if stretch.count < len(at) - 1 and next_id <= span.last:
                yield Bad(offset, max(next_id, span.first))
                return

    def _run(self, stretch: _Stretch, offset: int, *, with_locks: bool) -> Run | None:
        """The records of the sound batches of a stretch, of fewer where lengths or ids show that an owner was wrong."""
        bounds = self._bounds_by_index(stretch, offset)
        if bounds is None:
            bounds = stretch.bounds_by_walk()
        return None if bounds is None else stretch.run(bounds, with_locks=with_locks)

    def _bounds_by_index(self, stretch: _Stretch, offset: int) -> I64 | None:
        """Where each record starts in the stretch, if the index says so and all lengths agree."""
        if self._index is None:
            return None
        head = stretch.head[: stretch.count]
        first_id, count = int(head["first_id"][0]), int(head["records"].sum())
        entries = read_index(self._index, first_id - self._first_id, count)
        if len(entries) != count:
            return None
        starts = places_of(entries)[0] - offset
        return starts if stretch.are_starts(starts) else None

    # -- finding

    def _start(self, id_: int, bytes_max: int) -> int | Bad:
        """The offset of the batch that has the id."""
        if id_ == self._first_id:
            return HEADER_BYTES
        if self._index is not None:
            entry = read_index(self._index, id_ - self._first_id, 1)
            if len(entry):
                offset = int(places_of(entry)[1][0])
                head = self._head(offset)
                if head is not None and head.first_id <= id_ <= head.last_id:
                    return offset
        offset, next_id = HEADER_BYTES, self._first_id
        for offset, head in self.heads(HEADER_BYTES, bytes_max):
            if head.first_id != next_id:
                return Bad(offset, next_id)
            next_id = head.last_id + 1
            if id_ < next_id:
                return offset
        return Bad(offset, next_id)

    def _head(self, offset: int) -> Head | None:
        return Head.decode(self._file.read(offset, HEAD_BYTES)) if HEADER_BYTES <= offset < self._size else None

    def heads(self, offset: int, bytes_max: int) -> Iterator[tuple[int, Head]]:
        """Each with its offset, from that of a batch on, as far as they are sound."""
        raw, start = b"", 0
        while True:
            if offset + HEAD_BYTES > start + len(raw):
                raw, start = self._file.read(offset, bytes_max), offset
            head = Head.decode(raw, offset - start)
            if head is None:
                return
            yield offset, head
            offset += head.size

    def preambles(self, span: Span, bytes_max: int) -> Iterator[tuple[int, bytes] | Bad]:
        """What stands in front of the records of each batch that begins within the span, and its first id."""
        start = self._start(span.first, bytes_max)
        if isinstance(start, Bad):
            yield start
            return
        next_id = span.first
        for offset, head in self.heads(start, bytes_max):
            if head.first_id > span.last:
                return
            if head.first_id >= span.first:
                raw = self._file.read(offset, head.lead)
                if head.first_id != next_id or crc32(raw[HEAD_BYTES:]) != head.section_crc:
                    yield Bad(offset, next_id)
                    return
                yield head.first_id, raw
            next_id = head.last_id + 1
            if next_id > span.last:
                return
        yield Bad(start, next_id)

    def first_time(self) -> int | None:
        """Of its first batch."""
        head = self._head(HEADER_BYTES)
        return None if head is None else head.time

    def first_at(self, time: int, bytes_max: int) -> int | None:
        """The id of the first record of that time or later; None where there is none. By the footer, where there is one."""
        footer = read_footer(self._file)
        if footer is None:
            return self._first_by_heads(time, bytes_max)
        low, high = 0, len(footer.batches)
        while low < high:
            middle = (low + high) // 2
            head = self._head(int(footer.batches[middle]))
            if head is None:
                return self._first_by_heads(time, bytes_max)
            low, high = (low, middle) if head.time >= time else (middle + 1, high)
        head = self._head(int(footer.batches[low])) if low < len(footer.batches) else None
        return None if head is None else head.first_id

    def _first_by_heads(self, time: int, bytes_max: int) -> int | None:
        return next((head.first_id for _, head in self.heads(HEADER_BYTES, bytes_max) if head.time >= time), None)


def _whole(raw: memoryview, last_id: int) -> tuple[list[int], int]:
    """Where each whole batch begins and where the last one ends, up to that with the id; and the size of the next one."""
    at, place, size = [0], 0, HEAD_BYTES + OVERHEAD_BYTES
    while place + HEAD_BYTES <= len(raw):
        magic, size, first_id, records = _FRONT.unpack_from(raw, place)
        if magic != MAGIC or size < HEAD_BYTES + OVERHEAD_BYTES:
            return at, 0
        if place + size > len(raw):
            break
        place += size
        at.append(place)
        if first_id + records > last_id:
            break
    return at, size


class _Stretch:
    """Whole batches back to back, as their heads say. `count` of them are sound and fit to each other."""

    def __init__(self, raw: memoryview, at: I64, before: tuple[int, int] | None) -> None:
        """`before`: the checksum and the time of the head in front, where it is known."""
        self.raw = raw
        self.at = at
        every = np.ndarray((len(raw) - HEAD_BYTES + 1,), f"V{HEAD_BYTES}", buffer=raw, strides=(1,))
        self.rows: NDArray[np.void] = every[at[:-1]]
        self.head: NDArray[np.void] = self.rows.view(_HEAD)
        self.lead = HEAD_BYTES + self.head["lock_bytes"].astype(np.int64) + self.head["group_bytes"]
        self.count = self._sound(before)

    @property
    def last(self) -> tuple[int, int]:
        head = self.head[self.count - 1]
        return int(head["crc"]), int(head["time"])

    def _sound(self, before: tuple[int, int] | None) -> int:
        head, sizes = self.head, np.diff(self.at)
        crcs, times, records = head["crc"], head["time"], head["records"].astype(np.int64)
        right = self._head_crcs() == crcs
        right &= (head["zeros"] == np.void(bytes(16))) & (head["flags"] & ~np.uint32(LAST) == 0)
        right &= (self.lead + head["record_bytes"] == sizes) & (records > 0) & (head["first_id"] >= 0)
        right &= head["record_bytes"] >= records * OVERHEAD_BYTES
        right[1:] &= (head["first_id"][1:] == head["first_id"][:-1] + records[:-1]) & (times[1:] >= times[:-1])
        right[1:] &= head["before"][1:] == crcs[:-1]
        if before is not None:
            right[0] &= head["before"][0] == before[0] and times[0] >= before[1]
        sound = len(right) if right.all() else int(np.argmin(right))
        at, leads = self.at.tolist(), self.lead.tolist()
        wanted = zip(head["record_crc"].tolist(), head["section_crc"].tolist(), range(sound), strict=False)
        for record_crc, section_crc, number in wanted:
            start, lead = at[number], leads[number]
            if crc32(self.raw[start + lead : at[number + 1]]) != record_crc:
                return number
            sections = self.raw[start + HEAD_BYTES : start + lead]
            if (crc32(sections) if lead > HEAD_BYTES else 0) != section_crc:
                return number
        return sound

    def _head_crcs(self) -> NDArray[np.uint32]:
        if len(self.rows) < _ROWS_MIN:
            starts = self.at[:-1].tolist()
            found = [crc32(self.raw[start : start + HEAD_BYTES - 4]) for start in starts]
            return np.array(found, np.uint32)
        return crc_of_rows(self.rows.view(np.uint8).reshape(-1, HEAD_BYTES)[:, :-4])

    # -- where records start

    def are_starts(self, starts: I64) -> bool:
        """Whether the records that start there fill the sound batches, one behind the other, and have their ids."""
        head = self.head[: self.count]
        counts = head["records"].astype(np.int64)
        firsts = np.concatenate(([0], np.cumsum(counts)[:-1]))
        end = int(self.at[self.count])
        if (starts < HEAD_BYTES).any() or (starts > end - OVERHEAD_BYTES).any():
            return False
        every = np.ndarray((end - 31,), ">i4", buffer=self.raw[28:end], strides=(1,))
        ends = starts + every[starts].astype(np.int64) + OVERHEAD_BYTES
        expected = np.append(starts[1:], 0)
        expected[firsts + counts - 1] = self.at[1 : self.count + 1]
        is_right = np.array_equal(ends, expected)
        is_right &= np.array_equal(starts[firsts], self.at[: self.count] + self.lead[: self.count])
        ids = np.ndarray((end - 7,), ">i8", buffer=self.raw[:end], strides=(1,))[starts]
        first_id = int(head["first_id"][0])
        return bool(is_right and (ids == np.arange(first_id, first_id + len(starts))).all())

    def bounds_by_walk(self) -> I64 | None:
        """The twin: by the lengths alone. Of fewer batches where an owner was wrong; None where the first one is."""
        starts: list[I64] = []
        at, leads = self.at.tolist(), self.lead.tolist()
        for number, records in enumerate(self.head["records"][: self.count].tolist()):
            start, end = at[number] + leads[number], at[number + 1]
            bounds = walk(self.raw[start:end])
            if len(bounds) != records + 1 or bounds[-1] != end - start:
                self.count = number
                break
            starts.append(bounds[:-1] + start)
        if not starts:
            return None
        found = np.concatenate(starts)
        return found if self.are_starts(found) else None

    # -- as one run

    def run(self, starts: I64, *, with_locks: bool) -> Run | None:
        head, count = self.head[: self.count], self.count
        records = head["records"].astype(np.int64)
        at, leads = self.at.tolist(), self.lead.tolist()
        pieces = [self.raw[at[number] + leads[number] : at[number + 1]] for number in range(count)]
        data = pieces[0] if count == 1 else memoryview(b"".join(pieces))
        # Where each record starts once the leads are taken out.
        bounds = np.append(starts - np.repeat(np.cumsum(self.lead[:count]), records), len(data))
        follows = self._follows(records)
        locks = self._locks(records) if with_locks else None
        if with_locks and locks is None:
            return None
        times = np.repeat(head["time"].astype(np.int64), records)
        return Run(int(head["first_id"][0]), data, bounds, times=times, follows=follows, locks=locks)

    def _follows(self, records: I64) -> Flags | None:
        head = self.head[: self.count]
        grouped = np.flatnonzero(head["group_bytes"])
        if not len(grouped):
            return None
        found = np.zeros(int(records.sum()), np.bool_)
        behind = np.cumsum(records)
        for number in grouped.tolist():
            start = int(self.at[number]) + HEAD_BYTES + int(head["lock_bytes"][number])
            count, stop = int(records[number]), int(self.at[number] + self.lead[number])
            flags = decode_groups(self.raw[start:stop], count)
            assert flags is not None
            found[behind[number] - count : behind[number]] = flags
        return found

    def _locks(self, records: I64) -> LockColumns | None:
        """None where a section is none: its checksum is right, so its owner was wrong."""
        head, behind = self.head[: self.count], np.cumsum(records)
        sizes, starts = head["lock_bytes"].astype(np.int64), self.at[: self.count] + HEAD_BYTES
        parts: list[tuple[I64, LockColumns]] = []
        """Numbers of batches with as many locks each, and what they say."""
        forms = np.frombuffer(self.raw, np.uint8)[starts]
        has_one = (records == 1) & (sizes >= _ONE_BYTES) & (forms == 0)
        for size in np.unique(sizes[has_one]).tolist():
            numbers = np.flatnonzero(has_one & (sizes == size))
            found = self._locks_of_ones(starts[numbers], size)
            if found is None:
                return None
            parts.append((numbers, found))
        for number in np.flatnonzero((sizes > 0) & ~has_one).tolist():
            raw, count = self.raw[int(starts[number]) : int(starts[number] + sizes[number])], int(records[number])
            found = decode_locks(raw, count) if are_locks(raw, count) else None
            if found is None:
                return None
            parts.append((np.array([number]), found))
        return _in_order(parts, behind - records, int(behind[-1]))

    def _locks_of_ones(self, starts: I64, size: int) -> LockColumns | None:
        """Of batches of one record whose sections have the same size. As columns: a quiet log has nothing else."""
        every = np.ndarray((len(self.raw) - size + 1,), f"V{size}", buffer=self.raw, strides=(1,))
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
    """`firsts`: of each batch, the number of its first record."""
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
