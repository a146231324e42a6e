"""Crash everywhere: the short version of `./dev crash-test`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.crash import run_seed

SLICES, WORKLOADS = 10, 4
BATCH_SLICES, BATCH_WORKLOADS, EVERY = 8, 3, 3
SHORT = 1
"""So many slices of each are part of every run of the tests."""


def slices(number: int) -> list[Any]:
    return [*range(SHORT), *(pytest.param(part, marks=pytest.mark.long) for part in range(SHORT, number))]


@pytest.mark.parametrize("part", slices(SLICES))
def test_nothing_acknowledged_is_lost_in_any_crash(part: int) -> None:
    crashes = sum(run_seed(seed).crashes for seed in range(part * WORKLOADS, (part + 1) * WORKLOADS))
    assert crashes > 100 * WORKLOADS / 2


def test_a_seed_repeats_itself() -> None:
    assert run_seed(7) == run_seed(7)


@pytest.mark.parametrize("part", slices(BATCH_SLICES))
def test_no_batch_is_lost_or_split_in_any_crash(part: int) -> None:
    seeds = range(part * BATCH_WORKLOADS, (part + 1) * BATCH_WORKLOADS)
    assert sum(run_seed(seed, every=EVERY, version=1).crashes for seed in seeds) > 0
