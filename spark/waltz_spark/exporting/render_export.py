"""How an export, its state and its verification look: while it runs, and after.

While it runs, a terminal gets a few lines that are written over: the partitions, and below them all together with an
estimate. What is no terminal gets a line every some seconds, as soon as there is something to tell; who wants the result as
JSON gets none, and who asks for objects gets one whenever tasks have ended. A task counts when it has ended, once, whoever
tells it first: Spark, or the task itself with what it wrote.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer

from waltz_spark.exporting.manifest import SPARK, Manifest, Total
from waltz_spark.exporting.tasks import Assignment, Written
from waltz_spark.log.origin import Span
from waltzctl.progress import Amount, Course, Shown, duration, event
from waltzctl.show.forms import put_json
from waltzctl.show.terminal import console, count, rate, size, table
from waltzd.errors import WaltzError

if TYPE_CHECKING:
    from waltz_spark.engine.java import Place
    from waltz_spark.exporting.delta import TableState
    from waltz_spark.exporting.export import Run
    from waltz_spark.exporting.verification import Finding


class Clock:
    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started


# -- spark-export ------------------------------------------------------------------------------------------------------


def planned(run: Run, spans: Mapping[int, Span], java: Place | WaltzError | None, output: str) -> None:
    """What --dry-run shows. `java`: what it would run on, or why it would not."""
    from waltz_spark.engine.render_spark import described, java_lines

    place, source, form, assignments = run.destination.place, run.job.origin.describe(), run.job.form, run.assignments
    sizes: dict[int, int] = dict.fromkeys(spans, 0)
    files = dict.fromkeys(spans, 0)
    for given in assignments:
        sizes[given.partition] += given.split.bytes
        files[given.partition] += 1
    rows = [
        {"partition": number, "first": span.first, "last": span.last, "records": span.count, "data_bytes": sizes[number],
         "files": files[number], "bytes_guessed": form.guess(sizes[number])}
        for number, span in spans.items()
    ]  # fmt: skip
    if output == "json":
        put_json({"result": "planned" if assignments else "nothing new", "output": place, "source": source,
                  "format": form.format, "compression": form.compression, "partitions": rows,
                  "runs_on": None if java is None else described(java)})  # fmt: skip
        return
    out = console()
    if not assignments:
        out.print(f"{place} is up to date with {source}: nothing would be exported.", soft_wrap=True)
        return
    cells = [
        (str(row["partition"]), ids(spans[int(row["partition"])]), f"{row['records']:,}", size(int(row["data_bytes"])),
         f"{row['files']:,}", size(int(row["bytes_guessed"])))
        for row in rows if row["records"]
    ]  # fmt: skip
    table(
        out,
        ("partition", "ids", "records", "log", "files", "about"),
        cells,
        right=("partition", "records", "log", "files", "about"),
    )
    out.print(f"Would be written to {place} as {form.format} ({form.compression}), from {source}. Nothing was written.",
              soft_wrap=True)  # fmt: skip
    for line in () if java is None else java_lines(java):
        out.print(line, soft_wrap=True)


def exported(
    run: Run, newest: Manifest | None, progress: Progress | None, seconds: float, output: str, table_: TableState | None
) -> None:
    place, source, before = run.destination.place, run.job.origin.describe(), run.before
    added = progress or Progress(())
    if output == "json":
        put_json({
            "result": "exported" if added.files else "nothing new",
            "output": place,
            "source": source,
            "exported": {"records": added.records, "data_bytes": added.data_bytes, "files": added.files,
                         "rows": _rows(newest) - _rows(before),
                         "bytes": _bytes(newest) - _bytes(before), "seconds": round(seconds, 3),
                         "megabytes_per_second": rate(added.data_bytes, seconds),
                         "task_seconds": round(added.task_seconds, 3)},
            **state_json(newest, table_),
        })  # fmt: skip
        return
    out = console()
    if not added.files:
        out.print(f"{place} is up to date with {source}: nothing was exported.", soft_wrap=True)
        _table(newest, table_)
        return
    _partitions(newest)
    written = f"{size(_bytes(newest) - _bytes(before))} in {count(added.files, 'file')}"
    if newest and newest.shape.query.where:
        written = f"{count(_rows(newest) - _rows(before), 'row')}, {written}"
    out.print(
        f"Exported {count(added.records, 'record')}, {size(added.data_bytes)} of log, as {written}, "
        f"in {seconds:.1f} s ({rate(added.data_bytes, seconds)} MB/s).",
        soft_wrap=True,
    )
    out.print(f"{place} is complete up to these ids: manifest {newest.number if newest else 0}.", soft_wrap=True)
    _table(newest, table_)


def _bytes(manifest: Manifest | None) -> int:
    return 0 if manifest is None else sum(total.size for total in manifest.partitions.values())


def _rows(manifest: Manifest | None) -> int:
    return 0 if manifest is None else sum(total.rows for total in manifest.partitions.values())


# -- export status -----------------------------------------------------------------------------------------------------


def state_json(manifest: Manifest | None, table_: TableState | None) -> dict[str, Any]:
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
        "lossless": shape.lossless,
        "decoder": shape.decoder or None,
        "engine": shape.query.engine,
        "select": shape.query.select or None,
        "where": shape.query.where or None,
        "columns": [{"name": name, "type": type_} for name, type_ in shape.schema],
        "table": None if table_ is None else {"version": table_.version, "manifest": table_.manifest},
        "partitions": [_total_row(number, total) for number, total in manifest.partitions.items()],
    }


def _total_row(number: int, total: Total) -> dict[str, Any]:
    return {"partition": number, "first": total.span.first, "last": total.span.last, "records": total.span.count,
            "data_bytes": total.data_bytes, "crc": f"{total.crc:08x}", "files": total.files,
            "rows": total.rows, "bytes": total.size}  # fmt: skip


def state(place: str, manifest: Manifest, table_: TableState | None, is_unfinished: bool, output: str) -> None:
    if output == "json":
        put_json({"output": place, "source": manifest.source, "unfinished": is_unfinished,
                  **state_json(manifest, table_)})  # fmt: skip
        return
    out = console()
    shape = manifest.shape
    _partitions(manifest)
    made = [f"{shape.format} ({shape.compression})"]
    made += ["lossless"] * shape.lossless
    made += [f"decoded by {shape.decoder}"] * bool(shape.decoder)
    made += ["by Spark's own writers"] * (shape.query.engine == SPARK)
    out.print(f"Manifest {manifest.number} of {manifest.written}: {', '.join(made)}.", soft_wrap=True)
    for name, text in (("--where", shape.query.where), ("--select", shape.query.select)):
        if text:
            out.print(f"{name} {text}", soft_wrap=True)
    out.print(f"Cluster {manifest.cluster}, last read from {manifest.source}.", soft_wrap=True)
    _table(manifest, table_)
    if is_unfinished:
        out.print("A run is at work, or ended before it was done: what it left does not count, the next one removes it.",
                  soft_wrap=True)  # fmt: skip


def _table(manifest: Manifest | None, there: TableState | None) -> None:
    if manifest is None or manifest.shape.format != "delta":
        return
    if there is None:
        said = "not there yet: the next run makes it"
    else:
        is_behind = there.manifest < manifest.number
        said = f"version {there.version}, up to manifest {there.manifest}" + "; the next run adds what it lacks" * is_behind
    console().print(f"Delta table: {said}.", soft_wrap=True)


def _partitions(manifest: Manifest | None) -> None:
    has_rows = manifest is not None and bool(manifest.shape.query.where)
    rows = [
        (
            str(number),
            ids(total.span),
            f"{total.span.count:,}",
            *([f"{total.rows:,}"] if has_rows else []),
            size(total.data_bytes),
            f"{total.files:,}",
            size(total.size),
        )
        for number, total in (manifest.partitions.items() if manifest else ())
    ]
    heads = ("partition", "ids", "records", *(["rows"] if has_rows else []), "log", "files", "size")
    table(console(), heads, rows, right=(*heads[:1], *heads[2:]))


def ids(span: Span) -> str:
    return f"{span.first:,} to {span.last:,}" if span.count else "none"


# -- export verify -----------------------------------------------------------------------------------------------------


def verified(
    place: str, manifest: Manifest, findings: Sequence[Finding], against: str | None, seconds: float, output: str
) -> None:
    records = sum(total.span.count for total in manifest.partitions.values())
    bytes_ = _bytes(manifest)
    has_records = manifest.shape.query.keeps_records
    if output == "json":
        put_json({
            "result": "findings" if findings else "clean", "output": place, "against": against, "manifest": manifest.number,
            "summary": {"files": len(manifest.pieces), "records": records, "bytes": bytes_, "seconds": round(seconds, 3),
                        "findings": len(findings), "rows": _rows(manifest), "records_checked": has_records},
            "findings": [{"path": found.path, "partition": found.partition, "first": found.span.first,
                          "last": found.span.last, "detail": found.detail} for found in findings],
        })  # fmt: skip
        return
    out = console()
    out.print(
        "clean" if not findings else count(len(findings), "finding"), style="bold green" if not findings else "bold red"
    )
    for found in findings:
        out.print()
        out.print(found.path, style="bold", soft_wrap=True)
        if found.span.count:
            out.print(f"  partition {found.partition}, ids {ids(found.span)}", soft_wrap=True)
        out.print(f"  {found.detail}", soft_wrap=True)
    out.print(
        f"{count(len(manifest.pieces), 'file')}, {count(records, 'record')}, {size(bytes_)} in {seconds:.1f} s"
        + (f"; compared with {against}" if against else ""),
        soft_wrap=True,
    )
    if not has_records:
        out.print("SQL was at these files, so they were checked by sizes, hashes and numbers of rows.", soft_wrap=True)


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
    """What is known of the tasks, and what follows from it. Pure: moments are given to it."""

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
        """Bytes a second and seconds left, when a task ended last: what the others have done since then is not known."""

    def begin(self, at: float) -> None:
        """The tasks run from now on; told again, nothing changes."""
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
        """Bytes a second of late, and how many seconds are left."""
        if self._forecast is None:
            return None
        speed, left = self._forecast
        return speed, max(0.0, left - (at - self._ended_at))

    def shown(self, lines: int) -> tuple[list[Part], int, int]:
        """The parts to show, and how many others there are, and how many of those are done. Those at work come first."""
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
    """On standard error."""

    def __init__(self, assignments: Sequence[Assignment], *, is_quiet: bool = False, shown: str = Shown.AUTO) -> None:
        """`is_quiet`: no lines where there is no terminal, unless somebody asked for objects."""
        self.records = self.data_bytes = self.files = 0
        self._first = self._last = 0.0
        self._tasks = Tasks(assignments)
        self._said = self._started = time.monotonic()
        self._is_live = shown == Shown.AUTO and sys.stderr.isatty()
        self._says = shown == Shown.AUTO and not is_quiet and not self._is_live
        self._writes_json = shown == Shown.JSON
        self._parts_max = PARTS_MAX
        self._file: Any = None
        self._live: Any = None

    def ended(self, numbers: Collection[int]) -> None:
        """Told again and again while tasks run, also without news."""
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

    def watch(self, written: Written) -> None:
        if written.piece is None:
            return
        self._first = min(self._first or written.started, written.started)
        self._last = max(self._last, written.ended)
        self.files += 1
        self.records += written.piece.span.count
        self.data_bytes += written.piece.data_bytes
        self.ended([written.number])

    @property
    def task_seconds(self) -> float:
        """From the start of the first task to the end of the last: without what starting Spark takes."""
        return self._last - self._first

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
    """What a terminal shows; `parts`: how many partitions at most."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    if not tasks.has_begun:
        return Text(f"Starting Spark: {duration(waited)}")
    grid = Table.grid(padding=(0, 1), expand=True)
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
