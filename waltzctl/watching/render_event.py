"""How lines of logs look, when they come from many daemons."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import typer

from waltzctl.merged_log import Line
from waltzctl.render import console, printable, put_json
from waltzd.errors import TlsMismatch, WaltzError

STYLES = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}


def events(found: Sequence[Line], output: str) -> None:
    if output == "json":
        put_json({"events": [line_json(line) for line in found]})
        return
    followed(found, output)
    if not found:
        typer.echo("Nobody said anything in this time.", err=True)


def followed(found: Sequence[Line], output: str) -> None:
    if output == "json":
        for line in found:
            typer.echo(json.dumps(line_json(line)))
        return
    if not found:
        return
    out = console()
    width = max(len(line.who) for line in found)
    for line in found:
        text = " ".join(line.text.split())
        out.print(
            f"{moment(line.time_ms)}  {line.who:<{width}}  {line.level:<8}  {text}",
            style=STYLES.get(line.level, ""),
            soft_wrap=True,
        )


def silent(found: Mapping[str, WaltzError]) -> None:
    steps = []
    for name, error in sorted(found.items()):
        typer.echo(f"{name} does not answer: {error.code} {printable(error.message)}", err=True)
        if isinstance(error, TlsMismatch) and error.detail_next_step not in steps:
            steps.append(error.detail_next_step)
    for step in steps:  # `status` has those of the others
        typer.echo(f"Next: {printable(step)}", err=True)


def moment(time_ms: int) -> str:
    try:
        whole = datetime.fromtimestamp(time_ms // 1000, UTC)
    except (ValueError, OverflowError, OSError):  # a clock that shows no time
        return str(time_ms)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{time_ms % 1000:03d}Z"


def line_json(line: Line) -> dict[str, Any]:
    return {
        "time": moment(line.time_ms),
        "who": line.who,
        "kind": line.kind,
        "level": line.level,
        "code": line.code,
        "text": line.text,
    }
