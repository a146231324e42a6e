"""What came between two looks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.snapshots import STORAGES, owned, partition, replica, silent, storage, well
from waltzctl.health.rates import PartitionRates, by, rates
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.errors import CannotConnect
from waltzd.protocol.descriptions import PartitionStatistics, Statistics
from waltzd.protocol.histogram import Durations


def took(*seconds: float) -> Any:
    durations = Durations()
    for one in seconds:
        durations.add(one)
    return durations.histogram()


def with_statistics(number: int, **fields: Any) -> ClusterSnapshot:
    replicas = tuple(replica(name) for name in STORAGES)
    reported = owned(number, replicas, statistics=PartitionStatistics(**fields))
    return well(partitions=(partition(number, reported=reported),))


def test_differences_as_rates() -> None:
    before = with_statistics(0, committed=100, committed_bytes=1000, refused={"CONFLICT": 1}, fed=5, commit=took(0.5))
    now = with_statistics(
        0,
        committed=300,
        committed_bytes=5000,
        refused={"CONFLICT": 1, "TOO_FAR_BEHIND": 200},
        fed=25,
        commit=took(0.5, 0.001, 0.001),
    )
    found = rates(before, now, 2.0).partitions[0]
    assert (found.tx, found.bytes, found.fed, found.refused) == (100.0, 2000.0, 10.0, 0.5)
    assert found.p99_ms is not None
    assert found.p99_ms < 2.0, "the half second was before"
    assert (found.lag, found.mounts, found.state) == (0, 1, "open")


def test_counters_that_began_again() -> None:
    before, now = with_statistics(0, committed=1000), with_statistics(0, committed=10)
    assert rates(before, now, 1.0).partitions[0].tx == 10.0


def test_nothing_is_known_of_who_did_not_answer() -> None:
    nobody = well(partitions=(replace(partition(0), reported=None),))
    for before, now in ((nobody, with_statistics(0)), (with_statistics(0), nobody)):
        found = rates(before, now, 1.0).partitions[0]
        assert (found.tx, found.refused, found.p50_ms) == (None, None, None)
    gone = well(storages=(silent(storage("s1"), CannotConnect("gone")),))
    assert rates(gone, gone, 1.0).storages[0].flushes is None


def test_all_together() -> None:
    def both(committed: int) -> ClusterSnapshot:
        return well(partitions=tuple(with_statistics(number, committed=committed).partitions[0] for number in range(2)))

    found = rates(both(0), both(5), 1.0)
    assert (found.total.partition, found.total.tx, found.total.mounts) == (None, 10.0, 2)
    assert rates(well(partitions=()), well(partitions=()), 1.0).total.tx is None


def test_the_lag_is_of_replicas_that_count() -> None:
    late = replace(replica("s2"), durable_id=49)
    down = replace(replica("s3", counts=False), durable_id=-1)
    snapshot = well(partitions=(partition(0, reported=owned(0, (replica("s1"), late, down))),))
    assert rates(snapshot, snapshot, 1.0).partitions[0].lag == 50


def test_storages() -> None:
    then = storage("s1", statistics=Statistics(groups=10, appended_records=100, appended_bytes=100, flush=took(1.0)))
    now = storage("s1", statistics=Statistics(groups=30, appended_records=300, appended_bytes=900, flush=took(1.0, 0.002)))
    found = rates(well(storages=(then,)), well(storages=(now,)), 2.0).storages[0]
    assert (found.flushes, found.records, found.bytes) == (10.0, 100.0, 400.0)
    assert found.flush_ms == pytest.approx(2.0)


def test_sorting_is_stable() -> None:
    def one(number: int, tx: float | None, lag: int | None) -> PartitionRates:
        return PartitionRates(partition=number, owner="a", tx=tx, lag=lag)

    some = [one(2, 5.0, 1), one(0, None, 7), one(1, 5.0, None)]
    assert [found.partition for found in by("tx", some)] == [1, 2, 0]
    assert [found.partition for found in by("lag", some)] == [0, 2, 1]
    assert [found.partition for found in by("partition", some)] == [0, 1, 2]
