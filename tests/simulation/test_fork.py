"""One replica goes over to another timeline: what it set aside, what it may claim, and a crash before every operation."""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

import pytest

from tests.simulation.sample import (
    KEY,
    ROOT,
    begin,
    blank_disk,
    expected,
    hard_state_path,
    open_directory,
    records_of,
    run_for,
    segment_path,
)
from waltzd.disk.simulated import Loss, SimDisk
from waltzd.errors import OtherTimeline, WaltzError
from waltzd.errors.operations import StaleSession
from waltzd.format.layout import aside_build_name, aside_partition, is_aside_build
from waltzd.format.scan import survey
from waltzd.format.span import Span
from waltzd.protocol.timelines import NEVER_FORKED, Lineage
from waltzd.storage.replica.control import ControlFile
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.replica_context import ReplicaContext

RECORDS = 30
FORK = 11
SECOND = NEVER_FORKED.forked(identity=UUID(int=2), fork=FORK, session=5, cause="rescue", began="now", who="me")
THIRD = SECOND.forked(identity=UUID(int=3), fork=5, session=9, cause="rescue", began="now", who="me")


class Crash(BaseException):
    """The machine stops before the next operation of the disk."""


def crash_after(disk: SimDisk, steps: int) -> None:
    last = disk.steps + steps

    def observe(kind: str, path: str) -> None:
        if disk.steps > last:
            raise Crash

    disk.observer = observe


def of_the_old_timeline(seed: int = 0) -> SimDisk:
    """A storage that knows that ids up to 26 are committed, and holds some more."""
    disk = blank_disk(seed)
    directory = open_directory(disk)
    partition = begin(directory, 0, records=20)
    partition.open_session(2)
    partition.set_low_mark(2, 19)
    partition.append(2, [run_for(0, 20, RECORDS - 20)], 26)
    directory.close()
    return disk


def held(partition: Partition) -> list[bytes]:
    out: list[bytes] = []
    while len(out) <= partition.last_id:
        run = partition.read(len(out), partition.last_id, 1 << 20, session=partition.promised_session)
        out += records_of(run)
    return out


def set_aside(disk: SimDisk) -> list[bytes]:
    """The records above the fork in what was set aside: one directory, also after a crash."""
    out: dict[int, bytes] = {}

    def take(span: Span) -> None:
        for id_, record in enumerate(records_of(span.run), span.first_id):
            assert out.setdefault(id_, record) == record

    folders = [entry.name for entry in disk.list(ROOT) if entry.is_directory and entry.name != "0"]
    assert [aside_partition(name) for name in folders] == [0], folders
    for folder in folders:
        for name in disk.names(f"{ROOT}/{folder}"):
            file = disk.open(f"{ROOT}/{folder}/{name}")
            survey(file, first_id=int(name[:-4]), end=file.size(), version=0, on_span=take)
    return [record for id_, record in sorted(out.items()) if id_ > FORK]


def check_gone_over(partition: Partition, disk: SimDisk, session: int) -> None:
    status = partition.status()
    assert (status.timeline, status.last_id, status.is_sound) == (SECOND.current, FORK, True)
    assert max(status.low_mark, status.local_low_mark, status.committed) <= FORK
    assert held(partition) == expected(0, FORK + 1)
    assert set_aside(disk) == expected(0, RECORDS)[FORK + 1 :]
    partition.set_low_mark(session, FORK)
    partition.append(session, [run_for(1, FORK + 1, 5)], FORK)
    assert partition.last_id == FORK + 5


def test_what_is_above_the_fork_is_set_aside_and_the_log_goes_on() -> None:
    disk = of_the_old_timeline()
    directory = open_directory(disk)
    partition = directory.partition(0)
    partition.open_session(6)
    assert partition.fork(6, SECOND).timeline == SECOND.current
    check_gone_over(partition, disk, 6)
    directory.close()
    partition = open_directory(disk).partition(0)
    assert partition.status().timelines == tuple(one.bare for one in SECOND.later)
    partition.open_session(7)
    asides = [entry.name for entry in disk.list(ROOT)]
    assert partition.fork(7, SECOND).last_id == FORK + 5, "asked again, nothing is cut"
    assert [entry.name for entry in disk.list(ROOT)] == asides


def test_a_replica_that_holds_less_only_learns_the_timeline() -> None:
    disk = blank_disk()
    partition = begin(open_directory(disk), 0, records=8)
    partition.open_session(6)
    status = partition.fork(6, SECOND)
    assert (status.last_id, status.timeline) == (7, SECOND.current)
    assert [aside_partition(entry.name) for entry in disk.list(ROOT) if entry.is_directory] == [None]


def copying(seed: int = 0) -> tuple[SimDisk, Partition]:
    """A replica that has begun a session up to whose beginning, id 9, it still copies: it holds 8 records."""
    disk = blank_disk(seed)
    partition = begin(open_directory(disk), 0, records=8)
    partition.open_session(4)
    partition.set_low_mark(4, 9)
    assert (partition.status().low_mark, partition.last_id) == (9, 7)
    return disk, partition


@pytest.mark.parametrize("fork", [5, 7, 8])
def test_the_marks_of_a_replica_that_copies_go_down_to_the_fork(fork: int) -> None:
    """They are above what it holds. It refused the lower mark of every session after the fork, W2014, and a partition of
    such replicas could not be opened, nor rescued again."""
    disk, partition = copying()
    lineage = NEVER_FORKED.forked(identity=UUID(int=2), fork=fork, session=5, cause="rescue", began="now", who="me")
    partition.open_session(6)
    status = partition.fork(6, lineage)
    assert (status.last_id, status.timeline) == (min(7, fork), lineage.current)
    assert max(status.low_mark, status.local_low_mark, status.committed) <= fork
    partition.set_low_mark(6, fork)
    partition.append(6, [run_for(1, status.last_id + 1, 9)], fork)
    assert partition.last_id == status.last_id + 9
    assert disk.exists(ROOT)


def test_a_crash_while_the_marks_of_a_replica_that_copies_go_down() -> None:
    lineage = NEVER_FORKED.forked(identity=UUID(int=2), fork=7, session=5, cause="rescue", began="now", who="me")
    for steps in range(20):
        disk, partition = copying(steps)
        partition.open_session(6)
        crash_after(disk, steps)
        try:
            partition.fork(6, lineage)
            is_done = True
        except Crash:
            is_done = False
        disk.observer = None
        disk.power_cut(Loss.SCATTERED)
        partition = open_directory(disk).partition(0)
        partition.open_session(7)
        status = partition.fork(7, lineage)
        assert (status.last_id, status.timeline) == (7, lineage.current)
        partition.set_low_mark(7, 7)
        partition.append(7, [run_for(1, 8, 3)], 7)
        if is_done:
            break
    else:
        raise AssertionError("the change has more operations than were tried")
    assert steps > 3


def test_damage_below_the_fork_is_set_aside_with_all_that_follows() -> None:
    disk = of_the_old_timeline()
    first_ids = sorted(int(name[:-4]) for name in disk.names(f"{ROOT}/0") if name.endswith(".seg"))
    damaged = max(first_id for first_id in first_ids if first_id <= FORK)
    disk.corrupt(segment_path(0, damaged), 140, b"\xff\xee\xdd")
    partition = open_directory(disk).partition(0)
    partition.open_session(6)
    partition.examine(damaged)
    assert not partition.status().is_sound
    status = partition.fork(6, SECOND)
    assert (status.last_id, status.is_sound, status.timeline) == (damaged - 1, True, SECOND.current)
    assert status.certain <= damaged - 1
    assert held(partition) == expected(0, damaged)


def test_two_forks_end_a_replica_at_the_lower_one() -> None:
    disk = of_the_old_timeline()
    partition = open_directory(disk).partition(0)
    partition.open_session(10)
    assert partition.fork(10, THIRD).last_id == 5


def test_a_timeline_that_the_log_never_had_is_refused_and_nothing_is_touched() -> None:
    disk = of_the_old_timeline()
    partition = open_directory(disk).partition(0)
    partition.open_session(6)
    partition.fork(6, SECOND)
    other = NEVER_FORKED.forked(identity=UUID(int=9), fork=3, session=6, cause="rescue", began="now", who="me")
    for lineage in (other, NEVER_FORKED):
        with pytest.raises(OtherTimeline, match="never had"):
            partition.fork(6, lineage)
    assert partition.last_id == FORK


def test_only_the_owner_of_the_promised_session_ends_a_log() -> None:
    partition = open_directory(of_the_old_timeline()).partition(0)
    partition.open_session(6)
    with pytest.raises(StaleSession):
        partition.fork(5, SECOND)
    partition.set_low_mark(6, RECORDS - 1)
    with pytest.raises(OtherTimeline, match="in session 6"):
        partition.fork(6, SECOND)
    assert partition.last_id == RECORDS - 1


@pytest.mark.parametrize("loss", [None, Loss.ORDERED, Loss.SCATTERED])
def test_a_crash_before_every_operation_loses_nothing_and_claims_nothing(loss: Loss | None) -> None:
    """Whenever it names the new timeline it holds nothing of the old one; and what stood above the fork is on the disk."""
    steps = 0
    while True:
        steps += 1
        disk = of_the_old_timeline(steps)
        partition = open_directory(disk).partition(0)
        partition.open_session(6)
        crash_after(disk, steps)
        try:
            partition.fork(6, SECOND)
        except Crash:
            disk.observer = None
        else:
            break
        disk.kill() if loss is None else disk.power_cut(loss)
        again = open_directory(disk)
        partition = again.partition(0)
        status = partition.status()
        if status.timeline == SECOND.current:
            assert status.last_id == FORK
            assert status.certain <= FORK
        assert status.is_sound
        partition.open_session(7)
        partition.fork(7, SECOND)
        check_gone_over(partition, disk, 7)
    assert steps > 10


def test_a_copy_that_was_not_finished_goes_away_with_the_next_start() -> None:
    disk = of_the_old_timeline()
    partition = open_directory(disk).partition(0)
    partition.open_session(6)

    def observe(kind: str, path: str) -> None:
        if kind == "write" and is_aside_build(path.split("/")[-2]):
            raise Crash

    disk.observer = observe
    with pytest.raises(Crash):
        partition.fork(6, SECOND)
    disk.observer = None
    disk.kill()
    assert [entry.name for entry in disk.list(ROOT) if is_aside_build(entry.name)] == [aside_build_name(0)]
    partition = open_directory(disk).partition(0)
    assert [entry.name for entry in disk.list(ROOT) if entry.is_directory] == ["0"]
    assert held(partition) == expected(0, RECORDS)


def test_the_lineage_survives_in_either_slot() -> None:
    disk = of_the_old_timeline()
    directory = open_directory(disk)
    directory.partition(0).open_session(6)
    directory.partition(0).fork(6, SECOND)
    for slot in (0, 4096):
        copy = disk.clone(slot + 1)
        copy.kill()
        copy.corrupt(hard_state_path(0), slot + 50, b"\xff\xee")
        partition = open_directory(copy).partition(0)
        assert partition.lineage == Lineage(SECOND.later)
        assert partition.key == KEY


def keeps_nothing(context: ReplicaContext, first_ids: Iterable[int], why: str) -> str:
    return ""


def test_segments_that_are_not_set_aside_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waltzd.storage.replica.partition.set_segments_aside", keeps_nothing)
    with pytest.raises(AssertionError):
        test_what_is_above_the_fork_is_set_aside_and_the_log_goes_on()


def test_marks_that_are_not_lowered_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlFile, "lower_marks", lambda *_: None)
    with pytest.raises((AssertionError, WaltzError)):
        test_what_is_above_the_fork_is_set_aside_and_the_log_goes_on()
