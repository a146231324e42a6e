"""`waltzctl segment`: what was typed, and what came out. The work is `waltzd.storage.offline.dump`."""

from __future__ import annotations

from typing import Annotated, Literal

from typer import Argument, Option

from waltzctl.options import OUTPUT
from waltzctl.records.target import plain_file
from waltzctl.show import dump as shown
from waltzd.disk.real import RealDisk
from waltzd.errors import EXIT_OK, BadArgument
from waltzd.storage.offline.dump import dump


def dump_segment(
    *,
    path: Annotated[str, Argument(metavar="PATH")],
    first_id: Annotated[int, Option("--from", min=0, help="The first transaction id to show.")] = 0,
    last_id: Annotated[int | None, Option("--to", min=0, help="The last transaction id to show.")] = None,
    output: Annotated[
        Literal["table", "json", "hex"],
        Option(
            "-o",
            "--output",
            rich_help_panel=OUTPUT,
            help="For people, for scripts (one JSON object a line), or all bytes with their meaning.",
        ),
    ] = "table",
    payload_bytes: Annotated[int | None, Option("--payload-bytes", min=0, help="How much of each payload to show.")] = None,
) -> int:
    """Show what a file holds: a segment (.seg), an index (.idx), the control file, the identity file, a promise file.

    Damaged files are shown too. Bytes that are no sound record are printed where they stand, and the bad byte is marked
    where one changed byte explains the damage. Nothing is written.

    \b
    Examples:
      waltzctl segment dump /var/lib/waltz/0/0000000000000000000.seg
      waltzctl segment dump -o hex --from 17 --to 17 /var/lib/waltz/0/0000000000000000000.seg
      waltzctl segment dump -o json /var/lib/waltz/waltz-storage.ctl
    """
    if last_id is not None and last_id < first_id:
        raise BadArgument(f"--from {first_id} is above --to {last_id}", not_done="nothing was shown")
    sink = shown.sink(output, payload_bytes)
    dump(RealDisk(), plain_file(path), sink, first_id=first_id, last_id=last_id)
    return EXIT_OK
