"""`waltzctl errors`: the tree of `waltzd.errors`, for people."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument

from waltzctl import render
from waltzctl.interruption import EXIT_INTERRUPTED
from waltzctl.options import Output
from waltzd.errors import EXIT_MEANING, EXIT_NOT_FOUND, EXIT_OK, tree


def list_errors(*, output: Output = "table") -> int:
    """List all error codes with their names and what became of the request.

    \b
    Examples:
      waltzctl errors list
      waltzctl errors list -o json
    """
    render.error_list(list(tree().values()), output)
    return EXIT_OK


def lookup(*, code: Annotated[str, Argument(metavar="CODE")]) -> int:
    """Explain one error code: what it means, what was not done, what to do next.

    \b
    Examples:
      waltzctl errors lookup W2001
      waltzctl errors lookup w3009
    """
    found = tree().get(code.upper())
    if found is None:
        typer.echo(f"There is no error {code}. `waltzctl errors list` shows them all.", err=True)
        return EXIT_NOT_FOUND
    render.error_explained(found)
    return EXIT_OK


def exit_codes(*, output: Output = "table") -> int:
    """Every command ends with one of these. A command that says more by its exit code tells so in its help.

    \b
    Examples:
      waltzctl help exit-codes
      waltzctl help exit-codes -o json
    """
    codes = EXIT_MEANING | {EXIT_INTERRUPTED: "interrupted"}
    if output == "json":
        render.put_json({"exit_codes": [{"code": code, "meaning": meaning} for code, meaning in codes.items()]})
    else:
        for code, meaning in codes.items():
            typer.echo(f"{code:>5}  {meaning}")
    return EXIT_OK
