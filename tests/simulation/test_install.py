"""Segment files that are installed: what is taken, what is refused, and how a damaged replica becomes sound by itself.

The owner in these tests is the simplest there could be: it replaces what the replica says is damaged, as far as the decided
mark, cuts what is above, and appends what is missing. Each healing is also crashed before every operation on the disk: what
the replica served before, it serves still; it is never sound without holding everything; and the healing can go on.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

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
    hard_state_path,
    index_path,
    is_vouched_for,
    open_directory,
    run_for,
    sample,
    segment_path,
    served,
)
from waltzd.disk.simulated import Loss, SimDisk
from waltzd.errors import ForeignCluster, TooLarge, WaltzError
from waltzd.errors.operations import DiskFull, NotNextId, NotOpened, PartitionDamaged, StaleSession, UnfitSegment
from waltzd.format.layout import HEADER_BYTES, FileHeader, read_hard_state_file
from waltzd.format.record import encode_payloads
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.repair import Installation
from waltzd.storage.replica.replica_context import PartitionSettings

RECORDS = 12
SENT = expected(0, RECORDS)
ALL = set(range(RECORDS))
FIRSTS = first_ids(sample(RECORDS))


def header(first_id: int, *, number: int = 0, key: object = KEY) -> bytes:
    return FileHeader(created_ms=77, key=key, partition=number, first_id=first_id).encode()  # type: ignore[arg-type]


def segment_file(first_id: int, last_id: int, *, number: int = 0) -> bytes:
    return header(first_id, number=number) + bytes(run_for(number, first_id, last_id - first_id + 1).data)


def install(partition: Partition, session: int, first_id: int, content: bytes, *, piece_bytes: int = 100) -> None:
    installation = partition.begin_installation(session, first_id, len(content))
    try:
        for at in range(0, len(content), piece_bytes):
            installation.write(content[at : at + piece_bytes])
        installation.prove()
        partition.install(session, installation)
    finally:
        installation.abandon()


def ends(partition: Partition) -> dict[int, int]:
    return dict(partition.sealed_segments())


def bring_level(partition: Partition, mark: int, *, chance: random.Random | None = None) -> None:
    """What an owner does with the answer to `Open`. Files may end earlier than the segments here do."""
    session = partition.promised_session + 1
    status = partition.open_session(session)
    for _ in range(50):
        wanted = [first_id for first_id in status.damaged_segments if first_id <= mark]
        if status.is_sound:
            break
        if not wanted:
            status = partition.truncate(session, mark)
            continue
        first_id = wanted[0]
        last_id = min(ends(partition).get(first_id, mark), mark)
        if chance is not None and chance.random() < 0.5:
            last_id = chance.randrange(first_id, last_id + 1)
        try:
            install(partition, session, first_id, segment_file(first_id, last_id))
        except UnfitSegment:
            if chance is None:
                raise
        status = partition.status()
    assert status.is_sound, status.findings
    partition.truncate(session, mark)
    if partition.last_id < mark:
        partition.append(session, [run_for(0, partition.last_id + 1, mark - partition.last_id)], -1)
    partition.set_low_mark(session, mark)


def is_level(disk: SimDisk, mark: int = RECORDS - 1) -> None:
    """Sound, whole, and going on, also after a power cut."""
    disk.power_cut()
    directory = open_directory(disk)
    partition = directory.partition(0)
    assert is_vouched_for(partition)
    partition.examine(partition.sealed_segments()[0][0] if partition.sealed_segments() else 0)
    assert partition.status().is_sound
    assert partition.last_id == mark
    assert served(partition, SENT[: mark + 1]) == set(range(mark + 1))
    goes_on(partition, 0)
    assert served(directory.partition(1), expected(1, RECORDS)) == ALL


# -- what is taken, and what is refused --------------------------------------------------------------------------------


def fresh(records: int = 0, *, session: int = 1) -> tuple[SimDisk, Directory, Partition]:
    disk = blank_disk()
    directory = open_directory(disk)
    begin(directory, 1, records=RECORDS)
    return disk, directory, begin(directory, 0, records=records, session=session)


@pytest.mark.parametrize("records", [0, 1, 2, 3, 7])
def test_files_stand_behind_the_last_id(records: int) -> None:
    disk, _, partition = fresh(records)
    install(partition, 1, records, segment_file(records, 8))
    assert partition.last_id == 8
    install(partition, 1, 9, segment_file(9, 9))
    assert first_ids(disk) == sorted({*(first for first in first_ids(disk) if first < records), records, 9})
    assert partition.append(1, [run_for(0, 10, 2)], -1) == RECORDS - 1
    assert partition.status().is_sound
    assert served(partition, SENT) == ALL
    is_level(disk)


def test_a_file_may_have_another_creation_date_and_any_size() -> None:
    disk, _, partition = fresh()
    install(partition, 1, 0, segment_file(0, RECORDS - 1))
    assert first_ids(disk) == [0]
    assert disk.size(segment_path(0, 0)) == len(segment_file(0, RECORDS - 1)) > 400
    is_level(disk)


def wrong_files() -> dict[str, tuple[bytes, type[WaltzError]]]:
    good = segment_file(3, 8)
    first_size = len(expected(0, 4)[3])
    return {
        "nothing": (b"", UnfitSegment),
        "half a header": (good[:60], UnfitSegment),
        "only a header": (good[:HEADER_BYTES], UnfitSegment),
        "half a record at the end": (good[:-5], UnfitSegment),
        "bytes too many": (good + b"\0", UnfitSegment),
        "a flipped bit": (good[:200] + bytes([good[200] ^ 1]) + good[201:], UnfitSegment),
        "a record left out": (good[:HEADER_BYTES] + good[HEADER_BYTES + first_size :], UnfitSegment),
        "records of other ids": (header(3) + bytes(run_for(0, 4, 3).data), UnfitSegment),
        "another partition's header": (header(3, number=1) + good[HEADER_BYTES:], UnfitSegment),
        "another id in the header": (header(4) + good[HEADER_BYTES:], UnfitSegment),
        "another cluster's header": (header(3, key=type(KEY)(int=5)) + good[HEADER_BYTES:], ForeignCluster),
        "a record that is too large": (header(3) + bytes(encode_payloads(3, [bytes(3000)]).data), TooLarge),
        "a record that claims 2 GiB": (
            good[: HEADER_BYTES + 28] + b"\x7f\xff\xff\xff" + good[HEADER_BYTES + 32 :],
            TooLarge,
        ),
    }


@pytest.mark.parametrize("name", sorted(wrong_files()))
def test_a_wrong_file_changes_nothing(name: str) -> None:
    content, error = wrong_files()[name]
    disk = sample(3)
    directory = Directory.open(
        disk,
        ROOT,
        key=KEY,
        partitions=PARTITIONS,
        settings=PartitionSettings(segment_bytes_max=400, record_bytes_max=2000),
    )
    partition = directory.partition(0)
    partition.open_session(2)
    before = {entry.name: bytes(disk.content(f"{ROOT}/0/{entry.name}")) for entry in disk.list(f"{ROOT}/0")}
    with pytest.raises(error):
        install(partition, 2, 3, content)
    after = {entry.name: bytes(disk.content(f"{ROOT}/0/{entry.name}")) for entry in disk.list(f"{ROOT}/0")}
    assert after == before
    assert partition.status().is_sound
    goes_on(partition, 0)


def _receive(installation: Installation, content: bytes) -> None:
    installation.write(content)
    installation.prove()


def test_a_file_that_is_not_as_large_as_announced_is_refused() -> None:
    _, _, partition = fresh(3)
    for announced in (len(segment_file(3, 8)) - 1, len(segment_file(3, 8)) + 1):
        installation = partition.begin_installation(1, 3, announced)
        with pytest.raises(UnfitSegment):
            _receive(installation, segment_file(3, 8))
        installation.abandon()
    installation = partition.begin_installation(1, 3, 0)
    installation.write(segment_file(3, 8))
    installation.prove()
    assert partition.install(1, installation).last_id == 8


@pytest.mark.parametrize("first_id", [0, 1, 4, 5, 7, 8, 100])
def test_a_sound_replica_takes_a_file_at_its_end_only(first_id: int) -> None:
    _, _, partition = fresh(6)
    with pytest.raises(NotNextId) as refused:
        partition.begin_installation(1, first_id, 1000)
    assert refused.value.facts["next_id"] == "6"


def test_only_the_promised_session_installs_and_the_place_is_looked_at_again() -> None:
    disk, _, partition = fresh(6)
    with pytest.raises(NotOpened):
        partition.begin_installation(2, 6, 1000)
    late, second = partition.begin_installation(1, 6, 0), partition.begin_installation(1, 6, 0)
    for installation in (late, second):
        installation.write(segment_file(6, 8))
        installation.prove()
    partition.append(1, [run_for(0, 6, 1)], -1)
    with pytest.raises(NotNextId):
        partition.install(1, late)
    partition.open_session(2)
    with pytest.raises(StaleSession):
        partition.install(1, second)
    late.abandon()
    second.abandon()
    assert not [entry.name for entry in disk.list(f"{ROOT}/0") if entry.name.endswith(".new")]
    assert served(partition, SENT) == set(range(7))


def test_a_full_disk_refuses_a_file_and_keeps_nothing_of_it() -> None:
    disk, _, partition = fresh(3)
    content = segment_file(3, RECORDS - 1)
    names = disk.names(f"{ROOT}/0")
    disk.capacity_bytes -= disk.room() - 300
    with pytest.raises(DiskFull):
        install(partition, 1, 3, content)
    assert disk.names(f"{ROOT}/0") == names
    disk.capacity_bytes += 10_000
    install(partition, 1, 3, content)
    is_level(disk)


def test_a_file_that_is_too_long_for_its_place_is_cut_to_it() -> None:
    disk = sample(RECORDS)
    disk.corrupt(segment_path(0, FIRSTS[1]), HEADER_BYTES + 30, b"\xa5")
    partition = open_directory(disk).partition(0)
    partition.open_session(9)
    partition.examine(FIRSTS[1])
    assert partition.status().damaged_segments == (FIRSTS[1],)
    install(partition, 9, FIRSTS[1], segment_file(FIRSTS[1], RECORDS - 1))
    assert partition.status().is_sound
    assert first_ids(disk) == FIRSTS
    assert disk.content(segment_path(0, FIRSTS[1])) == segment_file(FIRSTS[1], FIRSTS[2] - 1)
    assert disk.size(index_path(0, FIRSTS[1])) == HEADER_BYTES + 8 * (FIRSTS[2] - FIRSTS[1])
    hard_state = read_hard_state_file(bytes(disk.content(hard_state_path(0))), "promise")[0]
    assert hard_state is not None
    assert hard_state.segments == len(FIRSTS)
    assert served(partition, SENT) == ALL
    is_level(disk)


def test_a_crash_while_a_hole_is_left_never_makes_it_forgotten() -> None:
    disk = sample(RECORDS)
    disk.corrupt(segment_path(0, FIRSTS[1]), 12, b"\xa5")
    damaged = bytes(disk.content(segment_path(0, FIRSTS[1])))
    partition = open_directory(disk).partition(0)
    partition.open_session(9)
    partition.examine(FIRSTS[1])
    seen: set[bool] = set()

    def crash(kind: str, path: str) -> None:
        for seed, loss in itertools.product(range(4), Loss):
            copy = disk.clone(seed)
            copy.power_cut(loss)
            left = open_directory(copy).partition(0)
            is_new = copy.content(segment_path(0, FIRSTS[1])) != damaged
            seen.add(is_new)
            assert not (is_new and left.status().is_sound), f"before {kind} of {path}"

    disk.observer = crash
    install(partition, 9, FIRSTS[1], segment_file(FIRSTS[1], FIRSTS[1]))
    disk.observer = None
    assert seen == {False, True}


def test_a_sound_record_is_not_lost_by_a_file_once_the_session_has_begun() -> None:
    disk = sample(RECORDS)
    partition = open_directory(disk).partition(0)
    partition.open_session(9)
    partition.set_low_mark(9, RECORDS - 1)
    first_id, next_first = FIRSTS[1], FIRSTS[2]
    assert next_first - first_id >= 3
    disk.corrupt(segment_path(0, first_id), HEADER_BYTES + 30, b"\xa5")
    partition.examine(first_id)
    with pytest.raises(UnfitSegment) as refused:
        install(partition, 9, first_id, segment_file(first_id, next_first - 2))
    assert refused.value.facts["least_id"] == str(next_first - 1)
    install(partition, 9, first_id, segment_file(first_id, next_first - 1))
    assert partition.status().is_sound
    is_level(disk)


def test_a_file_that_ends_early_leaves_a_hole_that_is_known() -> None:
    disk = sample(RECORDS)
    disk.corrupt(segment_path(0, FIRSTS[1]), 12, b"\xa5")  # its header: nothing of it can be served
    partition = open_directory(disk).partition(0)
    partition.open_session(9)
    partition.examine(FIRSTS[1])
    install(partition, 9, FIRSTS[1], segment_file(FIRSTS[1], FIRSTS[1]))
    hole = FIRSTS[1] + 1
    assert [(f.first_id, f.last_id) for f in partition.findings] == [(hole, FIRSTS[2] - 1)]
    assert partition.status().damaged_segments == (hole,)
    disk.power_cut()
    partition = open_directory(disk).partition(0)
    assert partition.status().damaged_segments == (hole,)
    assert served(partition, SENT) == ALL - set(range(hole, FIRSTS[2]))
    bring_level(partition, RECORDS - 1)
    is_level(disk)


# -- healing -----------------------------------------------------------------------------------------------------------


def remove(disk: SimDisk, first_id: int) -> None:
    disk.remove(segment_path(0, first_id))
    disk.remove(index_path(0, first_id))


def stray(disk: SimDisk, first_id: int) -> None:
    disk.create(segment_path(0, first_id)).write(0, b"junk")


def first_and_last(disk: SimDisk) -> None:
    disk.corrupt(segment_path(0, 0), 140, b"!")
    remove(disk, FIRSTS[-1])


def removed(*missing: int) -> Callable[[SimDisk], None]:
    def harm(disk: SimDisk) -> None:
        for first_id in missing:
            remove(disk, first_id)

    return harm


def harms() -> dict[str, Callable[[SimDisk], None]]:
    found: dict[str, Callable[[SimDisk], None]] = {
        "all segments missing": removed(*FIRSTS),
        "all but the last missing": removed(*FIRSTS[:-1]),
        "the last two missing": removed(*FIRSTS[-2:]),
        "two in the middle missing": removed(*FIRSTS[1:3]),
        "a stray file far behind": lambda disk: stray(disk, 9 * 10**18),
        "a stray file behind": lambda disk: stray(disk, RECORDS + 100),
        "the first damaged, the last missing": first_and_last,
    }
    for name, first_id in (("first", FIRSTS[0]), ("sealed", FIRSTS[1]), ("last", FIRSTS[-1])):
        for what, harm in one_file(segment_path(0, first_id)).items():
            found[f"{name}: {what}"] = harm
        found[f"{name}: missing"] = removed(first_id)
    return found


def one_file(path: str) -> dict[str, Callable[[SimDisk], None]]:
    size = sample(RECORDS).size(path)

    def resize(new_size: int) -> Callable[[SimDisk], None]:
        def harm(disk: SimDisk) -> None:
            file = disk.open(path, write=True)
            file.truncate(new_size)
            file.flush()

        return harm

    def flip(offset: int) -> Callable[[SimDisk], None]:
        return lambda disk: disk.corrupt(path, offset, bytes([disk.content(path)[offset] ^ 0xA5]))

    return {
        "only its index left": lambda disk: disk.remove(path),
        "header": flip(12),
        "empty": resize(0),
        "only a header": resize(HEADER_BYTES),
        "first record": flip(150),
        "last byte": flip(size - 1),
        "cut by a byte": resize(size - 1),
        "zeros behind": resize(size + 9),
    }


HARMS = harms()


def harmed(name: str, *, clean: bool, mark: int | None = None) -> SimDisk:
    disk = sample(RECORDS, clean=clean, mark=mark)
    HARMS[name](disk)
    return disk


EVERY = [
    pytest.param(name, clean, marks=[pytest.mark.long] if at % 2 == clean else [], id=f"{name}-{state}")
    for at, name in enumerate(sorted(HARMS))
    for clean, state in ((True, "stopped"), (False, "killed"))
]
"""Each harm, where the storage was stopped and where it was killed; in short each harm in one of the two."""


@pytest.mark.parametrize(("name", "clean"), EVERY)
def test_whatever_was_damaged_is_brought_level(name: str, clean: bool) -> None:
    for seed in range(3):
        disk = harmed(name, clean=clean)
        partition = open_directory(disk).partition(0)
        partition.open_session(5)
        for first_id, _ in partition.sealed_segments():
            partition.examine(first_id)
        bring_level(partition, RECORDS - 1, chance=random.Random(seed) if seed else None)
        assert served(partition, SENT) == ALL
        is_level(disk)


@pytest.mark.parametrize("name", sorted(HARMS))
def test_a_lower_mark_than_the_replica_held_was_decided(name: str) -> None:
    """What this replica had above it was never committed: a healing must not depend on records that exist nowhere."""
    for mark in (5, 8, RECORDS - 2):
        disk = harmed(name, clean=True, mark=5)
        partition = open_directory(disk).partition(0)
        partition.open_session(5)
        for first_id, _ in partition.sealed_segments():
            partition.examine(first_id)
        bring_level(partition, mark)
        is_level(disk, mark)


@pytest.mark.parametrize(("name", "clean"), EVERY)
def test_a_healing_is_crashed_before_every_operation(name: str, clean: bool) -> None:
    chance = random.Random(name)
    disk = harmed(name, clean=clean)
    partition = open_directory(disk).partition(0)
    partition.open_session(5)
    for first_id, _ in partition.sealed_segments():
        partition.examine(first_id)
    before = served(partition, SENT)
    crashes = 0

    def crash(kind: str, path: str) -> None:
        nonlocal crashes
        if kind == "read":
            return
        crashes += 1
        copy = disk.clone(chance.getrandbits(32))
        if chance.random() < 0.2:
            copy.kill()
        else:
            copy.power_cut(chance.choice([Loss.ORDERED, Loss.SCATTERED]))
        left = open_directory(copy).partition(0)
        left.open_session(left.promised_session + 1)
        left.prove()
        if left.status().is_sound:
            for first_id, _ in left.sealed_segments():
                left.examine(first_id)
        found = served(left, SENT)
        assert found >= before, f"ids {sorted(before - found)} are lost by a crash before {kind} of {path}"
        if not left.status().is_sound:
            assert not [entry for entry in copy.list(f"{ROOT}/0") if entry.name.endswith(".new")]
        bring_level(left, RECORDS - 1)
        is_level(copy)

    disk.observer = crash
    bring_level(partition, RECORDS - 1)
    disk.observer = None
    assert crashes >= 8 or "index" in name or ("behind" in name)


def test_installing_at_the_end_is_crashed_before_every_operation() -> None:
    for records in (0, 3, 7):
        disk, _, partition = fresh(records)
        chance = random.Random(records)

        def crash(kind: str, path: str) -> None:
            copy = disk.clone(chance.getrandbits(32))  # noqa: B023
            copy.power_cut(chance.choice([Loss.ORDERED, Loss.SCATTERED]))  # noqa: B023
            left = open_directory(copy).partition(0)
            status = left.status()
            assert status.is_sound
            assert status.last_id in (records - 1, RECORDS - 1)  # noqa: B023
            assert served(left, SENT) == set(range(status.last_id + 1))
            bring_level(left, RECORDS - 1)
            is_level(copy)

        disk.observer = crash
        install(partition, 1, records, segment_file(records, RECORDS - 1))
        disk.observer = None
        disk.power_cut(Loss.SCATTERED)
        assert open_directory(disk).partition(0).last_id == RECORDS - 1


def test_a_log_that_is_too_short_takes_appends_and_is_sound_when_it_is_as_long_as_it_was() -> None:
    disk = sample(RECORDS, clean=True)
    remove(disk, FIRSTS[-1])
    partition = open_directory(disk).partition(0)
    held = partition.last_id
    assert (held, partition.status().damaged_segments) == (FIRSTS[-1] - 1, (FIRSTS[-1],))
    partition.open_session(5)
    for id_ in range(held + 1, RECORDS):
        assert not partition.status().is_sound
        with pytest.raises(PartitionDamaged):
            partition.set_low_mark(5, partition.last_id)
        copy = disk.clone(id_)
        copy.power_cut()
        assert not open_directory(copy).partition(0).status().is_sound, "a restart made it forget what it had"
        partition.checkpoint()
        partition.append(5, [run_for(0, id_, 1)], -1)
    assert partition.status().is_sound
    is_level(disk)


# -- incarnations ------------------------------------------------------------------------------------------------------


def incarnation(disk: SimDisk) -> object:
    return open_directory(disk).partition(0).status().incarnation


def test_a_directory_that_was_copied_or_restored_is_another_incarnation() -> None:
    disk = sample(RECORDS)
    first = incarnation(disk)
    for restart in (disk.kill, disk.power_cut, disk.kill):
        restart()
        assert incarnation(disk) == first
    copy = disk.restored(1)
    said: list[str] = []
    partition = open_directory(copy, said=said).partition(0)
    second = partition.status().incarnation
    assert second != first
    assert any("copied or restored" in sentence and str(second) in sentence for sentence in said)
    assert partition.status().is_sound
    assert served(partition, SENT) == ALL
    copy.power_cut()
    assert incarnation(copy) == second
    copy.corrupt(hard_state_path(0), 50, b"\xa5")
    copy.kill()
    assert incarnation(copy) == second, "a damaged slot brought the old incarnation back"
    disk.kill()
    assert incarnation(disk) == first


def test_a_replica_that_lost_its_end_is_another_incarnation_also_when_it_is_healed() -> None:
    for name in ("last: missing", "last: header", "last: last byte", "all segments missing", "the last two missing"):
        disk = sample(RECORDS, clean=True)
        first = incarnation(disk)
        disk.kill()
        HARMS[name](disk)
        partition = open_directory(disk).partition(0)
        second = partition.status().incarnation
        assert second != first
        bring_level(partition, RECORDS - 1)
        assert partition.status().incarnation == second
        disk.power_cut()
        assert incarnation(disk) == second


@pytest.mark.parametrize("name", ["sealed: first record", "first: missing", "last: first record"])
def test_a_replica_that_knows_what_it_had_stays_what_it_is(name: str) -> None:
    disk = sample(RECORDS, clean=True)
    first = incarnation(disk)
    disk.kill()
    HARMS[name](disk)
    partition = open_directory(disk).partition(0)
    bring_level(partition, RECORDS - 1)
    assert partition.status().incarnation == first
