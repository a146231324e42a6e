"""Repair of a replica: which segment files it accepts, what these must hold, and when the replica is complete again.

A whole segment is checked if a read met wrong bytes, or if an owner asks what the replica can prove. Damage is added to the
damage report; only indexes are changed.

A segment file is accepted after the last id, or in the place of a damaged or missing segment, and nowhere else, because
records are never rewritten. It is received under a temporary name, checked record by record, and then renamed. Before that
nothing of it counts, and after a crash the next start removes it. A file that ends early leaves a known gap, which the next
file can fill. The marks in the hard-state file stay at what this replica once had until it has that again: a crash halfway
leaves the replica as damaged as it was, and never seemingly sound.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np

from waltzd.disk.seam import Buffer, File, join
from waltzd.errors import TooLarge, WaltzError
from waltzd.errors.operations import HeaderDamaged, NotNextId, ReadFailed, TooManyFiles, UnfitSegment
from waltzd.format.batch import HEAD_BYTES as BATCH_HEAD_BYTES
from waltzd.format.batch import End, Head
from waltzd.format.finding import Code, Finding
from waltzd.format.footer import Footer, FooterBuilder, footer_at
from waltzd.format.index import places_of, read_index, write_entries
from waltzd.format.layout import (
    BATCHES,
    HEADER_BYTES,
    NEW_SUFFIX,
    FileHeader,
    check_header,
    first_id_of,
    index_name,
    index_offset,
)
from waltzd.format.record import OVERHEAD_BYTES, Run, first_bad, id_and_length
from waltzd.format.scan import Stop, scan
from waltzd.format.span import BatchSpan, Span
from waltzd.storage.replica.examine import DamageReport, PrecedingEnd, examine_segment, missing_finding, short_finding
from waltzd.storage.replica.hard_state import HardStateFile, floor_of
from waltzd.storage.replica.replica_context import FreeSpaceGuard, ReplicaContext
from waltzd.storage.replica.segment import BatchSegment, Segment, Suspect, whole_or_fatal
from waltzd.storage.replica.segment_list import SegmentList


class Installation:
    """A segment file that a replica receives."""

    def __init__(
        self,
        context: ReplicaContext,
        first_id: int,
        free_space: FreeSpaceGuard,
        *,
        turn: int,
        begun_at: tuple[int, int, bool],
        file_bytes: int,
    ) -> None:
        """`file_bytes`: announced size of the file; 0 if the sender does not know it. `turn`: number that makes the
        temporary names unique. `begun_at`: the state of the replica in which the installation is valid."""
        self.first_id = self.next_id = first_id
        self.begun_at = begun_at
        self._context = context
        self._free_space = free_space
        self._file_bytes = file_bytes
        self._record_bytes_max = context.settings.record_bytes_max
        self._size = 0
        self.first_head: Head | None = None
        """Head of the first batch; None in format 0."""
        self.log_end: End | None = None
        self._builder: FooterBuilder | None = None
        self._footer: Footer | None = None
        """Footer that came with the file; None without a sound one."""
        self._has_footer = False
        self._names = [
            (f"{name}.{turn}{NEW_SUFFIX}", name)
            for name in (join(context.directory, index_name(first_id)), context.path(first_id))
        ]
        self._files: list[File] = []
        try:
            for new, _ in self._names:
                self._files.append(context.disk.create(new))
        except WaltzError:
            self.abandon()
            raise

    @property
    def _index(self) -> File:
        return self._files[0]

    @property
    def _data(self) -> File:
        return self._files[1]

    def _unfit(self, why: str) -> UnfitSegment:
        return UnfitSegment(f"the file for the segment at id {self.first_id} of partition {self._context.number} {why}")

    def write(self, piece: Buffer) -> None:
        if self._file_bytes and self._size + len(piece) > self._file_bytes:
            raise self._unfit(f"is larger than the {self._file_bytes} bytes that were announced")
        self._free_space.check(len(piece))
        self._data.write(self._size, piece)
        self._size += len(piece)

    def prove(self) -> None:
        """Check every record of the complete file, write its index, and flush both."""
        if self._file_bytes and self._size != self._file_bytes:
            raise self._unfit(f"ended after {self._size} of {self._file_bytes} bytes")
        header = self._header()
        if header.version == BATCHES:
            self.first_head = Head.decode(self._data.read(HEADER_BYTES, BATCH_HEAD_BYTES))
            if self.first_head is None or self.first_head.first_id != self.first_id:
                raise self._unfit("does not begin with its first batch")
            header = replace(header, created_ms=self.first_head.time // 1000)
        raw = header.encode()
        self._data.write(0, raw)  # with zeros in its reserved part
        self._index.write(0, raw)
        builder = FooterBuilder(raw)

        def add(span: Span) -> None:
            self._check(span.run, deeply=isinstance(span, BatchSpan))
            write_entries(self._index, span.first_id - self.first_id, span.entries)
            if isinstance(span, BatchSpan):
                builder.add_span(span)

        stop = scan(
            self._data,
            segment_first_id=self.first_id,
            next_id=self.first_id,
            offset=HEADER_BYTES,
            end=self._size,
            version=header.version,
            on_span=add,
            bytes_max=None if header.version == BATCHES else self._record_bytes_max,
        )
        if stop.offset != self._size and not stop.is_sealed:
            raise self._bad_record(stop)
        if stop.next_id == self.first_id:
            raise self._unfit("has no record in it")
        if stop.is_sealed:
            self._take_footer(stop, builder)
        self._data.flush()
        self._index.flush()
        self.next_id, self.log_end = stop.next_id, stop.end_of_log

    def _take_footer(self, stop: Stop, builder: FooterBuilder) -> None:
        """Keep the footer of the checked batches, and cut the footer of the file, which must be equal."""
        self._footer = footer_at(self._data, stop.offset, self._size)
        if self._footer is not None and self._footer.encode() != builder.footer(self._footer.before).encode():
            raise self._unfit("has a footer that is not that of its batches")
        self._builder = builder
        self._data.truncate(stop.offset)
        self._size = stop.offset

    def check_at_floor(self) -> None:
        """Raise `UnfitSegment` if a segment of format 1 at the trim floor came without a footer. Its footer cannot be
        rebuilt, because the footer before it is trimmed."""
        if self.first_head is not None and self._footer is None:
            raise self._unfit("has no footer, and stands at the floor of this replica")

    def stand_behind(self, preceding: PrecedingEnd) -> None:
        """Check that the batches continue the segment in front, and write the footer."""
        if self.first_head is None:
            if preceding.end is not None and preceding.end.crc:
                raise self._unfit("has records of format 0, and batches stand in front of them")
            return
        if preceding.end is not None and (
            self.first_head.before != preceding.end.crc or self.first_head.time < preceding.end.time
        ):
            raise self._unfit("does not go on with the batch in front of it")
        if self._builder is None:
            return
        before, came = preceding.footer, self._footer
        if came is not None and before not in (None, came.before):
            raise self._unfit("has a footer that names another one in front of it")
        if before is None and came is not None:
            before = came.before
        if before is not None:  # else the footer is written when the footer of the segment before is known
            self._data.write(self._size, self._builder.footer(before).encode())
            self._data.flush()
            self._has_footer = True

    def _header(self) -> FileHeader:
        where = f"the file for the segment at id {self.first_id}"
        try:
            return check_header(self._data.read(0, HEADER_BYTES), where, self._context.header(self.first_id))
        except HeaderDamaged as error:
            raise UnfitSegment(error.message) from error

    def _bad_record(self, stop: Stop) -> UnfitSegment | TooLarge:
        head = self._data.read(stop.offset, OVERHEAD_BYTES)
        size = id_and_length(head)[1] + OVERHEAD_BYTES if len(head) == OVERHEAD_BYTES else 0
        if size > self._record_bytes_max and id_and_length(head)[0] == stop.next_id:
            return self._too_large(stop.next_id, size)
        return self._unfit(f"has no sound record {stop.next_id} at byte {stop.offset}")

    def _too_large(self, id_: int, size: int) -> TooLarge:
        return TooLarge(f"record {id_} has {size} bytes; {self._record_bytes_max} are allowed")

    def _check(self, run: Run, *, deeply: bool) -> None:
        """Check sizes of records. `deeply`: check the checksum of each record, too. The checksum of its batch was checked
        before; they differ only if the owner made an error."""
        bad = first_bad(run) if deeply else None
        if bad is not None:
            raise self._unfit(f"has no sound record {run.first_id + bad}")
        sizes = np.diff(run.bounds)
        largest = int(sizes.argmax())
        if sizes[largest] > self._record_bytes_max:
            raise self._too_large(run.first_id + largest, int(sizes[largest]))

    def leave_out(self, next_id: int) -> None:
        """Truncate the file at this id, which another segment holds."""
        assert self.first_id < next_id < self.next_id
        found = read_index(self._index, next_id - self.first_id, 1)
        if self.first_head is not None:
            found = places_of(found)[1]
            head = Head.decode(self._data.read(int(found[0]), BATCH_HEAD_BYTES))
            if head is None or head.first_id != next_id:
                raise self._unfit(f"has a batch that goes on beyond id {next_id}, which another segment has")
            self._builder, self.log_end = None, None
        end = int(found[0])
        self._data.truncate(end)
        self._data.flush()
        self._index.truncate(index_offset(next_id - self.first_id))
        self._index.flush()
        self._size, self.next_id = end, next_id

    def take_names(self) -> Segment:
        """Rename both files and flush the names. The index comes first: a start notices an index alone or one too short."""
        disk, directory = self._context.disk, self._context.directory
        with whole_or_fatal():
            for new, name in self._names:
                disk.rename(new, name)
                disk.flush_directory(directory)
            self._close()
            index, data = (disk.open(name, write=True) for _, name in self._names)
            header = FileHeader.decode(data.read(0, HEADER_BYTES), data.path)
        segment = Segment.of(directory, header, data, index, end=self._size, next_id=self.next_id)
        if isinstance(segment, BatchSegment):
            segment.goes_on(self.log_end, has_footer=self._has_footer)
        return segment

    def _close(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()

    def abandon(self) -> None:
        """Remove the temporary files. It has no effect after `take_names`."""
        self._close()
        for new, _ in self._names:
            if self._context.disk.exists(new):
                self._context.disk.remove(new)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place for a segment file."""

    least_id: int
    """Id that the file must reach, because the replica serves the ids up to it."""
    next_first: int | None
    """First id of the next segment; None at the end of the log."""
    is_taken: bool
    """Whether a segment of that name, damaged or missing, is part of the log."""


class Healing:
    def __init__(
        self,
        context: ReplicaContext,
        segments: SegmentList,
        damage: DamageReport,
        hard_state: HardStateFile,
        free_space: FreeSpaceGuard,
        *,
        proven_from: int,
    ) -> None:
        self._context = context
        self._segments = segments
        self._damage = damage
        self._hard_state = hard_state
        self._free_space = free_space
        self._proven_from = proven_from
        """First id of the oldest segment that was checked since the start. All newer segments were checked as well."""
        self._turn = 0

    @property
    def floor(self) -> int:
        """Highest id that this replica is known to have had on disk."""
        return floor_of(self._context.info, self._hard_state.value)

    @property
    def damaged_segments(self) -> tuple[int, ...]:
        """First ids of the segments whose files would repair this replica."""
        names = [finding.path.rpartition("/")[2] for finding in self._damage.findings]
        found = {first_id for name in names if (first_id := first_id_of(name)) is not None}
        short = self._damage.short
        if short is not None and self._segments.first_ids[-1] not in found:
            assert short.first_id is not None
            found.add(self._segments.first_ids[-1] if self._is_cut_short else short.first_id)
        return tuple(sorted(found))

    @property
    def _is_cut_short(self) -> bool:
        """Return whether the log ends too early within a segment of format 1. The missing records belong into that
        segment, because the owner decides where a segment ends."""
        active = self._segments.active
        is_begun = isinstance(active, BatchSegment) and not active.is_full and active.next_id > active.first_id
        return self._damage.short is not None and is_begun

    # -- segment files

    def begin(
        self, first_id: int, *, file_bytes: int, cut_floor: int | None, begun_at: tuple[int, int, bool]
    ) -> Installation:
        """Begin to receive a file; raise an error if it has no place in the log, or no space on disk."""
        self._place(first_id, cut_floor)
        self._free_space.check(file_bytes)
        self._turn += 1
        return Installation(
            self._context, first_id, self._free_space, turn=self._turn, begun_at=begun_at, file_bytes=file_bytes
        )

    def _place(self, first_id: int, cut_floor: int | None) -> Place:
        """Return the place of a file. Ids above `cut_floor` may be lost, because the session has not begun; None: no id
        may."""
        segments, damage = self._segments, self._damage
        last_first = segments.first_ids[-1]
        if first_id in segments.first_ids:
            position = segments.first_ids.index(first_id)
            next_first = None if first_id == last_first else segments.first_ids[position + 1]
            last_id = segments.last_id_of(position)
            is_empty = next_first is None and last_id < first_id
            is_short = next_first is None and self._is_cut_short
            if damage.holds(self._context.path(first_id)) or is_empty or is_short:
                least_id = damage.last_sound(first_id, last_id)
                if cut_floor is not None:
                    least_id = min(least_id, cut_floor)
                return Place(least_id=least_id, next_first=next_first, is_taken=True)
        elif (
            segments.active is not None
            and first_id == segments.last_id + 1
            and not damage.holds(self._context.path(last_first))
        ):
            return Place(least_id=first_id, next_first=None, is_taken=False)
        damaged = ", ".join(map(str, self.damaged_segments)) or "none"
        raise NotNextId(
            f"a segment that starts at id {first_id} has no place in partition {self._context.number}: the log ends at id "
            f"{segments.last_id}, and segments that can be replaced start at: {damaged}",
            next_id=segments.last_id + 1,
        )

    def put(self, installation: Installation, *, cut_floor: int | None) -> None:
        """Rename the file to its place in the log. Its records count when this returns."""
        first_id = installation.first_id
        place = self._place(first_id, cut_floor)
        if installation.next_id - 1 < place.least_id:
            raise UnfitSegment(
                f"the file for the segment at id {first_id} of partition {self._context.number} ends at id "
                f"{installation.next_id - 1}; this replica holds sound records up to {place.least_id} there",
                least_id=place.least_id,
            )
        if place.next_first is not None and installation.next_id > place.next_first:
            installation.leave_out(place.next_first)
        if not place.is_taken:
            self._seal(installation)
        if 0 < first_id == self._segments.first_ids[0]:
            installation.check_at_floor()
        installation.stand_behind(self._preceding_end(first_id))
        if place.is_taken:
            self._hard_state.change(segments=0)  # after a crash here, the next start checks every segment
        segment = installation.take_names()
        self._damage.replace(self._context.path(first_id), [])
        self._segments.forget()
        if place.next_first is None:
            self._segments.set_active(segment)
            self.end_moved(is_indexed=True)
            self.stand()
            return
        segment.close()
        if segment.next_id < place.next_first:
            hole = missing_finding(self._context, segment.next_id, place.next_first - 1)
            self._damage.replace(hole.path, [hole])
            self._segments.note_missing(hole)
        self._hard_state.change(segments=len(self._segments.first_ids))
        self.stand()

    def _seal(self, installation: Installation) -> None:
        """Seal the active segment before a new one; raise `NotNextId` if it is not full."""
        active = self._segments.active
        if isinstance(active, BatchSegment) and not active.is_full and active.next_id > active.first_id:
            raise NotNextId(
                f"a segment that starts at id {installation.first_id} has no place in partition {self._context.number}: "
                "the segment in front of it is not full",
                next_id=self._segments.last_id + 1,
            )
        try:
            self._segments.seal()
        except Suspect as question:
            self.examine(question.first_id)
            if self._damage:
                raise self._damage.error() from None
            self._segments.seal()

    # -- the end of the log

    def _owe(self, last_id: int) -> None:
        """Save that this replica had ids up to `last_id`, as its newest segment is damaged: it is complete when it has them
        again, and a start never takes missing ids for a torn write."""
        if last_id > self._hard_state.value.durable:
            if self._segments.active is not None:
                self._segments.active.index.flush()
            self._hard_state.change(durable=last_id)

    def end_moved(self, *, is_indexed: bool) -> None:
        """Save the new end of the log, and whether it is as long as it once was."""
        segments, hard_state = self._segments, self._hard_state.value
        newest = segments.first_ids[-1]
        owed = max(self.floor, hard_state.newest if newest < hard_state.newest else -1)
        if segments.last_id < owed:
            self._damage.short = short_finding(self._context, segments.last_id + 1, owed)
            if hard_state.segments != len(segments.first_ids):
                self._hard_state.change(newest=max(hard_state.newest, newest), segments=len(segments.first_ids))
            return
        if not is_indexed:
            assert segments.active is not None
            segments.active.index.flush()
        self._hard_state.change(durable=segments.last_id, newest=newest, segments=len(segments.first_ids))
        self._damage.short = None

    # -- checking segments

    def prove_next(self, low_mark: int) -> bool:
        """Check the newest segment above the mark that was not checked since the start; return False if there is none."""
        at = bisect_left(self._segments.first_ids, self._proven_from) - 1
        if at < 0 or self._segments.last_id_of(at) <= low_mark or self._proven_from <= low_mark + 1:
            return False
        first_id = self._segments.first_ids[at]
        self.examine(first_id)
        self._proven_from = first_id
        return True

    def examine(self, first_id: int) -> None:
        """Read a whole segment, record what is wrong with it, and make its index right again."""
        segments = self._segments
        segments.forget()
        position = segments.first_ids.index(first_id)
        is_last = position == len(segments.first_ids) - 1
        last_id = segments.last_id_of(position)
        if is_last and self._damage.short is None:
            last_id = max(last_id, self.floor)
        active = segments.active if segments.is_active(first_id) else None
        found = examine_segment(
            self._context,
            first_id,
            next_id=last_id + 1,
            is_last=is_last,
            active=active,
            preceding=self._preceding_end(first_id),
        )
        if not found and isinstance(active, BatchSegment) and active.is_full and not active.has_footer:
            found = self._unfinished(first_id)
        if found and is_last:
            self._owe(last_id)
        known = self._damage.findings
        self._damage.replace(self._context.path(first_id), found)
        for finding in found:
            segments.note_missing(finding)
            if finding not in known:  # else it was reported already
                self._context.complain(finding)

    def _unfinished(self, first_id: int) -> list[Finding]:
        """Return the finding about a full segment at the floor that has no footer. The replica that was trimmed in front of
        it was damaged there, and cannot tell any more what the footer has to name; the file of another replica has it."""
        if not 0 < first_id == self._segments.first_ids[0]:
            return []
        detail = "its footer has to name that of the segment in front of it, which was trimmed"
        return [self._context.finding(Code.BROKEN_CHAIN, self._context.path(first_id), detail)]

    def stand(self) -> None:
        """Read the end of the log again, after a truncation or a new segment before it, and write missing footers."""
        try:
            self._stand()
        except Suspect as question:
            self.examine(question.first_id)
            with contextlib.suppress(Suspect):  # the segment is damaged, and the owner is told so
                self._stand()

    def _stand(self) -> None:
        self._segments.refresh_end()
        if not self._damage or self._damage.is_only_short:
            with contextlib.suppress(TooManyFiles):  # the next append writes the footer
                self._segments.finish()

    def _preceding_end(self, first_id: int) -> PrecedingEnd:
        """Return what is known of the segment before this one; nothing if that was trimmed."""
        if 0 < first_id == self._segments.first_ids[0]:
            return PrecedingEnd()
        end = footer = None
        with contextlib.suppress(Suspect):
            end = self._segments.preceding_end(first_id) or End()
        with contextlib.suppress(TooManyFiles):
            footer = self._segments.preceding_footer_hash(first_id)
        return PrecedingEnd(end, footer)

    def end_of(self, position: int, mark: int) -> tuple[int, int]:
        """Return where to cut after `mark` in the segment at `position`, and the next id there. If a batch goes beyond
        `mark`, the cut is before that batch; if `mark` is in the segment before, the cut is after the header."""
        segments = self._segments
        if mark < segments.first_ids[position]:
            return HEADER_BYTES, mark + 1
        try:
            return segments.segment_with(mark)[0].end_of(mark)
        except (Suspect, ReadFailed):
            self.examine(segments.first_ids[position])
            self._damage.check_up_to(mark)
            return segments.segment_with(mark)[0].end_of(mark)
