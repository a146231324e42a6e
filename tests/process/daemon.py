"""A real `waltzd storage` process for tests and benchmarks, on loopback, that ends with the process that started it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Self
from uuid import UUID

from waltzd.wire.storages import AdminClient, ReplicaClient

OWNER_KEY = b"the owner in all tests"
"""Who opens a session in one client goes on with it in another."""
KEY = UUID("00112233-4455-6677-8899-aabbccddeeff")
PARTITIONS = 4
END_SECONDS = 60


class DaemonProcess:
    """Start with `start`, end with `stop` (SIGTERM) or `kill` (SIGKILL); `log` is what it wrote to stderr."""

    role: ClassVar[str]
    ready: ClassVar[re.Pattern[str]]
    """The line that it prints when it is ready, with its addresses."""

    def __init__(self, home: Path, name: str, settings: dict[str, object], environment: dict[str, str]) -> None:
        """`environment`: in addition to that of the tests."""
        self.home = home
        self.config_path, self.log_path = home / f"{name}.yml", home / f"{name}.log"
        self.settings = {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", **settings}
        self.environment = environment
        self.arguments: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self.listen = self.admin_listen = ""

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def spawn(self) -> subprocess.Popen[str]:
        self.home.mkdir(parents=True, exist_ok=True)
        lines = [f"{name}: {value}\n" for name, value in self.settings.items() if value is not None]
        self.config_path.write_text("".join(lines))
        with self.log_path.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "waltzd", self.role, "--config", str(self.config_path), *self.arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self.environment},
            )
        return self.process

    def start(self) -> Self:
        process = self.spawn()
        assert process.stdout is not None
        found = self.ready.match(process.stdout.readline())
        if not found:
            raise AssertionError(f"the {self.role} did not start: exit code {process.wait(END_SECONDS)}\n{self.log}")
        vars(self).update(found.groupdict())
        return self

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        return self._end(signal.SIGKILL)

    def wait(self) -> int:
        """For a daemon that ends by itself."""
        assert self.process is not None
        self.process.wait(END_SECONDS)
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
        code = process.wait(END_SECONDS)
        assert process.stdout is not None
        process.stdout.close()
        return code

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.kill()


class Daemon(DaemonProcess):
    """A storage."""

    role = "storage"
    ready = re.compile(
        r"waltzd storage is ready: listen=(?P<listen>\S+) streams=(?P<stream_listen>\S+) admin=(?P<admin_listen>\S+) "
    )

    def __init__(self, home: Path, *, environment: dict[str, str] | None = None, **settings: object) -> None:
        self.directory = home / "data"
        own = {"directory": self.directory, "cluster_key": KEY, "partitions": PARTITIONS, "free_bytes_min": 0}
        super().__init__(home, "storage", {**own, **settings}, environment or {})
        self.stream_listen = ""

    @contextmanager
    def renaming(self) -> Iterator[None]:
        """Started for once as one that takes the directory of another storage over."""
        self.arguments = ["--rename"]
        try:
            with self:
                yield
        finally:
            self.arguments = []

    def replicas(self, key: UUID = KEY) -> ReplicaClient:
        port = int(self.stream_listen.rpartition(":")[2])
        return ReplicaClient(self.listen, key, stream_port=port, owner_key=OWNER_KEY)

    def admin(self, key: UUID = KEY) -> AdminClient:
        return AdminClient(self.admin_listen, key)
