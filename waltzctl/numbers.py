"""Partitions as people type them: `0-3,7`."""

from __future__ import annotations

import re

from waltzd.errors import BadArgument

RANGE_MAX = 1 << 16
_NUMBERS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


def partitions_of(text: str) -> list[int]:
    """`0-3,7` as [0, 1, 2, 3, 7]; each once, in order."""
    found: dict[int, None] = {}
    for part in text.split(","):
        given = _NUMBERS.fullmatch(part.strip())
        if given is None:
            raise BadArgument(f"{part.strip()!r} is no partition and no range of partitions", next_step="write it as 0-3,7")
        numbers = range(int(given[1]), int(given[2] or given[1]) + 1)
        if not numbers or numbers[-1] >= RANGE_MAX:
            raise BadArgument(f"{part.strip()!r} is no range of partitions", next_step="write it as 0-3,7")
        found.update(dict.fromkeys(numbers))
    return list(found)
