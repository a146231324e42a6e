"""Which cases are tried how often."""

from __future__ import annotations

from typing import Any

from tests.tiers import tiers


def marked(cases: list[Any], name: str) -> list[Any]:
    return [case.values[0] for case in cases if hasattr(case, "marks") and [mark.name for mark in case.marks] == [name]]


def test_each_case_is_in_one_tier_and_those_of_the_quick_one_are_spread() -> None:
    found = tiers(range(12), quick=3, short=6)
    assert [case for case in found if isinstance(case, int)] == [0, 4, 8]
    assert marked(found, "slow") == [2, 6, 10]
    assert marked(found, "long") == [1, 3, 5, 7, 9, 11]


def test_without_a_short_version_nothing_is_long() -> None:
    found = tiers("abc", quick=0)
    assert marked(found, "slow") == ["a", "b", "c"]
