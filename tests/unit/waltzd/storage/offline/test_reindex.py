"""An index made again is the one that was lost, and no crash leaves a segment without one.

The strongest check is the original's own files: what is built from its data is what it had written, apart from the date.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.waltzd.storage.offline.small import (
    IDX0,
    IDX3,
    IDX6,
    IDX9,
    KEY,
    MIXED_STARTS,
    SEG0,
    SEG3,
    SEG6,
    SEG9,
    mixed,
    storage,
)
from waltzd.disk.real import RealDisk
from waltzd.disk.seam import Disk, join
from waltzd.disk.simulated import Fault, Loss, SimDisk
from waltzd.errors.operations import DirectoryHeld, DiskFull
from waltzd.format.finding import Code
from waltzd.format.layout import (
    CONTROL_NAME,
    NEW_SUFFIX,
    FileHeader,
)
from waltzd.storage.offline.reindex import IndexState, IndexTask, Rebuild, rebuild, rebuild_index
from waltzd.storage.offline.verify import Options, Target, verify

TARGET = [Target(storage="s")]


def body(disk: SimDisk, path: str) -> bytes:
    """All but the creation date."""
    content = bytes(disk.content(path))
    return content[:4] + content[12:]


def data(disk: SimDisk) -> list[bytes]:
    return [bytes(disk.content(path)) for path in (SEG0, SEG3, SEG6)]


RIGHT = {path: body(storage(with_ours=False), path) for path in (IDX0, IDX3, IDX6)}


def states(done: Rebuild) -> list[IndexState]:
    return [built.state for built in done.built]


def clean(disk: Disk) -> bool:
    return verify(disk, TARGET, Options()).findings == []


# -- the original ------------------------------------------------------------------------------------------------------


def test_what_is_built_is_what_the_original_had_written(original: Path, tmp_path: Path) -> None:
    copy = tmp_path / "storage"
    shutil.copytree(original / "storage1", copy)
    indexes = sorted(copy.glob("*/*.idx"))
    before = {path: path.read_bytes() for path in indexes}
    segments = {path: path.read_bytes() for path in copy.glob("*/*.seg")}
    for path in indexes:
        path.unlink()
    done = rebuild(RealDisk(), [Target(storage=str(copy))])
    assert set(states(done)) == {IndexState.REBUILT}
    assert sum(built.records for built in done.built) == 605
    for path, content in before.items():
        made = path.read_bytes()
        assert made[:4] + made[12:] == content[:4] + content[12:]
    assert {path: path.read_bytes() for path in copy.glob("*/*.seg")} == segments
    assert not list(copy.rglob(f"*{NEW_SUFFIX}"))


# -- format 1 ----------------------------------------------------------------------------------------------------------

SMALL_INDEXES = (IDX0, IDX3, IDX6, IDX9)
MIXED_RIGHT = {path: body(mixed(), path) for path in SMALL_INDEXES}


@pytest.mark.parametrize("harm", ["removed", "wrong", "short", "of format 0"])
def test_an_index_of_batches_follows_from_the_footer_where_there_is_one(harm: str) -> None:
    disk = mixed()
    for path in SMALL_INDEXES[1:]:
        if harm == "removed":
            disk.remove(path)
        elif harm == "wrong":
            disk.corrupt(path, 130, b"\x77")
        elif harm == "short":
            disk.open(path, write=True).truncate(140)
        else:
            disk.corrupt(path, 3, b"\0")
    done = rebuild(disk, TARGET)
    assert [built.first_id for built in done.built] == MIXED_STARTS
    assert states(done) == [IndexState.RIGHT, IndexState.REBUILT, IndexState.REBUILT, IndexState.REBUILT]
    assert [built.is_from_footer for built in done.built] == [False, True, True, False]
    assert {path: body(disk, path) for path in SMALL_INDEXES} == MIXED_RIGHT
    assert clean(disk)
    assert states(rebuild(disk, TARGET)) == [IndexState.RIGHT] * 4


def test_a_footer_that_is_wrong_is_not_followed() -> None:
    disk = mixed()
    disk.remove(IDX3)
    disk.remove(IDX6)
    disk.corrupt(SEG3, len(disk.content(SEG3)) - 1, b"!")
    disk.corrupt(SEG6, 150, b"!")  # a head
    done = rebuild(disk, TARGET)
    assert states(done) == [IndexState.RIGHT, IndexState.REBUILT, IndexState.REFUSED, IndexState.RIGHT]
    assert [built.is_from_footer for built in done.built] == [False] * 4
    assert body(disk, IDX3) == MIXED_RIGHT[IDX3]
    left_out = rebuild(disk, TARGET, left_out=[(6, 6)])
    assert states(left_out) == [IndexState.RIGHT, IndexState.RIGHT, IndexState.REBUILT, IndexState.RIGHT]
    assert bytes(disk.content(IDX6))[128:136] == bytes(8)


def test_damaged_records_behind_a_footer_keep_their_entries() -> None:
    """The lengths are as the heads say; a reader finds the damage by the checksum."""
    disk = mixed()
    disk.remove(IDX6)
    content = bytes(disk.content(SEG6))
    disk.corrupt(SEG6, content.index(b"last"), b"LAST")
    before = bytes(disk.content(SEG9))
    assert states(rebuild(disk, TARGET)) == [IndexState.RIGHT, IndexState.RIGHT, IndexState.REBUILT, IndexState.RIGHT]
    assert body(disk, IDX6) == MIXED_RIGHT[IDX6]
    assert [finding.code for finding in verify(disk, TARGET, Options()).findings] == [Code.DAMAGED_RECORD]
    assert bytes(disk.content(SEG9)) == before


# -- wrong, missing and right indexes ----------------------------------------------------------------------------------


def test_a_right_index_is_left_alone() -> None:
    disk = storage(with_ours=False)
    before = [bytes(disk.content(path)) for path in RIGHT]
    assert states(rebuild(disk, TARGET)) == [IndexState.RIGHT] * 3
    assert [bytes(disk.content(path)) for path in RIGHT] == before
    assert not any(entry.name.endswith(NEW_SUFFIX) for entry in disk.list("s/0"))


@pytest.mark.parametrize("at", [0, 3, 12, 28, 39, 100, 128, 135, 151])
def test_a_wrong_byte_anywhere_in_an_index_is_made_right(at: int) -> None:
    disk = storage(with_ours=False)
    disk.corrupt(IDX3, at, b"\x7f")
    assert states(rebuild(disk, TARGET)) == [IndexState.RIGHT, IndexState.REBUILT, IndexState.RIGHT]
    assert body(disk, IDX3) == RIGHT[IDX3]
    assert clean(disk)


@pytest.mark.parametrize("size", [0, 50, 128, 136, 141, 152])
def test_an_index_of_any_other_length_is_made_right(size: int) -> None:
    disk = storage(with_ours=False)
    content = disk.content(IDX6)
    content[:] = content[:size].ljust(size, b"\0") + (b"more" if size == 152 else b"")
    assert states(rebuild(disk, TARGET)) == [IndexState.RIGHT, IndexState.RIGHT, IndexState.REBUILT]
    assert body(disk, IDX6) == RIGHT[IDX6]


def test_a_new_index_has_its_own_date() -> None:
    disk = storage(with_ours=False)
    disk.remove(IDX0)
    rebuild(disk, TARGET)
    header = FileHeader.decode(bytes(disk.content(IDX0)), IDX0)
    assert header == FileHeader(created_ms=header.created_ms, key=KEY, partition=0, first_id=0)
    assert header.created_ms != 5


def test_only_what_was_named_is_touched() -> None:
    disk = storage(with_ours=False)
    for path in RIGHT:
        disk.remove(path)
    done = rebuild(disk, [Target(storage="s", directory="s/0", first_id=3)])
    assert [built.first_id for built in done.built] == [3]
    assert not disk.exists(IDX0)


# -- damaged data ------------------------------------------------------------------------------------------------------


def test_damage_is_refused_and_the_other_segments_are_done() -> None:
    disk = storage(with_ours=False)
    disk.corrupt(SEG3, 170, b"\xff")  # in record 4
    for path in RIGHT:
        disk.corrupt(path, 130, b"\xff")
    before, old = data(disk), bytes(disk.content(IDX3))
    done = rebuild(disk, TARGET)
    assert states(done) == [IndexState.REBUILT, IndexState.REFUSED, IndexState.REBUILT]
    [refused] = done.of(IndexState.REFUSED)
    [finding] = refused.findings
    assert (finding.code, finding.first_id, finding.last_id) == (Code.DAMAGED_RECORD, 4, 4)
    assert bytes(disk.content(IDX3)) == old
    assert data(disk) == before
    assert not any(entry.name.endswith(NEW_SUFFIX) for entry in disk.list("s/0"))


def test_ids_that_may_be_left_out_get_the_entry_0() -> None:
    disk = storage(with_ours=False)
    disk.corrupt(SEG3, 170, b"\xff")
    before = data(disk)
    assert states(rebuild(disk, TARGET, left_out=[(3, 3), (5, 9)])) == [
        IndexState.RIGHT,
        IndexState.REFUSED,
        IndexState.RIGHT,
    ]
    done = rebuild(disk, TARGET, left_out=[(4, 4)])
    assert states(done) == [IndexState.RIGHT, IndexState.REBUILT, IndexState.RIGHT]
    assert done.built[1].left_out == 1
    assert bytes(disk.content(IDX3))[136:144] == bytes(8)
    assert bytes(disk.content(IDX3))[128:136] == bytes(7) + b"\x80"
    assert data(disk) == before
    assert [finding.code for finding in verify(disk, TARGET, Options()).findings] == [Code.DAMAGED_RECORD]


def test_a_sealed_segment_that_ends_too_early() -> None:
    disk = storage(with_ours=False)
    del disk.content(SEG3)[-43:]  # record 5, exactly
    done = rebuild(disk, TARGET)
    assert states(done) == [IndexState.RIGHT, IndexState.REFUSED, IndexState.RIGHT]
    finding = done.built[1].findings[0]
    assert (finding.code, finding.first_id, finding.last_id) == (Code.SEGMENT_GAP, 5, 5)
    assert states(rebuild(disk, TARGET, left_out=[(5, 5)])) == [IndexState.RIGHT, IndexState.REBUILT, IndexState.RIGHT]
    assert bytes(disk.content(IDX3))[-8:] == bytes(8)
    assert len(disk.content(IDX3)) == 128 + 3 * 8


def test_a_torn_tail_is_told_and_no_error() -> None:
    disk = storage(with_ours=False)
    del disk.content(SEG6)[-2:]
    done = rebuild(disk, TARGET)
    assert states(done) == [IndexState.RIGHT, IndexState.RIGHT, IndexState.REBUILT]
    assert (done.built[2].records, done.built[2].torn_bytes) == (2, 41)
    assert len(disk.content(IDX6)) == 128 + 2 * 8


def test_the_same_bytes_below_a_mark_are_damage() -> None:
    disk = storage(local_low_mark=8, with_ours=False)
    del disk.content(SEG6)[-2:]
    assert states(rebuild(disk, TARGET)) == [IndexState.RIGHT, IndexState.RIGHT, IndexState.REFUSED]
    assert states(rebuild(disk, TARGET, left_out=[(8, 8)])) == [IndexState.RIGHT, IndexState.RIGHT, IndexState.REBUILT]


@pytest.mark.parametrize(
    ("at", "code"),
    [(3, Code.UNKNOWN_VERSION), (12, Code.FOREIGN_KEY), (31, Code.DAMAGED_HEADER), (39, Code.DAMAGED_HEADER)],
)
def test_a_segment_with_a_wrong_header_is_refused(at: int, code: Code) -> None:
    disk = storage(with_ours=False)
    disk.corrupt(SEG3, at, b"\x55")
    done = rebuild(disk, TARGET)
    assert [finding.code for finding in done.built[1].findings] == [code]


def test_a_held_directory_is_refused() -> None:
    disk = storage(with_ours=False)
    disk.remove(IDX0)
    disk.open(join("s", CONTROL_NAME), write=True).lock()
    with pytest.raises(DirectoryHeld):
        rebuild(disk, TARGET)
    assert not disk.exists(IDX0)


def test_the_lock_is_held_while_indexes_change_and_given_back() -> None:
    disk = storage(with_ours=False)
    disk.remove(IDX0)
    seen: list[bool] = []
    control = disk.open(join("s", CONTROL_NAME))
    disk.observer = lambda kind, path: seen.append(control.is_locked_elsewhere()) if kind == "rename" else None
    rebuild(disk, TARGET)
    assert seen == [True]
    assert not control.is_locked_elsewhere()


# -- crashes -----------------------------------------------------------------------------------------------------------


def _broken() -> SimDisk:
    """One index wrong, one missing, one right; all of it on the platter."""
    disk = storage(with_ours=False)
    disk.corrupt(IDX0, 130, b"\xff")
    disk.remove(IDX6)
    disk.flush_directory("s/0")
    return disk


@pytest.mark.slow
@pytest.mark.parametrize("loss", list(Loss))
def test_a_power_cut_at_any_step_leaves_the_old_index_or_the_new_one(loss: Loss) -> None:
    moments: list[SimDisk] = []
    disk = _broken()
    disk.observer = lambda kind, path: moments.append(disk.clone(seed=len(moments)))
    rebuild(disk, TARGET)
    assert len(moments) > 20
    old = {path: body(_broken(), path) for path in (IDX0, IDX3)} | {IDX6: b""}
    for number, moment in enumerate(moments):
        moment.power_cut(loss)
        for path, right in RIGHT.items():
            found = body(moment, path) if moment.exists(path) else b""
            assert found in (old[path], right), f"step {number}: {path} is neither the old nor the new index"
        rebuild(moment, TARGET)
        assert clean(moment)
        assert {path: body(moment, path) for path in RIGHT} == RIGHT


def test_a_killed_rebuild_is_run_again_and_leaves_finished_indexes_alone() -> None:
    disk = _broken()

    def die(kind: str, path: str) -> None:
        if kind == "read" and path == SEG6:
            raise KeyboardInterrupt

    disk.observer = die
    with pytest.raises(KeyboardInterrupt):
        rebuild(disk, TARGET)
    disk.observer = None
    assert body(disk, IDX0) == RIGHT[IDX0]
    assert states(rebuild(disk, TARGET)) == [IndexState.RIGHT, IndexState.RIGHT, IndexState.REBUILT]
    assert clean(disk)


def test_a_full_disk_leaves_the_old_indexes() -> None:
    steps: list[int] = []
    disk = _broken()
    disk.observer = lambda kind, path: steps.append(disk.steps) if kind == "write" and path.endswith(NEW_SUFFIX) else None
    rebuild(disk, TARGET)
    for step in steps:
        fresh = _broken()
        fresh.faults = {step: Fault.NO_SPACE}
        with pytest.raises(DiskFull):
            rebuild(fresh, TARGET)
        assert not any(entry.name.endswith(NEW_SUFFIX) for entry in fresh.list("s/0"))
        fresh.faults = {}
        rebuild(fresh, TARGET)
        assert clean(fresh)


_KILLED = """
import os, signal, sys
from waltzd.disk.real import RealDisk
from waltzd.storage.offline.reindex import rebuild
from waltzd.storage.offline.verify import Target

class Deadly(RealDisk):
    left = int(sys.argv[2])
    def rename(self, old, new):
        Deadly.left -= 1
        if Deadly.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        super().rename(old, new)

rebuild(Deadly(), [Target(storage=sys.argv[1])])
"""


@pytest.mark.slow
def test_a_real_process_killed_in_the_middle(original: Path, tmp_path: Path) -> None:
    copy = tmp_path / "storage"
    shutil.copytree(original / "storage0", copy)
    for path in copy.glob("*/*.idx"):
        path.unlink()
    ended = subprocess.run([sys.executable, "-c", _KILLED, str(copy), "5"], check=False, env={**os.environ})
    assert ended.returncode == -signal.SIGKILL
    assert len(list(copy.glob("*/*.idx"))) == 5
    done = rebuild(RealDisk(), [Target(storage=str(copy))])
    assert len(done.of(IndexState.RIGHT)) == 5
    assert len(done.of(IndexState.REBUILT)) == 13
    assert verify(RealDisk(), [Target(storage=str(copy))], Options()).findings == []


def test_build_alone_leaves_the_old_index_in_its_place() -> None:
    """What the workers do: only the process that holds the lock puts a new index in the place of the old."""
    disk = _broken()
    old = bytes(disk.content(IDX0))
    built = rebuild_index(disk, IndexTask(directory="s/0", first_id=0, partition=0, key=KEY, next_first_id=3))
    assert built.state is IndexState.REBUILT
    assert bytes(disk.content(IDX0)) == old
    assert body(disk, IDX0 + NEW_SUFFIX) == RIGHT[IDX0]
