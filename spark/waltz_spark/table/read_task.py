"""What one task of Spark reads, and how: batches of Arrow columns, with checksums checked on the way.

The batch reader and the stream reader differ in how they choose what is read; a task is the same for both. It is pickled,
sent to an executor, and may run twice there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from waltz_spark.log.groups import Grouped, read_grouped
from waltz_spark.log.origin import BATCH_BYTES, Catalog, Extent, Origin, Span
from waltz_spark.log.plan import Part, Sizing, Split, plan
from waltz_spark.log.selection import FAIL_ON_DATA_LOSS, Selection
from waltz_spark.table.columns import Projection, Surroundings
from waltz_spark.table.pushdown import EVERYTHING, HIGHEST, LOWEST, TIMES, UNFILTERED, Filters, Ranges
from waltzd.errors import WaltzError
from waltzd.format.layout import FileHeader
from waltzd.format.record import NO_TIME

_log = logging.getLogger("waltz.spark")
READ_TOGETHER = 10_000
"""Ids that are not wanted between two that are: to read past so many costs less than to start reading anew."""
TIMES_MAX = 16
"""More ranges of times than these are looked up as one."""


@runtime_checkable
class KnowsSegments(Protocol):
    """An origin whose extents are segments says what stands in their headers."""

    def header(self, extent: Extent) -> FileHeader | None: ...


class Task(InputPartition):
    """A split, of which a filter may have left only some pieces."""

    def __init__(self, split: Split) -> None:
        super().__init__(None)
        self.split = split


@dataclass(frozen=True)
class Reading:
    """How tasks read; pickled to the executors."""

    origin: Origin
    projection: Projection
    filters: Filters = UNFILTERED

    def batches(self, task: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(task, Task):
            return  # no task at all: Spark makes one of its own then
        with telling():
            for part in task.split.parts:
                around = self._around(part.extent)
                for run, groups in self._rows(part):
                    batch = self.projection.batch(run, around, self.filters, groups)
                    if batch.num_rows:
                        yield batch

    def _rows(self, part: Part) -> Iterator[Grouped]:
        with_locks = self.projection.asks_for_locks
        if self.projection.asks_for_groups:
            yield from read_grouped(self.origin, part.extent, part.span, batch_bytes=BATCH_BYTES, with_locks=with_locks)
            return
        for run in self.origin.read(part.extent, part.span, batch_bytes=BATCH_BYTES, with_locks=with_locks):
            yield Grouped(run, None)

    def _around(self, extent: Extent) -> Surroundings:
        segment = None
        if self.projection.asks_for_segments and isinstance(self.origin, KnowsSegments):
            segment = self.origin.header(extent)
        return Surroundings(partition=extent.partition, source=self.origin.describe(), segment=segment)


def projection_of(schema: StructType) -> Projection:
    """Spark compares the schema of what it gets with this one, to the letter."""
    return Projection(to_arrow_schema(schema, timezone="UTC"))


def tasks(
    origin: Origin, catalog: Catalog, spans: Mapping[int, Span], sizing: Sizing, filters: Filters = UNFILTERED
) -> list[Task]:
    """What the filters leave of the spans, each part of it in one task."""
    ids = {number: ids_of(origin, catalog, number, filters) for number in spans if number in filters.partition}
    hulls: dict[int, Span] = {}
    for partition, wanted in ids.items():
        pieces = wanted.within(spans[partition], nearer=READ_TOGETHER)
        if pieces:
            hulls[partition] = Span(pieces[0].first, pieces[-1].last)
    left = (_left(split, ids[split.partition]) for split in plan(catalog, hulls, sizing))
    return [Task(split) for split in left if split is not None]


def ids_of(origin: Origin, catalog: Catalog, partition: int, filters: Filters) -> Ranges:
    """The ids that can be let through, of which those of other times are none."""
    if filters.time == EVERYTHING:
        return filters.txid
    times = list(filters.time & TIMES)
    if len(times) > TIMES_MAX:
        times = [(times[0][0], times[-1][1])]

    def first_at(time: int) -> int:
        return HIGHEST if time > HIGHEST else origin.first_at(catalog, partition, time)

    found = [(first_at(first), first_at(last + 1) - 1) for first, last in times]
    if NO_TIME in filters.time:
        found.append((LOWEST, first_at(0) - 1))
    return filters.txid & Ranges(found)


def _left(split: Split, ids: Ranges) -> Split | None:
    parts = [Part(part.extent, piece) for part in split.parts for piece in ids.within(part.span, nearer=READ_TOGETHER)]
    return replace(split, parts=tuple(parts)) if parts else None


def timed(selection: Selection, origin: Origin, catalog: Catalog) -> Selection:
    """With ids in place of times."""
    return selection.timed(catalog.spans, lambda partition, time: origin.first_at(catalog, partition, time))


def tell_losses(losses: Iterable[str]) -> None:
    """With `failOnDataLoss=false`. Planning has no other output: this is on the standard error of the driver, or in its
    log."""
    for loss in losses:
        _log.warning("%s; passed over, because %s is false", loss, FAIL_ON_DATA_LOSS)


@contextmanager
def telling() -> Iterator[None]:
    """Errors reach a user of Spark as the text of a traceback: all that there is to say has to stand in it."""
    try:
        yield
    except WaltzError as error:
        for line in error.lines()[1:]:
            error.add_note(line)
        error.add_note(f"`waltzctl errors lookup {error.code}` explains it.")
        raise
