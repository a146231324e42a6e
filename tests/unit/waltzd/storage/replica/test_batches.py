"""One replica of format 1, against a list of batches."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.simulation.batch_log import BatchLog
from tests.simulation.sample import KEY, ROOT, expected, first_ids, open_directory, run_for, served
from tests.tiers import tiers
from tests.unit.keeping import begun
from waltzd.disk.simulated import Fault, Loss, SimDisk
from waltzd.errors import WaltzError
from waltzd.errors.operations import BadFrame, BelowFloor, DiskFull, Diverged, NotNextId, PartitionDamaged
from waltzd.format.batch import HEAD_BYTES, Batch, End, Piece, encode_batch
from waltzd.format.finding import Code
from waltzd.format.footer import read_footer
from waltzd.format.layout import HEADER_BYTES
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.segment import BatchSegment

HOME = f"{ROOT}/0"


class Story:
    """A replica and its model, through appends, cuts, restarts and power cuts."""

    def __init__(self, seed: int) -> None:
        pick = self.random = random.Random(seed)
        self.disk, self.directory, self.partition = begun(seed=seed)
        self.log = BatchLog(pick, segment_bytes_max=pick.choice([300, 2000, 8000]))
        if pick.random() < 0.3:
            self.log.first = [run_for(0, 0, pick.randrange(1, 9))]
            self.partition.append(3, self.log.first, -1)

    def step(self) -> None:
        choice = self.random.random()
        if choice < 0.6:
            self.append()
        elif choice < 0.75:
            self.cut()
        elif choice < 0.8:
            self.partition.checkpoint()
        else:
            self.restart()

    def append(self) -> None:
        """Some of what is here may be sent once more."""
        again = self.log.batches[-self.random.randrange(1, 4) :] if self.random.random() < 0.3 else []
        new = self.log.draw(self.random.randrange(0 if again else 1, 4))
        twice: list[Batch] = new[-1:] if self.random.random() < 0.1 else []
        self.log.batches += new
        assert self.partition.append(self.partition.promised_session, [*again, *new, *twice], -1) == self.log.last_id

    def cut(self) -> None:
        session = self.partition.promised_session + 1
        self.partition.open_session(session)
        mark = self.random.randrange(-1, self.log.last_id + 1)
        right = self.log.lands_on(mark)
        assert self.partition.truncate(session, mark).last_id == right
        self.log.cut(right)

    def restart(self) -> None:
        how = self.random.randrange(4)
        if how == 0:
            self.directory.close()
        elif how == 1:
            self.disk.kill()
        else:
            self.disk.power_cut(Loss.ORDERED if how == 2 else Loss.SCATTERED)
        self.directory = open_directory(self.disk)
        self.partition = self.directory.partition(0)

    def check(self) -> None:
        self.log.check(self.partition)
        self.log.check_files(self.disk, HOME, KEY)


@pytest.mark.parametrize("seed", tiers(range(60), quick=4, short=20))
def test_a_replica_is_a_list_of_batches(seed: int) -> None:
    story = Story(seed)
    for _ in range(25):
        story.step()
        story.check()


# -- what is taken -----------------------------------------------------------------------------------------------------


def grown(count: int = 12, *, seed: int = 5, segment_bytes_max: int = 2000) -> tuple[SimDisk, Partition, BatchLog]:
    """A replica with some full segments of batches, and one that is written on."""
    disk, _, partition = begun(seed=seed)
    log = BatchLog(random.Random(seed), segment_bytes_max=segment_bytes_max)
    log.batches = log.draw(count)
    while log.end is None or log.end.segment_bytes == 0:
        log.batches += log.draw(1)
    partition.append(3, log.batches, -1)
    return disk, partition, log


def remade(batch: Batch, **fields: int) -> Batch:
    """With other fields in a head that is sound."""
    head = batch.head._replace(**fields)
    raw = head.encode()
    preamble = raw + bytes(batch.preamble[HEAD_BYTES:])
    return Batch(head._replace(crc=int.from_bytes(raw[-4:], "big")), preamble, batch.data, batch.bounds)


def test_batches_that_do_not_go_on_with_the_log_are_refused_and_nothing_is_written() -> None:
    disk, partition, log = grown()
    here = contents(disk)
    [new] = log.draw(1)
    other = BatchLog(random.Random(99), segment_bytes_max=2000)
    other.batches = other.draw(3)
    first = other.batches[0]
    part = encode_batch(
        log.batches[3].run.part(0, 1), session=1, generation=0, committed=-1, time=0, before=End(), segment_bytes_max=2000
    )
    cases: list[tuple[Sequence[Piece], type[WaltzError]]] = [
        (log.draw(2)[1:], NotNextId),
        ([remade(new, before=new.head.before ^ 1)], Diverged),
        ([remade(new, time=new.head.time - 10_000_000)], BadFrame),
        ([first], Diverged),
        ([part], Diverged),
        ([remade(log.batches[3], committed=7)], Diverged),
        ([run_for(0, log.last_id + 1, 1)], BadFrame),
        ([new, log.batches[0].run], BadFrame),
        ([new, remade(log.draw(1, behind=[new])[0], before=1)], Diverged),
    ]
    for batches, error in cases:
        with pytest.raises(error):
            partition.append(3, batches, -1)
        assert contents(disk) == here
    log.check(partition)


def test_the_newest_batch_is_compared_without_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    _, partition, log = grown(1, segment_bytes_max=1 << 20)
    newest = log.batches[-1]
    with monkeypatch.context() as patch:
        patch.setattr(BatchSegment, "_batches", None)
        assert partition.append(3, [newest], -1) == log.last_id
        with pytest.raises(Diverged):
            partition.append(3, [remade(newest, committed=7)], -1)
    partition.open_session(4)
    partition.truncate(4, -1)
    log.cut(-1)
    log.batches = [remade(newest, committed=7)]
    assert partition.append(4, log.batches, -1) == log.last_id
    with pytest.raises(Diverged):
        partition.append(4, [newest], -1)
    log.check(partition)


def contents(disk: SimDisk) -> dict[str, bytes]:
    paths = (f"{HOME}/{entry.name}" for entry in disk.list(HOME) if entry.name.endswith(".seg"))
    return {path: disk.open(path).read(0, disk.size(path)) for path in paths}


def test_a_frame_without_batches_tells_what_is_committed() -> None:
    _, partition, log = grown()
    mark = log.batches[4].last_id
    assert partition.append(3, [], mark) == log.last_id
    assert partition.committed == mark
    partition.open_session(4)
    with pytest.raises(BelowFloor):
        partition.truncate(4, mark - 1)
    assert partition.truncate(4, mark).last_id == mark


def test_a_cut_inside_of_the_batch_that_is_committed_in_part_is_refused() -> None:
    """No owner asks for that: a committed mark is the end of a batch. Whoever does gets nothing cut."""
    disk, partition, log = grown()
    inside = next(batch for batch in log.batches if len(batch) > 2 and batch.first_id > 0)
    partition.append(3, [], inside.first_id)
    partition.open_session(4)
    here = contents(disk)
    with pytest.raises(BelowFloor):
        partition.truncate(4, inside.first_id + 1)
    assert contents(disk) == here


# -- footers -----------------------------------------------------------------------------------------------------------


def full_segment(seed: int = 5) -> tuple[SimDisk, Partition, BatchLog]:
    """A replica whose last segment is full, and has its footer."""
    disk, _, partition = begun(seed=seed)
    log = BatchLog(random.Random(seed), segment_bytes_max=2000)
    while log.end is None or log.end.segment_bytes or len(log.files(KEY)) < 2:
        log.batches += log.draw(1)
    partition.append(3, log.batches, -1)
    log.check_files(disk, HOME, KEY)
    return disk, partition, log


def footer_place(log: BatchLog) -> tuple[str, int, int]:
    """Of the last segment: its path, where the footer begins, and where it ends."""
    name, raw = list(log.files(KEY).items())[-1]
    own = [batch for batch in log.batches if batch.first_id >= int(name[:-4])]
    begin = HEADER_BYTES + sum(batch.size for batch in own)
    return f"{HOME}/{name}", begin, len(raw)


def test_a_footer_goes_to_the_disk_behind_its_data() -> None:
    disk, _, partition = begun()
    log = BatchLog(random.Random(5), segment_bytes_max=300)
    log.batches = log.draw(3)
    while log.end is None or log.end.segment_bytes:
        log.batches += log.draw(1)
    seen: list[tuple[str, str]] = []
    disk.observer = lambda kind, path: seen.append((kind, path)) if path.endswith(".seg") and kind != "read" else None
    partition.append(3, log.batches, -1)
    for name in log.files(KEY):
        kinds = [kind for kind, path in seen if path == f"{HOME}/{name}"]
        assert kinds[-4:] == ["write", "flush", "write", "flush"], kinds  # the last batch, then the footer


def test_a_cut_takes_the_footer_along() -> None:
    disk, partition, log = full_segment()
    partition.open_session(4)
    partition.truncate(4, log.last_id - 1)
    log.cut(log.batches[-2].last_id)
    log.check(partition)
    log.check_files(disk, HOME, KEY)
    log.batches += log.draw(4)
    partition.append(4, log.batches[-4:], -1)
    log.check_files(disk, HOME, KEY)


@pytest.mark.parametrize("kept", [0, 1, 50, 119, 140])
def test_a_footer_that_a_crash_left_out_or_unfinished_is_made_at_the_next_start(kept: int) -> None:
    disk, _, log = full_segment()
    path, begin, end = footer_place(log)
    assert begin + kept < end
    disk.kill()
    disk.open(path, write=True).truncate(begin + kept)
    again = open_directory(disk).partition(0)
    log.check(again)
    log.check_files(disk, HOME, KEY)
    new = log.draw(2)
    log.batches += new
    assert again.append(again.promised_session, new, -1) == log.last_id
    disk.power_cut()
    log.check_files(disk, HOME, KEY)


@pytest.mark.parametrize("at", [0, 40, 60, 90, 121, -1])
def test_a_damaged_footer_is_made_again_wherever_it_stands(at: int) -> None:
    for is_last in (True, False):
        disk, partition, log = full_segment()
        path, begin, end = footer_place(log)
        if not is_last:
            log.batches += log.draw(1)
            partition.append(3, log.batches[-1:], -1)
        disk.kill()
        place = begin + at if at >= 0 else end + at
        disk.corrupt(path, place, bytes([disk.open(path).read(place, 1)[0] ^ 4]))
        again = open_directory(disk).partition(0)
        again.examine(int(path.rpartition("/")[2][:-4]))
        log.check(again)
        log.check_files(disk, HOME, KEY)


def test_a_sound_footer_of_other_batches_is_damage() -> None:
    disk, partition, log = full_segment()
    path, begin, _ = footer_place(log)
    footer = read_footer(disk.open(path))
    assert footer is not None
    partition.append(3, log.draw(1), -1)
    disk.kill()
    disk.corrupt(path, begin, replace(footer, before=b"x" * 32).encode())
    again = open_directory(disk).partition(0)
    again.open_session(4)
    assert [finding.code for finding in again.status().findings] == [Code.WRONG_FOOTER]
    with pytest.raises(PartitionDamaged):
        again.append(4, log.draw(1), -1)


@pytest.mark.slow
def test_a_full_disk_keeps_whole_batches_and_the_footer_comes_when_there_is_room() -> None:
    """At each operation of an append that fills three segments."""
    log = BatchLog(random.Random(8), segment_bytes_max=600)
    log.batches = log.draw(5)
    reached: set[int] = set()
    for number in range(1, 60):
        disk, _, partition = begun()
        disk.faults = {disk.steps + number: Fault.NO_SPACE}
        with contextlib.suppress(DiskFull):
            partition.append(3, log.batches, -1)
        disk.faults = {}
        reached.add(partition.last_id)
        assert partition.last_id in log.marks()
        here = replace(log, batches=[batch for batch in log.batches if batch.last_id <= partition.last_id])
        here.check(partition)
        assert partition.append(3, log.batches, -1) == log.last_id
        log.check(partition)
        log.check_files(disk, HOME, KEY)
        disk.power_cut()
        log.check(open_directory(disk).partition(0))
    assert len(reached) > 3


def test_a_segment_that_another_process_began_gets_the_same_footer() -> None:
    disk, _, partition = begun()
    log = BatchLog(random.Random(3), segment_bytes_max=5000)
    while len(log.files(KEY)) < 3:
        log.batches += log.draw(1)
        partition.append(3, log.batches[-1:], -1)
        disk.kill()
        partition = open_directory(disk).partition(0)
        partition.open_session(3)
    log.check_files(disk, HOME, KEY)


# -- from format 0 to 1 ------------------------------------------------------------------------------------------------


def test_batches_begin_a_segment_behind_records_of_format_0() -> None:
    disk, _, partition = begun(7)
    log = BatchLog(random.Random(1), first=[run_for(0, 0, 7)])
    assert partition.status().end is None
    log.batches = log.draw(3)
    partition.append(3, log.batches, -1)
    log.check(partition)
    assert log.batches[0].head.before == 0
    assert log.batches[0].first_id in first_ids(disk)
    log.check_files(disk, HOME, KEY)
    partition.open_session(4)
    partition.truncate(4, 6)
    log.cut(6)
    log.check(partition)  # the log ends with records of format 0 again
    assert partition.append(4, [run_for(0, 7, 2)], -1) == 8
    disk.power_cut()
    assert served(open_directory(disk).partition(0), expected(0, 9)) == set(range(9))


def test_a_copy_may_bring_both_formats_at_once() -> None:
    disk, _, partition = begun(4)
    log = BatchLog(random.Random(1), first=[run_for(0, 0, 9)])
    log.batches = log.draw(3)
    partition.append(3, [run_for(0, 2, 7), *log.batches], -1)
    log.check(partition)
    log.check_files(disk, HOME, KEY)
