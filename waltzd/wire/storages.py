"""Clients of a storage: for servers and exporters, and for operators through a port of their own.

Answers are plain values, and errors have the class that the storage raised. `AppendStream` is the hot path: frames are
sent as fast as the storage takes them, and marks come back.
"""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import lru_cache
from uuid import UUID

from waltzd.disk.seam import Buffer
from waltzd.errors import CannotConnect, WaltzError
from waltzd.errors.operations import BadFrame
from waltzd.format.batch import Piece
from waltzd.format.finding import Finding
from waltzd.format.key_index import LockMarks, LockQuery
from waltzd.format.record import Digest, Run
from waltzd.protocol.address import address_of_peer
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
from waltzd.protocol.peers import NOBODY, SECRET_BYTES, Contact, Content, LockHistory, secret_of
from waltzd.protocol.role import Role
from waltzd.protocol.timelines import NEVER_FORKED, Lineage
from waltzd.wire import calls, frames
from waltzd.wire import wire_pb2 as wire
from waltzd.wire.calls import Transport
from waltzd.wire.codec import checked, parsed, timelines_of, to_message, to_value, unpacked_error
from waltzd.wire.frames import Connection, Kind
from waltzd.wire.grpc import Caller
from waltzd.wire.streams import FileSender, Hello, batches_parts, mark_of, received, records_parts
from waltzd.wire.tls import Tls

ANSWER_BYTES_MAX = 1 << 20
"""Largest frame of a storage on a stream: a mark, a piece of a file, or an error."""
CALL_SECONDS = 30.0
"""Deadline of a call. Verifying a long tail in `open` may need more; give it there."""

ARCHIVE_SECONDS = 600.0
METADATA_SECONDS = 60.0
"""Deadline of a call that uploads metadata to an archive."""
TRIM_SECONDS = 120.0
"""Deadline of a call that looks for objects in a store or removes files. What was not done in time is asked for again."""


class Replicas(Transport):
    """The replicas on one storage as owners of partitions and readers use them, over any transport."""

    def __init__(
        self,
        key: UUID,
        owner_key: bytes = b"",
        *,
        number: int | None = None,
        check_version: Callable[[str], None] = lambda version: None,
    ) -> None:
        """Prepare calls. `owner_key` belongs to the process and gives the secrets of its sessions; two names of one
        storage share it. It is drawn if empty, and so is `number`, by which a storage tells callers apart.
        `check_version` raises if a storage of this version must not be used; it is called with each status."""
        self._check_version = check_version
        self._key = key
        self._number = secrets.randbits(62) if number is None else number
        self._owner_key = owner_key or secrets.token_bytes(SECRET_BYTES)
        self._contacts: dict[int, int] = {}
        """Number of the opening that later calls belong to, by partition."""
        self._stream_port = 0
        """Port for streams; 0 until a replica is opened."""

    def _contact(self, partition: int, session: int | None) -> Contact:
        if session is None:
            return NOBODY
        return Contact(self._contacts.get(partition, 0), secret_of(self._owner_key, partition, session))

    def _target(self, partition: int, session: int | None) -> wire.Target:
        contact = self._contact(partition, session)
        return wire.Target(
            cluster_key=self._key.bytes,
            partition=partition,
            session=session,
            contact=contact.number,
            secret=contact.secret,
        )

    async def status(self, partition: int) -> ReplicaStatus:
        """Return the status of a replica. `Open` without a session binds the replica to nothing."""
        status, _ = await self._ask(calls.OPEN, wire.OpenRequest(target=self._target(partition, None)))
        self._check_version(status.version)
        return status

    async def quiet(self, partitions: Sequence[int]) -> Sequence[int]:
        """Return those of the partitions that are on the storage and have no append stream now."""
        return await self._ask(calls.QUIET, wire.QuietRequest(cluster_key=self._key.bytes, partitions=partitions))

    async def open(
        self, partition: int, session: int, *, partitions: int, create: bool = False, seconds: float | None = None
    ) -> ReplicaStatus:
        """Open a replica in a session. With `create`, make an empty one if the storage holds nothing of the partition."""
        target = self._target(partition, session)
        request = wire.OpenRequest(target=target, partitions=partitions, create=create, caller=self._number)
        status, self._stream_port = await self._ask(calls.OPEN, request, seconds)
        self._check_version(status.version)
        self._contacts[partition] = status.contact
        return status

    async def set_low_mark(self, partition: int, session: int, mark: int) -> ReplicaStatus:
        return await self._ask(calls.SET_LOW_MARK, wire.MarkRequest(target=self._target(partition, session), mark=mark))

    async def truncate(self, partition: int, session: int, mark: int) -> ReplicaStatus:
        return await self._ask(calls.TRUNCATE, wire.MarkRequest(target=self._target(partition, session), mark=mark))

    async def fork(self, partition: int, session: int, lineage: Lineage) -> ReplicaStatus:
        timelines = timelines_of(Lineage(one.bare for one in lineage.later))
        request = wire.ForkRequest(target=self._target(partition, session), timelines=timelines)
        return await self._ask(calls.FORK, request, TRIM_SECONDS)

    async def read(
        self,
        partition: int,
        first_id: int,
        last_id: int | None = None,
        *,
        session: int | None = None,
        frame_bytes: int = 0,
        with_locks: bool = False,
        timeline: UUID | None = None,
    ) -> AsyncIterator[Run]:
        """Read records. `timeline`: the one whose log is read; None for that of the replica."""
        request = wire.ReadRequest(
            target=self._target(partition, session),
            first_id=first_id,
            last_id=last_id,
            frame_bytes=frame_bytes,
            form=wire.READ_FORM_LOCKS if with_locks else wire.READ_FORM_RECORDS,
            timeline=None if timeline is None else timeline.bytes,
        )
        async with aclosing(self._each(calls.READ, request)) as contents:
            async for run in contents:
                assert isinstance(run, Run)
                yield run

    async def read_whole(
        self, partition: int, first_id: int, last_id: int, *, session: int, frame_bytes: int = 0
    ) -> AsyncIterator[Piece]:
        """Read for another replica: in batches where the log has them."""
        request = wire.ReadRequest(
            target=self._target(partition, session),
            first_id=first_id,
            last_id=last_id,
            frame_bytes=frame_bytes,
            form=wire.READ_FORM_WHOLE,
        )
        async with aclosing(self._each(calls.READ, request)) as contents:
            async for content in contents:
                for piece in (content,) if isinstance(content, Run) else content:
                    yield piece

    async def read_locks(self, partition: int, last_id: int, *, session: int, bytes_max: int) -> LockHistory | None:
        request = wire.LocksRequest(target=self._target(partition, session), last_id=last_id, bytes_max=bytes_max)
        return await self._ask(calls.READ_LOCKS, request)

    async def find_marks(self, partition: int, query: LockQuery, *, session: int) -> LockMarks:
        request = to_message(wire.MarksRequest, query)
        request.target.CopyFrom(self._target(partition, session))
        return await self._ask(calls.FIND_MARKS, request)

    async def find_time(self, partition: int, time: int, *, session: int) -> int:
        request = wire.TimeRequest(target=self._target(partition, session), time=time)
        return await self._ask(calls.REPLICA_FIND_TIME, request)

    async def archive(
        self,
        partition: int,
        known: Archived,
        *,
        session: int,
        lineage: Lineage = NEVER_FORKED,
        with_keys: bool = False,
    ) -> Archived:
        request = wire.ArchiveRequest(
            target=self._target(partition, session), known=to_message(wire.Archived, known),
            timelines=timelines_of(lineage), with_keys=with_keys,
        )  # fmt: skip
        return await self._ask(calls.ARCHIVE, request, ARCHIVE_SECONDS)

    async def trim(
        self, partition: int, session: int, floor: int, archived: Archived | None = None, *, needs_none: bool = False
    ) -> ReplicaStatus:
        known = None if archived is None else to_message(wire.Archived, archived)
        target = self._target(partition, session)
        request = wire.MarkRequest(target=target, mark=floor, archived=known, needs_none=needs_none)
        return await self._ask(calls.TRIM, request, TRIM_SECONDS)

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
        return await self._ask(calls.BACK_UP, request, ARCHIVE_SECONDS)

    async def save_metadata(self, text: bytes, archive: UUID | None) -> int:
        request = wire.MetadataRequest(
            cluster_key=self._key.bytes, text=zlib.compress(text), archive=None if archive is None else archive.bytes
        )
        return await self._ask(calls.SAVE_METADATA, request, METADATA_SECONDS)

    async def check_archive(self, partition: int, known: Archived, first_id: int, *, session: int) -> ArchiveCheck:
        request = wire.CheckArchiveRequest(
            target=self._target(partition, session), known=to_message(wire.Archived, known), first_id=first_id
        )
        return await self._ask(calls.CHECK_ARCHIVE, request, ARCHIVE_SECONDS)

    async def segments(self, partition: int, *, session: int | None = None) -> list[tuple[int, int, int]]:
        """Return first id, last id and size of each sealed segment."""
        return await self._ask(calls.LIST_SEGMENTS, wire.SegmentsRequest(target=self._target(partition, session)))


class ReplicaClient(Caller, Replicas):
    """The replicas on one storage, through its port for servers and its port for streams."""

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
        check_version: Callable[[str], None] = lambda version: None,
    ) -> None:
        """Prepare calls. `stream_port` is where append streams connect; the answer to `open` gives it, too."""
        Caller.__init__(self, address, seconds=seconds, tls=tls, name=name, instance=instance)
        Replicas.__init__(self, key, owner_key, check_version=check_version)
        self._tls = tls
        self._name = name
        self._stream_port = stream_port

    def _hello(self, partition: int, session: int, first_id: int = 0, file_bytes: int = 0) -> Hello:
        contact = self._contact(partition, session)
        return Hello(self._key, partition, session, contact, self._name or "", first_id, file_bytes)

    @property
    def _host(self) -> str:
        """Host of the storage. Its address is looked at when a stream begins: a document may hold one that is none."""
        return address_of_peer(self.address).host

    def append(self, partition: int, session: int) -> AppendStream:
        """Return a stream of appends. The replica was opened by this client before, which gives the port for streams."""
        assert self._stream_port, "open the replica first"
        hello = self._hello(partition, session)
        return AppendStream(self._host, self._stream_port, hello, tls=self._tls, name=self._name)

    async def fetch_segment(self, partition: int, first_id: int, *, session: int) -> AsyncIterator[Buffer]:
        """Yield the bytes of a sealed segment file. The replica was opened by this client before, as for `append`."""
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
        """Send a whole segment file. The first piece is requested once the storage has agreed to take the file.
        `file_bytes` is 0 if its size is not known. Errors of `pieces` are raised unchanged."""
        try:
            connection = await self._connect(Kind.INSTALL, self._hello(partition, session, first_id, file_bytes))
            try:
                answer = await FileSender(connection, receiver=self.address, seconds=self._seconds).send(pieces)
            finally:
                connection.lose(CannotConnect("the file was cancelled here"))
        finally:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()
        match answer:
            case Kind.STATUS, content:
                return to_value(ReplicaStatus, checked(parsed(wire.ReplicaStatus)(bytes(content))))
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
    """Connect a stream to a storage and send its first frame."""
    connection = await frames.connect(host, port, role=Role.STORAGE, name=name, tls=tls, bytes_max=ANSWER_BYTES_MAX)
    await connection.send(kind, (hello,))
    return connection


class AppendStream:
    """Records for one replica, over a connection of its own. `send` waits only while the connection is full; `receive`
    returns the next mark."""

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
        """Connect and send the first frame without records, so that an error of the session shows before the first
        record."""
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
        """Call `taker` with each mark on arrival. The stream was started before."""
        assert self._connected is not None
        self._connected.hear(Kind.MARK, lambda content: taker(mark_of(content)))

    async def receive(self) -> int:
        """Return the next mark: everything sent here up to this id is on the storage's disk."""
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
            connecting.result().lose(CannotConnect("the stream was cancelled here"))


@lru_cache(maxsize=1)
def _frame_of(content: Content, committed: int) -> tuple[Kind, Sequence[Buffer]]:
    """Return kind and parts of a frame. It is made once for all replicas, which are sent the same records in turn. The
    cache tells records apart by identity."""
    if isinstance(content, Run):
        return Kind.RECORDS, records_parts(content, committed)
    parts = batches_parts(content, committed)
    size = sum(map(len, parts))
    return Kind.BATCHES, (b"".join(parts),) if size <= JOINED_BYTES else parts


JOINED_BYTES = 64 << 10
"""Largest frame whose parts are joined before it is sent. Copying a larger one for that costs more than it saves."""
PORTION = 16
"""Partitions created, removed or switched by one call. Each takes several flushes, and the deadline is that of the
call."""
FENCE_SECONDS = 300.0
"""Deadline of a fence. A storage verifies its tail before it answers, and the tail may be long."""


def _portions(partitions: Sequence[int]) -> list[Sequence[int]]:
    """Split partitions into portions. There is at least one, which checks that the storage is the one that is meant."""
    return [partitions[at : at + PORTION] for at in range(0, max(1, len(partitions)), PORTION)]


class AdminClient(Caller):
    """One storage, through its port for operators."""

    peer = Role.STORAGE

    def __init__(
        self, address: str, key: UUID, *, seconds: float = CALL_SECONDS, tls: Tls | None = None, name: str | None = None
    ) -> None:
        super().__init__(address, seconds=seconds, tls=tls, name=name)
        self._key = key

    async def describe(self) -> StorageDescription:
        return await self._ask(calls.DESCRIBE_STORAGE, wire.DescribeRequest())

    async def events(self, after: int = 0) -> Events:
        """Return the events logged after a number."""
        return await self._ask(calls.STORAGE_EVENTS, wire.EventsRequest(after=after))

    async def create_partitions(
        self, partitions: Sequence[int], *, on_progress: Callable[[int], None] = lambda done: None
    ) -> dict[int, WaltzError | None]:
        """Make empty replicas, in portions. `on_progress` is called with the number of partitions done."""
        results = dict[int, WaltzError | None]()
        for part in _portions(partitions):
            request = wire.PartitionsRequest(cluster_key=self._key.bytes, partitions=part)
            results |= _errors(await self._ask(calls.CREATE_PARTITIONS, request))
            on_progress(len(results))
        return results

    async def remove_partitions(
        self, partitions: Sequence[int], *, delete_files: bool = False
    ) -> dict[int, WaltzError | None]:
        results = dict[int, WaltzError | None]()
        for part in _portions(partitions):
            request = wire.RemoveRequest(cluster_key=self._key.bytes, partitions=part, delete_files=delete_files)
            results |= _errors(await self._ask(calls.REMOVE_PARTITIONS, request))
        return results

    async def set_available(self, partitions: Sequence[int], available: bool) -> dict[int, WaltzError | None]:
        results = dict[int, WaltzError | None]()
        for part in _portions(partitions):
            request = wire.AvailabilityRequest(cluster_key=self._key.bytes, partitions=part, available=available)
            results |= _errors(await self._ask(calls.SET_AVAILABLE, request))
        return results

    async def fence(self, partition: int, session: int) -> ReplicaStatus:
        """Bind a replica to a session, even below an earlier one; return its verified status."""
        request = wire.FenceRequest(cluster_key=self._key.bytes, partition=partition, session=session)
        return await self._ask(calls.FENCE, request, FENCE_SECONDS)

    def restore(self, order: RestoreOrder) -> AsyncGenerator[Restoring, None]:
        """Have the storage make a replica out of an archive. The last message gives the status of that replica."""
        request = wire.RestoreRequest(cluster_key=self._key.bytes, order=to_message(wire.RestoreOrder, order))
        return self._each(calls.RESTORE, request)

    async def delete_aside(self, names: Sequence[str]) -> Sequence[SetAside]:
        """Delete directories that were set aside; return those that were deleted."""
        return await self._ask(calls.DELETE_SET_ASIDE, wire.SetAsideRequest(cluster_key=self._key.bytes, names=names))

    async def digest(self, partition: int, first_id: int, last_id: int) -> Digest:
        """Return a hash of the records between two ids that the replica holds as committed. It may end earlier than
        asked."""
        request = wire.DigestRequest(cluster_key=self._key.bytes, partition=partition, first_id=first_id, last_id=last_id)
        return await self._ask(calls.DIGEST, request)

    def verify(self, partitions: Sequence[int] = ()) -> AsyncGenerator[Finding | VerifySummary, None]:
        """Yield the findings of each partition, then its summary."""
        return self._each(calls.VERIFY, wire.VerifyRequest(cluster_key=self._key.bytes, partitions=partitions))


def _errors(results: Mapping[int, WaltzError | str]) -> dict[int, WaltzError | None]:
    return {number: found if isinstance(found, WaltzError) else None for number, found in results.items()}
