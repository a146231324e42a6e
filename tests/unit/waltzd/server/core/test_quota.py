"""Quotas as arithmetic: no more passes than was granted, whoever waits waits in turn, and mounts stay free for others."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzd.protocol.policy import BURST_SECONDS, LOCKS_MAX, SHARE, Bucket, LockBuckets, may_enter


@given(
    st.floats(0.5, 1e6),
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 2_000_000)), max_size=40),
)
def test_over_any_time_no_more_passes_than_the_rate_one_bucket_and_one_thing(
    rate: float, wanted: list[tuple[float, int]]
) -> None:
    bucket, now = Bucket(rate, 0.0), 0.0
    passed: list[tuple[float, int]] = []
    for pause, amount in wanted:
        now += pause
        passed.append((now + bucket.take(amount, now), amount))
    times = [at for at, _ in passed]
    assert times == sorted(times), "who came first goes first"
    for first, (begin, _) in enumerate(passed):
        for last in range(first, len(passed)):
            end = passed[last][0]
            between = sum(amount for _, amount in passed[first : last + 1])
            largest = max(amount for _, amount in passed[first : last + 1])
            assert between <= rate * (end - begin + BURST_SECONDS) + largest + 1e-6 * (1 + between)


def test_a_name_that_stays_below_its_quota_never_waits() -> None:
    bucket = Bucket(100.0, 0.0)
    assert [bucket.take(10, 0.1 * number) for number in range(1, 100)] == [0.0] * 99
    assert bucket.take(100, 100.0) == 0.0, "what was not used for a second may be used at once"
    assert bucket.take(50, 100.0) == 0.5
    assert bucket.wait(100.2) == 0.5 - 0.2 or abs(bucket.wait(100.2) - 0.3) < 1e-9


def test_each_lock_is_counted_by_itself_and_their_number_is_bounded() -> None:
    locks = LockBuckets(2.0)
    assert locks.take([(1, 1), (2, 1)], 0.0) == 0.0
    assert locks.take([(1, 1)], 0.0) == 0.0
    assert locks.take([(1, 1)], 0.0) == 0.5
    assert locks.take([(2, 1)], 0.0) == 0.0, "another lock does not wait"
    assert locks.take([(1, 1), (3, 1)], 0.0) == 1.0, "what has several locks waits for the one that waits longest"
    locks.take([(lock, 1) for lock in range(2 * LOCKS_MAX)], 0.0)
    assert len(locks) <= 2 * LOCKS_MAX


@pytest.mark.slow
def test_no_lock_gets_rid_of_its_debt_behind_others() -> None:
    """However many other locks are marked in between, a lock is marked no more often than its rate."""
    locks, hot, now, junk = LockBuckets(5.0), 1 << 48, 0.0, itertools.count(2 << 48)
    marked = 0
    while now < 60.0:
        wait = locks.take([(hot, 1)], now)
        marked += 1
        for _ in range(5):
            wait = max(wait, locks.take([(next(junk), 1) for _ in range(1000)], now))
        now += max(wait, 0.001)
        assert len(locks) <= 2 * LOCKS_MAX
        assert marked <= 5 * now + 2 * 5


def test_locks_that_were_paid_for_make_room_for_others() -> None:
    locks = LockBuckets(5.0)
    for now in range(20):
        assert locks.take([(now * LOCKS_MAX + lock, 1) for lock in range(LOCKS_MAX)], 2.0 * now) == 0.0
    assert len(locks) == LOCKS_MAX


def test_one_name_that_takes_all_it_can_leaves_a_share_to_others() -> None:
    held = 0
    while may_enter(held, held, 1000):
        held += 1
    assert held == 800
    others = 0
    while may_enter(others, held + others, 1000):
        others += 1
    assert others == 160


@given(st.integers(1, 200), st.lists(st.integers(0, 9), max_size=1000))
def test_the_last_mounts_go_to_names_that_hold_few(most: int, wanted: list[int]) -> None:
    held = dict.fromkeys(range(10), 0)
    for name in wanted:
        total = sum(held.values())
        if may_enter(held[name], total, most):
            held[name] += 1
            assert total < most
        else:
            assert total == most or held[name] >= SHARE * (most - total) > 0
    free = most - sum(held.values())
    assert free > 0 or all(not may_enter(count, most, most) for count in held.values())


def test_a_quota_of_mounts_and_a_server_where_nobody_has_a_name() -> None:
    assert may_enter(1, 1, 100, most=2)
    assert not may_enter(2, 2, 100, most=2)
    assert may_enter(99, 99, 100, is_shared=False)
    assert not may_enter(100, 100, 100, is_shared=False)
    assert not may_enter(0, 100, 100)
