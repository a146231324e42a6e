"""Protocol buffers: each payload is one message, whose fields become columns.

A field without a value is null where a message can tell that from the default, and else the default, as in every language
of protobuf. An enumeration is its name, or its number where it has none. Bytes of fields that the descriptor does not know
are no error: that is how such messages grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from waltz_spark.payloads.payload import Undecodable, read_file, rows
from waltzd.errors import BadDecoder

_PLAIN = {
    FieldDescriptor.CPPTYPE_INT32: pa.int32(),
    FieldDescriptor.CPPTYPE_INT64: pa.int64(),
    FieldDescriptor.CPPTYPE_UINT32: pa.int64(),
    FieldDescriptor.CPPTYPE_UINT64: pa.decimal128(20, 0),
    FieldDescriptor.CPPTYPE_DOUBLE: pa.float64(),
    FieldDescriptor.CPPTYPE_FLOAT: pa.float32(),
    FieldDescriptor.CPPTYPE_BOOL: pa.bool_(),
    FieldDescriptor.CPPTYPE_ENUM: pa.string(),
}
"""Spark has no unsigned integers, so those take the next larger type."""


@dataclass(frozen=True)
class Protobuf:
    descriptors: bytes
    message: str
    columns: pa.Schema

    @property
    def identity(self) -> bytes:
        return self.message.encode() + b"\0" + self.descriptors

    def parse(self, payloads: pa.Array) -> Sequence[pa.Array]:
        return rows(payloads, self.columns, _reader(_descriptor(self.descriptors, self.message)))


def _reader(descriptor: Descriptor) -> Callable[[bytes], dict[str, Any]]:
    kind = message_factory.GetMessageClass(descriptor)

    def take_apart(payload: bytes) -> dict[str, Any]:
        message = kind()
        try:
            message.ParseFromString(payload)
        except DecodeError as error:
            raise Undecodable(f"it is no {descriptor.full_name}: {error}") from error
        return _values(message)

    return take_apart


def _values(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.is_repeated:
            items = getattr(message, field.name)
            if _is_map(field):
                inner = field.message_type.fields_by_name["value"]
                found[field.name] = [(key, _value(inner, items[key])) for key in items]
            else:
                found[field.name] = [_value(field, item) for item in items]
        elif field.has_presence and not message.HasField(field.name):
            found[field.name] = None
        else:
            found[field.name] = _value(field, getattr(message, field.name))
    return found


def _value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return _values(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else str(value)
    return value


def protobuf_method(text: str) -> Protobuf:
    path, _, message = text.rpartition("#")
    if not path or not message:
        raise BadDecoder("protobuf needs a descriptor set and a message in it: protobuf:orders.desc#shop.Order")
    descriptors = read_file(path, "the descriptor set")
    try:
        descriptor = _descriptor(descriptors, message)
    except DecodeError as error:
        raise BadDecoder(
            f"{path} is no descriptor set: {error}",
            next_step="protoc --include_imports --descriptor_set_out=FILE makes one",
        ) from error
    except (KeyError, TypeError) as error:  # what a file lacks, or the message itself
        raise BadDecoder(f"{path} does not describe {message}: {error}", next_step=_there(descriptors)) from error
    return Protobuf(descriptors, message, pa.schema([(field.name, _type_of(field, ())) for field in descriptor.fields]))


def _there(descriptors: bytes) -> str:
    found = descriptor_pb2.FileDescriptorSet.FromString(descriptors)
    names = [f"{file.package}.{kind.name}".lstrip(".") for file in found.file for kind in file.message_type]
    return f"there are {', '.join(names[:20])}" if names else "it describes no message at all"


def _descriptor(descriptors: bytes, message: str) -> Descriptor:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
        pool.Add(file)
    found: Descriptor = pool.FindMessageTypeByName(message)
    return found


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _type_of(field: FieldDescriptor, within: tuple[str, ...]) -> pa.DataType:
    if field.message_type is not None and _is_map(field):
        inner = field.message_type.fields_by_name
        return pa.map_(_single(inner["key"], within), _single(inner["value"], within))
    single = _single(field, within)
    return pa.list_(single) if field.is_repeated else single


def _single(field: FieldDescriptor, within: tuple[str, ...]) -> pa.DataType:
    """`within`: the messages around this field, by name."""
    if field.message_type is None:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return pa.binary()
        return _PLAIN.get(field.cpp_type, pa.string())
    name = field.message_type.full_name
    if name in within:
        raise BadDecoder(
            f"{name} contains itself, and columns cannot", next_step="decode it with a function: module:function"
        )
    return pa.struct([(inner.name, _type_of(inner, (*within, name))) for inner in field.message_type.fields])
