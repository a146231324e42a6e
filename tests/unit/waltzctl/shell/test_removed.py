"""A removed command or option is answered with what replaced it; what still exists is never taken for removed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from waltzctl.main import COMMANDS, cli, run
from waltzctl.shell.removed import REMOVED
from waltzd.errors import EXIT_OK, EXIT_USAGE

GONE = {
    "gone": "use `waltzctl status`",
    "cluster gone": "use `waltzctl status`",
    "errors lookup --gone": "leave it out",
    "errors lookup --output xml": "use --output json",
}


@pytest.fixture(autouse=True)
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, replacement in GONE.items():
        monkeypatch.setitem(REMOVED, name, replacement)


@pytest.mark.parametrize(
    ("arguments", "shown", "name"),
    [
        (["gone"], "`waltzctl gone`", "gone"),
        (["gone", "report", "--help"], "`waltzctl gone`", "gone"),
        (["cluster", "gone", "--yes"], "`waltzctl cluster gone`", "cluster gone"),
        (["errors", "lookup", "W1001", "--gone", "x"], "--gone of `waltzctl errors lookup`", "errors lookup --gone"),
        (["errors", "lookup", "--gone=x", "W1001"], "--gone of `waltzctl errors lookup`", "errors lookup --gone"),
        (["errors", "lookup", "--output", "xml"], "--output xml of `waltzctl errors lookup`", "errors lookup --output xml"),
        (["errors", "lookup", "--output=xml"], "--output xml of `waltzctl errors lookup`", "errors lookup --output xml"),
    ],
)
def test_a_removed_name_is_answered_with_its_replacement(
    arguments: list[str], shown: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == EXIT_USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"W1001 {shown} was removed\nNot done: nothing was changed\nNext: {GONE[name]}\n"


def test_the_error_is_json_where_json_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gone", "report", "-o", "json"]) == EXIT_USAGE
    told = json.loads(capsys.readouterr().err)
    assert (told["error"]["code"], told["error"]["next_step"]) == ("W1001", GONE["gone"])


def test_what_is_accepted_is_never_called_removed(capsys: pytest.CaptureFixture[str]) -> None:
    """The value of an option may look like a removed option; an unknown option of another command stays unknown."""
    assert run(["errors", "lookup", "--output", "json", "W1001"]) == EXIT_OK
    assert run(["storage", "list", "--gone"]) == EXIT_USAGE
    assert "No such option" in capsys.readouterr().err


def test_the_table_names_nothing_that_exists() -> None:
    for name in REMOVED.keys() - GONE.keys():
        words, dash, option = name.partition(" -")
        group, _, last = words.rpartition(" ")
        assert (last in COMMANDS.get(group, {})) == bool(dash), name
        if dash:
            command: Any = cli
            for word in words.split():
                command = command.get_command(None, word)
            assert dash.strip() + option not in {known for param in command.params for known in param.opts}, name
