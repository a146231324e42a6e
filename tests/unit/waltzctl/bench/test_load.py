"""The arithmetic of `waltzctl bench`: latencies, loads, counters, and what is told of them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzctl.bench import chart
from waltzctl.bench.counters import Counters, Latencies, Window
from waltzctl.bench.drive import stamp_of, stamped
from waltzctl.bench.kinds import tail_bytes
from waltzctl.bench.load import Load, Locks, Payloads, due_at
from waltzctl.bench.machine import Disk, Machine, Use, disk_of, this_machine, use_of
from waltzctl.bench.result import Place, Result, Series
from waltzctl.bench.site import CLIENT, Reading, flushes, processes
from waltzctl.show.bench import result as shown
from waltzctl.show.forms import put
from waltzd.client.pending import Outcomes
from waltzd.errors import BadArgument
from waltzd.protocol.descriptions import Statistics
from waltzd.protocol.locks import Committed, Mode, Reason, Rejected, Unknown

NEAR = 1.012
"""A bucket is at most this much wider than what it starts with."""


# -- latencies ---------------------------------------------------------------------------------------------------------

SECONDS = st.lists(st.floats(2e-6, 1000), min_size=1, max_size=200)


@given(SECONDS, st.sampled_from([1.0, 50.0, 90.0, 99.0, 99.9, 100.0]))
def test_a_percentile_is_nearly_the_one_of_the_sorted_list(seconds: list[float], percent: float) -> None:
    latencies = Latencies()
    for one in seconds:
        latencies.add(one)
    exact = sorted(seconds)[max(1, int(np.ceil(len(seconds) * percent / 100))) - 1]
    assert exact / NEAR <= latencies.percentile(percent) <= exact * NEAR
    assert latencies.count == len(seconds)
    assert latencies.highest == max(seconds)
    assert latencies.mean == pytest.approx(sum(seconds) / len(seconds))


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
    assert first.percentiles() == together.percentiles()
    assert (first.count, first.highest) == (together.count, together.highest)


def test_many_at_once_count_as_many() -> None:
    latencies = Latencies()
    latencies.add(0.001, 99)
    latencies.add(1.0)
    assert latencies.count == 100
    assert latencies.percentile(99) == pytest.approx(0.001, rel=0.02)
    assert latencies.percentile(99.9) == 1.0


def test_the_shortest_and_the_longest_have_a_place() -> None:
    latencies = Latencies()
    latencies.add(0.0)
    latencies.add(1e9)
    assert latencies.percentile(50) <= 2e-6
    assert latencies.highest == 1e9
    assert Latencies().percentile(99) == 0.0


# -- loads -------------------------------------------------------------------------------------------------------------


def test_transactions_have_locks_of_their_own_as_far_as_there_are_so_many() -> None:
    locks = Locks(Load(keys=10, locks=1))
    assert [lock.id for (lock,) in locks.take(12)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert [lock.id for (lock,) in locks.take(2)] == [2, 3]
    assert Locks(Load(locks=0)).take(3) == [(), (), ()]


def test_locks_of_one_transaction_differ_and_have_the_mode() -> None:
    locks = Locks(Load(keys=5, locks=3, skew=1.0, mode=Mode.APPEND))
    for some in locks.take(200):
        assert len({lock.id for lock in some}) == len(some) <= 3
        assert {lock.mode for lock in some} == {Mode.APPEND}


def test_skew_makes_some_locks_frequent() -> None:
    def most_frequent(skew: float) -> int:
        drawn = [lock.id for (lock,) in Locks(Load(keys=100, skew=skew)).take(5000)]
        assert set(drawn) <= set(range(100))
        return max(drawn.count(key) for key in set(drawn))

    assert most_frequent(0.0) < 120
    assert most_frequent(1.0) > 600
    assert most_frequent(3.0) > 3500


@given(st.integers(0, 3000), st.lists(st.integers(1, 700), max_size=5))
def test_payloads_have_their_size(size: int, counts: list[int]) -> None:
    payloads = Payloads(size)
    for count in counts:
        taken = payloads.take(count)
        assert len(taken) == count
        assert {len(payload) for payload in taken} == {size}


def test_a_load_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(BadArgument, match="8 partitions; the cluster has 4"):
        Load(partitions=8).on(4)
    with pytest.raises(BadArgument, match="5 different locks out of 3"):
        Load(locks=5, keys=3).on(4)
    with pytest.raises(BadArgument, match="either"):
        Load(seconds=None).on(4)
    with pytest.raises(BadArgument, match="either"):
        Load(count=5).on(4)


def test_a_load_uses_all_partitions_unless_it_says_how_many() -> None:
    assert Load(partitions=3).on(4).partitions == 3
    assert Load().on(4).partitions == 4


def test_what_is_due_follows_the_rate() -> None:
    assert due_at(0, 100) == 0
    assert due_at(250, 100) == 2.5


def test_a_stamp_can_be_read_and_keeps_the_size() -> None:
    payload = stamped(b"x" * 20)
    assert len(payload) == 20
    assert payload.endswith(b"x" * 12)
    assert stamp_of(payload) > 0


def test_the_owner_remembers_the_newer_half() -> None:
    load = Load(size=472, partitions=2, seconds=None, count=40_000)
    assert tail_bytes(load, 4) == 4 * 10_000 * 512
    assert tail_bytes(Load(size=1, partitions=1, seconds=None, count=10), 1) == 1 << 20


# -- counters -----------------------------------------------------------------------------------------------------------


def test_outcomes_are_counted_by_what_they_are() -> None:
    counters = Counters()
    counters.one(Committed(3), 0.1)
    counters.one(Rejected(Reason.CONFLICT, 3, 7), 0.1)
    counters.one(Unknown(), 0.1)
    outcomes = Outcomes.unknown(4)
    outcomes.reasons[:3] = [0, 0, int(Reason.IN_FLIGHT)]
    counters.many(outcomes, 0.2)
    counters.end(1.0)
    assert counters.committed == 3
    assert counters.refused == {"CONFLICT": 1, "IN_FLIGHT": 1}
    assert counters.unknown == 2
    assert counters.attempts == 7
    assert counters.latencies.count == 3


def test_seconds_become_windows_and_what_came_before_the_beginning_does_not_count() -> None:
    counters = Counters()
    counters.one(Committed(0), 9.0)
    counters.begin(10.0)
    for now, count in ((10.5, 5), (11.0, 5), (11.6, 3), (12.0, 1)):
        for _ in range(count):
            counters.one(Committed(0), 0.5)
        counters.tick(now)
    counters.one(Committed(0), 0.5)
    counters.end(12.1)
    assert [(window.second, round(window.rate)) for window in counters.windows] == [(1.0, 10), (2.0, 4)]
    assert counters.committed == counters.latencies.count == 15
    assert counters.seconds == pytest.approx(2.1)
    assert counters.latencies.highest == 0.5


# -- what processes use ------------------------------------------------------------------------------------------------


def test_what_is_used_is_the_difference_over_the_time() -> None:
    before = Reading(5.0, {CLIENT: Use(1.0, 10), "gone": Use(1.0, 10)}, {"storage-1": Statistics()})
    later = Statistics(groups=100, appended_records=5000, group_microseconds=200_000)
    after = Reading(7.0, {CLIENT: Use(2.0, 20)}, {"storage-1": later})
    (client,) = processes(before, after, rate=1000.0)
    assert (client.name, client.cpu_share, client.memory_bytes) == (CLIENT, 0.5, 20)
    assert client.transaction_cpu_seconds == 0.0005
    assert processes(before, after)[0].transaction_cpu_seconds is None
    (storage,) = flushes(before, after)
    assert (storage.flushes_per_second, storage.records_per_flush, storage.flush_seconds) == (50, 50, 0.002)
    assert flushes(after, after) == ()


def test_this_process_is_seen_and_one_that_is_not_there_is_not() -> None:
    import os

    used = use_of(os.getpid())
    assert used is not None
    assert used.memory_bytes > 1 << 20
    assert use_of(2**22 + 1) is None
    assert this_machine().cores >= 1


def test_the_disk_of_a_directory_is_measured_and_left_clean(tmp_path: Path) -> None:
    disk = disk_of(tmp_path)
    assert disk.filesystem not in ("", "unknown")
    assert disk.flush_seconds > 0
    assert list(tmp_path.iterdir()) == []


# -- pictures ----------------------------------------------------------------------------------------------------------


def result_of(windows: tuple[Window, ...], series: tuple[Series, ...]) -> Result:
    return Result(
        bench="append",
        settings={"size": 512},
        machine=Machine(processor="p", cores=2, memory_bytes=1, system="s", python="3", load=0.0),
        place=Place(
            cluster="c", version="1", partitions=4, storages=3, servers=1, replicas=3,
            disk=Disk(filesystem="ext4", flush_seconds=0.001), round_trip_seconds=0.0003,
        ),
        series=series,
        windows=windows,
    )  # fmt: skip


@pytest.mark.parametrize("ending", chart.FORMATS)
def test_a_picture_is_drawn(tmp_path: Path, ending: str) -> None:
    windows = tuple(Window(second=at, rate=100 * at, p50=0.001, p99=0.002) for at in range(1, 5))
    chart.draw(result_of(windows, ()), tmp_path / f"over-time{ending}")
    chart.draw(result_of((), (Series(name="hot", count=5, seconds=1, bytes=9),)), tmp_path / f"side-by-side{ending}")
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(starts[ending])
        assert path.stat().st_size > 1000


def test_a_result_as_json_has_what_a_reader_needs() -> None:
    latencies = Latencies()
    latencies.add(0.002, 10)
    found = result_of((), (Series.of("committed", latencies, 2.0, 512),)).as_dict()
    assert found["place"]["durability"] == "3 replicas, flushed by 2 of them before each acknowledgement"
    (series,) = found["series"]
    assert (series["per_second"], series["bytes"]) == (5.0, 5120)
    assert series["latency_ms"]["p50"] == pytest.approx(2.0, rel=0.02)
    assert set(series["latency_ms"]) == {"p50", "p99", "p99.9", "max"}


def test_a_result_as_a_table_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    latencies = Latencies()
    latencies.add(0.002, 10)
    series = (Series.of("committed", latencies, 2.0, 512), Series(name="hot", count=5, seconds=1, bytes=9))
    put(shown(result_of((), series)), "csv")
    committed, hot = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (committed["name"], committed["count"], committed["per_second"]) == ("committed", "10", "5.0")
    assert float(committed["p50_seconds"]) == pytest.approx(0.002, rel=0.02)
    assert (hot["name"], hot["p99_seconds"], hot["max_seconds"]) == ("hot", "", "")
