"""One daemon of a cluster on this machine: a process that outlives whoever started it, and is never taken for another.

A process is known by its number together with the moment when it started, so that a number which the system has given to
somebody else meanwhile is left alone; and it writes to the log that is there, or was started with our words, as whoever
gave us the directory may have written anything down. Its output goes to a log file, because nobody may be there to read a
pipe. Everything here blocks, with a deadline.
"""

from __future__ import annotations

import enum
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from waltzctl.blueprint import Life
from waltzd.disk.real import translate
from waltzd.errors import DaemonEnded, DaemonSilent

POLL_SECONDS = 0.03
KILL_SECONDS = 10.0
LOG_BYTES_MAX = 16 << 20
"""A log that is larger makes room for a new one at the next start; one older one is kept."""
TOLD_LINES, TOLD_BYTES = 8, 8 << 10
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def birth(pid: int) -> str | None:
    """When the process started, as a text that no other process ever has; None when it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = _BOOT.read_text(encoding="ascii").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the name before may hold anything
    # The first thread of a process that was killed may have ended while others still close its files and ports.
    has_ended = state == "X" or (state == "Z" and int(rest[16]) <= 1)
    return None if has_ended else f"{boot}/{rest[18]}"


class State(enum.Enum):
    """What becomes of a daemon while somebody waits for it."""

    WAITS = "waits"
    """For its turn to be started."""
    STARTS = "starts"
    READY = "ready"
    ENDS = "ends"
    STOPPED = "stopped"
    """As it was told to."""
    ENDED = "ended"
    """By itself."""

    @property
    def is_passing(self) -> bool:
        return self in (State.STARTS, State.ENDS)


class Daemon:
    """`arguments` are those of `waltzd`; `is_ready` looks at what the process wrote, or at whatever it likes."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, is_ready: Callable[[str], bool]) -> None:
        self.name = name
        self.log = log
        self.life: Life | None = None
        """The last one, which may have ended."""
        self.command = [sys.executable, "-P", "-m", "waltzd", *arguments]
        """What is started. A test may put another program in front of it, named by its whole path."""
        self.environment: dict[str, str] = {}
        """What it is given besides our own."""
        self._is_ready = is_ready
        self._child: int | None = None
        """A process of ours whose exit code nobody has asked for yet."""
        self._exit: int | None = None

    def take_over(self, life: Life) -> None:
        """What is written down of it, perhaps by somebody else."""
        if self.life is not None and self.life.birth != life.birth:
            self._exit = None
        self.life = life

    @property
    def stranger(self) -> int | None:
        """The number of our last process, when another one has it now."""
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
        """A log may have been removed meanwhile, and ZooKeeper becomes Java: one of the two is enough."""
        try:
            with suppress(FileNotFoundError):
                if os.path.samestat(self.log.stat(), os.stat(f"/proc/{pid}/fd/1")):
                    return True
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
        except (FileNotFoundError, ProcessLookupError):  # it has ended just now
            return False
        except PermissionError:  # of another user: nothing that we could do to it
            return True
        # One that is just ending has no words and no files any more, and its ports are taken for a moment yet.
        return not words or words[-len(self.command) :] == [os.fsencode(word) for word in self.command]

    def _reap(self) -> None:
        """A child that has ended stays visible until its exit code is asked for."""
        if self._child is None:
            return
        ended, status = os.waitpid(self._child, os.WNOHANG)
        if ended:
            self._child, self._exit = None, os.waitstatus_to_exitcode(status)

    # -- a start

    def spawn(self) -> Life:
        """Start it. It has a session of its own: Ctrl-C and a closed terminal do not reach it."""
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
        """Where its words are going to begin, behind a line of ours: what a daemon says first has no time of its own."""
        if self.log.exists() and self.log.stat().st_size > LOG_BYTES_MAX:
            self.log.replace(self.log.with_name(self.log.name + ".old"))
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"{now} INFO     waltzctl starts {self.name}\n")
            return log.tell()

    def is_ready(self) -> bool:
        """Whether it has become ready; an error when it has ended instead."""
        assert self.life is not None
        if not self.life.was_ready:
            is_running = self.is_running  # looked at first: its last words are there when it has ended
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
        return DaemonEnded(f"{self.name} ended{self.how_it_ended}. {self._last_words()}")

    # -- an end

    def send(self, number: signal.Signals) -> bool:
        """Whether there was a process to send it to."""
        if self.life is None or not self.is_running:
            return False
        try:
            os.kill(self.life.pid, number)
        except ProcessLookupError:  # it ended just now
            return False
        return True

    def ask_to_end(self) -> None:
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)  # a paused one would never hear it

    def wait_end(self, seconds: float) -> bool:
        """Whether it ended in time. Otherwise it is killed: what it acknowledged is on the disk all the same."""
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
        """What it wrote since its last start, or so many bytes of the end of it."""
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
        """Empty when it was started by somebody else: then nobody told us."""
        if self._exit is None:
            return ""
        return f" with exit code {self._exit}" if self._exit >= 0 else f", killed by {signal.Signals(-self._exit).name}"

    def _last_words(self) -> str:
        lines = [f"  {line}" for line in self.words().splitlines()[-TOLD_LINES:]]
        return "\n".join([f"{self.log} ends with:", *lines]) if lines else f"{self.log} is empty."
