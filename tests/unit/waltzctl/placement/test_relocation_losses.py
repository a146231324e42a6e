"""What operators may take away while a partition takes no transactions: judged by what storages hold, not by its owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, product

import pytest

from tests.unit import snapshots
from tests.unit.snapshots import STORAGES, held, owned, partition, replica, storage, well
from waltzctl.placement.replica_moves import MovePlan, PlacementState, members_at_hand
from waltzctl.shell.safety import Danger, Plan
from waltzctl.snapshot.cluster_snapshot import StorageView
from waltzd.cluster.documents import Membership
from waltzd.errors import CannotConnect

GONE = CannotConnect("it is dead")
MEMBERS = dict.fromkeys(STORAGES, Membership.MEMBER)


def one(name: str, how: str) -> StorageView:
    """`how`: it holds everything, lags a session behind, is empty, or does not answer."""
    if how == "dead":
        return replace(storage(name), reported=None, error=GONE)
    session = {"level": 7, "behind": 6, "empty": -1}[how]
    return storage(name, assigned=(held(0, session=session, last_id=99 if session > 0 else -1),))


def placement_state(*hows: str, is_open: bool = False) -> PlacementState:
    views = [one(name, how) for name, how in zip(STORAGES, hows, strict=True)]
    replicas = tuple(replica(name, counts=how == "level", state="LIVE") for name, how in zip(STORAGES, hows, strict=True))
    reported = owned(0, replicas, step="OPEN" if is_open else "VOTING", waiting="" if is_open else "undecided")
    found = well(storages=tuple(views), partitions=(partition(0, reported=reported),))
    found = replace(found, meta=replace(found.meta, partitions=1))
    return snapshots.placement_state(found, {0: MEMBERS})


def planned(now: PlacementState, *kept: str) -> Plan:
    return MovePlan(now=now, verb="storage remove", subject="trial", goals={0: kept}).plan()


def against(now: PlacementState, kept: tuple[str, ...]) -> list[str]:
    return planned(now, *kept).refusals


def test_the_last_replica_with_data_is_not_taken_away() -> None:
    now = placement_state("level", "dead", "dead")
    for kept in (("s1",), ("s2",), ("s2", "s3"), ("s1", "s2")):
        assert against(now, kept), kept
    assert against(now, ("s2", "s3")) == [
        "partition 0 would have 0 of 3 members level; it takes no transactions now, and would lack even more members"
    ]
    assert "what the others hold may be needed" in against(now, ("s1",))[0]


def test_an_empty_storage_is_not_what_is_kept() -> None:
    now = placement_state("empty", "level", "level", is_open=True)
    assert now.spread(now.groups, {0: 1})[0] in (("s2",), ("s3",))
    closed = placement_state("empty", "level", "dead")
    assert members_at_hand(closed, 0) == {"s2"}
    assert closed.spread(closed.groups, {0: 1}) == {0: ("s2",)}
    assert against(closed, ("s2",)), "and even that may be too little"


@pytest.mark.slow
def test_whatever_is_taken_away_a_majority_of_what_was_written_stays() -> None:
    """All states of three replicas, and all that may be kept of them."""
    kinds = ("level", "behind", "empty", "dead")
    goals = [names for size in (1, 2) for names in combinations(STORAGES, size)]
    refused = 0
    for hows, kept in product(product(kinds, repeat=3), goals):
        now = placement_state(*hows)
        newest = next((how for how in kinds[:3] if how in hows), "level")
        usable = [name for name, how in zip(STORAGES, hows, strict=True) if how == newest and name in kept]
        assert bool(against(now, kept)) == (len(usable) < 2), (hows, kept)
        refused += len(usable) < 2
    assert refused > 300


def test_adding_and_replacing_nothing_is_no_loss() -> None:
    now = placement_state("level", "level", "dead")
    assert against(now, STORAGES) == []
    plan = planned(now, "s1", "s2")
    assert (plan.refusals, plan.danger) == ([], Danger.ASK)


@pytest.mark.parametrize("changes", [{"is_available": False}, {"findings": (object(),)}])
def test_who_cannot_vouch_for_it_is_no_help(changes: Mapping[str, object]) -> None:
    now = placement_state("level", "level", "dead")
    worse = storage("s2", assigned=(held(0, session=7, **changes),))
    found = replace(now.found, storages=(now.found.storages[0], worse, now.found.storages[2]))
    assert against(replace(now, found=found), ("s1", "s2"))


def test_a_plan_says_when_one_failure_domain_could_stop_a_partition() -> None:
    now = placement_state("level", "level", "level", is_open=True)
    east = storage("s4", group="s1")
    apart = replace(now, found=replace(now.found, storages=(*now.found.storages, east)))
    plan = planned(apart, "s1", "s2", "s4")
    assert plan.steps[-1] == "partition 0: most replicas are in the group s1 then, and it stops with it"
    assert plan.danger is Danger.TYPED
    assert planned(apart, "s2", "s3", "s4").danger is Danger.ASK
