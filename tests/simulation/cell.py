"""One partition over real storages, with as many owners as a test wants, on a clock that moves only when all tasks wait.

A storage is the real one over a simulated disk, and can be killed, hung and given another disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec
from uuid import UUID

from tests.unit.timeless import run
from waltzd.archive.store import Store
from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import ClusterMeta, Membership, PartitionMeta, ReplicaSets, StorageMeta
from waltzd.cluster.memory import MemoryTree
from waltzd.daemon.config import StorageConfig
from waltzd.disk.simulated import SimDisk
from waltzd.errors import CannotConnect, WaltzError
from waltzd.format.record import encode_payloads
from waltzd.protocol.level import THIS
from waltzd.server.session.change_signal import PeriodicTimer
from waltzd.server.session.owned import OwnedLog
from waltzd.server.session.replicated_log import ReplicatedLog
from waltzd.server.session.settings import SessionSettings, since_boot
from waltzd.storage.calls import StorageCalls
from waltzd.storage.replica.directory import Directory
from waltzd.storage.replica.partition import Partition
from waltzd.storage.replica.replica_context import PartitionSettings
from waltzd.testing.ports import StorageEndpoint, StoragePort

P = ParamSpec("P")
KEY = UUID(int=0xA11CE)
ROOT = "storage"
SETTINGS = SessionSettings(
    partitions=1, key=KEY, tail_bytes_max=20_000, retry_seconds=0.01, storage_seconds=1.0, hand_over_seconds=0.5,
    level=lambda: THIS.level,
)  # fmt: skip


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
        self.door: StorageEndpoint | None = None
        self._ports: list[StoragePort] = []
        self.store: Store | None = None
        """Of the archive, from the next start on."""

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
            settings=PartitionSettings(
                segment_bytes_max=self.segment_bytes, say=self.log.append, archives=self.store is not None
            ),
            reserve_bytes=0,
        )
        if create:
            for number in range(self.partitions):
                directory.create_partition(number)
        self.calls = StorageCalls(
            self.disk, directory, config, run_writing=inline, run_reading=inline, on_fatal=self.fatal.append,
            store=self.store,
        )  # fmt: skip
        self.calls.start()
        self.door = StorageEndpoint(self.name, self.calls, self.fatal.append)
        return self

    async def stop(self) -> None:
        """In order."""
        calls = self._hang_up()
        calls.refuse_new()
        await calls.close()

    def kill(self) -> None:
        """As with kill -9: what the system was given is there, and nothing more happens."""
        for queue in self._hang_up()._queues.values():
            if queue._task is not None:
                queue._task.cancel()
        self.disk.kill()

    def _hang_up(self) -> StorageCalls:
        assert self.calls is not None
        calls, self.calls, self.door = self.calls, None, None
        for port in self._ports:
            port.cut()
        self._ports = []
        return calls

    def lose_disk(self, seed: int) -> None:
        """It is given an empty one."""
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
        self._ports.append(StoragePort(self.door, KEY, b"all owners"))
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
        self._door: StorageEndpoint | None = None
        self._port: StoragePort | None = None

    def __getattr__(self, name: str) -> Any:
        if self._port is None or self._door is not self._storage.door:
            self._port = self._storage.port()
            self._door = self._storage.door
        return getattr(self._port, name)

    async def close(self) -> None:
        return None


class Appender:
    """In the place of a pipeline: appends what it is told, and remembers what was committed."""

    def __init__(self, session: ReplicatedLog) -> None:
        self.session = session
        self.ended: WaltzError | None = None
        self.mounts = 0
        self.is_held = False
        self.changed = asyncio.Event()
        session.on_commit(lambda mark: self.changed.set())

    def append(self, count: int, *, size: int = 50) -> int:
        """The last id."""
        assert not self.is_held
        first_id = self.session.cache.next_id
        payloads = [f"{self.session.session}:{first_id + n}".encode().ljust(size, b".") for n in range(count)]
        self.session.append(encode_payloads(first_id, payloads))
        return first_id + count - 1

    async def committed(self, mark: int) -> None:
        async with asyncio.timeout(10):
            while self.session.committed < mark:
                self.changed.clear()
                await self.changed.wait()

    def hold(self) -> None:
        self.is_held = True

    def close(self, error: WaltzError) -> None:
        self.ended = error


class Cell:
    """Storages, a coordinator, and as many owners as a test wants."""

    def __init__(self, names: int = 3, members: int | None = None) -> None:
        self.storages = {f"s{n}": SimStorage(f"s{n}", seed=n) for n in range(names)}
        self.tree = MemoryTree()
        self.cluster = Cluster(self.tree.connect())
        self.members = list(self.storages)[: members or names]
        self.timer = PeriodicTimer(0.2)
        self.owned_logs: list[OwnedLog[Appender]] = []
        self.log: list[str] = []

    async def start(self) -> None:
        for storage in self.storages.values():
            await storage.start(create=True)
        await Cluster.create(
            self.cluster.coordinator,
            ClusterMeta(name="test", key=KEY, partitions=1, created="2026-01-01T00:00:00Z"),
            storages=[storage.meta for storage in self.storages.values()],
            replicas=ReplicaSets(partitions={0: dict.fromkeys(self.members, Membership.MEMBER)}),
        )

    def connect(self, meta: StorageMeta) -> Any:
        return SimPort(self.storages[meta.name])

    async def own(
        self, generation: int = 1, *, settings: SessionSettings = SETTINGS, previous: Callable[[], bool] = lambda: False
    ) -> OwnedLog[Appender]:
        if settings.clock is since_boot:
            settings = replace(settings, clock=asyncio.get_running_loop().time)
        owned: OwnedLog[Appender] = OwnedLog(
            0,
            generation,
            cluster=Cluster(self.tree.connect()),
            connect=self.connect,
            settings=settings,
            timer=self.timer,
            make_pipeline=Appender,
            say=self.log.append,
            previous_owner_alive=previous,
        )
        self.owned_logs.append(owned)
        await owned.start()
        return owned

    async def until(self, true: Callable[[], Any], seconds: float = 10) -> Any:
        try:
            async with asyncio.timeout(seconds):
                while not (found := true()):
                    for owned in self.owned_logs:
                        if owned.task.done() and not owned.task.cancelled():
                            owned.task.result()
                    await asyncio.sleep(0.005)
                return found
        except TimeoutError:
            raise AssertionError(
                "\n".join(["it did not happen", *self.log, *(repr(s.describe()) for s in self.owned_logs)])
            ) from None

    async def opened(self, owned: OwnedLog[Appender], above: int = 0) -> Appender:
        def found() -> Appender | None:
            pipeline = owned._pipeline
            return pipeline if pipeline is not None and pipeline.session.session > above else None

        pipeline: Appender = await self.until(found)
        return pipeline

    async def holding(self, count: int, *, settings: SessionSettings = SETTINGS) -> tuple[OwnedLog[Appender], Appender]:
        """An owner and its log, with so many records committed."""
        owned = await self.own(settings=settings)
        pipeline = await self.opened(owned)
        await pipeline.committed(pipeline.append(count))
        return owned, pipeline

    async def lose_all_but_s1(self, owned: OwnedLog[Appender]) -> tuple[int, int]:
        """Append what "s1" holds when the owner ends, and start "s0" and "s2" with empty disks. Return the last id and the
        session, which "s0" has not joined."""
        pipeline = await self.opened(owned)
        last_id, session = pipeline.append(20), pipeline.session.session
        while self.last_id("s1") < last_id:
            await asyncio.sleep(0)
        owned.task.cancel()
        await asyncio.gather(owned.task, return_exceptions=True)
        assert self.replica("s1").committed < last_id
        self.storages["s2"].kill()
        for number, name in enumerate(("s0", "s2")):
            self.storages[name].lose_disk(seed=80 + number)
            await self.storages[name].start()
        return last_id, session

    async def all_hold(self, last_id: int) -> None:
        await self.until(lambda: all(self.last_id(name) == last_id for name in self.storages))

    def lose_coordinator(self) -> None:
        """It is given an empty one."""
        self.tree = MemoryTree()
        self.cluster = Cluster(self.tree.connect())

    async def meta(self) -> PartitionMeta:
        found, _ = await self.cluster.partition(0)
        assert found is not None
        return found

    async def add_learner(self, name: str) -> None:
        roles, version = await self.cluster.replica_set(0)
        await self.cluster.save_replica_set(0, {**roles, name: Membership.LEARNER}, version)

    async def restart(self, name: str, *, empty_disk: int | None = None) -> None:
        """Kill it and start it again; on an empty disk with this seed, if there is one."""
        self.storages[name].kill()
        if empty_disk is not None:
            self.storages[name].lose_disk(empty_disk)
        await self.storages[name].start()

    def replica(self, name: str) -> Partition:
        calls = self.storages[name].calls
        assert calls is not None
        return calls.directory.partition(0)

    async def close(self) -> None:
        for owned in self.owned_logs:
            owned.task.cancel()
            await asyncio.gather(owned.task, return_exceptions=True)
        for storage in self.storages.values():
            if storage.calls is not None:
                await storage.stop()

    def last_id(self, name: str) -> int:
        calls = self.storages[name].calls
        if calls is None or 0 not in [replica.number for replica in calls.directory.partitions()]:
            return -2
        return calls.directory.partition(0).last_id

    def is_sound(self, name: str) -> bool:
        calls = self.storages[name].calls
        return calls is not None and not calls.directory.partition(0).findings

    def check_equal(self, *names: str) -> list[bytes]:
        logs = [self.storages[name].records() for name in names or self.members]
        assert all(log == logs[0] for log in logs)
        return logs[0]


@asynccontextmanager
async def cell(names: int = 3, members: int | None = None) -> AsyncIterator[Cell]:
    made = Cell(names, members)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def story(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """On a clock that stands still while a task has something to do: how fast this process runs changes nothing."""

    @wraps(test)
    def run_it(*arguments: P.args, **named: P.kwargs) -> None:
        run(test(*arguments, **named))

    return run_it
