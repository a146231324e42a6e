"""The columns of a log as Arrow types, from records and back, without a Python object for each.

`encode` makes records of columns again.

The checksum of a record is computed from those of its head and of its payload, which is a column, so payloads are not read.
A payload that was changed therefore results in a record with a wrong checksum. In the other direction, a log can contain a
record whose payload does not match its client's checksum, with a correct checksum of its own; only `resealed`, which reads
all bytes, restores it. Its result has to be proven by something else, as the checksums in the manifest of an export.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from waltz_spark.log.origin import Extent, Origin, Span
from waltzd.errors import TooLarge
from waltzd.errors.operations import ExportDamaged
from waltzd.format.batch import Flags
from waltzd.format.checksum import I64, crc32, crc_of_rows, shift, suspect_blocks
from waltzd.format.record import (
    HEAD,
    HEAD_BYTES,
    NO_TIME,
    OVERHEAD_BYTES,
    TRAILER_BYTES,
    LockColumns,
    Run,
    empty_run,
    no_locks,
    trailers,
)
from waltzd.protocol.locks import Mode

RECORD = pa.schema(
    [
        ("partition", pa.int32()),
        ("txid", pa.int64()),
        ("client_id", pa.int32()),
        ("generation", pa.int32()),
        ("req_partition", pa.int32()),
        ("seq", pa.int32()),
        ("header", pa.int32()),
        ("crc", pa.int32()),
        ("data", pa.binary()),
    ]
)
"""Columns from the record itself. `crc` is the stored checksum of the payload as signed 32 bits, because Arrow on the JVM
has no unsigned integers."""

TIME = pa.timestamp("us", tz="UTC")
LOCKS = pa.list_(pa.field("element", pa.struct([("lock", pa.int64()), ("mode", pa.string())])))
BESIDE = pa.schema([("time", TIME), ("locks", LOCKS), ("group", pa.int64())])
"""Columns from the record's batch; null in format 0, which has no batches. `lock` is the hash as signed 64 bits; `group` is
the id of the first transaction of its group, null without a group."""

SCHEMA = pa.schema([*RECORD, *BESIDE])
NO_GROUP = -1

BATCH_BYTES_MAX = (1 << 31) - 1
"""Arrow's `binary` addresses its bytes with 32-bit signed offsets."""


def time_column(times: I64 | None, count: int) -> pa.Array:
    if times is None:
        return pa.nulls(count, TIME)
    return pa.array(times, pa.int64(), mask=times == NO_TIME).cast(TIME)


MODES = pa.array([mode.name for mode in sorted(Mode)])
assert min(Mode) == 1


def lock_column(locks: LockColumns | None, times: I64 | None, count: int) -> pa.Array:
    """Return the column of locks: an empty list for a transaction without locks; null if they are unknown."""
    if locks is None or times is None:
        return pa.nulls(count, LOCKS)
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(locks.counts, out=offsets[1:])
    modes = MODES.take(pa.array(locks.modes.astype(np.int32) - 1))
    each = pa.StructArray.from_arrays([pa.array(locks.ids.view(np.int64)), modes], fields=list(LOCKS.value_type))
    unknown = times == NO_TIME
    mask = pa.array(unknown) if unknown.any() else None
    return pa.ListArray.from_arrays(pa.array(offsets), each, type=LOCKS, mask=mask)


def group_column(groups: I64 | None, count: int) -> pa.Array:
    if groups is None:
        return pa.nulls(count, pa.int64())
    return pa.array(groups, pa.int64(), mask=groups == NO_GROUP)


_FIELDS = {
    "id": "txid",
    "client": "client_id",
    "generation": "generation",
    "partition": "req_partition",
    "sequence": "seq",
    "header": "header",
}


def encode(batch: pa.RecordBatch) -> Run:
    """Return the records of rows of one partition with consecutive ids."""
    _check(batch)
    count = batch.num_rows
    if count == 0:
        return empty_run(0)
    payloads = batch.column("data")
    lengths = _numbers(pc.binary_length(payloads)).astype(np.int64)
    size = int(lengths.sum()) + OVERHEAD_BYTES * count
    if size > BATCH_BYTES_MAX:
        raise TooLarge(
            f"{count} records of {size} bytes do not fit one Arrow array of {BATCH_BYTES_MAX} bytes",
            not_done="no record was made",
            next_step="encode fewer rows at once",
        )
    data_crcs = _numbers(batch.column("crc")).view(np.uint32)
    heads = np.zeros(count, HEAD)
    for field, name in _FIELDS.items():
        heads[field] = _numbers(batch.column(name))
    heads["length"], heads["data_crc"] = lengths, data_crcs
    rows = heads.view(np.uint8).reshape(count, HEAD_BYTES)
    seals = (shift(crc_of_rows(rows), lengths) ^ data_crcs).astype(">u4")
    records = pc.binary_join_element_wise(_fixed(rows, HEAD_BYTES), payloads, _fixed(seals, TRAILER_BYTES), b"")
    _, offsets, data = records.buffers()
    bounds = np.frombuffer(offsets, np.int32, count + 1, records.offset * 4).astype(np.int64)
    first, last = int(bounds[0]), int(bounds[-1])
    return Run(int(heads["id"][0]), memoryview(data)[first:last], bounds - first)


def resealed(run: Run) -> Run:
    """Return the records with checksums computed from their bytes, in one pass; copy only if a checksum differs."""
    suspects = suspect_blocks(run.data, run.bounds[1:], trailers(run))
    if not suspects:
        return run
    data = bytearray(run.data)
    view = memoryview(data)
    for first, last in suspects:
        for start, end in pairwise(run.bounds[first : last + 2].tolist()):
            data[end - TRAILER_BYTES : end] = crc32(view[start : end - TRAILER_BYTES]).to_bytes(TRAILER_BYTES, "big")
    return Run(run.first_id, view, run.bounds)


def beside(run: Run, batch: pa.RecordBatch) -> Run:
    """Return a run with the times, groups and locks of the rows that it was made of."""
    times = _numbers(batch.column("time").cast(pa.int64()).fill_null(NO_TIME)).astype(np.int64)
    if (times == NO_TIME).all():
        return run
    groups = _numbers(batch.column("group").fill_null(NO_GROUP)).astype(np.int64)
    ids = np.arange(run.first_id, run.first_id + len(run), dtype=np.int64)
    follows = (groups != NO_GROUP) & (groups != ids)
    return replace(run, times=times, follows=follows if follows.any() else None, locks=_locks(batch.column("locks")))


def _locks(column: pa.ListArray) -> LockColumns:
    each = column.flatten()
    modes = pc.index_in(each.field("mode"), MODES)
    if modes.null_count or each.field("lock").null_count:
        raise ExportDamaged("the column locks has a lock without an id, or in a mode that there is not")
    return LockColumns(
        _numbers(column.value_lengths().fill_null(0)).astype(np.int64),
        _numbers(each.field("lock")).astype(np.int64).view(np.uint64),
        (_numbers(modes) + 1).astype(np.uint8),
    )


class Proof:
    """The checksums of consecutive records, independent of how they are cut into runs."""

    def __init__(self) -> None:
        self.data_bytes = 0
        """Bytes of the records in the log."""
        self.crc = 0
        """CRC-32 of these bytes."""
        self.times: tuple[int, int] | None = None
        """First and last time, in µs since 1970; None if no record has a time, as in format 0."""
        self._crcs = [0] * 5

    def add(self, run: Run) -> None:
        self.crc, self.data_bytes = crc32(run.data, self.crc), self.data_bytes + len(run.data)
        count = len(run)
        times = np.full(count, NO_TIME, np.int64) if run.times is None else run.times
        follows = np.zeros(count, np.bool_) if run.follows is None else run.follows
        locks = no_locks(count) if run.locks is None else run.locks
        known = times[times != NO_TIME]
        if len(known):
            self.times = int(known[0]) if self.times is None else self.times[0], int(known[-1])
        columns = (times.astype(">i8"), follows, locks.counts.astype(">u4"), locks.ids.astype(">u8"), locks.modes)
        self._crcs = [crc32(column.tobytes(), crc) for column, crc in zip(columns, self._crcs, strict=True)]

    @property
    def beside(self) -> int | None:
        """CRC-32 of times, groups and locks; None if no record has a time."""
        return None if self.times is None else crc32(struct.pack(">5I", *self._crcs))


def _check(batch: pa.RecordBatch) -> None:
    for field in RECORD:
        at = batch.schema.get_field_index(field.name)
        if at < 0:
            raise ExportDamaged(f"there is no column {field.name}, and a record cannot be made without it")
        column = batch.column(at)
        if column.type != field.type:
            raise ExportDamaged(f"the column {field.name} is {column.type}; a record needs {field.type}")
        if column.null_count:
            raise ExportDamaged(f"the column {field.name} has rows without a value, and a record has no such thing")
    if batch.num_rows == 0:
        return
    ids, partitions = _numbers(batch.column("txid")), _numbers(batch.column("partition"))
    if ids[0] < 0 or (ids[1:] != ids[:-1] + 1).any():
        raise ExportDamaged(f"the ids from {ids[0]} on do not follow each other")
    if (partitions != partitions[0]).any():
        raise ExportDamaged(f"rows of partition {partitions.min()} and {partitions.max()} are in one batch")


def _numbers(column: pa.Array) -> NDArray[Any]:
    found: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return found


def _fixed(values: NDArray[Any], width: int) -> pa.Array:
    """Return the bytes of each row as an Arrow value."""
    offsets = np.arange(0, (len(values) + 1) * width, width, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(values.tobytes())])


LOOK_BACK = 64
"""Records that are read before the first one to find the start of its group; doubled with each further read."""


class Grouped(NamedTuple):
    """The group of each transaction: the id of the first transaction that it was appended with.

    A run has a flag for each record that continues the group of the one before, and one flag for the record after its
    end. A read may begin within a group; then earlier records are read to find its first one. An extent never begins
    within a group, because batches are not split.
    """

    run: Run
    groups: I64 | None
    """First id of each record's group, or `NO_GROUP`; None if no record is in a group."""


def read_grouped(origin: Origin, extent: Extent, span: Span, *, batch_bytes: int, with_locks: bool) -> Iterator[Grouped]:
    """Yield the runs of `origin.read`, with groups."""

    def read(some: Span) -> Iterator[Run]:
        return origin.read(extent, some, batch_bytes=batch_bytes, with_locks=with_locks)

    return grouped(read, extent.span, span)


def grouped(read: Callable[[Span], Iterator[Run]], whole: Span, span: Span) -> Iterator[Grouped]:
    """Yield the runs of `read` for a span within `whole`, with groups."""
    begin: int | None = None
    for run in read(span):
        if begin is None:
            goes_on = run.follows is not None and bool(run.follows[0])
            begin = _begin(read, whole.first, run.first_id) if goes_on else NO_GROUP
        groups, begin = groups_of(run, begin)
        yield Grouped(run, groups)


def _begin(read: Callable[[Span], Iterator[Run]], first_id: int, id_: int) -> int:
    """Return the first id, at or above `first_id`, of the group that continues at `id_`."""
    count, last = LOOK_BACK, id_ - 1
    while last >= first_id:
        start, found = max(first_id, last - count + 1), NO_GROUP
        for run in read(Span(start, last)):
            firsts = np.arange(len(run)) if run.follows is None else np.flatnonzero(~run.follows)
            if len(firsts):
                found = run.first_id + int(firsts[-1])
        if found != NO_GROUP:
            return found
        last, count = start - 1, 2 * count
    return first_id


def groups_of(run: Run, begin: int) -> tuple[I64 | None, int]:
    """Return the group of each record, and the group that a following record would continue. Pure.

    `begin` is the first id of the group that the first record continues."""
    follows: Flags | None = run.follows
    if follows is None or not follows.any():
        if not run.goes_on:
            return None, run.last_id
        groups = np.full(len(run), NO_GROUP, np.int64)
        groups[-1] = run.last_id
        return groups, run.last_id
    ids = np.arange(run.first_id, run.first_id + len(run), dtype=np.int64)
    firsts = np.maximum.accumulate(np.where(follows, begin, ids))
    is_in = follows.copy()
    is_in[:-1] |= follows[1:]
    is_in[-1] |= run.goes_on
    return np.where(is_in, firsts, NO_GROUP), int(firsts[-1])
