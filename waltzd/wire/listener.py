"""A port of a daemon: it listens for as long as the daemon lives, also when the transport ends its server by itself.

gRPC does that when one call has a path that is no text: a single frame of anybody who may connect. The process would live
on and nobody would reach it again. So there is another server at the same port a moment later. What still runs on the first
one may go on for a while, and keeps nobody out: gRPC closes the port at once, and says so when the last call has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from waltzd.errors import PortInUse
from waltzd.protocol.address import Address
from waltzd.wire.grpc import Server, knocked
from waltzd.wire.rpc_server import create_server, listen
from waltzd.wire.tls import Tls

LOOK_SECONDS = 0.1
"""How often the server is asked whether it still is one."""
OPEN_SECONDS = 10.0
"""How long the socket of a server that has ended may be in the way of the next one."""
RETIRED_SECONDS = 60.0
RETIRED_MAX = 4
"""So long may calls go on at servers that have ended, and so many of those are kept: strangers end them."""
KNOCK_SECONDS = 2.0
FRESH_SECONDS = 1.0
log = logging.getLogger("waltz.listener")


class Listener:
    def __init__(self, address: Address, message_bytes_max: int, tls: Tls | None) -> None:
        self.address = address
        self._message_bytes_max = message_bytes_max
        self._tls = tls
        self._server = self._open()
        self._add_services: Callable[[Server], None] = lambda server: None
        self._keeping: asyncio.Task[None] | None = None
        self._ended = 0
        self._retired: dict[Server, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Lock()
        self._heard: list[str] = []
        self._knocked: float | None = None

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
                # Without a limit it would not say what ended it before all calls have ended.
                while await self._server.wait_for_termination(LOOK_SECONDS):
                    pass
                return
            except Exception as error:  # noqa: BLE001  whatever it was that ended the transport, callers need another one
                self._ended += 1
                if self._ended.bit_count() == 1:  # strangers do not fill the log
                    log.error("the transport ended its server at %s by itself, for the %d. time: %r; listening there again",
                              self.address, self._ended, error)  # fmt: skip
            try:
                self._retire(self._server)
                self._server = await self._open_again()
                self._add_services(self._server)
                await self._server.start()
            except Exception as error:
                on_fatal(error)
                raise

    def _retire(self, server: Server) -> None:
        self._end(server, RETIRED_SECONDS)
        for oldest in list(self._retired)[:-RETIRED_MAX]:
            self._end(oldest, None)

    def _end(self, server: Server, seconds: float | None) -> None:
        """None: all of its calls end now."""
        ending = asyncio.create_task(server.stop(seconds), name=f"ending a server at {self.address}")
        self._retired[server] = ending
        ending.add_done_callback(lambda _: self._retired.pop(server, None))

    async def _open_again(self) -> Server:
        """At once, unless the socket of the one before is still being closed, on a thread of its own."""
        async with asyncio.timeout(OPEN_SECONDS):
            while True:
                try:
                    return self._open()
                except PortInUse:
                    await asyncio.sleep(LOOK_SECONDS / 10)

    async def knock(self) -> list[str]:
        """Why nobody gets in, by a call of our own through this port, as it was a second ago at most."""
        async with self._one_at_a_time:
            now = asyncio.get_running_loop().time()
            if self._knocked is None or now - self._knocked >= FRESH_SECONDS:
                self._heard = await self._try_the_door()
                self._knocked = asyncio.get_running_loop().time()
            return self._heard

    async def _try_the_door(self) -> list[str]:
        ours = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address.host, self.address.host)
        why = await knocked(str(replace(self.address, host=ours)), self._tls, KNOCK_SECONDS)
        return [] if why is None else [f"nobody gets in at {self.address}: {why}"]

    async def stop(self, seconds: float) -> None:
        """No new calls; those that run may go on for so long."""
        if self._keeping is not None:
            await asyncio.gather(*(server.stop(seconds) for server in (self._server, *self._retired)))
            await self._keeping
