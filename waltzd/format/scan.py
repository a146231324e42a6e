"""Scans: reading a segment from end to end by its data, never by its index alone.

`scan` reads up to the first bytes that are not sound. `search_record` finds the next record after such bytes that its
checksum proves. `survey` combines the two: it reports sound records, the gaps between them, and a tail of other bytes at
the end. `judge_tail` decides by the promises of the replica whether that tail was torn by a crash, or is damage.

The version in the header of the segment decides what is read: records back to back, or batches, whose gaps are whole
batches. A sound head of a batch states where the next batch begins, whatever the bytes between are, so payloads that look
like records do not matter. Only after a wrong head are all bytes searched. In format 0, places are concluded from several
hints.

An index may be given as a hint for where records start, which saves following their lengths one by one. Each place that it
names has to follow from the record before.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from waltzd.disk.seam import File, Readable
from waltzd.format.batch import HEAD_BYTES as BATCH_HEAD_BYTES
from waltzd.format.batch import LAST, MAGIC, End, Head, batch_at
from waltzd.format.checksum import I64, crc32, is_one_byte_wrong, shift, single_byte_error
from waltzd.format.footer import Footer, footer_at
from waltzd.format.index import offsets_of, places_of, read_index
from waltzd.format.layout import BATCHES, HEADER_BYTES, NO_MARK, VERSION
from waltzd.format.record import (
    HEAD_BYTES,
    OVERHEAD_BYTES,
    TRAILER_BYTES,
    Run,
    first_bad,
    id_and_length,
    likely_starts,
    walk,
)
from waltzd.format.span import BatchSpan, RecordSpan, Span, whole_batches

CHUNK_BYTES = 4 << 20
SEARCH_BYTES = 1 << 20
BATCH_BYTES_MAX = 128 << 20
"""Size of the largest batch that fits into an index. A head that claims more is wrong."""
_MAGIC = int.from_bytes(MAGIC, "big")
RECORD_BYTES_MAX = (16 << 20) + OVERHEAD_BYTES
"""Size of the largest damaged record that is searched for its wrong byte."""
_HINT_ENTRIES = 8192
_HINTS_BEHIND = 64


OnSpan = Callable[[Span], None]
"""Callback for the next sound records. Their buffer is reused after it returns."""


@dataclass(frozen=True)
class Stop:
    """The end of a scan: `next_id` would have started at `offset`. The other fields are set in format 1."""

    offset: int
    next_id: int
    end_of_log: End | None = None
    """End of the last sound batch; `before` if there is none."""
    is_sealed: bool = False
    """Whether that batch is the last of its segment."""
    committed: int = NO_MARK
    """Highest committed mark in a sound head."""


@dataclass(frozen=True)
class Gap:
    """Bytes that are no sound records, followed by sound records. If no id is missing, `last_id` is `first_id - 1`."""

    first_byte: int
    last_byte: int
    first_id: int
    last_id: int


class TailKind(enum.Enum):
    """Kinds of tails, by the first bytes after the last sound record or batch."""

    SHORT = "the start of the next record or batch, cut off by the end of the file"
    ROTTEN = "the next record or batch with one byte changed, or with a wrong length"
    WHOLE = "a sound batch that does not continue the batch in front of it"
    FOLLOWED = "a wrong batch, followed by the head of a later batch"
    OTHER = "nothing of the kind"


@dataclass
class Survey:
    """A whole segment: sound records up to `next_id - 1`, except for the gaps, which end at `end`; then `tail_bytes`.

    The last five fields are set in format 1. A sealed segment has no tail: the bytes after its last batch are its footer,
    or are to be replaced by a footer."""

    next_id: int
    end: int
    tail_bytes: int
    gaps: list[Gap] = field(default_factory=list)
    tail_kind: TailKind = TailKind.OTHER
    end_of_log: End | None = None
    """End of the last sound batch; `before` if there is none."""
    is_sealed: bool = False
    """Whether the last batch is the last of its segment."""
    footer: Footer | None = None
    """The footer; None if it is not sound. Only its digest tells whether it belongs to these batches."""
    footer_bytes: int = 0
    """Number of bytes after the last batch of a sealed segment, sound or not."""
    committed: int = NO_MARK
    """Highest committed mark in a sound head."""


def _bounds_by_hint(data: memoryview, hint: I64) -> I64:
    """Return the bounds that the hint names and the lengths in the data confirm; at least [0]."""
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


def whole_records(data: memoryview, hint: I64) -> I64:
    """Return the bounds of the whole records in `data`, as `walk` does. `hint`: where they start, as an index says; empty
    without one. Checksums are not checked."""
    known = _bounds_by_hint(data, hint)
    rest = walk(data[int(known[-1]) :])
    return np.concatenate((known, known[-1] + rest[1:])) if len(rest) > 1 else known


def scan(
    file: Readable,
    *,
    segment_first_id: int,
    next_id: int,
    offset: int,
    end: int,
    version: int = VERSION,
    before: End | None = None,
    index: File | None = None,
    on_span: OnSpan | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    bytes_max: int | None = None,
) -> Stop:
    """Check records from `offset` on, where `next_id` should start, up to a bad or too large one, to the last batch of the
    segment, or to `end`.

    `bytes_max` limits a record, or in format 1 a batch. `offset`: in format 1 the offset of a batch. `before`: the end of
    the batch in front of it; None if unknown, so that any batch may come first."""
    if version == BATCHES:
        return _scan_batches(
            file, next_id=next_id, offset=offset, end=end, before=before, index=index, segment_first_id=segment_first_id,
            on_span=on_span, chunk_bytes=chunk_bytes, limit=BATCH_BYTES_MAX if bytes_max is None else bytes_max,
        )  # fmt: skip
    buffer = bytearray(min(chunk_bytes, max(end - offset, 0)))
    while offset < end:
        want = min(len(buffer), end - offset)
        got = file.read_into(offset, memoryview(buffer)[:want])
        data = memoryview(buffer)[:got]
        hint = np.zeros(0, np.int64)
        if index is not None:
            hint = read_index(index, next_id - segment_first_id, _HINT_ENTRIES) - offset
        bounds = whole_records(data, hint)
        if len(bounds) == 1:  # not one whole record in the chunk: a longer one, or nothing
            needed = OVERHEAD_BYTES + id_and_length(data)[1] if got >= OVERHEAD_BYTES else 0
            is_too_large = bytes_max is not None and needed > bytes_max
            if needed <= got or needed > end - offset or got < want or is_too_large:
                return Stop(offset, next_id)
            buffer = bytearray(needed)
            continue
        run = Run(next_id, data[: int(bounds[-1])], bounds)
        bad = first_bad(run)
        sound = run if bad is None else run.part(0, bad)
        if len(sound) and on_span is not None:
            on_span(RecordSpan(offset, sound))
        offset += len(sound.data)
        next_id += len(sound)
        if bad is not None:
            return Stop(offset, next_id)
    return Stop(offset, next_id)


def _is_sound_at(file: Readable, offset: int, length: int) -> bool:
    """Return whether the record has a right checksum. It is read in pieces, because its length may be wrong."""
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


def search_record(file: Readable, *, offset: int, end: int, low_id: int, high_id: int) -> Stop | None:
    """Return the first record from `offset` on that its checksum proves and whose id is `low_id` to `high_id`; None
    without.

    Forged record heads could make this read the file many times over. Past a limit, everything up to the end counts as
    damaged, which is the safe answer."""
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


def is_sound_record(file: Readable, offset: int, end: int, id_: int) -> bool:
    """Return whether the sound record `id_` of format 0 starts at `offset`."""
    head = file.read(offset, HEAD_BYTES) if 0 <= offset <= end - OVERHEAD_BYTES else b""
    if len(head) < HEAD_BYTES:
        return False
    found, length = id_and_length(head)
    return found == id_ and 0 <= length <= end - offset - OVERHEAD_BYTES and _is_sound_at(file, offset, length)


def version_behind(file: Readable, said: int, first_id: int) -> int:
    """Return the version of a segment: the one that its first batch or record proves, else `said`, that of its header."""
    if Head.decode(file.read(HEADER_BYTES, BATCH_HEAD_BYTES)) is not None:
        return BATCHES
    return VERSION if is_sound_record(file, HEADER_BYTES, file.size(), first_id) else said


def _next_sound_record(
    file: Readable, index: File | None, first_id: int, stop: Stop, end: int, high_id: int
) -> Stop | None:
    """Return the next sound record after bad bytes: where the index says, else where the length of the bad record says,
    else by a search of all bytes. The search comes last because a payload may contain the bytes of a whole record."""
    if index is not None:
        for number, offset in enumerate(read_index(index, stop.next_id - first_id, _HINTS_BEHIND).tolist()):
            id_ = stop.next_id + number
            if offset > stop.offset and id_ <= high_id and is_sound_record(file, offset, end, id_):
                return Stop(offset, id_)
    head = file.read(stop.offset, HEAD_BYTES)
    if len(head) == HEAD_BYTES and (length := id_and_length(head)[1]) >= 0:
        offset, id_ = stop.offset + OVERHEAD_BYTES + length, stop.next_id + 1
        if id_ <= high_id and is_sound_record(file, offset, end, id_):
            return Stop(offset, id_)
    return search_record(file, offset=stop.offset + 1, end=end, low_id=stop.next_id, high_id=high_id)


def survey(
    file: Readable,
    *,
    first_id: int,
    end: int,
    version: int = VERSION,
    before: End | None = None,
    next_id: int | None = None,
    offset: int = HEADER_BYTES,
    id_limit: int | None = None,
    index: File | None = None,
    on_span: OnSpan | None = None,
) -> Survey:
    """Read the segment that starts at `first_id`, from `offset`, where `next_id` should start, to `end`. `id_limit`: the
    first id of the next segment. `before`: see `scan`."""
    next_id = first_id if next_id is None else next_id
    gaps: list[Gap] = []
    committed = NO_MARK
    while True:
        stop = scan(
            file, segment_first_id=first_id, next_id=next_id, offset=offset, end=end, version=version, before=before,
            index=index, on_span=on_span,
        )  # fmt: skip
        found = Survey(
            stop.next_id, stop.offset, end - stop.offset, gaps, end_of_log=stop.end_of_log, is_sealed=stop.is_sealed
        )
        found.committed = committed = max(committed, stop.committed)
        if stop.offset == end or _is_footer(file, found, end):
            return found
        high = stop.next_id + (end - stop.offset) // OVERHEAD_BYTES + 1
        if id_limit is not None:
            high = min(high, id_limit - 1)
        if stop.is_sealed:
            heads = _likely_heads(file, stop.offset, end, stop.next_id, high)
            return _with_tail_kind(file, found, stop, has_head=next(heads, None) is not None)
        if version == BATCHES:
            seen = next_sound_batch(file, offset=stop.offset, end=end, next_id=stop.next_id, high_id=high)
            behind, found.committed = seen.stop, max(committed, seen.committed)
            if behind is None:
                return _with_tail_kind(file, found, stop, has_head=seen.has_head)
        else:
            behind = _next_sound_record(file, index, first_id, stop, end, high)
            if behind is None:
                found.tail_kind = _tail_kind(file, stop, end)
                return found
        gaps.append(Gap(stop.offset, behind.offset - 1, stop.next_id, behind.next_id - 1))
        next_id, offset, before = behind.next_id, behind.offset, None


def _is_footer(file: Readable, found: Survey, end: int) -> bool:
    if found.is_sealed:
        found.footer = footer_at(file, found.end, end)
    if found.footer is not None:
        found.tail_bytes, found.footer_bytes = 0, found.tail_bytes
    return found.footer is not None


def _with_tail_kind(file: Readable, found: Survey, stop: Stop, *, has_head: bool) -> Survey:
    if has_head:
        found.tail_kind = TailKind.FOLLOWED
    elif found.is_sealed:
        found.tail_bytes, found.footer_bytes = 0, found.tail_bytes
    else:
        found.tail_kind = tail_kind_of_batches(file, stop, found.end + found.tail_bytes)
    return found


def _tail_kind(file: Readable, stop: Stop, end: int) -> TailKind:
    size = end - stop.offset
    head = file.read(stop.offset, HEAD_BYTES)
    if len(head) < HEAD_BYTES:
        return TailKind.SHORT if stop.next_id.to_bytes(8, "big").startswith(head[:8]) else TailKind.OTHER
    id_, length = id_and_length(head)
    claimed = length + OVERHEAD_BYTES
    if length >= 0 and claimed <= min(size, RECORD_BYTES_MAX) and is_one_byte_wrong(file.read(stop.offset, claimed)):
        return TailKind.ROTTEN
    if size >= OVERHEAD_BYTES and _has_wrong_length(file.read(stop.offset, min(size, RECORD_BYTES_MAX)), size):
        return TailKind.ROTTEN
    return TailKind.SHORT if claimed > size and length >= 0 and id_ == stop.next_id else TailKind.OTHER


def _has_wrong_length(data: bytes, size: int) -> bool:
    """Return whether a sound record begins here if one byte of its length is changed, or if its length fills the data."""
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
    """The verdict on the bytes after the last sound record of a segment."""

    CLEAN = "clean"
    TORN = "torn"
    DAMAGED = "damaged"
    UNFINISHED = "all batches are sound, and no sound footer follows: it is rebuilt from the batches"


def judge_tail(found: Survey, *, is_last: bool, floor: int, was_cut: bool = True) -> Tail:
    """Decide whether the tail of a segment was torn by a crash, or is damage.

    A tail is torn only if no owner can rely on it: it is in the last segment, above `floor`, the highest id that this
    replica is known to have had on disk, and no sound record follows it, which the survey has checked.

    A power cut (`was_cut`) may leave any part of a write on the disk. But a record or batch with a single wrong byte was
    complete, and may have been acknowledged. Without a power cut, all bytes that were written are there, in order: a write
    that a kill interrupted ends with the file, and any other wrong byte was changed later.

    A footer acknowledges nothing: if it is missing or wrong in any segment, it is rebuilt from the batches."""
    if found.tail_bytes == 0:
        return Tail.UNFINISHED if found.is_sealed and found.footer is None else Tail.CLEAN
    if not is_last or found.gaps or found.next_id <= max(floor, found.committed):
        return Tail.DAMAGED
    may_be_torn = found.tail_kind is TailKind.SHORT or (was_cut and found.tail_kind is TailKind.OTHER)
    return Tail.TORN if may_be_torn else Tail.DAMAGED


# -- batches -----------------------------------------------------------------------------------------------------------


class _Window:
    """A file that is read forwards in large pieces. The result of `at` is valid until the next call."""

    def __init__(self, file: Readable, chunk_bytes: int, end: int) -> None:
        self._file = file
        self._buffer = bytearray(max(chunk_bytes, BATCH_HEAD_BYTES))
        self._end = end
        self._start = 0
        self._data = memoryview(b"")

    def at(self, offset: int, size: int) -> memoryview:
        """Return `size` bytes at `offset`, fewer at the end."""
        first = offset - self._start
        if first < 0 or first + size > len(self._data):
            if size > len(self._buffer):
                self._buffer = bytearray(size)
            want = memoryview(self._buffer)[: max(0, min(len(self._buffer), self._end - offset))]
            self._start, self._data, first = offset, want[: self._file.read_into(offset, want)], 0
        return self._data[first : first + size]


def _scan_batches(
    file: Readable, *, next_id: int, offset: int, end: int, before: End | None, index: File | None, segment_first_id: int,
    on_span: OnSpan | None, chunk_bytes: int, limit: int,
) -> Stop:  # fmt: skip
    window = _Window(file, min(chunk_bytes, max(end - offset, 0)), end)
    committed, is_sealed = NO_MARK, False
    while offset < end and not is_sealed:
        head = Head.decode(window.at(offset, BATCH_HEAD_BYTES))
        if head is None or head.first_id != next_id or head.size > min(end - offset, limit):
            break
        raw = window.at(offset, max(head.size, min(chunk_bytes, end - offset)))
        if len(raw) < head.size:
            break
        at = np.array(whole_batches(raw)[0])
        span = BatchSpan(raw, at, None if before is None else (before.crc, before.time), offset)
        span.keep_to(limit)
        hint = None
        if index is not None and span.count:
            entry = span.first_id - segment_first_id
            hint = places_of(read_index(index, entry, span.next_id - span.first_id))[0] - offset
        if not span.count or not span.find_starts(hint):
            break
        if on_span is not None:
            on_span(span)
        heads = span.head[: span.count]
        offset += len(span.bytes)
        next_id, committed = span.next_id, max(committed, int(heads["committed"].max()))
        is_sealed = bool(heads["flags"][-1] & LAST)
        crc, time = span.last
        before = End(crc=crc, time=time, segment_bytes=0 if is_sealed else offset)
    return Stop(offset, next_id, before, is_sealed, committed)


# -- after bad bytes ---------------------------------------------------------------------------------------------------


def _crc_of(file: Readable, offset: int, size: int) -> int:
    """Return the checksum of `size` bytes; -1 if the file ends before. They are read in pieces: the size may be wrong."""
    crc, end = 0, offset + size
    while offset < end:
        piece = file.read(offset, min(end - offset, SEARCH_BYTES))
        if not piece:
            return -1
        crc = crc32(piece, crc)
        offset += len(piece)
    return crc


def _has_sound_body(file: Readable, offset: int, head: Head) -> bool:
    return (
        _crc_of(file, offset + BATCH_HEAD_BYTES, head.lead - BATCH_HEAD_BYTES) == head.section_crc
        and _crc_of(file, offset + head.lead, head.record_bytes) == head.record_crc
    )


def _likely_heads(file: Readable, offset: int, end: int, low_id: int, high_id: int) -> Iterator[tuple[int, Head]]:
    """Yield each sound head from `offset` on whose first id is `low_id` to `high_id`."""
    while offset < end:
        piece = file.read(offset, min(SEARCH_BYTES + BATCH_HEAD_BYTES - 1, end - offset))
        count = len(piece) - BATCH_HEAD_BYTES + 1
        if count > 0:
            magics = np.ndarray((count,), ">u4", buffer=piece, strides=(1,))
            at = np.flatnonzero(magics == _MAGIC)
            ids = np.ndarray((count,), ">i8", buffer=memoryview(piece)[8:], strides=(1,))[at]
            for place in at[(ids >= low_id) & (ids <= high_id)].tolist():
                head = Head.decode(piece, place)
                if head is not None:
                    yield offset + place, head
        offset += SEARCH_BYTES


@dataclass(frozen=True)
class FoundBatch:
    """Result of a search after bad bytes: the next sound batch, or at least whether there is a sound head."""

    stop: Stop | None = None
    has_head: bool = False
    committed: int = NO_MARK
    """Highest committed mark in the sound heads that the search met."""


def next_sound_batch(file: Readable, *, offset: int, end: int, next_id: int, high_id: int) -> FoundBatch:
    """Find the next sound batch after bad bytes at `offset`, where `next_id` should start.

    Forged batches could make this read the file many times over. Past a limit, everything up to the end counts as damaged,
    which is the safe answer."""
    raw = file.read(offset, BATCH_HEAD_BYTES)
    own = Head.decode(raw)
    start = offset + 1
    if own is not None and own.first_id == next_id:  # its payloads are skipped, whatever they look like
        start = offset + own.size
    elif own is None and len(raw) == BATCH_HEAD_BYTES:
        # A head states its size twice, so with one wrong byte one of the two is right.
        for size in _claimed_sizes(raw):
            head = Head.decode(file.read(offset + size, BATCH_HEAD_BYTES)) if size < end - offset else None
            if head is not None and next_id < head.first_id <= high_id:
                start = offset + size
                break
    budget = 4 * (end - offset) + (64 << 20)
    committed, has_head = NO_MARK, False
    if own is not None and own.first_id == next_id:
        committed = own.committed
    for place, head in _likely_heads(file, start, end, next_id, high_id):
        has_head, committed = True, max(committed, head.committed)
        if head.size > min(end - place, BATCH_BYTES_MAX):
            continue
        budget -= head.size
        if budget < 0:
            break
        if _has_sound_body(file, place, head):
            return FoundBatch(Stop(place, head.first_id), True, committed)
    return FoundBatch(None, has_head, committed)


def _claimed_sizes(raw: bytes) -> list[int]:
    """Return the sizes of the batch that a wrong head claims: its total size, and the sum of its sections."""
    locks, groups, records = (int.from_bytes(raw[at : at + 4], "big") for at in (48, 52, 56))
    sizes = {BATCH_HEAD_BYTES + locks + groups + records, int.from_bytes(raw[4:8], "big")}
    return sorted(size for size in sizes if size >= BATCH_HEAD_BYTES)


# -- the tail ----------------------------------------------------------------------------------------------------------


def tail_kind_of_batches(file: Readable, stop: Stop, end: int) -> TailKind:
    """Return what a tail looks like in which no later batch begins."""
    size = end - stop.offset
    raw = file.read(stop.offset, BATCH_HEAD_BYTES)
    if len(raw) < BATCH_HEAD_BYTES:
        return TailKind.SHORT if _begins_next(raw, stop) else TailKind.OTHER
    head = Head.decode(raw)
    if head is None:
        return TailKind.ROTTEN if _is_right_but_for_its_head(file, stop, raw, size) else TailKind.OTHER
    if not _follows(head, stop):
        return TailKind.WHOLE
    if head.size > size:
        return TailKind.SHORT
    return _tail_kind_of_body(file, stop.offset, head)


def _begins_next(raw: bytes, stop: Stop) -> bool:
    """Return whether the bytes agree with what is known of the next head."""
    known = [(0, MAGIC), (8, stop.next_id.to_bytes(8, "big")), (76, bytes(16))]
    if stop.end_of_log is not None:
        known.append((64, stop.end_of_log.crc.to_bytes(4, "big")))
    return all(right.startswith(raw[at : at + len(right)]) for at, right in known)


def _follows(head: Head, stop: Stop) -> bool:
    log_end = stop.end_of_log
    return head.first_id == stop.next_id and (log_end is None or (head.before == log_end.crc and head.time >= log_end.time))


def _is_right_but_for_its_head(file: Readable, stop: Stop, raw: bytes, size: int) -> bool:
    error = single_byte_error(raw)
    if error is None:
        return False
    at, right = error
    head = Head.decode(raw[:at] + bytes([right]) + raw[at + 1 :])
    return head is not None and _follows(head, stop) and head.size <= size and _has_sound_body(file, stop.offset, head)


def _tail_kind_of_body(file: Readable, offset: int, head: Head) -> TailKind:
    """Classify an invalid batch that is complete: none of its bytes are beyond the end of the file."""
    sections = file.read(offset + BATCH_HEAD_BYTES, head.lead - BATCH_HEAD_BYTES)
    are_sections_right = crc32(sections) == head.section_crc
    are_records_right = _crc_of(file, offset + head.lead, head.record_bytes) == head.record_crc
    if are_sections_right and are_records_right:
        return TailKind.WHOLE
    if are_records_right:
        rotten, crc = sections, head.section_crc
    elif are_sections_right:
        rotten, crc = file.read(offset + head.lead, head.record_bytes), head.record_crc
    else:
        return TailKind.OTHER
    return TailKind.ROTTEN if is_one_byte_wrong(rotten + crc.to_bytes(TRAILER_BYTES, "big")) else TailKind.OTHER


# -- by a footer -------------------------------------------------------------------------------------------------------


def follow_footer(
    file: Readable, footer: Footer, on_entries: Callable[[int, I64], object], *, chunk_bytes: int = CHUNK_BYTES
) -> bool:
    """Call `on_entries` with the first id and the index entries of each batch, by the footer, the heads of the batches and
    the lengths of the records; compute no checksum of a record. Return False if these contradict each other: then only the
    data can tell (`survey`)."""
    next_id = footer.first_id
    window = _Window(file, chunk_bytes, footer.offset)
    places = [*footer.batches.tolist(), footer.offset]
    for offset, stop in itertools.pairwise(places):
        head = Head.decode(window.at(offset, BATCH_HEAD_BYTES))
        if head is None or head.first_id != next_id or head.size != stop - offset or head.size > BATCH_BYTES_MAX:
            return False
        raw = window.at(offset, head.size)
        batch = batch_at(raw, head, walk(raw[head.lead :])) if len(raw) == head.size else None
        if batch is None:
            return False
        on_entries(next_id, offsets_of(offset + head.lead, batch.run))
        next_id += head.records
    return next_id == footer.last_id + 1
