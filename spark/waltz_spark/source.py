"""The Spark data source: `spark.read.format("waltz")` and `spark.readStream.format("waltz")`.

Spark calls these classes in short-lived processes beside the driver, one for each step of planning, and sends the reader to
the executors. So no state survives a step, and each step checks the options that it uses. Options are named as in the Kafka
and Delta sources; docs/spark.md lists them.

The progress of a stream is a position in Spark's checkpoint, and nowhere else. Spark keeps one reader of it in a process
beside the driver while the query runs, and sends a second one with the same options to the executors; the two share no
state. The last calls of `commit` and `stop` may never come. So a batch depends on its two positions only
(`waltz_spark.table.position`), and the reader only caches values that it can read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from waltz_spark.export.origin_options import given_options, open_origin
from waltz_spark.log.origin import Catalog
from waltz_spark.log.plan import size_of, sizing_of
from waltz_spark.log.selection import ENDING, ENDING_TIME, number_of, selection_of, truth_of
from waltz_spark.table.columns import wanted
from waltz_spark.table.position import (
    NO_LIMIT,
    Limit,
    Position,
    advanced,
    beginning_at,
    between,
    check_timelines,
    covers,
    end_of,
    lost,
    readable,
    reconciled,
)
from waltz_spark.table.pushdown import filters_of
from waltz_spark.table.read_task import Reading, explained_errors, log_losses, projection_of, tasks
from waltzd.errors import BadArgument

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
            selection = self._selection.timed(self._origin, catalog)
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


# -- the log as a stream -----------------------------------------------------------------------------------------------


MAX_TXNS, MAX_BYTES = "maxTxnsPerTrigger", "maxBytesPerTrigger"


class WaltzStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        with explained_errors():
            given = given_options(options)
            ends = [name for name in (ENDING, ENDING_TIME) if given.pop(name.lower(), None) is not None]
            self._end = ends[0] if ends else ""
            self._selection = selection_of(given, is_stream=True)
            self._sizing = sizing_of(given)
            self._limit = limit_of(given)
            self._filters = filters_of(given)
            self._projection = projection_of(schema)
            self._origin = open_origin(options)
        self._catalog: Catalog | None = None
        self._bound: Position | None = None
        self._told: set[str] = set()
        """Losses that were logged: Spark plans again and again."""

    def initialOffset(self) -> dict[str, Any]:
        """Return the start of a new query; `startingTxnIds` and `startingTime` are ignored by one with a checkpoint."""
        with explained_errors():
            catalog = self._look()
            selection = self._selection.timed(self._origin, catalog)
            starts = {partition: span.first for partition, span in selection.spans(catalog.spans).items()}
            log_losses(selection.passed_over(catalog.spans))
            return beginning_at(catalog, starts).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return one of the limits, because Spark has no limit of both kinds; `latestOffset` applies both."""
        if self._limit.txns is not None:
            return ReadMaxRows(self._limit.txns)
        return ReadAllAvailable() if self._limit.bytes is None else ReadMaxBytes(self._limit.bytes)

    def prepareForTriggerAvailableNow(self) -> None:
        with explained_errors():
            self._bound = end_of(self._look())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        with explained_errors():
            catalog = self._look()
            allowed = NO_LIMIT if isinstance(limit, ReadAllAvailable) else self._limit
            begin = self._reconciled(Position.from_json(start), catalog)
            return advanced(begin, catalog, limit=allowed, bound=self._bound).to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return None if self._catalog is None else end_of(self._catalog).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the tasks of a batch. After a restart, an earlier process may have planned it."""
        with explained_errors():
            begin, behind = Position.from_json(start), Position.from_json(end)
            spans = between(begin, behind)
            catalog = self._catalog
            if catalog is None or not covers(catalog, spans):
                catalog = self._look()
            self._reconciled(begin, catalog)
            check_timelines(behind, self._origin, catalog, start=begin)
            left = readable(spans, catalog, fail_on_loss=self._selection.fails_on_loss)
            return [*tasks(self._origin, catalog, left, self._sizing, self._filters)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return Reading(self._origin, self._projection, self._filters).batches(partition)

    def _look(self) -> Catalog:
        if self._end:  # not in __init__: PySpark hides errors of a reader's constructor behind its own
            raise BadArgument(
                f"{self._end} makes no sense for a stream, which has no end", next_step=f"leave {self._end} out"
            )
        self._catalog = self._origin.catalog(self._selection.partitions)
        return self._catalog

    def _reconciled(self, position: Position, catalog: Catalog) -> Position:
        among, fails = self._selection.partitions, self._selection.fails_on_loss
        if position.key == catalog.key:
            check_timelines(position, self._origin, catalog)
        found = reconciled(position, catalog, among=among, fail_on_loss=fails)
        news = [what for what in lost(position, catalog, among=among).values() if what not in self._told]
        self._told.update(news)
        log_losses(news)
        return found


def limit_of(options: Mapping[str, str]) -> Limit:
    """Parse the options about the size of batches; names are in lower case."""
    txns, size = options.get(MAX_TXNS.lower()), options.get(MAX_BYTES.lower())
    return Limit(
        txns=None if txns is None else number_of(MAX_TXNS, txns), bytes=None if size is None else size_of(MAX_BYTES, size)
    )
