"""How results look: tables for people, JSON for scripts, progress for those who wait.

Nothing here decides anything. JSON carries a version and only grows; tables may change. Both go to standard output, and
standard error carries the progress, only to a terminal. `render_dump` does the same for dumps.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from waltzctl.interruption import silence_stdout
from waltzd.errors import WaltzError, explanation

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from waltzd.format.finding import Finding
    from waltzd.storage.offline.reindex import Rebuild
    from waltzd.storage.offline.verify import PartitionReport, Report

JSON_VERSION = 1
PIPE_COLUMNS = 10_000
ROWS_MAX = 100
"""More partitions than this are only shown when something is wrong with them."""
_BLANKS = frozenset("\n\t\u00a0\u2009\u202f\u3000")
"""Not printable for Python, and harmless: with the blanks that keep words together."""


def console(*, to_stderr: bool = False) -> Console:
    from rich.console import Console

    class Quiet(Console):
        def render_str(self, text: str, **given: Any) -> Text:  # everything that is no `Text` already comes through here
            return super().render_str(printable(text), **given)

        def on_broken_pipe(self) -> None:  # rich would end the process here, with an exit code of its own
            raise BrokenPipeError

    stream = sys.stderr if to_stderr else sys.stdout
    width = None if stream.isatty() else 80
    return Quiet(file=stream, highlight=False, markup=False, emoji=False, width=width)


def printable(text: str) -> str:
    """What people and daemons wrote must not move the cursor of whoever reads it, or colour it, or hide something."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in _BLANKS else one.encode("unicode_escape").decode() for one in text)


def is_line(text: str) -> bool:
    """Whether a person who reads it sees all that is in it, on one line."""
    return not set("\n\t") & set(text) and printable(text) == text


def put_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps({"version": JSON_VERSION, **value}, indent=2))


def count(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def size(bytes_: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if bytes_ >= scale:
            return f"{bytes_ / scale:.1f} {unit}"
    return f"{bytes_} B"


def error_json(error: WaltzError) -> dict[str, str]:
    return {
        "code": error.code,
        "message": error.message,
        "not_done": error.detail_not_done,
        "next_step": error.detail_next_step,
    }


def rate(bytes_: int, seconds: float) -> float:
    """MB/s."""
    return round(bytes_ / max(seconds, 1e-6) / 1e6, 1)


def table(out: Console, names: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, right: tuple[str, ...] = ()) -> None:
    from rich import box
    from rich.table import Table

    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    rows = [tuple(printable(cell) for cell in row) for row in rows]
    screen = out.width
    if not out.is_terminal:  # a program reads it, or a file takes it: a row stays a line
        out.width = PIPE_COLUMNS
    for name, width in zip(names, widths(names, rows, right, out.width - 2 * len(names)), strict=True):
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", width=width)
    for row in rows:
        table.add_row(*row)
    out.print(table)
    out.width = screen


def widths(names: Sequence[str], rows: Sequence[Sequence[str]], whole: Sequence[str], room: int) -> Sequence[int | None]:
    """Of columns that do not fit as they are: each has its longest word in one piece, which may be an address that is
    copied; of `whole` ones, which hold numbers with their units, no cell is broken; and whoever lacks most gets what is
    left. Only where that does not fit, the longest words of all are broken."""
    from rich.cells import cell_len

    columns = list(zip(names, *rows, strict=True))
    wanted = [max(cell_len(line) for cell in column for line in cell.splitlines() or [""]) for column in columns]
    if sum(wanted) <= room:
        return [None] * len(names)
    given = []
    for name, *cells in columns:
        pieces = cells if name in whole else [word for cell in cells for word in cell.split()]
        given.append(max(1, *map(cell_len, [*name.split(), *pieces])))
    while sum(given) > max(room, len(names)):
        given[given.index(max(given))] -= 1
    while sum(given) < room:
        lacking = [want - has for want, has in zip(wanted, given, strict=True)]
        given[lacking.index(max(lacking))] += 1
    return given


# -- verify-segments ---------------------------------------------------------------------------------------------------


def verification(report: Report, output: str, *, seconds: float) -> None:
    try:
        if output == "json":
            put_json(_verification_json(report, seconds))
        else:
            _verification_table(report, seconds)
        sys.stdout.flush()
    except BrokenPipeError:  # the exit code still tells the result
        silence_stdout()


def _verification_json(report: Report, seconds: float) -> dict[str, Any]:
    findings = report.findings
    bytes_ = sum(partition.bytes for partition in report.partitions)
    return {
        "result": "findings" if findings else "clean",
        "held": report.held,
        "summary": {
            "partitions": len(report.partitions),
            "segments": sum(partition.segments for partition in report.partitions),
            "records": sum(partition.records for partition in report.partitions),
            "bytes": bytes_,
            "seconds": round(seconds, 3),
            "megabytes_per_second": rate(bytes_, seconds),
            "in_flight_bytes": sum(partition.in_flight_bytes for partition in report.partitions),
            "findings": len(findings),
        },
        "partitions": [
            {
                "partition": partition.partition,
                "path": partition.directory,
                "segments": partition.segments,
                "first_id": partition.first_id,
                "last_id": partition.last_id,
                "records": partition.records,
                "bytes": partition.bytes,
                "in_flight_bytes": partition.in_flight_bytes,
                "findings": len(partition.findings),
            }
            for partition in report.partitions
        ],
        "findings": [finding.as_dict() for finding in findings],
    }


def _verification_table(report: Report, seconds: float) -> None:
    from rich import box
    from rich.table import Table

    out = console()
    findings = report.findings
    bytes_ = sum(partition.bytes for partition in report.partitions)
    records = sum(partition.records for partition in report.partitions)
    segments = sum(partition.segments for partition in report.partitions)
    verdict = "clean" if not findings else count(len(findings), "finding")
    out.print(verdict, style="bold green" if not findings else "bold red")
    for finding in findings:
        show_finding(out, finding)
    many = len(report.partitions) > ROWS_MAX
    shown = [partition for partition in report.partitions if partition.findings or not many]
    if shown:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name, justify in (("partition", "right"), ("segments", "right"), ("ids", "left"), ("records", "right"),
                              ("size", "right"), ("findings", "right")):  # fmt: skip
            table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
        for partition in shown:
            table.add_row(
                "?" if partition.partition is None else str(partition.partition), f"{partition.segments:,}",
                _ids(partition), f"{partition.records:,}", size(partition.bytes), str(len(partition.findings)),
            )  # fmt: skip
        out.print(table)
    if len(shown) < len(report.partitions):
        out.print(f"{len(report.partitions) - len(shown)} more partitions without findings")
    out.print(
        f"{count(len(report.partitions), 'partition')}, {count(segments, 'segment')}, {count(records, 'record')}, "
        f"{size(bytes_)} in {seconds:.1f} s ({rate(bytes_, seconds)} MB/s), {count(len(findings), 'finding')}",
        soft_wrap=True,
    )
    if report.held:
        in_flight = sum(partition.in_flight_bytes for partition in report.partitions)
        out.print(
            f"A process holds {', '.join(report.held)}: the end of each log ({size(in_flight)} above the durable marks) "
            "may be in flight and was not judged.",
            soft_wrap=True,
        )


def _ids(partition: PartitionReport) -> str:
    return f"{partition.first_id:,} to {partition.last_id:,}" if partition.last_id >= partition.first_id else "none"


def show_finding(out: Console, finding: Finding) -> None:
    where: list[str] = []
    if finding.first_byte is not None:
        where.append(f"bytes {finding.first_byte} to {finding.last_byte}")
    if finding.first_id is not None:
        same = finding.first_id == finding.last_id
        where.append(f"id {finding.first_id}" if same else f"ids {finding.first_id} to {finding.last_id}")
    # Paths and byte ranges stay whole on their lines, so that they can be copied and searched for.
    out.print()
    out.print(str(finding.code), style="bold", end="  ", soft_wrap=True)
    out.print(finding.path, soft_wrap=True)
    if where:
        out.print("  " + ", ".join(where), soft_wrap=True)
    for text in (finding.detail, f"Next: {finding.remedy}"):
        for line in textwrap.wrap(text, max(20, out.width - 2), break_long_words=False, break_on_hyphens=False):
            out.print("  " + line, soft_wrap=True)


# -- rebuild-index -----------------------------------------------------------------------------------------------------


def rebuilding(done: Rebuild, output: str, *, seconds: float) -> None:
    bytes_ = sum(built.data_bytes for built in done.built if built.state.value != "done before")
    states = {"rebuilt": 0, "right": 0, "done before": 0, "refused": 0}
    for built in done.built:
        states[built.state.value] += 1
    if output == "json":
        put_json(
            {
                "result": "refused" if states["refused"] else "done",
                "summary": {
                    "segments": len(done.built), **{name.replace(" ", "_"): n for name, n in states.items()},
                    "records": sum(built.records for built in done.built), "bytes": bytes_,
                    "seconds": round(seconds, 3), "megabytes_per_second": rate(bytes_, seconds),
                },
                "segments": [
                    {
                        "path": built.path, "state": built.state.value.replace(" ", "-"), "records": built.records,
                        "left_out": built.left_out, "torn_bytes": built.torn_bytes,
                        "findings": [finding.as_dict() for finding in built.findings],
                    }
                    for built in done.built
                ],
            }
        )  # fmt: skip
        return
    out = console()
    for built in done.built:
        if built.state.value == "rebuilt":
            said = f"rebuilt  {built.path}: {count(built.records, 'record')}"
            out.print(said + (f", {count(built.left_out, 'id')} left out" if built.left_out else ""), soft_wrap=True)
        if built.torn_bytes:
            said = f"{built.data_path}: a torn tail of {count(built.torn_bytes, 'byte')} stands behind the last record; "
            out.print(said + "the storage cuts it at its next start", soft_wrap=True)
        for finding in built.findings:
            show_finding(out, finding)
    for finding in done.storage_findings:
        show_finding(out, finding)
    out.print(
        f"{count(len(done.built), 'segment')}: {states['rebuilt']} rebuilt, {states['right']} were right, "
        f"{states['done before']} done before, {states['refused']} refused; "
        f"{size(bytes_)} in {seconds:.1f} s ({rate(bytes_, seconds)} MB/s)",
        soft_wrap=True,
    )


# -- errors ------------------------------------------------------------------------------------------------------------


def error_list(errors: list[type[WaltzError]], output: str) -> None:
    if output == "json":
        rows = [
            {"code": cls.code, "name": cls.__name__, "exit_code": cls.exit_code, "retry": cls.retry.value,
             "not_done": cls.not_done, "next_step": cls.next_step, "explanation": explanation(cls)}
            for cls in errors
        ]  # fmt: skip
        put_json({"errors": rows})
        return
    for cls in errors:
        typer.echo(f"{cls.code}  {cls.__name__:<18}  exit {cls.exit_code:>2}  {cls.not_done}".rstrip())


def error_explained(cls: type[WaltzError]) -> None:
    typer.echo(f"{cls.code} {cls.__name__}")
    typer.echo()
    typer.echo(textwrap.fill(explanation(cls), 80))
    typer.echo()
    if cls.not_done:
        typer.echo(f"Not done:  {cls.not_done}")
    if cls.next_step:
        typer.echo(f"Next:      {cls.next_step}")
    typer.echo(f"Retry:     {cls.retry.value}")
    typer.echo(f"Exit code: {cls.exit_code}")
