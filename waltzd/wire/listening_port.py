"""A listening port, plain or TLS, that bounds the connections whose TLS handshake is not finished.

An event loop shows a TLS connection only after its handshake, so the limits of a port count nothing before. Strangers
could hold every descriptor of the process for as long as a handshake may take. So a TLS port accepts by itself. When too
many handshakes are unfinished, the oldest one of the address with the most of them is closed for the new one: a caller
that opens many connections closes its own, and one that finishes its handshake soon gets in.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

from waltzd.errors import CannotConnect
from waltzd.errors.operations import PortInUse
from waltzd.protocol.address import Address
from waltzd.wire.connections import CONNECTIONS_MAX, ConnectionShares
from waltzd.wire.frames import Connection
from waltzd.wire.tasks import tell_failure
from waltzd.wire.tls import Tls

HANDSHAKES_MAX = 512
"""Largest number of unfinished handshakes of a port."""
ACCEPTED_MAX = 64
"""Number of connections that are accepted before other tasks run."""
BACKLOG = 128
"""Number of connections that wait in the kernel until they are accepted."""
PAUSE_SECONDS = 1.0
"""Seconds without accepting after the process has run out of descriptors or memory; asyncio waits as long."""


class ListeningPort:
    def __init__(
        self,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        *,
        handshake_seconds: float,
        handshakes_max: int = HANDSHAKES_MAX,
    ) -> None:
        """`make_protocol`: makes the protocol of a connection."""
        self.number = 0
        """TCP port; 0 before `open`."""
        self._make_protocol = make_protocol
        self._tls: ssl.SSLContext | None = None
        self._handshake_seconds = handshake_seconds
        self._handshakes_max = handshakes_max
        self._server: asyncio.Server | None = None
        """Server of a plain port."""
        self._sockets: dict[socket.socket, asyncio.TimerHandle | None] = {}
        """Listening sockets of a TLS port, each with the end of its pause; None while it accepts."""
        self._handshakes: dict[str, dict[asyncio.Task[None], None]] = {}
        """Unfinished handshakes, the oldest first, by the address of the caller."""
        self._count = 0
        """Number of unfinished handshakes."""

    async def open(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        """Listen; raise OSError if that is impossible. `tls`: None for a plain port, which has no handshakes."""
        loop, self._tls = asyncio.get_running_loop(), tls
        server = await loop.create_server(self._make_protocol, host, port, start_serving=tls is None)
        self.number = server.sockets[0].getsockname()[1]
        if tls is None:
            self._server = server
            return
        try:
            for bound in server.sockets:  # they are bound, and do not listen
                one = socket.socket(fileno=os.dup(bound.fileno()))
                self._sockets[one] = None
                one.setblocking(False)
                one.listen(BACKLOG)
                loop.add_reader(one, self._accept, one)
        except OSError:
            self.close()
            raise
        finally:
            server.close()

    def close(self) -> None:
        """Accept no more, and close the connections whose handshake is not finished."""
        if self._server is not None:
            self._server.close()
        for one, pause in self._sockets.items():
            if pause is not None:
                pause.cancel()
            asyncio.get_running_loop().remove_reader(one)
            one.close()
        self._sockets.clear()
        for task in [task for tasks in self._handshakes.values() for task in tasks]:
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_MAX):
            try:
                connected, (host, *_) = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is free: the loop would call this without end
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                self._sockets[listening] = loop.call_later(PAUSE_SECONDS, self._resume, listening)
                return
            connected.setblocking(False)
            self._begin(connected, host)

    def _resume(self, listening: socket.socket) -> None:
        self._sockets[listening] = None
        asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _begin(self, connected: socket.socket, host: str) -> None:
        if self._count >= self._handshakes_max:
            most = max(self._handshakes, key=lambda one: len(self._handshakes[one]))
            oldest = next(iter(self._handshakes[most]))
            self._forget(oldest, most)
            oldest.cancel()
        task = asyncio.create_task(self._shake_hands(connected))
        self._handshakes.setdefault(host, {})[task] = None
        self._count += 1
        task.add_done_callback(lambda done: self._end(done, host, connected))

    async def _shake_hands(self, connected: socket.socket) -> None:
        with suppress(OSError):  # the caller was refused, is gone, or took too long
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_protocol, connected, ssl=self._tls, ssl_handshake_timeout=self._handshake_seconds
            )

    def _end(self, task: asyncio.Task[None], host: str, connected: socket.socket) -> None:
        self._forget(task, host)
        if task.cancelled():  # perhaps before it began
            connected.close()

    def _forget(self, task: asyncio.Task[None], host: str) -> None:
        held = self._handshakes.get(host, {})
        if task in held:
            del held[task]
            self._count -= 1
            if not held:
                del self._handshakes[host]


HANDSHAKE_SECONDS = 5.0


class FramedListener:
    """A port whose connections hold frames: it listens, counts connections by holder, and runs one task for each."""

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
