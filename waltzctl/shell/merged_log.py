"""Log lines of several daemons, merged by time: `waltzctl logs` reads their files, `waltzctl events` asks the daemons.

A line in a file begins with its time; a line without one, as in a traceback, belongs to the line before it. A followed file
that was replaced is read to its end first. Times are from the clocks of the daemons. Lines that exist at the start are
merged in exact order; lines that arrive later, in order within one poll.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from waltzctl.shell import moment
from waltzctl.show.forms import Column, Columns, attributes
from waltzd.disk.real import translate

BLOCK_BYTES = 64 << 10
LOOK_BYTES_MAX = 1 << 20
"""Bytes read from each file in one poll; a longer line is split."""
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)[.,](\d{3})(Z|[+-]\d\d:?\d\d)")


@dataclass(frozen=True, kw_only=True)
class LogLine:
    time_ms: int
    """Milliseconds since 1970."""
    who: str
    """Name of a daemon or of a person."""
    text: str
    kind: str = ""
    """`server`, `storage` or `operator`; "" if unknown, like the level and code below."""
    level: str = ""
    code: str | None = None


def merged(logs: Iterable[Sequence[LogLine]]) -> list[LogLine]:
    """Merge logs by time; lines of one log with equal times keep their order."""
    return sorted((line for log in logs for line in log), key=lambda line: (line.time_ms, line.who))


# -- files -------------------------------------------------------------------------------------------------------------


def stamp(text: str) -> int | None:
    """Return the time at the beginning of a line, in milliseconds since 1970; None if there is none."""
    found = _STAMP.match(text)
    if found is None:
        return None
    try:
        return round(datetime.fromisoformat(f"{found[1]}.{found[2]}000{found[3]}").timestamp() * 1000)
    except ValueError:  # the 31st of February
        return None


def dated(daemon: str, texts: Sequence[str], *, otherwise: int) -> list[LogLine]:
    """Give each line a time. A line without one has the time of the line before it, or, at the beginning, of the first line
    that has one; `otherwise` if no line has one."""
    times = [stamp(text) for text in texts]
    at = next((time for time in times if time is not None), otherwise)
    lines = []
    for text, time in zip(texts, times, strict=True):
        # The lines of a file keep their order, even if the clock was set back.
        at = max(at, time) if time is not None else at
        lines.append(LogLine(time_ms=at, who=daemon, text=text))
    return lines


class Tail:
    """Reader of the end of a file that may not exist yet."""

    def __init__(self, daemon: str, path: Path) -> None:
        self.daemon = daemon
        self.path = path
        self._file: BinaryIO | None = None
        self._rest = b""
        """Incomplete last line of the last poll."""

    def last(self, lines: int) -> list[LogLine]:
        """Return the last lines of the file; `new` continues after them."""
        try:
            self._open()
            if self._file is None:
                return []
            blocks: list[bytes] = []
            at = self._file.seek(0, os.SEEK_END)
            ends = 0
            while at > 0 and ends <= lines:
                size = min(BLOCK_BYTES, at)
                at = self._file.seek(at - size)
                block = self._file.read(size)
                blocks.append(block)
                ends += block.count(b"\n")
            self._file.seek(0, os.SEEK_END)
            texts = self._whole(b"".join(reversed(blocks)))
            return self._dated(texts[len(texts) - min(lines, len(texts)) :])
        except OSError as error:
            raise translate(error, f"reading {self.path}") from error

    def new(self) -> list[LogLine]:
        """Return the lines written since the last call."""
        try:
            if self._file is None:
                self._open()
            if self._file is None:
                return []
            came = self._read()
            if not came and self._is_replaced():
                self.close()
                self._open()
                came = self._read()
            return self._dated(self._whole(came))
        except OSError as error:
            raise translate(error, f"reading {self.path}") from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._rest = b""

    def _open(self) -> None:
        if self._file is None:
            with suppress(FileNotFoundError):
                self._file = self.path.open("rb", buffering=0)

    def _read(self) -> bytes:
        if self._file is None:
            return b""
        if os.fstat(self._file.fileno()).st_size < self._file.tell():  # the file was truncated
            self._file.seek(0)
        return self._file.read(LOOK_BYTES_MAX) or b""

    def _is_replaced(self) -> bool:
        assert self._file is not None
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return True

    def _whole(self, came: bytes) -> list[str]:
        *whole, self._rest = (self._rest + came).split(b"\n")
        if len(self._rest) > LOOK_BYTES_MAX:
            whole, self._rest = [*whole, self._rest], b""
        return [line.decode("utf-8", errors="replace").rstrip("\r") for line in whole]

    def _dated(self, texts: list[str]) -> list[LogLine]:
        if self._file is None or not texts:
            return []
        return dated(self.daemon, texts, otherwise=int(os.fstat(self._file.fileno()).st_mtime * 1000))


EVENTS: Columns[LogLine] = (
    Column("time", lambda line: moment.shown(1000 * line.time_ms)),
    *attributes("who kind level code text"),
)
