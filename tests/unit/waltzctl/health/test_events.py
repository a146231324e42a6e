"""The newest lines of a log, kept in memory, and lines of many daemons as one story."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from waltzctl.health.events import duration, event_lines, lines_of
from waltzd.cluster.documents import HistoryEntry
from waltzd.daemon.logs import TEXT_CHARACTERS_MAX, Ring
from waltzd.errors import BadArgument
from waltzd.protocol.descriptions import Event, Events
from waltzd.wire.codec import to_message, to_value
from waltzd.wire.wire_pb2 import EventsReply


@pytest.fixture
def ring() -> Iterator[tuple[Ring, logging.Logger]]:
    found, log = Ring(lines_max=3), logging.getLogger("waltz.test.ring")
    log.addHandler(found)
    log.setLevel(logging.INFO)
    yield found, log
    log.removeHandler(found)


# -- the ring ----------------------------------------------------------------------------------------------------------


def test_the_newest_lines_with_level_and_code(ring: tuple[Ring, logging.Logger]) -> None:
    found, log = ring
    log.debug("not said")
    log.info("one %d", 1)
    log.warning("s1 failed: W3005 the disk is full")
    log.error("partition 3: refused", extra={"code": "W3003"})
    told = [(event.number, event.level, event.text, event.code) for event in found.after(0).events]
    assert told == [
        (1, "info", "one 1", None),
        (2, "warning", "s1 failed: W3005 the disk is full", "W3005"),
        (3, "error", "partition 3: refused", "W3003"),
    ]
    log.info("four")
    assert [event.number for event in found.after(0).events] == [2, 3, 4], "room for three"
    assert [event.text for event in found.after(3).events] == ["four"]
    assert found.after(4).events == ()


def test_a_line_is_bounded_and_a_traceback_stays_in_the_log(ring: tuple[Ring, logging.Logger]) -> None:
    found, log = ring
    log.info("x" * 5000)
    try:
        raise ValueError("told nobody")
    except ValueError:
        log.exception("a mistake")
    long, mistake = found.after(0).events
    assert len(long.text) == TEXT_CHARACTERS_MAX
    assert (mistake.text, mistake.level) == ("a mistake", "error")


def test_a_line_whose_parts_do_not_fit_is_kept_as_it_is(ring: tuple[Ring, logging.Logger]) -> None:
    found, log = ring
    found.handle(log.makeRecord(log.name, logging.INFO, "", 0, "%d of", ("many",), None))
    assert found.after(0).events[0].text == "%d of"


def test_events_survive_the_wire() -> None:
    some = Events(
        began_ms=5,
        events=(
            Event(number=1, time_ms=2, level="info", text="so", code=None),
            Event(number=2, time_ms=3, level="error", text="W3005 full", code="W3005"),
        ),
    )
    assert to_value(Events, EventsReply.FromString(to_message(EventsReply, some).SerializeToString())) == some


# -- the story ---------------------------------------------------------------------------------------------------------


def event(number: int, time_ms: int, level: str = "info") -> Event:
    return Event(number=number, time_ms=time_ms, level=level, text=f"line {number}", code=None)


def entry(**changes: Any) -> HistoryEntry:
    fields: dict[str, Any] = {
        "began": "1970-01-01T00:00:10+00:00", "ended": "1970-01-01T00:00:20+00:00", "who": "ann@here",
        "verb": "storage remove", "subject": "s3", "reason": None, "steps": (), "outcome": "done",
    }  # fmt: skip
    return HistoryEntry(**{**fields, **changes})


TOLD = {
    ("server", "a"): Events(began_ms=1, events=(event(1, 15_000), event(2, 30_000, "warning"))),
    ("storage", "s1"): Events(began_ms=1, events=(event(1, 5_000, "error"), event(2, 15_000))),
}


def test_lines_of_all_in_the_order_of_time() -> None:
    found = event_lines(TOLD, [entry()], since_ms=0, level="info")
    assert [(line.time_ms // 1000, line.who) for line in found] == [
        (5, "s1"), (10, "ann@here"), (15, "a"), (15, "s1"), (20, "ann@here"), (30, "a"),
    ]  # fmt: skip
    assert [line.kind for line in found][:3] == ["storage", "operator", "server"]


def test_only_what_was_asked_for() -> None:
    def told(**changes: Any) -> list[tuple[int, str]]:
        asked = {"since_ms": 0, "level": "info", **changes}
        return [(line.time_ms // 1000, line.who) for line in event_lines(TOLD, [entry()], **asked)]

    assert told(level="warning") == [(5, "s1"), (30, "a")]
    assert told(level="error") == [(5, "s1")]
    assert told(since_ms=20_000) == [(20, "ann@here"), (30, "a")]
    assert told(names=["s1"]) == [(5, "s1"), (15, "s1")]


def test_a_change_that_failed_or_goes_on() -> None:
    began, ended = lines_of(entry(reason="old disk", outcome="W2105 not all moved"))
    assert (began.text, began.level) == ("storage remove s3 began (old disk)", "info")
    assert (ended.text, ended.level) == ("storage remove s3: W2105 not all moved", "warning")
    assert len(lines_of(entry(ended=None, outcome="begun"))) == 1
    assert lines_of(entry(began="once", ended=None)) == [], "a moment that nobody understands"


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86400)])
def test_lengths_of_time(text: str, seconds: int) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "-5m", "1w", "1h30m", "9999999s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(BadArgument, match="is not a duration"):
        duration(text)
