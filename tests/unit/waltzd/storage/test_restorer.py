"""What a storage makes out of an archive when it is told to: once, whole or not at all, and never over anything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from tests.archives import ARCHIVE, Uploads
from tests.batches import batches_of
from tests.simulation.faulty_store import FaultyStore
from tests.simulation.sample import KEY, PARTITIONS, blank_disk, open_directory, run_for
from tests.unit.keeping import CONFIG, begun
from waltzd.disk.simulated import Fault, SimDisk
from waltzd.errors import BadArgument, NoSuchPartition, WaltzError
from waltzd.errors.operations import ArchiveDamaged, DiskFull, FlushFailed, ForeignArchive, TargetNotEmpty, TooManyCallers
from waltzd.protocol.descriptions import RestoreOrder, Restoring
from waltzd.storage.archiver import ArchivedSource
from waltzd.storage.calls import StorageCalls
from waltzd.storage.replica.partition import Partition
from waltzd.storage.restorer import Restorer

OLD = UUID(int=0x01D)


def stored() -> tuple[FaultyStore, RestoreOrder]:
    """Ids 0 to 1, 2 and 3 in three segments."""
    store = FaultyStore()
    uploads = Uploads(store, cluster=OLD)
    uploads.batches(batches_of([[b"a", b"b"], [b"c"], [b"d"]], cuts=[0, 1, 2]))
    manifest = uploads.manifest
    return store, RestoreOrder(
        store="there", archive=ARCHIVE, cluster=OLD, partition=0, number=manifest.number, sha256=manifest.sha256, mark=3,
        session=9,
    )  # fmt: skip


Test = Callable[[StorageCalls, Restorer], Coroutine[Any, Any, None]]


def with_restorer(store: FaultyStore, test: Test, disk: SimDisk | None = None, *, free: int = 0) -> list[BaseException]:
    """Threads are turns on the loop; what was called fatal comes back."""
    fatal: list[BaseException] = []

    async def run(function: Callable[..., Any], /, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return function(*arguments)

    def in_turn(function: Callable[..., Any], /, *arguments: Any) -> Awaitable[Any]:
        return asyncio.shield(asyncio.ensure_future(run(function, *arguments)))

    async def all_of_it() -> None:
        there = disk or blank_disk()
        calls = StorageCalls(
            there, open_directory(there), replace(CONFIG, free_bytes_min=free), run_writing=in_turn, run_reading=in_turn,
            on_fatal=fatal.append,
        )  # fmt: skip
        calls.start()
        await test(calls, Restorer(calls, there, in_turn, fatal.append, lambda _: store))
        if not fatal:
            await calls.close()

    asyncio.run(all_of_it())
    return fatal


async def states(restorer: Restorer, order: RestoreOrder) -> list[Restoring]:
    return [state async for state in restorer.restore(order)]


async def refusal(restorer: Restorer, order: RestoreOrder) -> WaltzError:
    with pytest.raises(WaltzError) as caught:
        await states(restorer, order)
    return caught.value


def test_a_replica_is_there_when_that_is_said_and_a_second_order_changes_nothing() -> None:
    store, order = stored()

    async def test(calls: StorageCalls, restorer: Restorer) -> None:
        found = await states(restorer, order)
        last = found[-1]
        assert [state.status for state in found[:-1]] == [None] * (len(found) - 1)
        assert last.status == calls.status(0)
        assert (last.status.last_id, last.status.session, last.bytes) == (3, 9, last.bytes_total)
        steps = store.operations
        assert [state.status for state in await states(restorer, order)] == [last.status]
        assert store.operations == steps
        for other in (replace(order, mark=2), replace(order, session=8)):
            assert isinstance(await refusal(restorer, other), TargetNotEmpty)
        assert (await calls.open_session(0, 10, calls.directory.control.header.partitions, secret=b"x")).last_id == 3

    assert with_restorer(store, test) == []


def test_the_group_log_is_made_where_there_was_none() -> None:
    store, disk = FaultyStore(), blank_disk()
    uploads = Uploads(store, cluster=OLD, partition=PARTITIONS)
    uploads.batches(batches_of([[b"a", b"b"], [b"c"], [b"d"]], cuts=[0, 1, 2], partition=PARTITIONS))
    manifest = uploads.manifest
    order = replace(stored()[1], partition=PARTITIONS, number=manifest.number, sha256=manifest.sha256)

    async def test(calls: StorageCalls, restorer: Restorer) -> None:
        found = await states(restorer, order)
        assert found[-1].status == calls.status(PARTITIONS)
        assert (await states(restorer, order))[-1].status == found[-1].status
        assert calls.status(PARTITIONS).last_id == 3

    assert with_restorer(store, test, disk) == []
    assert open_directory(disk).partition(PARTITIONS).last_id == 3


def test_what_is_wrong_is_refused_before_anything_counts() -> None:
    store, order = stored()
    disk = blank_disk()

    async def test(calls: StorageCalls, restorer: Restorer) -> None:
        for wrong, kind in (
            (replace(order, archive=UUID(int=1)), ForeignArchive),
            (replace(order, cluster=UUID(int=1)), ForeignArchive),
            (replace(order, sha256=64 * "0"), ArchiveDamaged),
            (replace(order, mark=4), ArchiveDamaged),
            (replace(order, mark=0), ArchiveDamaged),  # in the middle of a batch
            (replace(order, session=0), BadArgument),
            (replace(order, partition=99), NoSuchPartition),
        ):
            assert isinstance(await refusal(restorer, wrong), kind), wrong
            assert calls.directory.errors() == {}
        await states(restorer, order)

    assert with_restorer(store, test, disk) == []


def test_there_has_to_be_room_before_anything_is_written() -> None:
    store, order = stored()

    async def test(calls: StorageCalls, restorer: Restorer) -> None:
        error = await refusal(restorer, order)
        assert isinstance(error, DiskFull)
        assert "nothing of partition 0 was written" in "\n".join(error.lines())
        assert not calls.directory.errors()

    assert with_restorer(store, test, free=1 << 40) == []


def test_a_caller_that_goes_away_leaves_no_second_writer() -> None:
    """The piece under way is finished, and the next order goes on behind it."""
    store, order = stored()

    async def test(calls: StorageCalls, restorer: Restorer) -> None:
        async with aclosing(restorer.restore(order)) as states_:
            async for _ in states_:
                assert isinstance(await refusal(restorer, order), TooManyCallers)
                break
        assert (await states(restorer, order))[-1].status == calls.status(0)

    assert with_restorer(store, test) == []


def test_a_flush_that_fails_ends_the_storage() -> None:
    store, order = stored()
    disk = blank_disk()

    async def test(_: StorageCalls, restorer: Restorer) -> None:
        def fail(kind: str, path: str) -> None:
            if kind == "flush" and "0.new/" in path:
                disk.faults[disk.steps] = Fault.IO_ERROR

        disk.observer = fail
        assert isinstance(await refusal(restorer, order), FlushFailed)

    assert [type(error) for error in with_restorer(store, test, disk)] == [FlushFailed]


def restorer_of(partition: Partition, uploads: Uploads) -> Restorer:
    """A restorer in a storage with one replica and this archive."""
    source = ArchivedSource(uploads.log().archive, uploads.manifest, (), None)

    async def find(_: Partition) -> ArchivedSource:
        return source

    async def in_turn(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    queue = SimpleNamespace(partition=partition, call=in_turn)
    home: Any = SimpleNamespace(readable=lambda *_: queue, archiver=SimpleNamespace(source=find))
    return Restorer(home, partition._context.disk, in_turn, lambda error: None)


def completing(mark: int) -> RestoreOrder:
    nobody = UUID(int=0)
    return RestoreOrder(
        store="", archive=nobody, cluster=nobody, partition=0, number=0, sha256="", mark=mark, session=5, completes=True
    )


def test_a_replica_that_was_trimmed_is_completed_from_its_floor_on() -> None:
    """A replica that is filled from the floor on knows of no committed mark before its session begins. What is below its
    floor is not compared: it is committed, and not there."""
    _, _, partition = begun(20)
    floor = partition.sealed_segments()[2][0]
    partition.open_session(4)
    partition.trim(4, floor)
    partition.fence(5, by_operator=True)
    assert partition.visible_mark == -1
    uploads = Uploads(FaultyStore(), cluster=KEY)
    for first in range(0, 24, 6):  # one of them begins below the floor
        uploads.records(run_for(0, first, 6))
    found = asyncio.run(states(restorer_of(partition, uploads), completing(23)))
    assert found[-1].status is not None
    assert (found[-1].status.last_id, found[-1].status.committed) == (23, 23)


def test_what_differs_behind_an_equal_part_is_cut_alone() -> None:
    """The records in front of it, which had just been compared and were as uncertain as it, were cut with it: the next
    piece had no place then, and the rescue ended with W2004."""
    _, _, partition = begun(10)
    partition.fence(5, by_operator=True)
    uploads = Uploads(FaultyStore(), cluster=KEY)
    uploads.records(run_for(0, 0, 6))
    uploads.records(run_for(0, 6, 6, size=50))
    found = asyncio.run(states(restorer_of(partition, uploads), completing(11)))
    assert found[-1].status is not None
    assert (found[-1].status.last_id, found[-1].status.committed) == (11, 11)
    assert partition.read_examined(6, 6, 1).data == run_for(0, 6, 1, size=50).data
