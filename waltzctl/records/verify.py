"""`waltzctl verify-segments`: what was typed, and what came out. The work is `waltzd.storage.offline.verify`."""

from __future__ import annotations

import time
from uuid import UUID

import click

from waltzctl import render
from waltzctl.main import exit_codes
from waltzctl.progress import Progress, shown_progress
from waltzctl.records.target import resolve
from waltzd.disk.real import RealDisk
from waltzd.errors import EXIT_FINDINGS, EXIT_OK
from waltzd.storage.offline.verify import Options, verify
from waltzd.storage.offline.workers import processors


@click.command("verify-segments", epilog=exit_codes())
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="For people, or for scripts.")
@shown_progress
@click.option("-j", "--jobs", type=click.IntRange(1, 256), help="Processes to use; as many as processors by default.")
@click.option("--read-only", is_flag=True, help="Check a directory although a daemon holds it; what it may be writing "
    "at the end of each log is then not judged.")  # fmt: skip
@click.option("--deep", is_flag=True, help="Check each record once more by itself, with plain zlib. Much slower.")
@click.option("--key", type=click.UUID, help="The cluster key that the data must have.")
def verify_segments(
    paths: tuple[str, ...], output: str, jobs: int | None, read_only: bool, deep: bool, key: UUID | None, progress: str
) -> int:
    """Check all files of a storage: every checksum, header and index entry, the control and promise files, and that no
    segment is missing. PATH is a storage directory, one of its partition directories, or one segment.

    Nothing is written. The end is 0 when all is right, 8 when something was found, 1 when the check could not run.

    \b
    Examples:
      waltzctl verify-segments /var/lib/waltz
      waltzctl verify-segments /var/lib/waltz/0 /var/lib/waltz/1 -o json
      waltzctl verify-segments --read-only --jobs 1 /var/lib/waltz
    """
    targets = resolve(paths)
    options = Options(jobs=jobs or processors(), is_read_only=read_only, is_deep=deep, key=key)
    started = time.monotonic()
    with Progress("verify", progress) as course:
        report = verify(RealDisk(), targets, options, course.update)
    render.verification(report, output, seconds=time.monotonic() - started)
    return EXIT_FINDINGS if report.findings else EXIT_OK
