"""A storage directory: the control file, the lock, and one replica for each assigned partition.

One bad partition never keeps the others from being served: its error is kept, and every call for it gets that error. A
directory that holds data without its control file is refused, never made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID, uuid4

from waltzd.disk.seam import Disk, join
from waltzd.errors import BadArgument, NoSuchPartition, WaltzError
from waltzd.errors.operations import BadConfig, DirectoryGone, DiskFull, FlushFailed, PartitionExists, WrongStorage
from waltzd.format.layout import (
    CONTROL_NAME,
    FLAG_ASSIGNED,
    FLAG_AVAILABLE,
    GROUP_SEGMENT_BYTES,
    NEW_SUFFIX,
    RESERVE_NAME,
    SEGMENT_SUFFIX,
    Identity,
    aside_partition,
    is_aside_build,
)
from waltzd.protocol.address import is_name
from waltzd.protocol.descriptions import SetAside
from waltzd.storage.replica.aside import remove_with_files, set_aside
from waltzd.storage.replica.control import ControlFile, check_blank, check_identity, new_identity, write_identity
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.replica_context import PartitionSettings, ReplicaContext
from waltzd.storage.replica.startup import adopt_partition, create_partition_files, open_partition

_ZEROS = bytes(1 << 16)


def delete_directory(disk: Disk, home: str, path: str) -> None:
    """Delete the directory of a partition with its files, durably."""
    remove_with_files(disk, path)
    disk.flush_directory(home)


class Directory:
    def __init__(
        self, disk: Disk, path: str, control: ControlFile, settings: PartitionSettings, reserve_bytes: int
    ) -> None:
        self._disk = disk
        self.path = path
        self.control = control
        self._settings = settings
        self._reserve_bytes = reserve_bytes
        self._partitions: dict[int, Partition] = {}
        self._refused: dict[int, WaltzError] = {}
        self._identity: Identity | None = None
        self.instance = uuid4()
        """Identity of the process that holds the directory."""

    @staticmethod
    def open(
        disk: Disk,
        path: str,
        *,
        key: UUID | None,
        partitions: int | None,
        settings: PartitionSettings,
        reserve_bytes: int = 0,
        name: str = "",
        is_renamed: bool = False,
    ) -> Directory:
        """Lock the directory and open every assigned partition. An empty directory becomes one of this cluster. The
        directory of a storage with another `name` is refused, unless it `is_renamed`."""
        if not disk.exists(join(path, CONTROL_NAME)):
            check_blank(path, disk.list(path))
            if key is None or partitions is None:
                raise BadConfig(
                    f"{path} is empty, so cluster_key and partitions must say which cluster it is for",
                    next_step="set both in the configuration, with the values of the cluster",
                )
            ControlFile.create(disk, path, key, partitions)
        control = ControlFile.open(disk, path)
        try:
            control.check_cluster(key, partitions)
            directory = Directory(disk, path, control, settings, reserve_bytes)
            directory._identity = check_identity(disk, path, control.header)
            directory._check_name(name, is_renamed=is_renamed)
            directory._open_all()
            directory.take_name(name, is_renamed=is_renamed)
        except BaseException:
            control.close()
            raise
        return directory

    def _open_all(self) -> None:
        for entry in self._disk.list(self.path):
            if entry.name.endswith(NEW_SUFFIX) and not entry.is_directory:
                self._disk.remove(join(self.path, entry.name))
            elif entry.is_directory and is_aside_build(entry.name):  # an unfinished copy of what the log still has
                remove_with_files(self._disk, join(self.path, entry.name))
        try:
            self._start()
        except DiskFull:
            # The last bytes of a full disk were kept for this moment.
            if not self._release_reserve():
                raise
            self._partitions.clear()
            self._refused.clear()
            self._start()
        self.keep_reserve()

    # -- whose it is

    @property
    def name(self) -> str:
        """Name of the storage; empty until it is known."""
        return "" if self._identity is None else self._identity.name

    def _check_name(self, name: str, *, is_renamed: bool = False) -> None:
        if name and self.name and name != self.name and not is_renamed:
            raise WrongStorage(f"{self.path} is the directory of the storage {self.name}, not of {name}")

    def check_meant(self, name: str, instance: UUID | None = None) -> None:
        """Refuse a call that is meant for another storage, or another process of this one."""
        if (name and self.name and name != self.name) or instance not in (None, self.instance):
            who = f"the storage {self.name}" if self.name else "a storage without a name"
            meant = f"the storage {name}" if name else "another one"
            raise WrongStorage(f"this is {who} in {self.path}; the caller means {meant}")

    def take_name(self, name: str, *, is_renamed: bool = False) -> None:
        """Become the directory of this storage; refused when it is that of another one."""
        self._check_name(name, is_renamed=is_renamed)
        if name and not is_name(name):
            raise BadArgument(f"{name!r} is not a name of a storage")
        assert self._identity is not None, "open it first"
        if name and name != self.name:
            identity = replace(self._identity, name=name)
            write_identity(self._disk, self.path, identity)
            self._settings.say(f"{self.path} is the directory of the storage {name} now" +
                               (f"; it was that of {self.name}" if self.name else ""))  # fmt: skip
            self._identity = identity

    # -- its start

    def _start(self) -> None:
        for number, damage in self.control.damage():
            self._refused[number] = damage
        assigned = self.control.assigned()
        if self._identity is None:
            for number in assigned:
                adopt_partition(self._context(number))
            self._identity = new_identity(self._disk, self.path, self.control.header)
        self.control.write_again()
        self._disk.flush_directory(self.path)
        for number in assigned:
            self._open_one(number)

    def _open_one(self, number: int) -> None:
        try:
            self._partitions[number] = open_partition(self._context(number))
        except (FlushFailed, DiskFull):
            raise
        except WaltzError as error:
            self._refused[number] = error
            self._settings.say(f"partition {number} is refused: {error.message}")

    def _path_of(self, number: int) -> str:
        return join(self.path, str(number))

    def _context(self, number: int) -> ReplicaContext:
        settings = self._settings
        if number == self.control.group_log:
            size = min(settings.segment_bytes_max, GROUP_SEGMENT_BYTES)
            settings = replace(settings, segment_bytes_max=size)
        return ReplicaContext(
            disk=self._disk, directory=self._path_of(number), number=number, control=self.control, settings=settings
        )

    # -- partitions

    def partition(self, number: int) -> Partition:
        found = self._partitions.get(number)
        if found is not None:
            return found
        if number in self._refused:
            raise self._refused[number]
        self.control.info(number)
        raise NoSuchPartition(f"partition {number} is not assigned to this storage")

    def partitions(self) -> list[Partition]:
        return [self._partitions[number] for number in sorted(self._partitions)]

    def errors(self) -> dict[int, WaltzError | None]:
        """All partitions of this storage, each with the error that refuses it."""
        return {number: self._refused.get(number) for number in sorted({*self._partitions, *self._refused})}

    def create_partition(self, number: int) -> Partition:
        """Create an empty replica. Files that are left in the directory of an unassigned partition are set aside,
        never reused."""
        self.control.make_record(number)
        info = self.control.info(number)
        if info.is_assigned:
            raise PartitionExists(f"partition {number} is already assigned to this storage")
        self._set_aside(number)
        create_partition_files(self._context(number))
        self._disk.flush_directory(self.path)
        partition = open_partition(self._context(number))
        try:
            self.control.set_flags(number, info.flags | FLAG_ASSIGNED | FLAG_AVAILABLE)
        except DiskFull:
            partition.close()
            raise
        self._partitions[number] = partition
        return partition

    def stand(self, number: int) -> Partition:
        """Open a replica that has just come to be here."""
        partition = self._partitions[number] = open_partition(self._context(number))
        return partition

    def ensure_partition(self, number: int) -> Partition | None:
        """Create an empty replica if there is none, or if no segment of an earlier one is left: a new disk. Return
        None if a replica exists, even a damaged one, about which an operator has to decide."""
        self.control.make_record(number)
        is_assigned = self.control.info(number).is_assigned
        if is_assigned and not (number in self._refused and self._is_blank(number)):
            return None
        if is_assigned:
            self.remove_partition(number, delete_files=False)
        self._settings.say(f"partition {number}: its owner asked for it and nothing is here; an empty replica is made")
        return self.create_partition(number)

    def _is_blank(self, number: int) -> bool:
        path = self._path_of(number)
        return not self._disk.exists(path) or not any(name.endswith(SEGMENT_SUFFIX) for name in self._disk.names(path))

    def remove_partition(self, number: int, *, delete_files: bool) -> str | None:
        """Take the partition off this storage. Its files are deleted, or set aside; returns where.

        Files of a partition whose part of the control file is damaged are only set aside: they may be anything."""
        may_be_here = self.control.is_damaged(number) and not delete_files
        if not may_be_here and not self.control.info(number).is_assigned:
            raise NoSuchPartition(f"partition {number} is not assigned to this storage")
        partition = self._partitions.pop(number, None)
        self._refused.pop(number, None)
        if partition is not None:
            partition.close()
        self.control.reset(number)
        aside = self._set_aside(number)
        if aside is not None and delete_files:
            delete_directory(self._disk, self.path, aside)
            return None
        return aside

    def _set_aside(self, number: int) -> str | None:
        aside = set_aside(self._disk, self.path, number)
        if aside is not None:
            self._settings.say(f"the files of partition {number} were set aside in {aside}")
        return aside

    def aside(self) -> tuple[SetAside, ...]:
        """Directories of partitions that were taken off this storage."""
        found = (entry.name for entry in self._disk.list(self.path) if entry.is_directory)
        return tuple(
            SetAside(name, sum(entry.size for entry in self._disk.list(join(self.path, name))))
            for name in sorted(found)
            if aside_partition(name) is not None
        )

    def delete_aside(self, names: Sequence[str]) -> tuple[SetAside, ...]:
        """Only directories that were set aside can be named here."""
        there = {one.name: one for one in self.aside()}
        for name in names:
            if name not in there:
                raise BadArgument(
                    f"{name!r} is no directory that was set aside in {self.path}", not_done="nothing was deleted"
                )
        for name in names:
            delete_directory(self._disk, self.path, join(self.path, name))
            self._settings.say(f"{join(self.path, name)}, which was set aside, was deleted")
        return tuple(there[name] for name in names)

    def set_available(self, number: int, available: bool) -> None:
        info = self.control.info(number)
        if not info.is_assigned:
            raise NoSuchPartition(f"partition {number} is not assigned to this storage")
        flags = info.flags | FLAG_AVAILABLE if available else info.flags & ~FLAG_AVAILABLE
        if flags != info.flags:
            self.control.set_flags(number, flags)

    # -- being there

    def check_in_place(self) -> None:
        """Raise `DirectoryGone` if the directory, or that of a partition, is gone. Must not be called while partitions
        change."""
        is_here = self.control.is_in_place
        lost = [partition for partition in self.partitions() if not (is_here and partition.is_in_place)]
        if lost or not is_here:
            what = self.path if not is_here else ", ".join(self._path_of(partition.number) for partition in lost)
            ids = ", ".join(f"partition {partition.number} up to id {partition.last_id}" for partition in lost)
            raise DirectoryGone(f"{what} went away while the storage ran. Lost with it: {ids or 'no partition'}")

    # -- space for a start

    def keep_reserve(self) -> bool:
        """Bring the reserve file to its size when there is room for it; called again from time to time."""
        path = join(self.path, RESERVE_NAME)
        if self._reserve_bytes == 0 or (self._disk.exists(path) and self._disk.size(path) >= self._reserve_bytes):
            return True
        if self._disk.free_bytes(self.path) < self._reserve_bytes + self._settings.free_bytes_min:
            return False
        file = self._disk.create(path)
        try:
            for offset in range(0, self._reserve_bytes, len(_ZEROS)):
                file.write(offset, _ZEROS[: self._reserve_bytes - offset])
            file.flush()
        except DiskFull:
            self._disk.remove(path)
            return False
        finally:
            file.close()
        self._disk.flush_directory(self.path)
        return True

    def _release_reserve(self) -> bool:
        path = join(self.path, RESERVE_NAME)
        if not self._disk.exists(path):
            return False
        self._disk.remove(path)
        self._settings.say(f"the disk is full: {path} was given up so that this storage can start")
        return True

    def close(self) -> None:
        self.check_in_place()
        for partition in self.partitions():
            partition.close()
        self.control.close()
