"""Replicas taken from the files of one storage into those of another, while both are stopped.

Only certain records go over: those that the source knows to be committed, by its promise file or by the low-water mark of
its last session, each proven by its checksum. Records above that may be cut by an owner one day and are left behind. Fewer
of them than the source once had is damage, and named by range. The source is only read.

In the target each replica is a new incarnation that has begun no session: it has no vote on the past, and its owner trusts
it exactly up to its committed mark. It is built beside, and takes its name when it is whole and on the disk; the control
file is changed last. A crash leaves the partition there or not there, and a second attempt goes on behind the last segment
that was whole.

Nothing in the target is overwritten. A replica that its daemon would serve stays; one that it would refuse, or that holds
no record, is set aside. Segment files that an owner sends to a running replica are another matter
(`waltzd.storage.replica.healing`): those must be sound to their last byte, a source here may end in a torn record.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from waltzd.disk.seam import Disk, File, join, opened
from waltzd.errors import (
    BadArgument,
    DirectoryHeld,
    DiskFull,
    ForeignCluster,
    HeaderDamaged,
    NoSuchPartition,
    NothingHere,
    NotRegularFile,
    PathMissing,
    ReadFailed,
    SourceDamaged,
    UnknownVersion,
    WaltzError,
)
from waltzd.format.batch import HEAD_BYTES as BATCH_HEAD_BYTES
from waltzd.format.batch import Batch, End, Head
from waltzd.format.footer import NO_HASH, Footer, FooterBuilder, footer_at, read_footer
from waltzd.format.index import IndexChecker, IndexWriter
from waltzd.format.layout import (
    BATCHES,
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
    Promise,
    index_name,
    index_offset,
    initial_structs,
    segment_ids,
    segment_name,
)
from waltzd.format.record import OVERHEAD_BYTES, Run
from waltzd.format.scan import Stop, scan
from waltzd.storage.offline.inspection import SegmentTask, inspect_segment
from waltzd.storage.offline.verify import is_held
from waltzd.storage.replica.aside import set_aside
from waltzd.storage.replica.control import ControlFile, check_blank, check_identity, new_identity
from waltzd.storage.replica.directory import delete_directory
from waltzd.storage.replica.promise import PromiseFile, floor_of, read_promise
from waltzd.storage.replica.segment import UNUSABLE, header_of

OnBytes = Callable[[int], None]
"""Called with the bytes read since the last call."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """One partition in the source."""

    partition: int
    directory: str
    first_ids: tuple[int, ...] = ()
    """Of the segments with certain records."""
    begin: int = 0
    """The trim floor: where the log begins. What is below is in the archive."""
    certain: int = NO_MARK
    """Committed up to here. The source may hold fewer, when it was still being brought level."""
    session: int = NO_SESSION
    """The newest one that the source has promised; the certain records were committed in it or before."""
    required: int = NO_MARK
    """The source once had the certain records up to here on its disk: less is damage."""
    bytes: int = 0
    room: int = 0
    """For the copy with its indexes; a little too much where the last segment goes on behind the mark."""

    def damaged(self, why: str) -> SourceDamaged:
        mark = "" if self.certain == NO_MARK else f" below its committed mark {self.certain}"
        return SourceDamaged(f"partition {self.partition} in {self.directory} is damaged{mark}: {why}")


def examine(disk: Disk, storage: str, control: ControlFile, number: int, *, has_identity: bool) -> Origin:
    """By names and small files only: records are proven while they are copied. Raises `SourceDamaged` where none can be."""
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
    begin = promise.floor if promise is not None else 0
    first_ids = [first_id for first_id in segment_ids(sizes) if begin <= first_id <= certain]
    data = sum(sizes[segment_name(first_id)] for first_id in first_ids)
    indexes = sum(
        sizes.get(index_name(first_id), sizes[segment_name(first_id)] // OVERHEAD_BYTES * INDEX_ENTRY_BYTES)
        for first_id in first_ids
    )
    origin = Origin(
        partition=number,
        directory=directory,
        first_ids=tuple(first_ids),
        begin=begin,
        certain=certain,
        session=promise.session if promise is not None else struct.session if struct is not None else NO_SESSION,
        required=min(certain, floor_of(struct, promise)),
        bytes=data,
        room=data + indexes + PROMISE_BYTES,
    )
    if not first_ids and origin.required > NO_MARK:
        raise origin.damaged(f"ids {begin} to {origin.required} are missing, and no segment is there")
    if first_ids and first_ids[0] != begin:
        raise origin.damaged(
            f"ids {begin} to {first_ids[0] - 1} are missing: the first segment starts at id {first_ids[0]}"
        )
    return origin


def copy(disk: Disk, origin: Origin, header: ControlHeader, build: str, on_bytes: OnBytes) -> tuple[int, int, int]:
    """Copy all segments to the disk; returns the last id, the first id of the newest, and their number. Whole segments that
    an earlier attempt left in `build` are proven and kept. The caller flushes the names."""
    if not disk.exists(build):
        disk.make_directory(build)
    _clear(disk, origin, build)
    next_id, done, front = origin.begin, 0, _front_at_floor(disk, origin)
    for position, first_id in enumerate(origin.first_ids):
        following = origin.first_ids[position + 1] if position + 1 < len(origin.first_ids) else None
        last_id = origin.certain if following is None else following - 1
        expected = FileHeader(created_ms=0, key=header.key, partition=origin.partition, first_id=first_id)
        done += 1
        if following is not None and (behind := _whole(disk, build, expected, following, front, on_bytes)) is not None:
            next_id, front = following, behind
            continue
        next_id, behind = _copy_segment(disk, origin, expected, build, last_id, front, on_bytes)
        if next_id <= last_id:  # it ends early
            if next_id <= origin.required:
                raise _explained(disk, origin, expected, following, next_id, front)
            break
        front = behind
    return next_id - 1, origin.first_ids[done - 1], done


@dataclass(frozen=True, kw_only=True)
class Front:
    """The end of the segment in front, to which the next one has to fit: nothing in format 0, and before the first one."""

    end: End = field(default_factory=End)
    footer_hash: bytes = NO_HASH


def _front_at_floor(disk: Disk, origin: Origin) -> Front:
    """As the first segment itself names it: what stood in front of it was trimmed, and cannot be held against it."""
    if origin.begin == 0 or not origin.first_ids:
        return Front()
    path = join(origin.directory, segment_name(origin.begin))
    try:
        with closing(disk.open(path)) as data:
            head = Head.decode(data.read(HEADER_BYTES, BATCH_HEAD_BYTES))
            footer = read_footer(data)
    except (PathMissing, NotRegularFile, ReadFailed) as error:
        raise origin.damaged(error.message) from error
    if head is None:
        return Front()
    if footer is None and len(origin.first_ids) > 1:
        raise origin.damaged(f"{path} has no sound footer, and begins at the floor of the partition")
    return Front(end=End(crc=head.before), footer_hash=NO_HASH if footer is None else footer.before)


def _clear(disk: Disk, origin: Origin, build: str) -> None:
    """Remove files that this copy will not have: the segments of another source begin elsewhere."""
    names = [name(first_id) for first_id in origin.first_ids for name in (segment_name, index_name)]
    for name in disk.names(build):
        if name not in names:
            disk.remove(join(build, name))


def _whole(disk: Disk, build: str, expected: FileHeader, following: int, front: Front, on_bytes: OnBytes) -> Front | None:
    """Its end, where an earlier attempt has finished this segment: the index took its name last."""
    data, index = (opened(disk, join(build, name(expected.first_id))) for name in (segment_name, index_name))
    try:
        if data is None or index is None or data.size() < HEADER_BYTES:
            return None
        header = header_of(data, expected)
        if index.read(0, HEADER_BYTES) != data.read(0, HEADER_BYTES):
            return None
        checker = IndexChecker(index, expected.first_id)
        stop = scan(
            data,
            segment_first_id=expected.first_id,
            next_id=expected.first_id,
            offset=HEADER_BYTES,
            end=data.size(),
            version=header.version,
            before=front.end,
            index=index,
            on_run=checker.add,
        )
        footer = footer_at(data, stop.offset, data.size()) if stop.is_sealed else None
        is_at_end = stop.offset == data.size() if not stop.is_sealed else footer is not None
        is_whole = stop.next_id == following and is_at_end and checker.is_right
        is_chain = footer is None or footer.before == front.footer_hash
        if is_whole and is_chain and index.size() == index_offset(following - expected.first_id):
            on_bytes(data.size())
            return _front(stop, footer)
        return None
    except UNUSABLE:  # a header that a crash left half written
        return None
    finally:
        for file in (data, index):
            if file is not None:
                file.close()


def _front(stop: Stop, footer: Footer | None) -> Front:
    return Front(end=stop.end_of_log or End(), footer_hash=NO_HASH if footer is None else footer.hash)


def _copy_segment(
    disk: Disk, origin: Origin, expected: FileHeader, build: str, last_id: int, front: Front, on_bytes: OnBytes
) -> tuple[int, Front]:
    """Copy its sound records up to `last_id`, with a new index; returns the id behind them, and the new end."""
    path = join(origin.directory, segment_name(expected.first_id))
    try:
        data = disk.open(path)
    except (PathMissing, NotRegularFile, ReadFailed) as error:
        raise origin.damaged(error.message) from error
    hint = opened(disk, join(origin.directory, index_name(expected.first_id)))
    try:
        header = header_of(data, expected)
        copying = _copy_batches if header.version == BATCHES else _copy_records
        return copying(disk, origin, data, hint, header, build, last_id, front, on_bytes)
    except (ReadFailed, HeaderDamaged, UnknownVersion, ForeignCluster) as error:
        raise origin.damaged(error.message) from error
    finally:
        data.close()
        if hint is not None:
            hint.close()


def _copy_records(
    disk: Disk, origin: Origin, data: File, hint: File | None, header: FileHeader, build: str, last_id: int, front: Front,
    on_bytes: OnBytes,
) -> tuple[int, Front]:  # fmt: skip
    with closing(disk.create(join(build, segment_name(header.first_id)))) as out:
        out.write(0, header.encode())  # without damage in the part of it that means nothing
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
    return next_id, Front()


def _copy_batches(
    disk: Disk, origin: Origin, data: File, hint: File | None, header: FileHeader, build: str, last_id: int, front: Front,
    on_bytes: OnBytes,
) -> tuple[int, Front]:  # fmt: skip
    """Whole ones, and the footer: that of the source, which must be the one that follows from the batches, or where it has
    none, this one."""
    first = Head.decode(data.read(HEADER_BYTES, BATCH_HEAD_BYTES))
    raw = (header if first is None else replace(header, created_ms=first.time // 1000)).encode()
    builder = FooterBuilder(raw)
    next_id, taken = header.first_id, front.end
    with closing(disk.create(join(build, segment_name(header.first_id)))) as out:
        out.write(0, raw)
        index = IndexWriter(disk, build, header)

        def take(offset: int, batch: Batch) -> None:
            nonlocal next_id, taken
            on_bytes(batch.size)
            if batch.last_id <= last_id:
                out.write_many(offset, batch.pieces)
                index.add(offset + batch.head.lead, batch.run)
                builder.add(batch.head, batch.pieces)
                next_id, taken = batch.last_id + 1, batch.end(taken)

        stop = scan(
            data,
            segment_first_id=header.first_id,
            next_id=header.first_id,
            offset=HEADER_BYTES,
            end=data.size(),
            version=header.version,
            before=front.end,
            index=hint,
            on_batch=take,
        )
        footer = None
        if stop.is_sealed and next_id == stop.next_id:
            footer = builder.footer(front.footer_hash)
            found = footer_at(data, stop.offset, data.size())
            if found is not None and found.encode() != footer.encode():
                index.abandon()
                raise origin.damaged(f"{data.path}: its footer is sound, and not that of its batches")
            out.write(stop.offset, footer.encode())
        out.flush()
        index.finish(next_id)
    return next_id, Front(end=taken, footer_hash=NO_HASH if footer is None else footer.hash)


def _explained(
    disk: Disk, origin: Origin, expected: FileHeader, following: int | None, next_id: int, front: Front
) -> SourceDamaged:
    """By ids and bytes, as `verify-segments` would say it."""
    task = SegmentTask(
        directory=origin.directory,
        first_id=expected.first_id,
        partition=origin.partition,
        key=expected.key,
        next_first_id=following,
        floor=origin.required,
        before=front.end,
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
    """The target has a replica with records, which stays."""
    NOTHING = "nothing"
    """The source knows of no committed record: an empty replica, made by the owner, is as good."""
    DAMAGED = "damaged"
    """The source's is damaged below its committed mark."""


@dataclass(frozen=True, kw_only=True)
class Graft:
    """One partition, and its outcome."""

    origin: Origin
    state: State
    replaces: str = ""
    """Why the target's own files are set aside; empty when it has none."""
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
    """The plan, and afterwards the outcome, of taking partitions from one directory into another."""

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


# -- the plan ----------------------------------------------------------------------------------------------------------


def plan(disk: Disk, source: str, target: str, partitions: Sequence[int] | None = None) -> Transplant:
    """All of the source's partitions, unless some are named. Reads only names and small files: records are proven while
    they are copied. Raises when the whole is impossible."""
    with closing(_source_control(disk, source)) as control:
        header = control.header
        has_identity = check_identity(disk, source, header) is not None
        grafts = [
            _graft(disk, source, control, number, has_identity=has_identity)
            for number in _chosen(source, control, partitions)
        ]
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
    with closing(ControlFile.look(disk, target)) as control:
        _check_same(target, control, header)
        return [_judged(disk, target, control, graft) for graft in grafts]


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
    """Why the target's own files may be set aside, "" when there are none; None when they must stay."""
    directory = join(target, str(number))
    if control.is_damaged(number):
        return "its part of the control file is damaged"
    if not control.is_assigned(number):
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


# -- carrying it out ---------------------------------------------------------------------------------------------------


def carry_out(disk: Disk, wanted: Transplant, on_bytes: OnBytes = lambda _: None) -> Transplant:
    """Take what is ready, one partition after the other, under the target's lock; the target is judged again under it. One
    damaged source does not keep the others from being taken."""
    if wanted.is_new:
        _make_storage(disk, wanted)
    with closing(ControlFile.open(disk, wanted.target)) as control:
        _check_same(wanted.target, control, wanted.header)
        if not check_identity(disk, wanted.target, control.header) and not control.assigned():
            new_identity(disk, wanted.target, control.header)
        grafts = []
        for graft in wanted.grafts:
            graft = _judged(disk, wanted.target, control, replace(graft, replaces=""))
            grafts.append(_take(disk, wanted, control, graft, on_bytes) if graft.state is State.READY else graft)
        return replace(wanted, grafts=tuple(grafts))


def _make_storage(disk: Disk, wanted: Transplant) -> None:
    """An empty storage directory of the same cluster, unless one was made since the plan."""
    if not disk.exists(join(wanted.target, CONTROL_NAME)):
        check_blank(wanted.target, disk.list(wanted.target))
        ControlFile.create(disk, wanted.target, wanted.header.key, wanted.header.partitions)


def _take(disk: Disk, wanted: Transplant, control: ControlFile, graft: Graft, on_bytes: OnBytes) -> Graft:
    number = graft.partition
    build = _build(wanted.target, number)
    try:
        last_id, newest, segments = copy(disk, graft.origin, wanted.header, build, on_bytes)
        promise = Promise(
            key=wanted.header.key,
            partition=number,
            incarnation=disk.fresh_id(),
            session=graft.origin.session,  # the session may have begun below the marks that were committed since
            committed=last_id,
            durable=last_id,
            newest=newest,
            segments=segments,
            is_clean=True,
            floor=graft.origin.begin,
        )
        PromiseFile.create(disk, build, promise)
    except SourceDamaged as error:
        _drop(disk, wanted.target, build)
        return replace(graft, state=State.DAMAGED, error=error)
    except DiskFull as error:
        _drop(disk, wanted.target, build)
        raise DiskFull(
            error.message,
            not_done=f"partition {number} was not taken, nor those behind it; what was taken before is there",
            next_step="free space there and run the same command again",
        ) from error
    disk.flush_directory(build)
    _check_stopped(disk, wanted.source)  # its files were read as if nothing changed them
    aside = _give_name(disk, wanted.target, control, number, build)
    return replace(graft, state=State.TAKEN, last_id=last_id, segments=segments, set_aside=aside)


def _give_name(disk: Disk, target: str, control: ControlFile, number: int, build: str) -> str | None:
    """From here on the replica is this one. In between none is assigned, so a crash leaves files that an owner may
    replace."""
    control.make_record(number)
    if control.is_damaged(number) or control.info(number) not in initial_structs():
        control.reset(number)
    aside = set_aside(disk, target, number)
    disk.rename(build, join(target, str(number)))
    disk.flush_directory(target)
    control.set_flags(number, FLAG_ASSIGNED | FLAG_AVAILABLE)
    return aside


def _drop(disk: Disk, target: str, build: str) -> None:
    if disk.exists(build):
        delete_directory(disk, target, build)


def check_apart(source: str, target: str) -> None:
    """Real paths of two directories."""
    if source == target or target.startswith(source + "/") or source.startswith(target + "/"):
        raise BadArgument(
            f"{source} and {target} are not two directories beside each other",
            not_done="nothing was changed",
            next_step="name the directory of another storage, or a copy of one, with --from",
        )
