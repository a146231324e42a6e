"""A log that an operator ended, over real storages: old replicas come back, owners crash, a second rescue, a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tests.simulation.cell import SETTINGS, Cell, cell, story
from tests.simulation.test_rescue import Hands, undecided
from waltzctl.placement.proof import Scene
from waltzd.cluster.documents import PartitionMeta
from waltzd.errors import WaltzError
from waltzd.protocol.timelines import FIRST, NEVER_FORKED
from waltzd.server.core.recovery import Recovery
from waltzd.server.session.confirmation import SessionConfirmation
from waltzd.storage.replica.partition import Partition

FORK = 29


async def ended_at(c: Cell, fork: int, *, away: str) -> tuple[PartitionMeta, bytes]:
    """The first life of a log up to id 60, and a document that ends it at the fork, as a restore under the same key does.
    The storage that is `away` does not hear of it. Its last record comes back, too."""
    owned = await c.own()
    pipeline = await c.opened(owned)
    for count in (30, 30, 1):
        await pipeline.committed(pipeline.append(count))
    await c.all_hold(60)
    last = c.storages[away].records()[-1]
    await owned.close(hand_over=True)
    await c.storages[away].stop()
    meta = await c.meta()
    lineage = NEVER_FORKED.forked(
        identity=UUID(int=77), fork=fork, session=meta.session + 10, cause="cluster restore", began="now", who="me"
    )
    decision = replace(meta.decision, mark=fork, session=meta.session + 10) if meta.decision is not None else None
    assert decision is not None
    forked = replace(meta, session=meta.session + 10, decision=decision, timelines=lineage.later)
    _, version = await c.cluster.partition(0)
    await c.cluster.save_partition(0, forked, version)
    return forked, last


@story
async def test_a_storage_of_the_old_timeline_comes_back_and_the_owner_crashes() -> None:
    async with cell() as c:
        _, last = await ended_at(c, FORK, away="s2")
        owned = await c.own(2)
        pipeline = await c.opened(owned)
        await pipeline.committed(pipeline.append(10))
        await pipeline.committed(pipeline.append(1))
        await c.until(lambda: c.last_id("s0") == c.last_id("s1") == 40)
        acknowledged = c.storages["s0"].records()
        await c.storages["s2"].start()
        assert c.replica("s2").status().timeline == FIRST
        owned.task.cancel()
        await asyncio.gather(owned.task, return_exceptions=True)
        owned = await c.own(3)
        await c.opened(owned)
        await c.until(lambda: c.last_id("s2") == 40)
        assert c.check_equal()[:41] == acknowledged
        assert last not in c.storages["s2"].records()
        (aside,) = (await c.storages["s2"].calls.describe()).set_aside  # type: ignore[union-attr]
        assert aside.name == "0.set-aside-1"


@story
async def test_two_storages_of_the_old_timeline_do_not_outvote_the_one_that_went_on() -> None:
    """Both come back while the only replica of the new timeline is away: nothing opens, and nothing is cut."""
    async with cell() as c:
        owned, pipeline = await c.holding(50)
        await c.until(lambda: c.last_id("s0") == 49)
        c.storages["s0"].kill()
        await pipeline.committed(pipeline.append(50))
        await pipeline.committed(pipeline.append(1))
        await c.until(lambda: c.last_id("s1") == c.last_id("s2") == 100)
        for name in ("s1", "s2"):
            await c.storages[name].stop()
        await c.storages["s0"].start()
        done = await Hands(c).rescue()
        later = await c.opened(owned, above=done.session)
        await later.committed(later.append(20))
        owned.task.cancel()
        await asyncio.gather(owned.task, return_exceptions=True)
        c.storages["s0"].kill()
        for name in ("s1", "s2"):
            await c.storages[name].start()
        owned = await c.own(3)
        await asyncio.sleep(20)
        assert owned.describe().step != "OPEN"
        assert c.last_id("s1") == c.last_id("s2") == 100, "what they hold stays as long as nothing is decided"
        await c.storages["s0"].start()
        await c.opened(owned)
        await c.until(lambda: c.last_id("s1") == c.last_id("s2") == 69)
        assert len(c.check_equal()) == 70


@story
async def test_a_new_disk_decides_the_vote_of_a_log_that_forked() -> None:
    """Its replica never joined the session, so it may be filled from the only one that remembers all of it."""
    async with cell() as c:
        await undecided(c)
        done = await Hands(c).rescue()
        owned = c.owned_logs[0]
        await c.opened(owned, above=done.session)
        for name in ("s1", "s2"):
            await c.storages[name].start()
        await c.until(lambda: all(one.counts for one in owned.describe().replicas))
        c.storages["s0"].kill()
        owned.task.cancel()
        await asyncio.gather(owned.task, return_exceptions=True)
        owned = await c.own(2)
        last_id, session = await c.lose_all_but_s1(owned)
        later = await c.opened(await c.own(3), above=session)
        assert later.session.low_mark == last_id
        await later.committed(later.append(5))
        await c.until(lambda: c.last_id("s0") == c.last_id("s2") == last_id + 5)
        assert c.check_equal()


@story
async def test_a_second_rescue_ends_the_log_that_the_first_one_began() -> None:
    async with cell() as c:
        owned, pipeline = await c.holding(50)
        await c.until(lambda: c.last_id("s0") == 49)
        for seed in (100, 200):
            for number, name in enumerate(("s1", "s2")):
                c.storages[name].kill()
                c.storages[name].lose_disk(seed=seed + number)
            done = await Hands(c).rescue()
            pipeline = await c.opened(owned, above=done.session)
            for name in ("s1", "s2"):
                await c.storages[name].start()
            await pipeline.committed(pipeline.append(5))
            await c.until(lambda: c.last_id("s0") == c.last_id("s1") == c.last_id("s2") >= 54)
            await c.until(lambda: all(one.counts for one in owned.describe().replicas))
        meta = await c.meta()
        assert [(one.number, one.parent) for one in meta.timelines] == [(2, 1), (3, 2)]
        assert {one.identity for one in c.replica("s1").status().timelines} == {one.identity for one in meta.timelines}


@story
async def test_a_rescue_waits_for_the_lease_of_an_owner_that_it_cut_off() -> None:
    """Reads that the old owner confirms by its lease have to end before the new one acknowledges."""
    async with cell() as c:
        settings = replace(SETTINGS, lease_seconds=0.25, clock=asyncio.get_running_loop().time)
        first = await c.own(1, settings=settings)
        pipeline = await c.opened(first)
        await pipeline.committed(pipeline.append(20))
        await c.all_hold(19)
        old = SessionConfirmation(pipeline.session)
        await pipeline.committed(pipeline.append(1))
        assert old.is_leased
        for link in pipeline.session.replicators.values():
            link.cancel()
        scene = await Hands(c).scene()
        await Hands(c).carry_out(scene)
        second = await c.own(2, settings=settings)
        later = await c.opened(second)
        assert not old.is_leased, "the new log opened while the old owner still answered by its lease"
        await later.committed(later.append(5))


def without_a_lease(self: Scene, **named: Any) -> PartitionMeta:
    return replace(FORKED(self, **named), lease_ms=0)


def without_a_timeline(self: Scene, **named: Any) -> PartitionMeta:
    return self.document


FORKED = Scene.forked


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "told"),
    [
        (Scene, "forked", without_a_lease, test_a_rescue_waits_for_the_lease_of_an_owner_that_it_cut_off),
        (Scene, "forked", without_a_timeline, test_two_storages_of_the_old_timeline_do_not_outvote_the_one_that_went_on),
        (
            Recovery,
            "_is_of_older_timeline",
            lambda *_: False,
            test_a_storage_of_the_old_timeline_comes_back_and_the_owner_crashes,
        ),
        (
            Partition,
            "fork",
            lambda self, session, lineage, contact=0: self.status(),
            test_a_storage_of_the_old_timeline_comes_back_and_the_owner_crashes,
        ),
    ],
)
def test_a_rule_of_timelines_that_is_missing_is_noticed(
    owner: type, name: str, wrong: object, told: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, WaltzError)):
        told()
