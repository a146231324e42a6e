"""Verifies a storage directory: every byte that a checksum or a second copy covers.

There are three layers: the small files (`replica.control` and `replica.hard_state`), each segment with its index
(`inspection`, in parallel), and here the checks across files: gaps between segments, a log that ends below its marks,
missing files and partitions. Nothing is ever written. A directory that another process holds is refused, because writes
in flight would look like damage; with `is_read_only` the end of each log is not judged instead.

`run_on_segments` applies one function to many segments, in worker processes if there is enough work.

A worker needs half a second to start, so small amounts of work run in this process. Workers are spawned, because a fork
would inherit the lock of the directory. They exit when their parent exits for any reason. An interrupt reaches only the
parent, which terminates them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import wait
from typing import TypeVar
from uuid import UUID

from waltzd.disk.seam import Disk, join, read_whole
from waltzd.errors.operations import (
    DirectoryHeld,
    HeaderDamaged,
    NotRegularFile,
    PathMissing,
    ReadFailed,
    UnknownVersion,
    WorkerLost,
)
from waltzd.format.batch import End
from waltzd.format.finding import Code, Finding
from waltzd.format.footer import NO_HASH
from waltzd.format.layout import (
    CONTROL_NAME,
    HEADER_BYTES,
    NO_BOOT,
    NO_MARK,
    VERSION,
    ControlStruct,
    FileHeader,
    HardState,
    first_id_of,
    segment_ids,
    segment_name,
)
from waltzd.storage.offline.inspection import Links, SegmentReport, SegmentTask, inspect_segment
from waltzd.storage.replica.control import Ledger, read_ledger
from waltzd.storage.replica.hard_state import read_hard_state

FEW_BYTES = 1 << 30
"""Bytes below which no workers are started: they are checked in half a second, before a worker would be ready."""

Task = TypeVar("Task")
Result = TypeVar("Result")


def processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def run_on_segments(
    function: Callable[[Disk, Task], Result],
    disk: Disk,
    tasks: Sequence[Task],
    *,
    jobs: int,
    total_bytes: int,
    few_bytes: int = FEW_BYTES,
) -> Iterator[tuple[Task, Result]]:
    """Yield each task with its result, in the order in which they finish."""
    assert jobs > 0
    jobs = min(jobs, len(tasks))
    if jobs <= 1 or total_bytes < few_bytes:
        for task in tasks:
            yield task, function(disk, task)
        return
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_parent)
    futures: dict[Future[Result], Task] = {}
    is_done = False
    try:
        with _interrupts_wait():
            for task in tasks:
                futures[executor.submit(function, disk, task)] = task
        for future in as_completed(futures):
            yield futures.pop(future), future.result()
        is_done = True
    except BrokenProcessPool as error:
        raise WorkerLost("a worker process ended before its work was done") from error
    finally:
        if not is_done:  # also if an interrupt came while tasks were submitted
            executor.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
        executor.shutdown()


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Block SIGINT, which workers inherit: Ctrl-C is for the parent, and a starting worker prints no traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """Exit when the parent exits: else a worker of a killed parent could write while another process holds the
    directory."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Marks that the log of a replica must reach, each with its source."""

    named: tuple[tuple[str, int], ...] = ()
    newest: int = NO_MARK
    """Id at or above which a segment must start."""
    begin: int = 0
    """Trim floor, where the log begins. Files below it are leftovers of a trim, and are ignored."""

    @property
    def floor(self) -> int:
        return max((mark for _, mark in self.named), default=NO_MARK)


def marks_of(struct: ControlStruct | None, hard_state: HardState | None) -> Marks:
    named: list[tuple[str, int]] = []
    if struct is not None:
        named.append(("the control file's local low-water mark", struct.local_low_mark))
    if hard_state is not None:
        named.append(("the promised committed mark", hard_state.committed))
        named.append(("the promised durable mark", hard_state.durable))
    if hard_state is None:
        return Marks(named=tuple(named))
    return Marks(named=tuple(named), newest=hard_state.newest, begin=hard_state.floor)


OnProgress = Callable[[int, int], None]
"""Callback with the number of bytes done and in total."""


@dataclass(frozen=True, kw_only=True, order=True)
class Target:
    """A storage directory, one partition directory, or one segment. `storage` is "" if there is no control file."""

    storage: str
    directory: str = ""
    """The partition directory; "" for the whole storage."""
    first_id: int = NO_MARK
    """First id of one segment; NO_MARK for the whole partition."""

    def covers(self, other: Target) -> bool:
        if not self.directory:
            return self.storage == other.storage
        return self.directory == other.directory and self.first_id in (NO_MARK, other.first_id)


@dataclass(frozen=True, kw_only=True)
class Options:
    jobs: int = 1
    is_read_only: bool = False
    is_deep: bool = False
    key: UUID | None = None


@dataclass(kw_only=True)
class PartitionReport:
    directory: str
    partition: int | None
    segments: int = 0
    records: int = 0
    bytes: int = 0
    first_id: int = 0
    last_id: int = NO_MARK
    in_flight_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)


@dataclass(kw_only=True)
class Report:
    partitions: list[PartitionReport] = field(default_factory=list)
    storage_findings: list[Finding] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    """Storage directories that another process holds."""

    @property
    def findings(self) -> list[Finding]:
        return self.storage_findings + [finding for partition in self.partitions for finding in partition.findings]


def verify(disk: Disk, targets: list[Target], options: Options, on_progress: OnProgress | None = None) -> Report:
    report = Report()
    found: list[PartitionCheck] = []
    wanted = wanted_targets(targets)
    storages = dict.fromkeys(target.storage for target in wanted)
    report.held = [storage for storage in storages if storage and is_held(disk, storage)]
    if report.held and not options.is_read_only:
        raise _held(report.held[0])
    for storage in storages:
        ledger = read_ledger(disk, storage) if storage else Ledger()
        _check_given_key(ledger, storage, options.key)
        report.storage_findings += ledger.findings
        mine = [target for target in wanted if target.storage == storage]
        found += partition_checks(
            disk, storage, ledger, mine, report, is_live=storage in report.held, is_deep=options.is_deep
        )
    _inspect(disk, found, options, on_progress)
    report.partitions = [plan.judge() for plan in found]
    taken = [storage for storage in storages if storage and storage not in report.held and is_held(disk, storage)]
    if taken and not options.is_read_only:
        raise _held(taken[0], "was taken by another process during the check")
    return report


def wanted_targets(targets: list[Target]) -> list[Target]:
    """Return the targets without repetitions, and without targets that a wider one covers."""
    once = list(dict.fromkeys(targets))
    return [target for target in once if not any(other.covers(target) for other in once if other != target)]


def is_held(disk: Disk, storage: str) -> bool:
    try:
        with closing(disk.open(join(storage, CONTROL_NAME))) as control:
            return control.is_locked_elsewhere()
    except (PathMissing, NotRegularFile):
        return False


def _held(storage: str, how: str = "is held by another process") -> DirectoryHeld:
    return DirectoryHeld(f"{storage} {how}", not_done="the files were not verified; nothing was changed")


def verify_partition(
    disk: Disk, directory: str, partition: int, key: UUID, *, durable_id: int, marks: Marks | None = None
) -> Iterator[Finding | PartitionReport]:
    """Verify one partition of a running storage: yield findings segment by segment, and the whole report at the end.

    Ids above `durable_id` are not checked, nor are the small files, which the daemon holds open."""
    plan = PartitionCheck(disk, directory, partition, key, marks=marks or Marks(), durable_id=durable_id)
    told = 0
    for task in plan.tasks:
        report = plan.reports[task.first_id] = inspect_segment(disk, task)
        yield from report.findings
        told += len(report.findings)
    whole = plan.judge()
    whole.last_id = min(whole.last_id, durable_id)
    yield from whole.findings[told:]  # findings across segments come last
    yield whole


def _check_given_key(ledger: Ledger, storage: str, key: UUID | None) -> None:
    if ledger.key is None:
        ledger.key = key
    elif key is not None and key != ledger.key:
        detail = f"belongs to the cluster {ledger.key}, not to {key}"
        path = join(storage, CONTROL_NAME)
        ledger.findings.append(Finding(Code.FOREIGN_KEY, path, detail, first_byte=12, last_byte=27))


# -- plans -------------------------------------------------------------------------------------------------------------


def partition_checks(
    disk: Disk, storage: str, ledger: Ledger, targets: list[Target], report: Report, *, is_live: bool = False,
    is_deep: bool = False,
) -> list[PartitionCheck]:  # fmt: skip
    """Return a check for each partition of the targets. Findings about missing directories go to the report."""
    directories: dict[str, list[int]] = {}
    for target in targets:
        if not target.directory:
            directories.update({found: [] for found in _partition_directories(disk, storage, ledger, report)})
        elif target.first_id == NO_MARK:
            directories[target.directory] = []
        else:
            directories.setdefault(target.directory, []).append(target.first_id)
    found: list[PartitionCheck] = []
    boot = disk.boot_id()
    for directory, only in directories.items():
        partition = partition_of(directory)
        struct = ledger.structs.get(partition) if partition is not None and storage else None
        is_expected = ledger.has_identity and struct is not None and struct.is_assigned
        hard_state, findings = read_hard_state(disk, directory, partition, ledger.key, is_expected=is_expected)
        plan = PartitionCheck(
            disk, directory, partition, ledger.key, marks=marks_of(struct, hard_state), is_live=is_live,
            is_deep=is_deep, only=only, was_cut=hard_state is None or boot == NO_BOOT or hard_state.boot != boot,
        )  # fmt: skip
        plan.findings += findings
        found.append(plan)
    return found


def partition_of(directory: str) -> int | None:
    name = directory.rpartition("/")[2]
    return int(name) if name.isascii() and name.isdigit() and str(int(name)) == name else None


def _partition_directories(disk: Disk, storage: str, ledger: Ledger, report: Report) -> list[str]:
    found: dict[int, str] = {}
    for entry in disk.list(storage):
        number = partition_of(entry.name)
        if number is None:
            continue
        found[number] = join(storage, entry.name)
        if not entry.is_directory:
            detail = "this is the name of a partition directory, and it is a link or a file"
            report.storage_findings.append(Finding(Code.NOT_A_FILE, found[number], detail, partition=number))
    for number in ledger.assigned:
        if number not in found:
            detail = "the control file assigns this partition to the storage, and its directory is missing"
            path = join(storage, str(number))
            report.storage_findings.append(Finding(Code.MISSING_PARTITION, path, detail, partition=number))
    broken = {finding.path for finding in report.storage_findings if finding.code is Code.NOT_A_FILE}
    return [path for number, path in sorted(found.items()) if path not in broken]


class PartitionCheck:
    """The check of one partition: a task for each segment, and the verdict on their reports."""

    def __init__(
        self, disk: Disk, directory: str, partition: int | None, key: UUID | None, *, marks: Marks, is_live: bool = False,
        is_deep: bool = False, durable_id: int | None = None, only: list[int] | None = None, was_cut: bool = True,
    ) -> None:  # fmt: skip
        self.directory = directory
        self.partition = partition
        self.marks = marks
        self.findings: list[Finding] = []
        self.reports: dict[int, SegmentReport] = {}
        self._only = only or []
        sizes = {
            entry.name: entry.size
            for entry in disk.list(directory)
            if (first_id := first_id_of(entry.name)) is None or first_id >= marks.begin
        }
        self.first_ids = segment_ids(sizes)
        if key is None:
            key, self.partition = _by_majority(disk, directory, self.first_ids, partition)
        named = {
            first_id for name in sizes if (first_id := first_id_of(name)) is not None
        }  # by a segment, or by an index without a segment
        next_of: dict[int, int | None] = {**dict.fromkeys(named), **dict(pairwise(self.first_ids))}
        wanted = sorted(named & set(self._only) if self._only else named)
        self.sizes = {first_id: sizes.get(segment_name(first_id), 0) for first_id in wanted}
        self.tasks = [
            SegmentTask(
                directory=directory,
                first_id=first_id,
                partition=self.partition,
                key=key,
                next_first_id=next_of[first_id],
                floor=marks.floor,
                is_live=is_live,
                durable_id=durable_id,
                is_deep=is_deep,
                was_cut=was_cut,
            )
            for first_id in wanted
        ]

    def judge(self) -> PartitionReport:
        out = PartitionReport(directory=self.directory, partition=self.partition, findings=list(self.findings))
        ids = [first_id for first_id in self.first_ids if first_id in self.reports]
        for first_id in sorted(self.reports):
            report = self.reports[first_id]
            out.findings += report.findings
            out.records += report.records
            out.bytes += report.bytes
            out.in_flight_bytes += report.in_flight_bytes
        out.segments = len(ids)
        out.first_id = ids[0] if ids else 0
        last = self.reports[ids[-1]] if ids else None
        if last is not None and last.next_id is not None:
            out.last_id = last.next_id - 1
        if not self._only:
            out.findings += self._between_segments(ids) + self._shortness(last)
        return out

    def _between_segments(self, ids: list[int]) -> list[Finding]:
        out: list[Finding] = []
        reaches: int | None = self.marks.begin
        for first_id in ids:
            path = join(self.directory, segment_name(first_id))
            if reaches is not None and reaches < first_id:
                what = (
                    f"the first segment does not start at id {reaches}"
                    if first_id == ids[0]
                    else "ids are missing in front of it"
                )
                out.append(self._finding(Code.SEGMENT_GAP, path, what, reaches, first_id - 1))
            elif reaches is not None and reaches > first_id:
                what = f"starts at id {first_id}, and the segment before it reaches id {reaches - 1}"
                out.append(self._finding(Code.SEGMENT_GAP, path, what, first_id, reaches - 1))
            reaches = self.reports[first_id].reaches
        return out + self._broken_links(ids)

    def _broken_links(self, ids: list[int]) -> list[Finding]:
        """Return findings about segments of format 1 that do not continue the segment in front of them."""
        out: list[Finding] = []
        front: SegmentReport | None = None
        for first_id in ids:
            report = self.reports[first_id]
            if report.links is not None and first_id == (0 if front is None else front.reaches):
                path = join(self.directory, segment_name(first_id))
                before = _links_in_front(front)
                out += [
                    self._finding(Code.BROKEN_CHAIN, path, what, first_id, first_id)
                    for what in _breaks(before, report.links)
                ]
            front = report
        return out

    def _shortness(self, last: SegmentReport | None) -> list[Finding]:
        reaches = last.reaches if last is not None else self.marks.begin
        newest = last.first_id if last is not None else NO_MARK
        if reaches is None:
            return []
        if self.marks.newest > newest and self.marks.newest >= reaches:
            what = f"the hard-state file names a segment that starts at id {self.marks.newest}; the last one is missing"
            return [self._finding(Code.SHORT_LOG, self.directory, what, reaches, self.marks.newest)]
        above = [f"{name} is {mark}" for name, mark in self.marks.named if mark >= reaches]
        if not above:
            return []
        what = f"the log ends at id {reaches - 1}, and {' and '.join(above)}"
        return [self._finding(Code.SHORT_LOG, self.directory, what, reaches, self.marks.floor)]

    def _finding(self, code: Code, path: str, detail: str, first_id: int, last_id: int) -> Finding:
        return Finding(code, path, detail, partition=self.partition, first_id=first_id, last_id=last_id)


def _links_in_front(front: SegmentReport | None) -> Links:
    """Return what the next segment has to name: no head and no footer after a segment of format 0, or at the start."""
    if front is None or (front.header is not None and front.header.version == VERSION):
        return Links(end=End(), footer_hash=NO_HASH)
    return front.links or Links()


def _breaks(front: Links, links: Links) -> list[str]:
    found: list[str] = []
    if front.end is not None and links.before != front.end.crc:
        found.append("its first batch does not name the last batch of the segment in front of it")
    if front.end is not None and links.first_time < front.end.time:
        found.append("its first batch has an earlier time than the last batch of the segment in front of it")
    if None not in (front.footer_hash, links.footer_before) and links.footer_before != front.footer_hash:
        found.append("its footer does not name the footer of the segment in front of it")
    return found


def _by_majority(disk: Disk, directory: str, first_ids: list[int], partition: int | None) -> tuple[UUID | None, int | None]:
    """Return the key and partition that most segments state: without a control file, segments must agree at least."""
    seen: Counter[tuple[UUID, int]] = Counter()
    for first_id in first_ids:
        path = join(directory, segment_name(first_id))
        try:
            header = FileHeader.decode(read_whole(disk, path, HEADER_BYTES), path)
        except (HeaderDamaged, UnknownVersion, NotRegularFile, ReadFailed):
            continue
        seen[header.key, header.partition] += 1
    if not seen:
        return None, partition
    (key, number), _ = seen.most_common(1)[0]
    return key, number if partition is None else partition


def _inspect(disk: Disk, found: list[PartitionCheck], options: Options, on_progress: OnProgress | None) -> None:
    by_directory = {plan.directory: plan for plan in found}
    tasks = [task for plan in found for task in plan.tasks]
    total = sum(sum(plan.sizes.values()) for plan in found)
    done = 0
    for task, report in run_on_segments(inspect_segment, disk, tasks, jobs=options.jobs, total_bytes=total):
        plan = by_directory[task.directory]
        plan.reports[task.first_id] = report
        done += plan.sizes[task.first_id]
        if on_progress is not None:
            on_progress(done, total)
