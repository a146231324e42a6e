"""What a replica has bound itself to is on the disk before it counts, in both slots, behind what it speaks of."""

from __future__ import annotations

import pytest

from tests.simulation.sample import KEY, hard_state_path, index_path, open_directory, run_for, segment_path
from tests.unit.keeping import begun
from waltzd.disk.simulated import Loss, SimDisk
from waltzd.storage.replica.hard_state import HardStateFile
from waltzd.storage.replica.partition import Partition


def reopened(disk: SimDisk) -> Partition:
    return open_directory(disk, segment_bytes=1 << 20).partition(0)


def test_a_promise_outlives_the_damage_of_the_slot_that_was_written_last() -> None:
    disk, _, partition = begun(4, committed=1, segment_bytes=1 << 20)
    partition.open_session(9)
    disk.kill()
    file = HardStateFile.open(disk, f"{hard_state_path(0).rpartition('/')[0]}", key=KEY, partition=0)
    newest = file.value.slot_offset
    file.close()
    disk.kill()
    disk.corrupt(hard_state_path(0), newest + 8, b"\xff\xff\xff\xff")
    again = reopened(disk)
    assert again.promised_session == 9
    assert again.status().incarnation == partition.status().incarnation


@pytest.mark.parametrize("what", ["a checkpoint", "a session that begins"])
def test_what_is_marked_as_indexed_was_flushed_before(what: str) -> None:
    disk, _, partition = begun(20, committed=17, segment_bytes=1 << 20)
    partition.open_session(4)
    seen: list[tuple[str, str]] = []
    disk.observer = lambda kind, path: seen.append((kind, path))
    if what == "a checkpoint":
        partition.checkpoint()
    else:
        partition.set_low_mark(4, 19)
    disk.observer = None
    assert ("flush", index_path(0, 0)) in seen[: seen.index(("write", hard_state_path(0)))]


def test_a_checkpoint_keeps_what_is_known_to_be_committed() -> None:
    disk, _, partition = begun(20, committed=17, segment_bytes=1 << 20)
    assert partition.committed == 17
    partition.checkpoint()
    disk.kill()
    assert reopened(disk).committed == 17


@pytest.mark.parametrize("seed", range(6))
def test_what_a_killed_process_left_in_the_cache_is_on_the_disk_before_it_is_vouched_for(seed: int) -> None:
    """It was written and not flushed, and nobody was told of it. The next process finds it, and its owner relies on it."""
    disk, _, partition = begun(4, committed=1, seed=seed, segment_bytes=1 << 20)

    def killed(kind: str, path: str) -> None:
        if (kind, path) == ("flush", segment_path(0, 0)):
            raise ZeroDivisionError

    disk.observer = killed
    with pytest.raises(ZeroDivisionError):
        partition.append(3, [run_for(0, 4, 6)], -1)
    disk.observer = None
    disk.kill()
    assert reopened(disk).open_session(4).last_id == 9
    disk.power_cut(Loss.ORDERED)
    found = reopened(disk).open_session(5)
    assert (found.last_id, found.is_sound) == (9, True)


def test_a_newest_record_that_was_vouched_for_is_damaged_and_never_torn() -> None:
    disk, _, partition = begun(20, committed=17, segment_bytes=1 << 20)
    partition.checkpoint()
    disk.kill()
    path = segment_path(0, 0)
    size = disk.size(path)
    disk.corrupt(path, size - 10, b"\xff\xff")
    disk.power_cut()
    again = reopened(disk)
    assert again.findings
    assert not again.open_session(4).is_sound
    assert disk.size(path) == size, "nothing was cut"
