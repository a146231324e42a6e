"""The process of a daemon and its operating system: memory, open files, and the service manager that started it.

The manager (systemd) names a socket in the environment and receives datagrams with `NAME=value` lines on it; without a
manager, nothing is sent. It never replies, and nothing here waits: a manager that has stopped must not end a daemon. The
watchdog heartbeat comes from the daemon's own event loop, and only while nothing hangs that the daemon depends on, so that
the manager restarts a process that is alive but does no work."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic, monotonic_ns
from types import TracebackType
from typing import Any, Self, TypeAlias

from waltzd.protocol.descriptions import Vitals
from waltzd.wire.tls import Tls

_Call: TypeAlias = tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]


class Threads:
    """Threads for calls that wait for the disk.

    A call goes to any free thread, and its result returns to the event loop of the caller. An executor of the standard
    library does the same for twice the processor time, and there is such a call for every flush.
    """

    def __init__(self, count: int, name: str, *, is_waited_for: bool = True) -> None:
        """`is_waited_for`: `close` waits for running calls; otherwise the process may end during one."""
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._is_waited_for = is_waited_for
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}_{number}", daemon=not is_waited_for)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Call a function on a thread. It continues if the caller stops waiting."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.put((answer, function, arguments))
        return answer

    def close(self) -> None:
        """End the threads; with `is_waited_for`, after all calls are done."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if self._is_waited_for else ():
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            answer, function, arguments = call
            loop = answer.get_loop()
            result, failure = None, None
            try:
                result = function(*arguments)
            except BaseException as error:  # noqa: BLE001  # it belongs to the caller
                failure = error
            with suppress(RuntimeError):  # the loop has ended, without waiting for this call
                loop.call_soon_threadsafe(_settle, answer, result, failure)
            del call, answer, function, arguments, result, failure  # keep no reference until the next call


def _settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():  # given up meanwhile
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


_M_ARENA_MAX = -8


def share_arena() -> None:
    """Let all threads share one malloc arena. Call it before the first thread starts.

    glibc gives every thread an arena of its own, and keeps memory in the arena where it was freed. A daemon passes large
    buffers between a few threads, of which one at a time runs Python: with one arena it needs a third less memory. Other
    allocators are not changed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def collect_seldom() -> None:
    """Look for reference cycles less often, and not among the objects that were imported. Call it after the imports.

    With CPython's own thresholds an owner of 512 partitions stopped five times in a fail-over to look through all its
    objects, for up to 0.3 seconds, and found next to nothing. Here a full collection follows half a million new objects."""
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)


WANTED = 65536


def allow_open_files() -> None:
    """Raise the limit of open files as far as the system permits, up to `WANTED`: each segment, index and connection is a
    file, and the default limit is low."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(WANTED, hard) if hard != resource.RLIM_INFINITY else WANTED
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def print_ready(line: str) -> None:
    """Print the line that says that the daemon is ready. A standard output that takes nothing, such as a file on a full
    disk, keeps no daemon from starting."""
    try:
        os.write(1, f"{line}\n".encode())  # not `print`: what it could not write fails again when the process ends
    except OSError as error:
        log.warning("standard output takes no line (%s), and this daemon goes on: %s", error.strerror, line)


_DESCRIPTORS = "/proc/self/fd"


def vitals() -> Vitals:
    """Return the clock and the open files of this process."""
    import resource  # not on Windows, where applications test with the services of a storage

    try:
        open_files: int | None = len(os.listdir(_DESCRIPTORS)) - 1  # without the one that lists them
    except OSError:  # no /proc here, or no descriptor left to look with
        open_files = None
    return Vitals(
        time_ms=time.time_ns() // 1_000_000,
        open_files=open_files,
        open_files_max=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


STATUS_SECONDS = 2.0
"""Interval between two status messages to the manager."""
STATUS_CHARACTERS_MAX = 400
log = logging.getLogger("waltz.notify")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the service manager in the environment."""

    address: str | None = None
    """Path of the socket, or an abstract name after an `@`; None without a manager."""
    watchdog_seconds: float | None = None
    """Seconds without a heartbeat after which the manager ends the process; None without a watchdog."""


def settings_from(environment: Mapping[str, str], *, process: int) -> Settings:
    """Parse the environment. The watchdog is ignored if it is for another process: children inherit the variables."""
    address = environment.get("NOTIFY_SOCKET", "")
    if len(address) < 2 or address[0] not in "/@":
        return Settings()
    period = environment.get("WATCHDOG_USEC", "")
    is_meant = environment.get("WATCHDOG_PID", str(process)) == str(process)
    if not is_meant or not period.isdecimal() or int(period) == 0:
        return Settings(address=address)
    return Settings(address=address, watchdog_seconds=int(period) / 1e6)


def lines_of(**fields: str | int) -> bytes:
    """Return a message with one line for each field. Line ends in a value become spaces."""
    return "\n".join(f"{name}={' '.join(str(value).split())}" for name, value in fields.items()).encode()


class Supervisor:
    """The connection to the service manager."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._socket: socket.socket | None = None
        self._status = ""
        self._ailment = ""
        self._is_ready = False
        self._owes_ready = False
        """Whether READY has to be sent again because the queue of the manager was full: without it, a start times out."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        if settings.address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    @staticmethod
    def of_this_process() -> Supervisor:
        # SIGHUP would end the process until `reload` is its handler, and a manager takes that for a clean end.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return Supervisor(settings_from(os.environ, process=os.getpid()))

    def _say(self, **fields: str | int) -> bool:
        if self._socket is None:
            return False
        assert self._settings.address is not None
        address = self._settings.address
        place = "\0" + address[1:] if address.startswith("@") else address
        try:
            self._socket.sendto(lines_of(**fields), place)
        except OSError as error:  # its queue is full, or it does not run; the next message may reach it
            log.debug("the service manager at %s was not reached: %s", address, error.strerror or error)
            return False
        return True

    # -- messages

    def status(self, text: str) -> None:
        """Send one sentence about the state of this daemon."""
        text = text[:STATUS_CHARACTERS_MAX]
        if text != self._status and self._say(STATUS=text):
            self._status = text

    def ready(self) -> None:
        self._is_ready = True
        self._owes_ready = not self._say(READY=1)

    def stopping(self, text: str) -> None:
        self._say(STOPPING=1)
        self.status(text)

    def reload(self, tls: Tls | None) -> None:
        """Reload the certificates, for SIGHUP: new connections use them, open ones continue. Invalid files are logged by
        `Tls` and not used."""
        self._say(RELOADING=1, MONOTONIC_USEC=monotonic_ns() // 1000)
        if tls is None:
            log.info("asked to read the certificates again; this daemon has none, so there is nothing to do")
        else:
            tls.reload()
        if self._is_ready:
            self.ready()

    # -- heartbeats

    def follow(self, describe: Callable[[], str], ailment: Callable[[], str] = lambda: "") -> None:
        """Start to send the status from `describe`, and heartbeats while `ailment` returns an empty text. An exception in
        either of them ends the heartbeats, and so the process, on purpose."""
        if self._settings.watchdog_seconds is not None:
            self._beat(self._settings.watchdog_seconds / 2, ailment)
        if self._socket is not None:
            self._tell(describe)

    def _beat(self, seconds: float, ailment: Callable[[], str]) -> None:
        found = ailment()
        if not found:
            self._say(WATCHDOG=1)
        elif found != self._ailment:
            log.critical("%s: no more signs of life for the service manager, which will end this process", found)
        self._ailment = found
        self._timers["beat"] = asyncio.get_running_loop().call_later(seconds, self._beat, seconds, ailment)

    def _tell(self, describe: Callable[[], str]) -> None:
        if self._owes_ready:
            self.ready()
        self.status(self._ailment or describe())
        self._timers["tell"] = asyncio.get_running_loop().call_later(STATUS_SECONDS, self._tell, describe)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def patience_seconds(self) -> float | None:
        """Seconds for which a call may hang before the process should end; None without a watchdog."""
        return self._settings.watchdog_seconds


class Underway:
    """A watchdog for calls that wait for the disk on any thread, and for the event loop of append streams.

    The age of the oldest call shows a hanging disk; the loop is asked for a heartbeat."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._began: dict[object, float] = {}
        self._ask: Callable[[Callable[[], None]], object] | None = None
        self._asked: float | None = None
        """Time of the request for a heartbeat that is outstanding; None if there is none."""

    def watch(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """Watch an event loop. `call_soon`: its `call_soon_threadsafe`."""
        self._ask = call_soon

    def _heard(self) -> None:
        self._asked = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function and track its duration. Called on the thread: the wait for a thread does not count."""
        mark = object()
        self._began[mark] = self._clock()
        try:
            return function(*arguments)
        finally:
            del self._began[mark]

    def ailment(self, seconds: float | None) -> str:
        """Return an error if a call, or the loop, has hung for `seconds`; empty if not, or if `seconds` is None."""
        now, began = self._clock(), list(self._began.values())
        if seconds is None:
            return ""
        if began and now - min(began) >= seconds:
            return "a write or flush hangs: the disk does not answer"
        if self._ask is not None and self._asked is None:
            self._asked = now
            self._ask(self._heard)
        asked = self._asked
        return "" if asked is None or now - asked < seconds else "the loop of append streams does not answer"
