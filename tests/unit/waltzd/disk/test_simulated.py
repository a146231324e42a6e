"""The simulated disk forgets, tears and fails as it says; otherwise the tests that stand on it prove nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from waltzd.disk.simulated import SECTOR_BYTES, Fault, Loss, SimDisk, SimFile
from waltzd.errors.operations import DiskFull, FlushFailed, ReadFailed

SEEDS = range(200)


def disk_with_file(seed: int) -> tuple[SimDisk, SimFile]:
    """A file whose name is on the platter."""
    disk = SimDisk(seed)
    file = disk.create("a")
    disk.flush_directory("")
    return disk, file


def after(disk: SimDisk, path: str = "a") -> bytes:
    file = disk.open(path)
    return file.read(0, file.size())


@pytest.mark.parametrize("loss", Loss)
def test_what_was_flushed_survives_every_power_cut(loss: Loss) -> None:
    for seed in SEEDS:
        disk, file = disk_with_file(seed)
        file.write(0, b"kept" * 500)
        file.flush()
        file.write(2000, b"lost?")
        disk.power_cut(loss)
        assert after(disk)[:2000] == b"kept" * 500


def test_an_ordered_loss_keeps_some_first_operations_the_last_one_perhaps_in_part() -> None:
    possible = {b"", *(b"one"[:n] for n in range(4)), *(b"onetwo"[:n] for n in range(7))}
    found = set()
    for seed in SEEDS:
        disk, file = disk_with_file(seed)
        file.write(0, b"one")
        file.write(3, b"two")
        disk.power_cut()
        found.add(after(disk))
    assert found == possible


def test_an_ordered_loss_may_undo_a_truncation() -> None:
    found = set()
    for seed in SEEDS:
        disk, file = disk_with_file(seed)
        file.write(0, b"abcdef")
        file.flush()
        file.truncate(2)
        disk.power_cut()
        found.add(after(disk))
    assert found == {b"abcdef", b"ab"}


def test_a_scattered_loss_can_leave_holes_between_sectors_and_never_inside_one() -> None:
    patterns = set()
    for seed in SEEDS:
        disk, file = disk_with_file(seed)
        file.write(0, b"x" * 3 * SECTOR_BYTES)
        disk.power_cut(Loss.SCATTERED)
        raw = after(disk).ljust(3 * SECTOR_BYTES, b"\0")
        sectors = [raw[at : at + SECTOR_BYTES] for at in range(0, len(raw), SECTOR_BYTES)]
        assert all(sector in (b"x" * SECTOR_BYTES, bytes(SECTOR_BYTES)) for sector in sectors)
        patterns.add(tuple(sector[0] for sector in sectors))
    assert len(patterns) == 8


@pytest.mark.parametrize("loss", Loss)
def test_a_name_can_be_lost_until_its_directory_is_flushed(loss: Loss) -> None:
    seen = set()
    for seed in SEEDS:
        disk = SimDisk(seed)
        file = disk.create("a")
        file.write(0, b"abc")
        file.flush()
        disk.power_cut(loss)
        seen.add(disk.exists("a"))
    assert seen == {True, False}


@pytest.mark.parametrize("loss", Loss)
def test_a_rename_happens_whole_or_not_at_all(loss: Loss) -> None:
    seen = set()
    for seed in SEEDS:
        disk, file = disk_with_file(seed)
        file.write(0, b"old")
        file.flush()
        fresh = disk.create("a.new")
        fresh.write(0, b"new")
        fresh.flush()
        disk.flush_directory("")
        disk.rename("a.new", "a")
        disk.power_cut(loss)
        seen.add((after(disk), disk.exists("a.new")))
    assert seen == {(b"old", True), (b"new", False)}


def test_a_removed_file_can_come_back_until_the_directory_is_flushed() -> None:
    seen = set()
    for seed in SEEDS:
        disk, _ = disk_with_file(seed)
        disk.remove("a")
        disk.power_cut()
        seen.add(disk.exists("a"))
    assert seen == {True, False}
    disk, _ = disk_with_file(0)
    disk.remove("a")
    disk.flush_directory("")
    disk.power_cut()
    assert not disk.exists("a")


def test_a_killed_process_loses_no_write_but_its_files_and_locks() -> None:
    disk, file = disk_with_file(0)
    file.write(0, b"in the cache")
    file.lock()
    disk.kill()
    assert after(disk) == b"in the cache"
    with pytest.raises(AssertionError, match="used after the crash"):
        file.read(0, 1)
    disk.open("a", write=True).lock()


def test_a_failed_flush_loses_writes_and_a_second_one_hides_it() -> None:
    """The reason why nobody may flush again: the second call succeeds and nothing is on the platter."""
    lost = 0
    for seed in SEEDS:
        disk, file = disk_with_file(seed)
        file.write(0, b"abc")
        disk.faults[disk.steps + 1] = Fault.IO_ERROR
        with pytest.raises(FlushFailed):
            file.flush()
        assert file.read(0, 9) == b"abc"
        file.flush()
        disk.power_cut()
        lost += after(disk) == b""
    assert 0 < lost < len(SEEDS)


def test_faults_strike_the_operation_with_their_number() -> None:
    disk, file = disk_with_file(0)
    file.write(0, b"abc")
    disk.faults[disk.steps + 2] = Fault.IO_ERROR
    assert file.read(0, 1) == b"a"
    with pytest.raises(ReadFailed):
        file.read(0, 1)
    assert file.read(0, 1) == b"a"
    attempts: list[Callable[[], None]] = [
        lambda: file.write(0, b"x"),
        lambda: file.truncate(0),
        lambda: disk.flush_directory(""),
    ]
    for attempt in attempts:
        disk.faults[disk.steps + 1] = Fault.IO_ERROR
        with pytest.raises(FlushFailed):
            attempt()
    assert after(disk) == b"abc"


def test_a_full_disk_takes_part_of_a_write() -> None:
    disk = SimDisk(capacity_bytes=100)
    file = disk.create("a")
    file.write(0, bytes(60))
    with pytest.raises(DiskFull):
        file.write(60, bytes(60))
    assert (file.size(), disk.free_bytes("")) == (100, 0)
    file.write(0, b"writing over is no growth")
    file.truncate(10)
    file.write(10, bytes(90))
    parts = set()
    for seed in SEEDS:
        disk, file = disk_with_file(seed)
        disk.faults[disk.steps + 1] = Fault.NO_SPACE
        with pytest.raises(DiskFull):
            file.write(0, b"abc")
        parts.add(after(disk))
    assert parts == {b"", b"a", b"ab", b"abc"}


def test_operations_are_announced_before_they_happen() -> None:
    disk, file = disk_with_file(0)
    seen: list[tuple[str, int]] = []
    disk.observer = lambda kind, path: seen.append((kind, disk.size("a")))
    file.write(0, b"abc")
    file.flush()
    file.truncate(1)
    disk.observer = None
    file.read(0, 1)
    assert seen == [("write", 0), ("flush", 3), ("truncate", 3)]


def test_a_clone_is_a_world_of_its_own() -> None:
    disk, file = disk_with_file(0)
    file.write(0, b"flushed")
    file.flush()
    file.write(0, b"CACHED!")
    for seed in range(20):
        world = disk.clone(seed)
        assert after(world) == b"CACHED!"
        world.power_cut()
        assert len(after(world)) == 7
        world.remove("a")
    assert file.read(0, 9) == b"CACHED!"
    results = set()
    for seed in SEEDS:
        world = disk.clone(seed)
        world.power_cut()
        results.add(after(world))
    assert {b"flushed", b"CACshed", b"CACHED!"} <= results


def test_the_same_seed_is_the_same_crash() -> None:
    def crash(seed: int) -> bytes:
        disk, file = disk_with_file(seed)
        for number in range(20):
            file.write(number * 700, b"%d" % number * 700)
        disk.power_cut(Loss.SCATTERED)
        return after(disk)

    assert crash(7) == crash(7)
    assert crash(7) != crash(8)


def test_the_medium_can_change_a_byte_behind_everyone() -> None:
    disk, file = disk_with_file(0)
    file.write(0, b"abc")
    file.flush()
    disk.corrupt("a", 1, b"X")
    assert file.read(0, 9) == b"aXc"
    disk.power_cut()
    assert after(disk) == b"aXc"


def test_a_crash_keeps_a_file_what_it_is_and_a_restored_disk_has_other_files() -> None:
    disk = SimDisk(1)
    for name in ("a", "b"):
        disk.create(name).flush()
    disk.flush_directory("")
    before = disk.inode("a")
    disk.power_cut()
    assert disk.inode("a") == disk.clone(2).inode("a") == before
    restored = disk.restored(3)
    assert len({before, disk.inode("b"), restored.inode("a"), restored.inode("b")}) == 4
    assert bytes(restored.content("a")) == bytes(disk.content("a"))
