"""The interface of the file system: small enough to simulate, and used for all files of a storage.

Code that uses files takes a `Disk`, whose calls block. `waltzd.disk.real` implements it over the file system of this
machine, `waltzd.disk.simulated` in memory, with a page cache that a crash discards. Both follow these rules:

- A write is in the cache until `flush`; a name is in the cache until `flush_directory`.
- A failed flush, or an I/O error of a write, raises `FlushFailed`, after which the process must exit.
- A write without space raises `DiskFull`, and the caller truncates what it wrote.
- Links are never followed.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from waltzd.errors.operations import NotRegularFile, PathMissing, ReadFailed

Buffer: TypeAlias = bytes | bytearray | memoryview


class Readable(Protocol):
    """Bytes with the reading methods of a file: a file, or an archived segment in memory or in a cache."""

    @property
    def path(self) -> str: ...
    def size(self) -> int: ...
    def read(self, offset: int, size: int) -> bytes:
        """Read `size` bytes, or fewer at the end."""

    def read_into(self, offset: int, buffer: memoryview) -> int: ...


class File(Readable, Protocol):
    """An open file. Offsets are explicit: there is no current position."""

    def write(self, offset: int, data: Buffer) -> None:
        """Write all of `data`, or raise an error."""

    def write_many(self, offset: int, pieces: Sequence[Buffer]) -> None: ...
    def truncate(self, size: int) -> None: ...
    def flush(self) -> None:
        """Flush content and size to the disk."""

    def lock(self) -> None:
        """Take an exclusive lock until the file is closed; raise `DirectoryHeld` if another process holds it."""

    def is_locked_elsewhere(self) -> bool: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Entry:
    name: str
    is_directory: bool
    size: int


class Inode(NamedTuple):
    """The identity of a file: a copy has another one, a renamed file keeps its own."""

    number: int
    generation: int
    """Distinguishes files that reuse an inode number: the generation of the inode (32 bits), or else the birth time in
    nanoseconds; 0 if the file system has neither."""

    def is_same(self, other: Inode) -> bool:
        """Return whether both are one file. A generation is compared only with a generation, a birth time with a birth
        time."""
        mine, theirs = self.generation, other.generation
        is_comparable = 0 not in (mine, theirs) and (mine < 1 << 32) == (theirs < 1 << 32)
        return self.number == other.number and (mine == theirs or not is_comparable)


class Disk(Protocol):
    def open(self, path: str, *, write: bool = False) -> File: ...
    def create(self, path: str) -> File:
        """Create an empty file, open for writing; empty an existing file of that name."""

    def exists(self, path: str) -> bool: ...
    def size(self, path: str) -> int: ...
    def inode(self, path: str) -> Inode: ...
    def list(self, path: str) -> list[Entry]:
        """Return the entries of a directory, sorted by name."""

    def names(self, path: str) -> Sequence[str]:
        """Return the sorted names in a directory, which costs less than `list`."""

    def make_directory(self, path: str) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def remove_directory(self, path: str) -> None: ...
    def flush_directory(self, path: str) -> None: ...
    def free_bytes(self, path: str) -> int: ...
    def now_ms(self) -> int:
        """Return the creation date for file headers, in milliseconds since 1970. Nothing is decided by it."""

    def fresh_id(self) -> uuid.UUID: ...
    def boot_id(self) -> uuid.UUID:
        """Return an id that changes with each start of the machine; zeros if unknown. While it stays equal, no write was
        lost, even if processes were killed."""


def join(directory: str, name: str) -> str:
    return f"{directory}/{name}"


def opened(disk: Disk, path: str) -> File | None:
    """Open a file for reading; return None if there is no readable plain file."""
    try:
        return disk.open(path)
    except (PathMissing, NotRegularFile, ReadFailed):
        return None


def read_whole(disk: Disk, path: str, limit: int) -> bytes:
    """Read a small file, up to `limit` bytes."""
    with closing(disk.open(path)) as file:
        return file.read(0, limit)
