"""Segments of format 1 as records, many batches at a time.

A quiet log has one batch for each transaction, so the heads of several batches are checked as columns: each batch costs
one native pass over its records, and little else. Returned records are proven by the checksum of their batch, which implies
those of the records; a batch is read whole even if only a part of it is needed. The slow twin, for one batch, is
`waltzd.format.batch.why_wrong`.

As in format 0, the index is a hint: without it, the lengths of records are followed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from waltz_spark.log.origin import Span
from waltzd.disk.seam import File
from waltzd.format.batch import HEAD_BYTES, Flags, Head, are_locks, decode_groups, decode_locks
from waltzd.format.checksum import I64
from waltzd.format.footer import read_footer
from waltzd.format.index import places_of, read_index
from waltzd.format.layout import HEADER_BYTES
from waltzd.format.record import LockColumns, Run
from waltzd.format.span import BatchSpan, whole_batches

_ONE_BYTES = 5
"""Bytes before the ids of locks if all records have the same number of locks: the form of the counts, and the count."""


@dataclass(frozen=True)
class InvalidBatch:
    """The offset at which there is no valid batch with the next id."""

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

    def runs(self, span: Span, *, bytes_max: int, with_locks: bool) -> Iterator[Run | InvalidBatch]:
        """Yield the records of the span; yield an `InvalidBatch` last if some cannot be proven."""
        bytes_max = max(bytes_max, HEAD_BYTES)
        found = self._start(span.first, bytes_max)
        if isinstance(found, InvalidBatch):
            yield found
            return
        offset, next_id, before = found, -1, None
        window = bytes_max
        while next_id <= span.last:
            raw = memoryview(self._file.read(offset, min(window, self._size - offset)))
            at, size_of_next = whole_batches(raw, span.last)
            if len(at) == 1:
                if size_of_next <= window or offset + size_of_next > self._size:
                    yield InvalidBatch(offset, max(next_id, span.first))
                    return
                if Head.decode(raw) is None:  # do not allocate the size in a damaged head
                    yield InvalidBatch(offset, max(next_id, span.first))
                    return
                window = size_of_next
                continue
            window = bytes_max
            batches = _BatchSpan(raw[: at[-1]], np.array(at, np.int64), before)
            if next_id >= 0 and batches.count and batches.head["first_id"][0] != next_id:
                batches.count = 0
            run = self._run(batches, offset, with_locks=with_locks) if batches.count else None
            if run is None:
                yield InvalidBatch(offset, max(next_id, span.first))
                return
            before, next_id = batches.last, run.last_id + 1
            offset += int(batches.at[batches.count])
            first, stop = max(0, span.first - run.first_id), min(len(run), span.last - run.first_id + 1)
            if stop > first:
                yield run.part(first, stop)
            if batches.count < len(at) - 1 and next_id <= span.last:
                yield InvalidBatch(offset, max(next_id, span.first))
                return

    def _run(self, batches: _BatchSpan, offset: int, *, with_locks: bool) -> Run | None:
        """Return the records of the valid batches of a span, of fewer where lengths or ids show that an owner was wrong."""
        return batches.columns(with_locks=with_locks) if batches.find_starts(self._hint(batches, offset)) else None

    def _hint(self, batches: BatchSpan, offset: int) -> I64 | None:
        """Return the offsets of records in the span, according to the index."""
        if self._index is None:
            return None
        entries = read_index(self._index, batches.first_id - self._first_id, batches.next_id - batches.first_id)
        return places_of(entries)[0] - offset

    # -- finding

    def _start(self, id_: int, bytes_max: int) -> int | InvalidBatch:
        """Return the offset of the batch with the id, or an `InvalidBatch`."""
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
                return InvalidBatch(offset, next_id)
            next_id = head.last_id + 1
            if id_ < next_id:
                return offset
        return InvalidBatch(offset, next_id)

    def _head(self, offset: int) -> Head | None:
        return Head.decode(self._file.read(offset, HEAD_BYTES)) if HEADER_BYTES <= offset < self._size else None

    def heads(self, offset: int, bytes_max: int) -> Iterator[tuple[int, Head]]:
        """Yield the heads of batches with their offsets, starting at a batch, up to the first invalid one."""
        raw, start = b"", 0
        while True:
            if offset + HEAD_BYTES > start + len(raw):
                raw, start = self._file.read(offset, bytes_max), offset
            head = Head.decode(raw, offset - start)
            if head is None:
                return
            yield offset, head
            offset += head.size

    def first_time(self) -> int | None:
        """Return the time of the first batch; None if it is damaged."""
        head = self._head(HEADER_BYTES)
        return None if head is None else head.time

    def first_at(self, time: int, bytes_max: int) -> int | None:
        """Return the id of the first record of that time or later; None if there is none. Use the footer if there is
        one."""
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


class _BatchSpan(BatchSpan):
    """A span of batches that becomes one run with times, groups and locks."""

    def columns(self, *, with_locks: bool) -> Run | None:
        head, records = self.head[: self.count], self.records
        locks = self._locks(records) if with_locks else None
        if with_locks and locks is None:
            return None
        times = np.repeat(head["time"].astype(np.int64), records)
        return replace(self.run, times=times, follows=self._follows(records), locks=locks)

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
        """Return the locks; None if a section is invalid despite its checksum, because of a faulty owner."""
        head, behind = self.head[: self.count], np.cumsum(records)
        sizes, starts = head["lock_bytes"].astype(np.int64), self.at[: self.count] + HEAD_BYTES
        parts: list[tuple[I64, LockColumns]] = []
        """Batches with the same number of locks for each record, and their locks."""
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
        """Return the locks of batches with one record and equal sizes, as columns: a quiet log has no other batches."""
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
