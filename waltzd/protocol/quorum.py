"""The highest mark that a majority has reached. Pure.

Commits compute it from acknowledgements, recovery from the records that replicas hold, and operators' tools from the
replicas that would be left after a change.
"""

from __future__ import annotations

from collections.abc import Iterable

EMPTY = -1
"""Mark of a log without a transaction."""
EVERYTHING = 1 << 62
"""Mark of a replica of which nothing is known, and which may hold any id."""


def majority(members: int) -> int:
    """Return the number of members that are a majority."""
    assert members > 0
    return members // 2 + 1


def reached(marks: Iterable[int], members: int) -> int:
    """Return the highest mark that a majority of `members` has reached; a member without a mark has reached none."""
    standing = sorted(marks, reverse=True)
    assert len(standing) <= members
    needed = majority(members)
    return standing[needed - 1] if len(standing) >= needed else EMPTY


def decided(bounds: Iterable[tuple[int, int]]) -> int | None:
    """Return the mark that a majority has reached, given two bounds for the mark of each member; None if it is undecided.

    If the result for all lower bounds equals the result for all upper bounds, it is the result for all values between."""
    pairs = list(bounds)
    least = reached((low for low, _ in pairs), len(pairs))
    most = reached((high for _, high in pairs), len(pairs))
    return least if least == most else None
