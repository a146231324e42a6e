"""`waltzctl export status` and `export verify`: what an export holds, and whether that is so. Without Spark."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from waltz_spark.exporting.options import Log, origin_of
from waltzctl.options import Output
from waltzctl.progress import Progress, Shown, ShownProgress
from waltzd.errors import EXIT_FINDINGS, EXIT_OK, BadArgument


def status(*, output: Annotated[str, Argument(metavar="OUTPUT")], shown: Output = "table") -> int:
    """Show what an export holds, as its manifest says. The files are not read: `export verify` does that.

    \b
    Examples:
      waltzctl export status /tmp/export
      waltzctl export status /tmp/export -o json
    """
    from waltz_spark.exporting.delta import state_of
    from waltz_spark.exporting.destination import destination_of
    from waltz_spark.exporting.export import has_leftovers, the_manifest
    from waltz_spark.exporting.render_export import state

    destination = destination_of(output)
    manifest = the_manifest(destination)
    state(destination.place, manifest, state_of(destination, manifest), has_leftovers(destination), shown)
    return EXIT_OK


def verify(
    *,
    output: Annotated[str, Argument(metavar="OUTPUT")],
    against_log: Annotated[
        bool, Option("--against-log", help="Compare with the log as well: of the cluster that is meant, or of --source.")
    ] = False,
    log: Log,
    shown: Output = "table",
    progress: ShownProgress = Shown.AUTO,
) -> int:
    """Check every file of an export: its size, its hash, and that its rows are the records that were exported, byte for
    byte. Of a Delta table, also that it lists exactly these files. Needs nothing but the files; with --against-log, the log
    is read and compared, too.

    \b
    Examples:
      waltzctl export verify /tmp/export
      waltzctl export verify /tmp/export --against-log
    """
    from waltz_spark.exporting.destination import destination_of
    from waltz_spark.exporting.export import the_manifest
    from waltz_spark.exporting.render_export import Clock, verified
    from waltz_spark.exporting.verification import Finding, check_files, check_log, check_table, strays
    from waltz_spark.log.origin import Span

    if log.sources and not against_log:
        raise BadArgument("--source needs --against-log: without it, only the files are checked")
    clock = Clock()
    destination = destination_of(output)
    manifest = the_manifest(destination)
    findings = [
        Finding(path=name, partition=-1, span=Span(0, -1), detail="no manifest has it; whoever reads all files reads it")
        for name in strays(destination, manifest)
    ]
    findings += check_table(destination, manifest)
    total = sum(piece.size for piece in manifest.pieces)
    with Progress("verifying", progress) as course:
        done = 0
        for checked in check_files(destination, manifest):
            done += checked.piece.size
            course.update(done, total)
            findings += [checked.finding] if checked.finding else []
    against = None
    if against_log:
        origin = origin_of(log)
        against = origin.describe()
        catalog = origin.catalog(sorted(manifest.partitions))
        if catalog.key != manifest.cluster:
            from waltzd.errors import ForeignCluster

            raise ForeignCluster(f"{destination.place} is an export of {manifest.cluster}; {against} is {catalog.key}")
        total = sum(piece.data_bytes for piece in manifest.pieces)
        with Progress("comparing", progress) as course:
            done = 0
            for checked in check_log(origin, catalog, manifest):
                done += checked.piece.data_bytes
                course.update(done, total)
                findings += [checked.finding] if checked.finding else []
    verified(destination.place, manifest, findings, against, clock.seconds, shown)
    return EXIT_FINDINGS if findings else EXIT_OK
