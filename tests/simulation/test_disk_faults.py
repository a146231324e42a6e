"""Every operation on the disk fails once, in front of every step of one workload.

A failed flush ends the replica: nothing is acknowledged any more, and the next process serves what was acknowledged
before. A full disk refuses the append and nothing else: reads go on, a restart is possible, and writes resume by
themselves when there is room.
"""

from __future__ import annotations

import random
from contextlib import closing

import pytest

from tests.simulation.sample import (
    ROOT,
    begin,
    blank_disk,
    expected,
    open_directory,
    records_of,
    run_for,
    segment_path,
    served,
)
from waltzd.disk.simulated import Fault, Loss, SimDisk
from waltzd.errors import WaltzError
from waltzd.errors.operations import DiskFull, FlushFailed
from waltzd.format.finding import Code
from waltzd.format.layout import HEADER_BYTES, RESERVE_NAME
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition

SLICES = 6


class Workload:
    """One replica through everything that writes: create, sessions, appends over segments, checkpoint, cut, restart."""

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self.acked = -1
        """The highest id that was acknowledged and not cut since."""
        self.promised = -1
        self.is_created = False
        self.cut_to: int | None = None
        self.partition: Partition | None = None
        self.directory: Directory | None = None

    def start(self) -> None:
        self.directory = open_directory(self.disk, reserve_bytes=500)
        if self.is_created:
            self.partition = self.directory.partition(0)

    def create(self) -> None:
        assert self.directory is not None
        self.partition = self.directory.create_partition(0)
        self.is_created = True

    def session(self, session: int) -> None:
        assert self.partition is not None
        self.partition.open_session(session)
        self.promised = session

    def mark(self) -> None:
        assert self.partition is not None
        self.partition.set_low_mark(self.promised, self.partition.last_id)

    def append(self, count: int) -> None:
        assert self.partition is not None
        self.acked = self.partition.append(self.promised, [run_for(0, self.partition.last_id + 1, count)], 4)

    def cut(self, mark: int) -> None:
        assert self.partition is not None
        self.cut_to = mark
        self.partition.truncate(self.promised, mark)
        self.acked, self.cut_to = mark, None

    def restart(self) -> None:
        assert self.directory is not None
        self.directory.close()
        self.start()

    def run(self) -> None:
        self.start()
        self.create()
        self.session(1)
        self.mark()
        for count in (2, 1, 9, 3):
            self.append(count)
        assert self.partition is not None
        self.partition.checkpoint()
        self.append(2)
        self.session(2)
        self.cut(5)
        self.mark()
        self.append(4)
        self.restart()
        self.session(3)
        self.mark()
        self.append(5)

    @property
    def least(self) -> int:
        return self.acked if self.cut_to is None else min(self.acked, self.cut_to)


SENT = expected(0, 40)


def steps_of_workload() -> int:
    disk = blank_disk()
    Workload(disk).run()
    return disk.steps


STEPS = steps_of_workload()


def steps(part: int) -> range:
    return range(part + 1, STEPS + 1, SLICES)


def check_served(partition: Partition, least: int) -> None:
    status = partition.status()
    assert not status.findings, status.findings[0].sentence()
    assert status.last_id >= least
    assert served(partition, SENT) == set(range(status.last_id + 1))


def fail_at(step: int, fault: Fault) -> tuple[Workload, WaltzError | None]:
    disk = blank_disk(seed=step)
    work = Workload(disk)
    disk.faults = {disk.steps + step: fault}
    try:
        work.run()
    except WaltzError as error:
        disk.faults = {}
        return work, error
    disk.faults = {}
    return work, None


def test_the_workload_visits_all_kinds_of_operations() -> None:
    disk = blank_disk()
    kinds: set[str] = set()
    disk.observer = lambda kind, path: kinds.add(kind)
    Workload(disk).run()
    assert kinds >= {
        "read",
        "write",
        "flush",
        "truncate",
        "create",
        "rename",
        "remove",
        "flush_directory",
        "make_directory",
    }


@pytest.mark.parametrize("part", range(SLICES))
def test_after_a_failed_flush_nothing_is_acknowledged_and_nothing_is_lost(part: int) -> None:
    for step in steps(part):
        work, error = fail_at(step, Fault.IO_ERROR)
        if isinstance(error, FlushFailed) and work.partition is not None and work.partition._failed is error:
            assert error.facts["last_durable_id"] == str(work.partition.last_id)
            refuses_everything(work.partition, work.promised)
        work.disk.kill()
        directory = open_directory(work.disk, reserve_bytes=500)
        if not work.is_created:
            continue
        partition = directory.partition(0)
        # What the replica vouches for now must be on the platter; the failed flush may have left anything in the cache.
        assert partition.open_session(partition.promised_session + 1).is_sound
        vouched = partition.last_id
        check_served(partition, work.least)
        work.disk.power_cut(Loss.SCATTERED)
        again = open_directory(work.disk, reserve_bytes=500).partition(0)
        check_served(again, vouched)
        assert again.promised_session > work.promised


def refuses_everything(partition: Partition, session: int) -> None:
    run = run_for(0, partition.last_id + 1, 1)
    for call in (
        lambda: partition.append(session, [run], -1),
        lambda: partition.open_session(session + 1),
        lambda: partition.set_low_mark(session, partition.last_id),
        lambda: partition.truncate(session, partition.last_id - 1),
        lambda: partition.read(0, 0, 1000, session=None),
        lambda: partition.read_examined(0, 0, 1000),
    ):
        with pytest.raises(FlushFailed):
            call()
    partition.checkpoint()
    assert "stopped" in partition.describe()


def test_without_writing_again_a_failed_flush_would_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is needed, and the test above would notice: the cache shows records that the disk never got."""
    monkeypatch.setattr("waltzd.storage.replica.segment.Segment.write_again", lambda self, offset: None)
    lost = 0
    for step in range(1, STEPS + 1):
        work, error = fail_at(step, Fault.IO_ERROR)
        if not isinstance(error, FlushFailed) or work.acked < 0:
            continue
        work.disk.kill()
        partition = open_directory(work.disk).partition(0)
        partition.open_session(partition.promised_session + 1)
        vouched = partition.last_id
        work.disk.power_cut()
        lost += open_directory(work.disk).partition(0).last_id < vouched
    assert lost > 0


@pytest.mark.parametrize("part", range(SLICES))
def test_a_full_disk_refuses_the_write_and_nothing_else(part: int) -> None:
    for step in steps(part):
        work, error = fail_at(step, Fault.NO_SPACE)
        assert error is None or isinstance(error, DiskFull)
        if not work.is_created:
            if work.directory is not None:
                work.create()  # there is room again: the same process goes on
                work.session(1)
                work.append(3)
            continue
        partition = work.partition
        assert partition is not None
        if error is not None and "closed" not in partition.describe():
            assert served(partition, SENT) >= set(range(work.least + 1)), f"step {step}: reads stopped on a full disk"
            session = partition.promised_session + 1
            partition.open_session(session)
            first_id = partition.last_id + 1
            assert partition.append(session, [run_for(0, first_id, 3)], -1) == first_id + 2, "writes did not resume"
            work.acked, work.cut_to = max(work.least, first_id + 2), None
            assert not partition.status().is_full
        copy = work.disk.clone(step)
        work.disk.kill()
        check_served(open_directory(work.disk).partition(0), work.least)
        copy.power_cut(Loss.SCATTERED)
        check_served(open_directory(copy).partition(0), work.least)


def test_without_taking_back_a_full_disk_would_leave_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waltzd.storage.replica.segment.Segment.take_back", lambda self: None)
    left = 0
    for step in range(1, STEPS + 1):
        work, error = fail_at(step, Fault.NO_SPACE)
        active = work.partition._segments.active if work.partition is not None else None
        if isinstance(error, DiskFull) and active is not None:
            left += active.data.size() != active.end
    assert left > 0


@pytest.mark.parametrize("records", [1, 7])
def test_the_first_append_after_a_restart_meets_a_full_disk(records: int) -> None:
    disk = blank_disk()
    work = Workload(disk)
    work.start()
    work.create()
    work.session(1)
    work.append(5)
    disk.kill()
    work.start()
    assert work.partition is not None
    disk.capacity_bytes = disk.capacity_bytes - disk.room() + 30
    with pytest.raises(DiskFull):
        work.append(records)
    assert served(work.partition, SENT) == set(range(5))
    disk.capacity_bytes += 1 << 20
    work.append(records)
    disk.power_cut()
    check_served(open_directory(disk).partition(0), 4 + records)


def fill(work: Workload) -> DiskFull:
    """Append until the disk is full."""
    while True:
        try:
            work.append(3)
        except DiskFull as error:
            return error


@pytest.mark.parametrize("seed", range(6))
def test_a_disk_that_fills_up_and_is_enlarged(seed: int) -> None:
    """It starts, serves and refuses while it is full, also after a restart, and goes on without one."""
    chance = random.Random(seed)
    disk = blank_disk(seed, capacity_bytes=1 << 30)
    work = Workload(disk)
    work.start()
    work.create()
    work.session(1)
    work.mark()
    disk.capacity_bytes = disk.capacity_bytes - disk.room() + chance.randrange(300, 3000)
    refusal = fill(work)
    assert work.partition is not None
    assert refusal.facts["durable_id"] == str(work.partition.last_id)
    assert work.partition.status().is_full
    assert work.partition.last_id >= work.acked
    check_served(work.partition, work.acked)
    work.session(2)
    if chance.random() < 0.5:
        disk.kill()
        work.start()
        assert disk.exists(f"{ROOT}/{RESERVE_NAME}") or disk.room() <= 500 + 300
        check_served(work.partition, work.acked)
    fill(work)
    held = work.partition.last_id
    disk.capacity_bytes += 1 << 20
    work.append(3)
    assert work.acked == held + 3
    assert not work.partition.status().is_full
    disk.power_cut()
    check_served(open_directory(disk).partition(0), work.acked)


def test_a_start_on_a_disk_without_a_free_byte_uses_the_reserve() -> None:
    disk = blank_disk()
    directory = open_directory(disk, reserve_bytes=2000)
    partition = directory.create_partition(0)
    partition.open_session(1)
    partition.append(1, [run_for(0, 0, 4)], -1)
    disk.remove(segment_path(0, 0).replace(".seg", ".idx"))
    disk.capacity_bytes -= disk.room()
    disk.kill()
    said: list[str] = []
    directory = open_directory(disk, reserve_bytes=2000, said=said)
    check_served(directory.partition(0), 3)
    assert any("was given up so that this storage can start" in sentence for sentence in said)
    assert not directory.keep_reserve()
    disk.capacity_bytes += 1 << 20
    assert directory.keep_reserve()
    assert disk.size(f"{ROOT}/{RESERVE_NAME}") == 2000


def test_an_index_that_cannot_be_made_again_on_a_full_disk_leaves_nothing_behind() -> None:
    disk = blank_disk()
    work = Workload(disk)
    work.start()
    work.create()
    work.session(1)
    work.append(30)
    assert work.partition is not None
    disk.corrupt(segment_path(0, 0).replace(".seg", ".idx"), 128, bytes(8))
    room = disk.room()
    disk.capacity_bytes -= room - 150
    with pytest.raises(DiskFull):
        work.partition.read_examined(0, 0, 1000)
    assert not [entry for entry in disk.list(f"{ROOT}/0") if entry.name.endswith(".new")]
    disk.capacity_bytes += room
    assert records_of(work.partition.read_examined(0, 0, 1000)) == SENT[:1]


@pytest.mark.parametrize("seed", range(4))
def test_a_log_that_is_short_is_written_again_before_it_is_acknowledged(seed: int) -> None:
    """A replica that has lost its end takes it from the owner again. When the flush of that fails, the cache shows to the
    next process what the disk never got."""
    disk = blank_disk(seed)
    directory = open_directory(disk, segment_bytes=1 << 20)
    partition = begin(directory, 0, records=10)
    directory.close()
    with closing(disk.open(segment_path(0, 0), write=True)) as file:
        file.truncate(HEADER_BYTES + len(run_for(0, 0, 6).data))
        file.flush()
    partition = open_directory(disk, segment_bytes=1 << 20).partition(0)
    partition.open_session(2)
    disk.observer = lambda kind, path: disk.faults.update({disk.steps: Fault.IO_ERROR} if kind == "flush" else {})
    with pytest.raises(FlushFailed):
        partition.append(2, [run_for(0, 6, 2)], -1)
    disk.observer, disk.faults = None, {}
    disk.kill()
    partition = open_directory(disk, segment_bytes=1 << 20).partition(0)
    assert partition.open_session(3).findings[0].code is Code.SHORT_LOG
    acknowledged = partition.append(3, [run_for(0, 6, 2)], -1)
    disk.power_cut()
    assert open_directory(disk, segment_bytes=1 << 20).partition(0).last_id == acknowledged == 7
