"""Renderer of results: tables for people, JSON and YAML for programs, CSV for spreadsheets, names for shells.

The columns of a result are declared once, from the fields of what a command returns: each has a heading for people, a key
for programs, and a path to its value. A result is a list of rows, with further lines and tables for people and further keys
for programs. Rows that arrive one by one are printed as they arrive. JSON and YAML carry a version and only gain keys;
tables may change.
"""

from __future__ import annotations

import csv
import enum
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar, get_args

import typer
from typer import Option

from waltzctl.shell.options import OUTPUT
from waltzctl.show.terminal import Screen, console, count, paragraph, printable, silence_stdout, table
from waltzd.errors import WaltzError

if TYPE_CHECKING:
    from rich.console import Console

JSON_VERSION = 1
Form = Literal["table", "wide", "json", "yaml", "csv", "name"]
FORMS = get_args(Form)
AnyForm = Annotated[Form, Option("-o", "--output", rich_help_panel=OUTPUT, help="Output format.")]
"""Output option of commands that read; `Output` is the one of commands that change something."""
NAMING = frozenset({"partition", "id", "pid"})
"""Columns whose numbers are names, printed without separators of thousands."""
T = TypeVar("T")

# -- what a result is made of ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column(Generic[T]):
    name: str
    """Heading of the column, and with underscores its key in JSON; "" if people do not see it."""
    of: str | Callable[[T], Any] = ""
    """Path of attributes to the value, with dots, or a function of the row; "" for the attribute named like the column. In
    a row that is a mapping, the key."""
    cell: Callable[[Any], str] | None = None
    """Format of a value for people; None for the default. It is not called for None."""
    none: str = ""
    """Text in place of None."""
    label: Callable[[T], str] | None = None
    """Format of the cell from the whole row; None to use the value alone."""
    json: str | None = None
    """Key in JSON if it is not the heading; "" to leave the column out."""
    is_wide: bool = False
    """True if only the form `wide` shows the column."""
    is_right: bool | None = None
    """True to align right; None to do so if all values are numbers."""

    @property
    def key(self) -> str:
        return self.name.replace(" ", "_") if self.json is None else self.json

    def value(self, row: Any) -> Any:
        if callable(self.of):
            return self.of(row)
        if isinstance(row, Mapping):
            return row[self.of or self.key]
        for name in (self.of or self.name.replace(" ", "_") or self.key).split("."):
            row = None if row is None else getattr(row, name)
        return row

    def shown(self, row: Any) -> str:
        if self.label is not None:
            return self.label(row)
        value = self.value(row)
        if value is None:
            return self.none
        return _shown(value, is_name=self.key in NAMING) if self.cell is None else self.cell(value)

    def is_of_numbers(self, rows: Iterable[Any]) -> bool:
        """Return whether the cells are aligned right."""
        if self.is_right is not None:
            return self.is_right
        values = [value for row in rows if (value := self.value(row)) is not None]
        return bool(values) and all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)


Columns = tuple[Column[T], ...]


def attributes(names: str, of: str = "", **given: Any) -> Columns[Any]:
    """Return columns named like the attributes that they show, all found at `of`."""
    at = f"{of}." if of else ""
    return tuple(Column(name.replace("_", " "), f"{at}{name}", **given) for name in names.split())


def pick(columns: Columns[T], *names: str) -> Columns[T]:
    """Return the columns with these headings, in this order, including columns for `wide`."""
    found = {one.name: replace(one, is_wide=False) for one in columns}
    return tuple(found[name] for name in names)


@dataclass(frozen=True)
class Line:
    text: str
    style: str = ""
    fit: Literal["whole", "wrap", "cut"] = "whole"
    """`whole`: never broken, so that a command in it can be copied. `wrap`: wrapped with a hanging indent. `cut`: cut at
    the end of the screen."""


@dataclass(frozen=True)
class Table(Generic[T]):
    columns: Columns[T]
    rows: Sequence[T]


Part = Line | Table[Any] | str
"""Element of a page for people. A str is a line without a style."""


def verdict(text: str, *, is_good: bool) -> Line:
    return Line(text, "bold green" if is_good else "bold red")


def warnings(texts: Iterable[str]) -> list[Line]:
    return [Line(text, "yellow", "wrap") for text in texts]


def capped(columns: Columns[T], shown: Sequence[T], total: int, noun: str, way: str) -> list[Part]:
    """Return a table of some of `total` rows, with a line that names the `way` to see the rest."""
    rest = [f"{count(total - len(shown), f'more {noun}')}: {way}"] if len(shown) < total else []
    return [Table(columns, shown), *rest]


def next_step(step: str) -> Line:
    return Line(f"  Next: {step}")


@dataclass(frozen=True, kw_only=True)
class Listing(Generic[T]):
    """Result of a command, which can be printed in every form."""

    kind: str = ""
    """Noun for the rows in the plural: their key in JSON."""
    columns: Columns[T] = ()
    """Columns; the first one is the name of a row."""
    rows: Sequence[T] = ()
    nothing: str = ""
    """Text for people if there are no rows."""
    notes: Sequence[Part] = ()
    """Elements below the table, for people."""
    page: Sequence[Part] | None = None
    """Page for people, in place of the table and its notes; None for the table."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of JSON and YAML."""
    content: Mapping[str, Any] | None = None
    """Content of JSON and YAML, in place of the rows; None for the rows."""

    @property
    def document(self) -> Mapping[str, Any]:
        return {**self.more, self.kind: objects(self.columns, self.rows)} if self.content is None else self.content

    def draw(self, out: Console, *, is_wide: bool = False) -> None:
        if self.page is not None and not is_wide:
            return draw(out, self.page)
        if not self.rows and self.nothing:
            draw(out, [self.nothing])
        draw(out, [Table(self.columns, self.rows), *(() if is_wide else self.notes)], is_wide=is_wide)


# -- the forms ---------------------------------------------------------------------------------------------------------


def draw(out: Console, parts: Iterable[Part], *, is_wide: bool = False) -> None:
    """Print elements of a page."""
    for part in parts:
        if isinstance(part, Table):
            shown = [one for one in part.columns if one.name and (is_wide or not one.is_wide)]
            cells = [tuple(one.shown(row) for one in shown) for row in part.rows]
            right = tuple(one.name for one in shown if one.is_of_numbers(part.rows))
            table(out, tuple(one.name for one in shown), cells, right=right)
        elif isinstance(part, str):
            out.print(part, soft_wrap=True)
        elif part.fit == "wrap":
            paragraph(out, part.text, part.style)
        elif part.fit == "cut":
            out.print(part.text, style=part.style, no_wrap=True, overflow="ellipsis")
        else:
            out.print(part.text, style=part.style, soft_wrap=True)


@contextmanager
def _whole() -> Iterator[None]:
    """Print a whole result. If its reader goes away, the rest is dropped, and the command goes on: its exit code still has
    the result."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()


def put(found: Listing[Any], output: str) -> None:
    with _whole():
        _put(found, output)


def _put(found: Listing[Any], output: str) -> None:
    if output == "json":
        _put_json(found.document)
    elif output == "yaml":
        _put_yaml(found.document)
    elif output == "name":
        for row in found.rows:
            typer.echo(printable(str(found.columns[0].value(row))))
    elif output == "csv":
        put_csv(found.columns, found.rows)
    else:
        found.draw(console(), is_wide=output == "wide")


def put_again(found: Listing[Any] | WaltzError, output: str, screen: Screen | None, every: float) -> None:
    """Show a result that is refreshed, or the error in its place: on the open screen, else below the earlier output."""
    if screen is not None:
        screen.put(found if isinstance(found, WaltzError) else found.draw, every)
    elif isinstance(found, WaltzError):
        for line in found.lines():
            typer.echo(printable(line), err=True)
    else:
        _put(found, output)  # ends with its reader


def screen_for(output: str) -> AbstractContextManager[Screen | None]:
    """Return a screen for the form `table`; None for other forms, whose results are printed in sequence."""
    return Screen() if output == "table" else nullcontext()


def objects(columns: Columns[T], rows: Iterable[T]) -> list[dict[str, Any]]:
    """Return rows as JSON objects. A row that is a mapping keeps all its keys."""
    return [
        dict(row) if isinstance(row, Mapping) else {one.key: one.value(row) for one in columns if one.key} for row in rows
    ]


Lines = Annotated[
    Literal["table", "json", "csv"],
    Option("-o", "--output", rich_help_panel=OUTPUT, help="For people; JSON Lines, an object for each; or CSV."),
]
"""Output option of commands that print rows as they arrive."""


def stream(columns: Columns[T], output: str, put_one: Callable[[T], None] | None = None) -> Callable[[T], None]:
    """Return a function that prints rows as they arrive; `put_one` prints a row for people."""
    if output == "json":
        return lambda row: typer.echo(json.dumps(objects(columns, [row])[0], default=plain))
    if output != "csv":
        assert put_one is not None, output
        return put_one
    is_begun = False

    def put_row(row: T) -> None:
        nonlocal is_begun
        put_csv(columns, [row], with_heads=not is_begun)
        is_begun = True

    return put_row


def put_csv(columns: Columns[T], rows: Iterable[T], *, with_heads: bool = True) -> None:
    """Print rows as CSV. A cell holds one value, or several separated by blanks."""
    shown = [one for one in columns if one.name and one.key]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if with_heads:
        writer.writerow([one.key for one in shown])
    writer.writerows([[printable(_plain_text(one.value(row))) for one in shown] for row in rows])
    typer.echo(text.getvalue(), nl=False)


def put_json(value: Mapping[str, Any]) -> None:
    with _whole():
        _put_json(value)


def _put_json(value: Mapping[str, Any]) -> None:
    typer.echo(json.dumps({"version": JSON_VERSION, **value}, indent=2, default=plain))


def _put_yaml(value: Mapping[str, Any]) -> None:
    """Print YAML. Values pass through JSON first, so that both forms are equal."""
    import yaml

    whole = json.loads(json.dumps({"version": JSON_VERSION, **value}, default=plain))
    text = yaml.safe_dump(whole, sort_keys=False, allow_unicode=True)
    if printable(text) != text:  # escaped as YAML does it, so that it is still what it was
        text = yaml.safe_dump(whole, sort_keys=False)
    typer.echo(text.rstrip("\n"))


def _plain_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    if isinstance(value, Mapping):
        return json.dumps(value, default=plain)
    return "" if value is None else str(plain(value))


def _shown(value: Any, *, is_name: bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and not is_name:
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(plain(value))


# -- values as JSON ----------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Convert a value for JSON: a dataclass to an object, an error to code and message, an unknown type to text."""
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
    """Return an error as an object, with what was not done and the next step."""
    if error is None:
        return None
    whole = plain(error) | {"not_done": error.detail_not_done, "next_step": error.detail_next_step}
    assert isinstance(whole, dict)
    return whole


# -- measured numbers --------------------------------------------------------------------------------------------------


def rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def measured(name: str, of: str, cell: Callable[[Any], str], *, json: str | None = None, digits: int = 4) -> Column[Any]:
    """Return a column of measured numbers, in which a dash stands for one that is not known."""
    known = Column[Any](name, of)
    return Column(name, lambda row: rounded(known.value(row), digits), cell=cell, none="-", json=json, is_right=True)


def tenths(value: float) -> str:
    return f"{value:,.1f}"
