"""From a store to a replica: every cut gives exactly the log up to it, whatever was killed; and nothing wrong is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tests.archives import Uploads, unsealed
from tests.batches import batches_of
from tests.simulation.faulty_store import FaultyStore, Killed
from tests.simulation.sample import KEY, ROOT, blank_disk, open_directory, records_of
from waltzd.archive import restoration
from waltzd.archive.cut_point import ArchivedLog, UnsealedRecords
from waltzd.archive.restoration import RestoredPartition, restore_partition
from waltzd.disk.seam import join
from waltzd.disk.simulated import Fault, Loss, SimDisk
from waltzd.errors.operations import ArchiveDamaged, FlushFailed, StaleSession, TargetNotEmpty
from waltzd.format.batch import Batch
from waltzd.format.layout import index_name, segment_name
from waltzd.format.record import encode_payloads
from waltzd.storage.offline.verify import Options, Target, verify
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.restored import folder_for, give_name

OLD = UUID(int=0x01D)
"""The key of the cluster that was archived."""
SESSION = 77
PAYLOADS = [[b"a", b"b"], [b"c"], [b"d"], [b"e" * 40, b"f", b"g"], [b"h", b"i"], [b"j"], [b"k", b"l", b"m"], [b"n"]]
FOLLOWS = [[False, True], None, None, [False, True, True], None, None, [False, False, True], None]


async def at_once(function: Callable[..., Any], /, *arguments: Any) -> Any:
    await asyncio.sleep(0)
    return function(*arguments)


def batches() -> list[Batch]:
    """Three segments of ids 0 to 2, 3 to 6 and 7 to 9, and what is not sealed, of ids 10 to 13."""
    return batches_of(PAYLOADS, follows=FOLLOWS, cuts=[1, 3, 5])


def archived(store: FaultyStore | None = None, *, has_index: bool = True, has_rest: bool = True) -> ArchivedLog:
    uploads = Uploads(store or FaultyStore(), cluster=OLD)
    rest = uploads.batches(batches(), has_index=has_index)
    return uploads.log(*([unsealed(rest)] if has_rest else []))


def mixed(*, has_index: bool = True) -> ArchivedLog:
    """A log that began in format 0: ids 0 to 2 and 3 to 4, then batches."""
    uploads = Uploads(FaultyStore(), cluster=OLD)
    uploads.records(encode_payloads(0, [b"x", b"yy", b"z" * 50]), has_index=has_index)
    uploads.records(encode_payloads(3, [b"v", b"w"]), has_index=has_index)
    uploads.batches(batches_of([[b"a", b"b"], [b"c"]], first_id=5, cuts=[1]), has_index=has_index)
    return uploads.log()


def restore(disk: SimDisk, log: ArchivedLog, mark: int, *, key: UUID = KEY, session: int = SESSION) -> RestoredPartition:
    """As a storage does it; its directory is closed afterwards."""
    return asyncio.run(_restore(disk, log, mark, key, session))


async def _restore(disk: SimDisk, log: ArchivedLog, mark: int, key: UUID, session: int) -> RestoredPartition:
    directory = open_directory(disk)
    try:
        folder = folder_for(ROOT, 0)
        run: Callable[..., Awaitable[Any]] = at_once
        built = await restore_partition(disk, log, mark, key=key, folder=folder, run=run)
        give_name(
            disk, ROOT, directory.control, 0, session=session, last_id=built.last_id, newest=built.newest,
            segments=built.segments,
        )  # fmt: skip
        directory.stand(0)
        return built
    finally:
        directory.close()


def records(partition: Partition) -> list[bytes]:
    """All that it serves."""
    found: list[bytes] = []
    while len(found) <= partition.last_id:
        found += records_of(partition.read(len(found), partition.last_id, 1 << 20, session=None))
    return found


LOG = [record for batch in batches_of(PAYLOADS) for record in records_of(batch.run)]


def check(disk: SimDisk, mark: int, *, session: int = SESSION) -> Directory:
    """The replica stands as at the end of a session that closed at the mark, and every byte of it is sound."""
    report = verify(disk, [Target(storage=ROOT)], Options(key=KEY, is_deep=True))
    assert report.findings == []
    directory = open_directory(disk)
    status = directory.partition(0).status()
    assert (status.last_id, status.committed, status.low_mark, status.local_low_mark) == (mark, mark, mark, mark)
    assert (status.session, status.promised_session) == (session, session)
    assert status.is_sound
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("has_index", [True, False])
def test_each_end_of_a_batch_is_an_end_that_a_log_may_have(has_index: bool) -> None:
    ends = [-1, *(batch.last_id for batch in batches())]
    for mark in range(-1, len(LOG)):
        disk, log = blank_disk(), archived(has_index=has_index)
        assert log.at_mark(mark).mark == max(end for end in ends if end <= mark)
        if mark not in ends:
            with pytest.raises(ArchiveDamaged, match=f"no batch ends at id {mark}"):
                restore(disk, log, mark)
            continue
        built = restore(disk, log, mark)
        assert built.segments == max(1, len([first for first in (0, 3, 7, 10) if first <= mark]))
        directory = check(disk, mark)
        assert records(directory.partition(0)) == LOG[: mark + 1]
        directory.close()


@pytest.mark.parametrize("has_index", [True, False])
def test_a_log_that_began_in_format_0_is_cut_at_any_of_its_ids(has_index: bool) -> None:
    old = [*records_of(encode_payloads(0, [b"x", b"yy", b"z" * 50])), *records_of(encode_payloads(3, [b"v", b"w"]))]
    new = [record for batch in batches_of([[b"a", b"b"], [b"c"]], first_id=5) for record in records_of(batch.run)]
    for mark in (0, 1, 2, 3, 4, 6, 7):
        disk = blank_disk()
        assert mixed().at_mark(mark).mark == mark
        restore(disk, mixed(has_index=has_index), mark)
        directory = check(disk, mark)
        assert records(directory.partition(0)) == [*old, *new][: mark + 1]
        directory.close()
    assert mixed().at_mark(5).mark == 4


def test_records_of_format_0_that_were_saved_behind_the_segments_are_cut_as_well() -> None:
    run = encode_payloads(3, [b"v", b"w" * 20, b""])
    for mark in (2, 3, 4, 5):
        uploads = Uploads(FaultyStore(), cluster=OLD)
        uploads.records(encode_payloads(0, [b"x", b"yy", b"z" * 50]))
        log = uploads.log(UnsealedRecords(first=3, last=5, version=0, data=bytes(run.data)))
        disk = blank_disk()
        restore(disk, log, mark)
        directory = check(disk, mark)
        assert records(directory.partition(0))[3:] == records_of(run)[: mark - 2]
        directory.close()


def test_an_owner_goes_on_behind_it() -> None:
    """Also where the log was cut in the middle of what had been a sealed segment."""
    for mark in (1, 2, 3, 9, 13):
        disk = blank_disk()
        restore(disk, archived(), mark)
        directory = check(disk, mark)
        partition = directory.partition(0)
        with pytest.raises(StaleSession):
            partition.open_session(SESSION - 1)
        partition.open_session(SESSION + 1)
        partition.set_low_mark(SESSION + 1, mark)
        more = batches_of([[b"new"], [b"newer"]], first_id=mark + 1, before=partition.status().end)
        assert partition.append(SESSION + 1, more, mark) == mark + 2
        directory.close()
        assert verify(disk, [Target(storage=ROOT)], Options(key=KEY, is_deep=True)).findings == []


def test_under_its_own_key_a_replica_has_the_same_bytes_as_before() -> None:
    store = FaultyStore()
    log = archived(store)
    disk = blank_disk()
    disk_files = asyncio.run(_files_of(disk, log, 9, OLD))
    for piece in log.pieces:
        whole = store.objects[piece.name(0)].data
        size = piece.size - piece.index_bytes
        assert disk_files[segment_name(piece.first)] == whole[:size]
        assert disk_files[index_name(piece.first)] == whole[size:]


@pytest.mark.parametrize(("read", "step"), [(128, 128), (200, 150), (131, 129), (1 << 20, 133)])
def test_wherever_the_steps_end_in_which_an_object_is_copied_the_files_are_the_same(
    read: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for log in (archived(), mixed()):
        expected = asyncio.run(_files_of(begun(), log, log.last, KEY))
        with monkeypatch.context() as patch:
            patch.setattr(restoration, "READ_BYTES", read)
            patch.setattr(restoration, "STEP_BYTES", step)
            assert asyncio.run(_files_of(begun(), log, log.last, KEY)) == expected


def begun() -> SimDisk:
    """With a storage's directory that has no replica."""
    disk = blank_disk()
    open_directory(disk).close()
    return disk


async def _files_of(disk: SimDisk, log: ArchivedLog, mark: int, key: UUID) -> dict[str, bytes]:
    await restore_partition(disk, log, mark, key=key, folder=join(ROOT, "0.new"), run=at_once)
    return {name: bytes(disk.content(join(f"{ROOT}/0.new", name))) for name in disk.names(f"{ROOT}/0.new")}


# -- killed ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loss", [None, Loss.ORDERED, Loss.SCATTERED])
def test_a_crash_before_any_operation_leaves_a_whole_replica_or_none(loss: Loss | None) -> None:
    disk, left = begun(), list[SimDisk]()

    def crash(kind: str, path: str) -> None:
        if kind == "read":
            return
        left.append(disk.clone(disk.steps))
        left[-1].kill() if loss is None else left[-1].power_cut(loss)

    disk.observer = crash
    restore(disk, archived(), 12)
    disk.observer = None
    assert len(left) > 50
    outcomes = set[bool]()
    for copy in left:
        directory = open_directory(copy)
        outcomes.add(is_there := bool(directory.errors()))
        if is_there:
            assert records(directory.partition(0)) == LOG[:13]
            assert directory.partition(0).status().is_sound
        directory.close()
        if not is_there:
            restore(copy, archived(), 12)
        check(copy, 12).close()
    assert outcomes == {True, False}


def test_a_run_that_was_killed_is_gone_on_with() -> None:
    """Before each request to the store; what is there already is not fetched again, and a wrong one is."""
    killed = 0
    while True:
        disk, store = blank_disk(), FaultyStore()
        log = archived(store)
        store.log.clear()
        store.operations, store.kill_at = 0, killed
        try:
            restore(disk, log, 13)
            break
        except Killed:
            disk.kill()
        store.kill_at = None
        if killed == 2:
            path = f"{ROOT}/0.new/{segment_name(0)}"
            if disk.exists(path):
                content = bytearray(disk.content(path))
                content[140] ^= 1
                file = disk.create(path)
                file.write(0, bytes(content))
                file.flush()
                file.close()
        restore(disk, log, 13)
        check(disk, 13).close()
        killed += 1
    assert killed == 9  # the footer of each object, the object, and the end of its footer


@pytest.mark.slow
@pytest.mark.parametrize("loss", [Loss.ORDERED, Loss.SCATTERED])
def test_what_is_kept_is_on_the_disk(loss: Loss) -> None:
    """One run has left whole segments, the first of them rots, a second run is killed before any operation, a third one
    ends well, and then the power fails."""
    disk, left = begun(), list[SimDisk]()
    asyncio.run(_files_of(disk, archived(has_rest=False), 9, KEY))
    disk.content(f"{ROOT}/0.new/{segment_name(0)}")[140] ^= 1
    disk.observer = lambda _kind, _path: left.append(disk.clone(disk.steps))
    restore(disk, archived(), 13)
    disk.observer = None
    for copy in left:
        copy.kill()
        directory = open_directory(copy)
        is_there = bool(directory.errors())
        directory.close()
        if not is_there:
            restore(copy, archived(), 13)
        copy.power_cut(loss)
        check(copy, 13).close()


def test_a_flush_that_fails_is_no_file_that_has_to_be_written_again() -> None:
    """What the system could not write of it may be read as before."""
    disk = begun()
    asyncio.run(_files_of(disk, archived(has_rest=False), 9, KEY))

    def fail(kind: str, path: str) -> None:
        if kind == "flush" and path.endswith(segment_name(0)) and not disk.faults:
            disk.faults[disk.steps] = Fault.IO_ERROR

    disk.observer = fail
    with pytest.raises(FlushFailed):
        restore(disk, archived(), 13)


def test_whole_segments_of_a_run_that_was_killed_are_kept_and_those_of_another_log_are_not() -> None:
    disk = begun()
    asyncio.run(_files_of(disk, archived(has_rest=False), 9, KEY))
    assert restore(disk, archived(), 13).kept == 2  # the last one may have been cut
    check(disk, 13).close()
    for key, wanted in ((KEY, 0), (OLD, 0)):
        disk, uploads = begun(), Uploads(FaultyStore(), cluster=OLD)
        uploads.batches(batches_of([[b"A", b"B"], [b"C"], [b"D"]], cuts=[1, 2]))
        asyncio.run(_files_of(disk, uploads.log(), 3, key))
        assert restore(disk, archived(), 13).kept == wanted
        check(disk, 13).close()


# -- what is not taken -------------------------------------------------------------------------------------------------


def test_each_wrong_byte_in_the_store_is_named_and_nothing_counts() -> None:
    log = archived(store := FaultyStore())
    for piece in log.pieces:
        name = piece.name(0)
        right = store.objects[name].data
        for at in {0, 20, 130, piece.size - piece.index_bytes - 3, piece.size - 1}:
            wrong = bytearray(right)
            wrong[at] ^= 4
            store.objects[name].data = bytes(wrong)
            disk = blank_disk()
            with pytest.raises(ArchiveDamaged, match=f"the ids {piece.first} to {piece.last}, has other bytes"):
                restore(disk, log, 13)
            directory = open_directory(disk)
            assert directory.errors() == {}
            directory.close()
            store.objects[name].data = right
            restore(disk, log, 13)
    del store.objects[log.pieces[1].name(0)]
    with pytest.raises(ArchiveDamaged, match="the ids 3 to 6, is not there"):
        restore(blank_disk(), log, 13)
    restore(blank_disk(), log, 2)


def test_nothing_is_written_over() -> None:
    disk = blank_disk()
    restore(disk, archived(), 13)
    with pytest.raises(TargetNotEmpty):
        restore(disk, archived(), 9)
    check(disk, 13).close()


def test_segments_that_are_not_of_one_log_are_not_restored() -> None:
    """Each of them is whole, and two logs were mixed: the footer of one does not name the one in front of it."""
    mine, other = archived(), FaultyStore()
    other_batches = batches_of([[b"A", b"B"], [b"C"], *PAYLOADS[2:]], follows=FOLLOWS, cuts=[1, 3, 5])
    uploads = Uploads(other, cluster=OLD)
    uploads.batches(other_batches)
    foreign = uploads.log().pieces[0]
    pieces = (foreign, *mine.pieces[1:])
    mine.archive.store.put_new(foreign.name(0), other.objects[foreign.name(0)].data)
    mixed_up = ArchivedLog(mine.archive, replace(mine.manifest, entries=pieces), mine.rest)
    disk = blank_disk()
    with pytest.raises(ArchiveDamaged, match="its footer names another footer in front"):
        restore(disk, mixed_up, 13)
    assert not disk.exists(f"{ROOT}/0.new")
    restore(disk, ArchivedLog(mine.archive, replace(mine.manifest, entries=pieces[:1])), 2)
