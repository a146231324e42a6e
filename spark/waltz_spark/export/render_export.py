"""The output of export commands: progress while they run, and results.

While a run is active, a terminal shows a few lines that are overwritten: the partitions, and a total with an estimate. If
standard error is not a terminal, a line is written at intervals, unless the result is JSON; `--progress json` writes an
object whenever tasks have ended. A task counts once, at the first report of its end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer

from waltz_spark.export.manifest import Manifest, total_json
from waltz_spark.export.tasks import Assignment
from waltz_spark.log.origin import Span
from waltzctl.shell.progress import Amount, Course, Shown, duration, event
from waltzctl.show.forms import Column, Columns, Line, Listing, Table, attributes, put, verdict
from waltzctl.show.forms import Part as PagePart
from waltzctl.show.terminal import console, count, rate, size
from waltzd.errors import WaltzError

if TYPE_CHECKING:
    from waltz_spark.export.delta import TableState
    from waltz_spark.export.export import Run
    from waltz_spark.export.verification import Finding
    from waltzctl.local_cluster.java import Java

Row = Mapping[str, Any]


def _ids(row: Row) -> str:
    return f"{row['first']:,} to {row['last']:,}" if row["last"] >= row["first"] else "none"


PARTITION: Columns[Row] = (
    Column("partition"),
    Column("ids", _ids, json=""),
    *attributes("first last", is_wide=True),
)
PLANNED: Columns[Row] = (
    *PARTITION,
    Column("records"),
    Column("log", cell=size, json="data_bytes"),
    Column("files"),
    Column("about", cell=size, json="bytes_guessed"),
)
FINDING: Columns[Row] = (Column("path"), *PARTITION, Column("detail"))


def totals_of(manifest: Manifest | None) -> list[Row]:
    there = manifest.partitions if manifest else {}
    return [{"partition": number, **total_json(total)} for number, total in there.items()]


def partitions(manifest: Manifest | None) -> Listing[Row]:
    columns: Columns[Row] = (
        *PARTITION,
        Column("records"),
        Column("log", cell=size, json="data_bytes"),
        Column("crc", is_right=True, is_wide=True),
        Column("files"),
        Column("size", cell=size, json="bytes"),
    )
    return Listing(kind="partitions", columns=columns, rows=totals_of(manifest))


# -- spark-export ------------------------------------------------------------------------------------------------------


def planned(run: Run, spans: Mapping[int, Span], java: Java | WaltzError | None, output: str) -> None:
    """Print the plan of a run, for --dry-run. `java`: the Java to run on, or the error if there is none."""
    place, source, form, assignments = run.destination.place, run.job.origin.describe(), run.job.form, run.assignments
    sizes, files = dict.fromkeys(spans, 0), dict.fromkeys(spans, 0)
    for given in assignments:
        sizes[given.partition] += given.split.bytes
        files[given.partition] += 1
    rows = [
        {"partition": number, "first": span.first, "last": span.last, "records": span.count, "data_bytes": sizes[number],
         "files": files[number], "bytes_guessed": form.guess(sizes[number])}
        for number, span in spans.items()
    ]  # fmt: skip
    told = {"result": "planned" if assignments else "nothing new", "output": place, "source": source,
            "format": form.format, "compression": form.compression, "partitions": rows,
            "runs_on": None if java is None else _described(java)}  # fmt: skip
    page: list[PagePart] = [f"{place} is up to date with {source}: nothing would be exported."]
    if assignments:
        page = [
            Table(PLANNED, [row for row in rows if row["records"]]),
            f"Would be written to {place} as {form.format} ({form.compression}), from {source}. Nothing was written.",
            *([] if java is None else _java_lines(java)),
        ]
    put(Listing(page=page, content=told), output)


def _described(java: Java | WaltzError) -> dict[str, Any]:
    if isinstance(java, WaltzError):
        return {"error": {"code": java.code, "message": java.message, "next_step": java.detail_next_step}}
    return {"java": {"home": java.home, "version": java.version, "place": java.place}}


def _java_lines(java: Java | WaltzError) -> list[str]:
    if isinstance(java, WaltzError):
        return [f"It would not start: {java.lines()[0]}", f"Next: {java.detail_next_step}"]
    return [f"It would run on Java {java.version}: {java.home} (from {java.place})."]


def exported(run: Run, newest: Manifest | None, seconds: float, output: str, table: TableState | None) -> None:
    place, source = run.destination.place, run.job.origin.describe()
    before, now = _sums(run.before), _sums(newest)
    added = {name: now[name] - before[name] for name in now}
    first, last = run.task_seconds
    told = {
        "result": "exported" if added["files"] else "nothing new",
        "output": place,
        "source": source,
        "exported": {**added, "seconds": round(seconds, 3),
                     "megabytes_per_second": rate(added["data_bytes"], seconds),
                     "task_seconds": round(max(0.0, last - first), 3)},
        **described_state(newest, table),
    }  # fmt: skip
    page: list[PagePart] = [f"{place} is up to date with {source}: nothing was exported."]
    if added["files"]:
        assert newest is not None
        things = partitions(newest)
        page = [
            Table(things.columns, things.rows),
            f"Exported {count(added['records'], 'record')}, {size(added['data_bytes'])} of log, as "
            f"{size(added['bytes'])} in {count(added['files'], 'file')}, in {seconds:.1f} s "
            f"({rate(added['data_bytes'], seconds)} MB/s).",
            f"{place} is complete up to these ids: manifest {newest.number}.",
        ]
    put(Listing(page=[*page, *_table_lines(newest, table)], content=told), output)


def _sums(manifest: Manifest | None) -> dict[str, int]:
    rows = totals_of(manifest)
    return {name: sum(row[name] for row in rows) for name in ("records", "data_bytes", "files", "bytes")}


# -- export status -----------------------------------------------------------------------------------------------------


def described_state(manifest: Manifest | None, table: TableState | None) -> dict[str, Any]:
    if manifest is None:
        return {"manifest": None, "partitions": []}
    shape = manifest.shape
    return {
        "manifest": manifest.number,
        "export": str(manifest.export),
        "cluster": str(manifest.cluster),
        "written": manifest.written,
        "format": shape.format,
        "compression": shape.compression,
        "decoder": shape.decoder or None,
        "columns": [{"name": name, "type": type_} for name, type_ in shape.schema],
        "table": None if table is None else {"version": table.version, "manifest": table.manifest},
        "partitions": totals_of(manifest),
    }


def state(place: str, manifest: Manifest, table: TableState | None, *, is_unfinished: bool, output: str) -> None:
    shape = manifest.shape
    made = [f"{shape.format} ({shape.compression})", *[f"decoded by {shape.decoder}"] * bool(shape.decoder)]
    left = "A run is at work, or ended before it was done: what it left does not count, and the next one removes it."
    notes = [
        f"Manifest {manifest.number} of {manifest.written}: {', '.join(made)}.",
        f"Cluster {manifest.cluster}, last read from {manifest.source}.",
        *_table_lines(manifest, table),
        *[left] * is_unfinished,
    ]
    told = {"output": place, "source": manifest.source, "unfinished": is_unfinished, **described_state(manifest, table)}
    put(replace(partitions(manifest), notes=notes, content=told), output)


def _table_lines(manifest: Manifest | None, there: TableState | None) -> list[str]:
    if manifest is None or manifest.shape.format != "delta":
        return []
    if there is None:
        said = "not there yet: the next run makes it"
    else:
        is_behind = there.manifest < manifest.number
        said = f"version {there.version}, up to manifest {there.manifest}" + "; the next run adds what it lacks" * is_behind
    return [f"Delta table: {said}."]


# -- export verify -----------------------------------------------------------------------------------------------------


def verified(
    place: str, manifest: Manifest, findings: Sequence[Finding], against: str | None, seconds: float, output: str
) -> None:
    sums = _sums(manifest)
    rows: list[Row] = [
        {"path": found.path, "partition": found.partition, "first": found.span.first, "last": found.span.last,
         "detail": found.detail}
        for found in findings
    ]  # fmt: skip

    page: list[PagePart] = [verdict(count(len(rows), "finding") if rows else "clean", is_good=not rows)]
    for row in rows:
        page += ["", Line(row["path"], "bold")]
        page += [f"  partition {row['partition']}, ids {_ids(row)}"] if row["last"] >= row["first"] else []
        page.append(f"  {row['detail']}")
    page.append(
        f"{count(sums['files'], 'file')}, {count(sums['records'], 'record')}, {size(sums['bytes'])} in {seconds:.1f} s"
        + (f"; compared with {against}" if against else "")
    )
    told = {
        "result": "findings" if rows else "clean", "output": place, "against": against, "manifest": manifest.number,
        "summary": {"files": sums["files"], "records": sums["records"], "bytes": sums["bytes"],
                    "seconds": round(seconds, 3), "findings": len(rows)},
        "findings": rows,
    }  # fmt: skip
    put(Listing(kind="findings", columns=FINDING, rows=rows, page=page, content=told), output)


# -- while it runs -----------------------------------------------------------------------------------------------------

PARTS_MAX = 12
"""With more partitions than this, the others are only counted while it runs."""
LINE_SECONDS = 10.0
_OTHER_LINES = 4
_LATELY_SECONDS = 60.0
"""What was done before says little of how fast it goes now."""
_FRAMES_PER_SECOND = 4


@dataclass
class Part:
    partition: int
    records: int = 0
    records_done: int = 0

    @property
    def is_done(self) -> bool:
        return self.records_done == self.records


class Tasks:
    """The progress of all tasks, and an estimate. Pure: times are passed in."""

    def __init__(self, assignments: Sequence[Assignment]) -> None:
        self._open = {given.number: given for given in assignments}
        self.parts: dict[int, Part] = {}
        for given in sorted(assignments, key=lambda given: given.partition):
            self.parts.setdefault(given.partition, Part(given.partition)).records += given.span.count
        self.records = sum(part.records for part in self.parts.values())
        self.data_bytes = sum(given.split.bytes for given in assignments)
        self.records_done = self.data_bytes_done = 0
        self.has_begun = False
        self._course = Course(_LATELY_SECONDS)
        self._ended_at = 0.0
        self._forecast: tuple[float, float] | None = None
        """Rate and remaining seconds at the last end of a task; work in progress since then is unknown."""

    def begin(self, at: float) -> None:
        """Record the start of the tasks; later calls have no effect."""
        if not self.has_begun:
            self.has_begun = True
            self._course.see(at, self.amount)

    @property
    def amount(self) -> Amount:
        return Amount(done=self.data_bytes_done, total=self.data_bytes, unit="bytes")

    def end(self, number: int, at: float) -> None:
        self.begin(at)
        given = self._open.pop(number, None)
        if given is None:
            return
        self.parts[given.partition].records_done += given.span.count
        self.records_done += given.span.count
        self.data_bytes_done += given.split.bytes
        self._ended_at, self._forecast = at, self._course.see(at, self.amount)

    def forecast(self, at: float) -> tuple[float, float] | None:
        """Return the recent rate in bytes a second, and the remaining seconds; None if unknown."""
        if self._forecast is None:
            return None
        speed, left = self._forecast
        return speed, max(0.0, left - (at - self._ended_at))

    def shown(self, lines: int) -> tuple[list[Part], int, int]:
        """Return the partitions to show, active ones first, the number of others, and the number of those that are done."""
        parts = list(self.parts.values())
        if len(parts) <= lines:
            return parts, 0, 0
        first = sorted(parts, key=lambda part: (part.is_done, part.partition))
        others = first[lines:]
        return first[:lines], len(others), sum(part.is_done for part in others)

    def sentence(self, at: float) -> str:
        words = [f"{size(self.data_bytes_done)} of {size(self.data_bytes)}"]
        if (forecast := self.forecast(at)) is not None:
            words += [f"{rate(int(forecast[0]), 1)} MB/s", f"about {duration(forecast[1])} left"]
        return ", ".join(words)

    @property
    def percent(self) -> int:
        return 100 * self.records_done // max(1, self.records)


class Progress:
    def __init__(self, assignments: Sequence[Assignment], *, is_quiet: bool = False, shown: str = Shown.AUTO) -> None:
        """`is_quiet`: write no lines without a terminal, except with `--progress json`."""
        self._tasks = Tasks(assignments)
        self._said = self._started = time.monotonic()
        self._is_live = shown == Shown.AUTO and sys.stderr.isatty()
        self._says = shown == Shown.AUTO and not is_quiet and not self._is_live
        self._writes_json = shown == Shown.JSON
        self._parts_max = PARTS_MAX
        self._file: Any = None
        self._live: Any = None

    def ended(self, numbers: Collection[int]) -> None:
        """Update the display; called repeatedly while tasks run, also without new results."""
        now = time.monotonic()
        if not self._tasks.has_begun:
            self._said = now
        self._tasks.begin(now)
        before = self._tasks.records_done
        for number in numbers:
            self._tasks.end(number, now)
        if self._writes_json and self._tasks.records_done > before:
            typer.echo(json.dumps(self._event(now)), err=True)
        if self._says and self._tasks.records_done and now - self._said >= LINE_SECONDS:
            self._said = now
            tasks = self._tasks
            typer.echo(
                f"{tasks.percent} %: {tasks.records_done:,} of {tasks.records:,} records, {tasks.sentence(now)}",
                err=True,
            )

    def _event(self, now: float) -> dict[str, object]:
        tasks = self._tasks
        found = event(now - self._started, "export", tasks.amount, tasks.forecast(now))
        found["records"], found["records_total"] = tasks.records_done, tasks.records
        found["partitions"] = {str(number): part.records_done for number, part in tasks.parts.items()}
        return found

    def _picture(self) -> Any:
        now = time.monotonic()
        return picture(self._tasks, now, waited=now - self._started, parts=self._parts_max)

    def __enter__(self) -> Progress:
        if self._is_live:
            from rich.live import Live

            out = console(to_stderr=True)
            # A way to it of our own: what is meant for standard error goes to a file while Java starts.
            out.file = self._file = os.fdopen(os.dup(2), "w", encoding="utf-8")
            self._parts_max = max(0, min(PARTS_MAX, out.size.height - _OTHER_LINES))
            self._live = Live(
                console=out, get_renderable=self._picture, refresh_per_second=_FRAMES_PER_SECOND, transient=True,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._file.close()


def picture(tasks: Tasks, now: float, *, waited: float, parts: int) -> Any:
    """Return the lines for a terminal, with at most `parts` partitions."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table as Grid
    from rich.text import Text

    if not tasks.has_begun:
        return Text(f"Starting Spark: {duration(waited)}")
    grid = Grid.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1, min_width=5)
    grid.add_column(justify="right", no_wrap=True)
    shown, others, others_done = tasks.shown(parts)
    for part in shown:
        bar = ProgressBar(total=part.records, completed=part.records_done)
        grid.add_row(f"partition {part.partition}", bar, _of(part.records_done, part.records))
    if others:
        grid.add_row(f"and {others:,} more", "", f"{others_done:,} of them complete")
    bar = ProgressBar(total=tasks.records, completed=tasks.records_done)
    grid.add_row("together", bar, _of(tasks.records_done, tasks.records))
    return Group(grid, Text(tasks.sentence(now), no_wrap=True, overflow="ellipsis"))


def _of(done: int, total: int) -> str:
    return f"{done:,} of {total:,} records"
