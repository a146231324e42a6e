"""Who uploads next, told as stories."""

from __future__ import annotations

from waltzd.server.core.archive import IDLE_SECONDS, LOOKS, RETRY_SECONDS, RETRY_SECONDS_MAX, TURN_SEGMENTS, Turns

ALL = ["a", "b", "c"]


def test_the_replicas_take_turns_of_a_few_segments() -> None:
    turns, asked = Turns(), []
    for committed in range(4 * TURN_SEGMENTS):
        name = turns.choose(ALL, committed)
        assert name is not None
        asked.append(name)
        turns.uploaded(name)
        assert turns.pause == 0
    assert asked == [name for name in (*ALL, "a") for _ in range(TURN_SEGMENTS)]


def test_when_a_segment_is_known_to_wait_who_had_none_is_asked_again() -> None:
    turns = Turns()
    for name in ALL:
        assert turns.choose(ALL, 5) == name
        turns.found_none(name, 5)
    assert turns.choose(ALL, 5) is None
    turns.hurry()
    assert turns.choose(ALL, 5) == "a"


def test_when_one_has_nothing_another_is_asked_and_then_only_when_something_was_committed() -> None:
    turns, asked = Turns(), []
    for _ in range(6):
        name = turns.choose(ALL, 10)
        asked.append(name)
        if name is not None:
            turns.found_none(name, 10)
        assert turns.pause == IDLE_SECONDS
    assert asked == [*ALL, None, None, None]
    assert turns.choose(ALL, 11) == "a"


def test_a_quiet_log_is_looked_at_now_and_then() -> None:
    """A replica may learn later that its last sealed segment is committed."""
    turns = Turns()
    for name in ALL:
        turns.found_none(name, 10)
    turns.choose(ALL, 10)
    asked = [turns.choose(["b"], 10) for _ in range(2 * LOOKS)]
    assert 1 <= sum(name is not None for name in asked) <= 2


def test_who_fails_is_asked_last_and_all_of_them_later_and_later() -> None:
    turns, pauses = Turns(), []
    for step in range(30):
        name = turns.choose(ALL, step)
        assert name is not None
        turns.failed(name, "away", ALL)
        pauses.append(turns.pause)
        assert (turns.trouble == "") == (step < 2)
    assert pauses[:9] == [0, 0, RETRY_SECONDS, 0, 0, 2 * RETRY_SECONDS, 0, 0, 4 * RETRY_SECONDS]
    assert pauses[-1] == RETRY_SECONDS_MAX
    turns.uploaded("a")
    assert (turns.trouble, turns.pause) == ("", 0)
    turns.failed("a", "away", ALL)
    assert turns.pause == 0
    turns.failed("b", "away", ["b"])
    assert turns.pause == RETRY_SECONDS


def test_a_replica_that_cannot_be_asked_is_left_out() -> None:
    turns = Turns()
    assert turns.choose([], 5) is None
    assert turns.choose(["c"], 5) == "c"
    turns.failed("c", "away", ALL)
    assert turns.choose(ALL, 5) == "a"
