"""What holds bytes."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from waltzd.errors import NotRegularFile, PathMissing, ReadFailed


class File(Protocol):
    """An open file. Offsets are explicit; nothing depends on a position."""

    @property
    def path(self) -> str: ...
    def size(self) -> int: ...
    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> int: ...
    def write(self, offset: int, data: Buffer) -> None:
        """All of `data`, or an error."""
        ...

    def write_many(self, offset: int, pieces: Sequence[Buffer]) -> None: ...
    def truncate(self, size: int) -> None: ...
    def flush(self) -> None:
        """Content and size are on the disk when this returns."""
        ...

    def lock(self) -> None:
        """Exclusive, for the life of the open file; `DirectoryHeld` when somebody else has it."""
        ...

    def is_locked_elsewhere(self) -> bool: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Entry:
    name: str
    is_directory: bool
    size: int


class Inode(NamedTuple):
    """Which file this is, whatever its name: a copy has another one, a renamed file keeps its own."""

    number: int
    generation: int
    """Tells a file from an earlier one whose number it got: what the file system counts (32 bits), or else the nanoseconds
    at which the file was born; 0 where it knows neither."""

    def is_same(self, other: Inode) -> bool:
        """A file system that came to count says nothing about a file whose birth was written down before."""
        mine, theirs = self.generation, other.generation
        is_comparable = 0 not in (mine, theirs) and (mine < 1 << 32) == (theirs < 1 << 32)
        return self.number == other.number and (mine == theirs or not is_comparable)


class Disk(Protocol):
    def open(self, path: str, *, write: bool = False) -> File: ...
    def create(self, path: str) -> File:
        """A new empty file open for writing; an existing file of that name is emptied."""
        ...

    def exists(self, path: str) -> bool: ...
    def size(self, path: str) -> int: ...
    def inode(self, path: str) -> Inode: ...
    def list(self, path: str) -> list[Entry]:
        """Sorted by name."""
        ...

    def names(self, path: str) -> Sequence[str]:
        """Sorted; cheaper than `list` where sizes and kinds do not matter."""
        ...

    def make_directory(self, path: str) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def remove_directory(self, path: str) -> None: ...
    def flush_directory(self, path: str) -> None: ...
    def free_bytes(self, path: str) -> int: ...
    def now_ms(self) -> int:
        """The creation date that goes into file headers; nothing is ever decided by it."""
        ...

    def fresh_id(self) -> uuid.UUID: ...
    def boot_id(self) -> uuid.UUID:
        """Another one after each start of the machine; zeros where it does not say. In the same boot nothing that was
        written is lost, whatever became of the process."""
        ...


def join(directory: str, name: str) -> str:
    return f"{directory}/{name}"


def opened(disk: Disk, path: str) -> File | None:
    """For reading; None where there is no file that can be read."""
    try:
        return disk.open(path)
    except (PathMissing, NotRegularFile, ReadFailed):
        return None


def read_whole(disk: Disk, path: str, limit: int) -> bytes:
    """A small file, as far as the limit."""
    file = disk.open(path)
    try:
        return file.read(0, limit)
    finally:
        file.close()


Buffer: TypeAlias = bytes | bytearray | memoryview
