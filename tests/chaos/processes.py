"""Nemeses of processes: killed, stopped in order, paused, expired, and with a wall clock that is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException
from kazoo.handlers.threading import KazooTimeoutError

from tests.chaos import preload
from tests.chaos.nemesis import Nemesis, a_kind
from tests.chaos.plan import SERVERS, STORAGES, STORAGES_AT_ONCE, ZOOKEEPER, Part
from tests.chaos.world import SESSION_SECONDS
from waltzctl.local_cluster.local import ROOT
from waltzd.cluster.cluster import SERVERS as SERVERS_NODE

HOUR, DAY = 3600, 86_400
EXPIRY_SECONDS = 10.0
_SILENT = logging.getLogger("tests.chaos.kazoo")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False


class Kill(Nemesis):
    """kill -9, and started again at the end."""

    async def begin(self) -> None:
        for name in self.names:
            self.world.cluster.local.daemons[name].send(signal.SIGKILL)  # all of them, before waiting for any
        for name in self.names:
            self.world.kill(name)

    async def end(self) -> None:
        for name in self.names:
            self.world.spawn(name)


@a_kind("kill-server", SERVERS)
class KillServer(Kill):
    pass


@a_kind("kill-storage", STORAGES)
class KillStorage(Kill):
    pass


@a_kind("kill-storages", (STORAGES_AT_ONCE,))
class KillStorages(Kill):
    pass


@a_kind("zookeeper-away", (ZOOKEEPER,))
class ZooKeeperAway(Kill):
    """Longer than every session."""

    async def begin(self) -> None:
        await super().begin()
        await asyncio.sleep(SESSION_SECONDS)


@a_kind("restart-zookeeper", (ZOOKEEPER,))
class RestartZooKeeper(Kill):
    """At once: sessions may live on."""

    async def begin(self) -> None:
        await super().begin()
        await super().end()


@a_kind("stop-server", SERVERS)
class StopServer(Nemesis):
    """A planned hand-over."""

    async def begin(self) -> None:
        self.world.may_end(self.target)
        self.world.cluster.local.daemons[self.target].send(signal.SIGTERM)

    async def end(self) -> None:
        await self.world.cluster.gone(self.target)
        self.world.spawn(self.target)


class Pause(Nemesis):
    """SIGSTOP: for a moment, or until the end, which is longer than the session."""

    async def begin(self) -> None:
        self.world.pause(self.target)
        if self.pick.random() < 0.4:
            await asyncio.sleep(self.pick.uniform(0.1, 0.9) * SESSION_SECONDS)
            self.world.resume(self.target)
            self.remarks.append("short")

    async def end(self) -> None:
        self.world.resume(self.target)


@a_kind("pause-server", SERVERS)
class PauseServer(Pause):
    pass


@a_kind("pause-storage", STORAGES)
class PauseStorage(Pause):
    pass


@a_kind("pause-zookeeper", (ZOOKEEPER,))
class PauseZooKeeper(Pause):
    pass


@a_kind("clock-jump", (*STORAGES, *SERVERS, ZOOKEEPER), Part.CLOCK, refusal=preload.refusal)
class ClockJump(Nemesis):
    """The wall clock jumps, and jumps back at the end."""

    async def begin(self) -> None:
        seconds = self.pick.choice((HOUR, -HOUR, DAY, -DAY, 20, -20))
        self.remarks.append(f"{seconds:+} s")
        self.world.preload.shift(self.target, seconds)

    async def end(self) -> None:
        self.world.preload.shift(self.target, 0)


# -- sessions


def password(session: int) -> bytes:
    """Of a session of ZooKeeper, which makes it from the number of the session: Java's `Random` with a constant as salt."""
    state = (session ^ 0xB3415C00 ^ 0x5DEECE66D) & (1 << 48) - 1
    found = b""
    for _ in range(4):
        state = (state * 0x5DEECE66D + 0xB) & (1 << 48) - 1
        found += (state >> 16 & 0xFFFFFFFF).to_bytes(4, "little")
    return found


@contextlib.contextmanager
def _connected(hosts: str, **about: object) -> Iterator[KazooClient]:
    client = KazooClient(hosts, timeout=EXPIRY_SECONDS, logger=_SILENT, **about)
    try:
        client.start(EXPIRY_SECONDS)
        yield client
    finally:
        client.stop()
        client.close()


@a_kind("expire-session", SERVERS)
class ExpireSession(Nemesis):
    """Another client takes over the session of a server, and closes it."""

    async def begin(self) -> None:
        try:
            self.remarks.append(await asyncio.to_thread(self._expire))
        except (KazooException, KazooTimeoutError) as error:  # ZooKeeper is away in the same round
            self.remarks.append(f"not reached: {type(error).__name__}")

    def _expire(self) -> str:
        hosts = self.world.cluster.local.coordinator_hosts
        with _connected(hosts) as reader:
            node = f"{ROOT}{SERVERS_NODE}/{self.target}"
            found = reader.exists(node)
            if found is None:
                return "not registered"
            session = found.ephemeralOwner
            with _connected(hosts, client_id=(session, password(session & (1 << 64) - 1))) as thief:
                assert thief.client_id[0] == session, "ZooKeeper gave another session than was asked for"
            left = reader.exists(node)
            return "expired" if left is None or left.ephemeralOwner != session else "still there"

    async def end(self) -> None:
        """The server registers again by itself."""


@a_kind("kill-twice", STORAGES)
class KillTwice(Kill):
    """Killed again while it starts, and while it is being brought level."""

    async def begin(self) -> None:
        for _ in range(2):
            await super().begin()
            await super().end()
            await asyncio.sleep(self.pick.uniform(0.0, 1.5))
        await super().begin()
