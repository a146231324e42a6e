"""How often each of many cases is tried: some by `./dev test --quick`, more by `./dev test`, all by `./dev test --all`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def tiers(cases: Iterable[Any], *, quick: int, short: int | None = None) -> list[Any]:
    """Return the cases as parameters of a test, of which all but `quick` are marked `slow`, and all but `short` `long`.

    Those without a mark are spread evenly, so that a sweep is tried from end to end in every tier.
    """
    every = list(cases)
    return [
        pytest.param(case, marks=getattr(pytest.mark, tier)) if tier else case
        for case, tier in zip(every, _tiers(len(every), quick, short), strict=True)
    ]


def together(
    name: str, cases: Iterable[Any], *, quick: int | None = None, short: int | None = None
) -> Callable[[Callable[..., None]], Any]:
    """Run a test with one case after the other, as one test for each tier: `tiers` for cases that take next to no time.

    Each worker collects every test, and each test is reported. The case that fails is told in a note.
    """
    every = list(cases)
    tiers_of = _tiers(len(every), len(every) if quick is None else quick, short)
    parts = {
        part: [case for case, tier in zip(every, tiers_of, strict=True) if tier == part] for part in ("", "slow", "long")
    }
    given = [
        pytest.param(part, id=f"{len(part)}-cases", marks=[getattr(pytest.mark, tier)] if tier else [])
        for tier, part in parts.items()
        if part
    ]

    def decorate(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for case in fixtures.pop(name):
                try:
                    test(**{name: case}, **fixtures)
                except BaseException as error:
                    error.add_note(f"in the case {name} = {case!r}")
                    raise

        run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
        return pytest.mark.parametrize(name, given)(run)

    return decorate


def in_turns(cases: Iterable[Any], *, of: int) -> list[Any]:
    """Return the cases as parameters of a test, of which this run takes one of `of` parts; the others are marked `long`.

    Which part it is comes from `WALTZ_SEED`, so that each case has its turn within some runs.
    """
    turn = int(os.environ.get("WALTZ_SEED", "0")) % of
    return [case if at % of == turn else pytest.param(case, marks=pytest.mark.long) for at, case in enumerate(cases)]


def _tiers(size: int, quick: int, short: int | None) -> list[str]:
    """Return for each of so many cases the mark of its tier; no mark for the quick one."""
    in_quick, in_short = _spread(quick, size), _spread(size if short is None else short, size)
    return ["" if at in in_quick else "slow" if at in in_short else "long" for at in range(size)]


def _spread(count: int, size: int) -> set[int]:
    return {number * size // count for number in range(count)}
