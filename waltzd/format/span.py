"""Spans: what a scan of a segment reads at a time, records of format 0 or batches of format 1.

A log with little traffic has one batch for each transaction, so the heads of all batches in a span are checked as columns.
The only work for each batch is a native pass over its bytes. `waltzd.format.batch.why_wrong` makes the same checks of one
batch, and tests compare the two. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from waltzd.format.batch import HEAD_BYTES, LAST, MAGIC, Batch, Head, are_locks, batch_at, decode_groups, encode_groups
from waltzd.format.checksum import I64, crc32, crc_of_rows
from waltzd.format.index import LEAD_BITS
from waltzd.format.layout import ID_MAX
from waltzd.format.record import OVERHEAD_BYTES, Run, walk

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
_ROWS_MIN = 16
"""Number of heads from which their checksums are computed as columns: for fewer, one by one takes less time."""


def whole_batches(raw: memoryview, last_id: int = ID_MAX) -> tuple[list[int], int]:
    """Return the offsets of the whole batches in `raw`, up to the batch that holds `last_id`, with the end of the last one;
    and the size of the batch after them, 0 if no head follows. Checksums of heads are not checked."""
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


class BatchSpan:
    """Whole batches back to back, by the sizes in their heads. The first `count` of them are sound and follow each
    other."""

    def __init__(self, raw: memoryview, at: I64, before: tuple[int, int] | None, offset: int = 0) -> None:
        """`at`: where each batch begins in `raw`, and where the last one ends. `before`: checksum and time of the head
        before the first one; None if unknown. `offset`: offset of `raw` in its file."""
        assert len(at) > 1
        self.raw = raw
        self.offset = offset
        self.at = at
        every = np.ndarray((len(raw) - HEAD_BYTES + 1,), f"V{HEAD_BYTES}", buffer=raw, strides=(1,))
        self.rows: NDArray[np.void] = every[at[:-1]]
        self.head: NDArray[np.void] = self.rows.view(_HEAD)
        self.starts: I64 = np.zeros(0, np.int64)
        """Where each record of the sound batches starts in `raw`; empty before `find_starts`."""
        self.lead = HEAD_BYTES + self.head["lock_bytes"].astype(np.int64) + self.head["group_bytes"]
        self.count = self._sound(before)

    @property
    def first_id(self) -> int:
        return int(self.head["first_id"][0])

    @property
    def next_id(self) -> int:
        return self.first_id + int(self.records.sum())

    @property
    def records(self) -> I64:
        """Number of records of each sound batch."""
        return self.head["records"][: self.count].astype(np.int64)

    @property
    def bytes(self) -> memoryview:
        """The bytes of the sound batches."""
        return self.raw[: int(self.at[self.count])]

    @property
    def last(self) -> tuple[int, int]:
        """Checksum and time of the last sound head."""
        head = self.head[self.count - 1]
        return int(head["crc"]), int(head["time"])

    def keep_to(self, bytes_max: int) -> None:
        """Drop batches that follow the last batch of a segment, and a batch above `bytes_max` with all that follow it."""
        is_end = np.flatnonzero(self.head["flags"][: self.count] & LAST)
        too_large = np.flatnonzero(np.diff(self.at)[: self.count] > bytes_max)
        self.count = min([self.count, *(is_end[:1] + 1).tolist(), *too_large[:1].tolist()])

    def head_of(self, number: int) -> Head:
        found = Head.decode(self.raw, int(self.at[number]))
        assert found is not None, "the head is one of the sound ones"
        return found

    def _sound(self, before: tuple[int, int] | None) -> int:
        head, sizes = self.head, np.diff(self.at)
        crcs, times, records = head["crc"], head["time"], head["records"].astype(np.int64)
        right = self._head_crcs() == crcs
        right &= (head["zeros"] == np.void(bytes(16))) & (head["flags"] & ~np.uint32(LAST) == 0)
        right &= (self.lead + head["record_bytes"] == sizes) & (records > 0)
        right &= (head["first_id"] >= 0) & (head["first_id"] <= ID_MAX - records)
        right &= head["record_bytes"] >= records * OVERHEAD_BYTES
        right &= (head["group_bytes"] == 0) | (head["group_bytes"] == (records + 7) // 8)
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
            if lead == HEAD_BYTES:
                if section_crc:
                    return number
            elif not self._are_sections(number, self.raw[start + HEAD_BYTES : start + lead], section_crc):
                return number
        return sound

    def _head_crcs(self) -> NDArray[np.uint32]:
        if len(self.rows) < _ROWS_MIN:
            starts = self.at[:-1].tolist()
            found = [crc32(self.raw[start : start + HEAD_BYTES - 4]) for start in starts]
            return np.array(found, np.uint32)
        return crc_of_rows(self.rows.view(np.uint8).reshape(-1, HEAD_BYTES)[:, :-4])

    def _are_sections(self, number: int, raw: memoryview, crc: int) -> bool:
        if crc32(raw) != crc:
            return False
        head = self.head[number]
        records, locks = int(head["records"]), int(head["lock_bytes"])
        if not are_locks(raw[:locks], records):
            return False
        follows = decode_groups(raw[locks:], records)
        return follows is None or not (follows[0] or encode_groups(follows) != raw[locks:])

    # -- where records start

    def find_starts(self, hint: I64 | None = None) -> bool:
        """Find where each record of the sound batches starts: at `hint` if all lengths agree with it, else by the lengths
        alone. Count only the batches in front of one whose lengths or ids are wrong; return False if that leaves none."""
        records = self.records
        if (records == 1).all():
            hint = self.at[: self.count] + self.lead[: self.count]
        if hint is not None and len(hint) == int(records.sum()) and self._are_starts(hint):
            self.starts = hint
            return True
        found: list[I64] = []
        at, leads = self.at.tolist(), self.lead.tolist()
        for number, count in enumerate(records.tolist()):
            start, end = at[number] + leads[number], at[number + 1]
            bounds = walk(self.raw[start:end])
            ids = np.ndarray((end - start - 7,), ">i8", buffer=self.raw[start:end], strides=(1,))
            first_id = int(self.head["first_id"][number])
            if (
                len(bounds) != count + 1
                or bounds[-1] != end - start
                or (ids[bounds[:-1]] != np.arange(first_id, first_id + count)).any()
            ):
                self.count = number
                break
            found.append(bounds[:-1] + start)
        self.starts = np.concatenate(found) if found else np.zeros(0, np.int64)
        return bool(found)

    def _are_starts(self, starts: I64) -> bool:
        """Return whether records at `starts` fill the sound batches back to back, and have the right ids."""
        counts = self.records
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
        return bool(is_right and (ids == np.arange(self.first_id, self.first_id + len(starts))).all())

    @property
    def record_pieces(self) -> list[memoryview]:
        """The bytes of the records of each sound batch."""
        at, leads = self.at.tolist(), self.lead.tolist()
        return [self.raw[at[number] + leads[number] : at[number + 1]] for number in range(self.count)]

    @property
    def run(self) -> Run:
        """All records as one run, copied together unless there is one batch. It has neither times nor groups."""
        pieces = self.record_pieces
        data = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
        bounds = np.append(self.starts - np.repeat(np.cumsum(self.lead[: self.count]), self.records), len(data))
        return Run(self.first_id, data, bounds)

    @property
    def entries(self) -> I64:
        """The index entries of all records."""
        return (self.starts + self.offset) | (self.starts - np.repeat(self.at[: self.count], self.records)) << LEAD_BITS

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield each sound batch with its file offset."""
        at, first = self.at.tolist(), 0
        for number in range(self.count):
            head, start = self.head_of(number), at[number]
            bounds = np.append(self.starts[first : first + head.records] - (start + head.lead), head.record_bytes)
            batch = batch_at(self.raw[start : at[number + 1]], head, bounds)
            assert batch is not None, "find_starts() has followed its lengths"
            yield self.offset + start, batch
            first += head.records


@dataclass(frozen=True, eq=False)
class RecordSpan:
    """Sound records of format 0 back to back. Its members mean the same as those of `BatchSpan`."""

    offset: int
    run: Run

    @property
    def first_id(self) -> int:
        return self.run.first_id

    @property
    def record_pieces(self) -> list[memoryview]:
        return [self.run.data]

    @property
    def entries(self) -> I64:
        return self.run.bounds[:-1] + self.offset


Span: TypeAlias = RecordSpan | BatchSpan
"""Sound records with consecutive ids, in the format of their segment."""
