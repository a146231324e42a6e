"""The setting of how much of the archived log storages keep on their own disks. Pure.

The setting is a short text: `all`, a time as in `7d` or `12h`, or a size as in `500GB` or `2TiB`, which applies to each
replica of a partition. Only archived segments may be removed; the others are kept regardless of their size.
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
    """A parsed setting: at most one of the two limits is set; without a limit, everything is kept."""

    seconds: int | None = None
    """Age up to which records are kept; None for no limit of age."""
    size: int | None = None
    """Bytes of the newest segments of a replica that are kept; None for no limit of size."""


def keep_of(text: str) -> Keep | None:
    """Parse a setting; return None if it is invalid."""
    if text == ALL:
        return Keep()
    found = _KEEP.fullmatch(text)
    if found is None:
        return None
    number, unit = int(found[1]), found[2]
    if unit in _UNITS_OF_TIME:
        return Keep(seconds=number * _UNITS_OF_TIME[unit])
    return Keep(size=number * _UNITS_OF_SIZE[unit])
