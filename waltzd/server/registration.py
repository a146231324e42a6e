"""The entry of this server in the list of servers: an ephemeral document, which exists as long as its coordinator
session.

The name is the identity, so only one process may have it. A document of the same name from another coordinator session
was left behind by a process that has ended, or belongs to one that still runs. The hard part is to distinguish the two
without waiting until the coordinator expires the old session. So we call the process that announced it at its own
address. If it answers, the name is taken. If not, its document is replaced at once. A process that resumes later finds
our document in its place and ends. It does not call us before: a process that has just started may be slow to answer.

After each registration a server checks the versions of the other servers in the list. If one does not fit, it leaves the
list and ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from waltzd.cluster.cluster import ROOT, SERVERS, Cluster, Registered
from waltzd.cluster.documents import ServerMeta
from waltzd.errors.operations import ChangedMeanwhile, IncompatibleVersion, NameInUse, NodeMissing
from waltzd.server.reconcile import Reconciler

log = logging.getLogger("waltz.server")


async def _check_nothing() -> None:
    """Accept every list of servers."""


class Registration:
    def __init__(
        self,
        cluster: Cluster,
        server: ServerMeta,
        *,
        is_alive: Callable[[ServerMeta], Awaitable[bool]],
        check_servers: Callable[[], Awaitable[None]] = _check_nothing,
    ) -> None:
        """`is_alive`: whether the process that announced this document still answers at its address. `check_servers` raises
        `IncompatibleVersion` if a server in the list does not work with this one."""
        self._cluster = cluster
        self._server = server
        self._is_alive = is_alive
        self._check_servers = check_servers
        self._one_at_a_time = asyncio.Lock()
        self._was_announced = False
        """Whether this process was in the list at any time."""
        self.is_announced = False
        """Whether the document was in the list at the last look. While the coordinator does not answer that may have
        changed."""
        self.reconciler = Reconciler("registration", wait=self._wait, act=self.announce)
        """Announces the server again whenever its document is not as it should be. If the documents of the cluster are
        missing, the list returns with the root."""

    @property
    def server(self) -> ServerMeta:
        """Document that is announced, or will be."""
        return self._server

    async def _wait(self, seen: object | None) -> object:
        """Wait for a change of the own document, or, after a failure, of any in the list: one that cannot be read may have
        been the cause."""
        path = f"{SERVERS}/{self._server.name}" if self.is_announced else SERVERS
        return await self._cluster.wait_for_change([path, ROOT], seen)

    async def announce(self) -> None:
        """Put the document into the list. Raise `NameInUse` if another process has this name, and leave the list
        and raise `IncompatibleVersion` if a server in it does not work with this one."""
        async with self._one_at_a_time:
            self.is_announced = False
            await self._announce(self._server)
            self.is_announced = self._was_announced = True

    async def change(self, *, is_draining: bool | None = None, preferred: tuple[int, ...] | None = None) -> None:
        """Announce a changed document from now on. After an error the old document counts here: if the change was made
        after all, it is undone."""
        async with self._one_at_a_time:
            wanted = self._server
            if is_draining is not None:
                wanted = replace(wanted, is_draining=is_draining)
            if preferred is not None:
                wanted = replace(wanted, preferred=preferred)
            await self._announce(wanted)
            self._server = wanted
            self.is_announced = self._was_announced = True

    async def _announce(self, wanted: ServerMeta) -> None:
        while not await self._is_announced(wanted):
            pass  # another process has just changed it: look again
        try:
            await self._check_servers()  # not only before: another server may have started at the same time
        except IncompatibleVersion:
            await self._cluster.unregister_server(wanted.name)
            raise

    async def _is_announced(self, wanted: ServerMeta) -> bool:
        found = await self._cluster.server(wanted.name)
        if found is None:
            return await self._add(wanted)
        try:
            if not found.is_mine:
                await self._take_the_place(found, wanted)
            elif found.meta != wanted:
                await self._cluster.update_server(wanted)
        except ChangedMeanwhile:
            return False
        return True

    async def _add(self, wanted: ServerMeta) -> bool:
        try:
            await self._cluster.register_server(wanted)
        except NodeMissing:  # the cluster was never created, or was deleted
            raise
        except ChangedMeanwhile:
            return False
        log.info("server %s is in the list of servers", wanted.name)
        return True

    async def _take_the_place(self, found: Registered, wanted: ServerMeta) -> None:
        is_other = found.meta.instance != wanted.instance
        if is_other and (self._was_announced or await self._is_alive(found.meta)):
            address, does = found.meta.admin_listen, "took the place of this one" if self._was_announced else "is running"
            raise NameInUse(
                f"another server named {wanted.name} {does}; its address for operators is {address}",
                server=wanted.name,
                address=address,
            )
        await self._cluster.replace_server(wanted, found.version)
        log.info("server %s replaced the entry of an ended process in the list of servers", wanted.name)
