"""Batches: the unit in which segments of format 1 hold records.

    96 bytes of head · locks · groups · records as in format 0

The owner of a partition builds one batch in each step. The batch states the time and the session of its transactions, their
locks, which of them form a group, and the committed mark of that moment. A batch is never split: replicas write it,
acknowledge it and truncate it as a whole, so every mark is the end of a batch. Each head carries the checksum of the head
before it, which shows when a batch was inserted or removed.

    0  magic `WZB1`        4     28 generation           4     60 flags                       4
    4  bytes in all        4     32 committed mark       8     64 CRC-32 of the head before   4
    8  first id            8     40 time, µs since 1970  8     68 CRC-32 of locks and groups  4
    16 records             4     48 bytes of locks       4     72 CRC-32 of the records       4
    20 session             8     52 bytes of groups      4     76 zeros                      16
                                 56 bytes of records     4     92 CRC-32 of the head          4

Locks: a byte for the form of the counts (0: one count of four bytes for all records, 1: a byte for each record, 2: four
bytes for each), the counts, the 64-bit ids, and two bits for each mode, the first in the highest bits. The section is empty
if no transaction has a lock. Groups: a bit for each record, the first in the highest bit, set if the record continues the
group of the record before it. The section is empty if no bit is set.

Pure: bytes in, values out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from waltzd.disk.seam import Buffer
from waltzd.errors.operations import BadFrame
from waltzd.format.checksum import I64, crc32
from waltzd.format.layout import HEADER_BYTES, ID_MAX
from waltzd.format.record import (
    FEW_RECORDS,
    OVERHEAD_BYTES,
    LockColumns,
    Run,
    first_bad,
    heads,
    is_sound_record,
    join_runs,
    no_locks,
    sent_length,
    walk,
)

MAGIC = b"WZB1"
HEAD_BYTES = 96
_HEAD = struct.Struct(">4sIqIqiqqIIIIIII16xI")
assert _HEAD.size == HEAD_BYTES
_CRC = struct.Struct(">I")
LAST = 0x1
"""Flag of the last batch of a segment, which a footer follows."""
_KNOWN_FLAGS = LAST
_RESERVED = slice(76, 92)
_ZEROS = bytes(16)
GROUPS_BYTES_MAX = 8 << 20
"""Bytes of a client's message with groups, whatever other limits allow: it cannot be cut, and every storage accepts it."""
FEW_LOCKS = 16
"""Number of locks up to which a Python loop is faster than numpy."""

Flags: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The end of a log: what the next batch has to continue."""

    crc: int = 0
    """Checksum of the head of the last batch; 0 for an empty log."""
    time: int = 0
    """Time of the last batch, in microseconds since 1970."""
    segment_bytes: int = 0
    """Size of the last segment up to here, with its header; 0 if the next batch begins a segment."""


class Head(NamedTuple):
    """The head of a batch; fields stand in the order of its bytes."""

    first_id: int
    records: int
    session: int
    generation: int
    committed: int
    """Committed mark that the owner knew when it built the batch."""
    time: int
    """Microseconds since 1970, by a hybrid clock: never less than the time of the batch before. Nothing is decided by
    it."""
    lock_bytes: int
    group_bytes: int
    record_bytes: int
    flags: int
    before: int
    """Checksum of the head of the batch before; 0 for the first batch of a log."""
    section_crc: int
    record_crc: int
    crc: int = 0
    """Checksum of this head."""

    @property
    def lead(self) -> int:
        """Number of bytes in front of the records."""
        return HEAD_BYTES + self.lock_bytes + self.group_bytes

    @property
    def size(self) -> int:
        return self.lead + self.record_bytes

    @property
    def last_id(self) -> int:
        return self.first_id + self.records - 1

    @property
    def is_last(self) -> bool:
        """True if the batch is the last of its segment."""
        return bool(self.flags & LAST)

    def encode(self) -> bytes:
        """Return the 96 bytes of the head, with a checksum computed anew: `crc` is ignored."""
        raw = _HEAD.pack(
            MAGIC, self.size, self.first_id, self.records, self.session, self.generation, self.committed, self.time,
            self.lock_bytes, self.group_bytes, self.record_bytes, self.flags, self.before, self.section_crc,
            self.record_crc, 0,
        )[:-4]  # fmt: skip
        return raw + _CRC.pack(crc32(raw))

    @staticmethod
    def decode(raw: Buffer, offset: int = 0) -> Head | None:
        """Decode the head at `offset`; return None if its checksum is wrong or its sizes contradict each other."""
        if len(raw) - offset < HEAD_BYTES:
            return None
        view = bytes(raw[offset : offset + HEAD_BYTES])
        magic, size, *values = _HEAD.unpack(view)
        first_id, records, _, _, _, _, lock_bytes, group_bytes, record_bytes, flags, _, _, _, crc = values
        if magic != MAGIC or crc32(view[:-4]) != crc or view[_RESERVED] != _ZEROS or flags & ~_KNOWN_FLAGS:
            return None
        is_possible = (
            size == HEAD_BYTES + lock_bytes + group_bytes + record_bytes
            and records > 0
            and 0 <= first_id <= ID_MAX - records
            and record_bytes >= records * OVERHEAD_BYTES
            and (group_bytes == 0 or group_bytes == (records + 7) // 8)
        )
        return Head._make(values) if is_possible else None


# -- locks and groups --------------------------------------------------------------------------------------------------


class PlainLocks(NamedTuple):
    """The locks of a few transactions, as `LockColumns` without numpy."""

    counts: Sequence[int]
    ids: Sequence[int]
    modes: Sequence[int]


def encode_locks(locks: LockColumns | PlainLocks) -> bytes:
    if len(locks.ids) == 0:
        return b""
    if isinstance(locks, PlainLocks):
        return _encode_few_locks(locks)
    if len(locks.ids) <= FEW_LOCKS:
        return _encode_few_locks(PlainLocks(locks.counts.tolist(), locks.ids.tolist(), locks.modes.tolist()))
    most = int(locks.counts.max())
    if most == int(locks.counts.min()):
        counts = b"\0" + most.to_bytes(4, "big")
    elif most < 256:
        counts = b"\1" + locks.counts.astype(np.uint8).tobytes()
    else:
        counts = b"\2" + locks.counts.astype(">u4").tobytes()
    four = np.zeros(((len(locks.modes) + 3) // 4, 4), np.uint8)
    four.ravel()[: len(locks.modes)] = locks.modes
    packed = four[:, 0] << 6 | four[:, 1] << 4 | four[:, 2] << 2 | four[:, 3]
    return counts + locks.ids.astype(">u8").tobytes() + packed.tobytes()


def _encode_few_locks(locks: PlainLocks) -> bytes:
    """Do the same as the rest of `encode_locks` in a loop, which costs less than ten calls of numpy."""
    counts, ids, modes = locks
    most, total = max(counts), len(ids)
    if most == min(counts):
        form = b"\0" + most.to_bytes(4, "big")
    else:
        form = b"\1" + bytes(counts)
    bits = 0
    size = (total + 3) // 4
    for mode in modes:
        bits = bits << 2 | mode
    return form + struct.pack(f">{total}Q", *ids) + (bits << 8 * size - 2 * total).to_bytes(size, "big")


_COUNTS = {0: (4, ">u4"), 1: (1, "u1"), 2: (4, ">u4")}
"""Size in bytes and numpy type of a count, for each form of the counts."""


def decode_locks(raw: Buffer, records: int) -> LockColumns | None:
    """Decode the locks of `records` transactions; return None if the bytes are not their locks."""
    if len(raw) == 0:
        return no_locks(records)
    if not are_locks(raw, records):
        return None
    width, kind = _COUNTS[raw[0]]
    rows = 1 if raw[0] == 0 else records
    view = memoryview(raw)[1:]
    counts = np.frombuffer(view[: width * rows], kind).astype(np.int64)
    if raw[0] == 0:
        counts = np.full(records, counts[0])
    total, view = int(counts.sum()), view[width * rows :]
    packed = np.frombuffer(view[8 * total :], np.uint8)
    modes = (packed[:, None] >> np.array([6, 4, 2, 0], np.uint8) & 3).ravel()[:total].astype(np.uint8)
    ids = np.frombuffer(view[: 8 * total], ">u8").astype(np.uint64)
    return None if int(modes.min()) == 0 else LockColumns(counts, ids, modes)


def are_locks(raw: Buffer, records: int) -> bool:
    """Return whether a section has the size that its counts imply. A checksum proves its other bytes."""
    if len(raw) == 0:
        return True
    found = _COUNTS.get(raw[0])
    if found is None:
        return False
    width, kind = found
    rows = 1 if raw[0] == 0 else records
    behind = 1 + width * rows
    if len(raw) < behind:
        return False
    if rows == 1:
        total = int.from_bytes(raw[1:behind], "big") * records
    else:
        total = int(np.frombuffer(memoryview(raw)[1:behind], kind).sum(dtype=np.int64))
    return total > 0 and len(raw) - behind == 8 * total + (total + 3) // 4


def encode_groups(follows: Flags | None) -> bytes:
    return b"" if follows is None or not follows.any() else np.packbits(follows).tobytes()


def decode_groups(raw: Buffer, records: int) -> Flags | None:
    """Return for each record whether it continues the group of the record before it; None for an empty section."""
    if len(raw) == 0:
        return None
    return np.unpackbits(np.frombuffer(raw, np.uint8))[:records].astype(np.bool_)


# -- batches -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Batch:
    """A whole batch: `preamble` is everything in front of the records, `data` is the records."""

    head: Head
    preamble: Buffer
    data: memoryview
    bounds: I64 | tuple[int, int]
    """Where each record starts and ends in `data`. It is a tuple only for a single record."""

    @cached_property
    def run(self) -> Run:
        """The records with their times and groups. The columns are made on first use: a storage needs none of them to
        append a single record."""
        head, follows = self.head, None
        if head.group_bytes:
            follows = decode_groups(memoryview(self.preamble)[HEAD_BYTES + head.lock_bytes : head.lead], head.records)
        times = np.full(head.records, head.time, np.int64)
        return Run(head.first_id, self.data, np.asarray(self.bounds), lead=head.lead, times=times, follows=follows)

    @property
    def first_id(self) -> int:
        return self.head.first_id

    @property
    def last_id(self) -> int:
        return self.head.last_id

    @property
    def size(self) -> int:
        return len(self.preamble) + len(self.data)

    def __len__(self) -> int:
        return self.head.records

    @property
    def pieces(self) -> tuple[Buffer, Buffer]:
        """The bytes of the batch as they are on the disk: preamble and records."""
        return self.preamble, self.data

    @property
    def sent_lengths(self) -> bytes:
        """The lengths of the payloads as they are sent to replicas."""
        return sent_length(len(self.data)) if self.head.records == 1 else self.run.sent_lengths

    @cached_property
    def locks(self) -> LockColumns:
        found = decode_locks(memoryview(self.preamble)[HEAD_BYTES : HEAD_BYTES + self.head.lock_bytes], len(self))
        assert found is not None, "why_wrong() has checked the section"
        return found

    @property
    def run_with_locks(self) -> Run:
        return replace(self.run, locks=self.locks)

    def is_same_as(self, other: Batch) -> bool:
        return self.preamble == other.preamble and self.data == other.data

    def end(self, before: End) -> End:
        """Return the end of the log after this batch is appended to one that ends at `before`."""
        size = (before.segment_bytes or HEADER_BYTES) + self.size
        return End(crc=self.head.crc, time=self.head.time, segment_bytes=0 if self.head.is_last else size)


Piece: TypeAlias = Run | Batch
"""Unit of an append: records of format 0, or a batch of format 1."""


def encode_batch(
    run: Run,
    *,
    session: int,
    generation: int,
    committed: int,
    time: int,
    before: End,
    locks: LockColumns | PlainLocks | None = None,
    follows: Flags | None = None,
    segment_bytes_max: int,
) -> Batch:
    """Build the batch of these records that follows `before`. It is the last of its segment if the segment then has
    `segment_bytes_max` bytes or more."""
    lock_raw, group_raw = encode_locks(locks) if locks is not None else b"", encode_groups(follows)
    size = HEAD_BYTES + len(lock_raw) + len(group_raw) + len(run.data)
    is_last = (before.segment_bytes or HEADER_BYTES) + size >= segment_bytes_max
    values = (
        len(lock_raw), len(group_raw), len(run.data), LAST if is_last else 0, before.crc,
        crc32(group_raw, crc32(lock_raw)), crc32(run.data),
    )  # fmt: skip
    raw = _HEAD.pack(MAGIC, size, run.first_id, len(run), session, generation, committed, time, *values, 0)[:-4]
    crc = crc32(raw)
    head = Head(run.first_id, len(run), session, generation, committed, time, *values, crc)
    return Batch(head, b"".join((raw, _CRC.pack(crc), lock_raw, group_raw)), run.data, run.bounds)


def batch_at(raw: memoryview, head: Head, bounds: I64 | tuple[int, int] | None = None) -> Batch | None:
    """Take apart the batch that begins with `head` and fills `raw`. `bounds`: where its records start and end; None to
    follow their lengths. Return None if the lengths do not add up to the records; everything else is for `why_wrong`."""
    assert len(raw) == head.size
    records = raw[head.lead :]
    if bounds is None:
        bounds = walk(records)
    if len(bounds) != head.records + 1 or bounds[-1] != len(records):
        return None
    return Batch(head, raw[: head.lead], records, bounds)


def sound_batches(raw: memoryview, id_: int, starts: I64 | None = None) -> list[Batch]:
    """Return the consecutive batches at the start of `raw`, up to the first one that is not whole and sound. The first one
    has to hold `id_`. `starts`: where the records from `id_` on start in `raw`, as an index says; it is only a hint."""
    found: list[Batch] = []
    before: End | None = None
    at = 0
    while at < len(raw):
        head = Head.decode(raw, at)
        if head is None or head.size > len(raw) - at:
            break
        if not head.first_id <= id_ <= head.last_id if before is None else head.first_id != found[-1].last_id + 1:
            break
        bounds, entry = None, head.first_id - id_
        if starts is not None and entry >= 0:
            known = starts[entry : entry + head.records] - (at + head.lead)
            bounds = _confirmed(raw[at + head.lead : at + head.size], head, known)
        batch = batch_at(raw[at : at + head.size], head, bounds)
        if batch is None or why_wrong(batch, before, deeply=False):
            break
        found.append(batch)
        before, at = End(crc=head.crc, time=head.time), at + head.size
    return found


def _confirmed(records: memoryview, head: Head, starts: I64) -> I64 | None:
    """Return the bounds of the records of a batch if each length agrees with the index; None if one does not, or if
    following the lengths of a few records takes less time."""
    if head.records < FEW_RECORDS or len(starts) != head.records or starts[0] != 0:
        return None
    bounds = np.append(starts, len(records))
    if (np.diff(bounds) < OVERHEAD_BYTES).any():
        return None
    return bounds if (heads(Run(0, records, bounds))["length"] == np.diff(bounds) - OVERHEAD_BYTES).all() else None


def records_of(batches: Sequence[Batch], first_id: int, last_id: int, bytes_max: int, *, with_locks: bool = False) -> Run:
    """Return the records of consecutive batches as one run: from `first_id`, which the first batch holds, up to `last_id`
    and up to `bytes_max` bytes, but at least one record."""
    found = [batch for batch in batches if batch.first_id <= last_id]
    runs = [batch.run_with_locks if with_locks else batch.run for batch in found]
    runs[-1] = runs[-1].part(0, min(len(runs[-1]), last_id + 1 - runs[-1].first_id))
    runs[0] = runs[0].part(first_id - runs[0].first_id, len(runs[0]))
    run = join_runs(runs)
    taken = max(1, int(np.searchsorted(run.bounds, bytes_max, "right")) - 1)
    return run if taken >= len(run) else run.part(0, taken)


def why_wrong(batch: Batch, before: End | None = None, *, deeply: bool = True) -> str:
    """Return what is wrong with the batch, or why it cannot follow `before`; "" if it is sound. `deeply`: check also the
    checksum of each record, which the checksum of all records implies unless the owner computed one of them wrongly."""
    head = batch.head
    if before is not None and head.before != before.crc:
        return "its head names another head in front of it"
    if before is not None and head.time < before.time:
        return "its time is before that of the batch in front of it"
    sections = memoryview(batch.preamble)[HEAD_BYTES:]
    if crc32(sections) != head.section_crc:
        return "its locks and groups fail their checksum"
    if not are_locks(sections[: head.lock_bytes], head.records):
        return "its locks do not have the size that their counts imply"
    follows = batch.run.follows if head.group_bytes else None
    if follows is not None and (follows[0] or encode_groups(follows) != sections[head.lock_bytes :]):
        return "its groups are not encoded as they have to be"
    if crc32(batch.data) != head.record_crc:
        return "its records fail their checksum"
    if head.records == 1 and deeply:
        is_sound = is_sound_record(batch.data, 0, len(batch.data), head.first_id)
        return "" if is_sound else f"record {head.first_id} fails its checks"
    run = batch.run
    if deeply:
        bad = first_bad(run)
        return "" if bad is None else f"record {run.first_id + bad} fails its checks"
    ids = heads(run)["id"] if len(run) > 1 else np.frombuffer(run.data[:8], ">i8")
    return (
        "" if (ids == np.arange(run.first_id, run.first_id + len(run))).all() else "its records do not have consecutive ids"
    )


def parse_batches(data: Buffer, bounds: I64 | tuple[int, int] | None = None) -> tuple[Batch, ...]:
    """Take apart whole batches back to back. `bounds`: where all their records start and end, counted as if the records
    stood back to back; None to follow their lengths. Raise `BadFrame` if that fails. Checksums of sections and records are
    not checked."""
    view, at, number = memoryview(data), 0, 0
    found: list[Batch] = []
    while at < len(view):
        head = Head.decode(view, at)
        if head is None or head.size > len(view) - at:
            raise BadFrame(f"no sound batch at byte {at} of {len(view)}")
        mine: I64 | tuple[int, int] | None = None
        if isinstance(bounds, tuple):
            mine = bounds if number == 0 else (0, 0)  # lengths of one record, and a second batch: it has none
        elif bounds is not None:
            part = bounds[number : number + head.records + 1]
            mine = part - part[0] if number and len(part) else part
        batch = batch_at(view[at : at + head.size], head, mine)
        if batch is None:
            raise BadFrame(f"the batch at id {head.first_id} does not hold the {head.records} records that its head states")
        if found and batch.first_id != found[-1].last_id + 1:
            raise BadFrame(f"a batch at id {batch.first_id} follows id {found[-1].last_id}")
        found.append(batch)
        at += head.size
        number += head.records
    return tuple(found)
