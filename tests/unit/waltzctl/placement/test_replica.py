"""Forgotten replicas that are set aside, and replicas taken offline: what may be lost by it, told before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.unit.snapshots import STORAGES, held, partition, placement_state, silent, storage, well
from waltzctl.placement.replica_moves import PlacementState
from waltzctl.placement.storage import KEPT_MS, cleaning, switching, tidying
from waltzctl.shell.safety import Danger, Plan
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.cluster.documents import Membership, PartitionMeta
from waltzd.errors import CannotConnect
from waltzd.protocol.descriptions import SetAside

OPENED = PartitionMeta(generation=1, session=4, opened=4, members=STORAGES)
NEVER_OPENED = PartitionMeta(generation=1, session=1)


def now(found: ClusterSnapshot, roles: Sequence[str] = STORAGES) -> PlacementState:
    return placement_state(found, {number: dict.fromkeys(roles, Membership.MEMBER) for number in range(4)})


def taken(found: PlacementState, meta: PartitionMeta | None = OPENED) -> Plan:
    return tidying(found, "s1", dict.fromkeys(range(4), meta))


def test_what_is_assigned_stays() -> None:
    plan = taken(now(well()))
    assert (plan.steps, plan.margins, plan.refusals) == ((), (), [])


def test_where_nobody_says_who_is_level_it_may_be_the_last() -> None:
    closed = tuple(partition(number, reported=None) for number in range(4))
    plan = taken(now(well(partitions=closed), ("s2", "s3")))
    assert len(plan.refusals) == 4, plan
    assert "0 of 3 members level without s1, whose replica may be needed" in plan.refusals[0]


def test_a_vote_counts_also_of_one_that_is_no_longer_assigned() -> None:
    """Who has left has a vote until the session without it is recorded."""
    storages = (storage("s1"), storage("s2"), storage("s3", partitions=0))
    assert taken(now(well(storages=storages), ("s2", "s3"))).refusals != []
    assert taken(now(well(), ("s2", "s3"))).refusals == []


def test_what_nobody_wants_is_asked_for_simply() -> None:
    meta = replace(OPENED, members=("s2", "s3"))
    plan = taken(now(well(), ("s2", "s3")), meta)
    assert (plan.refusals, plan.danger) == ([], Danger.ASK)
    assert plan.steps == ("set aside the files of partitions 0-3 on s1; not assigned to it",)


@pytest.mark.parametrize(("kept_ms", "wanted"), [(0, Danger.TYPED), (KEPT_MS - 1, Danger.TYPED), (KEPT_MS, Danger.ASK)])
def test_what_was_set_aside_today_wants_a_name(kept_ms: int, wanted: Danger) -> None:
    old = SetAside("1.set-aside-1", 10, kept_ms=10 * KEPT_MS)
    plan = cleaning(now(well()), "s1", [old, SetAside("0.set-aside-1", 10, kept_ms=kept_ms)])
    assert (plan.danger, plan.refusals) == (wanted, [])
    assert [("younger than a day" in step) for step in plan.steps] == [False, wanted is Danger.TYPED]


def test_before_the_first_session_there_is_nothing_to_lose() -> None:
    for meta in (None, NEVER_OPENED):
        plan = taken(now(closed(last_id=-1), ("s2", "s3")), meta)
        assert (plan.refusals, plan.margins, plan.danger) == ([], (), Danger.ASK)


@pytest.mark.parametrize("meta", [None, NEVER_OPENED])
def test_a_replica_with_data_shows_that_its_document_is_lost(meta: PartitionMeta | None) -> None:
    """It was deleted, or went back to before the first session: nobody knows who has a vote."""
    plan = taken(now(closed(last_id=9), ("s2", "s3")), meta)
    assert len(plan.refusals) == 4, plan
    assert "without s1, whose replica may be needed" in plan.refusals[0]


def closed(*, last_id: int) -> ClusterSnapshot:
    """Return a cluster without owners whose replicas hold ids up to `last_id`."""
    replicas = tuple(held(number, last_id=last_id) for number in range(4))
    return well(
        partitions=tuple(partition(number, reported=None) for number in range(4)),
        storages=tuple(storage(name, assigned=replicas) for name in STORAGES),
    )


def test_a_storage_that_does_not_answer_is_not_cleared() -> None:
    gone = now(well(storages=(silent(storage("s1"), CannotConnect("refused")), storage("s2"), storage("s3"))))
    with pytest.raises(CannotConnect, match="the storage s1 does not answer: refused"):
        taken(gone)


def test_online_is_never_refused() -> None:
    assert switching(now(closed(last_id=9)), "s1", [0], is_online=True).refusals == []
    assert switching(now(well()), "s1", [0, 2], is_online=False).danger is Danger.TYPED
