"""A store of objects as the archive uses it: bytes under names, each written once, and few ways to ask for them.

The port is small enough to simulate. Two adapters pass one contract: `waltzd.archive.local` keeps objects in a directory of
this machine, `waltzd.archive.objects` in a bucket of S3, GCS or Azure. Calls are plain and blocking; the callers put them
on threads. Every call ends with one of four errors, or succeeds:

- `StoreUnavailable`: no answer in time, or a fault of the store. What was to be written may be there all the same.
- `StoreRefused`: the store answered that it will not: no rights, no such bucket, a store that cannot do what is needed.
- `ObjectAbsent`, `ObjectExists`: the condition of the call does not hold, and nothing was written.

An object is whole or absent: no reader meets a half of one. A list may lag behind what was written; a read of a name does
not. So nothing is ever decided by a name that a list lacks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from waltzd.disk.seam import Buffer
from waltzd.errors import StoreRefused

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
NAME_LENGTH_MAX = 512


@dataclass(frozen=True, order=True)
class Listed:
    """An object that is there."""

    name: str
    size: int
    tag: str
    """Changes with the content. Compared for equality only, and only within one store."""


class Store(Protocol):
    """Names are parts with slashes in between, of letters, digits, dots, dashes and underscores."""

    @property
    def place(self) -> str:
        """For people: where this is."""
        ...

    def put_new(self, name: str, data: Buffer) -> str:
        """Make an object that was not there, and return its tag. `ObjectExists` when one of that name is there, which may
        be this call's own after an answer that was lost on the way."""
        ...

    def put_if(self, name: str, data: Buffer, tag: str) -> str:
        """Replace the object that has this tag, and return the new one. `ObjectAbsent` without any, `ObjectExists` when
        another one stands there."""
        ...

    def get_range(self, name: str, offset: int, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the object."""
        ...

    def list(self, folder: str) -> list[Listed]:
        """All objects below a folder, or all with an empty one, sorted by name."""
        ...

    def head(self, name: str) -> Listed: ...

    def remove(self, name: str) -> None:
        """Nothing happens where there is none. Only what a person has confirmed is removed."""
        ...


def read_object(store: Store, name: str, limit: int) -> bytes:
    """A small object at once. `ObjectAbsent` without one; one of more than `limit` bytes is refused."""
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
