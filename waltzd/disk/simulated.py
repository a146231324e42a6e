"""A disk in memory that loses, tears and fails writes like a real one.

Each file has a cache, which programs see, a platter, which survives a power cut, and the pending operations between the
two. A directory has the same for its names. `power_cut` applies a random part of the pending operations to the platter, and
makes it the cache. Every operation is numbered and passed to `observer` *before* it happens, so that a test can inspect
each state that a crash could leave; `faults` makes the operation with a given number fail.

Two ways to lose unflushed operations:
- ordered: the first k operations on a file survive, the last of them possibly in part, as in journaling file systems;
- scattered: each 512-byte sector of each write survives or not independently, which is all that POSIX promises.
"""

from __future__ import annotations

import enum
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from waltzd.disk.seam import Buffer, Entry, Inode
from waltzd.errors.operations import DirectoryHeld, DiskFull, FlushFailed, NotRegularFile, PathMissing, ReadFailed

SECTOR_BYTES = 512


class Fault(enum.Enum):
    IO_ERROR = "io error"
    NO_SPACE = "no space"


class Loss(enum.Enum):
    ORDERED = "ordered"
    SCATTERED = "scattered"


@dataclass(frozen=True)
class _Write:
    offset: int
    data: bytes


@dataclass(frozen=True)
class _Truncate:
    size: int


@dataclass(eq=False)
class _FileNode:
    cache: bytearray = field(default_factory=bytearray)
    platter: bytearray = field(default_factory=bytearray)
    pending: list[_Write | _Truncate] = field(default_factory=list)
    holder: int = 0
    number: int = 0


@dataclass(frozen=True)
class _Link:
    name: str
    node: _Node | None
    """Target of the name; None if the name is removed."""
    old_name: str = ""
    """Name that a rename removes in the same step; "" for other operations."""


@dataclass(eq=False)
class _DirectoryNode:
    names: dict[str, _Node] = field(default_factory=dict)
    platter: dict[str, _Node] = field(default_factory=dict)
    pending: list[_Link] = field(default_factory=list)


_Node: TypeAlias = _FileNode | _DirectoryNode


def _apply(content: bytearray, op: _Write | _Truncate) -> None:
    if isinstance(op, _Truncate):
        if op.size <= len(content):
            del content[op.size :]
        else:
            content.extend(bytes(op.size - len(content)))
        return
    end = op.offset + len(op.data)
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    content[op.offset : end] = op.data


def _link(names: dict[str, _Node], link: _Link) -> None:
    if link.old_name:
        names.pop(link.old_name, None)
    if link.node is None:
        names.pop(link.name, None)
    else:
        names[link.name] = link.node


class SimFile:
    def __init__(self, disk: SimDisk, path: str, node: _FileNode, *, write: bool) -> None:
        self._disk = disk
        self._path = path
        self._node = node
        self._write = write
        self._epoch = disk.epoch
        self._is_closed = False

    @property
    def path(self) -> str:
        return self._path

    def _alive(self) -> None:
        assert self._epoch == self._disk.epoch, f"{self._path} is used after the crash that closed it"
        assert not self._is_closed, f"{self._path} is used after it was closed"

    def size(self) -> int:
        self._alive()
        return len(self._node.cache)

    def read(self, offset: int, size: int) -> bytes:
        self._alive()
        if self._disk.step("read", self._path) is Fault.IO_ERROR:
            raise ReadFailed(f"reading {self._path} at {offset}: simulated I/O error")
        return bytes(self._node.cache[offset : offset + size])

    def read_into(self, offset: int, buffer: memoryview) -> int:
        piece = self.read(offset, len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def write(self, offset: int, data: Buffer) -> None:
        self.write_many(offset, [data])

    def write_many(self, offset: int, pieces: Sequence[Buffer]) -> None:
        self._alive()
        assert self._write, f"{self._path} is open for reading only"
        data = b"".join(bytes(piece) for piece in pieces)
        fault = self._disk.step("write", self._path)
        if fault is Fault.IO_ERROR:
            raise FlushFailed(f"writing {self._path} at {offset}: simulated I/O error")
        room = self._disk.room() + max(0, len(self._node.cache) - offset)
        if fault is Fault.NO_SPACE:
            room = min(room, self._disk.random.randrange(len(data) + 1))
        kept = data[: max(0, room)]
        self._do(_Write(offset, kept))
        if len(kept) < len(data) or fault is Fault.NO_SPACE:
            raise DiskFull(f"writing {self._path} at {offset}: simulated full disk")

    def truncate(self, size: int) -> None:
        self._alive()
        assert self._write, f"{self._path} is open for reading only"
        if self._disk.step("truncate", self._path) is Fault.IO_ERROR:
            raise FlushFailed(f"truncating {self._path}: simulated I/O error")
        self._do(_Truncate(size))

    def _do(self, op: _Write | _Truncate) -> None:
        before = len(self._node.cache)
        _apply(self._node.cache, op)
        self._disk.grew(len(self._node.cache) - before)
        self._node.pending.append(op)

    def flush(self) -> None:
        self._alive()
        node = self._node
        if self._disk.step("flush", self._path) is Fault.IO_ERROR:
            # As Linux does: some pages did not arrive, all count as clean, a second flush would succeed.
            for op in node.pending[: self._disk.random.randrange(len(node.pending) + 1)]:
                _apply(node.platter, op)
            node.pending.clear()
            raise FlushFailed(f"flushing {self._path}: simulated I/O error")
        for op in node.pending:
            _apply(node.platter, op)
        node.pending.clear()

    def lock(self) -> None:
        self._alive()
        if self._node.holder == self._disk.epoch:
            raise DirectoryHeld(f"{self._path} is held by another process")
        self._node.holder = self._disk.epoch

    def is_locked_elsewhere(self) -> bool:
        return self._node.holder == self._disk.epoch

    def close(self) -> None:
        self._is_closed = True
        if self._epoch == self._disk.epoch and self._node.holder == self._epoch and self._write:
            self._node.holder = 0


class SimDisk:
    """A file system of its own. The root directory is the empty path."""

    def __init__(self, seed: int = 0, *, capacity_bytes: int = 1 << 40) -> None:
        self.random = random.Random(seed)
        self.capacity_bytes = capacity_bytes
        self.epoch = 1
        """Number of crashes. Each crash closes all files."""
        self.steps = 0
        self.observer: Callable[[str, str], None] | None = None
        self.faults: dict[int, Fault] = {}
        self._root = _DirectoryNode()
        self._clock_ms = 1_700_000_000_000
        self._numbers, self._boots = 0, 1
        self._used: int | None = None
        """Total size of all files in bytes; None if names have changed since it was counted."""

    # -- for tests: steps, faults, crashes

    def step(self, kind: str, path: str) -> Fault | None:
        self.steps += 1
        if self.observer is not None:
            self.observer(kind, path)
        return self.faults.get(self.steps)

    def room(self) -> int:
        if self._used is None:
            self._used = _used(self._root)
        return self.capacity_bytes - self._used

    def grew(self, count: int) -> None:
        if self._used is not None:
            self._used += count

    def clone(self, seed: int) -> SimDisk:
        """Return an independent disk in the same state, without observer and faults."""
        other = SimDisk(seed, capacity_bytes=self.capacity_bytes)
        other._root = _copy_directory(self._root, {})
        other.epoch, other._clock_ms = self.epoch, self._clock_ms
        other._numbers, other._boots = self._numbers, self._boots
        return other

    def restored(self, seed: int, *, over: SimDisk | None = None) -> SimDisk:
        """Return a disk with the same files restored from a backup: as new files, or written over those of `over`."""
        other = self.clone(seed)
        other.kill()
        if over is not None:
            other._numbers, other._boots = over._numbers, over._boots
        other._renumber(other._root, over._root if over is not None else None)
        return other

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _renumber(self, node: _Node, over: _Node | None) -> None:
        if isinstance(node, _FileNode):
            node.number = over.number if isinstance(over, _FileNode) else self._next_number()
            return
        for name, child in sorted(node.names.items()):
            self._renumber(child, over.names.get(name) if isinstance(over, _DirectoryNode) else None)

    def kill(self) -> None:
        """Kill the process but not the machine: the cache survives."""
        self.epoch += 1

    def power_cut(self, loss: Loss = Loss.ORDERED) -> None:
        """Cut the power of the machine: operations that were not flushed survive in part."""
        self.epoch += 1
        self._boots += 1
        self._used = None
        self._settle(self._root, loss, set())

    def _settle(self, node: _Node, loss: Loss, seen: set[int]) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        pick = self.random
        if isinstance(node, _FileNode):
            kept = pick.randrange(len(node.pending) + 1)
            for number, op in enumerate(node.pending):
                if loss is Loss.SCATTERED and isinstance(op, _Write):
                    self._scatter(node.platter, op)
                elif number < kept - 1 or (number == kept - 1 and isinstance(op, _Truncate)):
                    _apply(node.platter, op)
                elif number == kept - 1 and isinstance(op, _Write):
                    _apply(node.platter, _Write(op.offset, op.data[: pick.randrange(len(op.data) + 1)]))
            node.cache = bytearray(node.platter)
            node.pending.clear()
            return
        kept = pick.randrange(len(node.pending) + 1)
        for number, link in enumerate(node.pending):
            if pick.random() < 0.5 if loss is Loss.SCATTERED else number < kept:
                _link(node.platter, link)
        node.pending.clear()
        node.names = dict(node.platter)
        for child in node.names.values():
            self._settle(child, loss, seen)

    def _scatter(self, platter: bytearray, op: _Write) -> None:
        at = op.offset
        end = op.offset + len(op.data)
        while at < end:
            stop = min(end, (at // SECTOR_BYTES + 1) * SECTOR_BYTES)
            if self.random.random() < 0.7:
                _apply(platter, _Write(at, op.data[at - op.offset : stop - op.offset]))
            at = stop

    def content(self, path: str) -> bytearray:
        """Return the cached bytes of a file, to inspect or damage. `corrupt` damages the platter as well."""
        node = self._node(path)
        assert isinstance(node, _FileNode)
        return node.cache

    def corrupt(self, path: str, offset: int, value: bytes) -> None:
        """Change bytes of a file as a failing medium would."""
        node = self._node(path)
        assert isinstance(node, _FileNode)
        for content in (node.cache, node.platter):
            content[offset : offset + len(value)] = value

    # -- the interface of waltzd.disk.seam.Disk

    def _node(self, path: str) -> _Node:
        node: _Node = self._root
        for name in [part for part in path.split("/") if part]:
            if not isinstance(node, _DirectoryNode) or name not in node.names:
                raise PathMissing(f"{path} does not exist")
            node = node.names[name]
        return node

    def _directory(self, path: str) -> _DirectoryNode:
        node = self._node(path)
        if not isinstance(node, _DirectoryNode):
            raise NotRegularFile(f"{path} is not a directory")
        return node

    def _parent(self, path: str) -> tuple[_DirectoryNode, str]:
        head, _, name = path.rpartition("/")
        return self._directory(head), name

    def _change(self, directory: _DirectoryNode, link: _Link) -> None:
        self._used = None
        _link(directory.names, link)
        directory.pending.append(link)

    def open(self, path: str, *, write: bool = False) -> SimFile:
        node = self._node(path)
        if not isinstance(node, _FileNode):
            raise NotRegularFile(f"{path} is not a plain file")
        return SimFile(self, path, node, write=write)

    def create(self, path: str) -> SimFile:
        directory, name = self._parent(path)
        if self.step("create", path) is not None or self.room() < 0:
            raise DiskFull(f"creating {path}: simulated full disk")
        if name not in directory.names:
            self._change(directory, _Link(name, _FileNode(number=self._next_number())))
        file = self.open(path, write=True)
        if file.size():
            file.truncate(0)
        return file

    def exists(self, path: str) -> bool:
        try:
            self._node(path)
        except PathMissing:
            return False
        return True

    def size(self, path: str) -> int:
        node = self._node(path)
        return len(node.cache) if isinstance(node, _FileNode) else 0

    def inode(self, path: str) -> Inode:
        node = self._node(path)
        assert isinstance(node, _FileNode)
        return Inode(node.number, 1)

    def list(self, path: str) -> list[Entry]:
        found = sorted(self._directory(path).names.items())
        return [Entry(name, isinstance(node, _DirectoryNode), self.size(f"{path}/{name}")) for name, node in found]

    def names(self, path: str) -> Sequence[str]:
        return sorted(self._directory(path).names)

    def make_directory(self, path: str) -> None:
        directory, name = self._parent(path)
        if self.step("make_directory", path) is not None:
            raise DiskFull(f"creating the directory {path}: simulated full disk")
        assert name not in directory.names, f"{path} exists"
        self._change(directory, _Link(name, _DirectoryNode()))

    def rename(self, old: str, new: str) -> None:
        directory, old_name = self._parent(old)
        target, new_name = self._parent(new)
        if old_name not in directory.names:
            raise PathMissing(f"{old} does not exist")
        assert directory is target, "only renames within a directory are simulated"
        self.step("rename", new)
        self._change(directory, _Link(new_name, directory.names[old_name], old_name))

    def remove(self, path: str) -> None:
        directory, name = self._parent(path)
        if name not in directory.names:
            raise PathMissing(f"{path} does not exist")
        self.step("remove", path)
        self._change(directory, _Link(name, None))

    def remove_directory(self, path: str) -> None:
        assert not self._directory(path).names, f"{path} is not empty"
        self.remove(path)

    def flush_directory(self, path: str) -> None:
        directory = self._directory(path)
        if self.step("flush_directory", path) is Fault.IO_ERROR:
            raise FlushFailed(f"flushing the directory {path}: simulated I/O error")
        for link in directory.pending:
            _link(directory.platter, link)
        directory.pending.clear()

    def free_bytes(self, path: str) -> int:
        return max(0, self.room())

    def now_ms(self) -> int:
        self._clock_ms += 1
        return self._clock_ms

    def fresh_id(self) -> uuid.UUID:
        return uuid.UUID(int=self.random.getrandbits(128), version=4)

    def boot_id(self) -> uuid.UUID:
        return uuid.UUID(int=self._boots)


def _used(node: _Node) -> int:
    if isinstance(node, _FileNode):
        return len(node.cache)
    return sum(_used(child) for child in node.names.values())


def _copy_directory(node: _DirectoryNode, done: dict[int, _Node]) -> _DirectoryNode:
    copy = _DirectoryNode()
    done[id(node)] = copy
    copy.names = {name: _copy_node(child, done) for name, child in node.names.items()}
    copy.platter = {name: _copy_node(child, done) for name, child in node.platter.items()}
    copy.pending = [
        _Link(link.name, None if link.node is None else _copy_node(link.node, done), link.old_name) for link in node.pending
    ]
    return copy


def _copy_node(node: _Node, done: dict[int, _Node]) -> _Node:
    if id(node) in done:
        return done[id(node)]
    if isinstance(node, _DirectoryNode):
        return _copy_directory(node, done)
    copy = _FileNode(bytearray(node.cache), bytearray(node.platter), list(node.pending), node.holder, node.number)
    done[id(node)] = copy
    return copy
