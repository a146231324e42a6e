"""The log of a daemon on stderr: text for people, or one JSON object per line for log collectors.

The newest lines are also kept in memory, for `waltzctl events`, which needs no access to the files of the machine. If the
daemon has a directory, they are also kept in a small file, so that lines from before a restart are included."""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import ssl
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import replace

from waltzd.protocol.descriptions import Event, Events

RECENT_MAX = 500
TEXT_CHARACTERS_MAX = 1000
"""Length of a line in memory; 500 lines are half a megabyte at most."""
KEPT_BYTES_MAX = 1 << 20
FLUSH_SECONDS = 1.0
EVENTS_NAME = "events.log"
_STANDARD = set(vars(logging.makeLogRecord({})))
_CODE = re.compile(r"\bW[0-9]{4}\b")


class _TextFormatter(logging.Formatter):
    """A formatter that makes one line of a message and escapes control characters, which may come from a caller."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)-8s %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        if text.isprintable():
            return text
        return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


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
    """A filter for lines that any caller could cause without limit: what gRPC logs, with a traceback, about calls whose
    headers or path are not text, and what the event loop logs about broken connections, whose users get the error."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith("grpc"):
            return not (str(record.msg).startswith("Invalid encoding on ") or isinstance(record.msg, UnicodeDecodeError))
        if record.name == "asyncio" and record.exc_info and isinstance(record.exc_info[1], ssl.SSLError | ConnectionError):
            return False
        if record.name == "asyncio" and record.exc_info and isinstance(record.exc_info[1], UnicodeDecodeError):
            return "_server_main_loop" not in "".join(traceback.format_tb(record.exc_info[2]))
        return True


class Ring(logging.Handler):
    """The newest lines in memory, without tracebacks."""

    def __init__(self, lines_max: int = RECENT_MAX) -> None:
        super().__init__()
        self.began_ms = time.time_ns() // 1_000_000
        self._events: deque[Event] = deque(maxlen=lines_max)
        self._number = 0
        self._unkept: queue.Queue[Event] | None = None

    def keep(self, path: str) -> None:
        """Also keep the lines in this file, and load those of earlier processes. A thread writes the file, so that a disk
        that hangs does not block logging; lines that cannot be written are dropped."""
        if self._unkept is not None:
            return
        before = _kept(path)
        self.acquire()
        try:
            mine, self._number = list(self._events), 0
            self._events.clear()
            for event in (*before, *mine):
                self._number += 1
                self._events.append(replace(event, number=self._number))
            self._unkept = queue.Queue()
            for event in mine:
                self._unkept.put(event)
        finally:
            self.release()
        threading.Thread(target=_write, args=(path, self._unkept), name="events", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line. Called with the lock of this handler."""
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # its arguments do not fit: the other handler complains
            text = str(record.msg)
        self._number += 1
        event = Event(
            number=self._number,
            time_ms=int(record.created * 1000),
            level=record.levelname.lower(),
            text=text[:TEXT_CHARACTERS_MAX],
            code=_code(record, text),
        )
        self._events.append(event)
        if self._unkept is not None and self._unkept.qsize() < RECENT_MAX:
            self._unkept.put(event)

    def flush(self) -> None:
        """Wait at most `FLUSH_SECONDS` until the file has all lines. Called before the process ends."""
        unkept = self._unkept
        if unkept is not None:
            with unkept.all_tasks_done:
                unkept.all_tasks_done.wait_for(lambda: not unkept.unfinished_tasks, FLUSH_SECONDS)

    def after(self, number: int) -> Events:
        """Return the lines with higher numbers, oldest first."""
        self.acquire()
        try:
            found = tuple(event for event in self._events if event.number > number)
        finally:
            self.release()
        return Events(began_ms=self.began_ms, events=found)


def _kept(path: str) -> list[Event]:
    """Read the lines of earlier processes, without incomplete ones."""
    found: list[Event] = []
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in deque(file, maxlen=RECENT_MAX):
            with suppress(ValueError, KeyError, TypeError):
                one = json.loads(line)
                code = None if one["code"] is None else str(one["code"])
                fields = {"time_ms": int(one["time_ms"]), "level": str(one["level"]), "text": str(one["text"])}
                found.append(Event(number=0, code=code, **fields))  # type: ignore[arg-type]
    return found


def _write(path: str, unkept: queue.Queue[Event]) -> None:
    """Write lines to the file, on a thread. Replace a file that is too large by its newest lines."""
    while True:
        event = unkept.get()
        line = json.dumps({"time_ms": event.time_ms, "level": event.level, "code": event.code, "text": event.text})
        with suppress(OSError):
            with open(path, "a", encoding="utf-8", opener=_private) as file:
                file.write(line + "\n")
                size = file.tell()
            if size > KEPT_BYTES_MAX:
                with open(path, encoding="utf-8") as file:
                    newest = deque(file, maxlen=RECENT_MAX // 2)
                with open(path + ".new", "w", encoding="utf-8", opener=_private) as file:
                    file.writelines(newest)
                os.replace(path + ".new", path)
        unkept.task_done()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _code(record: logging.LogRecord, text: str) -> str | None:
    """Return the code of the error in a log record, from its attribute or its text."""
    beside = getattr(record, "code", None)
    if isinstance(beside, str) and _CODE.fullmatch(beside):
        return beside
    found = _CODE.search(text)
    return found[0] if found else None


_STRANGERS = _Strangers()
RECENT = Ring()
"""Newest lines of this process."""


def configure(log_format: str, log_level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    for one in (handler, RECENT):
        one.addFilter(_STRANGERS)
    logging.basicConfig(level=log_level.upper(), handlers=[handler, RECENT], force=True)
