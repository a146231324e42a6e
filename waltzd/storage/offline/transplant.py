"""What is certain in the files that a storage has of one partition, and copying that and nothing else.

Certain is what the source knows to be committed, by its promise file or by the low-water mark of its last session; each
record is proven by its checksum on the way. What it has above may be cut by an owner one day and is left behind. Less than
it once had of what is certain is damage, and named by range. The source is only read.

Replicas taken from the files of one storage into those of another, while neither of them runs.

Only what is certain goes over: records up to the mark that the source knows to be committed, each proven by its checksum.
What arrives is a new incarnation that has begun no session: it has no vote on the past, and its owner trusts it up to its
committed mark, exactly as far as it goes. Each partition is built beside and takes its name when it is whole and on the
disk; the control file says so last. A crash leaves the partition there or not there, and doing it again goes on, behind the
last segment that was whole.

Nothing that the target has is overwritten. A replica that its daemon would serve stays; one that it would refuse, or that
holds no record, is set aside.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from waltzd.disk.seam import Disk, File, join, opened
from waltzd.errors import (
    BadArgument,
    DirectoryHeld,
    DiskFull,
    ForeignCluster,
    NoSuchPartition,
    NothingHere,
    NotRegularFile,
    PathMissing,
    ReadFailed,
    SourceDamaged,
    WaltzError,
)
from waltzd.format.index import IndexChecker, IndexWriter
from waltzd.format.layout import (
    CONTROL_NAME,
    FLAG_ASSIGNED,
    FLAG_AVAILABLE,
    HEADER_BYTES,
    INDEX_ENTRY_BYTES,
    NEW_SUFFIX,
    NO_MARK,
    NO_SESSION,
    PROMISE_BYTES,
    SEGMENT_SUFFIX,
    ControlHeader,
    FileHeader,
    aside_name,
    check_header,
    index_name,
    index_offset,
    initial_structs,
    segment_ids,
    segment_name,
)
from waltzd.format.record import OVERHEAD_BYTES, Run
from waltzd.format.scan import scan
from waltzd.storage.offline.inspection import SegmentTask, inspect_segment
from waltzd.storage.offline.verify import is_held
from waltzd.storage.replica.control import ControlFile, check_blank, check_identity, new_identity
from waltzd.storage.replica.promise import PromiseFile, floor_of, read_promise
from waltzd.storage.replica.segment import UNUSABLE

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
    first_ids = [first_id for first_id in segment_ids(sizes) if first_id <= certain]
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
        required=min(certain, floor_of(struct, promise)),
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
    data, index = (opened(disk, join(build, name(expected.first_id))) for name in (segment_name, index_name))
    try:
        if data is None or index is None or data.size() < HEADER_BYTES:
            return False
        header = data.read(0, HEADER_BYTES)
        check_header(header, data.path, expected)
        if index.read(0, HEADER_BYTES) != header:
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
    except UNUSABLE:  # a header that a crash left half written
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
    hint = opened(disk, join(origin.directory, index_name(expected.first_id)))
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


def _header_of(data: File, origin: Origin, expected: FileHeader) -> FileHeader:
    try:
        return check_header(data.read(0, HEADER_BYTES), data.path, expected)
    except UNUSABLE as error:
        raise origin.damaged(error.message) from error


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


class State(enum.StrEnum):
    READY = "ready"
    """It can be taken."""
    TAKEN = "taken"
    THERE = "there"
    """The target has a replica with records, which is left as it is."""
    NOTHING = "nothing"
    """The source knows of no committed record: an empty replica is as good, and its owner makes that."""
    DAMAGED = "damaged"
    """The source's is damaged below its committed mark."""


@dataclass(frozen=True, kw_only=True)
class Graft:
    """One partition, and what becomes of it."""

    origin: Origin
    state: State
    replaces: str = ""
    """Why what the target has of it is set aside; empty when it has nothing."""
    last_id: int = NO_MARK
    segments: int = 0
    set_aside: str | None = None
    """Where."""
    error: WaltzError | None = None

    @property
    def partition(self) -> int:
        return self.origin.partition


@dataclass(frozen=True, kw_only=True)
class Transplant:
    """What is taken from where to where; the same value says before what will be done, and afterwards what was done."""

    source: str
    target: str
    header: ControlHeader
    """Of the source's control file."""
    is_new: bool
    """The target is empty, and becomes a storage directory of the source's cluster."""
    grafts: tuple[Graft, ...]

    def of(self, state: State) -> list[Graft]:
        return [graft for graft in self.grafts if graft.state is state]

    @property
    def bytes(self) -> int:
        """To be read."""
        return sum(graft.origin.bytes for graft in self.of(State.READY))


# -- what there is -----------------------------------------------------------------------------------------------------


def plan(disk: Disk, source: str, target: str, partitions: Sequence[int] | None = None) -> Transplant:
    """What can be taken; all of the source's partitions unless some are named. Only looks, at names and small files:
    records are proven while they are copied. Raises when nothing can be said about the whole."""
    control = _source_control(disk, source)
    try:
        header = control.header
        has_identity = check_identity(disk, source, header) is not None
        grafts = [
            _graft(disk, source, control, number, has_identity=has_identity)
            for number in _chosen(source, control, partitions)
        ]
    finally:
        control.close()
    is_new = _is_new(disk, target)
    if not is_new:
        grafts = _beside_what_is_there(disk, target, header, grafts)
    found = Transplant(source=source, target=target, header=header, is_new=is_new, grafts=tuple(grafts))
    _check_room(disk, found)
    return found


def _source_control(disk: Disk, source: str) -> ControlFile:
    if not disk.exists(join(source, CONTROL_NAME)):
        if disk.exists(source):
            check_blank(source, disk.list(source))
        raise NothingHere(f"{source} is no storage directory: it has no file {CONTROL_NAME}")
    _check_stopped(disk, source)
    return ControlFile.look(disk, source)


def _check_stopped(disk: Disk, directory: str) -> None:
    if is_held(disk, directory):
        raise DirectoryHeld(
            f"a storage runs in {directory}", next_step="stop it; both directories must be at rest, or be copies"
        )


def _chosen(source: str, control: ControlFile, partitions: Sequence[int] | None) -> list[int]:
    there = sorted({*control.assigned(), *(number for number, _ in control.damage())})
    if partitions is None:
        return there
    for number in partitions:
        if number not in there:
            raise NoSuchPartition(
                f"{source} has no replica of partition {number}",
                not_done="nothing was changed",
                next_step=f"it has: {', '.join(map(str, there)) or 'none'}",
            )
    return sorted(set(partitions))


def _graft(disk: Disk, source: str, control: ControlFile, number: int, *, has_identity: bool) -> Graft:
    try:
        origin = examine(disk, source, control, number, has_identity=has_identity)
    except SourceDamaged as error:
        bare = Origin(partition=number, directory=join(source, str(number)))
        return Graft(origin=bare, state=State.DAMAGED, error=error)
    state = State.READY if origin.first_ids else State.NOTHING
    return Graft(origin=origin, state=state, last_id=origin.certain, segments=len(origin.first_ids))


def _is_new(disk: Disk, target: str) -> bool:
    if disk.exists(join(target, CONTROL_NAME)):
        return False
    if not disk.exists(target):
        raise PathMissing(
            f"{target} does not exist",
            not_done="nothing was changed",
            next_step="make the directory, on the file system that it is meant for",
        )
    check_blank(target, disk.list(target))
    return True


def _beside_what_is_there(disk: Disk, target: str, header: ControlHeader, grafts: list[Graft]) -> list[Graft]:
    _check_stopped(disk, target)
    control = ControlFile.look(disk, target)
    try:
        _check_same(target, control, header)
        return [_judged(disk, target, control, graft) for graft in grafts]
    finally:
        control.close()


def _check_same(target: str, control: ControlFile, header: ControlHeader) -> None:
    theirs = control.header
    if (theirs.key, theirs.partitions) != (header.key, header.partitions):
        raise ForeignCluster(
            f"{target} belongs to the cluster {theirs.key} with {theirs.partitions} partitions; the source to "
            f"{header.key} with {header.partitions}",
            not_done="nothing was changed",
            next_step="take it from a storage of the same cluster",
        )


def _judged(disk: Disk, target: str, control: ControlFile, graft: Graft) -> Graft:
    if graft.state is not State.READY:
        return graft
    has_identity = check_identity(disk, target, control.header) is not None
    why = _why_replaced(disk, target, control, graft.partition, has_identity=has_identity)
    return replace(graft, state=State.THERE) if why is None else replace(graft, replaces=why)


def _why_replaced(disk: Disk, target: str, control: ControlFile, number: int, *, has_identity: bool) -> str | None:
    """Why what the target has of it may be set aside, or "" when it has nothing; None when it must stay."""
    directory = join(target, str(number))
    if control.is_damaged(number):
        return "its part of the control file is damaged"
    if not control.info(number).is_assigned:
        return "it is not assigned to this storage" if disk.exists(directory) else ""
    if not disk.exists(directory):
        return "its directory is missing"
    promise, findings = read_promise(disk, directory, number, control.header.key, is_expected=has_identity)
    if promise is None and findings:
        return findings[0].sentence()
    is_empty = all(entry.size <= HEADER_BYTES for entry in disk.list(directory) if entry.name.endswith(SEGMENT_SUFFIX))
    return "it holds no record" if is_empty else None


def _build(target: str, number: int) -> str:
    """Where a partition is put together. Whole segments that are found there are kept."""
    return join(target, f"{number}{NEW_SUFFIX}")


def _check_room(disk: Disk, found: Transplant) -> None:
    ready = found.of(State.READY)
    needed = sum(graft.origin.room for graft in ready)
    unfinished = [build for graft in ready if disk.exists(build := _build(found.target, graft.partition))]
    free = disk.free_bytes(found.target) + sum(entry.size for build in unfinished for entry in disk.list(build))
    if needed > free:
        raise DiskFull(
            f"{found.target}: {needed} bytes are needed, {free} are free",
            not_done="nothing was changed",
            next_step="free space there, or take fewer partitions with --partitions",
        )


# -- doing it ----------------------------------------------------------------------------------------------------------


def carry_out(disk: Disk, wanted: Transplant, on_bytes: OnBytes = lambda _: None) -> Transplant:
    """Take what is ready, one partition after the other. Holds the target's lock; what has happened there since the plan
    was made is looked at again under it. One source that is damaged does not keep the others from being taken."""
    if wanted.is_new:
        _make_storage(disk, wanted)
    control = ControlFile.open(disk, wanted.target)
    try:
        _check_same(wanted.target, control, wanted.header)
        if not check_identity(disk, wanted.target, control.header) and not control.assigned():
            new_identity(disk, wanted.target, control.header)
        grafts = []
        for graft in wanted.grafts:
            graft = _judged(disk, wanted.target, control, replace(graft, replaces=""))
            grafts.append(_take(disk, wanted, control, graft, on_bytes) if graft.state is State.READY else graft)
        return replace(wanted, grafts=tuple(grafts))
    finally:
        control.close()


def _make_storage(disk: Disk, wanted: Transplant) -> None:
    """An empty storage directory of the same cluster; somebody else may have made one since the plan was made."""
    if not disk.exists(join(wanted.target, CONTROL_NAME)):
        check_blank(wanted.target, disk.list(wanted.target))
        ControlFile.create(disk, wanted.target, wanted.header.key, wanted.header.partitions)


def _take(disk: Disk, wanted: Transplant, control: ControlFile, graft: Graft, on_bytes: OnBytes) -> Graft:
    number = graft.partition
    build = _build(wanted.target, number)
    try:
        last_id, newest, segments = copy(disk, graft.origin, wanted.header, build, on_bytes)
        PromiseFile.create(
            disk,
            build,
            key=wanted.header.key,
            partition=number,
            session=graft.origin.session,  # which may have begun below what it has committed since
            committed=last_id,
            durable=last_id,
            newest=newest,
            segments=segments,
            is_clean=True,
        )
    except SourceDamaged as error:
        _remove_whole(disk, wanted.target, build)
        return replace(graft, state=State.DAMAGED, error=error)
    except DiskFull as error:
        _remove_whole(disk, wanted.target, build)
        raise DiskFull(
            error.message,
            not_done=f"partition {number} was not taken, nor those behind it; what was taken before is there",
            next_step="free space there and run the same command again",
        ) from error
    disk.flush_directory(build)
    _check_stopped(disk, wanted.source)  # it was read as files that nobody changes
    aside = _give_name(disk, wanted.target, control, number, build)
    return replace(graft, state=State.TAKEN, last_id=last_id, segments=segments, set_aside=aside)


def _give_name(disk: Disk, target: str, control: ControlFile, number: int, build: str) -> str | None:
    """From here on the replica is this one. Nothing is assigned in between, so a crash leaves what an owner may replace."""
    if control.is_damaged(number) or control.info(number) not in initial_structs():
        control.reset(number)
    place, aside = join(target, str(number)), None
    if disk.exists(place):
        aside = join(target, aside_name(number, set(disk.names(target))))
        disk.rename(place, aside)
        disk.flush_directory(target)
    disk.rename(build, place)
    disk.flush_directory(target)
    control.set_flags(number, FLAG_ASSIGNED | FLAG_AVAILABLE)
    return aside


def _remove_whole(disk: Disk, target: str, build: str) -> None:
    """Nothing ever refers to it."""
    if not disk.exists(build):
        return
    for name in disk.names(build):
        disk.remove(join(build, name))
    disk.remove_directory(build)
    disk.flush_directory(target)


def check_apart(source: str, target: str) -> None:
    """Real paths of two directories."""
    if source == target or target.startswith(source + "/") or source.startswith(target + "/"):
        raise BadArgument(
            f"{source} and {target} are not two directories beside each other",
            not_done="nothing was changed",
            next_step="name the directory of another storage, or a copy of one, with --from",
        )
