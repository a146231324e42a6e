"""The context of a replica: its disk and directory, the control file of its storage, and its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from uuid import UUID

from waltzd.disk.seam import Disk, join
from waltzd.errors.operations import DiskFull, PartitionDamaged
from waltzd.format.finding import Code, Finding
from waltzd.format.layout import BATCHES, ControlStruct, FileHeader, segment_name
from waltzd.storage.replica.control import ControlFile


@dataclass(frozen=True, kw_only=True)
class PartitionSettings:
    segment_bytes_max: int = 64 << 20
    free_bytes_min: int = 0
    record_bytes_max: int = 16 << 20
    archives: bool = False
    """True if the storage can upload sealed segments. Each status reports it to the owner."""
    version: str = ""
    """Version of the storage. Each status reports it to the owner."""
    say: Callable[[str], None] = lambda sentence: None
    """Callback for each sentence that an operator should read."""
    complain: Callable[[str], None] | None = None
    """Callback for each sentence about damage; None to use `say`."""


@dataclass(frozen=True, kw_only=True)
class ReplicaContext:
    disk: Disk
    directory: str
    number: int
    control: ControlFile
    settings: PartitionSettings

    @property
    def key(self) -> UUID:
        return self.control.header.key

    @property
    def info(self) -> ControlStruct:
        return self.control.info(self.number)

    def header(self, first_id: int) -> FileHeader:
        """Return the header of a segment that starts at this id, created now."""
        return FileHeader(created_ms=self.disk.now_ms(), key=self.key, partition=self.number, first_id=first_id)

    def batch_header(self, first_id: int, time: int) -> FileHeader:
        """Return the header of a segment of format 1. Its creation time is `time`, the time of its first batch in
        microseconds, so that the file is identical on each replica."""
        return replace(self.header(first_id), version=BATCHES, created_ms=time // 1000)

    def path(self, first_id: int) -> str:
        return join(self.directory, segment_name(first_id))

    def finding(self, code: Code, path: str, detail: str, **place: int | None) -> Finding:
        return Finding(code, path, detail, partition=self.number, **place)

    def say(self, sentence: str) -> None:
        self.settings.say(f"partition {self.number}: {sentence}")

    def complain(self, finding: Finding) -> None:
        complain = self.settings.complain or self.settings.say
        complain(f"{PartitionDamaged.code} partition {self.number}: {finding.sentence()}")


class FreeSpaceGuard:
    """Guard of the free space: appends stop before the disk is full, and resume once clearly more is free."""

    def __init__(self, context: ReplicaContext) -> None:
        self._context = context
        self.is_full = False
        self._refused = 0
        """Bytes of the last refused write."""

    def note_refused(self, size: int) -> None:
        self.is_full, self._refused = True, size

    def is_still_full(self) -> bool:
        """Return whether the disk is still too full for the write that was refused last. The status thus
        reports free space before the next write is tried."""
        if self.is_full:
            least = self._context.settings.free_bytes_min
            free = self._context.disk.free_bytes(self._context.directory)
            self.is_full = free - self._refused < least + least // 8
        return self.is_full

    def check(self, size: int) -> None:
        """Refused when less than the least would stay free; after a refusal, less than an eighth more, so as not to
        flap."""
        directory, least = self._context.directory, self._context.settings.free_bytes_min
        if least == 0:
            return
        free = self._context.disk.free_bytes(directory)
        least += least // 8 if self.is_full else 0
        if free - size < least:
            self.note_refused(size)
            raise DiskFull(f"{directory}: {free} bytes are free, {size} are to be written and {least} must stay free")
