"""The storage without its network: who gets a turn while a long tail is proven, and replicas that are made on request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import closing
from uuid import UUID

import pytest

from tests.simulation.batch_log import BatchLog
from tests.simulation.sample import (
    KEY,
    PARTITIONS,
    ROOT,
    begin,
    blank_disk,
    expected,
    open_directory,
    run_for,
    sample,
    served,
)
from tests.unit.keeping import with_calls
from tests.unit.waltzd.storage.replica import test_key_indexes
from waltzd.disk.simulated import Fault, SimDisk
from waltzd.errors import BadArgument, BeyondLog, ForeignCluster, NoSuchPartition, OtherTimeline, TooLarge, WaltzError
from waltzd.errors.operations import (
    ControlDamaged,
    Draining,
    FlushFailed,
    PartitionDamaged,
    ReadFailed,
    TooManyCallers,
    Unsafe,
)
from waltzd.format.batch import Batch, Piece
from waltzd.format.finding import Finding
from waltzd.format.key_index import LockQuery
from waltzd.format.layout import CONTROL_NAME, HEADER_BYTES, FileHeader, control_struct_offset, segment_name
from waltzd.format.record import Run
from waltzd.protocol.peers import RecordsFrame
from waltzd.protocol.timelines import FIRST, NEVER_FORKED
from waltzd.storage import calls as module
from waltzd.storage.calls import StorageCalls
from waltzd.storage.offline.verify import Options, PartitionReport, Target, verify
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.segment import Suspect


class OneFrame:
    """A link with one frame to send."""

    def __init__(self, frame: RecordsFrame) -> None:
        self._frames = [frame]
        self.marks: list[int] = []
        self.acknowledged = asyncio.Event()

    async def receive(self) -> RecordsFrame | None:
        return self._frames.pop() if self._frames else None

    def hear(self, taker: Callable[[RecordsFrame], bool]) -> None:
        """Ignore the taker: the frame is received."""

    async def send(self, durable_id: int) -> None:
        self.marks.append(durable_id)
        self.acknowledged.set()

    @property
    def may_post(self) -> bool:
        return False  # nothing arrives at once

    def post(self, durable_id: int) -> None:
        raise AssertionError("it may not")

    async def refuse(self, error: WaltzError) -> None:
        raise error


class QuietLink(OneFrame):
    """A link whose owner has nothing to send."""

    def __init__(self) -> None:
        super().__init__(RecordsFrame(run_for(0, 0, 1), -1))
        self._hung_up = asyncio.Event()

    def hang_up(self) -> None:
        self._hung_up.set()

    async def receive(self) -> RecordsFrame | None:
        await self._hung_up.wait()
        return None


def test_proving_a_long_tail_takes_a_turn_for_each_segment() -> None:
    disk = blank_disk()
    directory = open_directory(disk)
    begin(directory, 0, records=200)
    begin(directory, 1, records=3)
    disk.kill()

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.open_session(1, 2, PARTITIONS)
        turns.clear()
        opening = asyncio.create_task(calls.open_session(0, 2, PARTITIONS))
        for id_ in range(3, 10):
            link = OneFrame(RecordsFrame(run_for(1, id_, 1), -1))
            await calls.append(1, 2, link)
            assert link.marks == [id_]
        assert not opening.done(), "the others waited until everything was proven"
        assert (await opening).last_id == 199

    turns, _ = with_calls(disk, test)
    assert sum("prove_next" in turn for turn in turns) > 20


def test_an_owner_is_fenced_before_the_tail_is_proven_and_can_be_fenced_meanwhile() -> None:
    disk = blank_disk()
    begin(open_directory(disk), 0, records=200)
    disk.kill()

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        first = asyncio.create_task(calls.open_session(0, 5, PARTITIONS))
        while calls.directory.partition(0).promised_session < 5:
            await asyncio.sleep(0)
        second = asyncio.create_task(calls.open_session(0, 6, PARTITIONS))
        results = await asyncio.gather(first, second, return_exceptions=True)
        assert "StaleSession" in repr(results[0])
        assert not isinstance(results[1], BaseException)
        assert results[1].promised_session == 6

    with_calls(disk, test)


def test_an_owner_can_ask_for_an_empty_replica_where_nothing_is() -> None:
    disk = sample(6)
    for entry in disk.list(f"{ROOT}/0"):
        disk.remove(f"{ROOT}/0/{entry.name}")
    disk.remove(f"{ROOT}/1/promise")
    for number in (0, 1):
        disk.flush_directory(f"{ROOT}/{number}")

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        for number in (0, 1, 2):
            with pytest.raises((NoSuchPartition, PartitionDamaged)):
                await calls.open_session(number, 7, PARTITIONS)
        with pytest.raises(ForeignCluster):
            await calls.open_session(0, 7, PARTITIONS + 1, create=True)
        for number in (0, 2):
            status = await calls.open_session(number, 7, PARTITIONS, create=True)
            assert (status.last_id, status.session, status.low_mark, status.is_sound) == (-1, -1, -1, True)
            again = await calls.open_session(number, 7, PARTITIONS, create=True)
            assert again.incarnation == status.incarnation
        with pytest.raises(PartitionDamaged):  # its records are here: an operator decides
            await calls.open_session(1, 7, PARTITIONS, create=True)

    with_calls(disk, test)
    disk.power_cut()
    directory = open_directory(disk)
    assert [partition.number for partition in directory.partitions()] == [0, 2]


@pytest.mark.parametrize("offset", [0, 10], ids=["its number", "its structs"])
def test_a_partition_with_a_damaged_control_record_is_rebuilt_by_removing_it(offset: int) -> None:
    disk = sample(6)
    for at in (0, 36):
        disk.corrupt(f"{ROOT}/{CONTROL_NAME}", control_struct_offset(0, 0) - 4 + offset + (at if offset else 0), b"\xa5")

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        for create in (False, True):
            with pytest.raises(ControlDamaged):
                await calls.open_session(0, 7, PARTITIONS, create=create)
        aside = await calls.remove_partition(0, delete_files=False)
        assert aside is not None
        assert len(disk.list(aside)) > 3
        assert (await calls.open_session(0, 7, PARTITIONS, create=True)).last_id == -1

    with_calls(disk, test)
    disk.power_cut()
    assert [partition.number for partition in open_directory(disk).partitions()] == [0, 1]


def test_callers_are_bounded_and_their_places_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waltzd.storage.calls.READERS_MAX", 2)
    monkeypatch.setattr("waltzd.storage.calls.APPENDERS_MAX", 2)
    disk = sample(6)

    class Silent(OneFrame):
        def __init__(self) -> None:
            super().__init__(RecordsFrame(run_for(0, 6, 1), -1))
            self.is_over = asyncio.Event()

        async def receive(self) -> RecordsFrame | None:
            await self.is_over.wait()
            return None

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.open_session(0, 7, PARTITIONS)
        reading = [calls.read(0, 7, 0, 5, 50) for _ in range(3)]
        first = [await anext(reader) for reader in reading[:2]]
        assert [run.first_id for run in first] == [0, 0]
        with pytest.raises(TooManyCallers):
            await anext(reading[2])
        async for _ in reading[0]:
            continue
        assert [run async for run in calls.read(0, 7, 0, 5, 0)] != []

        links = [Silent(), Silent()]
        streams = [asyncio.create_task(calls.append(0, 7, link)) for link in links]
        await asyncio.sleep(0)
        with pytest.raises(TooManyCallers):
            await calls.append(0, 7, Silent())
        for link in links:
            link.is_over.set()
        await asyncio.gather(*streams)
        last = OneFrame(RecordsFrame(run_for(0, 6, 1), -1))
        await calls.append(0, 7, last)
        assert last.marks == [6]

    with_calls(disk, test)


def file_of(first_id: int, count: int) -> bytes:
    header = FileHeader(created_ms=5, key=KEY, partition=0, first_id=first_id)
    return header.encode() + bytes(run_for(0, first_id, count).data)


async def in_pieces(content: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(content), 50):
        yield content[at : at + 50]


def names(disk: SimDisk) -> list[str]:
    return [name for name in disk.names(f"{ROOT}/0") if name.endswith(".new")]


def test_a_segment_file_takes_the_queue_only_for_its_place() -> None:
    disk = sample(6)
    content = file_of(6, 6)

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.open_session(0, 7, PARTITIONS)
        status = await calls.install_segment(0, 7, 6, len(content), in_pieces(content))
        assert status.last_id == 11
        assert served(calls.directory.partition(0), expected(0, 12)) == set(range(12))

    turns, _ = with_calls(disk, test)
    assert turns.count("Installation.write") == -(-len(content) // 50)
    assert names(disk) == []


def test_damage_in_a_header_is_not_handed_on() -> None:
    """In the part that means nothing: whoever serves the file does not notice, and whoever verifies the copy would."""
    disk = sample(6)
    content = bytearray(file_of(6, 6))
    content[104] ^= 0x40

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.open_session(0, 7, PARTITIONS)
        await calls.install_segment(0, 7, 6, len(content), in_pieces(bytes(content)))
        assert served(calls.directory.partition(0), expected(0, 12)) == set(range(12))

    with_calls(disk, test)
    assert verify(disk, [Target(storage=ROOT)], Options(key=KEY)).findings == []


@pytest.mark.parametrize("suffix", ["seg", "idx"])
@pytest.mark.parametrize("first_id", [4, 8], ids=["sealed", "newest"])
@pytest.mark.parametrize("at", [0, 12, 40, 127], ids=["version", "key", "first zero", "last zero"])
def test_damage_in_a_header_that_verification_finds_is_mended(first_id: int, suffix: str, at: int) -> None:
    """What the zeros and an index must be is known without another replica."""
    disk = sample(12)
    path = f"{ROOT}/0/{first_id:019d}.{suffix}"
    before = bytes(disk.content(path))

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        disk.corrupt(path, at, bytes([before[at] ^ 0x40]))
        assert [found for found in [one async for one in calls.verify(0)] if isinstance(found, Finding)] != []
        is_sound = calls.directory.partition(0).status().is_sound
        assert is_sound == (suffix == "idx" or at >= 40), "the rest of it comes from another replica"
        again = [found for found in [one async for one in calls.verify(0)] if isinstance(found, Finding)]
        assert (again == []) == is_sound
        assert not is_sound or suffix == "idx" or bytes(disk.content(path)) == before

    with_calls(disk, test)


@pytest.mark.slow
def test_a_sender_that_goes_away_at_any_moment_leaves_nothing() -> None:
    content = file_of(6, 6)
    outcomes: set[int] = set()
    for moment in range(140):
        disk = sample(6)

        async def test(calls: StorageCalls, turns: list[str]) -> None:
            await calls.open_session(0, 7, PARTITIONS)
            work = asyncio.create_task(calls.install_segment(0, 7, 6, 0, in_pieces(content)))
            for _ in range(moment):  # noqa: B023
                await asyncio.sleep(0)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            outcomes.add(calls.directory.partition(0).last_id)
            assert calls.directory.partition(0).status().is_sound

        with_calls(disk, test)
        assert names(disk) == []
    assert outcomes == {5, 11}


def test_a_storage_that_shuts_down_takes_no_more_of_a_file() -> None:
    disk = sample(6)

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.open_session(0, 7, PARTITIONS)

        async def pieces() -> AsyncIterator[bytes]:
            yield file_of(6, 6)[:200]
            calls.refuse_new()
            yield file_of(6, 6)[200:]

        with pytest.raises(Draining):
            await calls.install_segment(0, 7, 6, 0, pieces())

    with_calls(disk, test)
    assert names(disk) == []


def test_a_flush_of_a_file_that_fails_ends_the_process() -> None:
    disk = sample(6)

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.open_session(0, 7, PARTITIONS)

        def strike(kind: str, path: str) -> None:
            if kind == "flush" and path.endswith(".new"):
                disk.faults[disk.steps] = Fault.IO_ERROR

        disk.observer = strike
        with pytest.raises(FlushFailed):
            await calls.install_segment(0, 7, 6, 0, in_pieces(file_of(6, 6)))

    _, fatal = with_calls(disk, test)
    assert [type(error) for error in fatal] == [FlushFailed]


@pytest.mark.parametrize(
    ("how", "which"),
    [("rotten", 1), ("rotten", -1), ("gone", 1), ("gone", -1), ("shorter", -1)],
    ids=lambda value: {1: "sealed", -1: "newest"}.get(value, value),
)
def test_damage_that_a_verification_finds_is_known_from_then_on(which: int, how: str) -> None:
    """Otherwise the owner would not heal it before somebody reads those ids. Also where records still come."""
    disk = blank_disk()

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.create_partition(0)
        partition = calls.directory.partition(0)
        partition.open_session(1)
        partition.set_low_mark(1, -1)
        partition.append(1, [run_for(0, 0, 40)], -1)
        first_id = partition._segments.first_ids[which]
        path = f"{ROOT}/0/{segment_name(first_id)}"
        if how == "gone":
            disk.remove(path)
        elif how == "shorter":  # it ends behind a whole record
            with closing(disk.open(path, write=True)) as file:
                file.truncate(file.size() - len(run_for(0, 39, 1).data))
        else:
            disk.corrupt(path, disk.size(path) - 30, b"\xa5")
        assert partition.status().is_sound
        serving = asyncio.create_task(calls.append(0, 1, QuietLink()))
        await asyncio.sleep(0)
        found = [result async for result in calls.verify(0)]
        assert any(isinstance(result, Finding) for result in found)
        assert partition.status().damaged_segments == (first_id,)
        assert which != -1 or partition.floor == 39, "what it had it owes"
        async with asyncio.timeout(5):
            with pytest.raises(PartitionDamaged):
                await serving  # the owner is told, although it sends nothing

    with_calls(disk, test)


def test_what_is_trimmed_while_it_is_verified_is_no_finding() -> None:
    disk = blank_disk()

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.create_partition(0)
        partition = calls.directory.partition(0)
        partition.open_session(1)
        partition.append(1, [run_for(0, 0, 40)], -1)
        partition.set_low_mark(1, 39)
        path = f"{ROOT}/0/{segment_name(4)}"
        disk.corrupt(path, disk.size(path) - 30, b"\xa5")
        found = calls.verify(0)
        first = await anext(found)
        partition.trim(1, 20)
        while partition.unlink_next():
            pass
        (report,) = [one async for one in found]
        assert isinstance(report, PartitionReport)
        assert report.findings == [first]

    with_calls(disk, test)


def test_a_partition_is_quiet_while_no_append_stream_stands() -> None:
    """And one that is not here is not said to be quiet."""

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.open_session(0, 7, PARTITIONS)
        elsewhere = PARTITIONS - 1
        assert calls.quiet([0]) == [0]
        link = QuietLink()
        serving = asyncio.create_task(calls.append(0, 7, link))
        await asyncio.sleep(0)
        assert calls.quiet([0]) == []
        assert elsewhere not in calls.quiet([0, elsewhere])
        link._hung_up.set()
        await serving
        assert calls.quiet([0]) == [0]
        with pytest.raises(TooLarge):
            calls.quiet(range(PARTITIONS + 2))

    with_calls(sample(6), test)


def test_a_newest_segment_that_is_healed_for_less_than_it_had_is_not_level() -> None:
    """What it had acknowledged it must not vouch for before it has it again, whatever a start believes of the end."""
    disk = blank_disk()
    directory = open_directory(disk, segment_bytes=1 << 20)
    partition = begin(directory, 0, records=40)
    path = f"{ROOT}/0/{segment_name(0)}"
    disk.corrupt(path, disk.size(path) - 30, b"\xa5")
    partition.examine(0)
    assert (partition.last_id, partition.status().damaged_segments) == (39, (0,))
    installation = partition.begin_installation(1, 0, 0)
    for piece in (FileHeader(created_ms=0, key=KEY, partition=0, first_id=0).encode(), run_for(0, 0, 39).data):
        installation.write(piece)
    installation.prove()
    status = partition.install(1, installation)
    assert (status.last_id, status.damaged_segments) == (38, (39,)), status.findings
    disk.kill()
    again = open_directory(disk, segment_bytes=1 << 20).partition(0)
    assert not again.status().is_sound
    assert again.status().incarnation != status.incarnation
    disk.kill()


def test_files_to_which_an_owner_appends_are_not_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks, and by whichever address. Once the owner has left, they are."""
    monkeypatch.setattr(module, "LEAVE_SECONDS", 0.1)
    disk = blank_disk()
    begin(open_directory(disk), 0, records=3)
    disk.kill()

    async def test(calls: StorageCalls, _: list[str]) -> None:
        await calls.open_session(0, 7, PARTITIONS)
        link = QuietLink()
        serving = asyncio.create_task(calls.append(0, 7, link))
        await asyncio.sleep(0)
        (refused,) = await asyncio.gather(calls.remove_partition(0, delete_files=True), return_exceptions=True)
        if not isinstance(refused, Unsafe):
            await asyncio.gather(serving, return_exceptions=True)
        assert isinstance(refused, Unsafe), "the owner appends"
        assert calls.status(0).last_id == 2, "nothing was touched"
        leaving = asyncio.create_task(calls.remove_partition(0, delete_files=True))
        link.hang_up()
        await serving
        assert await leaving is None
        assert disk.names(ROOT).count("0") == 0

    with_calls(disk, test)


def test_what_was_set_aside_is_as_old_as_the_storage_knows() -> None:
    disk = blank_disk()
    directory = open_directory(disk)
    begin(directory, 0, records=3)
    begin(directory, 1, records=3)
    directory.remove_partition(1, delete_files=False)
    disk.kill()

    async def test(calls: StorageCalls, _: list[str]) -> None:
        await asyncio.sleep(0.01)
        await calls.remove_partition(0, delete_files=False)
        kept = {one.name: one.kept_ms for one in (await calls.describe()).set_aside}
        assert kept["0.set-aside-1"] == 0, "it is new"
        assert kept["1.set-aside-1"] > 0, "it was there at the start"

    with_calls(disk, test)


def test_a_partition_that_is_made_while_the_storage_closes_is_finished_first() -> None:
    disk = blank_disk()
    directory = open_directory(disk)
    for number in (0, 1):
        begin(directory, number, records=3)
    disk.kill()

    async def test(calls: StorageCalls, _: list[str]) -> None:
        made: list[asyncio.Task[str | None] | asyncio.Task[None]] = [asyncio.create_task(calls.create_partition(2))]
        await asyncio.sleep(0)
        calls.refuse_new()
        made.append(asyncio.create_task(calls.remove_partition(0, delete_files=True)))
        await asyncio.sleep(0)
        await calls.close()
        first, second = await asyncio.gather(*made, return_exceptions=True)
        assert first is None
        assert isinstance(second, Draining), "what had not begun does not begin any more"

    with_calls(disk, test)
    assert [partition.number for partition in open_directory(disk).partitions()] == [0, 1, 2]


@pytest.mark.parametrize("turns", range(8))
def test_who_gives_up_while_a_replica_is_made_or_removed_leaves_it_whole(turns: int) -> None:
    """Threads finish what they began all the same: whoever comes next finds a replica that works, or none."""

    async def give_up(work: Coroutine[object, object, object]) -> None:
        asked = asyncio.create_task(work)
        for _ in range(turns):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    async def test(calls: StorageCalls, _turns: list[str]) -> None:
        await give_up(calls.open_session(2, 1, PARTITIONS, create=True))
        assert (await calls.open_session(2, 2, PARTITIONS, create=True)).promised_session == 2
        await give_up(calls.remove_partition(2, delete_files=True))
        assert (await calls.open_session(2, 3, PARTITIONS, create=True)).promised_session == 3

    assert with_calls(blank_disk(), test)[1] == []


def test_what_stays_in_doubt_after_it_was_examined_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubtful(
        self: Partition, first_id: int, last_id: int, size: int, *, session: int | None, with_locks: bool = False
    ) -> Run:
        raise Suspect(0)

    monkeypatch.setattr(Partition, "read", doubtful)

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.open_session(0, 7, PARTITIONS)
        with pytest.raises(PartitionDamaged, match="segment at id 0"):
            [run async for run in calls.read(0, 7, 0, 5, 0)]

    with_calls(sample(6), test)


def test_who_reads_more_slowly_than_the_log_grows_comes_to_an_end() -> None:
    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.open_session(0, 7, PARTITIONS)
        found, bound = 0, 1 << 40

        async def read() -> None:
            nonlocal found
            async for run in calls.read(0, 7, 0, bound, 1):
                found += len(run)
                assert found <= 6
                await calls.append(0, 7, OneFrame(RecordsFrame(run_for(0, 5 + found, 1), -1)))

        with pytest.raises(BeyondLog, match=f"id {bound} is not here"):
            await read()
        assert found == 6, "what was there when it began"

    with_calls(sample(6), test)


def test_a_reader_of_another_timeline_gets_no_id_above_the_fork() -> None:
    """A storage that was away when an operator ended the log still has what was given up, and owes it to nobody."""
    other = UUID(int=12)

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.open_session(0, 7, PARTITIONS)
        await calls.set_low_mark(0, 7, 5)

        async def read(last_id: int, timeline: UUID | None) -> int:
            found = [run async for run in calls.read(0, None, 0, last_id, 0, timeline=timeline)]
            return sum(map(len, found))

        assert [await read(5, timeline) for timeline in (None, FIRST)] == [6, 6]
        with pytest.raises(OtherTimeline, match="which this log never had"):
            await read(5, other)
        await calls.open_session(0, 8, PARTITIONS)
        await calls.fork(0, 8, NEVER_FORKED.forked(identity=other, fork=3, session=8, cause="", began="", who=None))
        assert [await read(3, timeline) for timeline in (None, FIRST, other)] == [4, 4, 4]
        with pytest.raises(OtherTimeline, match="forked behind id 3"):
            await read(5, FIRST)

    with_calls(sample(6), test)


def test_a_reader_that_leaves_early_is_none_any_more() -> None:
    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.open_session(0, 7, PARTITIONS)
        for found in (calls.read(0, 7, 0, 5, 1), calls.read_whole(0, 7, 0, 5, 1)):
            assert await anext(found) is not None
            assert len(calls._readers) == 1
            await found.aclose()
            assert len(calls._readers) == 0

    with_calls(sample(6), test)


def test_readers_get_batches_whole_in_parts_or_only_their_locks() -> None:
    disk = sample(3)
    log = BatchLog(random.Random(2), first=[run_for(0, 0, 3)])
    log.batches = log.draw(12)

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.open_session(0, 7, PARTITIONS)
        partition = calls.directory.partition(0)
        partition.append(7, log.batches, -1)
        log.check(partition)
        whole: list[Piece] = []
        async for content in calls.read_whole(0, 7, 0, log.last_id, 2000):
            whole += [content] if isinstance(content, Run) else content
        assert [piece for piece in whole if isinstance(piece, Run)][-1].last_id == 2
        found = [piece for piece in whole if isinstance(piece, Batch)]
        assert all(ours.is_same_as(right) for ours, right in zip(found, log.batches, strict=True))
        long = next(batch for batch in log.batches if len(batch) > 1)
        async for content in calls.read_whole(0, 7, long.first_id, long.first_id, 0):
            # Who lost the head of a batch knows of one id in it, and needs all of it.
            assert isinstance(content, tuple)
            assert [piece.last_id for piece in content] == [long.last_id]
        with pytest.raises(BadArgument, match=f"no batch begins at id {long.last_id}"):
            [content async for content in calls.read_whole(0, 7, long.last_id, long.last_id, 0)]
        runs = [run async for run in calls.read(0, 7, 0, None, 700, with_locks=True)]
        assert b"".join(run.data for run in runs) == b"".join(runs_of_log(log))
        history = await calls.read_locks(0, 7, log.last_id, 1 << 20)
        assert history is not None
        assert history.first_id == 3
        time = log.batches[5].head.time
        right = max([2, *(batch.last_id for batch in log.batches if batch.head.time < time)])
        assert await calls.find_time(0, 7, time) == right
        assert (await calls.describe()).formats == (0, 1)

    with_calls(disk, test)


def runs_of_log(log: BatchLog) -> list[memoryview]:
    return [piece.data if isinstance(piece, Run) else piece.run.data for piece in log.pieces]


def test_a_reader_of_locks_that_meets_rot_is_told_and_the_owner_is_as_well() -> None:
    disk = sample(3)
    log = BatchLog(random.Random(2), first=[run_for(0, 0, 3)])
    log.batches = log.draw(12)

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.open_session(0, 7, PARTITIONS)
        partition = calls.directory.partition(0)
        partition.append(7, log.batches, -1)
        name = sorted(log.files(KEY))[-1]
        disk.corrupt(f"{ROOT}/0/{name}", HEADER_BYTES + 50, b"\xff\xff")
        with pytest.raises(PartitionDamaged):
            await calls.read_locks(0, 7, log.last_id, 1 << 20)
        assert not partition.status().is_sound

    with_calls(disk, test)


def test_a_segment_that_is_cut_before_its_turn_to_be_examined_ends_nothing() -> None:
    """A reader met wrong bytes in it while a new owner cut it away. The storage ended by a mistake in Waltz itself."""

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.open_session(0, 7, PARTITIONS)
        queue = calls.queue_of(0)
        assert queue is not None
        first_id, _ = queue.partition.sealed_segments()[-1]
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            group.create_task(calls.truncate(0, 7, first_id - 2))
            group.create_task(calls.examine(queue, first_id))
        assert calls.status(0).last_id == first_id - 2

    assert with_calls(sample(), test)[1] == []


class Emptied(dict[int, Partition]):
    """Replicas that another thread removes while their numbers are sorted."""

    def __iter__(self) -> Iterator[int]:
        numbers = list(super().__iter__())
        self.clear()
        return iter(numbers)


def test_a_replica_that_is_removed_while_all_are_listed_ends_nothing() -> None:
    """The loop, the scrub and the metrics list them while another thread removes one, and any of them ended the storage."""
    directory = open_directory(sample())
    directory._partitions = Emptied(directory._partitions)
    assert [partition.number for partition in directory.partitions()] == [0, 1]


@pytest.mark.parametrize("how", ["locks", "marks", "time", "file"])
def test_a_bad_sector_is_known_from_its_first_reader_on(how: str) -> None:
    """Whatever was read. A scrub may take a week to come there, or be off."""
    disk, partition, log = test_key_indexes.written()
    first_id, last_id = partition.sealed_segments()[2]
    time = next(batch.head.time for batch in log.batches if batch.last_id == last_id)
    query = LockQuery(lock=99, first_id=first_id, last_id=last_id, limit=1)
    disk.kill()

    def fail(kind: str, where: str) -> None:
        if kind == "read" and where == f"{ROOT}/0/{segment_name(first_id)}":
            disk.faults[disk.steps] = Fault.IO_ERROR

    async def test(calls: StorageCalls, turns: list[str]) -> None:
        await calls.open_session(0, 4, PARTITIONS)
        disk.observer = fail
        reads: dict[str, Callable[[], Awaitable[object]]] = {
            "locks": lambda: calls.read_locks(0, 4, last_id, 1),
            "marks": lambda: calls.find_marks(0, 4, query),
            "time": lambda: calls.find_time(0, 4, time),
            "file": lambda: anext(calls.fetch_segment(0, 4, first_id)),
        }
        with pytest.raises((PartitionDamaged, ReadFailed)):
            await reads[how]()
        assert calls.status(0).damaged_segments == (first_id,)

    assert with_calls(disk, test)[1] == []
