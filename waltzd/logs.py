"""Log lines of the daemons: text for people, or one JSON object a line for collectors. Everything goes to stderr.

The newest lines are also kept in memory, so that `waltzctl events` can show them without a way to the machine's files.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from collections import deque

from waltzd.process import Event, Events

RECENT_MAX = 500
TEXT_CHARACTERS_MAX = 1000
"""Of a line that is kept: 500 of them are half a megabyte at most."""
_STANDARD = set(vars(logging.makeLogRecord({})))
_CODE = re.compile(r"\bW[0-9]{4}\b")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({name: value for name, value in vars(record).items() if name not in _STANDARD and name not in line})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Strangers(logging.Filter):
    """Headers of a call that are no text are a mistake of whoever calls, and anybody may. gRPC tells of each as of
    a mistake of ours, with tracebacks: as many as somebody likes to send. Of a path that is none, the listener tells."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith("grpc"):
            return not (str(record.msg).startswith("Invalid encoding on ") or isinstance(record.msg, UnicodeDecodeError))
        if record.name == "asyncio" and record.exc_info and isinstance(record.exc_info[1], UnicodeDecodeError):
            return "_server_main_loop" not in "".join(traceback.format_tb(record.exc_info[2]))
        return True


class Ring(logging.Handler):
    """The newest lines. Tracebacks stay in the log itself."""

    def __init__(self, lines_max: int = RECENT_MAX) -> None:
        super().__init__()
        self.began_ms = time.time_ns() // 1_000_000
        self._events: deque[Event] = deque(maxlen=lines_max)
        self._number = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Called with the lock of this handler."""
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # a line whose parts do not fit: the other handler complains of it
            text = str(record.msg)
        self._number += 1
        self._events.append(
            Event(
                number=self._number,
                time_ms=int(record.created * 1000),
                level=record.levelname.lower(),
                text=text[:TEXT_CHARACTERS_MAX],
                code=_code(record, text),
            )
        )

    def after(self, number: int) -> Events:
        """Those with higher numbers, oldest first."""
        self.acquire()
        try:
            found = tuple(event for event in self._events if event.number > number)
        finally:
            self.release()
        return Events(began_ms=self.began_ms, events=found)


def _code(record: logging.LogRecord, text: str) -> str | None:
    """A line that tells of an error has its code somewhere in its text, or beside it."""
    beside = getattr(record, "code", None)
    if isinstance(beside, str) and _CODE.fullmatch(beside):
        return beside
    found = _CODE.search(text)
    return found[0] if found else None


_STRANGERS = _Strangers()
RECENT = Ring()
"""Of this process."""


def configure(log_format: str, log_level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)-8s %(message)s", "%Y-%m-%dT%H:%M:%S")
        formatter.converter = time.gmtime
        handler.setFormatter(formatter)
    for one in (handler, RECENT):
        one.addFilter(_STRANGERS)
    logging.basicConfig(level=log_level.upper(), handlers=[handler, RECENT], force=True)
