"""Notes of a long piece of work, so that a killed one goes on where it was.

One line a note, each with its own checksum, appended and flushed. A line that a crash left half written is no note. The
notes say what was true then; whoever reads them checks that it still is.

The index of one segment, made again from its data.

One scan writes the new index beside the old one; putting it in its place is a step of its own, because the process that
scans need not be the one that holds the directory. Only whole, sound records get an entry. Damage refuses the segment
unless the ids that it took may be left out: an index that silently skips records would hide that they are lost.

All indexes of a storage made again from the data, without ever being without one.

A new index is written beside the old one, flushed, and takes its name in one step; a process that is killed leaves the old
index or the new one. Workers only write beside; the one process that holds the lock of the directory puts things in their
place. Segments that are done are noted in a journal, so that a killed rebuild goes on where it was.
"""

from __future__ import annotations

import enum
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from uuid import UUID

from waltzd.disk.seam import Disk, File, join
from waltzd.errors import HeaderDamaged, NotRegularFile, PathMissing, ReadFailed, UnknownVersion, WaltzError
from waltzd.format.finding import Code, Finding
from waltzd.format.index import IndexWriter, install_index
from waltzd.format.layout import (
    CONTROL_NAME,
    HEADER_BYTES,
    JOURNAL_NAME,
    NEW_SUFFIX,
    NO_MARK,
    SEGMENT_SUFFIX,
    FileHeader,
    first_id_of,
    index_name,
    segment_name,
)
from waltzd.format.scan import Survey, Tail, judge_tail, survey
from waltzd.storage.offline.inspection import SegmentTask, inspect_segment
from waltzd.storage.offline.ledger import Ledger, marks_of, read_ledger, read_promise
from waltzd.storage.offline.verify import OnProgress, Target, partition_of, wanted_targets
from waltzd.storage.offline.workers import run

BYTES_MAX = 64 << 20
"""A quarter of a million segments; what stands behind is done again."""


class Journal:
    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._notes: dict[str, dict[str, object]] = {}
        self._file: File | None = None
        if disk.exists(path):
            self._read()

    def _read(self) -> None:
        file = self._disk.open(self._path)
        try:
            raw = file.read(0, BYTES_MAX)
        finally:
            file.close()
        for line in raw.splitlines():
            body, _, crc = line.rpartition(b" ")
            if crc == b"%08x" % zlib.crc32(body) and (note := _note(body)) is not None:
                self._notes[note[0]] = note[1]

    def get(self, name: str) -> dict[str, object] | None:
        return self._notes.get(name)

    def add(self, name: str, facts: dict[str, object]) -> None:
        if self._file is None:
            exists = self._disk.exists(self._path)
            self._file = self._disk.open(self._path, write=True) if exists else self._disk.create(self._path)
        body = json.dumps([name, facts], sort_keys=True).encode()
        # The line feed in front ends a line that was left half written.
        self._file.write(self._file.size(), b"\n%s %08x\n" % (body, zlib.crc32(body)))
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def remove(self) -> None:
        self.close()
        if self._disk.exists(self._path):
            self._disk.remove(self._path)


def _note(body: bytes) -> tuple[str, dict[str, object]] | None:
    """A name and its facts; None for a line that somebody else wrote, whatever its checksum says."""
    try:
        match json.loads(body):
            case [str() as name, dict() as facts]:
                return name, facts
    except (ValueError, RecursionError):
        pass
    return None


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


@dataclass(kw_only=True)
class Rebuild:
    """What a whole rebuild did."""

    built: list[Built] = field(default_factory=list)
    storage_findings: list[Finding] = field(default_factory=list)

    def of(self, state: State) -> list[Built]:
        return [built for built in self.built if built.state is state]


def rebuild(
    disk: Disk,
    targets: Sequence[Target],
    *,
    jobs: int = 1,
    left_out: Sequence[IdRange] = (),
    key: UUID | None = None,
    on_progress: OnProgress | None = None,
    on_built: Callable[[Built], None] = lambda built: None,
) -> Rebuild:
    """All indexes of the targets. Holds the lock of each storage directory from start to end."""
    out = Rebuild()
    wanted = wanted_targets(list(targets))
    for storage in dict.fromkeys(target.storage for target in wanted):
        mine = [target for target in wanted if target.storage == storage]
        control = _take(disk, storage) if storage else None
        try:
            ledger = read_ledger(disk, storage, control) if storage else Ledger()
            out.storage_findings += ledger.findings
            tasks = list(_tasks(disk, storage, ledger, mine, tuple(left_out), key))
            home = storage or mine[0].directory
            for built in _rebuild_all(disk, home, tasks, jobs, on_progress):
                out.built.append(built)
                on_built(built)
        finally:
            if control is not None:
                control.close()
    out.built.sort(key=lambda built: (built.directory, built.first_id))
    return out


def _take(disk: Disk, storage: str) -> File | None:
    """The lock of the directory; a storage without a control file has nothing to lock."""
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
    disk: Disk, storage: str, ledger: Ledger, targets: list[Target], left_out: tuple[IdRange, ...], key: UUID | None
) -> Iterator[IndexTask]:
    directories: dict[str, set[int]] = {}
    for target in targets:
        if target.directory:
            only = directories.setdefault(target.directory, set())
            if target.first_id != NO_MARK:
                only.add(target.first_id)
            continue
        for entry in disk.list(storage):
            if entry.is_directory and partition_of(entry.name) is not None:
                directories[join(storage, entry.name)] = set()
    for directory, only in sorted(directories.items()):
        partition = partition_of(directory)
        struct = ledger.structs.get(partition) if partition is not None else None
        promise, _ = read_promise(disk, directory, partition, ledger.key, is_expected=False)
        floor = marks_of(struct, promise).floor
        names = [entry.name for entry in disk.list(directory)]
        first_ids = sorted(
            number for name in names if name.endswith(SEGMENT_SUFFIX) and (number := first_id_of(name)) is not None
        )
        for position, first_id in enumerate(first_ids):
            if only and first_id not in only:
                continue
            following = first_ids[position + 1] if position + 1 < len(first_ids) else None
            yield IndexTask(
                directory=directory, first_id=first_id, partition=partition, key=ledger.key or key,
                next_first_id=following, floor=floor, left_out=left_out,
            )  # fmt: skip


def _rebuild_all(
    disk: Disk, home: str, tasks: list[IndexTask], jobs: int, on_progress: OnProgress | None
) -> Iterator[Built]:
    journal = Journal(disk, join(home, JOURNAL_NAME))
    total = done = 0
    left: list[IndexTask] = []
    for task in tasks:
        before = _done_before(disk, task, journal.get(_key(home, task)))
        if before is not None:
            yield before
            continue
        left.append(task)
        total += disk.size(join(task.directory, segment_name(task.first_id)))
    try:
        for task, built in run(build_index, disk, left, jobs=jobs, total_bytes=total):
            yield install(disk, built)
            if built.state is not State.REFUSED:
                journal.add(_key(home, task), _facts(task, built))
            done += disk.size(join(task.directory, segment_name(task.first_id)))
            if on_progress is not None:
                on_progress(done, total)
    except BaseException:
        journal.close()
        raise
    journal.remove()


def _key(home: str, task: IndexTask) -> str:
    return join(task.directory.removeprefix(home), segment_name(task.first_id)).lstrip("/")


def _facts(task: IndexTask, built: Built) -> dict[str, object]:
    return {
        "left_out": [list(pair) for pair in task.left_out],
        "records": built.records,
        "data_bytes": built.data_bytes,
        "index_bytes": built.index_bytes,
        "index_crc": built.index_crc,
    }


def _done_before(disk: Disk, task: IndexTask, facts: dict[str, object] | None) -> Built | None:
    """A note of an earlier rebuild counts only while data and index are still as it says."""
    path = join(task.directory, index_name(task.first_id))
    if facts is None or not isinstance(records := facts.get("records"), int) or not disk.exists(path):
        return None
    size, crc = sum_of(disk, path)
    built = Built(
        directory=task.directory,
        first_id=task.first_id,
        state=State.DONE_BEFORE,
        records=records,
        data_bytes=disk.size(join(task.directory, segment_name(task.first_id))),
        index_bytes=size,
        index_crc=crc,
    )
    return built if _facts(task, built) == facts else None
