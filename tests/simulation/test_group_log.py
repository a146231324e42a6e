"""The group log stays short without losing what is needed of it: trimmed behind its reader, with an archive and without."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from tests.simulation.cell import SETTINGS, Appender, Cell, cell, story
from tests.simulation.faulty_store import Faults, FaultyStore
from tests.simulation.test_archive import archiving, document, reached
from tests.simulation.test_rescue import Hands
from tests.simulation.test_retention import floors, under_load
from waltzd.cluster.groups import GroupMeta
from waltzd.errors import Trimmed
from waltzd.format.record import encode_payloads
from waltzd.protocol.groups import Mode
from waltzd.server.groups.state import GroupState
from waltzd.server.groups.state_log import GARBAGE, SLACK_BYTES, GroupStateLog, group_entry, state_entry
from waltzd.server.session.owned import OwnedLog

SESSION_BYTES = 8_000
SMALL = replace(SETTINGS, session_bytes_max=SESSION_BYTES)
SEGMENT_BYTES = 4_000
"""Of the storages in these tests."""


class Needed:
    """What the reader of the log says."""

    def __init__(self) -> None:
        self.first_id = 0


async def begun(c: Cell, batches: int = 60) -> tuple[OwnedLog[Appender], Needed]:
    needed = Needed()
    owned = await c.own(settings=SMALL.of_group_log(lambda: needed.first_id))
    await under_load(c, owned, batches)
    return owned, needed


async def check(c: Cell, needed: Needed) -> None:
    low_mark = (await c.meta()).low_mark
    for name in c.storages:
        if c.last_id(name) > -2:
            assert c.replica(name).first_id <= min(needed.first_id, low_mark + 1)


async def settled(c: Cell, needed: Needed, true: Callable[[], bool]) -> None:
    """Until it is true, while no floor is ever above what is needed, or above what a member may still lack."""
    async with asyncio.timeout(600):
        while not true():
            await check(c, needed)
            await asyncio.sleep(0.5)
    await check(c, needed)


@story
async def test_without_an_archive_what_nobody_needs_leaves_every_storage() -> None:
    async with cell() as c:
        owned, needed = await begun(c)
        await asyncio.sleep(60)
        assert floors(c) == [0, 0, 0], "all of it is needed"
        needed.first_id = 700
        await settled(c, needed, lambda: min(floors(c)) > 500)
        await asyncio.sleep(60)
        await check(c, needed)
        pipeline = await c.opened(owned)
        with pytest.raises(Trimmed) as caught:
            await pipeline.session.read_archived(0, 5, 1 << 20)
        first_id = caught.value.number("floor")
        assert first_id == min(floors(c))
        found = [run async for run in pipeline.session.read(first_id, pipeline.session.committed, 1 << 20)]
        assert (found[0].first_id, found[-1].last_id) == (first_id, pipeline.session.committed)


@story
async def test_what_a_silent_member_may_lack_stays() -> None:
    async with cell() as c:
        owned, needed = await begun(c, 20)
        c.storages["s2"].kill()
        held = (await c.meta()).replicas["s2"]
        await under_load(c, owned, 60)
        needed.first_id = 1500
        await asyncio.sleep(120)
        assert max(floors_of_living(c)) <= held.acknowledged + 1
        await c.storages["s2"].start()
        await under_load(c, owned, 20)
        await settled(c, needed, lambda: min(floors(c)) > held.acknowledged + 1)
        await c.all_hold((await c.opened(owned)).session.committed)


def floors_of_living(c: Cell) -> list[int]:
    return [c.replica(name).first_id for name in c.storages if c.last_id(name) > -2]


@story
async def test_an_emptied_replica_begins_at_the_floor_and_counts() -> None:
    async with cell() as c:
        owned, needed = await begun(c)
        needed.first_id = 900
        await settled(c, needed, lambda: min(floors(c)) > 700)
        floor = min(floors(c))
        await c.restart("s1", empty_disk=77)
        await under_load(c, owned, 20)
        await c.until(lambda: c.last_id("s1") == c.last_id("s0") and c.replica("s1").first_id >= floor, seconds=60)
        for name in ("s0", "s2"):  # it is one of the majority that is left
            c.storages[name].kill()
            await under_load(c, owned, 3)
            await c.storages[name].start()
            await c.until(lambda: c.last_id("s1") == c.last_id("s0") == c.last_id("s2"), seconds=60)
        logs = []
        for name in c.storages:
            replica = c.replica(name)
            first_id = max(floors(c))
            logs.append(replica.read(first_id, replica.last_id, 1 << 20, session=replica.promised_session).data)
        assert logs[0] == logs[1] == logs[2]


@story
async def test_a_new_owner_after_a_crash_loses_nothing_and_goes_on_trimming() -> None:
    async with cell() as c:
        owned, needed = await begun(c)
        needed.first_id = 600
        await settled(c, needed, lambda: min(floors(c)) > 400)
        before = (await c.opened(owned)).session.committed
        await owned.close(hand_over=False)
        for name in c.storages:
            await c.restart(name)
        again = await c.own(2, settings=SMALL.of_group_log(lambda: needed.first_id))
        assert (await c.opened(again)).session.committed >= before
        await under_load(c, again, 40)
        needed.first_id = 1400
        await settled(c, needed, lambda: min(floors(c)) > 1000)


@story
async def test_with_an_archive_it_is_archived_before_it_goes() -> None:
    store = FaultyStore()
    async with archiving(store) as c:
        owned, needed = await begun(c, 20)
        store.faults = Faults(refused=100)
        await under_load(c, owned, 60)
        needed.first_id = 1500
        await asyncio.sleep(120)
        known = await document(c)
        reached = -1 if known is None else known.last
        assert reached < 1000
        assert max(floors(c)) <= reached + 1
        store.faults = Faults()
        await settled(c, needed, lambda: min(floors(c)) > 1200)
        found = await document(c)
        assert found is not None
        assert found.last + 1 >= max(floors(c))


@story
async def test_nothing_goes_while_the_archive_has_nothing() -> None:
    store = FaultyStore(faults=Faults(refused=100))
    async with archiving(store) as c:
        _, needed = await begun(c)
        needed.first_id = 1000
        await asyncio.sleep(120)
        assert floors(c) == [0, 0, 0]
        store.faults = Faults()
        await settled(c, needed, lambda: min(floors(c)) > 800)
        assert await document(c) is not None


@story
async def test_nothing_goes_that_only_the_timeline_before_has_archived() -> None:
    """What goes before the archive of the timeline begins can never be in it, nor what is behind."""
    store = FaultyStore()
    async with archiving(store) as c:
        owned, needed = await begun(c, 10)
        await c.all_hold(199)
        c.storages["s0"].kill()
        await under_load(c, owned, 30)
        await reached(c, 600)
        for n, name in enumerate(("s1", "s2")):
            c.storages[name].kill()
            c.storages[name].lose_disk(seed=91 + n)
        await c.storages["s0"].start()
        store.faults = Faults(refused=100)
        done = await Hands(c).rescue()
        for name in ("s1", "s2"):
            await c.storages[name].start()
        for _ in range(40):
            pipeline = await c.opened(owned, above=done.session - 1)
            await pipeline.committed(pipeline.append(20))
            await asyncio.sleep(0.2)
        fork = (await c.meta()).lineage.fork
        needed.first_id = 500
        await asyncio.sleep(120)
        assert max(floors(c)) <= fork + 1
        store.faults = Faults()
        await settled(c, needed, lambda: min(floors(c)) > fork + 100)
        found = await document(c)
        assert found is not None
        assert found.timeline == (await c.meta()).lineage.current
        assert found.last + 1 >= max(floors(c))


@story
async def test_an_archive_that_comes_later_is_no_trouble_and_holds_up_nothing() -> None:
    async with cell() as c:
        owned, needed = await begun(c)
        needed.first_id = 900
        await settled(c, needed, lambda: min(floors(c)) > 600)
        for name, storage in c.storages.items():
            storage.store = FaultyStore()
            await c.restart(name)
        await under_load(c, owned, 60)
        needed.first_id = 1900
        await settled(c, needed, lambda: min(floors(c)) > 1500)
        await asyncio.sleep(60)
        assert owned.describe().archive_trouble == ""
        assert await document(c) is None, "nothing is archived from the middle of a log on"


@story
async def test_the_log_is_not_much_larger_than_what_it_says() -> None:
    """What a reader learns from the floor on is what one learned that has read everything."""
    async with cell() as c:
        state_log, pick = GroupStateLog(), random.Random(7)
        owned = await c.own(settings=SMALL.of_group_log(lambda: state_log.floor))
        metas = [GroupMeta(name=f"group-{number}", partitions=None, mode=Mode.QUEUE) for number in range(8)]
        states = {(meta.name, partition): GroupState(after=-1) for meta in metas for partition in range(2)}
        made_at: dict[str, int] = {}

        async def write(entry: bytes) -> int:
            pipeline = await c.opened(owned)
            first_id = pipeline.session.cache.next_id
            pipeline.session.append(encode_payloads(first_id, [entry]))
            await pipeline.committed(first_id)
            state_log.read(first_id, entry)
            return first_id

        for meta in metas:
            made_at[meta.name] = await write(group_entry(meta))
        for step in range(3000):
            name, partition = pick.choice(list(states))
            states[name, partition] = GroupState(after=step)
            await write(state_entry(name, partition, made_at[name], states[name, partition].snapshot()))
            if step % 20 == 0:
                await asyncio.sleep(0.5)
            while (key := state_log.overdue) is not None:
                await write(anew(key.name, key.partition, metas, made_at, states))
        await asyncio.sleep(120)
        live = sum(size for _, size in state_log._live.values())
        bound = GARBAGE * live + SLACK_BYTES
        pipeline = await c.opened(owned)
        for name in c.storages:
            replica = c.replica(name)
            kept = sum(replica.bytes_of(first) for first, _ in replica.sealed_segments())
            assert kept <= 2 * bound + SESSION_BYTES + 3 * SEGMENT_BYTES
        again, first_id = GroupStateLog(), max(floors(c))
        assert first_id > 0
        async for run in pipeline.session.read(first_id, pipeline.session.committed, 1 << 20):
            for at in range(len(run)):
                record = run.record(at)
                again.read(record.id, record.payload)
        assert again.groups == state_log.groups
        for name, partition in states:
            assert again.state(name, partition) == state_log.state(name, partition) == states[name, partition]


def anew(
    name: str,
    partition: int,
    metas: list[GroupMeta],
    made_at: Mapping[str, int],
    states: Mapping[tuple[str, int], GroupState],
) -> bytes:
    if partition >= 0:
        return state_entry(name, partition, made_at[name], states[name, partition].snapshot())
    meta = next(meta for meta in metas if meta.name == name)
    return group_entry(meta, made_at[name])
