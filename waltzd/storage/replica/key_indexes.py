"""Look-ups of the transactions that marked a lock: by the key indexes of sealed segments, or by the batches.

A key index is a file that nothing depends on. It is read beside the queue, and checked against the footer of its segment.
Where it is missing or wrong, the heads of the batches are read, and the segment is noted in `unwritten`. `write` makes
the file, on a thread that writes. The marks of the segment that takes the appends are in memory: each question reads the
batches that came since the last one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from contextlib import closing
from typing import NamedTuple, TypeVar

from waltzd.disk.seam import join, opened
from waltzd.errors import NeedsBatches, Trimmed, WaltzError
from waltzd.errors.operations import DiskFull, ReadFailed
from waltzd.format.key_index import (
    KeyHeader,
    KeyIndex,
    KeyIndexWrong,
    LockMarks,
    LockQuery,
    MarkColumns,
    key_index_of,
    scan_marks,
)
from waltzd.format.layout import HEADER_BYTES, NEW_SUFFIX, key_index_name
from waltzd.storage.replica.replica_context import ReplicaContext
from waltzd.storage.replica.segment import BatchSegment, Suspect
from waltzd.storage.replica.segment_list import SegmentList

T = TypeVar("T")
SEGMENTS_MAX = 64
"""Segments that one answer looks into, which bounds its time."""
KNOWN_MAX = 32
"""Fences of key indexes in memory, for each partition."""
SCANNED_MAX = 2
"""Segments without a key index that one answer reads, and whose marks stay in memory."""


class Scanned(NamedTuple):
    """Marks of the start of a segment, read from its batches."""

    cuts: int
    next_id: int
    offset: int
    parts: tuple[MarkColumns, ...]
    """The marks up to `next_id`, in few parts: each is larger than the part after it."""


class KeyIndexes:
    def __init__(self, context: ReplicaContext, segments: SegmentList) -> None:
        self._context = context
        self._segments = segments
        self._known: OrderedDict[int, tuple[int, KeyIndex]] = OrderedDict()
        """Key indexes that were read, with the number of cuts before."""
        self._scanned: OrderedDict[int, Scanned] = OrderedDict()
        self.unwritten: dict[int, None] = {}
        """First ids of sealed segments whose key index was missing or wrong when it was needed."""

    def _path(self, first_id: int) -> str:
        return join(self._context.directory, key_index_name(first_id))

    def find(self, query: LockQuery, *, cuts: int) -> LockMarks:
        """Return an answer to the start of a query whose ids are all here. `cuts`: number of cuts of the replica and of its
        segments that were replaced; what was read at another number is not used.

        Raise `NeedsBatches` if the first id that it has to cover is of format 0."""
        ids: list[int] = []
        rest, through = query, query.next_id
        for turn in range(SEGMENTS_MAX):
            try:
                with self._segments.suspecting(rest.next_id):
                    segment, last_here = self._segments.segment_with(rest.next_id)
            except (Suspect, Trimmed):  # the second: it was trimmed meanwhile
                if turn == 0:
                    raise
                break
            if not isinstance(segment, BatchSegment):
                if turn == 0:
                    raise self._needs_batches()
                break
            here = rest.within(segment.first_id, last_here)
            try:
                with self._segments.suspecting(rest.next_id):
                    found = self._find_in(segment, last_here, here, cuts)
            except Suspect:
                if turn == 0:
                    raise
                break
            through = here.first_id if query.newest_first else here.last_id
            ids += found
            if len(ids) >= query.limit:
                through = ids[-1]
                break
            rest = rest.after(LockMarks(ids=tuple(found), through=through))
            if rest.is_done or len(self.unwritten) >= SCANNED_MAX:
                break
        return LockMarks(ids=tuple(ids), through=through)

    def _needs_batches(self) -> NeedsBatches:
        first_ids = self._segments.first_ids

        def has_batches(first_id: int) -> bool:
            return first_id > self._segments.last_id or isinstance(self._segments.segment_with(first_id)[0], BatchSegment)

        at = bisect_left(first_ids, x=True, key=has_batches)
        first_id = first_ids[at] if at < len(first_ids) else self._segments.last_id + 1
        return NeedsBatches(
            f"partition {self._context.number}: transactions below id {first_id} are of format 0, which keeps no locks",
            next_step=f"ask only for ids above {first_id - 1}: after={first_id - 1}, or --after {first_id - 1}",
            first_id=first_id,
        )

    def _find_in(self, segment: BatchSegment, last_id: int, query: LockQuery, cuts: int) -> list[int]:
        first_id = segment.first_id
        if not self._segments.is_active(first_id):
            try:
                found = self._find_by_index(segment, query, cuts)
            except (KeyIndexWrong, ReadFailed):  # the batches answer, and the file is made again
                self._known.pop(first_id, None)
                found = None
            if found is not None:
                return found
            self.unwritten[first_id] = None
        parts = self._scan(segment, last_id, cuts).parts
        if query.newest_first:
            parts = parts[::-1]
        ids: list[int] = []
        for part in parts:
            ids += part.find(query)
        return ids[: query.limit]

    def _find_by_index(self, segment: BatchSegment, query: LockQuery, cuts: int) -> list[int] | None:
        """Return the answer of the key index; None if there is none. Raise `KeyIndexWrong` if it is not a sound index of
        this segment."""
        file = opened(self._context.disk, self._path(segment.first_id))
        if file is None:
            return None
        with closing(file):
            before, index = self._known.get(segment.first_id, (-1, None))
            if index is None or before != cuts:
                header = self._header(segment)
                if header is None:
                    return None
                index = KeyIndex.read(file, header)
                _keep(self._known, segment.first_id, (cuts, index), KNOWN_MAX)
            return index.find(file, query)

    def _header(self, segment: BatchSegment) -> KeyHeader | None:
        """Return what an index of a sealed segment has to name; None if the segment has no sound footer."""
        footer = segment.footer_hash()
        if footer is None:
            return None
        return KeyHeader(
            key=self._context.key, partition=self._context.number, first_id=segment.first_id,
            last_id=segment.next_id - 1, footer=footer,
        )  # fmt: skip

    def _scan(self, segment: BatchSegment, last_id: int, cuts: int) -> Scanned:
        """Return the marks of a segment up to `last_id`, where a batch ends, reading the batches that are new."""
        before = self._scanned.get(segment.first_id)
        if before is None or before.cuts != cuts:
            before = Scanned(cuts, segment.first_id, HEADER_BYTES, ())
        found = _scan_on(segment, before, last_id)
        _keep(self._scanned, segment.first_id, found, SCANNED_MAX)
        return found

    # -- files

    def missing(self) -> list[int]:
        """Return the first ids of sealed segments of format 1 beside which no key index stands."""
        disk, segments = self._context.disk, self._segments
        names = dict.fromkeys(disk.names(self._context.directory))
        found = [first_id for first_id, _ in segments.sealed() if key_index_name(first_id) not in names]
        return [first_id for first_id in found if self._has_batches(first_id)]

    def _has_batches(self, first_id: int) -> bool:
        try:
            return isinstance(self._segments.segment_with(first_id)[0], BatchSegment)
        except (Suspect, WaltzError):  # its next reader examines it, or fails
            return False

    def write(self, first_id: int) -> None:
        """Write the key index of a sealed segment beside it, unless the segment has no sound footer or there is little free
        space. It is not flushed: what a crash leaves of it is noticed."""
        self.unwritten.pop(first_id, None)
        context, path = self._context, self._path(first_id)
        if first_id not in self._segments.first_ids[:-1]:
            return
        segment, _ = self._segments.segment_with(first_id)
        header = self._header(segment) if isinstance(segment, BatchSegment) else None
        if header is None or not isinstance(segment, BatchSegment):
            return
        raw, new = key_index_of(segment.data, header), path + NEW_SUFFIX
        if raw is None:
            raise Suspect(first_id)
        least = context.settings.free_bytes_min
        if least and context.disk.free_bytes(context.directory) - len(raw) < least:
            return
        try:
            with closing(context.disk.create(new)) as file:
                file.write(0, raw)
        except DiskFull:
            context.disk.remove(new)
            return
        context.disk.rename(new, path)
        self._known.pop(first_id, None)
        self._scanned.pop(first_id, None)
        if first_id not in self._segments.first_ids[:-1] and context.disk.exists(path):
            context.disk.remove(path)  # it was trimmed or cut meanwhile


def _scan_on(segment: BatchSegment, before: Scanned, last_id: int) -> Scanned:
    if before.next_id > last_id:
        return before
    found = scan_marks(segment.data, before.offset, before.next_id, last_id)
    if found is None:
        raise Suspect(segment.first_id)
    marks, offset, next_id = found
    parts = before.parts
    if len(marks.ids):
        parts = (*parts, marks)
        while len(parts) > 1 and len(parts[-2].ids) <= 2 * len(parts[-1].ids):
            parts = (*parts[:-2], MarkColumns.join(parts[-2:]))
    return Scanned(before.cuts, next_id, offset, parts)


def _keep(kept: OrderedDict[int, T], first_id: int, value: T, most: int) -> None:
    """Keep a value; drop the oldest ones above `most`. Several readers may call it at once."""
    kept.pop(first_id, None)
    kept[first_id] = value
    while len(kept) > most:
        kept.popitem(last=False)
