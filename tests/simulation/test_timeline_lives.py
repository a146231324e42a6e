"""Lives of a log that operators end, drawn by seeds."""

from __future__ import annotations

import pytest

from tests.simulation.timeline_lives import live
from tests.tiers import in_turns


@pytest.mark.parametrize("seed", in_turns([*range(12), 15], of=2))
def test_nothing_of_the_current_timeline_is_lost_and_nothing_of_an_older_one_comes_back(seed: int) -> None:
    live(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 300))
def test_more_lives(seed: int) -> None:
    live(seed)
