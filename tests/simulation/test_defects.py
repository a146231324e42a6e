"""The storage defects of the original, one test each: what it did, and what ours does instead.

W1 to W9 were found by reading its source, a to j by running its classes against damaged files.
"""

from __future__ import annotations

import resource
import tracemalloc

import pytest

from tests.simulation.sample import (
    KEY,
    PARTITIONS,
    ROOT,
    begin,
    blank_disk,
    expected,
    first_ids,
    goes_on,
    index_path,
    is_vouched_for,
    open_directory,
    records_of,
    run_for,
    sample,
    segment_path,
    served,
)
from waltzd.disk.simulated import Fault, Loss, SimDisk
from waltzd.errors import (
    BelowFloor,
    ControlDamaged,
    FlushFailed,
    NoSuchPartition,
    NotOpened,
    PartitionDamaged,
    StaleSession,
)
from waltzd.format.layout import CONTROL_NAME, HEADER_BYTES, FileHeader, control_bytes, index_offset
from waltzd.format.record import encode_payloads
from waltzd.storage.replica.partition import Partition

SENT = expected(0, 12)


def put(disk: SimDisk, path: str, content: bytes) -> None:
    file = disk.create(path)
    file.write(0, content)
    file.flush()
    disk.flush_directory(path.rpartition("/")[0])


def offset_of(id_: int, first_id: int = 0) -> int:
    return HEADER_BYTES + sum(len(record) for record in SENT[first_id:id_])


# -- found by reading


def test_w1_a_flipped_bit_is_not_cut_and_the_replica_does_not_vote_with_less() -> None:
    """Committed up to 10, record 6 rots: the original cut everything from 6 on and voted 5."""
    disk = blank_disk()
    directory = open_directory(disk, segment_bytes=1 << 20)
    partition = begin(directory, 0, records=11)
    partition.append(1, [], 10)
    directory.close()
    disk.corrupt(segment_path(0, 0), offset_of(6) + 40, b"\xee")
    size = disk.size(segment_path(0, 0))
    partition = open_directory(disk, segment_bytes=1 << 20).partition(0)
    status = partition.open_session(2)
    assert [(f.first_id, f.last_id) for f in status.findings] == [(6, 6)]
    assert (status.last_id, status.is_sound) == (10, False)
    with pytest.raises(BelowFloor):
        partition.truncate(2, 5)
    assert served(partition, SENT[:11]) == set(range(11)) - {6}
    assert disk.size(segment_path(0, 0)) == size


def test_w2_every_read_is_checked() -> None:
    """A bit of the request id or the header of a record: the original served it."""
    for byte in (9, 20, 26, 30, 34, 50):
        disk = sample()
        partition = open_directory(disk).partition(0)
        disk.corrupt(segment_path(0, 0), offset_of(1) + byte, b"\xee")
        assert served(partition, SENT) == set(range(12)) - {1}
        assert not is_vouched_for(partition)


@pytest.mark.parametrize("loss", [None, Loss.ORDERED, Loss.SCATTERED])
def test_w3_a_promise_outlives_the_process_and_the_power(loss: Loss | None) -> None:
    disk = sample()
    directory = open_directory(disk)
    directory.partition(0).open_session(40)
    if loss is None:
        disk.kill()
    else:
        disk.power_cut(loss)
    partition = open_directory(disk).partition(0)
    for session in (1, 39):
        with pytest.raises(StaleSession):
            partition.open_session(session)
        with pytest.raises(StaleSession):
            partition.append(session, [run_for(0, 12, 1)], -1)


def test_w4_nobody_fences_by_talking() -> None:
    """Any message with a higher session made the original forget its owner."""
    disk = sample()
    partition = open_directory(disk).partition(0)
    for call in (
        lambda: partition.append(99, [run_for(0, 12, 1)], -1),
        lambda: partition.set_low_mark(99, 11),
        lambda: partition.truncate(99, 5),
        lambda: partition.read(0, 1, 100, session=99),
    ):
        with pytest.raises(NotOpened):
            call()
    assert partition.append(1, [run_for(0, 12, 1)], -1) == 12


@pytest.mark.parametrize("size", [0, 1, 127])
def test_w5_a_short_control_file_is_never_made_anew(size: int) -> None:
    disk = sample()
    file = disk.open(f"{ROOT}/{CONTROL_NAME}", write=True)
    file.truncate(size)
    file.flush()
    for _ in range(2):
        with pytest.raises(ControlDamaged, match=CONTROL_NAME):
            open_directory(disk)
        disk.kill()
    assert disk.size(f"{ROOT}/{CONTROL_NAME}") == size


def test_w6_names_are_on_the_disk_before_anything_in_them_is_acknowledged() -> None:
    """Power goes after each acknowledgement, over many new segments; the original lost some."""
    disk = blank_disk()
    partition = begin(open_directory(disk, segment_bytes=60), 0)
    for id_ in range(12):
        partition.append(1, [run_for(0, id_, 1)], -1)
        for seed in range(6):
            copy = disk.clone(seed)
            copy.power_cut(Loss.SCATTERED)
            again = open_directory(copy, segment_bytes=60).partition(0)
            assert served(again, SENT[: id_ + 1]) == set(range(id_ + 1))
            assert is_vouched_for(again)
    assert len(first_ids(disk)) > 8


def test_w7_memory_moves_after_the_flush() -> None:
    """After a failed flush the original went on with ids that no disk had, and its next flush 'succeeded'."""
    disk = sample()
    partition = open_directory(disk).partition(0)
    flushes = [0]

    def fail_the_first_flush(kind: str, path: str) -> None:
        if kind == "flush":
            flushes[0] += 1
            if flushes[0] == 1:
                disk.faults[disk.steps] = Fault.IO_ERROR

    disk.observer = fail_the_first_flush
    with pytest.raises(FlushFailed) as failed:
        partition.append(1, [run_for(0, 12, 2)], -1)
    assert failed.value.facts["last_durable_id"] == "11"
    assert partition.last_id == 11
    for _ in range(2):
        with pytest.raises(FlushFailed):
            partition.append(1, [run_for(0, 12, 2)], -1)
    assert flushes == [1], "a file whose flush failed is never flushed again"


def test_w8_an_index_is_never_believed() -> None:
    sizes = {"zeros": 12, "gone": None, "too long": 40, "too short": 2}
    for kind, entries in sizes.items():
        for first_id in first_ids(sample()):
            disk = sample()
            path = index_path(0, first_id)
            if entries is None:
                disk.remove(path)
            else:
                file = disk.open(path, write=True)
                file.truncate(HEADER_BYTES)
                file.truncate(index_offset(entries))
                file.flush()
            partition = open_directory(disk).partition(0)
            assert is_vouched_for(partition), f"{kind} index of segment {first_id}"
            assert served(partition, SENT) == set(range(12))


def test_w8_segments_must_follow_each_other() -> None:
    disk = sample()
    middle = first_ids(disk)[1]
    disk.remove(segment_path(0, middle))
    disk.remove(index_path(0, middle))
    partition = open_directory(disk).partition(0)
    assert not is_vouched_for(partition)
    assert served(partition, SENT) == set(range(12)) - set(range(middle, first_ids(sample())[2]))


@pytest.mark.parametrize("length", [-1, -(1 << 31), (1 << 31) - 1, 1 << 24])
def test_w9_a_length_is_a_claim_until_the_bytes_are_there(length: int) -> None:
    """Garbage lengths in the tail: the original allocated what they said."""
    disk = sample()
    partition = open_directory(disk).partition(0)
    end = disk.size(segment_path(0, first_ids(disk)[-1]))
    disk.kill()
    head = bytearray(run_for(0, 12, 1).data[:36])
    head[28:32] = length.to_bytes(4, "big", signed=True)
    file = disk.open(segment_path(0, first_ids(disk)[-1]), write=True)
    file.write(end, bytes(head) + b"garbage" * 20)
    file.flush()
    disk.power_cut()
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    partition = open_directory(disk).partition(0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert partition.last_id == 11
    goes_on(partition, 0)


# -- found by running


def test_a_an_index_entry_behind_the_checkpoint_may_be_missing() -> None:
    """The original's anchor was one entry further than what its checkpoint had flushed."""
    for ids in range(998, 1003):
        disk = blank_disk()
        directory = open_directory(disk, segment_bytes=1 << 20)
        partition = directory.create_partition(0)
        partition.open_session(1)
        for first_id in range(0, ids, 100):
            partition.append(1, [encode_payloads(first_id, [b"x"] * min(100, ids - first_id))], -1)
            if partition.wants_checkpoint:
                partition.checkpoint()
        disk.kill()
        for entry in range(995, ids):
            disk.corrupt(index_path(0, 0), index_offset(entry), bytes(8))
        partition = open_directory(disk, segment_bytes=1 << 20).partition(0)
        assert partition.last_id == ids - 1
        assert is_vouched_for(partition)
        goes_on(partition, 0)
        assert len(partition.read_examined(990, ids - 1, 1 << 20)) == ids - 990


def test_b_a_lone_index_does_not_stand_in_the_way() -> None:
    disk = sample()
    put(disk, index_path(0, 12), b"whatever a crash left")
    partition = open_directory(disk, segment_bytes=10).partition(0)
    partition.append(1, [run_for(0, 12, 1)], -1)
    assert 12 in first_ids(disk)
    assert partition.read_examined(12, 12, 1000).data == run_for(0, 12, 1).data


@pytest.mark.parametrize("size", [0, 1, 127])
def test_c_a_segment_without_a_whole_header_stops_nobody(size: int) -> None:
    """An unfinished new segment is finished; the same in front of known records is damage of that partition alone."""
    disk = sample()
    header = FileHeader(created_ms=1, key=KEY, partition=0, first_id=12).encode()
    put(disk, segment_path(0, 12), header[:size])
    directory = open_directory(disk)
    assert served(directory.partition(0), SENT) == set(range(12))
    goes_on(directory.partition(0), 0)
    goes_on(directory.partition(1), 1)
    disk = sample()
    put(disk, segment_path(0, 0), header[:size])
    directory = open_directory(disk)
    assert not is_vouched_for(directory.partition(0))
    goes_on(directory.partition(1), 1)


@pytest.mark.parametrize("length", [-5, (1 << 31) - 1])
def test_d_a_torn_head_with_a_garbage_length_is_the_end_of_the_log(length: int) -> None:
    disk = sample()
    last = first_ids(disk)[-1]
    head = (12).to_bytes(8, "big") + bytes(20) + length.to_bytes(4, "big", signed=True) + bytes(4)
    file = disk.open(segment_path(0, last), write=True)
    end = file.size()
    file.write(end, head)
    file.flush()
    disk.power_cut()
    said: list[str] = []
    partition = open_directory(disk, said=said).partition(0)
    assert partition.last_id == 11
    assert disk.size(segment_path(0, last)) == end
    assert any(sentence.startswith("partition 0: cut 36 bytes behind id 11") for sentence in said)
    goes_on(partition, 0)


def test_e_a_flipped_bit_in_a_sealed_segment_makes_no_hole() -> None:
    """Ids 2 and 3 vanished from the original without a word, and the replica went on voting."""
    disk = sample()
    sealed = first_ids(disk)[1]
    size = disk.size(segment_path(0, sealed))
    disk.corrupt(segment_path(0, sealed), HEADER_BYTES + 45, b"\xee")
    partition = open_directory(disk).partition(0)
    assert not is_vouched_for(partition)
    assert served(partition, SENT) == set(range(12)) - {sealed}
    assert disk.size(segment_path(0, sealed)) == size


def test_f_rot_is_found_by_the_reader_and_remembered() -> None:
    disk = sample()
    partition = open_directory(disk).partition(0)
    assert is_vouched_for(partition)
    disk.corrupt(segment_path(0, 0), offset_of(0) + 12, b"\xee")
    with pytest.raises(PartitionDamaged) as damaged:
        partition.read_examined(0, 0, 1000)
    assert (damaged.value.facts["first_id"], damaged.value.facts["last_id"]) == ("0", "0")
    assert "damaged" in partition.describe()
    with pytest.raises(PartitionDamaged):
        partition.append(partition.promised_session, [run_for(0, 12, 1)], -1)


def test_g_what_is_not_assigned_cannot_be_removed() -> None:
    disk = sample()
    directory = open_directory(disk)
    before = bytes(disk.content(f"{ROOT}/{CONTROL_NAME}"))
    for _ in range(2):
        with pytest.raises(NoSuchPartition):
            directory.remove_partition(2, delete_files=True)
    assert bytes(disk.content(f"{ROOT}/{CONTROL_NAME}")) == before


@pytest.mark.parametrize("number", [-1, PARTITIONS + 1, 1 << 31, 1 << 70])  # in front of it is the group log
def test_h_a_partition_outside_the_range_is_refused_by_every_call(number: int) -> None:
    directory = open_directory(sample())
    for call in (
        lambda: directory.partition(number),
        lambda: directory.create_partition(number),
        lambda: directory.remove_partition(number, delete_files=False),
        lambda: directory.set_available(number, True),
    ):
        with pytest.raises(NoSuchPartition, match="0 to 2"):
            call()


def test_i_a_control_file_is_never_longer_than_what_is_in_it() -> None:
    """The original extended the file first and wrote the structs later; a crash between was for ever."""
    disk = blank_disk()
    seen: list[SimDisk] = []
    disk.observer = lambda kind, path: seen.append(disk.clone(len(seen)))
    open_directory(disk).close()
    for copy in seen:
        copy.power_cut(Loss.SCATTERED)
        assert open_directory(copy).control.damage() == []
        assert copy.size(f"{ROOT}/{CONTROL_NAME}") == control_bytes(PARTITIONS)
    disk = sample()
    file = disk.open(f"{ROOT}/{CONTROL_NAME}", write=True)
    file.truncate(control_bytes(PARTITIONS) + 76)
    file.flush()
    with pytest.raises(ControlDamaged, match="bytes; for 3 partitions"):
        open_directory(disk)


def test_j_a_truncation_below_the_low_mark_is_refused_and_the_replica_is_not_wedged() -> None:
    disk = sample(mark=7)

    def attempt(partition: Partition, session: int) -> None:
        partition.open_session(session)
        for mark in (-1, 3, 6):
            with pytest.raises(BelowFloor):
                partition.truncate(session, mark)

    attempt(open_directory(disk).partition(0), 5)
    disk.kill()
    partition = open_directory(disk).partition(0)
    attempt(partition, 6)
    assert partition.truncate(6, 7).last_id == 7
    assert partition.set_low_mark(6, 7).low_mark == 7
    assert partition.append(6, [run_for(0, 8, 2)], -1) == 9
    assert records_of(partition.read_examined(7, 7, 1000)) == [SENT[7]]
