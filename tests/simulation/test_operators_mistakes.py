"""Documents that an operator deletes or spoils while a session is open: it goes on with what it knows, says which one it
is, and writes its partition's own ones anew, unless somebody else may have taken a session since."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.simulation.test_store import cell, story
from tests.unit.timeless import run
from waltzd.coordinator import Delete, Set
from waltzd.meta import Assignment, Ownership
from waltzd.server.changes import acknowledging


async def assign(c: Any, generation: int) -> None:
    _, version = await c.cluster.assignment()
    await c.cluster.save_assignment(Assignment(owners=(Ownership("server", generation),)), version)


async def damage(c: Any, verb: str, path: str) -> None:
    node = await c.cluster.coordinator.get(path)
    change = Delete(path, node.version) if verb == "delete" else Set(path, b"{oops", node.version)
    await c.cluster.coordinator.commit([change])


@pytest.mark.parametrize("verb", ["delete", "spoil"])
@pytest.mark.parametrize("path", ["/partitions/0", "/replicas/0", "/storages/s2"])
def test_a_session_that_is_open_goes_on(verb: str, path: str) -> None:
    async def story() -> None:
        async with cell() as c:
            await assign(c, 1)
            store = await c.own(1)
            pipeline = await c.opened(store)
            await pipeline.committed(pipeline.append(20))
            meta, roles = (await c.cluster.partition(0))[0], (await c.cluster.replica_set(0))[0]
            assert meta is not None
            known = acknowledging(meta, dict.fromkeys(c.members, 19)), roles
            await damage(c, verb, path)
            await asyncio.sleep(2)
            assert any(path in line and "going on" in line for line in c.log)
            if path == "/storages/s2":
                assert path in store.describe().trouble
                c.storages["s2"].kill()  # known still, and tried again
                await c.storages["s2"].start()
            else:
                after = await c.cluster.partition(0), await c.cluster.replica_set(0)
                assert tuple(found for found, _ in after) == known, "written anew"
                assert store.describe().trouble == ""
            last = pipeline.append(5)
            await pipeline.committed(last)
            assert pipeline.ended is None, f"the session was ended by: {pipeline.ended}"
            await c.until(lambda: all(c.last_id(name) == last for name in c.storages))
            await store.close(hand_over=True)
            if path != "/storages/s2":
                await assign(c, 2)
                assert (await c.opened(await c.own(2))).session.low_mark == last

    run(story())


@story
async def test_a_document_is_not_written_over_a_session_that_somebody_may_have_taken() -> None:
    async with cell() as c:
        await assign(c, 2)
        store = await c.own(1)
        pipeline = await c.opened(store)
        await pipeline.committed(pipeline.append(20))
        await damage(c, "delete", "/partitions/0")
        await c.until(lambda: pipeline.ended is not None)
        assert await c.cluster.partition(0) == (None, -1)
        assert any("not ours to write" in line for line in c.log)


@story
async def test_a_document_is_not_written_by_an_assignment_that_went_back() -> None:
    """Nobody knows what else the coordinator has forgotten: the session goes on, and an operator decides."""
    async with cell() as c:
        store = await c.own(1)  # under a generation that was never given out
        pipeline = await c.opened(store)
        await damage(c, "delete", "/partitions/0")
        await asyncio.sleep(30)
        await pipeline.committed(pipeline.append(20))
        assert await c.cluster.partition(0) == (None, -1)
        assert "/partitions/0" in store.describe().trouble


@story
async def test_a_document_is_not_written_when_the_partition_is_given_away_in_that_moment() -> None:
    """Between the owner's look at the assignment and what it writes."""
    async with cell() as c:
        await assign(c, 1)
        store = await c.own(1)
        pipeline = await c.opened(store)
        look = store._cluster.assignment

        async def look_and_wait() -> Any:
            found = await look()
            await assign(c, 2)
            return found

        store._cluster.assignment = look_and_wait  # type: ignore[method-assign]
        await damage(c, "delete", "/partitions/0")
        await c.until(lambda: pipeline.ended is not None)
        assert await c.cluster.partition(0) == (None, -1)
