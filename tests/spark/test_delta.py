"""The Delta table of an export: it says what the manifests say, whenever a run dies, and what others do to it is found."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import deltalake
import pyarrow as pa
import pytest
from deltalake.schema import PrimitiveType
from deltalake.transaction import AddAction, RemoveAction
from waltz_spark.export.delta import DeltaTable, TableState, address_of, differences, state_of, table_schema
from waltz_spark.export.destination import LocalDestination, destination_of, newest_manifest
from waltz_spark.export.form import Form, ParquetFile, form_of
from waltz_spark.export.manifest import Manifest, Piece, Shape, manifest_path
from waltz_spark.log.arrow import SCHEMA
from waltz_spark.log.origin import Span
from waltz_spark.payloads import decoders

from tests.spark import exporting as exporting_
from tests.spark.exporting import KEY, Dying, Killed, export
from tests.spark.growing import GrowingStorage
from tests.spark.telling import Tool
from waltzd.errors import BadArgument
from waltzd.errors.operations import TableDiffers, TableFailed

FORM = form_of("delta", None)


@dataclass(kw_only=True)
class Exporting(exporting_.Exporting):
    """With its table."""

    form: Form = FORM
    file_data_bytes: int | None = 1000

    def __post_init__(self) -> None:
        self.table = DeltaTable(self.destination, SCHEMA)

    @property
    def files(self) -> set[str]:
        """Of the table."""
        log = Path(self.destination.place, "_delta_log")
        if not log.exists() or not any(name.endswith(".json") for name in os.listdir(log)):
            return set()
        actions = pa.table(deltalake.DeltaTable(self.destination.place).get_add_actions(flatten=True))
        return set(actions.column("path").to_pylist())

    def check(self) -> None:
        """A reader of the table sees the log, each id once, and each manifest was committed once."""
        manifest = newest_manifest(self.destination)
        assert manifest is not None
        assert differences(self.destination, manifest) == []
        assert self.files == {piece.path for piece in manifest.pieces}
        rows = rows_of(Path(self.destination.place), "SELECT partition, txid FROM t ORDER BY partition, txid")
        log = [{"partition": number, "txid": txid} for number, end in self.storage.ends.items() for txid in range(end)]
        assert rows == log
        table = deltalake.DeltaTable(self.destination.place)
        assert [commit["waltzManifest"] for commit in reversed(table.history())] == list(range(1, manifest.number + 1))


def rows_of(place: Path, sql: str) -> list[dict[str, Any]]:
    """By deltalake's own reader. That of PyArrow may abort the process at its end (see `delta`)."""
    reader = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(place)).execute(sql)
    return list(pa.table(reader.read_all()).to_pylist())


@pytest.fixture
def exporting(growing: GrowingStorage, tmp_path: Path) -> Exporting:
    grow(growing)
    return Exporting(storage=growing, destination=LocalDestination(str(tmp_path / "out")))


def grow(storage: GrowingStorage) -> None:
    for partition in storage.ends:
        storage.append(partition, [b"%d" % number * 5 for number in range(40)])


# -- what it says ------------------------------------------------------------------------------------------------------


def test_the_table_is_the_log(exporting: Exporting) -> None:
    first = exporting.export()
    exporting.check()
    grow(exporting.storage)
    exporting.storage.assign(2)
    exporting.storage.append(2, [b"the first of a new partition"])
    second = exporting.export()
    exporting.check()
    assert exporting.export() == second
    exporting.check()
    assert state_of(exporting.destination, second) == TableState(version=1, manifest=first.number + 1)


def test_payloads_and_all_other_columns(exporting: Exporting) -> None:
    exporting.export()
    rows = rows_of(Path(exporting.destination.place), "SELECT * FROM t ORDER BY partition, txid")
    assert list(rows[0]) == SCHEMA.names
    assert [row["data"] for row in rows] == [b"%d" % number * 5 for number in range(40)] * 2


def test_a_reader_can_pass_over_files(exporting: Exporting) -> None:
    manifest = exporting.export()
    table = deltalake.DeltaTable(exporting.destination.place)
    found = {row["path"]: row for row in pa.table(table.get_add_actions(flatten=True)).to_pylist()}
    assert len(found) > 2
    for piece in manifest.pieces:
        row = found[piece.path]
        assert (row["num_records"], row["size_bytes"]) == (piece.span.count, piece.size)
        assert (row["min.txid"], row["max.txid"]) == (piece.span.first, piece.span.last)
        assert row["min.partition"] == row["max.partition"] == piece.partition


def test_nobody_deletes_rows_of_a_log_by_mistake(exporting: Exporting) -> None:
    exporting.export()
    with pytest.raises(deltalake.exceptions.CommitFailedError, match="append-only"):
        deltalake.DeltaTable(exporting.destination.place).delete("txid > 3")
    exporting.check()


@pytest.mark.parametrize("name", ["plain", "with space", "grün", "a&b;c", "[x]*"])
def test_wherever_it_is(growing: GrowingStorage, tmp_path: Path, name: str) -> None:
    grow(growing)
    exporting = Exporting(storage=growing, destination=LocalDestination(str(tmp_path / name)))
    exporting.export()
    exporting.check()


# -- runs that die -----------------------------------------------------------------------------------------------------


def test_killed_before_every_operation(growing: GrowingStorage, tmp_path: Path) -> None:
    """The table never has a file that no manifest has; the next run makes it whole."""
    at, late = 0, 0
    while True:
        storage = GrowingStorage(tmp_path / f"storage {at}", key=KEY, partitions=3, assigned=(0, 1))
        grow(storage)
        destination = LocalDestination(str(tmp_path / f"out {at}"))
        exporting = Exporting(storage=storage, destination=destination, file_data_bytes=2500)
        exporting.export()
        grow(storage)
        run, left = exporting.prepared(), [at]
        exporting.destination = Dying(destination, left)
        run.job = replace(run.job, destination=exporting.destination)
        run.table = cast(DeltaTable, Dying(run.table, left))
        try:
            run.carry_out(exporting.tasks)
        except Killed:
            exporting.destination = destination
        else:
            break
        reached = newest_manifest(destination)
        assert reached is not None
        assert exporting.files <= {piece.path for piece in reached.pieces}
        late += bool(differences(destination, reached))
        exporting.export()
        exporting.check()
        at += 1
    assert at > 20
    assert late > 0, "no run died between a manifest and its commit"


class Failing(DeltaTable):
    def follow(self, newest: Manifest) -> None:
        raise TableFailed("the disk is full")


def test_a_commit_that_fails_ends_the_run_and_comes_later(exporting: Exporting) -> None:
    run = exporting.prepared()
    run.table = Failing(exporting.destination, SCHEMA)
    with pytest.raises(TableFailed, match="the disk is full"):
        run.carry_out(exporting.tasks)
    reached = newest_manifest(exporting.destination)
    assert reached is not None
    assert reached.number == 1
    assert state_of(exporting.destination, reached) is None
    assert exporting.export() == reached
    exporting.check()


def test_what_a_killed_commit_left_is_no_table(exporting: Exporting) -> None:
    """deltalake writes a commit under another name first."""
    log = Path(exporting.destination.place, "_delta_log")
    run = exporting.prepared()
    run.table = None
    run.carry_out(exporting.tasks)
    log.mkdir()
    (log / "00000000000000000000.json#1").write_text("{")
    exporting.export()
    exporting.check()


def test_a_commit_that_was_lost_with_the_power_is_made_again(exporting: Exporting) -> None:
    exporting.export()
    grow(exporting.storage)
    exporting.export()
    last = Path(exporting.destination.place, "_delta_log", f"{1:020d}.json")
    last.write_bytes(b"")
    manifest = exporting.export()
    assert differences(exporting.destination, manifest) == []
    assert exporting.files == {piece.path for piece in manifest.pieces}


# -- what others do to it ----------------------------------------------------------------------------------------------


def compact(place: str, _manifest: Manifest) -> None:
    deltalake.DeltaTable(place).optimize.compact()


def take_out(place: str, manifest: Manifest) -> None:
    table, piece = deltalake.DeltaTable(place), manifest.pieces[0]
    removal = RemoveAction(piece.path, data_change=False, deletion_timestamp=0)
    table.create_write_transaction([removal], "append", table.schema())


def put_in(place: str, _manifest: Manifest) -> None:
    table = deltalake.DeltaTable(place)
    table.create_write_transaction([AddAction("mine.parquet", 7, {}, 0, True, "{}")], "append", table.schema())


def add_column(place: str, _manifest: Manifest) -> None:
    deltalake.DeltaTable(place).alter.add_columns([deltalake.Field("mine", PrimitiveType("integer"))])


def remove_log(place: str, _manifest: Manifest) -> None:
    shutil.rmtree(Path(place, "_delta_log"))


def damage_log(place: str, _manifest: Manifest) -> None:
    Path(place, "_delta_log", f"{0:020d}.json").write_text("nonsense")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (compact, "does not have it: another tool removed it"),
        (take_out, "does not have it: another tool removed it"),
        (put_in, "mine.parquet\n  the Delta table has it, and no manifest does: another tool added it"),
        (add_column, "locks, group, mine; the files have partition,"),
        (remove_log, "there is no Delta table"),
        (damage_log, "reading the Delta table in"),
    ],
)
def test_what_others_did_is_found(
    exporting: Exporting, tool: Tool, change: Callable[[str, Manifest], None], words: str
) -> None:
    manifest, place = exporting.export(), exporting.destination.place
    assert tool("export", "verify", place).out.startswith("clean\n")
    change(place, manifest)
    told = tool("export", "verify", place)
    assert told.code == 8
    assert words in told.out
    assert told.err == ""


@pytest.mark.parametrize("change", [compact, take_out, put_in])
def test_what_others_did_is_not_undone(exporting: Exporting, change: Callable[[str, Manifest], None]) -> None:
    """What is new is added, and nothing else."""
    change(exporting.destination.place, exporting.export())
    before = exporting.files
    assert exporting.export().number == 1
    assert exporting.files == before
    known = {piece.path for piece in exporting.export().pieces}
    grow(exporting.storage)
    new = {piece.path for piece in exporting.export().pieces} - known
    assert new
    assert exporting.files == before | new


def test_a_compacted_table_goes_on_and_has_each_id_once(exporting: Exporting) -> None:
    compact(exporting.destination.place, exporting.export())
    grow(exporting.storage)
    exporting.export()
    rows = rows_of(Path(exporting.destination.place), "SELECT partition, txid FROM t ORDER BY partition, txid")
    assert [(row["partition"], row["txid"]) for row in rows] == [(number, txid) for number in (0, 1) for txid in range(80)]


def test_a_table_that_was_moved_away_is_made_anew(exporting: Exporting) -> None:
    exporting.export()
    grow(exporting.storage)
    remove_log(exporting.destination.place, exporting.export())
    manifest = exporting.export()
    assert differences(exporting.destination, manifest) == []
    assert state_of(exporting.destination, manifest) == TableState(version=0, manifest=2)


def test_somebody_elses_table_is_refused(exporting: Exporting) -> None:
    place = Path(exporting.destination.place)
    (place / "_waltz").mkdir(parents=True)
    schema = deltalake.Schema.from_json(table_schema(SCHEMA))
    deltalake.DeltaTable.create(str(place), schema)
    with pytest.raises(TableDiffers, match="holds a Delta table already, and no export"):
        exporting.export()
    assert sorted(os.listdir(place)) == ["_delta_log", "_waltz"]


def test_the_table_of_another_export_is_refused(exporting: Exporting, tmp_path: Path) -> None:
    exporting.export()
    other = Exporting(storage=exporting.storage, destination=LocalDestination(str(tmp_path / "other")))
    other.export()
    remove_log(exporting.destination.place, other.export())
    shutil.copytree(tmp_path / "other/_delta_log", Path(exporting.destination.place, "_delta_log"))
    grow(exporting.storage)
    with pytest.raises(TableDiffers, match="is not of the export that is there"):
        exporting.export()


def test_a_table_that_is_further_than_the_export_is_refused(exporting: Exporting) -> None:
    first = exporting.export()
    grow(exporting.storage)
    exporting.export()
    exporting.destination.remove(manifest_path(2))
    with pytest.raises(TableDiffers, match="has the files of manifest 2, and the newest that is there is 1"):
        exporting.export()
    assert differences(exporting.destination, first)[0][0] == "_delta_log/"


def test_a_table_far_behind_is_refused(exporting: Exporting) -> None:
    """The manifest that it has reached is gone: what is new since cannot be told from what somebody took out."""
    exporting.export()
    for _ in range(3):
        grow(exporting.storage)
        run = exporting.prepared()
        run.table = None
        run.carry_out(exporting.tasks)
    with pytest.raises(TableDiffers, match="the files up to manifest 1, and that is not there any more"):
        exporting.export()


def test_verified_while_a_run_publishes(exporting: Exporting) -> None:
    """A manifest that was read a moment ago, and a table that has reached the next one."""
    first = exporting.export()
    grow(exporting.storage)
    exporting.export()
    assert differences(exporting.destination, first) == []


# -- columns -----------------------------------------------------------------------------------------------------------

_AT = dt.datetime(2020, 2, 3, 4, 5, 6, 789000)
_INNER = pa.struct([("a", pa.int32()), ("b", pa.list_(pa.struct([("c", pa.string())])))])
_VALUES: list[tuple[pa.DataType, Any]] = [
    (pa.bool_(), True),
    (pa.int8(), -1),
    (pa.int16(), -300),
    (pa.int32(), -70_000),
    (pa.int64(), -(1 << 62)),
    (pa.float32(), 1.5),
    (pa.float64(), 1.1),
    (pa.date32(), dt.date(2020, 2, 3)),
    (pa.date64(), dt.date(2020, 2, 3)),
    (pa.string(), "ü"),
    (pa.large_string(), "ü"),
    (pa.binary(), b"\0\xff"),
    (pa.large_binary(), b"\0\xff"),
    (pa.binary(3), b"\0\xff\1"),
    (pa.timestamp("us", tz="UTC"), _AT),
    (pa.timestamp("ms", tz="UTC"), _AT),
    (pa.timestamp("s", tz="UTC"), _AT.replace(microsecond=0)),
    (pa.timestamp("us", tz="+02:00"), _AT),
    (pa.timestamp("us"), _AT),
    (pa.decimal128(20, 0), decimal.Decimal((1 << 64) - 1)),
    (pa.decimal128(10, 2), decimal.Decimal("-1.25")),
    (pa.dictionary(pa.int32(), pa.string()), "one"),
    (pa.list_(pa.int32()), [1, None]),
    (pa.map_(pa.string(), pa.binary()), [("k", b"v")]),
    (_INNER, {"a": 1, "b": [{"c": "x"}, {"c": None}]}),
]


def test_every_type_that_fits_is_read_as_it_was_written(tmp_path: Path) -> None:
    """In one table: a row with values, and one without."""
    columns = pa.schema([(f"c{number}", type_) for number, (type_, _) in enumerate(_VALUES)])
    arrays = [pa.array([value, None], type_) for type_, value in _VALUES]
    destination = LocalDestination(str(tmp_path))
    with (tmp_path / "a.parquet").open("wb") as file:
        writer = ParquetFile(FORM, file, columns, {})
        writer.write(pa.RecordBatch.from_arrays(arrays, schema=columns))
        writer.close({})
    piece = Piece(path="a.parquet", partition=0, span=Span(0, 1), data_bytes=0, crc=0,
                  size=destination.size("a.parquet") or 0, sha256="")  # fmt: skip
    shape = Shape(format="delta", compression="zstd", decoder="", decoder_fingerprint="", schema=())
    manifest = Manifest(number=1, export=UUID(int=1), cluster=KEY, source="", written="", shape=shape, pieces=(piece,))
    DeltaTable(destination, columns).follow(manifest)
    expected = pa.Table.from_arrays(arrays, schema=columns).to_pylist()
    for row, found in zip(expected, rows_of(tmp_path, "SELECT * FROM t"), strict=True):
        for name, value in row.items():
            assert found[name] == value, columns.field(name)


@pytest.mark.parametrize(
    ("type_", "words"),
    [
        (pa.uint32(), "no type for uint32; the next larger signed type"),
        (pa.time32("ms"), "no type for time32"),
        (pa.duration("s"), "no type for duration"),
        (pa.null(), "no type for null"),
        (pa.float16(), "no type for halffloat"),
        (pa.timestamp("ns"), r"timestamp\[us\] is as fine as Delta goes"),
        (pa.decimal256(50, 0), "no type for decimal256"),
        (pa.decimal128(5, -2), "no type for decimal128"),
        (pa.struct([]), "no structure without a field"),
        (pa.struct([("a", pa.int32()), ("A", pa.int32())]), "differ in case only"),
        (pa.list_(pa.struct([("a b", pa.int32())])), r"the column 'x.element.a b' cannot be in a table"),
        (pa.map_(pa.string(), pa.uint8()), r"the column 'x.value' cannot be in a table"),
    ],
)
def test_what_has_no_place_in_delta_is_refused(type_: pa.DataType, words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        table_schema(pa.schema([*SCHEMA, ("x", type_)]))


def test_what_decoders_make_fits() -> None:
    for type_ in {*decoders.TYPES.values(), pa.decimal128(38, 10)}:
        table_schema(pa.schema([("x", type_)]))


@pytest.mark.parametrize(
    ("place", "address", "options"),
    [
        ("s3a://bucket/a/b", "s3://bucket/a/b", {}),
        ("gs://bucket/a", "gs://bucket/a", {}),
        ("s3://bucket/a?region=eu-west-1", "s3://bucket/a", {"AWS_REGION": "eu-west-1"}),
        ("s3://bucket/a?endpoint_override=127.0.0.1:9000&scheme=http", "s3://bucket/a",
         {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000", "AWS_ALLOW_HTTP": "true"}),
        ("s3://bucket/a?endpoint_override=https://minio", "s3://bucket/a",
         {"AWS_ENDPOINT_URL": "https://minio", "AWS_ALLOW_HTTP": "false"}),
    ],
)  # fmt: skip
def test_where_deltalake_finds_it(place: str, address: str, options: dict[str, str]) -> None:
    assert address_of(destination_of(place)) == (address, options)


@pytest.mark.parametrize(
    "place",
    [
        "/data/100%20",
        "/data/a\\b",
        "/data/a#b",
        "/data/a?b",
        "/data/a\nb",
        "hdfs://host/a",
        "s3://key:secret@bucket/a",
        "s3://b/a?background=1",
    ],
)
def test_where_it_cannot_be(place: str) -> None:
    with pytest.raises(BadArgument, match="there can be no Delta table in"):
        DeltaTable(destination_of(place), SCHEMA)


# -- the tool ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    return Tool(capsys)


def test_a_run_with_nothing_new_makes_the_table_whole(exporting: Exporting) -> None:
    """A process of its own, without a Java: what deltalake leaves behind must not disturb how it ends."""
    run = exporting.prepared()
    run.table = None
    run.carry_out(exporting.tasks)
    place = exporting.destination.place
    line = [sys.executable, "-m", "waltzctl", "spark-export", place, "--source", str(exporting.storage.directory)]
    environment = {"PATH": "/nowhere", "JAVA_HOME": "/nowhere"}
    for _ in range(2):
        done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert "nothing was exported.\nDelta table: version 0, up to manifest 1.\n" in done.stdout
    exporting.check()


def test_the_state_shows_the_version(exporting: Exporting, tool: Tool) -> None:
    exporting.export()
    grow(exporting.storage)
    run = exporting.prepared()
    run.table = None
    place = exporting.destination.place
    assert tool("export", "status", place).out.endswith("\nDelta table: version 0, up to manifest 1.\n")
    run.carry_out(exporting.tasks)
    shown = tool("export", "status", place).out
    assert shown.endswith("\nDelta table: version 0, up to manifest 1; the next run adds what it lacks.\n")
    assert json.loads(tool("export", "status", place, "-o", "json").out)["table"] == {"version": 0, "manifest": 1}
    told = tool("export", "verify", place)
    assert told.code == 8
    assert "the Delta table has the files up to manifest 1 only" in told.out
    remove_log(place, exporting.export())
    assert "\nDelta table: not there yet: the next run makes it.\n" in tool("export", "status", place).out


def test_without_deltalake_nothing_is_written(
    exporting: Exporting, tmp_path: Path, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "none"
    monkeypatch.setitem(sys.modules, "deltalake", None)
    told = tool("spark-export", place, "--source", exporting.storage.directory, "--format", "delta")
    assert told.code == 1
    assert told.err.startswith("W2032 the package deltalake is not installed\n")
    assert "pip install 'waltzd[delta]'" in told.err
    assert not place.exists()
    assert tool("spark-export", place, "--source", exporting.storage.directory, "--dry-run").code == 0


def test_a_column_that_does_not_fit_is_refused_before_anything_is_written(
    exporting: Exporting, tmp_path: Path, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unfit_decoder.py").write_text(
        "import pyarrow as pa\n"
        "def numbers(p): return pa.RecordBatch.from_pydict({'n': pa.array([1] * len(p), pa.uint64())})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    place = tmp_path / "none"
    told = tool("spark-export", place, "--source", exporting.storage.directory, "--format", "delta",
                "--decode", "unfit_decoder:numbers")  # fmt: skip
    assert told.code == 2
    assert "the column 'n' cannot be in a table: Delta has no type for uint64" in told.err
    assert not place.exists()


def test_files_and_a_table_are_not_the_same_export(exporting: Exporting, tmp_path: Path, tool: Tool) -> None:
    place = tmp_path / "files"
    export(place, exporting.storage.directory)
    told = tool("spark-export", place, "--source", exporting.storage.directory, "--format", "delta")
    assert (told.code, "the format was parquet, and is to be delta" in told.err) == (4, True)
    assert not (place / "_delta_log").exists()
