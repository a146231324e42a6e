"""The decoders of `--decode`.

    json:a bigint, b string    the named members of JSON objects; or a file: json:SCHEMA.json, a JSON schema
    text                       UTF-8
    binary                     the payload as it is
    module:function            a function from an Arrow array of payloads to a record batch with as many rows

JSON is parsed by PyArrow's block reader, which reads lines and gets all payloads of a batch at once, so rows must stay
aligned with payloads. Each payload must begin with `{`, end with `}`, and contain no zero byte, which ends a text for this
reader. An object cannot continue from one payload to the next, because two objects inside a third are never adjacent. So
each payload has one object or more, and as many rows as payloads means that each has exactly one.

Decoding of payloads to columns: a log contains bytes, and only its application knows their meaning.

A decoder converts an array of payloads to columns, a batch at a time. A payload that cannot be decoded keeps its row, with
the reason in `_decode_error`, and with the payload in `data`. Whether a payload can be decoded depends on nothing but the
payload: a batch with a failure is cut into pieces until the payload is alone, and the others are decoded as usual. That is
slow for many failures, so a decoder may detect common ones at once (`Sieve`). A decoder is a value with a fingerprint, so
that an export can refuse to continue with another decoder; its files are part of it, and are sent with it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

from waltz_spark.table.columns import EVERY
from waltzd.disk.real import translate
from waltzd.errors.operations import BadDecoder

ERROR_COLUMN = "_decode_error"
PREFIX = "payload_"
"""Prefix of columns whose names are columns of the log."""
FILE_BYTES_MAX = 16 << 20
_REASON_CHARACTERS = 300
_PIECES = 8
"""Pieces into which a batch is cut after a failure."""


class Undecodable(ValueError):
    """A payload of a batch cannot be decoded. If the batch has one payload, the text is the reason."""


_UNDECODABLE = (Undecodable, pa.ArrowException, UnicodeDecodeError)


class Method(Protocol):
    """A method of decoding. It is a value that is pickled and sent to the executors."""

    @property
    def columns(self) -> pa.Schema: ...
    @property
    def identity(self) -> bytes:
        """Bytes that change if equal payloads may be decoded to other columns."""
        ...

    def parse(self, payloads: pa.Array) -> Sequence[pa.Array]:
        """Return the columns, each as long as `payloads`; raise if a payload cannot be decoded."""
        ...


@runtime_checkable
class Sieve(Protocol):
    """A method that detects failures of many payloads at once."""

    def refused(self, payloads: pa.Array) -> pa.Array:
        """Return for each payload the reason that `parse` would give; null if `parse` has to be tried."""
        ...


@dataclass(frozen=True)
class Decoder:
    text: str
    """Argument of `--decode`."""
    method: Method
    names: tuple[str, ...]
    """Names of the columns that it adds, without the one for errors."""

    @property
    def fingerprint(self) -> str:
        kind = self.text.partition(":")[0]
        types = "\n".join(f"{field.name} {field.type}" for field in self.columns).encode()
        return hashlib.sha256(b"\0".join((kind.encode(), types, self.method.identity))).hexdigest()

    @property
    def columns(self) -> pa.Schema:
        own = [pa.field(name, field.type) for name, field in zip(self.names, self.method.columns, strict=True)]
        return pa.schema([*own, (ERROR_COLUMN, pa.string())])

    def schema(self, before: pa.Schema) -> pa.Schema:
        return pa.schema([*before, *self.columns])

    def decode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with the columns of the decoder added; `data` has to be one of the existing columns."""
        payloads = batch.column("data")
        try:
            columns, errors = self.method.parse(payloads), pa.nulls(len(payloads), pa.string())
        except _UNDECODABLE:
            columns, errors = self._sieved(payloads)
        return pa.RecordBatch.from_arrays([*batch.columns, *columns, errors], schema=self.schema(batch.schema))

    def _sieved(self, payloads: pa.Array) -> tuple[Sequence[pa.Array], pa.Array]:
        """Decode after a failure; return the columns, and the reason for each payload that was not decoded."""
        if not isinstance(self.method, Sieve):
            return self._apart(payloads)
        reasons = self.method.refused(payloads)
        is_tried = reasons.is_null()
        columns, errors = self._apart(payloads.filter(is_tried))
        tried = is_tried.to_numpy(zero_copy_only=False)
        rows = pa.array(np.cumsum(tried) - 1, mask=~tried)
        return [column.take(rows) for column in columns], pc.coalesce(reasons, errors.take(rows))

    def _apart(self, payloads: pa.Array) -> tuple[Sequence[pa.Array], pa.Array]:
        parts: list[Sequence[pa.Array]] = []
        errors: list[str | None] = []
        waiting = [payloads] if len(payloads) else []
        while waiting:
            stretch = waiting.pop()
            try:
                part = self.method.parse(stretch)
            except _UNDECODABLE as error:
                if len(stretch) > 1:
                    step = -(-len(stretch) // _PIECES)
                    waiting += [stretch.slice(start, step) for start in reversed(range(0, len(stretch), step))]
                    continue
                parts.append([pa.nulls(1, field.type) for field in self.method.columns])
                errors.append(_reason(error))
                continue
            parts.append(part)
            errors += [None] * len(stretch)
        columns = [
            pa.concat_arrays([part[number] for part in parts]) if parts else pa.array([], field.type)
            for number, field in enumerate(self.method.columns)
        ]
        return columns, pa.array(errors, pa.string())


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _REASON_CHARACTERS else text[: _REASON_CHARACTERS - 1] + "…"


def read_file(path: str, what: str) -> bytes:
    """Read a small file of a decoder. Its content is sent to the executors, not its path."""
    try:
        with open(path, "rb") as file:
            found = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            raise translate(error, f"reading {what} {path}") from error
        raise BadDecoder(f"{path!r} is no path") from error
    if len(found) > FILE_BYTES_MAX:
        raise BadDecoder(f"{path} has more than {FILE_BYTES_MAX >> 20} MiB, which no {what} has")
    return found


# -- for methods --------------------------------------------------------------------------------------------------------

_NOT_UTF8 = "it is not UTF-8"
_UTF8 = (
    r"^(?:[\x00-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}"
    r"|\xed[\x80-\x9f][\x80-\xbf]|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2})*$"
)
"""Pattern of valid UTF-8: no overlong forms, no surrogates, no code point above the last."""


def utf8(payloads: pa.Array) -> pa.Array:
    try:
        return payloads.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise Undecodable(_NOT_UTF8) from error


def not_utf8(payloads: pa.Array) -> pa.Array:
    """Return a reason for each payload that is not UTF-8, and null for all others."""
    return reason_where(pc.invert(pc.match_substring_regex(payloads, _UTF8)), _NOT_UTF8)


def reason_where(truths: pa.Array, reason: str) -> pa.Array:
    return pc.if_else(truths, pa.scalar(reason, pa.string()), pa.scalar(None, pa.string()))


def is_all(truths: pa.Array) -> bool:
    return bool(pc.all(truths, min_count=0).as_py())


def decoder_of(text: str) -> Decoder:
    kind, _, rest = text.partition(":")
    match kind:
        case "text":
            method: Method = Text()
        case "binary":
            method = Binary()
        case "json":
            return _named(text, json_method(rest))
        case "avro" | "protobuf" | "cells":
            raise BadDecoder(f"--decode {kind} was removed", next_step=_REMOVED[kind])
        case _:
            return _named(text, _function(text))
    if text != kind:
        raise BadDecoder(f"--decode {text}: {kind} takes no argument")
    return _named(text, method)


_KINDS = ("text", "binary", "json", "avro", "protobuf", "cells")
_REMOVED = {
    **dict.fromkeys(
        ("avro", "protobuf"),
        "decode `data` when you read, with Spark's from_avro or from_protobuf (docs/spark.md); or use MODULE:FUNCTION",
    ),
    "cells": "export without it, and write CSV with Spark (docs/spark.md)",
}


def is_function(text: str) -> bool:
    """Return whether a decoder is a function, which is imported and called."""
    return text.partition(":")[0] not in _KINDS


def _named(text: str, method: Method) -> Decoder:
    taken = {*EVERY.names, ERROR_COLUMN}
    names: list[str] = []
    for field in method.columns:
        name = PREFIX + field.name if field.name.lower() in taken else field.name
        if name.lower() in map(str.lower, names):
            raise BadDecoder(f"--decode {text} makes two columns {name}, which differ in case at most")
        names.append(name)
    return Decoder(text, method, tuple(names))


# -- text and binary ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    columns = pa.schema([("text", pa.string())])
    identity = b""

    def parse(self, payloads: pa.Array) -> Sequence[pa.Array]:
        return [utf8(payloads)]

    def refused(self, payloads: pa.Array) -> pa.Array:
        return not_utf8(payloads)


@dataclass(frozen=True)
class Binary:
    columns = pa.schema([])
    identity = b""

    def parse(self, payloads: pa.Array) -> Sequence[pa.Array]:
        return []


# -- JSON ---------------------------------------------------------------------------------------------------------------

TYPES = {
    "bigint": pa.int64(),
    "long": pa.int64(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "smallint": pa.int16(),
    "double": pa.float64(),
    "float": pa.float32(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
"""Types by their names in Spark. A timestamp is text as in ISO 8601."""
_OF_JSON_SCHEMA = {"integer": pa.int64(), "number": pa.float64(), "string": pa.string(), "boolean": pa.bool_()}
_COLUMN = re.compile(r"\s*(?:`([^`]+)`|([^\s`,:]+))\s*[\s:]\s*(\w+)\s*(?:\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))?\s*")
_OBJECT = r"^[ \t\r\n]*\{[^\x00]*\}[ \t\r\n]*$"
_NO_OBJECT = "it is not a JSON object"
_BLOCK_BYTES_MAX = (1 << 31) - 2


@dataclass(frozen=True)
class Json:
    columns: pa.Schema
    identity = b""

    def parse(self, payloads: pa.Array) -> Sequence[pa.Array]:
        texts = utf8(payloads)
        if not is_all(pc.match_substring_regex(texts, _OBJECT)):
            raise Undecodable(_NO_OBJECT)
        size = int(pc.sum(pc.binary_length(payloads), min_count=0).as_py()) + len(payloads)
        if size > _BLOCK_BYTES_MAX:
            raise Undecodable(f"it has {size} bytes, and at most {_BLOCK_BYTES_MAX} are read as JSON")
        lines = pc.binary_join_element_wise(payloads, b"", b"\n")
        _, offsets, data = lines.buffers()
        assert offsets is not None
        table = arrow_json.read_json(
            pa.BufferReader(data.slice(0, size)),
            arrow_json.ReadOptions(use_threads=False, block_size=size + 1),
            arrow_json.ParseOptions(
                explicit_schema=self.columns, newlines_in_values=True, unexpected_field_behavior="ignore"
            ),
        )
        if table.num_rows != len(payloads):
            raise Undecodable("it is more than one JSON object")
        return [table.column(name).combine_chunks() for name in self.columns.names]

    def refused(self, payloads: pa.Array) -> pa.Array:
        no_object = pc.invert(pc.match_substring_regex(payloads, _OBJECT))
        return pc.coalesce(not_utf8(payloads), reason_where(no_object, _NO_OBJECT))


def json_method(schema: str) -> Json:
    """Return the JSON decoder for a list of `name type`, or for the path of a JSON schema."""
    if not schema.strip():
        raise BadDecoder("json needs the columns to make: json:'id bigint, name string', or json:SCHEMA.json")
    columns = _of_file(schema) if schema.endswith(".json") else [_column(part) for part in _parts(schema)]
    names = [name for name, _ in columns]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise BadDecoder(f"json:{schema} names {min(twice)} twice")
    return Json(pa.schema(columns))


def _parts(schema: str) -> list[str]:
    return re.split(r",(?![^(]*\))", schema)


def _column(text: str) -> tuple[str, pa.DataType]:
    given = _COLUMN.fullmatch(text)
    if given is None:
        raise BadDecoder(f"json: {text.strip()!r} is no column", next_step="write it as `name type, …`: json:'id bigint'")
    name, word = given[1] or given[2], given[3].lower()
    if word == "decimal":
        digits, behind = int(given[4] or 10), int(given[5] or 0)
        if not 0 <= behind <= digits <= 38 or digits == 0:
            raise BadDecoder(f"json: {text.strip()}: a decimal has 1 to 38 digits, and no more than that behind the point")
        return name, pa.decimal128(digits, behind)
    if word not in TYPES or given[4]:
        raise BadDecoder(f"json: there is no type {text.strip()[len(name) :].strip()!r} for {name}",
                         next_step=f"there are {', '.join(TYPES)} and decimal(10,2)")  # fmt: skip
    return name, TYPES[word]


def _of_file(path: str) -> list[tuple[str, pa.DataType]]:
    """Return the columns for the properties of an object in a JSON schema; nested ones are left out."""
    try:
        found = json.loads(read_file(path, "the JSON schema"))
        properties = found["properties"].items()
        columns = [(str(name), _type_of(said)) for name, said in properties]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadDecoder(f"{path} is no JSON schema of an object with properties: {error!r}") from error
    known = [(name, type_) for name, type_ in columns if type_ is not None]
    if not known:
        raise BadDecoder(f"{path} names no property that is a string, a number or a boolean")
    return known


def _type_of(said: dict[str, object]) -> pa.DataType | None:
    kinds = said.get("type")
    listed = [kind for kind in kinds if kind != "null"] if isinstance(kinds, list) else [kinds]
    if len(listed) != 1 or not isinstance(listed[0], str):
        return None
    if listed[0] == "string" and said.get("format") == "date-time":
        return TYPES["timestamp"]
    return _OF_JSON_SCHEMA.get(listed[0])


# -- a function of the user --------------------------------------------------------------------------------------------

_FUNCTION = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Function:
    """A function of the user, which executors import by name, from `--py-files` or an installed package."""

    module: str
    name: str
    columns: pa.Schema
    identity: bytes

    def parse(self, payloads: pa.Array) -> Sequence[pa.Array]:
        found = _called(getattr(importlib.import_module(self.module), self.name), payloads)
        if found.schema.remove_metadata() != self.columns:
            raise Undecodable(f"{self.module}:{self.name} made the columns {_listed(found.schema)}")
        if found.num_rows != len(payloads):
            raise Undecodable(f"{self.module}:{self.name} made {found.num_rows} rows of {len(payloads)} payloads")
        return list(found.columns)


def _called(function: Any, payloads: pa.Array) -> pa.RecordBatch:
    try:
        found = function(payloads)
    except Exception as error:  # any error of the user's code is the reason why a payload has no row
        raise Undecodable(f"{type(error).__name__}: {error}") from error
    if isinstance(found, pa.StructArray):
        return pa.RecordBatch.from_struct_array(found)
    if not isinstance(found, pa.RecordBatch):
        raise Undecodable(f"it returned {type(found).__name__}, and not a pyarrow.RecordBatch")
    return found


def _function(text: str) -> Function:
    given = _FUNCTION.fullmatch(text)
    if given is None:
        raise BadDecoder(f"there is no decoder {text!r}")
    module_name, name = given[1], given[2]
    try:
        with redirect_stdout(sys.stderr):  # output of the module must not mix with results
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise BadDecoder(
            f"--decode {text}: {error}", next_step="say where the module is: PYTHONPATH here, --py-files for the executors"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise BadDecoder(f"--decode {text}: {module_name} has no function {name}")
    try:
        none = _called(function, pa.array([], pa.binary()))
    except Undecodable as error:
        raise BadDecoder(
            f"--decode {text} failed on an empty array, which is how its columns are found out: {error}"
        ) from error
    source = getattr(module, "__file__", None)
    return Function(module_name, name, none.schema.remove_metadata(), read_file(source, "the module") if source else b"")


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema) or "none at all"
