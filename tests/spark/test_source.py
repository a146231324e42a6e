"""The batch source in a real Spark, against what is known of the original's files; and without Spark where it can be."""

from __future__ import annotations

import hashlib
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.datasource import EqualTo, GreaterThan, In, InputPartition
from waltz_spark.engine import session
from waltz_spark.log.origin import Span
from waltz_spark.source import WaltzDataSource, WaltzReader
from waltz_spark.table.columns import EVERY
from waltz_spark.table.read_task import Task

from tests.spark.growing import CREATED_MS, GrowingStorage
from waltzd.errors import BeyondLog
from waltzd.format.layout import HEADER_BYTES, segment_name

PYSPARK_WALTZ = Path(session.__file__).parents[2] / "pyspark_waltz" / "__init__.py"
PUSHING = "spark.sql.python.filterPushdown.enabled"


def recorded(original: Path, storage: str, *, is_committed: bool = True) -> list[tuple[Any, ...]]:
    """(partition, id, request, header, length, sha256, stored checksum) of the records, by the manifest of the files; of
    those that the control file says are committed, or of all."""
    section = (original / "manifest.txt").read_text().partition(f"## {storage}\n")[2].partition("\n## ")[0]
    marks = {}
    for line in section.splitlines():
        said = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if line.startswith("control-struct ") and line.endswith(" CURRENT"):
            marks[int(said["partition"])] = min(int(said["lwm"]), int(said["localLwm"]))
    found = [line.split() for line in section.splitlines() if line.startswith("rec ")]
    records = sorted((int(w[1]), int(w[2]), w[3], int(w[4]), int(w[5]), w[6], w[7]) for w in found)
    return [each for each in records if not is_committed or each[1] <= marks[each[0]]]


def seen(rows: list[Any]) -> list[tuple[Any, ...]]:
    return sorted(
        (
            row.partition,
            row.txid,
            f"{row.client_id}:{row.generation}:{row.req_partition}:{row.seq}",
            row.header,
            len(row.data),
            hashlib.sha256(row.data).hexdigest(),
            f"{row.crc & 0xFFFFFFFF:08x}",
        )
        for row in rows
    )


def log(spark: Any, path: object, **options: object) -> Any:
    return spark.read.format("waltz").options(**options).load(str(path))


@pytest.mark.parametrize("storage", ["storage0", "storage1", "storage2"])
def test_every_record_of_the_original_and_no_other(spark: Any, original: Path, storage: str) -> None:
    committed = recorded(original, storage)
    assert seen(log(spark, original / storage).collect()) == committed
    every = recorded(original, storage, is_committed=False)
    assert len(every) > len(committed)
    assert seen(log(spark, original / storage, allowUncommitted="true").collect()) == every


def test_several_directories_are_one_log(spark: Any, original: Path) -> None:
    paths = [str(original / name) for name in ("storage2", "storage0")]
    frame = spark.read.format("waltz").load(paths)
    assert seen(frame.collect()) == recorded(original, "storage0")


def test_as_a_view_in_sql(spark: Any, original: Path) -> None:
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW original_log USING waltz OPTIONS (path '{original / 'storage0'}')")
    found = spark.sql(
        "SELECT partition, count(*), min(txid), max(txid), sum(length(data)) FROM original_log GROUP BY 1"
    ).collect()
    expected: dict[int, tuple[int, int, int, int]] = {}
    for partition, id_, _, _, length, _, _ in recorded(original, "storage0"):
        count, first, last, size = expected.get(partition, (0, id_, id_, 0))
        expected[partition] = (count + 1, min(first, id_), max(last, id_), size + length)
    assert {row[0]: tuple(row[1:]) for row in found} == expected


def test_what_only_the_files_know(spark: Any, growing: GrowingStorage) -> None:
    growing.append(1, [b"a", b"bcd"])
    growing.append(1, [b"", b"e"])
    frame = log(spark, growing.directory, includeMetadata="true", partitions="1").orderBy("txid")
    assert frame.columns == EVERY.names
    rows = frame.collect()
    known = [(row.txid, row.segment_first_txid, row.record_bytes) for row in rows]
    assert known == [(0, 0, 41), (1, 0, 43), (2, 2, 40), (3, 2, 41)]
    assert {row.segment_created.timestamp() for row in rows} == {CREATED_MS / 1000}
    assert {row.source for row in rows} == {f"what is committed in {growing.directory}"}
    raw = (growing.directory / "1" / segment_name(2)).read_bytes()
    assert rows[2].record_crc & 0xFFFFFFFF == int.from_bytes(raw[HEADER_BYTES + 36 : HEADER_BYTES + 40], "big")


# -- columns -----------------------------------------------------------------------------------------------------------


def test_the_schema_of_the_user_is_the_projection(spark: Any, original: Path) -> None:
    frame = spark.read.format("waltz").schema("TxId BIGINT, header INT").load(str(original / "storage0"))
    assert frame.columns == ["TxId", "header"]
    whole = [(each[1], each[3]) for each in recorded(original, "storage0")]
    assert sorted(map(tuple, frame.collect())) == sorted(whole)
    assert frame.where("txid = 7").count() == sum(id_ == 7 for id_, _ in whole)


def test_columns_by_name(spark: Any, original: Path) -> None:
    frame = log(spark, original / "storage0", columns="data, record_crc")
    assert frame.dtypes == [("data", "binary"), ("record_crc", "int")]
    assert frame.count() == len(recorded(original, "storage0"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": "txid,heder"}, "a column 'heder' that a log does not have; the nearest is header"),
        ({"columns": "txid,TXID"}, "the column TXID is asked for twice"),
        ({"includeMetadata": "yes"}, "includeMetadata is 'yes'; it can be true or false"),
        ({"startingTxnId": "5"}, "did you mean startingTxnIds"),
        ({"partitions": "9"}, "W2007"),
    ],
)
def test_an_option_that_makes_no_sense_says_so(spark: Any, original: Path, options: dict[str, str], said: str) -> None:
    with pytest.raises(PySparkException) as caught:
        log(spark, original / "storage0", **options).collect()
    assert said in str(caught.value)
    assert "waltzctl errors lookup W" in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "said"),
    [("txid INT", "the schema says that txid is int32; it is int64"), ("id BIGINT", "names a column 'id'; ")],
)
def test_a_schema_that_does_not_fit_says_so(spark: Any, original: Path, schema: str, said: str) -> None:
    with pytest.raises(PySparkException) as caught:
        spark.read.format("waltz").schema(schema).load(str(original / "storage0")).collect()
    assert said.partition(";")[0] in str(caught.value)


# -- filters -----------------------------------------------------------------------------------------------------------

PREDICATES: list[tuple[str, Callable[[Any], bool]]] = [
    ("partition IN (0, 4) AND txid BETWEEN 10 AND 20", lambda row: row.partition in (0, 4) and 10 <= row.txid <= 20),
    ("header >= 0 AND header < 100 AND partition <> 0", lambda row: 0 <= row.header < 100 and row.partition != 0),
    ("length(data) > 10 AND partition < 2", lambda row: len(row.data) > 10 and row.partition < 2),
    ("partition = 1", lambda row: row.partition == 1),
    ("txid = 33 OR txid = 5", lambda row: row.txid in (5, 33)),
    ("txid IN (1, 200, 389) AND partition = 0", lambda row: row.txid in (1, 200, 389) and row.partition == 0),
    ("txid > 380 AND NOT txid = 385", lambda row: row.txid > 380 and row.txid != 385),
    ("header <=> 3 AND txid IS NOT NULL", lambda row: row.header == 3),
    ("txid IS NULL", lambda _: False),
    ("partition = 99", lambda _: False),
    ("txid > 9223372036854775806", lambda _: False),
    ("partition + 0 = 1", lambda row: row.partition == 1),
]


@pytest.mark.parametrize("is_pushed", [False, True])
def test_filters_find_the_same_rows_pushed_or_not(spark: Any, original: Path, is_pushed: bool) -> None:
    whole = log(spark, original / "storage0").collect()
    spark.conf.set(PUSHING, str(is_pushed).lower())
    try:
        for predicate, holds in PREDICATES if is_pushed else PREDICATES[:3]:
            found = log(spark, original / "storage0").where(predicate)
            assert seen(found.collect()) == seen([row for row in whole if holds(row)]), predicate
    finally:
        spark.conf.unset(PUSHING)


def test_filters_are_given_to_the_source(spark: Any, original: Path, pushing_down: None) -> None:
    frame = log(spark, original / "storage0").where("partition = 1 AND header < 0 AND length(data) > 3")
    rows = frame.collect()
    metrics = scan_metrics(frame)
    whole = recorded(original, "storage0")
    assert metrics["numOutputRows"] == sum(each[0] == 1 and each[3] < 0 for each in whole)
    assert len(rows) == sum(each[0] == 1 and each[3] < 0 and each[4] > 3 for each in whole)


def scan_metrics(frame: Any) -> dict[str, int]:
    """Of the step that asked the source."""
    plan = frame._jdf.queryExecution().executedPlan()
    while plan.children().size() and not plan.nodeName().startswith("BatchScan"):
        plan = plan.children().apply(0)
    metrics = plan.metrics().iterator()
    found = {}
    while metrics.hasNext():
        name, metric = (lambda pair: (pair._1(), pair._2()))(metrics.next())
        found[name] = metric.value()
    return found


def rows_read(reader: WaltzReader) -> list[tuple[int, int]]:
    return [
        (row["partition"], row["txid"])
        for task in reader.partitions()
        for batch in reader.read(task)
        for row in batch.select(["partition", "txid"]).to_pylist()
    ]


def reader_of(path: Path, **options: str) -> WaltzReader:
    source = WaltzDataSource({"path": str(path), **options})
    return source.reader(source.schema())


def test_what_cannot_match_is_not_read(original: Path) -> None:
    reader = reader_of(original / "storage0", splitBytes="4KiB")
    every = len(reader.partitions())
    given_back = list(reader.pushFilters([EqualTo(("partition",), 0), In(("txid",), (3, 380)), GreaterThan(("seq",), 5)]))
    assert given_back == [GreaterThan(("seq",), 5)]
    tasks = reader.partitions()
    assert 0 < len(tasks) < every
    assert all(task.split.partition == 0 for task in tasks if isinstance(task, Task))
    assert rows_read(reader) == [(0, 3), (0, 380)]


def test_far_apart_ids_of_one_task_are_read_by_themselves(growing: GrowingStorage) -> None:
    growing.append(0, [b"x"] * 30_001)
    reader = reader_of(growing.directory)
    assert list(reader.pushFilters([In(("txid",), (0, 2, 15_000, 30_000)), EqualTo(("partition",), 0)])) == []
    (task,) = reader.partitions()
    assert isinstance(task, Task)
    assert [part.span for part in task.split.parts] == [Span(0, 2), Span(15_000, 15_000), Span(30_000, 30_000)]
    assert rows_read(reader) == [(0, 0), (0, 2), (0, 15_000), (0, 30_000)]


def test_nothing_to_read_is_no_row_and_no_error(spark: Any, growing: GrowingStorage) -> None:
    assert log(spark, growing.directory).collect() == []
    reader = reader_of(growing.directory)
    assert reader.partitions() == []
    assert list(reader.read(InputPartition(None))) == []


# -- amounts and errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "count"), [({}, 5), ({"minPartitions": "9"}, 9)])
def test_as_many_tasks_as_was_asked_for(spark: Any, original: Path, options: dict[str, str], count: int) -> None:
    frame = log(spark, original / "storage0", **options)
    assert frame.rdd.getNumPartitions() == count
    assert frame.count() == len(recorded(original, "storage0"))


def test_a_range_of_ids(spark: Any, original: Path) -> None:
    bounds = {"startingTxnIds": '{"0": 380}', "endingTxnIds": '{"0": 385, "1": 3}'}
    frame = log(spark, original / "storage0", partitions="0-1", **bounds)
    found = sorted((row.partition, row.txid) for row in frame.collect())
    assert found == [*((0, id_) for id_ in range(380, 385)), *((1, id_) for id_ in range(3))]


def test_what_was_moved_away_is_missed_by_those_who_ask_for_it(
    growing: GrowingStorage, caplog: pytest.LogCaptureFixture
) -> None:
    growing.append(0, [b"old"] * 10)
    growing.append(0, [b"new"] * 10)
    (growing.directory / "0" / segment_name(0)).unlink()
    left = [(0, id_) for id_ in range(10, 20)]
    assert rows_read(reader_of(growing.directory)) == left
    with pytest.raises(BeyondLog, match="partition 0: ids 3 to 9 are not there any more; the first id is 10"):
        reader_of(growing.directory, startingTxnIds='{"0": 3}').partitions()
    assert caplog.messages == []
    assert rows_read(reader_of(growing.directory, startingTxnIds='{"0": 3}', failOnDataLoss="false")) == left
    assert ["ids 3 to 9 are not there any more" in message for message in caplog.messages] == [True]


def test_damage_names_the_partition_and_the_ids(spark: Any, growing: GrowingStorage) -> None:
    """Rows never end early: the whole query fails."""
    growing.append(0, [b"payload %d" % number for number in range(200)])
    growing.append(1, [b"x"] * 10)
    path = growing.directory / "0" / segment_name(0)
    raw = path.read_bytes()
    at = raw.index(b"payload 150")
    path.write_bytes(raw[:at] + b"?" + raw[at + 1 :])
    with pytest.raises(PySparkException) as caught:
        log(spark, growing.directory).count()
    said = str(caught.value)
    assert "PartitionDamaged" in said
    assert "id 150 of partition 0" in said
    assert "waltzctl errors lookup W3003" in said
    assert log(spark, growing.directory, partitions="1").count() == 10
    assert log(spark, growing.directory, endingTxnIds='{"0": 150}').count() == 160


# -- where it runs -----------------------------------------------------------------------------------------------------
ELSEWHERE = """
import sys
from pyspark.sql import SparkSession
from waltz_spark.engine.session import PATIENCE

builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
spark = builder.config(map=PATIENCE).config("spark.driver.bindAddress", "127.0.0.1").getOrCreate()
version = spark._jvm.System.getProperty("java.version")
print(spark.read.format("waltz").load(sys.argv[1]).count(), version)
spark.stop()
"""


def test_nothing_is_registered_and_java_comes_with_the_packages(original: Path, tmp_path: Path) -> None:
    """On a machine without a Java of its own. Where packages are installed, Spark finds `pyspark_waltz` by its name; here
    it lies in the checkout."""
    environment = {"PATH": os.defpath, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = str(PYSPARK_WALTZ.parents[1])
    found = session.find_java(session._bundled(environment))
    environment |= {"JAVA_HOME": found.home, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    asked = [sys.executable, "-c", ELSEWHERE, str(original / "storage0")]
    done = subprocess.run(asked, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(recorded(original, "storage0"))), found.version]


def test_without_its_packages_nothing_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark would give up on all sources if this one could not be imported."""
    assert runpy.run_path(str(PYSPARK_WALTZ))["DefaultSource"] is WaltzDataSource
    monkeypatch.setitem(sys.modules, "waltz_spark.source", None)
    assert "DefaultSource" not in runpy.run_path(str(PYSPARK_WALTZ))
