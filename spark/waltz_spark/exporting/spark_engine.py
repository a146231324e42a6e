"""The tasks of an export where Spark computes and writes: a condition, a list of columns, Spark's own writers.

One assignment is one partition of Spark, from its reading to its file: SQL that looks at one row at a time moves nothing
between partitions, and other SQL is refused before a record is read. So the number in the name of a file says which ids are
in it. Where Spark makes no file, because it kept no row, an empty one of its own takes the place: ids that were looked at
have a file, as everywhere.

Rows that SQL has been at do not prove that all records were read. That is told past Spark: the task of an assignment
puts down, under the assignment's number, the checksum of all that it read, or what stood in its way. A task that runs twice
tells the same, and what went wrong in any of them counts. What is told is looked at when Spark has ended.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, PySparkTypeError
from pyspark.logger import PySparkLogger
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import BinaryType, StructType

from waltz_spark.exporting.destination import LocalDestination, flush, measured
from waltz_spark.exporting.form import row_count
from waltz_spark.exporting.manifest import UNFINISHED, Piece
from waltz_spark.exporting.spark_form import NEEDED, PART, are_locks, check_columns, options_of
from waltz_spark.exporting.tasks import (
    Assignment,
    Job,
    Reading,
    Watch,
    Written,
    error_text,
    error_told,
    in_waves,
    packed,
    unpacked,
    unseen,
)
from waltz_spark.log.decode import SCHEMA, record_batch
from waltz_spark.log.groups import Grouped
from waltzd.errors import (
    BadArgument,
    BadDecoder,
    BadSql,
    DiskFull,
    ExportDamaged,
    NotOurExport,
    SparkFailed,
    SqlFailed,
    WaltzError,
)

_HADOOP_SCHEMES = {"s3": "s3a"}
_ROW_BY_ROW = ("Project", "Filter")
_OTHERS = {"Aggregate": "an aggregate", "Window": "a window", "Generate": "a generator", "Sort": "an order"}
_LATER = "each transaction gives its row by itself; ask for the rest when you read the files"
_DATA_EXCEPTION = "22"
"""The class of SQL's states for values that cannot be computed with."""
_TALKATIVE = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
_NOT_SAID = ("==", "'", "+-")
"""How the lines begin that show a plan, or the SQL once more."""


class SparkEngine:
    def __init__(self, spark: Any, job: Job) -> None:
        self._spark = spark
        self._job = job
        self._query = job.query
        self._options = options_of(job.form)
        self._making = threading.Lock()
        self._empty: bytes | None = None

    def tasks(self, assignments: Sequence[Assignment], watch: Watch = unseen) -> Generator[Written, None, None]:
        """What became of them, in any order. SQL that cannot be is refused first."""
        columns_of(self._job)
        _silence()
        for name, value in NEEDED.items():
            self._spark.conf.set(name, value)
        self._spark.dataSource.register(WaltzRows)
        self._reach()
        needed, columns = self._analysed()
        if self._job.columns and self._job.columns != columns:
            raise NotOurExport(
                f"{self._job.destination.place} was made differently: its columns are {_listed(self._job.columns)}, and "
                f"the SQL makes {_listed(columns)} now"
            )

        def carry_out(wave: Sequence[Assignment]) -> list[Written]:
            return self._wave(wave, needed, columns)

        yield from in_waves(self._spark, carry_out, assignments, watch)

    def _rows(self, wave: Sequence[Assignment], needed: frozenset[str]) -> Any:
        feed = packed(Feed(job=self._job, needed=needed))
        return self._spark.read.format(WaltzRows.name()).option("feed", feed).option("wave", packed(list(wave))).load()

    def _frame(self, wave: Sequence[Assignment], needed: frozenset[str]) -> Any:
        rows = self._rows(wave, needed)
        if self._query.where:
            rows = rows.where(self._query.where)
        if self._query.select:
            rows = rows.selectExpr(*self._query.items)
        return rows

    def _analysed(self) -> tuple[frozenset[str], tuple[tuple[str, str], ...]]:
        """The columns that the SQL looks at, and names and types of those that it makes."""
        frame = self._rows((), frozenset())
        if self._query.where:
            with _telling_sql("--where", self._query.where):
                frame = frame.where(self._query.where)
                self._check_row_by_row(frame)
        if self._query.select:
            with _telling_sql("--select", self._query.select):
                frame = frame.selectExpr(*self._query.items)
                self._check_row_by_row(frame)
        check_columns(frame.schema.fields, self._job.form)
        with _telling_sql("--select", self._query.select or "*"):
            needed = _looked_at(frame._jdf.queryExecution().optimizedPlan())
        arrow = to_arrow_schema(frame.schema, timezone="UTC")
        return needed, tuple((field.name, str(field.type)) for field in arrow)

    def _check_row_by_row(self, frame: Any) -> None:
        plan = frame._jdf.queryExecution().analyzed()
        patterns = self._spark._jvm.org.apache.spark.sql.catalyst.trees.TreePattern
        if plan.containsPattern(patterns.PLAN_EXPRESSION()):
            raise BadSql("a subquery looks at more than one transaction", next_step=_LATER)
        if not plan.deterministic() or plan.containsPattern(patterns.CURRENT_LIKE()):
            raise BadSql(
                "it gives another value each time",
                next_step="the same transaction has to give the same row: leave that out",
            )
        while (inner := plan.children()).size():
            if plan.nodeName() not in _ROW_BY_ROW:
                what = _OTHERS.get(plan.nodeName(), plan.nodeName())
                raise BadSql(f"{what} does not give one row or none for each transaction", next_step=_LATER)
            plan = inner.apply(0)

    def _reach(self) -> None:
        """Whether Spark, too, can write where this export goes."""
        place = self._uri("")
        try:
            hadoop = self._spark._jsc.hadoopConfiguration()
            system = self._spark._jvm.org.apache.hadoop.fs.Path(place).getFileSystem(hadoop)
            if self._job.destination.is_on_this_machine:
                system.setWriteChecksum(False)  # no .crc file beside each file
        except Py4JJavaError as error:
            raise BadArgument(
                f"Spark cannot write to {place}: {error.java_exception.getMessage()}",
                not_done="nothing was written",
                next_step="say --conf spark.jars=… with what it lacks, or do without --engine spark, --select and --where",
            ) from error

    def _uri(self, path: str) -> str:
        place = self._job.destination.place
        if isinstance(self._job.destination, LocalDestination):
            return f"file://{place}/{path}"
        scheme, _, rest = place.partition("://")
        return f"{_HADOOP_SCHEMES.get(scheme, scheme)}://{rest.partition('?')[0]}/{path}"

    def _wave(
        self, wave: Sequence[Assignment], needed: frozenset[str], columns: tuple[tuple[str, str], ...]
    ) -> list[Written]:
        place = f"{UNFINISHED}/{self._job.run}/{wave[0].number}"
        self._save(self._frame(wave, needed), place)
        parts = self._parts(place)
        found = [self._written(given, parts.get(at), columns) for at, given in enumerate(wave)]
        return sorted(found, key=lambda written: written.error is not None)  # what is finished counts first

    def _save(self, frame: Any, place: str) -> None:
        from pyspark.sql import functions as f

        if self._job.form.format == "csv":
            named = [(field, f.col("`" + field.name.replace("`", "``") + "`")) for field in frame.schema.fields]
            frame = frame.select(
                [f.base64(column).alias(field.name) if isinstance(field.dataType, BinaryType)
                 else f.to_json(column).alias(field.name) if are_locks(field) else column
                 for field, column in named]
            )  # fmt: skip
        try:
            frame.write.format(self._job.form.format).mode("error").options(**self._options).save(self._uri(place))
        except (PySparkException, Py4JJavaError) as error:  # the second where PySpark has no class of its own
            raise _failed(error, self._job.destination.place) from error

    def _parts(self, place: str) -> dict[int, str]:
        found: dict[int, str] = {}
        for name in self._job.destination.names(place):
            if name.startswith((".", "_")):
                continue
            match = PART.fullmatch(name)
            if match is None or int(match[1]) in found:
                raise SparkFailed(f"Spark wrote {place}/{name}, which is not one file for one task")
            found[int(match[1])] = f"{place}/{name}"
        return found

    def _written(self, given: Assignment, place: str | None, columns: tuple[tuple[str, str], ...]) -> Written:
        job = self._job
        told = told_of(job, given)
        if isinstance(told, WaltzError):
            return Written(number=given.number, error=told)
        if place is None:
            place = self._put_empty(given)
        size, sha256 = self._settled(place)
        with job.destination.open(place) as file:
            rows = row_count(job.form, file, place)
        if rows > given.span.count or (rows < given.span.count and not self._query.where):
            raise ExportDamaged(
                f"{place} has {rows} rows; it was made of ids {given.span.first} to {given.span.last} of partition "
                f"{given.partition}",
                not_done="these ids were not exported",
            )
        piece = Piece(
            path=given.path(job.form),
            partition=given.partition,
            span=given.span,
            data_bytes=told.data_bytes,
            crc=told.crc,
            size=size,
            sha256=sha256,
            times=told.times,
            beside=told.beside,
            rows=None if rows == given.span.count else rows,
        )
        return Written(
            number=given.number, piece=piece, place=place, started=told.started, ended=told.ended, columns=columns
        )

    def _put_empty(self, given: Assignment) -> str:
        with self._making:
            if self._empty is None:
                self._empty = self._empty_file()
        place = f"{UNFINISHED}/{self._job.run}/empty-{given.number}"
        is_new = self._job.destination.put_new(place, self._empty)
        assert is_new, "the name of a run is unique"
        return place

    def _empty_file(self) -> bytes:
        """Made by Spark, so that it is like the others."""
        place = f"{UNFINISHED}/{self._job.run}/empty"
        frame = self._frame((), frozenset())
        self._save(self._spark.createDataFrame([], frame.schema), place)
        found = self._job.destination.read(self._parts(place)[0])
        assert found is not None
        return found

    def _settled(self, place: str) -> tuple[int, str]:
        """Its size and hash, once it is flushed: Spark does not flush."""
        if isinstance(self._job.destination, LocalDestination):
            flush(Path(self._job.destination.place, place))
        return measured(self._job.destination, place)


def _looked_at(plan: Any) -> frozenset[str]:
    """The columns that an optimized plan reads."""
    found = _names(plan.output())
    while (inner := plan.children()).size():
        found |= _names(plan.references().toSeq())
        plan = inner.apply(0)
    return found


def _names(attributes: Any) -> frozenset[str]:
    return frozenset(attributes.apply(at).name() for at in range(attributes.size()))


def _listed(columns: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {type_}" for name, type_ in columns)


# -- what Spark says ---------------------------------------------------------------------------------------------------


@contextmanager
def _telling_sql(option: str, text: str) -> Iterator[None]:
    """Puts the SQL into the error."""
    try:
        yield
    except PySparkException as error:
        raise BadSql(f"{option} {text}: {said_of(str(error))}") from error
    except BadSql as error:
        raise BadSql(f"{option} {text}: {error.message}", next_step=error.detail_next_step) from error


def _silence() -> None:
    """PySpark shows errors of SQL on the terminal as well, with all that Java has to say."""
    for name in _TALKATIVE:
        PySparkLogger.getLogger(name).setLevel(logging.CRITICAL)


def _failed(error: PySparkException | Py4JJavaError, place: str) -> Exception:
    if isinstance(error, PySparkException) and (error.getSqlState() or "").startswith(_DATA_EXCEPTION):
        return SqlFailed(said_of(str(error)))
    if os.strerror(errno.ENOSPC) in str(error):
        return DiskFull(
            f"there is no space left for {place}",
            not_done="what was not finished is not in the export",
            next_step="make room there, then run the same command again",
        )
    return error


def said_of(text: str) -> str:
    """What Spark says, without what only its makers can use: states, plans, the place in a text of one line."""
    lines = [line.strip() for line in text.strip().splitlines()]
    end = next((at for at, line in enumerate(lines) if line.startswith(_NOT_SAID)), len(lines))
    joined = re.sub(r"\s*SQLSTATE: \w+.*", "", " ".join(lines[:end]))
    return re.sub(r"^\[[A-Z0-9_.]+\] ", "", joined).rstrip(". ")


# -- the records of a wave as a table for SQL --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Told:
    """Proof that all of an assignment was read."""

    crc: int
    data_bytes: int
    times: tuple[int, int] | None
    beside: int | None
    started: float
    ended: float


@dataclass(frozen=True, kw_only=True)
class Feed:
    """How records become rows; goes to the executors."""

    job: Job
    needed: frozenset[str]
    """What the SQL looks at. The other columns are null: Spark takes all columns from a source, and these cost nothing."""

    def batch(self, rows: Grouped, partition: int, schema: pa.Schema) -> pa.RecordBatch:
        batch = record_batch(rows.run, partition, rows.groups)
        if self.job.decoder is not None and not self.needed <= set(SCHEMA.names):
            batch = self.job.decoder.decode(batch)
        columns = [self._column(batch, field) for field in schema]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _column(self, batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
        if field.name not in self.needed:
            return pa.nulls(batch.num_rows, field.type)
        try:
            return batch.column(field.name).cast(field.type)
        except pa.ArrowException as error:
            raise SqlFailed(
                f"the column {field.name} of the decoder has a value that Spark's {field.type} cannot hold: {error}",
                next_step="let the decoder make another type, or leave out --engine spark, --select and --where",
            ) from error

    def rows(self, given: Assignment, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """An error of ours ends them early, and is told: Spark would only try again, and make a text of it."""
        started, reading = time.time(), Reading(self.job, given)
        try:
            for rows in reading.rows():
                yield self.batch(rows, given.partition, schema)
        except WaltzError as error:
            self._tell(_wrong(self.job.run, given), error_text(error))
            return
        told = Told(
            crc=reading.crc, data_bytes=reading.data_bytes, times=reading.beside.times, beside=reading.beside.crc,
            started=started, ended=time.time(),
        )  # fmt: skip
        self._tell(_read(self.job.run, given), json.dumps(asdict(told)))

    def _tell(self, path: str, text: str) -> None:
        self.job.destination.put_new(path, text.encode())  # or it was told by an attempt before this one


def _read(run: str, given: Assignment) -> str:
    return f"{UNFINISHED}/{run}/told/{given.number}.read"


def _wrong(run: str, given: Assignment) -> str:
    return f"{UNFINISHED}/{run}/told/{given.number}.wrong"


def told_of(job: Job, given: Assignment) -> Told | WaltzError:
    """Known when Spark has ended."""
    wrong = job.destination.read(_wrong(job.run, given))
    if wrong is not None:
        return error_told(wrong)
    told = job.destination.read(_read(job.run, given))
    if told is None:
        raise SparkFailed(
            f"Spark ended without reading ids {given.span.first} to {given.span.last} of partition {given.partition}"
        )
    found = json.loads(told)
    return Told(**{**found, "times": found["times"] and tuple(found["times"])})


class _Given(InputPartition):
    def __init__(self, assignment: Assignment) -> None:
        super().__init__(None)
        self.assignment = assignment


class WaltzRows(DataSource):
    """The records of a wave, a partition of Spark for each assignment, in their order."""

    @classmethod
    def name(cls) -> str:
        return "waltz_rows"

    def schema(self) -> StructType:
        feed: Feed = unpacked(self.options["feed"])
        return columns_of(feed.job)

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Rows(unpacked(self.options["feed"]), unpacked(self.options["wave"]), schema)


class _Rows(DataSourceReader):
    def __init__(self, feed: Feed, wave: Sequence[Assignment], schema: StructType) -> None:
        self._feed = feed
        self._wave = wave
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        return [_Given(assignment) for assignment in self._wave]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Given)
        return self._feed.rows(partition.assignment, to_arrow_schema(self._schema, timezone="UTC"))


def columns_of(job: Job) -> StructType:
    for field in job.schema:
        try:
            from_arrow_schema(pa.schema([field]))
        except (PySparkTypeError, ValueError) as error:
            raise BadDecoder(
                f"the decoder makes a column {field.name} of type {field.type}, for which Spark has none",
                next_step="let it make another type, or leave out --engine spark, --select and --where",
            ) from error
    return from_arrow_schema(job.schema)
