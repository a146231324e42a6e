"""The files of an export: how rows become one of them, and how they come out of it again.

What a format can do is in one table. Payloads are never put in dictionaries and get no statistics, because both cost more
than they give; the columns that hold nearly always the same value are nothing but a dictionary, and ids that rise by one
take a few bits each.

Neither JSON nor CSV can hold bytes, so they are written as base64, wherever they stand, and a payload comes back by
`bytes_of`, exactly. Null stays null; NaN and the infinities, which JSON does not know, become null there. CSV has no place
for lists: locks are in it as JSON has them. The columns of a log are written without a Python object per record; so are
those of a decoder, but for floating point numbers and columns that nest, which take the way of `json.dumps`.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from waltz_spark.log.decode import BATCH, BESIDE, LOCKS, LOSSLESS, RECORD, SCHEMA
from waltzd.errors import BadArgument, ExportDamaged

ROW_GROUP_BYTES, ROW_GROUP_ROWS = 64 << 20, 1 << 20
"""So much is held in memory until it is written; readers can skip as much by its statistics."""
TEXT_BLOCK_BYTES = 16 << 20
ROW_TEXT_MAX = 256 << 20
GROUP_BYTES_MAX = 1 << 30
"""Of the log's columns. What Spark writes has an eighth of it unless it was told otherwise."""
_DELTA = ("txid", "seq")
_NO_DICTIONARY = ("txid", "seq", "crc", "data", "locks", "group", BATCH)
_NO_STATISTICS = ("data", BATCH)
_OF_LOCKS = ("locks.list.element.lock", "locks.list.element.mode")
_LOCK_BYTES = 12
"""Of one lock in memory: its id, or its mode and where that ends."""
_WITH_LEVELS = ("parquet", "delta")
"""What PyArrow can write at a level."""
_LEVELS = {"zstd": range(1, 23), "gzip": range(1, 10), "zlib": range(1, 10)}


@dataclass(frozen=True, kw_only=True)
class _Kind:
    suffix: str
    codecs: tuple[str, ...]
    """The first is the default."""
    ratio: float
    """About so many bytes of log are one byte of a file: for guessing sizes, for nothing else."""


_PARQUET = _Kind(suffix=".parquet", codecs=("zstd:3", "zstd", "snappy", "gzip", "lz4", "none"), ratio=3)
KINDS: Mapping[str, _Kind] = {
    "parquet": _PARQUET,
    "delta": _PARQUET,
    "orc": _Kind(suffix=".orc", codecs=("zstd", "snappy", "zlib", "lz4", "none"), ratio=3),
    "json": _Kind(suffix=".json", codecs=("gzip", "zstd", "none"), ratio=2.5),
    "csv": _Kind(suffix=".csv", codecs=("gzip", "zstd", "none"), ratio=3),
}
"""Delta is Parquet whose files are in a table as well, which is none of a file's business: `delta`."""
_STREAM_SUFFIX = {"gzip": ".gz", "zstd": ".zst", "none": ""}


@dataclass(frozen=True, kw_only=True)
class Form:
    format: str
    compression: str

    @property
    def suffix(self) -> str:
        kind = KINDS[self.format]
        return kind.suffix + (_STREAM_SUFFIX[self.codec] if self.is_text else "")

    @property
    def is_table(self) -> bool:
        """Whether a table beside the files says which of them count, too."""
        return self.format == "delta"

    @property
    def is_text(self) -> bool:
        return self.format in ("json", "csv")

    @property
    def codec(self) -> str:
        return self.compression.partition(":")[0]

    @property
    def level(self) -> int | None:
        text = self.compression.partition(":")[2]
        return int(text) if text else None

    def guess(self, data_bytes: int) -> int:
        """How large the files of so many bytes of records may be."""
        return int(data_bytes / (KINDS[self.format].ratio if self.codec != "none" else 1))


def form_of(format_: str, compression: str | None) -> Form:
    kind = KINDS[format_]
    said = compression or kind.codecs[0]
    codec, _, level = said.partition(":")
    known = sorted({name.partition(":")[0] for name in kind.codecs})
    if codec not in known:
        raise BadArgument(
            f"--compression {said}: {format_} has no {codec}",
            not_done="nothing was written",
            next_step=f"choose one of {', '.join(known)}",
        )
    levels = _LEVELS.get(codec, range(0)) if format_ in _WITH_LEVELS else range(0)
    if level and (not level.isdecimal() or int(level) not in levels):
        can = f"{codec} has levels {levels.start} to {levels.stop - 1}" if levels else "leave it out"
        raise BadArgument(f"--compression {said}: there is no such level", not_done="nothing was written", next_step=can)
    return Form(format=format_, compression=said)


class Sink(Protocol):
    def write(self, data: Any, /) -> int | None: ...


class RowWriter(Protocol):
    def write(self, batch: pa.RecordBatch) -> None: ...
    def close(self, metadata: Mapping[str, str]) -> None:
        """`metadata`: what is known only at the end; formats without a place for it leave it out."""
        ...


def open_writer(form: Form, sink: Sink, schema: pa.Schema, metadata: Mapping[str, str]) -> RowWriter:
    match form.format:
        case "parquet" | "delta":
            return _Parquet(form, sink, schema.with_metadata(dict(metadata)))
        case "orc":
            return _orc(form, sink, schema)
        case "json":
            return _Json(form, sink)
        case _:
            return _Csv(form, sink, schema)


class _Gathering:
    """Batches until they are worth a row group."""

    def __init__(self, schema: pa.Schema, writer: Any) -> None:
        self._schema = schema
        self._writer = writer
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
            self._put(pa.Table.from_batches([batch.cast(self._schema) for batch in self._held], self._schema))
        self._held, self._bytes, self._rows = [], 0, 0

    def _put(self, table: pa.Table) -> None:
        self._writer.write(table)

    def close(self, metadata: Mapping[str, str]) -> None:
        self._flush()
        self._writer.close()


class _Parquet(_Gathering):
    def __init__(self, form: Form, sink: Sink, schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        writer = pq.ParquetWriter(
            sink,
            schema,
            compression=form.codec,
            compression_level=form.level,
            use_dictionary=[*(name for name in schema.names if name not in _NO_DICTIONARY), _OF_LOCKS[1]],
            column_encoding=dict.fromkeys(_DELTA, "DELTA_BINARY_PACKED"),
            write_statistics=[name for name in schema.names if name not in _NO_STATISTICS],
        )
        super().__init__(schema, writer)

    def _put(self, table: pa.Table) -> None:
        self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS)

    def close(self, metadata: Mapping[str, str]) -> None:
        self._flush()
        self._writer.add_key_value_metadata(dict(metadata))
        super().close(metadata)


def _orc(form: Form, sink: Sink, schema: pa.Schema) -> _Gathering:
    from pyarrow import orc

    codec = "uncompressed" if form.codec == "none" else form.codec
    return _Gathering(schema, orc.ORCWriter(sink, compression=codec, dictionary_key_size_threshold=0.0))


def _stream(form: Form, sink: Sink) -> Any:
    raw = pa.PythonFile(sink, mode="w")
    return raw if form.codec == "none" else pa.CompressedOutputStream(raw, form.codec)


class _Json:
    def __init__(self, form: Form, sink: Sink) -> None:
        self._stream = _stream(form, sink)

    def write(self, batch: pa.RecordBatch) -> None:
        self._stream.write(json_lines(batch))

    def close(self, metadata: Mapping[str, str]) -> None:
        self._stream.close()


class _Csv:
    def __init__(self, form: Form, sink: Sink, schema: pa.Schema) -> None:
        from pyarrow import csv

        nested = [field.name for field in schema if pa.types.is_nested(field.type) and not _are_locks(field)]
        if nested:
            raise BadArgument(
                f"CSV has no place for the column {nested[0]}, which nests",
                not_done="nothing was written",
                next_step="choose parquet, orc or json, or a decoder with plain columns",
            )
        self._stream = _stream(form, sink)
        self._writer = csv.CSVWriter(self._stream, text_schema(schema))

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(as_text(batch))

    def close(self, metadata: Mapping[str, str]) -> None:
        self._writer.close()
        self._stream.close()


def check_rows(form: Form, schema: pa.Schema) -> None:
    """Whether the format has a place for each column: one row is written to nowhere, with nothing in the columns of a
    decoder. All columns together first, because that is nearly always all that there is to do."""
    try:
        _try(form, schema)
    except pa.ArrowException as error:
        for field in schema:
            if field.name not in LOSSLESS.names and not _takes(form, field):
                raise BadArgument(
                    f"{form.format} has no place for the column {field.name} ({field.type}) of the decoder: {error}",
                    not_done="nothing was written",
                    next_step="choose parquet, or let the decoder make a simpler type",
                ) from error
        raise BadArgument(f"{form.format} cannot be written: {error}", not_done="nothing was written") from error


def _takes(form: Form, field: pa.Field) -> bool:
    try:
        _try(form, pa.schema([field]))
    except pa.ArrowException:
        return False
    return True


def _try(form: Form, schema: pa.Schema) -> None:
    nothing = {field.name: pa.array([b"" if pa.types.is_binary(field.type) else 0], field.type) for field in RECORD}
    columns = [nothing[field.name] if field.name in nothing else pa.nulls(1, field.type) for field in schema]
    writer = open_writer(form, io.BytesIO(), schema, {})
    writer.write(pa.RecordBatch.from_arrays(columns, schema=schema))
    writer.close({})


# -- reading -----------------------------------------------------------------------------------------------------------


def read_batches(form: Form, source: pa.NativeFile, place: str) -> Iterator[pa.RecordBatch]:
    """The columns of the log (`decode.SCHEMA`) of a file, and what a lossless one has of batches, whatever else it has.
    `place`: its path, for messages."""
    try:
        yield from _READERS[form.format](form, source, place)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ExportDamaged(f"{place} cannot be read: {' '.join(str(error).split())}") from error


def _read_parquet(_form: Form, source: pa.NativeFile, place: str) -> Iterator[pa.RecordBatch]:
    """A few kilobytes can stand for gigabytes: the same value again and again. So payloads, and what stands in front of
    batches, are taken as dictionaries and spelled out a few megabytes at a time; locks are counted before."""
    import pyarrow.parquet as pq

    names = pq.ParquetFile(source).schema_arrow.names
    wanted = LOSSLESS.names if BATCH in names else SCHEMA.names
    file = pq.ParquetFile(source, read_dictionary=[name for name in ("data", BATCH) if name in names])
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        columns = [group.column(place) for place in range(group.num_columns)]
        size = sum(
            max(
                column.total_uncompressed_size, _LOCK_BYTES * column.num_values if column.path_in_schema in _OF_LOCKS else 0
            )
            for column in columns
            if column.path_in_schema.split(".")[0] in wanted
        )
        if size > GROUP_BYTES_MAX:
            raise ExportDamaged(f"{place} has a row group of {size} bytes; no export makes one above {GROUP_BYTES_MAX}")
    for batch in file.iter_batches(batch_size=1 << 16, columns=wanted):
        for part in _spelled_out(batch):
            yield _right(part, place)


def _spelled_out(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    numbers = [at for at, field in enumerate(batch.schema) if pa.types.is_dictionary(field.type)]
    if not numbers:
        yield batch
        return
    lengths = np.zeros(batch.num_rows, np.int64)
    for number in numbers:
        column = batch.column(number)
        lengths += pc.binary_length(column.dictionary).take(column.indices).fill_null(0).to_numpy()
    ends = np.cumsum(lengths)
    start = 0
    while start < batch.num_rows:
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + TEXT_BLOCK_BYTES, "right")))
        part = batch.slice(start, stop - start)
        for number in numbers:
            part = part.set_column(number, part.schema.names[number], part.column(number).dictionary_decode())
        yield part
        start = stop


def _read_orc(_form: Form, source: pa.NativeFile, place: str) -> Iterator[pa.RecordBatch]:
    from pyarrow import orc

    file = orc.ORCFile(source)
    for number in range(file.nstripes):
        yield _right(file.read_stripe(number, columns=SCHEMA.names), place)


def _read_json(form: Form, source: pa.NativeFile, place: str) -> Iterator[pa.RecordBatch]:
    from pyarrow import json

    parse = json.ParseOptions(explicit_schema=_TEXT_SCHEMA, unexpected_field_behavior="ignore")
    for rows in _whole_rows(_plain(form, source), lambda text: text.rfind(b"\n") + 1):
        table = json.read_json(pa.BufferReader(rows), json.ReadOptions(block_size=len(rows)), parse)
        for batch in table.to_batches():
            yield _from_text(batch, place)


def _read_csv(form: Form, source: pa.NativeFile, place: str) -> Iterator[pa.RecordBatch]:
    from pyarrow import csv

    types = {field.name: field.type for field in _CSV_SCHEMA}
    convert = csv.ConvertOptions(column_types=types, include_columns=SCHEMA.names, strings_can_be_null=False)
    parse = csv.ParseOptions(newlines_in_values=True)
    head = b""
    for rows in _whole_rows(_plain(form, source), _end_of_csv):
        whole = head + rows
        head = head or rows[: rows.find(b"\n") + 1]
        table = csv.read_csv(pa.BufferReader(whole), csv.ReadOptions(block_size=len(whole)), parse, convert)
        for batch in table.to_batches():
            yield _from_text(batch, place)


def row_count(form: Form, source: pa.NativeFile, place: str) -> int:
    """How many rows a file has, whatever they are. `place`: its path, for messages."""
    try:
        match form.format:
            case "parquet" | "delta":
                import pyarrow.parquet as pq

                return int(pq.ParquetFile(source).metadata.num_rows)
            case "orc":
                from pyarrow import orc

                return int(orc.ORCFile(source).nrows)
            case "json":
                text, count = _plain(form, source), 0
                while block := text.read(TEXT_BLOCK_BYTES):
                    count += block.count(b"\n")  # within a value it would be escaped
                return count
            case _:
                from pyarrow import csv

                parse = csv.ParseOptions(newlines_in_values=True)
                return sum(batch.num_rows for batch in csv.open_csv(_plain(form, source), parse_options=parse))
    except (pa.ArrowException, OSError) as error:
        raise ExportDamaged(f"{place} cannot be read: {' '.join(str(error).split())}") from error


def _whole_rows(stream: Any, end: Callable[[bytes], int]) -> Iterator[bytes]:
    """A text in pieces of whole rows, however long a row is: PyArrow's readers want each row within one of their blocks.
    `end`: behind the last whole row of a text."""
    rest = b""
    while text := stream.read(TEXT_BLOCK_BYTES):
        rest += text
        if len(rest) > ROW_TEXT_MAX:
            raise ExportDamaged(f"a row is longer than {ROW_TEXT_MAX} bytes")
        if cut := end(rest):
            yield rest[:cut]
            rest = rest[cut:]
    if rest:
        yield rest


def _end_of_csv(text: bytes) -> int:
    """A line ends a row where all quotes before it are closed."""
    raw = np.frombuffer(text, np.uint8)
    is_closed = np.bitwise_xor.accumulate(raw == ord('"')) == 0
    ends = np.flatnonzero((raw == ord("\n")) & is_closed)
    return int(ends[-1]) + 1 if len(ends) else 0


_TEXT_SCHEMA = pa.schema([pa.field(f.name, pa.string() if f.name == "data" else f.type) for f in SCHEMA])
_CSV_SCHEMA = pa.schema([pa.field(f.name, pa.string() if f.type == LOCKS else f.type) for f in _TEXT_SCHEMA])
_READERS = {"parquet": _read_parquet, "delta": _read_parquet, "orc": _read_orc, "json": _read_json, "csv": _read_csv}


def _plain(form: Form, source: pa.NativeFile) -> Any:
    return source if form.codec == "none" else pa.CompressedInputStream(source, form.codec)


def _from_text(batch: pa.RecordBatch, place: str) -> pa.RecordBatch:
    columns = {name: batch.column(name) for name in SCHEMA.names}
    columns["data"] = bytes_of(columns["data"], place)
    if columns["locks"].type != LOCKS:
        columns["locks"] = _locks_of(columns["locks"])
    return _right(pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], names=SCHEMA.names), place)


def _right(batch: pa.RecordBatch, place: str) -> pa.RecordBatch:
    schema = LOSSLESS if BATCH in batch.schema.names else SCHEMA
    found = batch.select(schema.names).cast(schema)
    if any(found.column(name).null_count for name in RECORD.names):
        raise ExportDamaged(f"{place} has rows without a value in a column of the log")
    return found


def _locks_of(column: pa.Array) -> pa.ListArray:
    """Of CSV, where nothing stands for null."""
    from pyarrow import json

    if len(column) == 0:
        return pa.array([], LOCKS)
    text = pc.if_else(pc.equal(column, ""), "null", column)
    lines, _ = _stretches(pc.binary_join_element_wise('{"locks":', text, "}\n", ""))
    parse = json.ParseOptions(explicit_schema=pa.schema([BESIDE.field("locks")]), unexpected_field_behavior="error")
    table = json.read_json(pa.BufferReader(lines), json.ReadOptions(block_size=len(lines)), parse)
    return table.column("locks").combine_chunks()


# -- rows as text ------------------------------------------------------------------------------------------------------

_PAD = ord("=")
_PADDING = pa.array([b"", b"\0", b"\0\0"], pa.large_binary())


def _stretches(column: pa.Array) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes of all values back to back, and where each begins and ends."""
    wide = column.cast(pa.large_binary())
    _, offsets, data = wide.buffers()
    bounds = np.frombuffer(offsets, np.int64)[wide.offset : wide.offset + len(wide) + 1]
    raw = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return raw[bounds[0] : bounds[-1]], bounds - bounds[0]


def _packed(raw: NDArray[np.uint8], bounds: NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(bounds) - 1, [None, pa.py_buffer(bounds), pa.py_buffer(raw)])


def _bounds(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def base64_of(column: pa.Array) -> pa.Array:
    """Of a binary column, as text. Filled up to threes, all values together are encoded in one go."""
    wide = column.cast(pa.large_binary())
    whole = wide.fill_null(b"") if wide.null_count else wide
    _, bounds = _stretches(whole)
    missing = -np.diff(bounds) % 3
    filled = pc.binary_join_element_wise(whole, _PADDING.take(pa.array(missing)), _PADDING[0])
    raw, bounds = _stretches(filled)
    out = np.frombuffer(bytearray(binascii.b2a_base64(raw.data, newline=False)), np.uint8)
    bounds = bounds // 3 * 4
    for places in (1, 2):
        out[bounds[1:][missing >= places] - places] = _PAD
    text = _packed(out, bounds, pa.large_string())
    return pc.if_else(wide.is_valid(), text, None) if wide.null_count else text


def is_bytes(kind: pa.DataType) -> bool:
    of = pa.types
    return bool(of.is_binary(kind) or of.is_large_binary(kind) or of.is_fixed_size_binary(kind) or of.is_binary_view(kind))


def bytes_of(column: pa.Array, place: str) -> pa.Array:
    """The other way. `place`: what is read, for the message when it is no base64."""
    raw, bounds = _stretches(column)
    lengths, ends = np.diff(bounds), bounds[1:]
    pads = np.flatnonzero(raw == _PAD)
    missing = np.zeros(len(lengths), np.int64)
    for places in (1, 2):
        has_one = (lengths > 0) & (missing == places - 1)
        has_one[has_one] = raw[ends[has_one] - places] == _PAD
        missing += has_one
    filled = raw.copy()
    filled[pads] = ord("A")
    try:
        if (lengths % 4).any() or len(pads) != missing.sum():
            raise binascii.Error("padding where there is none")
        found = np.frombuffer(binascii.a2b_base64(filled.data, strict_mode=True), np.uint8)
    except binascii.Error as error:
        raise ExportDamaged(f"{place}: the column data holds what is not base64") from error
    ends = ends // 4 * 3
    surplus = np.concatenate([ends[missing >= places] - places for places in (1, 2)])
    return _packed(np.delete(found, surplus), _bounds(lengths // 4 * 3 - missing), pa.large_binary()).cast(pa.binary())


def as_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Binary columns as base64, locks as JSON."""
    columns = [
        base64_of(column) if is_bytes(column.type) else _lock_texts(column) if _are_locks(field) else column
        for field, column in zip(batch.schema, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def text_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(f.name, pa.large_string() if is_bytes(f.type) or _are_locks(f) else f.type) for f in schema])


def _are_locks(field: pa.Field) -> bool:
    return bool(field.name == "locks" and field.type == LOCKS)


def _lock_texts(column: pa.ListArray) -> pa.Array:
    """As JSON, all of them together; null stays null."""
    each = column.flatten()
    number, mode = each.field("lock").cast(pa.string()), each.field("mode")
    texts = pc.binary_join_element_wise('{"lock":', number, ',"mode":"', mode, '"}', "")
    offsets = np.zeros(len(column) + 1, np.int32)
    np.cumsum(column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), out=offsets[1:])
    lists = pa.ListArray.from_arrays(pa.array(offsets), texts, mask=column.is_null())
    joined = pc.binary_join(lists, ",").cast(pa.large_string())
    return pc.binary_join_element_wise(_wide("["), joined, _wide("]"), _wide(""))


# -- JSON --------------------------------------------------------------------------------------------------------------


def json_lines(batch: pa.RecordBatch) -> bytes:
    """An object in a line for each row."""
    if batch.num_rows == 0:
        return b""
    pieces: list[pa.Array | pa.Scalar] = []
    for number, (name, column) in enumerate(zip(batch.schema.names, batch.columns, strict=True)):
        pieces.append(_wide(("{" if number == 0 else ",") + json.dumps(name) + ":"))
        pieces.append(_json(column))
    lines = pc.binary_join_element_wise(*pieces, _wide("}\n"), _wide(""))
    raw, _ = _stretches(lines)
    return raw.tobytes()


def _wide(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())


def _json(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _json(column.dictionary_decode())
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return column.cast(pa.large_string()).fill_null("null")
    if is_bytes(kind):
        return _quoted(base64_of(column))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return _quoted(_escaped(column.cast(pa.large_string())))
    if pa.types.is_decimal(kind) or pa.types.is_date(kind):
        return _quoted(column.cast(pa.large_string()))
    if pa.types.is_time(kind):
        return _quoted(pc.replace_substring_regex(column.cast(pa.large_string()), r"\.0+$", ""))
    if pa.types.is_timestamp(kind):
        return _quoted(_moments(column))
    if kind == LOCKS:
        return _lock_texts(column).fill_null("null")
    if pa.types.is_floating(kind):  # by the encoder of Python, which writes 1.0 where Arrow writes 1
        finite = pc.if_else(pc.is_finite(column), column, None)
        return pa.array(json.dumps(finite.to_pylist())[1:-1].split(", "), pa.large_string())
    return pa.array([json.dumps(_json_value(value)) for value in column.to_pylist()], pa.large_string())


def _json_value(value: Any) -> Any:
    """Values that nest, by the same rules."""
    match value:
        case dict():
            return {str(name): _json_value(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_json_value(inner) for inner in value]
        case bytes():
            return base64.b64encode(value).decode()
        case float():
            return value if math.isfinite(value) else None
        case datetime() | date() | time():
            return value.isoformat()
        case None | bool() | int() | str():
            return value
        case _:
            return str(value)


def _moments(column: pa.Array) -> pa.Array:
    """As ISO 8601 has them, in UTC where they say which moment they are."""
    kind = column.type
    zone = "" if kind.tz is None else "Z"
    text = (column.cast(pa.timestamp(kind.unit, "UTC")) if zone else column).cast(pa.large_string())
    text = pc.replace_substring_regex(text, rf"(\.0+)?{zone}$", "+00:00" if zone else "")
    return pc.replace_substring(text, " ", "T", max_replacements=1)


def _quoted(column: pa.Array) -> pa.Array:
    quote = _wide('"')
    return pc.binary_join_element_wise(quote, column, quote, _wide("")).fill_null("null")


def _escaped(column: pa.Array) -> pa.Array:
    for char in "\\", '"':
        column = pc.replace_substring(column, char, "\\" + char)
    raw, _ = _stretches(column)
    for code in np.flatnonzero(np.bincount(raw, minlength=32)[:32]).tolist():
        column = pc.replace_substring(column, chr(code), f"\\u{code:04x}")
    return column
