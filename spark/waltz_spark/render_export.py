"""How an export, its state and its verification look: while it runs, and after."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from waltz_spark.export import Told
from waltz_spark.form import Form
from waltz_spark.manifest import Manifest, Total
from waltz_spark.origin import Span
from waltz_spark.task import Assignment
from waltz_spark.verification import Finding
from waltzctl.render import console, count, put_json, rate, size, table

LINES_MAX = 16
"""With more partitions than this, only the sum is shown while it runs."""


class Progress:
    """A line for each partition and one for all, on standard error; nothing when that is no terminal."""

    def __init__(self, assignments: Sequence[Assignment]) -> None:
        self.records = self.data_bytes = self.files = 0
        self._first = self._last = 0.0
        self._sizes = {given.number: given.split.bytes for given in assignments}
        self._partitions = {given.number: given.partition for given in assignments}
        self._bar: Any = None
        self._lines: dict[int | None, Any] = {}
        if not sys.stderr.isatty():
            return
        from rich import progress

        self._bar = progress.Progress(
            "{task.description}",
            progress.BarColumn(bar_width=None),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=self._terminal(),
            transient=True,
        )
        numbers = sorted(set(self._partitions.values()))
        for number in numbers if len(numbers) <= LINES_MAX else ():
            total = sum(given.split.bytes for given in assignments if given.partition == number)
            self._lines[number] = self._bar.add_task(f"partition {number}", total=total)
        self._lines[None] = self._bar.add_task("starting Spark", total=sum(self._sizes.values()))

    def _terminal(self) -> Any:
        """A way to it of our own: what is meant for standard error goes to a file while Java starts."""
        found = console(to_stderr=True)
        found.file = self._file = os.fdopen(os.dup(2), "w", encoding="utf-8")
        return found

    def watch(self, told: Told) -> None:
        written = told.written
        if written is None or written.piece is None:
            return
        self._first = min(self._first or written.started, written.started)
        self._last = max(self._last, written.ended)
        self.files += 1
        self.records += written.piece.span.count
        self.data_bytes += written.piece.data_bytes
        if self._bar is None:
            return
        done = self._sizes[written.number]
        for line in (self._partitions[written.number], None):
            if line in self._lines:
                self._bar.advance(self._lines[line], done)
        self._bar.update(self._lines[None], description=f"{self.records:,} records")

    @property
    def task_seconds(self) -> float:
        """From the start of the first task to the end of the last: without what starting Spark takes."""
        return self._last - self._first

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._file.close()


class Clock:
    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started


# -- spark-export ------------------------------------------------------------------------------------------------------


def planned(
    place: str, source: str, spans: Mapping[int, Span], assignments: Sequence[Assignment], form: Form, output: str
) -> None:
    """What --dry-run shows."""
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
                  "format": form.format, "compression": form.compression, "partitions": rows})  # fmt: skip
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


def exported(
    place: str, source: str, newest: Manifest | None, before: Manifest | None, progress: Progress | None, seconds: float,
    output: str,
) -> None:  # fmt: skip
    added = progress or Progress(())
    if output == "json":
        put_json({
            "result": "exported" if added.files else "nothing new",
            "output": place,
            "source": source,
            "exported": {"records": added.records, "data_bytes": added.data_bytes, "files": added.files,
                         "bytes": _bytes(newest) - _bytes(before), "seconds": round(seconds, 3),
                         "megabytes_per_second": rate(added.data_bytes, seconds),
                         "task_seconds": round(added.task_seconds, 3)},
            **state_json(newest),
        })  # fmt: skip
        return
    out = console()
    if not added.files:
        out.print(f"{place} is up to date with {source}: nothing was exported.", soft_wrap=True)
        return
    _partitions(newest)
    written = f"{size(_bytes(newest) - _bytes(before))} in {count(added.files, 'file')}"
    out.print(
        f"Exported {count(added.records, 'record')}, {size(added.data_bytes)} of log, as {written}, "
        f"in {seconds:.1f} s ({rate(added.data_bytes, seconds)} MB/s).",
        soft_wrap=True,
    )
    out.print(f"{place} is complete up to these ids: manifest {newest.number if newest else 0}.", soft_wrap=True)


def _bytes(manifest: Manifest | None) -> int:
    return 0 if manifest is None else sum(total.size for total in manifest.partitions.values())


# -- export status -----------------------------------------------------------------------------------------------------


def state_json(manifest: Manifest | None) -> dict[str, Any]:
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
        "columns": [{"name": name, "type": type_} for name, type_ in shape.schema],
        "partitions": [_total_row(number, total) for number, total in manifest.partitions.items()],
    }


def _total_row(number: int, total: Total) -> dict[str, Any]:
    return {"partition": number, "first": total.span.first, "last": total.span.last, "records": total.span.count,
            "data_bytes": total.data_bytes, "crc": f"{total.crc:08x}", "files": total.files,
            "bytes": total.size}  # fmt: skip


def state(place: str, manifest: Manifest, is_unfinished: bool, output: str) -> None:
    if output == "json":
        put_json({"output": place, "source": manifest.source, "unfinished": is_unfinished, **state_json(manifest)})
        return
    out = console()
    shape = manifest.shape
    _partitions(manifest)
    made = [f"{shape.format} ({shape.compression})"]
    made += ["lossless"] * shape.lossless
    made += [f"decoded by {shape.decoder}"] * bool(shape.decoder)
    out.print(f"Manifest {manifest.number} of {manifest.written}: {', '.join(made)}.", soft_wrap=True)
    out.print(f"Cluster {manifest.cluster}, last read from {manifest.source}.", soft_wrap=True)
    if is_unfinished:
        out.print("A run is at work, or ended before it was done: what it left does not count, the next one removes it.",
                  soft_wrap=True)  # fmt: skip


def _partitions(manifest: Manifest | None) -> None:
    rows = [
        (
            str(number),
            ids(total.span),
            f"{total.span.count:,}",
            size(total.data_bytes),
            f"{total.files:,}",
            size(total.size),
        )
        for number, total in (manifest.partitions.items() if manifest else ())
    ]
    heads = ("partition", "ids", "records", "log", "files", "size")
    table(console(), heads, rows, right=(*heads[:1], *heads[2:]))


def ids(span: Span) -> str:
    return f"{span.first:,} to {span.last:,}" if span.count else "none"


# -- export verify -----------------------------------------------------------------------------------------------------


def verified(
    place: str, manifest: Manifest, findings: Sequence[Finding], against: str | None, seconds: float, output: str
) -> None:
    records = sum(total.span.count for total in manifest.partitions.values())
    bytes_ = _bytes(manifest)
    if output == "json":
        put_json({
            "result": "findings" if findings else "clean", "output": place, "against": against, "manifest": manifest.number,
            "summary": {"files": len(manifest.pieces), "records": records, "bytes": bytes_, "seconds": round(seconds, 3),
                        "findings": len(findings)},
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
