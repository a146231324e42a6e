"""A replica that is trimmed: what is below its floor goes for good, whatever interrupts it, and nothing else does."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.simulation.batch_log import BatchLog
from tests.simulation.sample import KEY, ROOT, expected, open_directory, records_of, run_for
from tests.unit.keeping import begun
from waltzd.disk.simulated import Loss, SimDisk, SimFile
from waltzd.errors import Trimmed
from waltzd.errors.operations import BadFrame, BelowFloor, NotOpened, ReadFailed, StaleSession, UnfitSegment, Unsafe
from waltzd.format.layout import HARD_STATE_NAME, HEADER_BYTES, aside_partition, segment_ids, segment_name
from waltzd.storage.replica.aside import set_segments_aside
from waltzd.storage.replica.partition import Partition

HOME = f"{ROOT}/0"
RECORDS = 24
SENT = expected(0, RECORDS)


def trimmed_to(partition: Partition, floor: int) -> None:
    partition.trim(partition.promised_session, floor)
    while partition.unlink_next():
        continue


def on_disk(disk: SimDisk) -> list[int]:
    return segment_ids(disk.names(HOME))


def kept(*, low_mark: int = RECORDS - 1) -> tuple[SimDisk, Partition]:
    """Of format 0, in a session that began at its end."""
    disk, _, partition = begun(RECORDS, committed=RECORDS - 1)
    partition.open_session(4)
    partition.set_low_mark(4, low_mark)
    return disk, partition


def batches(seed: int = 1) -> tuple[SimDisk, Partition, BatchLog]:
    log = BatchLog(random.Random(seed), segment_bytes_max=2500)
    log.batches = log.draw(30)
    disk, _, partition = begun()
    for batch in log.batches:
        partition.append(3, [batch], -1)
    partition.open_session(4)
    partition.set_low_mark(4, log.last_id)
    return disk, partition, log


def install(partition: Partition, first_id: int, content: bytes) -> None:
    installation = partition.begin_installation(partition.promised_session, first_id, len(content))
    try:
        installation.write(content)
        installation.prove()
        partition.install(partition.promised_session, installation)
    finally:
        installation.abandon()


def copies(disk: SimDisk, work: Callable[[], object]) -> list[SimDisk]:
    """The disk as it is in front of each operation of this work."""
    found: list[SimDisk] = []
    disk.observer = lambda kind, path: found.append(disk.clone(len(found)))
    work()
    disk.observer = None
    return [*found, disk.clone(len(found))]


def test_segments_below_the_floor_go_and_reads_of_them_say_where_they_are() -> None:
    disk, partition = kept()
    firsts = on_disk(disk)
    floor = firsts[3]
    trimmed_to(partition, floor + 1)  # within a segment: that one stays
    assert (partition.status().floor, on_disk(disk)) == (floor, firsts[3:])
    assert partition.status().is_sound
    assert [first for first, _ in partition.sealed_segments()] == firsts[3:-1]
    for id_ in (0, floor - 1):
        with pytest.raises(Trimmed, match=f"replicas have ids from {floor} on") as caught:
            partition.read(id_, RECORDS - 1, 1 << 20, session=4)
        assert caught.value.facts["floor"] == str(floor)
    with pytest.raises(Trimmed):
        partition.sealed_path(0)
    assert records_of(partition.read(floor, floor, 1, session=4)) == SENT[floor : floor + 1]
    partition.append(4, [run_for(0, RECORDS, 3)], RECORDS - 1)
    partition.examine(0)  # by a reader that came before
    for again in (floor, 0, firsts[1]):
        trimmed_to(partition, again)
        assert partition.status().floor == floor, "it never goes back"
    partition.open_session(5)
    with pytest.raises(BelowFloor):
        partition.truncate(5, floor - 2)


def test_a_reader_that_has_a_segment_open_reads_on() -> None:
    disk, partition = kept()
    file = disk.open(partition.sealed_path(0))
    whole = file.read(0, file.size())
    trimmed_to(partition, on_disk(disk)[2])
    assert file.read(0, file.size()) == whole


def test_a_reader_that_comes_in_the_middle_of_a_trim_is_told_where_the_ids_are() -> None:
    """It has looked at the list of segments already, and opens the one that goes in this moment."""
    disk, partition = kept()
    floor = on_disk(disk)[3]
    is_trimmed = False

    def trim(kind: str, path: str) -> None:
        nonlocal is_trimmed
        if not is_trimmed:
            is_trimmed = True
            trimmed_to(partition, floor)

    opened = disk.open

    def open_late(path: str, *, write: bool = False) -> object:
        trim("open", path)
        return opened(path, write=write)

    disk.open = open_late  # type: ignore[method-assign, assignment]
    with pytest.raises(Trimmed, match=f"ids from {floor} on"):
        partition.read(0, 3, 1 << 20, session=4)
    assert is_trimmed
    assert partition.status().is_sound


def test_only_the_owner_may_and_only_below_the_mark_of_its_session() -> None:
    disk, partition = kept()
    with pytest.raises(StaleSession):
        partition.trim(3, 5)
    with pytest.raises(NotOpened):
        partition.trim(5, 5)
    partition.append(4, [run_for(0, RECORDS, 30)], RECORDS + 29)
    with pytest.raises(Unsafe, match="above the low-water mark 23"):
        partition.trim(4, RECORDS + 1)
    assert partition.status().floor == 0
    assert on_disk(disk)[0] == 0


@pytest.mark.parametrize("loss", Loss)
def test_a_trim_that_any_crash_interrupts_is_finished_by_the_next_start(loss: Loss) -> None:
    disk, partition = kept()
    firsts = on_disk(disk)
    floor = firsts[4]
    floors: list[int] = []
    for copy in copies(disk, lambda: trimmed_to(partition, floor)):
        copy.power_cut(loss)
        again = open_directory(copy).partition(0)
        status = again.status()
        assert status.is_sound, status.findings
        assert status.floor == on_disk(copy)[0]
        assert status.floor in (0, floor)
        assert status.incarnation == partition.status().incarnation
        assert status.last_id == RECORDS - 1
        assert records_of(again.read_examined(floor, RECORDS - 1, 1)) == SENT[floor : floor + 1]
        assert set(range(floor, RECORDS)) <= set(range(status.floor, RECORDS))
        floors.append(status.floor)
        if status.floor:
            with pytest.raises(Trimmed):
                again.read_examined(0, 0, 1)
        again.open_session(9)
        trimmed_to(again, floor)
        assert on_disk(copy) == firsts[4:]
    assert floors == sorted(floors)
    assert set(floors) == {0, floor}


@pytest.mark.parametrize("seed", range(6))
def test_a_trimmed_log_of_batches_is_level_to_the_last_byte(seed: int) -> None:
    disk, partition, log = batches(seed)
    firsts = on_disk(disk)
    floor = firsts[len(firsts) // 2]
    trimmed_to(partition, floor)
    after(log, floor).check(partition)
    disk.kill()
    partition = open_directory(disk).partition(0)
    partition.open_session(5)
    partition.set_low_mark(5, log.last_id)
    new = log.draw(12)
    log.batches += new
    partition.append(5, new, -1)
    for first_id in on_disk(disk):
        partition.examine(first_id)
    assert partition.status().is_sound
    check_files(disk, log, floor)


class After(BatchLog):
    """What is left of a log from a floor on."""

    floor = 0

    def _check_reads(self, partition: Partition) -> None:
        run = partition.read(self.floor, self.last_id, 1 << 20, session=partition.promised_session)
        self._check_record(run, 0, with_locks=False)

    def _check_locks(self, partition: Partition) -> None:
        history = partition.read_locks(self.last_id, 1 << 20, session=partition.promised_session)
        assert history is not None
        assert history.first_id == self.floor

    def _check_times(self, partition: Partition) -> None:
        first, last = self.batches[0].head.time, self.batches[-1].head.time
        assert partition.find_time(last + 1, session=partition.promised_session) == self.last_id
        with pytest.raises(Trimmed):
            partition.find_time(first, session=partition.promised_session)


def after(log: BatchLog, floor: int) -> BatchLog:
    found = After(log.random, log.segment_bytes_max)
    found.batches = [batch for batch in log.batches if batch.first_id >= floor]
    found.floor = floor
    # The log in front counts for the end, which is that of its last segment alone.
    return found


def check_files(disk: SimDisk, log: BatchLog, floor: int) -> None:
    for name, raw in log.files(KEY).items():
        path = f"{HOME}/{name}"
        if int(name[:19]) >= floor:
            assert disk.open(path).read(0, disk.size(path)) == raw
        else:
            assert not disk.exists(path)


@pytest.mark.parametrize("held", [0, 3, 10])
@pytest.mark.parametrize("loss", Loss)
def test_a_replica_that_ends_below_the_floor_begins_anew_there(held: int, loss: Loss) -> None:
    """Whatever crash comes between: it is empty at the floor, or what it was, and never claims what it does not have."""
    disk, _, partition = begun(held, committed=held - 1)
    partition.open_session(4)
    floor = 15
    for copy in copies(disk, lambda: trimmed_to(partition, floor)):
        copy.power_cut(loss)
        again = open_directory(copy).partition(0)
        status = again.status()
        assert status.is_sound, status.findings
        assert (status.floor, status.last_id) in ((0, held - 1), (floor, floor - 1))
        again.open_session(5)
        again.trim(5, floor)
        again.set_low_mark(5, RECORDS - 1)
        again.append(5, [run_for(0, floor, RECORDS - floor)], RECORDS - 1)
        with pytest.raises(Trimmed):
            again.read(0, 0, 1, session=5)
        assert records_of(again.read(floor, RECORDS - 1, 1 << 20, session=5))[0] == SENT[floor]
        copy.power_cut(loss)
        last = open_directory(copy).partition(0)
        assert (last.status().floor, last.status().last_id, last.status().is_sound) == (floor, RECORDS - 1, True)


def test_batches_at_the_floor_come_as_a_file_with_its_footer() -> None:
    """The footer names that of the segment in front, which nobody here has any more."""
    _, _, log = batches()
    firsts = sorted(int(name[:19]) for name in log.files(KEY))
    floor = firsts[2]
    disk, _, partition = begun()
    partition.open_session(4)
    trimmed_to(partition, floor)
    partition.set_low_mark(4, log.last_id)
    behind = [batch for batch in log.batches if batch.first_id >= floor]
    with pytest.raises(BadFrame, match="comes as a file"):
        partition.append(4, behind[:1], -1)
    whole = log.files(KEY)[segment_name(floor)]
    own = [batch for batch in behind if batch.first_id < firsts[3]]
    bare = whole[:HEADER_BYTES] + b"".join(bytes(piece) for batch in own for piece in batch.pieces)
    with pytest.raises(UnfitSegment, match="has no footer"):
        install(partition, floor, bare)
    install(partition, floor, whole)
    partition.append(4, [batch for batch in behind if batch.first_id >= firsts[3]], log.last_id)
    check_files(disk, log, floor)
    disk.power_cut()
    again = open_directory(disk).partition(0)
    assert (again.status().is_sound, again.status().last_id, again.status().end) == (True, log.last_id, log.end)


def test_damage_below_the_floor_goes_with_it() -> None:
    disk, partition = kept()
    firsts = on_disk(disk)
    disk.corrupt(f"{HOME}/{segment_name(firsts[1])}", HEADER_BYTES + 9, b"XXXX")
    partition.examine(firsts[1])
    assert not partition.status().is_sound
    trimmed_to(partition, firsts[2])
    assert partition.status().is_sound


def test_a_segment_with_a_bad_sector_is_set_aside_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the archive is not proven to have is copied before it goes. A bad sector held up the trim for ever, and so the
    damage below the floor, which no other replica has any more."""
    disk, _, partition = begun(0, segment_bytes=20_000)
    partition.append(3, [run_for(0, 0, 60, size=1000)], 59)
    partition.open_session(4)
    partition.set_low_mark(4, 59)
    path, read = f"{HOME}/{segment_name(0)}", SimFile.read
    right = disk.open(path).read(0, 1 << 20)

    def fail(file: SimFile, offset: int, size: int) -> bytes:
        if file.path == path and offset < 9000 < offset + size:
            raise ReadFailed(f"{path} at {offset}")
        return read(file, offset, size)

    monkeypatch.setattr(SimFile, "read", fail)
    monkeypatch.setattr(SimFile, "read_into", lambda file, offset, buffer: into(file.read(offset, len(buffer)), buffer))
    partition.examine(0)
    assert partition.status().damaged_segments == (0,)
    floor = partition.sealed_segments()[1][0]
    for _ in range(2):  # a copy that is there is not made again
        set_segments_aside(partition._context, [0], "a test")
    partition.trim(4, floor, damaged=[0])
    assert partition.first_id == floor
    assert partition.status().is_sound
    [aside] = [name for name in disk.names(ROOT) if aside_partition(name) == 0]
    copy = disk.open(f"{ROOT}/{aside}/{segment_name(0)}").read(0, 1 << 20)
    assert copy == right[:8192] + bytes(4096) + right[12288:]


def into(piece: bytes, buffer: memoryview) -> int:
    buffer[: len(piece)] = piece
    return len(piece)


def test_a_log_that_begins_above_its_floor_is_damaged_until_the_floor_is_there() -> None:
    """The promise is from before the trim: it was put back, or the file system lost what was flushed."""
    disk, partition = kept()
    firsts = on_disk(disk)
    old = bytes(disk.content(f"{HOME}/{HARD_STATE_NAME}"))
    trimmed_to(partition, firsts[3])
    disk.kill()
    disk.content(f"{HOME}/{HARD_STATE_NAME}")[:] = old
    again = open_directory(disk).partition(0)
    assert again.status().damaged_segments == (0,)
    again.open_session(5)
    trimmed_to(again, firsts[3])
    assert again.status().is_sound
    assert again.status().floor == firsts[3]


def test_many_segments_leave_in_several_turns() -> None:
    disk, _, partition = begun(200, committed=199)
    partition.open_session(4)
    partition.set_low_mark(4, 199)
    count = len(on_disk(disk))
    assert count > 40
    partition.trim(4, on_disk(disk)[-2])
    left: list[int] = []
    while partition.unlink_next():
        left.append(len(on_disk(disk)))
    assert left == sorted(left, reverse=True)
    assert len(left) >= 2
    assert len(on_disk(disk)) == 2


def test_a_trim_while_files_are_left_of_the_one_before_removes_both() -> None:
    disk, partition = kept()
    firsts = on_disk(disk)
    partition.trim(4, firsts[1])
    partition.trim(4, firsts[3])
    while partition.unlink_next():
        continue
    assert on_disk(disk) == firsts[3:]
