"""Programs that a comparison starts: their output in a log, ended by their number, and the CPU that they used.

Each has a session of its own, so that Ctrl-C reaches only the one who ends them in order.
"""

from __future__ import annotations

import os
import pwd
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

HOST = "127.0.0.1"
START_SECONDS, END_SECONDS = 60.0, 15.0
POLL_SECONDS = 0.03
TOLD_BYTES = 2000


class Process:
    """`account`: who runs it, when that is not us. `ending`: the signal after which it takes its children with it."""

    def __init__(
        self,
        name: str,
        command: Sequence[object],
        home: Path,
        *,
        port: int,
        account: pwd.struct_passwd | None = None,
        ending: signal.Signals = signal.SIGKILL,
        end_seconds: float = END_SECONDS,
    ) -> None:
        self.name = name
        self._command = [str(word) for word in command]
        self._home = home
        self._port = port
        self._account = account
        self._ending = ending
        self._end_seconds = end_seconds
        self._log = home / f"{name}.log"
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None, f"{self.name} was not started"
        return self._child.pid

    def start(self) -> None:
        with self._log.open("ab") as log, undisturbed():
            self._child = spawn(self._command, self._home, self._account, log.fileno())

    def wait_listening(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not listens(self._port):
            assert self._child is not None
            if self._child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} did not start: {self.last_words()}")
            time.sleep(POLL_SECONDS)

    def last_words(self) -> str:
        return self._log.read_bytes()[-TOLD_BYTES:].decode("utf-8", errors="replace")

    def stop(self) -> None:
        if self._child is None:
            return
        family = family_of([self._child.pid])
        self._child.send_signal(self._ending)
        try:
            self._child.wait(self._end_seconds)
        except subprocess.TimeoutExpired:
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._child.wait(END_SECONDS)


def spawn(command: list[str], home: Path, account: pwd.struct_passwd | None, output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=home,
        env=environment(home),
        start_new_session=True,
        user=account.pw_uid if account else None,
        group=account.pw_gid if account else None,
        extra_groups=[] if account else None,
    )


def environment(home: Path) -> dict[str, str]:
    """Little of ours: what somebody set for another server must not change these."""
    return {"PATH": os.environ.get("PATH", ""), "HOME": str(home), "LC_ALL": "C", "TZ": "UTC"}


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


def family_of(pids: Iterable[int]) -> list[int]:
    """These and everything that they started and that still runs: a database has a process for each connection."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := _fields(int(folder.name))):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = list(pids)
    for pid in found:
        found += [child for child in children.get(pid, []) if child not in found]
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """What they and their children used, ended ones included."""
    return sum(_used(pid) for pid in family_of(pids))


def _used(pid: int) -> float:
    fields = _fields(pid)
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _fields(pid: int) -> list[str]:
    """From the state on; none when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


@contextmanager
def undisturbed() -> Iterator[None]:
    """Whoever wants us to end waits until this is over: a process that was started is remembered, and one that is being
    ended is gone."""
    came: list[int] = []
    wanted = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: came.append(number)) for number in wanted]
    try:
        yield
    finally:
        for number, handler in zip(wanted, before, strict=True):
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])
