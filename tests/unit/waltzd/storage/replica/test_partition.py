"""One replica: who may call, what an append is allowed to be, where a cut may go, what a reader sees."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from tests.simulation.sample import (
    KEY,
    PARTITIONS,
    ROOT,
    blank_disk,
    expected,
    first_ids,
    open_directory,
    records_of,
    run_for,
    segment_path,
    served,
)
from tests.unit.keeping import begun
from waltzd.disk.real import translate
from waltzd.disk.seam import File
from waltzd.disk.simulated import Fault, SimDisk
from waltzd.errors import BadArgument, BeyondLog
from waltzd.errors.operations import (
    BelowFloor,
    DirectoryGone,
    DiskFull,
    Diverged,
    FlushFailed,
    MarkWentDown,
    NotNextId,
    NotOpened,
    PartitionDamaged,
    PartitionOffline,
    StaleSession,
    TooManyFiles,
)
from waltzd.format.finding import Code
from waltzd.format.layout import segment_name
from waltzd.format.record import TAIL_RECORDS, encode_payloads, tail_hash
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.replica_context import PartitionSettings


def reopened(disk: SimDisk) -> Partition:
    disk.kill()
    return open_directory(disk).partition(0)


def test_only_open_raises_the_session_and_it_never_goes_down() -> None:
    disk, _, partition = begun(4)
    partition.open_session(3)
    partition.open_session(5)
    for partition_now in (partition, reopened(disk)):
        for session in (-1, 0, 3, 4):
            with pytest.raises((StaleSession, BadArgument)):
                partition_now.open_session(session)
        with pytest.raises(StaleSession) as stale:
            partition_now.append(4, [run_for(0, 4, 1)], -1)
        assert stale.value.facts["promised_session"] == "5"
        refuses_a_session_that_was_not_opened(partition_now, 6)
        assert partition_now.promised_session == 5
        assert partition_now.last_id == 3


def refuses_a_session_that_was_not_opened(partition: Partition, session: int) -> None:
    for call in (
        lambda: partition.append(session, [run_for(0, 4, 1)], -1),
        lambda: partition.set_low_mark(session, 3),
        lambda: partition.truncate(session, 2),
        lambda: partition.read(0, 1, 100, session=session),
    ):
        with pytest.raises(NotOpened):
            call()


def test_runs_follow_the_log_or_are_refused_before_anything_is_written() -> None:
    disk, _, partition = begun(4)
    writes: list[str] = []

    def note(kind: str, path: str) -> None:
        if kind in ("write", "truncate", "flush"):
            writes.append(path)

    disk.observer = note
    other = encode_payloads(2, [b"another history", b"of the same ids"])
    for runs, error in (
        ([run_for(0, 5, 1)], NotNextId),
        ([run_for(0, 4, 1), run_for(0, 6, 1)], NotNextId),
        ([run_for(0, 1 << 62, 1)], NotNextId),
        ([other], Diverged),
        ([run_for(0, 0, 2), other], Diverged),
        ([encode_payloads(3, [b"x", b"y"])], Diverged),
    ):
        with pytest.raises(error):
            partition.append(3, runs, -1)
    assert partition.append(3, [run_for(0, 0, 4)], -1) == 3
    assert partition.append(3, [run_for(0, 2, 1), run_for(0, 0, 3)], -1) == 3
    assert partition.append(3, [], -1) == 3
    assert writes == []


def test_an_overlap_writes_only_what_is_new() -> None:
    _, _, partition = begun(4)
    assert partition.append(3, [run_for(0, 2, 5), run_for(0, 5, 4)], -1) == 8
    assert served(partition, expected(0, 9)) == set(range(9))


def test_a_batch_may_span_many_segments() -> None:
    disk, _, partition = begun()
    assert partition.append(3, [run_for(0, 0, 50)], -1) == 49
    assert len(first_ids(disk)) > 8
    assert served(partition, expected(0, 50)) == set(range(50))
    disk.power_cut()
    assert served(open_directory(disk).partition(0), expected(0, 50)) == set(range(50))


def test_the_committed_mark_is_believed_only_from_the_session_and_only_as_far_as_the_log() -> None:
    disk, _, partition = begun(4)
    partition.append(3, [run_for(0, 4, 1)], 1 << 40)
    assert partition.committed == 4
    partition.append(3, [run_for(0, 5, 1)], -7)
    assert partition.committed == 4
    partition.open_session(4)
    partition.append(4, [run_for(0, 6, 1)], 6)  # its low-water mark is not set: nothing it says is decided yet
    assert partition.committed == 4
    assert reopened(disk).committed == 4


@pytest.mark.parametrize("mark", range(-1, 12))
def test_a_cut_keeps_everything_up_to_the_mark_and_nothing_else(mark: int) -> None:
    disk, _, partition = begun(12)
    partition.open_session(4)
    assert partition.truncate(4, mark).last_id == mark
    other = encode_payloads(mark + 1, [b"the other history"] * 3)
    sent = expected(0, mark + 1) + records_of(other)
    partition.append(4, [other], -1)
    assert served(partition, sent) == set(range(mark + 4))
    disk.power_cut()
    again = open_directory(disk).partition(0)
    assert again.last_id == mark + 3
    assert served(again, sent) == set(range(mark + 4))


def test_a_cut_never_goes_below_what_is_decided() -> None:
    disk, _, partition = begun(12)
    with pytest.raises(BelowFloor):
        partition.truncate(3, 8)
    partition.append(3, [run_for(0, 12, 1)], 6)
    partition.open_session(4)
    with pytest.raises(BelowFloor) as below:
        partition.truncate(4, 5)
    assert below.value.facts["floor"] == "6"
    with pytest.raises(BadArgument):
        partition.truncate(4, -2)
    assert partition.truncate(4, 99).last_id == 12
    with pytest.raises(BadArgument):
        partition.set_low_mark(4, 9)
    partition.truncate(4, 9)
    partition.set_low_mark(4, 9)
    partition.open_session(5)
    for again in (partition, reopened(disk)):
        with pytest.raises(BelowFloor):
            again.truncate(5, 8)
        with pytest.raises(MarkWentDown):
            again._context.control.start_session(0, session=5, low_mark=8, local_low_mark=9)


def test_a_low_mark_above_the_log_is_remembered_as_what_it_is() -> None:
    """A replica that lags says so: what it holds ends below the mark of its session."""
    disk, _, partition = begun(4)
    partition.open_session(4)
    status = partition.set_low_mark(4, 30)
    assert (status.low_mark, status.local_low_mark, status.last_id) == (30, 3, 3)
    status = reopened(disk).status()
    assert (status.low_mark, status.local_low_mark, status.last_id, status.is_sound) == (30, 3, 3, True)


def test_a_session_that_lost_its_beginning_begins_again_and_nothing_is_cut_for_that() -> None:
    """A control file that rotted can bring an older struct back, while the hard-state file still says what is committed."""
    _, _, partition = begun(6)
    partition.open_session(4)
    partition.set_low_mark(4, 5)
    partition.append(4, [run_for(0, 6, 5)], 10)
    partition.open_session(4)
    assert partition.set_low_mark(4, 5).last_id == 10
    partition.append(4, [run_for(0, 11, 1)], 10)
    partition.open_session(5)
    with pytest.raises(BadArgument):
        partition.set_low_mark(5, 10)  # nobody said that 11 is committed


def test_no_session_begins_below_what_was_committed_before_it() -> None:
    """Whatever its owner was told: documents that went back, say."""
    disk, _, partition = begun(6)
    partition.append(3, [run_for(0, 6, 5)], 10)
    partition.open_session(4)
    with pytest.raises(BelowFloor):
        partition.set_low_mark(4, 5)
    assert partition.status().session == 3
    partition = reopened(disk)
    with pytest.raises(BelowFloor):
        partition.set_low_mark(4, 9)
    assert partition.set_low_mark(4, 10).session == 4


def test_what_a_replica_was_told_outlives_its_process() -> None:
    """Told with the append and not flushed: a kill loses nothing of it, and a power cut at most that."""
    for is_cut in (False, True):
        disk, _, partition = begun(6)
        partition.append(3, [run_for(0, 6, 5)], 8)
        partition.append(3, [run_for(0, 11, 1)], 10)
        if is_cut:
            disk.power_cut()
        partition = reopened(disk)
        assert partition.last_id == 11
        assert partition.status().committed in ((-1, 8, 10) if is_cut else (10,))
        partition.open_session(4)
        if (known := partition.status().committed) > 0:
            with pytest.raises(BelowFloor):
                partition.truncate(4, known - 1)
            assert partition.truncate(4, known).last_id == known


def test_readers_without_a_session_see_only_what_is_committed() -> None:
    _, _, partition = begun(6)
    partition.append(3, [run_for(0, 6, 1)], 2)
    assert len(partition.read(0, 2, 1 << 20, session=None)) == 3
    assert len(partition.read(0, 6, 1 << 20, session=None)) == 3
    with pytest.raises(BeyondLog) as beyond:
        partition.read(3, 3, 100, session=None)
    assert beyond.value.facts["last_id"] == "2"
    with pytest.raises(BeyondLog):
        partition.read(7, 7, 100, session=3)
    for first_id, last_id in ((-1, 3), (3, 2), (-5, -2)):
        with pytest.raises(BadArgument):
            partition.read(first_id, last_id, 100, session=3)


def test_offline_means_no_calls_and_no_change() -> None:
    disk, directory, partition = begun(4)
    directory.set_available(0, False)
    for call in (
        lambda: partition.open_session(9),
        lambda: partition.append(3, [run_for(0, 4, 1)], -1),
        lambda: partition.truncate(3, 1),
        lambda: partition.set_low_mark(3, 3),
    ):
        with pytest.raises(PartitionOffline):
            call()
    assert "offline" in reopened(disk).describe()
    disk.kill()
    directory = open_directory(disk)
    directory.set_available(0, True)
    assert directory.partition(0).append(3, [run_for(0, 4, 1)], -1) == 4


def test_writes_stop_before_the_disk_is_full_and_go_on_with_some_more_room() -> None:
    disk = blank_disk()
    settings = PartitionSettings(segment_bytes_max=100_000, free_bytes_min=8000)
    directory = Directory.open(disk, ROOT, key=KEY, partitions=PARTITIONS, settings=settings)
    partition = directory.create_partition(0)
    partition.open_session(1)
    partition.append(1, [run_for(0, 0, 3)], -1)
    disk.capacity_bytes -= disk.room() - 8050
    with pytest.raises(DiskFull):
        partition.append(1, [run_for(0, 3, 1)], -1)
    assert partition.status().is_full
    assert "wait for disk space" in partition.describe()
    disk.capacity_bytes += 500
    with pytest.raises(DiskFull):
        partition.append(1, [run_for(0, 3, 1)], -1)
    disk.capacity_bytes += 1000
    assert partition.append(1, [run_for(0, 3, 1)], -1) == 3
    assert not partition.status().is_full


def test_a_closed_replica_answers_nothing() -> None:
    _, directory, partition = begun(2)
    directory.close()
    with pytest.raises(NotOpened, match="is closed"):
        partition.append(3, [run_for(0, 2, 1)], -1)
    with pytest.raises(NotOpened, match="is closed"):
        partition.read(0, 1, 100, session=None)


def test_a_directory_that_went_away_is_noticed_where_the_next_segment_is_made() -> None:
    disk, directory, partition = begun(6)
    disk.rename(f"{ROOT}/0", f"{ROOT}/elsewhere")
    with pytest.raises(DirectoryGone):
        partition.append(3, [run_for(0, 6, 30)], -1)
    with pytest.raises(DirectoryGone):
        partition.open_session(4)
    with pytest.raises(DirectoryGone, match="partition 0 up to id"):
        directory.close()


def test_an_answer_to_the_owner_says_what_the_log_ends_with() -> None:
    """Of format 0; replicas that were cut into segments in another way say the same."""
    one, other = (begun(40, segment_bytes=size)[2] for size in (300, 1 << 20))
    said = one.open_session(4).tail
    assert said == other.open_session(4).tail == tail_hash([run_for(0, 40 - TAIL_RECORDS, TAIL_RECORDS)])
    one.append(4, [run_for(0, 40, 1)], -1)
    assert one.status().tail == "", "it is not known before somebody asks"
    assert one.set_low_mark(4, 40).tail not in ("", said)
    assert other.truncate(4, 38).tail == ""
    assert other.set_low_mark(4, 38).tail == tail_hash([run_for(0, 39 - TAIL_RECORDS, TAIL_RECORDS)])
    assert begun(0)[2].open_session(4).tail == ""
    few = begun(3)[2].open_session(4).tail
    assert few == tail_hash([run_for(0, 0, 3)])


def test_what_cannot_be_read_at_the_end_is_left_out_of_the_answer() -> None:
    disk, _, partition = begun(40, segment_bytes=1 << 20)
    path = f"{partition.directory}/{segment_name(0)}"
    disk.corrupt(path, disk.size(path) - 20, b"\xff")
    partition._tail = (-1, "")
    partition._look_at_tail()
    assert partition.status().tail == ""


@pytest.mark.parametrize(
    "call",
    [lambda partition, id_: partition.read_examined(id_, id_, 1000), lambda partition, id_: partition.truncate(5, id_)],
)
def test_a_bad_sector_that_a_call_meets_is_damage_and_can_be_healed(call: Callable[[Partition, int], object]) -> None:
    """A scrub may take a week to come there, or be off."""
    disk, _, partition = begun(24)
    first_id, _ = partition.sealed_segments()[1]
    partition = reopened(disk)
    partition.open_session(5)
    path = segment_path(0, first_id)
    disk.observer = lambda kind, where: disk.faults.update({disk.steps: Fault.IO_ERROR} if where == path else {})
    with pytest.raises(PartitionDamaged):
        call(partition, first_id)
    [finding] = partition.status().findings
    assert (finding.code, partition.status().damaged_segments) == (Code.UNREADABLE, (first_id,))


def test_a_segment_is_not_damaged_because_too_many_files_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """All replicas of a partition would be out at the same time, if the limit is low and their readers are many."""
    disk, _, partition = begun(24)
    first_id, last_id = partition.sealed_segments()[1]
    partition = reopened(disk)
    partition.open_session(5)

    def refuse(path: str, *, write: bool = False) -> File:
        raise translate(OSError(errno.EMFILE, "x"), f"opening {path}")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "open", refuse)
        with pytest.raises(TooManyFiles):
            partition.read_examined(first_id, last_id, 1000)
    assert partition.status().is_sound
    assert partition.read_examined(first_id, last_id, 1000).first_id == first_id


def test_a_sector_that_could_not_be_read_once_is_no_damage() -> None:
    disk, _, partition = begun(24)
    first_id, last_id = partition.sealed_segments()[1]
    disk.faults = {disk.steps + 1: Fault.IO_ERROR}
    assert len(partition.read_examined(first_id, last_id, 1000)) > 0
    assert partition.status().is_sound


def test_a_cut_that_stops_halfway_ends_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no file descriptor left (EMFILE), the directory could not be opened to be flushed. The replica went on to hold
    records in a segment without a name, and another owner could go on behind them."""
    disk, _, partition = begun(24)
    mark = partition.sealed_segments()[0][1]
    partition.open_session(5)

    def refuse(path: str) -> None:
        raise translate(OSError(errno.EMFILE, "x"), f"opening the directory {path}")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "flush_directory", refuse)
        with pytest.raises(FlushFailed, match="EMFILE"):
            partition.truncate(5, mark - 1)
    with pytest.raises(FlushFailed):
        partition.open_session(6)
    assert reopened(disk).truncate(5, mark - 1).last_id == mark - 1
