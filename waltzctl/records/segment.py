"""`waltzctl segment`: what was typed, and what came out. The work is `waltzd.storage.offline.dump`."""

from __future__ import annotations

import click

from waltzctl.main import exit_codes
from waltzctl.records import render_dump
from waltzctl.records.target import plain_file
from waltzd.disk.real import RealDisk
from waltzd.errors import EXIT_OK, BadArgument
from waltzd.storage.offline.dump import dump


@click.command("dump", epilog=exit_codes())
@click.argument("path", metavar="PATH")
@click.option("--from", "first_id", type=click.IntRange(min=0), default=0, help="The first transaction id to show.")
@click.option("--to", "last_id", type=click.IntRange(min=0), help="The last transaction id to show.")
@click.option("-o", "--output", type=click.Choice(["table", "json", "hex"]), default="table",
    help="For people, for scripts (one JSON object a line), or all bytes with their meaning.")  # fmt: skip
@click.option("--payload-bytes", type=click.IntRange(min=0), help="How much of each payload to show.")
def dump_segment(path: str, first_id: int, last_id: int | None, output: str, payload_bytes: int | None) -> int:
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
    sink = render_dump.sink(output, payload_bytes)
    dump(RealDisk(), plain_file(path), sink, first_id=first_id, last_id=last_id)
    return EXIT_OK
