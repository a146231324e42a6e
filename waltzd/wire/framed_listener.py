"""A port whose connections hold frames: it listens, counts connections by holder, and runs one task for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from waltzd.errors import CannotConnect
from waltzd.errors.operations import PortInUse
from waltzd.protocol.address import Address
from waltzd.wire.connections import CONNECTIONS_MAX, ConnectionShares
from waltzd.wire.frames import Connection
from waltzd.wire.listening_port import ListeningPort
from waltzd.wire.tasks import tell_failure
from waltzd.wire.tls import Tls

HANDSHAKE_SECONDS = 5.0


class FramedListener:
    def __init__(
        self,
        address: Address,
        tls: Tls | None,
        *,
        make_connection: Callable[[Callable[[Connection], None]], Connection],
        serve: Callable[[Connection], Coroutine[Any, Any, None]],
        purpose: str,
        busy: str,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """`make_connection`: the protocol of an accepted connection, which calls its argument once it is connected.
        `serve`: work for a connection until its end. `purpose`: what the port is for. `busy`: what a caller is told that
        is not served."""
        self.address = address
        self._serve = serve
        self._purpose = purpose
        self._busy = busy
        self._shares = ConnectionShares(connections_max)
        self._on_fatal: Callable[[BaseException], None] | None = None
        self._tls = tls
        self._port = ListeningPort(lambda: make_connection(self._accept), handshake_seconds=HANDSHAKE_SECONDS)
        self._serving: dict[asyncio.Task[None], None] = {}

    async def open(self) -> None:
        """Listen. Callers are served after `begin`."""
        try:
            tls = None if self._tls is None else self._tls.answering()
            await self._port.open(self.address.host, self.address.port, tls)
        except OSError as error:
            raise PortInUse(f"cannot listen for {self._purpose} on {self.address}: {error}") from error
        self.address = replace(self.address, port=self._port.number)

    def begin(self, on_fatal: Callable[[BaseException], None]) -> None:
        """Serve callers from now on. `on_fatal`: called with an internal error."""
        self._on_fatal = on_fatal

    def _accept(self, connection: Connection) -> None:
        holder = connection.holder
        if self._on_fatal is None or not self._shares.take(holder):
            connection.lose(CannotConnect(self._busy))
            return
        task = asyncio.create_task(self._serve(connection))
        self._serving[task] = None
        task.add_done_callback(self._serving.pop)
        task.add_done_callback(lambda _: self._shares.give(holder))
        tell_failure(task, self._on_fatal)

    async def stop(self, seconds: float) -> None:
        """Accept no more connections; the present ones may go on for `seconds`."""
        self._port.close()
        serving = list(self._serving)
        if serving:
            await asyncio.wait(serving, timeout=seconds)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
