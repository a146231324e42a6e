"""Names of applications in the coordinator: recorded while they are connected, forgotten when they were away for long.

Every server records the names that are connected to it, seldom. The leader removes names that were not seen for months.
Nothing depends on it; while the coordinator does not answer it is done later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from waltzd.cluster.clients import SEEN_SECONDS, ClientNames
from waltzd.errors import WaltzError
from waltzd.server.clients.registry import ClientRegistry

log = logging.getLogger("waltz.server")
LOOK_SECONDS = 60.0
"""Interval in which a server records connected names."""
FORGET_SECONDS = 3600.0
"""Interval in which the leader looks for names to forget."""


class NameRecorder:
    def __init__(self, names: ClientNames, registry: ClientRegistry, *, is_leader: Callable[[], bool]) -> None:
        self._names = names
        self._registry = registry
        self._is_leader = is_leader
        self._noted: dict[str, float] = {}
        """Time at which each connected name was last recorded."""
        self._forgot_at = 0.0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.record_names(asyncio.get_running_loop().time())
            except WaltzError as error:
                log.info("the names of applications are written down later: %s %s", error.code, error.message)

    async def record_names(self, now: float) -> None:
        connected = self._registry.names
        self._noted = {name: self._noted[name] for name in connected if name in self._noted}
        for name in connected:
            if now - self._noted.get(name, -SEEN_SECONDS) >= SEEN_SECONDS:
                await self._names.note_seen(name)
                self._noted[name] = now
        if self._is_leader() and now - self._forgot_at >= FORGET_SECONDS:
            gone = await self._names.forget()
            self._forgot_at = now
            if gone:
                log.info(
                    "%d names of applications were not seen for long, and are forgotten: %s", len(gone), ", ".join(gone)
                )
