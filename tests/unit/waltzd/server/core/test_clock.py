"""The hybrid clock against what it promises: it never falls, and nothing is earlier than what its client had seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzd.errors import ClockAhead
from waltzd.server.core.clock import AHEAD_MAX, HybridClock, check_seen

TIMES = st.integers(0, 1 << 60)


@given(TIMES, st.lists(st.tuples(TIMES, TIMES)))
def test_it_never_falls(last: int, steps: list[tuple[int, int]]) -> None:
    clock = HybridClock(last)
    for now, seen in steps:
        before = clock.last
        time = clock.next(now, seen)
        assert time == clock.last == max(before, now, seen)


@pytest.mark.parametrize(("ahead", "is_refused"), [(-1, False), (0, False), (AHEAD_MAX, False), (AHEAD_MAX + 1, True)])
def test_a_client_far_ahead_is_refused(ahead: int, is_refused: bool) -> None:
    now = 1_700_000_000_000_000
    if is_refused:
        with pytest.raises(ClockAhead, match="60 seconds ahead"):
            check_seen(now + ahead, now)
    else:
        check_seen(now + ahead, now)
