"""A cluster of real processes that a test may kill, pause and wake by name; on loopback, and gone when the test is."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

from waltzctl.local_cluster.local import LocalCluster
from waltzctl.shell.blueprint import ZOOKEEPER
from waltzctl.snapshot.cluster_snapshot import ClusterSnapshot
from waltzd.errors import WaltzError
from waltzd.wire.storages import AdminClient

PATIENCE_SECONDS = 60


class Cluster:
    def __init__(self, local: LocalCluster) -> None:
        self.local = local
        self._paused: dict[str, None] = {}

    @classmethod
    def make(
        cls, directory: Path, *, partitions: int = 4, servers: int = 2, session_seconds: int = 2, **server: object
    ) -> Cluster:
        """`server`: settings of its servers."""
        settings = {"server": {"session_seconds": session_seconds, **server}}
        return cls(LocalCluster.make(directory, partitions=partitions, servers=servers, settings=settings))

    # -- who there is

    @property
    def key(self) -> UUID:
        return self.local.blueprint.key

    @property
    def server_names(self) -> list[str]:
        return list(self.local.blueprint.server_names)

    @property
    def storage_names(self) -> list[str]:
        return list(self.local.blueprint.storage_names)

    @property
    def server_addresses(self) -> list[str]:
        return self.local.server_addresses

    @property
    def servers(self) -> str:
        return ",".join(self.server_addresses)

    @property
    def storage_addresses(self) -> list[str]:
        return self.local.storage_addresses

    # -- what is done to them

    def start(self) -> None:
        try:
            self.local.start()
        except BaseException:
            self.local.kill()
            raise

    def close(self) -> None:
        for name in list(self._paused):
            self.resume(name)
        self.local.kill()

    async def heal(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Every daemon runs, and every partition is open with all its replicas."""
        for name in list(self._paused):
            self.resume(name)
        for name in [ZOOKEEPER, *self.storage_names, *self.server_names]:
            self.spawn(name)
        await self.settled(seconds)

    def send(self, name: str, number: signal.Signals) -> None:
        assert self.local.daemons[name].send(number), f"{name} does not run"

    def kill(self, name: str) -> None:
        self.local.daemons[name].kill()

    def spawn(self, name: str) -> None:
        daemon = self.local.daemons[name]
        if not daemon.is_running:
            daemon.spawn()
            self.local.remember()

    def pause(self, name: str) -> None:
        self._paused[name] = None
        self.send(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self._paused.pop(name, None)
        self.send(name, signal.SIGCONT)

    # -- what a test waits for

    async def until(self, what: str, true: Callable[[ClusterSnapshot], Any], seconds: float = PATIENCE_SECONDS) -> Any:
        found: ClusterSnapshot | None = None
        error: WaltzError | None = None
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        found = await self.local.snapshot()
                        if answer := true(found):
                            return answer
                    except WaltzError as failed:
                        error = failed
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"{what}: not within {seconds:g} seconds; {error}; {found}") from None

    async def settled(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Every server and every storage is there, and every partition is open with all its replicas."""

        def is_settled(found: ClusterSnapshot) -> bool:
            return found.is_healthy and len(found.servers) == len(self.server_names)

        await self.until("the cluster settles", is_settled, seconds)

    async def owner(self, partition: int) -> str:
        """Who serves it at this moment."""

        def serving(found: ClusterSnapshot) -> str | None:
            view = found.partitions[partition]
            return view.owner if view.is_open else None

        name: str = await self.until(f"partition {partition} is open", serving)
        return name

    async def owned_by(self, partition: int, name: str) -> None:
        def is_there(found: ClusterSnapshot) -> bool:
            view = found.partitions[partition]
            return view.owner == name and view.is_open

        await self.until(f"{name} owns partition {partition}", is_there)

    async def gone(self, name: str) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.local.daemons[name].is_running:
                await asyncio.sleep(0.05)

    async def equal(self, partition: int) -> None:
        """Wait until every storage holds the same ids of this partition, and vouches for them."""

        async def last_id(address: str) -> int:
            async with AdminClient(address, self.key) as admin:
                described = await admin.describe()
            status = next(found.status for found in described.assigned if found.partition == partition)
            assert status is not None
            assert status.is_sound
            return status.last_id

        addresses = [self.local.blueprint.addresses(name)[1] for name in self.storage_names]
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len({await last_id(address) for address in addresses}) > 1:
                await asyncio.sleep(0.1)
