"""Port for streams: maps connections to calls, and errors to the last frame. It makes no decision.

A connection is one stream: of records that are appended, or of one segment file, in or out. Its first frame has to come
within some seconds, names the caller, and is checked like every other call. With certificates only servers are admitted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from waltzd.disk.seam import Buffer
from waltzd.errors import CannotConnect, NotPermitted, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.protocol.address import Address
from waltzd.protocol.audit import NO_AUDIT, Auditor, AuditRecord
from waltzd.protocol.peers import RecordsFrame
from waltzd.protocol.role import Role
from waltzd.storage.append_queue import refuse
from waltzd.storage.calls import StorageCalls
from waltzd.wire.codec import packed_error, packed_status
from waltzd.wire.connections import CONNECTIONS_MAX
from waltzd.wire.frames import Connection, Kind
from waltzd.wire.listening_port import FramedListener
from waltzd.wire.servicer import audited_name
from waltzd.wire.streams import FIRST_BYTES, FileSender, Hello, batches_of, mark_bytes, received, records_of
from waltzd.wire.tls import Tls

HELLO_SECONDS = 5.0


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

    def hear(self, taker: Callable[[RecordsFrame], bool]) -> None:
        def take(content: Buffer) -> bool:
            try:
                frame = batches_of(content)
            except BadFrame:
                return False  # `receive` raises it
            return taker(frame)

        self._connection.hear(Kind.BATCHES, take)

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
    """Send the error to a caller that is refused, if it is still connected."""
    try:
        yield
    except CannotConnect:
        raise
    except WaltzError as error:
        await refuse(link, error)
        raise


def _told(deed: AuditRecord, kind: Kind, hello: Hello) -> AuditRecord:
    """Return the audit record of a stream, completed from its first frame."""
    what = {Kind.HELLO: "Replica/Append", Kind.INSTALL: "Replica/Install"}.get(kind, "Replica/FetchSegment")
    return replace(deed, what=what, partitions=str(hello.partition), about=f"session={hello.session}")


class StreamPort:
    def __init__(
        self,
        calls: StorageCalls,
        address: Address,
        tls: Tls | None,
        auditor: Auditor = NO_AUDIT,
        *,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._calls = calls
        self._tls = tls
        self._auditor = auditor
        self._listener = FramedListener(
            address,
            tls,
            make_connection=lambda accept: Connection(calls.config.message_bytes_max, accept, first_max=FIRST_BYTES),
            serve=self._serve,
            purpose="streams",
            busy="this storage has too many streams, or too many of this caller",
            connections_max=connections_max,
        )

    @property
    def address(self) -> Address:
        return self._listener.address

    async def start(self, on_fatal: Callable[[BaseException], None]) -> None:
        await self._listener.open()
        self._listener.begin(on_fatal)

    async def _serve(self, connection: Connection) -> None:
        link = _FramedLink(connection)
        deed = AuditRecord(who=audited_name(connection.identity), peer=connection.peer, what="Replica/Stream")
        try:
            async with _telling(link):
                call = await self._call(connection)
                if call is not None:
                    deed = _told(deed, *call)
                match call:
                    case Kind.FETCH, hello:
                        await self._send(hello, connection)
                    case Kind.INSTALL, hello:
                        await self._take(hello, connection)
                        self._auditor.note(deed)
            if call is not None and call[0] is Kind.HELLO:
                hello = call[1]
                self._auditor.note(deed)
                deed = replace(deed, what=f"{deed.what}/end")
                await self._calls.append(hello.partition, hello.session, link, contact=hello.contact)
                self._auditor.note(deed)
        except CannotConnect:  # the caller has gone
            self._end(deed, None)
        except WaltzError as error:
            self._calls.streamed.refused_calls += 1
            self._end(deed, error.code)
        finally:
            connection.close()

    def _end(self, deed: AuditRecord, code: str | None) -> None:
        """Record the end of a stream that was refused or lost; a connection that ended before its first frame is not
        recorded."""
        if code is not None or deed.what.endswith("/end"):
            self._auditor.note(replace(deed, code=code))

    async def _call(self, connection: Connection) -> tuple[Kind, Hello] | None:
        """Return the first frame; None if it does not come. A caller whose role has no streams is refused at once."""
        if self._tls is not None:
            caller = connection.identity
            if caller is None or caller.role is not Role.SERVER or caller.key != self._tls.identity.key:
                raise NotPermitted("only servers of this cluster have streams")
            why = connection.end_with_certificate(self._tls)
            if why is not None:
                raise NotPermitted(f"the certificate of {caller.name} {why}")
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                found = await connection.receive()
        except TimeoutError:
            return None
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
        file = self._calls.fetch_segment(hello.partition, hello.session, hello.first_id, contact=hello.contact)
        async with aclosing(file) as pieces:
            await FileSender(connection, receiver=connection.peer).send(pieces)

    async def _take(self, hello: Hello, connection: Connection) -> None:
        async with aclosing(received(connection)) as pieces:
            status = await self._calls.install_segment(
                hello.partition, hello.session, hello.first_id, hello.file_bytes, pieces, contact=hello.contact
            )
        await connection.send(Kind.STATUS, (packed_status(status),))

    async def stop(self, seconds: float) -> None:
        """Accept no new streams; running streams may go on for `seconds`."""
        await self._listener.stop(seconds)
