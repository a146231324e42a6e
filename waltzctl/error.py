"""`waltzctl errors`: the tree of `waltzd.errors`, for people."""

from __future__ import annotations

import click

from waltzctl import render
from waltzctl.main import exit_codes
from waltzd.errors import EXIT_NOT_FOUND, EXIT_OK, tree


@click.command("list", epilog=exit_codes())
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="For people, or for scripts.")
def list_errors(output: str) -> int:
    """List all error codes with their names and what became of the request.

    \b
    Examples:
      waltzctl errors list
      waltzctl errors list -o json
    """
    render.error_list(list(tree().values()), output)
    return EXIT_OK


@click.command("lookup", epilog=exit_codes())
@click.argument("code", metavar="CODE")
def lookup(code: str) -> int:
    """Explain one error code: what it means, what was not done, what to do next.

    \b
    Examples:
      waltzctl errors lookup W2001
      waltzctl errors lookup w3009
    """
    found = tree().get(code.upper())
    if found is None:
        click.echo(f"There is no error {code}. `waltzctl errors list` shows them all.", err=True)
        return EXIT_NOT_FOUND
    render.error_explained(found)
    return EXIT_OK
