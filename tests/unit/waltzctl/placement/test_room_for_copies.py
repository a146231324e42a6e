"""Whether there is room for what is to be copied, told before; and why a copy waits, told while it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.unit.snapshots import STORAGES, held, owned, partition, placement_state, replica, storage, well
from waltzctl.placement.replica_moves import Goals, MovePlan, PlacementState, next_step, partition_move
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot, StorageView
from waltzd.cluster.documents import Membership, PartitionMeta

MB = 10**6


def holding(name: str, bytes_: Mapping[int, int], *, free: int = 1000 * MB) -> StorageView:
    assigned = tuple(replace(held(number), disk_bytes=count) for number, count in bytes_.items())
    return storage(name, free_bytes=free, assigned=assigned)


def now(*more: StorageView, learners: Mapping[int, str] | None = None) -> PlacementState:
    """Each partition has 30 MB on s1 to s3, and a bit less where it is younger."""
    first = [holding(name, dict.fromkeys(range(4), (30 - less) * MB)) for less, name in enumerate(STORAGES)]
    found = well(storages=(*first, *more))
    sets = {number: dict.fromkeys(STORAGES, Membership.MEMBER) for number in range(4)}
    for number, name in (learners or {}).items():
        sets[number][name] = Membership.LEARNER
    return placement_state(found, sets)


def against(now: PlacementState, goals: Goals, new: StorageView | None = None) -> list[str]:
    aimed = MovePlan(now=now, verb="storage add", subject="s4", goals=goals)
    if new is not None:
        aimed = replace(aimed, newcomer=new.meta, newcomer_says=new.reported)
    return aimed.plan().refusals


@pytest.mark.parametrize("is_new", [True, False])
def test_what_does_not_fit_is_refused(is_new: bool) -> None:
    four = holding("s4", {}, free=50 * MB)
    there = now() if is_new else now(four)
    newcomer = four if is_new else None
    assert against(there, {0: ("s1", "s2", "s4")}, newcomer) == []
    both = {0: ("s1", "s2", "s4"), 1: ("s1", "s3", "s4")}
    assert against(there, both, newcomer) == ["s4 has room for 50.0 MB, and 60.0 MB are to be copied there"]


def test_how_much_is_copied_and_how_long_that_takes_is_in_the_plan() -> None:
    both = {0: ("s1", "s2", "s4"), 1: ("s1", "s3", "s4")}

    def steps(goals: Goals, bound: int | None = None) -> tuple[str, ...]:
        there = now(holding("s4", {0: 20 * MB}, free=1000 * MB))
        return MovePlan(now=there, verb="", subject="", goals=goals).plan(bound).steps[2:]

    assert steps(both, MB // 2) == ("copy 40.0 MB in all, at most 500.0 kB a second: 1:20 or longer",)
    assert steps(both)[0].startswith("copy 40.0 MB in all, at most as fast as the servers'")
    assert steps({0: ("s1", "s2"), 1: ("s1", "s3")}) == (), "nothing is copied"


def test_what_a_storage_keeps_free_is_no_room() -> None:
    four = storage("s4", free_bytes=50 * MB, free_bytes_min=21 * MB)
    told = ["s4 has room for 29.0 MB, and 30.0 MB are to be copied there"]
    assert against(now(four), {0: ("s1", "s2", "s4")}) == told
    full = storage("s4", free_bytes=20 * MB, free_bytes_min=21 * MB)
    assert "room for 0 B" in against(now(full), {0: ("s1", "s2", "s4")})[0]


def test_what_is_there_is_not_copied_again() -> None:
    """A command that goes on from where it was."""
    four = holding("s4", {0: 25 * MB, 1: 40 * MB}, free=6 * MB)
    both = {0: ("s1", "s2", "s4"), 1: ("s1", "s3", "s4")}
    assert against(now(four, learners={0: "s4", 1: "s4"}), both) == []
    less = replace(four, reported=replace(four.reported, free_bytes=4 * MB) if four.reported is not None else None)
    assert len(against(now(less, learners={0: "s4", 1: "s4"}), both)) == 1


def test_of_whom_nothing_is_known_nothing_is_said() -> None:
    four = holding("s4", {}, free=0)
    assert against(now(replace(four, reported=None)), {0: ("s1", "s2", "s4")}) == []
    assert against(now(four), {0: ("s1", "s2")}) == [], "nothing is copied there"


# -- while it waits ----------------------------------------------------------------------------------------------------


def waiting(state: str, *, story: str, is_full: bool = False) -> str:
    """Of s4, which copies partition 0."""
    four = replica("s4", counts=False, state=state, story=story)
    reported = owned(0, (*(replica(name) for name in STORAGES), replace(four, durable_id=9)))
    copying = storage("s4", assigned=(held(0, is_full=is_full, last_id=9),))
    found: ClusterSnapshot = well(partitions=(partition(0, reported=reported),))
    found = replace(found, storages=(*found.storages, copying))
    roles = {**dict.fromkeys(STORAGES, Membership.MEMBER), "s4": Membership.LEARNER}
    meta = PartitionMeta(generation=1, session=4, opened=4, members=STORAGES)
    step = next_step(partition_move(found, 0, ("s1", "s2", "s4"), roles, meta))
    assert step.roles == roles
    return step.why


def test_it_says_why() -> None:
    full = "data/s4: 10 bytes are free, 100 are to be written and 50 must stay free"
    assert waiting("DOWN", story=full) == f"s4: {full}"
    assert waiting("DOWN", story="W1", is_full=True) == "s4: its disk is full"
    assert waiting("DOWN", story="s4 and s1 are one storage") == "s4: s4 and s1 are one storage"
    assert waiting("DOWN", story="") == "s4 has not answered yet"
    assert waiting("CATCHING_UP", story="copying") == "s4 holds 10 of 100 transactions"
    assert waiting("CATCHING_UP", story="copying", is_full=True) == "s4 holds 10 of 100 transactions; its disk is full"
