"""Opening a replica: what a storage does with what it finds at a start.

Cost: one listing, the end of the last segment, four flushes; never the whole log. What it finds in the last segment is
put into one of four drawers (`waltzd.format.scan.judge_tail`): clean; torn, which is cut, counted and said; damaged, which
is remembered as a finding and left as it is; or a creation that a crash cut short, which is finished. Everything else (the
sealed segments) is looked at by name and size here, and by content when it is read or must be vouched for.

A replica that has forgotten something takes a new incarnation before it answers anybody: one whose directory was copied or
restored, and one that has lost the end of its log. Nobody will count what the old one acknowledged.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from waltzd.disk.seam import Disk, File, join
from waltzd.errors import PartitionDamaged, PathMissing
from waltzd.format.finding import Finding
from waltzd.format.index import offsets_of
from waltzd.format.layout import (
    HEADER_BYTES,
    NEW_SUFFIX,
    NO_BOOT,
    NO_MARK,
    PROMISE_NAME,
    ControlStruct,
    FileHeader,
    check_header,
    index_entries,
    index_name,
    index_offset,
    segment_ids,
    segment_name,
)
from waltzd.format.record import Run
from waltzd.format.scan import Survey, Tail, judge_tail, read_index, survey
from waltzd.storage.replica.control import ControlFile
from waltzd.storage.replica.examine import (
    Quarantine,
    examine_segment,
    gap_finding,
    header_finding,
    missing_finding,
    short_finding,
    tail_finding,
)
from waltzd.storage.replica.partition import Partition, PartitionSettings
from waltzd.storage.replica.promise import PromiseFile, floor_of
from waltzd.storage.replica.segment import UNUSABLE, Segment
from waltzd.storage.replica.shelf import Shelf


def create_partition_files(disk: Disk, directory: str, number: int, *, control: ControlFile) -> None:
    """An empty replica, a new incarnation: everything durable before the control file says that it is assigned."""
    disk.make_directory(directory)
    header = FileHeader(created_ms=disk.now_ms(), key=control.header.key, partition=number, first_id=0)
    Segment.create(disk, directory, header).close()
    PromiseFile.create(disk, directory, key=control.header.key, partition=number, session=NO_MARK, committed=NO_MARK)
    disk.flush_directory(directory)


def adopt_partition(disk: Disk, directory: str, number: int, *, control: ControlFile) -> None:
    """A replica of the original: what it knew becomes the first promise of ours."""
    if not disk.exists(directory) or disk.exists(join(directory, PROMISE_NAME)):
        return
    info = control.info(number)
    PromiseFile.create(
        disk,
        directory,
        key=control.header.key,
        partition=number,
        session=info.session,
        committed=min(info.low_mark, info.local_low_mark),
    )
    disk.flush_directory(directory)


def open_partition(
    disk: Disk, directory: str, number: int, *, control: ControlFile, settings: PartitionSettings
) -> Partition:
    """The replica in `directory`. Raises when nothing of it can be served; damage in its data is no reason to raise."""
    if not disk.exists(directory):
        raise PartitionDamaged(f"partition {number} is assigned to this storage, but its directory {directory} is missing")
    try:
        promise = PromiseFile.open(disk, directory, key=control.header.key, partition=number)
    except PathMissing as error:
        raise PartitionDamaged(
            f"partition {number} has lost its promise file {join(directory, PROMISE_NAME)}: what it promised is not known"
        ) from error
    return _Opening(disk, directory, number, control, promise, settings).run()


@dataclass
class _Found:
    """The last segment: open for writing, or not usable at all (`segment` is None)."""

    segment: Segment | None
    findings: list[Finding]
    proven_from: int
    is_end_lost: bool
    """There was more behind it, nobody knows how much."""


class _Opening:
    def __init__(
        self,
        disk: Disk,
        directory: str,
        number: int,
        control: ControlFile,
        promise: PromiseFile,
        settings: PartitionSettings,
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._number = number
        self._control = control
        self._promise = promise
        self._settings = settings
        self._info: ControlStruct = control.info(number)
        boot = disk.boot_id()
        self._was_cut = boot == NO_BOOT or promise.value.boot != boot
        """The machine may have lost power since the files were written: what was not flushed is there, torn, or gone."""
        self._changes: dict[str, Any] = {"boot": boot, "is_clean": False}
        """What is different in the promise from now on. It is written at the end, so that an opening that is interrupted is
        made again as it was."""

    @property
    def _floor(self) -> int:
        return floor_of(self._info, self._promise.value)

    def _say(self, sentence: str) -> None:
        self._settings.say(f"partition {self._number}: {sentence}")

    def _header(self, first_id: int) -> FileHeader:
        return FileHeader(
            created_ms=self._disk.now_ms(), key=self._control.header.key, partition=self._number, first_id=first_id
        )

    def run(self) -> Partition:
        if self._promise.is_copy:
            self._renew("its promise file was copied or restored")
        names = self._clear_leftovers()
        first_ids = segment_ids(names)
        findings = self._check_names(first_ids, set(names))
        newest = self._promise.value.newest
        if not first_ids and self._floor == NO_MARK and newest == 0:
            Segment.create(self._disk, self._directory, self._header(0)).close()
            first_ids = [0]
        last = self._open_last(first_ids[-1], is_whole=not findings) if first_ids else _Found(None, [], 0, True)
        first_ids = first_ids or [0]
        findings += last.findings
        quarantine = Quarantine(self._number, findings, self._short(last, first_ids[-1]))
        for finding in quarantine.findings:
            complain = self._settings.complain or self._settings.say
            complain(f"{PartitionDamaged.code} partition {self._number}: {finding.sentence()}")
        if quarantine.short is not None or last.is_end_lost:
            self._renew("it has lost the end of its log")
        if not quarantine and last.segment is not None:
            self._settle(last.segment, len(first_ids))
        self._promise.make_anew(**self._changes)
        shelf = Shelf(
            self._disk,
            self._directory,
            key=self._control.header.key,
            partition=self._number,
            first_ids=first_ids,
            active=last.segment,
        )
        for finding in findings:
            shelf.miss_for(finding)
        return Partition(
            self._disk,
            self._directory,
            self._number,
            control=self._control,
            promise=self._promise,
            settings=self._settings,
            shelf=shelf,
            quarantine=quarantine,
            proven_from=last.proven_from,
        )

    def _renew(self, why: str) -> None:
        new = self._changes["incarnation"] = self._disk.fresh_id()
        old = self._promise.value.incarnation
        self._say(f"{why}; the replica is a new one from now on, incarnation {new}, was {old}")

    def _short(self, last: _Found, first_id: int) -> Finding | None:
        """What is missing behind the last segment that is there."""
        newest = self._promise.value.newest
        next_id = last.segment.next_id if last.segment else first_id
        if first_id < newest or (last.segment is None and not last.findings):
            missing_to = max(newest, self._floor)
        else:
            missing_to = NO_MARK if last.findings else self._floor
        return short_finding(self._directory, self._number, next_id, missing_to) if next_id <= missing_to else None

    def _clear_leftovers(self) -> list[str]:
        kept: list[str] = []
        for name in self._disk.names(self._directory):
            if name.endswith(NEW_SUFFIX):
                self._disk.remove(join(self._directory, name))
            else:
                kept.append(name)
        return kept

    # -- all segments, by name and size

    def _check_names(self, first_ids: Sequence[int], names: set[str]) -> list[Finding]:
        findings: list[Finding] = []
        if first_ids and first_ids[0] != 0:
            findings.append(missing_finding(self._directory, self._number, 0, first_ids[0] - 1))
        if len(first_ids) == self._promise.value.segments:
            return findings  # as many as this replica made: none is missing in the middle
        for first_id, next_first in itertools.pairwise(first_ids):
            name = index_name(first_id)
            size = self._disk.size(join(self._directory, name)) if name in names else 0
            if (
                index_entries(size) != next_first - first_id
            ):  # the index is wrong, or a segment is missing behind: the data tells
                findings += self._examine(first_id, next_first)
        return findings

    def _examine(self, first_id: int, next_id: int) -> list[Finding]:
        return examine_segment(
            self._disk,
            self._directory,
            expected=self._header(first_id),
            next_id=next_id,
            is_last=False,
            active=None,
            say=self._settings.say,
        )

    # -- the last segment

    def _open_last(self, first_id: int, *, is_whole: bool) -> _Found:
        path = join(self._directory, segment_name(first_id))
        try:
            size = self._disk.size(path)
            if size < HEADER_BYTES and is_whole and self._is_unused(first_id):
                self._say(f"{path} was left unfinished by a crash while it was made; it is made again")
                Segment.create(self._disk, self._directory, self._header(first_id)).close()
            data = self._disk.open(path, write=True)
            header = check_header(data.read(0, HEADER_BYTES), path, self._header(first_id))
        except UNUSABLE as error:
            last_id = max(first_id, self._floor)
            finding = header_finding(error, path, partition=self._number, first_id=first_id, last_id=last_id)
            return _Found(None, [finding], first_id, True)
        index = self._open_index(header)
        segment = Segment(self._directory, header, data, index, end=data.size(), next_id=first_id)
        found, start_id = self._survey_end(segment)
        return self._judge(segment, found, start_id)

    def _is_unused(self, first_id: int) -> bool:
        """A file too short to hold anything can only be the rest of a creation: nobody was told that it exists."""
        promise = self._promise.value
        return self._floor < first_id and (promise.newest < first_id or (first_id == 0 and promise.durable == NO_MARK))

    def _open_index(self, header: FileHeader) -> File:
        path = join(self._directory, index_name(header.first_id))
        if self._disk.exists(path):
            index = self._disk.open(path, write=True)
            try:
                check_header(index.read(0, HEADER_BYTES), path, header)
                return index
            except UNUSABLE:
                index.close()
                self._say(f"{path} is no index of this segment; it is made again")
        index = self._disk.create(path)
        index.write(0, header.encode())
        index.flush()
        self._disk.flush_directory(self._directory)
        return index

    def _survey_end(self, segment: Segment) -> tuple[Survey, int]:
        """From the last id that is known to be indexed durably, or all of it; the index is right afterwards."""
        end = segment.data.size()
        anchor = self._promise.value.durable

        def put(offset: int, run: Run) -> None:
            segment.write_index(run.first_id, offsets_of(offset, run))

        if self._promise.value.newest == segment.first_id and anchor >= segment.first_id:
            entry = read_index(segment.index, anchor - segment.first_id, 1)
            if len(entry) == 1 and HEADER_BYTES <= entry[0] < end:
                found = survey(
                    segment.data, first_id=segment.first_id, end=end, next_id=anchor, offset=int(entry[0]), on_run=put
                )
                if found.next_id > anchor and not found.gaps:
                    return found, anchor
        return survey(segment.data, first_id=segment.first_id, end=end, index=segment.index, on_run=put), segment.first_id

    def _judge(self, segment: Segment, found: Survey, start_id: int) -> _Found:
        path = segment.data.path
        tail = judge_tail(
            tail_bytes=found.tail_bytes,
            next_id=found.next_id,
            is_last=True,
            has_gaps=bool(found.gaps),
            floor=self._floor,
            rest=found.rest,
            was_cut=self._was_cut,
        )
        segment.stands_at(end=found.end, next_id=found.next_id)
        findings = [gap_finding(gap, path, self._number, found.next_id) for gap in found.gaps]
        if tail is Tail.DAMAGED:
            findings.append(tail_finding(found, path, self._number, max(found.next_id, self._floor)))
        if tail is Tail.TORN:
            self._say(
                f"cut {found.tail_bytes} bytes behind id {found.next_id - 1} in {path}: the end of a write that a crash "
                "interrupted, never acknowledged"
            )
            segment.cut(end=found.end, next_id=found.next_id)
        elif segment.index.size() != index_offset(found.next_id - segment.first_id):
            segment.index.truncate(index_offset(found.next_id - segment.first_id))
        return _Found(segment, findings, start_id, tail is Tail.DAMAGED or found.next_id <= self._floor)

    def _settle(self, segment: Segment, segments: int) -> None:
        """Make sure that the disk has what the cache shows."""
        promise = self._promise.value
        if not promise.is_clean:
            # Names too: a process that was killed may have left some that only the cache knows.
            self._disk.flush_directory(self._directory)
            known = promise.durable if promise.newest == segment.first_id else NO_MARK
            segment.write_again(segment.offset_of(max(known + 1, segment.first_id)))
        segment.index.flush()
        self._changes |= {"durable": segment.next_id - 1, "newest": segment.first_id, "segments": segments}
