"""A real cluster that went over to format 1: what its client reads, one transaction after the other, Spark reads."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from waltz_spark.log.directory_origin import DirectoryOrigin
from waltz_spark.log.live_origin import LiveOrigin
from waltz_spark.log.origin import Catalog, Extent, Origin, Span
from waltz_spark.log.plan import Sizing
from waltz_spark.table import read_task
from waltz_spark.table.columns import columns_of
from waltz_spark.table.pushdown import HIGHEST, Filters, Ranges
from waltz_spark.table.read_task import Reading, tasks

from tests.spark.batches import microseconds
from tests.spark.test_marked import marks
from waltzctl.local_cluster.local import ROOT, LocalCluster
from waltzctl.main import run
from waltzctl.shell.blueprint import ZOOKEEPER
from waltzd import BlockingClient, Committed, FeedMode, append_lock
from waltzd.format.record import Run

NAMES = ("txid", "header", "data", "time", "locks", "group")


@dataclass
class There:
    cluster: LocalCluster
    rows: list[dict[str, Any]]
    """Of partition 0, as its owner gave them to a client."""
    first_before: int = -1
    """With a time, before the cluster went over."""

    @property
    def servers(self) -> tuple[str, ...]:
        return tuple(self.cluster.blueprint.addresses(name)[0] for name in self.cluster.blueprint.server_names)

    def directory(self, number: int) -> Path:
        return self.cluster.storage_directories[number]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[There]:
    settings = {"storage": {"segment_bytes_max": "4KiB", "reserve_bytes": "1MiB"}, "server": {"segment_bytes_max": "4KiB"}}
    place = tmp_path_factory.mktemp("batches") / "c"
    cluster = LocalCluster.make(place, partitions=1, servers=1, format=0, settings=settings)
    try:
        cluster.start()
        found = There(cluster, [])
        with BlockingClient(found.servers, feed=FeedMode.NONE, partitions=[0]) as client:
            assert len(client.append_many([b"plain %d" % number * 9 for number in range(150)], partition=0).ids) == 150
        by_owner = LiveOrigin(servers=found.servers)
        found.first_before = by_owner.first_at(by_owner.catalog(), 0, 0)
        assert run(["cluster", "set", "--format", "1", "--directory", str(place), "--yes"]) == 0
        with BlockingClient(found.servers, feed=FeedMode.NONE, partitions=[0]) as client:
            for number in range(60):
                locks = [append_lock("account", number % 7), append_lock("journal")]
                assert isinstance(client.append(b"alone %d" % number * 5, partition=0, kind=number, locks=locks), Committed)
                group = client.append_atomic(
                    [b"first", b"second" * number, b"third"], partition=0, locks=[locks, (), locks]
                )
                assert isinstance(group, Committed)
            found.rows += rows_of(client)
        wait_until_level(found)
        yield found
    finally:
        cluster.kill()


def rows_of(client: BlockingClient) -> list[dict[str, Any]]:
    transactions = client.read_some(0, with_locks=True)
    rows: list[dict[str, Any]] = []
    for transaction in transactions:
        if transaction.follows:
            first = rows[-1]["group"] if rows[-1]["group"] is not None else rows[-1]["txid"]
            rows[-1]["group"] = first
        taken = [{"lock": lock - (lock >> 63 << 64), "mode": mode.name} for lock, mode in transaction.locks or ()]
        rows.append({
            "txid": transaction.id, "header": transaction.kind, "data": bytes(transaction.payload),
            "time": transaction.time, "locks": None if transaction.time is None else taken,
            "group": rows[-1]["group"] if transaction.follows else None,
        })  # fmt: skip
    return rows


def wait_until_level(there: There) -> None:
    """Until each storage has everything on its disk."""
    patience = time.monotonic() + 60
    for directory in there.cluster.storage_directories:
        while DirectoryOrigin(storages=(str(directory),), allows_uncommitted=True).catalog().spans[0].last < 389:
            assert time.monotonic() < patience
            time.sleep(0.05)


def read(
    origin: Origin, catalog: Catalog, span: Span, filters: Filters | None = None, **sizing: int
) -> list[dict[str, Any]]:
    reading = Reading(origin, columns_of(NAMES), filters or Filters())
    given = tasks(origin, catalog, {0: span}, Sizing(**sizing), reading.filters)
    found = [row for task in given for batch in reading.batches(task) for row in batch.to_pylist()]
    return sorted(found, key=lambda row: int(row["txid"]))


def test_the_cluster_and_each_of_its_directories_give_what_a_client_reads(there: There) -> None:
    assert len(there.rows) == 390
    assert there.first_before == 150, "behind all that there was"
    assert {row["time"] is None for row in there.rows[:150]} == {True}
    assert all(row["locks"] for row in there.rows[150::4])
    assert [row["group"] for row in there.rows[150:158]] == [None, 151, 151, 151, None, 155, 155, 155]
    whole = Span(0, len(there.rows) - 1)
    live = LiveOrigin(coordinator=there.cluster.blueprint.addresses(ZOOKEEPER)[0], root=ROOT)
    by_owner = LiveOrigin(servers=there.servers)
    directories = [
        DirectoryOrigin(storages=(str(directory),), allows_uncommitted=True)
        for directory in there.cluster.storage_directories
    ]
    times = [row["time"] for row in there.rows]
    origins: list[Origin] = [live, by_owner, *directories]
    for origin in origins:
        catalog = origin.catalog()
        assert read(origin, catalog, whole) == there.rows
        assert read(origin, catalog, whole, splits_min=33) == there.rows
        assert read(origin, catalog, Span(152, 153)) == there.rows[152:154]
        assert origin.first_at(catalog, 0, 0) == 150
        cut = origin.first_at(catalog, 0, microseconds(times[270]))
        assert times[cut] == times[270]
        assert times[cut - 1] < times[270]
        assert origin.first_at(catalog, 0, HIGHEST) == 390
        filters = Filters(time=Ranges([(microseconds(times[270]), HIGHEST)]))
        assert read(origin, catalog, whole, filters) == there.rows[cut:]


def test_a_lock_is_read_by_its_marks_alone(there: There, monkeypatch: pytest.MonkeyPatch) -> None:
    """From replicas and from the owner; of format 0, which keeps no locks, all is read."""
    ids: list[int] = []
    read_from = LiveOrigin.read

    def counting(origin: LiveOrigin, extent: Extent, span: Span, **how: Any) -> Iterable[Run]:
        ids.extend(range(span.first, span.last + 1))
        return read_from(origin, extent, span, **how)

    monkeypatch.setattr(LiveOrigin, "read", counting)
    monkeypatch.setattr(read_task, "READ_TOGETHER", 0)
    live = LiveOrigin(coordinator=there.cluster.blueprint.addresses(ZOOKEEPER)[0], root=ROOT)
    whole, later = Span(0, len(there.rows) - 1), Span(150, len(there.rows) - 1)
    lock = append_lock("account", 3).hash
    signed = lock - (lock >> 63 << 64)
    expected = [row for row in there.rows if marks(row, signed)]
    wanted = [row["txid"] for row in expected]
    assert 20 < len(expected) < 40
    projection = columns_of(("txid", "header", "data", "time", "locks"))
    for origin in (live, LiveOrigin(servers=there.servers)):
        catalog = origin.catalog()
        for span, plain in ((later, []), (whole, list(range(150)))):
            for filters, some in (
                (Filters(lock=lock), wanted),
                (Filters(lock=lock, txid=Ranges([(0, 250)])), [id_ for id_ in wanted if id_ <= 250]),
            ):
                ids.clear()
                given = tasks(origin, catalog, {0: span}, Sizing(), filters)
                batches = [batch for task in given for batch in Reading(origin, projection, filters).batches(task)]
                found = [row for batch in batches for row in batch.to_pylist()]
                assert found == [
                    {name: row[name] for name in projection.schema.names} for row in expected if row["txid"] in some
                ]
                assert sorted(ids) == plain + some
        ids.clear()
        assert tasks(origin, catalog, {0: later}, Sizing(), Filters(lock=append_lock("account", 99).hash)) == []
