"""One arithmetic fact: the highest mark that a majority has reached. Pure.

Committing asks it of acknowledgements, recovery of what replicas hold, safe operations of what would be left.
"""

from __future__ import annotations

from collections.abc import Iterable

EMPTY = -1
"""The mark of a log without a transaction."""
EVERYTHING = 1 << 62
"""The mark of a replica that may hold anything, for all we know."""


def majority(members: int) -> int:
    """How many of so many members make one."""
    assert members > 0
    return members // 2 + 1


def reached(marks: Iterable[int], members: int) -> int:
    """The highest mark that a majority of `members` has reached; a member without a mark has reached nothing."""
    standing = sorted(marks, reverse=True)
    assert len(standing) <= members
    needed = majority(members)
    return standing[needed - 1] if len(standing) >= needed else EMPTY


def decided(bounds: Iterable[tuple[int, int]]) -> int | None:
    """The mark that a majority has reached, when each member's mark is only known to lie between two bounds; None as long
    as more than one answer is possible.

    Assume that all members hold the least, then that all hold the most: if the answers agree, so does any truth."""
    pairs = list(bounds)
    least = reached((low for low, _ in pairs), len(pairs))
    most = reached((high for _, high in pairs), len(pairs))
    return least if least == most else None
