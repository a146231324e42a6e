"""The columns of an export as Delta has them.

Delta knows fewer types than Arrow, and a reader finds out about one that does not fit only when it reads. So each column is
looked at before anything is written, and what has no place in Delta is refused by name. A type fits if the Parquet file of
an export holds it as Delta's readers expect it: a file is never converted for the table's sake. Pure.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
from pyarrow import types

from waltzd.errors import BadArgument

_PLAIN = (
    (types.is_boolean, "boolean"),
    (types.is_int8, "byte"),
    (types.is_int16, "short"),
    (types.is_int32, "integer"),
    (types.is_int64, "long"),
    (types.is_float32, "float"),
    (types.is_float64, "double"),
    (types.is_date, "date"),
    (types.is_string, "string"),
    (types.is_large_string, "string"),
    (types.is_string_view, "string"),
    (types.is_binary, "binary"),
    (types.is_large_binary, "binary"),
    (types.is_binary_view, "binary"),
    (types.is_fixed_size_binary, "binary"),
)
_LISTS = (types.is_list, types.is_large_list, types.is_fixed_size_list)
_FORBIDDEN = frozenset(" ,;{}()\n\t=")
"""In names of columns: what readers without a mapping of columns, as most are, do not take."""


def table_schema(columns: pa.Schema) -> str:
    """As JSON, which is how a Delta log has it."""
    return json.dumps(_struct(list(columns), ""))


def _struct(fields: list[pa.Field], within: str) -> dict[str, Any]:
    names = [field.name.lower() for field in fields]
    for field in fields:
        place = within + field.name
        if not field.name or _FORBIDDEN & set(field.name):
            raise _refused(place, "Delta does not take names that are empty or have spaces or any of ,;{}()= in them")
        if names.count(field.name.lower()) > 1:
            raise _refused(place, "Delta does not tell apart names that differ in case only")
    if not fields:
        raise _refused(within.rstrip("."), "Delta has no structure without a field")
    # Nullable, all of them: that a value is always there is the export's word, and no constraint for whoever adds columns.
    return {
        "type": "struct",
        "fields": [
            {"name": field.name, "type": _type(field.type, within + field.name), "nullable": True, "metadata": {}}
            for field in fields
        ],
    }


def _type(given: pa.DataType, place: str) -> str | dict[str, Any]:
    for fits, name in _PLAIN:
        if fits(given):
            return name
    if types.is_timestamp(given) and given.unit != "ns":
        return "timestamp" if given.tz else "timestamp_ntz"
    if types.is_decimal128(given) and 0 <= given.scale <= given.precision:
        return f"decimal({given.precision},{given.scale})"
    if types.is_dictionary(given):
        return _type(given.value_type, place)
    if any(fits(given) for fits in _LISTS):
        inner = _type(given.value_type, f"{place}.element")
        return {"type": "array", "elementType": inner, "containsNull": True}
    if types.is_map(given):
        key, value = _type(given.key_type, f"{place}.key"), _type(given.item_type, f"{place}.value")
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}
    if types.is_struct(given):
        return _struct([given.field(number) for number in range(given.num_fields)], f"{place}.")
    raise _refused(place, f"Delta has no type for {given}{_advice(given)}")


def _advice(given: pa.DataType) -> str:
    if types.is_unsigned_integer(given):
        return "; the next larger signed type, or decimal128(20, 0), holds the same numbers"
    if types.is_timestamp(given):
        return "; timestamp[us] is as fine as Delta goes"
    if types.is_time(given) or types.is_duration(given):
        return "; a number does, as int64"
    return ""


def _refused(place: str, why: str) -> BadArgument:
    return BadArgument(
        f"--format delta: the column {place!r} cannot be in a table: {why}",
        not_done="nothing was written",
        next_step="choose a decoder that makes another column of it, or --format parquet",
    )
