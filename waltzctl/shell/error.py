"""`waltzctl errors`: explain the error codes."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer
from typer import Argument

from waltzctl.shell.interruption import EXIT_INTERRUPTED
from waltzctl.show.forms import AnyForm, Column, Columns, Listing, put
from waltzd.errors import EXIT_MEANING, EXIT_NOT_FOUND, EXIT_OK, WaltzError, explain
from waltzd.errors.operations import tree

ERRORS: Columns[type[WaltzError]] = (
    Column("code"),
    Column("name", "__name__"),
    Column("exit code"),
    Column("retry", "retry.value"),
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

    text, not_done, next_step = explain(found)
    facts = {"Not done": not_done, "Next": next_step, "Retry": found.retry.value, "Exit code": found.exit_code}
    page = [
        f"{found.code} {found.__name__}\n\n{textwrap.fill(text, 80)}\n",
        *(f"{head + ':':<10} {fact}" for head, fact in facts.items() if fact != ""),
    ]
    put(Listing(kind="errors", columns=ERRORS, rows=[found], page=page), output)
    return EXIT_OK


def _list_all(output: str) -> int:
    errors = list(tree().values())
    page = [
        *(f"{cls.code}  {cls.__name__:<18}  exit {cls.exit_code:>2}  {explain(cls)[1]}".rstrip() for cls in errors),
        "\nExit codes:",
        *(f"{number:>5}  {meaning}" for number, meaning in EXIT_CODES.items()),
    ]
    more = {"exit_codes": [{"code": number, "meaning": meaning} for number, meaning in EXIT_CODES.items()]}
    put(Listing(kind="errors", columns=ERRORS, rows=errors, page=page, more=more), output)
    return EXIT_OK
