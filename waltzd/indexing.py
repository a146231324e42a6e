"""The index of one segment, made again from its data.

One scan writes the new index beside the old one; putting it in its place is a step of its own, because the process that
scans need not be the one that holds the directory. Only whole, sound records get an entry. Damage refuses the segment
unless the ids that it took may be left out: an index that silently skips records would hide that they are lost.
"""

from __future__ import annotations

import enum
import zlib
from dataclasses import dataclass, replace
from uuid import UUID

from waltzd.disk import Disk, File, join
from waltzd.errors import HeaderDamaged, NotRegularFile, PathMissing, ReadFailed, UnknownVersion, WaltzError
from waltzd.finding import Code, Finding
from waltzd.index import IndexWriter, install_index
from waltzd.inspection import SegmentTask, inspect_segment
from waltzd.layout import HEADER_BYTES, NEW_SUFFIX, NO_MARK, FileHeader, index_name, segment_name
from waltzd.scan import Survey, Tail, judge_tail, survey

COMPARE_BYTES = 1 << 20

IdRange = tuple[int, int]


class State(enum.StrEnum):
    RIGHT = "right"
    """The index was right and was left alone."""
    REBUILT = "rebuilt"
    DONE_BEFORE = "done before"
    """An earlier rebuild that did not finish had done this segment."""
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class IndexTask:
    directory: str
    first_id: int
    partition: int | None
    key: UUID | None
    next_first_id: int | None = None
    """Where the next segment starts; None for the last one."""
    floor: int = NO_MARK
    left_out: tuple[IdRange, ...] = ()
    """Ids that may be missing from the index."""


@dataclass(frozen=True, kw_only=True)
class Built:
    """What became of one segment's index. A rebuilt one is sealed beside the old one and still has to be installed."""

    directory: str
    first_id: int
    state: State
    records: int = 0
    left_out: int = 0
    data_bytes: int = 0
    index_bytes: int = 0
    index_crc: int = 0
    torn_bytes: int = 0
    findings: tuple[Finding, ...] = ()
    """The damage that is in the way."""

    @property
    def path(self) -> str:
        return join(self.directory, index_name(self.first_id))

    @property
    def data_path(self) -> str:
        return join(self.directory, segment_name(self.first_id))


def build_index(disk: Disk, task: IndexTask) -> Built:
    """One scan of the data. The new index is sealed beside the old one unless that one is right already."""
    path = join(task.directory, segment_name(task.first_id))
    try:
        data = disk.open(path)
    except (PathMissing, NotRegularFile) as error:
        return _refused(task, _header_finding(path, Code.NOT_A_FILE, error))
    try:
        try:
            header = FileHeader.decode(data.read(0, HEADER_BYTES), path)
        except UnknownVersion as error:
            return _refused(task, _header_finding(path, Code.UNKNOWN_VERSION, error))
        except HeaderDamaged as error:
            return _refused(task, _header_finding(path, Code.DAMAGED_HEADER, error))
        problem = _foreign(header, task)
        if problem:
            code = Code.FOREIGN_KEY if task.key is not None and header.key != task.key else Code.DAMAGED_HEADER
            return _refused(task, Finding(code=code, path=path, detail=problem, partition=task.partition))
        return _build(disk, task, header, data)
    except ReadFailed as error:
        return _refused(task, _header_finding(path, Code.UNREADABLE, error))
    finally:
        data.close()


def _foreign(header: FileHeader, task: IndexTask) -> str:
    if task.key is not None and header.key != task.key:
        return f"belongs to the cluster {header.key}, not to {task.key}"
    if task.partition is not None and header.partition != task.partition:
        return f"the header says partition {header.partition}, the directory {task.partition}"
    if header.first_id != task.first_id:
        return f"the header says first id {header.first_id}, the file name {task.first_id}"
    return ""


def _header_finding(path: str, code: Code, error: WaltzError) -> Finding:
    return Finding(code=code, path=path, detail=error.message)


def _refused(task: IndexTask, *findings: Finding) -> Built:
    return Built(directory=task.directory, first_id=task.first_id, state=State.REFUSED, findings=findings)


def _build(disk: Disk, task: IndexTask, header: FileHeader, data: File) -> Built:
    writer = IndexWriter(disk, task.directory, replace(header, created_ms=disk.now_ms()))
    old = _open_old(disk, task, header)
    end = data.size()
    sealed = False
    try:
        found = survey(data, first_id=task.first_id, end=end, id_limit=task.next_first_id, index=old, on_run=writer.add)
        ids, missing, torn = _what_is_missing(found, task)
        if not all(_may_be_left_out(task, first, last) for first, last in missing):
            report = inspect_segment(
                disk,
                SegmentTask(
                    directory=task.directory, first_id=task.first_id, partition=task.partition, key=task.key,
                    next_first_id=task.next_first_id, floor=task.floor,
                ),
            )  # fmt: skip
            damage = [finding for finding in report.findings if finding.code is Code.DAMAGED_RECORD]
            return _refused(task, *(damage or [_cut_short(task, found)]))
        writer.seal(ids)
        sealed = True
    finally:
        if not sealed:
            writer.abandon()
        if old is not None:
            old.close()
    new_path = join(task.directory, index_name(task.first_id) + NEW_SUFFIX)
    size, crc = sum_of(disk, new_path)
    built = Built(
        directory=task.directory,
        first_id=task.first_id,
        state=State.REBUILT,
        records=found.next_id - task.first_id - sum(last - first + 1 for first, last in _id_gaps(found)),
        left_out=sum(last - first + 1 for first, last in missing if first < ids),
        data_bytes=end,
        index_bytes=size,
        index_crc=crc,
        torn_bytes=torn,
    )
    if old is None or not _same_entries(disk, new_path, built.path):
        return built
    disk.remove(new_path)
    size, crc = sum_of(disk, built.path)
    return replace(built, state=State.RIGHT, index_bytes=size, index_crc=crc)


def _cut_short(task: IndexTask, found: Survey) -> Finding:
    assert task.next_first_id is not None
    return Finding(
        code=Code.SEGMENT_GAP,
        path=join(task.directory, segment_name(task.first_id)),
        partition=task.partition,
        detail="the segment ends before the next one starts",
        first_id=found.next_id,
        last_id=task.next_first_id - 1,
    )


def _open_old(disk: Disk, task: IndexTask, header: FileHeader) -> File | None:
    """The present index, when its header is right: a hint for the scan, and perhaps all that is needed."""
    try:
        file = disk.open(join(task.directory, index_name(task.first_id)))
    except (PathMissing, NotRegularFile):
        return None
    try:
        raw = file.read(0, HEADER_BYTES)
        old = FileHeader.decode(raw, file.path)
    except (HeaderDamaged, UnknownVersion, ReadFailed):
        file.close()
        return None
    if replace(old, created_ms=header.created_ms) != header or raw != old.encode():
        file.close()
        return None
    return file


def _id_gaps(found: Survey) -> list[IdRange]:
    return [(gap.first_id, gap.last_id) for gap in found.gaps if gap.last_id >= gap.first_id]


def _what_is_missing(found: Survey, task: IndexTask) -> tuple[int, list[IdRange], int]:
    """Where the entries end, the ids that are damage, and how many bytes are a torn tail."""
    missing = [(gap.first_id, max(gap.first_id, gap.last_id)) for gap in found.gaps]
    verdict = judge_tail(
        tail_bytes=found.tail_bytes,
        next_id=found.next_id,
        is_last=task.next_first_id is None,
        has_gaps=bool(found.gaps),
        floor=task.floor,
        rest=found.rest,
    )
    if verdict is Tail.TORN:
        return found.next_id, missing, found.tail_bytes
    if task.next_first_id is not None and found.next_id < task.next_first_id:
        missing.append((found.next_id, task.next_first_id - 1))
        return task.next_first_id, missing, 0
    if verdict is Tail.DAMAGED:
        missing.append((found.next_id, max(found.next_id, task.floor)))
    return found.next_id, missing, 0


def _may_be_left_out(task: IndexTask, first: int, last: int) -> bool:
    id_ = first
    for start, stop in sorted(task.left_out):
        if start <= id_ <= stop:
            id_ = stop + 1
    return id_ > last


def sum_of(disk: Disk, path: str) -> tuple[int, int]:
    file = disk.open(path)
    try:
        at = crc = 0
        while piece := file.read(at, COMPARE_BYTES):
            crc = zlib.crc32(piece, crc)
            at += len(piece)
        return at, crc
    finally:
        file.close()


def _same_entries(disk: Disk, one: str, other: str) -> bool:
    first, second = disk.open(one), disk.open(other)
    try:
        at = HEADER_BYTES
        while True:
            piece = first.read(at, COMPARE_BYTES)
            if piece != second.read(at, COMPARE_BYTES):
                return False
            if not piece:
                return True
            at += len(piece)
    finally:
        first.close()
        second.close()


def install(disk: Disk, built: Built) -> Built:
    """Puts a sealed index in its place, after reading back that it is what was built."""
    if built.state is State.REBUILT:
        size, crc = sum_of(disk, built.path + NEW_SUFFIX)
        if (size, crc) != (built.index_bytes, built.index_crc):
            raise ReadFailed(f"{built.path}{NEW_SUFFIX} does not read back as it was written")
        install_index(disk, built.directory, built.first_id)
    return built
