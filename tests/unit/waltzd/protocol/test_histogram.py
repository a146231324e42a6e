"""Histograms: what they count, what they say of it, and that they survive arithmetic and the wire."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzd.errors.operations import BadFrame
from waltzd.protocol.histogram import BOUNDS, Durations, Histogram

SECONDS = st.lists(st.floats(min_value=0, max_value=100), min_size=1, max_size=50)


def of(*seconds: float) -> Histogram:
    found = Histogram()
    for one in seconds:
        found = found.more(one)
    return found


def test_the_bounds_are_those_that_others_know() -> None:
    """They are part of the wire: a change of one is another wire."""
    assert len(BOUNDS) == 31
    assert (BOUNDS[0], BOUNDS[5], BOUNDS[-2], BOUNDS[-1]) == (50e-6, 500e-6, 32.0, 60.0)
    ratios = [upper / lower for lower, upper in pairwise(BOUNDS)]
    assert 1.5 < min(ratios) <= max(ratios) < 1.9


@given(SECONDS)
def test_both_ways_of_counting_agree(seconds: list[float]) -> None:
    gathered = Durations()
    for one in seconds:
        gathered.add(one)
    assert gathered.histogram() == of(*seconds)
    assert gathered.histogram().count == len(seconds)
    assert math.isclose(gathered.histogram().seconds, sum(seconds))


def test_many_that_took_as_long_are_counted_at_once() -> None:
    assert of(*[0.25] * 8) == Histogram().more(0.25, 8)
    assert Histogram().more(0.25, 8).mean == 0.25
    assert Histogram().mean is None


@given(SECONDS, st.floats(min_value=0, max_value=1))
def test_a_quantile_is_in_the_range_of_the_true_one(seconds: list[float], q: float) -> None:
    true = sorted(seconds)[max(0, math.ceil(q * len(seconds)) - 1)]
    said = of(*seconds).quantile(q)
    assert said is not None
    upper = next((bound for bound in BOUNDS if bound >= true), BOUNDS[-1])
    lower = max((bound for bound in BOUNDS if bound < true), default=0.0)
    assert lower <= said <= upper or math.isclose(said, lower)


@given(SECONDS)
def test_quantiles_rise(seconds: list[float]) -> None:
    found = of(*seconds)
    said = [found.quantile(step / 20) for step in range(21)]
    assert said == sorted(said, key=lambda one: one or 0.0)


def test_nothing_counted_has_no_quantile_and_the_last_bound_is_all_that_is_known_beyond_it() -> None:
    assert Histogram().quantile(0.5) is None
    assert of(1000.0, 2000.0).quantile(0.5) == BOUNDS[-1]
    assert of(0.0).quantile(1.0) == BOUNDS[0], "what took no time is in the first range"
    assert of(*[0.1] * 4).quantile(0.5) == pytest.approx((0.08 + 0.125) / 2)


@pytest.mark.slow
@given(SECONDS, SECONDS)
def test_what_is_added_can_be_taken_away(before: list[float], since: list[float]) -> None:
    both = of(*before).plus(of(*since))
    assert both.minus(of(*before)).counts == of(*since).counts
    assert both.minus(of(*before)).seconds == pytest.approx(sum(since), abs=1e-6)


def test_a_count_that_began_again_is_all_new() -> None:
    assert of(0.1, 0.2).minus(of(0.1, 0.1)) == of(0.1, 0.2)


@given(SECONDS)
def test_it_survives_the_wire(seconds: list[float]) -> None:
    found = of(*seconds)
    assert Histogram.decode(found.encode(), found.seconds) == found
    assert Histogram.decode((), 0.0) == Histogram()
    assert Histogram().encode() == ()


@pytest.mark.parametrize(
    ("counts", "seconds"),
    [
        ((1,), 1.0),
        ((1,) * 33, 1.0),
        ((-1, *[0] * 31), 1.0),
        ((1, *[0] * 31), -1.0),
        ((1, *[0] * 31), math.nan),
    ],
)
def test_what_is_no_histogram_is_refused(counts: tuple[int, ...], seconds: float) -> None:
    with pytest.raises(BadFrame):
        Histogram.decode(counts, seconds)
