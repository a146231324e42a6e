"""`waltzctl errors`: the tree of `waltzd.errors`, for people."""

from __future__ import annotations

import textwrap
from typing import Annotated, Any

import typer
from typer import Argument

from waltzctl.shell.interruption import EXIT_INTERRUPTED
from waltzctl.show.forms import AnyForm, Column, Columns, Listing, Page, put
from waltzd.errors import EXIT_MEANING, EXIT_NOT_FOUND, EXIT_OK, WaltzError, explanation, tree

ERRORS: Columns[type[WaltzError]] = (
    Column("code", lambda cls: cls.code),
    Column("name", lambda cls: cls.__name__),
    Column("exit code", lambda cls: cls.exit_code, is_right=True),
    Column("retry", lambda cls: cls.retry.value),
    Column("not done", lambda cls: cls.not_done),
    Column("next step", lambda cls: cls.next_step, is_wide=True),
    Column("", lambda cls: explanation(cls), json="explanation"),
)


def list_errors(*, output: AnyForm = "table") -> int:
    """List all error codes with their names and what became of the request.

    \b
    Examples:
      waltzctl errors list
      waltzctl errors list -o json
    """
    errors = list(tree().values())

    def draw(_out: Any) -> None:
        for cls in errors:
            typer.echo(f"{cls.code}  {cls.__name__:<18}  exit {cls.exit_code:>2}  {cls.not_done}".rstrip())

    put(Page(draw=draw, things=Listing(kind="errors", columns=ERRORS, rows=errors)), output)
    return EXIT_OK


def lookup(*, code: Annotated[str, Argument(metavar="CODE")], output: AnyForm = "table") -> int:
    """Explain one error code: what it means, what was not done, what to do next.

    \b
    Examples:
      waltzctl errors lookup W2001
      waltzctl errors lookup w3009 -o json
    """
    found = tree().get(code.upper())
    if found is None:
        typer.echo(f"There is no error {code}. `waltzctl errors list` shows them all.", err=True)
        return EXIT_NOT_FOUND

    def draw(_out: Any) -> None:
        typer.echo(f"{found.code} {found.__name__}\n\n{textwrap.fill(explanation(found), 80)}\n")
        for head, text in (("Not done", found.not_done), ("Next", found.next_step)):
            if text:
                typer.echo(f"{head + ':':<10} {text}")
        typer.echo(f"Retry:     {found.retry.value}\nExit code: {found.exit_code}")

    put(Page(draw=draw, things=Listing(kind="errors", columns=ERRORS, rows=[found])), output)
    return EXIT_OK


def exit_codes(*, output: AnyForm = "table") -> int:
    """Every command ends with one of these. A command that says more by its exit code tells so in its help.

    \b
    Examples:
      waltzctl help exit-codes
      waltzctl help exit-codes -o json
    """
    codes = EXIT_MEANING | {EXIT_INTERRUPTED: "interrupted"}

    def draw(_out: Any) -> None:
        for code, meaning in codes.items():
            typer.echo(f"{code:>5}  {meaning}")

    columns: Columns[Any] = (Column("code", is_right=True), Column("meaning"))
    rows = [{"code": code, "meaning": meaning} for code, meaning in codes.items()]
    put(Page(draw=draw, things=Listing(kind="exit_codes", columns=columns, rows=rows)), output)
    return EXIT_OK
