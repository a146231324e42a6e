"""One list in all its forms: what a person sees at 80 columns, and what scripts get."""

from __future__ import annotations

import csv
import enum
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO
from uuid import UUID

import pytest
import typer
import yaml

from tests.archives import Uploads
from tests.batches import batches_of
from waltzctl.main import run
from waltzctl.shell.options import command_of
from waltzctl.show.forms import (
    AnyForm,
    Column,
    Columns,
    Line,
    Listing,
    Table,
    attributes,
    capped,
    draw,
    pick,
    put,
    put_again,
    stream,
    verdict,
)
from waltzctl.show.terminal import console
from waltzd.archive.local import LocalStore
from waltzd.errors import CannotConnect, WaltzError


class Colour(enum.StrEnum):
    RED = "red"


ROWS: list[dict[str, Any]] = [
    {"name": "one", "size_of_it": 12345, "is_up": True, "groups": ["a", "b"], "colour": Colour.RED, "why": None, "more": 1},
    {"name": "two, [bold]", "size_of_it": 0, "is_up": False, "groups": (), "colour": Colour.RED, "why": 'a "b"', "more": 2},
]
COLUMNS: Columns[Any] = (
    Column("name"), Column("size of it", is_right=True), Column("is up"), Column("groups"),
    Column("colour", is_wide=True), Column("why", is_wide=True),
)  # fmt: skip
FOUND = Listing(kind="things", columns=COLUMNS, rows=ROWS, nothing="There are no things.")
Shown = Callable[..., str]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    def show(form: str, found: Listing[Any] = FOUND, *, notes: list[str] | None = None, **more: Any) -> str:
        put(replace(found, more=more, notes=notes or ()), form)
        said = capsys.readouterr()
        assert said.err == ""
        return said.out

    return show


def test_a_table(shown: Shown) -> None:
    lines = [line.rstrip() for line in shown("table").splitlines() if line.strip()]
    assert lines[0].split() == ["name", "size", "of", "it", "is", "up", "groups"]
    assert lines[2].split() == ["one", "12,345", "yes", "a,", "b"]
    assert lines[3].split() == ["two,", "[bold]", "0", "no"]
    assert "red" not in "".join(lines)


def test_a_table_in_a_pipe_is_not_wrapped(shown: Shown) -> None:
    name = "x" * 200
    text = shown("table", Listing(kind="t", columns=COLUMNS[:1], rows=[{"name": name}], nothing=""))
    assert name in text


def test_the_wide_form_has_all_columns_each_on_one_line(shown: Shown) -> None:
    lines = [line for line in shown("wide").splitlines() if line.strip()]
    assert len(lines) == 2 + len(ROWS)
    assert lines[2].split() == ["one", "12,345", "yes", "a,", "b", "red"]


@pytest.mark.parametrize(("form", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_for_programs(shown: Shown, form: str, read: Callable[[str], Any]) -> None:
    found = read(shown(form, leader="one"))
    assert list(found) == ["version", "leader", "things"]
    assert (found["version"], found["leader"]) == (1, "one")
    assert found["things"][0] == {**ROWS[0], "colour": "red"}
    assert found["things"][1] == {**ROWS[1], "groups": [], "colour": "red"}


def test_for_spreadsheets(shown: Shown) -> None:
    found = list(csv.reader(io.StringIO(shown("csv"))))
    assert found == [
        ["name", "size_of_it", "is_up", "groups", "colour", "why"],
        ["one", "12345", "true", "a b", "red", ""],
        ["two, [bold]", "0", "false", "", "red", 'a "b"'],
    ]


def test_only_names(shown: Shown) -> None:
    assert shown("name") == "one\ntwo, [bold]\n"


def test_nothing(shown: Shown) -> None:
    empty = Listing(kind="things", columns=COLUMNS, rows=[], nothing="There are no things.")
    assert shown("table", empty) == shown("wide", empty) == "There are no things.\n"
    assert json.loads(shown("json", empty)) == {"version": 1, "things": []}
    assert shown("csv", empty) == "name,size_of_it,is_up,groups,colour,why\n"
    assert shown("name", empty) == ""


@dataclass(frozen=True)
class Replica:
    end: int | None


@dataclass(frozen=True)
class Row:
    """With a field in another object, which may be missing."""

    partition: int
    replica: Replica | None
    error: WaltzError | None = None


def test_columns_are_declared_by_attribute(shown: Shown) -> None:
    columns: Columns[Row] = (
        Column("partition"),
        Column("last", "replica.end", none="-"),
        Column("next", lambda row: row.replica and row.partition + 1, json=""),
        Column("", "error", json="error"),
    )
    rows = [Row(1000, Replica(12345)), Row(2, Replica(None)), Row(3, None, CannotConnect("no answer"))]
    found = Listing(kind="rows", columns=columns, rows=rows)
    lines = [line for line in shown("table", found).splitlines() if line.strip()]
    assert [line.split() for line in lines[2:]] == [["1000", "12,345", "1,001"], ["2", "-", "3"], ["3", "-"]]
    assert json.loads(shown("json", found))["rows"] == [
        {"partition": 1000, "last": 12345, "error": None},
        {"partition": 2, "last": None, "error": None},
        {"partition": 3, "last": None, "error": {"code": "W4001", "message": "no answer"}},
    ]
    assert [one.is_of_numbers(rows) for one in columns] == [True, True, True, False]
    assert [one.name for one in pick(columns, "last", "partition")] == ["last", "partition"]
    assert attributes("first_id size", of="log", is_wide=True)[0] == Column("first id", "log.first_id", is_wide=True)


def test_a_page_is_made_of_parts(shown: Shown) -> None:
    lines = [Line("long " * 30, fit="wrap"), Line("cut " * 30, fit="cut"), Line("whole " * 30)]
    found = Listing(
        kind="things", columns=COLUMNS, rows=ROWS, page=[verdict("well", is_good=True), *lines], content={"a": 1}
    )
    said = shown("table", found).splitlines()
    assert said[0] == "well"
    assert [len(line) <= 80 for line in said[1:]] == [True, True, True, False]
    assert len(shown("wide", found).splitlines()) == len(shown("wide").splitlines()), "all columns, and nothing around them"
    assert json.loads(shown("json", found)) == {"version": 1, "a": 1}
    assert shown("table", notes=["a note"]) == shown("table") + "a note\n"
    rest = capped(COLUMNS, ROWS[:1], 2, "thing", "-n shows more")
    assert rest == [Table(COLUMNS, ROWS[:1]), "1 more thing: -n shows more"]


def test_a_command_gets_the_form() -> None:
    got: list[str] = []

    def listed(*, output: AnyForm = "table") -> int:
        got.append(output)
        return 0

    command, forms = command_of("listed", listed), ["table", "wide", "json", "yaml", "csv", "name"]
    for form in forms:
        command.main(["-o", form], standalone_mode=False)
    command.main([], standalone_mode=False)
    assert got == [*forms, "table"]
    with pytest.raises(typer.BadParameter):
        command.main(["-o", "xml"], standalone_mode=False)


def test_things_that_come_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    """As CSV they have one line of heads, and the same cells as a list; in JSON, an object a line."""
    for form in ("csv", "json"):
        put_one = stream(COLUMNS, form)
        assert capsys.readouterr().out == "", "nothing is said of nothing"
        for row in ROWS:
            put_one(row)
        lines = capsys.readouterr().out.splitlines()
        if form == "json":
            assert [json.loads(line)["size_of_it"] for line in lines] == [12345, 0]
        else:
            put(FOUND, "csv")
            assert lines == capsys.readouterr().out.splitlines()
    told: list[Any] = []
    stream(COLUMNS, "table", told.append)(ROWS[0])
    assert told == ROWS[:1]


@contextmanager
def unread() -> Iterator[None]:
    """Standard output and standard error are pipes that nobody reads any more."""
    with ExitStack() as pipes, pytest.MonkeyPatch.context() as patched:
        for name in ("stdout", "stderr"):
            read, write = os.pipe()
            os.close(read)
            file = os.fdopen(write, "w")
            pipes.push(lambda *_, file=file: _close(file))
            patched.setattr(sys, name, file)
        yield


def _close(file: TextIO) -> None:
    with suppress(BrokenPipeError):
        file.close()


@pytest.mark.parametrize("form", ["table", "wide", "json", "yaml", "csv", "name"])
def test_a_command_goes_on_when_the_reader_of_its_result_goes_away(form: str) -> None:
    with unread():
        put(FOUND, form)
        draw(console(to_stderr=True), ["a note", "and another one"])


def test_what_is_printed_again_and_again_ends_with_its_reader() -> None:
    with unread(), pytest.raises(BrokenPipeError):
        put_again(FOUND, "json", None, 1)


@pytest.mark.parametrize("form", ["table", "json", "csv"])
def test_an_archive_with_findings_is_not_clean_because_nobody_reads_them(form: str, tmp_path: Path) -> None:
    Uploads(LocalStore(str(tmp_path)), cluster=UUID(int=5)).batches(batches_of([[b"a"], [b"b"]], cuts=[1]))
    (segment,) = tmp_path.glob("partition-0/segment/*")
    segment.write_bytes(b"")
    with unread():
        code = run(["archive", "verify", str(tmp_path), "-o", form])
    assert code == 8
