"""How often each of many cases is tried: some by `./dev test --quick`, more by `./dev test`, all by `./dev test --all`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest


def tiers(cases: Iterable[Any], *, quick: int, short: int | None = None) -> list[Any]:
    """Return the cases as parameters of a test, of which all but `quick` are marked `slow`, and all but `short` `long`.

    Those without a mark are spread evenly, so that a sweep is tried from end to end in every tier.
    """
    every = list(cases)
    in_quick, in_short = _spread(quick, len(every)), _spread(len(every) if short is None else short, len(every))
    return [
        case if at in in_quick else pytest.param(case, marks=pytest.mark.slow if at in in_short else pytest.mark.long)
        for at, case in enumerate(every)
    ]


def in_turns(cases: Iterable[Any], *, of: int) -> list[Any]:
    """Return the cases as parameters of a test, of which this run takes one of `of` parts; the others are marked `long`.

    Which part it is comes from `WALTZ_SEED`, so that each case has its turn within some runs.
    """
    turn = int(os.environ.get("WALTZ_SEED", "0")) % of
    return [case if at % of == turn else pytest.param(case, marks=pytest.mark.long) for at, case in enumerate(cases)]


def _spread(count: int, size: int) -> set[int]:
    return {number * size // count for number in range(count)}
