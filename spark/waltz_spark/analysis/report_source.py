"""An origin as a table for `report`: what there is to count, and not the payloads.

An origin cannot be said in options of the data source, so it is packed and goes along as it is. An error of ours is an
answer, too, as in an export: Spark would make a traceback of it. It has its own column.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from waltz_spark.exporting.tasks import error_text, packed, unpacked
from waltz_spark.log.origin import Origin
from waltz_spark.log.plan import Sizing
from waltz_spark.log.selection import Selection
from waltz_spark.table.columns import columns_of
from waltz_spark.table.reading import Reading, projection_of, tasks, telling
from waltzd.errors import WaltzError

COUNTED = ("partition", "txid", "header", "client_id", "record_bytes", "segment_created", "time")
LOCKED = ("partition", "txid", "client_id", "locks")
ERROR = "wrong"
"""Null, but in the last row of a task that failed: what went wrong, as `task.error_text` writes it."""


class _Counted(DataSource):
    @classmethod
    def name(cls) -> str:
        return "waltz_report"

    def schema(self) -> StructType:
        _, _, columns = unpacked(self.options["log"])
        return from_arrow_schema(columns_of(columns).schema.append(pa.field(ERROR, pa.string())))

    def reader(self, schema: StructType) -> DataSourceReader:
        origin, partitions, _ = unpacked(self.options["log"])
        return _Reader(origin, partitions, schema)


class _Reader(DataSourceReader):
    def __init__(self, origin: Origin, partitions: tuple[int, ...] | None, schema: StructType) -> None:
        self._origin = origin
        self._partitions = partitions
        self._schema = schema
        self._reading = Reading(origin, projection_of(StructType([field for field in schema if field.name != ERROR])))

    def partitions(self) -> list[InputPartition]:
        with telling():
            catalog = self._origin.catalog(self._partitions)
            spans = Selection(partitions=self._partitions).spans(catalog.spans)
            return [*tasks(self._origin, catalog, spans, Sizing())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        schema = to_arrow_schema(self._schema, timezone="UTC")
        try:
            for batch in self._reading.batches(partition):
                columns = [*batch.columns, pa.nulls(batch.num_rows, pa.string())]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)
        except WaltzError as error:
            row = {ERROR: error_text(error)}
            yield pa.RecordBatch.from_pylist([row], schema=schema)


def read(spark: Any, origin: Origin, partitions: tuple[int, ...] | None, columns: tuple[str, ...]) -> Any:
    spark.dataSource.register(_Counted)
    return spark.read.format(_Counted.name()).option("log", packed((origin, partitions, columns))).load()
