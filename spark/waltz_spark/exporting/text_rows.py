"""Rows as text: payloads in base64, and lines of JSON, a batch at a time.

Neither JSON nor CSV can hold bytes, so they are written as base64, wherever they stand, and a payload comes back by
`bytes_of`, exactly. Nothing stays nothing. JSON has no number that is none, and none without an end: both are null there.
The columns of a log are written without a Python object per record; so are those of a decoder, but for floating point
numbers and columns that nest, which take the way of `json.dumps`.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from datetime import date, datetime, time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from waltzd.errors import ExportDamaged

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
    """Of whatever width."""
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
    """Binary columns as base64; the others as they are."""
    columns = [base64_of(column) if is_bytes(column.type) else column for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def text_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(f.name, pa.large_string() if is_bytes(f.type) else f.type) for f in schema])


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
    """Each value as JSON."""
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
    if pa.types.is_floating(kind):  # by the encoder of Python, which writes 1.0 where Arrow writes 1
        finite = pc.if_else(pc.is_finite(column), column, None)
        return pa.array(json.dumps(finite.to_pylist())[1:-1].split(", "), pa.large_string())
    return pa.array([json.dumps(_plain(value)) for value in column.to_pylist()], pa.large_string())


def _plain(value: Any) -> Any:
    """What nests, by the rules of the columns that do not."""
    match value:
        case dict():
            return {str(name): _plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
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
