"""Who uploads next, told as stories."""

from __future__ import annotations

from waltzd.protocol.descriptions import ArchiveCheck
from waltzd.server.core.archive import (
    AGAIN_SECONDS,
    FIRST_SECONDS,
    IDLE_SECONDS,
    LOOKS,
    RETRY_SECONDS,
    RETRY_SECONDS_MAX,
    ROUND_SECONDS,
    STEP_SECONDS,
    TURN_SEGMENTS,
    ArchiveRounds,
    UploadTurns,
)

ALL = ["a", "b", "c"]


def test_the_replicas_take_turns_of_a_few_segments() -> None:
    turns, asked = UploadTurns(), []
    for committed in range(4 * TURN_SEGMENTS):
        name = turns.choose(ALL, committed)
        assert name is not None
        asked.append(name)
        turns.uploaded(name)
        assert turns.pause == 0
    assert asked == [name for name in (*ALL, "a") for _ in range(TURN_SEGMENTS)]


def test_when_a_segment_is_known_to_wait_who_had_none_is_asked_again() -> None:
    turns = UploadTurns()
    for name in ALL:
        assert turns.choose(ALL, 5) == name
        turns.found_none(name, 5)
    assert turns.choose(ALL, 5) is None
    turns.hurry()
    assert turns.choose(ALL, 5) == "a"


def test_when_one_has_nothing_another_is_asked_and_then_only_when_something_was_committed() -> None:
    turns, asked = UploadTurns(), []
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
    turns = UploadTurns()
    for name in ALL:
        turns.found_none(name, 10)
    turns.choose(ALL, 10)
    asked = [turns.choose(["b"], 10) for _ in range(2 * LOOKS)]
    assert 1 <= sum(name is not None for name in asked) <= 2


def test_who_fails_is_asked_last_and_all_of_them_later_and_later() -> None:
    turns, pauses = UploadTurns(), []
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
    turns = UploadTurns()
    assert turns.choose([], 5) is None
    assert turns.choose(["c"], 5) == "c"
    turns.failed("c", "away", ALL)
    assert turns.choose(ALL, 5) == "a"


def walk(rounds: ArchiveRounds, archived: int, now: float, *, step: int = 100, gone: int | None = None) -> float:
    """One round over so many ids, or up to an object that is gone, and when it ended."""
    while True:
        now += rounds.pause
        last_id = min(rounds.first_id + step - 1, archived)
        if gone is not None and last_id >= gone:
            rounds.record(ArchiveCheck(last_id=gone - 1, missing=f"{gone} is gone"), archived, now)
            return now
        rounds.record(ArchiveCheck(last_id=last_id), archived, now)
        if rounds.first_id == 0:
            return now


def test_the_first_round_is_quick_and_each_later_one_takes_a_day() -> None:
    rounds = ArchiveRounds()
    assert rounds.describe(5.0) is None
    first = walk(rounds, 999, 0.0)
    assert first == FIRST_SECONDS + 9 * STEP_SECONDS
    assert rounds.describe(first) == ArchiveCheck(last_id=999, age_ms=9000)
    second = walk(rounds, 1999, first)
    assert abs(second - first - ROUND_SECONDS) <= ROUND_SECONDS / 10
    assert (rounds.last_id, rounds.since) == (1999, first + ROUND_SECONDS / 10)


def test_one_step_that_sees_everything_comes_once_a_day() -> None:
    rounds = ArchiveRounds()
    first = walk(rounds, 9, 0.0)
    assert walk(rounds, 9, first) == first + ROUND_SECONDS


def test_at_a_missing_object_it_stops_until_that_is_back() -> None:
    rounds = ArchiveRounds()
    now = walk(rounds, 999, walk(rounds, 999, 0.0), gone=250)
    assert (rounds.first_id, rounds.last_id, rounds.pause) == (250, 249, AGAIN_SECONDS)
    assert rounds.describe(now) == ArchiveCheck(last_id=249, missing="250 is gone")
    rounds.uploaded(999, 1099)
    assert rounds.last_id == 249
    again = walk(rounds, 1099, now)
    assert again - now < AGAIN_SECONDS + 100 * STEP_SECONDS, "not a day later"
    assert (rounds.missing, rounds.last_id) == ("", 1099)


def test_what_is_uploaded_was_read_back_and_counts() -> None:
    rounds = ArchiveRounds()
    rounds.uploaded(-1, 99)
    assert rounds.last_id == -1, "nothing was looked for yet"
    walk(rounds, 99, 0.0)
    rounds.uploaded(99, 199)
    assert rounds.last_id == 199
    rounds.failed()
    assert (rounds.last_id, rounds.pause) == (199, AGAIN_SECONDS)
