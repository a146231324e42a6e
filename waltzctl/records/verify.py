"""`waltzctl verify-segments`: what was typed, and what came out. The work is `waltzd.storage.offline.verify`."""

from __future__ import annotations

import sys
import time
from typing import Annotated
from uuid import UUID

from typer import Argument, Option

from waltzctl.interruption import silence_stdout
from waltzctl.progress import Progress, Shown, ShownProgress
from waltzctl.records.target import resolve
from waltzctl.show import files
from waltzctl.show.forms import AnyForm, put
from waltzd.disk.real import RealDisk
from waltzd.errors import EXIT_FINDINGS, EXIT_OK
from waltzd.storage.offline.verify import Options, verify
from waltzd.storage.offline.workers import processors


def verify_segments(
    *,
    paths: Annotated[tuple[str, ...], Argument(metavar="PATH...")],
    jobs: Annotated[
        int | None, Option("-j", "--jobs", min=1, max=256, help="Processes to use; as many as processors by default.")
    ] = None,
    read_only: Annotated[
        bool,
        Option(
            "--read-only",
            help="Check a directory although a daemon holds it; what it may be writing "
            "at the end of each log is then not judged.",
        ),
    ] = False,
    deep: Annotated[
        bool, Option("--deep", help="Check each record once more by itself, with plain zlib. Much slower.")
    ] = False,
    key: Annotated[UUID | None, Option("--key", help="The cluster key that the data must have.")] = None,
    output: AnyForm = "table",
    progress: ShownProgress = Shown.AUTO,
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
    try:
        put(files.report(report, seconds=time.monotonic() - started), output)
        sys.stdout.flush()
    except BrokenPipeError:  # the exit code still tells the result
        silence_stdout()
    return EXIT_FINDINGS if report.findings else EXIT_OK
