"""Ranges against sets of integers, filters against what they say of each number."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
)
from waltz_spark.log.origin import Span
from waltz_spark.table.pushdown import EVERYTHING, HIGHEST, LOWEST, NOTHING, UNFILTERED, Ranges

SMALL = range(-12, 13)
PAIRS = st.lists(st.tuples(st.integers(-10, 10), st.integers(-10, 10)))


def listed(ranges: Ranges) -> set[int]:
    return {value for value in SMALL if value in ranges}


@given(PAIRS)
def test_ranges_are_the_set_of_what_is_within(pairs: list[tuple[int, int]]) -> None:
    ranges = Ranges(pairs)
    assert listed(ranges) == {value for first, last in pairs for value in range(first, last + 1)}
    bounds = list(ranges)
    assert all(first <= last for first, last in bounds)
    assert all(last + 1 < first for (_, last), (first, _) in itertools.pairwise(bounds))


@given(PAIRS, PAIRS)
def test_what_both_have(ones: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    assert listed(Ranges(ones) & Ranges(others)) == listed(Ranges(ones)) & listed(Ranges(others))


@given(PAIRS)
def test_the_inverse_and_many_at_once(pairs: list[tuple[int, int]]) -> None:
    ranges = Ranges(pairs)
    assert listed(ranges.inverse()) == set(SMALL) - listed(ranges)
    assert ranges.inverse().inverse() == ranges
    assert ranges.hold(np.array(SMALL)).tolist() == [value in ranges for value in SMALL]


def test_the_ends_of_all_numbers() -> None:
    assert EVERYTHING.inverse() == NOTHING
    assert NOTHING.inverse() == EVERYTHING
    assert EVERYTHING.hold(np.array([LOWEST, 0, HIGHEST])).all()
    assert Ranges([(HIGHEST, HIGHEST)]).inverse() == Ranges([(LOWEST, HIGHEST - 1)])
    assert Ranges([(HIGHEST + 1, HIGHEST + 5)]) == NOTHING


@given(PAIRS, st.integers(0, 6), st.integers(-10, 10), st.integers(-10, 10))
def test_what_is_read_of_a_span_holds_what_is_wanted_and_little_else(
    pairs: list[tuple[int, int]], nearer: int, first: int, last: int
) -> None:
    wanted = listed(Ranges(pairs)) & set(range(first, last + 1))
    pieces = Ranges(pairs).within(Span(first, last), nearer=nearer)
    assert (
        wanted <= {value for piece in pieces for value in range(piece.first, piece.last + 1)} <= set(range(first, last + 1))
    )
    assert all({piece.first, piece.last} <= wanted for piece in pieces)
    gaps = [after.first - before.last for before, after in itertools.pairwise(pieces)]
    assert all(gap > nearer for gap in gaps)


CONDITIONS: list[tuple[Filter, Callable[[int], bool]]] = [
    (EqualTo(("txid",), 3), lambda value: value == 3),
    (EqualNullSafe(("txid",), 3), lambda value: value == 3),
    (GreaterThan(("txid",), 3), lambda value: value > 3),
    (GreaterThanOrEqual(("TXID",), 3), lambda value: value >= 3),
    (LessThan(("txid",), 3), lambda value: value < 3),
    (LessThanOrEqual(("txid",), 3), lambda value: value <= 3),
    (In(("txid",), (3, -5, 4)), lambda value: value in (3, -5, 4)),
    (IsNull(("txid",)), lambda _: False),
    (IsNotNull(("txid",)), lambda _: True),
]


@pytest.mark.parametrize(("condition", "holds"), CONDITIONS)
def test_a_condition_leaves_what_it_says(condition: Filter, holds: Callable[[int], bool]) -> None:
    found, opposite = UNFILTERED.narrowed(condition), UNFILTERED.narrowed(Not(condition))
    assert found is not None
    assert opposite is not None
    assert listed(found.txid) == {value for value in SMALL if holds(value)}
    assert listed(opposite.txid) == {value for value in SMALL if not holds(value)}
    assert found.partition == found.header == EVERYTHING


def test_conditions_hold_together_each_on_its_column() -> None:
    filters = UNFILTERED
    for condition in (
        GreaterThan(("txid",), 3),
        LessThan(("txid",), 7),
        EqualTo(("partition",), 2),
        In(("header",), (1, 9)),
    ):
        narrowed = filters.narrowed(condition)
        assert narrowed is not None
        filters = narrowed
    assert filters.txid == Ranges([(4, 6)])
    assert filters.partition == Ranges([(2, 2)])
    assert filters.header == Ranges([(1, 1), (9, 9)])


@pytest.mark.parametrize(
    "condition",
    [
        EqualTo(("seq",), 3),
        EqualTo(("txid", "inner"), 3),
        EqualTo(("txid",), None),
        EqualTo(("txid",), 3.5),
        EqualTo(("txid",), True),
        EqualTo(("txid",), "3"),
        EqualNullSafe(("txid",), None),
        In(("txid",), (3, None)),
        In(("txid",), ()),
        StringContains(("data",), "x"),
        Not(EqualTo(("seq",), 3)),
        Not(In(("txid",), (3, None))),
    ],
)
def test_what_is_not_understood_is_given_back(condition: Any) -> None:
    assert UNFILTERED.narrowed(condition) is None
