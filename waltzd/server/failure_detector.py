"""Detection of dead servers: an idle connection to each other server, whose end is noticed at once.

When a connection ends, it is opened again. If that is refused, the storages of that server's partitions are asked, and
the core decides (`waltzd.server.core.suspicion`). The consequences of a suspicion are decided by `election`. Every server
detects failures, because each may have to lead. While the coordinator does not answer there are no suspicions, because no
assignment could follow.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from waltzd.cluster.cluster import Cluster
from waltzd.cluster.documents import Membership, ServerMeta, StorageMeta
from waltzd.errors import CannotConnect, WaltzError
from waltzd.protocol.address import address_of_peer
from waltzd.server.core.suspicion import Suspicions
from waltzd.server.reconcile import Reconciler
from waltzd.server.session.change_signal import ChangeSignal

log = logging.getLogger("waltz.server")
DIAL_SECONDS = 1.0
ASK_SECONDS = 0.5
AGAIN_SECONDS = 0.1
"""Pause before a server whose port refused is tried again, and shortest interval between two connections."""
UNREACHABLE_SECONDS = 1.0
"""Pause after a connection attempt without an answer, which proves nothing."""


class LivenessProbe(Protocol):
    """A connection without traffic."""

    async def ended(self) -> None:
        """Return when the other side has ended it."""
        ...

    def close(self) -> None: ...


OpenProbe: TypeAlias = Callable[[ServerMeta], Awaitable[LivenessProbe]]
"""Opens a probe. Raises `ConnectionRefusedError` if nothing listens, and `CannotConnect` if that is unknown."""
AskStorage: TypeAlias = Callable[[StorageMeta, Sequence[int]], Awaitable[Sequence[int]]]
"""Asks a storage for which of these partitions it has no append stream."""


class FailureDetector:
    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *,
        open_probe: OpenProbe,
        ask_storage: AskStorage,
        is_alive: Callable[[ServerMeta], Awaitable[bool]],
    ) -> None:
        """`is_alive`: whether this very process answers; another process may listen at its address by now."""
        self._is_alive = is_alive
        self._cluster = cluster
        self._name = name
        self._open_probe = open_probe
        self._ask_storage = ask_storage
        self._core = Suspicions()
        self._refusing: dict[str, ServerMeta] = {}
        """Servers whose port refused the newest attempt."""
        self._watched: dict[str, tuple[ServerMeta, asyncio.Task[None]]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self.changed = ChangeSignal()
        """Notified when a suspicion begins or ends."""
        self.reconciler = Reconciler("failure detector", wait=cluster.wait_for_servers, act=self._follow_servers)

    @property
    def suspected(self) -> Mapping[str, str]:
        """Suspected servers and the cause of each suspicion."""
        return {name: held.why for name, held in self._core.suspected.items()}

    def is_gone(self, server: ServerMeta) -> bool:
        """Return whether nothing listened at the address of this process in the newest attempt."""
        found = self._refusing.get(server.name)
        return found is not None and found.instance == server.instance

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self.reconciler.run(), name=self.reconciler.name)

    async def _follow_servers(self) -> None:
        assert self._tasks is not None, "`run` looks"
        servers = await self._cluster.servers()
        for name, (server, task) in list(self._watched.items()):
            now = servers.get(name)
            if now is None or (now.instance, now.listen) != (server.instance, server.listen):
                del self._watched[name]
                self._refusing.pop(name, None)
                task.cancel()
        for name, server in servers.items():
            if name != self._name and name not in self._watched:
                self._watched[name] = server, self._tasks.create_task(self._watch(server), name=f"liveness of {name}")
        if self._core.seen({name: server.instance for name, server in servers.items()}):
            self.changed.notify()

    async def _watch(self, server: ServerMeta) -> None:
        while True:
            try:
                async with asyncio.timeout(DIAL_SECONDS):
                    probe = await self._open_probe(server)
            except ConnectionRefusedError:
                self._refusing[server.name] = server
                await self._suspect(server)
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            except (CannotConnect, TimeoutError):
                self._refusing.pop(server.name, None)
                await asyncio.sleep(UNREACHABLE_SECONDS)
                continue
            self._refusing.pop(server.name, None)
            began = asyncio.get_running_loop().time()
            ending = asyncio.ensure_future(probe.ended())
            try:
                while server.name in self._core.suspected and not ending.done():
                    if await self._is_alive(server):
                        self.clear_suspicion(server.name, "it answers after all")
                    else:
                        await asyncio.wait((ending,), timeout=UNREACHABLE_SECONDS)
                await ending
            finally:
                ending.cancel()
                probe.close()
            if asyncio.get_running_loop().time() - began < AGAIN_SECONDS:
                await asyncio.sleep(AGAIN_SECONDS)

    def clear_suspicion(self, name: str, why: str) -> None:
        if self._core.answered(name):
            log.info("server %s is no longer suspected: %s", name, why)
            self.changed.notify()

    async def _suspect(self, server: ServerMeta) -> None:
        clock = asyncio.get_running_loop()
        name, instance = server.name, server.instance
        if not self._cluster.coordinator.is_connected or not self._core.may_suspect(name, instance, clock.time()):
            return
        try:
            members = await self._members(name)
            quiet = await self._quiet(members)
        except WaltzError as error:
            log.debug("server %s refuses connections; what its storages say is not known: %s", name, error.message)
            return
        if not self._cluster.coordinator.is_connected:
            return
        refuses = await self._refuses(server)
        if self._core.judge(name, instance, clock.time(), refuses=refuses, members=members, quiet=quiet):
            log.warning("server %s is suspected to be dead: %s", name, self._core.suspected[name].why)
            self.changed.notify()

    async def _refuses(self, server: ServerMeta) -> bool:
        """Try the port once more, after the storages were asked: a short failure of all connections proves nothing."""
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                (await self._open_probe(server)).close()
        except ConnectionRefusedError:
            return True
        except (CannotConnect, TimeoutError):
            return False
        return False

    async def _members(self, name: str) -> dict[int, list[str]]:
        """Return the members of each partition that the server owns."""
        assignment, _ = await self._cluster.assignment()
        owned = [number for number, owner in enumerate(assignment.owners) if owner.server == name]
        found = await self._cluster.each(owned, self._cluster.replica_set)
        return {
            number: [storage for storage, role in roles.items() if role is Membership.MEMBER]
            for number, (roles, _) in zip(owned, found, strict=True)
        }

    async def _quiet(self, members: Mapping[int, Sequence[str]]) -> dict[str, Sequence[int]]:
        wanted: dict[str, list[int]] = {}
        for number, names in members.items():
            for name in names:
                wanted.setdefault(name, []).append(number)
        storages = await self._cluster.storages() if wanted else {}

        async def ask(name: str) -> Sequence[int]:
            try:
                async with asyncio.timeout(ASK_SECONDS):
                    return await self._ask_storage(storages[name], wanted[name])
            except (WaltzError, TimeoutError):
                return ()  # no answer proves nothing

        asked = [name for name in wanted if name in storages]
        return dict(zip(asked, await self._cluster.each(asked, ask), strict=True))


class _ProbeConnection(asyncio.Protocol):
    def __init__(self) -> None:
        self.is_over = asyncio.get_running_loop().create_future()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if not self.is_over.done():
            self.is_over.set_result(None)

    async def ended(self) -> None:
        await self.is_over

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def open_probe(server: ServerMeta) -> LivenessProbe:
    """Open a plain connection. It does not identify the process that listens: any listener is enough against a
    suspicion."""
    loop, address = asyncio.get_running_loop(), address_of_peer(server.listen)
    failures: list[OSError] = []
    try:
        places = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        for *_, place in places:
            try:
                _, probe = await loop.create_connection(_ProbeConnection, str(place[0]), int(place[1]))
                return probe
            except OSError as error:
                failures.append(error)
    except OSError as error:
        raise CannotConnect(f"{server.listen} cannot be looked up: {error}") from error
    if failures and all(error.errno == errno.ECONNREFUSED for error in failures):
        raise ConnectionRefusedError(f"nothing listens at {server.listen}")
    raise CannotConnect(f"cannot connect to {server.listen}: {failures[0] if failures else 'no address'}")
