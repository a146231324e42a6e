"""The arithmetic of majorities, against one that tries everything."""

from __future__ import annotations

from itertools import product

import pytest

from waltzd.protocol.quorum import EMPTY, EVERYTHING, decided, majority, reached


@pytest.mark.parametrize(("members", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_a_majority_is_more_than_half(members: int, needed: int) -> None:
    assert majority(members) == needed


def dumb_reached(marks: tuple[int, ...], members: int) -> int:
    best = EMPTY
    for mark in range(10):
        if sum(held >= mark for held in marks) * 2 > members:
            best = mark
    return best


@pytest.mark.parametrize("members", range(1, 6))
def test_what_a_majority_has_reached_is_what_counting_says(members: int) -> None:
    for present in range(members + 1):
        for marks in product(range(EMPTY, 4), repeat=present):
            assert reached(marks, members) == dumb_reached(marks, members)


@pytest.mark.parametrize("members", range(1, 6))
def test_a_decision_is_what_every_possible_truth_says(members: int) -> None:
    """Every assignment of marks and every set of silent replicas: the silent ones could hold anything."""
    for present in range(members + 1):
        for marks in product(range(EMPTY, 4), repeat=present):
            silent = members - present
            truths = {dumb_reached((*marks, *guess), members) for guess in product(range(EMPTY, 6), repeat=silent)}
            expected = truths.pop() if len(truths) == 1 else None
            bounds = [(mark, mark) for mark in marks] + [(EMPTY, EVERYTHING)] * silent
            assert decided(bounds) == expected, (marks, silent)


def test_the_example_of_the_silent_replica() -> None:
    """B is silent. If it holds 12, so does a quorum: we may not guess. Then C copies from A, and B changes nothing."""
    assert decided([(12, 12), (EMPTY, EVERYTHING), (9, 9)]) is None
    assert decided([(12, 12), (EMPTY, EVERYTHING), (12, 12)]) == 12
