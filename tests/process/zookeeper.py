"""A real ZooKeeper on loopback for tests, as `waltzd zookeeper` runs it, that can be killed, paused and started again."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

from waltzctl.shell.blueprint import candidate_ports, free_ports
from waltzd.client.loop import run
from waltzd.cluster.zookeeper import ZooKeeperCoordinator
from waltzd.cluster.zookeeper_credentials import NO_CREDENTIALS, ZooKeeperCredentials
from waltzd.errors import CannotConnect

START_ATTEMPTS, ATTEMPT_SECONDS = 30, 2
END_SECONDS = 60


def free_port() -> int:
    """A port that nobody listens on, and that no outgoing connection is given while its ZooKeeper is down."""
    return next(free_ports(random.randrange(len(candidate_ports()))))


class LocalZooKeeper:
    """Keeps its data and its port over `kill` and `start`."""

    def __init__(
        self, directory: Path, *, keystore: Path | None = None, access: ZooKeeperCredentials = NO_CREDENTIALS
    ) -> None:
        """`keystore`: its key and its certificate, and it speaks TLS. `access`: with what it is looked at."""
        self.directory = directory
        self.access = access
        self._tls: list[str] = []
        if keystore is not None:
            self._tls = ["--tls-keystore", str(keystore), "--tls-ca", str(keystore.parent / "zookeeper-ca.pem")]
        self.hosts = f"127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What it wrote before and after it became Java."""
        files = (self.directory.with_suffix(".out"), self.directory / "zookeeper.log")
        return "\n".join(path.read_text() for path in files if path.exists())

    def spawn(self) -> subprocess.Popen[bytes]:
        assert self.process is None
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        with self.directory.with_suffix(".out").open("ab") as out:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "waltzd", "zookeeper", "--directory", str(self.directory)),
                    *("--listen", self.hosts, *self._tls),
                ],
                stdout=out,
                stderr=out,
            )
        return self.process

    def start(self) -> LocalZooKeeper:
        """Return when it answers."""
        process = self.spawn()
        for _ in range(START_ATTEMPTS):
            try:
                run(self._answers())
            except CannotConnect as error:
                if process.poll() is not None:
                    raise AssertionError(f"ZooKeeper ended: exit code {process.poll()}\n{self.log}") from error
            else:
                return self
        self.kill()
        raise AssertionError(f"ZooKeeper does not answer\n{self.log}")

    async def _answers(self) -> None:
        coordinator = ZooKeeperCoordinator(self.hosts, "/up", self.access, call_seconds=ATTEMPT_SECONDS)
        await coordinator.start()
        await coordinator.close()

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
            process.wait(END_SECONDS)
