"""Readers do not notice that old segments leave the storages: below the floor records come from the archive, once, in
order, whatever is trimmed while they read and whatever the store does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.cell import KEY, SETTINGS, Appender, Cell, SimPort, cell, inline, story
from tests.simulation.faulty_store import Faults, FaultyStore
from tests.simulation.test_archive import archiving, reached, sealed, written
from tests.simulation.test_retention import SMALL, keeping, under_load
from tests.simulation.test_retention import trimmed as trimmed_to
from tests.tiers import in_turns
from waltzd.archive.reader import ArchiveReader, SegmentCache
from waltzd.cluster.documents import StorageMeta
from waltzd.errors import ArchiveAway, NotReady, OnlyInArchive, Trimmed
from waltzd.errors.operations import ArchiveDamaged, StoreUnavailable
from waltzd.format.record import Run, join_runs
from waltzd.server.clients.feed import ColdReader
from waltzd.server.session.archive_fetcher import ArchiveFetcher
from waltzd.server.session.replicated_log import ReplicatedLog

CHUNK = 700


class TrimmedPort(SimPort):
    """A storage that has trimmed: it refuses what is below its floor, also in the middle of a read."""

    def __init__(self, cell: TrimmedCell, name: str) -> None:
        super().__init__(cell.storages[name])
        self._cell = cell
        self._name = name

    @property
    def floor(self) -> int:
        return self._cell.floors.get(self._name, 0)

    async def status(self, partition: int) -> Any:
        return replace(await self.__getattr__("status")(partition), floor=self.floor)

    async def open(self, *arguments: Any, **named: Any) -> Any:
        return replace(await self.__getattr__("open")(*arguments, **named), floor=self.floor)

    async def read(self, partition: int, first_id: int, *arguments: Any, **named: Any) -> AsyncIterator[Run]:
        self._cell.reads += 1
        self._check(first_id)
        async for run in self.__getattr__("read")(partition, first_id, *arguments, **named):
            self._check(run.first_id)
            yield run

    async def find_time(self, partition: int, time: int, **named: Any) -> int:
        mark: int = await self.__getattr__("find_time")(partition, time, **named)
        self._check(mark + 1)
        return mark

    def _check(self, id_: int) -> None:
        if id_ < self.floor:
            raise Trimmed(f"partition 0: id {id_} was trimmed; ids from {self.floor} on are here", floor=self.floor)


class TrimmedCell:
    """A cell whose storages trim when the test says so, and an owner that reads the archive."""

    def __init__(self, made: Cell, store: FaultyStore) -> None:
        self.made = made
        self.storages = made.storages
        self.store = store
        self.floors: dict[str, int] = {}
        self.reads = 0
        self.reader = ArchiveReader(store, KEY, SegmentCache(6000))
        self.lane = ArchiveFetcher(self.reader, bring=inline, read=inline)
        made.connect = self.connect  # type: ignore[method-assign]

    def connect(self, meta: StorageMeta) -> Any:
        return TrimmedPort(self, meta.name)

    async def opened(self, *, reads: bool = True) -> Appender:
        owned = await self.made.own(settings=replace(SETTINGS, archive=self.lane if reads else None))
        return await self.made.opened(owned)

    def trim(self, floor: int, *names: str) -> None:
        for name in names or self.storages:
            self.floors[name] = max(floor, self.floors.get(name, 0))


@asynccontextmanager
async def trimmed(store: FaultyStore) -> AsyncIterator[TrimmedCell]:
    async with cell() as made:
        for name, storage in made.storages.items():
            storage.store = store
            await made.restart(name)
        yield TrimmedCell(made, store)


async def read_all(log: ReplicatedLog, first_id: int, *, patience: int = 0, pause: float = 0) -> Run:
    """As a mount does: chunk by chunk, and waiting for what passes."""
    cold, runs = ColdReader(log, asyncio.Semaphore(1), CHUNK), []
    until = log.cache.first_id - 1
    while first_id <= until:
        try:
            run = await cold.read(first_id, until)
        except (ArchiveAway, ArchiveDamaged):
            patience -= 1
            if patience < 0:
                raise
            await asyncio.sleep(1)
            continue
        assert (run.first_id, len(run) > 0, run.last_id <= until) == (first_id, True, True)
        runs.append(run)
        first_id = run.last_id + 1
        await asyncio.sleep(pause)
    return join_runs(runs)


def check(c: TrimmedCell, run: Run) -> None:
    """It is what is on the disks, from its first id on."""
    records = c.storages["s0"].records()[run.first_id :]
    assert [bytes(run.data[at:end]) for at, end in zip(run.bounds[:-1], run.bounds[1:], strict=True)] == records[: len(run)]


@story
async def test_what_all_storages_have_trimmed_comes_from_the_archive_up_to_the_very_bound() -> None:
    store = FaultyStore()
    async with trimmed(store) as c:
        pipeline = await c.opened()
        last_id = await written(c.made, pipeline, 60)
        await reached(c.made, last_id)
        floor = sealed(c.made)[10][0]
        c.trim(floor)
        log = pipeline.session
        for first_id in (0, 1, floor - 1, floor, floor + 1):
            c.reads, before = 0, c.reader.counters.pieces
            run = await read_all(log, first_id)
            check(c, run)
            assert run.last_id == log.cache.first_id - 1
            assert c.reads > 0, "above the floor replicas are read"
            if first_id >= floor:
                assert c.reader.counters.pieces == before
        assert log.is_trimmed(floor - 1)
        assert not log.is_trimmed(floor)
        cold = ColdReader(log, asyncio.Semaphore(0), CHUNK)  # all turns are taken: the archive needs none
        async with asyncio.timeout(60):
            check(c, await cold.read(3, 5))


@story
async def test_a_replica_that_has_not_trimmed_yet_is_asked_first() -> None:
    store = FaultyStore()
    async with trimmed(store) as c:
        pipeline = await c.opened()
        await reached(c.made, await written(c.made, pipeline, 30))
        c.trim(sealed(c.made)[6][0], "s0", "s2")
        check(c, await read_all(pipeline.session, 0))
        assert c.reader.counters.pieces == 0
        c.storages["s1"].kill()  # now nobody has it
        await c.made.until(lambda: not pipeline.session.replicators["s1"].is_readable)
        check(c, await read_all(pipeline.session, 0))
        assert c.reader.counters.pieces == 6
        await c.storages["s1"].start()


@pytest.mark.parametrize("seed", in_turns(range(8), of=2))
@story
async def test_trims_go_on_while_readers_read_and_the_store_fails(seed: int) -> None:
    pick = random.Random(seed)
    store = FaultyStore(random.Random(seed + 1000))
    async with trimmed(store) as c:
        pipeline = await c.opened()
        await reached(c.made, await written(c.made, pipeline, 60))
        store.faults = Faults(refused=20, torn=10)
        bounds, oldest = [first for first, _ in sealed(c.made)], pipeline.session.cache.first_id

        async def trim() -> None:
            while True:
                await asyncio.sleep(pick.random() * 2)
                floor = pick.choice(bounds)
                c.trim(floor, *[name for name in c.storages if pick.random() < 0.7])

        trimming = asyncio.create_task(trim())
        starts = [0, *(pick.randrange(oldest) for _ in range(6))]
        readers = [read_all(pipeline.session, start, patience=10_000, pause=pick.random()) for start in starts]
        runs = await asyncio.gather(*readers)
        trimming.cancel()
        await asyncio.gather(trimming, return_exceptions=True)
        for run in runs:
            check(c, run)
            assert run.last_id == pipeline.session.cache.first_id - 1
        assert c.reader.counters.pieces > 0


@story
async def test_a_server_without_the_archive_says_which_ids_are_where() -> None:
    store = FaultyStore()
    async with trimmed(store) as c:
        pipeline = await c.opened(reads=False)
        await reached(c.made, await written(c.made, pipeline, 30))
        floor = sealed(c.made)[6][0]
        c.trim(floor)
        with pytest.raises(OnlyInArchive, match=f"id 3 is only in the archive.*have the ids from {floor} on") as caught:
            await read_all(pipeline.session, 3)
        assert (caught.value.number("first_id"), caught.value.number("floor")) == (3, floor)
        check(c, await read_all(pipeline.session, floor))


@story
async def test_a_store_that_is_away_is_waited_for_and_told_once() -> None:
    class Away(FaultyStore):
        is_away = False

        def get_range(self, name: str, offset: int, size: int) -> bytes:
            if self.is_away:
                raise StoreUnavailable("the store is away", next_step="wait")
            return super().get_range(name, offset, size)

    store = Away()
    async with trimmed(store) as c:
        pipeline = await c.opened()
        await reached(c.made, await written(c.made, pipeline, 30))
        c.trim(sealed(c.made)[6][0])
        store.is_away = True
        for _ in range(3):
            with pytest.raises(ArchiveAway, match="W2260 the store is away"):
                await read_all(pipeline.session, 3)
        reading = asyncio.create_task(read_all(pipeline.session, 3, patience=10_000))
        await asyncio.sleep(300)
        await pipeline.committed(pipeline.append(20))  # nobody else waits
        store.is_away = False
        check(c, await reading)
        said = [line for line in c.made.log if "archive" in line and "read" in line]
        assert [line.partition("the archive ")[2] for line in said] == [
            "cannot be read: W2271 W2260 the store is away", "can be read again"
        ]  # fmt: skip


@story
async def test_one_flipped_bit_is_named_by_its_range_and_the_rest_of_the_log_is_read() -> None:
    store = FaultyStore()
    async with trimmed(store) as c:
        pipeline = await c.opened()
        await reached(c.made, await written(c.made, pipeline, 30))
        first_id, last_id = sealed(c.made)[2]
        c.trim(sealed(c.made)[6][0], "s0", "s1")
        name = next(name for name in store.objects if f"/segment/{first_id:019d}" in name)
        data = store.objects[name].data
        store.objects[name].data = data[:900] + bytes([data[900] ^ 1]) + data[901:]
        check(c, await read_all(pipeline.session, 0))  # from the replica that still has it
        c.trim(sealed(c.made)[6][0])
        with pytest.raises(ArchiveDamaged, match=r"damaged: the ids \d+ to \d+ \(bytes \d+ to \d+\)") as caught:
            await read_all(pipeline.session, 0)
        bad = caught.value.number("first_id")
        assert bad is not None
        assert first_id <= bad <= last_id
        assert bad == caught.value.number("last_id")
        check(c, await read_all(pipeline.session, last_id + 1))


@story
async def test_a_slow_piece_keeps_no_reader_whose_piece_is_here() -> None:
    store = FaultyStore()
    async with trimmed(store) as c:
        pipeline = await c.opened()
        await reached(c.made, await written(c.made, pipeline, 60))
        bounds = sealed(c.made)
        c.trim(bounds[10][0])
        log = pipeline.session
        await read_all_of(log, *bounds[0])
        gate = asyncio.Event()

        async def slow(function: Any, *arguments: Any) -> Any:
            await gate.wait()
            return function(*arguments)

        c.lane._bring = slow
        waiting = [asyncio.create_task(read_all_of(log, *bounds[5])) for _ in range(3)]
        await asyncio.sleep(1)
        check(c, await read_all_of(log, *bounds[0]))
        waiting.pop().cancel()
        before = c.reader.counters.pieces
        gate.set()
        for run in await asyncio.gather(*waiting):
            check(c, run)
        assert c.reader.counters.pieces == before + 1, "readers of one piece have it brought once"
        await c.lane.close()


async def read_all_of(log: ReplicatedLog, first_id: int, last_id: int) -> Run:
    cold, runs = ColdReader(log, asyncio.Semaphore(1), CHUNK), []
    while first_id <= last_id:
        runs.append(await cold.read(first_id, last_id))
        first_id = runs[-1].last_id + 1
    return join_runs(runs)


@pytest.mark.parametrize("seed", range(2))
@story
async def test_readers_notice_nothing_while_an_owner_trims(seed: int) -> None:
    """The whole of it: archiving, trimming, sessions that give way to each other, and readers from the first id on."""
    pick, store = random.Random(seed), FaultyStore(random.Random(seed + 1000), Faults(refused=10, torn=5))
    lane = ArchiveFetcher(ArchiveReader(store, KEY, SegmentCache(20_000)), bring=inline, read=inline)
    async with archiving(store) as c:
        await keeping(c, "5KB")
        owned = await c.own(settings=replace(SMALL, archive=lane))
        done = asyncio.Event()

        async def read() -> None:
            pipeline, next_id = await c.opened(owned), pick.randrange(60)
            while not done.is_set() or next_id < pipeline.session.cache.first_id:
                log = (pipeline := await c.opened(owned)).session
                if next_id < log.cache.first_id:
                    run = await read_some(log, next_id)
                    for number in range(len(run)):
                        record = run.record(number)
                        assert (record.id, record.payload.split(b".")[0].split(b":")[1]) == (next_id, b"%d" % next_id)
                        next_id += 1
                await asyncio.sleep(pick.random())

        reading = [asyncio.create_task(read()) for _ in range(4)]
        await under_load(c, owned, 60)
        await trimmed_to(c, above=200)
        late = asyncio.create_task(read())
        await under_load(c, owned, 30)
        done.set()
        await asyncio.gather(late, *reading)
        assert lane.reader.counters.pieces > 5
        await lane.close()


async def read_some(log: ReplicatedLog, first_id: int) -> Run:
    cold = ColdReader(log, asyncio.Semaphore(1), CHUNK)
    while True:
        try:
            return await cold.read(first_id, log.cache.first_id - 1)
        except (ArchiveAway, ArchiveDamaged, NotReady):
            await asyncio.sleep(1)


@story
async def test_who_reads_on_has_the_next_piece_brought_before_it_is_needed() -> None:
    store = FaultyStore()
    async with trimmed(store) as c:
        pipeline = await c.opened()
        await reached(c.made, await written(c.made, pipeline, 60))
        bounds = sealed(c.made)
        c.trim(bounds[10][0])
        log, known = pipeline.session, await pipeline.session.ask_archived()
        assert known is not None
        c.lane.reader.cache = SegmentCache(1 << 20)
        await read_all_of(log, *bounds[0])
        assert c.reader.counters.pieces == 1, "nobody wants more than this one"
        first_id, last_id = bounds[3]
        await ColdReader(log, asyncio.Semaphore(1), 1 << 20).read(first_id, bounds[8][1])
        await asyncio.sleep(0.1)
        assert c.reader.counters.pieces == 3
        assert c.reader.at_hand(0, known, last_id + 1) is not None
        c.reader.cache = SegmentCache(
            2 * c.reader.entry(0, known, first_id).size
        )  # the next would take the place of this one
        await ColdReader(log, asyncio.Semaphore(1), 1 << 20).read(first_id, bounds[8][1])
        await asyncio.sleep(0.1)
        assert c.reader.counters.pieces == 4
        store.objects = {}
        c.reader.cache = SegmentCache(1 << 20)
        with pytest.raises(ArchiveDamaged, match="is not in the store"):
            await read_all_of(log, *bounds[6])
