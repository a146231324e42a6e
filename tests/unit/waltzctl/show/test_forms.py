"""One list in all its forms: what a person sees at 80 columns, and what scripts get."""

from __future__ import annotations

import csv
import enum
import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import typer
import yaml

from waltzctl.shell.options import command_of
from waltzctl.show.forms import AnyForm, Column, Columns, Listing, put, stream


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
    def show(form: str, found: Listing[Any] = FOUND, **more: Any) -> str:
        put(replace(found, more=more), form)
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
