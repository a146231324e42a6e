"""Documents that somebody forged who reaches the coordinator: a log that was opened once is never begun again at 0,
whatever the documents say, no storage is fenced in the name of such a document, and the right ones help as soon as
they are put back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from uuid import UUID

import pytest

from tests.simulation.cell import Cell, cell, story
from tests.simulation.test_documents_went_back import DOCUMENT, keep, put_back
from waltzd.cluster.cluster import replicas_path
from waltzd.cluster.coordinator import Create, Delete, Set
from waltzd.cluster.documents import Decision, Membership, PartitionMeta, ReplicaSet, ReplicaState
from waltzd.protocol.document import encode

BLANK = dict.fromkeys(("s3", "s4", "s5"), Membership.MEMBER)
"""Storages of the cluster that hold nothing of the partition."""
HELD = 19


async def held(c: Cell) -> dict[str, bytes]:
    """Transactions up to `HELD`, and then a session in which nothing was written: no storage holds more than its low-water
    mark. The documents, as they were when their owner was killed."""
    owned, pipeline = await c.holding(HELD + 1)
    await owned.close(hand_over=False)
    second = await c.own(2)
    await c.opened(second, above=pipeline.session.session)
    await c.until(lambda: all(c.last_id(name) == HELD for name in ("s0", "s1", "s2")))
    await second.close(hand_over=False)
    return await keep(c, DOCUMENT, replicas_path(0))


async def forge(c: Cell, meta: PartitionMeta | None, replicas: dict[str, Membership] | None = None) -> None:
    """None: the document is deleted."""
    node = await c.cluster.coordinator.get(DOCUMENT)
    assert node is not None
    await c.cluster.coordinator.commit(
        [Delete(DOCUMENT, node.version) if meta is None else Set(DOCUMENT, encode(meta), node.version)]
    )
    if replicas is not None:
        node = await c.cluster.coordinator.get(replicas_path(0))
        assert node is not None
        await c.cluster.coordinator.commit([Set(replicas_path(0), encode(ReplicaSet(replicas)), node.version)])


async def stays_closed(c: Cell, says: str) -> None:
    """Whoever is made its owner next, it does not open, and no storage is asked to promise anything."""
    before = {name: c.replica(name).status().promised_session for name in ("s0", "s1", "s2")}
    c.log.clear()
    owned = await c.own(3)
    try:
        await c.until(lambda: says in owned.describe().waiting or any(says in line for line in c.log), seconds=60)
        await asyncio.sleep(60)
        assert owned._pipeline is None
        assert [c.last_id(name) for name in before] == [HELD] * 3
        after = {name: c.replica(name).status().promised_session for name in before}
        assert after == before, "a storage that is fenced by a forgery refuses the right document"
    finally:
        await owned.close(hand_over=False)


async def opens_with(c: Cell, right: dict[str, bytes]) -> None:
    if await c.cluster.coordinator.get(DOCUMENT) is None:
        await c.cluster.coordinator.commit([Create(DOCUMENT, b"")])
    await put_back(c, right)
    pipeline = await c.opened(await c.own(4))
    assert pipeline.session.low_mark == HELD
    await pipeline.committed(pipeline.append(10))
    assert (await c.meta()).session < 1000


@pytest.mark.parametrize("is_known_to_one_only", [False, True])
@story
async def test_a_log_is_not_begun_again_on_storages_that_know_nothing_of_it(is_known_to_one_only: bool) -> None:
    """The document is deleted, and the list names other storages: those that hold the log are asked all the same."""
    async with cell(6, members=3) as c:
        right = await held(c)
        if is_known_to_one_only:
            for name in ("s0", "s1"):
                c.storages[name].kill()
        await forge(c, None, BLANK)
        if is_known_to_one_only:
            owned = await c.own(3)
            await c.until(lambda: any("W2020" in line for line in c.log), seconds=60)
            assert owned._pipeline is None
            await owned.close(hand_over=False)
            for name in ("s0", "s1"):
                await c.storages[name].start()
        await stays_closed(c, "W2020")
        await opens_with(c, right)


@story
async def test_a_log_is_not_begun_while_a_storage_that_may_hold_it_is_silent() -> None:
    async with cell(6, members=3) as c:
        right = await held(c)
        for name in ("s0", "s1", "s2"):
            c.storages[name].kill()
        await forge(c, None, BLANK)
        owned = await c.own(3)
        await asyncio.sleep(60)
        assert owned._pipeline is None
        assert owned.describe().waiting.endswith("every storage of the cluster; no answer from s0, s1, s2")
        await owned.close(hand_over=False)
        for name in ("s0", "s1", "s2"):
            await c.storages[name].start()
        await stays_closed(c, "W2020")
        await opens_with(c, right)


@pytest.mark.parametrize("session", [1, 2, 3, 900])
@pytest.mark.parametrize("replicas", [None, BLANK], ids=["its storages", "others"])
@story
async def test_a_closing_mark_of_no_session_is_no_reason_to_begin(
    replicas: dict[str, Membership] | None, session: int
) -> None:
    """ "No session was opened, and it is decided that the log begins at 0": also at session 1, which may have written."""
    async with cell(6, members=3) as c:
        right = await held(c)
        meta = PartitionMeta(generation=2, session=session, decision=Decision(mark=-1, session=session))
        await forge(c, meta, replicas)
        await stays_closed(c, "W2020")
        await opens_with(c, right)


@pytest.mark.parametrize("mark", [-1, HELD - 1])
@pytest.mark.parametrize("replicas", [None, BLANK], ids=["its storages", "others"])
@story
async def test_a_closing_mark_below_what_a_storage_knows_to_be_committed_is_none(
    replicas: dict[str, Membership] | None, mark: int
) -> None:
    async with cell(6, members=3) as c:
        right = await held(c)
        meta = replace(await c.meta(), decision=Decision(mark=mark, session=2))
        await forge(c, meta, replicas)
        await stays_closed(c, "W2021")
        await opens_with(c, right)


@story
async def test_a_member_that_never_joined_closes_no_session_that_others_wrote_in() -> None:
    """ "The only member is a storage that holds nothing": its vote would be that nothing was written."""
    async with cell(6, members=3) as c:
        right = await held(c)
        meta = replace(await c.meta(), members=("s3",), replicas={}, low_mark=-1)
        await forge(c, meta, {"s3": Membership.MEMBER})
        await stays_closed(c, "no storage that answers has the replica that took part in session 2")
        await opens_with(c, right)


@pytest.mark.parametrize("session", [5000, 900_000, 10**15])
@story
async def test_a_session_number_that_no_storage_has_come_near_fences_none(session: int) -> None:
    async with cell() as c:
        right = await held(c)
        await forge(c, replace(await c.meta(), session=session))
        await stays_closed(c, "W2021")
        await opens_with(c, right)


@story
async def test_members_that_are_no_replica_of_theirs_fence_none() -> None:
    """Nothing could be decided, and every storage would have promised itself to a session that never opens."""
    async with cell() as c:
        right = await held(c)
        meta = await c.meta()
        others = {
            name: ReplicaState(session=2, closing=None, incarnation=UUID(int=number))
            for number, name in enumerate(meta.members)
        }
        await forge(c, replace(meta, session=meta.session + 10, replicas=others))
        await stays_closed(c, "no storage that answers has the replica that took part in session 2")
        await opens_with(c, right)
