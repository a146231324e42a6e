"""Cut points: where the logs in a store may end so that a restored cluster is consistent.

A cut is a mark for each partition, at which its log ends. Partitions that are cut at one time are consistent: times come
from a hybrid clock, so an effect is never earlier than its cause, and the cause of everything in the cut is in the cut as
well. This holds if each partition is *complete* up to that time: the store lacks nothing that was committed until then. The
index of unsealed records states up to which time that is. Without it, it is a microsecond before the time of the last
batch, because a later batch may have the same time.

In format 1 a log is cut after a batch, never within it, so a group of transactions is whole or absent. Records of format 0
have no times: they can be cut at any id, but not at a time.

`common_moment` and the `cut_…` functions decide. `ArchivedLog` finds a cut point by few small reads, whatever the size of
the archive. The heads and footers that it reads carry checksums; all other bytes are checked when they are fetched."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property

from waltzd.archive.listing import Branch, check_one_log, highest_numbers, rank
from waltzd.archive.manifest import Entry, Label, Manifest, pieces_of
from waltzd.archive.store import Store
from waltzd.archive.unsealed import read_unsealed
from waltzd.archive.upload import PartitionArchive
from waltzd.disk.seam import Buffer
from waltzd.errors.operations import ArchiveDamaged, CutImpossible, NoTimes
from waltzd.format.batch import HEAD_BYTES, Head
from waltzd.format.footer import END_BYTES, Footer, footer_bytes
from waltzd.format.layout import BATCHES, HEADER_BYTES, NO_MARK, VERSION, FileHeader
from waltzd.format.record import OVERHEAD_BYTES, Run, id_and_length
from waltzd.protocol.timelines import FIRST, NEVER_FORKED, Lineage

APART = 1_000_000
"""Largest difference between the clocks of servers, in microseconds. A record that was committed after a backup may have a
time before it, by the clock of its owner."""
AHEAD = 60_000_000
"""Microseconds by which a time that a client passes on, or the clock of an owner, may be ahead."""
_TAIL = re.compile(r"partition-(0|[1-9][0-9]{0,4})/tail\.json")


@dataclass(frozen=True, kw_only=True)
class UnsealedRecords:
    """Checked records of a log after its sealed segments, in one format: records or batches back to back."""

    first: int
    last: int
    version: int
    data: bytes


@dataclass(frozen=True, kw_only=True)
class CutPoint:
    """A possible end of a log, after the id `mark`."""

    mark: int = NO_MARK
    time: int | None = None
    """Time of the batch that ends there; None in format 0, and for an empty log."""
    session: int = 0
    """Session in which that batch was written."""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The part of the log of one partition that the store holds."""

    partition: int
    end: CutPoint
    complete_to: int | None
    """Time up to which no committed record is missing; None if unknown."""


# -- deciding: pure ----------------------------------------------------------------------------------------------------


def common_moment(coverages: Sequence[Coverage]) -> int | None:
    """Return the latest time up to which every partition is complete; None if it is unknown for one of them."""
    times = [coverage.complete_to for coverage in coverages]
    known = [time for time in times if time is not None]
    return min(known) if known and len(known) == len(times) else None


def incomplete_at(coverages: Sequence[Coverage], time: int) -> list[Coverage]:
    """Return the partitions that may lack records that were committed up to this time."""
    return [coverage for coverage in coverages if coverage.complete_to is None or coverage.complete_to < time]


def format_time(time: int | None) -> str:
    """Format a time in microseconds in a form that commands accept."""
    if time is None:
        return "no time"
    return datetime.fromtimestamp(time / 1e6, UTC).isoformat(timespec="microseconds")


# -- one log -----------------------------------------------------------------------------------------------------------


class _SegmentInStore:
    """A sealed segment in the store, or, in a subclass, the unsealed records after all segments."""

    def __init__(self, first: int, last: int, size: int, where: str, read: Callable[[int, int], bytes]) -> None:
        self.first, self.last, self.size = first, last, size
        self.where = where
        self._read = read

    @cached_property
    def version(self) -> int:
        return FileHeader.decode(self._read(0, HEADER_BYTES), self.where).version

    @cached_property
    def places(self) -> Sequence[int]:
        """Offsets of the batches."""
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

    def point(self, number: int) -> CutPoint:
        """Return the cut point after this batch."""
        head = self.head(number)
        return CutPoint(mark=head.last_id, time=head.time, session=head.session)

    @property
    def end(self) -> CutPoint:
        return CutPoint(mark=self.last) if self.version != BATCHES else self.point(len(self.places) - 1)


class _UnsealedPart(_SegmentInStore):
    def __init__(self, rest: UnsealedRecords, where: str) -> None:
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
    """Return the offsets of the batches that fill `data` from `at` on."""
    found = list[int]()
    while at < len(data):
        head = Head.decode(data, at)
        if head is None or head.size > len(data) - at:
            raise ArchiveDamaged(f"{where} has no sound batch at byte {at}")
        found.append(at)
        at += head.size
    return found


class ArchivedLog:
    """The log of one partition in a store."""

    def __init__(
        self,
        archive: PartitionArchive,
        manifest: Manifest,
        rest: Sequence[UnsealedRecords] = (),
        *,
        complete_to: int | None = None,
        session: int = 0,
        tree: Lineage = NEVER_FORKED,
    ) -> None:
        """`rest`: the unsealed records after the manifest. `complete_to`: no batch up to this time is missing; None if
        unknown. `session`: highest known session. `tree`: all timelines in the store, including that of this log."""
        self.tree = tree
        self.archive = archive
        self.manifest = manifest
        self.pieces: tuple[Entry, ...] = tuple(pieces_of(manifest.entries, archive.chunk))
        self.rest = tuple(rest)
        self._complete_to, self._session = complete_to, session
        self._parts: list[_SegmentInStore] = [self._part(piece) for piece in self.pieces]
        for one in rest:
            if one.first != self.last + 1:
                raise ArchiveDamaged(
                    f"partition {self.partition}: what was saved behind its segments begins at id {one.first}, and they "
                    f"end at id {self.last}"
                )
            self._parts.append(_UnsealedPart(one, f"what was saved of partition {self.partition} behind its segments"))

    @property
    def partition(self) -> int:
        return self.archive.partition

    def _part(self, piece: Entry) -> _SegmentInStore:
        def read(offset: int, size: int) -> bytes:
            return self.archive.bytes_of(piece, offset, size)

        return _SegmentInStore(piece.first, piece.last, piece.size - piece.index_bytes, self.archive.where(piece), read)

    @property
    def last(self) -> int:
        return self._parts[-1].last if self._parts else NO_MARK

    @property
    def last_shared(self) -> int:
        """Last id that is on the newest timeline of the tree, too."""
        shared = self.tree.shared_to(self.archive.timeline)
        return self.last if shared is None else min(self.last, shared)

    @cached_property
    def end(self) -> CutPoint:
        return self._parts[-1].end if self._parts else CutPoint()

    @property
    def session(self) -> int:
        """Highest session that the store knows of."""
        return max(self._session, self.end.session)

    @property
    def ahead_from(self) -> CutPoint | None:
        """Cut point before the first batch whose time is ahead because a clock was wrong: later than the moment of the
        save. None if there is no such batch, or if the moment is unknown."""
        moment, time = self._complete_to, self.end.time
        if moment is None or time is None or time <= moment + 2 * APART + AHEAD:
            return None
        return self.at_time(moment + 2 * APART + AHEAD)

    @cached_property
    def coverage(self) -> Coverage:
        if self.ahead_from is not None:  # its times are wrong, and do not show what is missing
            return Coverage(partition=self.partition, end=self.end, complete_to=self._complete_to)
        times = [self._complete_to, None if self.end.time is None else self.end.time - 1]
        known = [time for time in times if time is not None]
        return Coverage(partition=self.partition, end=self.end, complete_to=max(known, default=None))

    @property
    def has_batches(self) -> bool:
        """True if the end of the log has format 1."""
        return self.end.time is not None

    @cached_property
    def first_time(self) -> int | None:
        """Time of the first batch; None without batches."""
        return next((time for part in self._parts if (time := part.first_time) is not None), None)

    def at_time(self, time: int) -> CutPoint:
        """Return the cut point after the last batch up to this time. Raise `NoTimes` if it falls among records of format
        0."""
        at = bisect_right(range(len(self._parts)), time, key=lambda number: self._time_in_front(number))
        if at == 0:
            return CutPoint()
        part = self._parts[at - 1]
        if part.first_time is None:
            raise NoTimes(
                f"partition {self.partition}: the ids {self._parts[0].first} to {part.last} are records of format 0, which "
                f"have no times, and nothing behind them is of {format_time(time)} or before"
            )
        number = bisect_right(range(len(part.places)), time, key=lambda number: part.head(number).time)
        return part.point(number - 1)

    def _time_in_front(self, number: int) -> int:
        """Return the first time of a part; -1 if its records have no times."""
        time = self._parts[number].first_time
        return -1 if time is None else time

    def at_mark(self, mark: int) -> CutPoint:
        """Return the cut point after this id, or before the batch that contains both this id and later ones."""
        if mark > self.last:
            raise CutImpossible(f"partition {self.partition} ends at id {self.last} in the store; {mark} was asked for")
        at = bisect_right(range(len(self._parts)), mark, key=lambda number: self._parts[number].first)
        if at == 0:
            return CutPoint()
        part = self._parts[at - 1]
        if part.version != BATCHES:
            return CutPoint(mark=mark)
        number = bisect_right(range(len(part.places)), mark, key=lambda number: part.head(number).last_id)
        if number:
            return part.point(number - 1)
        return self._parts[at - 2].end if at > 1 else CutPoint()


def log_of(archive: PartitionArchive, known: Manifest, tree: Lineage | None = None) -> ArchivedLog:
    """Return the log of a partition in the store, starting from a known manifest."""
    tree = known.lineage if tree is None else tree
    manifest, index, parts = read_unsealed(archive, known)
    rest = list[UnsealedRecords]()
    for part in parts:
        content = part.content()
        if isinstance(content, Run):
            run = content.part(max(0, manifest.last + 1 - content.first_id), len(content))
            found = UnsealedRecords(first=run.first_id, last=run.last_id, version=VERSION, data=bytes(run.data))
        else:
            batches = [batch for batch in content if batch.first_id > manifest.last]
            data = b"".join(bytes(piece) for batch in batches for piece in batch.pieces)
            found = UnsealedRecords(first=batches[0].first_id, last=batches[-1].last_id, version=BATCHES, data=data)
        if rest and rest[-1].version == found.version:
            found = replace(found, first=rest[-1].first, data=rest.pop().data + found.data)
        rest.append(found)
    if index is None:
        return ArchivedLog(archive, manifest, tree=tree)
    return ArchivedLog(archive, manifest, rest, complete_to=index.moment - APART, session=index.session, tree=tree)


def logs_in(
    store: Store, label: Label, partitions: int | None, chosen: Mapping[int, int] | None = None
) -> dict[int, ArchivedLog]:
    """Return the logs of all partitions in the store, and of all numbers below `partitions`: the newest timeline of each,
    or the timeline with the number in `chosen`. If the newest one is not backed up to its fork yet, return an earlier one
    that has more of the log, which goes on behind the fork."""
    listed = store.list("")
    numbers = {(number, FIRST): 0 for number in range(partitions or 0)}
    numbers |= {(int(match[1]), FIRST): 0 for one in listed if (match := _TAIL.fullmatch(one.name))}
    numbers |= highest_numbers(listed)
    found = dict[int, ArchivedLog]()
    for partition in sorted({partition for partition, _ in numbers}):
        archives = [PartitionArchive(store, label, *branch) for branch in numbers if branch[0] == partition]
        archives.sort(key=lambda archive: rank(archive.start()))
        check_one_log([archive.start() for archive in archives], store)
        tree, wanted = archives[-1].start().lineage, (chosen or {}).get(partition)
        if wanted is not None:
            archives = [_with_number(archives, tree, partition, wanted)]
        logs = [_newest_log(archives[-1], numbers, tree)]
        if wanted is None and logs[0].last < tree.fork:  # not backed up yet: what is shared is in those before
            logs += [_newest_log(archive, numbers, tree) for archive in archives[:-1]]
        found[partition] = max(logs, key=lambda log: log.last_shared)
    return found


def _newest_log(archive: PartitionArchive, numbers: Mapping[Branch, int], tree: Lineage) -> ArchivedLog:
    number = numbers[archive.partition, archive.timeline]
    manifest = archive.manifest_at(number) if number else archive.start()
    if manifest is None:
        raise ArchiveDamaged(f"{archive.store.place}: {archive.name_at(number)} was listed, and is not there")
    return log_of(archive, archive.newest_after(manifest), tree)


def _with_number(archives: Sequence[PartitionArchive], tree: Lineage, partition: int, wanted: int) -> PartitionArchive:
    for archive in archives:
        if tree.number_of(archive.timeline) == wanted:
            return archive
    there = sorted(number for archive in archives if (number := tree.number_of(archive.timeline)) is not None)
    raise CutImpossible(
        f"the store has nothing of timeline {wanted} of partition {partition}; it has {', '.join(map(str, there))}"
    )


def empty_log(store: Store, label: Label, partition: int) -> ArchivedLog:
    """Return the log of a partition that is not in the store."""
    archive = PartitionArchive(store, label, partition)
    return ArchivedLog(archive, archive.manifest(0, ""))


# -- all of them -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A cut of all partitions."""

    points: Mapping[int, CutPoint]
    time: int | None = None
    """Time at which all partitions are cut; None for a cut by marks, or at the end of each partition."""
    ahead: Mapping[int, int] = field(default_factory=dict)
    """Partitions with times that are ahead, because a clock was wrong, and the last id before these times. Such a log is
    taken to its end, because a cut by time would leave out everything after."""
    given: Mapping[int, int] = field(default_factory=dict)
    """Requested marks that fell within a batch. The cut is before that batch."""


def cut_at_time(logs: Mapping[int, ArchivedLog], time: int, *, now: int, is_each: bool = False) -> Cut:
    """Cut all partitions at one time. `is_each`: include partitions that may lack records before that time."""
    if time > now:
        raise CutImpossible(f"{format_time(time)} is in the future: it is {format_time(now)} now")
    short = [] if is_each else incomplete_at([log.coverage for log in logs.values()], time)
    points = {number: log.at_time(time) for number, log in logs.items()}
    if all(point.mark == NO_MARK for point in points.values()):
        times = [first for log in logs.values() if (first := log.first_time) is not None]
        raise CutImpossible(
            f"nothing in the store is of {format_time(time)} or before"
            + (f": its first transaction is of {format_time(min(times))}" if times else "")
        )
    if short:
        raise CutImpossible(
            f"{_describe(short)}: what came after that and until {format_time(time)} is not in the store",
            next_step="restore to an earlier time or to --latest; or take these as far as they go, with "
            "--each-as-far-as-it-goes",
        )
    return Cut(points=points, time=time)


def cut_latest(logs: Mapping[int, ArchivedLog], *, is_each: bool = False) -> Cut:
    """Cut at the newest time up to which all partitions are complete; with `is_each`, cut each partition at its end."""
    if not any(log.last > NO_MARK for log in logs.values()):
        raise CutImpossible("the store has no transaction")
    if is_each or len(logs) == 1:  # one partition alone is consistent at any end
        return Cut(points={number: log.end for number, log in logs.items()})
    for log in logs.values():
        if log.last > NO_MARK and log.first_time is None:
            raise NoTimes(
                f"partition {log.partition}: the ids 0 to {log.last} are records of format 0, which have no times"
            )
    coverages = [log.coverage for log in logs.values()]
    time = common_moment(coverages)
    if time is None:
        unknown = [coverage for coverage in coverages if coverage.complete_to is None]
        raise CutImpossible(
            f"{_describe(unknown)}: no moment is known to which all partitions are complete",
            next_step="give a moment with --through and take these as far as they go, with --each-as-far-as-it-goes",
        )
    ahead = {number: front.mark for number, log in logs.items() if (front := log.ahead_from) is not None}
    points = {number: log.end if number in ahead else log.at_time(time) for number, log in logs.items()}
    return Cut(points=points, time=time, ahead=ahead)


def cut_at_marks(logs: Mapping[int, ArchivedLog], marks: Mapping[int, int]) -> Cut:
    """Cut each partition at its given mark."""
    if left := logs.keys() - marks:
        raise CutImpossible(f"the marks do not say where partition {min(left)} ends")
    if strange := marks.keys() - logs:
        raise CutImpossible(f"the store has no partition {min(strange)}")
    points = {number: log.at_mark(marks[number]) for number, log in logs.items()}
    given = {number: marks[number] for number, point in points.items() if point.mark != marks[number]}
    return Cut(points=points, given=given)


def _describe(coverages: Sequence[Coverage]) -> str:
    first = coverages[0]
    known = (
        f"is complete up to {format_time(first.complete_to)} only" if first.complete_to is not None
        else "has nothing in the store" if first.end.mark == NO_MARK
        else "is not known to be complete up to any time"
    )  # fmt: skip
    more = len(coverages) - 1
    return f"partition {first.partition} {known}" + (f", and so {more} more" if more else "")


def place_of(data: Buffer, version: int, places: Sequence[int] | None, mark: int, where: str) -> int | None:
    """Return the offset of the first record or batch after the mark in a checked segment; None if no batch begins there.
    `places`: offsets of records by an index, which are only hints, or of batches by the footer."""
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
