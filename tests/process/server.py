"""A real `waltzd server` process for tests, on loopback, that ends with whoever started it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from uuid import UUID

from waltzd.wire.servers import ServerAdminClient

END_SECONDS = 60
_READY = re.compile(r"waltzd server is ready: listen=(\S+) admin=(\S+) name=(\S+)\n")


class ServerDaemon:
    """Start with `start`, end with `stop` (SIGTERM) or `kill` (SIGKILL); `log` is what it wrote to stderr."""

    def __init__(self, home: Path, *, name: str, hosts: str, cluster: str, **settings: object) -> None:
        self.home = home
        self.name = name
        self.environment: dict[str, str] = {}
        """In addition to that of the tests."""
        self.settings: dict[str, object] = {
            "name": name,
            "coordinator": hosts,
            "cluster": cluster,
            "listen": "127.0.0.1:0",
            "admin_listen": "127.0.0.1:0",
            "session_seconds": 4,
            "drain_seconds": 20,
            **settings,
        }
        self.process: subprocess.Popen[str] | None = None
        self.listen = self.admin_listen = ""

    @property
    def log_path(self) -> Path:
        return self.home / f"{self.name}.log"

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def spawn(self) -> subprocess.Popen[str]:
        self.home.mkdir(parents=True, exist_ok=True)
        config = self.home / f"{self.name}.yml"
        config.write_text("".join(f"{name}: {value}\n" for name, value in self.settings.items() if value is not None))
        with self.log_path.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "waltzd", "server", "--config", str(config)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self.environment},
            )
        return self.process

    def start(self) -> ServerDaemon:
        process = self.spawn()
        assert process.stdout is not None
        found = _READY.match(process.stdout.readline())
        if not found:
            raise AssertionError(f"the server did not start: exit code {process.wait(END_SECONDS)}\n{self.log}")
        self.listen, self.admin_listen, _ = found.groups()
        return self

    def admin(self, key: UUID) -> ServerAdminClient:
        return ServerAdminClient(self.admin_listen, key)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        return self._end(signal.SIGKILL)

    def wait(self) -> int:
        """For a server that ends by itself."""
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
