"""An old copy of a storage's directory comes back while another one lags and the third is away: it does not vote."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from uuid import UUID

import pytest

from tests.simulation.storage_machine import is_told
from tests.simulation.test_store import cell
from tests.unit.timeless import run
from waltzd.cluster.documents import Decision, PartitionMeta, ReplicaState
from waltzd.format.finding import Code, Finding
from waltzd.protocol.descriptions import ReplicaStatus


@pytest.mark.parametrize("in_place", [False, True], ids=["as other files", "in place"])
def test_an_old_copy_does_not_vote(in_place: bool) -> None:
    async def story() -> None:
        async with cell() as c:
            owned = await c.own(1)
            pipeline = await c.opened(owned)
            await pipeline.committed(pipeline.append(20))
            await c.until(lambda: all(c.last_id(name) == 19 for name in c.storages))
            storage = c.storages["s2"]
            copy = storage.disk.clone(5)
            storage.kill()
            await storage.start()
            await c.until(lambda: all(replica.state == "LIVE" for replica in owned.describe().replicas))
            c.storages["s1"].kill()  # it lags
            await pipeline.committed(pipeline.append(30))  # acknowledged by s0 and s2
            await owned.close(hand_over=False)
            storage.kill()
            c.storages["s0"].kill()  # away, with everything
            storage.disk = copy.restored(6, over=storage.disk if in_place else None)
            await c.storages["s1"].start()
            await storage.start()
            second = await c.own(2)
            await asyncio.sleep(30)
            assert second._pipeline is None, "it waits for s0, which alone has what was acknowledged"

    run(story())


# -- which snapshots of a volume the simulator puts back ----------------------------------------------------------------

JOINED, OTHER = UUID(int=1), UUID(int=2)
THEN = ReplicaStatus(
    partition=0,
    incarnation=JOINED,
    promised_session=5,
    session=5,
    low_mark=6,
    local_low_mark=6,
    committed=6,
    last_id=8,
    is_available=True,
    is_full=False,
    segments=1,
    findings=(),
)
NOW = replace(THEN, last_id=9)
META = PartitionMeta(
    generation=1,
    session=5,
    opened=5,
    low_mark=6,
    members=("a", "b", "c"),
    replicas={"a": ReplicaState(session=5, closing=None, incarnation=JOINED, acknowledged=7)},
)
CLOSED = replace(META, decision=Decision(mark=9, session=5))
DAMAGED = replace(NOW, last_id=8, findings=(Finding(code=Code.DAMAGED_RECORD, path="0.seg", detail="it is rotten"),))


@pytest.mark.parametrize("now", [NOW, replace(THEN, incarnation=OTHER), replace(THEN, session=4), DAMAGED, None])
def test_a_snapshot_of_the_one_that_joined_is_told_by_nothing_but_the_document(now: ReplicaStatus | None) -> None:
    """Whether another copy was put back before it, or an empty disk: it is the one that joined, and holds less."""
    assert not is_told(META, "a", THEN, now)


@pytest.mark.parametrize(
    ("meta", "name", "then", "now"),
    [
        (META, "a", THEN, replace(NOW, last_id=8)),
        (META, "a", replace(THEN, last_id=6), NOW),
        (META, "a", replace(THEN, session=4), NOW),
        (META, "a", replace(THEN, incarnation=OTHER), NOW),
        (META, "b", THEN, NOW),
        (CLOSED, "a", THEN, NOW),
    ],
    ids=["as it is", "less than acknowledged", "an older session", "another one", "never joined", "decided"],
)
def test_a_snapshot_is_told(meta: PartitionMeta, name: str, then: ReplicaStatus, now: ReplicaStatus) -> None:
    assert is_told(meta, name, then, now)
