"""The tasks of a read: they yield batches of Arrow columns, with checksums checked.

The batch reader and the stream reader select ids in different ways; tasks are the same for both. A task is pickled, sent to
an executor, and may run twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from waltz_spark.log.arrow import Grouped, read_grouped
from waltz_spark.log.origin import BATCH_BYTES, Catalog, Extent, Origin, Span, check_read
from waltz_spark.log.plan import Part, Sizing, Split, plan
from waltz_spark.log.selection import FAIL_ON_DATA_LOSS
from waltz_spark.table.columns import Projection, Surroundings
from waltz_spark.table.pushdown import EVERYTHING, HIGHEST, LOWEST, TIMES, UNFILTERED, Filters, Ranges
from waltzd.errors import OtherTimeline, WaltzError
from waltzd.format.record import NO_TIME
from waltzd.protocol.timelines import FIRST

_log = logging.getLogger("waltz.spark")
READ_TOGETHER, READ_TOGETHER_BYTES = 10_000, 1 << 20
"""Unwanted ids between two wanted ones, and their bytes, that are read and dropped, because that is faster than a new
read."""
TIMES_MAX = 16
"""Ranges of times that are looked up; more are replaced by one range that covers them."""


class Task(InputPartition):
    """A split, without the parts that filters exclude."""

    def __init__(self, split: Split, timeline: UUID = FIRST, route: Any = None) -> None:
        super().__init__(None)
        self.split = split
        self.timeline = timeline
        """Timeline of the log when the read was planned."""
        self.route = route


@dataclass(frozen=True)
class Reading:
    """The parameters of all tasks of a read, which are pickled to the executors."""

    origin: Origin
    projection: Projection
    filters: Filters = UNFILTERED

    def batches(self, task: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(task, Task):
            return  # without tasks, Spark makes one of its own
        with explained_errors():
            try:
                for part in task.split.parts:
                    around = self._around(part.extent)
                    for run, groups in self._rows(part):
                        batch = self.projection.batch(run, around, self.filters, groups)
                        if batch.num_rows:
                            yield batch
            except OtherTimeline:  # of an owner: what it means for the batch is said by the check
                self._check_log(task)
                raise
            self._check_log(task)

    def _check_log(self, task: Task) -> None:
        """Raise `OtherTimeline` if ids that were read are not on the log any more. Spark completes no batch with a failed
        task."""
        check_read(
            self.origin, task.split.partition, task.split.span, task.timeline, route=task.route,
            not_done="the batch was not completed, and a stream's checkpoint does not go past it",
            next_step="run a batch read again; restart a stream with its checkpoint: it goes on if its batch ends at "
            "or below the fork, and else names the startingTxnIds for a new checkpoint",
        )  # fmt: skip

    def _rows(self, part: Part) -> Iterator[Grouped]:
        with_locks = self.projection.asks_for_locks or self.filters.lock is not None
        if self.projection.asks_for_groups:
            yield from read_grouped(self.origin, part.extent, part.span, batch_bytes=BATCH_BYTES, with_locks=with_locks)
            return
        for run in self.origin.read(part.extent, part.span, batch_bytes=BATCH_BYTES, with_locks=with_locks):
            yield Grouped(run, None)

    def _around(self, extent: Extent) -> Surroundings:
        segment = self.origin.header(extent) if self.projection.asks_for_segments else None
        return Surroundings(partition=extent.partition, source=self.origin.describe(), segment=segment)


def projection_of(schema: StructType) -> Projection:
    """Return the projection for a schema, with exactly the types that Spark will compare."""
    return Projection(to_arrow_schema(schema, timezone="UTC"))


def tasks(
    origin: Origin, catalog: Catalog, spans: Mapping[int, Span], sizing: Sizing, filters: Filters = UNFILTERED
) -> list[Task]:
    """Return the tasks that read the ids in `spans` that pass the filters."""
    ids = {number: ids_of(origin, catalog, number, filters) for number in spans if number in filters.partition}
    hulls = _hulls(ids, spans)
    if filters.lock is not None:
        for number, found in origin.marked(catalog, hulls, filters.lock).items():
            ids[number] &= Ranges((span.first, span.last) for span in found)
        hulls = _hulls(ids, hulls)
    left = (_left(split, ids[split.partition]) for split in plan(catalog, hulls, sizing))
    return [
        Task(split, catalog.position(split.partition, split.span.last).timeline, catalog.routes.get(split.partition))
        for split in left
        if split is not None
    ]


def _hulls(ids: Mapping[int, Ranges], spans: Mapping[int, Span]) -> dict[int, Span]:
    """Return the first to the last of the ids within each span, for the partitions that have any."""
    hulls: dict[int, Span] = {}
    for number in ids.keys() & spans.keys():
        pieces = ids[number].within(spans[number], nearer=0)
        if pieces:
            hulls[number] = Span(pieces[0].first, pieces[-1].last)
    return hulls


def ids_of(origin: Origin, catalog: Catalog, partition: int, filters: Filters) -> Ranges:
    """Return the ids of a partition that may pass the filters on ids and times."""
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
    parts = [Part(part.extent, piece) for part in split.parts for piece in ids.within(part.span, nearer=_nearer(part))]
    return replace(split, parts=tuple(parts)) if parts else None


def _nearer(part: Part) -> int:
    return min(READ_TOGETHER, READ_TOGETHER_BYTES * part.span.count // max(1, part.bytes))


def log_losses(losses: Iterable[str]) -> None:
    """Log lost ids that `failOnDataLoss=false` skips, to the standard error of the driver or to its log."""
    for loss in losses:
        _log.warning("%s; passed over, because %s is false", loss, FAIL_ON_DATA_LOSS)


@contextmanager
def explained_errors() -> Iterator[None]:
    """Add code and advice to errors: users of Spark only see the text of a traceback."""
    try:
        yield
    except WaltzError as error:
        for line in error.lines()[1:]:
            error.add_note(line)
        error.add_note(f"`waltzctl errors lookup {error.code}` explains it.")
        raise
