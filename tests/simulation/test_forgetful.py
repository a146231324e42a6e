"""Members that have forgotten something in an open session, or do not count yet: the owner notices, and saves it first."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.simulation.test_store import cell, story


async def is_committed(pipeline: Any, mark: int) -> bool:
    try:
        async with asyncio.timeout(3):
            await pipeline.committed(mark)
    except TimeoutError:
        return False
    return True


@story
async def test_a_replica_that_holds_less_than_it_acknowledged_has_forgotten() -> None:
    """Its volume is put back to a moment in this very session: the files are the same ones, with less in them."""
    async with cell() as c:
        pipeline = await c.opened(await c.own(1))
        await pipeline.committed(pipeline.append(10))
        await c.until(lambda: all(c.last_id(name) == 9 for name in c.storages))
        before = c.storages["s2"].disk.clone(5)
        await pipeline.committed(pipeline.append(10))
        await c.until(lambda: all(c.last_id(name) == 19 for name in c.storages))
        c.storages["s2"].kill()
        before.kill()
        c.storages["s2"].disk = before
        await c.storages["s2"].start()
        await c.until(lambda: any("s2 has forgotten" in line for line in c.log))


@story
async def test_a_replica_whose_directory_is_another_one_has_forgotten_although_it_holds_everything() -> None:
    async with cell() as c:
        pipeline = await c.opened(await c.own(1))
        await pipeline.committed(pipeline.append(20))
        await c.until(lambda: all(c.last_id(name) == 19 for name in c.storages))
        c.storages["s2"].kill()
        c.storages["s2"].disk = c.storages["s2"].disk.restored(5)
        await c.storages["s2"].start()
        await c.until(lambda: any("s2 has forgotten" in line for line in c.log))


@story
async def test_a_member_that_is_level_does_not_count_before_its_joining_is_saved() -> None:
    async with cell() as c:
        c.storages["s2"].kill()
        store = await c.own(1)
        await c.until(lambda: c.last_id("s0") >= -1)
        await c.storages["s2"].start()
        first = await c.opened(store)  # the first session needs all of them
        await first.committed(first.append(5))
        await store.close(hand_over=True)
        c.storages["s2"].kill()
        second = await c.own(2)
        pipeline = await c.opened(second)
        await pipeline.committed(pipeline.append(5))
        coordinator: Any = second._cluster.coordinator
        coordinator.disconnect()
        await c.storages["s2"].start()
        await c.until(lambda: c.last_id("s2") == 9)
        c.storages["s1"].kill()
        mark = pipeline.append(1)
        await c.until(lambda: c.last_id("s2") == mark)
        assert not await is_committed(pipeline, mark), "s2 has it, and no document says that it counts"
        coordinator.reconnect()
        assert await is_committed(pipeline, mark)


@story
async def test_an_empty_disk_and_a_silent_storage_of_four_leave_nothing_undecided() -> None:
    async with cell(4) as c:
        store = await c.own(1)
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(50))
        await c.until(lambda: all(c.last_id(name) == 49 for name in c.storages))
        c.storages["s1"].kill()
        await pipeline.committed(pipeline.append(10))
        await store.close(hand_over=False)
        for name in ("s2", "s3"):
            c.storages[name].kill()
        c.storages["s2"].lose_disk(7)
        await c.storages["s1"].start()
        await c.storages["s2"].start()
        assert (await c.opened(await c.own(2))).session.low_mark == 59
        c.check_equal("s0", "s1", "s2")
