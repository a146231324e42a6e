"""What is committed in one open session.

How long an owner may answer without asking.
"""

from __future__ import annotations

import random
from itertools import combinations

from waltzd.server.core.progress import OUTLASTS, Lease, Marks, Progress


def test_the_committed_mark_is_what_a_majority_of_all_members_reached() -> None:
    live = Marks({name: Progress() for name in "ABC"}, ("A", "B"), 4)
    assert not live.acknowledge("A", 9)
    assert live.committed == 4, "one of three"
    assert not live.acknowledge("C", 9), "it does not take part"
    assert live.acknowledge("B", 7)
    assert live.committed == 7
    live.lose("A")
    assert not live.acknowledge("A", 12)
    assert live.acknowledge("B", 12) is False
    assert live.committed == 7


def test_what_is_missing_for_a_majority_is_said_by_name() -> None:
    live = Marks({name: Progress() for name in "ABC"}, ("A", "B"), 4)
    assert live.missing(["A", "B"]) == ""
    assert live.missing(["A", "C"]) == "no majority of A, B, C takes appends: not B, C"


def test_whatever_confirms_a_session_meets_whatever_could_end_it() -> None:
    """In all cases of up to five members and two learners: who confirms has a member in common with any majority."""
    for size in range(1, 6):
        members, everybody = "ABCDE"[:size], "ABCDE"[:size] + "XY"
        quorums = [set(some) for n in range(size // 2 + 1, size + 1) for some in combinations(members, n)]
        for joined in (some for n in range(size + 1) for some in combinations(members, n)):
            marks = Marks({name: Progress() for name in members}, joined, 4)
            for bound in (some for n in range(size + 3) for some in combinations(everybody, n)):
                meets_all = all(set(bound) & set(joined) & quorum for quorum in quorums)
                assert meets_all or not marks.confirms(bound)
                assert marks.confirms(bound) or not meets_all or size % 2 == 0


def test_a_majority_of_all_members_renews_it() -> None:
    lease = Lease(3, 0.2)
    assert not lease.holds("ABC", 0.0), "nobody was asked"
    lease.renew("A", 10.0)
    assert not lease.holds("ABC", 10.0), "one of three"
    lease.renew("B", 10.1)
    assert lease.holds("ABC", 10.19)
    assert not lease.holds("ABC", 10.2), "the second newest question counts"
    lease.renew("C", 10.15)
    assert lease.holds("ABC", 10.29)
    assert not lease.holds("ABC", 10.3)


def test_who_does_not_count_does_not_renew_it() -> None:
    lease = Lease(3, 0.2)
    lease.renew("A", 10.0)
    lease.renew("B", 10.0)
    assert lease.holds("AB", 10.1)
    assert not lease.holds("AC", 10.1)
    assert not lease.holds("A", 10.1), "a majority is one of all members"


def test_an_answer_that_comes_late_takes_nothing_away() -> None:
    lease = Lease(1, 0.2)
    lease.renew("A", 10.0)
    lease.renew("A", 9.0)
    assert lease.holds("A", 10.1)


def test_it_is_over_when_a_new_owner_has_outlasted_it() -> None:
    """An owner that asks, with answers of any delay and clocks of any pace up to half and twice the other's; storages that
    promise themselves to a new one at any time. When that one has waited, the lease is over, whatever was answered."""
    pick = random.Random(20261124)
    held = 0
    for _ in range(3000):
        size = pick.choice((1, 3, 5))
        names = "ABCDE"[:size]
        ours, theirs = pick.choice(((0.71, 1.41), (1.41, 0.71), (1.0, 1.0), (0.9, 1.2)))
        lease, seconds = Lease(size, 0.2), 0.2
        promised = {name: pick.uniform(0, 2) for name in pick.sample(names, size // 2 + 1)}
        known = max(promised.values())
        for name in names:
            for _ in range(20):
                asked = pick.uniform(0, 2)
                answered = asked + pick.expovariate(20)
                if answered < promised.get(name, 9.0):
                    lease.renew(name, asked * ours)
        held += lease.holds(names, known * ours)
        opens = known + OUTLASTS * seconds / theirs
        assert not lease.holds(names, opens * ours)
    assert held > 100, "in some of them it held when the promises were known"
