"""Storages in one process: the real storage over a simulated disk that can be killed, hung and given another disk."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

from waltzd.cluster.documents import StorageMeta
from waltzd.daemon.config import StorageConfig
from waltzd.disk.simulated import SimDisk
from waltzd.errors import CannotConnect
from waltzd.storage.calls import StorageCalls
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import PartitionSettings
from waltzd.testing.storage_port import StorageDoor, StoragePort

KEY = UUID(int=0xA11CE)
ROOT = "storage"


async def inline(function: Any, *arguments: Any) -> Any:
    await asyncio.sleep(0)
    return function(*arguments)


def _blank(seed: int) -> SimDisk:
    disk = SimDisk(seed)
    disk.make_directory(ROOT)
    disk.flush_directory("")
    return disk


class SimStorage:
    """`calls` is None while it is down."""

    def __init__(self, name: str, *, partitions: int = 1, seed: int = 0, segment_bytes: int = 4000) -> None:
        self.name = name
        self.partitions = partitions
        self.segment_bytes = segment_bytes
        self.disk = _blank(seed)
        self.calls: StorageCalls | None = None
        self.log: list[str] = []
        self.fatal: list[BaseException] = []
        self.door: StorageDoor | None = None
        self._ports: list[StoragePort] = []

    @property
    def meta(self) -> StorageMeta:
        return StorageMeta(name=self.name, listen=f"{self.name}:1", admin_listen=f"{self.name}:2", group=self.name)

    async def start(self, *, create: bool = False) -> SimStorage:
        config = StorageConfig(directory=ROOT, segment_bytes_max=max(1024, self.segment_bytes), free_bytes_min=0)
        directory = Directory.open(
            self.disk,
            ROOT,
            key=KEY,
            partitions=self.partitions,
            settings=PartitionSettings(segment_bytes_max=self.segment_bytes, say=self.log.append),
            reserve_bytes=0,
        )
        if create:
            for number in range(self.partitions):
                directory.create_partition(number)
        self.calls = StorageCalls(
            self.disk, directory, config, run_writing=inline, run_reading=inline, on_fatal=self.fatal.append
        )
        self.calls.start()
        self.door = StorageDoor(self.name, self.calls, self.fatal.append)
        return self

    async def stop(self) -> None:
        """In order."""
        calls = self._hang_up()
        calls.refuse_new()
        await calls.close()

    def kill(self) -> None:
        """As with kill -9: what the system was given is there, and nothing more happens."""
        for lane in self._hang_up()._lanes.values():
            if lane._task is not None:
                lane._task.cancel()
        self.disk.kill()

    def _hang_up(self) -> StorageCalls:
        assert self.calls is not None
        calls, self.calls, self.door = self.calls, None, None
        for port in self._ports:
            port.cut()
        self._ports = []
        return calls

    def lose_disk(self, seed: int) -> None:
        """Somebody put an empty disk in its place."""
        assert self.calls is None
        self.disk = _blank(seed)

    def hang(self) -> None:
        """It takes everything and answers nothing."""
        assert self.door is not None
        self.door.pause()

    def go_on(self) -> None:
        assert self.door is not None
        self.door.resume()

    def port(self) -> StoragePort:
        """A connection of its own, until the storage stops."""
        if self.door is None:
            raise CannotConnect(f"{self.name} is down")
        self._ports.append(StoragePort(self.door, KEY))
        return self._ports[-1]

    def records(self, partition: int = 0) -> list[bytes]:
        """Every record that is on the disk, straight from the replica."""
        assert self.calls is not None
        replica = self.calls.directory.partition(partition)
        out: list[bytes] = []
        at = 0
        while at <= replica.last_id:
            run = replica.read(at, replica.last_id, 1 << 20, session=replica.promised_session)
            out += [bytes(run.data[a:b]) for a, b in zip(run.bounds[:-1], run.bounds[1:], strict=True)]
            at = run.last_id + 1
        return out


class SimPort:
    """A `ReplicaPort` that finds the storage of the moment: like a channel, it outlives restarts."""

    def __init__(self, storage: SimStorage) -> None:
        self._storage = storage
        self._door: StorageDoor | None = None
        self._port: StoragePort | None = None

    def __getattr__(self, name: str) -> Any:
        if self._port is None or self._door is not self._storage.door:
            self._port = self._storage.port()
            self._door = self._storage.door
        return getattr(self._port, name)

    async def close(self) -> None:
        return None
