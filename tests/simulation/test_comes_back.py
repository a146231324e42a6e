"""What becomes of a storage that was away, is another one now, or went back to what it was."""

from __future__ import annotations

import asyncio

from tests.simulation.test_store import SETTINGS, Cell, cell, story
from waltzd.meta import Role
from waltzd.server.store_settings import StoreSettings


def visible(c: Cell, name: str) -> int:
    """How far somebody who reads there, without being the owner, sees."""
    keeper = c.storages[name].keeper
    assert keeper is not None
    return keeper.directory.partition(0).visible_mark


async def restart(c: Cell, name: str) -> None:
    c.storages[name].kill()
    await c.storages[name].start()


async def are_all_told(c: Cell, mark: int, *names: str) -> None:
    await c.until(lambda: all(c.last_id(name) == mark == visible(c, name) for name in names or c.members), seconds=30)


@story
async def test_a_storage_that_comes_back_to_a_quiet_partition_is_told_what_is_committed() -> None:
    async with cell() as c:
        store = await c.own(1)
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(50))
        await are_all_told(c, 49)
        await restart(c, "s2")
        await are_all_told(c, 49)
        await store.close(hand_over=True)  # and after a new session and with another owner, whose tail is empty
        await c.opened(await c.own(2))
        await restart(c, "s1")
        await are_all_told(c, 49)


@story
async def test_a_storage_that_comes_back_is_told_what_is_committed_though_the_tail_has_no_room_for_it() -> None:
    async with cell() as c:
        settings = StoreSettings(**{**vars(SETTINGS), "tail_bytes_max": 1000})
        pipeline = await c.opened(await c.own(1, settings=settings))
        await pipeline.committed(pipeline.append(50))
        await are_all_told(c, 49)
        await restart(c, "s2")
        await are_all_told(c, 49)


@story
async def test_a_learner_that_copies_is_told_what_is_committed() -> None:
    async with cell(4, members=3) as c:
        store = await c.own(1)
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(2000))
        await are_all_told(c, 1999)
        roles, version = await c.cluster.replica_set(0)
        await c.cluster.save_replica_set(0, {**roles, "s3": Role.LEARNER}, version)
        await c.until(lambda: c.last_id("s3") == 1999)
        await asyncio.sleep(0)
        await are_all_told(c, 1999, "s3")
