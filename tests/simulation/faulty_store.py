"""A store of objects in memory that keeps the contract, and everything that a real one does within it.

Answers are lost although the object was written, come although it was not, or it is written later, when nobody waits for it
any more; a request is repeated on the way and meets its own object; a read is cut short or has a wrong byte; a list lacks
what was written a moment ago. Every operation is numbered, and the process can be killed before or behind each.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from waltzd.archive.store import Listed, is_object_name
from waltzd.disk.seam import Buffer
from waltzd.errors.operations import ObjectAbsent, ObjectExists, StoreUnavailable


class Killed(BaseException):
    """The process is gone: nothing may catch this."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often in a hundred."""

    lost: int = 0
    refused: int = 0
    late: int = 0
    repeated: int = 0
    torn: int = 0
    rotten: int = 0
    """Segments, key indexes and slots that are not written as they came."""
    lag: int = 0
    """A list shows nothing of the last so many operations."""


@dataclass
class _Object:
    data: bytes
    tag: str
    since: int


@dataclass
class FaultyStore:
    pick: random.Random = field(default_factory=lambda: random.Random(1))
    faults: Faults = field(default_factory=Faults)
    kill_at: int | None = None
    """Before the operation of this number; half a number more is behind it."""
    before_each: Callable[[], None] = lambda: None
    objects: dict[str, _Object] = field(default_factory=dict)
    operations: int = 0
    log: list[str] = field(default_factory=list)
    _late: list[tuple[int, str, bytes]] = field(default_factory=list)
    _tags: int = 0

    @property
    def place(self) -> str:
        return "a faulty store"

    def _begin(self, what: str) -> int:
        self.before_each()
        number, self.operations = self.operations, self.operations + 1
        self.log.append(what)
        for due, name, data in [late for late in self._late if late[0] <= number]:
            self._late.remove((due, name, data))
            if name not in self.objects:
                self._write(name, data)
        if self.kill_at == number:
            raise Killed
        return number

    def _end(self, number: int) -> None:
        if self.kill_at == number + 0.5:
            raise Killed

    def _happens(self, percent: int) -> bool:
        return percent > 0 and self.pick.randrange(100) < percent

    def _write(self, name: str, data: bytes) -> str:
        self._tags += 1
        self.objects[name] = _Object(data, f"tag-{self._tags}", self.operations)
        return self.objects[name].tag

    def _put(self, number: int, name: str, data: bytes) -> str:
        if self._happens(self.faults.refused):
            raise StoreUnavailable(f"{name}: simulated, and not written")
        if any(kind in name for kind in ("/segment/", "/key/", "/tail/")) and self._happens(self.faults.rotten):
            data = data[:-1] + bytes([data[-1] ^ 1])
        tag = self._write(name, data)
        self._end(number)
        if self._happens(self.faults.lost):
            raise StoreUnavailable(f"{name}: simulated, and written")
        return tag

    def put_new(self, name: str, data: Buffer) -> str:
        assert is_object_name(name)
        number, content = self._begin(f"put {name}"), bytes(data)
        if name in self.objects:
            raise ObjectExists(name)
        if self._happens(self.faults.late):
            self._late.append((number + self.pick.randrange(1, 12), name, content))
            raise StoreUnavailable(f"{name}: simulated, and written later")
        tag = self._put(number, name, content)
        if self._happens(self.faults.repeated):
            raise ObjectExists(name)
        return tag

    def put_if(self, name: str, data: Buffer, tag: str) -> str:
        number = self._begin(f"put if {name}")
        if self._found(name).tag != tag:
            raise ObjectExists(name)
        return self._put(number, name, bytes(data))

    def _found(self, name: str) -> _Object:
        if name not in self.objects:
            raise ObjectAbsent(name)
        return self.objects[name]

    def get_range(self, name: str, offset: int, size: int) -> bytes:
        number = self._begin(f"get {name}")
        data = bytearray(self._found(name).data[offset : offset + size])
        if self._happens(self.faults.refused):
            raise StoreUnavailable(f"{name}: simulated")
        if data and self._happens(self.faults.torn):
            at = self.pick.randrange(len(data))
            if self.pick.random() < 0.5:
                del data[at:]
            else:
                data[at] ^= 1 << self.pick.randrange(8)
        self._end(number)
        return bytes(data)

    def list(self, folder: str) -> list[Listed]:
        number = self._begin(f"list {folder}")
        known = [
            Listed(name, len(one.data), one.tag)
            for name, one in self.objects.items()
            if (not folder or name.startswith(folder + "/")) and one.since <= number - self.faults.lag
        ]
        self._end(number)
        return sorted(known)

    def head(self, name: str) -> Listed:
        number = self._begin(f"head {name}")
        found = self._found(name)
        self._end(number)
        return Listed(name, len(found.data), found.tag)

    def remove(self, name: str) -> None:
        number = self._begin(f"remove {name}")
        self.objects.pop(name, None)
        self._end(number)
