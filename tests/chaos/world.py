"""Everything that a run may break: a cluster of real processes, its network, its disks and its clocks.

What is not possible on this machine is missing here, and those who need it say so by their `refusal`. Daemons that end
without having been asked to are a finding; the cluster itself is that of `waltzctl up`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from tests.chaos import disks, preload, sandbox
from tests.chaos.disks import Disk
from tests.chaos.network import Network
from tests.chaos.plan import DAEMONS, SERVERS, STORAGES, STORAGES_AT_ONCE, ZOOKEEPER
from tests.chaos.preload import Preload
from tests.process.cluster import Cluster
from waltzctl.local_cluster.java import java_command, write_settings
from waltzctl.local_cluster.local import LocalCluster
from waltzctl.shell.blueprint import Blueprint, ports_for
from waltzd.errors.operations import DaemonEnded
from waltzd.protocol.address import Address
from waltzd.wire.storages import AdminClient, ReplicaClient

PARTITIONS = (0, 1, 2)
NO_ZOOKEEPER = "no ZooKeeper answers at"
"""What a server says that is started while ZooKeeper is away. It ends, and its supervisor starts it again."""
SESSION_SECONDS = 2
PATIENCE_SECONDS = 60.0
STORAGE_SETTINGS: Mapping[str, object] = {"segment_bytes_max": 256 << 10, "free_bytes_min": 1 << 20}
SERVER_SETTINGS: Mapping[str, object] = {
    "session_seconds": SESSION_SECONDS,
    "storage_seconds": 2,
    "session_bytes_max": 8 << 20,
    "segment_bytes_max": 32 << 10,
}
"""Segments are small, so that much is sealed, and archived."""


def placed(blueprint: Blueprint, hosts: Mapping[str, str]) -> Blueprint:
    """Each daemon has an address of its own, which stands in no file."""

    class Placed(Blueprint):
        def addresses(self, name: str) -> tuple[str, ...]:
            return tuple(f"{hosts[name]}:{port}" for port in self.ports[name])

    return Placed(**vars(blueprint))


class World:
    def __init__(self, folder: Path, seed: int, *, patience: float = PATIENCE_SECONDS, format: int = 1) -> None:
        """`patience`: how long it may take to become whole when nothing is wrong any more; half of it, to commit again.
        `format`: of what the cluster writes at first."""
        self.folder = folder
        self.format = format
        self.patience = patience
        self._seed = seed
        self._network: Network | None = None
        self._preload: Preload | None = None
        self.disks: dict[str, Disk] = {}
        self._cluster: Cluster | None = None
        self._up: set[str] = set()
        """Daemons that nobody has ended."""
        self._may_end: set[str] = set()
        self._paused: set[str] = set()
        self.flipped: set[str] = set()
        """Storages with a small file of which one copy may still be wrong: the next changes repair it."""
        self.deaths: list[str] = []
        """Daemons that ended and should not have, and their last words."""

    @property
    def cluster(self) -> Cluster:
        assert self._cluster is not None
        return self._cluster

    @property
    def network(self) -> Network:
        assert self._network is not None
        return self._network

    @property
    def preload(self) -> Preload:
        assert self._preload is not None
        return self._preload

    @property
    def archive(self) -> Path:
        """On a disk to which nothing happens."""
        return self.folder / "archive"

    def storage_directory(self, name: str) -> Path:
        return self.folder / "cluster" / name / "data"

    # -- begin and end

    async def start(self) -> None:
        self.folder.mkdir()
        (self.folder / "history").mkdir()
        self.archive.mkdir()
        directory = self.folder / "cluster"
        (directory / "log").mkdir(parents=True)
        if sandbox.refusal() is None:
            self._network = Network(DAEMONS, self._seed)
            self._network.start()
        if disks.refusal() is None:
            for name in STORAGES:
                disk = self.disks[name] = Disk(self.folder / f"{name}.img", directory / name)
                await asyncio.to_thread(disk.make)
        if preload.refusal() is None:
            self._preload = Preload(self.folder / "preload")
            await asyncio.to_thread(self._preload.build)
        self._cluster = Cluster(self._lay_out(directory))
        await asyncio.to_thread(self.cluster.start)
        for name in self.disks:
            _flush(directory / name)
        self._up = set(DAEMONS)

    def _lay_out(self, directory: Path) -> LocalCluster:
        blueprint = Blueprint(
            key=uuid4(), partitions=len(PARTITIONS), replication=3, storages=len(STORAGES), servers=len(SERVERS), ports={},
            format=self.format,
        )  # fmt: skip
        blueprint = replace(blueprint, ports=ports_for(blueprint.names, directory, None))
        anywhere: dict[str, object] = {}
        if self._network is not None:
            blueprint = placed(blueprint, {name: self._network.address(name) for name in DAEMONS})
            anywhere = {"plaintext": "anywhere"}
        storage = {**STORAGE_SETTINGS, "archive": str(self.archive), **anywhere}
        settings = {"storage": storage, "server": {**SERVER_SETTINGS, **anywhere}}
        local = LocalCluster(directory, blueprint, settings=settings)
        for name, daemon in local.daemons.items():
            if self._network is not None:
                if name == ZOOKEEPER:
                    daemon.command = self._zookeeper_command(directory / name, local.coordinator_hosts)
                daemon.command = [*self._network.inside(name), *daemon.command]
            if self._preload is not None:
                daemon.environment = self._preload.environment(name, directory / name)
        return local

    @staticmethod
    def _zookeeper_command(home: Path, hosts: str) -> list[str]:
        """As `waltzd zookeeper` runs it, which listens on this machine's own address only, and not on ours."""
        (home / "data").mkdir(mode=0o700, parents=True)
        host, port = hosts.split(":")
        write_settings(str(home), Address(host, int(port)))
        java, *rest = java_command()
        return ["/usr/bin/env", f"--chdir={home}", java, "-XX:-UsePerfData", *rest]  # a killed one would leave its file

    async def close(self) -> None:
        try:
            if self._cluster is not None:
                await asyncio.to_thread(self._cluster.close)
        finally:
            try:
                for disk in self.disks.values():
                    await asyncio.to_thread(disk.unmount)
            finally:
                if self._network is not None:
                    self._network.close()

    # -- processes

    def members(self, target: str) -> Sequence[str]:
        return STORAGES if target == STORAGES_AT_ONCE else (target,)

    def kill(self, name: str) -> None:
        self._up.discard(name)
        self.cluster.kill(name)

    def pause(self, name: str) -> None:
        if self.cluster.local.daemons[name].send(signal.SIGSTOP):
            self._paused.add(name)

    def resume(self, name: str) -> None:
        if name in self._paused:
            self._paused.discard(name)
            self.cluster.local.daemons[name].send(signal.SIGCONT)

    def may_end(self, name: str) -> None:
        """Until its next start."""
        self._may_end.add(name)

    def spawn(self, name: str) -> None:
        if not self.cluster.local.daemons[name].is_running:
            self._may_end.discard(name)
        self.cluster.spawn(name)
        self._up.add(name)

    def look_for_deaths(self) -> None:
        """Start those again that have ended, and take down the names of those that should not have."""
        for name in sorted(self._up):
            try:
                self.cluster.local.daemons[name].check_running()
            except DaemonEnded as error:
                if name not in self._may_end and NO_ZOOKEEPER not in error.message:
                    self.deaths.append(f"{name} ended by itself: {error.message}")
                self.spawn(name)

    # -- health

    async def heal(self, seconds: float) -> None:
        """Every daemon runs, and every partition is open with all its replicas."""
        self.look_for_deaths()
        await self.cluster.heal(seconds)

    async def upgrade(self) -> None:
        """The cluster goes over to format 1, while clients race."""
        self.format = 1
        hosts = self.cluster.local.coordinator_hosts
        command = ("cluster", "set", "--format", "1", "--yes", "--timeout", str(self.patience), "--coordinator", hosts)
        tool = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "waltzctl",
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await tool.communicate()
        assert tool.returncode == 0, f"the cluster does not go over to format 1: {said.decode(errors='replace')}"

    def replica(self, name: str) -> ReplicaClient:
        return ReplicaClient(self.cluster.local.blueprint.addresses(name)[0], self.cluster.key)

    def admin(self, name: str) -> AdminClient:
        return AdminClient(self.cluster.local.blueprint.addresses(name)[1], self.cluster.key)


def _flush(home: Path) -> None:
    """What was written before the first power cut, and by nobody who flushes."""
    for path in (*home.glob("*.yml"), home):
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def remove(folder: Path) -> None:
    shutil.rmtree(folder)
