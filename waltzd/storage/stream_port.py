"""The port of streams: connections to calls, errors to the last frame. It decides nothing.

A connection is one stream: of records that are appended, or of one segment file, in or out. Its first frame, within some
seconds, says who calls, and is checked like every other call; with certificates only servers are let in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from waltzd.errors import BadFrame, CannotConnect, NotPermitted, PortInUse, WaltzError
from waltzd.protocol.address import Address
from waltzd.protocol.peers import RecordsFrame
from waltzd.protocol.role import Role
from waltzd.storage.calls import StorageCalls
from waltzd.storage.lane import refuse
from waltzd.wire.codec import packed_error, packed_status
from waltzd.wire.frames import Connection, Kind
from waltzd.wire.streams import FIRST_BYTES, FileSender, Hello, batches_of, mark_bytes, received, records_of
from waltzd.wire.tasks import tell_failure
from waltzd.wire.tls import Tls

HELLO_SECONDS = 5.0
CONNECTIONS_MAX = 8192
"""Further ones are closed at once: one server has one stream for each of its partitions."""


class _FramedLink:
    """The append stream of one caller."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def receive(self) -> RecordsFrame | None:
        try:
            found = await self._connection.receive()
        except CannotConnect:  # the caller has gone
            return None
        match found:
            case None:
                return None
            case Kind.RECORDS, content:
                return records_of(content)
            case Kind.BATCHES, content:
                return batches_of(content)
            case kind, _:
                raise BadFrame(f"a frame of the kind {kind.name} on an append stream")

    async def send(self, durable_id: int) -> None:
        await self._connection.send(Kind.MARK, (mark_bytes(durable_id),))

    @property
    def may_post(self) -> bool:
        return self._connection.may_post

    def post(self, durable_id: int) -> None:
        self._connection.post(Kind.MARK, (mark_bytes(durable_id),))

    async def refuse(self, error: WaltzError) -> None:
        await self._connection.send(Kind.REFUSED, (packed_error(error),))


@asynccontextmanager
async def _telling(link: _FramedLink) -> AsyncGenerator[None, None]:
    """A caller that is still there is told why it is refused."""
    try:
        yield
    except CannotConnect:
        raise
    except WaltzError as error:
        await refuse(link, error)
        raise


class StreamPort:
    def __init__(
        self, calls: StorageCalls, address: Address, tls: Tls | None, *, connections_max: int = CONNECTIONS_MAX
    ) -> None:
        self.address = address
        self._calls = calls
        self._tls = tls
        self._connections_max = connections_max
        self._server: asyncio.Server | None = None
        self._on_fatal: Callable[[BaseException], None] | None = None
        self._serving: dict[asyncio.Task[None], None] = {}

    async def start(self, on_fatal: Callable[[BaseException], None]) -> None:
        self._on_fatal = on_fatal
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: Connection(self._calls.config.message_bytes_max, self._accept, first_max=FIRST_BYTES),
                self.address.host,
                self.address.port,
                ssl=self._tls.answering() if self._tls is not None else None,
                ssl_handshake_timeout=HELLO_SECONDS if self._tls is not None else None,
            )
        except OSError as error:
            raise PortInUse(f"cannot listen for streams on {self.address}: {error}") from error
        self.address = replace(self.address, port=self._server.sockets[0].getsockname()[1])

    def _accept(self, connection: Connection) -> None:
        if len(self._serving) >= self._connections_max:
            connection.lose(CannotConnect("this storage has too many streams"))
        else:
            self._spawn(self._serve(connection))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._serving[task] = None
        task.add_done_callback(self._serving.pop)
        assert self._on_fatal is not None
        tell_failure(task, self._on_fatal)

    async def _serve(self, connection: Connection) -> None:
        link = _FramedLink(connection)
        try:
            async with _telling(link):
                call = await self._call(connection)
                match call:
                    case Kind.FETCH, hello:
                        await self._send(hello, connection)
                    case Kind.INSTALL, hello:
                        await self._take(hello, connection)
            if call is not None and call[0] is Kind.HELLO:
                hello = call[1]
                await self._calls.append(hello.partition, hello.session, link, contact=hello.contact)
        except CannotConnect:  # the caller has gone
            pass
        except WaltzError:
            self._calls.streamed.refused_calls += 1
        finally:
            connection.close()

    async def _call(self, connection: Connection) -> tuple[Kind, Hello] | None:
        """The first frame; None when it does not come."""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                found = await connection.receive()
        except TimeoutError:
            return None
        if self._tls is not None:
            caller = connection.identity
            if caller is None or caller.role is not Role.SERVER or caller.key != self._tls.identity.key:
                raise NotPermitted("only servers of this cluster have streams")
            why = connection.end_with_certificate(self._tls)
            if why is not None:
                raise NotPermitted(f"the certificate of {caller.name} {why}")
        match found:
            case (Kind.HELLO | Kind.FETCH | Kind.INSTALL) as kind, content:
                hello = Hello.decode(content)
                self._calls.check_key(hello.key)
                self._calls.directory.check_meant(hello.storage)
                connection.admit()
                return kind, hello
            case _:
                raise BadFrame("a stream begins with who calls")

    async def _send(self, hello: Hello, connection: Connection) -> None:
        async with aclosing(self._calls.fetch_segment(hello.partition, hello.session, hello.first_id)) as pieces:
            await FileSender(connection, receiver=connection.peer).send(pieces)

    async def _take(self, hello: Hello, connection: Connection) -> None:
        async with aclosing(received(connection)) as pieces:
            status = await self._calls.install_segment(
                hello.partition, hello.session, hello.first_id, hello.file_bytes, pieces, contact=hello.contact
            )
        await connection.send(Kind.STATUS, (packed_status(status),))

    async def stop(self, seconds: float) -> None:
        """No new streams; the present ones may finish for so long."""
        if self._server is not None:
            self._server.close()
        serving = list(self._serving)
        if serving:
            await asyncio.wait(serving, timeout=seconds)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
