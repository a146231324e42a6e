"""The segments of one replica, in the order of their ids: the one that is written, and a few sealed ones kept open.

It knows names and files; sessions, marks and promises are the business of `waltzd.storage.replica.partition`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from waltzd.disk.seam import join
from waltzd.errors import Trimmed
from waltzd.errors.operations import ReadFailed, TooManyFiles
from waltzd.format.batch import End
from waltzd.format.finding import Finding
from waltzd.format.footer import NO_HASH
from waltzd.format.layout import FileHeader, first_id_of, index_name, key_index_name, segment_name
from waltzd.storage.replica.replica_context import ReplicaContext
from waltzd.storage.replica.segment import UNUSABLE, BatchSegment, Segment, Suspect, whole_or_fatal

OPEN_SEGMENTS_MAX = 4
"""Sealed segments kept open for reading, per partition: with 64 partitions still below the usual limit of open files."""


class SegmentList:
    def __init__(self, context: ReplicaContext, *, first_ids: list[int], active: Segment | None) -> None:
        assert first_ids
        assert active is None or active.first_id == first_ids[-1]
        self._context = context
        self._disk = context.disk
        self._directory = context.directory
        self.first_ids = first_ids
        self.active = active
        """The last segment, open for writing; None when it is damaged beyond use."""
        self.last_id = active.next_id - 1 if active else first_ids[-1] - 1
        """The highest id on the disk. It moves after a flush, never before."""
        self.end: End | None = None
        """Where the last batch ends, with `last_id`. None: the last record is of format 0, or there is none."""
        self._chain: tuple[int, bytes] | None = None
        """Hash of the footer before the segment with this first id; None if not read yet."""
        self._forgotten = 0
        """Number of calls of `forget`."""
        self._sealed: tuple[int, dict[int, Segment]] = 0, {}
        """Sealed segments that are open, the last used last, and the number of calls of `forget` before the first was
        opened: after another call they are not used. Readers on several threads replace the dictionary and never change
        it, because closing a file lets another thread run."""

    def position_of(self, id_: int) -> int:
        return max(0, bisect_right(self.first_ids, id_) - 1)

    def last_id_of(self, position: int, first_ids: list[int] | None = None) -> int:
        first_ids = first_ids or self.first_ids
        return first_ids[position + 1] - 1 if position + 1 < len(first_ids) else self.last_id

    def is_active(self, first_id: int) -> bool:
        return self.active is not None and first_id == self.active.first_id

    def sealed(self) -> list[tuple[int, int]]:
        """First and last id of each segment that takes no more records."""
        return [(first_id, self.last_id_of(at)) for at, first_id in enumerate(self.first_ids[:-1])]

    def concerned(self, finding: Finding) -> list[int]:
        """Return the first ids of the segments that a finding names, or that hold its ids."""
        found = {first_id_of(finding.path.rpartition("/")[2])} & set(self.first_ids)
        if finding.first_id is not None and finding.last_id is not None and finding.first_id <= self.last_id:
            found.update(self.first_ids[self.position_of(finding.first_id) : self.position_of(finding.last_id) + 1])
        return sorted(first_id for first_id in found if first_id is not None)

    def segment_with(self, id_: int) -> tuple[Segment, int]:
        """Return the segment that holds this id, and the last id of that segment. Raise `Trimmed` below the first segment.

        Readers call this beside the queue: it looks at the list once, and the queue replaces lists instead of changing
        them."""
        first_ids = self.first_ids
        position = bisect_right(first_ids, id_) - 1
        if position < 0:
            raise self.trimmed(id_)
        first_id, last_id = first_ids[position], self.last_id_of(position, first_ids)
        active = self.active
        if active is not None and first_id == active.first_id:
            return active, last_id
        forgotten = self._forgotten
        before, sealed = self._sealed
        found = sealed.get(first_id) if before == forgotten else None
        if found is None:
            found = Segment.open(self._disk, self._directory, expected=self._context.header(first_id), next_id=last_id + 1)
        self._keep_open(found, forgotten)
        return found, last_id

    @contextmanager
    def suspecting(self, id_: int) -> Iterator[None]:
        """Raise `Suspect` if the segment with this id is sealed and cannot be read: its owner heals it."""
        try:
            yield
        except ReadFailed as error:
            first_id = self.first_ids[self.position_of(id_)]
            if self.is_active(first_id) or isinstance(error, TooManyFiles):
                raise
            raise Suspect(first_id) from error

    def trimmed(self, id_: int) -> Trimmed:
        """Return the error for an id below the first segment."""
        first_id = self.first_ids[0]
        return Trimmed(
            f"partition {self._context.number}: id {id_} is only in the archive; replicas have ids from {first_id} on",
            floor=first_id,
        )

    def _keep_open(self, segment: Segment, forgotten: int) -> None:
        before, sealed = self._sealed
        others = [one for one in sealed.values() if one.first_id != segment.first_id] if before == forgotten else []
        self._sealed = forgotten, {one.first_id: one for one in (*others[1 - OPEN_SEGMENTS_MAX :], segment)}

    def forget(self) -> None:
        """Drop the open segments, also those that a reader is opening: the next reader opens them again."""
        self._forgotten += 1
        self._sealed = self._forgotten, {}
        self._chain = None

    def start_segment(self, header: FileHeader) -> Segment:
        """Seal the active segment and create the next one. An empty active segment is replaced instead."""
        old = self.active
        assert old is not None
        if old.next_id > old.first_id:
            self.seal()
        new = Segment.create(self._disk, self._directory, header)
        if new.first_id == old.first_id:
            old.close()
        self.set_active(new)
        return new

    def seal(self) -> None:
        """Flush the active segment with its footer, so that another one can stand behind it."""
        assert self.active is not None
        self.flush()
        self.active.index.flush()

    def flush(self) -> None:
        """Flush the active segment and move the end of the log. A full segment of batches gets its footer."""
        active = self.active
        assert active is not None
        active.flush()
        self._moved()
        self.finish()

    def finish(self) -> None:
        """Write the footer of a full active segment, if it has none. Raise `Suspect` if the preceding footer cannot be
        read, `TooManyFiles` if its segment cannot be opened now: the next append writes it."""
        active = self.active
        if isinstance(active, BatchSegment) and active.is_full and not active.has_footer:
            before = self.preceding_footer_hash(active.first_id)
            if before is None:
                raise Suspect(self.first_ids[self.position_of(active.first_id - 1)])
            active.write_footer(before)

    def preceding_footer_hash(self, first_id: int) -> bytes | None:
        """Return the hash of the footer of the preceding segment; None if it cannot be read. Raise `TooManyFiles` if that
        tells nothing about the segment."""
        if self._chain is None or self._chain[0] != first_id:
            found = self._preceding_footer_hash(first_id)
            self._chain = None if found is None else (first_id, found)
        return None if self._chain is None else self._chain[1]

    def _preceding_footer_hash(self, first_id: int) -> bytes | None:
        if first_id == 0:
            return NO_HASH
        if first_id <= self.first_ids[0]:
            return None
        try:
            front, last_id = self.segment_with(first_id - 1)
            if not isinstance(front, BatchSegment):
                return NO_HASH
            return front.footer_hash() if last_id == first_id - 1 else None
        except TooManyFiles:
            raise
        except (Suspect, ReadFailed):
            return None

    def _moved(self) -> None:
        """Move the end of the log to the end of the active segment."""
        active = self.active
        assert active is not None
        self.last_id = active.next_id - 1
        if isinstance(active, BatchSegment) and active.log_end is not None:
            self.end = active.log_end
        elif active.next_id > active.first_id:
            self.end = None

    def refresh_end(self) -> None:
        """Read again which batch ends the log, after the active segment was replaced or cut. If it is empty, the batch is
        in the preceding segment. Raise `Suspect` if that cannot be read."""
        active, self.end = self.active, None
        if active is not None and active.next_id == active.first_id:
            self.end = self.preceding_end(active.first_id)
        elif active is not None:
            self._moved()

    def preceding_end(self, first_id: int) -> End | None:
        """Return the end of the last batch before this segment; None if there is no batch, or it was trimmed. Raise
        `Suspect` if it cannot be read."""
        try:
            front = self.segment_with(first_id - 1)[0] if first_id > self.first_ids[0] else None
            found = front.found_log_end() if isinstance(front, BatchSegment) else None
        except ReadFailed as error:  # a bad sector is damage of its segment, as wrong bytes are
            raise Suspect(self.first_ids[self.position_of(first_id - 1)]) from error
        return None if found is None else replace(found, segment_bytes=0)

    def set_active(self, new: Segment) -> None:
        """Make `new` the active segment, after the last segment or in its place."""
        old, self.active = self.active, new
        if new.first_id not in self.first_ids:
            self.first_ids = [*self.first_ids, new.first_id]
            if old is not None:
                self._keep_open(old, self._forgotten)
        self._moved()

    def note_missing(self, finding: Finding) -> None:
        """Keep the place of a missing segment, so that no other claims its ids."""
        first_id = first_id_of(finding.path.rpartition("/")[2])
        if first_id is not None and first_id not in self.first_ids:
            self.first_ids = sorted([*self.first_ids, first_id])

    @property
    def is_empty_above_zero(self) -> bool:
        """True if the log is empty and begins above id 0. The batch before its first id is then unknown here."""
        return 0 < self.first_ids[0] == self.last_id + 1

    def empty(self, first_id: int) -> None:
        """Drop all segments from the list. The caller must then create the segment with this first id."""
        if self.active is not None:
            self.active.close()
        self.forget()
        self.first_ids, self.active, self.last_id, self.end = [first_id], None, first_id - 1, None

    def _reopen(self, first_id: int, *, is_emptied: bool) -> Segment:
        """Open a sealed segment for writing. If it is to keep no record and cannot be read, create it again."""
        expected = self._context.header(first_id)
        try:
            return Segment.open(self._disk, self._directory, expected=expected, next_id=None, write=True)
        except (*UNUSABLE, Suspect):
            if not is_emptied:
                raise
            return Segment.create(self._disk, self._directory, expected)

    def cut(self, position: int, *, end: int, next_id: int) -> None:
        """Make the segment at `position` the last one, ending at byte `end`, in front of `next_id`.

        It is opened before anything goes. Then the newest goes first, and each is gone durably before the next: a crash
        between leaves a log, never a hole."""
        kept = self.first_ids[position]
        active = self.active
        if active is None or active.first_id != kept:
            active = self._reopen(kept, is_emptied=next_id == kept)
        with whole_or_fatal():
            for first_id in reversed(self.first_ids[position + 1 :]):
                for name in (segment_name(first_id), index_name(first_id), key_index_name(first_id)):
                    path = join(self._directory, name)
                    if self._disk.exists(path):
                        self._disk.remove(path)
                self._disk.flush_directory(self._directory)
        self.first_ids = self.first_ids[: position + 1]
        self.forget()
        self.active = active
        active.cut(end=end, next_id=next_id)
        self.last_id = next_id - 1
