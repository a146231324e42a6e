"""`waltzctl spark-export`: from the options to a run, and its output.

All errors in options are reported, and existing files are examined, before Java is started: a run with nothing to do only
costs that examination.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from functools import partial

import typer

from waltz_spark.engine.session import SparkChoice, end_java, new_log, running, scratch
from waltz_spark.export.delta import DeltaTable, TableState, state_of
from waltz_spark.export.destination import Destination, destination_of, newest_manifest
from waltz_spark.export.export import Run, behind, check_history, planned, recover, wanted
from waltz_spark.export.form import Form, check_columns, form_of
from waltz_spark.export.manifest import Manifest
from waltz_spark.export.options import (
    ExportOptions,
    SourceOptions,
    check_ends,
    check_no_overlap,
    make_importable,
)
from waltz_spark.export.render_export import Course, print_plan, print_result
from waltz_spark.export.tasks import Assignment, Job, Watch, Written, run_by_spark
from waltz_spark.log.origin import Catalog, Origin, Span, Throttle
from waltz_spark.log.selection import EARLIEST, Selection
from waltz_spark.payloads.decoders import Decoder, decoder_of, is_function
from waltzctl.local_cluster.java import Java
from waltzctl.shell.interruption import EXIT_INTERRUPTED, ending_in_order
from waltzctl.shell.progress import Shown, Waiting
from waltzd.errors import EXIT_FINDINGS, EXIT_OK, BadArgument, WaltzError
from waltzd.errors.operations import NotOurExport, Unfinished

LATELY_SECONDS = 60.0
"""Window of the measured speed: a task, which counts at its end, takes longer than a message."""


def export(
    output: str,
    wish: ExportOptions,
    log: SourceOptions,
    spark: SparkChoice,
    *,
    is_dry_run: bool,
    shown: str,
    progress: Shown,
) -> int:
    """Export what is new, or with `is_dry_run` print what that is; return the exit code."""
    started = time.monotonic()
    destination, asked = _destination(output, log.sources, spark), wish.ids(log)
    make_importable(spark.py_files)
    if not is_dry_run:
        recover(destination, "recovery")
    before = newest_manifest(destination)
    if before is not None and not wish.incremental:
        raise NotOurExport(
            f"{destination.place} holds an export already",
            next_step="leave --no-incremental out to add what is new, or name another output",
        )
    run, spans = _run(destination, before, wish, asked, log)
    if is_dry_run:
        print_plan(run, spans, spark.java() if run.assignments else None, shown)
        return EXIT_OK
    if run.assignments:
        return _carry_out(run, spark, started, shown, progress)
    if run.has_leftovers:
        run.tidy()
    print_result(run, before, time.monotonic() - started, shown, _table_state(run, before))
    return EXIT_OK


def _destination(output: str, sources: Sequence[str], spark: SparkChoice) -> Destination:
    """Return the destination; raise if it overlaps with the source, or executors cannot reach it."""
    if not output.strip():
        raise BadArgument("OUTPUT is empty")
    destination = destination_of(output)
    if destination.is_on_this_machine:
        check_no_overlap(destination.place, sources)
    spark.check_places([*([destination.place] if destination.is_on_this_machine else []), *sources])
    return destination


def _run(
    destination: Destination, before: Manifest | None, wish: ExportOptions, asked: Selection, log: SourceOptions
) -> tuple[Run, dict[int, Span]]:
    """Plan a run; return it with the ids to add."""
    form, decoder = _form_and_decoder(wish, before)
    origin = log.origin()
    catalog = origin.catalog(asked.partitions)
    check_history(origin, catalog, before, destination.place)
    asked = asked.timed(origin, catalog)
    _say_timeless(origin, catalog, asked)
    spans = wanted(catalog, before, asked)
    _say_beginnings(catalog, before, asked)
    _say_ends(catalog, before, origin, is_live=not log.sources)
    file_data = None if wish.file_bytes is None else _data_bytes_of(form, wish.file_bytes)
    assignments = planned(catalog, spans, file_data_bytes=file_data)
    job = Job(
        origin=origin, destination=destination, cluster=catalog.key, timelines=catalog.timelines,
        routes=catalog.routes, form=form, decoder=decoder, throttle=Throttle(wish.bytes_per_second),
    )  # fmt: skip
    table = None
    if form.is_table:
        table = DeltaTable(destination, job.schema)
        table.is_behind(before)  # raises if the table cannot be used
    run = Run(job=job, before=before, assignments=assignments, table=table)
    if assignments:
        check_columns(form, job.schema)
    return run, spans


def _form_and_decoder(wish: ExportOptions, before: Manifest | None) -> tuple[Form, Decoder | None]:
    """Return the form of the files and the decoder. Omitted options are taken from the existing export.

    A function has to be named again: a process that can write to the export could name any function in it."""
    there = None if before is None else before.shape
    form = form_of(
        wish.format or (there.format if there else "parquet"),
        wish.compression or (there.compression if there else None),
    )
    text = wish.decode if wish.decode is not None else (there.decoder if there else "")
    if not text:
        return form, None
    if wish.decode is None and is_function(text):
        raise BadArgument(
            f"this export was begun with --decode {text!r}, which runs code, and the command does not say so",
            not_done="nothing was written, and nothing of it was run",
            next_step="if you know it, give --decode again",
        )
    return form, decoder_of(text)


def _data_bytes_of(form: Form, file_bytes: int) -> int:
    """Estimate the bytes of log that make a file of this size."""
    return max(1, int(file_bytes * file_bytes / max(1, form.guess(file_bytes))))


def _carry_out(run: Run, spark: SparkChoice, started: float, shown: str, progress: Shown) -> int:
    java = spark.ready()
    with ending_in_order(partial(end_java, spark)) as ending:
        try:
            with Waiting(progress, lately=LATELY_SECONDS) as line:
                course = Course(run.assignments, line.report)
                newest = run.carry_out(partial(_tasks, spark, java, course.ended))
        except KeyboardInterrupt:
            _say_interrupted(run)
            return EXIT_INTERRUPTED
        except WaltzError as error:
            if ending.was_signalled:  # the error is a consequence of ending Spark
                _say_interrupted(run)
                return EXIT_INTERRUPTED
            _explain(error, run)
            raise
    print_result(run, newest, time.monotonic() - started, shown, _table_state(run, newest))
    return EXIT_OK


def _say_interrupted(run: Run) -> None:
    if _published(run) is not None:
        said = "What was finished is in the export, and the same command goes on from there."
    else:
        said = "The export is as it was; the same command begins again."
    typer.echo(f"Interrupted. {said}", err=True)


def _published(run: Run) -> Manifest | None:
    """Return the newest manifest if this run has published it."""
    reached = newest_manifest(run.destination)
    return None if reached is None or (run.before and reached.number == run.before.number) else reached


def _say_beginnings(catalog: Catalog, before: Manifest | None, asked: Selection) -> None:
    """Print the partitions whose log does not begin at id 0, unless an option chose their first id."""
    known = {} if before is None else before.partitions
    wanted = catalog.spans if asked.partitions is None else asked.partitions
    news = [number for number in sorted(wanted) if number not in known and asked.starting.of(number) == EARLIEST]
    late = [f"{number} at id {catalog.spans[number].first:,}" for number in news if catalog.spans[number].first > 0]
    if late:
        listed = ", ".join(late[:5]) + (f" and {len(late) - 5:,} more" if len(late) > 5 else "")
        typer.echo(f"The log does not begin at id 0 there: partition {listed}. What lay before is not exported.", err=True)


def _say_timeless(origin: Origin, catalog: Catalog, asked: Selection) -> None:
    """Print which records have no time, and so are before all times."""
    if not asked.has_times:
        return
    wanted = sorted(catalog.spans if asked.partitions is None else asked.partitions)
    begins = {number: origin.first_at(catalog, number, 0) - 1 for number in wanted}
    timeless = [f"{number} up to id {last:,}" for number, last in begins.items() if last >= catalog.spans[number].first]
    if timeless:
        listed = ", ".join(timeless[:5]) + (f" and {len(timeless) - 5:,} more" if len(timeless) > 5 else "")
        typer.echo(f"What was written in format 0 has no time and lies before all others: partition {listed}.", err=True)


def _say_ends(catalog: Catalog, before: Manifest | None, origin: Origin, *, is_live: bool) -> None:
    """Print the partitions whose log ends before the export; raise for a running cluster, which was set back."""
    ends = behind(catalog, before)
    if before is None or not ends:
        return
    if is_live:
        check_ends(ends, before.next_ids, origin.describe())
    listed = ", ".join(f"{number} ends at id {last:,}" for number, last in sorted(ends.items())[:5])
    more = f" and {len(ends) - 5:,} more" if len(ends) > 5 else ""
    typer.echo(f"The export is ahead of what was read: partition {listed}{more}. Nothing of them was exported.", err=True)


def _explain(error: WaltzError, run: Run) -> None:
    """Convert an error after a publication to `Unfinished`, unless it reports damage."""
    reached = _published(run)
    if reached is None:
        return
    records = sum(total.span.count for total in reached.partitions.values())
    if error.exit_code == EXIT_FINDINGS:
        typer.echo(f"What was finished stays: {records:,} records are in the export.", err=True)
        return
    raise Unfinished(
        f"after {records:,} records: {error.message}", next_step=error.detail_next_step + "; the same command goes on"
    ) from error


def _tasks(
    choice: SparkChoice, java: Java, watch: Watch, job: Job, assignments: Sequence[Assignment]
) -> Generator[Written, None, None]:
    with scratch() as place, running(choice, java, new_log(os.environ)) as spark:
        bucket = place / "bucket" if choice.is_local else None
        yield from run_by_spark(spark, job, assignments, bucket=bucket, watch=watch)


def _table_state(run: Run, newest: Manifest | None) -> TableState | None:
    if run.table is None or newest is None:
        return None
    return state_of(run.destination, newest)
