"""The coordinator behind the simulated network: calls take time, and sessions are lost like those of ZooKeeper."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.simulation.loop import LIFE, Life
from tests.simulation.machines import ZOOKEEPER, World
from tests.simulation.versions import WatchedTree
from waltzd.cluster.coordinator import Create, Delete, Set
from waltzd.cluster.memory import MemoryCoordinator
from waltzd.server.session.change_signal import ChangeSignal

GOING_BACK = ("/partitions/", "/replicas/")
"""What owners decide by."""
MORE_GOING_BACK = ("/archives", "/clients", "/assignment", "/ids")
"""What else an operator puts back with them."""


class ZooKeeper:
    """The tree behind a network: calls take time, wait while the way is cut, and sessions end by themselves."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tree = WatchedTree(self._trip)
        self.is_up = True
        self.went_back = False
        """Documents say less than they did: owners may refuse them, and nothing more."""
        self._backup: dict[str, bytes] | None = None
        self._going_back = GOING_BACK + (MORE_GOING_BACK if "regress" in world.setup.faults else ())
        self._sessions: list[Session] = []
        self._changed = ChangeSignal()
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
        """One way of one call, as long as the caller's network needs."""
        life = LIFE.get()
        await asyncio.sleep(0 if life is None else self.world.network.seconds(ZOOKEEPER))
        session = None if life is None else next((one for one in self._sessions if one.life is life), None)
        while session is not None and not self.hears(session.life.name) and session.coordinator.is_connected:
            await self._changed.wait(self._changed.version)

    def changed(self) -> None:
        self._changed.notify()

    def spoil(self, path: str, data: bytes | None) -> None:
        """An operator's mistake: a document is nonsense from now on, or gone."""
        there = self.tree.find(path)
        if there is not None:
            self.tree.commit([Delete(path, there.version) if data is None else Set(path, data, there.version)], 0)
            self.went_back = True

    @property
    def has_backup(self) -> bool:
        return self._backup is not None

    def remember(self) -> None:
        """As a backup does: the documents of the partitions as they are now."""
        self._backup = {path: entry.data for path, entry in self.tree._entries.items() if path.startswith(self._going_back)}

    def go_back(self) -> None:
        """An operator restores the backup, and every session is a new one."""
        if self._backup is None:
            return
        entries = self.tree._entries
        gone = [path for path in entries if path.startswith(self._going_back) and path not in self._backup]
        for path in sorted(gone, reverse=True):
            self.tree.commit([Delete(path, entries[path].version)], 0)
        for path, data in self._backup.items():
            there = entries.get(path)
            self.tree.commit([Create(path, data) if there is None else Set(path, data, there.version)], 0)
        self.went_back = True
        for session in list(self._sessions):
            session.expire()

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
