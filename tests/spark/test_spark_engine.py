"""An export that Spark computes and writes: the same protocol, and the same proof of what was read."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pyarrow.csv as pc
import pyarrow.parquet as pq
import pytest
from waltz_spark.exporting import export as protocol
from waltz_spark.exporting.archive import ExportOrigin
from waltz_spark.exporting.destination import LocalDestination, newest_manifest
from waltz_spark.exporting.export import Range, by_spark, has_leftovers
from waltz_spark.exporting.form import form_of
from waltz_spark.exporting.manifest import HIDDEN, SPARK, Manifest, Query, encode, manifest_path
from waltz_spark.exporting.spark_form import NEEDED
from waltz_spark.exporting.tasks import Assignment, Job, Written
from waltz_spark.exporting.verification import check_files, strays
from waltz_spark.log.origin import Span
from waltz_spark.log.plan import Sizing
from waltz_spark.payloads.decoders import decoder_of
from waltz_spark.restoring.restore import segments_of
from waltz_spark.table.columns import columns_of
from waltz_spark.table.reading import Reading, tasks

from tests.spark import exporting as exporting_
from tests.spark.batches import microseconds, mixed_log
from tests.spark.exporting import Killed, findings, rows_in, rows_of
from tests.spark.growing import GrowingStorage
from waltzctl.main import run
from waltzd.errors import (
    EXIT_CONFLICT,
    EXIT_USAGE,
    ArchiveUnfit,
    BadDecoder,
    BadSql,
    NotOurExport,
    PartitionDamaged,
    SqlFailed,
    WaltzError,
)
from waltzd.format.layout import segment_name

DECODER = "json:n bigint, s string, at timestamp"
TEXTS = ["", " a\"b,\\ \n'c' ", "plain", "\t\r\n", None]


class Mortal(LocalDestination):
    """Of a driver that is gone from a moment on: nothing reaches the disk any more."""

    def put_new(self, path: str, content: bytes) -> bool:
        if path == manifest_path(2):
            self.__dict__["place"] = "/dev/null/gone"
            raise Killed
        return super().put_new(path, content)


@pytest.mark.parametrize("format_", ["parquet", "orc", "json", "csv"])
def test_times_locks_and_groups_by_the_writers_of_spark(spark: Any, tmp_path: Path, format_: str) -> None:
    """As they are in the log; and a condition on the time."""
    (tmp_path / "storage").mkdir()
    log = mixed_log(tmp_path / "storage" / "0", 21)
    exporting = Exporting(
        spark=spark, storage=cast(GrowingStorage, SimpleNamespace(directory=tmp_path / "storage")),
        destination=LocalDestination(str(tmp_path / "out")), form=form_of(format_, None), query=Query(engine=SPARK),
        allows_uncommitted=True,
    )  # fmt: skip
    found = exporting.export()
    archive = ExportOrigin(output=str(tmp_path / "out"))
    reading, catalog = Reading(archive, columns_of(log.rows[0])), archive.catalog()
    given = tasks(archive, catalog, catalog.spans, Sizing())
    assert [row for task in given for batch in reading.batches(task) for row in batch.to_pylist()] == log.rows
    times = [row["time"] for row in log.rows if row["time"] is not None]
    assert sum(piece.row_count for piece in found.pieces) == len(log.rows)
    cut = times[len(times) // 2]
    exporting.destination = LocalDestination(str(tmp_path / "some"))
    where = f"time >= timestamp_micros({microseconds(cut)}) AND exists(locks, each -> each.mode = 'READ')"
    exporting.query = Query(engine=SPARK, where=where, select="txid, `group`, size(locks) AS locks")
    wanted = [row for row in log.rows if row["time"] is not None and row["time"] >= cut]
    wanted = [row for row in wanted if any(lock["mode"] == "READ" for lock in row["locks"])]
    assert sum(piece.row_count for piece in exporting.export().pieces) == len(wanted) > 0


@dataclass(kw_only=True)
class Exporting(exporting_.Exporting):
    spark: Any

    def tasks(self, job: Job, given: Sequence[Assignment]) -> Generator[Written, None, None]:
        job = replace(job, destination=self.destination)
        return by_spark(self.spark, job, given, bucket=self.storage.directory.parent / "bucket")

    def export(self, asked: Range | None = None) -> Manifest:
        found = super().export(asked)
        self.check_proof(found)
        return found

    def rows(self) -> list[dict[str, Any]]:
        """As any reader of a directory sees it."""
        order = [("partition", "ascending"), ("txid", "ascending")]
        rows: list[dict[str, Any]] = pq.read_table(self.destination.place).sort_by(order).to_pylist()
        return rows


def payload(partition: int, number: int) -> bytes:
    at = f"2026-01-01T00:00:{number % 60:02d}.{number:06d}Z"
    return json.dumps({"n": number, "s": TEXTS[number % len(TEXTS)], "at": at, "p": partition}).encode()


def grow(storage: GrowingStorage, segments: int, records: int = 12) -> None:
    for partition, end in dict(storage.ends).items():
        for segment in range(segments):
            start = end + segment * records
            numbers = range(start, start + records)
            storage.append(
                partition, [payload(partition, number) for number in numbers], headers=[number % 3 for number in numbers]
            )


@pytest.fixture
def storage(tmp_path: Path) -> GrowingStorage:
    made = GrowingStorage(tmp_path / "storage", key=UUID(int=77), partitions=3, assigned=(0, 1))
    grow(made, 2)
    return made


@pytest.fixture
def exporting(spark: Any, storage: GrowingStorage, tmp_path: Path) -> Iterator[Exporting]:
    before = {name: spark.conf.get(name, None) for name in NEEDED}
    try:
        place = LocalDestination(str(tmp_path / "out a{b}%20"))
        yield Exporting(spark=spark, storage=storage, destination=place, query=Query(engine=SPARK), file_data_bytes=None)
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)


# -- all of it ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("format_", "compression"), [("parquet", "lz4"), ("orc", None), ("json", None), ("csv", "none")])
def test_the_files_are_the_log(exporting: Exporting, format_: str, compression: str | None) -> None:
    exporting.form = form_of(format_, compression)
    exporting.file_data_bytes = 1000
    manifest = exporting.export()
    assert rows_in(exporting.destination, manifest) == rows_of(exporting.origin)
    assert {number: total.span for number, total in manifest.partitions.items()} == {0: Span(0, 23), 1: Span(0, 23)}
    origin = ExportOrigin(output=exporting.destination.place)
    catalog = origin.catalog()
    assert (
        sum(len(run) for extent in catalog.extents for run in origin.read(extent, extent.span, batch_bytes=1 << 20)) == 48
    )


def test_columns_beside_all_of_the_log_leave_it_the_log(exporting: Exporting) -> None:
    exporting.query = Query(engine=SPARK, select="*, length(data) AS size")
    manifest = exporting.export()
    assert manifest.shape.query.keeps_records
    table = exporting.rows()
    assert [row.pop("size") for row in table] == [len(row["data"]) for row in table]
    assert table == rows_of(exporting.origin)
    assert ExportOrigin(output=exporting.destination.place).catalog().spans == {0: Span(0, 23), 1: Span(0, 23)}


def test_text_is_as_elsewhere(exporting: Exporting) -> None:
    """Nulls, empty texts, quotes, line ends, spaces and microseconds come back."""
    exporting.decoder = decoder_of(DECODER)
    exporting.query = Query(engine=SPARK, select="partition, txid, s, at, data", where="txid < 10 AND partition = 0")
    exporting.form = form_of("csv", "gzip")
    manifest = exporting.export()
    assert [piece.row_count for piece in manifest.pieces] == [10, 0]
    options = pc.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=False, null_values=[""])
    parse = pc.ParseOptions(newlines_in_values=True)
    path = Path(exporting.destination.place, manifest.pieces[0].path)
    rows = pc.read_csv(path, parse_options=parse, convert_options=options).to_pylist()
    assert [row["s"] for row in rows] == [TEXTS[number % len(TEXTS)] for number in range(10)]
    assert [row["at"].isoformat() for row in rows[:2]] == ["2026-01-01T00:00:00+00:00", "2026-01-01T00:00:01.000001+00:00"]


# -- a part of it ------------------------------------------------------------------------------------------------------


def test_some_records_and_other_columns(exporting: Exporting) -> None:
    exporting.decoder = decoder_of(DECODER)
    exporting.query = Query(engine=SPARK, where="n % 5 = 2 AND header < 2", select="partition, txid, upper(s) AS big, at")
    first = exporting.export()
    assert first.shape.schema == (
        ("partition", "int32"), ("txid", "int64"), ("big", "string"), ("at", "timestamp[us, tz=UTC]")
    )  # fmt: skip
    grow(exporting.storage, 2)
    exporting.storage.assign(2)
    exporting.storage.append(2, [payload(2, 0)])
    second = exporting.export()
    assert set(first.pieces) < set(second.pieces)
    expected = [row for row in rows_of(exporting.origin) if row["txid"] % 5 == 2 and row["header"] < 2]
    table = exporting.rows()
    assert [(row["partition"], row["txid"]) for row in table] == [(row["partition"], row["txid"]) for row in expected]
    assert {row["big"] for row in table} == {"PLAIN"}
    assert [row["at"].microsecond for row in table] == [row["txid"] for row in table]
    totals = second.partitions
    assert {number: total.span for number, total in totals.items()} == {0: Span(0, 47), 1: Span(0, 47), 2: Span(0, 0)}
    assert {number: total.rows for number, total in totals.items()} == {0: 6, 1: 6, 2: 0}
    empty = second.pieces[-1]
    assert pq.read_schema(Path(exporting.destination.place, empty.path)).names == ["partition", "txid", "big", "at"]


@pytest.mark.parametrize("where", ["header = 1 AND header = 2", "1 = 0"])
def test_a_condition_that_is_never_true_still_reads_all(exporting: Exporting, where: str) -> None:
    exporting.query = Query(engine=SPARK, where=where, select="1 AS one")
    manifest = exporting.export()
    assert {number: (total.span.count, total.rows) for number, total in manifest.partitions.items()} == {
        0: (24, 0),
        1: (24, 0),
    }


def test_what_is_not_the_log_is_not_taken_for_it(exporting: Exporting) -> None:
    exporting.query = Query(engine=SPARK, where="txid > 3", select="partition, txid")
    manifest = exporting.export()
    place = exporting.destination.place
    said = r"is an export with --select 'partition, txid' and --where 'txid > 3': it is not the log"
    with pytest.raises(ArchiveUnfit, match=said):
        ExportOrigin(output=place).catalog()
    with pytest.raises(ArchiveUnfit, match=said):
        segments_of(manifest)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"where": "nope = 1"}, "--where nope = 1: A column.*`nope` cannot be resolved"),
        ({"where": "txid >"}, "--where txid >: Syntax error at or near end of input$"),
        ({"where": "txid"}, r"--where txid: .*is not a boolean$"),
        ({"where": "rand() > 0.5"}, "another value each time"),
        ({"where": "current_timestamp() > date'2020-01-01'"}, "another value each time"),
        ({"where": "txid IN (SELECT 1)"}, "a subquery looks at more than one transaction"),
        ({"where": "count(*) > 1"}, "invalid expressions: count"),
        ({"select": "count(*) AS n"}, "an aggregate does not give one row"),
        ({"select": "txid, count(*)"}, "--select txid, count.*GROUP BY"),
        ({"select": "explode(array(1, 2)) AS x"}, "a generator does not give one row"),
        ({"select": "row_number() OVER (ORDER BY txid) AS x"}, "a window does not give one row"),
        ({"select": "uuid() AS x"}, "another value each time"),
        ({"select": "txid, header AS TXID"}, "two columns are called TXID"),
        ({"select": "NULL AS x"}, "the column x is void, for which parquet has no place"),
        ({"select": "array(parse_json('1')) AS x"}, "the column x is variant"),
        ({"select": "f(txid"}, "a parenthesis is not closed"),
    ],
)
def test_sql_that_cannot_be(exporting: Exporting, query: dict[str, str], said: str) -> None:
    """Before a record is read: the log is one that nobody could read."""
    for path in exporting.storage.directory.glob("*/*.seg"):
        path.write_bytes(path.read_bytes()[:128] + b"x" * 100)
    exporting.query = Query(engine=SPARK, **query)
    with pytest.raises(BadSql, match=said):
        next(exporting.tasks(exporting.prepared().job, []))
    assert exporting.destination.names() == []


def test_what_nests_has_no_place_in_csv(exporting: Exporting) -> None:
    exporting.query, exporting.form = Query(engine=SPARK, select="array(txid) AS x"), form_of("csv", None)
    with pytest.raises(BadSql, match="the column x is array<bigint>, for which csv has no place"):
        next(exporting.tasks(exporting.prepared().job, []))


def test_a_decoder_whose_type_spark_does_not_have(exporting: Exporting, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "odd_decoder.py").write_text(
        "import pyarrow as pa\n\n\ndef odd(payloads):\n"
        "    return pa.RecordBatch.from_arrays([pa.nulls(len(payloads), pa.uint32())], names=['u'])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    exporting.decoder = decoder_of("odd_decoder:odd")
    with pytest.raises(BadDecoder, match="a column u of type uint32, for which Spark has none"):
        next(exporting.tasks(exporting.prepared().job, []))


def test_other_columns_than_before_are_refused(exporting: Exporting) -> None:
    exporting.query = Query(engine=SPARK, select="txid")
    exporting.export(Range(last={0: 5, 1: 5}))
    run = exporting.prepared()
    run.job = replace(run.job, query=Query(engine=SPARK, select="txid, header"))
    with pytest.raises(NotOurExport, match="its columns are txid int64, and the SQL makes txid int64, header int32 now"):
        run.carry_out(exporting.tasks)


# -- what goes wrong on the way ----------------------------------------------------------------------------------------


def test_an_expression_that_fails_names_itself(exporting: Exporting, capfd: pytest.CaptureFixture[str]) -> None:
    exporting.query = Query(engine=SPARK, select="txid, 1 / (txid - 20) AS x")
    with pytest.raises(SqlFailed, match=r"^Division by zero. Use `try_divide`"):
        exporting.prepared().carry_out(exporting.tasks)
    assert newest_manifest(exporting.destination) is None
    assert exporting.destination.names(HIDDEN) == ["lock", "plan", "tmp"]
    assert capfd.readouterr().err == ""


def test_damage_ends_a_run_and_what_was_finished_stays(exporting: Exporting) -> None:
    grow(exporting.storage, 1)
    path = exporting.storage.directory / "1" / segment_name(12)
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)
    exporting.query, exporting.file_data_bytes = Query(engine=SPARK, where="header = 0"), 2000
    with pytest.raises(PartitionDamaged) as raised:
        exporting.prepared().carry_out(exporting.tasks)
    assert "partition 1" in str(raised.value)
    manifest = newest_manifest(exporting.destination)
    assert manifest is not None
    assert manifest.partitions[1].span == Span(0, 11)
    assert manifest.next_ids[0] >= 24, "what shared a wave with the damage"
    assert findings(check_files(exporting.destination, manifest)) == []


def test_a_run_that_was_killed_goes_on_exactly(exporting: Exporting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead between two waves: one manifest is published, files of the next wave have their names, nobody cleared up."""
    monkeypatch.setattr(protocol, "PUBLISH_SECONDS", 0.0)
    exporting.query = Query(engine=SPARK, where="header = 1", select="partition, txid, data")
    exporting.file_data_bytes = 800
    run = exporting.prepared()
    assert len(run.assignments) > 4, "more than a wave"
    run.job = replace(run.job, destination=Mortal(exporting.destination.place))
    with pytest.raises((Killed, WaltzError)):
        run.carry_out(exporting.tasks)
    reached = newest_manifest(exporting.destination)
    assert reached is not None
    assert reached.number == 1
    assert strays(exporting.destination, reached) != []
    assert has_leftovers(exporting.destination)
    grow(exporting.storage, 1)
    found = exporting.export()
    assert set(reached.pieces) < set(found.pieces)
    expected = [row for row in rows_of(exporting.origin) if row["header"] == 1]
    assert exporting.rows() == [{name: row[name] for name in ("partition", "txid", "data")} for row in expected]


def test_verification_names_what_is_wrong(exporting: Exporting) -> None:
    exporting.query = Query(engine=SPARK, where="header = 1", select="txid")
    manifest = exporting.export()
    first, second = manifest.pieces
    forged = replace(manifest, pieces=(replace(first, rows=(first.rows or 0) + 1), second))
    assert findings(check_files(exporting.destination, forged)) == ["it has 8 rows, and 9 were written"]
    path = Path(exporting.destination.place, first.path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert findings(check_files(exporting.destination, manifest)) == ["its hash is not the one in the manifest"]
    assert encode(newest_manifest(exporting.destination) or pytest.fail("gone")) == encode(manifest)


def test_the_rate_is_kept_here_too(exporting: Exporting) -> None:
    """All that is read is drawn from the one bucket."""
    exporting.bytes_per_second = 1 << 30
    exporting.export()
    assert (exporting.storage.directory.parent / "bucket").stat().st_size == 8


# -- the tools ---------------------------------------------------------------------------------------------------------


def test_the_tools_know_what_sql_was_at_an_export(exporting: Exporting, capsys: pytest.CaptureFixture[str]) -> None:
    """And need no Spark for it."""
    exporting.query = Query(engine=SPARK, where="header = 1")
    exporting.export()
    place, source = exporting.destination.place, ["--source", str(exporting.storage.directory)]

    def said(*line: str, code: int = 0) -> str:
        assert run(list(line)) == code
        return "".join(capsys.readouterr())

    again = said("spark-export", place, *source, "--where", "header = 1", "-o", "json")
    assert json.loads(again)["result"] == "nothing new"
    assert "which runs code, and the command does not say so" in said("spark-export", place, *source, code=EXIT_USAGE)
    other = said("spark-export", place, *source, "--where", "header = 2", code=EXIT_CONFLICT)
    assert other.startswith("W2222")
    assert "--where was header = 1, and is to be header = 2" in other
    assert "the engine was spark, and is to be arrow" in said(
        "spark-export", place, *source, "--where", "", "--engine", "arrow", code=EXIT_CONFLICT
    )
    state = json.loads(said("export", "status", place, "-o", "json"))
    assert [state[name] for name in ("engine", "where", "select")] == ["spark", "header = 1", None]
    assert [part["rows"] for part in state["partitions"]] == [8, 8]
    assert "--where header = 1\n" in said("export", "status", place)
    checked = json.loads(said("export", "verify", place, *source, "--against-log", "-o", "json"))
    assert (checked["result"], checked["summary"]["rows"], checked["summary"]["records_checked"]) == ("clean", 16, False)
