"""The commands of exports as the command line has them: options and help, which need none of the packages of an export."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from waltz_spark.engine.session import Spark
from waltz_spark.export.options import ExportOptions, SourceOptions
from waltzctl.shell.options import Output
from waltzctl.shell.progress import Shown, ShownProgress
from waltzctl.show.forms import AnyForm


def spark_export(
    *,
    output: Annotated[str, Argument(metavar="OUTPUT")],
    wish: ExportOptions,
    dry_run: Annotated[bool, Option("--dry-run", help="Only show what would be exported.")] = False,
    log: SourceOptions,
    spark: Spark,
    shown: Output = "table",
    progress: ShownProgress = Shown.AUTO,
) -> int:
    """Export the log, or what was added since the last run, to Parquet files. OUTPUT is a directory, or a URI as
    s3://bucket/export. The log is read from the running cluster, or from directories of storages (--source).

    An export is exact: each committed transaction is in it once, and a manifest proves it. To run the command again adds
    what is new, and does nothing if nothing is. Nothing has to be prepared: Spark runs on this machine unless --master says
    otherwise.

    \b
    Examples:
      waltzctl spark-export /tmp/export --dry-run
      waltzctl spark-export /tmp/export
      waltzctl spark-export /tmp/orders --decode text --partitions 0-1 --rate 50MB
      waltzctl spark-export /tmp/old --archive s3://waltz-archive/orders
    """
    from waltz_spark.export.export_command import export

    return export(output, wish, log, spark, is_dry_run=dry_run, shown=shown, progress=progress)


def status(*, output: Annotated[str, Argument(metavar="OUTPUT")], shown: AnyForm = "table") -> int:
    """Show what an export holds, as its manifest says. The files are not read: `export verify` does that.

    \b
    Examples:
      waltzctl export status /tmp/export
      waltzctl export status /tmp/export -o json
    """
    from waltz_spark.export.render_export import show

    return show(output, shown)


def verify(
    *,
    output: Annotated[str, Argument(metavar="OUTPUT")],
    against_log: Annotated[
        bool, Option("--against-log", help="Compare with the log as well: of the cluster that is meant, or of --source.")
    ] = False,
    log: SourceOptions,
    shown: AnyForm = "table",
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
    from waltz_spark.export.render_export import check

    return check(output, log, against_log=against_log, shown=shown, progress=progress)
