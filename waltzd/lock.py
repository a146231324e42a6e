"""Locks as applications name them, and as the log knows them: 64 bits and a mode. Pure.

READ is checked: "my decision depends on this". WRITE is checked and marks: "I read this and change it". APPEND marks
without being checked: "I change this whatever it is", so appenders never conflict with each other, and readers notice.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from operator import index

from waltzd.errors import BadArgument


class Mode(enum.IntEnum):
    READ = 1
    WRITE = 2
    APPEND = 3


@dataclass(frozen=True)
class Lock:
    name: str
    id: int
    mode: Mode = Mode.WRITE

    def __post_init__(self) -> None:
        if type(self.mode) is not Mode:
            raise BadArgument(f"the mode of a lock is READ, WRITE or APPEND, not {self.mode!r}")

    @property
    def hash(self) -> int:
        return lock_hash(self.name, self.id)


def read_lock(name: str, id: int = 0) -> Lock:
    return Lock(name, id, Mode.READ)


def write_lock(name: str, id: int = 0) -> Lock:
    return Lock(name, id, Mode.WRITE)


def append_lock(name: str, id: int = 0) -> Lock:
    return Lock(name, id, Mode.APPEND)


@lru_cache(maxsize=1 << 16)
def lock_hash(name: str, id: int) -> int:
    """The first 8 bytes, big-endian, of BLAKE2b over the id (8 bytes, big-endian) and the UTF-8 of the name.

    Any client in any language must compute the same, or two of them do not see each other's locks."""
    try:
        raw = (index(id) & (1 << 64) - 1).to_bytes(8, "big") + name.encode()
    except (TypeError, AttributeError, UnicodeEncodeError) as error:
        raise BadArgument(f"a lock has a name of text and an integer, not {name!r} and {id!r}") from error
    return int.from_bytes(blake2b(raw, digest_size=8).digest(), "big")
