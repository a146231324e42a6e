"""How damage is found and healed: which segment files a replica takes, what they must hold, and when it is level again.

A segment is checked whole, because a read met wrong bytes or because an owner asks what the replica vouches for. Damage
goes into quarantine; only indexes are changed.

A file may stand behind the last id, or in the place of a segment that is damaged or missing; nowhere else, because records
are never rewritten. It is received beside the log, proven record by record, then given its name: before that nothing of it
counts, and a crash leaves only files that the next start removes. A file that ends early leaves a hole that is known and
can be filled by the next one. The marks of the promise file never fall below what this replica once had, until it has that
again: a crash halfway leaves it as damaged as it was, never sound by accident.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from waltzd.disk.seam import Buffer, File, join
from waltzd.errors import HeaderDamaged, NotNextId, TooLarge, UnfitSegment, WaltzError
from waltzd.format.index import offsets_of, read_index, write_entries
from waltzd.format.layout import (
    HEADER_BYTES,
    NEW_SUFFIX,
    FileHeader,
    check_header,
    first_id_of,
    index_name,
    index_offset,
)
from waltzd.format.record import OVERHEAD_BYTES, Run, id_and_length
from waltzd.format.scan import Stop, scan
from waltzd.storage.replica.examine import Quarantine, examine_segment, missing_finding, short_finding
from waltzd.storage.replica.promise import PromiseFile, floor_of
from waltzd.storage.replica.segment import Segment, Suspect
from waltzd.storage.replica.shelf import Shelf
from waltzd.storage.replica.site import Room, Site


class Installation:
    """A segment file on its way into a replica."""

    def __init__(
        self, site: Site, first_id: int, room: Room, *, turn: int, begun_at: tuple[int, int, bool], file_bytes: int
    ) -> None:
        """`file_bytes`: how large the file will be; 0 where the sender does not know. `turn` keeps the names of two
        installations apart, `begun_at` is the moment that it belongs to."""
        self.first_id = self.next_id = first_id
        self.begun_at = begun_at
        self._site = site
        self._room = room
        self._file_bytes = file_bytes
        self._record_bytes_max = site.settings.record_bytes_max
        self._size = 0
        self._names = [
            (f"{name}.{turn}{NEW_SUFFIX}", name)
            for name in (join(site.directory, index_name(first_id)), site.path(first_id))
        ]
        self._files: list[File] = []
        try:
            for new, _ in self._names:
                self._files.append(site.disk.create(new))
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
        return UnfitSegment(f"the file for the segment at id {self.first_id} of partition {self._site.number} {why}")

    def write(self, piece: Buffer) -> None:
        if self._file_bytes and self._size + len(piece) > self._file_bytes:
            raise self._unfit(f"is larger than the {self._file_bytes} bytes that were announced")
        self._room.check(len(piece))
        self._data.write(self._size, piece)
        self._size += len(piece)

    def prove(self) -> None:
        """The whole file is here: check every record, make the index, and have both on the disk."""
        if self._file_bytes and self._size != self._file_bytes:
            raise self._unfit(f"ended after {self._size} of {self._file_bytes} bytes")
        header = self._header().encode()
        self._data.write(0, header)  # without damage in the part of it that means nothing
        self._index.write(0, header)
        stop = scan(
            self._data,
            segment_first_id=self.first_id,
            next_id=self.first_id,
            offset=HEADER_BYTES,
            end=self._size,
            on_run=self._add,
            record_bytes_max=self._record_bytes_max,
        )
        if stop.offset != self._size:
            raise self._bad_record(stop)
        if stop.next_id == self.first_id:
            raise self._unfit("has no record in it")
        self._data.flush()
        self._index.flush()
        self.next_id = stop.next_id

    def _header(self) -> FileHeader:
        where = f"the file for the segment at id {self.first_id}"
        try:
            return check_header(self._data.read(0, HEADER_BYTES), where, self._site.header(self.first_id))
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

    def _add(self, offset: int, run: Run) -> None:
        sizes = np.diff(run.bounds)
        largest = int(sizes.argmax())
        if sizes[largest] > self._record_bytes_max:
            raise self._too_large(run.first_id + largest, int(sizes[largest]))
        write_entries(self._index, run.first_id - self.first_id, offsets_of(offset, run))

    def leave_out(self, next_id: int) -> None:
        """Cut from this id on: another segment has it."""
        assert self.first_id < next_id < self.next_id
        end = int(read_index(self._index, next_id - self.first_id, 1)[0])
        self._data.truncate(end)
        self._data.flush()
        self._index.truncate(index_offset(next_id - self.first_id))
        self._index.flush()
        self._size, self.next_id = end, next_id

    def take_names(self) -> Segment:
        """Under their names, durably, one after the other: an index that is too short or alone is noticed at a start."""
        disk, directory = self._site.disk, self._site.directory
        for new, name in self._names:
            disk.rename(new, name)
            disk.flush_directory(directory)
        self._close()
        index, data = (disk.open(name, write=True) for _, name in self._names)
        header = FileHeader.decode(data.read(0, HEADER_BYTES), data.path)
        return Segment(directory, header, data, index, end=self._size, next_id=self.next_id)

    def _close(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()

    def abandon(self) -> None:
        """Remove what has no name yet. Harmless after the end."""
        self._close()
        for new, _ in self._names:
            if self._site.disk.exists(new):
                self._site.disk.remove(new)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place where a segment file may stand."""

    least_id: int
    """The file must reach this id: the replica serves the ids up to it."""
    next_first: int | None
    """The first id of the segment behind; None at the end of the log."""
    is_taken: bool
    """By a segment of that name, damaged or missing."""


class Healing:
    def __init__(
        self, site: Site, shelf: Shelf, quarantine: Quarantine, promise: PromiseFile, room: Room, *, proven_from: int
    ) -> None:
        self._site = site
        self._shelf = shelf
        self._quarantine = quarantine
        self._promise = promise
        self._room = room
        self._proven_from = proven_from
        """The first id of the oldest segment that was checked since the files were opened; all newer ones were, too."""
        self._turn = 0

    @property
    def floor(self) -> int:
        """The highest id that this replica is known to have had on disk."""
        return floor_of(self._site.info, self._promise.value)

    @property
    def damaged_segments(self) -> tuple[int, ...]:
        """The first ids of the files that would heal this replica."""
        names = [finding.path.rpartition("/")[2] for finding in self._quarantine.findings]
        found = {first_id for name in names if (first_id := first_id_of(name)) is not None}
        short = self._quarantine.short
        if short is not None and self._shelf.first_ids[-1] not in found:
            assert short.first_id is not None
            found.add(short.first_id)
        return tuple(sorted(found))

    # -- segment files

    def begin(
        self, first_id: int, *, file_bytes: int, cut_floor: int | None, begun_at: tuple[int, int, bool]
    ) -> Installation:
        """Begin to receive a file. Raises when it has no place, or there is no room."""
        self._place(first_id, cut_floor)
        self._room.check(file_bytes)
        self._turn += 1
        return Installation(self._site, first_id, self._room, turn=self._turn, begun_at=begun_at, file_bytes=file_bytes)

    def _place(self, first_id: int, cut_floor: int | None) -> Place:
        """Ids above `cut_floor` may be lost, because their owner has not begun the session yet; with None, none may."""
        shelf, quarantine = self._shelf, self._quarantine
        last_first = shelf.first_ids[-1]
        if first_id in shelf.first_ids:
            position = shelf.first_ids.index(first_id)
            next_first = None if first_id == last_first else shelf.first_ids[position + 1]
            last_id = shelf.last_id_of(position)
            if quarantine.holds(self._site.path(first_id)) or (next_first is None and last_id < first_id):
                least_id = quarantine.last_sound(first_id, last_id)
                if cut_floor is not None:
                    least_id = min(least_id, cut_floor)
                return Place(least_id=least_id, next_first=next_first, is_taken=True)
        elif (
            shelf.active is not None and first_id == shelf.last_id + 1 and not quarantine.holds(self._site.path(last_first))
        ):
            return Place(least_id=first_id, next_first=None, is_taken=False)
        damaged = ", ".join(map(str, self.damaged_segments)) or "none"
        raise NotNextId(
            f"a segment that starts at id {first_id} has no place in partition {self._site.number}: the log ends at id "
            f"{shelf.last_id}, and segments that can be replaced start at: {damaged}",
            next_id=shelf.last_id + 1,
        )

    def put(self, installation: Installation, *, cut_floor: int | None) -> None:
        """Give the file its place. Its records count when this returns."""
        first_id = installation.first_id
        place = self._place(first_id, cut_floor)
        if installation.next_id - 1 < place.least_id:
            raise UnfitSegment(
                f"the file for the segment at id {first_id} of partition {self._site.number} ends at id "
                f"{installation.next_id - 1}; this replica holds sound records up to {place.least_id} there",
                least_id=place.least_id,
            )
        if place.next_first is not None and installation.next_id > place.next_first:
            installation.leave_out(place.next_first)
        if place.is_taken:
            self._promise.change(segments=0)  # should this be interrupted, the next start looks at every segment
        else:
            self._shelf.seal()
        segment = installation.take_names()
        self._quarantine.replace(self._site.path(first_id), [])
        self._shelf.forget(first_id)
        if place.next_first is None:
            self._shelf.stand_last(segment)
            self.end_moved(is_indexed=True)
            return
        segment.close()
        if segment.next_id < place.next_first:
            hole = missing_finding(self._site, segment.next_id, place.next_first - 1)
            self._quarantine.replace(hole.path, [hole])
            self._shelf.miss_for(hole)
        self._promise.change(segments=len(self._shelf.first_ids))

    # -- the end of the log

    def _owe(self, last_id: int) -> None:
        """The newest segment is damaged, and this replica has had ids up to `last_id`: it is level when it has them again,
        and a start takes no missing one for a torn write."""
        if last_id > self._promise.value.durable:
            if self._shelf.active is not None:
                self._shelf.active.index.flush()
            self._promise.change(durable=last_id)

    def end_moved(self, *, is_indexed: bool) -> None:
        """The log ends elsewhere now: write down whether it is as long as it once was."""
        shelf, promise = self._shelf, self._promise.value
        newest = shelf.first_ids[-1]
        owed = max(self.floor, promise.newest if newest < promise.newest else -1)
        if shelf.last_id < owed:
            self._quarantine.short = short_finding(self._site, shelf.last_id + 1, owed)
            if promise.segments != len(shelf.first_ids):
                self._promise.change(newest=max(promise.newest, newest), segments=len(shelf.first_ids))
            return
        if not is_indexed:
            assert shelf.active is not None
            shelf.active.index.flush()
        self._promise.change(durable=shelf.last_id, newest=newest, segments=len(shelf.first_ids))
        self._quarantine.short = None

    # -- checking segments

    def prove_next(self, low_mark: int) -> bool:
        """Check the newest segment above the mark that was not checked since the files were opened. False when there is
        none left."""
        at = bisect_left(self._shelf.first_ids, self._proven_from) - 1
        if at < 0 or self._shelf.last_id_of(at) <= low_mark or self._proven_from <= low_mark + 1:
            return False
        first_id = self._shelf.first_ids[at]
        self.examine(first_id)
        self._proven_from = first_id
        return True

    def examine(self, first_id: int) -> None:
        """Read a whole segment, quarantine what is wrong with it, and make its index right again."""
        shelf = self._shelf
        shelf.forget(first_id)
        position = shelf.first_ids.index(first_id)
        is_last = position == len(shelf.first_ids) - 1
        last_id = shelf.last_id_of(position)
        if is_last and self._quarantine.short is None:
            last_id = max(last_id, self.floor)
        active = shelf.active if shelf.is_active(first_id) else None
        found = examine_segment(self._site, first_id, next_id=last_id + 1, is_last=is_last, active=active)
        if found and is_last:
            self._owe(last_id)
        known = self._quarantine.findings
        self._quarantine.replace(self._site.path(first_id), found)
        for finding in found:
            shelf.miss_for(finding)
            if finding not in known:  # otherwise it was said already
                self._site.complain(finding)

    def end_of(self, position: int, mark: int) -> int:
        """Where the record `mark` ends in its segment, or the header ends where that record is in the segment before."""
        shelf = self._shelf
        if mark < shelf.first_ids[position]:
            return HEADER_BYTES
        try:
            return shelf.segment_with(mark)[0].end_of(mark)
        except Suspect as question:
            self.examine(question.first_id)
            self._quarantine.check_up_to(mark)
            return shelf.segment_with(mark)[0].end_of(mark)
