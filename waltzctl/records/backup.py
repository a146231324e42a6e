"""Backups: `waltzctl archive status --lost-now` shows how much would be lost if all storages failed at this moment, and
`waltzctl backup drill` tests a restore on this machine, without a daemon.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated, Any
from uuid import uuid4

from typer import Argument, Option

from waltzctl.placement.backup import Ending, bytes_up_to, cut_rows, moment_of, source_at
from waltzctl.shell.blueprint import unwritten
from waltzctl.shell.cluster_target import ClusterOptions, ClusterTarget
from waltzctl.shell.moment import shown
from waltzctl.shell.progress import Progress, Shown, ShownProgress
from waltzctl.show.forms import (
    AnyForm,
    Column,
    Columns,
    Line,
    Listing,
    Part,
    Table,
    objects,
    plain,
    put,
    put_again,
    screen_for,
    verdict,
)
from waltzctl.show.terminal import count, rate, size
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzctl.snapshot.collector import snapshot_of
from waltzd.archive.cut_point import ArchivedLog, Cut
from waltzd.archive.listing import newest_metadata
from waltzd.archive.location import open_archive
from waltzd.archive.restoration import restore_partition
from waltzd.archive.unsealed import unsealed_index_at
from waltzd.archive.verification import survey
from waltzd.cluster.metadata import read
from waltzd.disk.real import RealDisk
from waltzd.errors import EXIT_FINDINGS, EXIT_OK, WaltzError
from waltzd.errors.operations import DiskFull, PathMissing
from waltzd.format.finding import Finding
from waltzd.protocol.timelines import FIRST
from waltzd.storage.offline.verify import Options, Target, verify
from waltzd.storage.replica.control import ControlFile, new_identity
from waltzd.storage.replica.restored import folder_for, give_name

LATE_SECONDS = 60.0
"""Lag from which the exit code reports findings; ten seconds are usual."""


def show_loss(store: str | None, watch: float | None, given: ClusterOptions, output: str) -> int:
    """Show the loss as the owners report it, or as the store shows it if one is given. Return the exit code."""
    target = given.target() if store is None else None
    if watch is None:
        found = _fetch(store, target)
        put(found.page(), output)
        return _code(found)
    return _watch(store, target, watch, output)


def _code(found: Backups) -> int:
    return EXIT_FINDINGS if found.is_behind(LATE_SECONDS) else EXIT_OK


def _fetch(store: str | None, target: ClusterTarget | None) -> Backups:
    if store is not None:
        return _in_store(store)
    assert target is not None
    return backed_up(snapshot_of(target))


def _watch(store: str | None, target: ClusterTarget | None, every: float, output: str) -> int:
    """Show the loss repeatedly until Ctrl-C; return the exit code of the last time."""
    code = EXIT_FINDINGS

    with suppress(KeyboardInterrupt), screen_for(output) as screen:
        while True:
            found: Backups | WaltzError
            try:
                found = _fetch(store, target)
                code = _code(found)
            except WaltzError as error:
                found, code = error, error.exit_code
            put_again(found if isinstance(found, WaltzError) else found.page(), output, screen, every)
            time.sleep(every)
    return code


def backed_up(snapshot: ClusterSnapshot) -> Backups:
    """Return the loss as owners and the leader report it."""
    rows = []
    for view in snapshot.partitions:
        reported = view.reported
        is_kept = reported is not None and reported.backed_up_to is not None
        rows.append(
            BackedUpPartition(
                partition=view.partition,
                committed=None if reported is None else reported.committed,
                backed_up=None if reported is None else reported.backed_up_to,
                transactions=reported.lost_now if reported is not None and is_kept else None,
                seconds=reported.backup_lag_ms / 1000 if reported is not None and is_kept else None,
                moment=0 if reported is None or reported.backed_up is None else reported.backed_up.moment,
                trouble="its owner does not say"
                if reported is None
                else reported.backup_trouble or reported.archive_trouble,
            )
        )
    metadata = None
    for server in snapshot.server_reports.values():
        saved = server.metadata_backup
        if saved is not None:
            age = saved.age_ms / 1000 if saved.age_ms >= 0 else None
            metadata = SavedMetadata(number=saved.number, seconds=age, moment="", trouble=saved.trouble)
    return Backups(place="", partitions=rows, metadata=metadata)


def _in_store(place: str) -> Backups:
    """Return the loss as the store alone shows it."""
    store = open_archive(place)
    newest = newest_metadata(store)  # before the survey: what documents name is in the store before they do
    found, now = survey(store), time.time_ns() // 1000
    saved = None if newest is None else read(newest[1], f"metadata {newest[0]}")
    known = () if saved is None else saved.archives
    there = {*found.manifests, *(partition for partition, _ in found.unsealed)}
    rows = []
    for number in sorted({*there, *known}):
        trouble = next((flaw.detail for flaw in found.flaws if flaw.partition == number), "")
        if number not in there:
            trouble = trouble or "the saved documents name it, and the store has nothing of it"
        tail, last = None, found.manifests[number].last if number in found.manifests else -1
        try:
            timeline = found.manifests[number].timeline if number in found.manifests else FIRST
            tail = unsealed_index_at(store, found.label, number, timeline)
        except WaltzError as error:
            trouble = trouble or f"{error.code} {error.message}"
        moment = 0 if tail is None else tail.moment
        rows.append(
            BackedUpPartition(
                partition=number,
                committed=None,
                backed_up=max(last, -1 if tail is None else tail.last),
                transactions=None,
                seconds=max(0.0, (now - moment) / 1e6) if moment else None,
                moment=moment,
                trouble=trouble,
            )
        )
    metadata = None
    if newest is not None and saved is not None:
        metadata = SavedMetadata(number=newest[0], seconds=None, moment=saved.moment, trouble="")
    return Backups(place=store.place, partitions=rows, metadata=metadata)


# -- what people read of backups ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BackedUpPartition:
    partition: int
    committed: int | None
    """Last committed id, as the owner reports it; None if it was not asked or does not answer."""
    backed_up: int | None
    """Last id in the store, in a segment or in the unsealed part."""
    transactions: int | None
    """Number of transactions that are committed and not in the store; None if unknown."""
    seconds: float | None
    """Age in seconds of the oldest commit that is not in the store, as the owner reports it; from a store alone, the age
    of its newest complete moment. None if unknown."""
    moment: int
    """Time up to which all commits are in the store, in microseconds since 1970; 0 if unknown."""
    trouble: str


@dataclass(frozen=True, kw_only=True)
class SavedMetadata:
    """Documents of the cluster in the store."""

    number: int
    seconds: float | None
    """Time since the leader last found them there in this state."""
    moment: str
    """Time at which the newest ones in the store were read."""
    trouble: str


PARTITIONS: Columns[BackedUpPartition] = (
    Column("partition"),
    Column("committed"),
    Column("backed up", json="backed_up_to"),
    Column("lost now", "transactions", json="lost_transactions"),
    Column("seconds", lambda one: None if one.seconds is None else round(one.seconds, 1), json="lost_seconds"),
    Column("complete to", lambda one: shown(one.moment) if one.moment else None),
    Column("trouble"),
)


@dataclass(frozen=True, kw_only=True)
class Backups:
    place: str
    """Store that was read; "" if owners were asked."""
    partitions: Sequence[BackedUpPartition]
    metadata: SavedMetadata | None

    def is_behind(self, seconds: float) -> bool:
        """Return whether the backup stopped, or is more than `seconds` behind."""
        is_late = not self.place and any((one.seconds or 0) > seconds for one in self.partitions)
        return is_late or any(one.trouble for one in self.partitions) or bool(self.metadata and self.metadata.trouble)

    def page(self) -> Listing[BackedUpPartition]:
        unused = "Nothing is backed up: set `archive` in the configuration of the storages."
        return Listing(
            kind="partitions",
            columns=PARTITIONS,
            rows=self.partitions,
            notes=[
                *([unused] if all(one.backed_up is None for one in self.partitions) else []),
                f"Documents of the cluster: {self.documents()}",
            ],
            content={
                "store": self.place or None,
                "partitions": objects(PARTITIONS, self.partitions),
                "metadata": self.metadata and {**plain(self.metadata), "moment": self.metadata.moment or None},
            },
        )

    def documents(self) -> str:
        """Describe how the documents of the cluster are saved."""
        saved = self.metadata
        if saved is None:
            return "none are saved" if self.place else "no leader says that they are saved"
        if saved.trouble:
            return saved.trouble
        if saved.moment:
            return f"number {saved.number}, as at {saved.moment}"
        if saved.seconds is None:
            return "not saved yet"
        return f"number {saved.number}, seen as they are {saved.seconds:.0f} seconds ago"


# -- drills ------------------------------------------------------------------------------------------------------------


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
    source = source_at(store, end.chosen)
    cut = source.cut_at(end, datetime.now(UTC))
    total = sum(bytes_up_to(log, cut.points[number].mark) for number, log in source.logs.items())
    disk = RealDisk()
    free = disk.free_bytes(str(scratch))
    if total > free:
        raise DiskFull(
            f"{scratch}: {size(total)} are needed, {size(free)} are free",
            not_done="nothing was restored",
            next_step="name a directory with more space with --directory",
        )
    try:
        home = mkdtemp(prefix="waltz-drill-", dir=scratch)
    except OSError as error:
        raise unwritten(error, scratch, "nothing was restored") from error
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


# -- where a restore would end, and what came of a drill ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Drill:
    """Result of a drill."""

    place: str
    cut: Cut
    logs: Mapping[int, ArchivedLog]
    bytes: int
    restored_seconds: float
    verified_seconds: float
    records: int
    findings: tuple[Finding, ...]

    @property
    def is_right(self) -> bool:
        return not self.findings and self.records == sum(point.mark + 1 for point in self.cut.points.values())


ENDS: Columns[Mapping[str, Any]] = tuple(map(Column, ("partition", "last id", "time", "stored to", "given up")))


def marks(place: str, cut: Cut, moment: str | None, rows: Sequence[Mapping[str, Any]]) -> Listing[Mapping[str, Any]]:
    """Return the marks of a restore; their JSON is a file for `--through-marks`."""
    content = {
        "store": place, "moment": moment, "marks": {str(row["partition"]): row["last_id"] for row in rows},
        "partitions": rows,
    }  # fmt: skip
    return Listing(kind="partitions", columns=ENDS, rows=rows, page=ends(moment, rows), content=content)


def ends(moment: str | None, rows: Sequence[Mapping[str, Any]]) -> list[Part]:
    return [
        Line(f"all partitions at {moment}" if moment is not None else "each partition by itself", "bold"),
        Table(ENDS, rows),
    ]


def drilled(found: Drill, moment: str | None, rows: Sequence[Mapping[str, Any]]) -> Listing[Mapping[str, Any]]:
    took = f"restored in {found.restored_seconds:.1f} s ({rate(found.bytes, found.restored_seconds)} MB/s)"
    page = [
        verdict("restored and whole" if found.is_right else "NOT whole", is_good=found.is_right),
        *(f"  {finding.sentence()}" for finding in found.findings),
        *ends(moment, rows),
        f"{count(found.records, 'record')}, {size(found.bytes)}: {took}, every record checked in "
        f"{found.verified_seconds:.1f} s",
    ]
    content = {
        "result": "whole" if found.is_right else "findings", "store": found.place, "moment": moment,
        "bytes": found.bytes, "records": found.records, "restored_seconds": round(found.restored_seconds, 3),
        "verified_seconds": round(found.verified_seconds, 3), "partitions": rows,
        "findings": [finding.sentence() for finding in found.findings],
    }  # fmt: skip
    return Listing(kind="partitions", columns=ENDS, rows=rows, page=page, content=content)
