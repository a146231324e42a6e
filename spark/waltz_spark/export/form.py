"""The Parquet files of an export: writing rows to them, and reading them again.

Payloads have no dictionaries and no statistics, because both cost more than they save. Columns with few different values
are dictionaries, and ids that rise by one take a few bits each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waltz_spark.log.arrow import RECORD, SCHEMA
from waltzd.errors import BadArgument
from waltzd.errors.operations import ExportDamaged

ROW_GROUP_BYTES, ROW_GROUP_ROWS = 64 << 20, 1 << 20
"""Size of a row group: it is held in memory until it is written, and readers skip as much by its statistics."""
READ_BYTES = 16 << 20
"""Payload bytes of one batch that a reader makes."""
GROUP_BYTES_MAX = 1 << 30
"""Largest row group that is read, in bytes of the log's columns."""
_DELTA_PACKED = ("txid", "seq")
_NO_DICTIONARY = ("txid", "seq", "crc", "data", "locks", "group")
_OF_LOCKS = ("locks.list.element.lock", "locks.list.element.mode")
_LOCK_BYTES = 12
"""Bytes of one lock in memory: its id, or its mode and where that ends."""
_RATIO = 3
"""Bytes of log for a byte of a compressed file, roughly: only for guessing sizes."""
_CODECS = ("gzip", "lz4", "none", "snappy", "zstd")
_LEVELS = {"zstd": range(1, 23), "gzip": range(1, 10)}


@dataclass(frozen=True, kw_only=True)
class Form:
    format: str
    """`parquet`, or `delta`: the same files, and a Delta table that lists them."""
    compression: str
    """Codec, or codec and level as in `zstd:3`."""

    @property
    def is_table(self) -> bool:
        return self.format == "delta"

    @property
    def codec(self) -> str:
        return self.compression.partition(":")[0]

    @property
    def level(self) -> int | None:
        text = self.compression.partition(":")[2]
        return int(text) if text else None

    def guess(self, data_bytes: int) -> int:
        """Estimate the size of the files for `data_bytes` of records."""
        return data_bytes // _RATIO if self.codec != "none" else data_bytes


def form_of(format_: str, compression: str | None) -> Form:
    """Return the form; raise `BadArgument` for a codec or a level that Parquet does not have."""
    said = compression or "zstd:3"
    codec, _, level = said.partition(":")
    if codec not in _CODECS:
        raise BadArgument(
            f"--compression {said}: {format_} has no {codec}",
            not_done="nothing was written",
            next_step=f"choose one of {', '.join(_CODECS)}",
        )
    levels = _LEVELS.get(codec, range(0))
    if level and (not level.isdecimal() or int(level) not in levels):
        can = f"{codec} has levels {levels.start} to {levels.stop - 1}" if levels else "leave it out"
        raise BadArgument(f"--compression {said}: there is no such level", not_done="nothing was written", next_step=can)
    return Form(format=format_, compression=said)


class Sink(Protocol):
    def write(self, data: Any, /) -> int | None: ...


class ParquetFile:
    """A file under construction: batches are gathered until they are worth a row group."""

    def __init__(self, form: Form, sink: Sink, schema: pa.Schema, metadata: Mapping[str, str]) -> None:
        import pyarrow.parquet as pq

        self._schema = schema
        self._writer = pq.ParquetWriter(
            sink,
            schema.with_metadata(dict(metadata)),
            compression=form.codec,
            compression_level=form.level,
            use_dictionary=[*(name for name in schema.names if name not in _NO_DICTIONARY), _OF_LOCKS[1]],
            column_encoding=dict.fromkeys(_DELTA_PACKED, "DELTA_BINARY_PACKED"),
            write_statistics=[name for name in schema.names if name != "data"],
        )
        self._held: list[pa.RecordBatch] = []
        self._bytes = self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        if self._held and self._rows + batch.num_rows > ROW_GROUP_ROWS:
            self._flush()
        self._held.append(batch)
        self._bytes += batch.nbytes
        self._rows += batch.num_rows
        if self._bytes >= ROW_GROUP_BYTES or self._rows >= ROW_GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            table = pa.Table.from_batches([batch.cast(self._schema) for batch in self._held], self._schema)
            self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        self._held, self._bytes, self._rows = [], 0, 0

    def close(self, metadata: Mapping[str, str]) -> None:
        """Finish the file. `metadata`: key-values that are known only at the end."""
        self._flush()
        self._writer.add_key_value_metadata(dict(metadata))
        self._writer.close()


def check_columns(form: Form, schema: pa.Schema) -> None:
    """Raise `BadArgument` for a column of a decoder that Parquet cannot hold. A row is written to memory to find out."""
    for field in schema:
        if field.name in SCHEMA.names:
            continue
        column = pa.schema([field])
        try:
            file = ParquetFile(form, BytesIO(), column, {})
            file.write(pa.RecordBatch.from_arrays([pa.nulls(1, field.type)], schema=column))
            file.close({})
        except pa.ArrowException as error:
            raise BadArgument(
                f"parquet has no place for the column {field.name} ({field.type}) of the decoder: {error}",
                not_done="nothing was written",
                next_step="let the decoder make a simpler type",
            ) from error


def read_batches(source: pa.NativeFile, place: str) -> Iterator[pa.RecordBatch]:
    """Yield the columns of the log (`decode.SCHEMA`) of a file, whatever else it has. `place`: its path, for messages."""
    try:
        yield from _read(source, place)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ExportDamaged(f"{place} cannot be read: {' '.join(str(error).split())}") from error


def _read(source: pa.NativeFile, place: str) -> Iterator[pa.RecordBatch]:
    """Read a file that may be forged: a few kilobytes can expand to gigabytes of equal values. So payloads are read as
    dictionaries and expanded a few megabytes at a time, and locks are counted before."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(source, read_dictionary=["data"])
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        columns = [group.column(at) for at in range(group.num_columns)]
        size = sum(
            max(each.total_uncompressed_size, _LOCK_BYTES * each.num_values if each.path_in_schema in _OF_LOCKS else 0)
            for each in columns
            if each.path_in_schema.split(".")[0] in SCHEMA.names
        )
        if size > GROUP_BYTES_MAX:
            raise ExportDamaged(f"{place} has a row group of {size} bytes; no export makes one above {GROUP_BYTES_MAX}")
    for batch in file.iter_batches(batch_size=1 << 16, columns=SCHEMA.names):
        for part in _decoded_parts(batch):
            found = part.select(SCHEMA.names).cast(SCHEMA)
            if any(found.column(name).null_count for name in RECORD.names):
                raise ExportDamaged(f"{place} has rows without a value in a column of the log")
            yield found


def _decoded_parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    at = batch.schema.get_field_index("data")
    column = batch.column(at)
    if not pa.types.is_dictionary(column.type):
        yield batch
        return
    ends = np.cumsum(pc.binary_length(column.dictionary).take(column.indices).fill_null(0).to_numpy().astype(np.int64))
    start = 0
    while start < batch.num_rows:
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + READ_BYTES, "right")))
        part = batch.slice(start, stop - start)
        yield part.set_column(at, "data", part.column(at).dictionary_decode())
        start = stop
