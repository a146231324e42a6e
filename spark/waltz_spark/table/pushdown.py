"""What the filters of a query leave of a log: whole ranges of partitions, ids and headers that need not be read.

Spark hands over conditions of one column and a constant, all of which must hold. Those on `partition`, `txid` and `header`
are sets of integers, and a set of integers is a few ranges: intersect them, and what is left over is exact. Whatever is
understood here Spark does not check again, so what is not understood entirely must be given back. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waltz_spark.log.origin import Span

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
COLUMNS = ("partition", "txid", "header")


class Ranges:
    """A set of integers of 64 bits, as ranges in order that neither overlap nor touch. A value."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        joined: list[tuple[int, int]] = []
        for first, last in sorted((max(first, LOWEST), min(last, HIGHEST)) for first, last in ranges):
            if first > last:
                continue
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
            else:
                joined.append((first, last))
        self._ranges = tuple(joined)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self._ranges == other._ranges

    def __hash__(self) -> int:
        return hash(self._ranges)

    def __repr__(self) -> str:
        return f"Ranges({list(self._ranges)})"

    def __contains__(self, value: int) -> bool:
        return any(first <= value <= last for first, last in self._ranges)

    @cached_property
    def _bounds(self) -> NDArray[np.int64]:
        return np.array(self._ranges, np.int64).reshape(-1, 2)

    def hold(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """For each value, whether it is in here."""
        first, last = self._bounds.T
        if not len(first):
            return np.zeros(len(values), np.bool_)
        at = np.searchsorted(first, values, side="right") - 1
        is_in: NDArray[np.bool_] = (at >= 0) & (values <= last[at])
        return is_in

    def __and__(self, other: Ranges) -> Ranges:
        mine, theirs = self._ranges, other._ranges
        out: list[tuple[int, int]] = []
        i = j = 0
        while i < len(mine) and j < len(theirs):
            out.append((max(mine[i][0], theirs[j][0]), min(mine[i][1], theirs[j][1])))
            if mine[i][1] < theirs[j][1]:
                i += 1
            else:
                j += 1
        return Ranges(out)

    def inverse(self) -> Ranges:
        out, next_ = [], LOWEST
        for first, last in self._ranges:
            out.append((next_, first - 1))
            next_ = last + 1
        return Ranges([*out, (next_, HIGHEST)])

    def within(self, span: Span, *, nearer: int) -> tuple[Span, ...]:
        """What of a span is worth reading: pieces that are nearer to each other than so many ids are read as one."""
        pieces: list[Span] = []
        for first, last in self & Ranges([(span.first, span.last)]):
            if pieces and first - pieces[-1].last <= nearer:
                pieces[-1] = Span(pieces[-1].first, last)
            else:
                pieces.append(Span(first, last))
        return tuple(pieces)


EVERYTHING = Ranges([(LOWEST, HIGHEST)])
NOTHING = Ranges([])


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Which records a query can see at all."""

    partition: Ranges = field(default=EVERYTHING)
    txid: Ranges = field(default=EVERYTHING)
    header: Ranges = field(default=EVERYTHING)

    def narrowed(self, condition: object) -> Filters | None:
        """With one more condition, an object of a class of `pyspark.sql.datasource`; None when it is not understood."""
        column, values = _column(condition), _values(condition)
        if column is None or values is None:
            return None
        mine: Ranges = getattr(self, column)
        return replace(self, **{column: mine & values})


UNFILTERED = Filters()


def _column(condition: object) -> str | None:
    """Of which of our columns the condition speaks. Names come as the user wrote the schema, in any case."""
    path: tuple[str, ...] = getattr(getattr(condition, "child", condition), "attribute", ())
    name = path[0].lower() if len(path) == 1 else ""
    return name if name in COLUMNS else None


def _values(condition: object) -> Ranges | None:
    """For which values of its column it holds. No column of ours is ever null."""
    kind, value = type(condition).__name__, getattr(condition, "value", None)
    if kind == "Not":
        inner = _values(getattr(condition, "child", None))
        return None if inner is None else inner.inverse()
    if kind in ("IsNull", "IsNotNull"):
        return NOTHING if kind == "IsNull" else EVERYTHING
    if kind == "In":
        listed = [each for each in value if _is_whole(each)] if isinstance(value, tuple | list) else []
        return Ranges([(each, each) for each in listed]) if value and len(listed) == len(value) else None
    if not isinstance(value, int) or not _is_whole(value):
        return None
    match kind:
        case "EqualTo" | "EqualNullSafe":
            return Ranges([(value, value)])
        case "GreaterThan":
            return Ranges([(value + 1, HIGHEST)])
        case "GreaterThanOrEqual":
            return Ranges([(value, HIGHEST)])
        case "LessThan":
            return Ranges([(LOWEST, value - 1)])
        case "LessThanOrEqual":
            return Ranges([(LOWEST, value)])
        case _:
            return None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
