"""`LocalCluster`: storages, coordinator and servers of one process, put together like the daemons put theirs together.

The code is that of the daemons; only what is around it is exchanged: disks in memory, a coordinator in memory, doors
instead of sockets. A mistake of ours in any part is kept and raised when the cluster is closed, so that no test passes
over it.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID, uuid4

from waltzd.client.client import Client
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, ReplicaSets, Role, StorageMeta
from waltzd.cluster.memory import MemoryCoordinator, MemoryTree
from waltzd.daemon.config import StorageConfig
from waltzd.disk.simulated import SimDisk
from waltzd.errors import BadArgument, CannotConnect, NotOwner, NotReady
from waltzd.format.record import Record, Run
from waltzd.server.clients.pipeline import Pipeline
from waltzd.server.ownership import PartitionOwner
from waltzd.server.session.settings import SessionSettings
from waltzd.storage.calls import StorageCalls
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import PartitionSettings
from waltzd.testing.server import LocalServer
from waltzd.testing.server_port import Luck, ServerDoor, ServerPort
from waltzd.testing.storage_port import StorageDoor, StoragePort

T = TypeVar("T")
READY_SECONDS = 30.0
LOOK_SECONDS = 0.005


async def _inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """A disk in memory does not keep anybody waiting."""
    return function(*arguments)


class LocalCluster:
    def __init__(self, *, partitions: int = 1, servers: int = 2, storages: int = 3, storage_seconds: float = 5.0) -> None:
        """Every storage holds every partition. `storage_seconds`: how long a server waits for a storage that is paused."""
        for name, value in (("partitions", partitions), ("servers", servers), ("storages", storages)):
            if value < 1:
                raise BadArgument(f"{name} must be at least 1, not {value}")
        self.meta = ClusterMeta(name="local", key=uuid4(), partitions=partitions, created="in a test")
        self.storage_seconds = storage_seconds
        self.luck = Luck()
        self.tree = MemoryTree()
        self._servers: dict[str, _Server | None] = {f"server-{number + 1}": None for number in range(servers)}
        self._storages: dict[str, StorageDoor] = {}
        self._storage_names = [f"storage-{number + 1}" for number in range(storages)]
        self._under_way: set[asyncio.Task[None]] = set()
        self.mistakes: list[BaseException] = []
        """Of ours; the first is raised by `close`."""

    # -- life

    async def start(self) -> None:
        """Until every partition can be written."""
        for name in self._storage_names:
            self._storages[name] = await self._make_storage(name)
        everywhere = {
            partition: dict.fromkeys(self._storage_names, Role.MEMBER) for partition in range(self.meta.partitions)
        }
        coordinator = self.tree.connect()
        await Cluster.create(
            coordinator,
            self.meta,
            storages=[
                StorageMeta(name=name, listen=name, admin_listen=f"{name} admin", group=name)
                for name in self._storage_names
            ],
            replicas=ReplicaSets(partitions=everywhere),
        )
        await coordinator.close()
        for name in self._servers:
            await self.start_server(name)
        await self.wait_until_ready()

    async def close(self) -> None:
        """End in order; raises a mistake of ours that was met on the way."""
        for door in self._storages.values():
            door.resume()
        await asyncio.gather(*self._under_way)
        for name, server in self._servers.items():
            if server is not None:
                self._servers[name] = None
                await server.stop()
        for door in self._storages.values():
            await door.close()
        self._storages.clear()
        if self.mistakes:
            raise self.mistakes[0]

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def run(self, story: Callable[[LocalCluster], Coroutine[Any, Any, T]]) -> T:
        """For tests that are plain functions: start, run the story, close."""

        async def whole() -> T:
            async with self:
                return await story(self)

        return asyncio.run(whole())

    @property
    def is_running(self) -> bool:
        return bool(self._storages)

    async def wait_until_ready(self, seconds: float = READY_SECONDS) -> None:
        """Until `is_ready`."""
        try:
            async with asyncio.timeout(seconds):
                while not self.is_ready:
                    if self.mistakes:
                        raise self.mistakes[0]
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            raise NotReady(f"the cluster was not ready in {seconds:g} seconds: {self.story()}") from None

    @property
    def is_ready(self) -> bool:
        """Every partition has an owner that takes transactions."""
        return all(self._is_open(partition) for partition in range(self.meta.partitions))

    def _is_open(self, partition: int) -> bool:
        try:
            self._open(partition)
        except NotReady:
            return False
        return True

    def story(self) -> str:
        """What every partition is doing."""
        return "; ".join(
            f"{server.name} partition {owned.partition}: {owned.step} {owned.waiting}".rstrip()
            for server in self._living()
            for owned in server.owner.describe()
        )

    def _living(self) -> list[_Server]:
        return [server for server in self._servers.values() if server is not None]

    def _on_fatal(self, error: BaseException) -> None:
        self.mistakes.append(error)

    async def _make_storage(self, name: str) -> StorageDoor:
        disk = SimDisk(zlib.crc32(name.encode()))  # what it draws must not be what another one draws
        disk.make_directory(name)
        config = StorageConfig(directory=name, free_bytes_min=0)
        directory = Directory.open(
            disk, name, key=self.meta.key, partitions=self.meta.partitions, settings=PartitionSettings()
        )
        calls = StorageCalls(disk, directory, config, run_writing=_inline, run_reading=_inline, on_fatal=self._on_fatal)
        calls.start()
        for partition in range(self.meta.partitions):
            await calls.create_partition(partition)
        return StorageDoor(name, calls, self._on_fatal)

    # -- for applications

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses; they mean something to `connect` only."""
        return tuple(_address(name) for name in self._servers)

    def connect(self, address: str, key: UUID | None) -> ServerPort:
        """What a `Client` takes as its `connect`."""
        return ServerPort(lambda: self._door(address), key)

    def _door(self, address: str) -> ServerDoor:
        for server in self._living():
            if _address(server.name) == address:
                return server.door
        raise CannotConnect(f"nobody listens at {address}")

    def client(self, **settings: Any) -> Client:
        """A client of this cluster, with the settings of `Client`; use it with `async with`."""
        return Client(self.servers, connect=self.connect, **settings)

    async def log(self, partition: int = 0) -> list[Record]:
        """Everything that is committed."""
        return [run.record(number) async for run in self.runs(partition) for number in range(len(run))]

    async def runs(self, partition: int = 0) -> AsyncIterator[Run]:
        """The same as it is stored, a run at a time."""
        port = self.connect(_address(self.owner(partition)), None)
        async for run in port.fetch(partition, 0):
            yield run

    def owner(self, partition: int = 0) -> str:
        """The name of the server that has the partition open."""
        return self._open(partition)[0].name

    def high_water_mark(self, partition: int = 0) -> int:
        """The highest committed id."""
        return self._open(partition)[1].committed

    def _open(self, partition: int) -> tuple[_Server, Pipeline]:
        for server in self._living():
            try:
                return server, server.owner.pipeline(partition, None)
            except (NotOwner, NotReady):
                continue
        raise NotReady(f"nobody has partition {partition} open: {self.story()}")

    # -- bad luck for applications

    def force_next_lock_failure(self, partition: int = 0, *, times: int = 1) -> None:
        """The next transaction with a READ or WRITE lock is refused as if it had lagged too far behind."""
        self._check_luck(partition, times)
        self.luck.lock_failures[partition] = self.luck.lock_failures.get(partition, 0) + times

    def lose_next_acknowledgement(self, partition: int = 0, *, times: int = 1) -> None:
        """What is committed next stays committed, but the connection breaks in front of the answer."""
        self._check_luck(partition, times)
        self.luck.lost_answers[partition] = self.luck.lost_answers.get(partition, 0) + times

    def _check_luck(self, partition: int | None, times: int = 1) -> None:
        """A fault that can never come would let a test pass that tests nothing."""
        if partition is not None and partition not in range(self.meta.partitions):
            raise BadArgument(f"there is no partition {partition!r}; there are {self.meta.partitions}, from 0 on")
        if times < 1:
            raise BadArgument(f"times must be at least 1, not {times}")

    def suspend_feed(self) -> None:
        """Outcomes still arrive; no view learns anything new."""
        self.luck.is_feed_suspended = True

    def resume_feed(self) -> None:
        self.luck.is_feed_suspended = False
        for server in self._living():
            server.door.look()

    def break_connections(self, partition: int | None = None) -> None:
        """Every client of the partition, or of all, loses its mount and whatever is on its way."""
        self._check_luck(partition)
        for server in self._living():
            server.door.break_connections(partition)

    def pause_storage(self, number: int) -> None:
        """The storage with this number, from 0 on, answers nobody; with most of them paused nothing is committed."""
        self._storage(number).pause()

    def resume_storage(self, number: int) -> None:
        self._storage(number).resume()

    def _storage(self, number: int) -> StorageDoor:
        if not 0 <= number < len(self._storage_names):
            raise BadArgument(f"there is no storage {number}; there are {len(self._storage_names)}, from 0 on")
        return self._storages[self._storage_names[number]]

    async def kill_owner(self, partition: int = 0) -> str:
        """The server that owns the partition is gone, with all its connections, without a word. Another one takes over
        if there is one; `start_server` brings it back. Returns its name."""
        name = self.owner(partition)
        await self.kill_server(name)
        return name

    @property
    def server_names(self) -> tuple[str, ...]:
        """Of all servers, whether they run or not."""
        return tuple(self._servers)

    def is_alive(self, name: str) -> bool:
        """Whether this server runs."""
        return self._server(name) is not None

    def _server(self, name: str) -> _Server | None:
        if name not in self._servers:
            raise BadArgument(f"there is no server {name!r}; there are {', '.join(self._servers)}")
        return self._servers[name]

    async def _finished(self, work: Coroutine[Any, Any, None]) -> None:
        """Also when the test does not wait for it any more: a server that is half dead would keep its partitions."""
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        await asyncio.shield(task)

    async def kill_server(self, name: str) -> None:
        server = self._server(name)
        if server is None:
            raise BadArgument(f"{name} does not run")
        self._servers[name] = None
        await self._finished(server.kill())

    async def stop_server(self, name: str) -> None:
        """In order: its partitions are handed over first, if there is anybody to take them."""
        server = self._server(name)
        if server is None:
            raise BadArgument(f"{name} does not run")
        await server.drain()
        self._servers[name] = None
        await server.stop()

    async def start_server(self, name: str) -> None:
        if self._server(name) is not None:
            raise BadArgument(f"{name} runs already")
        server = _Server(name, self, self.tree.connect(), self._storages, self._on_fatal)
        self._servers[name] = server
        await self._finished(server.start())


def _address(name: str) -> str:
    return f"{name}:1"


class _Server:
    """A server, its door, and its connections to the storages."""

    def __init__(
        self,
        name: str,
        local: LocalCluster,
        coordinator: MemoryCoordinator,
        storages: dict[str, StorageDoor],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self.name = name
        self.coordinator = coordinator
        self._storages = storages
        self._key = local.meta.key
        self._ports: list[StoragePort] = []
        settings = SessionSettings(
            partitions=local.meta.partitions,
            key=local.meta.key,
            storage_seconds=local.storage_seconds,
            retry_seconds=0.02,
            hand_over_seconds=0.5,
        )
        self._server = LocalServer(
            name,
            local.meta,
            coordinator,
            address=_address(name),
            instance=uuid4(),
            connect=self._connect,
            settings=settings,
            on_fatal=on_fatal,
        )
        self.door = ServerDoor(_address(name), self._server.calls, local.luck, on_fatal)

    @property
    def owner(self) -> PartitionOwner[Pipeline]:
        return self._server.owner

    async def start(self) -> None:
        await self._server.start()

    async def drain(self) -> None:
        await self._server.drain(READY_SECONDS)

    async def stop(self) -> None:
        await self.owner.close()
        await self.door.slam()
        await self._server.end()
        await self.coordinator.close()

    async def kill(self) -> None:
        """Connections first: nothing that is still said or written in here arrives anywhere."""
        self.coordinator.disconnect()
        for port in self._ports:
            port.cut()
        await self.door.slam()
        await self._server.kill()
        self.coordinator.expire()

    def _connect(self, storage: StorageMeta) -> StoragePort:
        port = StoragePort(self._storages[storage.listen], self._key)
        self._ports.append(port)
        return port
