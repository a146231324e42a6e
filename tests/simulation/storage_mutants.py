"""Mutants of the storage daemon: flushes that are missing, promises that are not kept, bytes that are believed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.simulation.mutant import BUSY, TWO_OWNERS, Aim, Patches, mutant
from waltzd.errors.operations import FlushFailed
from waltzd.format import scan
from waltzd.format.layout import FileHeader, index_entries
from waltzd.format.scan import Survey, Tail
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.storage.append_queue import AppendQueue
from waltzd.storage.replica import directory, segment
from waltzd.storage.replica.control import ControlFile
from waltzd.storage.replica.directory import _Opening
from waltzd.storage.replica.hard_state import Fence, HardStateFile
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.repair import Healing
from waltzd.storage.replica.segment import Segment
from waltzd.storage.replica.segment_list import SegmentList

POWER = Aim(faults=("power",), setup=BUSY)
LONELY = Aim(faults=("aim",), seconds=10.0, storages=3, setup=BUSY)
FAIL_OVER = Aim(faults=("cut", "slow", "crash"), seconds=10.0, servers=2, setup=BUSY)
SMALL_SEGMENTS = {**BUSY, "segment_bytes": 1500}


# -- flushes -----------------------------------------------------------------------------------------------------------


@mutant(1, 0, aim=POWER)
def acknowledges_before_it_flushes(patches: Patches) -> None:
    """Appended records are acknowledged while only the cache knows them."""

    def flush(self: Segment) -> None:
        self._flushed = (self.end, self.next_id)

    patches.set(Segment, "flush", flush)


@mutant(15, aim=Aim(faults=("power", "disk"), setup=BUSY))
def ignores_a_flush_that_failed(patches: Patches) -> None:
    """An error of a data flush is swallowed, as if the next flush would bring the bytes."""

    def make(right: Any) -> Any:
        def flush(self: Segment) -> None:
            try:
                right(self)
            except FlushFailed:
                self._flushed = (self.end, self.next_id)

        return flush

    patches.wrap(Segment, "flush", make)


class _NamesUnflushed:
    """A disk whose directories are not flushed."""

    def __init__(self, disk: Any) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    def flush_directory(self, path: str) -> None: ...


@mutant(0, 1, aim=Aim(faults=("power",), setup=SMALL_SEGMENTS))
def does_not_flush_the_name_of_a_new_segment(patches: Patches) -> None:
    """A segment is rolled without a flush of its directory."""

    def make(right: Any) -> Any:
        def start_segment(self: SegmentList, header: FileHeader) -> Segment:
            disk, self._disk = self._disk, _NamesUnflushed(self._disk)
            try:
                new: Segment = right(self, header)
            finally:
                self._disk = disk
            return new

        return start_segment

    patches.wrap(SegmentList, "start_segment", make)


class _Unflushed:
    """A file that is written and not flushed."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def flush(self) -> None: ...


def _without_flush(patches: Patches, owner: type[Any], name: str) -> None:
    def make(right: Any) -> Any:
        def work(self: Any, *arguments: Any, **named: Any) -> Any:
            file, self._file = self._file, _Unflushed(self._file)
            try:
                return right(self, *arguments, **named)
            finally:
                self._file = file

        return work

    patches.wrap(owner, name, make)


@mutant(18, 33, aim=POWER)
def does_not_flush_the_control_file(patches: Patches) -> None:
    """The session that begins is answered before the control file is flushed."""
    _without_flush(patches, ControlFile, "_write_slot")


@mutant(2, aim=Aim(faults=("power", "coordinator"), setup=BUSY))
def does_not_flush_the_hard_state(patches: Patches) -> None:
    """A promise is answered before it is flushed."""
    _without_flush(patches, HardStateFile, "change")


@mutant(10, 12, aim=Aim(faults=("crash", "coordinator"), setup=BUSY))
def keeps_its_promises_in_memory(patches: Patches) -> None:
    """Promised sessions and marks are never written down."""

    def change(self: HardStateFile, **fields: Any) -> None:
        self.value = replace(self.value, sequence=self.value.sequence + 1, **fields)

    patches.set(HardStateFile, "change", change)


# -- what is found at a start ------------------------------------------------------------------------------------------


@mutant(1, 0, aim=POWER)
def believes_the_index_behind_its_checkpoint(patches: Patches) -> None:
    """At a start the records are counted by the index, and the data is not read."""

    def survey_end(self: _Opening, segment: Segment) -> tuple[Survey, int]:
        count = index_entries(segment.index.size())
        return Survey(segment.first_id + count, segment.data.size(), 0), segment.first_id

    patches.set(_Opening, "_survey_end", survey_end)


@mutant(15, 4, aim=Aim(faults=("aim",), setup=BUSY))
def leaves_a_torn_tail_where_it_is(patches: Patches) -> None:
    """What a crash left of a write is not cut, and the next record is written behind it."""

    def make(right: Any) -> Any:
        def judge(self: _Opening, segment: Segment, found: Survey, start_id: int) -> Any:
            size = segment.data.size()
            result = right(self, segment, found, start_id)
            segment.stands_at(end=size, next_id=found.next_id)
            return result

        return judge

    patches.set(directory, "judge_tail", lambda found, **known: Tail.CLEAN)
    patches.wrap(_Opening, "_judge", make)


@mutant(0, 1, aim=Aim(faults=("damage", "crash"), seconds=8.0, setup=SMALL_SEGMENTS))
def does_not_look_at_checksums(patches: Patches) -> None:
    """Records that were damaged on the disk are served as they are."""
    patches.set(scan, "first_bad", lambda run: None)
    patches.set(segment, "first_bad", lambda run: None)


@mutant(0, 1, aim=Aim(faults=("damage", "crash"), seconds=8.0, setup=SMALL_SEGMENTS))
def says_that_it_is_sound_when_it_is_damaged(patches: Patches) -> None:
    """A replica with findings is treated like one without."""
    patches.set(ReplicaStatus, "is_sound", property(lambda self: True))


# -- sessions ----------------------------------------------------------------------------------------------------------


@mutant(1, 6, aim=TWO_OWNERS)
def takes_appends_of_a_session_that_is_over(patches: Patches) -> None:
    """An older session than the promised one is served like the promised one."""

    def make(right: Any) -> Any:
        def check_session(self: Partition, session: int, contact: int = 0) -> None:
            if session >= self.promised_session:
                right(self, session, contact)

        return check_session

    patches.wrap(Partition, "check_session", make)


@mutant(1, 6, aim=TWO_OWNERS)
def does_not_end_streams_of_a_session_that_is_over(patches: Patches) -> None:
    """A newer session is opened, and the appender of the older one goes on: what is in its stream is taken."""

    async def fence(self: AppendQueue, function: Any) -> Any:
        return await self._call(function)

    patches.set(AppendQueue, "_fence", fence)

    def make(right: Any) -> Any:
        def write(self: Partition, session: int, pieces: Any, committed: int, contact: int = 0) -> Any:
            if session < self.promised_session:
                session, contact = self.promised_session, 0
            return right(self, session, pieces, committed, contact)

        return write

    patches.wrap(Partition, "write", make)


@mutant(0, 1, aim=LONELY)
def takes_what_it_holds_for_committed(patches: Patches) -> None:
    """A storage raises its committed mark to the last id that it has written."""

    def make(right: Any) -> Any:
        def write(self: Partition, session: int, pieces: Any, committed: int, contact: int = 0) -> Any:
            return right(self, session, pieces, pieces[-1].last_id if pieces else committed, contact)

        return write

    patches.wrap(Partition, "write", make)


# -- cutting -----------------------------------------------------------------------------------------------------------


@mutant(21, aim=Aim(faults=("aim",), seconds=10.0, storages=3, setup=BUSY))
def cuts_one_record_too_many(patches: Patches) -> None:
    """A truncation takes the last record that should stay as well, and says that it did not."""

    def make(right: Any) -> Any:
        def cut(self: Partition, mark: int) -> None:
            right(self, max(-1, mark - 1))

        return cut

    patches.wrap(Partition, "_cut", make)


@mutant(10, 4, aim=FAIL_OVER)
def cuts_one_record_too_few(patches: Patches) -> None:
    """A truncation leaves one more record in the file than it says."""

    def make(right: Any) -> Any:
        def end_of(self: Healing, position: int, mark: int) -> tuple[int, int]:
            end, next_id = right(self, position, mark)
            behind = self._segments.segment_with(max(0, mark))[0]
            if mark + 2 < behind.next_id and mark >= behind.first_id:
                end = behind.end_of(mark + 1)[0]
            return end, next_id

        return end_of

    patches.wrap(Healing, "end_of", make)


# -- owners ------------------------------------------------------------------------------------------------------------


@mutant(1, 0, aim=Aim(faults=("forge",), setup=BUSY))
def obeys_whoever_knows_the_session(patches: Patches) -> None:
    """A call of a session that does not show its owner's secret is served."""
    patches.set(Fence, "_is_shown", lambda self, secret: True)
