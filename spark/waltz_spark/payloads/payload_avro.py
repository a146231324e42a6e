"""Avro without a container: each payload is one datum of the schema, whose fields become columns.

Done by fastavro, which is not among the dependencies, one datum after the other: Arrow does not read Avro. What Arrow has
no type for is text: an enumeration by its symbol, a union of several types as JSON.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from waltz_spark.payloads.payload import Undecodable, read_file, rows
from waltzd.errors import BadDecoder

_PLAIN = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
}
_LOGICAL = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time32("ms"),
    ("long", "time-micros"): pa.time64("us"),
    ("long", "timestamp-millis"): pa.timestamp("ms", tz="UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", tz="UTC"),
}
NESTED_MAX = 64


@dataclass(frozen=True)
class Avro:
    schema: str
    """As JSON."""
    columns: pa.Schema

    @property
    def identity(self) -> bytes:
        return self.schema.encode()

    def parse(self, payloads: pa.Array) -> Sequence[pa.Array]:
        read = _reader(self.schema)
        return rows(payloads, self.columns, read)


def _reader(schema: str) -> Callable[[bytes], dict[str, Any]]:
    fastavro = _fastavro()
    parsed = fastavro.parse_schema(json.loads(schema))
    mixed = [field["name"] for field in parsed["fields"] if _is_mixed(field["type"])]

    def take_apart(payload: bytes) -> dict[str, Any]:
        stream = io.BytesIO(payload)
        try:
            found = fastavro.schemaless_reader(stream, parsed, None)
        except (EOFError, ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, RecursionError) as error:
            raise Undecodable(f"it is not Avro of this schema: {type(error).__name__} {error}".rstrip()) from error
        left = len(payload) - stream.tell()
        if left:
            raise Undecodable(f"it is not Avro of this schema: {left} bytes are left over")
        assert isinstance(found, dict)
        for name in mixed:
            found[name] = json.dumps(found[name], default=repr)
        return found

    return take_apart


def _fastavro() -> Any:
    try:
        return importlib.import_module("fastavro")
    except ImportError as error:
        raise BadDecoder("fastavro is not installed, and Avro needs it", next_step="`pip install fastavro`") from error


def avro_method(path: str) -> Avro:
    if not path:
        raise BadDecoder("avro needs the file of a schema: avro:orders.avsc")
    fastavro = _fastavro()
    text = read_file(path, "the Avro schema")
    try:
        schema = json.loads(text)
        fastavro.parse_schema(schema)
        if schema["type"] != "record":
            raise BadDecoder(f"{path} is an Avro {schema['type']}; only the fields of a record can be columns")
        columns = pa.schema([(field["name"], _type_of(field["type"], {}, 0)) for field in schema["fields"]])
    except (ValueError, KeyError, TypeError, RecursionError, fastavro.schema.SchemaParseException) as error:
        raise BadDecoder(f"{path} is no Avro schema: {error!r}") from error
    except fastavro.schema.UnknownType as error:
        raise BadDecoder(f"{path} names a type that it does not have: {error}") from error
    return Avro(json.dumps(schema, sort_keys=True), columns)


def _union(said: list[Any]) -> list[Any]:
    return [kind for kind in said if kind != "null"]


def _is_mixed(said: Any) -> bool:
    return isinstance(said, list) and len(_union(said)) > 1


def _type_of(said: Any, names: Mapping[str, pa.DataType], depth: int) -> pa.DataType:
    """`names`: types that were named further out, which Avro then calls by that name."""
    if depth > NESTED_MAX:
        raise BadDecoder("an Avro schema that contains itself has no columns")
    if isinstance(said, list):
        kinds = _union(said)
        if len(kinds) > 1 and depth:
            raise BadDecoder("an Avro union of several types can only be a column of its own, not within another")
        return pa.string() if len(kinds) > 1 else _type_of(kinds[0] if kinds else "null", names, depth)
    if isinstance(said, str):
        return names[said] if said in names else _PLAIN[said]
    kind = said["type"]
    logical = said.get("logicalType")
    if logical == "decimal":
        return pa.decimal128(said["precision"], said.get("scale", 0))
    if (kind, logical) in _LOGICAL:
        return _LOGICAL[kind, logical]
    match kind:
        case "record":
            return pa.struct([(field["name"], _type_of(field["type"], names, depth + 1)) for field in said["fields"]])
        case "enum":
            return pa.string()
        case "fixed":
            return pa.binary(said["size"])
        case "array":
            return pa.list_(_type_of(said["items"], names, depth + 1))
        case "map":
            return pa.map_(pa.string(), _type_of(said["values"], names, depth + 1))
        case _:
            return _type_of(kind, names, depth + 1)
