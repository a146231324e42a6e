"""Single replicas that are made or taken off by the name of their storage: what may be lost by it, told before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.pictures import STORAGES, partition, silent, situation, storage, well
from waltzctl.picture.picture import Picture
from waltzctl.placement.moves import Situation
from waltzctl.placement.storage import KEPT_MS, cleaning, creation, removal, switching
from waltzctl.shell.safety import Danger, Plan
from waltzd.cluster.documents import Membership, PartitionMeta
from waltzd.errors import CannotConnect, NoSuchPartition, PartitionExists
from waltzd.protocol.descriptions import SetAside

OPENED = PartitionMeta(generation=1, session=4, opened=4, members=STORAGES)


def now(found: Picture, roles: Sequence[str] = STORAGES) -> Situation:
    return situation(found, {number: dict.fromkeys(roles, Membership.MEMBER) for number in range(4)})


def taken(found: Situation, meta: PartitionMeta | None = OPENED, **more: Any) -> Plan:
    return removal(found, "s1", [0, 1], {0: meta, 1: meta}, **{"delete_files": False, **more})


def test_one_of_three_may_go_and_its_name_is_typed() -> None:
    plan = taken(now(well()))
    assert (plan.refusals, plan.danger) == ([], Danger.TYPED), "one more, and they stop"
    assert [(step.before.spare, step.after.spare) for step in plan.margins] == [(1, 0), (1, 0)]
    assert plan.steps == (
        "set aside the files of partitions 0-1 on s1; assigned to it, so that owners make empty replicas there and copy",
    )


def test_the_majority_stays() -> None:
    """The replica of another storage was taken off a moment ago, or offline: its owner may not have noticed."""
    for other in (storage("s2", partitions=0), silent(storage("s2"), CannotConnect("gone"))):
        plan = taken(now(well(storages=(storage("s1"), other, storage("s3")))))
        assert plan.refusals == [
            f"partition {number} would have 1 of 3 members level and take no transactions: a majority of 2 is needed"
            for number in (0, 1)
        ]


def test_where_nobody_says_who_is_level_it_may_be_the_last() -> None:
    closed = tuple(partition(number, said=None) for number in range(4))
    for roles in (STORAGES, ("s2", "s3")):  # assigned there, or forgotten
        plan = taken(now(well(partitions=closed), roles))
        assert len(plan.refusals) == 2, plan
        assert "0 of 3 members level without s1, and what this one holds may be needed" in plan.refusals[0]


def test_a_vote_counts_also_of_one_that_is_no_longer_assigned() -> None:
    """Who has left has a vote until the session without it is recorded."""
    storages = (storage("s1"), storage("s2"), storage("s3", partitions=0))
    assert taken(now(well(storages=storages), ("s2", "s3"))).refusals != []
    assert taken(now(well(), ("s2", "s3"))).refusals == []


def test_what_nobody_wants_is_asked_for_simply() -> None:
    meta = replace(OPENED, members=("s2", "s3"))
    plan = taken(now(well(), ("s2", "s3")), meta)
    assert (plan.refusals, plan.danger) == ([], Danger.ASK)
    assert plan.steps == ("set aside the files of partitions 0-1 on s1; not assigned to it",)
    plan = taken(now(well(), ("s2", "s3")), meta, delete_files=True)
    assert (plan.refusals, plan.danger) == ([], Danger.TYPED)
    assert plan.steps == ("delete the files of partitions 0-1 on s1; not assigned to it",)


def test_files_of_a_member_are_not_deleted() -> None:
    """By the document of the last session, or by the assignment: whichever says so."""
    wanted = ["s1 is a member of partitions 0-1: its files can be set aside, and deleted later"]
    assert taken(now(well()), delete_files=True).refusals == wanted
    assert taken(now(well(), ("s2", "s3")), delete_files=True).refusals == wanted
    assert taken(now(well()), replace(OPENED, members=("s2", "s3")), delete_files=True).refusals == wanted
    assert taken(now(well()), None, delete_files=True).refusals == wanted, "the document is gone"


@pytest.mark.parametrize(("kept_ms", "wanted"), [(0, Danger.TYPED), (KEPT_MS - 1, Danger.TYPED), (KEPT_MS, Danger.ASK)])
def test_what_was_set_aside_today_wants_a_name(kept_ms: int, wanted: Danger) -> None:
    old = SetAside("1.set-aside-1", 10, kept_ms=10 * KEPT_MS)
    plan = cleaning(now(well()), "s1", [old, SetAside("0.set-aside-1", 10, kept_ms=kept_ms)])
    assert (plan.danger, plan.refusals) == (wanted, [])
    assert [("younger than a day" in step) for step in plan.steps] == [False, wanted is Danger.TYPED]


def test_before_the_first_session_there_is_nothing_to_lose() -> None:
    closed = tuple(partition(number, said=None) for number in range(4))
    for meta in (None, PartitionMeta(generation=1, session=1)):
        plan = taken(now(well(partitions=closed)), meta)
        assert (plan.refusals, plan.margins, plan.danger) == ([], (), Danger.ASK)


def test_what_is_not_there_cannot_be_taken_and_what_is_there_cannot_be_made() -> None:
    few = now(well(storages=(storage("s1", partitions=1), storage("s2"), storage("s3"))))
    with pytest.raises(NoSuchPartition, match="s1 holds nothing of partition 1"):
        taken(few)
    with pytest.raises(PartitionExists, match="s1 holds partition 0 already"):
        creation(few, "s1", [0, 1])
    plan = creation(few, "s1", [1, 2, 3])
    assert (plan.steps, plan.danger) == (("make empty replicas of partitions 1-3 on s1",), Danger.NONE)
    gone = now(well(storages=(silent(storage("s1"), CannotConnect("refused")), storage("s2"), storage("s3"))))
    with pytest.raises(CannotConnect, match="the storage s1 does not answer: refused"):
        taken(gone)


def test_online_is_never_refused() -> None:
    closed = now(well(partitions=tuple(partition(number, said=None) for number in range(4))))
    assert switching(closed, "s1", [0], is_online=True).refusals == []
    assert switching(now(well()), "s1", [0, 2], is_online=False).danger is Danger.TYPED
