"""`waltzctl archive`: what was typed, and what came out. The work is `restore`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from waltzctl.shell.options import Output
from waltzctl.shell.progress import Progress, Shown, ShownProgress
from waltzctl.show import terminal
from waltzctl.show.forms import Column, Columns, grid, put_json
from waltzd.disk.real import RealDisk
from waltzd.errors import EXIT_OK

if TYPE_CHECKING:
    from waltz_spark.restoring.restore import Restored

COLUMNS: Columns[dict[str, int]] = (
    Column("partition", is_right=True),
    Column("ids", lambda row: f"{row['first']:,} to {row['last']:,}"),
    Column("segments", is_right=True),
    Column("there before", is_right=True, json="were_there"),
    Column("bytes", is_right=True, is_size=True),
)
_WHAT_IT_IS = "This is an archive, not a replica: it has no promise and no vote, and no storage starts on it."


def restore_(
    *,
    archive: Annotated[str, Argument(metavar="ARCHIVE")],
    directory: Annotated[str, Argument(metavar="DIRECTORY")],
    partitions: Annotated[
        str | None, Option("--partitions", metavar="0-3,7", help="Only these; all that the archive holds by default.")
    ] = None,
    output: Output = "table",
    progress: ShownProgress = Shown.AUTO,
) -> int:
    """Make segments and their indexes again, byte for byte, from an export made with `--format parquet --lossless`.

    DIRECTORY is made, or empty, or one where a restore of the same export was stopped: that goes on where it was. Nothing
    is written over. What comes out is an archive and not a replica: read it with `waltzctl segment dump`, check it with
    `waltzctl verify-segments`.

    \b
    Examples:
      waltzctl archive restore /data/export /data/restored
      waltzctl archive restore /data/export /data/restored-0 --partitions 0 -o json
    """
    from waltz_spark.exporting.destination import destination_of, the_manifest
    from waltz_spark.log.selection import partitions_of
    from waltz_spark.restoring import restore

    place = destination_of(archive)
    found = the_manifest(place)
    segments = restore.segments_of(found, None if partitions is None else partitions_of(partitions))
    directory = os.path.realpath(directory)
    started = time.monotonic()
    with Progress("restore", progress) as course:
        done = list(restore.restore(place, found, segments, RealDisk(), directory, course.update))
    seconds = time.monotonic() - started
    rows = [_row(partition, list(part)) for partition, part in groupby(done, key=lambda one: one.segment.partition)]
    if output == "json":
        put_json({
            "archive": place.place, "export": str(found.export), "cluster": str(found.cluster), "manifest": found.number,
            "directory": directory,
            "partitions": {str(row["partition"]): {name: row[name] for name in row if name != "partition"} for row in rows},
            "seconds": round(seconds, 3),
        })  # fmt: skip
        return EXIT_OK
    out = terminal.console()
    size = terminal.size(sum(one.segment.bytes for one in done))
    out.print(f"restored: {terminal.count(len(done), 'segment')}, {size}, in {directory}", soft_wrap=True)
    grid(out, COLUMNS, rows)
    out.print(_WHAT_IT_IS, soft_wrap=True)
    out.print(f"`waltzctl verify-segments {directory}/[0-9]*` checks it.", soft_wrap=True)
    return EXIT_OK


def _row(partition: int, part: Sequence[Restored]) -> dict[str, int]:
    return {
        "partition": partition,
        "first": part[0].segment.span.first,
        "last": part[-1].segment.span.last,
        "segments": len(part),
        "were_there": sum(one.was_there for one in part),
        "data_bytes": sum(one.segment.data_bytes for one in part),
        "bytes": sum(one.segment.bytes for one in part),
    }
