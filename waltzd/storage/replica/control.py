"""The control file of a storage (sessions, marks and flags of each partition), and the identity file beside it.

Each partition has two structs; a change writes the one that is not current, flushes, and only then counts. A partition
whose two structs are both damaged is refused by name, and the others go on. The file is made once, whole, by a rename.
Where it is missing or short beside existing data it is never made anew, because it holds the promises of this storage.

The group log, which clusters of older versions get later than their partitions, has the number behind all others. Its
record stands in a second control file, for one partition, so that the first one keeps the size that the number of
partitions gives it.

The daemon stops at the first finding (`ControlFile`, `check_identity`); the tools for stopped storages read on and list all
findings (`read_ledger`).
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field, replace
from uuid import UUID

from waltzd.disk.seam import Disk, Entry, File, join, read_whole
from waltzd.errors import ForeignCluster, NoSuchPartition, WaltzError
from waltzd.errors.operations import BadConfig, ControlDamaged, MarkWentDown, NotRegularFile, PathMissing, ReadFailed
from waltzd.format.finding import Code, Finding, unreadable
from waltzd.format.layout import (
    CONTROL_NAME,
    FLAG_ASSIGNED,
    FLAG_AVAILABLE,
    GROUPS_NAME,
    IDENTITY_BYTES,
    IDENTITY_NAME,
    NEW_SUFFIX,
    PARTITIONS_MAX,
    SEGMENT_SUFFIX,
    ControlHeader,
    ControlInfo,
    ControlStruct,
    Identity,
    compare_identity,
    control_bytes,
    control_struct_offset,
    decode_control_info,
    initial_structs,
    read_control_header,
    read_control_info,
    read_identity,
)


def write_new_file(disk: Disk, directory: str, name: str, content: bytes) -> None:
    """All or nothing: written beside, flushed, renamed. The caller flushes the directory."""
    new = join(directory, name + NEW_SUFFIX)
    with closing(disk.create(new)) as file:
        file.write(0, content)
        file.flush()
    disk.rename(new, join(directory, name))


class ControlFile:
    def __init__(
        self, disk: Disk, directory: str, file: File, header: ControlHeader, infos: list[ControlInfo | ControlDamaged]
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._file = file
        self.header = header
        self._infos = infos
        """Records of the partitions, followed by that of the group log if this storage has one."""
        self._groups: File | None = None
        """With the record of the group log, as its only one."""

    @staticmethod
    def create(disk: Disk, directory: str, key: UUID, partitions: int, *, name: str = CONTROL_NAME) -> None:
        header = ControlHeader(created_ms=disk.now_ms(), key=key, partitions=partitions)
        infos = [ControlInfo(partition=number, structs=initial_structs()) for number in range(partitions)]
        body = header.encode() + b"".join(info.encode() for info in infos)
        write_new_file(disk, directory, name, body)
        disk.flush_directory(directory)

    @staticmethod
    def open(disk: Disk, directory: str) -> ControlFile:
        """Locks the directory for the life of this process."""
        file = disk.open(join(directory, CONTROL_NAME), write=True)
        file.lock()
        return ControlFile._read(disk, directory, file, write=True)

    @staticmethod
    def look(disk: Disk, directory: str) -> ControlFile:
        """Without the lock, for readers. Never while this process holds the lock: closing this file would release it."""
        file = disk.open(join(directory, CONTROL_NAME))
        try:
            return ControlFile._read(disk, directory, file, write=False)
        except BaseException:
            file.close()
            raise

    @staticmethod
    def _read(disk: Disk, directory: str, file: File, *, write: bool) -> ControlFile:
        header, infos = _records(file)
        control = ControlFile(disk, directory, file, header, infos)
        control._read_groups(write=write)
        return control

    def _read_groups(self, *, write: bool) -> None:
        """Whatever is wrong with that file refuses the group log, and nothing else."""
        path, number = join(self._directory, GROUPS_NAME), self.group_log
        if not self._disk.exists(path):
            if self._disk.exists(join(self._directory, str(number))):
                self._infos.append(ControlDamaged(f"{path} is missing, but {self._directory} holds {number}"))
            return
        self._groups = self._disk.open(path, write=write)
        try:
            header, infos = _records(self._groups)
            check_groups(self.header, header, path)
            found = infos[0]
            if isinstance(found, ControlDamaged):
                raise found
        except WaltzError as error:
            found = ControlDamaged(f"the group log, partition {number}: {error.message}")
        self._infos.append(found)

    @property
    def group_log(self) -> int:
        """The number that the group log has, where there is one."""
        return self.header.partitions

    def make_record(self, partition: int) -> None:
        """Create the record of the group log if it is missing; partitions have a record from the start."""
        if partition == self.group_log and len(self._infos) == self.group_log:
            self._make_groups()

    def _make_groups(self) -> None:
        ControlFile.create(self._disk, self._directory, self.header.key, 1, name=GROUPS_NAME)
        if self._groups is not None:
            self._groups.close()
        self._groups = self._disk.open(join(self._directory, GROUPS_NAME), write=True)
        del self._infos[self.group_log :]
        self._infos += _records(self._groups)[1]

    def close(self) -> None:
        self._file.close()
        if self._groups is not None:
            self._groups.close()

    @property
    def is_in_place(self) -> bool:
        paths = [self.path] if self._groups is None else [self.path, self._groups.path]
        return all(map(self._disk.exists, paths))

    @property
    def path(self) -> str:
        return self._file.path

    def check_cluster(self, key: UUID | None, partitions: int | None) -> None:
        """Refuses a cluster other than that of the file."""
        if key is not None and key != self.header.key:
            raise ForeignCluster(
                f"{self._file.path} belongs to the cluster {self.header.key}, not to {key}", key=self.header.key
            )
        if partitions is not None and partitions != self.header.partitions:
            raise BadConfig(
                f"{self._file.path} was made for {self.header.partitions} partitions, not for {partitions}",
                next_step="the number of partitions is fixed when a cluster is created; correct the configuration",
            )

    def info(self, partition: int) -> ControlStruct:
        """Return the current struct. Raise if the number is out of range or the record is damaged."""
        return self._info(partition).current

    def _info(self, partition: int) -> ControlInfo:
        if not 0 <= partition < len(self._infos):
            raise NoSuchPartition(
                f"partition {partition} does not exist: this cluster has the partitions 0 to {self.group_log - 1}"
            )
        found = self._infos[partition]
        if isinstance(found, ControlDamaged):
            raise found
        return found

    def damage(self) -> list[tuple[int, ControlDamaged]]:
        return [(number, info) for number, info in enumerate(self._infos) if isinstance(info, ControlDamaged)]

    def assigned(self) -> list[int]:
        return [
            number for number, info in enumerate(self._infos) if isinstance(info, ControlInfo) and info.current.is_assigned
        ]

    def is_assigned(self, partition: int) -> bool:
        """Return whether this storage has a replica of the partition. Raise as `info` does; the group log may have no
        record yet."""
        is_unknown = partition == self.group_log == len(self._infos)
        return not is_unknown and self.info(partition).is_assigned

    def start_session(self, partition: int, *, session: int, low_mark: int, local_low_mark: int) -> None:
        """Record that a session has begun, whose owner has decided that everything up to `low_mark` is committed.
        Marks only rise."""
        now = self.info(partition)
        for name, old, new in (
            ("session", now.session, session),
            ("low-water mark", now.low_mark, low_mark),
            ("local low-water mark", now.local_low_mark, local_low_mark),
        ):
            if new < old:
                raise MarkWentDown(f"the {name} of partition {partition} is {old}; {new} is below it")
        self._write(partition, replace(now, session=session, low_mark=low_mark, local_low_mark=local_low_mark))

    def lower_marks(self, partition: int, fork: int) -> None:
        """Lower the marks to a fork: what is above it belongs to the timeline that ended there."""
        now = self.info(partition)
        low_mark, local = min(now.low_mark, fork), min(now.local_low_mark, fork)
        self._write(partition, replace(now, low_mark=low_mark, local_low_mark=local))

    def restore(self, partition: int, *, session: int, mark: int) -> None:
        """Record a replica that was made from an archive, as at the end of a session that closed at this mark."""
        flags = FLAG_ASSIGNED | FLAG_AVAILABLE
        now = self.info(partition)
        self._write(partition, replace(now, session=session, low_mark=mark, local_low_mark=mark, flags=flags))

    def set_flags(self, partition: int, flags: int) -> None:
        self._write(partition, replace(self.info(partition), flags=flags))

    def _write(self, partition: int, new: ControlStruct) -> None:
        info = self._info(partition)
        self._write_slot(partition, 1 - info.current_slot, replace(new, sequence=info.current.sequence + 1))

    def _place(self, partition: int) -> tuple[File, int]:
        """Return the file with the record of a partition, and the number of the record in this file."""
        if partition != self.group_log:
            return self._file, partition
        assert self._groups is not None
        return self._groups, 0

    def _write_slot(self, partition: int, slot: int, new: ControlStruct) -> None:
        file, record = self._place(partition)
        file.write(control_struct_offset(record, slot), new.encode())
        file.flush()
        info = self._info(partition)
        structs = (new, info.structs[1]) if slot == 0 else (info.structs[0], new)
        self._infos[partition] = ControlInfo(partition=partition, structs=structs)

    def reset(self, partition: int) -> None:
        """Reset a partition to *never assigned*. The struct that is not current is written and flushed first. So one struct
        is always whole, and the old one counts until the second write."""
        blank = ControlInfo(partition=partition, structs=initial_structs())
        is_damaged = isinstance(self._infos[partition], ControlDamaged)
        if is_damaged and partition == self.group_log:  # its whole file may be missing
            self._make_groups()
            return
        if is_damaged:  # nothing of the record is believed, its number included
            self._file.write(control_struct_offset(partition, 0) - 4, blank.encode())
            self._file.flush()
            self._infos[partition] = blank
            return
        current = self._info(partition).current_slot
        for slot in (1 - current, current):
            self._write_slot(partition, slot, initial_structs()[slot])

    def is_damaged(self, partition: int) -> bool:
        """Then even whether it was assigned is unknown."""
        return 0 <= partition < len(self._infos) and isinstance(self._infos[partition], ControlDamaged)

    def write_again(self) -> None:
        """After an unclean stop the cache may show bytes that never reached the disk: write the same ones again and
        flush."""
        for file in (self._file, self._groups):
            if file is not None:
                file.write(0, file.read(0, file.size()))
                file.flush()


def _records(file: File) -> tuple[ControlHeader, list[ControlInfo | ControlDamaged]]:
    path = file.path
    raw = file.read(0, min(file.size(), control_bytes(PARTITIONS_MAX) + 1))
    header, findings = read_control_header(raw, path)
    for finding in findings:
        raise finding.error()
    assert header is not None
    infos: list[ControlInfo | ControlDamaged] = []
    for number in range(header.partitions):
        try:
            infos.append(decode_control_info(raw, number, path))
        except ControlDamaged as error:
            infos.append(error)
    return header, infos


def check_groups(header: ControlHeader, second: ControlHeader, path: str) -> None:
    """Refuses a second control file that is not for the group log of the same cluster."""
    if second.key != header.key:
        raise ControlDamaged(f"{path} belongs to the cluster {second.key}, not to {header.key}")
    if second.partitions != 1:
        raise ControlDamaged(f"{path} is for {second.partitions} partitions, not for one")


def new_identity(disk: Disk, directory: str, header: ControlHeader, name: str = "") -> Identity:
    identity = Identity(control=header, directory=disk.fresh_id(), name=name)
    write_identity(disk, directory, identity)
    return identity


def write_identity(disk: Disk, directory: str, identity: Identity) -> None:
    write_new_file(disk, directory, IDENTITY_NAME, identity.encode())
    disk.flush_directory(directory)


def check_identity(disk: Disk, directory: str, header: ControlHeader) -> Identity | None:
    """Return the identity in the identity file; None if there is no such file. Raise if it disagrees with the control
    file."""
    path = join(directory, IDENTITY_NAME)
    if not disk.exists(path):
        return None
    identity, findings = read_identity(read_whole(disk, path, IDENTITY_BYTES + 1), path)
    if identity is not None:
        findings += compare_identity(header, identity, join(directory, CONTROL_NAME))
    for finding in findings:
        raise finding.error()
    return identity


def check_blank(path: str, entries: list[Entry]) -> None:
    """Raise `ControlDamaged` if a directory without a control file holds anything that could be data."""
    for entry in entries:
        name = entry.name
        stem = name.split(".")[0]
        if name == IDENTITY_NAME or name.endswith(SEGMENT_SUFFIX) or (entry.is_directory and stem.isdigit()):
            raise ControlDamaged(f"{join(path, CONTROL_NAME)} is missing, but {path} holds {name}")


@dataclass(kw_only=True)
class Ledger:
    """The cluster of a storage directory, and the current struct of each partition."""

    key: UUID | None = None
    has_identity: bool = False
    structs: dict[int, ControlStruct] = field(default_factory=dict)
    group_log: int | None = None
    """The number that the group log has, where there is one."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def assigned(self) -> list[int]:
        return [number for number, struct in self.structs.items() if struct.is_assigned]


def read_ledger(disk: Disk, directory: str, control: File | None = None) -> Ledger:
    """Read control file and identity file to their ends, with all findings. A caller that holds the lock passes its
    open control file, because closing another handle would release the lock."""
    ledger, path, limit = Ledger(), join(directory, CONTROL_NAME), control_bytes(PARTITIONS_MAX) + 1
    identity, header = None, None
    if disk.exists(join(directory, IDENTITY_NAME)):
        ledger.has_identity = True
        raw = _readable(disk, join(directory, IDENTITY_NAME), IDENTITY_BYTES + 1, ledger)
        if raw is not None:
            identity, found = read_identity(raw, join(directory, IDENTITY_NAME))
            ledger.findings += found
    raw = control.read(0, limit) if control is not None else _readable(disk, path, limit, ledger)
    if raw is not None:
        header, found = read_control_header(raw, path)
        ledger.findings += found
        for number in range(header.partitions if header is not None else 0):
            info, found = read_control_info(raw, number, path)
            ledger.findings += found
            if info is not None:
                ledger.structs[number] = info.current
    if header is not None:
        _read_groups(disk, directory, header, ledger)
    if header is not None and identity is not None:
        ledger.findings += compare_identity(header, identity, path)
    known = identity.control if identity is not None else header
    ledger.key = known.key if known is not None else None
    return ledger


def _read_groups(disk: Disk, directory: str, first: ControlHeader, ledger: Ledger) -> None:
    number, path = first.partitions, join(directory, GROUPS_NAME)
    ledger.group_log = number
    if not disk.exists(path):
        if disk.exists(join(directory, str(number))):
            missing = Finding(Code.CONTROL_FILE, path, "the control file of the group log is missing", partition=number)
            ledger.findings.append(missing)
        return
    raw = _readable(disk, path, control_bytes(1) + 1, ledger)
    header, findings = (None, []) if raw is None else read_control_header(raw, path)
    if raw is not None and header is not None:
        try:
            check_groups(first, header, path)
            info, found = read_control_info(raw, 0, path)
            findings += found
            if info is not None:
                ledger.structs[number] = info.current
        except ControlDamaged as error:
            findings.append(Finding(Code.CONTROL_FILE, path, error.message))
    ledger.findings += [replace(finding, partition=number) for finding in findings]


def _readable(disk: Disk, path: str, limit: int, ledger: Ledger) -> bytes | None:
    try:
        return read_whole(disk, path, limit)
    except PathMissing:
        ledger.findings.append(Finding(Code.CONTROL_FILE, path, "the control file is missing"))
    except (NotRegularFile, ReadFailed) as error:
        ledger.findings.append(unreadable(path, error))
    return None
