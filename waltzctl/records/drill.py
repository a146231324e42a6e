"""`waltzctl backup drill`: test a restore on this machine, without a daemon."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

from typer import Argument, Option

from waltzctl.placement.backup import Ending, bytes_up_to, cut_rows, moment_of, source_at
from waltzctl.shell.progress import Progress, Shown, ShownProgress
from waltzctl.show.archive import Drill, drilled
from waltzctl.show.forms import AnyForm, put
from waltzctl.show.terminal import size
from waltzd.errors.exit_codes import EXIT_FINDINGS, EXIT_OK
from waltzd.errors.operations import DiskFull, PathMissing

if TYPE_CHECKING:
    from waltzd.archive.cut_point import ArchivedLog, Cut

SESSION = 1
"""Session id of the restored replicas; no owner ever opens them."""
PARTITIONS_AT_ONCE = 2


def drill(
    *,
    store: Annotated[str, Argument(metavar="STORE", help="A directory, or s3://bucket/folder.")],
    end: Ending,
    scratch: Annotated[
        Path,
        Option("--directory", metavar="DIR", help="Scratch directory with space for one replica of each partition."),
    ],
    output: AnyForm = "table",
    progress: ShownProgress = Shown.AUTO,
) -> int:
    """Restore one replica of each partition from STORE into a scratch directory, check every record, show the time it took,
    and delete the replicas. No daemon runs, and no cluster is contacted.

    The exit code is 8 if a check fails. A log that cannot be restored is refused, as by `waltzctl cluster restore`. Run a
    drill regularly: only a restore proves that a backup works.

    \b
    Examples:
      waltzctl backup drill /mnt/archive --latest --directory /var/tmp
      waltzctl backup drill s3://waltz-archive/orders --through 2h --directory /var/tmp -o json
    """
    if not scratch.is_dir():
        raise PathMissing(
            f"{scratch} is not a directory",
            not_done="nothing was restored",
            next_step="create it, or name another one with --directory",
        )
    with Progress("restoring", progress) as course:
        found = practised(store, end, scratch, course.update)
    put(drilled(found, moment_of(found.cut), cut_rows(found.cut, found.logs)), output)
    return EXIT_OK if found.is_right else EXIT_FINDINGS


def practised(store: str, end: Ending, scratch: Path, on_progress: Callable[[int, int], None]) -> Drill:
    from waltzd.disk.real import RealDisk
    from waltzd.storage.offline.verify import Options, Target, verify

    source = source_at(store, end.chosen)
    cut = source.within_newest(end.cut(source.logs, datetime.now(UTC)))
    total = sum(bytes_up_to(log, cut.points[number].mark) for number, log in source.logs.items())
    disk = RealDisk()
    free = disk.free_bytes(str(scratch))
    if total > free:
        raise DiskFull(
            f"{scratch}: {size(total)} are needed, {size(free)} are free",
            not_done="nothing was restored",
            next_step="name a directory with more space with --directory",
        )
    home = mkdtemp(prefix="waltz-drill-", dir=scratch)
    try:
        started = time.monotonic()
        asyncio.run(_restored(home, source.logs, cut, lambda done: on_progress(done, total)))
        restored = time.monotonic()
        report = verify(disk, [Target(storage=home)], Options(is_deep=True))
        return Drill(
            place=source.store.place, cut=cut, logs=source.logs, bytes=total, restored_seconds=restored - started,
            verified_seconds=time.monotonic() - restored, findings=tuple(report.findings),
            records=sum(one.records for one in report.partitions),
        )  # fmt: skip
    finally:
        shutil.rmtree(home, ignore_errors=True)


async def _restored(home: str, logs: Mapping[int, ArchivedLog], cut: Cut, on_bytes: Callable[[int], None]) -> None:
    """Build the directory of a storage with one restored replica of each partition."""
    from waltzd.archive.restoration import restore_partition
    from waltzd.disk.real import RealDisk
    from waltzd.storage.replica.control import ControlFile, new_identity
    from waltzd.storage.replica.restored import folder_for, give_name

    disk, key, done = RealDisk(), uuid4(), 0
    ControlFile.create(disk, home, key, max(logs) + 1)
    turns = asyncio.Semaphore(PARTITIONS_AT_ONCE)

    def add(size: int) -> None:
        nonlocal done
        done += size
        on_bytes(done)

    async def one(number: int, log: ArchivedLog) -> tuple[int, Any]:
        async with turns:
            folder = folder_for(home, number)
            mark = cut.points[number].mark
            return number, await restore_partition(
                disk, log, mark, key=key, folder=folder, run=asyncio.to_thread, on_bytes=add
            )

    tasks = [asyncio.create_task(one(number, log)) for number, log in sorted(logs.items())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
    with closing(ControlFile.open(disk, home)) as control:
        new_identity(disk, home, control.header)
        for task in tasks:
            number, built = task.result()
            give_name(
                disk, home, control, number, session=SESSION, last_id=built.last_id, newest=built.newest,
                segments=built.segments,
            )  # fmt: skip
