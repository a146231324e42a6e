"""The selected columns of a reader, and runs of records as Arrow batches with exactly these columns.

Spark does not pass the columns that a query needs to a Python source, only the schema that the user asked for: that is the
projection. A column is computed only if it is selected, and filters are applied before rows are made. The heads of records
are read as one structured array, and payloads are cut out of the run by one native call. Only runs whose checksums were
checked become rows. A batch owns its memory, so the buffer of the run may be reused.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from waltz_spark.log.arrow import BATCH_BYTES_MAX, SCHEMA, TIME, group_column, lock_column, time_column
from waltz_spark.table.pushdown import EVERYTHING, UNFILTERED, Filters
from waltzd.errors import BadArgument, TooLarge
from waltzd.format.checksum import I64
from waltzd.format.key_index import marks_of
from waltzd.format.layout import FileHeader
from waltzd.format.record import HEAD_BYTES, NO_TIME, TRAILER_BYTES, HeadArray, Run, heads, no_locks, trailers


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The values that are equal for all records of a run and not in the records."""

    partition: int
    source: str
    """Description of the origin, for people."""
    segment: FileHeader | None = None
    """Header of the segment; None if the origin does not know segments."""


class _Rows:
    """A run, or some of its records, with lazily computed values that several columns share."""

    def __init__(self, run: Run, groups: I64 | None, around: Surroundings, chosen: I64 | None) -> None:
        self.run = run
        self.groups = groups
        self.around = around
        self.chosen = chosen
        self.count = len(run) if chosen is None else len(chosen)

    @cached_property
    def heads(self) -> HeadArray:
        return self.pick(heads(self.run))

    def pick(self, values: NDArray[Any]) -> NDArray[Any]:
        return values if self.chosen is None else values[self.chosen]

    @property
    def ids(self) -> I64:
        """Ids of the rows; in a checked run they are consecutive."""
        if self.chosen is None:
            return np.arange(self.run.first_id, self.run.first_id + self.count, dtype=np.int64)
        return self.chosen + self.run.first_id

    def same(self, value: object, kind: pa.DataType) -> pa.Array:
        return pa.repeat(pa.scalar(value, kind), self.count)

    def payloads(self) -> pa.Array:
        run = self.run
        records = pa.Array.from_buffers(
            pa.binary(), len(run), [None, pa.py_buffer(run.bounds.astype(np.int32)), pa.py_buffer(run.data)]
        )
        if self.chosen is not None:
            records = records.take(pa.array(self.chosen))
        return pc.binary_slice(records, HEAD_BYTES, -TRAILER_BYTES)

    def times(self) -> pa.Array:
        return time_column(None if self.run.times is None else self.pick(self.run.times), self.count)

    def locks(self) -> pa.Array:
        found = lock_column(self.run.locks, self.run.times, len(self.run))
        return found if self.chosen is None else found.take(pa.array(self.chosen))

    def group(self) -> pa.Array:
        return group_column(None if self.groups is None else self.pick(self.groups), self.count)


def _field(name: str) -> Callable[[_Rows], pa.Array]:
    return lambda rows: pa.array(rows.heads[name].astype(np.int32))


def _bits(values: NDArray[Any]) -> pa.Array:
    """Return checksums as signed 32 bits, because Arrow on the JVM has no unsigned integers."""
    return pa.array(values.astype(np.uint32).view(np.int32))


def _segment_created(rows: _Rows) -> pa.Array:
    segment = rows.around.segment
    return rows.same(None if segment is None else datetime.fromtimestamp(segment.created_ms / 1000, UTC), TIME)


def _segment_first(rows: _Rows) -> pa.Array:
    return rows.same(None if rows.around.segment is None else rows.around.segment.first_id, pa.int64())


_MAKERS: Mapping[str, Callable[[_Rows], pa.Array]] = {
    "partition": lambda rows: rows.same(rows.around.partition, pa.int32()),
    "txid": lambda rows: pa.array(rows.ids),
    "client_id": _field("client"),
    "generation": _field("generation"),
    "req_partition": _field("partition"),
    "seq": _field("sequence"),
    "header": _field("header"),
    "crc": lambda rows: _bits(rows.heads["data_crc"]),
    "data": _Rows.payloads,
    "time": _Rows.times,
    "locks": _Rows.locks,
    "group": _Rows.group,
    "record_crc": lambda rows: _bits(rows.pick(trailers(rows.run))),
    "record_bytes": lambda rows: pa.array(rows.pick(np.diff(rows.run.bounds)).astype(np.int32)),
    "segment_first_txid": _segment_first,
    "segment_created": _segment_created,
    "source": lambda rows: rows.same(rows.around.source, pa.string()),
}

METADATA = pa.schema(
    [
        ("record_crc", pa.int32()),
        ("record_bytes", pa.int32()),
        ("segment_first_txid", pa.int64()),
        ("segment_created", TIME),
        ("source", pa.string()),
    ]
)
"""What `includeMetadata` adds. What only the segment says differs among replicas."""

EVERY = pa.schema([*SCHEMA, *METADATA])
assert set(EVERY.names) == set(_MAKERS)


def wanted(names: str | None, *, metadata: bool) -> pa.Schema:
    """Return the columns of the option `columns`; without it, all columns, with or without metadata."""
    if names is None:
        return EVERY if metadata else SCHEMA
    listed = [name.strip() for name in names.split(",")]
    return pa.schema([_known(name, "the option columns") for name in _once(listed)])


def _once(names: Sequence[str]) -> Sequence[str]:
    twice = {name for name in names if [other.lower() for other in names].count(name.lower()) > 1}
    if twice:
        raise BadArgument(f"the column {min(twice)} is asked for twice", not_done="nothing was read")
    return names


def _known(name: str, asked_by: str) -> pa.Field:
    lower = name.lower()
    if lower in EVERY.names:
        return EVERY.field(lower)
    near = difflib.get_close_matches(lower, EVERY.names, n=1)
    hint = f"; the nearest is {near[0]}" if near else ""
    raise BadArgument(
        f"{asked_by} names a column {name!r} that a log does not have{hint}",
        not_done="nothing was read",
        next_step=f"choose from {', '.join(EVERY.names)}",
    )


class Projection:
    """Converts runs to batches with the columns of one schema, in its order and with its names, which may differ in
    case."""

    def __init__(self, schema: pa.Schema) -> None:
        if not schema.names:
            raise BadArgument("the schema names no column", not_done="nothing was read", next_step="name at least one")
        for field in schema:
            known = _known(field.name, "the schema")
            if field.type != known.type:
                raise BadArgument(
                    f"the schema says that {field.name} is {field.type}; it is {known.type}",
                    not_done="nothing was read",
                    next_step="name the type that the column has, and cast it in the query",
                )
        _once(schema.names)
        self.schema = schema
        self._columns = [name.lower() for name in schema.names]

    @property
    def asks_for_segments(self) -> bool:
        return any(name.startswith("segment_") for name in self._columns)

    @property
    def asks_for_locks(self) -> bool:
        return "locks" in self._columns

    @property
    def asks_for_groups(self) -> bool:
        return "group" in self._columns

    def batch(
        self, run: Run, around: Surroundings, filters: Filters = UNFILTERED, groups: I64 | None = None
    ) -> pa.RecordBatch:
        """Return the records of a checked run that pass the filters. The filter on partitions was applied before."""
        if len(run.data) > BATCH_BYTES_MAX:
            raise TooLarge(
                f"{len(run.data)} bytes of records from id {run.first_id} of partition {around.partition} on do not fit one"
                f" Arrow batch of {BATCH_BYTES_MAX} bytes",
                not_done="no batch was made",
                next_step="read fewer records at once",
            )
        rows = _Rows(run, groups, around, _chosen(run, filters))
        return pa.RecordBatch.from_arrays([_MAKERS[name](rows) for name in self._columns], schema=self.schema)


def _chosen(run: Run, filters: Filters) -> I64 | None:
    """Return the indexes of the records that pass the filters; None for all records."""
    if filters.txid == filters.header == filters.time == EVERYTHING and filters.lock is None:
        return None
    ids = np.arange(run.first_id, run.first_id + len(run), dtype=np.int64)
    is_in = filters.txid.hold(ids)
    if filters.header != EVERYTHING:
        is_in &= filters.header.hold(heads(run)["header"].astype(np.int64))
    if filters.time != EVERYTHING:
        is_in &= filters.time.hold(np.full(len(run), NO_TIME) if run.times is None else run.times)
    if filters.lock is not None:
        marks = marks_of(run.first_id, run.locks or no_locks(len(run)))
        is_in &= np.isin(ids, marks.ids[marks.locks == np.uint64(filters.lock)])
    return None if is_in.all() else np.flatnonzero(is_in)


def columns_of(names: Iterable[str]) -> Projection:
    return Projection(pa.schema([_known(name, "the list") for name in names]))


def record_batch(run: Run, partition: int, groups: I64 | None = None) -> pa.RecordBatch:
    """Return the records of a checked run as rows of `SCHEMA`. `groups` is from `waltz_spark.log.arrow`."""
    return _WHOLE.batch(run, Surroundings(partition=partition, source=""), groups=groups)


_WHOLE = Projection(SCHEMA)
