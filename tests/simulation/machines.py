"""What outlives processes: the machines of storages and servers, the coordinator, and what starts daemons again."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn, Protocol
from uuid import UUID

from tests.simulation.loop import LIFE, Life, SimLoop
from tests.simulation.network import Network
from tests.simulation.plan import Setup
from tests.simulation.ports import SimReplicaPort
from waltzd.config import StorageConfig
from waltzd.coordinator_memory import MemoryCoordinator, MemoryTree
from waltzd.disk_sim import Fault, Loss, SimDisk
from waltzd.errors import FlushFailed, WaltzError
from waltzd.frame import Limits
from waltzd.layout import CONTROL_NAME, PROMISE_NAME
from waltzd.meta import ClusterMeta, ServerMeta, StorageMeta
from waltzd.server.bell import Bell
from waltzd.server.desk import Desk
from waltzd.server.pipeline import PipelineSettings
from waltzd.server.store_session import StoreSettings
from waltzd.storage.directory import Directory
from waltzd.storage.keeper import Keeper
from waltzd.storage.partition import PartitionSettings
from waltzd.testing.server import LocalServer

RESTART_SECONDS = 1.0
"""How long whatever supervises a daemon waits before it starts one again that ended by itself."""
ZOOKEEPER = "zookeeper"


def server_address(name: str) -> str:
    return f"{name}:1"


class Exited(BaseException):
    """This process is over: nothing that stands behind the call that raised this is done."""


class World(Protocol):
    """What the machines of one simulation share."""

    loop: SimLoop
    network: Network
    setup: Setup
    pick: random.Random
    meta: ClusterMeta
    zookeeper: ZooKeeper
    storages: dict[str, StorageMachine]
    servers: dict[str, ServerMachine]

    def say(self, who: str, what: str) -> None: ...
    def mistake(self, error: BaseException) -> None: ...


class Machine(ABC):
    """A name under which processes live, one after the other."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.life: Life | None = None
        self.lives: list[Life] = []
        self.is_wanted = False
        """It shall run: whatever supervises it starts it again when it ends by itself."""
        self._restart: asyncio.TimerHandle | None = None

    @property
    def is_up(self) -> bool:
        return self.life is not None

    def begin(self) -> Life:
        setup, pick = self.world.setup, self.world.pick
        ahead = pick.random() * 1000 if setup.drift else 0.0
        rate = 1 + setup.drift * (2 * pick.random() - 1)
        self.life = Life(self.name, ahead=ahead, rate=rate)
        self.lives.append(self.life)
        return self.life

    def end(self, why: str) -> None:
        """The process is gone, in the middle of whatever it did."""
        life, self.life = self.life, None
        if life is not None:
            self.world.say(self.name, why)
            life.is_over = True
            self.world.network.left(life)

    def start(self) -> None:
        self.is_wanted = True
        if not self.is_up:
            self.world.say(self.name, "starts")
            life = self.begin()
            self.world.loop.run_in(life, self._live(life), f"life of {self.name}")

    @abstractmethod
    async def _live(self, life: Life) -> None:
        """What the process does from its start on."""

    def exits(self, life: Life, why: str) -> None:
        """By itself; it is started again after a while."""
        if self.life is life:
            self.end(why)
            if self._restart is not None:
                self._restart.cancel()
            self._restart = self.world.loop.after(RESTART_SECONDS, None, self._again)

    def _again(self) -> None:
        if self.is_wanted and not self.is_up:
            self.start()

    def kill(self) -> None:
        self.is_wanted = False
        self.end("is killed")

    def pause(self) -> None:
        if self.life is not None:
            self.life.is_paused = True

    def resume(self) -> None:
        if self.life is not None and self.life.is_paused:
            self.world.loop.resume(self.life)


# -- storages ----------------------------------------------------------------------------------------------------------


class StorageMachine(Machine):
    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.keeper: Keeper | None = None
        self.disks = 0
        self.disk = self.blank_disk()
        self.disk_seconds = 0.0
        """How much longer everything takes on a slow disk, at most."""
        self.photograph: SimDisk | None = None
        self.is_damaged = False
        self.refuses: WaltzError | None = None
        """Why it did not start the last time."""

    @property
    def meta(self) -> StorageMeta:
        return StorageMeta(name=self.name, listen=self.name, admin_listen=f"{self.name} admin", group=self.name)

    def _disk_seed(self) -> int:
        self.disks += 1
        return self.world.pick.getrandbits(64)

    def blank_disk(self) -> SimDisk:
        disk = SimDisk(self._disk_seed())
        disk.make_directory(self.name)
        disk.flush_directory("")
        return disk

    def open(self) -> Keeper:
        """The daemon's way from its directory to a keeper."""
        world, setup = self.world, self.world.setup
        directory = Directory.open(
            self.disk,
            self.name,
            key=world.meta.key,
            partitions=setup.partitions,
            settings=PartitionSettings(
                segment_bytes_max=setup.segment_bytes, say=lambda sentence: world.say(self.name, sentence)
            ),
            reserve_bytes=0,
        )
        config = StorageConfig(directory=self.name, segment_bytes_max=max(1024, setup.segment_bytes), free_bytes_min=0)
        keeper = Keeper(
            self.disk, directory, config, run_writing=self._write, run_reading=self._read, on_fatal=self._on_fatal
        )
        keeper.start()
        return keeper

    async def _live(self, life: Life) -> None:
        try:
            keeper = self.open()
        except FlushFailed as error:
            self._exit(life, error.message)
        except WaltzError as error:
            self.refuses = error
            self._exit(life, f"does not start: {error.code} {error.message}")
        except Exception as mistake:  # noqa: BLE001  whatever it is ends the whole run
            self.world.mistake(mistake)
            return
        self.refuses = None
        self.keeper = keeper
        self.world.network.joined(life)

    async def create_partitions(self) -> None:
        assert self.keeper is not None
        for partition in range(self.world.setup.partitions):
            await self.keeper.create_partition(partition)

    def serving(self, life: Life) -> Keeper | None:
        return self.keeper if self.life is life else None

    # -- the disk below it

    def _seconds(self) -> float:
        pick = self.world.pick
        return 0.0001 + pick.random() * (0.0005 + self.disk_seconds)

    async def _write(self, function: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(self._seconds())
        result = function(*arguments)
        await asyncio.sleep(0.00005)
        return result

    async def _read(self, function: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(0.00005 + self.disk_seconds * self.world.pick.random())
        return function(*arguments)

    def _on_fatal(self, error: BaseException) -> NoReturn:
        life = LIFE.get()
        assert life is not None
        if isinstance(error, Exited):
            raise error
        if not isinstance(error, FlushFailed):
            self.world.mistake(error)
        self._exit(life, f"ends by itself: {error}")

    def _exit(self, life: Life, why: str) -> NoReturn:
        self.exits(life, why)
        raise Exited(why)

    def end(self, why: str) -> None:
        if self.life is not None:
            self.keeper = None
            self.disk.observer = None
            self.disk.kill()
        super().end(why)

    def stop(self) -> None:
        """In order: what is queued is done first."""
        self.is_wanted = False
        if self.life is not None and self.keeper is not None:
            self.world.say(self.name, "is told to stop")
            self.world.loop.run_in(self.life, self._stop(self.life, self.keeper), f"end of {self.name}")

    async def _stop(self, life: Life, keeper: Keeper) -> None:
        keeper.refuse_new()
        try:
            await keeper.close()
        except FlushFailed as error:
            self._on_fatal(error)
        if self.life is life:
            self.end("has stopped")

    def cut_power(self, *, is_scattered: bool) -> None:
        self.is_wanted = False
        self.end("loses power")
        self.disk.power_cut(Loss.SCATTERED if is_scattered else Loss.ORDERED)

    def die_at(self, operations: int) -> None:
        """Lose power in front of the n-th disk operation from now on."""
        left = operations
        disk = self.disk

        def count(kind: str, path: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                disk.observer = None
                self.cut_power(is_scattered=bool(operations % 2))
                raise Exited(f"in front of {kind} {path}")

        disk.observer = count

    def fail_next_flush(self) -> None:
        disk = self.disk

        def look(kind: str, path: str) -> None:
            if kind == "flush":
                disk.observer = None
                disk.faults[disk.steps] = Fault.IO_ERROR

        disk.observer = look

    def fill(self) -> None:
        self.disk.capacity_bytes -= max(0, self.disk.room() - self.world.pick.randrange(2000))

    def make_room(self) -> None:
        self.disk.capacity_bytes = 1 << 40

    def flip(self, where: float) -> str:
        """One byte of one file; `where` says which."""
        files = [(path, size) for path, size in self._files() if size]
        if not files or self.is_up:
            return "nothing to damage"
        number, rest = divmod(where * len(files), 1)
        path, size = files[int(number)]
        offset = int(rest * size)
        self.is_damaged = True
        self.disk.corrupt(path, offset, bytes([self.disk.content(path)[offset] ^ 0x40]))
        return f"byte {offset} of {path} is damaged"

    def _files(self) -> list[tuple[str, int]]:
        """Sealed segments with their indexes, control and promise files."""
        found: list[tuple[str, int]] = []
        for entry in self.disk.list(self.name):
            path = f"{self.name}/{entry.name}"
            if entry.name == CONTROL_NAME:
                found.append((path, self.disk.size(path)))
            elif entry.is_directory:
                names = self.disk.names(path)
                newest = max((name.partition(".")[0] for name in names if name != PROMISE_NAME), default="")
                kept = [name for name in names if name.partition(".")[0] != newest]
                found += [(f"{path}/{name}", self.disk.size(f"{path}/{name}")) for name in kept]
        return found

    def replace_disk(self, disk: SimDisk) -> None:
        assert not self.is_up
        self.disk = disk
        self.is_damaged = False

    def take_photograph(self) -> None:
        if not self.is_damaged:
            self.photograph = self.disk.clone(self._disk_seed())

    def put_back_photograph(self) -> bool:
        if self.photograph is None:
            return False
        self.replace_disk(self.photograph.restored(self._disk_seed()))
        return True


# -- the coordinator ---------------------------------------------------------------------------------------------------


class ZooKeeper:
    """The tree behind a network: calls take time, wait while the way is cut, and sessions end by themselves."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tree = MemoryTree(self._trip)
        self.is_up = True
        self._sessions: list[Session] = []
        self._bell = Bell()
        self._tick_seconds = world.setup.session_seconds / 8
        world.loop.after(self._tick_seconds, None, self._tick)

    def connect(self, life: Life) -> Session:
        session = Session(self, life)
        self._sessions.append(session)
        return session

    def hears(self, name: str) -> bool:
        network = self.world.network
        return self.is_up and network.is_open(name, ZOOKEEPER) and network.is_open(ZOOKEEPER, name)

    async def _trip(self) -> None:
        """One way of one call, for whoever calls."""
        life = LIFE.get()
        await asyncio.sleep(0 if life is None else self.world.network.seconds(ZOOKEEPER))
        session = None if life is None else next((one for one in self._sessions if one.life is life), None)
        while session is not None and not self.hears(session.life.name) and session.coordinator.is_connected:
            await self._bell.wait(self._bell.rings)

    def changed(self) -> None:
        self._bell.ring()

    def _tick(self) -> None:
        self.world.loop.after(self._tick_seconds, None, self._tick)
        for session in list(self._sessions):
            session.look()
            if session.is_gone:
                self._sessions.remove(session)


class Session:
    """What a server has with the coordinator, and for how long."""

    def __init__(self, zookeeper: ZooKeeper, life: Life) -> None:
        self.life = life
        self.coordinator: MemoryCoordinator = zookeeper.tree.connect()
        self.is_gone = False
        self._zookeeper = zookeeper
        self._is_lost = False
        self._is_lapsed = False
        self._heard = zookeeper.world.loop.now

    def _tell(self, what: Callable[[], None]) -> None:
        """As soon as the process runs."""
        self._zookeeper.world.loop.after(0.0, self.life, what)

    def look(self) -> None:
        world = self._zookeeper.world
        now, limit = world.loop.now, world.setup.session_seconds
        if self._zookeeper.hears(self.life.name) and not self.life.is_still:
            self._heard = now
            if self._is_lost or self._is_lapsed:
                world.say(self.life.name, "has the coordinator again" + (", in a new session" if self._is_lapsed else ""))
                if self._is_lapsed and not self._is_lost:
                    self._tell(self.coordinator.expire)
                self._tell(self.coordinator.reconnect)
                self._is_lost = self._is_lapsed = False
            return
        if not self._zookeeper.is_up:
            silence = now - self._heard  # a coordinator that is down ends no session
        else:
            silence = now - self._heard
            if silence >= limit and not self._is_lapsed:
                world.say(self.life.name, "loses its coordinator session")
                self.coordinator.lapse()
                self._is_lapsed = True
                self.is_gone = self.life.is_over
        if silence >= limit * 2 / 3 and not self._is_lost and not self.life.is_still:
            self._is_lost = True
            self._tell(self.coordinator.disconnect)
            self._zookeeper.changed()

    def expire(self) -> None:
        if not self._is_lapsed:
            self.coordinator.lapse()
            self._tell(self.coordinator.expire)


# -- servers -----------------------------------------------------------------------------------------------------------


class ServerMachine(Machine):
    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.server: LocalServer | None = None
        self.session: Session | None = None
        self._instance: UUID | None = None

    async def _live(self, life: Life) -> None:
        try:
            await self._start(life)
        except WaltzError as error:
            self.exits(life, f"does not start: {error.code} {error.message}")
        except Exception as mistake:  # noqa: BLE001  whatever it is ends the whole run
            self.world.mistake(mistake)
            return

    async def _start(self, life: Life) -> None:
        world, setup = self.world, self.world.setup
        session = self.session = world.zookeeper.connect(life)
        self._instance = UUID(int=world.pick.getrandbits(128), version=4)
        server = LocalServer(
            self.name,
            world.meta,
            session.coordinator,
            address=server_address(self.name),
            instance=self._instance,
            connect=lambda storage: self._port(life, storage),
            settings=StoreSettings(
                partitions=setup.partitions,
                key=world.meta.key,
                tail_bytes_max=setup.tail_bytes,
                session_bytes_max=setup.session_bytes,
                storage_seconds=setup.storage_seconds,
                retry_seconds=0.05,
                hand_over_seconds=0.5,
            ),
            pipeline=PipelineSettings(
                limits=Limits(payload_bytes_max=1 << 20, locks_max=1000, frame_bytes_max=4 << 20),
                lock_table_size=setup.lock_table_size,
            ),
            on_fatal=lambda error: self._on_fatal(life, error),
            is_alive=self._is_alive,
            say=lambda sentence: world.say(self.name, sentence),
        )
        self.server = server
        await server.start()
        world.network.joined(life)

    def _on_fatal(self, life: Life, error: BaseException) -> None:
        causes = _leaves(error)
        if not all(isinstance(cause, WaltzError) for cause in causes):
            self.world.mistake(error)
        self.exits(life, f"ends by itself: {causes[0]}")

    def _port(self, life: Life, storage: StorageMeta) -> SimReplicaPort:
        machine = self.world.storages[storage.listen]
        return SimReplicaPort(
            self.world.network,
            life,
            storage.listen,
            machine.serving,
            key=self.world.meta.key,
            seconds=self.world.setup.storage_seconds,
        )

    async def _is_alive(self, found: ServerMeta) -> bool:
        """Whether the process that announced this still answers."""
        await asyncio.sleep(self.world.network.seconds(found.name))
        return self.is_up and found.instance == self._instance

    def serving(self, life: Life) -> Desk | None:
        return self.server.desk if self.life is life and self.server is not None else None

    def stop(self) -> None:
        """In order: the partitions are given away first."""
        self.is_wanted = False
        if self.life is not None and self.server is not None and self.session is not None:
            self.world.say(self.name, "is told to stop")
            self.world.loop.run_in(self.life, self._stop(self.life, self.server, self.session), f"end of {self.name}")

    async def _stop(self, life: Life, server: LocalServer, session: Session) -> None:
        try:
            await server.drain(3.0)
        except WaltzError as error:
            self.world.say(self.name, f"cannot give its partitions away: {error.code} {error.message}")
        await server.stop()
        await session.coordinator.close()
        session.is_gone = True
        if self.life is life:
            self.end("has stopped")

    def end(self, why: str) -> None:
        self.server = None
        super().end(why)


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for part in error.exceptions for leaf in _leaves(part)]
