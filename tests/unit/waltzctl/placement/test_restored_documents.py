"""The generations of a cluster whose documents were put back: clients and servers that lived through it follow."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.snapshots import KEY, STORAGES, storage, well
from waltzctl.placement.daemons import Daemons
from waltzctl.placement.metadata import GENERATIONS_AHEAD, Restoration, Target, clock_generation, loading
from waltzctl.shell.progress import unreported
from waltzd.cluster.cluster import ASSIGNMENT, POLICY, Cluster
from waltzd.cluster.coordinator import Create, Node, Set
from waltzd.cluster.documents import (
    GENERATION_MAX,
    Assignment,
    ClusterMeta,
    Membership,
    Ownership,
    PolicyDocument,
    ReplicaSets,
)
from waltzd.cluster.memory import MemoryTree
from waltzd.cluster.metadata import read_documents
from waltzd.errors.operations import ChangedMeanwhile
from waltzd.protocol.channels import Parts
from waltzd.protocol.document import encode
from waltzd.protocol.policy import Grant, Pattern, Verb

NOW = 1_800_000_000.0


def put_back(generation: int, now: float, target: Target | None = None) -> Assignment:
    meta = ClusterMeta(name="shop", key=UUID(int=7), partitions=1, created="2026-11-24T00:00:00Z")
    wanted = Restoration(
        meta=meta, verdicts=(), generations=(generation,), counted_by_clock=clock_generation(now), documents={}, storages={}
    )
    return wanted.assignment(target or Target())


def rebuilt(now: float) -> Assignment:
    """Out of storages alone, which tell no generation."""
    return put_back(0, now)


def moved(assignment: Assignment, owner: str) -> Assignment:
    return Assignment(owners=tuple(Ownership(owner, one.generation + 1) for one in assignment.owners))


def test_documents_that_are_put_back_twice_within_a_minute_are_above_the_owners_between() -> None:
    known = moved(moved(moved(rebuilt(NOW), "a"), "b"), "a").owners[0]
    assert moved(rebuilt(NOW + 5), "b").owners[0].generation > known.generation


def test_a_rebuild_is_above_documents_that_were_put_back_from_a_file_before() -> None:
    """Twice from a file, each time saved after the last one, and then out of storages, which know of neither."""
    first = moved(rebuilt(NOW), "a")
    second = moved(put_back(first.owners[0].generation, NOW + 9), "a")
    third = moved(put_back(second.owners[0].generation, NOW + 18), "a")
    assert first.owners[0].generation < second.owners[0].generation < third.owners[0].generation
    assert third.owners[0].generation < rebuilt(NOW + 27).owners[0].generation


def test_a_clock_that_is_behind_is_not_believed() -> None:
    known = rebuilt(NOW).owners[0].generation + 3
    assert put_back(known, NOW - 3600).owners[0].generation == known + GENERATIONS_AHEAD


def target_with(assignment: Assignment) -> Target:
    return Target(nodes={ASSIGNMENT: Node(encode(assignment), version=3, created=1, is_mine=False)})


def test_an_assignment_that_was_put_back_a_while_ago_and_nobody_has_taken_stays() -> None:
    there = rebuilt(NOW)
    assert put_back(clock_generation(NOW - 60), NOW + 60, target_with(there)) == there
    known = there.owners[0].generation
    assert put_back(known, NOW + 60, target_with(there)) == rebuilt(NOW + 60), "it is not above what is known"


def test_an_assignment_with_an_owner_is_not_believed_to_be_the_newest() -> None:
    """The coordinator may have gone back, and servers may know of later owners."""
    there = moved(rebuilt(NOW), "a")
    assert put_back(clock_generation(NOW - 60), NOW + 60, target_with(there)) == rebuilt(NOW + 60)


@given(st.floats(-1e12, 1e12))
def test_a_clock_that_is_wrong_gives_a_generation_all_the_same(now: float) -> None:
    assert 0 <= clock_generation(now) <= GENERATION_MAX - GENERATIONS_AHEAD


def test_it_is_above_those_that_were_counted_in_minutes_since_1970() -> None:
    assert clock_generation(NOW) > NOW / 60 + GENERATIONS_AHEAD


class Empty(Daemons):
    async def ask(self, *_: object) -> Any:
        return well(storages=tuple(storage(name, assigned=()) for name in STORAGES))


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_document_that_was_changed_while_a_person_was_asked_is_not_written_over(is_planned: bool) -> None:
    """Whether or not the plan says that it is changed: the file may give back rights that were just taken away."""

    def policy(name: str) -> bytes:
        grant = Grant(names=(Pattern(name),), may=(Verb.READ,), partitions=Parts("0"))
        return encode(PolicyDocument(grants=(grant,)))

    async def work() -> None:
        meta = ClusterMeta(name="trial", key=KEY, partitions=4, created="2026-01-01", format=1)
        sets = ReplicaSets(partitions=dict.fromkeys(range(4), dict.fromkeys(STORAGES, Membership.MEMBER)))
        metas = [storage(name).meta for name in STORAGES]
        cluster = await Cluster.create(MemoryTree().connect(), meta, storages=metas, replicas=sets)
        await cluster.coordinator.commit([Create(POLICY, policy("saved"))])
        saved = await read_documents(cluster, moment="2026-01-01T00:00:00+00:00")
        if is_planned:
            await cluster.coordinator.commit([Set(POLICY, policy("before"), 0)])
        change = await loading(cluster, Empty(None), saved, file="file", where="nowhere", who="me")
        assert (f"change {POLICY}" in change.plan.steps) == is_planned
        version = 1 if is_planned else 0
        await cluster.coordinator.commit([Set(POLICY, policy("newest"), version)])
        with pytest.raises(ChangedMeanwhile, match="/policy was changed since the plan"):
            await change.do(cluster, unreported)
        found = await cluster.coordinator.get(POLICY)
        assert found is not None
        assert found.data == policy("newest")
        assert (await cluster.meta()).name == "trial"

    asyncio.run(work())
