"""A replica that was changed over to format 1 goes from one storage to another: its segments, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.batches import batches_of, segments_of
from tests.unit.waltzd.storage.offline.small import (
    IDX3,
    IDX9,
    KEY,
    MIXED,
    MIXED_LAST_ID,
    MIXED_LOCKS,
    MIXED_PAYLOADS,
    MIXED_PROMISE,
    SEG0,
    SEG3,
    SEG6,
    SEG9,
    mixed,
    put_mixed,
    put_promise,
    storage,
)
from waltzd.disk.seam import join
from waltzd.disk.simulated import Loss, SimDisk
from waltzd.format.batch import End
from waltzd.format.layout import CONTROL_NAME, HEADER_BYTES
from waltzd.storage.offline.transplant import State, Transplant, carry_out, plan
from waltzd.storage.offline.verify import Options, Target, verify
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.site import PartitionSettings

SEGMENTS = (SEG0, SEG3, SEG6, SEG9)


def source(committed: int = MIXED_LAST_ID) -> SimDisk:
    disk = mixed()
    put_promise(disk, replace(MIXED_PROMISE, committed=committed))
    disk.make_directory("t")
    disk.flush_directory("")
    return disk


def take(disk: SimDisk) -> Transplant:
    return carry_out(disk, plan(disk, "s", "t", [0]))


def taken(path: str) -> str:
    return path.replace("s/", "t/", 1)


def footer_start(number: int) -> int:
    return HEADER_BYTES + sum(batch.size for batch in segments_of(MIXED)[number])


def is_sound(disk: SimDisk) -> bool:
    return verify(disk, [Target(storage="t")], Options(is_deep=True)).findings == []


def test_all_of_it_arrives_byte_for_byte() -> None:
    disk = source()
    assert [graft.state for graft in take(disk).grafts] == [State.TAKEN]
    for path in SEGMENTS:
        assert disk.content(taken(path)) == disk.content(path)
        assert disk.content(taken(path.replace("seg", "idx")))[128:] == disk.content(path.replace("seg", "idx"))[128:]
    assert is_sound(disk)
    directory = Directory.open(disk, "t", key=KEY, partitions=2, settings=PartitionSettings(segment_bytes_max=1 << 20))
    status = directory.partition(0).open_session(9)
    assert (status.last_id, status.committed, status.is_sound) == (MIXED_LAST_ID, MIXED_LAST_ID, True)
    last = MIXED[-1].head
    assert status.end == End(crc=last.crc, time=last.time, segment_bytes=len(disk.content(SEG9)))


@pytest.mark.parametrize(
    ("committed", "last_id", "segments"), [(10, 10, 4), (8, 8, 3), (6, 6, 3), (5, 5, 2), (4, 4, 2), (2, 2, 1)]
)
def test_what_is_not_committed_stays_behind_in_whole_batches(committed: int, last_id: int, segments: int) -> None:
    disk = source(committed)
    put_promise(disk, replace(MIXED_PROMISE, committed=committed, durable=min(committed, last_id)))
    if committed < 5:
        lower = storage(local_low_mark=committed, low_mark=committed)
        disk.corrupt(join("s", CONTROL_NAME), 0, bytes(lower.content(join("s", CONTROL_NAME))))
    found = take(disk)
    assert [(graft.state, graft.last_id) for graft in found.grafts] == [(State.TAKEN, last_id)]
    assert is_sound(disk)
    kept = [batch for batch in MIXED if batch.last_id <= last_id]
    is_sealed = bool(kept) and kept[-1].head.is_last
    for number, path in enumerate(SEGMENTS):
        if disk.exists(taken(path)):
            whole = bytes(disk.content(path))
            is_last_of_them = path == max(one for one in SEGMENTS if disk.exists(taken(one)))
            same = not is_last_of_them or is_sealed or number == 0
            assert whole == disk.content(taken(path)) if same else whole.startswith(bytes(disk.content(taken(path))))


@pytest.mark.parametrize("kept", [0, 60])
def test_a_footer_that_is_not_whole_is_made_again(kept: int) -> None:
    disk = source()
    right = bytes(disk.content(SEG6))
    disk.open(SEG6, write=True).truncate(footer_start(1) + kept)
    take(disk)
    assert disk.content(taken(SEG6)) == right
    assert is_sound(disk)


def test_a_chain_that_is_broken_is_damage_of_the_source() -> None:
    disk = source()
    front = End(crc=5, time=MIXED[1].head.time)
    put_mixed(disk, [*MIXED[:2], *batches_of(MIXED_PAYLOADS[2:], first_id=6, before=front, cuts=[1])])
    [graft] = take(disk).grafts
    assert graft.state is State.DAMAGED
    assert graft.error is not None
    assert "broken-chain" in graft.error.message


def test_a_footer_of_other_batches_is_damage_of_the_source() -> None:
    disk, twin = source(), source()
    other = [*MIXED_PAYLOADS[:2], [b"LAST"], *MIXED_PAYLOADS[3:]]
    follows = [None, None, None, [False, True], None, None]
    put_mixed(twin, batches_of(other, first_id=3, locks=MIXED_LOCKS, follows=follows, cuts=[1, 3]))
    disk.corrupt(SEG6, footer_start(1), bytes(twin.content(SEG6))[footer_start(1) :])
    [graft] = take(disk).grafts
    assert graft.state is State.DAMAGED


def test_a_crash_before_each_operation_and_a_second_attempt() -> None:
    whole = source()
    steps = whole.steps
    take(whole)
    wanted = {path: bytes(whole.content(taken(path))) for path in SEGMENTS}
    for at in range(1, whole.steps - steps, 3):
        disk = source()
        stop_at = disk.steps + at

        def stop(kind: str, path: str, disk: SimDisk = disk, stop_at: int = stop_at) -> None:
            if disk.steps >= stop_at:
                raise InterruptedError

        disk.observer = stop
        with pytest.raises(InterruptedError):
            take(disk)
        disk.observer = None
        disk.power_cut(Loss.ORDERED)
        take(disk)
        assert {path: bytes(disk.content(taken(path))) for path in SEGMENTS} == wanted
        assert is_sound(disk)
        assert disk.exists(taken(IDX3))
        assert disk.exists(taken(IDX9))
