"""A dump shows every record of the original as its manifest lists it, and every bad byte where it is."""

from __future__ import annotations

import hashlib
from pathlib import Path
from uuid import UUID

import pytest

from waltzd.disk.real import RealDisk
from waltzd.disk.simulated import SimDisk
from waltzd.errors import BadArgument
from waltzd.format.layout import FileHeader, HardState, index_name, segment_name
from waltzd.format.record import Record, encode_payloads
from waltzd.storage.offline.dump import DamagedBytes, FileStart, IndexEntry, Item, Slot, WholeRecord, dump

KEY = UUID(int=3)
PAYLOADS = [bytes([65 + number]) * number * 3 for number in range(6)]
SEG, IDX = segment_name(10), index_name(10)
RUN = encode_payloads(10, PAYLOADS, partition=4, client=9)
BOUNDS = (RUN.bounds + 128).tolist()


def segment(*, with_index: bool = True) -> SimDisk:
    disk = SimDisk()
    header = FileHeader(created_ms=5, key=KEY, partition=4, first_id=10).encode()
    disk.create(SEG).write(0, header + bytes(RUN.data))
    if with_index:
        disk.create(IDX).write(0, header + (RUN.bounds[:-1] + 128).astype(">i8").tobytes())
    return disk


def items(disk: SimDisk | RealDisk, path: str, first_id: int = 0, last_id: int | None = None) -> list[Item]:
    """Items as they were when they were handed over: their buffers are used again."""
    out: list[Item] = []

    def keep(item: Item) -> None:
        out.append(
            WholeRecord(offset=item.offset, raw=memoryview(bytes(item.raw))) if isinstance(item, WholeRecord) else item
        )

    dump(disk, path, keep, first_id=first_id, last_id=last_id)
    return out


def ids(found: list[Item]) -> list[int]:
    return [item.record().id for item in found if isinstance(item, WholeRecord)]


def damage(found: list[Item]) -> list[DamagedBytes]:
    return [item for item in found if isinstance(item, DamagedBytes)]


def _line(partition: str, offset: int, name: str, record: Record) -> str:
    digest = hashlib.sha256(record.payload).hexdigest()
    return (
        f"rec {partition} {record.id} {record.request} {record.header} {record.length} {digest} "
        f"{record.data_crc:08x} {record.crc:08x} off={offset} seg={name}"
    )


@pytest.mark.parametrize("name", ["storage0", "storage1", "storage2"])
def test_the_manifest_of_the_original_again(original: Path, name: str) -> None:
    text = (original / "manifest.txt").read_text()
    section = text.split(f"## {name}\n")[1].split("\n## ")[0]
    expected = [line for line in section.splitlines() if line.startswith("rec ")]
    made: list[str] = []
    for path in sorted((original / name).glob("*/*.seg")):
        found = items(RealDisk(), str(path))
        assert not damage(found)
        for item in found:
            if isinstance(item, WholeRecord):
                made.append(_line(path.parent.name, item.offset, path.name, item.record()))
    assert made == expected


def test_a_range_of_ids() -> None:
    disk = segment()
    assert ids(items(disk, SEG)) == [10, 11, 12, 13, 14, 15]
    assert ids(items(disk, SEG, 12, 13)) == [12, 13]
    assert ids(items(disk, SEG, 14)) == [14, 15]
    assert ids(items(disk, SEG, 0, 10)) == [10]
    assert ids(items(disk, SEG, 16, 99)) == []


@pytest.mark.slow
@pytest.mark.parametrize("with_index", [True, False])
def test_every_byte_of_every_record(with_index: bool) -> None:
    """Wherever one byte is wrong, the dump names that byte, what it is and what it was, and shows all other records."""
    disk = segment(with_index=with_index)
    for at in range(128, BOUNDS[-1]):
        right = disk.content(SEG)[at]
        disk.corrupt(SEG, at, bytes([right ^ 0x84]))
        found = items(disk, SEG)
        number = next(i for i in range(6) if at < BOUNDS[i + 1])
        assert ids(found) == [id_ for id_ in range(10, 16) if id_ != 10 + number]
        [bad] = damage(found)
        [record] = bad.records
        assert (record.id, record.bad_byte, record.is_value, record.right_value) == (10 + number, at, right ^ 0x84, right)
        assert (bad.first_byte, bad.last_byte) == (BOUNDS[number], BOUNDS[number + 1] - 1)
        disk.corrupt(SEG, at, bytes([right]))


def test_damage_stands_between_the_records_around_it() -> None:
    disk = segment()
    disk.corrupt(SEG, BOUNDS[2] + 37, b"\0\1\2")
    kinds = [type(item).__name__ for item in items(disk, SEG)]
    assert kinds == ["FileStart", "WholeRecord", "WholeRecord", "DamagedBytes", "WholeRecord", "WholeRecord", "WholeRecord"]


def test_damage_outside_the_range_is_not_shown() -> None:
    disk = segment()
    disk.corrupt(SEG, BOUNDS[2] + 37, b"\0")
    assert damage(items(disk, SEG, 13)) == []
    assert damage(items(disk, SEG, 10, 11)) == []
    assert len(damage(items(disk, SEG, 12, 12))) == 1


def test_three_bad_neighbours_each_with_its_byte() -> None:
    disk = segment()
    places = [BOUNDS[1] + 4, BOUNDS[2] + 30, BOUNDS[3] + 38]
    for at in places:
        disk.corrupt(SEG, at, bytes([disk.content(SEG)[at] ^ 1]))
    [bad] = damage(items(disk, SEG))
    assert [record.bad_byte for record in bad.records] == places


def test_a_byte_too_many() -> None:
    disk = segment()
    content = disk.content(SEG)
    content[BOUNDS[3] : BOUNDS[3]] = b"?"
    found = items(disk, SEG)
    assert ids(found) == [10, 11, 12, 13, 14, 15]
    [bad] = damage(found)
    assert (bad.first_byte, bad.last_byte, bad.first_id, bad.last_id) == (BOUNDS[3], BOUNDS[3], 13, 12)


@pytest.mark.parametrize("left", [1, 20, 39, 40, 50])
def test_a_torn_tail(left: int) -> None:
    disk = segment()
    del disk.content(SEG)[BOUNDS[5] + left :]
    found = items(disk, SEG)
    [bad] = damage(found)
    assert (bad.first_byte, bad.first_id, bad.last_id) == (BOUNDS[5], 15, None)


def test_a_damaged_header_does_not_hide_the_records() -> None:
    disk = segment()
    disk.corrupt(SEG, 3, b"\x09")
    found = items(disk, SEG)
    assert isinstance(found[0], FileStart)
    assert "format version 9" in found[0].problem
    assert ids(found) == [10, 11, 12, 13, 14, 15]


def test_an_index() -> None:
    disk = segment()
    disk.content(IDX).extend(b"\0\0\0")
    found = items(disk, IDX)
    entries = [(item.id, item.offset, item.points_to) for item in found if isinstance(item, IndexEntry)]
    assert entries == [(10 + number, 128 + 8 * number, BOUNDS[number]) for number in range(6)]
    assert [item.note for item in found if isinstance(item, Slot)] == ["3 bytes, less than a whole entry"]
    assert [item.id for item in items(disk, IDX, 12, 13) if isinstance(item, IndexEntry)] == [12, 13]


def test_a_control_file(original: Path) -> None:
    found = items(RealDisk(), str(original / "storage1" / "waltz-storage.ctl"))
    assert isinstance(found[0], FileStart)
    assert found[0].fields["partitions"] == 6
    slots = [item for item in found if isinstance(item, Slot)]
    assert len(slots) == 12
    current = next(slot for slot in slots if slot.name.startswith("partition 5") and slot.note == "current")
    assert (current.fields["flags"], current.fields["sequence"], current.fields["local_low_mark"]) == (4, 5, 14)


def test_a_promise_file() -> None:
    disk = SimDisk()
    hard_state = HardState(
        key=KEY, partition=4, incarnation=UUID(int=9), session=3, committed=11, durable=12, newest=10, segments=2,
        is_clean=False, sequence=0,
    )  # fmt: skip
    disk.create("promise").write(0, hard_state.encode().ljust(8192, b"\0"))
    _, first, second = items(disk, "promise")
    assert isinstance(first, Slot)
    assert isinstance(second, Slot)
    assert (first.note, first.fields["committed"], second.note) == ("current", 11, "never written")
    disk.corrupt("promise", 30, b"!")
    first = items(disk, "promise")[1]
    assert isinstance(first, Slot)
    assert (first.is_sound, first.note) == (False, "fails its checksum")


def test_another_file_is_refused() -> None:
    disk = SimDisk()
    disk.create("notes.txt")
    with pytest.raises(BadArgument):
        items(disk, "notes.txt")
