"""Reading a segment from end to end, driven by its data, never by its index.

`scan` goes as far as records are sound. `next_sound` finds the next record behind a bad place that its checksum proves.
`survey` puts the two together: sound records, gaps between them, and a rest at the end. Whether that rest is a torn tail or
damage depends on what the replica had promised: `judge_tail`.

An index may be given as a hint for where records start. It saves the walk from length to length, and is never believed:
each place it names must follow from the record before it.

`explain` says which byte of a damaged place is wrong. One changed byte leaves a difference of checksums that gives its
position and its right value, once the exact extent of the record is known: from its own length field, from the index, or
from the record behind. A byte is claimed only when the corrected record has the expected id, the right length, and a
payload with the client's own checksum, which rules out a guess by chance.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from waltzd.disk.seam import File
from waltzd.format.checksum import I64, crc32, is_one_byte_wrong, shift, single_byte_error
from waltzd.format.layout import HEADER_BYTES, INDEX_ENTRY_BYTES, index_offset
from waltzd.format.record import (
    HEAD_BYTES,
    OVERHEAD_BYTES,
    TRAILER_BYTES,
    Run,
    decode_record,
    first_bad,
    id_and_length,
    likely_starts,
    walk,
)

CHUNK_BYTES = 4 << 20
SEARCH_BYTES = 1 << 20
RECORD_BYTES_MAX = (16 << 20) + OVERHEAD_BYTES
"""The largest damaged record that is searched for its wrong byte."""
_HINT_ENTRIES = 8192
_HINTS_BEHIND = 64

OnRun = Callable[[int, Run], None]
"""Called with the file offset and the sound records there. The buffer is used again afterwards."""


@dataclass(frozen=True)
class Stop:
    """Where a scan ended: `next_id` would have started at `offset`."""

    offset: int
    next_id: int


@dataclass(frozen=True)
class Gap:
    """Bytes that are no sound records, with sound ones behind them. `last_id < first_id`: bytes too many, no id missing."""

    first_byte: int
    last_byte: int
    first_id: int
    last_id: int


class Rest(enum.Enum):
    """The look of the first bytes behind the last sound record."""

    SHORT = "the beginning of the next record, which the end of the file cut off"
    ROTTEN = "the next record with one byte changed, or a wrong length"
    OTHER = "no record"


@dataclass
class Survey:
    """A whole segment: sound records up to `next_id - 1` apart from the gaps, which end at `end`; then `tail_bytes`."""

    next_id: int
    end: int
    tail_bytes: int
    gaps: list[Gap] = field(default_factory=list)
    rest: Rest = Rest.OTHER


def read_index(file: File, first_entry: int, count: int) -> I64:
    """Entries of an index file, fewer where it ends."""
    raw = file.read(index_offset(first_entry), count * INDEX_ENTRY_BYTES)
    return np.frombuffer(raw[: len(raw) // 8 * 8], ">i8").astype(np.int64)


def _bounds_by_hint(data: memoryview, hint: I64) -> I64:
    """The bounds that the hint names and the lengths in the data confirm; at least [0]."""
    if len(hint) == 0 or hint[0] != 0:
        return np.zeros(1, np.int64)
    outside = np.flatnonzero((hint < 0) | (hint > len(data) - HEAD_BYTES))
    if len(outside):
        hint = hint[: outside[0]]
    if len(hint) == 0:
        return np.zeros(1, np.int64)
    every_length = np.ndarray((len(data) - HEAD_BYTES + 1,), ">i4", buffer=data[28:], strides=(1,))
    lengths = every_length[hint].astype(np.int64)
    ends = hint + lengths + OVERHEAD_BYTES
    broken = np.flatnonzero((ends[:-1] != hint[1:]) | (lengths[:-1] < 0))
    whole = int(broken[0]) + 1 if len(broken) else len(hint)
    if lengths[whole - 1] < 0 or ends[whole - 1] > len(data):
        return hint[:whole]
    return np.append(hint[:whole], ends[whole - 1])


def _bounds(data: memoryview, hint: I64) -> I64:
    known = _bounds_by_hint(data, hint)
    rest = walk(data[int(known[-1]) :])
    return np.concatenate((known, known[-1] + rest[1:])) if len(rest) > 1 else known


def scan(
    file: File,
    *,
    segment_first_id: int,
    next_id: int,
    offset: int,
    end: int,
    index: File | None = None,
    on_run: OnRun | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    record_bytes_max: int | None = None,
) -> Stop:
    """Check records from `offset` on, where `next_id` should start, up to a bad or too large one, or to `end`."""
    buffer = bytearray(min(chunk_bytes, max(end - offset, 0)))
    while offset < end:
        want = min(len(buffer), end - offset)
        got = file.read_into(offset, memoryview(buffer)[:want])
        data = memoryview(buffer)[:got]
        hint = np.zeros(0, np.int64)
        if index is not None:
            hint = read_index(index, next_id - segment_first_id, _HINT_ENTRIES) - offset
        bounds = _bounds(data, hint)
        if len(bounds) == 1:  # not one whole record in the chunk: a longer one, or nothing
            needed = OVERHEAD_BYTES + id_and_length(data)[1] if got >= OVERHEAD_BYTES else 0
            is_too_large = record_bytes_max is not None and needed > record_bytes_max
            if needed <= got or needed > end - offset or got < want or is_too_large:
                return Stop(offset, next_id)
            buffer = bytearray(needed)
            continue
        run = Run(next_id, data[: int(bounds[-1])], bounds)
        bad = first_bad(run)
        sound = run if bad is None else run.part(0, bad)
        if len(sound) and on_run is not None:
            on_run(offset, sound)
        offset += len(sound.data)
        next_id += len(sound)
        if bad is not None:
            return Stop(offset, next_id)
    return Stop(offset, next_id)


def _is_sound_at(file: File, offset: int, length: int) -> bool:
    """Checks the checksum in pieces: the length is only a claim."""
    left = HEAD_BYTES + length
    crc = 0
    while left:
        piece = file.read(offset, min(left, SEARCH_BYTES))
        if not piece:
            return False
        crc = crc32(piece, crc)
        offset += len(piece)
        left -= len(piece)
    return crc == int.from_bytes(file.read(offset, 4), "big")


def next_sound(file: File, *, offset: int, end: int, low_id: int, high_id: int) -> Stop | None:
    """The first record behind `offset` that its checksum proves and whose id is `low_id` to `high_id`.

    Bytes made to look like record heads could make this read the file many times over. Past a bound everything to the end
    counts as damaged, which is the careful answer."""
    budget = 4 * (end - offset) + (64 << 20)
    while offset < end:
        piece = file.read(offset, SEARCH_BYTES + HEAD_BYTES - 1)
        for at, id_, length in likely_starts(piece, low_id, high_id, end - offset):
            budget -= length + OVERHEAD_BYTES
            if budget < 0:
                return Stop(end, low_id)
            if _is_sound_at(file, offset + at, length):
                return Stop(offset + at, id_)
        offset += SEARCH_BYTES
    return None


def _sound_record_at(file: File, offset: int, end: int, id_: int) -> bool:
    head = file.read(offset, HEAD_BYTES) if 0 <= offset <= end - OVERHEAD_BYTES else b""
    if len(head) < HEAD_BYTES:
        return False
    found, length = id_and_length(head)
    return found == id_ and 0 <= length <= end - offset - OVERHEAD_BYTES and _is_sound_at(file, offset, length)


def _behind(file: File, index: File | None, first_id: int, stop: Stop, end: int, high_id: int) -> Stop | None:
    """The next sound record behind a bad place: where the index says, then where the bad record's length says, then by a
    search of all bytes. The search comes last because a payload may itself contain the bytes of a whole record."""
    if index is not None:
        for number, offset in enumerate(read_index(index, stop.next_id - first_id, _HINTS_BEHIND).tolist()):
            id_ = stop.next_id + number
            if offset > stop.offset and id_ <= high_id and _sound_record_at(file, offset, end, id_):
                return Stop(offset, id_)
    head = file.read(stop.offset, HEAD_BYTES)
    if len(head) == HEAD_BYTES and (length := id_and_length(head)[1]) >= 0:
        offset, id_ = stop.offset + OVERHEAD_BYTES + length, stop.next_id + 1
        if id_ <= high_id and _sound_record_at(file, offset, end, id_):
            return Stop(offset, id_)
    return next_sound(file, offset=stop.offset + 1, end=end, low_id=stop.next_id, high_id=high_id)


def survey(
    file: File,
    *,
    first_id: int,
    end: int,
    next_id: int | None = None,
    offset: int = HEADER_BYTES,
    id_limit: int | None = None,
    index: File | None = None,
    on_run: OnRun | None = None,
) -> Survey:
    """The segment that starts at `first_id`, from `offset`, where `next_id` should start, to `end`. `id_limit` is the first
    id of the next segment."""
    next_id = first_id if next_id is None else next_id
    gaps: list[Gap] = []
    while True:
        stop = scan(file, segment_first_id=first_id, next_id=next_id, offset=offset, end=end, index=index, on_run=on_run)
        high = stop.next_id + (end - stop.offset) // OVERHEAD_BYTES + 1
        if id_limit is not None:
            high = min(high, id_limit - 1)
        behind = None
        if stop.offset < end:
            behind = _behind(file, index, first_id, stop, end, high)
        if behind is None:
            rest = _rest(file, stop, end) if stop.offset < end else Rest.OTHER
            return Survey(stop.next_id, stop.offset, end - stop.offset, gaps, rest)
        gaps.append(Gap(stop.offset, behind.offset - 1, stop.next_id, behind.next_id - 1))
        next_id, offset = behind.next_id, behind.offset


def _rest(file: File, stop: Stop, end: int) -> Rest:
    size = end - stop.offset
    head = file.read(stop.offset, HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return Rest.SHORT if stop.next_id.to_bytes(8, "big").startswith(head[:8]) else Rest.OTHER
    id_, length = id_and_length(head)
    claimed = length + OVERHEAD_BYTES
    if length >= 0 and claimed <= min(size, RECORD_BYTES_MAX) and is_one_byte_wrong(file.read(stop.offset, claimed)):
        return Rest.ROTTEN
    if size >= OVERHEAD_BYTES and _has_wrong_length(file.read(stop.offset, min(size, RECORD_BYTES_MAX)), size):
        return Rest.ROTTEN
    return Rest.SHORT if claimed > size and length >= 0 and id_ == stop.next_id else Rest.OTHER


def _has_wrong_length(data: bytes, size: int) -> bool:
    """Whether a sound record begins here once one byte of its length is changed, or its length fills the rest."""
    head, rest = data[:HEAD_BYTES], memoryview(data)[HEAD_BYTES:]
    known, most = head[28:32], len(rest) - TRAILER_BYTES
    claims = {int.from_bytes(known[:at] + bytes([byte]) + known[at + 1 :], "big") for at in range(4) for byte in range(256)}
    lengths = sorted(length for length in {*claims, size - OVERHEAD_BYTES} if length <= most)
    heads = [crc32(head[:28] + length.to_bytes(4, "big") + head[32:]) for length in lengths]
    crc = done = 0
    for length, before in zip(
        lengths, shift(np.array(heads, np.uint32), np.array(lengths, np.int64)).tolist(), strict=True
    ):
        crc, done = crc32(rest[done:length], crc), length
        if before ^ crc == int.from_bytes(rest[length : length + TRAILER_BYTES], "big"):
            return True
    return False


class Tail(enum.Enum):
    """The verdict on the bytes behind the last sound record of a segment."""

    CLEAN = "clean"
    TORN = "torn"
    DAMAGED = "damaged"


def judge_tail(found: Survey, *, is_last: bool, floor: int, was_cut: bool = True) -> Tail:
    """Torn are only bytes that no owner can have relied on: in the last segment, above `floor`, the highest id that this
    replica is known to have had on disk, and with no sound record behind them, which the survey has seen to.

    A power cut (`was_cut`) leaves any part of a write. Yet a record with a single wrong byte was whole, and may have been
    acknowledged. Without a power cut the system has every byte that was written, in order: a write that a kill interrupted
    ends with the file, and any other wrong byte was changed later."""
    if found.tail_bytes == 0:
        return Tail.CLEAN
    if not is_last or found.gaps or found.next_id <= floor:
        return Tail.DAMAGED
    rest = found.rest
    may_be_torn = rest is not Rest.ROTTEN if was_cut else rest is Rest.SHORT
    return Tail.TORN if may_be_torn else Tail.DAMAGED


RECORDS_MAX = 64
"""So many records of one damaged place are explained."""
SOUND_BYTES_MAX = 4 << 20
"""Of one record; in larger ones a second byte could explain the same damage."""
BUDGET_BYTES = 8 << 20
"""Read of one damaged place for its explanation, where several ends are tried."""


@dataclass(frozen=True, kw_only=True)
class BadRecord:
    """The extent of one damaged record, and its one wrong byte where there is only one."""

    id: int
    first_byte: int
    last_byte: int
    bad_byte: int | None = None
    is_value: int = 0
    right_value: int = 0
    note: str = ""

    def sentence(self) -> str:
        if self.bad_byte is not None:
            return (
                f"record {self.id}: byte {self.bad_byte} is 0x{self.is_value:02x}, "
                f"a sound record has 0x{self.right_value:02x}"
            )
        return f"record {self.id}: {self.note or 'no single byte explains it'}"


def explain(
    file: File, *, first_byte: int, last_byte: int, first_id: int, last_id: int | None, segment_first_id: int,
    index: File | None = None,
) -> list[BadRecord]:  # fmt: skip
    """The damaged records in a range of bytes. `last_id` is known when a sound record follows."""
    out: list[BadRecord] = []
    at, end, id_ = first_byte, last_byte + 1, first_id
    budget = BUDGET_BYTES
    while at < end and len(out) < RECORDS_MAX and (last_id is None or id_ <= last_id):
        by_index = _end_by_index(index, id_, segment_first_id, at, end)
        found = None
        for stop in _possible_ends(file, at, end, by_index, is_only=id_ == last_id):
            size = stop - at
            if not OVERHEAD_BYTES <= size <= min(SOUND_BYTES_MAX, budget):
                continue
            budget -= size
            found = _correct(file.read(at, size), at, id_)
            if found is not None:
                break
        if found is None:
            stop = by_index if by_index is not None else end
            found = BadRecord(id=id_, first_byte=at, last_byte=stop - 1, note=_cut_off(file, at, end, id_))
        out.append(found)
        at, id_ = found.last_byte + 1, id_ + 1
    return out


def describe(records: list[BadRecord], most: int = 4) -> str:
    said = [record.sentence() for record in records[:most]]
    if len(records) > most:
        said.append(f"{len(records) - most} more")
    return "; ".join(said)


def _end_by_index(index: File | None, id_: int, segment_first_id: int, at: int, end: int) -> int | None:
    """The index's start of the next record, provided that it agrees where this one starts."""
    if index is None:
        return None
    entries = read_index(index, id_ - segment_first_id, 2).tolist()
    if len(entries) == 2 and entries[0] == at and at + OVERHEAD_BYTES <= entries[1] <= end:
        return int(entries[1])
    return None


def _possible_ends(file: File, at: int, end: int, by_index: int | None, *, is_only: bool) -> list[int]:
    ends = [] if by_index is None else [by_index]
    if is_only:
        ends.insert(0, end)
    head = file.read(at, HEAD_BYTES)
    if len(head) == HEAD_BYTES:
        length = id_and_length(head)[1]
        if 0 <= length <= end - at - OVERHEAD_BYTES:
            ends.append(at + length + OVERHEAD_BYTES)
    ends.append(end)
    return list(dict.fromkeys(ends))


def _cut_off(file: File, at: int, end: int, id_: int) -> str:
    """A phrase about how much of the record is there, when the bytes end inside it."""
    head = file.read(at, min(HEAD_BYTES, end - at))
    if len(head) < HEAD_BYTES:
        return f"only {len(head)} bytes of it are there"
    claimed_id, length = id_and_length(head)
    if claimed_id == id_ and length > end - at - OVERHEAD_BYTES:
        return f"only {end - at} of its {length + OVERHEAD_BYTES} bytes are there"
    return ""


def _correct(raw: bytes, at: int, id_: int) -> BadRecord | None:
    last_byte = at + len(raw) - 1
    error = single_byte_error(raw)
    if error is None:
        record = decode_record(raw)
        if crc32(raw[:-4]) == record.crc and record.length == len(raw) - OVERHEAD_BYTES:
            note = f"a sound record with id {record.id} stands in its place"
            return BadRecord(id=id_, first_byte=at, last_byte=last_byte, note=note)
        return None
    position, right = error
    record = decode_record(raw[:position] + bytes([right]) + raw[position + 1 :])
    if record.id != id_ or record.length != len(raw) - OVERHEAD_BYTES or crc32(record.payload) != record.data_crc:
        return None
    return BadRecord(
        id=id_, first_byte=at, last_byte=last_byte, bad_byte=at + position, is_value=raw[position], right_value=right
    )
