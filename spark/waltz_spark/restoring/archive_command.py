"""`waltzctl archive`: what was typed, and what came out. The work is `restore`."""

from __future__ import annotations

import os
import time
from typing import Annotated

from typer import Argument, Option

from waltzctl.options import Output
from waltzctl.progress import Progress, Shown, ShownProgress
from waltzctl.show import terminal
from waltzctl.show.forms import put_json
from waltzctl.show.terminal import table
from waltzd.disk.real import RealDisk
from waltzd.errors import EXIT_OK

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
    from waltz_spark.exporting.destination import destination_of
    from waltz_spark.exporting.export import the_manifest
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
    by_partition = restore.by_partition(done)
    if output == "json":
        put_json(
            {
                "archive": place.place,
                "export": str(found.export),
                "cluster": str(found.cluster),
                "manifest": found.number,
                "directory": directory,
                "partitions": {
                    str(partition): {
                        "first": part[0].segment.span.first,
                        "last": part[-1].segment.span.last,
                        "segments": len(part),
                        "were_there": sum(one.was_there for one in part),
                        "data_bytes": sum(one.segment.data_bytes for one in part),
                        "bytes": sum(one.segment.bytes for one in part),
                    }
                    for partition, part in by_partition.items()
                },
                "seconds": round(seconds, 3),
            }
        )
        return EXIT_OK
    out = terminal.console()
    size = sum(one.segment.bytes for one in done)
    out.print(f"restored: {terminal.count(len(done), 'segment')}, {terminal.size(size)}, in {directory}", soft_wrap=True)
    names = ("partition", "ids", "segments", "there before", "bytes")
    rows = [
        (
            str(partition),
            f"{part[0].segment.span.first:,} to {part[-1].segment.span.last:,}",
            f"{len(part):,}",
            f"{sum(one.was_there for one in part):,}",
            terminal.size(sum(one.segment.bytes for one in part)),
        )
        for partition, part in by_partition.items()
    ]
    table(out, names, rows, right=("partition", "segments", "there before", "bytes"))
    out.print(_WHAT_IT_IS, soft_wrap=True)
    out.print(f"`waltzctl verify-segments {directory}/[0-9]*` checks it.", soft_wrap=True)
    return EXIT_OK
