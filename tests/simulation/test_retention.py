"""An owner trims what is archived, through everything that comes between: nothing that anybody needs ever goes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.cell import SETTINGS, Appender, Cell, story
from tests.simulation.faulty_store import Faults, FaultyStore
from tests.simulation.test_archive import FAULTY, archiving, document, reached, written
from tests.tiers import in_turns
from waltzd.cluster.cluster import archived
from waltzd.cluster.coordinator import Delete
from waltzd.errors import Trimmed
from waltzd.errors.operations import ChangedMeanwhile
from waltzd.format.layout import index_offset, segment_ids
from waltzd.server.session.owned import OwnedLog
from waltzd.server.session.replicated_log import ReplicatedLog

SMALL = replace(SETTINGS, session_bytes_max=8_000)
"""Sessions give way to the next one often, so low marks move."""
KEPT = 20_000


async def keeping(c: Cell, keep_local: str) -> None:
    before = await c.cluster.meta()
    await c.cluster.change_root(before, replace(before, keep_local=keep_local))


def firsts(c: Cell, name: str) -> list[int]:
    return segment_ids(c.storages[name].disk.names("storage/0"))


def floors(c: Cell) -> list[int]:
    return [c.replica(name).first_id for name in c.storages]


def kept_bytes(c: Cell, name: str) -> int:
    replica = c.replica(name)
    return sum(replica.bytes_of(first) + index_offset(last - first + 1) for first, last in replica.sealed_segments())


async def check(c: Cell) -> None:
    """No floor is above what is archived, or above what a member may still need."""
    found, meta = await document(c), await c.meta()
    floor = 0 if found is None else found.floor
    assert floor <= meta.low_mark + 1
    for name in c.storages:
        if c.last_id(name) > -2:  # else it is down, or holds nothing of the partition
            assert c.replica(name).first_id <= floor, "the document is saved first"


async def trimmed(c: Cell, above: int = 0) -> int:
    """The floor, once all storages have one above this."""

    async def all_there() -> int:
        while True:
            await check(c)
            found = await document(c)
            up = [c.replica(name) for name in c.storages if c.last_id(name) > -2]
            if found is not None and found.floor > above and all(one.first_id == found.floor for one in up):
                return found.floor
            await asyncio.sleep(0.5)

    try:
        async with asyncio.timeout(600):
            return await all_there()
    except TimeoutError:
        lines = [*c.log, *(repr(s.describe()) for s in c.owned_logs), repr(await document(c)), repr(floors(c))]
        raise AssertionError("\n".join(lines)) from None


async def under_load(c: Cell, owned: OwnedLog[Appender], batches: int) -> None:
    for _ in range(batches):
        pipeline = await c.opened(owned)
        await pipeline.committed(pipeline.append(20))
        await asyncio.sleep(0.2)


async def begun(c: Cell, keep_local: str, batches: int = 60) -> OwnedLog[Appender]:
    await keeping(c, keep_local)
    owned = await c.own(settings=SMALL)
    await under_load(c, owned, batches)
    return owned


@story
async def test_what_a_policy_of_size_does_not_keep_leaves_every_storage() -> None:
    async with archiving(FaultyStore()) as c:
        owned = await begun(c, f"{KEPT // 1000}KB")
        floor = await trimmed(c)
        await under_load(c, owned, 60)
        floor = await trimmed(c, above=floor)
        await asyncio.sleep(120)
        floor = c.replica("s0").first_id
        for name in c.storages:
            assert firsts(c, name)[0] == c.replica(name).first_id
            assert kept_bytes(c, name) <= KEPT + 2 * 8_000 + 4_000, "what no session has begun behind stays, too"
        pipeline = await c.opened(owned)
        with pytest.raises(Trimmed):
            async for _ in pipeline.session.read(0, 5, 1 << 20):
                pass
        found = [run async for run in pipeline.session.read(floor, pipeline.session.committed, 1 << 20)]
        assert found[0].first_id == floor
        assert found[-1].last_id == pipeline.session.committed


@story
async def test_nothing_is_trimmed_unless_somebody_says_so() -> None:
    async with archiving(FaultyStore()) as c:
        owned = await begun(c, "all", 30)
        await reached(c, await written(c, await c.opened(owned), 2) - 60)
        await asyncio.sleep(300)
        assert floors(c) == [0, 0, 0]


@story
async def test_a_silent_member_holds_the_floor_where_it_was_heard_last() -> None:
    async with archiving(FaultyStore()) as c:
        owned = await begun(c, "5KB", 20)
        before = await trimmed(c)
        c.storages["s2"].kill()
        held = (await c.meta()).replicas["s2"]
        await under_load(c, owned, 60)
        await asyncio.sleep(120)
        found = await document(c)
        assert found is not None
        assert before <= found.floor <= held.acknowledged + 1
        await c.storages["s2"].start()
        await under_load(c, owned, 20)
        assert await trimmed(c, above=found.floor) > found.floor
        last_id = (await c.opened(owned)).session.committed
        await c.all_hold(last_id)


@story
async def test_a_new_replica_and_an_emptied_one_begin_at_the_floor() -> None:
    async with archiving(FaultyStore()) as c:
        owned = await begun(c, "5KB")
        floor = await trimmed(c)
        await c.restart("s1", empty_disk=77)
        await under_load(c, owned, 20)
        await c.until(lambda: c.last_id("s1") == c.last_id("s0") and c.replica("s1").first_id >= floor, seconds=60)
        assert c.is_sound("s1")
        await trimmed(c, above=floor)
        logs = []
        for name in c.storages:
            replica = c.replica(name)
            logs.append(replica.read(replica.first_id, replica.last_id, 1 << 20, session=replica.promised_session).data)
        assert logs[0] == logs[1] == logs[2]


@story
async def test_a_learner_begins_at_the_floor_and_goes_on_with_it() -> None:
    async with archiving(FaultyStore(), "s0", "s1", "s2") as c:
        owned = await begun(c, "5KB")
        floor = await trimmed(c)
        await c.until(lambda: all(c.last_id(name) == c.last_id("s0") for name in c.storages))
        roles, version = await c.cluster.replica_set(0)
        await c.cluster.save_replica_set(0, {name: role for name, role in roles.items() if name != "s2"}, version)
        await under_load(c, owned, 3)
        c.storages["s2"].kill()
        c.storages["s2"].lose_disk(5)
        await c.storages["s2"].start()
        await c.add_learner("s2")
        await under_load(c, owned, 40)
        await c.until(lambda: c.last_id("s2") == c.last_id("s0") and c.replica("s2").first_id >= floor, seconds=60)


@story
async def test_an_object_that_is_missing_stops_it_and_is_told() -> None:
    store = FaultyStore()
    async with archiving(store) as c:
        await keeping(c, "all")
        owned = await c.own(settings=SMALL)
        await under_load(c, owned, 40)
        found = await reached(c, 400)
        names = sorted(name for name in store.objects if "/segment/" in name)
        gone = store.objects.pop(names[2])
        await keeping(c, "5KB")
        await c.until(lambda: "is not in the store" in owned.describe().archive_trouble, seconds=120)
        await asyncio.sleep(60)
        first = int(names[2].split("/")[2][:19])
        assert floors(c) == [first] * 3, "up to there all was seen"
        told = await document(c)
        assert told is not None
        assert told.floor == first, "the document tells readers what storages no longer hold"
        store.objects[names[2]] = gone
        assert await trimmed(c, above=first) > first
        await c.until(lambda: owned.describe().archive_trouble == "", seconds=120)
        assert found.archive is not None


@story
async def test_a_document_that_went_back_is_brought_forward() -> None:
    async with archiving(FaultyStore()) as c:
        owned = await begun(c, "5KB")
        floor = await trimmed(c)
        await c.until(lambda: (c.log, True)[1])
        while True:
            meta, version = await archived(c.cluster.coordinator, 0)
            assert meta is not None
            node = await c.cluster.coordinator.get("/archives/0")
            assert node is not None
            if await put_back(c, replace(meta, floor=0), version):
                break
        await asyncio.sleep(60)
        found = await document(c)
        assert found is not None
        assert found.floor >= floor
        assert min(floors(c)) >= floor
        assert owned.describe().archive_trouble == ""


async def put_back(c: Cell, meta: object, version: int) -> bool:
    from waltzd.cluster.coordinator import Set
    from waltzd.cluster.documents import ArchiveMeta
    from waltzd.errors.operations import ChangedMeanwhile
    from waltzd.protocol.document import encode

    assert isinstance(meta, ArchiveMeta)
    try:
        await c.cluster.coordinator.commit([Set("/archives/0", encode(meta), version)])
    except ChangedMeanwhile:
        return False
    return True


@story
async def test_an_archive_that_the_documents_have_forgotten_is_found_again() -> None:
    """As after documents that were made anew out of what storages have."""
    store = FaultyStore()
    async with archiving(store) as c:
        owned = await begun(c, "5KB")
        floor = await trimmed(c)
        archive = await document(c)
        assert archive is not None
        while not await forgotten(c):
            continue
        await asyncio.sleep(120)
        found = await document(c)
        assert found is not None
        assert (found.archive, found.floor >= floor) == (archive.archive, True)
        await under_load(c, owned, 60)
        assert await trimmed(c, above=found.floor) > found.floor
        assert owned.describe().archive_trouble == ""
        for one in store.list("partition-0/manifest"):
            store.remove(one.name)
        while not await forgotten(c):
            continue
        await asyncio.sleep(120)
        assert await document(c) is None, "nothing is archived from the middle of a log on"
        assert "W2265" in owned.describe().archive_trouble


async def forgotten(c: Cell) -> bool:
    _, version = await archived(c.cluster.coordinator, 0)
    try:
        await c.cluster.coordinator.commit([Delete("/archives/0", version)])
    except ChangedMeanwhile:
        return False
    return True


@story
async def test_a_session_that_gives_way_in_the_middle_ends_neither_archiving_nor_trimming() -> None:
    """A planned new session has other links: who was to be asked next may not be there at this moment."""
    async with archiving(FaultyStore()) as c:
        owned = await begun(c, "5KB", 20)
        calls, loop = c.storages["s0"].calls, asyncio.get_running_loop()
        assert calls is not None
        right, times = calls.segments, 0

        def segments(*arguments: Any, **named: Any) -> Any:
            nonlocal times
            log, times = (log_of(owned), times + 1)
            if times < 4:
                links, log.replicators = (
                    log.replicators,
                    {name: link for name, link in log.replicators.items() if name != "s2"},
                )
                loop.call_later(0.5, setattr, log, "replicators", links)
            return right(*arguments, **named)

        calls.segments = segments  # type: ignore[method-assign]
        floor = await trimmed(c)
        await under_load(c, owned, 30)
        assert await trimmed(c, above=floor) > floor
        assert times >= 4
        assert not any("a mistake in Waltz itself" in line for line in c.log)


def log_of(owned: OwnedLog[Appender]) -> ReplicatedLog:
    assert owned._session is not None
    return owned._session.log


@pytest.mark.parametrize("seed", in_turns(range(8), of=2))
@story
async def test_whatever_comes_between_nothing_that_is_needed_goes(seed: int) -> None:
    """Storages are killed and emptied, owners change, the store does what it likes, and the policy changes."""
    pick = random.Random(seed)
    store = FaultyStore(random.Random(seed + 1000), FAULTY)
    async with archiving(store) as c:
        await keeping(c, "5KB")
        owned = await c.own(1, settings=SMALL)
        for generation in range(2, 7):
            await under_load(c, owned, pick.randrange(5, 25))
            await asyncio.sleep(pick.randrange(20))
            name = f"s{pick.randrange(3)}"
            await c.restart(name, empty_disk=pick.choice([None, None, seed * 100 + generation]))
            await asyncio.sleep(pick.choice([0, 1, 30]))
            await check(c)
            await keeping(c, pick.choice(["5KB", "10KB", "all", "5KB"]))
            old, owned = owned, await c.own(generation, settings=SMALL)
            await c.opened(owned)
            await old.close(hand_over=pick.random() < 0.5)
            await check(c)
        store.faults = Faults()
        await keeping(c, "5KB")
        found = await document(c)
        await under_load(c, owned, 30)
        floor = await trimmed(c, above=0 if found is None else found.floor)
        last_id = (await c.opened(owned)).session.committed
        await c.until(lambda: all(c.last_id(name) == last_id for name in c.storages), seconds=60)
        check_same(c, [f"s{n}" for n in range(3)], floor)


def check_same(c: Cell, names: Sequence[str], floor: int) -> None:
    logs = []
    for name in names:
        replica = c.replica(name)
        assert not replica.findings
        at, data = floor, b""
        while at <= replica.last_id:
            run = replica.read(at, replica.last_id, 1 << 20, session=replica.promised_session)
            data, at = data + bytes(run.data), run.last_id + 1
        logs.append(data)
    assert logs[0] == logs[1] == logs[2]


@story
async def test_a_new_disk_that_begins_at_the_floor_decides_the_vote() -> None:
    """Its replica never joined the session, so it may be filled from the only one that remembers all of it."""
    async with archiving(FaultyStore()) as c:
        owned = await begun(c, "5KB")
        await trimmed(c)
        c.storages["s0"].kill()
        owned.task.cancel()
        await asyncio.gather(owned.task, return_exceptions=True)
        owned = await c.own(2, settings=SMALL)
        await under_load(c, owned, 3)
        last_id, session = await c.lose_all_but_s1(owned)
        later = await c.opened(await c.own(3, settings=SMALL), above=session)
        await later.committed(later.append(5))
        assert later.session.low_mark == last_id
        await c.until(lambda: [c.last_id(name) for name in c.storages] == [last_id + 5] * 3, seconds=60)
        first, second = (c.replica(name).read(last_id, last_id, 1 << 20, session=None).data for name in ("s0", "s1"))
        assert first == second
