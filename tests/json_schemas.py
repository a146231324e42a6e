"""JSON Schemas of what commands print with `-o json`, made of the shapes that `tests/golden/outside/json.txt` pins.

`waltzctl/show/schemas.json` is in the wheel: command → schema (draft 2020-12). A schema permits further fields, because a
minor version may add some, and null for every value that is not known, such as that of a daemon that does not answer. No
field is required but `version`. `./dev generate` writes the file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waltzctl.show.forms import JSON_VERSION

ROOT = Path(__file__).parents[1]
SHAPES = ROOT / "tests" / "golden" / "outside" / "json.txt"
SCHEMAS = ROOT / "waltzctl" / "show" / "schemas.json"
TYPES = {"bool": "boolean", "number": "number", "text": "string", "null": "null"}
VERSION_ONCE = "segment dump "
"""Command that prints the version in the first of its lines only; the schema is that of each line."""
_STEP = re.compile(r"\[\]|\.[^.\[]+")


@dataclass
class Node:
    """What was found at one path: types of single values, and the nodes below."""

    types: set[str] = field(default_factory=set)
    fields: dict[str, Node] = field(default_factory=dict)
    """By name; `{}` stands for names of the cluster."""
    items: Node | None = None

    def at(self, path: str) -> Node:
        node = self
        for step in _STEP.findall(path):
            if step == "[]":
                node.items = node.items or Node()
                node = node.items
            else:
                node = node.fields.setdefault(step[1:], Node())
        return node

    def schema(self) -> dict[str, Any]:
        """Return the schema. Where nothing but null or an empty value was pinned, any value is permitted."""
        types = {TYPES[one] for one in self.types}
        found: dict[str, Any] = {}
        if self.fields:
            types.add("object")
            named = {name: node.schema() for name, node in sorted(self.fields.items()) if name != "{}"}
            if named:
                found["properties"] = named
            if "{}" in self.fields:
                found["additionalProperties"] = self.fields["{}"].schema()
        if self.items is not None:
            types.add("array")
            found["items"] = self.items.schema()
        return {"type": sorted(types | {"null"}), **found} if types - {"null"} else {}


def schemas(shapes: str) -> dict[str, Any]:
    """Return the schema of each command in the text of the shapes."""
    roots: dict[str, Node] = {}
    for line in shapes.splitlines():
        command, _, shape = line.partition(": ")
        path, _, kind = shape.rpartition(" ")
        roots.setdefault(command, Node()).at(path).types.add(kind)
    found = {}
    for command, root in roots.items():
        schema = root.schema()
        if "version" in root.fields:
            schema["properties"]["version"] = {"const": JSON_VERSION}
            if not command.startswith(VERSION_ONCE):
                schema["required"] = ["version"]
        found[command] = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "type": "object"}
    return found


def text() -> str:
    made = schemas(SHAPES.read_text(encoding="utf-8"))
    return json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


_PYTHON: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def faults(schema: dict[str, Any], value: Any, path: str = "") -> Iterator[str]:
    """Yield where a value breaks a schema of the kinds that are made here."""
    if "const" in schema:
        if value != schema["const"]:
            yield f"{path} is {json.dumps(value)[:40]}, and not {schema['const']}"
        return
    kinds = schema.get("type", list(_PYTHON))
    allowed = [kinds] if isinstance(kinds, str) else kinds
    if not any(isinstance(value, _PYTHON[kind]) and (kind != "number" or type(value) is not bool) for kind in allowed):
        yield f"{path or '.'} is {json.dumps(value)[:40]}, and not {' or '.join(allowed)}"
        return
    if isinstance(value, dict):
        yield from (f"{path}.{name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, inner in value.items():
            below = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
            yield from faults(below, inner, f"{path}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from faults(schema.get("items", {}), inner, f"{path}[]")


if __name__ == "__main__":
    SCHEMAS.write_text(text(), encoding="utf-8")
    sys.exit(0)
