"""`waltzctl analysis`: what was typed, and what came out. The work is in `replay` and `report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from typer import Argument, Option

from waltz_spark.engine.spark_choice import Conf, JavaHome, Master
from waltz_spark.exporting.options import Log
from waltzctl.show.forms import AnyForm, Column, Columns, Listing, Page, grid, put
from waltzctl.show.terminal import count
from waltzd.errors import EXIT_OK, BadArgument

if TYPE_CHECKING:
    from rich.console import Console

    from waltz_spark.analysis.replay import Branch


def replay_(
    *,
    archive: Annotated[str, Argument(metavar="ARCHIVE")],
    view: Annotated[
        Path | None, Option("--view", metavar="FILE", help="A SQLite database of the bank to compare with.")
    ] = None,
    partitions: Annotated[
        str | None,
        Option("--partitions", metavar="0-3,7", help="Only these; all that the view, or else the archive, has by default."),
    ] = None,
    output: AnyForm = "table",
) -> int:
    """Replay the bank example out of an export: apply its transfers one after the other, partition by partition, and
    compare the balances with those of its SQL view. Shows that an export holds everything.

    ARCHIVE is the output of `waltzctl spark-export`, of any format. The end is 8 when an account is overdrawn on the way or
    has another balance in the view; the first of them is told. A view that is behind is compared as far as it has come.

    \b
    Examples:
      waltzctl analysis replay /data/export
      waltzctl analysis replay /data/export --view /data/bank.db --partitions 0 -o json
    """
    from waltz_spark.analysis import replay
    from waltz_spark.exporting.destination import destination_of, the_manifest
    from waltz_spark.log.selection import partitions_of

    place = destination_of(archive)
    found = the_manifest(place)
    wanted = None if partitions is None else partitions_of(partitions)
    there = None if view is None else replay.view_of(view)
    branches = list(replay.replay(place, found, replay.ends_of(found, there, wanted)))
    if there is not None:
        replay.compare(branches, there)
    _show_replay(branches, place.place, view, output)
    return EXIT_OK


class _Balance(NamedTuple):
    branch: Branch
    account: int
    balance: int


BALANCES: Columns[_Balance] = (
    Column("branch", lambda row: row.branch.partition, is_right=True, cell=str),
    Column("transfers", lambda row: row.branch.next_id, is_right=True),
    Column("account", lambda row: row.account, is_right=True, cell=str),
    Column("balance", lambda row: row.balance, is_right=True),
)


def _show_replay(branches: Sequence[Branch], archive: str, view: Path | None, output: str) -> None:
    rows = [_Balance(branch, *each) for branch in branches for each in sorted(branch.balances.items())]

    def draw(out: Console) -> None:
        said = "the log was replayed" if view is None else "the log and the view agree"
        transfers = count(sum(branch.next_id for branch in branches), "transfer")
        out.print(f"{said}: {transfers}, nobody overdrew, all money is there", soft_wrap=True)
        grid(out, BALANCES, rows)

    told = {
        "archive": archive,
        "view": None if view is None else str(view),
        "agrees": None if view is None else True,
        "partitions": {
            str(branch.partition): {
                "last": branch.next_id - 1,
                "transfers": branch.next_id,
                "total": branch.total,
                "lowest": branch.lowest,
                "balances": {str(number): balance for number, balance in sorted(branch.balances.items())},
            }
            for branch in branches
        },
    }
    put(Page(draw=draw, things=Listing(kind="balances", columns=BALANCES, rows=rows), told=told), output)


def report_(
    *,
    export: Annotated[str | None, Argument(metavar="[ARCHIVE]")] = None,
    partitions: Annotated[str | None, Option("--partitions", metavar="0-3,7", help="Only these.")] = None,
    time_column: Annotated[
        str | None,
        Option("--time-column", metavar="NAME", help="With ARCHIVE: a column of it that says when, to count by the hour."),
    ] = None,
    top: Annotated[int, Option("--top", min=1, max=1000, help="How many headers, clients and locks.")] = 10,
    chart: Annotated[
        Path | None, Option("--chart", metavar="FILE", help="Draw a picture, too: .png, .svg or .pdf.")
    ] = None,
    master: Master = None,
    conf: Conf = (),
    java_home: JavaHome = None,
    meant: Log,
    output: AnyForm = "table",
) -> int:
    """Count what a log holds: transactions and bytes, by partition, header, client, time and lock, and how large payloads
    are. Spark reads an export (ARCHIVE), the directories of storages or an archive of segments (--source), or the running
    cluster that is meant.

    Times are hours, of the log or of a column that was decoded (--time-column). Where a log is of format 0 only, they are
    the days on which segments were begun, where those are known, and nothing is said of locks. A transaction that was
    refused is not in a log: many clients that write one lock are what conflicts come from, and no count of them.

    \b
    Examples:
      waltzctl analysis report /data/export
      waltzctl analysis report --source /var/lib/waltz --chart /data/report.png
      waltzctl analysis report /data/export --partitions 0 --top 3 -o json
    """
    from waltz_spark.analysis import render_report, report, report_chart
    from waltz_spark.engine.session import check_master, conf_of, default_master
    from waltz_spark.engine.shipping import ALWAYS
    from waltz_spark.engine.spark_choice import SparkChoice
    from waltz_spark.log.selection import partitions_of

    if export is not None and meant.allow_uncommitted:
        raise BadArgument("--allow-uncommitted needs --source: an export holds only what is committed")
    others = [*(["--source"] if meant.sources else []), *(["--archive"] if meant.archive else []), *meant.cluster.typed]
    if export is not None and others:
        raise BadArgument(
            f"ARCHIVE and {others[0]} name two logs", not_done="nothing was read", next_step="say one of them only"
        )
    if export is None and time_column is not None:
        raise BadArgument("--time-column needs ARCHIVE: a log itself has no columns of an application")
    if chart is not None:
        report_chart.check(chart)
    wanted = None if partitions is None else partitions_of(partitions)
    if export is not None:
        log: report.Log = report.archive_log(export, wanted, time_column)
    else:
        log = report.origin_log(meant.origin(), wanted)
    spark = SparkChoice(master=master or default_master(), conf=conf_of(conf), java_home=java_home)
    check_master(spark.master)
    found = report.made_by(spark.settings(ALWAYS), log, top=top)
    if chart is not None:
        report_chart.draw(found, chart)
    render_report.show(found, output)
    if chart is not None and output in ("table", "wide"):
        typer.echo(f"The picture is in {chart}.", err=True)
    return EXIT_OK
