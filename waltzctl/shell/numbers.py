"""Partitions as people type and read them: `0-3,7`, and whether there are any of these numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from waltzd.cluster.assignment import spell_numbers
from waltzd.errors import BadArgument, NoSuchPartition

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


def check_partitions(numbers: Iterable[int], count: int, *, not_done: str = "nothing was changed") -> None:
    """Raises for a number that is not below `count`, the partitions of the cluster."""
    for number in numbers:
        if number >= count:
            raise NoSuchPartition(
                f"there is no partition {number}; the cluster has {count}, from 0 on",
                not_done=not_done,
                next_step="`waltzctl partition list` shows them",
                partition=number,
            )


def spell(numbers: Iterable[int], one: str = "", more: str = "") -> str:
    """`partitions 0-3 are`: with the verb for one of them, or for more."""
    found = sorted(numbers)
    noun, verb = ("partition", one) if len(found) == 1 else ("partitions", more)
    return " ".join(word for word in (noun, spell_numbers(found), verb) if word)
