"""A real cluster on this machine: ZooKeeper, storages and servers as processes under one directory, on loopback.

Nothing outside the directory is written. The cluster is its blueprint; the processes come and go, outlive whoever started
them, and whoever comes next finds them by what is written down in the directory. One at a time changes anything there.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from waltzctl.blueprint import (
    BLUEPRINT,
    HOST,
    ZOOKEEPER,
    Blueprint,
    draw,
    is_free,
    load_blueprint,
    load_lives,
    save_blueprint,
    save_lives,
)
from waltzctl.creation import Wish, create_cluster
from waltzctl.daemon import Daemon, birth
from waltzctl.overview import Overview, look
from waltzd import storages
from waltzd.disk import translate
from waltzd.errors import BadArgument, DirectoryHeld, DiskFull, NoLocalCluster, PartitionsClosed, PortInUse
from waltzd.meta import StorageMeta
from waltzd.zookeeper import ZooKeeperCoordinator
from waltzd.zookeeper_process import java_command

NAME, ROOT = "local", "/waltz"
SESSION_SECONDS, DRAIN_SECONDS = 4, 10
"""Of servers: shorter than what is good in earnest, so that something happens while somebody watches."""
FREE_BYTES_MIN = 256 << 20
START_SECONDS, OPEN_SECONDS, END_SECONDS = 60.0, 60.0, 45.0
SETTLE_SECONDS = 15.0
"""How long to wait for the last replicas, when all partitions take transactions already."""
POLL_SECONDS = 0.1
PROBE_SECONDS = 2.0
Say = Callable[[str], None]


def silence(_sentence: str) -> None:
    """For those who do not want to hear of progress."""


class LocalCluster:
    """`settings` are for the configuration files of its daemons, by kind: "storage", "server"."""

    def __init__(
        self,
        directory: Path,
        blueprint: Blueprint,
        *,
        say: Say = silence,
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self.directory = directory
        self.blueprint = blueprint
        self._say = say
        self._settings = settings or {}
        self.daemons = {name: self._daemon(name) for name in blueprint.names}
        self.recall()

    @classmethod
    def make(
        cls,
        directory: Path,
        *,
        partitions: int = 4,
        storages: int = 3,
        servers: int = 2,
        replication: int = 3,
        say: Say = silence,
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> LocalCluster:
        """A new one; nothing is started yet."""
        if directory.exists() and (directory.is_file() or set(os.listdir(directory)) - {"log", "lock"}):
            raise BadArgument(
                f"{directory} is not empty, and holds no cluster that `waltzctl up` made",
                not_done="nothing was made or started",
                next_step="name a new directory, or an empty one",
            )
        try:
            (directory / "log").mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise translate(error, f"making the directory {directory}") from error
        with _hold(directory):
            if (directory / BLUEPRINT).exists():
                raise DirectoryHeld(f"another program has just made a cluster in {directory}")
            blueprint = draw(directory, partitions=partitions, replication=replication, storages=storages, servers=servers)
            save_blueprint(directory, blueprint)
        return cls(directory, blueprint, say=say, settings=settings)

    @classmethod
    def find(cls, directory: Path, *, say: Say = silence) -> LocalCluster:
        """The one that was made in this directory."""
        return cls(directory, load_blueprint(directory), say=say)

    # -- where things are

    @property
    def coordinator_hosts(self) -> str:
        return self.blueprint.addresses(ZOOKEEPER)[0]

    @property
    def server_addresses(self) -> list[str]:
        """For applications."""
        return [self.blueprint.addresses(name)[0] for name in self.blueprint.server_names]

    @property
    def storage_addresses(self) -> list[str]:
        return [self.blueprint.addresses(name)[0] for name in self.blueprint.storage_names]

    @property
    def storage_directories(self) -> list[Path]:
        return [self.directory / name / "data" for name in self.blueprint.storage_names]

    @property
    def running(self) -> list[str]:
        return [name for name, daemon in self.daemons.items() if daemon.is_running]

    def recall(self) -> None:
        """Which processes were started, also by others."""
        for name, life in load_lives(self.directory).items():
            if name in self.daemons:
                self.daemons[name].life = life

    def remember(self) -> None:
        lives = {name: daemon.life for name, daemon in self.daemons.items() if daemon.life is not None}
        save_lives(self.directory, lives)

    # -- what the daemons are given

    def _daemon(self, name: str) -> Daemon:
        home = self.directory / name
        if name == ZOOKEEPER:
            arguments = [ZOOKEEPER, "--directory", str(home.absolute()), "--listen", self.coordinator_hosts]
            return Daemon(name, arguments, self._log(name), lambda _: _serves(self.coordinator_hosts))
        kind = "storage" if name in self.blueprint.storage_names else "server"
        arguments = [kind, "--config", str((home / f"{kind}.yml").absolute())]
        return Daemon(name, arguments, self._log(name), lambda words: f"waltzd {kind} is ready: " in words)

    def _log(self, name: str) -> Path:
        return self.directory / "log" / f"{name}.log"

    def _write_settings(self, name: str) -> None:
        listen, admin = self.blueprint.addresses(name)
        fields: dict[str, object] = {"listen": listen, "admin_listen": admin}
        if name in self.blueprint.storage_names:
            kind = "storage"
            fields |= {
                "directory": (self.directory / name / "data").absolute(),
                "cluster_key": self.blueprint.key,
                "partitions": self.blueprint.partitions,
            }
        else:
            kind = "server"
            fields |= {
                "name": name,
                "coordinator": self.coordinator_hosts,
                "cluster": ROOT,
                "session_seconds": SESSION_SECONDS,
                "drain_seconds": DRAIN_SECONDS,
            }
        fields |= self._settings.get(kind, {})
        lines = [
            "# Written by `waltzctl up` at every start.",
            *(f"{key}: {_quoted(value)}" for key, value in fields.items()),
        ]
        path = self.directory / name / f"{kind}.yml"
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            raise translate(error, f"writing {path}") from error

    # -- up

    def start(self) -> Overview:
        """Everything that does not run yet; return when every partition is open. When that fails, what was started here is
        stopped again."""
        with _hold(self.directory):
            self.recall()
            before = self.running
            try:
                self._check_machine()
                self._start([ZOOKEEPER, *self.blueprint.storage_names])
                storages.run(self._create())
                self._start(self.blueprint.server_names)
                return storages.run(self._wait_open())
            except BaseException:
                self._end([name for name in self.running if name not in before])
                raise

    def start_one(self, name: str) -> None:
        with _hold(self.directory):
            self._start([name])

    def _check_machine(self) -> None:
        """What can be known before anything is started."""
        if birth(os.getpid()) is None:
            raise BadArgument(
                "a cluster on one machine needs Linux: without /proc nobody can tell one process from another",
                not_done="nothing was started",
                next_step="run it in a Linux container or a virtual machine",
            )
        free = shutil.disk_usage(self.directory).free
        if free < FREE_BYTES_MIN:
            raise DiskFull(
                f"{self.directory}: {free >> 20} MiB are free there, and a cluster needs at least {FREE_BYTES_MIN >> 20}",
                not_done="nothing was started",
                next_step="free some space, or name a directory on another disk",
            )
        if not self.daemons[ZOOKEEPER].is_running:
            java_command()
        for name, daemon in self.daemons.items():
            if daemon.is_running:
                continue
            taken = [port for port in self.blueprint.ports[name] if not is_free(port)]
            if taken:
                raise PortInUse(
                    f"another program listens on {HOST}:{taken[0]}, the address of {name} in {self.directory}",
                    not_done="nothing was started",
                    next_step="stop that program, or begin anew in another directory",
                )

    def _start(self, names: list[str]) -> None:
        for name in names:
            if not self.daemons[name].is_running:
                if name != ZOOKEEPER:
                    self._write_settings(name)
                with _undisturbed():  # what runs and is not written down would never be found again
                    self.daemons[name].spawn()
                    self.remember()
        for name in names:
            self._say(f"waiting for {name}")
            self.daemons[name].wait_ready(START_SECONDS)
        self.remember()

    async def _create(self) -> None:
        self._say("writing down the cluster, making its replicas")
        wish = Wish(
            name=NAME,
            key=self.blueprint.key,
            partitions=self.blueprint.partitions,
            replication=self.blueprint.replication,
            storages=tuple(
                StorageMeta(name=name, listen=listen, admin_listen=admin, group=name)
                for name in self.blueprint.storage_names
                for listen, admin in [self.blueprint.addresses(name)]
            ),
        )
        coordinator = ZooKeeperCoordinator(self.coordinator_hosts, ROOT)
        await coordinator.start()
        try:
            await create_cluster(coordinator, wish, created=datetime.now(UTC).isoformat(timespec="seconds"))
        finally:
            await coordinator.close()

    async def _wait_open(self) -> Overview:
        """Until every partition takes transactions with all of its replicas; without some of them when that takes long."""
        coordinator = ZooKeeperCoordinator(self.coordinator_hosts, ROOT)
        await coordinator.start()
        started = time.monotonic()
        try:
            while True:
                found = await look(coordinator)
                seconds = time.monotonic() - started
                if not found.closed and (seconds > SETTLE_SECONDS or self._is_settled(found)):
                    return found
                if seconds > OPEN_SECONDS:
                    break
                self._say(f"waiting for partitions: {len(found.partitions) - len(found.closed)} are open")
                for daemon in self.daemons.values():
                    daemon.check_running()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await coordinator.close()
        waiting = "; ".join(f"partition {partition.partition}: {partition.waiting}" for partition in found.closed[:5])
        raise PartitionsClosed(f"{len(found.closed)} partitions are not open after {OPEN_SECONDS:g} seconds. {waiting}")

    def _is_settled(self, found: Overview) -> bool:
        """Every replica takes part, and the partitions are where they are going to stay."""
        owned = [len(view.said.partitions) if view.said is not None else -1 for view in found.servers]
        return not found.short and len(owned) == self.blueprint.servers and max(owned) - min(owned) <= 1

    async def overview(self) -> Overview:
        coordinator = ZooKeeperCoordinator(self.coordinator_hosts, ROOT)
        await coordinator.start()
        try:
            return await look(coordinator)
        finally:
            await coordinator.close()

    # -- down

    def stop(self) -> list[str]:
        """In order: servers, storages, ZooKeeper. The names of those that had to be killed."""
        with _hold(self.directory):
            self.recall()
            return self._end(self.running)

    def kill(self) -> None:
        """At once. What was acknowledged is on the disk."""
        self.recall()
        for name in self.running:
            self.daemons[name].kill()

    def _end(self, names: list[str]) -> list[str]:
        killed = []
        for wave in (self.blueprint.server_names, self.blueprint.storage_names, [ZOOKEEPER]):
            ending = [name for name in wave if name in names]
            for name in ending:
                self.daemons[name].ask_to_end()
            for name in ending:
                self._say(f"waiting for {name} to end")
                if not self.daemons[name].wait_end(END_SECONDS):
                    killed.append(name)
        return killed


def _quoted(value: object) -> str:
    return value if isinstance(value, str) and value.isalnum() else "'" + str(value).replace("'", "''") + "'"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C waits until this is over. It reaches the main thread only."""
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


def _serves(address: str) -> bool:
    """Whether ZooKeeper answers there."""
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=PROBE_SECONDS) as connection:
            connection.sendall(b"srvr")
            return connection.recv(64).startswith(b"Zookeeper version")
    except OSError:
        return False


@contextmanager
def _hold(directory: Path) -> Iterator[None]:
    """While this lasts nobody else starts or stops anything there. The lock goes with the process that has it."""
    try:
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError as error:
        raise NoLocalCluster(f"{directory} does not exist") from error
    except OSError as error:
        raise translate(error, f"locking {directory}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise DirectoryHeld(
            f"another waltzctl starts or stops the cluster in {directory} at this moment",
            next_step="wait until it has finished, then try again",
        ) from error
    finally:
        os.close(lock)
