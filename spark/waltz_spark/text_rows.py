"""Rows as text: payloads in base64, and lines of JSON, a batch at a time.

Neither JSON nor CSV can hold bytes, so a payload is written as base64, and comes back by `bytes_of`, exactly. The columns
of a log are written without a Python object per record; columns of a user's decoder that nest take the way of
`json.dumps`.
"""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from waltzd.errors import ExportDamaged

_ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8)
_PAIRS = np.stack([np.repeat(_ALPHABET, 64), np.tile(_ALPHABET, 64)], axis=1)
"""Twelve bits as two characters."""
_PAD = ord("=")
_WRONG = 255
_VALUES = np.full(256, _WRONG, np.uint8)
_VALUES[_ALPHABET] = np.arange(64, dtype=np.uint8)
_VALUES[_PAD] = 0
_CONTROLS = "[\\x00-\\x1f]"


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
    """Of a binary column without nulls, as text."""
    raw, bounds = _stretches(column)
    lengths = np.diff(bounds)
    groups = (lengths + 2) // 3
    starts = _bounds(groups)
    padded = np.zeros(int(starts[-1]) * 3, np.uint8)
    padded[np.arange(len(raw)) + np.repeat(starts[:-1] * 3 - bounds[:-1], lengths)] = raw
    triples = padded.reshape(-1, 3).astype(np.uint16)
    out = np.empty((len(triples), 4), np.uint8)
    out[:, :2] = _PAIRS[triples[:, 0] << 4 | triples[:, 1] >> 4]
    out[:, 2:] = _PAIRS[(triples[:, 1] & 15) << 8 | triples[:, 2]]
    ends = starts[1:][lengths % 3 != 0] - 1
    out[ends, 3] = _PAD
    out[starts[1:][lengths % 3 == 1] - 1, 2] = _PAD
    return _packed(out.reshape(-1), starts * 4, pa.large_string())


def bytes_of(column: pa.Array, place: str) -> pa.Array:
    """The other way. `place`: what is read, for the message when it is no base64."""
    raw, bounds = _stretches(column)
    lengths = np.diff(bounds)
    values = _VALUES[raw]
    if (lengths % 4).any() or (values == _WRONG).any():
        raise ExportDamaged(f"{place}: the column data holds what is not base64")
    quads = values.reshape(-1, 4).astype(np.uint32)
    joined = quads[:, 0] << 18 | quads[:, 1] << 12 | quads[:, 2] << 6 | quads[:, 3]
    out = np.empty((len(quads), 3), np.uint8)
    for place_of, shift in enumerate((16, 8, 0)):
        out[:, place_of] = joined >> shift & 255
    is_pad = raw.reshape(-1, 4) == _PAD
    kept = np.ones(out.shape, bool)
    kept[:, 2] = ~is_pad[:, 3]
    kept[:, 1] = ~is_pad[:, 2]
    sizes = np.add.reduceat(np.append(kept.sum(axis=1), 0), np.minimum(bounds[:-1] // 4, len(quads)))
    sizes = np.where(lengths == 0, 0, sizes).astype(np.int64)
    return _packed(out[kept], _bounds(sizes), pa.large_binary()).cast(pa.binary())


def as_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Binary columns as base64; the others as they are."""
    columns = [base64_of(column) if pa.types.is_binary(column.type) else column for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def text_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(f.name, pa.large_string() if pa.types.is_binary(f.type) else f.type) for f in schema])


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
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return column.cast(pa.large_string()).fill_null("null")
    if pa.types.is_binary(kind):
        return _quoted(base64_of(column))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _quoted(_escaped(column.cast(pa.large_string())))
    return pa.array([json.dumps(value, default=str) for value in column.to_pylist()], pa.large_string())


def _quoted(column: pa.Array) -> pa.Array:
    quote = _wide('"')
    return pc.binary_join_element_wise(quote, column, quote, _wide("")).fill_null("null")


def _escaped(column: pa.Array) -> pa.Array:
    for char in "\\", '"':
        column = pc.replace_substring(column, char, "\\" + char)
    if pc.any(pc.match_substring_regex(column, _CONTROLS)).as_py():
        for code in range(32):
            column = pc.replace_substring(column, chr(code), f"\\u{code:04x}")
    return column
