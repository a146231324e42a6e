"""A storage directory: the control file, the lock, and one replica for each assigned partition.

One bad partition never keeps the others from being served: its error is kept, and every call for it gets that error. A
directory that holds data without its control file is refused, never made anew.

**Opening a replica**, from the files of an earlier process to a replica that can be served.

A start has one question for each byte that it finds: may an owner rely on it? Cost forbids to read the whole log, so the
answer is put together from three kinds of evidence, at the price of one listing, the end of the last segment and four
flushes.

- Sealed segments were flushed before the next one began. Their names and sizes are looked at here; their content is proven
  when it is read, or when an owner asks what the replica vouches for.
- The small files say how far the log once reached: the *floor*, which is the highest of the hard state's `durable` and
  `committed` and the control file's local low-water mark, and `newest`, the segment that must be there. A log that ends
  below has lost records, whatever its bytes look like.
- The hard state also says where the log begins: below its trim floor nothing has to be there, and what a crash left
  there is removed.
- The records themselves, from `durable` on, prove the rest by their checksums.

The end of the last segment is then one of four things (`waltzd.format.scan.judge_tail`): clean; torn, which is above the
floor, is cut, counted and said; damaged, which is kept as a finding and left as it is; or a creation that a crash cut
short, which is finished. Torn and damaged differ in one point only: whether an owner can have been told that the bytes are
stored. A machine that lost power leaves any part of a write, a process that was killed only a beginning of it, so the boot
id takes part in the verdict.

Two more things a start must not get wrong. The page cache may hold bytes that the disk does not have, because an earlier
flush failed or never came: whatever is to be vouched for is written and flushed again (`_settle`). And a replica that has
forgotten something (its directory was copied or restored, or the end of its log is lost) becomes another *incarnation*
before it answers any call, so that no owner counts what the old one acknowledged.

The hard-state file is written last, so that an opening that is interrupted is made again from the same evidence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID, uuid4

from waltzd.disk.seam import Disk, File, join
from waltzd.errors import BadArgument, NoSuchPartition, WaltzError
from waltzd.errors.operations import (
    BadConfig,
    DirectoryGone,
    DiskFull,
    FlushFailed,
    PartitionDamaged,
    PartitionExists,
    PathMissing,
    ReadFailed,
    TooManyFiles,
    WrongStorage,
)
from waltzd.format.finding import Finding
from waltzd.format.layout import (
    CONTROL_NAME,
    FLAG_ASSIGNED,
    FLAG_AVAILABLE,
    GROUP_SEGMENT_BYTES,
    HARD_STATE_NAME,
    HEADER_BYTES,
    NEW_SUFFIX,
    NO_BOOT,
    NO_MARK,
    RESERVE_NAME,
    SEGMENT_SUFFIX,
    FileHeader,
    HardState,
    Identity,
    aside_partition,
    index_entries,
    index_name,
    index_offset,
    is_aside_build,
    segment_ids,
)
from waltzd.format.scan import Survey, Tail, judge_tail, survey
from waltzd.format.span import Span
from waltzd.protocol.address import is_name
from waltzd.protocol.descriptions import SetAside
from waltzd.storage.replica.aside import remove_with_files, set_aside
from waltzd.storage.replica.control import ControlFile, check_blank, check_identity, new_identity, write_identity
from waltzd.storage.replica.examine import (
    DamageReport,
    examine_segment,
    gap_finding,
    header_finding,
    missing_finding,
    short_finding,
    tail_finding,
    unreadable_finding,
)
from waltzd.storage.replica.hard_state import HardStateFile, floor_of
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.replica_context import PartitionSettings, ReplicaContext
from waltzd.storage.replica.segment import UNUSABLE, BatchSegment, Segment, header_of
from waltzd.storage.replica.segment_list import SegmentList
from waltzd.storage.replica.trimmer import names_below


def create_partition_files(context: ReplicaContext) -> None:
    """Create an empty replica, durable before the control file records that it is assigned."""
    context.disk.make_directory(context.directory)
    Segment.create(context.disk, context.directory, context.header(0)).close()
    _create_hard_state(context, session=NO_MARK, committed=NO_MARK)


def adopt_partition(context: ReplicaContext) -> None:
    """Adopt a replica of the original: its session and marks become the first hard state."""
    if context.disk.exists(context.directory) and not context.disk.exists(join(context.directory, HARD_STATE_NAME)):
        info = context.info
        _create_hard_state(context, session=info.session, committed=min(info.low_mark, info.local_low_mark))


def _create_hard_state(context: ReplicaContext, *, session: int, committed: int) -> None:
    """Create the hard state of a new incarnation."""
    hard_state = HardState(
        key=context.key, partition=context.number, incarnation=context.disk.fresh_id(), session=session, committed=committed
    )
    HardStateFile.create(context.disk, context.directory, hard_state)
    context.disk.flush_directory(context.directory)


def open_partition(context: ReplicaContext) -> Partition:
    """Open a replica. Raise if nothing of it can be served; damage in its data is no reason to raise."""
    number, directory = context.number, context.directory
    if not context.disk.exists(directory):
        raise PartitionDamaged(f"partition {number} is assigned to this storage, but its directory {directory} is missing")
    try:
        hard_state = HardStateFile.open(context.disk, directory, key=context.key, partition=number)
    except PathMissing as error:
        raise PartitionDamaged(
            f"partition {number} has lost its hard-state file {join(directory, HARD_STATE_NAME)}: its hard state is unknown"
        ) from error
    return _Opening(context, hard_state).run()


@dataclass
class _Found:
    """The last segment: open for writing, or unusable (`segment` is None)."""

    segment: Segment | None
    findings: list[Finding]
    proven_from: int
    is_end_lost: bool
    """There was more behind it, of unknown length."""


class _Opening:
    def __init__(self, context: ReplicaContext, hard_state: HardStateFile) -> None:
        self._context = context
        self._disk = context.disk
        self._directory = context.directory
        self._hard_state = hard_state
        self._floor = floor_of(context.info, hard_state.value)
        boot = self._disk.boot_id()
        self._was_cut = boot == NO_BOOT or hard_state.value.boot != boot
        """The machine may have lost power since the files were written: bytes without a flush are there, torn, or gone."""
        self._changes: dict[str, Any] = {"boot": boot, "is_clean": False}
        """For the hard state; written at the end."""

    def run(self) -> Partition:
        if self._hard_state.is_copy:
            self._renew("its hard-state file was copied or restored")
        names = self._clear_leftovers()
        first_ids = segment_ids(names)
        findings = self._check_names(first_ids, set(names))
        newest = self._hard_state.value.newest
        begin = self._hard_state.value.floor
        if not first_ids and self._floor == begin - 1 and newest == begin:
            Segment.create(self._disk, self._directory, self._context.header(begin)).close()
            first_ids = [begin]
        last = self._open_last(first_ids[-1], is_whole=not findings) if first_ids else _Found(None, [], begin, True)
        first_ids = first_ids or [begin]
        findings += last.findings
        damage = DamageReport(self._context.number, findings, self._short(last, first_ids[-1]))
        for finding in damage.findings:
            self._context.complain(finding)
        if damage.short is not None or last.is_end_lost:
            self._renew("it has lost the end of its log")
        if last.segment is not None:
            self._settle(last.segment, len(first_ids), is_whole=not damage)
        self._hard_state.make_anew(**self._changes)
        segments = SegmentList(self._context, first_ids=first_ids, active=last.segment)
        for finding in findings:
            segments.note_missing(finding)
        partition = Partition(self._context, self._hard_state, segments, damage, proven_from=last.proven_from)
        partition.stand()
        return partition

    def _renew(self, why: str) -> None:
        new = self._changes["incarnation"] = self._disk.fresh_id()
        old = self._hard_state.value.incarnation
        self._context.say(f"{why}; the replica is a new one from now on, incarnation {new}, was {old}")

    def _short(self, last: _Found, first_id: int) -> Finding | None:
        """Return the finding about ids that are missing after the last segment; None if none are."""
        newest = self._hard_state.value.newest
        next_id = last.segment.next_id if last.segment else first_id
        if first_id < newest or (last.segment is None and not last.findings):
            missing_to = max(newest, self._floor)
        else:
            missing_to = NO_MARK if last.findings else self._floor
        return short_finding(self._context, next_id, missing_to) if next_id <= missing_to else None

    def _clear_leftovers(self) -> list[str]:
        kept: list[str] = []
        trimmed = set(names_below(self._disk, self._directory, self._hard_state.value.floor))
        for name in self._disk.names(self._directory):
            if name.endswith(NEW_SUFFIX) or name in trimmed:
                self._disk.remove(join(self._directory, name))
            else:
                kept.append(name)
        if trimmed:
            self._disk.flush_directory(self._directory)
            self._context.say(
                f"removed {len(trimmed)} files below id {self._hard_state.value.floor}, which are in the archive"
            )
        return kept

    # -- all segments, by name and size

    def _check_names(self, first_ids: Sequence[int], names: set[str]) -> list[Finding]:
        findings: list[Finding] = []
        begin = self._hard_state.value.floor
        if first_ids and first_ids[0] != begin:
            findings.append(missing_finding(self._context, begin, first_ids[0] - 1))
        if len(first_ids) == self._hard_state.value.segments:
            return findings  # as many as this replica made: none is missing in the middle
        for first_id, next_first in itertools.pairwise(first_ids):
            name = index_name(first_id)
            size = self._disk.size(join(self._directory, name)) if name in names else 0
            # Where they differ, the index is wrong or a segment is missing behind: the data tells.
            if index_entries(size) != next_first - first_id:
                findings += examine_segment(self._context, first_id, next_id=next_first)
        return findings

    # -- the last segment

    def _open_last(self, first_id: int, *, is_whole: bool) -> _Found:
        try:
            return self._look_at_last(first_id, is_whole=is_whole)
        except TooManyFiles:
            raise
        except ReadFailed as error:
            finding = unreadable_finding(self._context, error, first_id, self._floor)
            return _Found(None, [finding], first_id, True)

    def _look_at_last(self, first_id: int, *, is_whole: bool) -> _Found:
        path = self._context.path(first_id)
        try:
            size = self._disk.size(path)
            if size < HEADER_BYTES and is_whole and self._is_unused(first_id):
                self._context.say(f"{path} was left unfinished by a crash while it was made; it is made again")
                Segment.create(self._disk, self._directory, self._context.header(first_id)).close()
            data = self._disk.open(path, write=True)
            header = header_of(data, self._context.header(first_id))
        except UNUSABLE as error:
            finding = header_finding(self._context, error, first_id, max(first_id, self._floor))
            return _Found(None, [finding], first_id, True)
        segment = Segment.of(self._directory, header, data, self._open_index(header), end=data.size())
        found, start_id = self._survey_end(segment)
        return self._judge(segment, found, start_id)

    def _is_unused(self, first_id: int) -> bool:
        """Return whether a file without a whole header can only be left by an unfinished creation, of which no owner
        was told."""
        hard_state = self._hard_state.value
        is_first = first_id == hard_state.floor and hard_state.durable == first_id - 1
        return self._floor < first_id and (hard_state.newest < first_id or is_first)

    def _open_index(self, header: FileHeader) -> File:
        path = join(self._directory, index_name(header.first_id))
        if self._disk.exists(path):
            index = self._disk.open(path, write=True)
            try:
                if header_of(index, header).version == header.version:
                    return index
            except UNUSABLE:
                pass
            index.close()
            self._context.say(f"{path} is no index of this segment; it is made again")
        index = self._disk.create(path)
        index.write(0, header.encode())
        index.flush()
        self._disk.flush_directory(self._directory)
        return index

    def _survey_end(self, segment: Segment) -> tuple[Survey, int]:
        """From the last id with a durable index entry, or the whole segment; its entries are right afterwards."""
        end, version = segment.data.size(), segment.header.version
        anchor = self._hard_state.value.durable

        def put(span: Span) -> None:
            segment.write_index(span.first_id, span.entries)

        if self._hard_state.value.newest == segment.first_id and anchor >= segment.first_id:
            offset, first_id = segment.anchor(anchor)
            if first_id is not None:
                found = survey(
                    segment.data,
                    first_id=segment.first_id,
                    end=end,
                    version=version,
                    next_id=first_id,
                    offset=offset,
                    on_span=put,
                )
                if found.next_id > anchor and not found.gaps:
                    return found, first_id
        found = survey(
            segment.data,
            first_id=segment.first_id,
            end=end,
            version=version,
            index=segment.index,
            on_span=put,
        )
        return found, segment.first_id

    def _judge(self, segment: Segment, found: Survey, start_id: int) -> _Found:
        path = segment.data.path
        tail = judge_tail(found, is_last=True, floor=self._floor, was_cut=self._was_cut)
        segment.stands_at(end=found.end, next_id=found.next_id)
        findings = [gap_finding(self._context, path, gap, found.next_id) for gap in found.gaps]
        if tail is Tail.DAMAGED:
            findings.append(tail_finding(self._context, path, found, max(found.next_id, self._floor)))
        if tail is Tail.TORN:
            self._context.say(
                f"cut {found.tail_bytes} bytes behind id {found.next_id - 1} in {path}: the end of a write that a crash "
                "interrupted, never acknowledged"
            )
            segment.cut(end=found.end, next_id=found.next_id)
        elif tail is Tail.UNFINISHED and found.footer_bytes and not found.gaps:
            self._context.say(f"{path} has no sound footer behind id {found.next_id - 1}: it is made again")
            segment.cut(end=found.end, next_id=found.next_id)
        elif segment.index.size() != index_offset(found.next_id - segment.first_id):
            segment.index.truncate(index_offset(found.next_id - segment.first_id))
        if isinstance(segment, BatchSegment):
            segment.goes_on(found.end_of_log, has_footer=found.footer is not None)
        return _Found(segment, findings, start_id, tail is Tail.DAMAGED or found.next_id <= self._floor)

    def _settle(self, segment: Segment, segments: int, *, is_whole: bool) -> None:
        """Flush everything that the cache shows, and record that in the hard state.

        A replica with damage keeps its marks, which say what it once had. They do not say what of it is on the disk now: a
        log that was short may have been written again below them. So all of its last segment is written again."""
        hard_state = self._hard_state.value
        if not hard_state.is_clean:
            # Names too: a process that was killed may have left some that only the cache knows.
            self._disk.flush_directory(self._directory)
            known = hard_state.durable if hard_state.newest == segment.first_id else NO_MARK
            segment.write_again(segment.start_of(max(known + 1, segment.first_id)) if is_whole else 0)
        if is_whole:
            segment.index.flush()
            self._changes |= {"durable": segment.next_id - 1, "newest": segment.first_id, "segments": segments}


_ZEROS = bytes(1 << 16)


def delete_directory(disk: Disk, home: str, path: str) -> None:
    """Delete the directory of a partition with its files, durably."""
    remove_with_files(disk, path)
    disk.flush_directory(home)


class Directory:
    def __init__(
        self, disk: Disk, path: str, control: ControlFile, settings: PartitionSettings, reserve_bytes: int
    ) -> None:
        self._disk = disk
        self.path = path
        self.control = control
        self._settings = settings
        self._reserve_bytes = reserve_bytes
        self._partitions: dict[int, Partition] = {}
        self._refused: dict[int, WaltzError] = {}
        self._identity: Identity | None = None
        self.instance = uuid4()
        """Identity of the process that holds the directory."""

    @staticmethod
    def open(
        disk: Disk,
        path: str,
        *,
        key: UUID | None,
        partitions: int | None,
        settings: PartitionSettings,
        reserve_bytes: int = 0,
        name: str = "",
        is_renamed: bool = False,
    ) -> Directory:
        """Lock the directory and open every assigned partition. An empty directory becomes one of this cluster. The
        directory of a storage with another `name` is refused, unless it `is_renamed`."""
        if not disk.exists(join(path, CONTROL_NAME)):
            check_blank(path, disk.list(path))
            if key is None or partitions is None:
                raise BadConfig(
                    f"{path} is empty, so cluster_key and partitions must say which cluster it is for",
                    next_step="set both in the configuration, with the values of the cluster",
                )
            ControlFile.create(disk, path, key, partitions)
        control = ControlFile.open(disk, path)
        try:
            control.check_cluster(key, partitions)
            directory = Directory(disk, path, control, settings, reserve_bytes)
            directory._identity = check_identity(disk, path, control.header)
            directory._check_name(name, is_renamed=is_renamed)
            directory._open_all()
            directory.take_name(name, is_renamed=is_renamed)
        except BaseException:
            control.close()
            raise
        return directory

    def _open_all(self) -> None:
        for entry in self._disk.list(self.path):
            if entry.name.endswith(NEW_SUFFIX) and not entry.is_directory:
                self._disk.remove(join(self.path, entry.name))
            elif entry.is_directory and is_aside_build(entry.name):  # an unfinished copy of what the log still has
                remove_with_files(self._disk, join(self.path, entry.name))
        try:
            self._start()
        except DiskFull:
            # The last bytes of a full disk were kept for this moment.
            if not self._release_reserve():
                raise
            self._partitions.clear()
            self._refused.clear()
            self._start()
        self.keep_reserve()

    # -- whose it is

    @property
    def name(self) -> str:
        """Name of the storage; empty until it is known."""
        return "" if self._identity is None else self._identity.name

    def _check_name(self, name: str, *, is_renamed: bool = False) -> None:
        if name and self.name and name != self.name and not is_renamed:
            raise WrongStorage(f"{self.path} is the directory of the storage {self.name}, not of {name}")

    def check_meant(self, name: str, instance: UUID | None = None) -> None:
        """Refuse a call that is meant for another storage, or another process of this one."""
        if (name and self.name and name != self.name) or instance not in (None, self.instance):
            who = f"the storage {self.name}" if self.name else "a storage without a name"
            meant = f"the storage {name}" if name else "another one"
            raise WrongStorage(f"this is {who} in {self.path}; the caller means {meant}")

    def take_name(self, name: str, *, is_renamed: bool = False) -> None:
        """Become the directory of this storage; refused when it is that of another one."""
        self._check_name(name, is_renamed=is_renamed)
        if name and not is_name(name):
            raise BadArgument(f"{name!r} is not a name of a storage")
        assert self._identity is not None, "open it first"
        if name and name != self.name:
            identity = replace(self._identity, name=name)
            write_identity(self._disk, self.path, identity)
            self._settings.say(f"{self.path} is the directory of the storage {name} now" +
                               (f"; it was that of {self.name}" if self.name else ""))  # fmt: skip
            self._identity = identity

    # -- its start

    def _start(self) -> None:
        for number, damage in self.control.damage():
            self._refused[number] = damage
        assigned = self.control.assigned()
        if self._identity is None:
            for number in assigned:
                adopt_partition(self._context(number))
            self._identity = new_identity(self._disk, self.path, self.control.header)
        self.control.write_again()
        self._disk.flush_directory(self.path)
        for number in assigned:
            self._open_one(number)

    def _open_one(self, number: int) -> None:
        try:
            self._partitions[number] = open_partition(self._context(number))
        except (FlushFailed, DiskFull):
            raise
        except WaltzError as error:
            self._refused[number] = error
            self._settings.say(f"partition {number} is refused: {error.message}")

    def _path_of(self, number: int) -> str:
        return join(self.path, str(number))

    def _context(self, number: int) -> ReplicaContext:
        settings = self._settings
        if number == self.control.group_log:
            size = min(settings.segment_bytes_max, GROUP_SEGMENT_BYTES)
            settings = replace(settings, segment_bytes_max=size)
        return ReplicaContext(
            disk=self._disk, directory=self._path_of(number), number=number, control=self.control, settings=settings
        )

    # -- partitions

    def partition(self, number: int) -> Partition:
        found = self._partitions.get(number)
        if found is not None:
            return found
        if number in self._refused:
            raise self._refused[number]
        self.control.info(number)
        raise NoSuchPartition(f"partition {number} is not assigned to this storage")

    def partitions(self) -> list[Partition]:
        """Return the replicas by their numbers. Threads ask beside the one that creates and removes replicas, so the
        dictionary is read in one step."""
        return [partition for _, partition in sorted(self._partitions.items())]

    def errors(self) -> dict[int, WaltzError | None]:
        """All partitions of this storage, each with the error that refuses it."""
        return {number: self._refused.get(number) for number in sorted({*self._partitions, *self._refused})}

    def create_partition(self, number: int) -> Partition:
        """Create an empty replica. Files that are left in the directory of an unassigned partition are set aside,
        never reused."""
        self.control.make_record(number)
        info = self.control.info(number)
        if info.is_assigned:
            raise PartitionExists(f"partition {number} is already assigned to this storage")
        self._set_aside(number)
        create_partition_files(self._context(number))
        self._disk.flush_directory(self.path)
        partition = open_partition(self._context(number))
        try:
            self.control.set_flags(number, info.flags | FLAG_ASSIGNED | FLAG_AVAILABLE)
        except DiskFull:
            partition.close()
            raise
        self._partitions[number] = partition
        return partition

    def stand(self, number: int) -> Partition:
        """Open a replica that has just come to be here."""
        partition = self._partitions[number] = open_partition(self._context(number))
        return partition

    def ensure_partition(self, number: int) -> Partition | None:
        """Create an empty replica if there is none, or if no segment of an earlier one is left: a new disk. Return
        None if a replica exists, even a damaged one, about which an operator has to decide."""
        self.control.make_record(number)
        is_assigned = self.control.info(number).is_assigned
        if is_assigned and not (number in self._refused and self._is_blank(number)):
            return None
        if is_assigned:
            self.remove_partition(number, delete_files=False)
        self._settings.say(f"partition {number}: its owner asked for it and nothing is here; an empty replica is made")
        return self.create_partition(number)

    def _is_blank(self, number: int) -> bool:
        path = self._path_of(number)
        return not self._disk.exists(path) or not any(name.endswith(SEGMENT_SUFFIX) for name in self._disk.names(path))

    def remove_partition(self, number: int, *, delete_files: bool) -> str | None:
        """Take the partition off this storage. Its files are deleted, or set aside; returns where.

        Files of a partition whose part of the control file is damaged are only set aside: they may be anything."""
        may_be_here = self.control.is_damaged(number) and not delete_files
        if not may_be_here and not self.control.info(number).is_assigned:
            raise NoSuchPartition(f"partition {number} is not assigned to this storage")
        partition = self._partitions.pop(number, None)
        self._refused.pop(number, None)
        if partition is not None:
            partition.close()
        self.control.reset(number)
        aside = self._set_aside(number)
        if aside is not None and delete_files:
            delete_directory(self._disk, self.path, aside)
            return None
        return aside

    def _set_aside(self, number: int) -> str | None:
        aside = set_aside(self._disk, self.path, number)
        if aside is not None:
            self._settings.say(f"the files of partition {number} were set aside in {aside}")
        return aside

    def aside(self) -> tuple[SetAside, ...]:
        """Directories of partitions that were taken off this storage."""
        found = (entry.name for entry in self._disk.list(self.path) if entry.is_directory)
        return tuple(
            SetAside(name, sum(entry.size for entry in self._disk.list(join(self.path, name))))
            for name in sorted(found)
            if aside_partition(name) is not None
        )

    def delete_aside(self, names: Sequence[str]) -> tuple[SetAside, ...]:
        """Only directories that were set aside can be named here."""
        there = {one.name: one for one in self.aside()}
        for name in names:
            if name not in there:
                raise BadArgument(
                    f"{name!r} is no directory that was set aside in {self.path}", not_done="nothing was deleted"
                )
        for name in names:
            delete_directory(self._disk, self.path, join(self.path, name))
            self._settings.say(f"{join(self.path, name)}, which was set aside, was deleted")
        return tuple(there[name] for name in names)

    def set_available(self, number: int, available: bool) -> None:
        info = self.control.info(number)
        if not info.is_assigned:
            raise NoSuchPartition(f"partition {number} is not assigned to this storage")
        flags = info.flags | FLAG_AVAILABLE if available else info.flags & ~FLAG_AVAILABLE
        if flags != info.flags:
            self.control.set_flags(number, flags)

    # -- being there

    def check_in_place(self) -> None:
        """Raise `DirectoryGone` if the directory, or that of a partition, is gone. Must not be called while partitions
        change."""
        is_here = self.control.is_in_place
        lost = [partition for partition in self.partitions() if not (is_here and partition.is_in_place)]
        if lost or not is_here:
            what = self.path if not is_here else ", ".join(self._path_of(partition.number) for partition in lost)
            ids = ", ".join(f"partition {partition.number} up to id {partition.last_id}" for partition in lost)
            raise DirectoryGone(f"{what} went away while the storage ran. Lost with it: {ids or 'no partition'}")

    # -- space for a start

    def keep_reserve(self) -> bool:
        """Bring the reserve file to its size when there is room for it; called again from time to time."""
        path = join(self.path, RESERVE_NAME)
        if self._reserve_bytes == 0 or (self._disk.exists(path) and self._disk.size(path) >= self._reserve_bytes):
            return True
        if self._disk.free_bytes(self.path) < self._reserve_bytes + self._settings.free_bytes_min:
            return False
        file = self._disk.create(path)
        try:
            for offset in range(0, self._reserve_bytes, len(_ZEROS)):
                file.write(offset, _ZEROS[: self._reserve_bytes - offset])
            file.flush()
        except DiskFull:
            self._disk.remove(path)
            return False
        finally:
            file.close()
        self._disk.flush_directory(self.path)
        return True

    def _release_reserve(self) -> bool:
        path = join(self.path, RESERVE_NAME)
        if not self._disk.exists(path):
            return False
        self._disk.remove(path)
        self._settings.say(f"the disk is full: {path} was given up so that this storage can start")
        return True

    def close(self) -> None:
        self.check_in_place()
        for partition in self.partitions():
            partition.close()
        self.control.close()
