"""What several daemons logged, as one log in order of time: `waltzctl logs` reads their files, `waltzctl events` asks them.

In a file a line says itself when it was written; one that does not, like those of a traceback, belongs to the line before
it. Files are followed by what grows at their ends: one that was replaced is read to its end first. The order is that of the
daemons' clocks. It is exact for what is there already, and of what comes while a reader follows, within one look.
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

from waltzd.disk.real import translate

BLOCK_BYTES = 64 << 10
LOOK_BYTES_MAX = 1 << 20
"""So much of each file is taken in one look, and a line that is longer is told in pieces."""
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)[.,](\d{3})(Z|[+-]\d\d:?\d\d)")


@dataclass(frozen=True, kw_only=True)
class Line:
    time_ms: int
    """Since 1970."""
    who: str
    """The name of a daemon, or of a person."""
    text: str
    kind: str = ""
    """server, storage, operator; like all that follows, where it is known."""
    level: str = ""
    code: str | None = None


def merged(logs: Iterable[Sequence[Line]]) -> list[Line]:
    """In order of time; each log keeps its own order."""
    return sorted((line for log in logs for line in log), key=lambda line: (line.time_ms, line.who))


# -- files -------------------------------------------------------------------------------------------------------------


def stamp(text: str) -> int | None:
    """When a line says that it was written."""
    found = _STAMP.match(text)
    if found is None:
        return None
    try:
        return round(datetime.fromisoformat(f"{found[1]}.{found[2]}000{found[3]}").timestamp() * 1000)
    except ValueError:  # the 31st of February
        return None


def dated(daemon: str, texts: Sequence[str], *, otherwise: int) -> list[Line]:
    """A line without a time has that of the one before it; before the first that has one, the time of that one."""
    times = [stamp(text) for text in texts]
    at = next((time for time in times if time is not None), otherwise)
    lines = []
    for text, time in zip(texts, times, strict=True):
        # A clock that was set back must not tear a file's lines out of their order.
        at = max(at, time) if time is not None else at
        lines.append(Line(time_ms=at, who=daemon, text=text))
    return lines


class Tail:
    """The end of one file, which may not be there yet."""

    def __init__(self, daemon: str, path: Path) -> None:
        self.daemon = daemon
        self.path = path
        self._file: BinaryIO | None = None
        self._rest = b""
        """The beginning of a line that was not whole at the last look."""

    def last(self, lines: int) -> list[Line]:
        """The newest that are there; `new` goes on behind them."""
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

    def new(self) -> list[Line]:
        """What was written since the last look."""
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
        if os.fstat(self._file.fileno()).st_size < self._file.tell():  # it was cut
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

    def _dated(self, texts: list[str]) -> list[Line]:
        if self._file is None or not texts:
            return []
        return dated(self.daemon, texts, otherwise=int(os.fstat(self._file.fileno()).st_mtime * 1000))
