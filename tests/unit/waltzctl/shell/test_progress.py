"""What commands say while they work: to a terminal, to a program, to nobody."""

from __future__ import annotations

import io
import json
import time
from typing import Any

import pytest

from waltzctl.shell.progress import Amount, Course, Progress, Shown, Waiting, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def of(done: int, total: int = 1000) -> Amount:
    return Amount(done=done, total=total, unit="transactions")


def shown(text: str) -> list[str]:
    return [line.rstrip() for line in text.split("\r") if line.strip()]


def test_how_fast_it_goes_is_said_of_late_only() -> None:
    course = Course()
    assert course.see(0.0, of(0)) is None
    assert course.see(0.0, of(10)) is None, "no time has passed"
    assert course.see(2.0, of(200)) == (100.0, 8.0)
    for at in range(3, 40):
        found = course.see(float(at), of(200 + at))
    assert found is not None
    assert found[0] == pytest.approx(1.0), "the beginning is forgotten"
    assert course.see(41.0, of(50)) is None, "it begins anew"
    assert course.see(43.0, of(70)) == (10.0, 93.0)


def test_of_bytes_the_line_says_how_many_a_second(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    out = Terminal()
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setenv("COLUMNS", "200")
    with Waiting() as waiting:
        for seconds in (0, 2):
            clock.now = 100.0 + seconds
            waiting.report("copying", Amount(done=seconds * 3_000_000, total=60_000_000, unit="bytes"))
    assert shown(out.getvalue())[-1] == " 2.0 s  10 %, 3.0 MB/s, about 0:18 left; copying"


def test_a_terminal_gets_a_line_that_is_written_over(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    out = Terminal()
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setenv("COLUMNS", "200")
    with Waiting() as waiting:
        waiting.report("0 of 2 partitions done; s4 begins to copy\x1b[2J")
        clock.now = 102.0
        waiting.report("0 of 2 partitions done", of(100))
        clock.now = 104.0
        waiting.report("0 of 2 partitions done", of(400))
    first, second, third = shown(out.getvalue())
    assert first.startswith(" 0.0 s  0 of 2 partitions done; s4 begins to copy")
    assert "\x1b" not in first
    assert second == " 2.0 s  0 of 2 partitions done"
    assert third == " 4.0 s  40 %, about 0:04 left; 0 of 2 partitions done"
    assert out.getvalue().endswith(" \r"), "nothing of it stays"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_program_gets_an_object_a_line(monkeypatch: pytest.MonkeyPatch, clock: Clock, is_terminal: bool) -> None:
    out = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    with Waiting(Shown.JSON) as waiting:
        waiting.report("looking")
        clock.now = 102.0
        waiting.report("looking")
        waiting.report("copying", of(100))
        clock.now = 104.0
        waiting.report("copying more", of(400))
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    head: dict[str, Any] = {"version": 1, "event": "progress"}
    amount: dict[str, Any] = {"unit": "transactions", "total": 1000}
    assert events == [
        head | {"seconds": 0.0, "text": "looking"},
        head | {"seconds": 2.0, "text": "copying"} | amount | {"done": 100, "per_second": None, "seconds_left": None},
        head | {"seconds": 4.0, "text": "copying more"} | amount | {"done": 400, "per_second": 150.0, "seconds_left": 4.0},
    ]


def test_a_log_file_gets_a_line_each_half_minute(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """A restore was silent for minutes where standard error is no terminal."""
    out = io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    with Waiting() as waiting:
        for _ in range(100):
            clock.now += 1
            waiting.report("restoring partition 3")
    assert [line.split("  ")[-1] for line in out.getvalue().splitlines()] == ["restoring partition 3"] * 3
    assert "\r" not in out.getvalue()


def test_nobody_is_told_where_nobody_looks(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    for out, how in ((io.StringIO(), Shown.AUTO), (Terminal(), Shown.OFF)):
        monkeypatch.setattr("sys.stderr", out)
        with Waiting(how) as waiting, Progress("verify", how) as progress:
            waiting.report("looking", of(1))
            progress.update(10, 10)
        assert out.getvalue() == ""


def test_through_bytes(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    lines, objects = Terminal(), io.StringIO()
    for out, how in ((lines, Shown.AUTO), (objects, Shown.JSON)):
        monkeypatch.setattr("sys.stderr", out)
        clock.now = 100.0
        with Progress("verify", how) as progress:
            clock.now = 102.0
            progress.update(4_000_000, 10_000_000)
            progress.update(4_100_000, 10_000_000)  # too soon
            clock.now = 104.0
            progress.update(10_000_000, 10_000_000)
    assert shown(lines.getvalue()) == [
        "verify: 4.0 MB of 10.0 MB, 2.0 MB/s, 3 s left",
        "verify: 10.0 MB of 10.0 MB, 2.5 MB/s, 0 s left",
    ]
    found = [json.loads(line) for line in objects.getvalue().splitlines()]
    assert [(one["text"], one["unit"], one["done"], one["per_second"], one["seconds_left"]) for one in found] == [
        ("verify", "bytes", 4_000_000, 2_000_000.0, 3.0),
        ("verify", "bytes", 10_000_000, 2_500_000.0, 0.0),
    ]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (3600 * 25 + 62, "25:01:02")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
