"""What of the archived log storages keep on their own disks: everything, a time, or a size. Pure.

A policy is a short text: `all`, a time as in `7d` or `12h`, or a size as in `500GB` or `2TiB`, which counts for each
replica of a partition. It says only what may go of what is archived already: the rest stays, however much that is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ALL = "all"
_UNITS_OF_TIME = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_UNITS_OF_SIZE = {
    name: base ** (power + 1)
    for base, ending in ((1000, "B"), (1024, "iB"))
    for power, name in enumerate(letter + ending for letter in "KMGTP")
}
_KEEP = re.compile(rf"([1-9][0-9]{{0,5}})({'|'.join([*_UNITS_OF_TIME, *_UNITS_OF_SIZE])})")


@dataclass(frozen=True)
class Keep:
    """At most one of the two is there; neither means everything."""

    seconds: int | None = None
    """What was written in the last so many seconds."""
    size: int | None = None
    """The newest segments of a replica, up to so many bytes."""


def keep_of(text: str) -> Keep | None:
    """What a policy means; None where it is none."""
    if text == ALL:
        return Keep()
    found = _KEEP.fullmatch(text)
    if found is None:
        return None
    number, unit = int(found[1]), found[2]
    if unit in _UNITS_OF_TIME:
        return Keep(seconds=number * _UNITS_OF_TIME[unit])
    return Keep(size=number * _UNITS_OF_SIZE[unit])


def is_keep_local(text: str) -> bool:
    return keep_of(text) is not None
