"""Storages as everybody else sees them: the calls of a server, an operator's tool or an exporter to one storage.

Answers are plain values, errors are the classes that the storage raised. `AppendStream` is the hot one: frames go out as
fast as the storage takes them, marks come back.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from uuid import UUID

from waltzd import wire_pb2 as wire
from waltzd.buffer import Buffer
from waltzd.caller import Caller
from waltzd.errors import BadFrame, CannotConnect, WaltzError, WrongPeer
from waltzd.framing import Connection, Kind
from waltzd.link import run_of
from waltzd.messages import status_of
from waltzd.record import Run, first_bad
from waltzd.replica import ReplicaStatus
from waltzd.role import Role, dns_name
from waltzd.segment_stream import FileSender, received
from waltzd.setting import parse_address
from waltzd.stream_frame import FileHello, Hello, mark_of, records_parts, refusal_of
from waltzd.tls import Tls, check_peer
from waltzd.wire_pb2_grpc import ReplicaStub

ANSWER_BYTES_MAX = 1 << 20
"""Of what a storage says on a stream: marks, pieces of files, and why it ends."""
CALL_SECONDS = 30.0
"""Every call has a deadline. Proving a long tail at `open` may need more; give it there."""


class ReplicaClient(Caller):
    """The replicas on one storage, through its port for servers."""

    service = ReplicaStub
    peer = Role.STORAGE

    def __init__(
        self,
        address: str,
        key: UUID,
        *,
        seconds: float = CALL_SECONDS,
        tls: Tls | None = None,
        name: str | None = None,
        stream_port: int = 0,
        instance: UUID | None = None,
    ) -> None:
        """`stream_port`: where append streams connect to; the answer to `open` says it, too."""
        super().__init__(address, seconds=seconds, tls=tls, name=name, instance=instance)
        self._key = key
        self._tls = tls
        self._name = name
        self._host = parse_address(address).host
        self._stream_port = stream_port
        self._caller = secrets.randbits(62)
        self._contacts: dict[int, int] = {}
        """Of each partition that was opened here: what is asked for later belongs to that opening."""

    def _target(self, partition: int, session: int | None) -> wire.Target:
        contact = self._contacts.get(partition, 0)
        return wire.Target(cluster_key=self._key.bytes, partition=partition, session=session, contact=contact)

    async def status(self, partition: int) -> ReplicaStatus:
        """Where the replica stands: `Open` without a session binds it to nothing."""
        return status_of(await self._call(self._stub.Open, wire.OpenRequest(target=self._target(partition, None))))

    async def open(
        self, partition: int, session: int, *, partitions: int, create: bool = False, seconds: float | None = None
    ) -> ReplicaStatus:
        """`create`: an empty replica where the storage holds nothing of the partition."""
        request = wire.OpenRequest(
            target=self._target(partition, session), partitions=partitions, create=create, caller=self._caller
        )
        reply: wire.ReplicaStatus = await self._call(self._stub.Open, request, seconds)
        self._stream_port = reply.stream_port
        self._contacts[partition] = reply.contact
        return status_of(reply)

    async def set_low_mark(self, partition: int, session: int, mark: int) -> ReplicaStatus:
        request = wire.MarkRequest(target=self._target(partition, session), mark=mark)
        return status_of(await self._call(self._stub.SetLowMark, request))

    async def truncate(self, partition: int, session: int, mark: int) -> ReplicaStatus:
        request = wire.MarkRequest(target=self._target(partition, session), mark=mark)
        return status_of(await self._call(self._stub.Truncate, request))

    def _hello(self, partition: int, session: int) -> Hello:
        return Hello(self._key, partition, session, self._contacts.get(partition, 0), self._name or "")

    def append(self, partition: int, session: int) -> AppendStream:
        """The replica was opened by this client before: the storage said then where its streams go."""
        assert self._stream_port, "open the replica first"
        hello = self._hello(partition, session)
        return AppendStream(self._host, self._stream_port, hello, tls=self._tls, name=self._name)

    async def read(
        self, partition: int, first_id: int, last_id: int | None = None, *, session: int | None = None, frame_bytes: int = 0
    ) -> AsyncIterator[Run]:
        """Runs that were checked here, too: what the network did to them shows."""
        request = wire.ReadRequest(
            target=self._target(partition, session), first_id=first_id, last_id=last_id, frame_bytes=frame_bytes
        )
        async with aclosing(self._stream(self._stub.Read, request)) as messages:
            async for message in messages:
                run = run_of(message.first_id, message.lengths, message.records)
                bad = first_bad(run)
                if bad is not None:
                    raise BadFrame(f"record {run.first_id + bad} from {self.address} was damaged on the way")
                yield run

    async def segments(self, partition: int, *, session: int | None = None) -> list[tuple[int, int, int]]:
        """First id, last id and size of each sealed segment."""
        request = wire.SegmentsRequest(target=self._target(partition, session))
        reply: wire.SegmentList = await self._call(self._stub.ListSegments, request)
        return [(found.first_id, found.last_id, found.bytes) for found in reply.segments]

    async def fetch_segment(self, partition: int, first_id: int, *, session: int) -> AsyncIterator[Buffer]:
        """The bytes of a sealed segment file. The replica was opened by this client before, as for `append`."""
        hello = FileHello(self._hello(partition, session), first_id)
        connection = await self._connect(Kind.FETCH, hello.encode())
        try:
            async with aclosing(received(connection)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            connection.lose(CannotConnect("no more of the file is needed here"))

    async def install_segment(
        self, partition: int, session: int, first_id: int, file_bytes: int, pieces: AsyncIterator[Buffer]
    ) -> ReplicaStatus:
        """Send a whole segment file. The pieces are asked for when the storage has agreed to take it; `file_bytes` is 0
        where the size is not known before. What is wrong with the pieces themselves is raised as it is."""
        hello = FileHello(self._hello(partition, session), first_id, file_bytes)
        try:
            connection = await self._connect(Kind.INSTALL, hello.encode())
            try:
                answer = await FileSender(connection, receiver=self.address, seconds=self._seconds).send(pieces)
            finally:
                connection.lose(CannotConnect("the file was given up here"))
        finally:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()
        match answer:
            case Kind.STATUS, content:
                return status_of(wire.ReplicaStatus.FromString(bytes(content)))
            case Kind.REFUSED, content:
                raise refusal_of(content)
            case None:
                raise CannotConnect(f"{self.address} closed the stream of a segment file")
            case kind, _:
                raise BadFrame(f"a storage answered a segment file with a frame of the kind {kind.name}")

    async def _connect(self, kind: Kind, hello: bytes) -> Connection:
        assert self._stream_port, "open the replica first"
        try:
            async with asyncio.timeout(self._seconds):
                return await connect(self._host, self._stream_port, kind, hello, tls=self._tls, name=self._name)
        except TimeoutError:
            raise CannotConnect(f"cannot open a stream to {self.address} within {self._seconds:.0f} seconds") from None


async def connect(host: str, port: int, kind: Kind, hello: bytes, *, tls: Tls | None, name: str | None) -> Connection:
    """A stream to a storage, and the first frame on it. With a `name`, only the storage of that name may answer."""
    secured, expected = None, None
    if tls is not None:
        secured = tls.calling()
        expected = dns_name(tls.identity.key, Role.STORAGE, name)
    try:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(ANSWER_BYTES_MAX), host, port, ssl=secured, server_hostname=expected
        )
    except (OSError, ssl.SSLError) as error:
        raise CannotConnect(f"cannot open a stream to {host}:{port}: {error}") from error
    if tls is not None:
        try:
            check_peer(connection.identity, f"{host}:{port}", key=tls.identity.key, role=Role.STORAGE, name=name)
            why = connection.end_with_certificate(tls)
            if why is not None:
                raise WrongPeer(f"the certificate of whoever answers at {host}:{port} {why}")
        except CannotConnect as error:
            connection.lose(error)
            raise
    await connection.send(kind, (hello,))
    return connection


class AppendStream:
    """Records to one replica, over a connection of its own. `send` waits only while the connection is full; `receive`
    gives the next mark."""

    def __init__(self, host: str, port: int, hello: Hello, *, tls: Tls | None, name: str | None) -> None:
        self._host = host
        self._port = port
        self._hello = hello
        self._tls = tls
        self._name = name
        self._connecting: asyncio.Task[Connection] | None = None
        self._is_finished = False
        self._refusal: WaltzError | None = None

    async def _connection(self) -> Connection:
        if self._connecting is None:
            self._connecting = asyncio.create_task(
                connect(self._host, self._port, Kind.HELLO, self._hello.encode(), tls=self._tls, name=self._name)
            )
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())  # whoever waits raises it
        return await asyncio.shield(self._connecting)

    async def start(self) -> None:
        """Say who calls without sending records yet: what is wrong with the session shows before the first record."""
        await self._connection()

    async def send(self, run: Run, committed: int) -> None:
        if self._refusal is not None:
            raise self._refusal
        connection = await self._connection()
        try:
            await connection.send(Kind.RECORDS, records_parts(run, committed))
        except CannotConnect:
            if self._refusal is not None:  # `receive` has met it
                raise self._refusal from None
            raise

    async def receive(self) -> int | None:
        """What was sent here up to this id is on the storage's disk; None when all that was sent is, after `finish`."""
        if self._refusal is not None:
            raise self._refusal
        connection = await self._connection()
        found = await connection.receive()
        if found is None and not self._is_finished:
            raise CannotConnect(f"{self._host}:{self._port} closed the stream")
        match found:
            case None:
                return None
            case Kind.MARK, content:
                return mark_of(content)
            case Kind.REFUSED, content:
                self._refusal = refusal_of(content)
                connection.close()
                raise self._refusal
            case kind, _:
                raise BadFrame(f"a storage sent a frame of the kind {kind.name} on an append stream")

    async def finish(self) -> None:
        """No more records will come."""
        self._is_finished = True
        await (await self._connection()).send(Kind.END)

    def cancel(self) -> None:
        connecting = self._connecting
        if connecting is None:
            return
        if not connecting.done():
            connecting.cancel()
        elif not connecting.cancelled() and connecting.exception() is None:
            connecting.result().lose(CannotConnect("the stream was given up here"))
