"""`waltzctl errors`: the table of `waltzd.errors`, for people."""

from __future__ import annotations

import textwrap
from typing import Annotated, Any

import typer
from typer import Argument

from waltzctl.shell.interruption import EXIT_INTERRUPTED
from waltzctl.show.forms import AnyForm, Column, Columns, Listing, Page, put
from waltzd.errors import EXIT_MEANING, EXIT_NOT_FOUND, EXIT_OK, WaltzError, explain, tree

ERRORS: Columns[type[WaltzError]] = (
    Column("code", lambda cls: cls.code),
    Column("name", lambda cls: cls.__name__),
    Column("exit code", lambda cls: cls.exit_code, is_right=True),
    Column("retry", lambda cls: cls.retry.value),
    Column("not done", lambda cls: explain(cls)[1]),
    Column("next step", lambda cls: explain(cls)[2], is_wide=True),
    Column("", lambda cls: explain(cls)[0], json="explanation"),
)


EXIT_CODES = EXIT_MEANING | {EXIT_INTERRUPTED: "interrupted"}


def lookup(*, code: Annotated[str | None, Argument(metavar="[CODE]")] = None, output: AnyForm = "table") -> int:
    """Explain one error code: what it means, what was not done, what to do next. Without CODE, list all error codes, and
    what the exit code of a command means.

    \b
    Examples:
      waltzctl errors lookup W2001
      waltzctl errors lookup -o json
    """
    if code is None:
        return _list_all(output)
    found = tree().get(code.upper())
    if found is None:
        typer.echo(f"There is no error {code}. `waltzctl errors lookup` lists them all.", err=True)
        return EXIT_NOT_FOUND

    def draw(_out: Any) -> None:
        text, not_done, next_step = explain(found)
        typer.echo(f"{found.code} {found.__name__}\n\n{textwrap.fill(text, 80)}\n")
        typer.echo(f"Not done:  {not_done}\nNext:      {next_step}")
        typer.echo(f"Retry:     {found.retry.value}\nExit code: {found.exit_code}")

    put(Page(draw=draw, things=Listing(kind="errors", columns=ERRORS, rows=[found])), output)
    return EXIT_OK


def _list_all(output: str) -> int:
    errors = list(tree().values())

    def draw(_out: Any) -> None:
        for cls in errors:
            typer.echo(f"{cls.code}  {cls.__name__:<18}  exit {cls.exit_code:>2}  {explain(cls)[1]}")
        typer.echo("\nExit codes:")
        for number, meaning in EXIT_CODES.items():
            typer.echo(f"{number:>5}  {meaning}")

    more = {"exit_codes": [{"code": number, "meaning": meaning} for number, meaning in EXIT_CODES.items()]}
    put(Page(draw=draw, things=Listing(kind="errors", columns=ERRORS, rows=errors, more=more)), output)
    return EXIT_OK
