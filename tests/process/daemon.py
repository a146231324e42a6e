"""A real `waltzd storage` process for tests and benchmarks, on loopback, that ends with whoever started it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from waltzd.wire.storages import AdminClient, ReplicaClient

KEY = UUID("00112233-4455-6677-8899-aabbccddeeff")
PARTITIONS = 4
_READY = re.compile(r"waltzd storage is ready: listen=(\S+) streams=(\S+) admin=(\S+) ")


class Daemon:
    """Start with `start`, end with `stop` (SIGTERM) or `kill` (SIGKILL); `log` is what it wrote to stderr."""

    def __init__(self, home: Path, *, environment: dict[str, str] | None = None, **settings: object) -> None:
        self.home = home
        self.directory = home / "data"
        self.environment = environment or {}
        self.arguments: list[str] = []
        self.settings: dict[str, object] = {
            "directory": self.directory,
            "listen": "127.0.0.1:0",
            "admin_listen": "127.0.0.1:0",
            "cluster_key": KEY,
            "partitions": PARTITIONS,
            "free_bytes_min": 0,
            **settings,
        }
        self.process: subprocess.Popen[str] | None = None
        self.listen = self.stream_listen = self.admin_listen = ""

    @property
    def config_path(self) -> Path:
        return self.home / "storage.yml"

    @property
    def log(self) -> str:
        return (self.home / "storage.log").read_text()

    def spawn(self) -> subprocess.Popen[str]:
        self.home.mkdir(parents=True, exist_ok=True)
        lines = [f"{name}: {value}" for name, value in self.settings.items() if value is not None]
        self.config_path.write_text("\n".join(lines) + "\n")
        with (self.home / "storage.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "waltzd", "storage", "--config", str(self.config_path), *self.arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self.environment},
            )
        return self.process

    def start(self) -> Daemon:
        process = self.spawn()
        assert process.stdout is not None
        line = process.stdout.readline()
        found = _READY.match(line)
        if not found:
            raise AssertionError(f"the storage did not start: exit code {process.wait(30)}\n{self.log}")
        self.listen, self.stream_listen, self.admin_listen = found.groups()
        return self

    @contextmanager
    def renaming(self) -> Iterator[None]:
        """Started for once as one that takes the directory over, whosever it was."""
        self.arguments = ["--rename"]
        try:
            with self:
                yield
        finally:
            self.arguments = []

    def replicas(self, key: UUID = KEY) -> ReplicaClient:
        return ReplicaClient(self.listen, key, stream_port=int(self.stream_listen.rpartition(":")[2]))

    def admin(self, key: UUID = KEY) -> AdminClient:
        return AdminClient(self.admin_listen, key)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        return self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(number)
        code = process.wait(60)
        assert process.stdout is not None
        process.stdout.close()
        return code

    def wait(self) -> int:
        """For a daemon that ends by itself."""
        assert self.process is not None
        self.process.wait(60)
        return self._end(signal.SIGTERM)

    def __enter__(self) -> Daemon:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.kill()
