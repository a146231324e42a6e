"""A sparse map from ids to small numbers, stored as intervals of consecutive ids with an equal number. Pure.

An id without a number takes no memory. Adjacent intervals never have equal numbers, so the representation is minimal,
and maps with equal contents compare equal.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple


class Interval(NamedTuple):
    first: int
    last: int
    value: int


class Intervals:
    __slots__ = ("_firsts", "_lasts", "_values")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self._values: list[int] = []

    def __len__(self) -> int:
        """Return the number of intervals."""
        return len(self._firsts)

    def __iter__(self) -> Iterator[Interval]:
        return map(Interval, self._firsts, self._lasts, self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def first(self) -> int | None:
        """Return the lowest id that has a number; None if there is none."""
        return self._firsts[0] if self._firsts else None

    @property
    def last(self) -> int | None:
        return self._lasts[-1] if self._lasts else None

    @property
    def ids(self) -> int:
        """Return how many ids have a number."""
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    def get(self, id: int) -> int | None:
        at = bisect_right(self._firsts, id) - 1
        return self._values[at] if at >= 0 and id <= self._lasts[at] else None

    def within(self, first: int, last: int) -> Iterator[Interval]:
        """Yield the intervals between two ids, clipped at both ends."""
        at = bisect_left(self._lasts, first)
        while at < len(self._firsts) and self._firsts[at] <= last:
            yield Interval(max(first, self._firsts[at]), min(last, self._lasts[at]), self._values[at])
            at += 1

    def put(self, first: int, last: int, value: int | None) -> None:
        """Set the number of all ids from `first` to `last`; None removes it."""
        assert 0 <= first <= last
        if not self._lasts or first > self._lasts[-1]:  # most ids come in their order
            self._append(first, last, value)
            return
        at = bisect_right(self._firsts, first) - 1
        if at >= 0 and last <= self._lasts[at] and value == self._values[at]:
            return
        begin, end = bisect_left(self._lasts, first), bisect_right(self._firsts, last)
        new: list[tuple[int, int, int]] = []
        if begin < end and self._firsts[begin] < first:
            new.append((self._firsts[begin], first - 1, self._values[begin]))
        if value is not None:
            new.append((first, last, value))
        if begin < end and self._lasts[end - 1] > last:
            new.append((last + 1, self._lasts[end - 1], self._values[end - 1]))
        if begin > 0 and self._lasts[begin - 1] == first - 1:  # a neighbour may have the same number
            begin -= 1
            new.insert(0, (self._firsts[begin], self._lasts[begin], self._values[begin]))
        if end < len(self._firsts) and self._firsts[end] == last + 1:
            new.append((self._firsts[end], self._lasts[end], self._values[end]))
            end += 1
        joined: list[tuple[int, int, int]] = []
        for one in new:
            if joined and joined[-1][1] == one[0] - 1 and joined[-1][2] == one[2]:
                joined[-1] = joined[-1][0], one[1], one[2]
            else:
                joined.append(one)
        self._firsts[begin:end] = [one[0] for one in joined]
        self._lasts[begin:end] = [one[1] for one in joined]
        self._values[begin:end] = [one[2] for one in joined]

    def _append(self, first: int, last: int, value: int | None) -> None:
        if value is None:
            return
        if self._lasts and self._lasts[-1] == first - 1 and self._values[-1] == value:
            self._lasts[-1] = last
            return
        self._firsts.append(first)
        self._lasts.append(last)
        self._values.append(value)

    def clear(self) -> None:
        self._firsts.clear()
        self._lasts.clear()
        self._values.clear()
