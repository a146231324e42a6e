"""Lists of things: one declaration of columns, and every form in which a person or a script may want them."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer
import yaml
from typer import Option

from waltzctl.options import OUTPUT
from waltzctl.render import JSON_VERSION, console, printable, size, table

FORMS = ("table", "wide", "json", "yaml", "csv", "name")


@dataclass(frozen=True)
class Column:
    name: str
    """Its head, and with underscores its key in JSON."""
    is_right: bool = False
    is_wide: bool = False
    """Only shown in the form `wide`."""
    is_size: bool = False
    """A number of bytes, which people read as MB."""

    @property
    def key(self) -> str:
        return self.name.replace(" ", "_")


@dataclass(frozen=True, kw_only=True)
class Listing:
    kind: str
    """What they are, in the plural: the key in JSON."""
    columns: tuple[Column, ...]
    """The first one is the name."""
    rows: Sequence[Mapping[str, Any]]
    """By the keys of the columns; may have more, for JSON and YAML."""
    nothing: str
    """What to say to a person when there are none."""


ListOutput = Annotated[
    Literal["table", "wide", "json", "yaml", "csv", "name"],
    Option("-o", "--output", rich_help_panel=OUTPUT, help="For people, or for scripts."),
]


def put_yaml(value: Mapping[str, Any]) -> None:
    """By way of JSON, so that both say the same and an enumeration is its text."""
    plain = json.loads(json.dumps({"version": JSON_VERSION, **value}))
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    if printable(text) != text:  # escaped as YAML does it, so that it is still what it was
        text = yaml.safe_dump(plain, sort_keys=False)
    typer.echo(text.rstrip("\n"))


def put(found: Listing, output: str, **more: Any) -> None:
    """`more`: what JSON and YAML say beside the list."""
    if output in ("json", "yaml"):
        value = {"version": JSON_VERSION, **more, found.kind: [dict(row) for row in found.rows]}
        if output == "yaml":
            put_yaml(value)
        else:
            typer.echo(json.dumps(value, indent=2))
        return
    if output == "name":
        for row in found.rows:
            typer.echo(printable(str(row[found.columns[0].key])))
        return
    if output == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([column.key for column in found.columns])
        writer.writerows([[printable(_plain(row[column.key])) for column in found.columns] for row in found.rows])
        return
    columns = [column for column in found.columns if output == "wide" or not column.is_wide]
    out = console()
    rows = [tuple(_cell(column, row[column.key]) for column in columns) for row in found.rows]
    right = tuple(column.name for column in columns if column.is_right)
    table(out, tuple(column.name for column in columns), rows, right=right)
    if not rows:
        out.print(found.nothing, soft_wrap=True)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "" if value is None else str(value)


def _cell(column: Column, value: Any) -> str:
    return size(value) if column.is_size and value is not None else _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
