"""The interface of an object store: named objects, each written as a whole.

It is small enough to simulate. Two implementations pass one suite of tests: `waltzd.archive.location` keeps objects
in a directory, `waltzd.archive.objects` in a bucket of S3, GCS or Azure. Calls block; callers run them on threads. A call
succeeds, or raises one of four errors:

- `StoreUnavailable`: no answer in time, or a fault of the store. A write may have happened.
- `StoreRefused`: the store rejected the call: no rights, no such bucket, or an operation that it does not support.
- `ObjectAbsent`, `ObjectExists`: the condition of the call does not hold, and nothing was written.

An object is whole or absent: readers never see a part of one. A list may lag behind writes; a read by name does not. So no
decision relies on a name being absent from a list.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from waltzd.disk.seam import Buffer
from waltzd.errors.operations import StoreRefused

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
NAME_LENGTH_MAX = 512


@dataclass(frozen=True, order=True)
class Listed:
    """An object in a store."""

    name: str
    size: int
    tag: str
    """Version of the object, which changes with its content. Tags of one store are compared for equality only."""


class Store(Protocol):
    """An object store. Names consist of letters, digits, dots, dashes and underscores, in parts that slashes separate."""

    @property
    def place(self) -> str:
        """Location of the store, for messages."""
        ...

    def put_new(self, name: str, data: Buffer) -> str:
        """Create an object, and return its tag. Raise `ObjectExists` if the name exists, which may be the work of this very
        call if an answer of the store was lost."""
        ...

    def put_if(self, name: str, data: Buffer, tag: str) -> str:
        """Replace the object that has this tag, and return its new tag. Raise `ObjectAbsent` if there is none,
        `ObjectExists` if its tag is another."""
        ...

    def get_range(self, name: str, offset: int, size: int) -> bytes:
        """Read `size` bytes, or fewer at the end of the object."""
        ...

    def list(self, folder: str) -> list[Listed]:
        """Return the objects below a folder, sorted by name; all objects for ""."""
        ...

    def head(self, name: str) -> Listed: ...

    def remove(self, name: str) -> None:
        """Remove an object if it exists. Only commands that a person has confirmed call this."""
        ...


def read_object(store: Store, name: str, limit: int) -> bytes:
    """Read a small object. Raise `ObjectAbsent` if there is none, `StoreRefused` if it has more than `limit` bytes."""
    found = store.get_range(name, 0, limit + 1)
    if len(found) > limit:
        raise StoreRefused(
            f"{name} in {store.place} has more than {limit} bytes, which no object of its kind has",
            not_done="nothing of it was used",
            next_step="find out what was put there; what Waltz writes is never so large",
        )
    return found


def is_object_name(name: str) -> bool:
    return len(name) <= NAME_LENGTH_MAX and _NAME.fullmatch(name) is not None
