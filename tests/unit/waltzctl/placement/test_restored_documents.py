"""The generations of a cluster whose documents were put back: clients and servers that lived through it follow."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from waltzctl.placement.restored_documents import GENERATIONS_AHEAD, Restoration, Target, clock_generation
from waltzd.cluster.documents import GENERATION_MAX, Assignment, ClusterMeta, Ownership

NOW = 1_800_000_000.0


def rebuilt(now: float) -> Assignment:
    """Out of storages alone, which tell no generation."""
    meta = ClusterMeta(name="shop", key=UUID(int=7), partitions=1, created="2026-11-24T00:00:00Z")
    wanted = Restoration(
        meta=meta, verdicts=(), generations=(0,), counted_by_clock=clock_generation(now), documents={}, storages={}
    )
    return wanted.assignment(Target())


def moved(assignment: Assignment, owner: str) -> Assignment:
    return Assignment(owners=tuple(Ownership(owner, one.generation + 1) for one in assignment.owners))


def test_documents_that_are_put_back_twice_within_a_minute_are_above_the_owners_between() -> None:
    known = moved(moved(moved(rebuilt(NOW), "a"), "b"), "a").owners[0]
    assert moved(rebuilt(NOW + 5), "b").owners[0].generation > known.generation


@given(st.floats(-1e12, 1e12))
def test_a_clock_that_is_wrong_gives_a_generation_all_the_same(now: float) -> None:
    assert 0 <= clock_generation(now) <= GENERATION_MAX - GENERATIONS_AHEAD


def test_it_is_above_those_that_were_counted_in_minutes_since_1970() -> None:
    assert clock_generation(NOW) > NOW / 60 + GENERATIONS_AHEAD
