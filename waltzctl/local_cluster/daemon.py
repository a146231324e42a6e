"""One daemon of a local cluster, and facts about processes from /proc.

The daemon outlives the command that started it. A process is identified by its number and its start time, so a number
that now belongs to another program is left alone. It must also write to the expected log file, or have been started
with our command line, because the notes in a directory may have been copied from elsewhere. Output goes to a log file,
which needs no reader as a pipe would. All functions block, with a deadline.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from waltzctl.shell.blueprint import Life
from waltzd.disk.real import translate
from waltzd.errors.operations import DaemonEnded, DaemonSilent

POLL_SECONDS = 0.03
KILL_SECONDS = 10.0
LOG_BYTES_MAX = 16 << 20
"""A larger log is renamed at the next start; one older log is kept."""
TOLD_LINES, TOLD_BYTES = 8, 8 << 10
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class Process:
    """State of a daemon at one moment, for display."""

    name: str
    kind: str
    """zookeeper, storage or server."""
    addresses: tuple[str, ...]
    """Address for callers, then the admin address; ZooKeeper has only the first."""
    pid: int | None
    """Process number; None if it does not run."""
    log: Path


class Daemon:
    """One daemon process. `arguments` are those of `waltzd`; `is_ready` gets the output of the process."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, is_ready: Callable[[str], bool]) -> None:
        self.name = name
        self.log = log
        self.life: Life | None = None
        """Last known process, which may have ended; None if there was none."""
        self.command = [sys.executable, "-P", "-m", "waltzd", *arguments]
        """Command line. A test may put another program in front of it, by its absolute path."""
        self.environment: dict[str, str] = {}
        """Environment variables besides our own."""
        self._is_ready = is_ready
        self._child: int | None = None
        """Process number of a child whose exit code was not read yet; None if there is none."""
        self._exit: int | None = None

    def take_over(self, life: Life) -> None:
        """Take over the notes of the directory; another command may have written them."""
        if self.life is not None and self.life.birth != life.birth:
            self._exit = None
        self.life = life

    @property
    def stranger(self) -> int | None:
        """Process number of our last process, if it belongs to another program now; else None."""
        if self.life is None or self.is_running or birth(self.life.pid) is None:
            return None
        return self.life.pid

    @property
    def is_running(self) -> bool:
        if self.life is None:
            return False
        self._reap()
        return birth(self.life.pid) == self.life.birth and self._is_ours(self.life.pid)

    def _is_ours(self, pid: int) -> bool:
        """Return whether the process writes to our log or has our command line: the log may have been removed, and
        ZooKeeper's command line becomes Java's."""
        try:
            with suppress(FileNotFoundError):
                if os.path.samestat(self.log.stat(), os.stat(f"/proc/{pid}/fd/1")):
                    return True
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            return False
        except PermissionError:  # of another user; it could not be signalled anyway
            return True
        # A process that is just ending has no command line and no files, but still holds its ports.
        return not words or words[-len(self.command) :] == [os.fsencode(word) for word in self.command]

    def _reap(self) -> None:
        """Read the exit code of a child that ended; until then it stays visible as a zombie."""
        if self._child is None:
            return
        ended, status = os.waitpid(self._child, os.WNOHANG)
        if ended:
            self._child, self._exit = None, os.waitstatus_to_exitcode(status)

    # -- a start

    def spawn(self) -> Life:
        """Start it in a session of its own: Ctrl-C and a closed terminal do not reach it."""
        assert not self.is_running
        self._exit = None
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            log_from = self._make_room()
            pid = os.posix_spawn(
                self.command[0],
                self.command,
                {**os.environ, **self.environment},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, str(self.log), append, 0o600),
                    (os.POSIX_SPAWN_DUP2, 1, 2),
                ],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
            )
        except OSError as error:
            raise translate(error, f"starting {self.name}") from error
        self._child = pid
        self.life = Life(pid, birth(pid) or "ended", log_from)
        return self.life

    def _make_room(self) -> int:
        """Return the offset in the log at which its output will begin. We write a line with the time first, because the
        first output of a daemon has none."""
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES_MAX:
            self.log.replace(self.log.with_name(self.log.name + ".old"))
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"{now} INFO     waltzctl starts {self.name}\n")
            return log.tell()

    def is_ready(self) -> bool:
        """Return whether it has become ready; raise if it has ended."""
        assert self.life is not None
        if not self.life.was_ready:
            is_running = self.is_running  # ask before reading the log: if the process has ended, its last output is there
            if not self._is_ready(self.words(most=None)):
                if not is_running:
                    raise self._ended()
                return False
            self.life = replace(self.life, was_ready=True)
        return True

    def silent(self, seconds: float) -> DaemonSilent:
        return DaemonSilent(
            f"{self.name} did not become ready within {seconds:g} seconds. {self._last_words()}",
            not_done="the cluster was not brought up; what was started for it is stopped again",
        )

    def check_running(self) -> None:
        if not self.is_running:
            raise self._ended()

    def _ended(self) -> DaemonEnded:
        deadline = time.monotonic() + KILL_SECONDS
        while self._child is not None and time.monotonic() < deadline:  # it is just ending, and has no exit code yet
            self._reap()
            time.sleep(POLL_SECONDS)
        return DaemonEnded(f"{self.name} ended{self.how_it_ended}. {self._last_words()}")

    # -- an end

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; return whether there was a process."""
        if self.life is None or not self.is_running:
            return False
        try:
            os.kill(self.life.pid, number)
        except ProcessLookupError:  # it has just ended
            return False
        return True

    def ask_to_end(self) -> None:
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)  # a stopped process would not see the other signal

    def wait_end(self, seconds: float) -> bool:
        """Wait for its end; return whether it ended in time. Otherwise it is killed; what it acknowledged is on the
        disk."""
        if self._has_ended(seconds):
            return True
        self.kill()
        return False

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        if not self._has_ended(KILL_SECONDS):
            raise DaemonSilent(f"{self.name} does not end although it was killed", next_step="look at its disk")

    def _has_ended(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.is_running:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    # -- what it says

    def words(self, *, most: int | None = TOLD_BYTES) -> str:
        """Return its output since the last start: all of it, or the last `most` bytes."""
        start = self.life.log_from if self.life is not None else 0
        try:
            with self.log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(start if most is None else max(start, end - most))
                return file.read().decode("utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    @property
    def how_it_ended(self) -> str:
        """Return how it ended, to follow a verb; empty if another command started it, which gets the exit code."""
        if self._exit is None:
            return ""
        return f" with exit code {self._exit}" if self._exit >= 0 else f", killed by {signal.Signals(-self._exit).name}"

    def _last_words(self) -> str:
        lines = [f"  {line}" for line in self.words().splitlines()[-TOLD_LINES:]]
        return "\n".join([f"{self.log} ends with:", *lines]) if lines else f"{self.log} is empty."


# -- processes, as the kernel tells of them ----------------------------------------------------------------------------


def birth(pid: int) -> str | None:
    """Return the start time of a process as a text that is unique across reboots; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = _BOOT.read_text(encoding="ascii").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the name of the program comes first, and may hold anything
    # The main thread of a killed process may have ended while other threads still close its files and ports.
    has_ended = state == "X" or (state == "Z" and int(rest[16]) <= 1)
    return None if has_ended else f"{boot}/{rest[18]}"


def command_of(pid: int) -> str:
    """Return the command line of a process, or its short name."""
    for file in ("cmdline", "comm"):
        try:
            words = Path(f"/proc/{pid}", file).read_bytes().decode("utf-8", "replace").replace("\0", " ").strip()
        except OSError:
            return "ended just now"
        if words:
            return "".join(one if one.isprintable() else "?" for one in words)
    return "without a name"


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay Ctrl-C until the block is left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)
