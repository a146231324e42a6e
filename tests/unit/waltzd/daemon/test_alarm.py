"""What is wrong is said once, repeated rarely, and its end is said; what is over in a moment is no alarm."""

from __future__ import annotations

import logging

from tests.unit.snapshots import owned, replica
from waltzd.daemon import alarm
from waltzd.daemon.alarm import AGAIN_SECONDS, Alarms, Trouble


def levels_and_texts(found: list[alarm.Said]) -> list[tuple[int, str]]:
    return [(said.level, said.text) for said in found]


def closed(*numbers: int) -> dict[int, list[Trouble]]:
    waiting = "no majority of s1, s2, s3 takes appends: not s2, s3"
    return alarm.of_server([owned(number, (replica("s1"),), waiting=waiting) for number in numbers], "W2096")


def test_a_trouble_is_an_error_once_and_again_after_ten_minutes_and_its_end_is_said() -> None:
    alarms = Alarms()
    assert alarms.look(0, closed(1, 2, 3)) == [], "it may be a fail-over"
    assert levels_and_texts(alarms.look(4, closed(1, 2, 3))) == [
        (
            logging.ERROR,
            "W2096 partitions 1-3: no transactions are taken, for 4 seconds now: OPEN, no majority of s1, s2, s3 takes "
            "appends: not s2, s3",
        )
    ]
    for now in range(6, 604, 2):
        assert alarms.look(now, closed(1, 2, 3)) == []
    again = alarms.look(4 + AGAIN_SECONDS, closed(1, 2, 3))
    assert len(again) == 1
    assert again[0].text.startswith("W2096 partitions 1-3: no transactions are taken, for 10 minutes now")
    assert levels_and_texts(alarms.look(700, closed(3))) == [
        (logging.INFO, "over: partitions 1-2: no transactions are taken; it lasted 11 minutes")
    ]
    assert alarms.look(702, closed(3)) == []
    assert len(alarms.look(704, {})) == 1
    assert alarms.look(706, {}) == []


def test_what_is_over_in_a_moment_is_not_told() -> None:
    alarms = Alarms()
    assert alarms.look(0, closed(1)) == []
    assert alarms.look(2, {}) == []
    assert alarms.look(4, closed(1)) == [], "it begins anew"


def test_files_that_are_refused_are_told_at_once_and_damage_when_nobody_heals_it() -> None:
    alarms = Alarms()
    refused = {4: alarm.of_replica(damage=None, refused="its directory is missing", code="W3003")}
    assert "partition 4: its files are refused" in alarms.look(0, refused)[0].text
    damaged = {5: alarm.of_replica(damage="damaged-record: …", refused=None, code="W3003")}
    assert [said.level for said in alarms.look(2, damaged)] == [logging.INFO], "the first one is over"
    assert alarms.look(4, damaged) == []
    assert "partition 5: damaged, and not healed, for 16 seconds now" in alarms.look(18, damaged)[0].text


def test_a_replica_of_another_history_is_an_error_at_once() -> None:
    alarms, story = Alarms(), "it holds something else at id 9 than the log"
    found = alarm.of_server([owned(3, (replica("s1"), replica("s2", state="DIVERGED", story=story)))], "W2096")
    assert levels_and_texts(alarms.look(0, found)) == [
        (
            logging.ERROR,
            "W2005 partition 3: the replica on s2 holds another history than the log and is out, for 0 seconds now: it "
            "holds something else at id 9 than the log; find out who wrote there, then `waltzctl storage recover s2`",
        )
    ]
