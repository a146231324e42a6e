"""What is certain in the files that a storage has of one partition, and copying that and nothing else.

Certain is what the source knows to be committed, by its promise file or by the low-water mark of its last session; each
record is proven by its checksum on the way. What it has above may be cut by an owner one day and is left behind. Less than
it once had of what is certain is damage, and named by range. The source is only read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from waltzd.control import ControlFile
from waltzd.disk import Disk, File, join
from waltzd.errors import (
    HeaderDamaged,
    NotRegularFile,
    PathMissing,
    ReadFailed,
    SourceDamaged,
    UnknownVersion,
)
from waltzd.index import IndexChecker, IndexWriter
from waltzd.inspection import SegmentTask, inspect_segment
from waltzd.layout import (
    HEADER_BYTES,
    INDEX_ENTRY_BYTES,
    NO_MARK,
    NO_SESSION,
    PROMISE_BYTES,
    SEGMENT_SUFFIX,
    ControlHeader,
    FileHeader,
    first_id_of,
    index_name,
    index_offset,
    segment_name,
)
from waltzd.ledger import marks_of, read_promise
from waltzd.record import OVERHEAD_BYTES, Run
from waltzd.scan import scan

OnBytes = Callable[[int], None]
"""Called with the bytes that were read since the last call."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """One partition in the source: which files it has, and up to where they are certain."""

    partition: int
    directory: str
    first_ids: tuple[int, ...] = ()
    """Of the segments that hold something certain."""
    certain: int = NO_MARK
    """What the source holds up to here is committed; it may hold less of it, when it was still being brought level."""
    session: int = NO_SESSION
    """The newest session that the source has promised itself to: what is certain was committed in it, or before."""
    required: int = NO_MARK
    """So much of it the source once had on its disk: less is damage."""
    bytes: int = 0
    room: int = 0
    """What the copy takes, with its indexes; a little too much where the last segment goes on behind the mark."""

    def damaged(self, why: str) -> SourceDamaged:
        mark = "" if self.certain == NO_MARK else f" below its committed mark {self.certain}"
        return SourceDamaged(f"partition {self.partition} in {self.directory} is damaged{mark}: {why}")


def examine(disk: Disk, storage: str, control: ControlFile, number: int, *, has_identity: bool) -> Origin:
    """By names and small files only: records are proven while they are copied. Raises `SourceDamaged` where nothing of it
    can be copied."""
    directory = join(storage, str(number))
    bare = Origin(partition=number, directory=directory)
    if not disk.exists(directory):
        raise bare.damaged(f"its directory {directory} is missing")
    struct = None if control.is_damaged(number) else control.info(number)
    promise, findings = read_promise(disk, directory, number, control.header.key, is_expected=has_identity)
    if promise is None and (findings or struct is None):
        raise bare.damaged(findings[0].sentence() if findings else "nothing says what is committed there")
    committed = promise.committed if promise is not None else NO_MARK
    certain = max(committed, struct.low_mark if struct is not None else NO_MARK)
    sizes = {entry.name: entry.size for entry in disk.list(directory)}
    first_ids = sorted(
        first_id
        for name in sizes
        if name.endswith(SEGMENT_SUFFIX) and (first_id := first_id_of(name)) is not None and first_id <= certain
    )
    data = sum(sizes[segment_name(first_id)] for first_id in first_ids)
    indexes = sum(
        sizes.get(index_name(first_id), sizes[segment_name(first_id)] // OVERHEAD_BYTES * INDEX_ENTRY_BYTES)
        for first_id in first_ids
    )
    origin = Origin(
        partition=number,
        directory=directory,
        first_ids=tuple(first_ids),
        certain=certain,
        session=promise.session if promise is not None else struct.session if struct is not None else NO_SESSION,
        required=min(certain, marks_of(struct, promise).floor),
        bytes=data,
        room=data + indexes + PROMISE_BYTES,
    )
    if not first_ids and origin.required > NO_MARK:
        raise origin.damaged(f"ids 0 to {origin.required} are missing, and no segment is there")
    if first_ids and first_ids[0] != 0:
        raise origin.damaged(f"ids 0 to {first_ids[0] - 1} are missing: the first segment starts at id {first_ids[0]}")
    return origin


def copy(disk: Disk, origin: Origin, header: ControlHeader, build: str, on_bytes: OnBytes) -> tuple[int, int, int]:
    """All segments, whole and on the disk; the last id, the first id of the newest, and how many there are. Whole segments
    that an earlier attempt left in `build` are proven and kept. Names are flushed by the caller."""
    if not disk.exists(build):
        disk.make_directory(build)
    _clear(disk, origin, build)
    next_id, done = 0, 0
    for position, first_id in enumerate(origin.first_ids):
        following = origin.first_ids[position + 1] if position + 1 < len(origin.first_ids) else None
        last_id = origin.certain if following is None else following - 1
        expected = FileHeader(created_ms=0, key=header.key, partition=origin.partition, first_id=first_id)
        done += 1
        if following is not None and _is_whole(disk, build, expected, following, on_bytes):
            next_id = following
            continue
        next_id = _copy_segment(disk, origin, expected, build, last_id, on_bytes)
        if next_id <= last_id:  # it ends early
            if next_id <= origin.required:
                raise _explained(disk, origin, expected, following, next_id)
            break
    return next_id - 1, origin.first_ids[done - 1], done


def _clear(disk: Disk, origin: Origin, build: str) -> None:
    """Only files that this copy will have may stay; of an attempt from another source, segments begin elsewhere."""
    names = [name(first_id) for first_id in origin.first_ids for name in (segment_name, index_name)]
    for name in disk.names(build):
        if name not in names:
            disk.remove(join(build, name))


def _is_whole(disk: Disk, build: str, expected: FileHeader, following: int, on_bytes: OnBytes) -> bool:
    """An earlier attempt has brought this segment to its end: the index took its name last."""
    data, index = (_opened(disk, join(build, name(expected.first_id))) for name in (segment_name, index_name))
    try:
        if data is None or index is None or data.size() < HEADER_BYTES:
            return False
        header = data.read(0, HEADER_BYTES)
        if replace(FileHeader.decode(header, data.path), created_ms=0) != expected or index.read(0, HEADER_BYTES) != header:
            return False
        checker = IndexChecker(index, expected.first_id)
        stop = scan(
            data,
            segment_first_id=expected.first_id,
            next_id=expected.first_id,
            offset=HEADER_BYTES,
            end=data.size(),
            index=index,
            on_run=checker.add,
        )
        is_whole = (stop.next_id, stop.offset) == (following, data.size()) and checker.is_right
        if is_whole and index.size() == index_offset(following - expected.first_id):
            on_bytes(data.size())
            return True
        return False
    except UnknownVersion:  # a header that a crash left half written
        return False
    finally:
        for file in (data, index):
            if file is not None:
                file.close()


def _copy_segment(disk: Disk, origin: Origin, expected: FileHeader, build: str, last_id: int, on_bytes: OnBytes) -> int:
    """Its sound records up to `last_id`, with a new index; the id behind them."""
    path = join(origin.directory, segment_name(expected.first_id))
    try:
        data = disk.open(path)
    except (PathMissing, NotRegularFile, ReadFailed) as error:
        raise origin.damaged(error.message) from error
    hint = _opened(disk, join(origin.directory, index_name(expected.first_id)))
    try:
        header = _header_of(data, origin, expected)
        return _copy_records(disk, data, hint, header, build, last_id, on_bytes)
    except ReadFailed as error:
        raise origin.damaged(error.message) from error
    finally:
        data.close()
        if hint is not None:
            hint.close()


def _copy_records(
    disk: Disk, data: File, hint: File | None, header: FileHeader, build: str, last_id: int, on_bytes: OnBytes
) -> int:
    out = disk.create(join(build, segment_name(header.first_id)))
    try:
        out.write(0, header.encode())  # without whatever damage stood in the part of it that means nothing
        index = IndexWriter(disk, build, header)

        def take(offset: int, run: Run) -> None:
            on_bytes(len(run.data))
            if run.first_id <= last_id:
                run = run.part(0, min(len(run), last_id - run.first_id + 1))
                out.write(offset, run.data)
                index.add(offset, run)

        stop = scan(
            data,
            segment_first_id=header.first_id,
            next_id=header.first_id,
            offset=HEADER_BYTES,
            end=data.size(),
            index=hint,
            on_run=take,
        )
        next_id = min(stop.next_id, last_id + 1)
        out.flush()
        index.finish(next_id)
    finally:
        out.close()
    return next_id


def _opened(disk: Disk, path: str) -> File | None:
    try:
        return disk.open(path)
    except (PathMissing, NotRegularFile, ReadFailed):
        return None


def _header_of(data: File, origin: Origin, expected: FileHeader) -> FileHeader:
    try:
        found = FileHeader.decode(data.read(0, HEADER_BYTES), data.path)
    except (HeaderDamaged, UnknownVersion) as error:
        raise origin.damaged(error.message) from error
    if replace(found, created_ms=0) != expected:
        raise origin.damaged(
            f"the header of {data.path} says cluster {found.key}, partition {found.partition}, first id {found.first_id}",
        )
    return found


def _explained(disk: Disk, origin: Origin, expected: FileHeader, following: int | None, next_id: int) -> SourceDamaged:
    """Which ids and bytes it is, as `verify-segments` would say it."""
    task = SegmentTask(
        directory=origin.directory,
        first_id=expected.first_id,
        partition=origin.partition,
        key=expected.key,
        next_first_id=following,
        floor=origin.required,
    )
    findings = [finding for finding in inspect_segment(disk, task).findings if finding.is_damage]
    if findings:
        return origin.damaged(findings[0].sentence())
    end = origin.required if following is None else following - 1
    return origin.damaged(f"ids {next_id} to {end} are missing")
