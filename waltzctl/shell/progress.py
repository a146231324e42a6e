"""Progress of a command, on standard error.

On a terminal it is one line that is overwritten; elsewhere a line each half minute. `--progress json` writes one JSON
object a line in both cases. A wait for an answer is reported after a second: without it the tool would seem to hang."""

from __future__ import annotations

import asyncio
import enum
import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Protocol, Self

import typer
from typer import Option

from waltzctl.shell.options import OUTPUT
from waltzctl.show.terminal import printable, rate, size

VERSION = 1
_UPDATE_SECONDS = 0.1
_LATELY_SECONDS = 15.0
"""Window over which the speed is measured."""
MOMENT_SECONDS = 1.0
"""Time after which a wait for an answer is reported."""
PLAIN_SECONDS = 30.0
"""Time between two lines if standard error is not a terminal: a restore takes minutes, and a short command prints none."""


class Shown(enum.StrEnum):
    AUTO = "auto"
    JSON = "json"
    OFF = "off"


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Amount of work done, such as copied transactions."""

    done: int
    total: int
    unit: str

    @property
    def percent(self) -> int:
        return 100 * self.done // max(1, self.total)


class Report(Protocol):
    def __call__(self, sentence: str, amount: Amount | None = None, /) -> None:
        """Report what the command waits for; called repeatedly."""


def unreported(_sentence: str, _amount: Amount | None = None, /) -> None:
    """Ignore progress."""


class Course:
    """Speed over the last seconds. Pure: the caller passes the time."""

    def __init__(self, lately: float = _LATELY_SECONDS) -> None:
        self._lately = lately
        self._seen: deque[tuple[float, int]] = deque()

    def see(self, at: float, amount: Amount) -> tuple[float, float] | None:
        """Return the amount a second and the seconds left; None before there are two different amounts."""
        if self._seen and amount.done < self._seen[-1][1]:
            self._seen.clear()  # the work restarted
        self._seen.append((at, amount.done))
        while len(self._seen) > 2 and self._seen[1][0] <= at - self._lately:
            self._seen.popleft()
        (start, before), (end, after) = self._seen[0], self._seen[-1]
        if after <= before or end <= start:
            return None
        speed = (after - before) / (end - start)
        return speed, max(0.0, (amount.total - after) / speed)


ShownProgress = Annotated[
    Shown,
    Option(
        "--progress",
        rich_help_panel=OUTPUT,
        help="Progress on standard error: text, one JSON object a line, or none.",
    ),
]


class _Line:
    """Line on a terminal that is overwritten, or JSON objects in its place."""

    def __init__(self, shown: str) -> None:
        self._writes_json = shown == Shown.JSON
        self._writes_line = shown == Shown.AUTO and sys.stderr.isatty()
        self._writes_plain = shown == Shown.AUTO and not self._writes_line
        self._started = self._reported_at = time.monotonic()
        self._width = 0

    @property
    def _is_shown(self) -> bool:
        return self._writes_json or self._writes_line or self._writes_plain

    def _write_event(self, event: Mapping[str, object]) -> None:
        self._put(json.dumps(event) + "\n")

    def _write_over(self, line: str) -> None:
        if self._writes_plain:
            now = time.monotonic()
            if now - self._reported_at >= PLAIN_SECONDS:
                self._reported_at = now
                self._put(line.strip() + "\n")
            return
        columns = shutil.get_terminal_size().columns
        with suppress(OSError):  # standard output, which it asks, may be a pipe
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
        line = line[: columns - 1]
        self._put("\r" + line.ljust(self._width))
        self._width = len(line)

    def _put(self, text: str) -> None:
        with suppress(OSError):  # the terminal may have gone away
            sys.stderr.write(text)
            sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._width:
            self._put("\r" + " " * self._width + "\r")


class Waiting(_Line):
    """Progress of a command that waits for others."""

    def __init__(self, shown: str = Shown.AUTO, *, lately: float = _LATELY_SECONDS) -> None:
        """`lately`: seconds over which the speed is measured."""
        super().__init__(shown)
        self._course = Course(lately)
        self._last_sentence = ""

    def report(self, sentence: str, amount: Amount | None = None, /) -> None:
        if not self._is_shown:
            return
        seconds = time.monotonic() - self._started
        course = None if amount is None else self._course.see(seconds, amount)
        if self._writes_json:
            if sentence != self._last_sentence:
                self._write_event(event(seconds, sentence, amount, course))
            self._last_sentence = sentence
            return
        far = ""  # comes first: a narrow terminal shows only the beginning of the line
        if amount is not None and course is not None:
            speed = f"{rate(round(course[0]), 1)} MB/s, " if amount.unit == "bytes" else ""
            far = f"{amount.percent} %, {speed}about {duration(course[1])} left; "
        self._write_over(f"{seconds:4.1f} s  {far}{printable(sentence)}")


class Progress(_Line):
    """Progress of a command that processes a known number of bytes itself."""

    def __init__(self, what: str, shown: str = Shown.AUTO) -> None:
        super().__init__(shown)
        self._what = what
        self._last = self._started

    def update(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._is_shown or (now - self._last < _UPDATE_SECONDS and done < total):
            return
        self._last = now
        seconds = now - self._started
        speed = done / seconds if seconds else 0.0
        left = (total - done) / speed if speed else 0.0
        if self._writes_json:
            amount = Amount(done=done, total=total, unit="bytes")
            self._write_event(event(seconds, self._what, amount, (speed, left) if speed else None))
            return
        self._write_over(f"{self._what}: {size(done)} of {size(total)}, {rate(done, seconds)} MB/s, {left:.0f} s left")


def event(seconds: float, sentence: str, amount: Amount | None, course: tuple[float, float] | None) -> dict[str, object]:
    """Return the JSON object of a progress event. `course` is the amount a second and the seconds left."""
    found: dict[str, object] = {
        "version": VERSION, "event": "progress", "seconds": round(seconds, 3), "text": sentence,
    }  # fmt: skip
    if amount is not None:
        speed, left = course if course is not None else (None, None)
        found |= {
            "unit": amount.unit,
            "done": amount.done,
            "total": amount.total,
            "per_second": None if speed is None else round(speed, 1),
            "seconds_left": None if left is None else round(left, 1),
        }
    return found


def duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


# -- one wait ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def waiting_aloud(what: Callable[[], str]) -> AsyncIterator[None]:
    """Report on standard error what the body waits for, if it takes longer than `MOMENT_SECONDS`. `what` is called then;
    nothing is written if it returns ""."""

    async def report() -> None:
        await asyncio.sleep(MOMENT_SECONDS)
        sentence = what()
        if sentence:
            with suppress(OSError):  # the terminal may have gone away
                typer.echo(printable(f"{sentence} …"), err=True)

    reporter = asyncio.create_task(report())
    try:
        yield
    finally:
        reporter.cancel()
        with suppress(asyncio.CancelledError):
            await reporter
