"""A port of a daemon: it listens for as long as the daemon lives, also when the transport ends its server by itself.

gRPC does that when one call has a path that is no text: a single frame of anybody who may connect. The process would live
on and nobody would reach it again. So there is another server at the same port a moment later; the connections of the first
one are lost, and callers make new ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from waltzd.rpc import Server, create_server, listen
from waltzd.setting import Address
from waltzd.tls import Tls

log = logging.getLogger("waltz.listener")


class Listener:
    def __init__(self, address: Address, message_bytes_max: int, tls: Tls | None) -> None:
        self.address = address
        self._message_bytes_max = message_bytes_max
        self._tls = tls
        self._server = self._open()
        self._add_services: Callable[[Server], None] = lambda server: None
        self._keeping: asyncio.Task[None] | None = None

    def _open(self) -> Server:
        server = create_server(self._message_bytes_max, self._tls)
        self.address = replace(self.address, port=listen(server, self.address, self._tls))
        return server

    async def start(self, add_services: Callable[[Server], None], *, on_fatal: Callable[[BaseException], None]) -> None:
        """`on_fatal` does not come back; it is called when the port is lost for good."""
        self._add_services = add_services
        add_services(self._server)
        await self._server.start()
        self._keeping = asyncio.create_task(self._keep(on_fatal), name=f"listening at {self.address}")

    async def _keep(self, on_fatal: Callable[[BaseException], None]) -> None:
        while True:
            try:
                await self._server.wait_for_termination()
                return
            except Exception as error:  # noqa: BLE001  whatever it was that ended the transport, callers need another one
                log.error("the transport ended its server at %s by itself: %r; listening there again", self.address, error)
            try:
                self._server = self._open()
                self._add_services(self._server)
                await self._server.start()
            except Exception as error:
                on_fatal(error)
                raise

    async def stop(self, seconds: float) -> None:
        """No new calls; those that run may go on for so long."""
        if self._keeping is not None:
            await self._server.stop(seconds)
            await self._keeping
