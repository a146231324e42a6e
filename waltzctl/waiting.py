"""What is being waited for: one line on standard error that is written over; nothing when that is no terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from waltzctl.render import printable

Say = Callable[[str], None]
"""Told what is being waited for, again and again."""


class Waiting:
    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()
        self._started = time.monotonic()
        self._width = 0

    def say(self, sentence: str) -> None:
        if self._shows:
            line = f"{time.monotonic() - self._started:4.1f} s  {printable(sentence)}"
            self._put(line[: shutil.get_terminal_size().columns - 1])

    def _put(self, line: str) -> None:
        with suppress(OSError):  # a terminal that went away
            sys.stderr.write("\r" + line.ljust(self._width))
            sys.stderr.flush()
        self._width = len(line)

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._width:
            self._put("")
            self._put("\r")
