"""Where the logs of a store may end so that together they are one moment of a cluster.

A cut is a mark for each partition: its log ends there. Partitions that are cut at one time are consistent: times are a
hybrid clock, an effect is never earlier than its cause, and so the cause of whatever is in the cut is in it as well. That
holds as far as a partition is *complete*: nothing that was committed up to the time is missing in the store. What was saved
says up to which time that is. Without such a word the last batch does: a later one may have the same time, so it is a
microsecond less.

In format 1 a log is cut behind a batch, never in it, so a group of transactions is whole or absent. Records of format 0
have no times: they can be cut at any id, and at no time.

`moment_of` and `marks_at` decide. `ArchivedLog` finds the place by few and small reads, whatever the size of the archive;
what it relies on carries a checksum, and the bytes themselves are proven when they are fetched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property

from waltzd.archive.archiving import PartitionArchive
from waltzd.archive.manifest import Entry, Manifest, pieces_of
from waltzd.disk.seam import Buffer
from waltzd.errors import ArchiveDamaged, CutImpossible, NoTimes
from waltzd.format.batch import HEAD_BYTES, Head
from waltzd.format.footer import END_BYTES, Footer, footer_bytes
from waltzd.format.layout import BATCHES, HEADER_BYTES, NO_MARK, FileHeader
from waltzd.format.record import OVERHEAD_BYTES, id_and_length


@dataclass(frozen=True, kw_only=True)
class Unsealed:
    """What was saved of a log behind its sealed segments: records or batches back to back, proven by who read them."""

    first: int
    last: int
    version: int
    data: bytes
    complete_to: int | None = None
    """Everything that was committed up to this time is in it, or in front of it; None where nobody says so."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """An end that a log may have: behind this id."""

    mark: int = NO_MARK
    time: int | None = None
    """Of the batch that ends there; None in format 0, and where nothing is in front."""
    session: int = 0
    """In which that batch was written."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How far the store reaches in one partition."""

    partition: int
    end: Point
    complete_to: int | None
    """Nothing that was committed up to this time is missing; None where no time can be told."""


# -- deciding: pure ----------------------------------------------------------------------------------------------------


def moment_of(reaches: Sequence[Reach]) -> int | None:
    """The latest time to which every partition is complete; None where one is complete to no time that is known."""
    times = [reach.complete_to for reach in reaches]
    known = [time for time in times if time is not None]
    return min(known) if known and len(known) == len(times) else None


def incomplete_at(reaches: Sequence[Reach], time: int) -> list[Reach]:
    """The partitions of which something may be missing that was committed up to this time."""
    return [reach for reach in reaches if reach.complete_to is None or reach.complete_to < time]


def spelled(time: int | None) -> str:
    """A time in microseconds for people, which can be typed as one."""
    if time is None:
        return "no time"
    return datetime.fromtimestamp(time / 1e6, UTC).isoformat(timespec="microseconds")


# -- one log -----------------------------------------------------------------------------------------------------------


class _Part:
    """A sealed segment in the store, or what was saved behind all of them."""

    def __init__(self, first: int, last: int, size: int, where: str, read: Callable[[int, int], bytes]) -> None:
        self.first, self.last, self.size = first, last, size
        self.where = where
        self._read = read

    @cached_property
    def version(self) -> int:
        return FileHeader.decode(self._read(0, HEADER_BYTES), self.where).version

    @cached_property
    def places(self) -> Sequence[int]:
        """Where its batches stand."""
        size = footer_bytes(self._read(self.size - END_BYTES, END_BYTES))
        raw = b"" if size is None else self._read(self.size - size, size)
        footer = Footer.decode(raw)
        if footer is None or (footer.first_id, footer.last_id) != (self.first, self.last):
            raise ArchiveDamaged(f"{self.where} has no sound footer of the ids {self.first} to {self.last}")
        return footer.batches.tolist()  # type: ignore[no-any-return]

    def head(self, number: int) -> Head:
        found = Head.decode(self._read(self.places[number], HEAD_BYTES))
        if found is None:
            raise ArchiveDamaged(f"{self.where} has no sound batch at byte {self.places[number]}")
        return found

    @cached_property
    def first_time(self) -> int | None:
        return None if self.version != BATCHES else self.head(0).time

    def point(self, number: int) -> Point:
        """Behind this batch."""
        head = self.head(number)
        return Point(mark=head.last_id, time=head.time, session=head.session)

    @property
    def end(self) -> Point:
        return Point(mark=self.last) if self.version != BATCHES else self.point(len(self.places) - 1)


class _Behind(_Part):
    def __init__(self, rest: Unsealed, where: str) -> None:
        super().__init__(
            rest.first, rest.last, len(rest.data), where, lambda at, size: bytes(memoryview(rest.data)[at : at + size])
        )
        self._rest = rest

    @cached_property
    def version(self) -> int:
        return self._rest.version

    @cached_property
    def places(self) -> Sequence[int]:
        return batch_places(self._rest.data, 0, self.where)


def batch_places(data: Buffer, at: int, where: str) -> list[int]:
    """Where the batches stand that fill the data from a place on."""
    found = list[int]()
    while at < len(data):
        head = Head.decode(data, at)
        if head is None or head.size > len(data) - at:
            raise ArchiveDamaged(f"{where} has no sound batch at byte {at}")
        found.append(at)
        at += head.size
    return found


class ArchivedLog:
    """The log of one partition, as a store has it."""

    def __init__(self, archive: PartitionArchive, manifest: Manifest, rest: Unsealed | None = None) -> None:
        self.archive = archive
        self.manifest = manifest
        self.pieces: tuple[Entry, ...] = tuple(pieces_of(manifest.entries, archive.chunk))
        self.rest = rest if rest is not None and rest.last > manifest.last else None
        self._parts: list[_Part] = [self._part(piece) for piece in self.pieces]
        if self.rest is not None:
            if self.rest.first > manifest.last + 1:
                raise ArchiveDamaged(
                    f"partition {self.partition}: ids {manifest.last + 1} to {self.rest.first - 1} are in no segment, and "
                    "what was saved besides begins behind them"
                )
            self._parts.append(_Behind(self.rest, f"what was saved of partition {self.partition} behind its segments"))

    @property
    def partition(self) -> int:
        return self.archive.partition

    def _part(self, piece: Entry) -> _Part:
        def read(offset: int, size: int) -> bytes:
            return self.archive.bytes_of(piece, offset, size)

        return _Part(piece.first, piece.last, piece.size - piece.index_bytes, self.archive.where(piece), read)

    @property
    def last(self) -> int:
        return self._parts[-1].last if self._parts else NO_MARK

    @cached_property
    def reach(self) -> Reach:
        end = self._parts[-1].end if self._parts else Point()
        complete_to = self.rest.complete_to if self.rest is not None else None
        if complete_to is None and end.time is not None:
            complete_to = end.time - 1
        return Reach(partition=self.partition, end=end, complete_to=complete_to)

    @cached_property
    def first_time(self) -> int | None:
        """Of the first batch; None where there is none."""
        return next((time for part in self._parts if (time := part.first_time) is not None), None)

    def at_time(self, time: int) -> Point:
        """Behind the last batch of this time or an earlier one. `NoTimes` where that is among records without times."""
        at = bisect_right(range(len(self._parts)), time, key=lambda number: self._time_in_front(number))
        if at == 0:
            return Point()
        part = self._parts[at - 1]
        if part.first_time is None:
            raise NoTimes(
                f"partition {self.partition}: the ids {self._parts[0].first} to {part.last} are records of format 0, which "
                f"have no times, and nothing behind them is of {spelled(time)} or before"
            )
        number = bisect_right(range(len(part.places)), time, key=lambda number: part.head(number).time)
        return part.point(number - 1)

    def _time_in_front(self, number: int) -> int:
        """Records without a time are in front of all times."""
        time = self._parts[number].first_time
        return -1 if time is None else time

    def at_mark(self, mark: int) -> Point:
        """Behind this id, or in front of the batch that goes on behind it."""
        if mark > self.last:
            raise CutImpossible(f"partition {self.partition} ends at id {self.last} in the store; {mark} was asked for")
        at = bisect_right(range(len(self._parts)), mark, key=lambda number: self._parts[number].first)
        if at == 0:
            return Point()
        part = self._parts[at - 1]
        if part.version != BATCHES:
            return Point(mark=mark)
        number = bisect_right(range(len(part.places)), mark, key=lambda number: part.head(number).last_id)
        if number:
            return part.point(number - 1)
        return self._parts[at - 2].end if at > 1 else Point()


def marks_at(logs: Mapping[int, ArchivedLog], time: int) -> dict[int, Point]:
    """Where each partition is cut. `CutImpossible` where nothing would be left at all."""
    found = {number: log.at_time(time) for number, log in logs.items()}
    if all(point.mark == NO_MARK for point in found.values()):
        times = [first for log in logs.values() if (first := log.first_time) is not None]
        raise CutImpossible(
            f"nothing in the store is of {spelled(time)} or before"
            + (f": its first transaction is of {spelled(min(times))}" if times else "")
        )
    return found


def place_of(data: Buffer, version: int, places: Sequence[int] | None, mark: int, where: str) -> int | None:
    """Where the first record or batch behind the mark stands in a segment that was proven; None where no batch begins
    there. `places`: where records are by an index, which is not believed; of batches by the footer."""
    if version != BATCHES:
        for at in places or ():
            if id_and_length(bytes(memoryview(data)[at : at + OVERHEAD_BYTES]))[0] == mark + 1:
                return at
        return None
    assert places is not None
    number = bisect_right(range(len(places)), mark, key=lambda number: _last_id(data, places[number], where))
    if number == 0 or _last_id(data, places[number - 1], where) != mark:
        return None
    return places[number] if number < len(places) else None


def _last_id(data: Buffer, at: int, where: str) -> int:
    head = Head.decode(data, at)
    if head is None:
        raise ArchiveDamaged(f"{where} has no sound batch at byte {at}")
    return head.last_id
