"""Rebuilds the indexes of a storage from its segments. At every moment there is an old or a new index.

A scan writes the new index of a segment beside the old one and flushes it; a separate step renames it, so a killed process
leaves the old index or the new one. Workers write new files; only the process that holds the lock of the directory renames
them. Only sound records get an entry. A damaged segment is refused unless its damaged ids may be left out: an index that
silently skips records would hide that they are lost.

The footer of a sealed segment states where the batches are, so the index follows from the footer, the heads and the lengths
of the records. The records are not checked then: each gets an entry, and a read of a damaged record fails its checksum. If
footer, heads and lengths contradict each other, the segment is scanned as one without a footer.

A killed rebuild is continued by running it again: indexes that are right are kept.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from uuid import UUID

from waltzd.disk.seam import Disk, File, join, opened, read_whole
from waltzd.errors import WaltzError
from waltzd.errors.operations import PathMissing, ReadFailed
from waltzd.format.finding import INDEX_CODES, Code, Finding
from waltzd.format.footer import Footer, read_footer
from waltzd.format.index import IndexChecker, IndexWriter, install_index
from waltzd.format.key_index import KeyHeader, key_index_of
from waltzd.format.layout import (
    BATCHES,
    CONTROL_NAME,
    HEADER_BYTES,
    NEW_SUFFIX,
    FileHeader,
    index_name,
    index_offset,
    key_index_name,
    read_header,
    segment_name,
)
from waltzd.format.scan import follow_footer, survey
from waltzd.storage.offline.inspection import SegmentReport, SegmentTask, inspect_segment
from waltzd.storage.offline.verify import OnProgress, Report, Target, partition_checks, run_on_segments, wanted_targets
from waltzd.storage.replica.control import Ledger, read_ledger

COMPARE_BYTES = 1 << 20

IdRange = tuple[int, int]


class IndexState(enum.StrEnum):
    RIGHT = "right"
    """The index was right, and was kept."""
    REBUILT = "rebuilt"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class IndexTask(SegmentTask):
    left_out: tuple[IdRange, ...] = ()
    """Ranges of damaged ids that may be left out of the index."""


@dataclass(frozen=True, kw_only=True)
class IndexResult:
    """The result for one segment. A rebuilt index is a new file beside the old one until `install` renames it."""

    directory: str
    first_id: int
    state: IndexState
    records: int = 0
    left_out: int = 0
    data_bytes: int = 0
    index_bytes: int = 0
    index_crc: int = 0
    torn_bytes: int = 0
    is_from_footer: bool = False
    """Whether the index was built from the footer, without a check of the records."""
    findings: tuple[Finding, ...] = ()
    """Damage because of which the index was not rebuilt."""

    @property
    def path(self) -> str:
        return join(self.directory, index_name(self.first_id))

    @property
    def data_path(self) -> str:
        return join(self.directory, segment_name(self.first_id))


def rebuild_index(disk: Disk, task: IndexTask) -> IndexResult:
    """Check the index of a segment, and write a new one beside it unless it is right."""
    built = _build_from_footer(disk, task)
    if built is not None:
        return built
    report = inspect_segment(disk, task)
    damage = [finding for finding in report.findings if finding.is_damage]
    if report.header is None or report.next_id is None or any(finding.code in _HOPELESS for finding in damage):
        return _refused(task, damage)
    missing = [finding for finding in damage if finding.code is Code.DAMAGED_RECORD]
    if report.reaches is not None and task.next_first_id is not None and report.reaches < task.next_first_id:
        missing.append(_cut_short(task, report.reaches, task.next_first_id - 1))
    in_the_way = [finding for finding in missing if not _may_be_left_out(task, finding)]
    if in_the_way:
        return _refused(task, in_the_way)
    ends = max(report.next_id, task.next_first_id or 0)
    built = IndexResult(
        directory=task.directory,
        first_id=task.first_id,
        state=IndexState.RIGHT,
        records=report.records,
        left_out=sum(last - first + 1 for first, last in map(_ids, missing) if first < ends),
        data_bytes=report.bytes,
        torn_bytes=sum(_bytes(finding) for finding in report.findings if finding.code is Code.TORN_TAIL),
    )
    path = built.path
    if missing or any(finding.code in INDEX_CODES for finding in report.findings):
        try:
            _write(disk, task, report, ends)
        except ReadFailed as error:
            return _refused(task, [Finding(Code.UNREADABLE, built.data_path, error.message)])
        built, path = replace(built, state=IndexState.REBUILT), path + NEW_SUFFIX
    size, crc = sum_of(disk, path)
    return replace(built, index_bytes=size, index_crc=crc)


def _build_from_footer(disk: Disk, task: IndexTask) -> IndexResult | None:
    """Do the work of `rebuild_index` by the footer alone; return None if the segment has to be scanned."""
    data = opened(disk, join(task.directory, segment_name(task.first_id)))
    if data is None:
        return None
    try:
        with closing(data):
            raw = data.read(0, HEADER_BYTES)
            header, findings = read_header(raw, data.path, task.key, task.partition, task.first_id)
            footer = read_footer(data) if header is not None and header.version == BATCHES and not findings else None
            if header is None or footer is None or footer.first_id != task.first_id:
                return None
            if task.next_first_id not in (None, footer.last_id + 1):
                return None
            built = IndexResult(
                directory=task.directory, first_id=task.first_id, state=IndexState.RIGHT, records=footer.records,
                data_bytes=data.size(), is_from_footer=True,
            )  # fmt: skip
            is_right = _is_index_of(disk, built.path, header, data, footer)
            if is_right is None:
                return None
            if not is_right:
                writer = IndexWriter(disk, task.directory, replace(header, created_ms=disk.now_ms()))
                try:
                    if not follow_footer(data, footer, writer.add):
                        writer.abandon()
                        return None
                    writer.seal(footer.last_id + 1)
                except BaseException:
                    writer.abandon()
                    raise
    except ReadFailed:
        return None
    size, crc = sum_of(disk, built.path + ("" if is_right else NEW_SUFFIX))
    return replace(built, state=IndexState.RIGHT if is_right else IndexState.REBUILT, index_bytes=size, index_crc=crc)


def _is_index_of(disk: Disk, path: str, header: FileHeader, data: File, footer: Footer) -> bool | None:
    """Return whether the index agrees with the footer; None if the footer contradicts its segment."""
    index = opened(disk, path)
    if index is None:
        return False
    with closing(index):
        raw = index.read(0, HEADER_BYTES)
        if read_header(raw, path, header.key, header.partition, header.first_id)[1]:
            return False
        if index.size() != index_offset(footer.records) or FileHeader.decode(raw, path).version != header.version:
            return False
        checker = IndexChecker(index, header.first_id)
        return checker.is_right if follow_footer(data, footer, checker.add) else None


_HOPELESS = (Code.UNREADABLE, Code.NOT_A_FILE)


def _refused(task: IndexTask, findings: Sequence[Finding]) -> IndexResult:
    return IndexResult(directory=task.directory, first_id=task.first_id, state=IndexState.REFUSED, findings=tuple(findings))


def _cut_short(task: IndexTask, first_id: int, last_id: int) -> Finding:
    path, detail = join(task.directory, segment_name(task.first_id)), "the segment ends before the next one starts"
    return Finding(Code.SEGMENT_GAP, path, detail, partition=task.partition, first_id=first_id, last_id=last_id)


def _ids(finding: Finding) -> IdRange:
    assert finding.first_id is not None
    assert finding.last_id is not None
    return finding.first_id, finding.last_id


def _bytes(finding: Finding) -> int:
    assert finding.first_byte is not None
    assert finding.last_byte is not None
    return finding.last_byte - finding.first_byte + 1


def _may_be_left_out(task: IndexTask, finding: Finding) -> bool:
    id_, last = _ids(finding)
    for start, stop in sorted(task.left_out):
        if start <= id_ <= stop:
            id_ = stop + 1
    return id_ > last


def _write(disk: Disk, task: IndexTask, report: SegmentReport, ends: int) -> None:
    assert report.header is not None
    with closing(disk.open(join(task.directory, segment_name(task.first_id)))) as data:
        writer = IndexWriter(disk, task.directory, replace(report.header, created_ms=disk.now_ms()))
        try:
            survey(
                data, first_id=task.first_id, end=report.bytes, version=report.header.version,
                id_limit=task.next_first_id, on_span=lambda span: writer.add(span.first_id, span.entries),
            )  # fmt: skip
            writer.seal(ends)
        except BaseException:
            writer.abandon()
            raise


def write_key_index(disk: Disk, task: IndexTask) -> None:
    """Write the key index of a segment of format 1 that has a sound footer, unless the one beside it is sound."""
    data = opened(disk, join(task.directory, segment_name(task.first_id)))
    if data is None:
        return
    with closing(data):
        header, findings = read_header(data.read(0, HEADER_BYTES), data.path, task.key, task.partition, task.first_id)
        footer = read_footer(data) if header is not None and header.version == BATCHES and not findings else None
        if header is None or footer is None or footer.first_id != task.first_id:
            return
        wanted = KeyHeader(
            key=header.key, partition=header.partition, first_id=footer.first_id, last_id=footer.last_id,
            footer=footer.hash,
        )  # fmt: skip
        raw = key_index_of(data, wanted)
    path = join(task.directory, key_index_name(task.first_id))
    if raw is None or (disk.exists(path) and read_whole(disk, path, len(raw) + 1) == raw):
        return
    with closing(disk.create(path + NEW_SUFFIX)) as file:
        file.write(0, raw)
    disk.rename(path + NEW_SUFFIX, path)


def sum_of(disk: Disk, path: str) -> tuple[int, int]:
    """Return size and checksum of a file."""
    at = crc = 0
    with closing(disk.open(path)) as file:
        while piece := file.read(at, COMPARE_BYTES):
            crc = zlib.crc32(piece, crc)
            at += len(piece)
    return at, crc


def install(disk: Disk, built: IndexResult) -> IndexResult:
    """Rename a new index over the old one, after reading it back."""
    if built.state is IndexState.REBUILT:
        size, crc = sum_of(disk, built.path + NEW_SUFFIX)
        if (size, crc) != (built.index_bytes, built.index_crc):
            raise ReadFailed(f"{built.path}{NEW_SUFFIX} does not read back as it was written")
        install_index(disk, built.directory, built.first_id)
    return built


@dataclass(kw_only=True)
class Rebuild:
    built: list[IndexResult] = field(default_factory=list)
    storage_findings: list[Finding] = field(default_factory=list)

    def of(self, state: IndexState) -> list[IndexResult]:
        return [built for built in self.built if built.state is state]


def rebuild(
    disk: Disk,
    targets: Sequence[Target],
    *,
    jobs: int = 1,
    left_out: Sequence[IdRange] = (),
    key: UUID | None = None,
    on_progress: OnProgress | None = None,
) -> Rebuild:
    """Rebuild the indexes of the targets, under the lock of each storage directory."""
    out = Rebuild()
    wanted = wanted_targets(list(targets))
    for storage in dict.fromkeys(target.storage for target in wanted):
        mine = [target for target in wanted if target.storage == storage]
        control = _take(disk, storage) if storage else None
        try:
            ledger = read_ledger(disk, storage, control) if storage else Ledger()
            ledger.key = ledger.key or key
            out.storage_findings += ledger.findings
            tasks = list(_tasks(disk, storage, ledger, mine, tuple(left_out)))
            total, done = sum(_data_bytes(disk, task) for task in tasks), 0
            for task, built in run_on_segments(rebuild_index, disk, tasks, jobs=jobs, total_bytes=total):
                out.built.append(install(disk, built))
                if built.state is not IndexState.REFUSED:
                    write_key_index(disk, task)
                done += _data_bytes(disk, task)
                if on_progress is not None:
                    on_progress(done, total)
        finally:
            if control is not None:
                control.close()
    out.built.sort(key=lambda built: (built.directory, built.first_id))
    return out


def _take(disk: Disk, storage: str) -> File | None:
    """Lock the directory; return None if it has no control file to lock."""
    try:
        control = disk.open(join(storage, CONTROL_NAME), write=True)
    except PathMissing:
        return None
    try:
        control.lock()
    except WaltzError:
        control.close()
        raise
    return control


def _tasks(
    disk: Disk, storage: str, ledger: Ledger, targets: list[Target], left_out: tuple[IdRange, ...]
) -> Iterator[IndexTask]:
    for plan in partition_checks(disk, storage, ledger, targets, Report()):
        for task in plan.tasks:
            if task.first_id in plan.first_ids:
                # An index ends before a torn and before a damaged tail, so it does not matter whether power was lost.
                yield IndexTask(**{**vars(task), "was_cut": True, "left_out": left_out})


def _data_bytes(disk: Disk, task: IndexTask) -> int:
    return disk.size(join(task.directory, segment_name(task.first_id)))
