"""How many failures a partition survives, before and after a change; against a twin that lets replicas fail."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from waltzctl.shell.safety import Danger, Effect, Margin, danger, margin, refusals, without
from waltzd.cluster.documents import Membership

NAMES = ("a", "b", "c", "d", "e")


def survives(members: int, level: int) -> int:
    """How many of the level members may fail, one after the other, and a majority of all is still there; -1: none is."""
    failures = -1
    while level - failures - 1 > members / 2:
        failures += 1
    return failures if failures < 0 or level else -1


@pytest.mark.parametrize("members", range(6))
def test_a_margin_is_how_many_may_fail(members: int) -> None:
    for level in range(members + 1):
        found = Margin(partition=0, members=members, level=level)
        assert max(found.spare, -1) == survives(members, level), (members, level)


def test_learners_do_not_count() -> None:
    roles = {"a": Membership.MEMBER, "b": Membership.MEMBER, "c": Membership.LEARNER}
    assert margin(7, roles, ["a", "c"]) == Margin(partition=7, members=2, level=1)


def test_who_falls_silent_stays_a_member_and_who_leaves_does_not() -> None:
    roles = dict.fromkeys(NAMES[:3], Membership.MEMBER)
    silent = without(0, roles, NAMES[:3], silent=["a"])
    gone = without(0, roles, NAMES[:3], gone=["a"], silent=["a"])
    assert (silent.before.spare, silent.after) == (1, Margin(partition=0, members=3, level=2))
    assert gone.after == Margin(partition=0, members=2, level=2)


def test_a_change_is_refused_exactly_when_it_stops_a_partition_or_makes_that_worse() -> None:
    """All clusters of up to five replicas, whoever is level, and whoever leaves or falls silent."""
    cases = refused = 0
    for count in range(1, 6):
        names = NAMES[:count]
        roles = dict.fromkeys(names, Membership.MEMBER)
        groups = [found for size in range(count + 1) for found in combinations(names, size)]
        for level, away, leaves in product(groups, groups, (False, True)):
            step = without(3, roles, level, silent=away, gone=away if leaves else ())
            left = [name for name in names if not (leaves and name in away)]
            still = [name for name in level if name not in away]
            takes_now, takes_then = len(level) > count / 2, len(still) > len(left) / 2 and bool(left)
            expected = not takes_then and (takes_now or step.is_worse)
            assert (step.refusal is not None) == expected, (names, level, away, leaves)
            assert (refusals([step]) != []) == expected
            if step.refusal is not None:
                held = f"{len(still)} of {len(left)} members level" if left or not takes_now else "no member left"
                assert step.refusal.startswith(f"partition 3 would have {held}")
            cases += 1
            refused += expected
    assert (cases, 0 < refused < cases) == (sum(2 * 4**count for count in range(1, 6)), True)


def step(before: tuple[int, int], after: tuple[int, int]) -> Effect:
    return Effect(
        before=Margin(partition=0, members=before[0], level=before[1]),
        after=Margin(partition=0, members=after[0], level=after[1]),
    )


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], Danger.ASK),
        ([step((3, 3), (3, 3))], Danger.ASK),
        ([step((5, 5), (5, 4))], Danger.ASK),
        ([step((3, 3), (3, 2))], Danger.TYPED),
        ([step((3, 2), (3, 2))], Danger.ASK),
        ([step((3, 3), (3, 3)), step((3, 3), (2, 2))], Danger.TYPED),
        ([step((3, 2), (3, 1))], Danger.TYPED),
    ],
)
def test_how_dangerous_it_is(steps: list[Effect], expected: Danger) -> None:
    assert danger(iter(steps)) is expected


def test_what_is_said() -> None:
    assert step((3, 3), (3, 1)).refusal == (
        "partition 0 would have 1 of 3 members level and take no transactions: a majority of 2 is needed"
    )
    assert step((3, 1), (3, 0)).refusal == (
        "partition 0 would have 0 of 3 members level; it takes no transactions now, and would lack even more members"
    )
    assert step((3, 1), (3, 1)).refusal is None, "it is not made worse"
