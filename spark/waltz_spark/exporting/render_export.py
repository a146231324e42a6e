"""How an export, its state and its verification look: while it runs, and after."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from waltz_spark.exporting.manifest import Manifest, Total
from waltz_spark.exporting.progress import Progress
from waltz_spark.exporting.query import SPARK
from waltz_spark.log.origin import Span
from waltzctl.render import console, count, put_json, rate, size, table
from waltzd.errors import WaltzError

if TYPE_CHECKING:
    from waltz_spark.engine.class_archive import Place
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
