"""All indexes of a storage made again from the data, without ever being without one.

A new index is written beside the old one, flushed, and takes its name in one step; a process that is killed leaves the old
index or the new one. Workers only write beside; the one process that holds the lock of the directory puts things in their
place. Segments that are done are noted in a journal, so that a killed rebuild goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from waltzd.disk import Disk, File, join
from waltzd.errors import PathMissing, WaltzError
from waltzd.finding import Finding
from waltzd.indexing import Built, IdRange, IndexTask, State, build_index, install, sum_of
from waltzd.journal import Journal
from waltzd.layout import CONTROL_NAME, JOURNAL_NAME, NO_MARK, SEGMENT_SUFFIX, first_id_of, index_name, segment_name
from waltzd.ledger import Ledger, marks_of, read_ledger, read_promise
from waltzd.verify import OnProgress, Target, partition_of, wanted_targets
from waltzd.workers import run


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
