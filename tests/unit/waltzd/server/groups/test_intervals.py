"""Numbers of ids as intervals, beside a dictionary of all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzd.server.groups.state import Interval, Intervals

IDS = st.integers(0, 20)
PUTS = st.lists(st.tuples(IDS, st.integers(0, 6), st.none() | st.integers(0, 2)))


def made(puts: list[tuple[int, int, int | None]]) -> tuple[Intervals, dict[int, int]]:
    found, twin = Intervals(), dict[int, int]()
    for first, more, value in puts:
        found.put(first, first + more, value)
        for id in range(first, first + more + 1):
            if value is None:
                twin.pop(id, None)
            else:
                twin[id] = value
    return found, twin


@pytest.mark.slow
@given(PUTS, IDS, IDS)
def test_they_hold_what_the_dictionary_holds(puts: list[tuple[int, int, int | None]], one: int, other: int) -> None:
    found, twin = made(puts)
    assert {id: value for first, last, value in found for id in range(first, last + 1)} == twin
    assert [found.get(id) for id in range(30)] == [twin.get(id) for id in range(30)]
    assert (found.first, found.last, found.ids) == (min(twin, default=None), max(twin, default=None), len(twin))
    first, last = sorted((one, other))
    within = {id: value for begin, end, value in found.within(first, last) for id in range(begin, end + 1)}
    assert within == {id: value for id, value in twin.items() if first <= id <= last}


@given(PUTS)
def test_there_are_as_few_as_there_can_be(puts: list[tuple[int, int, int | None]]) -> None:
    found, twin = made(puts)
    ends = [id for id, value in twin.items() if twin.get(id + 1) != value]
    assert len(found) == len(ends)
    again = Intervals()
    for id in sorted(twin, reverse=True):
        again.put(id, id, twin[id])
    assert again == found


def test_one_in_the_middle_is_cut_out_and_comes_back() -> None:
    found = Intervals()
    found.put(0, 9, 0)
    found.put(4, 5, None)
    assert list(found) == [Interval(0, 3, 0), Interval(6, 9, 0)]
    found.put(4, 5, 0)
    assert list(found) == [Interval(0, 9, 0)]
    found.clear()
    assert len(found) == 0
