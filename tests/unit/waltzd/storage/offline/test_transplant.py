"""Replicas from the files of one storage to another's: only what is certain arrives, whole or not at all.

The daemon's own code opens what was made, and an owner's own code says how far it would trust it. A crash comes before each
operation on the disk; whatever it leaves, a replica is there or not there, and doing it again goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from tests.simulation.sample import (
    KEY,
    PARTITIONS,
    ROOT,
    begin,
    expected,
    open_directory,
    promise_path,
    run_for,
    sample,
    segment_path,
)
from waltzd.cluster.documents import Membership, PartitionMeta, ReplicaState
from waltzd.disk.real import RealDisk
from waltzd.disk.seam import join
from waltzd.disk.simulated import Fault, Loss, SimDisk
from waltzd.errors import (
    BadArgument,
    ControlDamaged,
    DirectoryHeld,
    DiskFull,
    FlushFailed,
    ForeignCluster,
    NoSuchPartition,
    NothingHere,
    PathMissing,
    SourceDamaged,
)
from waltzd.format.layout import (
    CONTROL_NAME,
    HEADER_BYTES,
    IDENTITY_NAME,
    NO_SESSION,
    PROMISE_NAME,
    control_struct_offset,
    index_name,
    segment_ids,
    segment_name,
)
from waltzd.protocol.descriptions import ReplicaStatus
from waltzd.server.core.recovery import Recovery
from waltzd.storage.offline.transplant import State, Transplant, carry_out, check_apart, plan
from waltzd.storage.offline.verify import Options, Target, verify
from waltzd.storage.replica.control import ControlFile
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.site import PartitionSettings

TARGET = "target"
MARK = 7
"""What is certain of partition 0: ids up to here of 12."""
RECORDS = 12
SENT = expected(0, RECORDS)


def source(*, mark: int = MARK, seed: int = 0) -> SimDisk:
    """Partition 0 with a committed mark in the middle of it, partition 1 of which nothing is known to be committed; and an
    empty directory beside."""
    disk = sample(RECORDS, mark=mark, clean=True, seed=seed)
    disk.make_directory(TARGET)
    disk.flush_directory("")
    return disk


def transplant(disk: SimDisk, partitions: list[int] | None = None) -> Transplant:
    return carry_out(disk, plan(disk, ROOT, TARGET, partitions))


def states(found: Transplant) -> dict[int, State]:
    return {graft.partition: graft.state for graft in found.grafts}


def opened(disk: SimDisk, said: list[str] | None = None) -> Directory:
    settings = PartitionSettings(segment_bytes_max=400, say=(lambda sentence: None) if said is None else said.append)
    return Directory.open(disk, TARGET, key=KEY, partitions=PARTITIONS, settings=settings)


def content(partition: Partition) -> list[bytes]:
    found: list[bytes] = []
    while len(found) <= partition.last_id:
        run = partition.read_examined(len(found), partition.last_id, 1 << 16)
        found += [bytes(run.data[a:b]) for a, b in zip(run.bounds[:-1], run.bounds[1:], strict=True)]
    return found


def trusted(status: ReplicaStatus) -> int:
    """How far the owner of the next session trusts it, if another one of this name had joined the session before."""
    state = ReplicaState(session=2, closing=None, incarnation=UUID(int=5))
    names = ("a", "b", "c")
    meta = PartitionMeta(
        generation=1, session=3, opened=2, low_mark=MARK, members=names, replicas=dict.fromkeys(names, state)
    )
    recovery = Recovery(meta, dict.fromkeys(names, Membership.MEMBER))
    recovery.opened("a", status)
    assert not recovery.is_faithful("a"), "it has a vote on what another one acknowledged"
    return recovery.trusted("a")


def is_whole(partition: Partition, mark: int = MARK) -> None:
    status = partition.open_session(3)
    assert status.is_sound, status.findings
    assert (status.last_id, status.committed, status.session) == (mark, mark, NO_SESSION)
    assert content(partition) == SENT[: mark + 1]
    assert trusted(status) == mark


def goes_on(partition: Partition, mark: int = MARK) -> None:
    """What its owner does with it: begin the session further on, and give it the rest."""
    partition.set_low_mark(3, RECORDS - 1)
    assert partition.append(3, [run_for(0, mark + 1, RECORDS - 1 - mark)], RECORDS - 1) == RECORDS - 1
    assert content(partition) == SENT


# -- what arrives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", range(RECORDS))
def test_what_is_certain_arrives_and_nothing_else(mark: int) -> None:
    disk = source(mark=mark)
    before = _contents(disk, ROOT)
    found = transplant(disk)
    assert states(found) == {0: State.TAKEN, 1: State.NOTHING}
    assert found.is_new
    assert found.grafts[0].last_id == mark
    assert _contents(disk, ROOT) == before, "the source was changed"
    disk.kill()
    report = verify(disk, [Target(storage=TARGET)], Options())
    assert report.findings == []
    assert [partition.last_id for partition in report.partitions] == [mark]
    said: list[str] = []
    directory = opened(disk, said)
    assert said == [], "the daemon had to mend something"
    assert [partition.number for partition in directory.partitions()] == [0]
    is_whole(directory.partition(0), mark)
    if mark < RECORDS - 1:
        goes_on(directory.partition(0), mark)


def _files(disk: SimDisk, path: str) -> list[str]:
    found: list[str] = []
    for entry in disk.list(path):
        inner = join(path, entry.name)
        found += _files(disk, inner) if entry.is_directory else [inner]
    return found


def _contents(disk: SimDisk, path: str) -> dict[str, bytes]:
    return {path: bytes(disk.content(path)) for path in _files(disk, path)}


def _segments(disk: SimDisk) -> list[str]:
    return [path for path in _files(disk, f"{ROOT}/0") if path.endswith(".seg")]


def test_it_is_another_replica_than_the_one_it_was_taken_from() -> None:
    disk = source()
    transplant(disk)
    disk.kill()
    old, new = open_directory(disk).partition(0).status(), opened(disk).partition(0).status()
    assert old.incarnation != new.incarnation
    assert (new.session, new.promised_session) == (NO_SESSION, old.promised_session)


def test_it_begins_the_session_in_which_its_source_was() -> None:
    """What was committed since that session began is above the mark at which it began, and nothing against its owner."""
    disk = sample(RECORDS, clean=True)
    directory = open_directory(disk)
    partition = directory.partition(0)
    partition.open_session(2)
    partition.set_low_mark(2, RECORDS - 1)
    partition.append(2, [run_for(0, RECORDS, 4)], RECORDS + 1)
    directory.close()
    disk.make_directory(TARGET)
    assert transplant(disk).grafts[0].last_id == RECORDS + 1
    disk.kill()
    taken = opened(disk).partition(0)
    assert taken.open_session(2).last_id == RECORDS + 1
    assert taken.set_low_mark(2, RECORDS - 1).session == 2


def test_a_backup_is_as_good_as_the_directory_itself() -> None:
    disk = source().restored(3)
    assert states(transplant(disk)) == {0: State.TAKEN, 1: State.NOTHING}
    disk.kill()
    is_whole(opened(disk).partition(0))


def test_a_low_water_mark_is_certain_where_the_promise_lags_behind() -> None:
    disk = sample(RECORDS, clean=True)
    directory = open_directory(disk)
    partition = directory.partition(0)
    partition.open_session(2)
    partition.set_low_mark(2, RECORDS - 1)
    assert partition.status().committed == -1
    directory.close()
    disk.make_directory(TARGET)
    assert transplant(disk).grafts[0].last_id == RECORDS - 1


def test_a_replica_that_was_still_copying_gives_what_it_has() -> None:
    """Its session began at a mark that it had not reached; what it holds below is certain, and nothing of it is lost."""
    disk = sample(RECORDS, clean=True)
    directory = open_directory(disk)
    partition = directory.partition(0)
    partition.open_session(2)
    partition.set_low_mark(2, 100)
    directory.close()
    disk.make_directory(TARGET)
    found = transplant(disk)
    assert (found.grafts[0].state, found.grafts[0].last_id) == (State.TAKEN, RECORDS - 1)
    disk.kill()
    is_whole(opened(disk).partition(0), RECORDS - 1)


def test_the_original_s_directories_can_be_taken_from(original: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    disk = RealDisk()
    wanted = plan(disk, str(original / "storage0"), str(target))
    assert wanted.of(State.READY)
    found = carry_out(disk, wanted)
    assert len(found.of(State.TAKEN)) == len(wanted.of(State.READY))
    report = verify(disk, [Target(storage=str(target))], Options())
    assert report.findings == []
    assert {p.partition: p.last_id for p in report.partitions} == {g.partition: g.last_id for g in found.of(State.TAKEN)}


def test_only_the_partitions_that_are_named_are_taken() -> None:
    disk = two_partitions()
    assert states(transplant(disk, [1])) == {1: State.TAKEN}
    assert not disk.exists(join(TARGET, "0"))
    with pytest.raises(NoSuchPartition, match="no replica of partition 2"):
        plan(disk, ROOT, TARGET, [1, 2])


def two_partitions(seed: int = 0) -> SimDisk:
    """Both of the source's partitions have something certain."""
    disk = source(seed=seed)
    directory = open_directory(disk)
    partition = directory.partition(1)
    partition.open_session(2)
    partition.set_low_mark(2, RECORDS - 1)
    directory.close()
    return disk


# -- what the target has -----------------------------------------------------------------------------------------------


def with_target(harm: Callable[[SimDisk, Directory], None], *, records: int = 0) -> SimDisk:
    """A target whose daemon has run: it has a replica of partition 0."""
    disk = source()
    directory = opened(disk)
    partition = directory.create_partition(0)
    partition.open_session(1)
    if records:
        partition.append(1, [run_for(0, 0, records)], -1)
    directory.close()
    harm(disk, directory)
    return disk


def _nothing(disk: SimDisk, directory: Directory) -> None:
    """It stays as the daemon left it."""


def _damage_promise(disk: SimDisk, _: Directory) -> None:
    for slot in (0, 4096):
        disk.corrupt(f"{TARGET}/0/{PROMISE_NAME}", slot + 40, b"\xff\xff")


def _lose_promise(disk: SimDisk, _: Directory) -> None:
    disk.remove(f"{TARGET}/0/{PROMISE_NAME}")


def _damage_control(disk: SimDisk, _: Directory) -> None:
    for slot in (0, 1):
        disk.corrupt(f"{TARGET}/{CONTROL_NAME}", control_struct_offset(0, slot) + 3, b"\x5a")


def _lose_directory(disk: SimDisk, _: Directory) -> None:
    for name in disk.names(f"{TARGET}/0"):
        disk.remove(f"{TARGET}/0/{name}")
    disk.remove_directory(f"{TARGET}/0")


def _unassign(disk: SimDisk, _: Directory) -> None:
    control = ControlFile.open(disk, TARGET)
    control.reset(0)
    control.close()


def test_a_replica_that_is_served_stays_as_it_is() -> None:
    disk = with_target(_nothing, records=3)
    before = _contents(disk, f"{TARGET}/0")
    assert states(plan(disk, ROOT, TARGET)) == {0: State.THERE, 1: State.NOTHING}
    assert states(transplant(disk)) == {0: State.THERE, 1: State.NOTHING}
    assert _contents(disk, f"{TARGET}/0") == before


@pytest.mark.parametrize(
    ("harm", "records", "why", "is_aside"),
    [
        (_nothing, 0, "it holds no record", True),
        (_damage_promise, 3, "damaged-promise-file", True),
        (_lose_promise, 3, "the promise file is missing", True),
        (_damage_control, 3, "its part of the control file is damaged", True),
        (_lose_directory, 3, "its directory is missing", False),
        (_unassign, 3, "it is not assigned to this storage", True),
    ],
)
def test_what_its_daemon_would_refuse_is_set_aside(
    harm: Callable[[SimDisk, Directory], None], records: int, why: str, is_aside: bool
) -> None:
    disk = with_target(harm, records=records)
    old = sorted(disk.names(f"{TARGET}/0")) if is_aside else []
    wanted = plan(disk, ROOT, TARGET)
    assert wanted.grafts[0].state is State.READY
    assert why in wanted.grafts[0].replaces
    graft = carry_out(disk, wanted).grafts[0]
    assert (graft.state, graft.set_aside) == (State.TAKEN, f"{TARGET}/0.set-aside-1" if is_aside else None)
    if is_aside:
        assert sorted(disk.names(f"{TARGET}/0.set-aside-1")) == old
    disk.kill()
    is_whole(opened(disk).partition(0))


def test_doing_it_twice_changes_nothing() -> None:
    disk = source()
    transplant(disk)
    before = _contents(disk, TARGET)
    assert states(transplant(disk)) == {0: State.THERE, 1: State.NOTHING}
    assert _contents(disk, TARGET) == before


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_damage_below_the_mark_is_named_and_the_others_are_taken() -> None:
    disk = two_partitions()
    disk.corrupt(segment_path(0, 0), HEADER_BYTES + 30, b"\xff\xff")
    found = transplant(disk)
    assert states(found) == {0: State.DAMAGED, 1: State.TAKEN}
    error = found.grafts[0].error
    assert isinstance(error, SourceDamaged)
    assert f"below its committed mark {MARK}" in error.message
    assert "bytes 128 to " in error.message
    assert "id 0" in error.message
    assert disk.names(TARGET) == sorted(["1", CONTROL_NAME, IDENTITY_NAME])


def test_damage_above_the_mark_is_left_behind() -> None:
    disk = source()
    last = _segments(disk)[-1]
    disk.corrupt(last, disk.size(last) - 6, b"\xff\xff")
    assert states(transplant(disk))[0] is State.TAKEN
    disk.kill()
    is_whole(opened(disk).partition(0))


@pytest.mark.parametrize("at", range(RECORDS))
def test_every_record_is_proven(at: int) -> None:
    """A bit in the middle of any record: it is either above the mark, or refused."""
    disk = source()
    record = SENT[at]
    path = next(p for p in _files(disk, f"{ROOT}/0") if p.endswith(".seg") and record in bytes(disk.content(p)))
    disk.corrupt(path, bytes(disk.content(path)).index(record) + 45, b"\xff")
    found = transplant(disk).grafts[0]
    if at > MARK:
        assert (found.state, found.last_id) == (State.TAKEN, MARK)
        return
    assert found.state is State.DAMAGED
    assert found.error is not None
    assert f"id {at}:" in found.error.message


def _shorten_the_last(disk: SimDisk) -> None:
    """As in a copy that was made while the storage ran: the promise file came last."""
    last = _segments(disk)[-1]
    disk.open(last, write=True).truncate(disk.size(last) - 1)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_shorten_the_last, str(RECORDS - 1)),
        (lambda disk: disk.remove(segment_path(0, 0)), "the first segment starts at id"),
        (lambda disk: disk.remove(promise_path(0)), "the promise file is missing"),
        (lambda disk: disk.remove(_segments(disk)[1]), "missing"),
        (lambda disk: disk.corrupt(segment_path(0, 0), 31, b"\x01"), "partition 1"),
    ],
    ids=["a log shorter than its promise", "no first segment", "no promise", "no middle segment", "another partition's"],
)
def test_what_is_wrong_with_the_source_is_said(harm: Callable[[SimDisk], None], said: str) -> None:
    disk = source(mark=RECORDS - 1)
    harm(disk)
    found = transplant(disk).grafts[0]
    assert found.state is State.DAMAGED
    assert found.error is not None
    assert said in found.error.message


def test_a_wrong_or_missing_index_in_the_source_does_no_harm() -> None:
    disk = source()
    for path in [path for path in _files(disk, f"{ROOT}/0") if path.endswith(".idx")]:
        disk.corrupt(path, HEADER_BYTES, b"\x11" * 8)
    disk.remove(f"{ROOT}/0/{index_name(0)}")
    assert states(transplant(disk))[0] is State.TAKEN
    disk.kill()
    is_whole(opened(disk).partition(0))


def test_directories_in_use_are_refused() -> None:
    disk = source()
    running = open_directory(disk)
    with pytest.raises(DirectoryHeld, match=f"a storage runs in {ROOT}"):
        plan(disk, ROOT, TARGET)
    running.close()
    wanted = plan(disk, ROOT, TARGET)
    other = opened(disk)
    with pytest.raises(DirectoryHeld, match=f"a storage runs in {TARGET}"):
        plan(disk, ROOT, TARGET)
    with pytest.raises(DirectoryHeld):
        carry_out(disk, wanted)
    other.close()
    assert states(carry_out(disk, wanted))[0] is State.TAKEN


def test_a_source_that_is_started_meanwhile_is_noticed() -> None:
    disk = source()
    wanted = plan(disk, ROOT, TARGET)
    starting: list[Directory] = []

    def start(kind: str, path: str) -> None:
        if kind == "create" and path.startswith(f"{TARGET}/0.new/{PROMISE_NAME}") and not starting:
            disk.observer = None
            starting.append(open_directory(disk))

    disk.observer = start
    with pytest.raises(DirectoryHeld, match=f"a storage runs in {ROOT}"):
        carry_out(disk, wanted)
    assert starting
    assert not disk.exists(f"{TARGET}/0")
    starting[0].close()
    assert states(transplant(disk))[0] is State.TAKEN


def test_a_replica_that_came_meanwhile_stays() -> None:
    disk = source()
    wanted = plan(disk, ROOT, TARGET)
    directory = opened(disk)
    begin(directory, 0, records=3)
    directory.close()
    assert states(carry_out(disk, wanted))[0] is State.THERE


def test_places_that_are_none_are_refused() -> None:
    disk = source()
    disk.make_directory("empty")
    with pytest.raises(NothingHere):
        plan(disk, "empty", TARGET)
    with pytest.raises(NothingHere):
        plan(disk, "nowhere", TARGET)
    with pytest.raises(PathMissing, match="nowhere does not exist"):
        plan(disk, ROOT, "nowhere")
    disk.make_directory("empty/0")
    for pair in ((ROOT, "empty"), ("empty", TARGET)):
        with pytest.raises(ControlDamaged, match="is missing, but empty holds 0"):
            plan(disk, *pair)
    with pytest.raises(BadArgument):
        check_apart("a/b", "a/b")
    with pytest.raises(BadArgument):
        check_apart("a", "a/b")
    with pytest.raises(BadArgument):
        check_apart("a/b", "a")
    check_apart("a/b", "a/bc")


def test_clusters_are_not_mixed() -> None:
    disk = source()
    settings = PartitionSettings()
    Directory.open(disk, TARGET, key=UUID(int=9), partitions=PARTITIONS, settings=settings).close()
    with pytest.raises(ForeignCluster):
        plan(disk, ROOT, TARGET)


def test_there_must_be_room_before_anything_is_written() -> None:
    disk = source()
    disk.capacity_bytes -= disk.room() - 500
    with pytest.raises(DiskFull, match="bytes are needed, 500 are free"):
        plan(disk, ROOT, TARGET)
    assert disk.names(TARGET) == []


def test_a_disk_that_becomes_full_keeps_what_was_taken_before() -> None:
    disk = two_partitions()
    wanted = plan(disk, ROOT, TARGET)
    carry_out(disk, replace(wanted, grafts=wanted.grafts[:1]))
    left = disk.room()
    disk.capacity_bytes -= left - 300
    with pytest.raises(DiskFull) as error:
        carry_out(disk, wanted)
    assert "partition 1 was not taken" in error.value.detail_not_done
    assert disk.names(TARGET) == sorted(["0", CONTROL_NAME, IDENTITY_NAME])
    disk.capacity_bytes += left
    assert states(transplant(disk)) == {0: State.THERE, 1: State.TAKEN}


# -- crashes -----------------------------------------------------------------------------------------------------------


def _refused_target(seed: int) -> SimDisk:
    """A target with a replica that its daemon refuses; its files must never be lost."""
    disk = two_partitions(seed)
    directory = opened(disk)
    begin(directory, 0, records=3)
    directory.close()
    _damage_promise(disk, directory)
    return disk


@pytest.mark.parametrize("loss", [None, Loss.ORDERED, Loss.SCATTERED])
@pytest.mark.parametrize("make", [two_partitions, _refused_target])
def test_a_crash_before_any_operation(make: Callable[[int], SimDisk], loss: Loss | None) -> None:
    disk = make(1)
    old = bytes(disk.content(f"{TARGET}/0/{segment_name(0)}")) if make is _refused_target else None
    wanted = plan(disk, ROOT, TARGET)
    crashes: list[int] = []

    def crash(kind: str, path: str) -> None:
        if kind == "read":
            return
        crashes.append(disk.steps)
        copy = disk.clone(disk.steps)
        if loss is None:
            copy.kill()
        else:
            copy.power_cut(loss)
        _is_whole_or_not(copy, old)

    disk.observer = crash
    assert set(states(carry_out(disk, wanted)).values()) == {State.TAKEN}
    disk.observer = None
    assert len(crashes) > 50
    disk.kill()
    _is_whole_or_not(disk, old)


def _is_whole_or_not(disk: SimDisk, old: bytes | None) -> None:
    """Each partition, as its daemon finds it; then the same command again, and all of them are whole."""
    if old is not None:
        kept = [path for path in _files(disk, TARGET) if path.endswith(segment_name(0)) and disk.content(path) == old]
        assert any(".set-aside-" in path or path.startswith(f"{TARGET}/0/") for path in kept), "old files were lost"
    again = disk.clone(5)
    again.kill()
    if disk.exists(join(TARGET, CONTROL_NAME)):
        said: list[str] = []
        directory = opened(disk, said)
        for number, error in directory.errors().items():
            if error is not None:
                assert old is not None, f"partition {number} is refused: {error}"
                assert number == 0
            else:
                partition = directory.partition(number)
                assert partition.status().is_sound
                assert content(partition) == expected(number, MARK + 1 if number == 0 else RECORDS)
        assert old is not None or said == [], "the daemon had to mend something"
        directory.close()
    found = transplant(again)
    assert set(states(found).values()) <= {State.TAKEN, State.THERE}
    again.kill()
    directory = opened(again)
    is_whole(directory.partition(0))
    assert content(directory.partition(1)) == expected(1, RECORDS)
    directory.close()


def test_a_failed_flush_leaves_no_replica() -> None:
    """Whatever flush it is: the error comes out, and what is there afterwards is whole or not there."""
    steps: list[int] = []
    probe = two_partitions()
    wanted = plan(probe, ROOT, TARGET)
    start = probe.steps
    probe.observer = lambda kind, _: steps.append(probe.steps - start) if kind.startswith("flush") else None
    carry_out(probe, wanted)
    for step in steps:
        disk = two_partitions()
        wanted = plan(disk, ROOT, TARGET)
        disk.faults = {disk.steps + step: Fault.IO_ERROR}
        with pytest.raises(FlushFailed):
            carry_out(disk, wanted)
        disk.faults = {}
        disk.power_cut()
        _is_whole_or_not(disk, None)
    assert len(steps) > 20


class _Killed(BaseException):
    """The tool ends here."""


def _killed_at(disk: SimDisk, kind: str, path: str) -> None:
    """The tool is killed in front of this operation."""

    def stop(found: str, where: str) -> None:
        if (found, where) == (kind, path):
            raise _Killed

    disk.observer = stop
    with pytest.raises(_Killed):
        carry_out(disk, plan(disk, ROOT, TARGET, [0]))
    disk.observer = None
    disk.kill()


def _seen(disk: SimDisk) -> list[str]:
    """What the same command again creates, by name."""
    created: list[str] = []
    disk.observer = lambda kind, path: created.append(path) if kind == "create" else None
    assert states(transplant(disk, [0])) == {0: State.TAKEN}
    disk.observer = None
    disk.kill()
    is_whole(opened(disk).partition(0), RECORDS - 1)
    return [path.rpartition("/")[2] for path in created]


SEGMENTS = segment_ids(source(mark=RECORDS - 1).names(f"{ROOT}/0"))
BUILD = f"{TARGET}/0.new"


def test_doing_it_again_goes_on_behind_the_last_whole_segment() -> None:
    first, second, third = SEGMENTS
    disk = source(mark=RECORDS - 1)
    _killed_at(disk, "create", f"{BUILD}/{segment_name(third)}")
    copy = disk.clone(1)
    created = _seen(disk)
    assert segment_name(third) in created
    assert not {segment_name(first), segment_name(second)} & set(created)
    copy.corrupt(f"{BUILD}/{segment_name(second)}", HEADER_BYTES + 40, b"\xff")
    created = _seen(copy)
    assert segment_name(second) in created, "what was left is proven before it is kept"
    assert segment_name(first) not in created


def test_what_another_source_has_left_is_not_mixed_in() -> None:
    disk = source(mark=RECORDS - 1)
    _killed_at(disk, "create", f"{BUILD}/{segment_name(SEGMENTS[2])}")
    for path in _files(disk, f"{ROOT}/0"):
        disk.remove(path)
    directory = open_directory(disk, segment_bytes=300)
    directory.remove_partition(0, delete_files=True)
    partition = begin(directory, 0, records=RECORDS)
    partition.open_session(2)
    partition.set_low_mark(2, RECORDS - 1)
    directory.close()
    ours = segment_ids(disk.names(f"{ROOT}/0"))
    assert set(SEGMENTS) - set(ours), "the segments of this source begin elsewhere"
    _seen(disk)
    assert segment_ids(disk.names(f"{TARGET}/0")) == ours


def test_what_was_left_counts_as_room() -> None:
    disk = source(mark=RECORDS - 1)
    _killed_at(disk, "create", f"{BUILD}/{segment_name(SEGMENTS[2])}")
    needed = plan(disk, ROOT, TARGET, [0]).grafts[0].origin.room
    left = sum(entry.size for entry in disk.list(BUILD))
    disk.capacity_bytes -= disk.room() - (needed - left)
    assert plan(disk, ROOT, TARGET, [0]).of(State.READY)
    disk.capacity_bytes -= 1
    with pytest.raises(DiskFull):
        plan(disk, ROOT, TARGET, [0])
