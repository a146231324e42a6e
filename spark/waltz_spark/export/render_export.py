"""The output of export commands: progress while they run, and results.

`waltzctl export status` and `export verify`: describe an export, and check its files. Neither starts Spark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from waltz_spark.export.delta import TableState, state_of
from waltz_spark.export.destination import destination_of, require_manifest
from waltz_spark.export.export import Run, has_leftovers, stray_files
from waltz_spark.export.manifest import Manifest, Piece, total_json
from waltz_spark.export.options import SourceOptions
from waltz_spark.export.tasks import Assignment
from waltz_spark.export.verification import Checked, Finding, check_files, check_log, check_table
from waltz_spark.log.origin import Span
from waltzctl.local_cluster.java import Java
from waltzctl.shell.progress import Amount, Progress, Report, Shown
from waltzctl.show.forms import Column, Columns, Line, Listing, Table, attributes, put, verdict
from waltzctl.show.forms import Part as PagePart
from waltzctl.show.terminal import count, rate, size
from waltzd.errors import EXIT_FINDINGS, EXIT_OK, BadArgument, ForeignCluster, WaltzError

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


def print_plan(run: Run, spans: Mapping[int, Span], java: Java | WaltzError | None, output: str) -> None:
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


def print_result(run: Run, newest: Manifest | None, seconds: float, output: str, table: TableState | None) -> None:
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


def print_state(place: str, manifest: Manifest, table: TableState | None, *, is_unfinished: bool, output: str) -> None:
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


def print_findings(
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


class Course:
    """Progress of the tasks of a run: a task counts once, however often Spark reports its end."""

    def __init__(self, assignments: Sequence[Assignment], report: Report) -> None:
        self._open = {given.number: given for given in assignments}
        self._records = sum(given.span.count for given in assignments)
        self._bytes = sum(given.split.bytes for given in assignments)
        self._report = report
        report("starting Spark")

    def ended(self, numbers: Collection[int]) -> None:
        """Report the progress; called repeatedly while tasks run, also without new results."""
        for number in numbers:
            self._open.pop(number, None)
        left = sum(given.span.count for given in self._open.values())
        left_bytes = sum(given.split.bytes for given in self._open.values())
        amount = Amount(done=self._bytes - left_bytes, total=self._bytes, unit="bytes")
        self._report(f"{self._records - left:,} of {self._records:,} records are exported", amount)


def show(output: str, shown: str) -> int:
    """Print what an export holds; return the exit code."""
    destination = destination_of(output)
    manifest = require_manifest(destination)
    table, is_unfinished = state_of(destination, manifest), has_leftovers(destination)
    print_state(destination.place, manifest, table, is_unfinished=is_unfinished, output=shown)
    return EXIT_OK


def check(output: str, log: SourceOptions, *, against_log: bool, shown: str, progress: Shown) -> int:
    """Check the files of an export, and with `against_log` compare them with the log; return the exit code."""
    for option in (*(["--source"] if log.sources else []), *(["--archive"] if log.archive else [])):
        if not against_log:
            raise BadArgument(f"{option} needs --against-log: without it, only the files are checked")
    started = time.monotonic()
    destination = destination_of(output)
    manifest = require_manifest(destination)
    findings = [
        Finding(
            path=name, partition=-1, span=Span(0, -1), detail="no manifest has it; readers of the directory read it, too"
        )
        for name in stray_files(destination, manifest)
    ]
    findings += check_table(destination, manifest)
    findings += _found("verifying", progress, check_files(destination, manifest), manifest, attrgetter("size"))
    against = None
    if against_log:
        origin = log.origin()
        against = origin.describe()
        catalog = origin.catalog(sorted(manifest.partitions))
        if catalog.key != manifest.cluster:
            raise ForeignCluster(f"{destination.place} is an export of {manifest.cluster}; {against} is {catalog.key}")
        findings += _found("comparing", progress, check_log(origin, catalog, manifest), manifest, attrgetter("data_bytes"))
    print_findings(destination.place, manifest, findings, against, time.monotonic() - started, shown)
    return EXIT_FINDINGS if findings else EXIT_OK


def _found(
    doing: str, shown: Shown, checks: Iterator[Checked], manifest: Manifest, weight: Callable[[Piece], int]
) -> list[Finding]:
    findings, done, total = [], 0, sum(map(weight, manifest.pieces))
    with Progress(doing, shown) as course:
        for checked in checks:
            done += weight(checked.piece)
            course.update(done, total)
            findings += [checked.finding] if checked.finding else []
    return findings
