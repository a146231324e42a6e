"""An owner has its partition backed up to a store that fails, through kills and changes of owners: a few seconds behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.cell import KEY, SETTINGS, Appender, Cell, SimPort, story
from tests.simulation.faulty_store import Faults, FaultyStore
from tests.simulation.test_archive import FAULTY, archiving
from tests.tiers import in_turns
from waltzd.archive.listing import newest_metadata
from waltzd.archive.manifest import pieces_of
from waltzd.archive.unsealed import UnsealedIndex, read_unsealed, unsealed_index_at, unsealed_index_name
from waltzd.archive.upload import PartitionArchive, label_in
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.metadata import read
from waltzd.errors import CannotConnect
from waltzd.errors.operations import StoreUnavailable
from waltzd.protocol.descriptions import Archived
from waltzd.protocol.peers import runs_of
from waltzd.server.metadata import MetadataSaver
from waltzd.server.session.owned import OwnedLog


@asynccontextmanager
async def backing_up(store: FaultyStore) -> AsyncIterator[Cell]:
    async with archiving(store) as c:
        yield c


async def own(c: Cell, generation: int = 1, *, seconds: float = 10.0) -> OwnedLog[Appender]:
    loop = asyncio.get_running_loop()
    settings = replace(SETTINGS, backup_seconds=seconds, wall=lambda: round(1e6 * loop.time()))
    return await c.own(generation, settings=settings)


def stored(store: FaultyStore) -> list[bytes]:
    """Every record that the archive and the tail have, by the store alone."""
    faults, store.faults = store.faults, Faults()
    archive = PartitionArchive(store, label_in(store, KEY, lambda: KEY, None), 0)
    manifest, tail, parts = read_unsealed(archive, archive.manifest(0, ""))
    found: list[bytes] = []
    at = 0
    for piece in pieces_of(manifest.entries, archive.chunk):
        at = piece.last + 1
        found += [b""] * (at - piece.first)
    for part in parts:
        for run in runs_of(part.content()):
            assert run.first_id <= at
            rows = [bytes(run.data[a:b]) for a, b in zip(run.bounds[:-1], run.bounds[1:], strict=True)]
            found[run.first_id :] = rows
            at = run.last_id + 1
    assert tail is not None
    store.faults = faults
    return found


def check(c: Cell, store: FaultyStore, committed: int) -> int:
    """What is backed up is the log, and nothing above what is committed. How many records are."""
    found, log = stored(store), c.storages["s0"].records()
    assert len(found) <= committed + 1
    assert [one for one in found if one] == [one for one, mine in zip(log, found, strict=False) if mine]
    return len(found)


@story
async def test_what_is_committed_is_in_the_store_after_ten_seconds() -> None:
    store = FaultyStore()
    async with backing_up(store) as c:
        owned = await own(c)
        pipeline = await c.opened(owned)
        for _ in range(40):
            mark = pipeline.append(7)
            await pipeline.committed(mark)
            await asyncio.sleep(12)
            assert check(c, store, mark) == mark + 1
            assert owned.describe().backup_lag_ms == 0
        await pipeline.committed(pipeline.append(1))
        await asyncio.sleep(1)
        assert owned.describe().backup_lag_ms > 0
        said = owned.describe().backed_up
        assert said is not None
        assert said.last_id == mark
        await asyncio.sleep(15)
        before, told = len(store.log), owned.describe().backed_up
        assert told is not None
        await asyncio.sleep(200)
        later = owned.describe().backed_up
        assert later is not None
        assert {*store.log[before:]} == {"put if partition-0/tail.json"}, "that nothing came is all there is to say"
        assert len(store.log) - before <= 20
        assert later.moment - told.moment >= 180_000_000, "all hang on the one that says so least often"


@pytest.mark.parametrize("records", [0, 7])
@story
async def test_an_idle_log_is_reported_in_each_round(records: int) -> None:
    """A whole cluster is restored to the oldest moment that its logs report, also by a log that was never written."""
    store = FaultyStore()
    async with backing_up(store) as c:
        owned = await own(c, seconds=1.0)
        pipeline = await c.opened(owned)
        if records:
            await pipeline.committed(pipeline.append(records))
        await asyncio.sleep(30)
        label = label_in(store, KEY, lambda: KEY, None)
        for _ in range(15):
            await asyncio.sleep(0.7)
            tail = unsealed_index_at(store, label, 0)
            assert tail is not None
            assert tail.last == records - 1
            assert tail.moment > 1e6 * (asyncio.get_running_loop().time() - 1.5)


@story
async def test_a_session_that_gives_way_in_the_middle_does_not_end_it() -> None:
    """A planned new session has other links: who was to be asked next may not be there at this moment."""
    store = FaultyStore()
    async with backing_up(store) as c:
        owned, times = await own(c), 0
        pipeline = await c.opened(owned)
        backup = owned._backup
        assert backup is not None
        log, right = backup._log, backup._confirmation.confirm

        async def confirm() -> None:
            nonlocal times
            await right()
            times += 1
            if times < 4:
                links, log.replicators = log.replicators, {}
                asyncio.get_running_loop().call_later(0.5, setattr, log, "replicators", links)

        backup._confirmation.confirm = confirm  # type: ignore[method-assign]
        mark = pipeline.append(7)
        await pipeline.committed(mark)
        await asyncio.sleep(90)
        assert check(c, store, mark) == mark + 1
        assert times >= 4
        assert owned.describe().backup_trouble == ""
        assert not any("a mistake in Waltz itself" in line for line in c.log)


@story
async def test_a_segment_that_is_sealed_goes_into_the_archive_and_not_into_the_tail() -> None:
    store = FaultyStore()
    async with backing_up(store) as c:
        pipeline = await c.opened(await own(c))
        for _ in range(12):
            mark = pipeline.append(20)
            await pipeline.committed(mark)
            await asyncio.sleep(12)
            check(c, store, mark)
        assert len([name for name in store.objects if "/segment/" in name]) >= 3
        assert len([name for name in store.objects if "/tail/" in name]) <= 8


@pytest.mark.parametrize("seed", in_turns(range(10), of=2))
@story
async def test_whatever_fails_the_backup_is_the_log(seed: int) -> None:
    pick = random.Random(seed)
    store = FaultyStore(random.Random(seed), FAULTY)
    async with backing_up(store) as c:
        owned, generation = await own(c), 1
        pipeline = await c.opened(owned)
        mark = -1
        for _ in range(25):
            mark = pipeline.append(pick.randrange(1, 25))
            await pipeline.committed(mark)
            await asyncio.sleep(pick.random() * 15)
            dice = pick.random()
            if dice < 0.15:
                await c.restart(pick.choice(sorted(c.storages)))
            elif dice < 0.3:
                await owned.close(hand_over=pick.random() < 0.5)
                generation += 1
                owned = await own(c, generation)
                pipeline = await c.opened(owned)
            if "partition-0/tail.json" in store.objects:
                check(c, store, mark)
        store.faults = Faults()
        await asyncio.sleep(120)
        assert check(c, store, mark) == mark + 1


class NoWay(SimPort):
    def __getattr__(self, name: str) -> Any:
        raise CannotConnect("the way is cut")


@story
async def test_the_moment_is_from_before_the_round_that_shows_who_is_the_owner() -> None:
    """Behind that round a newer owner has begun, of which neither this one nor the storage that it asks knows."""
    store = FaultyStore()
    async with backing_up(store) as c:
        clock = asyncio.get_running_loop().time
        owned = await own(c)
        pipeline = await c.opened(owned)
        await pipeline.committed(pipeline.append(7))
        backup = owned._backup
        assert backup is not None
        right, committed_at = backup._confirmation.confirm, 0.0

        async def confirm() -> None:
            nonlocal committed_at
            await right()
            backup._confirmation.confirm = right  # type: ignore[method-assign]
            for name, link in backup._log.replicators.items():
                if name != backup._asked:
                    link.cancel()  # the owner hears of nobody who replaces it
            c.connect = lambda meta: (NoWay if meta.name == backup._asked else SimPort)(c.storages[meta.name])  # type: ignore[method-assign]
            newer = await c.opened(await c.own(2))  # which does not back up
            await newer.committed(newer.append(5))
            committed_at = clock()
            await asyncio.sleep(0.01)

        backup._confirmation.confirm = confirm  # type: ignore[method-assign]
        await c.until(lambda: committed_at > 0, seconds=60)
        label = label_in(store, KEY, lambda: KEY, None)

        def backed_up() -> UnsealedIndex | None:
            tail = unsealed_index_at(store, label, 0) if unsealed_index_name(0) in store.objects else None
            return tail if tail is not None and tail.last == 6 else None

        tail: UnsealedIndex = await c.until(backed_up, seconds=60)
        assert tail.moment < 1e6 * committed_at


@story
async def test_only_what_is_committed_is_backed_up() -> None:
    """Also on a replica that holds more, and on one that has not begun the session and may still be cut."""
    store = FaultyStore()
    async with backing_up(store) as c:
        owned, pipeline = await c.holding(20)
        await c.all_hold(19)
        port = owned._session.log.replicators["s0"].port  # type: ignore[union-attr]
        session = pipeline.session.session
        found = await port.back_up(0, Archived(), session=session, committed=11, moment=5)
        assert (found.last_id, found.moment) == (11, 5)
        for name in ("s1", "s2"):
            c.storages[name].hang()
        pipeline.append(20)
        await c.until(lambda: c.last_id("s0") == 39)
        await owned.close(hand_over=False)
        newer = c.storages["s0"].port()
        await newer.open(0, session + 7, partitions=1)
        found = await newer.back_up(0, Archived(), session=session + 7, committed=10**6, moment=9)
        assert (found.last_id <= 19, found.moment) == (True, 5)
        for name in ("s1", "s2"):
            c.storages[name].go_on()


@story
async def test_a_replica_that_holds_less_does_not_say_that_all_is_there() -> None:
    store = FaultyStore()
    async with backing_up(store) as c:
        owned, pipeline = await c.holding(20)
        port = owned._session.log.replicators["s0"].port  # type: ignore[union-attr]
        await c.all_hold(19)
        found = await port.back_up(0, Archived(), session=pipeline.session.session, committed=30, moment=7)
        assert (found.last_id, found.moment) == (19, 0)


@story
async def test_a_store_that_is_away_is_told_once_and_the_log_goes_on() -> None:
    store = FaultyStore()
    async with backing_up(store) as c:
        owned = await own(c)
        pipeline = await c.opened(owned)

        def away() -> None:
            raise StoreUnavailable("the store is away")

        store.before_each = away
        mark = pipeline.append(5)
        await pipeline.committed(mark)
        await asyncio.sleep(60)
        said = owned.describe()
        assert "W2260 the store is away" in said.backup_trouble
        assert said.backup_lag_ms > 50_000
        assert sum("the backup fails" in line for line in c.log) == 1
        store.before_each = lambda: None
        await asyncio.sleep(15)
        assert owned.describe().backup_trouble == ""
        assert check(c, store, mark) == mark + 1
        assert any("the backup works again" in line for line in c.log)


# -- the documents of the cluster ----------------------------------------------------------------------------------------


@story
async def test_the_leader_has_documents_saved_when_they_change() -> None:
    store = FaultyStore()
    async with backing_up(store) as c:
        leads = True
        saver = MetadataSaver(
            Cluster(c.tree.connect()),
            c.connect,
            is_leader=lambda: leads,
            is_backing_up=lambda: True,
            seconds=10,
            moment=lambda: "now",
        )
        running = asyncio.create_task(saver.run())
        pipeline = await c.opened(await own(c))
        await pipeline.committed(pipeline.append(200))
        await asyncio.sleep(120)
        number, text = newest_metadata(store) or (0, b"")
        said = saver.describe()
        assert said is not None
        assert (said.number, said.trouble, 0 <= said.age_ms <= 10_000) == (number, "", True)
        await pipeline.committed(pipeline.append(200))  # segments are archived, and marks rise
        await asyncio.sleep(120)
        assert newest_metadata(store) == (number, text)
        await c.add_learner("s0")
        await asyncio.sleep(15)
        found = newest_metadata(store)
        assert found is not None
        assert found[0] == number + 1
        assert read(found[1], "here").replicas(0).replicas["s0"] == "learner"
        leads = False
        await asyncio.sleep(30)
        assert saver.describe() is None
        assert newest_metadata(store) == found
        running.cancel()


@story
async def test_an_emptied_store_is_not_begun_anew_by_documents() -> None:
    store = FaultyStore()
    async with backing_up(store) as c:
        saver = MetadataSaver(
            Cluster(c.tree.connect()), c.connect, is_leader=lambda: True, is_backing_up=lambda: False, seconds=10
        )
        pipeline = await c.opened(await own(c))
        await pipeline.committed(pipeline.append(200))
        await asyncio.sleep(60)
        store.objects.clear()
        for name in list(c.storages):
            await c.restart(name)
        running = asyncio.create_task(saver.run())
        await asyncio.sleep(30)
        said = saver.describe()
        assert said is not None
        assert "W2265" in said.trouble
        assert said.age_ms == -1
        assert "metadata/0000000001.json" not in store.objects
        running.cancel()
