"""The stream: a reader alone through crashes that are drawn, and a real Spark that is made to fail and goes on."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows
from waltz_spark import source
from waltz_spark.log.origin import Catalog, Extent, Origin, Span
from waltz_spark.source import WaltzDataSource, WaltzStreamReader
from waltz_spark.table.columns import EVERY

from tests.spark.batches import microseconds, mixed_log
from tests.spark.growing import GrowingStorage
from waltzd.errors import BadArgument, ForeignCluster, WaltzError
from waltzd.errors.operations import PositionUnknown, TransactionsGone
from waltzd.format.record import Run, encode_payloads
from waltzd.protocol.positions import Position

RESTARTS = 20


@dataclass
class FakeLog(Origin):
    """An origin in memory that can lose what it has."""

    key: UUID = field(default_factory=lambda: UUID(int=1))
    spans: dict[int, Span] = field(default_factory=dict)

    def describe(self) -> str:
        return "a log in memory"

    def catalog(self, partitions: Collection[int] | None = None) -> Catalog:
        spans = {each: span for each, span in self.spans.items() if partitions is None or each in partitions}
        extents = [Extent(partition=each, span=span, bytes=41 * span.count, place="") for each, span in spans.items()]
        return Catalog(key=self.key, spans=spans, extents=tuple(extent for extent in extents if extent.span.count))

    def read(self, extent: Extent, span: Span, *, batch_bytes: int, with_locks: bool = False) -> Iterator[Run]:
        assert self.spans[extent.partition].cut(span) == span
        yield encode_payloads(span.first, [b"x"] * span.count)

    def first_at(self, catalog: Catalog, partition: int, time: int) -> int:
        """A transaction each second."""
        span = catalog.spans[partition]
        return max(span.first, min(span.last + 1, -(-time // 1_000_000)))

    def check(self, partition: int, position: Position, *, route: Any = None) -> None:
        """It never forked."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLog:
    log = FakeLog(spans={0: Span(0, 99), 1: Span(0, 9)})
    monkeypatch.setattr(source, "open_origin", lambda _options: log)
    return log


def reader_of(path: Path | str = "anywhere", **options: str) -> WaltzStreamReader:
    source = WaltzDataSource({"path": str(path), **options})
    return source.streamReader(source.schema())


def batch(reader: WaltzStreamReader, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[tuple[int, int]]:
    """As Spark asks for it: offsets come back from JSON."""
    ask = [json.loads(json.dumps(each)) for each in (start, end)]
    return [
        (row["partition"], row["txid"])
        for task in reader.partitions(*ask)
        for rows in reader.read(task)
        for row in rows.to_pylist()
    ]


def told(caught: pytest.ExceptionInfo[WaltzError]) -> str:
    return "\n".join([caught.value.message, *caught.value.__notes__])


# -- event time ------------------------------------------------------------------------------------------------------------


def test_windows_of_event_time_by_a_real_spark(spark: Any, tmp_path: Path) -> None:
    """In whatever zone the session is; and a batch reading of the same hours."""
    from pyspark.sql import functions as f

    (tmp_path / "storage").mkdir()
    log = mixed_log(tmp_path / "storage" / "0", 12, batches=60)
    options = {"path": str(tmp_path / "storage"), "allowUncommitted": "true", "maxTxnsPerTrigger": "100"}
    start = next(row["time"] for row in log.rows if row["time"] is not None)
    counted = Counter((row["time"] - start) // timedelta(seconds=10) for row in log.rows if row["time"] is not None)
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")
    try:
        stream = spark.readStream.format("waltz").options(**options).option("columns", "txid,time").load()
        window = f.window("time", "10 seconds", startTime=f"{start.second % 10} seconds")
        query = (
            stream.withWatermark("time", "20 seconds").groupBy(window).count().writeStream.format("memory")
            .queryName("windows").outputMode("update").option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        query.awaitTermination()
        rows = spark.sql("SELECT unix_micros(window.start) AS start, max(count) AS n FROM windows GROUP BY 1").collect()
        late = datetime(1970, 1, 1, tzinfo=UTC)
        found = {(late + timedelta(microseconds=row.start) - start) // timedelta(seconds=10): row.n for row in rows}
        assert found == counted
        whole = spark.read.format("waltz").options(**options).load()
        cut = log.rows[-40]["time"]
        said = whole.where(f"time >= timestamp_micros({microseconds(cut)})").selectExpr(
            "txid", "unix_micros(time) AS at", "`group`", "size(locks) AS locks"
        )
        expected = [
            (row["txid"], microseconds(row["time"]), row["group"], len(row["locks"]))
            for row in log.rows
            if row["time"] is not None and row["time"] >= cut
        ]
        assert [tuple(row) for row in said.orderBy("txid").collect()] == expected
        later = spark.read.format("waltz").options(**options).option("startingTime", cut.isoformat()).load()
        assert later.count() == len(expected)
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
        assert [tuple(row) for row in said.orderBy("txid").collect()] == expected
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


# -- the reader alone --------------------------------------------------------------------------------------------------


def test_a_new_stream_begins_where_it_is_told(fake: FakeLog) -> None:
    key = str(fake.key)
    assert reader_of().initialOffset() == {"v": 1, "cluster": key, "next": {"0": 0, "1": 0}}
    assert reader_of(startingTxnIds="latest").initialOffset()["next"] == {"0": 100, "1": 10}
    assert reader_of(startingTxnIds='{"0": 8, "1": -1}').initialOffset()["next"] == {"0": 8, "1": 10}
    assert reader_of(partitions="1").initialOffset()["next"] == {"1": 0}
    assert reader_of(startingTime="1970-01-01T00:00:08").initialOffset()["next"] == {"0": 8, "1": 8}
    assert reader_of(startingTime="1970-01-01T00:01:00").initialOffset()["next"] == {"0": 60, "1": 10}


@pytest.mark.parametrize(
    ("options", "limit", "count"),
    [
        ({}, ReadAllAvailable(), 110),
        ({"maxTxnsPerTrigger": "7"}, ReadMaxRows(7), 7),
        ({"maxBytesPerTrigger": "1KiB"}, ReadMaxBytes(1024), 22 + 2),
        ({"maxTxnsPerTrigger": "7", "maxBytesPerTrigger": "41"}, ReadMaxRows(7), 2),
    ],
)
def test_limits_are_those_of_the_options(fake: FakeLog, options: dict[str, str], limit: ReadLimit, count: int) -> None:
    reader = reader_of(**options)
    assert reader.getDefaultReadLimit() == limit
    start = reader.initialOffset()
    assert len(batch(reader, start, reader.latestOffset(start, limit))) == count
    assert len(batch(reader, start, reader.latestOffset(start, ReadAllAvailable()))) == 110


def test_nothing_new_is_the_same_position_to_the_letter(fake: FakeLog) -> None:
    fake.spans = {each: Span(0, 3) for each in (10, 9, 2)}
    reader = reader_of()
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert json.dumps(reader.latestOffset(json.loads(json.dumps(end)), ReadAllAvailable())) == json.dumps(end)
    assert reader.reportLatestOffset() == end
    assert reader.partitions(end, end) == []


def test_what_is_available_now_ends_though_the_log_grows(fake: FakeLog) -> None:
    reader = reader_of(maxTxnsPerTrigger="50")
    position, rows = reader.initialOffset(), 0
    reader.prepareForTriggerAvailableNow()
    for _ in range(4):
        fake.spans = {**{each: Span(0, span.last + 30) for each, span in fake.spans.items()}, 7: Span(0, 9)}
        end = reader.latestOffset(position, reader.getDefaultReadLimit())
        rows += len(batch(reader, position, end))
        position = end
    assert rows == 110
    assert position["next"] == {"0": 100, "1": 10}


def test_a_partition_that_appears_is_read_from_its_beginning(fake: FakeLog) -> None:
    reader = reader_of()
    first = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    fake.spans[2] = Span(0, 4)
    second = reader.latestOffset(first, ReadAllAvailable())
    assert batch(reader, first, second) == []
    third = reader.latestOffset(second, ReadAllAvailable())
    assert batch(reader, second, third) == [(2, id_) for id_ in range(5)]


def test_the_log_of_another_cluster_is_refused(fake: FakeLog) -> None:
    start = reader_of().initialOffset()
    fake.key = UUID(int=2)
    for reader in (reader_of(), reader_of(failOnDataLoss="false")):
        with pytest.raises(ForeignCluster):
            reader.latestOffset(start, ReadAllAvailable())
        with pytest.raises(ForeignCluster):
            reader.partitions(start, {**start, "next": {"0": 5, "1": 0}})


@pytest.mark.parametrize(
    ("spans", "said", "left"),
    [
        ({0: Span(20, 99), 1: Span(0, 9)}, "ids 10 to 19 of partition 0 were not read yet", range(20, 50)),
        ({0: Span(0, 3), 1: Span(0, 9)}, "partition 0 ends at id 3, but ids up to 9", range(0)),
        ({1: Span(0, 9)}, "partition 0, of which id 10 comes next, is not in the log", range(0)),
    ],
)
def test_what_is_gone_is_told_or_passed_over(fake: FakeLog, spans: dict[int, Span], said: str, left: range) -> None:
    start = reader_of(startingTxnIds='{"0": 10, "1": -1}').initialOffset()
    end = {**start, "next": {"0": 50, "1": 10}}
    fake.spans = spans
    for reader in (reader_of(), reader_of(partitions="0")):
        with pytest.raises(TransactionsGone, match=said) as caught:
            reader.latestOffset(start, ReadAllAvailable())
        assert "Next: " in told(caught)
        with pytest.raises(TransactionsGone, match=said):
            reader.partitions(start, end)
    reader = reader_of(failOnDataLoss="false")
    assert batch(reader, start, end) == [(0, id_) for id_ in left]
    after = reader.latestOffset(start, ReadAllAvailable())
    assert all(id_ >= start["next"][each] for each, id_ in after["next"].items())


def test_what_is_passed_over_is_said_once(fake: FakeLog, caplog: pytest.LogCaptureFixture) -> None:
    """Spark asks many times a second."""
    start = reader_of(startingTxnIds='{"0": 10, "1": 5}').initialOffset()
    fake.spans = {0: Span(20, 99), 1: Span(0, 3)}
    reader = reader_of(failOnDataLoss="false", startingTxnIds='{"0": 10}')
    said = (
        "ids 10 to 19 of partition 0 were not read yet and are not there any more; it begins at 20; passed over, because "
    )
    for _ in range(3):
        reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
    assert [message for message in caplog.messages if message.startswith(said)] == [said + "failOnDataLoss is false"]
    assert [message for message in caplog.messages if "partition 1 ends at id 3" in message] == caplog.messages[1:]
    caplog.clear()
    assert reader.initialOffset()["next"]["0"] == 20, "a new stream likewise"
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "partition 0: ids 10 to 19 are not there any more"
    ]


def test_a_stream_gives_the_columns_and_the_tasks_that_are_asked_for(fake: FakeLog) -> None:
    reader = reader_of(columns="txid,record_bytes", minPartitions="7", PARTITIONS="0")
    start = reader.initialOffset()
    tasks = reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
    assert len(tasks) == 7
    assert {tuple(rows.schema.names) for task in tasks for rows in reader.read(task)} == {("txid", "record_bytes")}
    assert sum(rows.num_rows for task in tasks for rows in reader.read(task)) == 100
    whole = reader_of(includeMetadata="TRUE", maxRecordsPerPartition="30")
    tasks = whole.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
    assert [rows.num_rows for task in tasks for rows in whole.read(task)] == [25, 25, 25, 25]
    assert {rows.num_columns for task in tasks for rows in whole.read(task)} == {len(EVERY)}


def test_a_checkpoint_of_another_kind_is_refused(fake: FakeLog) -> None:
    with pytest.raises(PositionUnknown, match="cannot be understood"):
        reader_of().latestOffset({"topic": {"0": 5}}, ReadAllAvailable())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"maxTxnsPerTrigger": "0"}, "maxTxnsPerTrigger is '0'"),
        ({"maxBytesPerTrigger": "much"}, "maxBytesPerTrigger"),
        ({"maxOffsetsPerTrigger": "5"}, "there is no option maxOffsetsPerTrigger"),
    ],
)
def test_options_that_make_no_sense(fake: FakeLog, options: dict[str, str], said: str) -> None:
    with pytest.raises(BadArgument, match=said):
        reader_of(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"maxTxnsPerTrigger": "0"}, "maxTxnsPerTrigger is '0'"),
        ({"maxBytesPerTrigger": "much"}, "maxBytesPerTrigger"),
        ({"minPartitions": "0"}, "minPartitions"),
        ({"startingTxnIds": '{"0": -7}'}, "startingTxnIds: -7 for partition 0"),
    ],
)
def test_a_stream_is_refused_before_it_runs(options: dict[str, str], said: str) -> None:
    """When it runs, PySpark falls over itself where a reader cannot be made, and tells that."""
    with pytest.raises(BadArgument, match=said):
        WaltzDataSource({"path": "/nowhere", **options}).schema()


def test_a_stream_has_no_end(fake: FakeLog) -> None:
    reader = reader_of(endingTxnIds="latest")
    with pytest.raises(BadArgument, match="a stream, which has no end"):
        reader.initialOffset()


@pytest.mark.parametrize("seed", range(20))
def test_crashes_lose_nothing_and_repeat_nothing(fake: FakeLog, seed: int) -> None:
    """Spark's own bookkeeping in miniature: the end of a batch is written down, the batch is written under its number, then
    it is committed; and the process ends anywhere in between, after which another reader goes on."""
    chance = random.Random(seed)
    reader, planned, committed = (
        reader_of(maxTxnsPerTrigger="9", maxBytesPerTrigger="300"),
        [reader_of().initialOffset()],
        0,
    )
    sink: dict[int, list[tuple[int, int]]] = {}
    crashes = 0
    while True:
        if chance.random() < 0.5:
            crashes, reader = crashes + 1, reader_of(maxTxnsPerTrigger=str(chance.randrange(1, 30)))
        if crashes < RESTARTS and chance.random() < 0.3:
            number = chance.randrange(4)
            before = fake.spans.get(number, Span(0, -1))
            fake.spans[number] = Span(0, before.last + chance.randrange(20))
        if len(planned) == committed + 1:
            end = reader.latestOffset(planned[-1], reader.getDefaultReadLimit())
            if end == planned[-1]:
                if crashes >= RESTARTS:
                    break
                continue
            planned.append(json.loads(json.dumps(end)))
        elif chance.random() < 0.7:
            rows = batch(reader, planned[-2], planned[-1])
            assert sink.get(committed + 1, rows) == rows, "the same batch is the same rows"
            sink[committed + 1] = rows
        elif committed + 1 in sink:
            committed += 1
    every = [row for rows in sink.values() for row in rows]
    assert sorted(every) == [(each, id_) for each in sorted(fake.spans) for id_ in range(fake.spans[each].last + 1)]


# -- a real Spark ------------------------------------------------------------------------------------------------------


class Sink:
    """Keeps each batch under its number, and can be told to fail before or after it did so."""

    def __init__(self) -> None:
        self.batches: dict[int, list[tuple[int, int, bytes]]] = {}
        self.fails_before: set[int] = set()
        self.fails_after: set[int] = set()

    def __call__(self, frame: Any, number: int) -> None:
        if number in self.fails_before:
            self.fails_before.remove(number)
            raise RuntimeError("before the batch was kept")
        rows = sorted((row.partition, row.txid, bytes(row.data)) for row in frame.collect())
        assert self.batches.get(number, rows) == rows, "the same batch is the same rows"
        self.batches[number] = rows
        if number in self.fails_after:
            self.fails_after.remove(number)
            raise RuntimeError("after the batch was kept")

    @property
    def rows(self) -> list[tuple[int, int, bytes]]:
        return sorted(row for rows in self.batches.values() for row in rows)


TOO_LATE = "Python worker failed to connect back"
"""Spark waits 10 seconds for the Python of a stream to start, whatever it was told, and then the query has not begun."""


def available_now(spark: Any, path: Path, checkpoint: Path, sink: Sink, **options: str) -> Any:
    """The finished query. Where a busy machine let its Python start too late for Spark, it is begun once more."""
    while True:
        try:
            return begun_now(spark, path, checkpoint, sink, **options)
        except PySparkException as error:
            if TOO_LATE not in str(error):
                raise


def begun_now(spark: Any, path: Path, checkpoint: Path, sink: Sink, **options: str) -> Any:
    frame = spark.readStream.format("waltz").options(**options).load(str(path))
    query = (
        frame.writeStream.foreachBatch(sink)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    try:
        query.awaitTermination()
    finally:
        query.stop()
    return query


CASES = tuple(product((False, True), (0, 1), ("before", "after")))
"""Whether a partition has appeared, in which batch of a query it fails, and whether before or after that is kept."""


@pytest.mark.parametrize("cases", [CASES[::3], pytest.param(CASES, marks=pytest.mark.long)], ids=["some", "all"])
def test_spark_goes_on_after_each_failure_without_gap_or_duplicate(
    spark: Any, growing: GrowingStorage, tmp_path: Path, cases: tuple[tuple[bool, int, str], ...]
) -> None:
    chance, sink = random.Random(7), Sink()
    expected: list[tuple[int, int, bytes]] = []

    def read() -> None:
        available_now(spark, growing.directory, tmp_path / "checkpoint", sink, maxTxnsPerTrigger="20")

    for is_third_there, behind, when in cases:
        if is_third_there and 2 not in growing.ends:
            growing.assign(2)
        for partition in growing.ends:
            payloads = [b"%d" % chance.randrange(1000) for _ in range(chance.randrange(8, 16))]
            first = growing.ends[partition]
            expected.extend((partition, first + at, payload) for at, payload in enumerate(payloads))
            growing.append(partition, payloads)
        fails = sink.fails_before if when == "before" else sink.fails_after
        fails.add(max(sink.batches, default=-1) + 1 + behind)
        with pytest.raises(PySparkException, match="the batch was kept"):
            read()
    read()
    assert max(len(rows) for rows in sink.batches.values()) == 20
    assert sink.rows == sorted(expected)


def test_spark_tells_what_is_damaged_and_how_far_the_log_goes(spark: Any, growing: GrowingStorage, tmp_path: Path) -> None:
    sink = Sink()
    growing.append(0, [b"first", b"second"])
    query = available_now(spark, growing.directory, tmp_path / "checkpoint", sink)
    assert json.loads(query.lastProgress["sources"][0]["latestOffset"])["next"] == {"0": 2, "1": 0}
    growing.append(0, [b"third", b"fourth", b"fifth"])
    path = next((growing.directory / "0").glob("*2.seg"))
    path.write_bytes(path.read_bytes().replace(b"fourth", b"FOURTH"))
    with pytest.raises(PySparkException) as caught:
        available_now(spark, growing.directory, tmp_path / "checkpoint", sink)
    assert "id 3 of partition 0" in str(caught.value)
    assert "waltzctl errors lookup W3003" in str(caught.value)
    path.write_bytes(path.read_bytes().replace(b"FOURTH", b"fourth"))
    available_now(spark, growing.directory, tmp_path / "checkpoint", sink)
    assert [row[2] for row in sink.rows] == [b"first", b"second", b"third", b"fourth", b"fifth"]
