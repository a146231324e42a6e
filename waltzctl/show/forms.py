"""One result in every form: tables for people, JSON and YAML for programs, CSV for spreadsheets, names for shells.

The columns of a thing are declared once: a column has a head for people, a key for programs, and a way to its value. A list
is shown by its columns alone; a page says more, and one list stands for it as CSV and as names. Things that come one by one
are printed as they come. JSON and YAML carry a version and only grow; tables may change.
"""

from __future__ import annotations

import csv
import enum
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar, get_args
from uuid import UUID

import typer
import yaml
from typer import Option

from waltzctl.shell.options import OUTPUT
from waltzctl.show.terminal import console, printable, size, table
from waltzd.errors import WaltzError

if TYPE_CHECKING:
    from rich.console import Console

JSON_VERSION = 1
Form = Literal["table", "wide", "json", "yaml", "csv", "name"]
FORMS = get_args(Form)
AnyForm = Annotated[Form, Option("-o", "--output", rich_help_panel=OUTPUT, help="For people, or for scripts.")]
"""Of every command that reads; `Output` is that of commands that change something."""
T = TypeVar("T")


@dataclass(frozen=True)
class Column(Generic[T]):
    name: str
    """Its head, and with underscores its key in JSON; empty for programs only."""
    of: Callable[[T], Any] | None = None
    """The value; without it a thing is a mapping, and has it by the key."""
    is_right: bool = False
    is_wide: bool = False
    """Only shown in the form `wide`."""
    is_size: bool = False
    """A number of bytes, which people read as MB."""
    cell: Callable[[Any], str] | None = None
    """How people read the value, where that is special."""
    label: Callable[[T], str] | None = None
    """How people read the thing in this column, where that takes more than the value."""
    json: str | None = None
    """What programs call it, where that is not its head; empty for people only."""

    @property
    def key(self) -> str:
        return self.name.replace(" ", "_") if self.json is None else self.json

    def value(self, thing: Any) -> Any:
        return thing[self.key] if self.of is None else self.of(thing)

    def shown(self, thing: Any) -> str:
        if self.label is not None:
            return self.label(thing)
        value = self.value(thing)
        if self.cell is not None:
            return self.cell(value)
        return size(value) if self.is_size and value is not None else _shown(value)


Columns = tuple[Column[T], ...]


@dataclass(frozen=True, kw_only=True)
class Listing(Generic[T]):
    kind: str
    """What they are, in the plural: the key in JSON."""
    columns: Columns[T]
    """The first one is the name."""
    rows: Sequence[T]
    nothing: str = ""
    """What to say to a person when there are none."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What JSON and YAML say beside the list."""

    @property
    def document(self) -> Mapping[str, Any]:
        return {**self.more, self.kind: objects(self.columns, self.rows)}

    def draw(self, out: Console, *, is_wide: bool = False) -> None:
        grid(out, self.columns, self.rows, is_wide=is_wide)
        if not self.rows and self.nothing:
            out.print(self.nothing, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class Page:
    draw: Callable[[Console], None]
    """For people, on the console that it is given."""
    things: Listing[Any]
    """What it is about most."""
    told: Mapping[str, Any] | None = None
    """For programs, where that is more than these things."""

    @property
    def document(self) -> Mapping[str, Any]:
        return self.things.document if self.told is None else self.told


def objects(columns: Columns[T], things: Sequence[T]) -> list[dict[str, Any]]:
    """A mapping may have more than its columns."""
    return [
        dict(thing) if isinstance(thing, Mapping) else {one.key: one.value(thing) for one in columns if one.key}
        for thing in things
    ]


def grid(out: Console, columns: Columns[T], things: Sequence[T], *, is_wide: bool = False) -> None:
    """A table."""
    shown = [one for one in columns if one.name and (is_wide or not one.is_wide)]
    rows = [tuple(one.shown(thing) for one in shown) for thing in things]
    table(out, tuple(one.name for one in shown), rows, right=tuple(one.name for one in shown if one.is_right))


def put(found: Listing[Any] | Page, output: str) -> None:
    things = found if isinstance(found, Listing) else found.things
    if output == "json":
        put_json(found.document)
    elif output == "yaml":
        _put_yaml(found.document)
    elif output == "name":
        for row in things.rows:
            typer.echo(printable(str(things.columns[0].value(row))))
    elif output == "csv":
        put_csv(things.columns, things.rows)
    elif output == "wide":
        things.draw(console(), is_wide=True)
    else:
        found.draw(console())


Lines = Annotated[
    Literal["table", "json", "csv"],
    Option("-o", "--output", rich_help_panel=OUTPUT, help="For people; JSON Lines, an object for each; or CSV."),
]
"""Of commands that print things as they come."""


def stream(columns: Columns[T], output: str, put_one: Callable[[T], None] | None = None) -> Callable[[T], None]:
    """A sink for things that come one after the other: `put_one` prints one of them for people, where that is a form."""
    if output == "json":
        return lambda thing: typer.echo(json.dumps(objects(columns, [thing])[0], default=_plain))
    if output != "csv":
        assert put_one is not None, output
        return put_one
    is_begun = False

    def put_row(thing: T) -> None:
        nonlocal is_begun
        put_csv(columns, [thing], with_heads=not is_begun)
        is_begun = True

    return put_row


def put_csv(columns: Columns[T], things: Sequence[T], *, with_heads: bool = True) -> None:
    """A structure has its keys in JSON and YAML only; a cell holds one value, or several with blanks between them."""
    shown = [one for one in columns if one.name and one.key]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if with_heads:
        writer.writerow([one.key for one in shown])
    writer.writerows([[printable(_plain_text(one.value(thing))) for one in shown] for thing in things])
    typer.echo(text.getvalue(), nl=False)


def put_json(value: Mapping[str, Any]) -> None:
    typer.echo(json.dumps({"version": JSON_VERSION, **value}, indent=2, default=_plain))


def _plain(value: object) -> str:
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{value!r} is nothing that JSON has")


def _put_yaml(value: Mapping[str, Any]) -> None:
    """By way of JSON, so that both say the same and an enumeration is its text."""
    plain = json.loads(json.dumps({"version": JSON_VERSION, **value}, default=_plain))
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    if printable(text) != text:  # escaped as YAML does it, so that it is still what it was
        text = yaml.safe_dump(plain, sort_keys=False)
    typer.echo(text.rstrip("\n"))


def _plain_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    if isinstance(value, Mapping):
        return json.dumps(value, default=_plain)
    return "" if value is None else str(value)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


# -- values as JSON ----------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Dataclasses as objects, errors as their code and message, everything else that JSON does not know as its text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {found.name: plain(getattr(value, found.name)) for found in fields(value)}
    if isinstance(value, WaltzError):
        return {"code": value.code, "message": value.message}
    if isinstance(value, enum.Enum):
        return value.name.lower() if isinstance(value, enum.IntEnum) else str(value.value)
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def whole_error(error: WaltzError | None) -> dict[str, str] | None:
    """With what was not done, and what to do next."""
    if error is None:
        return None
    told = plain(error) | {"not_done": error.detail_not_done, "next_step": error.detail_next_step}
    assert isinstance(told, dict)
    return told
