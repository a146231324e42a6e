"""Directories of storages as an origin: of stopped or running storages, or copies.

A replica may hold records that were never committed and will be cut. So only records that its small files vouch for are
returned: those up to the mark that an owner reported as committed, and up to the low-water mark as far as they are on disk.
The last committed records before a stop may be missing; `allowUncommitted` returns all records. If several directories hold
a partition, the one that vouches for most is read, and where its bytes are damaged, another one. A running storage may
write meanwhile: committed records never change.

Old segments may have been moved away: a log begins with its first segment. A gap after that is damage, because ids have no
gaps. If several directories begin at different ids, the log is the union of their segments.

A log may begin in format 0 and continue in format 1; the header of each segment names its format. A time is found by the
first batch of each segment, and by the footer of one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar
from uuid import UUID

from waltz_spark.log.origin import Catalog, Extent, Origin, Span
from waltz_spark.log.segment import Segment, SegmentPlace, first_at, read_segment_runs
from waltzd.disk.real import RealDisk
from waltzd.disk.seam import Disk, Entry, join, read_whole
from waltzd.errors import ForeignCluster, NoSuchPartition, WaltzError
from waltzd.errors.operations import (
    ControlDamaged,
    HeaderDamaged,
    MarkUnknown,
    NothingHere,
    NotRegularFile,
    PartitionDamaged,
    PathMissing,
    ReadFailed,
    UnknownVersion,
)
from waltzd.format.layout import (
    CONTROL_NAME,
    HEADER_BYTES,
    IDENTITY_BYTES,
    IDENTITY_NAME,
    NO_MARK,
    SEGMENT_SUFFIX,
    ControlHeader,
    ControlStruct,
    FileHeader,
    HardState,
    Identity,
    index_entries,
    index_name,
    segment_ids,
    segment_name,
)
from waltzd.format.record import Run
from waltzd.format.scan import Tail, judge_tail, survey
from waltzd.protocol.positions import Position
from waltzd.protocol.timelines import FIRST, NEVER_FORKED, Lineage
from waltzd.storage.offline.verify import partition_of
from waltzd.storage.replica.control import Ledger, read_ledger
from waltzd.storage.replica.hard_state import floor_of, read_hard_state

T = TypeVar("T")
_log = logging.getLogger("waltz.spark")
_UNFIT = (ControlDamaged, HeaderDamaged, NotRegularFile, PartitionDamaged, PathMissing, ReadFailed, UnknownVersion)
"""Errors of one directory after which another one is tried."""


def certain_mark(struct: ControlStruct | None, hard_state: HardState | None) -> int | None:
    """Return the last id that is certainly committed and on the replica's disk; None if unknown. Pure.

    While a replica catches up, its low-water mark may be above its last id. Then the id that it had when the mark was set
    counts, and the id that it has reported as durable since; files of the original Waltz have only the former."""
    if hard_state is None:
        return None if struct is None else min(struct.low_mark, struct.local_low_mark)
    if struct is None:
        return hard_state.committed
    return max(hard_state.committed, min(struct.low_mark, max(struct.local_low_mark, hard_state.durable)))


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One partition in one directory, according to file names and small files."""

    directory: str
    partition: int
    key: UUID
    last_id: int
    """Last id that may be returned."""
    first_ids: tuple[int, ...] = ()
    """First ids of its segments."""
    bytes: tuple[int, ...] = ()
    """Sizes of its segments, without ids that may not be returned."""
    complaint: WaltzError | None = None
    """Error if the replica cannot be read at all."""
    lineage: Lineage = NEVER_FORKED
    """Timelines of its log; its records belong to the last one."""

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
    """Return the replicas to read, with their ids, in the order of the ids. Pure.

    The replica with the highest id is read for all its ids; for lower ids, the one that begins first. A gap between two
    replicas is assigned to the later one, which reports the ids as missing only if they are read."""
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
class DirectoryOrigin(Origin):
    storages: tuple[str, ...]
    """Directories of storages of one cluster."""
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
            raise unfit[0]  # its partitions are unknown
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
        sound = {number: _of_newest_timeline(_sound(replicas)) for number, replicas in sorted(found.items())}
        shares = {number: shared(replicas) for number, replicas in sound.items()}
        timelines = {number: replicas[0].lineage.current for number, replicas in sound.items()}
        return Catalog(
            key=next(iter(keys)),
            spans={number: Span(parts[0][1].first, parts[-1][1].last) for number, parts in shares.items()},
            extents=tuple(extent for parts in shares.values() for part in parts for extent in _extents(*part)),
            timelines={number: timeline for number, timeline in timelines.items() if timeline != FIRST},
        )

    def check(self, partition: int, position: Position, *, route: Any = None) -> None:
        """Compare with the newest timeline among the directories; skip those that cannot be read, as the catalog does."""
        found: list[Lineage] = []
        problem = None
        for storage in self.storages:
            try:
                found.append(self._lineage(storage, partition))
            except _UNFIT as error:
                problem = problem or error
        if not found and problem is not None:
            raise problem
        newest = max(found, key=_rank, default=NEVER_FORKED)
        newest.check(position.timeline, position, what="the reader", partition=partition)

    def header(self, extent: Extent) -> FileHeader | None:
        try:
            return FileHeader.decode(read_whole(self.disk, extent.place, HEADER_BYTES), extent.place)
        except _UNFIT:
            return None

    def first_at(self, catalog: Catalog, partition: int, time: int) -> int:
        extents = [extent for extent in catalog.extents if extent.partition == partition and extent.bytes]
        return first_at(extents, catalog.spans[partition].first, time, self._asked)

    def _asked(self, extent: Extent, ask: Callable[[Segment], T]) -> T:
        """Call `ask` with the segment of an extent, in the first directory in which it is readable."""
        problem = None
        for place, has in self._places(extent):
            if has.cut(extent.span).count == 0:
                continue
            try:
                with closing(Segment.at(self.disk, place, extent.span)) as segment:
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

    # -- catalog

    def _places(self, extent: Extent) -> Iterator[tuple[SegmentPlace, Span]]:
        """Yield the chosen directory of an extent, then all others with the partition, and the certain ids of each."""
        directory = extent.place.rpartition("/")[0]
        storage = directory.rpartition("/")[0]
        yield SegmentPlace(directory, extent.partition, self._key(storage)), extent.span
        if len(self.storages) == 1:
            return
        lineage = self._lineage(storage, extent.partition)
        for other in self.storages:
            if other == storage:
                continue
            try:
                replicas = list(self._replicas(other, self._ledger(other), {extent.partition}))
            except _UNFIT as error:
                _log.warning("%s cannot be read: %s", other, error.message)
                continue
            for replica in replicas:
                if replica.complaint is None and replica.lineage == lineage:
                    yield SegmentPlace(replica.directory, extent.partition, replica.key), replica.span

    def _lineage(self, storage: str, partition: int) -> Lineage:
        ledger = self._ledger(storage)
        if ledger is None or ledger.key is None:
            return NEVER_FORKED
        hard_state, _ = read_hard_state(self.disk, join(storage, str(partition)), partition, ledger.key, is_expected=False)
        return NEVER_FORKED if hard_state is None else Lineage.decode(hard_state.timelines) or NEVER_FORKED

    def _key(self, storage: str) -> UUID | None:
        """Return the key of the cluster without reading the marks of all partitions, because it is needed for every
        extent."""
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
        """Return whether a storage has a control file; False for bare partitions."""
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
            if number == ledger.group_log:  # the group log has no transactions of applications
                continue
            struct = ledger.structs.get(number)
            if (partitions is not None and number not in partitions) or (struct is not None and not struct.is_assigned):
                continue
            yield self._replica(join(storage, str(number)), number, key, ledger, is_there=str(number) in there)

    def _replica(self, directory: str, number: int, key: UUID, ledger: Ledger, *, is_there: bool) -> Replica:
        bare = Replica(directory=directory, partition=number, key=key, last_id=NO_MARK)
        if not is_there:
            return _complaining(bare, "the control file says that it is here, and its directory is missing")
        struct = ledger.structs.get(number)
        hard_state, findings = read_hard_state(self.disk, directory, number, key, is_expected=ledger.has_identity)
        if hard_state is None and findings:
            return _complaining(bare, findings[0].sentence())
        lineage = NEVER_FORKED if hard_state is None else Lineage.decode(hard_state.timelines)
        if lineage is None:
            return _complaining(bare, "its promise names timelines that are no history of a log")
        bare = replace(bare, lineage=lineage)
        mark = certain_mark(struct, hard_state)
        if mark is None:
            return _complaining(bare, "its record in the control file is damaged, so nothing says what is committed")
        if self.allows_uncommitted:
            return self._whole(bare, floor=floor_of(struct, hard_state))
        newest = hard_state.newest if hard_state is not None else NO_MARK
        return self._shelved(bare, mark, newest=newest)

    def _shelved(self, bare: Replica, last_id: int, *, newest: int = NO_MARK) -> Replica:
        """Return the replica with its segments up to an id."""
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
            lineage=bare.lineage,
        )

    # -- uncommitted records

    def _without_control(self, storage: str, partitions: Collection[int] | None) -> Iterator[Replica]:
        """Yield the partitions of a directory without a control file."""
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
        """Return the replica up to its last valid record. Damage before that is reported by reads."""
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


def _rank(lineage: Lineage) -> tuple[int, int]:
    """Return a sort key: the newer of two lineages of one log has the higher one."""
    return lineage.number, lineage.later[-1].session if lineage.later else 0


def _of_newest_timeline(replicas: Sequence[Replica]) -> list[Replica]:
    """Return the replicas that hold the newest timeline: records of older ones above a fork are not on the log any more."""
    newest = max((replica.lineage for replica in replicas), key=_rank)
    for replica in replicas:
        if replica.lineage != newest:
            _log.warning(
                "partition %d in %s is not read: it holds timeline %d, and the log goes on under timeline %d",
                replica.partition, replica.directory, replica.lineage.number, newest.number,
            )  # fmt: skip
    return [replica for replica in replicas if replica.lineage == newest]


def _extents(replica: Replica, span: Span) -> Iterator[Extent]:
    """Yield the extents of a replica for a span; a gap is one extent."""
    if span.first < replica.span.first:
        yield Extent(partition=replica.partition, span=span, bytes=0, place=replica.place(span.first))
    else:
        yield from replica.extents(span)


def _bytes(entries: dict[str, Entry], first_id: int, last_id: int) -> int:
    """Estimate the bytes of ids `first_id` to `last_id` in a segment, by its index, which may be wrong."""
    size = entries[segment_name(first_id)].size
    index = entries.get(index_name(first_id))
    count = index_entries(index.size) if index is not None else 0
    wanted = last_id - first_id + 1
    return size * wanted // count if 0 < wanted < count else size
