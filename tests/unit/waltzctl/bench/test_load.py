"""The arithmetic of `waltzctl bench`: latencies, loads, counters, and the result as JSON."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.machine import this_machine, use_of
from waltzctl.bench.command import Counters, Latencies, Load, Series, locks, payloads
from waltzd.client.pending import Outcomes
from waltzd.errors import BadArgument
from waltzd.protocol.locks import Committed, Mode, Reason, Rejected, Unknown

NEAR = 1.012
"""A bucket is at most this much wider than what it starts with."""
SECONDS = st.lists(st.floats(2e-6, 1000), min_size=1, max_size=200)


@pytest.mark.slow
@given(SECONDS, st.sampled_from([1.0, 50.0, 90.0, 99.0, 99.9, 100.0]))
def test_a_percentile_is_nearly_the_one_of_the_sorted_list(seconds: list[float], percent: float) -> None:
    latencies = Latencies()
    for one in seconds:
        latencies.add(one)
    exact = sorted(seconds)[max(1, int(np.ceil(len(seconds) * percent / 100))) - 1]
    assert exact / NEAR <= latencies.percentile(percent) <= exact * NEAR
    assert latencies.count == len(seconds)
    assert latencies.highest == max(seconds)


@given(SECONDS, SECONDS)
def test_two_that_are_merged_are_as_one(some: list[float], others: list[float]) -> None:
    together, first, second = Latencies(), Latencies(), Latencies()
    for one in some:
        first.add(one)
        together.add(one)
    for one in others:
        second.add(one)
        together.add(one)
    first.merge(second)
    assert [first.percentile(at) for at in range(0, 101, 10)] == [together.percentile(at) for at in range(0, 101, 10)]
    assert (first.count, first.highest) == (together.count, together.highest)


def test_a_batch_counts_once_for_each_of_its_transactions() -> None:
    latencies = Latencies()
    latencies.add(0.001, 99)
    latencies.add(1.0)
    assert latencies.count == 100
    assert latencies.percentile(99) == pytest.approx(0.001, rel=0.02)
    assert latencies.percentile(99.9) == 1.0


def test_the_shortest_and_the_longest_latency_are_counted() -> None:
    latencies = Latencies()
    latencies.add(0.0)
    latencies.add(1e9)
    assert latencies.percentile(50) <= 2e-6
    assert latencies.highest == 1e9
    assert Latencies().percentile(99) == 0.0


def test_transactions_have_locks_of_their_own_as_long_as_there_are_keys() -> None:
    taken = locks(1, 10)
    assert [lock.id for (lock,) in taken.take(12)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert [lock.id for (lock,) in taken.take(2)] == [2, 3]
    assert locks(0, 10).take(3) == [(), (), ()]


@given(st.integers(1, 9), st.integers(0, 40))
def test_the_locks_of_a_transaction_differ(each: int, more: int) -> None:
    for some in locks(each, each + more).take(100):
        assert len({lock.id for lock in some}) == len(some) == each
        assert {lock.mode for lock in some} == {Mode.WRITE}


@given(st.integers(0, 3000), st.lists(st.integers(1, 700), max_size=5))
def test_payloads_have_their_size(size: int, counts: list[int]) -> None:
    made = payloads(size)
    for count in counts:
        taken = made.take(count)
        assert len(taken) == count
        assert {len(payload) for payload in taken} == {size}


def test_a_load_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(BadArgument, match="5 different locks out of 3"):
        Load(locks=5, keys=3).on(4)
    with pytest.raises(BadArgument, match="either"):
        Load(seconds=None).on(4)
    with pytest.raises(BadArgument, match="either"):
        Load(count=5).on(4)


def test_outcomes_are_counted_by_kind() -> None:
    counters = Counters()
    counters.one(Committed(3), 0.1)
    counters.one(Rejected(Reason.CONFLICT, 3, 7), 0.1)
    counters.one(Unknown(), 0.1)
    outcomes = Outcomes.unknown(4)
    outcomes.reasons[:3] = [0, 0, int(Reason.IN_FLIGHT)]
    counters.many(outcomes, 0.2)
    assert counters.committed == 3
    assert counters.refused == {"CONFLICT": 1, "IN_FLIGHT": 1}
    assert counters.unknown == 2
    assert counters.attempts == 7
    assert counters.latencies.count == 3


def test_the_warm_up_does_not_count() -> None:
    counters = Counters()
    counters.one(Committed(0), 9.0)
    counters.begin(10.0)
    counters.one(Committed(0), 0.5)
    counters.end(12.5)
    assert (counters.committed, counters.latencies.count, counters.latencies.highest) == (1, 1, 0.5)
    assert counters.seconds == 2.5


def test_a_series_as_json() -> None:
    latencies = Latencies()
    latencies.add(0.002, 10)
    told = Series(name="committed", count=10, seconds=2.0, bytes=5120, latencies=latencies).as_dict()
    assert (told["per_second"], told["bytes"]) == (5.0, 5120)
    assert told["latency_ms"]["p50"] == pytest.approx(2.0, rel=0.02)
    assert set(told["latency_ms"]) == {"p50", "p99", "p99.9", "max"}
    assert Series(name="hot", count=5, seconds=1.0, bytes=9).as_dict()["latency_ms"] == {}


def test_the_kernel_tells_what_this_process_uses() -> None:
    used = use_of(os.getpid())
    assert used is not None
    assert used.memory_bytes > 1 << 20
    assert use_of(2**22 + 1) is None
    assert this_machine().cores >= 1
