"""The hybrid clock against what it promises: it never falls, and nothing is earlier than what its client had seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waltzd.errors.operations import ClockAhead
from waltzd.server.core.step import AHEAD_MAX, OWN_AHEAD_MAX, HybridClock, StorageClocks, check_seen

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


SECOND = 1_000_000
NOW = 1_700_000_000 * SECOND


def test_an_application_does_not_move_the_time_of_a_partition_by_passing_on_its_own() -> None:
    """Each batch passes on the time of the one before and almost a minute more: the log gets ahead by one minute only."""
    clock, refused = HybridClock(NOW), 0
    for _ in range(500):
        seen = clock.last + 59 * SECOND
        try:
            check_seen(seen, NOW, clock.last)
        except ClockAhead:
            refused += 1
            continue
        clock.next(NOW, seen)
    assert clock.last <= NOW + AHEAD_MAX
    assert refused == 499
    check_seen(clock.last, NOW, clock.last)  # what it has read in this very log


def test_a_log_that_stands_ahead_takes_what_moves_it_no_further() -> None:
    check_seen(NOW + 3600 * SECOND, NOW, last=NOW + 3600 * SECOND)
    with pytest.raises(ClockAhead):
        check_seen(NOW + 3601 * SECOND, NOW, last=NOW + 3600 * SECOND)


def test_an_owner_whose_clock_is_a_day_ahead_is_held_by_its_storages() -> None:
    day, storage_clocks = 86_400 * SECOND, StorageClocks()
    assert storage_clocks.bounded(NOW + day, 5.0) == NOW + day, "nobody told a time"
    for name, offset in (("a", -SECOND), ("b", 0), ("c", 7 * day)):
        storage_clocks.note(name, NOW + offset, 5.0)
    assert storage_clocks.bounded(NOW + day, 5.0) == NOW + OWN_AHEAD_MAX
    assert storage_clocks.bounded(NOW + day, 65.0) == NOW + 60 * SECOND + OWN_AHEAD_MAX, "their time goes on"
    assert storage_clocks.bounded(NOW + 3 * SECOND, 5.0) == NOW + 3 * SECOND
    storage_clocks.note("b", 0, 6.0)
    assert storage_clocks.bounded(NOW + day, 5.0) == NOW + OWN_AHEAD_MAX, "an answer without a time changes nothing"


DAY = 86_400 * SECOND


@pytest.mark.parametrize(
    ("own", "storages", "corrected"),
    [
        pytest.param(DAY, [0, 0, 0], OWN_AHEAD_MAX, id="owner-ahead"),
        pytest.param(-DAY, [0, 0, 0], -OWN_AHEAD_MAX, id="owner-behind"),
        pytest.param(-DAY, [0, 0, -DAY], -OWN_AHEAD_MAX, id="owner-and-a-storage-behind"),
        pytest.param(DAY, [DAY, 0, 0], OWN_AHEAD_MAX, id="owner-and-a-storage-ahead"),
        pytest.param(0, [-DAY, 0], 0, id="one-of-two-behind"),
        pytest.param(0, [DAY, 0], 0, id="one-of-two-ahead"),
        pytest.param(-DAY, [0, 0], -OWN_AHEAD_MAX, id="owner-behind-two"),
        pytest.param(-DAY, [0, 0, 0, DAY], -OWN_AHEAD_MAX, id="owner-behind-and-a-storage-ahead"),
        pytest.param(0, [DAY], 0, id="one-storage-ahead"),
        pytest.param(DAY, [0], OWN_AHEAD_MAX, id="owner-ahead-of-one"),
        pytest.param(DAY, [], DAY, id="no-storage-tells-a-time"),
        pytest.param(-3 * SECOND, [0, 0, 0], -3 * SECOND, id="as-far-off-as-clocks-are"),
    ],
)
def test_a_single_wrong_clock_does_not_move_the_time_of_a_log(own: int, storages: list[int], corrected: int) -> None:
    storage_clocks = StorageClocks()
    for number, ahead in enumerate(storages):
        storage_clocks.note(f"storage-{number}", NOW + ahead, 5.0)
    assert storage_clocks.corrected(NOW + own, 5.0) == NOW + corrected
    assert storage_clocks.corrected(NOW + own + 60 * SECOND, 65.0) == NOW + corrected + 60 * SECOND
