"""How long an owner may answer without asking."""

from __future__ import annotations

import random

from waltzd.server.core.progress import OUTLASTS, Lease


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
