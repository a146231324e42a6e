"""Arrow columns as records: the exact inverse of `waltz_spark.log.decode`, without a Python object for each record.

The checksum of a record is computed from those of its head and of its payload, which is a column, so payloads are not read.
A payload that was changed therefore results in a record with a wrong checksum. In the other direction, a log can contain a
record whose payload does not match its client's checksum, with a correct checksum of its own; only `resealed`, which reads
all bytes, restores it. Its result has to be proven by something else, as the checksums in the manifest of an export.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from waltz_spark.log.decode import BATCH_BYTES_MAX, MODES, NO_GROUP, RECORD
from waltzd.errors import TooLarge
from waltzd.errors.operations import ExportDamaged
from waltzd.format.checksum import crc32, crc_of_rows, shift, suspect_blocks
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
