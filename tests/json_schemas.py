"""JSON Schemas of what commands print with `-o json`.

`waltzctl/show/schemas.json` is in the wheel: words of a command → schema (draft 2020-12). A schema permits further fields,
because a minor version may add some, and null for every value that is not known, such as that of a daemon that does not
answer. No field is required but `version`. `./dev generate` writes the file.

The schemas are made of the shapes of answers: `json.txt` has those that `tests/cli/test_json_shapes.py` pins, and
`json-more.txt` what else tests have seen. Every test checks every answer of a command that runs in its process, in whatever
form it is printed: a field that is in no schema, or has another type, fails the test (`install`). For a new command or
field run its tests with `WALTZ_SHAPES=FILE`, then `python -m tests.json_schemas FILE`, and look at what was added."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer._click.globals import get_current_context

from waltzctl.main import COMMANDS
from waltzctl.show.forms import JSON_VERSION, Listing, plain

ROOT = Path(__file__).parents[1]
OUTSIDE = ROOT / "tests" / "golden" / "outside"
SHAPES = OUTSIDE / "json.txt", OUTSIDE / "json-more.txt"
SCHEMAS = ROOT / "waltzctl" / "show" / "schemas.json"
TYPES = {"bool": "boolean", "number": "number", "text": "string", "null": "null"}
KINDS = {bool: "bool", int: "number", float: "number", str: "text", type(None): "null"}
VERSION_ONCE = ("segment dump",)
"""Commands that print the version in the first of their lines only; the schema is that of each line."""
RECORD = "WALTZ_SHAPES"
"""Variable with a file to which the shapes of all answers are added, in place of checking them."""
MAPS = (
    "answered_milliseconds", "cleared", "marks", "replicas", "servers_behind", "silent_servers", "unmet",
)  # fmt: skip
"""Fields whose values are objects with names of the cluster as keys."""
ANYTHING = ("payload",)
"""Fields that may have any value: what a decoder makes of a payload."""
_STEP = re.compile(r"\[\]|\.[^.\[]+")
_FIELD = re.compile(r"[A-Za-z_]\w*")


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
            fields = [(name, node) for name, node in sorted(self.fields.items()) if name != "{}"]
            named = {name: {} if name in ANYTHING else node.schema() for name, node in fields}
            if named:
                found["properties"] = named
            if "{}" in self.fields:
                found["additionalProperties"] = self.fields["{}"].schema()
        if self.items is not None:
            types.add("array")
            found["items"] = self.items.schema()
        return {"type": sorted(types | {"null"}), **found} if types - {"null"} else {}


def command_words(line: Sequence[str]) -> str:
    """Return the words of the command at the beginning of a command line."""
    found = ""
    for word in line:
        if word not in COMMANDS.get(found, ()):
            break
        found = f"{found} {word}".strip()
    return found


def shape(value: object, path: str = "") -> Iterator[str]:
    """Yield `path type` for everything in an answer."""
    if isinstance(value, dict) and value:
        is_map = path.rpartition(".")[2] in MAPS
        for key, inner in value.items():
            name = "{}" if is_map or not _FIELD.fullmatch(key) else key
            yield from [f"{path}.{key} null"] if name in ANYTHING else shape(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for inner in value or [None]:
            yield from shape(inner, f"{path}[]")
    else:
        yield f"{path} {KINDS.get(type(value), 'null')}"


def schemas(shapes: str) -> dict[str, Any]:
    """Return the schema of each command in the text of the shapes."""
    roots: dict[str, Node] = {}
    for line in shapes.splitlines():
        command, _, shape = line.partition(": ")
        path, _, kind = shape.rpartition(" ")
        roots.setdefault(command_words(command.split()), Node()).at(path).types.add(kind)
    found = {}
    for command, root in roots.items():
        schema = root.schema()
        if "version" in root.fields:
            schema["properties"]["version"] = {"const": JSON_VERSION}
            if command not in VERSION_ONCE:
                schema["required"] = ["version"]
        found[command] = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "type": "object"}
    return found


def text() -> str:
    made = schemas("".join(path.read_text(encoding="utf-8") for path in SHAPES))
    return json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


_PYTHON: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def faults(schema: dict[str, Any], value: Any, path: str = "", *, is_closed: bool = False) -> Iterator[str]:
    """Yield where a value breaks a schema of the kinds that are made here; with `is_closed`, fields that it does not name,
    too."""
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
            below = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if below is None and is_closed and "properties" in schema:
                yield f"{path}.{name} is in no schema"
            yield from faults(below or {}, inner, f"{path}.{name}", is_closed=is_closed)
    elif isinstance(value, list):
        for inner in value:
            yield from faults(schema.get("items", {}), inner, f"{path}[]", is_closed=is_closed)


@cache
def published() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SCHEMAS.read_text(encoding="utf-8"))
    return found


def install(patches: pytest.MonkeyPatch) -> None:
    """Check every answer of a command in this process, at the two places through which all of them pass."""
    echo, draw = typer.echo, Listing.draw

    def echo_checked(message: Any = "", *args: Any, **given: Any) -> None:
        context = get_current_context(silent=True)
        if context is not None and not given.get("err") and output_of(context) == "json":
            check(running_command(context), json.loads(message))
        echo(message, *args, **given)

    def draw_checked(self: Listing[Any], *args: Any, **given: Any) -> None:
        context = get_current_context(silent=True)
        if context is not None:
            answer = json.dumps({"version": JSON_VERSION, **self.document}, default=plain)
            check(running_command(context), json.loads(answer))
        draw(self, *args, **given)

    patches.setattr(typer, "echo", echo_checked)
    patches.setattr(Listing, "draw", draw_checked)


def output_of(context: Any) -> str | None:
    """Return the value of the option `--output` of a running command; None if it has no such option."""
    names = [one.name for one in context.command.params if "--output" in one.opts]
    return context.params.get(names[0]) if names else None


def running_command(context: Any) -> str:
    """Return the words of a running command."""
    words = []
    while context.parent is not None:
        words.append(context.info_name)
        context = context.parent
    return " ".join(reversed(words))


def check_output(arguments: Sequence[str], text: str) -> None:
    """Check what a command with `-o json` printed in a process of its own: one answer, or one for each line."""
    lines_apart = text.startswith("{") and text.count("\n{")
    for one in text.splitlines() if lines_apart else [text]:
        check(command_words(arguments), json.loads(one))


def check(command: str, answer: Any) -> None:
    """Raise if an answer does not fit the schema of its command; record its shape if `RECORD` is set."""
    if to := os.environ.get(RECORD):
        with Path(to).open("a", encoding="utf-8") as file:
            file.write("".join(f"{command}: {line}\n" for line in dict.fromkeys(shape(answer))))
        return
    assert command in published(), f"{command} has no schema"
    found = list(faults(published()[command], answer, is_closed=True))
    assert found == [], f"{command}: {found[:5]}"


def add(recorded: str) -> None:
    """Add recorded shapes that are not pinned yet."""
    pinned, more = SHAPES
    known = {(command_words(one.split()), one.partition(": ")[2]) for one in pinned.read_text("utf-8").splitlines()}
    lines = {*more.read_text("utf-8").splitlines(), *recorded.splitlines()}
    new = sorted(one for one in lines if (one.partition(": ")[0], one.partition(": ")[2]) not in known)
    more.write_text("".join(f"{one}\n" for one in new), encoding="utf-8")


if __name__ == "__main__":
    for path in sys.argv[1:]:
        add(Path(path).read_text(encoding="utf-8"))
    SCHEMAS.write_text(text(), encoding="utf-8")
    sys.exit(0)
