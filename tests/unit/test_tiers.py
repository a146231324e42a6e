"""Which cases are tried how often."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.conftest import HEAVY, TESTS
from tests.tiers import in_turns, tiers, together


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


@pytest.mark.parametrize("seed", [0, 1, 2, 7])
def test_cases_in_turns_are_all_tried_within_some_runs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for run in range(3):
        monkeypatch.setenv("WALTZ_SEED", str(seed + run))
        found = in_turns(range(7), of=3)
        now = [case for case in found if isinstance(case, int)]
        assert sorted([*now, *marked(found, "long")]) == list(range(7))
        taken += now
    assert sorted(taken) == list(range(7))


def test_cases_together_are_one_test_of_each_tier_and_the_case_that_fails_is_named() -> None:
    tried: list[tuple[int, str]] = []

    @together("case", range(12), quick=3, short=6)
    def test(case: int, fixture: str) -> None:
        tried.append((case, fixture))
        assert case != 8

    (mark,) = test.pytestmark
    assert [[one.name for one in part.marks] for part in mark.args[1]] == [[], ["slow"], ["long"]]
    assert [part.values[0] for part in mark.args[1]] == [[0, 4, 8], [2, 6, 10], [1, 3, 5, 7, 9, 11]]
    with pytest.raises(AssertionError) as caught:
        test(case=[0, 8, 4], fixture="x")
    assert (tried, caught.value.__notes__) == ([(0, "x"), (8, "x")], ["in the case case = 8"])


def test_files_that_are_said_to_be_slow_are_there() -> None:
    """In the table of CONTRIBUTING.md, and where the tests are given to workers."""
    page = (TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(\w+/[\w/]+\.py)` \| \d+ \|", page, re.M)
    assert len(told) > 15
    assert [name for name in (*told, *HEAVY) if not (TESTS / name).is_file()] == []
