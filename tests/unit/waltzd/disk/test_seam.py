"""One contract for the real disk and the simulated one: what holds for one in a test holds for the other in production."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from waltzd.disk.real import RealDisk
from waltzd.disk.seam import Disk, Entry, Inode, join
from waltzd.disk.simulated import SimDisk
from waltzd.errors.operations import DirectoryHeld, NotRegularFile, PathMissing

Place = tuple[Disk, str]


def real(tmp_path: Path) -> Place:
    return RealDisk(), str(tmp_path)


def simulated(tmp_path: Path) -> Place:
    disk = SimDisk()
    disk.make_directory("root")
    return disk, "root"


@pytest.fixture(params=[real, simulated], ids=["real", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    make: Callable[[Path], Place] = request.param
    return make(tmp_path)


def test_a_new_file_is_empty_and_has_its_path(place: Place) -> None:
    disk, root = place
    file = disk.create(join(root, "a"))
    assert (file.size(), file.path) == (0, join(root, "a"))
    assert file.read(0, 10) == b""
    assert file.read(100, 10) == b""


def test_writes_land_at_their_offset(place: Place) -> None:
    disk, root = place
    file = disk.create(join(root, "a"))
    file.write(0, b"0123456789")
    file.write(3, memoryview(b"abc"))
    file.write(12, bytearray(b"zz"))
    assert file.read(0, 100) == b"012abc6789\0\0zz"
    assert file.size() == 14
    file.write_many(1, [b"A", memoryview(b""), bytearray(b"BC"), b"D"])
    assert file.read(0, 6) == b"0ABCDc"
    file.write_many(14, [])
    assert file.size() == disk.size(join(root, "a")) == 14


def test_many_pieces_arrive_in_order(place: Place) -> None:
    """More pieces than one call of the system takes."""
    disk, root = place
    file = disk.create(join(root, "a"))
    pieces = [b"%05d" % number for number in range(2500)]
    file.write_many(7, pieces)
    assert file.read(0, 1 << 20) == bytes(7) + b"".join(pieces)


def test_reads_are_short_only_at_the_end(place: Place) -> None:
    disk, root = place
    file = disk.create(join(root, "a"))
    file.write(0, b"0123456789")
    assert file.read(4, 3) == b"456"
    assert file.read(8, 3) == b"89"
    assert file.read(10, 3) == b""
    buffer = bytearray(b"......")
    assert file.read_into(7, memoryview(buffer)) == 3
    assert buffer == b"789..."
    assert file.read_into(10, memoryview(buffer)) == 0


def test_truncation_cuts_and_extends_with_zeros(place: Place) -> None:
    disk, root = place
    file = disk.create(join(root, "a"))
    file.write(0, b"0123456789")
    file.truncate(4)
    assert file.read(0, 100) == b"0123"
    file.truncate(6)
    assert file.read(0, 100) == b"0123\0\0"
    file.flush()
    file.close()


def test_what_one_opening_wrote_another_reads(place: Place) -> None:
    disk, root = place
    writer = disk.create(join(root, "a"))
    writer.write(0, b"abc")
    reader = disk.open(join(root, "a"))
    assert reader.read(0, 9) == b"abc"
    writer.write(3, b"def")
    assert reader.read(0, 9) == b"abcdef"
    reader.close()
    writer.close()
    again = disk.open(join(root, "a"), write=True)
    again.write(0, b"X")
    assert again.read(0, 9) == b"Xbcdef"


def test_creating_a_file_that_exists_empties_it(place: Place) -> None:
    disk, root = place
    disk.create(join(root, "a")).write(0, b"abc")
    assert disk.create(join(root, "a")).size() == 0


def test_listing_is_sorted_and_tells_directories_and_sizes(place: Place) -> None:
    disk, root = place
    disk.create(join(root, "b")).write(0, b"12345")
    disk.make_directory(join(root, "c"))
    disk.create(join(root, "a"))
    disk.create(join(join(root, "c"), "d"))
    assert disk.list(root) == [Entry("a", False, 0), Entry("b", False, 5), Entry("c", True, 0)]
    assert [entry.name for entry in disk.list(join(root, "c"))] == ["d"]


def test_names_come_and_go(place: Place) -> None:
    disk, root = place
    old, new = join(root, "x.new"), join(root, "x")
    disk.create(old).write(0, b"new")
    disk.create(new).write(0, b"old")
    disk.rename(old, new)
    disk.flush_directory(root)
    assert disk.open(new).read(0, 9) == b"new"
    assert (disk.exists(old), disk.exists(new)) == (False, True)
    disk.remove(new)
    assert not disk.exists(new)
    disk.make_directory(new)
    assert disk.exists(new)
    disk.remove_directory(new)
    assert disk.list(root) == []


def test_an_open_file_outlives_its_name(place: Place) -> None:
    disk, root = place
    file = disk.create(join(root, "a"))
    file.write(0, b"abc")
    disk.remove(join(root, "a"))
    assert file.read(0, 9) == b"abc"


def test_what_is_missing_is_said_to_be_missing(place: Place) -> None:
    disk, root = place
    missing = join(root, "nothing")
    attempts: list[Callable[[], object]] = [
        lambda: disk.open(missing),
        lambda: disk.open(missing, write=True),
        lambda: disk.size(missing),
        lambda: disk.list(missing),
        lambda: disk.remove(missing),
        lambda: disk.rename(missing, join(root, "other")),
        lambda: disk.create(join(missing, "a")),
        lambda: disk.flush_directory(missing),
    ]
    for attempt in attempts:
        with pytest.raises(PathMissing):
            attempt()
    assert not disk.exists(missing)
    assert not disk.exists(join(missing, "a"))


def test_a_directory_is_not_opened_as_a_file(place: Place) -> None:
    disk, root = place
    disk.make_directory(join(root, "d"))
    with pytest.raises(NotRegularFile):
        disk.open(join(root, "d"))


def test_a_lock_keeps_a_second_opening_out_until_it_is_closed(place: Place) -> None:
    disk, root = place
    disk.create(join(root, "a")).close()
    holder = disk.open(join(root, "a"), write=True)
    onlooker = disk.open(join(root, "a"), write=True)
    assert not onlooker.is_locked_elsewhere()
    holder.lock()
    assert onlooker.is_locked_elsewhere()
    with pytest.raises(DirectoryHeld):
        onlooker.lock()
    holder.close()
    assert not onlooker.is_locked_elsewhere()
    onlooker.lock()


def test_closing_twice_is_harmless(place: Place) -> None:
    disk, root = place
    file = disk.create(join(root, "a"))
    file.close()
    file.close()


def test_there_is_room_and_the_clock_does_not_go_back(place: Place) -> None:
    disk, root = place
    assert disk.free_bytes(root) > 0
    assert 1_600_000_000_000 < disk.now_ms() <= disk.now_ms()
    assert disk.fresh_id() != disk.fresh_id()


def test_a_file_is_itself_under_every_name_and_a_copy_is_not(place: Place) -> None:
    disk, root = place
    path, other = join(root, "a"), join(root, "b")
    disk.create(path).write(0, b"content")
    first = disk.inode(path)
    disk.open(path, write=True).write(0, b"changed")
    disk.create(path).write(0, b"emptied and written again")
    disk.rename(path, other)
    assert disk.inode(other) == first
    assert disk.inode(other).is_same(first)
    disk.create(path).write(0, b"a copy")
    assert not disk.inode(path).is_same(first)


def test_a_number_that_is_used_again_is_told_by_its_generation() -> None:
    assert not Inode(7, 1).is_same(Inode(7, 2))
    assert not Inode(7, 1).is_same(Inode(8, 1))
    assert Inode(7, 0).is_same(Inode(7, 2)), "where the file system does not say, the number has to do"
