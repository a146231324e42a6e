"""Directories of storages as an origin, stopped or running, and copies of them.

A replica may hold records that were never committed and will be cut. So only what the small files vouch for is given: what
the owner said is committed, and the low-water mark as far as the replica had it on its disk. The last records before a stop
may be missing here although they are committed; `allowUncommitted` gives all that is there. Where several
directories hold a partition, the one that vouches for most is read, and where its bytes are damaged, another one. What a
running storage writes meanwhile does not matter: committed records never change.

Old segments may have been moved away: a log begins where its first segment does. That is no damage, because nothing says
that there ever should be more; what is missing behind that is, because ids have no gap. Where several directories begin
at different ids, the log is what they hold together.

A log may begin in format 0 and go on in format 1: the header of each segment says which. Where a time begins is found by
the first batch of each segment, and by the footer of one.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar
from uuid import UUID

import numpy as np

from waltz_spark.log.batch_segment import Bad, Batches
from waltz_spark.log.origin import BATCH_BYTES, Catalog, Extent, Span
from waltzd.disk.real import RealDisk
from waltzd.disk.seam import Disk, Entry, File, join, read_whole
from waltzd.errors import (
    ControlDamaged,
    ForeignCluster,
    HeaderDamaged,
    MarkUnknown,
    NoSuchPartition,
    NothingHere,
    NotRegularFile,
    PartitionDamaged,
    PathMissing,
    ReadFailed,
    Trimmed,
    UnknownVersion,
    WaltzError,
)
from waltzd.format.footer import Footer, read_footer
from waltzd.format.index import read_index
from waltzd.format.layout import (
    BATCHES,
    CONTROL_NAME,
    HEADER_BYTES,
    IDENTITY_BYTES,
    IDENTITY_NAME,
    NO_MARK,
    SEGMENT_SUFFIX,
    ControlHeader,
    ControlStruct,
    FileHeader,
    Identity,
    Promise,
    index_entries,
    index_name,
    segment_ids,
    segment_name,
)
from waltzd.format.record import HEAD_BYTES, OVERHEAD_BYTES, Run, first_bad, id_and_length, join_runs
from waltzd.format.scan import Tail, judge_tail, scan, survey
from waltzd.storage.offline.verify import partition_of
from waltzd.storage.replica.control import Ledger, read_ledger
from waltzd.storage.replica.promise import floor_of, read_promise

T = TypeVar("T")
_log = logging.getLogger("waltz.spark")
_UNFIT = (ControlDamaged, HeaderDamaged, NotRegularFile, PartitionDamaged, PathMissing, ReadFailed, UnknownVersion)
"""What another directory may make good."""


def certain_mark(struct: ControlStruct | None, promise: Promise | None) -> int | None:
    """Up to where a replica's records are committed, and on its disk; None when nothing says so. Pure.

    The low-water mark may be above what this replica holds, while it is being brought level: then what it had when the mark
    was set counts, and what it says is durable since. The original promised nothing, so there only the former."""
    if promise is None:
        return None if struct is None else min(struct.low_mark, struct.local_low_mark)
    if struct is None:
        return promise.committed
    return max(promise.committed, min(struct.low_mark, max(struct.local_low_mark, promise.durable)))


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One partition in one directory, by its names and small files."""

    directory: str
    partition: int
    key: UUID
    last_id: int
    """The last one that may be given."""
    first_ids: tuple[int, ...] = ()
    """Of its segments."""
    bytes: tuple[int, ...] = ()
    """Of its segments, as far as they may be given."""
    complaint: WaltzError | None = None
    """Why it cannot be read at all."""

    @property
    def span(self) -> Span:
        return Span(self.first_ids[0] if self.first_ids else 0, self.last_id)

    def extents(self, span: Span) -> Iterator[Extent]:
        starts = pairwise([*self.first_ids, self.last_id + 1])
        for (first_id, following), size in zip(starts, self.bytes, strict=True):
            whole = Span(first_id, following - 1)
            part = whole.cut(span)
            if part.count:
                share = size * part.count // whole.count
                yield Extent(partition=self.partition, span=part, bytes=share, place=self.place(first_id))

    def place(self, first_id: int) -> str:
        return join(self.directory, segment_name(first_id))


def shared(replicas: Sequence[Replica]) -> list[tuple[Replica, Span]]:
    """Which replica is read for which ids, in the order of the ids. Pure.

    The one that reaches furthest gives all that it has; of the ids before, the one that begins first. A gap between two of
    them is given to the one behind it, which reports the ids as missing when they are read: a reading of other ids goes
    on."""
    newest = max(replicas, key=lambda replica: (replica.last_id, -replica.span.first))
    found = [(newest, newest.span)]
    first = newest.span.first
    while older := [each for each in replicas if each.span.count and each.span.first < first]:
        close = [each for each in older if each.last_id >= first - 1]
        if not close:
            reach = max(each.last_id for each in older)
            found.append((found[-1][0], Span(reach + 1, first - 1)))
            close, first = [each for each in older if each.last_id == reach], reach + 1
        chosen = min(close, key=lambda replica: replica.span.first)
        found.append((chosen, Span(chosen.span.first, first - 1)))
        first = chosen.span.first
    return found[::-1]


@dataclass(frozen=True, kw_only=True)
class DirectoryOrigin:
    storages: tuple[str, ...]
    """Directories, of one cluster."""
    allows_uncommitted: bool = False
    disk: Disk = field(default_factory=RealDisk, repr=False, compare=False)

    def describe(self) -> str:
        what = "everything in" if self.allows_uncommitted else "what is committed in"
        return f"{what} {', '.join(self.storages)}"

    def catalog(self, partitions: Collection[int] | None = None) -> Catalog:
        found: dict[int, list[Replica]] = {}
        keys: dict[UUID, str] = {}
        unfit: list[WaltzError] = []
        wanted: set[int] = set(partitions or ())
        for storage in self.storages:
            try:
                ledger = self._ledger(storage)
                for replica in self._replicas(storage, ledger, partitions):
                    keys.setdefault(replica.key, storage)
                    found.setdefault(replica.partition, []).append(replica)
            except _UNFIT as error:
                _log.warning("%s cannot be read: %s", storage, error.message)
                unfit.append(error)
                continue
            if partitions is None and ledger is not None:
                wanted.update(ledger.structs)
        if unfit and not (wanted and found.keys() >= wanted):
            raise unfit[0]  # what it holds is not known
        if not found and not partitions:
            raise NothingHere(f"{', '.join(self.storages)}: no partition is there", not_done="nothing was read")
        if len(keys) > 1:
            (one, first), (other, second) = list(keys.items())[:2]
            raise ForeignCluster(f"{first} belongs to the cluster {one}, {second} to {other}")
        missing = sorted(set(partitions or ()) - found.keys())
        if missing:
            raise NoSuchPartition(
                f"{', '.join(self.storages)}: partition {', '.join(map(str, missing))} is not there",
                not_done="nothing was read",
                next_step="leave it out, or name the directory of a storage that has it",
            )
        shares = {number: shared(_sound(replicas)) for number, replicas in sorted(found.items())}
        return Catalog(
            key=next(iter(keys)),
            spans={number: Span(parts[0][1].first, parts[-1][1].last) for number, parts in shares.items()},
            extents=tuple(extent for parts in shares.values() for part in parts for extent in _extents(*part)),
        )

    def header(self, extent: Extent) -> FileHeader | None:
        """Of the segment that the extent lies in: where it begins, and when it was made. None where it cannot be read:
        whether another directory has these records shows when they are read."""
        try:
            return FileHeader.decode(read_whole(self.disk, extent.place, HEADER_BYTES), extent.place)
        except _UNFIT:
            return None

    def first_at(self, catalog: Catalog, partition: int, time: int) -> int:
        """By halves: times never fall, and records without one lie in front."""
        extents = [extent for extent in catalog.extents if extent.partition == partition and extent.bytes]
        low, high = 0, len(extents)
        while low < high:
            middle = (low + high) // 2
            first = self._asked(extents[middle], _Segment.first_time)
            low, high = (low, middle) if first is not None and first >= time else (middle + 1, high)
        if low == 0:
            return catalog.spans[partition].first
        extent = extents[low - 1]
        found = self._asked(extent, lambda segment: segment.first_at(time))
        return min(extent.span.last + 1, extent.span.last + 1 if found is None else found)

    def preambles(self, extent: Extent, span: Span) -> list[tuple[int, bytes]]:
        """What stands in front of the records of each batch that begins within the span, and its first id; for a segment of
        format 0 nothing."""
        return self._asked(extent, lambda segment: segment.preambles(span))

    def footer(self, extent: Extent, last_id: int) -> Footer | None:
        """Of the segment that the extent lies in, where it ends with this id."""
        found = self._asked(extent, _Segment.footer)
        return found if found is not None and found.last_id == last_id else None

    def _asked(self, extent: Extent, ask: Callable[[_Segment], T]) -> T:
        """Of the segment that the extent lies in, in whichever directory it is readable."""
        problem = None
        for place, has in self._places(extent):
            if has.cut(extent.span).count == 0:
                continue
            try:
                with closing(_Segment.at(self.disk, place, extent.span.first)) as segment:
                    return ask(segment)
            except _UNFIT as error:
                problem = problem or error
        assert problem is not None
        raise problem

    def read(self, extent: Extent, span: Span, *, batch_bytes: int, with_locks: bool = False) -> Iterator[Run]:
        next_id, problem = span.first, None
        for place, has in self._places(extent):
            rest = Span(next_id, span.last)
            if has.cut(rest) != rest:
                continue
            try:
                reading = read_segment_runs(self.disk, place, rest, batch_bytes=batch_bytes, with_locks=with_locks)
                with closing(reading) as runs:
                    for run in runs:
                        next_id = run.last_id + 1
                        yield run
                return
            except _UNFIT as error:
                if len(self.storages) > 1:
                    _log.warning("id %d of partition %d cannot be read there: %s", next_id, extent.partition, error.message)
                problem = problem or error
        assert problem is not None
        raise problem

    # -- what there is

    def _places(self, extent: Extent) -> Iterator[tuple[Place, Span]]:
        """The one that was chosen, then all others that have the partition; and which ids each of them has for certain."""
        directory = extent.place.rpartition("/")[0]
        storage = directory.rpartition("/")[0]
        yield Place(directory, extent.partition, self._key(storage)), extent.span
        for other in self.storages:
            if other == storage:
                continue
            try:
                replicas = list(self._replicas(other, self._ledger(other), {extent.partition}))
            except _UNFIT as error:
                _log.warning("%s cannot be read: %s", other, error.message)
                continue
            for replica in replicas:
                if replica.complaint is None:
                    yield Place(replica.directory, extent.partition, replica.key), replica.span

    def _key(self, storage: str) -> UUID | None:
        """What the ledger would say, without the marks of all partitions: those are many, and every extent is asked for."""
        if not self._has_control(storage):
            return None
        path = join(storage, IDENTITY_NAME)
        if self.disk.exists(path):
            try:
                return Identity.decode(read_whole(self.disk, path, IDENTITY_BYTES + 1), path).control.key
            except _UNFIT as error:
                _log.warning("%s, so the control file is believed", error.message)
        path = join(storage, CONTROL_NAME)
        return ControlHeader.decode(read_whole(self.disk, path, HEADER_BYTES), path).key

    def _has_control(self, storage: str) -> bool:
        """False for bare partitions."""
        there = self.disk.exists(join(storage, CONTROL_NAME))
        if not there and not self.allows_uncommitted:
            raise MarkUnknown(f"{storage} has no control file, so nothing says what in it is committed")
        return there

    def _ledger(self, storage: str) -> Ledger | None:
        if not self._has_control(storage):
            return None
        ledger = read_ledger(self.disk, storage)
        if ledger.key is None:
            raise ControlDamaged(f"{storage}: {ledger.findings[0].sentence()}", not_done="nothing was read")
        return ledger

    def _replicas(self, storage: str, ledger: Ledger | None, partitions: Collection[int] | None) -> Iterator[Replica]:
        if ledger is None or ledger.key is None:
            yield from self._without_control(storage, partitions)
            return
        key = ledger.key
        there = {entry.name for entry in self.disk.list(storage) if entry.is_directory}
        for number in sorted(
            ledger.structs.keys() | {found for name in there if (found := partition_of(name)) is not None}
        ):
            struct = ledger.structs.get(number)
            if (partitions is not None and number not in partitions) or (struct is not None and not struct.is_assigned):
                continue
            yield self._replica(join(storage, str(number)), number, key, ledger, is_there=str(number) in there)

    def _replica(self, directory: str, number: int, key: UUID, ledger: Ledger, *, is_there: bool) -> Replica:
        bare = Replica(directory=directory, partition=number, key=key, last_id=NO_MARK)
        if not is_there:
            return _complaining(bare, "the control file says that it is here, and its directory is missing")
        struct = ledger.structs.get(number)
        promise, findings = read_promise(self.disk, directory, number, key, is_expected=ledger.has_identity)
        if promise is None and findings:
            return _complaining(bare, findings[0].sentence())
        mark = certain_mark(struct, promise)
        if mark is None:
            return _complaining(bare, "its record in the control file is damaged, so nothing says what is committed")
        if self.allows_uncommitted:
            return self._whole(bare, floor=floor_of(struct, promise))
        newest = promise.newest if promise is not None else NO_MARK
        return self._shelved(bare, mark, newest=newest)

    def _shelved(self, bare: Replica, last_id: int, *, newest: int = NO_MARK) -> Replica:
        """The replica with its segments up to the id."""
        entries = {entry.name: entry for entry in self.disk.list(bare.directory)}
        first_ids = [first_id for first_id in segment_ids(entries) if first_id <= last_id + 1]
        if last_id >= 0 and not first_ids:
            return _complaining(bare, f"ids 0 to {last_id} are missing: no segment starts before id {last_id + 1}")
        if first_ids and first_ids[-1] < newest <= last_id:
            return _complaining(bare, f"ids {newest} to {last_id} are missing: no segment starts at id {newest}")
        return Replica(
            directory=bare.directory,
            partition=bare.partition,
            key=bare.key,
            last_id=last_id,
            first_ids=tuple(first_ids),
            bytes=tuple(_bytes(entries, first_id, last_id) for first_id in first_ids),
        )

    # -- what is not vouched for

    def _without_control(self, storage: str, partitions: Collection[int] | None) -> Iterator[Replica]:
        """Segments alone, as a restored archive has them."""
        for entry in self.disk.list(storage):
            number = partition_of(entry.name)
            if number is None or not entry.is_directory or (partitions is not None and number not in partitions):
                continue
            directory = join(storage, entry.name)
            names = [name for name in self.disk.names(directory) if name.endswith(SEGMENT_SUFFIX)]
            if names:
                path = join(directory, names[0])
                key = FileHeader.decode(read_whole(self.disk, path, HEADER_BYTES), path).key
                bare = Replica(directory=directory, partition=number, key=key, last_id=NO_MARK)
                yield self._whole(bare, floor=NO_MARK)

    def _whole(self, bare: Replica, *, floor: int) -> Replica:
        """Up to its last sound record. What of it is damaged before that shows when it is read."""
        first_ids = segment_ids(self.disk.names(bare.directory))
        last_id = NO_MARK
        if first_ids:
            newest = first_ids[-1]
            path = join(bare.directory, segment_name(newest))
            file = self.disk.open(path)
            try:
                version = FileHeader.decode(file.read(0, HEADER_BYTES), path).version
                found = survey(file, first_id=newest, end=file.size(), version=version)
            finally:
                file.close()
            tail = judge_tail(found, is_last=True, floor=floor)
            if tail is Tail.DAMAGED and not found.gaps:
                last_byte = found.end + found.tail_bytes - 1
                what = f"bytes {found.end} to {last_byte} of {path} are not the record of id {found.next_id}"
                return _complaining(bare, what)
            last_id = found.next_id - 1
        if last_id < floor:
            return _complaining(bare, f"ids {last_id + 1} to {floor} are missing: its log is shorter than it promised")
        return self._shelved(bare, last_id)


def _complaining(bare: Replica, why: str) -> Replica:
    error = PartitionDamaged(
        f"partition {bare.partition} in {bare.directory}: {why}",
        not_done=f"nothing of partition {bare.partition} was read",
        partition=bare.partition,
    )
    return Replica(directory=bare.directory, partition=bare.partition, key=bare.key, last_id=NO_MARK, complaint=error)


def _sound(replicas: Sequence[Replica]) -> list[Replica]:
    sound = [replica for replica in replicas if replica.complaint is None]
    for replica in replicas:
        if replica.complaint is not None and sound:
            _log.warning("%s", replica.complaint.message)
    if not sound:
        assert replicas[0].complaint is not None
        raise replicas[0].complaint
    return sound


def _extents(replica: Replica, span: Span) -> Iterator[Extent]:
    """What one replica is read for; a gap, too, is an extent."""
    if span.first < replica.span.first:
        yield Extent(partition=replica.partition, span=span, bytes=0, place=replica.place(span.first))
    else:
        yield from replica.extents(span)


def _bytes(entries: dict[str, Entry], first_id: int, last_id: int) -> int:
    """Of the segment's file, as much as these ids are of all that it holds. The index, which knows how many, may be wrong:
    this is only for weighing."""
    size = entries[segment_name(first_id)].size
    index = entries.get(index_name(first_id))
    count = index_entries(index.size) if index is not None else 0
    wanted = last_id - first_id + 1
    return size * wanted // count if 0 < wanted < count else size


# -- segments ----------------------------------------------------------------------------------------------------------
# The index says where records are, and is never believed: what stands there has to prove itself by id, length and checksum.
# Where it does not, or where there is no index, the records are walked from the last place that was proven. Only that walk
# decides that something is damaged, because an index that is wrong is no damage of a record.

ENTRIES_MIN = 64


@dataclass(frozen=True)
class Place:
    directory: str
    """Of the partition."""
    partition: int
    key: UUID | None
    """Of the cluster, as its files must say; None where nothing else says it."""


def read_segment_runs(
    disk: Disk, place: Place, span: Span, *, batch_bytes: int, with_locks: bool = False
) -> Generator[Run, None, None]:
    """Every record of the span, in order; each run owns its memory. What cannot be proven is `PartitionDamaged`."""
    first_ids = segment_ids(disk.names(place.directory))
    next_id = span.first
    while next_id <= span.last:
        position = bisect_right(first_ids, next_id) - 1
        following = first_ids[position + 1] if position + 1 < len(first_ids) else None
        stop = span.last if following is None else min(span.last, following - 1)
        if position < 0:
            raise _in_front(disk, place, Span(next_id, stop))
        with closing(_Segment(disk, place, first_ids[position], following)) as segment:
            yield from segment.runs(Span(next_id, stop), batch_bytes, with_locks=with_locks)
        next_id = stop + 1


def _in_front(disk: Disk, place: Place, span: Span) -> WaltzError:
    """Of the first segment: what is missing there, or was trimmed."""
    promise, _ = read_promise(disk, place.directory, place.partition, place.key, is_expected=False)
    if promise is None or span.first >= promise.floor:
        return _missing(place, place.directory, span)
    return Trimmed(
        f"{place.directory}: id {span.first} of partition {place.partition} is only in the archive; this replica has ids "
        f"from {promise.floor} on",
        not_done=f"no row from id {span.first} on was returned",
        floor=promise.floor,
    )


def _missing(place: Place, path: str, span: Span) -> PartitionDamaged:
    ids = f"id {span.first}" if span.count == 1 else f"ids {span.first} to {span.last}"
    return PartitionDamaged(
        f"{path}: {ids} of partition {place.partition} {'is' if span.count == 1 else 'are'} missing",
        not_done=f"no row from id {span.first} on was returned",
        partition=place.partition, first_id=span.first, last_id=span.last,
    )  # fmt: skip


class _Segment:
    def __init__(self, disk: Disk, place: Place, first_id: int, following: int | None) -> None:
        self._place = place
        self._first_id = first_id
        self._following = following
        self._file = disk.open(join(place.directory, segment_name(first_id)))
        self._index: File | None = None
        try:
            self._version = self._check_header()
            self._size = self._file.size()
            self._index = _hint(disk, join(place.directory, index_name(first_id)))
            entries = index_entries(self._index.size()) if self._index is not None else 0
            self._record_bytes = max(OVERHEAD_BYTES, self._size // max(1, entries))
        except BaseException:
            self.close()
            raise

    @staticmethod
    def at(disk: Disk, place: Place, id_: int) -> _Segment:
        """The one with the id."""
        first_ids = segment_ids(disk.names(place.directory))
        position = bisect_right(first_ids, id_) - 1
        if position < 0:
            raise _in_front(disk, place, Span(id_, id_))
        return _Segment(disk, place, first_ids[position], next(iter(first_ids[position + 1 :]), None))

    def close(self) -> None:
        self._file.close()
        if self._index is not None:
            self._index.close()

    @property
    def _batches(self) -> Batches | None:
        return Batches(self._file, self._index, self._first_id) if self._version == BATCHES else None

    def first_time(self) -> int | None:
        return None if self._batches is None else self._batches.first_time()

    def first_at(self, time: int) -> int | None:
        return None if self._batches is None else self._batches.first_at(time, BATCH_BYTES)

    def preambles(self, span: Span) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        for each in self._batches.preambles(span, BATCH_BYTES) if self._batches is not None else ():
            if isinstance(each, Bad):
                raise self._damage(each.next_id, each.offset)
            found.append(each)
        return found

    def footer(self) -> Footer | None:
        return None if self._batches is None else read_footer(self._file)

    def _check_header(self) -> int:
        """Returns its version."""
        path = self._file.path
        found = FileHeader.decode(self._file.read(0, HEADER_BYTES), path)
        key = self._place.key or found.key
        expected = FileHeader(created_ms=0, key=key, partition=self._place.partition, first_id=self._first_id)
        if replace(found, created_ms=0, version=expected.version) != expected:
            raise HeaderDamaged(
                f"the header of {path} says cluster {found.key}, partition {found.partition}, first id {found.first_id}; "
                f"it should be cluster {expected.key}, partition {expected.partition}, first id {expected.first_id}",
                not_done=f"no row from id {self._first_id} of partition {expected.partition} on was returned",
            )
        return found.version

    def runs(self, span: Span, batch_bytes: int, *, with_locks: bool) -> Iterator[Run]:
        if self._batches is not None:
            for each in self._batches.runs(span, bytes_max=batch_bytes, with_locks=with_locks):
                if isinstance(each, Bad):
                    raise self._damage(each.next_id, each.offset)
                yield each
            return
        next_id = span.first
        offset = HEADER_BYTES if next_id == self._first_id else None
        while next_id <= span.last:
            found = self._by_index(next_id, offset, span.last, batch_bytes)
            if found is None:
                if offset is None:
                    offset = self._offset_of(next_id, batch_bytes)
                found = offset, self._by_walk(next_id, offset, batch_bytes)
            start, run = found
            offset = start + len(run.data)
            run = run.part(0, min(len(run), span.last - next_id + 1))
            next_id = run.last_id + 1
            yield run

    # -- the fast way

    def _by_index(self, next_id: int, offset: int | None, last_id: int, bytes_max: int) -> tuple[int, Run] | None:
        """Records where the index says that they are, and the bytes prove that it is so; at least one."""
        if self._index is None:
            return None
        count = min(last_id - next_id + 1, bytes_max // self._record_bytes + ENTRIES_MIN)
        starts = read_index(self._index, next_id - self._first_id, count + 1)
        if len(starts) == 0 or starts[0] < HEADER_BYTES or (offset is not None and starts[0] != offset):
            return None
        if len(starts) <= count:  # the last record says itself where it ends
            starts = np.append(starts, self._end_by_head(next_id + len(starts) - 1, int(starts[-1])))
        sizes = np.diff(starts)
        impossible = np.flatnonzero((sizes < OVERHEAD_BYTES) | (starts[1:] > self._size))
        if len(impossible):
            starts = starts[: impossible[0] + 1]
        if len(starts) < 2:
            return None
        start = int(starts[0])
        taken = max(1, int(np.searchsorted(starts, start + bytes_max, "right")) - 1)
        bounds = starts[: taken + 1] - start
        if bounds[-1] > bytes_max and self._end_by_head(next_id, start) != starts[1]:
            return None  # nothing so large is allocated on the word of an index
        raw = self._file.read(start, int(bounds[-1]))
        if len(raw) != bounds[-1]:
            return None
        run = Run(next_id, memoryview(raw), bounds)
        bad = first_bad(run)
        return None if bad == 0 else (start, run if bad is None else run.part(0, bad))

    def _end_by_head(self, id_: int, start: int) -> int:
        """Where the record ends by its own account; -1 when it is not that record."""
        head = self._file.read(start, HEAD_BYTES) if 0 < start < self._size else b""
        if len(head) < HEAD_BYTES:
            return -1
        found, length = id_and_length(head)
        return start + OVERHEAD_BYTES + length if found == id_ and length >= 0 else -1

    # -- the slow way

    def _offset_of(self, id_: int, batch_bytes: int) -> int:
        """Found by walking all records before it."""
        next_id, offset = self._first_id, HEADER_BYTES
        while next_id < id_:
            run = self._by_walk(next_id, offset, batch_bytes)
            if run.last_id >= id_:
                return offset + int(run.bounds[id_ - next_id])
            next_id, offset = run.last_id + 1, offset + len(run.data)
        return offset

    def _by_walk(self, next_id: int, offset: int, bytes_max: int) -> Run:
        """The records from here on, at least one: the caller knows that they are here, so anything else is damage."""
        window = max(bytes_max, OVERHEAD_BYTES)
        found: list[Run] = []
        while True:
            scan(
                self._file,
                segment_first_id=self._first_id,
                next_id=next_id,
                offset=offset,
                end=min(self._size, offset + window),
                chunk_bytes=window,
                on_run=lambda _, run: found.append(Run(run.first_id, memoryview(bytes(run.data)), run.bounds)),
            )
            if found:
                run = join_runs(found)
                return run.part(0, max(1, int(np.searchsorted(run.bounds, bytes_max, "right")) - 1))
            if offset + window >= self._size:
                raise self._damage(next_id, offset)
            window *= 2  # a record larger than the window, or damage: only the rest of the file can tell

    def _damage(self, next_id: int, offset: int) -> PartitionDamaged:
        if offset >= self._size:
            last_id = next_id if self._following is None else self._following - 1
            return _missing(self._place, self._file.path, Span(next_id, max(next_id, last_id)))
        found = survey(
            self._file, first_id=self._first_id, end=self._size, next_id=next_id, offset=offset, id_limit=self._following,
            index=self._index, version=self._version,
        )  # fmt: skip
        if found.gaps:
            gap = found.gaps[0]
            last_byte, last_id = gap.last_byte, max(next_id, gap.last_id)
        else:
            last_byte, last_id = self._size - 1, next_id if self._following is None else self._following - 1
        ids = f"record of id {next_id}" if last_id == next_id else f"records of ids {next_id} to {last_id}"
        return PartitionDamaged(
            f"{self._file.path}: bytes {offset} to {last_byte} are not the {ids} of partition {self._place.partition}",
            not_done=f"no row from id {next_id} on was returned",
            partition=self._place.partition, first_id=next_id, last_id=last_id, first_byte=offset, last_byte=last_byte,
        )  # fmt: skip


def _hint(disk: Disk, path: str) -> File | None:
    try:
        return disk.open(path)
    except (PathMissing, NotRegularFile, ReadFailed):
        return None
