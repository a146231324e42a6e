"""The file system as a seam: small enough to simulate, and the only way to files.

Everything that touches files takes a `Disk` and works with plain, synchronous calls. `waltzd.disk.real` is the file system
of this machine, `waltzd.disk.simulated` the same interface over memory, with a page cache that a crash forgets. Both keep
these rules:

- A write is in the cache until `flush`; a name is in the cache until `flush_directory`.
- A failed flush, or an I/O error of a write, raises `FlushFailed`: after it the process may only end.
- No space raises `DiskFull`, and the caller takes back what it wrote.
- Links are never followed.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from waltzd.errors import NotRegularFile, PathMissing, ReadFailed

Buffer: TypeAlias = bytes | bytearray | memoryview


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
        """Exclusive, for the life of the open file; `DirectoryHeld` when another process has it."""
        ...

    def is_locked_elsewhere(self) -> bool: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Entry:
    name: str
    is_directory: bool
    size: int


class Inode(NamedTuple):
    """The identity of a file, whatever its name: a copy has another one, a renamed file keeps its own."""

    number: int
    generation: int
    """Tells a file from an earlier one with the same number: the generation of the file system (32 bits), or else the
    nanoseconds at which the file was born; 0 where it knows neither."""

    def is_same(self, other: Inode) -> bool:
        """Generations are compared only with generations, and births with births."""
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
        """The creation date for file headers; nothing is ever decided by it."""
        ...

    def fresh_id(self) -> uuid.UUID: ...
    def boot_id(self) -> uuid.UUID:
        """Another one after each start of the machine; zeros where it is unknown. Within one boot no write is lost,
        whatever became of the process."""
        ...


def join(directory: str, name: str) -> str:
    return f"{directory}/{name}"


def opened(disk: Disk, path: str) -> File | None:
    """For reading; None where there is no readable file."""
    try:
        return disk.open(path)
    except (PathMissing, NotRegularFile, ReadFailed):
        return None


def read_whole(disk: Disk, path: str, limit: int) -> bytes:
    """A small file, up to the limit."""
    with closing(disk.open(path)) as file:
        return file.read(0, limit)
