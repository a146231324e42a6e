"""One segment by itself: where records go, what a read believes, what is taken back."""

from __future__ import annotations

import pytest

from tests.simulation.sample import KEY, records_of, run_for
from waltzd.disk.simulated import Fault, SimDisk
from waltzd.errors import ForeignCluster
from waltzd.errors.operations import DiskFull, HeaderDamaged
from waltzd.format.layout import HEADER_BYTES, FileHeader, index_name, index_offset, segment_name
from waltzd.storage.replica.segment import Segment, Suspect

HOME = "home"


def header(first_id: int = 0, partition: int = 0) -> FileHeader:
    return FileHeader(created_ms=1, key=KEY, partition=partition, first_id=first_id)


def make(records: int = 6, first_id: int = 0) -> tuple[SimDisk, Segment]:
    disk = SimDisk()
    disk.make_directory(HOME)
    segment = Segment.create(disk, HOME, header(first_id))
    if records:
        segment.write([run_for(0, first_id, records)])
        segment.flush()
    return disk, segment


def open_sealed(disk: SimDisk, next_id: int = 6) -> Segment:
    return Segment.open(disk, HOME, expected=header(), next_id=next_id)


def test_any_range_is_read_as_it_was_written() -> None:
    _, segment = make(6)
    sent = records_of(run_for(0, 0, 6))
    for first in range(6):
        for last in range(first, 6):
            assert records_of(segment.read(first, last, 1 << 20)) == sent[first : last + 1]


def test_a_small_limit_gives_one_record_at_least_and_never_more_than_the_limit() -> None:
    _, segment = make(6)
    sent = records_of(run_for(0, 0, 6))
    assert records_of(segment.read(0, 5, 1)) == sent[:1]
    assert records_of(segment.read(1, 5, len(sent[1]) + len(sent[2]))) == sent[1:3]
    assert records_of(segment.read(1, 5, len(sent[1]) + len(sent[2]) - 1)) == sent[1:2]


def test_a_sealed_segment_reads_like_an_active_one() -> None:
    disk, segment = make(6)
    sealed = open_sealed(disk)
    for first in range(6):
        assert sealed.read(first, 5, 1 << 20).data == segment.read(first, 5, 1 << 20).data


def test_bytes_behind_the_last_record_of_a_sealed_segment_are_no_part_of_it() -> None:
    disk, segment = make(6)
    disk.open(f"{HOME}/{segment_name(0)}", write=True).write(segment.end, b"junk")
    assert records_of(open_sealed(disk).read(5, 5, 1 << 20)) == records_of(run_for(0, 5, 1))


@pytest.mark.parametrize("entry", range(6))
@pytest.mark.parametrize("value", [0, 1, -1, 1 << 40, (1 << 63) - 1, HEADER_BYTES + 1, HEADER_BYTES + 40])
def test_a_wrong_index_entry_never_gives_wrong_bytes(entry: int, value: int) -> None:
    disk, segment = make(6)
    sent = records_of(run_for(0, 0, 6))
    disk.corrupt(f"{HOME}/{index_name(0)}", index_offset(entry), value.to_bytes(8, "big", signed=True))
    for candidate in (segment, open_sealed(disk)):
        for first in range(6):
            try:
                found = records_of(candidate.read(first, 5, 1 << 20))
            except Suspect:
                continue
            assert found == sent[first : first + len(found)]


def test_an_index_that_cannot_belong_to_the_segment_is_a_question() -> None:
    disk, segment = make(6)
    index = f"{HOME}/{index_name(0)}"
    disk.corrupt(index, 28, b"\x00\x00\x00\x07")
    with pytest.raises(Suspect):
        open_sealed(disk)
    segment.index.truncate(5)
    with pytest.raises(Suspect):
        open_sealed(disk)
    disk.remove(index)
    with pytest.raises(Suspect):
        open_sealed(disk)


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (header(first_id=1), HeaderDamaged),
        (header(partition=1), HeaderDamaged),
        (FileHeader(created_ms=1, key=type(KEY)(int=5), partition=0, first_id=0), ForeignCluster),
    ],
)
def test_a_segment_of_another_place_cannot_be_opened_for_writing(other: FileHeader, error: type[Exception]) -> None:
    disk, _ = make(6)
    disk.corrupt(f"{HOME}/{segment_name(0)}", 0, other.encode())
    with pytest.raises(error):
        Segment.open(disk, HOME, expected=header(), next_id=None, write=True)


def test_what_was_not_flushed_is_taken_back_with_its_index_entries() -> None:
    disk, segment = make(4)
    end = segment.end
    segment.write([run_for(0, 4, 5)])
    segment.take_back()
    assert (segment.end, segment.next_id) == (end, 4)
    assert segment.data.size() == end
    assert segment.index.size() == index_offset(4)
    disk.power_cut()
    assert records_of(open_sealed(disk, 4).read(0, 3, 1 << 20)) == records_of(run_for(0, 0, 4))


@pytest.mark.parametrize("number", range(1, 9))
def test_a_full_disk_leaves_no_half_made_segment(number: int) -> None:
    disk = SimDisk()
    disk.make_directory(HOME)
    disk.faults = {disk.steps + number: Fault.NO_SPACE}
    try:
        Segment.create(disk, HOME, header()).close()
    except DiskFull:
        assert disk.list(HOME) == []
    disk.faults = {}
    segment = Segment.create(disk, HOME, header())
    segment.write([run_for(0, 0, 2)])
    segment.flush()
    assert len(segment.read(0, 1, 1 << 20)) == 2


def test_a_cut_ends_exactly_behind_the_record_in_front_of_it() -> None:
    disk, segment = make(6)
    end, next_id = segment.end_of(2)
    segment.cut(end=end, next_id=next_id)
    disk.power_cut()
    assert disk.size(f"{HOME}/{segment_name(0)}") == HEADER_BYTES + len(run_for(0, 0, 3).data)
    assert records_of(open_sealed(disk, 3).read(0, 2, 1 << 20)) == records_of(run_for(0, 0, 3))


def test_where_to_cut_is_never_decided_from_the_index_alone() -> None:
    disk, segment = make(6)
    disk.corrupt(f"{HOME}/{index_name(0)}", index_offset(3), (HEADER_BYTES + 3).to_bytes(8, "big"))
    assert segment.end_of(2) == (HEADER_BYTES + len(run_for(0, 0, 3).data), 3)
    with pytest.raises(Suspect):
        segment.end_of(3)
