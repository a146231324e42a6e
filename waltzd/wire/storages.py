"""A storage as its callers see it: servers, exporters, and operators through a port of their own.

Answers are plain values, errors are the classes that the storage raised. `AppendStream` is the hot one: frames go out as
fast as the storage takes them, marks come back.
"""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from uuid import UUID

from waltzd.disk.seam import Buffer
from waltzd.errors import BadFrame, CannotConnect, WaltzError
from waltzd.format.batch import Piece
from waltzd.format.digest import HASH_BYTES, Digest
from waltzd.format.finding import Finding
from waltzd.format.record import Run
from waltzd.protocol.address import parse_address
from waltzd.protocol.descriptions import (
    ArchiveCheck,
    Archived,
    BackedUp,
    Events,
    ReplicaStatus,
    RestoreOrder,
    Restoring,
    SetAside,
    StorageDescription,
    VerifySummary,
)
from waltzd.protocol.peers import SECRET_BYTES, Contact, Content, LockHistory, secret_of
from waltzd.protocol.role import Role
from waltzd.protocol.timelines import NEVER_FORKED, Lineage
from waltzd.wire import frames
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.codec import (
    checked_pieces,
    checked_run,
    error_of_detail,
    lock_history_of,
    timelines_of,
    to_message,
    to_value,
    unpacked_error,
)
from waltzd.wire.frames import Connection, Kind
from waltzd.wire.grpc import Caller
from waltzd.wire.streams import FileSender, Hello, batches_parts, mark_of, received, records_parts
from waltzd.wire.tls import Tls
from waltzd.wire.wire_pb2_grpc import ReplicaStub, StorageAdminStub

ANSWER_BYTES_MAX = 1 << 20
"""Of what a storage says on a stream: marks, pieces of files, and why it ends."""
CALL_SECONDS = 30.0
"""Every call has a deadline. Proving a long tail at `open` may need more; give it there."""

ARCHIVE_SECONDS = 600.0
METADATA_SECONDS = 60.0
"""A segment is read, proven, sent to a store and read back, one at a time on each storage."""
TRIM_SECONDS = 120.0
"""To look for objects in a store, or to remove files: what was not done in time is asked for again."""


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
        owner_key: bytes = b"",
    ) -> None:
        """`stream_port`: where append streams connect to; the answer to `open` says it, too. `owner_key`: of the process,
        for the secrets of its sessions; two names that lead to one storage have the same. Drawn where it is empty."""
        super().__init__(address, seconds=seconds, tls=tls, name=name, instance=instance)
        self._key = key
        self._tls = tls
        self._name = name
        self._host = parse_address(address).host
        self._stream_port = stream_port
        self._caller = secrets.randbits(62)
        self._owner_key = owner_key or secrets.token_bytes(SECRET_BYTES)
        self._contacts: dict[int, int] = {}
        """Of each partition that was opened here: what is asked for later belongs to that opening."""

    def _contact(self, partition: int, session: int) -> Contact:
        return Contact(self._contacts.get(partition, 0), secret_of(self._owner_key, partition, session))

    def _target(self, partition: int, session: int | None) -> wire.Target:
        target = wire.Target(cluster_key=self._key.bytes, partition=partition, session=session)
        if session is not None:
            contact = self._contact(partition, session)
            target.contact, target.secret = contact.number, contact.secret
        return target

    async def status(self, partition: int) -> ReplicaStatus:
        """Where the replica stands: `Open` without a session binds it to nothing."""
        return to_value(
            ReplicaStatus, await self._call(self._stub.Open, wire.OpenRequest(target=self._target(partition, None)))
        )

    async def quiet(self, partitions: Sequence[int]) -> Sequence[int]:
        """Those of these partitions that are here and have no append stream at the moment."""
        request = wire.QuietRequest(cluster_key=self._key.bytes, partitions=partitions)
        reply: wire.QuietReply = await self._call(self._stub.Quiet, request)
        return tuple(reply.partitions)

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
        return to_value(ReplicaStatus, reply)

    async def set_low_mark(self, partition: int, session: int, mark: int) -> ReplicaStatus:
        request = wire.MarkRequest(target=self._target(partition, session), mark=mark)
        return to_value(ReplicaStatus, await self._call(self._stub.SetLowMark, request))

    async def truncate(self, partition: int, session: int, mark: int) -> ReplicaStatus:
        request = wire.MarkRequest(target=self._target(partition, session), mark=mark)
        return to_value(ReplicaStatus, await self._call(self._stub.Truncate, request))

    async def fork(self, partition: int, session: int, lineage: Lineage) -> ReplicaStatus:
        timelines = timelines_of(Lineage(one.bare for one in lineage.later))
        request = wire.ForkRequest(target=self._target(partition, session), timelines=timelines)
        return to_value(ReplicaStatus, await self._call(self._stub.Fork, request, TRIM_SECONDS))

    def _hello(self, partition: int, session: int, first_id: int = 0, file_bytes: int = 0) -> Hello:
        contact = self._contact(partition, session)
        return Hello(self._key, partition, session, contact, self._name or "", first_id, file_bytes)

    def append(self, partition: int, session: int) -> AppendStream:
        """The replica was opened by this client before: the storage said then where its streams go."""
        assert self._stream_port, "open the replica first"
        hello = self._hello(partition, session)
        return AppendStream(self._host, self._stream_port, hello, tls=self._tls, name=self._name)

    async def read(
        self,
        partition: int,
        first_id: int,
        last_id: int | None = None,
        *,
        session: int | None = None,
        frame_bytes: int = 0,
        with_locks: bool = False,
    ) -> AsyncIterator[Run]:
        """Runs that were checked here, too: what the network did to them shows."""
        request = wire.ReadRequest(
            target=self._target(partition, session),
            first_id=first_id,
            last_id=last_id,
            frame_bytes=frame_bytes,
            form=wire.READ_FORM_LOCKS if with_locks else wire.READ_FORM_RECORDS,
        )
        async with aclosing(self._stream(self._stub.Read, request)) as messages:
            async for message in messages:
                yield checked_run(message, self.address)

    async def read_whole(
        self, partition: int, first_id: int, last_id: int, *, session: int, frame_bytes: int = 0
    ) -> AsyncIterator[Piece]:
        """The same for another replica: batches where the log has them."""
        request = wire.ReadRequest(
            target=self._target(partition, session),
            first_id=first_id,
            last_id=last_id,
            frame_bytes=frame_bytes,
            form=wire.READ_FORM_WHOLE,
        )
        async with aclosing(self._stream(self._stub.Read, request)) as messages:
            async for message in messages:
                for piece in checked_pieces(message, self.address):
                    yield piece

    async def read_locks(self, partition: int, last_id: int, *, session: int, bytes_max: int) -> LockHistory | None:
        request = wire.LocksRequest(target=self._target(partition, session), last_id=last_id, bytes_max=bytes_max)
        return lock_history_of(await self._call(self._stub.ReadLocks, request))

    async def find_time(self, partition: int, time: int, *, session: int) -> int:
        request = wire.TimeRequest(target=self._target(partition, session), time=time)
        reply: wire.MarkReply = await self._call(self._stub.FindTime, request)
        return reply.mark

    async def archive(self, partition: int, known: Archived, *, session: int, lineage: Lineage = NEVER_FORKED) -> Archived:
        request = wire.ArchiveRequest(
            target=self._target(partition, session), known=to_message(wire.Archived, known), timelines=timelines_of(lineage)
        )
        return to_value(Archived, await self._call(self._stub.Archive, request, ARCHIVE_SECONDS))

    async def trim(
        self, partition: int, session: int, floor: int, archived: Archived | None = None, *, needs_none: bool = False
    ) -> ReplicaStatus:
        known = None if archived is None else to_message(wire.Archived, archived)
        request = wire.MarkRequest(
            target=self._target(partition, session), mark=floor, archived=known, needs_none=needs_none
        )
        return to_value(ReplicaStatus, await self._call(self._stub.Trim, request, TRIM_SECONDS))

    async def back_up(
        self,
        partition: int,
        known: Archived,
        *,
        session: int,
        committed: int,
        moment: int,
        lineage: Lineage = NEVER_FORKED,
    ) -> BackedUp:
        request = wire.BackUpRequest(
            target=self._target(partition, session), known=to_message(wire.Archived, known), committed=committed,
            moment=moment, timelines=timelines_of(lineage),
        )  # fmt: skip
        return to_value(BackedUp, await self._call(self._stub.BackUp, request, ARCHIVE_SECONDS))

    async def save_metadata(self, text: bytes, archive: UUID | None) -> int:
        request = wire.MetadataRequest(
            cluster_key=self._key.bytes, text=zlib.compress(text), archive=None if archive is None else archive.bytes
        )
        reply: wire.MetadataSaved = await self._call(self._stub.SaveMetadata, request, METADATA_SECONDS)
        return reply.number

    async def check_archive(self, partition: int, known: Archived, first_id: int, *, session: int) -> ArchiveCheck:
        request = wire.CheckArchiveRequest(
            target=self._target(partition, session), known=to_message(wire.Archived, known), first_id=first_id
        )
        return to_value(ArchiveCheck, await self._call(self._stub.CheckArchive, request, ARCHIVE_SECONDS))

    async def segments(self, partition: int, *, session: int | None = None) -> list[tuple[int, int, int]]:
        """First id, last id and size of each sealed segment."""
        request = wire.SegmentsRequest(target=self._target(partition, session))
        reply: wire.SegmentList = await self._call(self._stub.ListSegments, request)
        return [(found.first_id, found.last_id, found.bytes) for found in reply.segments]

    async def fetch_segment(self, partition: int, first_id: int, *, session: int) -> AsyncIterator[Buffer]:
        """The bytes of a sealed segment file. The replica was opened by this client before, as for `append`."""
        connection = await self._connect(Kind.FETCH, self._hello(partition, session, first_id))
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
        try:
            connection = await self._connect(Kind.INSTALL, self._hello(partition, session, first_id, file_bytes))
            try:
                answer = await FileSender(connection, receiver=self.address, seconds=self._seconds).send(pieces)
            finally:
                connection.lose(CannotConnect("the file was given up here"))
        finally:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()
        match answer:
            case Kind.STATUS, content:
                return to_value(ReplicaStatus, wire.ReplicaStatus.FromString(bytes(content)))
            case Kind.REFUSED, content:
                raise unpacked_error(content)
            case None:
                raise CannotConnect(f"{self.address} closed the stream of a segment file")
            case kind, _:
                raise BadFrame(f"a storage answered a segment file with a frame of the kind {kind.name}")

    async def _connect(self, kind: Kind, hello: Hello) -> Connection:
        assert self._stream_port, "open the replica first"
        try:
            async with asyncio.timeout(self._seconds):
                return await connect(self._host, self._stream_port, kind, hello.encode(), tls=self._tls, name=self._name)
        except TimeoutError:
            raise CannotConnect(f"cannot open a stream to {self.address} within {self._seconds:.0f} seconds") from None


async def connect(host: str, port: int, kind: Kind, hello: bytes, *, tls: Tls | None, name: str | None) -> Connection:
    """A stream to a storage, and the first frame on it."""
    connection = await frames.connect(host, port, role=Role.STORAGE, name=name, tls=tls, bytes_max=ANSWER_BYTES_MAX)
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
        self._connected: Connection | None = None
        self._refusal: WaltzError | None = None

    async def _connection(self) -> Connection:
        if self._connecting is None:
            self._connecting = asyncio.create_task(
                connect(self._host, self._port, Kind.HELLO, self._hello.encode(), tls=self._tls, name=self._name)
            )
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())  # a waiter raises it
        return await asyncio.shield(self._connecting)

    async def start(self) -> None:
        """Send the hello without records yet: what is wrong with the session shows before the first record."""
        self._connected = await self._connection()

    async def send(self, content: Content, committed: int) -> None:
        if self._refusal is not None:
            raise self._refusal
        connection = await self._connection()
        try:
            await connection.send(*_frame_of(content, committed))
        except CannotConnect:
            if self._refusal is not None:  # `receive` has met it
                raise self._refusal from None
            raise

    @property
    def may_post(self) -> bool:
        found = self._connected
        return found is not None and self._refusal is None and found.may_post

    def post(self, content: Content, committed: int) -> None:
        assert self._connected is not None
        self._connected.post(*_frame_of(content, committed))

    def hear(self, taker: Callable[[int], None]) -> None:
        """It has to be started."""
        assert self._connected is not None
        self._connected.hear(Kind.MARK, lambda content: taker(mark_of(content)))

    async def receive(self) -> int:
        """What was sent here up to this id is on the storage's disk."""
        if self._refusal is not None:
            raise self._refusal
        connection = await self._connection()
        found = await connection.receive()
        match found:
            case None:
                raise CannotConnect(f"{self._host}:{self._port} closed the stream")
            case Kind.MARK, content:
                return mark_of(content)
            case Kind.REFUSED, content:
                self._refusal = unpacked_error(content)
                connection.close()
                raise self._refusal
            case kind, _:
                raise BadFrame(f"a storage sent a frame of the kind {kind.name} on an append stream")

    def cancel(self) -> None:
        connecting = self._connecting
        if connecting is None:
            return
        if not connecting.done():
            connecting.cancel()
        elif not connecting.cancelled() and connecting.exception() is None:
            connecting.result().lose(CannotConnect("the stream was given up here"))


def _frame_of(content: Content, committed: int) -> tuple[Kind, list[Buffer]]:
    if isinstance(content, Run):
        return Kind.RECORDS, records_parts(content, committed)
    return Kind.BATCHES, batches_parts(content, committed)


PORTION = 16
"""Partitions that one call makes, removes or switches. Each takes several flushes, and the deadline is that of the call."""
FENCE_SECONDS = 300.0
"""A storage proves what it holds before it answers, and its tail may be long."""


def _portions(partitions: Sequence[int]) -> list[Sequence[int]]:
    """At least one, which asks whether the storage is the one that is meant."""
    return [partitions[at : at + PORTION] for at in range(0, max(1, len(partitions)), PORTION)]


class AdminClient(Caller):
    """One storage, through its port for operators."""

    service = StorageAdminStub
    peer = Role.STORAGE

    def __init__(
        self, address: str, key: UUID, *, seconds: float = CALL_SECONDS, tls: Tls | None = None, name: str | None = None
    ) -> None:
        super().__init__(address, seconds=seconds, tls=tls, name=name)
        self._key = key

    async def describe(self) -> StorageDescription:
        return to_value(StorageDescription, await self._call(self._stub.Describe, wire.DescribeRequest()))

    async def events(self, after: int = 0) -> Events:
        """What it logged last, with higher numbers than this."""
        return to_value(Events, await self._call(self._stub.Events, wire.EventsRequest(after=after)))

    async def create_partitions(
        self, partitions: Sequence[int], *, on_progress: Callable[[int], None] = lambda done: None
    ) -> dict[int, WaltzError | None]:
        """Make empty replicas, in portions. `on_progress` is told how many partitions are done."""
        key, results = self._key.bytes, dict[int, WaltzError | None]()
        for part in _portions(partitions):
            request = wire.PartitionsRequest(cluster_key=key, partitions=part)
            results |= self._results(await self._call(self._stub.CreatePartitions, request))
            on_progress(len(results))
        return results

    async def remove_partitions(
        self, partitions: Sequence[int], *, delete_files: bool = False
    ) -> dict[int, WaltzError | None]:
        key, results = self._key.bytes, dict[int, WaltzError | None]()
        for part in _portions(partitions):
            request = wire.RemoveRequest(cluster_key=key, partitions=part, delete_files=delete_files)
            results |= self._results(await self._call(self._stub.RemovePartitions, request))
        return results

    async def set_available(self, partitions: Sequence[int], available: bool) -> dict[int, WaltzError | None]:
        key, results = self._key.bytes, dict[int, WaltzError | None]()
        for part in _portions(partitions):
            request = wire.AvailabilityRequest(cluster_key=key, partitions=part, available=available)
            results |= self._results(await self._call(self._stub.SetAvailable, request))
        return results

    async def fence(self, partition: int, session: int) -> ReplicaStatus:
        """Let its replica promise itself to this session, also below an earlier promise; where it then stands, proven."""
        request = wire.FenceRequest(cluster_key=self._key.bytes, partition=partition, session=session)
        return to_value(ReplicaStatus, await self._call(self._stub.Fence, request, FENCE_SECONDS))

    async def restore(self, order: RestoreOrder) -> AsyncIterator[Restoring]:
        """Have it make a replica out of an archive; the last message says where that stands."""
        request = wire.RestoreRequest(cluster_key=self._key.bytes, order=to_message(wire.RestoreOrder, order))
        async with aclosing(self._stream(self._stub.Restore, request)) as messages:
            async for message in messages:
                yield to_value(Restoring, message)

    async def delete_aside(self, names: Sequence[str]) -> tuple[SetAside, ...]:
        """Directories that were set aside, for good; what was deleted."""
        reply = await self._call(self._stub.DeleteSetAside, wire.SetAsideRequest(cluster_key=self._key.bytes, names=names))
        return tuple(to_value(SetAside, one) for one in reply.deleted)

    @staticmethod
    def _results(reply: wire.PartitionsReply) -> dict[int, WaltzError | None]:
        return {
            result.partition: error_of_detail(result.error) if result.HasField("error") else None
            for result in reply.results
        }

    async def digest(self, partition: int, first_id: int, last_id: int) -> Digest:
        """A hash of what its replica holds there and knows to be committed. It may end earlier than asked."""
        request = wire.DigestRequest(cluster_key=self._key.bytes, partition=partition, first_id=first_id, last_id=last_id)
        reply: wire.DigestReply = await self._call(self._stub.Digest, request)
        found = Digest(first_id=first_id, last_id=reply.last_id, hash=reply.hash, bytes=reply.bytes)
        if not first_id <= found.last_id <= last_id or len(found.hash) != HASH_BYTES or found.records != reply.records:
            raise BadFrame(f"{self.address} answered with a digest that is none of ids {first_id} to {last_id}")
        return found

    async def verify(self, partitions: Sequence[int] = ()) -> AsyncIterator[Finding | VerifySummary]:
        """The findings of each partition, then its summary."""
        request = wire.VerifyRequest(cluster_key=self._key.bytes, partitions=partitions)
        async with aclosing(self._stream(self._stub.Verify, request)) as messages:
            async for message in messages:
                if message.HasField("finding"):
                    yield to_value(Finding, message.finding)
                    continue
                yield to_value(VerifySummary, message.summary)
