"""The schemas of `-o json`: as they are generated, true of every pinned answer, and able to refuse."""

from __future__ import annotations

import json
from typing import Any

from tests.json_schemas import SCHEMAS, faults, schemas, text

FOUND: dict[str, Any] = json.loads(SCHEMAS.read_text(encoding="utf-8"))


def test_the_file_is_as_it_is_generated() -> None:
    assert SCHEMAS.read_text(encoding="utf-8") == text(), "run ./dev generate"
    assert len(FOUND) >= 50


def test_a_schema_says_what_the_shapes_say() -> None:
    shapes = ("version number", "rows[].name text", "rows[].error null", "rows[].error text", "by.{} bool", "x null")
    schema = schemas("".join(f"a: .{shape}\n" for shape in shapes))["a"]
    assert (schema["type"], schema["required"]) == ("object", ["version"])
    assert schema["properties"] == {
        "by": {"additionalProperties": {"type": ["boolean", "null"]}, "type": ["null", "object"]},
        "rows": {
            "items": {
                "properties": {"error": {"type": ["null", "string"]}, "name": {"type": ["null", "string"]}},
                "type": ["null", "object"],
            },
            "type": ["array", "null"],
        },
        "version": {"const": 1},
        "x": {},
    }
    good = {"version": 1, "rows": [{"name": "n", "error": None}], "by": {"7": True}, "x": [1]}
    assert list(faults(schema, good)) == []
    assert list(faults(schema, {"version": 2, "rows": {}, "by": {"7": 1}})) == [
        ".version is 2, and not 1", ".rows is {}, and not array or null", ".by.7 is 1, and not boolean or null",
    ]  # fmt: skip
