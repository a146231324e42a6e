"""A file that keeps positions: after a crash it says what was saved last or what was to be saved, and nothing else."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from waltzd import PositionFile
from waltzd.disk.simulated import Fault, Loss, SimDisk
from waltzd.errors import BadArgument, ForeignCluster, PositionsDamaged, WaltzError
from waltzd.errors.operations import PathMissing

CLUSTER, OTHER = UUID(int=1), UUID(int=2)
PATH = "/d/index.position"


def test_positions_are_kept_by_partition(tmp_path: Path) -> None:
    path = tmp_path / "index.position"
    file = PositionFile(path, CLUSTER)
    assert (file.position(0), dict(file.positions)) == (-1, {})
    assert not path.exists()
    file.save(0, 17)
    file.save(12, 3)
    file.save(0, 17)
    assert PositionFile(path, CLUSTER).positions == {0: 17, 12: 3}
    assert [entry.name for entry in tmp_path.iterdir()] == ["index.position"]


def test_another_cluster_and_a_position_that_goes_back_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "index.position"
    file = PositionFile(str(path), CLUSTER)
    file.save(0, 5)
    with pytest.raises(ForeignCluster, match=str(OTHER)):
        PositionFile(path, OTHER)
    for partition, id_ in ((0, 4), (0, -2), (-1, 7)):
        with pytest.raises(BadArgument):
            file.save(partition, id_)
    assert PositionFile(path, CLUSTER).positions == {0: 5}
    with pytest.raises(PathMissing):
        PositionFile(tmp_path / "nowhere" / "index.position", CLUSTER)


@pytest.mark.slow
def test_a_file_with_any_wrong_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index.position"
    PositionFile(path, CLUSTER).save(0, 1234)
    whole = path.read_bytes()
    rotten = [whole[:length] for length in range(len(whole))]
    rotten += [whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :] for at in range(len(whole)) for bit in range(8)]
    rotten += [whole + b" ", b"[" * 100_000, b"\xff\xfe"]
    for raw in rotten:
        path.write_bytes(raw)
        with pytest.raises(PositionsDamaged):
            PositionFile(path, CLUSTER)


def saved(disk: SimDisk) -> PositionFile:
    file = PositionFile._on(disk, PATH, CLUSTER)
    file.save(0, 1)
    return file


def new_disk(seed: int = 0) -> SimDisk:
    disk = SimDisk(seed)
    disk.make_directory("/d")
    disk.flush_directory("")
    return disk


@pytest.mark.parametrize("loss", list(Loss))
def test_a_power_cut_before_any_operation_leaves_the_old_or_the_new(loss: Loss) -> None:
    class Cut(Exception):
        pass

    disk = new_disk()
    file = saved(disk)
    before = disk.steps
    file.save(0, 2)
    steps = disk.steps - before
    assert steps >= 4
    seen = set()
    for seed in range(20):
        for at in range(1, steps + 2):
            disk = new_disk(seed)
            file = saved(disk)
            last = disk.steps + at

            def cut(_kind: str, _path: str, disk: SimDisk = disk, last: int = last) -> None:
                if disk.steps == last:
                    raise Cut

            disk.observer = cut
            try:
                file.save(0, 2)
                is_kept = True
            except Cut:
                is_kept = False
            disk.observer = None
            disk.power_cut(loss)
            found = PositionFile._on(disk, PATH, CLUSTER).position(0)
            seen.add(found)
            assert found == 2 if is_kept else found in (1, 2)
    assert seen == {1, 2}


def test_what_was_not_flushed_is_not_taken_for_kept() -> None:
    disk = new_disk()
    file = saved(disk)
    before = disk.steps
    file.save(0, 2)
    failed = 0
    for step in range(1, disk.steps - before + 1):
        disk = new_disk()
        file = saved(disk)
        disk.faults[disk.steps + step] = Fault.IO_ERROR
        try:
            file.save(0, 2)
        except WaltzError:
            failed += 1
            assert file.position(0) == 1
        disk.power_cut()
        assert PositionFile._on(disk, PATH, CLUSTER).position(0) in range(file.position(0), 3)
    assert failed >= 3  # writing, and flushing the file and its directory
