"""Filters of a query as ranges of partitions, ids, headers and times that need not be read. Pure.

Spark passes conditions on one column and a constant, all of which must hold. Conditions on `partition`, `txid` and
`header` are sets of integers, which are a few ranges; their intersection is exact. Spark does not check accepted
conditions again, so a condition that is not fully understood must be returned to it.

Times are microseconds. A record without a time has a special number below all times, which only `IS NULL` and null-safe
conditions match. Times never fall within a partition, so ranges of times are ranges of ids there; the origin finds their
bounds (`Origin.first_at`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from waltz_spark.log.origin import Span
from waltzd.format.record import NO_TIME
from waltzd.protocol.locks import marked_lock

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1
NUMBERS = ("partition", "txid", "header")
LOCK = "lock"
_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)


class Ranges:
    """A set of 64-bit integers, as sorted ranges that neither overlap nor touch. A value."""

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
        """Return for each value whether it is in the set."""
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
        """Return the parts of a span to read; parts that are at most `nearer` ids apart are joined."""
        pieces: list[Span] = []
        firsts, lasts = self._bounds.T
        start = int(lasts.searchsorted(span.first))
        stop = int(firsts.searchsorted(span.last, "right")) if span.count else start
        for first, last in ((max(first, span.first), min(last, span.last)) for first, last in self._ranges[start:stop]):
            if pieces and first - pieces[-1].last <= nearer:
                pieces[-1] = Span(pieces[-1].first, last)
            else:
                pieces.append(Span(first, last))
        return tuple(pieces)


EVERYTHING = Ranges([(LOWEST, HIGHEST)])
NOTHING = Ranges([])
WITHOUT_TIME, TIMES = Ranges([(NO_TIME, NO_TIME)]), Ranges([(0, HIGHEST)])


@dataclass(frozen=True, kw_only=True)
class Filters:
    """The conditions that all rows of a query must meet."""

    partition: Ranges = field(default=EVERYTHING)
    txid: Ranges = field(default=EVERYTHING)
    header: Ranges = field(default=EVERYTHING)
    time: Ranges = field(default=EVERYTHING)
    lock: int | None = None
    """64 bits of the lock that all rows marked; None for any row. An option sets it: Spark pushes no condition on an
    array."""

    def narrowed(self, condition: object) -> Filters | None:
        """Return the filters with one more condition of `pyspark.sql.datasource`; None if it is not understood."""
        column = _column(condition)
        values = _times(condition) if column == "time" else _values(condition)
        if not column or values is None:
            return None
        mine: Ranges = getattr(self, column)
        changed: dict[str, Any] = {column: mine & values}
        return replace(self, **changed)


UNFILTERED = Filters()


def filters_of(options: Mapping[str, str]) -> Filters:
    """Parse the option `lock`; names are in lower case."""
    text = options.get(LOCK)
    if text is None:
        return UNFILTERED
    lock = marked_lock(text)
    return Filters(lock=lock if isinstance(lock, int) else lock.hash)


def _column(condition: object) -> str:
    """Return the filterable column of a condition, in lower case; empty for any other column."""
    path: tuple[str, ...] = getattr(getattr(condition, "child", condition), "attribute", ())
    name = path[0].lower() if len(path) == 1 else ""
    return name if name in (*NUMBERS, "time") else ""


def _times(condition: object) -> Ranges | None:
    """Return the times for which a condition holds; None if it is not understood."""
    kind, child = type(condition).__name__, getattr(condition, "child", None)
    inner = type(child).__name__ if kind == "Not" else kind
    if inner == "IsNull":
        return WITHOUT_TIME if kind == inner else TIMES
    if inner == "IsNotNull":
        return TIMES if kind == inner else WITHOUT_TIME
    found = _values(condition, _microseconds)
    return found if found is None or inner == "EqualNullSafe" else found & TIMES  # other conditions do not hold for null


def _values(condition: object, number: Callable[[object], int | None] | None = None) -> Ranges | None:
    """Return the numbers for which a condition on a column without nulls holds; None if it is not understood.

    `number` converts a constant to a number; None if it is not one."""
    number = number or _whole
    kind, value = type(condition).__name__, getattr(condition, "value", None)
    if kind == "Not":
        inner = _values(getattr(condition, "child", None), number)
        return None if inner is None else inner.inverse()
    if kind in ("IsNull", "IsNotNull"):
        return NOTHING if kind == "IsNull" else EVERYTHING
    if kind == "In":
        listed = [found for each in value if (found := number(each)) is not None] if isinstance(value, tuple | list) else []
        return Ranges([(each, each) for each in listed]) if value and len(listed) == len(value) else None
    found = number(value)
    if found is None:
        return None
    match kind:
        case "EqualTo" | "EqualNullSafe":
            return Ranges([(found, found)])
        case "GreaterThan":
            return Ranges([(found + 1, HIGHEST)])
        case "GreaterThanOrEqual":
            return Ranges([(found, HIGHEST)])
        case "LessThan":
            return Ranges([(LOWEST, found - 1)])
        case "LessThanOrEqual":
            return Ranges([(LOWEST, found)])
        case _:
            return None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _microseconds(value: object) -> int | None:
    """Return microseconds since 1970; None for anything but a datetime with a zone."""
    return (value - _EPOCH) // _MICROSECOND if isinstance(value, datetime) and value.tzinfo is not None else None
