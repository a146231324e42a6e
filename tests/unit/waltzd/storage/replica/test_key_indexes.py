"""Key indexes beside the segments of a replica: used where they are sound, made again where they are not, gone with their
segments."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.batches import WRITE, LockRows, batches_of, segment_raw, segments_of
from tests.simulation.batch_log import BatchLog
from tests.simulation.sample import KEY, ROOT
from tests.unit.keeping import begun
from tests.unit.waltzd.storage.replica.test_batch_healing import install
from waltzd.disk.simulated import Fault, SimDisk
from waltzd.errors import BadArgument, BeyondLog, Trimmed
from waltzd.errors.operations import PartitionDamaged, StaleSession
from waltzd.format.batch import Batch
from waltzd.format.key_index import HEADER_BYTES, LockQuery
from waltzd.format.layout import HEADER_BYTES as SEGMENT_HEADER_BYTES
from waltzd.format.layout import key_index_name, segment_name
from waltzd.storage.offline.reindex import IndexTask, write_key_index
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.segment import Suspect

HOME = f"{ROOT}/0"


def written(seed: int = 1) -> tuple[SimDisk, Partition, BatchLog]:
    log = BatchLog(random.Random(seed), segment_bytes_max=2500)
    log.batches = log.draw(40)
    disk, _, partition = begun()
    for batch in log.batches:
        partition.append(3, [batch], -1)
    return disk, partition, log


def indexed(partition: Partition) -> list[int]:
    found = partition.missing_keys()
    for first_id in found:
        partition.write_key(first_id)
    assert partition.missing_keys() == []
    assert len(found) > 3
    return found


def path(first_id: int) -> str:
    return f"{HOME}/{key_index_name(first_id)}"


def queries(log: BatchLog) -> list[LockQuery]:
    locks = sorted({lock for batch in log.batches for lock in batch.locks.ids.tolist()})
    return [
        LockQuery(lock=lock, last_id=log.last_id, limit=1000, newest_first=newest_first)
        for lock in [*locks[:: max(1, len(locks) // 8)], 99]
        for newest_first in (False, True)
    ]


def answers(partition: Partition, log: BatchLog) -> None:
    for query in queries(log):
        found, rest = list[int](), query
        while not rest.is_done:
            part = partition.find_marks(rest, session=partition.promised_session)
            found, rest = found + list(part.ids), rest.after(part)
        assert found == log.marked(query)


@pytest.mark.parametrize("seed", range(6))
def test_marks_are_found_with_and_without_indexes(seed: int) -> None:
    _, partition, log = written(seed)
    answers(partition, log)
    missed = partition.unwritten_keys()
    assert missed == partition.missing_keys()
    indexed(partition)
    assert partition.unwritten_keys() == []
    answers(partition, log)
    assert partition.unwritten_keys() == [], "every sealed segment was answered by its index"


def harm_missing(disk: SimDisk, first_ids: list[int]) -> None:
    disk.remove(path(first_ids[1]))


def harm_empty(disk: SimDisk, first_ids: list[int]) -> None:
    disk.create(path(first_ids[1])).close()


def harm_header(disk: SimDisk, first_ids: list[int]) -> None:
    disk.corrupt(path(first_ids[1]), 50, b"\xff")


def harm_fence(disk: SimDisk, first_ids: list[int]) -> None:
    disk.corrupt(path(first_ids[1]), HEADER_BYTES, b"\xff")


def harm_pages(disk: SimDisk, first_ids: list[int]) -> None:
    size = disk.size(path(first_ids[1]))
    for at in range(HEADER_BYTES + 8, size, 64):
        disk.corrupt(path(first_ids[1]), at, b"\x5a")


def harm_swapped(disk: SimDisk, first_ids: list[int]) -> None:
    other = disk.open(path(first_ids[0])).read(0, 1 << 20)
    with_file = disk.create(path(first_ids[1]))
    with_file.write(0, other)
    with_file.close()


@pytest.mark.parametrize("harm", [harm_missing, harm_empty, harm_header, harm_fence, harm_pages, harm_swapped])
@pytest.mark.parametrize("is_known", [False, True])
def test_an_index_that_is_lost_or_wrong_is_made_again(harm: Callable[[SimDisk, list[int]], None], is_known: bool) -> None:
    disk, partition, log = written()
    first_ids = indexed(partition)
    right = disk.open(path(first_ids[1])).read(0, 1 << 20)
    if is_known:
        answers(partition, log)
    harm(disk, first_ids)
    answers(partition, log)
    if not is_known or harm in (harm_missing, harm_pages):  # else the sound part in memory was enough
        assert partition.unwritten_keys() == [first_ids[1]]
        partition.write_key(first_ids[1])
        assert disk.open(path(first_ids[1])).read(0, 1 << 20) == right
        answers(partition, log)
        assert partition.unwritten_keys() == []


@pytest.mark.parametrize("is_known", [False, True])
def test_an_index_with_a_bad_sector_is_made_again(is_known: bool) -> None:
    disk, partition, log = written()
    first_ids = indexed(partition)
    if is_known:
        answers(partition, log)

    def fail(kind: str, where: str) -> None:
        if kind == "read" and where == path(first_ids[1]):
            disk.faults[disk.steps] = Fault.IO_ERROR

    disk.observer = fail
    answers(partition, log)
    assert partition.unwritten_keys() == [first_ids[1]]
    disk.observer = None  # another file has other sectors
    partition.write_key(first_ids[1])
    answers(partition, log)
    assert partition.unwritten_keys() == []


def test_an_index_of_the_log_before_a_cut_is_not_believed() -> None:
    disk, partition, log = written()
    first_ids = indexed(partition)
    answers(partition, log)
    old = disk.open(path(first_ids[2])).read(0, 1 << 20)
    session = partition.open_session(4).promised_session
    partition.truncate(session, first_ids[2] - 1)
    assert not disk.exists(path(first_ids[3]))
    log.batches = [batch for batch in log.batches if batch.last_id < first_ids[2]]
    partition.set_low_mark(session, log.last_id)
    for batch in log.draw(30):
        log.batches.append(batch)
        partition.append(session, [batch], -1)
    file = disk.create(path(first_ids[2]))
    file.write(0, old)
    file.close()
    answers(partition, log)
    assert first_ids[2] in partition.unwritten_keys()


def test_marks_of_a_segment_that_was_replaced_are_forgotten() -> None:
    """What a replica holds above the last decided id may be of a history that was given up. Where it is damaged, the file
    of another replica takes its place, without a cut."""

    def history(*locks: int) -> list[Batch]:
        rows: list[LockRows | None] = [[[(lock, WRITE)], []] for lock in locks]
        return batches_of([[b"one", b"two"]] * len(locks), locks=rows, cuts=[4])

    disk, _, partition = begun()
    partition.append(3, history(5, 6, 7, 8), 1)
    query = LockQuery(lock=7, last_id=7, limit=9)
    assert partition.find_marks(query, session=3).ids == (4,)
    disk.corrupt(f"{HOME}/{segment_name(0)}", SEGMENT_HEADER_BYTES + 100, b"\xff")
    partition.examine(0)
    partition.open_session(4)
    [own] = segments_of(history(5, 6, 8, 7, 9))
    install(partition, 0, segment_raw(own, key=KEY)[0])
    partition.set_low_mark(4, 9)
    assert partition.find_marks(query, session=4).ids == (6,)


def test_an_index_goes_with_its_segment() -> None:
    disk, partition, log = written()
    first_ids = indexed(partition)
    partition.open_session(4)
    partition.set_low_mark(4, log.last_id)
    partition.trim(4, first_ids[2])
    while partition.unlink_next():
        continue
    assert [first_id for first_id in first_ids if disk.exists(path(first_id))] == first_ids[2:]
    partition.write_key(first_ids[0])
    assert not disk.exists(path(first_ids[0]))
    session = partition.promised_session
    with pytest.raises(Trimmed):
        partition.find_marks(LockQuery(lock=1, last_id=log.last_id, limit=9), session=session)
    part = partition.find_marks(LockQuery(lock=99, last_id=log.last_id, limit=9, newest_first=True), session=session)
    assert (part.ids, part.through) == ((), first_ids[2])


def test_a_damaged_segment_gives_no_answer() -> None:
    disk, partition, log = written()
    first_id = partition.sealed_segments()[1][0]
    disk.corrupt(f"{HOME}/{segment_name(first_id)}", SEGMENT_HEADER_BYTES + 20, b"\xff\xff\xff")
    query = LockQuery(lock=1, first_id=first_id, last_id=log.last_id, limit=9)
    with pytest.raises(Suspect):
        partition.find_marks(query, session=3)
    partition.examine(first_id)
    with pytest.raises(PartitionDamaged):
        partition.find_marks(query, session=3)
    partition.write_key(first_id)
    assert not disk.exists(path(first_id))
    back = partition.find_marks(LockQuery(lock=1, last_id=log.last_id, limit=1000, newest_first=True), session=3)
    assert back.through > first_id


def test_a_question_is_checked() -> None:
    _, partition, log = written()
    for wrong in (LockQuery(lock=1, first_id=5, last_id=4, limit=1), LockQuery(lock=1, last_id=5, limit=0)):
        with pytest.raises(BadArgument):
            partition.find_marks(wrong, session=3)
    with pytest.raises(BeyondLog):
        partition.find_marks(LockQuery(lock=1, last_id=log.last_id + 1, limit=1), session=3)
    with pytest.raises(StaleSession):
        partition.find_marks(LockQuery(lock=1, last_id=1, limit=1), session=2)


def test_a_full_disk_only_costs_the_index() -> None:
    disk, partition, log = written()
    first_ids = partition.missing_keys()
    disk.capacity_bytes = 0
    partition.write_key(first_ids[0])
    assert not disk.exists(path(first_ids[0]))
    assert not disk.exists(path(first_ids[0]) + ".new")
    answers(partition, log)


def test_rebuild_index_makes_the_same_file() -> None:
    disk, partition, _ = written()
    first_ids = indexed(partition)
    right = disk.open(path(first_ids[0])).read(0, 1 << 20)
    task = IndexTask(directory=HOME, first_id=first_ids[0], partition=0, key=KEY, next_first_id=first_ids[1])
    for harm in (None, harm_missing, harm_empty):
        if harm is not None:
            harm(disk, [-1, first_ids[0]])
        write_key_index(disk, task)
        assert disk.open(path(first_ids[0])).read(0, 1 << 20) == right
