"""The Spark data source: `spark.read.format("waltz")` and `spark.readStream.format("waltz")`.

Spark calls these classes in short-lived processes beside the driver, one for each step of planning, and sends the reader to
the executors. So no state survives a step, and each step checks the options that it uses. Options are named as in the Kafka
and Delta sources; docs/spark.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from waltz_spark.export.origin_options import given_options, open_origin
from waltz_spark.log.plan import sizing_of
from waltz_spark.log.selection import selection_of, truth_of
from waltz_spark.stream import WaltzStreamReader, limit_of
from waltz_spark.table.columns import wanted
from waltz_spark.table.pushdown import filters_of
from waltz_spark.table.read_task import Reading, explained_errors, log_losses, projection_of, tasks, timed

COLUMNS, METADATA = "columns", "includeMetadata"


class WaltzDataSource(DataSource):
    """A Waltz log as a table: one row for each transaction."""

    @classmethod
    def name(cls) -> str:
        return "waltz"

    def schema(self) -> StructType:
        """Return the schema, and check all options: a stream's options can only be refused here before it runs."""
        with explained_errors():
            given = given_options(self.options)
            sizing_of(given)
            limit_of(given)
            filters_of(given)
            selection_of(given, is_stream=True)
            metadata = truth_of(METADATA, given.get(METADATA.lower(), "false"))
            return from_arrow_schema(wanted(given.get(COLUMNS), metadata=metadata))

    def reader(self, schema: StructType) -> WaltzReader:
        return WaltzReader(dict(self.options), schema)

    def streamReader(self, schema: StructType) -> WaltzStreamReader:
        return WaltzStreamReader(dict(self.options), schema)


class WaltzReader(DataSourceReader):
    """A batch read of the log as it is at the time of planning."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        with explained_errors():
            given = given_options(options)
            self._selection = selection_of(given)
            self._sizing = sizing_of(given)
            self._filters = filters_of(given)
            self._projection = projection_of(schema)
            self._origin = open_origin(options)
        self.pushFilters = _OptionalPushdown(self)  # type: ignore[method-assign]

    def narrow(self, filters: Iterable[Filter]) -> Iterator[Filter]:
        """Apply filters; yield those that Spark has to apply itself."""
        for each in filters:
            narrowed = self._filters.narrowed(each)
            if narrowed is None:
                yield each
            else:
                self._filters = narrowed

    def partitions(self) -> list[InputPartition]:
        with explained_errors():
            catalog = self._origin.catalog(self._selection.partitions)
            selection = timed(self._selection, self._origin, catalog)
            spans = selection.spans(catalog.spans)
            log_losses(selection.passed_over(catalog.spans))
            return [*tasks(self._origin, catalog, spans, self._sizing, self._filters)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return Reading(self._origin, self._projection, self._filters).batches(partition)


class _OptionalPushdown:
    """A `pushFilters` that Spark does not recognise as an override.

    Spark refuses a reader that overrides `pushFilters` while `spark.sql.python.filterPushdown.enabled` is off, which is the
    default."""

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: WaltzReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        return self._reader.narrow(filters)
