"""The records of a wave as a table for SQL, and what was read for it.

Rows that SQL has been at do not prove that all records were read. That is told past Spark: whoever reads for an assignment
puts down, under the assignment's number, the checksum of all that it read, or what stood in its way. A task that runs twice
tells the same, and what went wrong in any of them counts. What is told is looked at when Spark has ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from waltz_spark.exporting.manifest import UNFINISHED
from waltz_spark.exporting.pace import Walk, batch_bytes_of
from waltz_spark.exporting.task import Assignment, Job, error_text, error_told, schema_of, unpacked
from waltz_spark.log.decode import SCHEMA, record_batch
from waltz_spark.log.plan import runs
from waltzd.errors import BadDecoder, SparkFailed, SqlFailed, WaltzError
from waltzd.format.checksum import crc32
from waltzd.format.record import Run


@dataclass(frozen=True, kw_only=True)
class Told:
    """What was read for an assignment: all of it."""

    crc: int
    data_bytes: int
    started: float
    ended: float


@dataclass(frozen=True, kw_only=True)
class Feed:
    """How records become rows; goes to the executors."""

    job: Job
    needed: frozenset[str]
    """What the SQL looks at. The other columns are null: Spark takes all columns from a source, and these cost nothing."""

    def batch(self, run: Run, partition: int, schema: pa.Schema) -> pa.RecordBatch:
        batch = record_batch(run, partition)
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
        started, walk = time.time(), Walk(self.job.pace)
        crc = data_bytes = 0
        next_id = given.span.first
        try:
            for run in runs(self.job.origin, given.split, batch_bytes=batch_bytes_of(self.job.pace)):
                walk.wait(len(run.data))
                assert run.first_id == next_id, f"id {run.first_id} came when {next_id} was to come"
                crc, data_bytes, next_id = crc32(run.data, crc), data_bytes + len(run.data), run.last_id + 1
                yield self.batch(run, given.partition, schema)
        except WaltzError as error:
            self._tell(_wrong(self.job.run, given), error_text(error))
            return
        assert next_id == given.span.last + 1, f"{given.span} of partition {given.partition} ended before id {next_id}"
        told = Told(crc=crc, data_bytes=data_bytes, started=started, ended=time.time())
        self._tell(_read(self.job.run, given), json.dumps(asdict(told)))

    def _tell(self, path: str, text: str) -> None:
        self.job.destination.put_new(path, text.encode())  # or it was told by an attempt before this one


def _read(run: str, given: Assignment) -> str:
    return f"{UNFINISHED}/{run}/told/{given.number}.read"


def _wrong(run: str, given: Assignment) -> str:
    return f"{UNFINISHED}/{run}/told/{given.number}.wrong"


def told_of(job: Job, given: Assignment) -> Told | WaltzError:
    """When Spark has ended."""
    wrong = job.destination.read(_wrong(job.run, given))
    if wrong is not None:
        return error_told(wrong)
    told = job.destination.read(_read(job.run, given))
    if told is None:
        raise SparkFailed(
            f"Spark ended without reading ids {given.span.first} to {given.span.last} of partition {given.partition}"
        )
    return Told(**json.loads(told))


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
    for field in schema_of(job.decoder):
        try:
            from_arrow_schema(pa.schema([field]))
        except (PySparkTypeError, ValueError) as error:
            raise BadDecoder(
                f"the decoder makes a column {field.name} of type {field.type}, for which Spark has none",
                next_step="let it make another type, or leave out --engine spark, --select and --where",
            ) from error
    return from_arrow_schema(schema_of(job.decoder))
